"""The judge against a server that keeps to the OpenAI protocol: scores, rates, budgets, and a key that is nowhere."""

from __future__ import annotations

import asyncio
import gzip
import json
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import numpy as np
import pytest

from retouch.config import ConfigError, parse_run
from retouch.config.load import dump_run
from retouch.errors import RewardOutage
from retouch.rewards.client.client import RewardClient
from retouch.rewards.foreign import fetch, questions_end
from retouch.rewards.protocol import CheckedScorer, RewardItem
from retouch.rewards.scorers import judge_client as judge
from retouch.rewards.scorers import make_scorer
from retouch.rewards.scorers.judge_client import (
    Budget,
    BudgetSpent,
    JudgeClient,
    JudgeError,
    TokenBucket,
    image_part,
    shared_bucket,
)
from retouch.rewards.scorers.judged import read_integers
from retouch.rewards.scorers.openai_judge import expectation
from retouch.rewards.server.process import score_rewards
from retouch.rewards.server.worker import ProcessWorker
from retouch.types import Failure, Score
from tests.config.conftest import BASE
from tests.rewards.fakes import HANG_S, closed_port, item, score_checked, serving, values
from tests.rewards.openai_server import KEY, OpenAIServer


@pytest.fixture(autouse=True)
def _key(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("OPENAI_API_KEY", KEY)
    judge._BUCKETS.clear()
    yield


QUESTION = [{"role": "user", "content": [{"type": "text", "text": "good?"}, image_part(np.zeros((8, 8, 3), np.uint8))]}]


def grey(level: int) -> RewardItem:
    return item(level, image=np.full((32, 32, 3), level, np.uint8), prompt=f"grey {level}")


def made(server: OpenAIServer, **options: Any) -> Any:
    scorer = make_scorer("openai_judge", {"model": "judge", "address": server.url, **options})
    scorer.load("cpu")
    return scorer


# --- scores ---


def test_the_expectation_over_score_tokens_is_the_brightness() -> None:
    """The server puts its probability on the digits around 5 x brightness, so that their mean is it."""
    levels = [0, 40, 51, 100, 255]
    with OpenAIServer() as server:
        outcomes = score_checked(made(server), [grey(level) for level in levels])
    assert values(outcomes) == pytest.approx([level / 255 for level in levels], abs=1e-6)
    assert all(isinstance(o, Score) and o.detail["mass"] == pytest.approx(0.95) for o in outcomes)


def test_a_rubric_is_read_by_its_schema() -> None:
    with OpenAIServer() as server:
        outcomes = score_checked(made(server, mode="rubric"), [grey(0), grey(102), grey(255)])
        assert server.asked[-1]["response_format"]["json_schema"]["strict"] is True
    assert values(outcomes) == [0.0, 0.4, 1.0]
    assert isinstance(outcomes[0], Score) and outcomes[0].detail == {"reason": "bright"}


def test_what_is_asked() -> None:
    with OpenAIServer() as server:
        scorer = made(server, question="Is it {prompt}?")
        score_checked(scorer, [grey(9)])
        asked = server.asked[-1]
    text, picture = asked["messages"][0]["content"]
    assert text["text"].startswith("Is it grey 9?\nAnswer with one digit") and picture["type"] == "image_url"
    assert (asked["temperature"], asked["seed"], asked["max_tokens"], asked["top_logprobs"]) == (0, 0, 1, 20)


def test_an_answer_off_the_schema_is_asked_for_once_more_with_the_error() -> None:
    with OpenAIServer() as server:
        scorer = made(server, mode="rubric", concurrency=1)
        server.bad_first = 1
        assert values(score_checked(scorer, [grey(255)])) == [1.0]
        assert "reason is missing" in server.asked[-1]["messages"][-1]["content"]
        server.bad_first = 2
        (failure,) = score_checked(scorer, [grey(255)])
        assert isinstance(failure, Failure) and failure.code == "scorer_error" and "twice" in failure.message


def test_little_mass_on_the_score_tokens_is_a_failure() -> None:
    with OpenAIServer() as server:
        scorer = made(server)
        server.digits = 0.3
        (failure,) = score_checked(scorer, [grey(100)])
        assert isinstance(failure, Failure) and failure.code == "low_mass"
        assert "0.30 of the probability" in failure.message
        server.top = lambda brightness: [{"token": "5", "logprob": 0.0}]  # type: ignore[method-assign]
        assert values(score_checked(made(server, min_mass=1.0), [grey(100)])) == [1.0]  # the least that is enough
        server.top = lambda brightness: [{"token": "x", "logprob": 0.0}]  # type: ignore[method-assign]
        scorer.options = scorer.options.model_copy(update={"min_mass": 0.0})
        (none,) = score_checked(scorer, [grey(100)])
    assert isinstance(none, Failure) and none.code == "low_mass"


def test_variants_of_a_token_are_summed_and_other_words_are_not() -> None:
    top = [{"token": t, "logprob": float(np.log(p))} for t, p in (("5", 0.25), (" 5", 0.25), ("0", 0.25), ("x", 0.2))]
    value, mass = expectation(top, {"0": 0.0, "5": 1.0})
    assert (value, mass) == pytest.approx((2 / 3, 0.75))
    assert expectation([], {"0": 0.0}) == (0.0, 0.0)


NO_VERDICTS = ["", "5", "[]", '{"score": 3}', '{"score": 3, "reason": "", "x": 1}'] + [
    f'{{"score": {score}, "reason": ""}}' for score in ("3.5", "true", "6", "-1", '"3.5"', '"three"', "null")
]


@pytest.mark.parametrize("text", NO_VERDICTS)
def test_verdicts_that_are_none(text: str) -> None:
    with pytest.raises(ValueError, match=r"JSON|is missing|is unknown|it must be|integer"):
        read_integers(text, ["score"], 5, ["reason"])


# --- what the endpoint can do ---


@pytest.mark.parametrize(
    ("server", "options", "message"),
    [
        ({"has_logprobs": False}, {}, "mode 'logprobs' does not work there: the reply has no log-probabilities"),
        ({"has_schema": False}, {"mode": "rubric"}, "mode 'rubric' does not work there: the answer does not keep to"),
        ({}, {"model": "other"}, "The model 'other' does not exist"),
    ],
)
def test_what_the_endpoint_cannot_do_is_found_at_the_start(
    server: dict[str, Any], options: dict[str, Any], message: str
) -> None:
    with OpenAIServer(**server) as one, pytest.raises(ConfigError, match=message):
        made(one, **options)


def test_the_served_model_is_in_the_revision() -> None:
    with OpenAIServer() as server:
        revisions = {made(server, **o).spec.revision for o in ({}, {"question": "{prompt}?"}, {"mode": "rubric"})}
    assert len(revisions) == 3 and all("served as judge-2026-01 fp_1" in one for one in revisions)


def test_a_model_that_is_swapped_is_told_once_and_is_another_revision(caplog: pytest.LogCaptureFixture) -> None:
    """From the batch in which it was heard of; back again it stays: scores of both are of this revision."""
    with OpenAIServer() as server:
        scorer = made(server)
        revisions: list[str] = []
        for name in ("judge-2026-01", "judge-2026-02", "judge-2026-02", "judge-2026-01"):
            server.served = name
            assert values(score_checked(scorer, [grey(51)] * 8)) == pytest.approx([0.2] * 8)
            revisions.append(scorer.spec.revision)
    assert "served as judge-2026-01 fp_1 " in revisions[0]
    assert "served as judge-2026-01 fp_1, judge-2026-02 fp_1 " in revisions[1]
    assert revisions[0] != revisions[1] == revisions[2] == revisions[3]
    (warning,) = [r.getMessage() for r in caplog.records if r.levelname == "WARNING"]
    assert "is served as 'judge-2026-02 fp_1' and was as 'judge-2026-01 fp_1'" in warning


def test_a_name_that_changes_with_every_reply_does_not_grow_the_revision() -> None:
    with OpenAIServer() as server:
        scorer = made(server)
        for i in range(18):
            server.served = f"judge-{i}"
            score_checked(scorer, [grey(51)])
    assert scorer.spec.revision.count("fp_1") == 16


def test_fingerprints_that_change_with_every_reply_hide_no_other_model() -> None:
    client = JudgeClient("http://127.0.0.1:1/v1", "judge", Budget())
    for name in (*(f"one fp_{i}" for i in range(20)), "other fp_0", "one fp_20"):
        client._note_served(name)
    assert client.served.count("one fp_") == 16 and client.served.endswith("other fp_0")


def test_a_server_tells_the_revision_of_a_swapped_model(caplog: pytest.LogCaptureFixture) -> None:
    """With the reply of the batch in which it was heard of, so that nothing of it is kept under the old one."""
    with OpenAIServer() as server:
        scorer = make_scorer("openai_judge", {"model": "judge", "address": server.url})
        with serving({"openai_judge": scorer}) as url, RewardClient([url], ["openai_judge"]) as client:
            client.score([grey(51)])
            server.served = "judge-2026-02"
            client.score([grey(51)])
            told = httpx.get(f"{url}/info", trust_env=False).json()["scorers"]["openai_judge"]["revision"]
    assert "judge-2026-02" in told and client.revisions.changes == 1
    assert "its scores may not compare" in caplog.text


def test_a_worker_process_tells_it_too() -> None:
    async def ask(server: OpenAIServer) -> list[str]:
        options = {"model": "judge", "address": server.url}
        worker = ProcessWorker({"judge": {"scorer": "openai_judge", **options}}, "cpu")
        await worker.start()
        try:
            async with asyncio.timeout(60):
                while not worker.ready:
                    await asyncio.sleep(0.02)
            revisions: list[str] = []
            for name in ("judge-2026-01", "judge-2026-02"):
                server.served = name
                outcomes, _ = await worker.score(["judge"], [grey(51)], [time.monotonic() + 30])
                assert values(outcomes["judge"]) == pytest.approx([0.2])
                revisions.append(worker.specs["judge"].revision)
            return revisions
        finally:
            await worker.stop()

    with OpenAIServer() as server:
        first, second = asyncio.run(ask(server))
    assert "judge-2026-02" not in first and "judge-2026-01 fp_1, judge-2026-02 fp_1" in second


# --- rates, retries, budgets ---


def test_a_rate_limit_is_waited_for() -> None:
    """6 a second are answered: without a bucket 429s are retried after what they say; with one there are none."""
    with OpenAIServer() as server:
        scorer = made(server)
        server.per_second = 6
        assert values(score_checked(scorer, [grey(51)] * 12)) == pytest.approx([0.2] * 12)
        assert server.refused > 0
    with OpenAIServer() as server:
        scorer = made(server, requests_per_minute=240)
        server.per_second, started = 30, time.monotonic()
        assert values(score_checked(scorer, [grey(51)] * 26)) == pytest.approx([0.2] * 26)
        assert server.refused == 0 and time.monotonic() - started > 1.0


def test_a_bucket_refills_and_gives_credit(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [100.0]
    monkeypatch.setattr(judge, "time", SimpleNamespace(monotonic=lambda: now[0]))
    bucket = TokenBucket(60.0, burst_s=2.0)
    assert [bucket.take(1) for _ in range(4)] == [0.0, 0.0, 1.0, 2.0]
    now[0] += 2.5
    assert bucket.take(1) == 0.5
    now[0] += 1000.0
    assert [bucket.take(1) for _ in range(3)] == [0.0, 0.0, 1.0]


def test_turns_that_nobody_waits_for_are_not_used_up() -> None:
    """A batch larger than the rate allows fails for its time, and not for that of all batches after it."""
    with OpenAIServer() as server:
        asking = JudgeClient(server.url, "judge", Budget(), 0.6, 1e5, timeout_s=60.0)
        asking.ask(QUESTION)
        for _ in range(50):
            with pytest.raises(JudgeError, match="leaves no turn") as late:
                asking.ask(QUESTION)
            assert late.value.retryable
    for kind, rate in (("requests", 0.6), ("tokens", 1e5)):
        bucket = shared_bucket(asking.address, kind, rate)
        assert bucket is not None and bucket.take(0) == 0.0
    with questions_end(time.monotonic() + 9.0), pytest.raises(JudgeError, match=r"leaves no turn in [1-9](\.\d+)? s$"):
        asking.ask(QUESTION)
    with questions_end(time.monotonic() - 1.0), pytest.raises(JudgeError, match="no time left for a question"):
        asking.ask(QUESTION)


def test_a_limit_of_tokens_is_one_of_those_that_were_used() -> None:
    """110 of the 800 that a question is thought to take."""
    with OpenAIServer() as server:
        asking = JudgeClient(server.url, "judge", Budget(), tokens_per_minute=60.0, timeout_s=60.0)
        bucket = shared_bucket(asking.address, "tokens", 60.0)
        assert bucket is not None
        bucket.most = 1e6
        bucket.take(-900)  # so that the first need not wait
        asking.ask(QUESTION)
        assert bucket.take(0) == 0.0 and bucket.take(900) == pytest.approx(105, abs=10)


def test_what_may_pass_is_asked_again_and_what_will_not_is_not() -> None:
    with OpenAIServer() as server:
        scorer = made(server, concurrency=1)
        server.fail = [500, 429, 503]
        assert values(score_checked(scorer, [grey(51)])) == pytest.approx([0.2])
        server.fail = [403]
        (failure,) = score_checked(scorer, [grey(51)])
    assert isinstance(failure, Failure) and (failure.code, failure.retryable) == ("scorer_error", False)


def test_no_answer_in_time_is_a_retryable_failure() -> None:
    with OpenAIServer() as server:
        scorer = made(server, timeout_s=0.6)
        server.fail = [500] * 1000
        started = time.monotonic()
        (failure,) = score_checked(scorer, [grey(51)])
    assert isinstance(failure, Failure) and (failure.code, failure.retryable) == ("unavailable", True)
    assert time.monotonic() - started < HANG_S


def test_a_question_ends_with_the_batch_of_its_worker(monkeypatch: pytest.MonkeyPatch) -> None:
    """Which is ended as hung a minute later: a slow answer is a failure of its item, and what comes after it is not
    asked, nor paid. In the process of the run a question has all of its time."""
    deadlines: list[float] = []

    def slow(client: httpx.Client, method: str, url: str, deadline: float, body: Any) -> Any:
        deadlines.append(deadline)
        if len(deadlines) < 3:
            return fetch(client, method, url, deadline, body)
        time.sleep(max(0.0, deadline - time.monotonic()))
        raise TimeoutError("no whole reply")

    with OpenAIServer() as server:
        scorer = made(server, timeout_s=1800.0, concurrency=1)
        monkeypatch.setattr(judge, "fetch", slow)
        score_checked(scorer, [grey(51)])
        batch, started = {"judge": CheckedScorer(scorer)}, time.monotonic()
        score_rewards(batch, ["judge"], [grey(51)], [started + 600])
        assert deadlines[0] > started + 900 and deadlines[1] == started + 600
        ends = time.monotonic() + 0.2
        outcomes, _ = score_rewards(batch, ["judge"], [grey(51), grey(102)], [ends, ends])
    assert deadlines[2:] == [ends]
    late: Any = outcomes["judge"]
    assert [(o.code, o.retryable) for o in late] == [("unavailable", True)] * 2
    assert "no whole reply" in late[0].message and "no time left for a question" in late[1].message


@pytest.mark.parametrize("left", [180.0, 4.0])
def test_an_address_that_drops_packets_is_noticed_within_seconds(left: float) -> None:
    asked: list[dict[str, float]] = []

    def reply(request: httpx.Request) -> httpx.Response:
        asked.append(request.extensions["timeout"])
        return httpx.Response(200, content=b"{}")

    with httpx.Client(transport=httpx.MockTransport(reply)) as client:
        fetch(client, "GET", "http://judge/v1/models", time.monotonic() + left)
    assert 0 < asked[0]["read"] <= left and left - asked[0]["read"] < HANG_S
    assert asked[0]["connect"] == min(5.0, asked[0]["read"])


def test_a_judge_that_is_down_is_told_at_once_and_waited_for_seconds(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Although a question has minutes. It costs no request of the budget; during a run, the run waits."""
    monkeypatch.setattr(judge, "UNREACHABLE_S", 0.5)
    away = f"http://127.0.0.1:{closed_port()}/v1"
    scorer: Any = make_scorer("openai_judge", {"model": "judge", "address": away, "timeout_s": 180.0})
    caplog.set_level("WARNING")
    started = time.monotonic()
    with pytest.raises(RewardOutage) as raised:  # exit code 3: a script starts the run again
        scorer.load("cpu")
    (failure,) = score_checked(scorer, [grey(51)])
    assert isinstance(failure, Failure) and (failure.code, failure.retryable) == ("unavailable", True)
    assert time.monotonic() - started < HANG_S
    assert f"{away}: ConnectError" in str(raised.value)
    assert str(raised.value).endswith("; start the judge there, or set address (JUDGE_URL) to where it is")
    assert caplog.text.count("the judge cannot be reached") == 1 and scorer.budget.spent_requests == 0


@pytest.mark.parametrize(
    ("limit", "scored"),
    [
        ({"budget_requests": 6}, 5),
        ({"budget_tokens": 550}, 4),  # 110 a question, the first one at the start
        ({"budget_dollars": 0.0006, "price_in": 1.0, "price_out": 2.0}, 4),  # 120e-6 a question
    ],
    ids=["requests", "tokens", "dollars"],
)
def test_a_budget_stops_cleanly(limit: dict[str, Any], scored: int) -> None:
    with OpenAIServer() as server:
        outcomes = score_checked(made(server, concurrency=1, **limit), [grey(51)] * 8)
        assert len(server.asked) == 1 + scored
    assert values(outcomes) == [*[pytest.approx(0.2)] * scored, *["budget_spent"] * (8 - scored)]
    assert not any(outcome.retryable for outcome in outcomes[scored:])


def test_a_budget_counts() -> None:
    budget = Budget(price_in=2.0, price_out=10.0)
    budget.used({"prompt_tokens": 1_000_000, "completion_tokens": 100_000})
    budget.used({})
    assert budget.cost == 3.0
    with pytest.raises(BudgetSpent, match=r"0\.5 dollars is spent"):
        Budget(dollars=0.5, price_in=1.0, spent_in=500_000).begin()


# --- the model ---


def test_auto_is_the_only_model_of_a_server() -> None:
    with OpenAIServer() as server:
        scorer = made(server, model="auto")
        assert "openai_judge judge served as" in scorer.spec.revision
        assert scorer.budget.spent_requests == len(server.asked) == 1  # asking for its models costs nothing
        server.models = ["judge", "other"]
        with pytest.raises(
            ConfigError, match=r"lists 2 models \(judge, other\), of which model=auto cannot choose one"
        ):
            made(server, model="auto")


@pytest.mark.parametrize("address", ["https://api.openai.com/v1", "https://eu.api.openai.com/v1"])
def test_auto_is_a_gpt_4o_at_openai(address: str) -> None:
    asked: list[dict[str, Any]] = []

    def answer(request: httpx.Request) -> httpx.Response:
        asked.append(json.loads(request.content))
        return httpx.Response(200, json={"choices": [{"message": {"content": "yes"}}]})

    asking = JudgeClient(address, "auto", Budget())
    asking._http = httpx.Client(transport=httpx.MockTransport(answer))
    asking.ask([{"role": "user", "content": "?"}])
    assert [body["model"] for body in asked] == ["gpt-4o-2024-11-20"]


# --- replies without bounds ---


def _answering(body: bytes, **headers: str) -> JudgeClient:
    def answer(request: httpx.Request) -> httpx.Response:
        assert request.headers["accept-encoding"] == "identity"
        return httpx.Response(200, headers=headers, stream=httpx.ByteStream(body))

    asking = JudgeClient("http://127.0.0.1:1/v1", "judge", Budget(tokens=100), timeout_s=2)
    asking._http = httpx.Client(transport=httpx.MockTransport(answer))
    return asking


def test_a_reply_is_bounded_and_never_decompressed() -> None:
    """A reply of a few megabytes became gigabytes of memory."""
    large = json.dumps({"choices": [{"message": {"content": "a" * (5 << 20)}}]}).encode()
    with pytest.raises(JudgeError, match="over 4194304 bytes"):
        _answering(large).ask([])
    with pytest.raises(JudgeError, match="compressed"):
        _answering(gzip.compress(large), **{"content-encoding": "gzip"}).ask([])


def test_a_reply_that_drips_ends_at_the_deadline() -> None:
    def drip() -> Iterator[bytes]:
        for _ in range(5000):
            time.sleep(0.02)
            yield b" "

    asking = JudgeClient("http://127.0.0.1:1/v1", "judge", Budget(), timeout_s=0.3)
    asking._http = httpx.Client(transport=httpx.MockTransport(lambda request: httpx.Response(200, content=drip())))
    began = time.monotonic()
    with pytest.raises(JudgeError, match="no whole reply within") as raised:
        asking.ask([])
    assert raised.value.retryable and time.monotonic() - began < HANG_S


def test_the_key_and_control_characters_of_a_reply_reach_no_message() -> None:
    with pytest.raises(JudgeError) as raised:
        _answering(f"\x1b[31m{KEY}\n\x00".encode()).ask([])
    assert KEY not in str(raised.value) and str(raised.value).isprintable()


@pytest.mark.parametrize("tokens", ["-1000000", "1e999", '"many"', "true"])
def test_a_false_number_of_tokens_does_not_change_the_budget(tokens: str) -> None:
    body = '{"choices": [{"message": {"content": "a"}}], "usage": {"prompt_tokens": %s}}' % tokens  # noqa: UP031
    asking = _answering(body.encode())
    with pytest.raises(JudgeError, match="not a chat completion"):
        asking.ask([])
    assert asking.budget.spent_in == asking.budget.spent_out == 0


# --- the key ---


def test_openai_without_a_key_is_refused_before_anything_is_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OPENAI_API_KEY")
    with pytest.raises(ConfigError, match=r"OPENAI_API_KEY is not set.*export OPENAI_API_KEY=\.\.\., or JUDGE_URL="):
        make_scorer("openai_judge", {"model": "gpt-4o"})


def test_the_key_is_in_no_log_no_message_no_revision_and_no_saved_config(
    caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    """Although the server echoes it in its errors."""
    with OpenAIServer() as server:
        scorer = made(server, concurrency=1)
        server.fail = [500, 400]
        (failure,) = score_checked(scorer, [grey(51)])
        assert isinstance(failure, Failure) and "Bearer ***" in failure.message
        entry = {"openai_judge": {"model": "judge", "address": server.url}}
        saved = dump_run(parse_run({**BASE, "rewards": entry}))
        shown = saved + scorer.spec.revision + repr(scorer) + repr(vars(scorer)) + failure.message
    assert server.url in saved and KEY not in shown
    assert caplog.records and KEY not in caplog.text


def test_the_key_is_not_told_where_a_server_lists_it_as_a_model() -> None:
    with OpenAIServer() as server:
        server.models = [f"judge-{KEY}", "other"]
        with pytest.raises(ConfigError, match=r"judge-\*\*\*, other") as raised:
            made(server, model="auto")
    assert KEY not in str(raised.value)


def test_an_address_without_its_path_is_told_what_is_missing() -> None:
    with OpenAIServer() as server, pytest.raises(ConfigError, match=r"HTTP 404.*endpoint ends with /v1"):
        made(server, address=server.url.removesuffix("/v1"))


def test_without_the_key_the_server_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OPENAI_API_KEY")
    with OpenAIServer() as server, pytest.raises(ConfigError, match="HTTP 401"):
        made(server)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({}, "model: not set"),
        ({"model": "m", "question": "good?"}, "must contain {prompt}"),
        ({"model": "m", "budget_dollars": 1.0}, "budget_dollars: given without prices; set price_in"),
        ({"model": "m", "address": "api.openai.com"}, "address: 'api.openai.com' is not the address"),
    ],
)
def test_options_that_cannot_work(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        make_scorer("openai_judge", options)
