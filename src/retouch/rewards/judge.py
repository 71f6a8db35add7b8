"""Section `judge` of a run file, and the options that it shares with the rewards that ask a judge."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, cast

from pydantic import Field, model_validator

from retouch.config.base import Count, Names, NonNegative, Positive, Section
from retouch.rewards import REWARDS
from retouch.rewards.addresses import is_openai

ADDRESS_VARIABLES = ("JUDGE_URL", "JUDGE_ADDRESS", "OPENAI_BASE_URL")
"""Environment variables by which published run files read the address of a judge."""

AUTO = "auto"
DEFAULT_MODEL = "gpt-4o-2024-11-20"
"""Model of AUTO at OpenAI: the judge of the published Complex-Edit scores."""

DEFAULT_PRICES = (2.5, 10.0)
"""List prices of DEFAULT_MODEL in 2026, in dollars per million tokens of questions and of answers."""

_ENDPOINT = ("model", "address")
_PRICES = ("price_in", "price_out")
COMMON = (*_ENDPOINT, *_PRICES, "budget_requests", "budget_tokens", "budget_dollars")
"""Keys that are the section's in all entries of its budget."""


class JudgeConfig(Section):
    """A judge behind an OpenAI-compatible endpoint, for every reward that asks one: an entry has these keys where it
    does not write them itself, if the run makes its scorer (`url` null or `auto`). Prices go with the model: an entry
    with a model or an address of its own takes none. The limits are one budget for all entries that take model,
    address, prices and limits from here; an entry with one of these of its own has a budget of its own."""

    model: str = ""
    """Name of the model at the endpoint; required of a reward with url null or `auto`. "auto" is gpt-4o-2024-11-20 at
    OpenAI, and elsewhere the only model that the endpoint lists."""
    address: Annotated[str, Names("host", variables=ADDRESS_VARIABLES)] = "https://api.openai.com/v1"
    """Address of the endpoint, with /v1, or with the query that it requires, like Azure's `?api-version=...`. OpenAI's
    needs OPENAI_API_KEY in the environment."""
    key_header: Annotated[str, Field(pattern=r"^[A-Za-z0-9-]{1,64}$")] | None = None
    """Header of the requests that holds the key of OPENAI_API_KEY, like Azure's "api-key"; null sends it as
    `Authorization: Bearer KEY`."""
    concurrency: Count = 8
    """Maximum number of open questions of a reward."""
    requests_per_minute: Positive | None = None
    """Rate limit of the endpoint, shared by all judges of the process; null sets no limit."""
    tokens_per_minute: Positive | None = None
    """Token rate limit of the endpoint, shared in the same way."""
    budget_requests: Count | None = None
    """Maximum number of answered requests of a run, over all its processes and starts, in training and in evaluations;
    a server that was started by hand counts its own. A question beyond it is a failure, and too many failures stop the
    run, resumable. Questions that are open at that moment are still answered, and those that other processes begin in
    the second before they read the common count."""
    budget_tokens: Count | None = None
    """Maximum number of tokens, in the same way; the endpoint must report them (`usage`)."""
    budget_dollars: Positive | None = None
    """Maximum cost in dollars by the two prices, in the same way."""
    price_in: NonNegative = 0.0
    """Dollars per million tokens of questions. With both prices left out, those of the default model at OpenAI are its
    list prices, 2.5 and 10; another address costs nothing."""
    price_out: NonNegative = 0.0
    """Dollars per million tokens of answers."""
    timeout_s: Positive = 180.0
    """Deadline of one question in seconds, retries included: `concurrency` times what a busy judge takes for one
    question, which is up to 20 s for a local judge."""

    @model_validator(mode="before")
    @classmethod
    def _known_prices(cls, value: object) -> object:
        """The section with the list prices of the default model at OpenAI where it has none: a budget in dollars must
        act without them."""
        if not isinstance(value, Mapping):
            return value
        entry = cast("Mapping[str, Any]", value)
        where = entry.get("address", cls.model_fields["address"].default)
        known = entry.get("model") in (AUTO, DEFAULT_MODEL) and isinstance(where, str) and is_openai(where)
        if not known or not _is_made_here(entry) or set(_PRICES) & entry.keys():
            return value
        return {**entry, "price_in": DEFAULT_PRICES[0], "price_out": DEFAULT_PRICES[1]}

    def connection(self) -> dict[str, Any]:
        """Arguments of a `JudgeClient`."""
        return {
            "address": self.address,
            "model": self.model,
            "requests_per_minute": self.requests_per_minute,
            "tokens_per_minute": self.tokens_per_minute,
            "timeout_s": self.timeout_s,
            "key_header": self.key_header,
        }

    def limits(self) -> dict[str, Any]:
        """Arguments of a `Budget`."""
        limits = {"requests": self.budget_requests, "tokens": self.budget_tokens, "dollars": self.budget_dollars}
        return {**limits, "price_in": self.price_in, "price_out": self.price_out}

    def at_once(self, questions: int) -> int:
        """Number of so many questions that are open at once."""
        return min(self.concurrency, questions)


def with_judge(run: Mapping[str, Any]) -> dict[str, Any]:
    """A run file in which the rewards that ask a judge have the keys of its section `judge`. The schema reports
    anything malformed.

    Raises:
        ValueError: no reward takes them.
    """
    judge, rewards = run.get("judge"), run.get("rewards")
    if isinstance(judge, JudgeConfig):
        judge = judge.model_dump(exclude_unset=True)
    if not isinstance(judge, Mapping) or not isinstance(rewards, Mapping):
        return dict(run)
    given = {key: value for key, value in cast("Mapping[str, Any]", judge).items() if key in JudgeConfig.model_fields}
    table = {str(name): entry for name, entry in cast("Mapping[Any, Any]", rewards).items()}
    takes = [name for name, entry in table.items() if _asks_a_judge(name, entry)]
    if not takes and not any(isinstance(entry, JudgeConfig) for entry in table.values()):
        raise ValueError("judge: given, but no reward of the run asks a judge; leave it out, or add one")
    return {**run, "rewards": {**table, **{name: _inheriting(table[name] or {}, given) for name in takes}}}


def _asks_a_judge(name: str, entry: object) -> bool:
    """Whether an entry, as it is written, has the options of a judge that the run asks itself."""
    if entry is not None and not isinstance(entry, Mapping):
        return False
    fields = cast("Mapping[str, Any]", entry or {})
    kind = REWARDS.find(fields.get("scorer", name))
    return kind is not None and issubclass(kind, JudgeConfig) and _is_made_here(fields)


def _is_made_here(entry: Mapping[str, Any]) -> bool:
    return entry.get("url") in (None, "auto")


def _inheriting(entry: Mapping[str, Any], judge: Mapping[str, Any]) -> dict[str, Any]:
    """An entry with the keys of the section that it does not write itself."""
    apart = any(key in entry for key in _ENDPOINT)
    keys = [key for key in JudgeConfig.model_fields if key not in entry and not (apart and key in _PRICES)]
    return {**{key: judge[key] for key in keys if key in judge}, **entry, "from_judge": keys}
