"""Replies of OpenAI-compatible endpoints, as OpenAI, Azure, OpenRouter, Gemini, LiteLLM, vLLM, SGLang, llama.cpp,
Ollama and DashScope send them: an answer, or what is wrong and whether a later try may succeed. Pure functions.

A reply with status 200 is no answer if it has an `error`, or no choices: routers report the failure of a provider so.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, TypeVar, cast

from retouch.rewards.addresses import retry_after_s
from retouch.rewards.foreign import Reply, one_line

Answer = TypeVar("Answer")


class JudgeError(Exception):
    """The judge gave no usable answer; the message is one line. `retryable`: a later try may succeed."""

    def __init__(self, message: str, retryable: bool = False) -> None:
        super().__init__(one_line(message))
        self.retryable = retryable


@dataclass(frozen=True)
class Problem:
    """Why a reply is no answer.

    Attributes:
        kind: "away" may pass; "unreachable" is an address that accepts no connections; "refused" would fail
            again; "exhausted" is an account without quota or credit; "parameter" is a request with a parameter that
            the model does not take.
        wait_s: seconds after which the endpoint allows the next try.
        parameter: its name; "" for other kinds.
        message: the problem as one line.
        billed: the reply reports tokens, which count although it is no answer.
    """

    kind: Literal["away", "unreachable", "refused", "exhausted", "parameter"]
    wait_s: float = 0.0
    parameter: str = ""
    message: str = ""
    billed: bool = False


_PASSES = {408, 409, 425, 429, 498}
"""Statuses below 500 that may pass; 498 is a provider without capacity."""

_OF_THE_ACCOUNT = {400, 401, 403, 404, 429}
"""Statuses with which endpoints report an account without quota; a 422 may repeat the text of the question."""

_EXHAUSTED = re.compile(
    r"insufficient[ _-]?(?:quota|balance|credit|fund)|(?:balance|credits?|funds) (?:is|are) (?:insufficient|too low)|"
    r"credit balance is too low|exceeded_current_quota_error|billing_(?:hard_limit|not_active)|budget_exceeded|"
    r"budget has been exceeded|exceededbudget|over budget|(?:more|out of|any) credits|arrearage|allocationquota|"
    r"余额不足|欠费"
)
"""Text of an account without quota or credit. "You exceeded your current quota" is not one: Gemini writes it for its
limits per minute."""

_UNSUPPORTED = re.compile(
    r"unsupported|not (?:be )?support|n't support|unrecognized|unknown (?:name|parameter|field|argument)|unexpected|"
    r"extra inputs|extra_forbidden|not permitted|not allowed|deprecated|only the default|cannot find field|"
    r"not available|invalid_parameter|must be (?:at most|less than|<=)|cannot both be"
)
"""Text of a refusal of a parameter, not of its value for one question, like a prompt that is too long."""

ADJUSTABLE = (
    "max_tokens", "max_completion_tokens", "temperature", "seed", "top_p", "top_k", "repetition_penalty",
    "response_format", "top_logprobs",
)  # fmt: skip
"""Parameters without which, or with another value of which, a question can still be answered."""


def completion(reply: Reply, sent: Collection[str] = ()) -> dict[str, Any] | Problem:
    """The completion of a reply, or why it is none.

    Args:
        sent: parameters of the request.

    Raises:
        ValueError: a reply with status 200 of another protocol.
    """
    if reply.status != 200:
        return problem_of(reply, sent)
    if not reply.body.strip():
        return Problem("away")  # a gateway whose server closed the connection
    found = reply.json()
    if not isinstance(found, dict):
        raise ValueError("not an object")
    found = cast("dict[str, Any]", found)
    error = found.get("error") or (found if found.get("object") == "error" else None)
    choices: Any = found.get("choices")
    if not error and isinstance(choices, list) and choices and isinstance(choices[0], dict):
        error = cast("dict[str, Any]", choices[0]).get("error")
    if error:
        code = cast("dict[str, Any]", error).get("code") if isinstance(error, dict) else None
        problem = problem_of(Reply(_status(code), reply.headers, json.dumps(error).encode()), sent)
    elif choices == [] or (choices is None and ("choices" in found or found.get("object") == "chat.completion")):
        problem = Problem("away")
    else:
        return found
    return replace(problem, billed=bool(found.get("usage")))


def listed(reply: Reply) -> list[str] | Problem:
    """The names of an endpoint's models, or why a reply is no list of them.

    Raises:
        ValueError: a reply with status 200 of another protocol.
    """
    if reply.status != 200:
        return problem_of(reply)
    try:
        return [str(model["id"]) for model in reply.json()["data"]]
    except (KeyError, TypeError):
        raise ValueError("no list of models") from None


def _status(code: object) -> int:
    """The HTTP status that the code of an error within a reply stands for; 503 if it is none."""
    return int(str(code)) if re.fullmatch(r"[45]\d\d", str(code)) else 503


def problem_of(reply: Reply, sent: Collection[str] = ()) -> Problem:
    """Why a reply with another status than 200 is no answer; its body may be JSON of any layout, or a proxy's page."""
    # Providers give the same status for an empty account and for too many requests (429): the words decide, before the
    # status does. A server that is away answers again; a parameter can be left out; everything else stays refused.
    told = _told(reply)
    words = told.casefold()
    if reply.status == 402 or (reply.status in _OF_THE_ACCOUNT and _EXHAUSTED.search(words)):
        return Problem("exhausted")
    if reply.status in _PASSES or (reply.status >= 500 and reply.status != 501):
        return Problem("away", max(retry_after_s(reply.headers), _retry_delay(words)))
    if reply.status in (400, 422) and _UNSUPPORTED.search(words) and (name := _parameter(reply, told, sent)):
        return Problem("parameter", parameter=name)
    return Problem("refused")


def _told(reply: Reply) -> str:
    """The body as text, without the escapes of JSON, which may hold the JSON of another endpoint."""
    try:
        text = json.dumps(reply.json(), ensure_ascii=False)
    except (ValueError, RecursionError):
        text = reply.body.decode("utf-8", "replace")
    return text.replace('\\"', '"')


def _retry_delay(words: str) -> float:
    """Google's `retryDelay` in seconds; 0 without one."""
    found = re.search(r'"retrydelay"\s*:\s*"(\d{1,5}(?:\.\d{1,9})?)s"', words)
    return float(found[1]) if found else 0.0


def _parameter(reply: Reply, told: str, sent: Collection[str]) -> str:
    """The parameter of the request that a refusal is about: the one under `param`, or the first that it mentions; ""
    if it is about none, or about one that the question needs."""
    param = re.search(r'"param"\s*:\s*"([a-z_]+)', told)
    if param and param[1] in sent:
        return param[1] if param[1] in ADJUSTABLE else ""
    named = [name for name in sent if name != "model"]  # a word of most refusals
    places = {name: found.start() for name in named if (found := re.search(rf"\b{name}\b", told))}
    first = min(places, key=lambda name: places[name], default="")
    return first if first in ADJUSTABLE else ""


_FEWER_LOGPROBS = 5
"""Log-probabilities of a token that endpoints return which do not return 20."""


def fitted(body: Mapping[str, Any], refused: Collection[str]) -> dict[str, Any]:
    """A request without the parameters that an endpoint refused: `max_tokens` under its new name, fewer
    log-probabilities, a schema as text, and the others left out."""
    # Endpoints refuse one parameter at a time. `max_tokens` is renamed before it is given up, and the schema is asked
    # for in words, because an answer without either can rarely be read.
    sent = {name: value for name, value in body.items() if name not in refused}
    if "max_tokens" in body and "max_tokens" in refused and "max_completion_tokens" not in refused:
        sent["max_completion_tokens"] = body["max_tokens"]
    if "top_logprobs" in body and "top_logprobs" in refused:
        sent["top_logprobs"] = min(_FEWER_LOGPROBS, body["top_logprobs"])
    if "response_format" in body and "response_format" in refused:
        sent["messages"] = _with_schema(body["messages"], body["response_format"]["json_schema"]["schema"])
    return sent


def adjustments(refused: Collection[str]) -> str:
    """The changes that `fitted` makes, for revisions and messages; "" for none."""
    renamed = "max_tokens" in refused and "max_completion_tokens" not in refused
    with_ = {
        "max_completion_tokens for max_tokens": renamed,
        f"{_FEWER_LOGPROBS} top_logprobs": "top_logprobs" in refused,
    }
    kept = {"max_completion_tokens", "top_logprobs", *(["max_tokens"] if renamed else [])}
    parts = [f"with {text}" for text, is_so in with_.items() if is_so]
    return " and ".join(parts + [f"without {name}" for name in sorted(set(refused) - kept)])


def _with_schema(messages: Sequence[Mapping[str, Any]], schema: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """The messages with a schema at the end of the first question."""
    text = f"Answer with nothing but a JSON object by this schema: {json.dumps(schema)}"
    first = next(i for i, message in enumerate(messages) if message["role"] == "user")
    question = {**messages[first], "content": [*messages[first]["content"], {"type": "text", "text": text}]}
    return [question if i == first else message for i, message in enumerate(messages)]


_FILTERED = {"content_filter", "safety", "prohibited_content", "blocklist", "recitation", "sensitive"}
_THOUGHTS = (("<think>", "</think>"), ("<thinking>", "</thinking>"), ("[THINK]", "[/THINK]"), ("◁think▷", "◁/think▷"))


def text_of(choice: Mapping[str, Any]) -> str:
    """The text of an answer, without the reasoning before it, which some servers leave there; "" if there is none.

    Raises:
        JudgeError: the judge declined.
    """
    message = choice["message"]
    if message.get("refusal"):
        raise JudgeError(f"the judge refused: {message['refusal']}")
    if (reason := str(choice.get("finish_reason"))).casefold() in _FILTERED:
        raise JudgeError(f"the judge refused: {reason}")
    text = _joined(message.get("content"))
    for opening, closing in _THOUGHTS:
        before, closed, after = text.rpartition(closing)
        if closed and (opening not in before or before.lstrip().startswith(opening)):
            text = after
        elif text.lstrip().startswith(opening):
            text = ""  # reasoning that was cut
    return text


def read_by(read: Callable[[str], Answer], choice: Mapping[str, Any]) -> Answer:
    """The result of `read` on the text of an answer.

    Raises:
        JudgeError: as of `text_of`.
        ValueError: the problem that `read` found, or there is no text; the message states it if the reply was cut.
    """
    text, message = text_of(choice), choice["message"]
    thought = next((name for name in ("reasoning_content", "reasoning") if message.get(name)), None)
    ending = cut(choice, text)
    # An empty text is an answer only where the endpoint sends it as one. Where the model only thought, or was cut,
    # `read` would report an empty answer and not its cause.
    if not text.strip() and (message.get("content") != "" or thought or ending or message.get("tool_calls")):
        kind = f"only {thought}" if thought else "a tool call" if message.get("tool_calls") else "no text"
        raise ValueError(f"the reply has {kind}{ending}")
    try:
        return read(text)
    except ValueError as error:
        raise ValueError(f"{error}{ending}") from None


def _joined(content: object) -> str:
    """The text of a message, which may be a list of parts; parts with reasoning are left out."""
    if isinstance(content, list):
        parts = [cast("dict[str, Any]", one) for one in cast("list[Any]", content) if isinstance(one, dict)]
        return "".join(
            str(part["text"])
            for part in parts
            if part.get("type", "text") in ("text", "output_text") and "text" in part
        )
    return "" if content is None else str(content)


def cut(choice: Mapping[str, Any], text: str) -> str:
    """The end of a message about a reply that was cut at its maximum length; "" for a whole one."""
    if choice.get("finish_reason") not in ("length", "max_tokens", "MAX_TOKENS"):
        return ""
    start = f", and begins with {text.strip()[:80]!r}" if text.strip() else ""
    return f"; it was cut off at its maximum of tokens (finish_reason: {choice['finish_reason']}){start}"
