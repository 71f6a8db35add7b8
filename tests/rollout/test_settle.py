"""Rewards settle in order; an outage is waited out or ends the run; a failure rate over the limit ends it."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
from PIL import Image

from retouch.rewards.client.config import RewardClientConfig
from retouch.rewards.protocol import RewardItem
from retouch.rewards.scorers.preservation import PreservationReward
from retouch.rewards.scorers.seam import SeamReward
from retouch.rewards.table import LocalRewards, RewardTable, Scores, of_all
from retouch.training import scoring as scorer
from retouch.training.scoring import (
    FailureRateExceeded,
    RewardOutage,
    Tally,
    item_of,
    refuse_failures,
    settle,
    tally_of,
)
from retouch.types import Example, Failure, Score
from tests.fuzz.inputs import bounded
from tests.rewards.fakes import (
    HANG_S,
    Answer,
    Asked,
    Brightness,
    FakeServer,
    closed_port,
    free_port,
    honest,
    items,
    reply,
)

Script = Callable[[Asked, int], Answer]


@pytest.fixture(autouse=True)
def _short_pause(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scorer, "_PAUSE_S", 0.01)


def limits(**changes: float) -> RewardClientConfig:
    """Requests of at most .3 s, so that an outage shows soon; a patient wait unless a test says otherwise."""
    return RewardClientConfig(**{"timeout_s": 0.3, "outage_wait_s": 60.0, "max_failure_rate": 1.0, **changes})


@contextmanager
def table(*urls: str, **changes: float) -> Iterator[RewardTable]:
    """A table with one reward, `r`."""
    made = RewardTable({"r": PreservationReward(url=list(urls))}, limits(**changes))
    made.start()
    try:
        yield made
    finally:
        made.close()


def settled(made: RewardTable, *batches: Sequence[RewardItem], **changes: float) -> list[Scores]:
    return settle(made, [made.submit(batch) for batch in batches], limits(**changes))


def by_prompt(asked: Asked) -> list[int]:
    """The numbers of the items asked for, as `items` numbers them."""
    return [int(one["prompt"].split()[1]) for one in asked.manifest["items"]]


def scoring_numbers(asked: Asked, number: int) -> Answer:
    numbers = dict(zip(asked.ids, by_prompt(asked), strict=True))
    return Answer(reply(asked.ids, lambda i: float(numbers[i])))


def failing(code: dict[int, bool]) -> Script:
    """Number of an item -> its failure, by whether it may be tried again; the others score their number. Only in the
    first request."""

    def script(asked: Asked, number: int) -> Answer:
        sound: dict[str, Any] = scoring_numbers(asked, number).body
        for one, which in zip(sound["items"], by_prompt(asked), strict=True):
            if which in code and number == 0:
                del one["scores"]
                one["errors"] = {"r": {"code": "scorer_error", "message": "no", "retryable": code[which]}}
        return Answer(sound)

    return script


# --- order ---


def test_batches_and_items_keep_their_order_whichever_is_done_first() -> None:
    def script(asked: Asked, number: int) -> Answer:
        time.sleep(0.1 * (0 in by_prompt(asked)))
        return scoring_numbers(asked, number)

    six = items(6)
    with FakeServer(script) as server, table(server.url, timeout_s=30) as made:
        first, second = settled(made, six[:4], six[4:])
    assert first.values("r") == [0.0, 1.0, 2.0, 3.0] and second.values("r") == [4.0, 5.0]


# --- outages ---


def test_servers_that_stay_away_are_an_outage_in_bounded_time() -> None:
    dead = f"http://127.0.0.1:{closed_port()}"
    with table(dead) as made:
        started = time.monotonic()
        with pytest.raises(
            RewardOutage, match=r"reward_client\.outage_wait_s = 0\.5\): unavailable x 2 .*127\.0\.0\.1"
        ):
            settled(made, items(2), outage_wait_s=0.5)
    assert time.monotonic() - started < HANG_S  # the request, the wait, one more request: about a second


def test_no_wait_at_all_is_an_outage_at_the_first_sign() -> None:
    with FakeServer(lambda asked, number: Answer(b"", 503)) as server, table(server.url) as made:
        with pytest.raises(RewardOutage, match=r"outage_wait_s = 0\)"):
            settled(made, items(1), outage_wait_s=0.0)
        assert all(asked.manifest["request_id"] == server.asked[0].manifest["request_id"] for asked in server.asked)


def test_a_server_that_comes_back_is_used() -> None:
    """The first request fails to the end of its time; the server answers from then on."""
    requests: list[str] = []

    def script(asked: Asked, number: int) -> Answer:
        requests.append(asked.manifest["request_id"])
        return Answer(b"", 503) if asked.manifest["request_id"] == requests[0] else scoring_numbers(asked, number)

    with FakeServer(script) as server, table(server.url) as made:
        (scores,) = settled(made, items(3))
    assert scores.values("r") == [0.0, 1.0, 2.0] and scores.failures() == []


def test_a_server_that_starts_late_is_used() -> None:
    port = free_port()
    with table(f"http://127.0.0.1:{port}") as made:
        pending = made.submit(items(2))
        assert len(pending.result().failures()) == 2  # the outage began
        with FakeServer(honest, port=port):
            (scores,) = settle(made, [pending], limits())
    assert scores.values("r") == [0.0, 1.0]


def test_one_server_of_two_is_enough_to_go_on() -> None:
    dead = f"http://127.0.0.1:{closed_port()}"
    with FakeServer(scoring_numbers) as server, table(dead, server.url, timeout_s=30) as made:
        (scores,) = settled(made, items(3), outage_wait_s=0.0)
    assert scores.values("r") == [0.0, 1.0, 2.0]


def test_only_rows_that_were_away_are_asked_again() -> None:
    """Scores that came stay; a failure for good is not asked again."""
    with FakeServer(failing({1: True, 2: False})) as server, table(server.url, timeout_s=30) as made:
        (scores,) = settled(made, items(4))
        assert [by_prompt(asked) for asked in server.asked] == [[0, 1, 2, 3], [1]]
    assert scores.values("r") == [0.0, 1.0, None, 3.0]


def test_a_reward_that_scored_an_image_is_not_asked_again_for_another_reward() -> None:
    """It may have a price; one of this process too, and one on the server that failed the other."""
    away = {"r": 1, "paid": 2}

    def script(asked: Asked, number: int) -> Answer:
        names = asked.manifest["rewards"]
        sound = {**reply(asked.ids), "scorers": {name: {"revision": "1"} for name in names}}
        for one, which in zip(sound["items"], by_prompt(asked), strict=True):
            lost = [name for name in names if number == 0 and away[name] == which]
            one["scores"] = {name: {"value": float(which)} for name in names if name not in lost}
            one["errors"] = {name: {"code": "unavailable", "message": "no", "retryable": True} for name in lost}
        return Answer(sound)

    with FakeServer(script, info={"scorers": {"r": {"revision": "1"}, "paid": {"revision": "1"}}}) as server:
        entries = {name: PreservationReward(url=[server.url]) for name in away} | {"here": SeamReward()}
        made = RewardTable(entries, limits(timeout_s=30))
        made.start()
        local = Brightness()
        made._backends[made._places["here"]] = LocalRewards({"here": local})
        (scores,) = settled(made, items(4))
        made.close()
        first, *again = [(asked.manifest["rewards"], by_prompt(asked)) for asked in server.asked]
        assert first == (["r", "paid"], [0, 1, 2, 3])
        assert sorted(again) == [(["paid"], [2]), (["r"], [1])]  # sent beside each other
    assert scores.values("r") == scores.values("paid") == [0.0, 1.0, 2.0, 3.0] and len(local.seen) == 4


def test_a_reward_and_its_gate_need_not_succeed_in_the_same_attempt() -> None:
    """Only the gate fails in the first attempt, only the reward in every later one: the first values of both stay."""

    def script(asked: Asked, number: int) -> Answer:
        sound, away = reply(asked.ids, lambda _: 0.8), "gate" if number == 0 else "r"
        for one in sound["items"]:
            one["scores"]["gate"] = {"value": 0.25 if number else 0.0}
            del one["scores"][away]
            one["errors"] = {away: {"code": "unavailable", "message": "no", "retryable": True}}
        return Answer({**sound, "scorers": {name: {"revision": "1"} for name in ("r", "gate")}})

    with FakeServer(script, info={"scorers": {"r": {"revision": "1"}, "gate": {"revision": "1"}}}) as server:
        entries = {
            "r": PreservationReward(url=[server.url], gated_by="gate"),
            "gate": PreservationReward(url=[server.url], weight=0.0),
        }
        made = RewardTable(entries, limits(timeout_s=30))
        made.start()
        (scores,) = settled(made, items(2), outage_wait_s=5.0)
        made.close()
    assert scores.combined() == [0.8 * 0.25] * 2 and scores.failures() == [] and len(server.asked) == 2


def failing_always(asked: Asked, number: int) -> Answer:
    """Item 1 fails in every attempt, with a server that scores the others."""
    return failing({1: True})(asked, 0)


def test_an_image_that_a_sound_server_never_scores_is_lost_and_no_outage() -> None:
    """A restart would sample it again: the run would never pass it."""
    with FakeServer(failing_always) as server, table(server.url, timeout_s=30) as made:
        (scores,) = settled(made, items(4), outage_wait_s=0.3)
        assert len(server.asked) > 2
        with pytest.raises(RewardOutage):  # alone, it may be the server's fault
            settled(made, items(4)[1:2], outage_wait_s=0.3)
    assert scores.values("r") == [0.0, None, 2.0, 3.0]
    assert [(failure.code, failure.retryable) for _, failure in scores.failures()] == [("scorer_error", False)]


def test_an_image_of_a_server_that_goes_away_is_an_outage() -> None:
    """It has scored the others, and failed the image once more before it went."""
    info: dict[str, Any] = {"scorers": {"r": {}}}

    def script(asked: Asked, number: int) -> Answer:
        if number:
            info["scorers"].clear()
        return failing_always(asked, number)

    with FakeServer(script, info=info) as server, table(server.url, timeout_s=30) as made:
        with pytest.raises(RewardOutage):
            settled(made, items(4), outage_wait_s=0.3)
        assert len(server.asked) > 1


@pytest.mark.parametrize("comes_back", [True, False])
def test_a_request_to_stop_ends_the_wait_after_one_more_attempt(comes_back: bool) -> None:
    """A reward that failed once does not cost the rollouts of a run that is about to stop."""
    requests: set[str] = set()

    def script(asked: Asked, number: int) -> Answer:
        requests.add(asked.manifest["request_id"])
        return failing({0: True})(asked, number) if comes_back else Answer(b"", 503)

    with FakeServer(script) as server, table(server.url, timeout_s=60 if comes_back else 2) as made:
        pending = [made.submit(items(2))]
        if comes_back:
            (scores,) = settle(made, pending, limits(), stop_heard=lambda: True)
            assert scores.values("r") == [0.0, 1.0]
        else:
            with bounded(30), pytest.raises(RewardOutage, match="asked to stop while rewards were unavailable"):
                settle(made, pending, limits(), stop_heard=lambda: True)
    assert len(requests) == 2


# --- failure rates ---


@pytest.mark.parametrize(("limit", "stops"), [(0.0, True), (0.24, True), (0.25, False), (1.0, False)])
def test_more_failures_than_the_limit_stop_the_run(limit: float, stops: bool) -> None:
    """Two of eight, over two batches."""
    eight = items(8)
    script = failing({1: False, 3: False})
    with FakeServer(script) as server, table(server.url, timeout_s=30, batch_size=4) as made:
        pending = [made.submit(eight[:4])]
        pending[0].result()  # the request that fails
        pending.append(made.submit(eight[4:]))
        if stops:
            with pytest.raises(FailureRateExceeded, match=r"2 of 8 images have no reward.*scorer_error x 2 \(no\)"):
                refuse_failures([tally_of(made, settle(made, pending, limits()))], limits(max_failure_rate=limit))
        else:
            first, second = settle(made, pending, limits())
            refuse_failures([tally_of(made, [first, second])], limits(max_failure_rate=limit))
            assert first.combined() == [0.0, None, 2.0, None] and second.combined() == [4.0, 5.0, 6.0, 7.0]


def test_one_dead_reward_of_many_stops_the_run() -> None:
    """Of five rewards a fifth failed, and no image can be trained on."""
    alive, dead = [Score(1.0)] * 4, [Failure("scorer_error", "no")] * 4
    scores = Scores(
        {"a": alive, "b": alive, "c": alive, "d": alive, "dead": dead}, dict.fromkeys("abcd", 1.0) | {"dead": 1.0}
    )
    made = RewardTable({}, limits())
    with pytest.raises(FailureRateExceeded, match=r"4 of 4 images have no reward.*scorer_error x 4 \(no\)"):
        refuse_failures([tally_of(made, settle(made, [scores], limits()))], limits(max_failure_rate=0.2))


def tally(asked: int, lost: int, before: tuple[int, int] = (0, 0)) -> Tally:
    return Tally(asked, lost, [Failure("bad_item", "no")] * lost, before)


def test_the_rate_is_that_of_all_processes_together() -> None:
    """One image of two is half of a process, and a sixteenth of eight of them; an outage is one on all."""
    fine = [tally(2, 0)] * 7
    refuse_failures([tally(2, 1), *fine], limits(max_failure_rate=1 / 16))
    with pytest.raises(FailureRateExceeded, match=r"2 of 16 images have no reward.* 0\.1: bad_item x 2 \(no\)"):
        refuse_failures([tally(2, 1), *fine[1:], tally(2, 1)], limits(max_failure_rate=0.1))
    with pytest.raises(FailureRateExceeded, match="16 of 16 images"):
        refuse_failures([tally(2, 2)] * 8, limits(max_failure_rate=0.2))
    with pytest.raises(FailureRateExceeded, match="1 of 2 images"):
        refuse_failures([tally(2, 1)], limits(max_failure_rate=0.2))


def test_the_rate_of_the_run_is_that_of_all_processes_together() -> None:
    """Of 200 images so far, 21 of them lost on one of two."""
    run = [tally(10, 1, (90, 20)), tally(10, 0, (90, 0))]
    refuse_failures(run, limits(max_run_failure_rate=0.105))
    with pytest.raises(
        FailureRateExceeded, match=r"21 of the 200 images of the run .*max_run_failure_rate 0\.1: bad_item"
    ):
        refuse_failures(run, limits(max_run_failure_rate=0.1))
    refuse_failures([tally(10, 1, (89, 20)), tally(10, 0, (90, 0))], limits(max_run_failure_rate=0.1))  # 199 say little


def test_a_reward_of_weight_0_is_no_loss() -> None:
    no = Failure("bad_item", "no")
    first = Scores({"r": [Score(1.0), no], "logged": [no, no]}, {"r": 1.0, "logged": 0.0})
    second = Scores({"r": [no, no], "logged": [Score(1.0), no]}, {"r": 1.0, "logged": 0.0})
    made = RewardTable({}, limits())
    made.count(30, 3)
    assert tally_of(made, [first, second]) == Tally(4, 3, [no] * 3, (30, 3))
    assert tally_of(made, []) == Tally(0, 0, [], (30, 3))


def test_counts_are_of_all_processes_however_many_go_on() -> None:
    """Three end; of what they counted, one, two or five have even shares, which fail alike."""
    ended = [RewardTable({}, limits()) for _ in range(3)]
    for made, asked, failed in zip(ended, (7, 6, 10), (1, 0, 6), strict=True):
        made.asked, made.failed = asked, failed
    ended[0].golden = {"r": [0.5, 0.25]}  # the first one probes
    state = json.loads(json.dumps(of_all([made.state() for made in ended])))
    assert state == {"asked": 23, "failed": 7, "golden": {"r": [0.5, 0.25]}}
    for processes in (1, 2, 5):
        begun = [RewardTable({}, limits()) for _ in range(processes)]
        for process, made in enumerate(begun):
            made.restore(state, process, processes)
            assert abs(made.asked - 23 / processes) < 1 and abs(made.failed - 7 / processes) < 1
        assert of_all([made.state() for made in begun]) == state


# --- a reward of weight 0 ---


def test_a_reward_of_weight_0_stops_nothing(caplog: pytest.LogCaptureFixture) -> None:
    """Its server is away for good, and its failures are half of all; the other comes back after an outage."""
    dead = f"http://127.0.0.1:{closed_port()}"
    entries = {"r": PreservationReward(), "logged": PreservationReward(weight=0.0, url=dead)}
    with FakeServer(failing({1: True})) as server:
        entries["r"] = PreservationReward(url=server.url)
        made = RewardTable(entries, limits(timeout_s=1.0))
        made.start()
        try:
            (scores,) = settled(made, items(3), max_failure_rate=0.0, outage_wait_s=5.0)
        finally:
            made.close()
    assert scores.combined() == scores.values("r") == [0.0, 1.0, 2.0]
    assert scores.values("logged") == [None] * 3
    assert "3 failed values of rewards of weight 0: unavailable x 3" in caplog.text


# --- what scorers see ---


def test_scorers_see_everything_but_the_target() -> None:
    def picture(level: int) -> Image.Image:
        return Image.new("RGB", (6, 4), (level, 0, 0))

    mask = Image.new("L", (6, 4), 255)
    full = Example(7, "p", picture(1), mask, target=picture(2), reference=picture(3), metadata={"text": "t"})
    images = np.arange(2 * 4 * 6 * 3, dtype=np.uint8).reshape(2, 4, 6, 3)
    first, second = (item_of(one, images[i], i) for i, one in enumerate([full, Example(8, "q")]))
    assert (first.id, first.prompt, first.group, first.metadata) == (0, "p", 7, {"text": "t"})
    for found, expected in ((first.image, images[0]), (first.source, picture(1)), (first.reference, picture(3))):
        assert np.array_equal(np.asarray(found), np.asarray(expected))
    assert np.array_equal(np.asarray(first.mask), np.asarray(mask))
    assert not any(np.array_equal(np.asarray(value), np.asarray(picture(2))) for value in vars(first).values())
    assert (second.id, second.group, second.source, second.mask, second.reference) == (1, 8, None, None, None)
