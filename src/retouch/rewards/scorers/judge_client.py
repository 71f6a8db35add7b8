"""Client of a judge behind the OpenAI protocol: rate limits, a budget, retries. No SDK.

The API key comes from the environment and appears in no option, revision, message or log.
"""

from __future__ import annotations

import base64
import io
import logging
import random
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, Literal, TypeVar

from PIL import Image

from retouch.process.plain_text import count_of
from retouch.rewards.addresses import base_and_query, is_local, is_openai, secret_of
from retouch.rewards.foreign import BrokenReply, Reply, deadline_of, fetch, no_cookies, one_line, reading_environment
from retouch.rewards.judge import AUTO, DEFAULT_MODEL
from retouch.rewards.protocol import Pixels
from retouch.rewards.scorers.judge_budget import Budget as Budget
from retouch.rewards.scorers.judge_budget import BudgetSpent as BudgetSpent
from retouch.rewards.scorers.judge_replies import JudgeError as JudgeError
from retouch.rewards.scorers.judge_replies import Problem, adjustments, completion, fitted, listed

logger = logging.getLogger(__name__)

Found = TypeVar("Found")

_jitter = random.Random()
"""Not the global generator: its state is part of checkpoints, and must not depend on when a judge answers."""

Encoding = Literal["png", "jpeg"]

KEY_VARIABLE = "OPENAI_API_KEY"
_BILLED_TRIES = 3  # of one question: replies without an answer that have a price
_READ_BYTES = 65536  # of a reply, from which the key is removed before it is cut for a message
_MOST_SERVED = 16  # names of the served model, and fingerprints; more would mean that they change with every reply
_MOST_NAME = 200  # characters of the name of the served model
_TOKENS_OF_IMAGE = 800  # estimate of a request before its usage is known


class TokenBucket:
    """A rate limit per minute with bursts of at most `burst_s` seconds' worth. Thread-safe."""

    def __init__(self, per_minute: float, burst_s: float = 5.0) -> None:
        self.rate = per_minute / 60
        self.most = max(1.0, self.rate * burst_s)
        self._left = self.most
        self._at = time.monotonic()
        self._lock = threading.Lock()

    def take(self, amount: float) -> float:
        """Take an amount, on credit if necessary -> seconds to wait before using it. A negative amount is returned."""
        with self._lock:
            now = time.monotonic()
            self._left = min(self.most, self._left + (now - self._at) * self.rate)
            self._at = now
            self._left -= amount
            return max(0.0, -self._left / self.rate)


_BUCKETS: dict[tuple[str, str, float], TokenBucket] = {}
_BUCKETS_LOCK = threading.Lock()


def shared_bucket(address: str, kind: str, per_minute: float | None) -> TokenBucket | None:
    """The bucket of an endpoint for all scorers, because its limits belong to the account."""
    if per_minute is None:
        return None
    with _BUCKETS_LOCK:
        return _BUCKETS.setdefault((address, kind, per_minute), TokenBucket(per_minute))


UNREACHABLE_S = 10.0
"""Seconds of a question after which an address that accepts no connections is given up. The run then waits for the
judge as for any reward that is away (`reward_client.outage_wait_s`)."""


class JudgeClient:
    """`POST /chat/completions` with rates, retries and a budget. A parameter that the endpoint refuses is replaced or
    left out, in this request and all later ones.

    Args:
        address: with /v1; a query like Azure's `?api-version=...` is sent with every request.
        model: name at the server; "auto" is `DEFAULT_MODEL` at OpenAI, and elsewhere the only model that the server
            lists.
        requests_per_minute, tokens_per_minute: None sets no limit.
        timeout_s: deadline of one question, retries included; in a worker that of its batch may be earlier.
        key_header: header that holds the key; None sends it as a bearer token.

    Attributes:
        is_away: the last attempt found an address that accepts no connections.

    Raises:
        ValueError: an address that cannot be used.
        ConfigError: a key that cannot be sent.
    """

    def __init__(
        self,
        address: str,
        model: str,
        budget: Budget,
        requests_per_minute: float | None = None,
        tokens_per_minute: float | None = None,
        timeout_s: float = 60.0,
        key_header: str | None = None,
    ) -> None:
        self.address, self._query = base_and_query(address)
        self.model = model
        self._model_lock = threading.Lock()
        self.budget = budget
        self.timeout_s = timeout_s
        self.is_away = False
        self._served: set[str] = set()
        self._refused: dict[str, None] = {}  # parameters that the endpoint refused, oldest first
        self._exhausted = False
        self._lock = threading.Lock()
        self._requests = shared_bucket(self.address, "requests", requests_per_minute)
        self._tokens = shared_bucket(self.address, "tokens", tokens_per_minute)
        self._key = secret_of(KEY_VARIABLE) or ""
        headers = {key_header: self._key} if key_header else {"Authorization": f"Bearer {self._key}"}
        import httpx  # loading a run file needs no client

        with reading_environment():
            self._http = httpx.Client(
                headers=headers if self._key else {},
                cookies=no_cookies(),
                trust_env=not is_local(self.address),
                timeout=timeout_s,
            )

    @property
    def served(self) -> str:
        """Every name of the model in the endpoint's replies; "" before the first reply."""
        with self._lock:
            return ", ".join(sorted(self._served))

    @property
    def adjusted(self) -> str:
        """Differences of the requests from those of the scorer, because the endpoint refused parameters; "" if none."""
        with self._lock:
            return adjustments(self._refused)

    def ask(self, messages: Sequence[Mapping[str, Any]], **options: Any) -> dict[str, Any]:
        """One question -> the first choice of the reply.

        Raises:
            JudgeError: no answer in time, a refusal, or a reply that breaks the protocol.
            BudgetSpent: before anything is sent, or the account has no quota.
        """
        deadline = deadline_of(self.timeout_s)
        body = {"model": self._named(deadline), "messages": list(messages), "temperature": 0, "seed": 0, **options}
        return self._choice(self._completion(deadline, body))

    def _named(self, deadline: float) -> str:
        """The model to ask; "auto" is resolved with the first question.

        Raises:
            JudgeError: a server that lists no model, or several.
        """
        with self._model_lock:
            if self.model == AUTO:
                self.model = DEFAULT_MODEL if is_openai(self.address) else self._only_model(deadline)
            return self.model

    def _only_model(self, deadline: float) -> str:
        names = self._tried("/models", deadline, None, listed)
        if isinstance(names, Problem):
            raise JudgeError(names.message)
        if len(names) != 1:
            shown = ", ".join([*names[:5], "…"] if len(names) > 5 else names)
            raise JudgeError(
                f"{self.address} lists {count_of(len(names), 'model')} ({self._redacted(shown)}), of which model=auto "
                "cannot choose one; export JUDGE_MODEL=..., or set rewards.NAME.model"
            )
        return names[0]

    def _completion(self, deadline: float, body: Mapping[str, Any]) -> dict[str, Any]:
        """The completion of a question; a parameter that the endpoint refuses is left out, here and in later questions.

        Raises:
            JudgeError, BudgetSpent: as of `ask`.
        """
        while True:
            with self._lock:
                sent = fitted(body, self._refused)
            found = self._tried("/chat/completions", deadline, sent, partial(completion, sent=sent))
            if not isinstance(found, Problem):
                return found
            self._leave_out(found)
            if fitted(body, self._refused) == sent:
                raise JudgeError(found.message)

    def _tried(
        self, path: str, deadline: float, body: Mapping[str, Any] | None, read: Callable[[Reply], Found | Problem]
    ) -> Found | Problem:
        """The result of `read` on the reply to a request, after retries, or the problem of a parameter. Only requests
        that were answered count against the budget; one without a body is a GET and does not.

        Raises:
            JudgeError: no answer before the deadline, or a problem that a retry would not change.
            BudgetSpent: before anything is sent, or the account has no quota.
        """
        problem, started, billed = Problem("away", message="no answer"), time.monotonic(), 0
        for attempt in range(1_000_000):
            if body is not None:
                self._wait_turn(deadline)
                self.budget.begin()
            found = self._attempt(path, deadline, body, read)
            if not isinstance(found, Problem):
                return found
            problem = found
            billed += problem.billed
            if body is not None and not problem.billed:
                self.budget.undo()
            if problem.kind == "parameter":
                return problem
            if problem.kind == "exhausted":
                self._note_exhausted(problem)
                raise BudgetSpent(f"{problem.message}; add credit or quota, or set another address or key")
            if problem.kind == "refused":
                raise JudgeError(problem.message)
            if problem.kind == "unreachable" and time.monotonic() - started > UNREACHABLE_S:
                break
            if billed == _BILLED_TRIES:
                break
            pause = max(problem.wait_s, _jitter.uniform(0, min(8.0, 0.25 * 2**attempt)))  # full jitter
            if time.monotonic() + pause >= deadline:
                break
            time.sleep(pause)
        raise JudgeError(problem.message, retryable=True)

    def _attempt(
        self, path: str, deadline: float, body: Mapping[str, Any] | None, read: Callable[[Reply], Found | Problem]
    ) -> Found | Problem:
        """The result of `read` on the reply to one request, or why there is none."""
        import httpx

        url = f"{self.address}{path}" + (f"?{self._query}" if self._query else "")
        try:
            reply = fetch(self._http, "GET" if body is None else "POST", url, deadline, body)
        except BrokenReply as error:
            return Problem("refused", message=self._redacted(f"{self.address}: {error}"))
        except (httpx.RequestError, TimeoutError) as error:
            message = self._redacted(f"{self.address}: {type(error).__name__} {error}")
            # Without a connection nobody has read the request. After any other failure the judge may be answering it,
            # and billing it.
            if isinstance(error, httpx.ConnectError | httpx.ConnectTimeout):
                self._note_away(message)
                return Problem("unreachable", message=message)
            self.is_away = False
            return Problem("away", message=message)
        self.is_away = False
        start = one_line(reply.body[:_READ_BYTES].decode("utf-8", "replace"), self._key, 300)
        told = f"HTTP {reply.status}: {start or 'an empty reply'}"
        if reply.status == 404 and not self.address.endswith("/v1") and not self._query:
            told += "; the address of an OpenAI-compatible endpoint ends with /v1"
        if 300 <= reply.status < 400:
            told += f"; it redirects to {reply.headers.get('location')}"
        try:
            found = read(reply)
        except ValueError:
            kind = "list of models" if body is None else "chat completion"
            found, told = Problem("refused"), f"not a {kind}: {start}"
        if not isinstance(found, Problem):
            return found
        if found.billed:
            found = replace(found, billed=self._count_billed(reply))
        return replace(found, message=self._redacted(f"{self.address}: {told}"))

    def _count_billed(self, reply: Reply) -> bool:
        """Count the tokens of a reply without an answer -> whether it has any."""
        try:
            return self.budget.used(reply.json()["usage"]) > 0
        except (ValueError, KeyError, TypeError, AttributeError):
            return False

    def _leave_out(self, problem: Problem) -> None:
        """Send no more of a parameter that the endpoint refused; warn once."""
        with self._lock:
            known = problem.parameter in self._refused
            self._refused[problem.parameter] = None
            now = adjustments(self._refused)
        if not known:
            logger.warning("the judge refuses a parameter; from now on questions are sent %s: %s", now, problem.message)

    def _note_exhausted(self, problem: Problem) -> None:
        """Warn once of an account without quota."""
        with self._lock:
            known, self._exhausted = self._exhausted, True
        if not known:
            logger.warning("the judge's account has no quota or credit left: %s", problem.message)

    def _note_away(self, problem: str) -> None:
        """Warn once of an address that accepts no connections, until it accepts one again; questions are asked from
        several threads."""
        with self._lock:
            known, self.is_away = self.is_away, True
        if not known:
            logger.warning("the judge cannot be reached: %s", problem)

    def _wait_turn(self, deadline: float) -> None:
        taken = [(b, n) for b, n in ((self._requests, 1), (self._tokens, _TOKENS_OF_IMAGE)) if b is not None]
        wait = max([bucket.take(amount) for bucket, amount in taken], default=0.0)
        left = deadline - time.monotonic()
        if wait > left:
            for bucket, amount in taken:  # unused turns would delay the next batch
                bucket.take(-amount)
            is_late = wait > 0 and left > 0
            problem = f"the rate limit leaves no turn in {left:.3g} s" if is_late else "no time left for a question"
            raise JudgeError(f"{self.address}: {problem}", retryable=True)
        time.sleep(wait)

    def _choice(self, found: dict[str, Any]) -> dict[str, Any]:
        try:
            spent = self.budget.used(found.get("usage") or {})
            if spent and self._tokens is not None:
                self._tokens.take(spent - _TOKENS_OF_IMAGE)
            model, fingerprint = (str(found.get(k) or "") for k in ("model", "system_fingerprint"))
            # a name of one word, which `without_fingerprints` separates from the fingerprint behind it
            served = f"{'_'.join(model.split())} {fingerprint}".strip()
            self._note_served(one_line(served, self._key, _MOST_NAME))
            choice = found["choices"][0]
            choice["message"].get("content")  # an error where there is none
            return choice
        except (ValueError, KeyError, TypeError, IndexError, AttributeError):
            problem = f"{self.address}: not a chat completion: {one_line(str(found), self._key, 200)}"
            raise JudgeError(self._redacted(problem)) from None

    def _note_served(self, name: str) -> None:
        with self._lock:
            # fingerprints that change with every reply must not hide a change of the model
            models, model = {one.partition(" ")[0] for one in self._served}, name.partition(" ")[0]
            known = self._served if model in models else models
            if not name or name in self._served or len(known) >= _MOST_SERVED:
                return
            before = ", ".join(sorted(self._served))
            self._served.add(name)
        if before:
            change = f"{self.address}: {self.model} is served as {name!r} and was as {before!r}"
            logger.warning("%s", self._redacted(f"{change}: its scores may not compare"))

    def _redacted(self, text: str) -> str:
        """The text as one line without the key, which a server may echo."""
        return one_line(text, self._key)


def image_part(pixels: Pixels, encoding: Encoding = "png") -> dict[str, Any]:
    """An image as a part of a message, lossless as PNG; a JPEG has quality 75."""
    buffer = io.BytesIO()
    how = {"compress_level": 1} if encoding == "png" else {"quality": 75}
    Image.fromarray(pixels).save(buffer, encoding.upper(), **how)
    data = base64.b64encode(buffer.getvalue()).decode()
    return {"type": "image_url", "image_url": {"url": f"data:image/{encoding};base64,{data}"}}
