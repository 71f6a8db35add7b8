"""What endpoints really send: each (status, headers, body) is an answer, an outage, a refusal or an empty account."""

from __future__ import annotations

import json
import logging
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from email.utils import format_datetime
from typing import Any

import httpx
import numpy as np
import pytest

from retouch.errors import ConfigError, RewardOutage
from retouch.files.plain_json import only_object
from retouch.rewards.addresses import base_and_query, retry_after_s
from retouch.rewards.foreign import Reply
from retouch.rewards.protocol import RewardItem
from retouch.rewards.scorers import make_scorer
from retouch.rewards.scorers.judge_client import Budget, BudgetSpent, JudgeClient, JudgeError
from retouch.rewards.scorers.judge_replies import Problem, adjustments, completion, fitted, read_by, text_of
from retouch.rewards.scorers.judged import as_integer, read_integers
from retouch.rewards.scorers.pairwise import read_choice
from retouch.rewards.server import process
from retouch.types import Failure, Score

VERDICT = '{"reason": "fine", "score": 4}'
SENT = {
    "model", "messages", "temperature", "seed", "max_tokens", "top_p", "top_k", "repetition_penalty", "logprobs",
    "top_logprobs", "response_format",
}  # fmt: skip


def chat(content: Any = VERDICT, finish: str = "stop", usage: Any = "some", **message: Any) -> dict[str, Any]:
    used = {"prompt_tokens": 10, "completion_tokens": 5} if usage == "some" else usage
    choice = {"index": 0, "message": {"role": "assistant", "content": content, **message}, "finish_reason": finish}
    return {"object": "chat.completion", "model": "served", "choices": [choice], "usage": used}


def error(message: str, **more: Any) -> dict[str, Any]:
    return {"error": {"message": message, **more}}


LOADING = error("Loading model", code=503, type="unavailable_error")
QUOTA = error("You exceeded your current quota.", type="insufficient_quota", param=None, code="insufficient_quota")
GEMINI_RATE = [
    {
        "error": {
            "code": 429,
            "message": "You exceeded your current quota, please check your plan and billing details.",
            "status": "RESOURCE_EXHAUSTED",
            "details": [{"@type": "type.googleapis.com/google.rpc.RetryInfo", "retryDelay": "26s"}],
        }
    }
]
UNKNOWN_NAME = 'Invalid JSON payload received. Unknown name "seed": Cannot find field.'
GEMINI_SEED = [{"error": {"code": 400, "message": UNKNOWN_NAME}}]
EXTRA = {"detail": [{"type": "extra_forbidden", "loc": ["body", "seed"], "msg": "Extra inputs are not permitted"}]}
SEED = Problem("parameter", parameter="seed")
MAX_TOKENS = error(
    "Unsupported parameter: 'max_tokens' is not supported with this model. Use 'max_completion_tokens' instead.",
    type="invalid_request_error", param="max_tokens", code="unsupported_parameter",
)  # fmt: skip
TEMPERATURE = error(
    "Unsupported value: 'temperature' does not support 0 with this model. Only the default (1) value is supported.",
    type="invalid_request_error", param="temperature", code="unsupported_value",
)  # fmt: skip
TOO_LONG = error(
    "'max_tokens' or 'max_completion_tokens' is too large: 1400. This model's maximum context length is 4096 tokens "
    "and your request has 3500 input tokens.", type="BadRequestError", param=None, code=400,
)  # fmt: skip
FILTER = error("The response was filtered.", param="prompt", code="content_filter", status=400)
PAGE = "<html><head><title>502 Bad Gateway</title></head><body>nginx</body></html>"

AWAY, REFUSED, EXHAUSTED = Problem("away"), Problem("refused"), Problem("exhausted")
BILLED = replace(AWAY, billed=True)  # it reports tokens

REPLIES: dict[str, tuple[int, dict[str, str], Any, Any]] = {
    # answers
    "OpenAI": (200, {}, chat(), "answer"),
    "usage null": (200, {}, chat(usage=None), "answer"),
    "no error, as null": (200, {}, {**chat(), "error": None}, "answer"),
    "leading keep-alive": (200, {}, "\n  \n" + json.dumps(chat()), "answer"),
    # errors within a 200
    "OpenRouter, rate": (200, {}, error("Rate limit exceeded: provider", code=429), AWAY),
    "OpenRouter, provider": (200, {}, error("Provider returned error", code=502, metadata={"raw": "x"}), AWAY),
    "OpenRouter, beside empty choices": (200, {}, {**chat(None), **error("Provider returned error", code=429)}, BILLED),
    "OpenRouter, in the choice": (
        200, {}, {"choices": [{"error": {"code": 502, "message": "x"}, "message": {"content": ""}}]}, AWAY,
    ),
    "an error as text": (200, {}, {"error": "upstream timed out"}, AWAY),
    "an error without a code": (200, {}, error("The server had an error", type="server_error"), AWAY),
    "a code that is a name": (200, {}, error("busy", code="overloaded_error"), AWAY),
    "FastChat": (200, {}, {"object": "error", "message": "NETWORK ERROR", "code": 50001}, AWAY),
    "OpenRouter, key": (200, {}, error("No auth credentials found", code=401), REFUSED),
    "OpenRouter, moderation": (200, {}, error("flagged", code=403), REFUSED),
    "OpenRouter, credit": (200, {}, error("This request requires more credits", code=402), EXHAUSTED),
    "LiteLLM, code as text": (200, {}, error("Unavailable", code="503"), AWAY),
    "empty choices": (200, {}, {**chat(), "choices": []}, BILLED),
    "choices null": (200, {}, {"id": None, "choices": None}, AWAY),
    "Gemini, without choices": (200, {}, {"object": "chat.completion", "usage": {}}, AWAY),
    "empty reply": (200, {}, "", AWAY),
    # another protocol
    "a web page": (200, {}, "<html>Welcome</html>", "other"),
    "a list of models": (200, {}, {"data": []}, "answer"),  # which has no choices: an error of the client
    "a list": (200, {}, [], "other"),
    # outages
    "proxy": (502, {}, PAGE, AWAY),
    "Cloudflare": (524, {}, "error code: 524", AWAY),
    "Anthropic, overloaded": (529, {}, {"type": "error", "error": {"type": "overloaded_error"}}, AWAY),
    "500": (500, {}, error("The server had an error"), AWAY),
    "llama.cpp": (503, {}, LOADING, AWAY),
    "Ollama": (503, {}, error("server busy, please try again. maximum pending requests exceeded"), AWAY),
    "an error as text, 503": (503, {}, {"error": "loading model"}, AWAY),
    "vLLM, engine": (500, {}, {"object": "error", "message": "EngineCore", "code": 500}, AWAY),
    "508": (508, {}, "", AWAY),
    "408": (408, {}, "", AWAY),
    "425": (425, {}, "", AWAY),
    "409": (409, {}, "", AWAY),
    "Groq, capacity": (498, {}, error("capacity exceeded"), AWAY),
    "rate": (429, {}, error("Rate limit reached", code="rate_limit_exceeded"), AWAY),
    "rate, seconds": (429, {"retry-after": "7"}, {}, Problem("away", 7.0)),
    "Azure, milliseconds": (429, {"retry-after-ms": "1500", "retry-after": "2"}, {}, Problem("away", 1.5)),
    "Gemini, per minute": (429, {}, GEMINI_RATE, Problem("away", 26.0)),
    "Gemini through OpenRouter": (429, {}, error(json.dumps(GEMINI_RATE), code=429), Problem("away", 26.0)),
    # accounts
    "OpenAI, quota": (429, {}, QUOTA, EXHAUSTED),
    "OpenAI, limit": (400, {}, error("Limit reached", code="billing_hard_limit_reached"), EXHAUSTED),
    "DeepSeek": (402, {}, error("Insufficient Balance", type="unknown_error"), EXHAUSTED),
    "Anthropic": (400, {}, error("Your credit balance is too low to access the API."), EXHAUSTED),
    "LiteLLM": (400, {}, error("Budget has been exceeded! Current cost: 2", type="budget_exceeded"), EXHAUSTED),
    "LiteLLM, key": (429, {}, error("exceeded budget", type="budget_exceeded", code="429"), EXHAUSTED),
    "DashScope": (400, {}, error("Access denied", code="Arrearage"), EXHAUSTED),
    "DashScope, free": (403, {}, error("The free tier is used up.", code="AllocationQuota.FreeTierOnly"), EXHAUSTED),
    "Moonshot": (429, {}, error("suspended", type="exceeded_current_quota_error"), EXHAUSTED),
    "Zhipu": (429, {}, error("您的账户已欠费,请充值后重试", code="1113"), EXHAUSTED),
    "xAI": (403, {}, error("Your newly created team doesn't have any credits yet."), EXHAUSTED),
    "a server's own quota": (503, {}, error("insufficient_quota of shared memory"), AWAY),
    # refusals
    "key": (401, {}, error("Incorrect API key provided", code="invalid_api_key"), REFUSED),
    "model": (404, {}, error("The model 'x' does not exist", code="model_not_found"), REFUSED),
    "Azure, deployment": (404, {}, error("not found", code="DeploymentNotFound"), REFUSED),
    "not implemented": (501, {}, "", REFUSED),
    "too large": (413, {}, PAGE, REFUSED),
    "redirect": (302, {"location": "/login"}, "", REFUSED),
    "Azure, filter": (400, {}, FILTER, REFUSED),
    "DashScope, filter": (400, {}, error("inappropriate content", code="data_inspection_failed"), REFUSED),
    "a prompt that is too long": (400, {}, TOO_LONG, REFUSED),
    "an image": (400, {}, error("messages.0.content.1: image is not supported", param="messages"), REFUSED),
    # parameters
    "reasoning, max_tokens": (400, {}, MAX_TOKENS, Problem("parameter", parameter="max_tokens")),
    "reasoning, temperature": (400, {}, TEMPERATURE, Problem("parameter", parameter="temperature")),
    "Gemini, seed": (400, {}, GEMINI_SEED, SEED),
    "Mistral, seed": (422, {}, EXTRA, SEED),
    "DeepSeek, seed": (400, {}, error("This model does not support the parameter seed"), SEED),
    "OpenAI, top_k": (
        400, {}, error("Unrecognized request argument supplied: top_k"), Problem("parameter", parameter="top_k"),
    ),
    "LiteLLM, seed": (
        400, {}, error("litellm.UnsupportedParamsError: x does not support parameters: ['seed'], for model=y"),
        Problem("parameter", parameter="seed"),
    ),
    "Anthropic, temperature": (
        400, {}, error("`temperature` and `top_p` cannot both be specified for this model"),
        Problem("parameter", parameter="temperature"),
    ),
    "schema": (
        400, {}, error("Invalid parameter: 'response_format' of type 'json_schema' is not supported with this model.",
                       param="response_format"),
        Problem("parameter", parameter="response_format"),
    ),
    "xAI, top_logprobs": (
        400, {}, error("top_logprobs must be at most 8"), Problem("parameter", parameter="top_logprobs"),
    ),
    "log-probabilities": (400, {}, error("logprobs is not supported by this model", param="logprobs"), REFUSED),
    "a parameter within a 200": (200, {}, error("seed: Extra inputs are not permitted", code=400), SEED),
    "a parameter that was not sent": (400, {}, error("'stop' is not supported", param="stop"), REFUSED),
}  # fmt: skip


@pytest.mark.parametrize("name", REPLIES)
def test_what_a_reply_is(name: str) -> None:
    status, headers, body, expected = REPLIES[name]
    reply = Reply(status, headers, (body if isinstance(body, str) else json.dumps(body)).encode())
    if expected == "other":
        with pytest.raises(ValueError):
            completion(reply, SENT)
    elif expected == "answer":
        assert isinstance(completion(reply, SENT), dict)
    else:
        assert completion(reply, SENT) == expected


FAR = "Mon, 01 Jan 99999999999 00:00:00 GMT"


def test_the_date_of_a_retry_is_read() -> None:
    now = datetime.now(UTC).replace(microsecond=0)
    later = format_datetime(now + timedelta(seconds=30), usegmt=True)
    assert retry_after_s({"retry-after": later, "date": format_datetime(now, usegmt=True)}) == 30.0
    assert retry_after_s({"retry-after": later}) == pytest.approx(30, abs=3)
    assert retry_after_s({"retry-after": format_datetime(now - timedelta(seconds=30), usegmt=True)}) == 0.0
    for broken in ("soon", "", "nan", "-3", "Wed, 99 Foo 2026", "1 Jan 2026 00:00:00", FAR):
        assert retry_after_s({"retry-after": broken}) == 0.0


# --- texts ---

TEXTS: dict[str, tuple[dict[str, Any], str]] = {
    "plain": (chat("4"), "4"),
    "Mistral, parts": (chat([{"type": "thinking", "thinking": []}, {"type": "text", "text": "4"}]), "4"),
    "parts of text": (chat([{"type": "text", "text": "4"}, {"type": "output_text", "text": "2"}]), "42"),
    "reasoning beside it": (chat("4", reasoning_content="so {score: 1}"), "4"),
    "think": (chat("<think>a {1}</think>\n4"), "\n4"),
    "think, opened by the template": (chat("so it is\n</think>\n\n4"), "\n\n4"),
    "Magistral": (chat("[THINK]a[/THINK]4"), "4"),
    "Kimi": (chat("◁think▷a◁/think▷4"), "4"),
    "a tag amid an answer": (chat("the sign says <think>x</think> here"), "the sign says <think>x</think> here"),
}


@pytest.mark.parametrize("name", TEXTS)
def test_the_text_of_an_answer(name: str) -> None:
    reply, expected = TEXTS[name]
    assert text_of(reply["choices"][0]) == expected


REFUSALS = {
    "refusal": (chat(None, refusal="I cannot."), "the judge refused: I cannot."),
    "filter": (chat("", "content_filter"), "the judge refused: content_filter"),
    "Gemini, filter": (chat(None, "SAFETY"), "the judge refused: SAFETY"),
}


@pytest.mark.parametrize("name", REFUSALS)
def test_a_judge_that_declines_fails_the_item(name: str) -> None:
    reply, message = REFUSALS[name]
    with pytest.raises(JudgeError) as raised:
        read_by(str, reply["choices"][0])
    assert str(raised.value) == message and not raised.value.retryable


CUT = "; it was cut off at its maximum of tokens (finish_reason: length)"
NO_TEXTS = {
    "null": (chat(None), "the reply has no text"),
    "tool call": (chat("", "tool_calls", tool_calls=[{"id": "x"}]), "the reply has a tool call"),
    "vLLM, cut in its reasoning": (
        chat(None, "length", reasoning_content="so"),
        f"the reply has only reasoning_content{CUT}",
    ),
    "OpenRouter, reasoning": (chat("", reasoning="so"), "the reply has only reasoning"),
    "cut in its reasoning": (chat("<think>so it", "length"), f"the reply has no text{CUT}"),
    "cut at once": (chat("", "length"), f"the reply has no text{CUT}"),
}


@pytest.mark.parametrize("name", NO_TEXTS)
def test_a_reply_without_a_text_is_asked_again(name: str) -> None:
    reply, message = NO_TEXTS[name]
    with pytest.raises(ValueError) as raised:
        read_by(str, reply["choices"][0])
    assert str(raised.value) == message
    assert read_by(str, chat("")["choices"][0]) == ""  # a reader that found no text in the image


# --- verdicts ---

VERDICTS = {
    "fence": f"```json\n{VERDICT}\n```",
    "fence without a language": f"```\n{VERDICT}\n```",
    "prose": f"Here is my verdict: {VERDICT} I hope that it helps {{maybe}}.",
    "twice the same": f"{VERDICT}\n\nAs JSON:\n```json\n{VERDICT}\n```",
    "a list": f"[{VERDICT}]",
    "4.0": '{"reason": "fine", "score": 4.0}',
    "text": '{"reason": "fine", "score": "4"}',
    "text with a point": '{"reason": "fine", "score": " 4.0 "}',
    "a line break": '{"reason": "fi\nne", "score": 4}',
    "LaTeX": f"$\\frac{{1}}{{2}}$ {VERDICT}",
    "a box": f"<|begin_of_box|>{VERDICT}<|end_of_box|>",
}


@pytest.mark.parametrize("name", VERDICTS)
def test_verdicts_that_are_read(name: str) -> None:
    assert read_integers(VERDICTS[name], ["score"], 5, ["reason"])["score"] == 4


AMBIGUOUS = {
    f"{VERDICT} or rather {VERDICT.replace('4', '3')}": "2 different JSON objects",
    f"[{VERDICT}, {VERDICT.replace('fine', 'good')}]": "2 different JSON objects",
    '{"reason": "", "score": 4, "score": 3}': "score is given twice, with different values",
    "I say 4.": "no JSON object: 'I say 4.'",
    '{"reason": "cut': "no JSON object: Unterminated string",
    "{" * 500: "over 100 braces",
    '{"score": 3, "reason": "it reads "OPEN", {"score": 5, "reason": "y"}"}': "an object within one that is not JSON",
    'I saw {"reason": "a sign that says {"reason": "ok", "score": 5}': "an object within one that is not JSON",
}


@pytest.mark.parametrize("text", AMBIGUOUS)
def test_verdicts_that_are_none(text: str) -> None:
    with pytest.raises(ValueError, match="^" + AMBIGUOUS[text]):
        only_object(text)


def test_integers() -> None:
    assert [as_integer(value) for value in (4, 4.0, "4", "4.00", " -1 ", 0)] == [4, 4, 4, 4, -1, 0]
    none = (True, 4.5, "4.5", "4/5", "four", "", None, [4], float("nan"), float("inf"), "1" * 5000, "٤", "1e1")
    assert [as_integer(value) for value in none] == [None] * len(none)


def test_choices_of_a_pair() -> None:
    assert [read_choice(text) for text in ("1", "2.", "**1**", "`2`", "Image 1", "Answer: 2", " 1.0\n")] == [
        1,
        0,
    ] * 3 + [1]
    for text in ("", "3", "12", "1 or 2", "Between the 2 images, 1", "first"):
        with pytest.raises(ValueError, match="the answer must be 1 or 2"):
            read_choice(text)


def test_a_cut_reply_says_so_with_its_beginning() -> None:
    def read(text: str) -> Any:
        return read_integers(text, ["score"], 5, ["reason"])

    with pytest.raises(ValueError) as raised:
        read_by(read, chat('{"reason": "the picture shows', "length")["choices"][0])
    problem, cut = str(raised.value).split(CUT)
    assert problem.startswith("not JSON") and cut == """, and begins with '{"reason": "the picture shows'"""
    assert read_by(read, chat(VERDICT + " The image", "length")["choices"][0])["score"] == 4  # cut behind its verdict
    with pytest.raises(ValueError, match=r"no JSON object: 'no'$"):
        read_by(read, chat("no")["choices"][0])


# --- through a scorer ---


def judge_of(monkeypatch: pytest.MonkeyPatch, answer: Any, **options: Any) -> tuple[Any, list[dict[str, Any]]]:
    """A scorer whose endpoint answers by a function of (number of the request, body) -> (status, body)."""
    asked: list[dict[str, Any]] = []

    def reply(request: httpx.Request) -> httpx.Response:
        asked.append(json.loads(request.content) | {"url": str(request.url), "headers": dict(request.headers)})
        status, body = answer(len(asked), asked[-1])
        return httpx.Response(status, content=body if isinstance(body, str) else json.dumps(body))

    given = {"model": "m", "address": "http://127.0.0.1:1/v1", "mode": "rubric", "timeout_s": 5.0, "concurrency": 1}
    scorer: Any = make_scorer("openai_judge", given | options)
    client = scorer.judge._http
    scorer.judge._http = httpx.Client(transport=httpx.MockTransport(reply), headers=client.headers)
    return scorer, asked


ITEM = RewardItem(1, "a sign", np.zeros((8, 8, 3), np.uint8))

STARTS: dict[str, tuple[int, Any, type[Exception]]] = {
    "error in a 200": (200, error("x", code=429), RewardOutage),
    "empty choices": (200, {"choices": []}, RewardOutage),
    "429": (429, error("slow down"), RewardOutage),
    "503": (503, LOADING, RewardOutage),
    "529": (529, "", RewardOutage),
    "proxy": (502, PAGE, RewardOutage),
    "501": (501, "", ConfigError),
    "quota": (429, QUOTA, ConfigError),
    "key": (401, error("wrong key"), ConfigError),
    "page": (200, PAGE, ConfigError),
}


@pytest.mark.parametrize("name", STARTS)
@pytest.mark.parametrize("reward", ["openai_judge", "pairwise"])
def test_an_outage_at_the_start_is_no_wrong_usage(name: str, reward: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """It ends with exit code 3, and the run can be started again; the budget pays for no question without an answer."""
    status, body, kind = STARTS[name]
    scorer, asked = judge_of(monkeypatch, lambda *_: (status, body), timeout_s=0.3)
    if reward == "pairwise":
        other: Any = make_scorer("pairwise", {"model": "m", "address": "http://127.0.0.1:1/v1", "timeout_s": 0.3})
        other.judge._http, scorer = scorer.judge._http, other
    with pytest.raises(kind):
        scorer.load("cpu")
    assert asked and scorer.budget.spent_requests == 0


def test_a_server_waits_for_a_judge_that_does_not_answer_yet(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """It is not ready meanwhile; it ended before, and the run with it, as if the reward were set wrongly."""
    monkeypatch.setattr(process, "_AGAIN_S", 0.01)
    caplog.set_level(logging.WARNING)
    scorer, asked = judge_of(monkeypatch, lambda n, _: (503, LOADING) if n < 3 else (200, chat()), timeout_s=0.02)
    process.load_all({"fits": scorer}, "cpu")
    assert len(asked) >= 3 and "rewards.fits: " in caplog.text and "Loading model" in caplog.text
    wrong, _ = judge_of(monkeypatch, lambda *_: (401, error("wrong key")))
    with pytest.raises(ConfigError, match=r"^rewards\.fits: .*wrong key"):
        process.load_all({"fits": wrong}, "cpu")


def test_an_error_within_a_200_is_asked_again(monkeypatch: pytest.MonkeyPatch) -> None:
    errors = [error("busy", code=429), {"choices": []}, ""]
    scorer, asked = judge_of(
        monkeypatch, lambda n, _: (200, errors[n - 1] if n <= len(errors) else chat()), budget_requests=1
    )
    assert scorer.score([ITEM]) == [Score(0.8, {"reason": "fine"})]
    assert (len(asked), scorer.budget.spent_requests, scorer.budget.spent_in) == (4, 1, 10)


def test_a_reply_without_an_answer_that_has_a_price_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Endpoints answer a question that they block with no choices, and bill it; it was asked until the deadline."""
    blocked = {"choices": [], "usage": {"prompt_tokens": 1000, "completion_tokens": 0}}
    scorer, asked = judge_of(monkeypatch, lambda *_: (200, blocked), budget_tokens=4000)
    first, second = scorer.score([ITEM]), scorer.score([ITEM])
    assert [outcome.code for outcome in first] == ["unavailable"] and len(asked) == 4
    assert [outcome.code for outcome in second] == ["budget_spent"]
    assert (scorer.budget.spent_requests, scorer.budget.spent_in) == (4, 4000)


def test_a_key_that_a_long_reply_echoes_is_in_no_message(monkeypatch: pytest.MonkeyPatch) -> None:
    """It lies across the place where the reply is cut."""
    key = "sk-" + "A" * 60
    monkeypatch.setenv("OPENAI_API_KEY", key)
    for body in ("x" * 270 + key, {"x" * 170: key}):
        scorer, _ = judge_of(monkeypatch, lambda *_, body=body: (200 if isinstance(body, dict) else 401, body))
        [outcome] = scorer.score([ITEM])
        assert "sk-A" not in outcome.message and "***" in outcome.message


def test_a_question_about_credits_is_no_account_without_credit() -> None:
    """A validation error repeats the question."""
    echoed = {"detail": [{"msg": "too long", "input": "a sign that reads OUT OF CREDITS"}]}
    assert completion(Reply(422, {}, json.dumps(echoed).encode()), SENT) == REFUSED


def test_an_account_without_quota_says_so_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING)
    scorer, asked = judge_of(monkeypatch, lambda *_: (429, QUOTA))
    outcomes = scorer.score([ITEM] * 3)
    assert [(one.code, one.retryable) for one in outcomes] == [("budget_spent", False)] * 3
    assert len(asked) == 3 and scorer.budget.spent_requests == 0
    assert "add credit or quota, or set another address or key" in outcomes[0].message
    assert [r.getMessage().partition(":")[0] for r in caplog.records] == [
        "the judge's account has no quota or credit left"
    ]


def reasoning(_: int, body: dict[str, Any]) -> tuple[int, Any]:
    """As o3: no max_tokens, and no temperature but 1."""
    if "max_tokens" in body:
        return 400, MAX_TOKENS
    return (400, TEMPERATURE) if "temperature" in body else (200, chat())


def test_refused_parameters_are_replaced_once_and_noted(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING)
    scorer, asked = judge_of(monkeypatch, reasoning)
    before = scorer.spec.revision
    scorer.load("cpu")
    assert scorer.score([ITEM] * 2) == [Score(0.8, {"reason": "fine"})] * 2
    choice = scorer.judge.ask([{"role": "user", "content": "?"}], max_tokens=7)
    assert choice["message"]["content"] == VERDICT
    assert len(asked) == 2 + 2 + 2 and "temperature" not in asked[1]  # a refusal of each parameter
    assert asked[-1]["max_completion_tokens"] == 7 and "max_tokens" not in asked[-1] and asked[-1]["seed"] == 0
    scorer.score([ITEM])
    noted = "m with max_completion_tokens for max_tokens and without temperature served as served"
    assert noted in scorer.spec.revision and "without" not in before
    assert len(caplog.records) == 2 and scorer.budget.spent_requests == len(asked) - 2


def test_a_schema_that_is_refused_becomes_text(monkeypatch: pytest.MonkeyPatch) -> None:
    message = "'response_format.type' : value is not one of the allowed values ['text']; json_schema is not supported"

    def answer(_: int, body: dict[str, Any]) -> tuple[int, Any]:
        return (400, error(message, param="response_format.type")) if "response_format" in body else (200, chat())

    scorer, asked = judge_of(monkeypatch, answer)
    assert scorer.score([ITEM]) == [Score(0.8, {"reason": "fine"})]
    assert "json_schema" not in str(asked[1].get("response_format"))
    assert '"required": ["reason", "score"]' in asked[1]["messages"][0]["content"][-1]["text"]
    assert "without response_format" in scorer.spec.revision


def test_a_parameter_that_is_refused_again_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    scorer, asked = judge_of(monkeypatch, lambda *_: (400, TEMPERATURE))
    (outcome,) = scorer.score([ITEM])
    assert isinstance(outcome, Failure) and outcome.code == "scorer_error" and len(asked) == 2


def test_what_is_sent_after_refusals() -> None:
    body = {"messages": [], "max_tokens": 4, "top_logprobs": 20, "seed": 0}
    assert fitted(body, []) == body and adjustments([]) == ""
    assert fitted(body, ["max_tokens", "top_logprobs"]) == {
        "messages": [], "max_completion_tokens": 4, "top_logprobs": 5, "seed": 0,
    }  # fmt: skip
    assert fitted(body, ["max_tokens", "max_completion_tokens", "seed"]) == {"messages": [], "top_logprobs": 20}
    assert adjustments(["seed", "max_tokens", "max_completion_tokens"]) == "without max_tokens and without seed"
    assert adjustments(["top_logprobs"]) == "with 5 top_logprobs"


# --- Azure ---


def test_an_address_with_a_query_and_another_header(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", "sk-azure")
    address = "https://x.openai.azure.com/openai/deployments/judge?api-version=2024-10-21"
    scorer, asked = judge_of(monkeypatch, lambda *_: (200, chat()), address=address, key_header="api-key")
    scorer.score([ITEM])
    assert asked[0]["url"] == (
        "https://x.openai.azure.com/openai/deployments/judge/chat/completions?api-version=2024-10-21"
    )
    assert asked[0]["headers"]["api-key"] == "sk-azure" and "authorization" not in asked[0]["headers"]
    plain, _ = judge_of(monkeypatch, lambda *_: (200, chat()), address=address)
    assert plain.judge._http.headers["authorization"] == "Bearer sk-azure"
    assert scorer.spec.revision.split(" served")[0] == plain.spec.revision.split(" served")[0]


@pytest.mark.parametrize("query", ["api-key=abc", "code=abc", "sig=abc", "access_token=abc", "subscription-key=abc"])
def test_a_key_in_the_query_is_refused(query: str) -> None:
    """It would be in the saved run file, in messages and in logs."""
    with pytest.raises(ValueError, match=r"holds .*; give the key in the environment") as raised:
        base_and_query(f"https://x/v1?{query}")
    assert "abc" not in str(raised.value)


@pytest.mark.parametrize("url", ["https://x/v1?", "https://x/v1?a b", "https://x/v1?a=1#b", "ftp://x/v1?a=1"])
def test_addresses_that_are_none(url: str) -> None:
    with pytest.raises(ValueError):
        base_and_query(url)


@pytest.mark.parametrize("key", ["sk-ключ", "sk-a\nb", "sk a"])
def test_a_key_that_cannot_be_sent(key: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", key)
    with pytest.raises(
        ConfigError, match=r"^reward 'openai_judge': OPENAI_API_KEY: the token must be printable ASCII"
    ) as raised:
        make_scorer("openai_judge", {"model": "m"})
    assert key not in str(raised.value)


def test_a_header_that_is_none_is_refused() -> None:
    with pytest.raises(ConfigError, match="key_header"):
        make_scorer("openai_judge", {"model": "m", "key_header": "a b"})


def test_a_compressed_page_of_a_proxy_is_an_outage() -> None:
    client = JudgeClient("http://127.0.0.1:1/v1", "m", Budget())
    client._http = httpx.Client(
        transport=httpx.MockTransport(
            lambda _: httpx.Response(
                502, headers={"content-encoding": "br", "retry-after": "3600"}, stream=httpx.ByteStream(b"\x01\x02")
            )
        )
    )
    with pytest.raises(JudgeError, match="HTTP 502: an empty reply") as raised:
        client.ask([])
    assert raised.value.retryable


def test_a_redirect_names_its_target() -> None:
    """An http address of a host that has moved to https."""
    client = JudgeClient("http://127.0.0.1:1/v1", "m", Budget())
    moved = httpx.Response(308, headers={"location": "https://judge.example/v1/chat/completions"})
    client._http = httpx.Client(transport=httpx.MockTransport(lambda _: moved))
    with pytest.raises(JudgeError, match=r"HTTP 308: .*; it redirects to https://judge\.example/v1/chat/completions"):
        client.ask([])


def test_a_question_whose_answer_is_empty_is_repeated(monkeypatch: pytest.MonkeyPatch) -> None:
    scorer, asked = judge_of(monkeypatch, lambda n, _: (200, chat(None) if n == 1 else chat()))
    assert scorer.score([ITEM]) == [Score(0.8, {"reason": "fine"})]
    given, complaint = asked[1]["messages"][1:]
    assert given["content"] == "(no text)" and "the reply has no text" in complaint["content"]


def test_a_budget_that_is_spent_sends_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    scorer, asked = judge_of(monkeypatch, lambda *_: (200, chat()), budget_requests=1)
    scorer.score([ITEM])
    with pytest.raises(BudgetSpent):
        scorer.judge.ask([])
    assert len(asked) == 1
