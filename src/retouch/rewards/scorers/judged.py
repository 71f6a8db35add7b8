"""Base of scorers with a judge: options, concurrent questions, answers by a JSON schema, typed failures."""

from __future__ import annotations

import hashlib
import json
import logging
import os
import re
from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar

import numpy as np
from pydantic import Field, SerializerFunctionWrapHandler, model_serializer, model_validator

from retouch.config.reads import ReadIf
from retouch.errors import ConfigError, RewardOutage, shown
from retouch.files import plain_json
from retouch.process.plain_text import count_of
from retouch.rewards.addresses import is_local, is_openai
from retouch.rewards.base import PackageScorer, Question, RewardEntry
from retouch.rewards.judge import COMMON, JudgeConfig
from retouch.rewards.protocol import RewardItem, raised
from retouch.rewards.scorers.judge_client import KEY_VARIABLE, Budget, BudgetSpent, JudgeClient, JudgeError
from retouch.rewards.scorers.judge_replies import read_by, text_of
from retouch.types import Failure, Outcome

if TYPE_CHECKING:
    from retouch.config.run import RunConfig

logger = logging.getLogger(__name__)

Task = TypeVar("Task")
Answer = TypeVar("Answer")

LOGPROBS = ReadIf(
    "with `mode: logprobs`",
    lambda own: own.mode == "logprobs",
    "but mode {own.mode} reads no probabilities; leave it out",
)
PUBLISHED = ReadIf(
    "with `wording: published`",
    lambda own: own.wording == "published",
    "but wording is own; set wording=published, or leave it out",
)


class JudgeEntry(JudgeConfig, RewardEntry):
    """Options of the rewards of a judge behind an OpenAI-compatible endpoint; section `judge` sets those of its own in
    all of them."""

    licence = "of the model"
    unscored = frozenset({"model", "address", "prompts"})  # the revision names what is served and asked
    cpu_only = "the judge's model runs at the endpoint of `address`; leave device out"
    published_in: ClassVar[str] = ""
    """Place of what the option `prompts` is a copy of; "" of an entry that has none."""

    from_judge: list[str] = Field(default=[])
    """Keys that the entry has from the section `judge`, which writes this; a stored run file has neither."""

    @model_serializer(mode="wrap")
    def _without_inherited(self, write: SerializerFunctionWrapHandler) -> dict[str, Any]:
        """Without what the section holds: a change of it then acts on a stored run, too."""
        return {key: value for key, value in write(self).items() if key not in {*self.from_judge, "from_judge"}}

    @property
    def shares_budget(self) -> bool:
        """Whether its limits are those of the section `judge`, for all entries together."""
        return set(COMMON) <= set(self.from_judge)

    def unused(self) -> frozenset[str]:
        return super().unused() | frozenset(self.from_judge)

    def check(self, run: RunConfig, key: str = "") -> None:
        """As of every reward.

        Raises:
            ValueError: also `from_judge` of another hand than `with_judge`: what it lists needs no consent of its own,
                is not stored, and is in no key of the cache.
        """
        super().check(run, key)
        kind = type(self)
        for name in self.from_judge:
            if run.judge is None or name not in JudgeConfig.model_fields:
                raise ValueError(f"{key}.from_judge: given {shown(name)}; the package writes this key; leave it out")
            source = run.judge if name in run.judge.model_fields_set else kind.model_fields[name].default
            expected = getattr(source, name) if isinstance(source, JudgeConfig) else source
            if getattr(self, name) != expected:
                raise ValueError(
                    f"{key}.{name}: given {shown(getattr(self, name))}, but from_judge states that of section judge, "
                    f"{shown(expected)}; leave from_judge out"
                )

    def questions(self, group_size: int) -> tuple[Question, ...]:
        return (self._question(),)

    def _question(self, images: int | None = None, **about: Any) -> Question:
        """A question about as many images; None: the sample and those that it needs."""
        shown = 1 + len(self.required_images() - {"mask"}) if images is None else images
        return Question(images=shown, tiled=is_openai(self.address), **about)

    def prices(self) -> tuple[float, float] | None:
        """Those of the options; without them nothing at an address of this machine, and else None: not known."""
        if self.price_in or self.price_out:
            return self.price_in, self.price_out
        return (0.0, 0.0) if is_local(self.address) else None

    @model_validator(mode="after")
    def _names_a_model(self) -> JudgeEntry:
        if self.is_made_here and not self.model:
            raise ValueError(
                "model: not set; set it to the model's name at the endpoint, or auto for the only one there"
            )
        if self.budget_dollars is not None and self._is_paid and not self.price_in + self.price_out:
            raise ValueError("budget_dollars: given without prices; set price_in and price_out")
        return self

    @model_validator(mode="after")
    def _has_published_questions(self) -> JudgeEntry:
        options = dict(self)  # of an entry whose questions the package may not contain
        asks_published = self.published_in and options.get("wording", "published") == "published"
        if asks_published and self.is_made_here and options["prompts"] is None:
            wording = " with wording=published" if "wording" in options else ""
            raise ValueError(f"prompts: not set{wording}; set it to your copy of {self.published_in}")
        return self

    @property
    def _is_paid(self) -> bool:
        """Whether the endpoint is known to be paid; those of others are the user's own, or have prices given."""
        return self.is_made_here and is_openai(self.address)

    def advice(self, name: str) -> list[str]:
        told = super().advice(name)
        if self._is_paid and self.budget_dollars is None:
            told.append(
                f"rewards.{name}.address: given {self.address}, a paid judge without a limit of dollars; set "
                f"rewards.{name}.budget_dollars, or JUDGE_URL of a judge on your machine"
            )
        if self.budget_dollars is not None and not self.price_in + self.price_out and not is_local(self.address):
            told.append(
                f"rewards.{name}.budget_dollars: given {self.budget_dollars:g} without the prices of {self.address}: "
                "it never ends; set price_in and price_out, or leave budget_dollars out for a judge that costs nothing"
            )
        return told


def uncropped(name: str) -> str:
    """The warning about a judge of crops that compares them with the reference image, which `crop` leaves whole."""
    return (
        f"rewards.{name}.crop: given 'mask_box', but the reference image stays whole: the judge compares a crop with "
        "all of it; leave crop out"
    )


Judged = TypeVar("Judged", bound=JudgeEntry)


class AnswerError(JudgeError):
    """The judge's answer does not match the schema."""


class JudgeScorer(PackageScorer[Judged]):
    """Base of scorers behind an OpenAI-compatible endpoint. The key is read from OPENAI_API_KEY.

    Args:
        depends_on: everything that the scores depend on except the judge, as JSON values.
        protocol: name of the score in the revision; None is the scorer's name.

    Raises:
        ConfigError: no key for OpenAI, or an unusable address. Nothing is sent.
    """

    first_prompt: ClassVar[str] = "a grey square"
    """Prompt of the first question."""

    def __init__(self, options: Judged, *depends_on: Any, protocol: str | None = None) -> None:
        o = self.options = options
        self._protocol = protocol or o.scorer
        self.budget = Budget(**o.limits())
        try:
            self.judge = JudgeClient(budget=self.budget, **o.connection())
        except ConfigError as error:  # the key
            raise ConfigError(f"reward {o.scorer!r}: {error}") from None
        except ValueError as error:
            raise ConfigError(f"reward {o.scorer!r}: address: {error}") from None
        if is_openai(self.judge.address) and not os.environ.get(KEY_VARIABLE, "").strip():
            raise ConfigError(
                f"reward {o.scorer!r}: {KEY_VARIABLE} is not set, which {self.judge.address} requires; export "
                f"{KEY_VARIABLE}=..., or JUDGE_URL=http://host:port/v1 for another judge"
            )
        self._depend_on(*depends_on)

    def _depend_on(self, *parts: Any) -> None:
        self._digest = hashlib.blake2b(json.dumps(parts).encode(), digest_size=6).hexdigest()
        self._name_judge()

    def _name_judge(self) -> None:
        """Update the revision with the model names that the endpoint has reported so far, and the parameters that it
        refused."""
        served, adjusted = self.judge.served or self.judge.model, self.judge.adjusted
        asked = f"{self.judge.model} {adjusted}" if adjusted else self.judge.model
        self.set_revision(f"{self._protocol} {asked} served as {served} {self._digest}")

    def load(self, device: str) -> None:
        """Ask a first question: missing abilities of the endpoint are reported before the run starts.

        Raises:
            ConfigError: no such model, a wrong key, an account without quota, answers that are not of the protocol, or
                a budget of what the endpoint does not report.
            RewardOutage: it cannot answer at the moment, or its address accepts no connection.
        """
        grey = np.full((64, 64, 3), 127, np.uint8)
        try:
            self._first_question(RewardItem(0, self.first_prompt, grey, source=grey))
        except (JudgeError, BudgetSpent) as error:
            where = f"reward {self.options.scorer!r}: {error}"
            if self.judge.is_away:
                remedy = "start the judge there, or set address (JUDGE_URL) to where it is"
                raise RewardOutage(f"{where}; {remedy}") from None
            if isinstance(error, JudgeError) and error.retryable:
                raise RewardOutage(f"{where}; start again when the judge answers") from None
            raise ConfigError(where) from None
        self._require_counted()
        self._name_judge()

    def _require_counted(self) -> None:
        """Raise ConfigError for a limit of tokens or money at an endpoint that reports none: it would never end."""
        o = self.options
        limits = {
            "budget_tokens": o.budget_tokens,
            "budget_dollars": o.budget_dollars if o.price_in + o.price_out else None,
        }
        if any(self.budget.spent[1:]):
            return
        for name, limit in limits.items():
            if limit is not None:
                raise ConfigError(
                    f"reward {o.scorer!r}: {name}: given {limit:g}, but {self.judge.address} reports no tokens (usage) "
                    "with its answers, which the budget counts; set budget_requests instead"
                )

    @abstractmethod
    def _first_question(self, item: RewardItem) -> object:
        """Ask about a grey square, which is its own source.

        Raises:
            JudgeError, BudgetSpent: no usable answer.
        """

    def score(self, items: Sequence[RewardItem]) -> list[Outcome]:
        return self._answers(self._one, items)

    def _answers(self, ask: Callable[[Task], Answer], tasks: Sequence[Task]) -> list[Answer | Failure]:
        """`ask` of every task, in order, `concurrency` at once; a failure for each task that the judge does not
        answer."""

        def one(task: Task) -> Answer | Failure:
            try:
                return ask(task)
            except BudgetSpent as spent:
                return Failure("budget_spent", str(spent))
            except JudgeError as error:
                return Failure("unavailable" if error.retryable else "scorer_error", str(error), error.retryable)
            except Exception as error:  # raised, it would have the whole batch asked, and paid, again
                return raised(self.spec.name, error)

        with ThreadPoolExecutor(self.options.at_once(len(tasks)), thread_name_prefix="judge") as pool:
            answers = list(pool.map(one, tasks))
        self.budget.exchange()
        self._name_judge()
        b = self.budget
        logger.info("judge: %s, %d + %d tokens, $%.4f", count_of(b.spent[0], "request"), *b.spent[1:], b.cost)
        return answers

    def _structured(
        self,
        content: Sequence[Mapping[str, Any]],
        schema: Mapping[str, Any] | None,
        read: Callable[[str], Answer],
        *,
        again: bool = True,
        system: str = "",
        **options: Any,
    ) -> Answer:
        """Request JSON by a schema -> the result of `read`.

        Args:
            content: parts of the question.
            schema: None if the question itself specifies the format of the answer, in text.
            read: raises ValueError with the problem of an answer.
            again: ask once more, with the problem.
            system: text of the system message; "" sends none.

        Raises:
            JudgeError: a refusal, or no answer.
            AnswerError: no answer by the schema.
            BudgetSpent: the budget is spent.
        """
        messages: list[dict[str, Any]] = [{"role": "system", "content": system}] if system else []
        messages.append({"role": "user", "content": list(content)})
        form = "in the required format"
        if schema is not None:
            options["response_format"], form = schema, "with nothing but JSON by the schema"
        choice = self.judge.ask(messages, **options)
        try:
            return read_by(read, choice)
        except ValueError as error:
            if not again:
                raise AnswerError(f"the answer does not keep to the schema: {error}") from None
            complaint = f"That answer cannot be used: {error}. Answer again, {form}."
        given = text_of(choice) or "(no text)"  # some endpoints refuse an empty message
        messages += [{"role": "assistant", "content": given}, {"role": "user", "content": complaint}]
        try:
            return read_by(read, self.judge.ask(messages, **options))
        except ValueError as error:
            raise AnswerError(f"the answer does not keep to the schema, twice: {error}") from None


def whole(answers: Sequence[Answer | Failure]) -> list[Answer] | Failure:
    """The answers about one item; the first failure if there is one, because a mean without it would be another
    reward."""
    failure = next((one for one in answers if isinstance(one, Failure)), None)
    return failure or [one for one in answers if not isinstance(one, Failure)]


def schema_of(name: str, properties: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """A `response_format` of one flat object in which every property is required."""
    schema = {
        "type": "object",
        "properties": dict(properties),
        "required": list(properties),
        "additionalProperties": False,
    }
    return {"type": "json_schema", "json_schema": {"name": name, "strict": True, "schema": schema}}


def integer_schema(most: int) -> dict[str, Any]:
    """An integer from 0 to `most` as a list of values, because not every endpoint supports bounds of numbers."""
    return {"type": "integer", "enum": list(range(most + 1))}


def read_object(text: str, keys: Sequence[str]) -> dict[str, Any]:
    """The JSON object of an answer with exactly these keys: alone, in a code fence, or amid prose.

    Raises:
        ValueError: anything else; the judge gets the message when it is asked again.
    """
    try:
        found = plain_json.only_object(text)
    except ValueError as error:
        raise ValueError(f"not JSON: {error}") from None
    wrong = [f"{k} is missing" for k in keys if k not in found] + [
        f"{k[:80]} is unknown" for k in found if k not in keys
    ]
    if wrong:
        raise ValueError("; ".join(wrong[:5]))
    return found


def read_integers(text: str, names: Sequence[str], most: int, also: Sequence[str] = ()) -> dict[str, Any]:
    """The object of an answer: integers from 0 to `most` under `names`, anything under `also`.

    Raises:
        ValueError: not the schema, or no such integer.
    """
    found = read_object(text, [*names, *also])
    for name in names:
        value = as_integer(found[name])
        if value is None or not 0 <= value <= most:
            raise ValueError(f"{name} must be an integer from 0 to {most}; given {shown(found[name])}")
        found[name] = value
    return found


_INTEGER = re.compile(r"\s*(-?\d{1,9})(?:\.0{1,9})?\s*")


def as_integer(value: object) -> int | None:
    """The integer that a value of an answer is, also as 4.0, "4" or "4.0"; None for anything else."""
    if isinstance(value, bool) or not isinstance(value, int | float | str):
        return None
    if isinstance(value, str):
        written = _INTEGER.fullmatch(value)
        return int(written[1]) if written and value.isascii() else None
    return int(value) if isinstance(value, int) or value.is_integer() else None
