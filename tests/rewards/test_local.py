"""In this process or on a server: the same items have the same outcomes, to the last bit."""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence

import numpy as np
import pytest

from retouch.config import ConfigError
from retouch.rewards.base import problem_of
from retouch.rewards.client.client import RewardClient
from retouch.rewards.client.config import RewardClientConfig
from retouch.rewards.protocol import RewardItem, Scorer
from retouch.rewards.scorers import make_scorer
from retouch.rewards.scorers.jpeg_size import JpegSizeReward
from retouch.rewards.scorers.ocr import OcrScorer
from retouch.rewards.scorers.preservation import PreservationReward
from retouch.rewards.scorers.seam import SeamReward
from retouch.rewards.table import LocalRewards, RewardTable
from retouch.tiny.signs import draw_sign
from retouch.types import Failure, Outcome, Score
from tests.rewards.fakes import (
    Brightness,
    Gated,
    Poisoned,
    Scripted,
    Unloadable,
    brightness,
    half_mask,
    item,
    items,
    picture,
    serving,
    values,
)


def both_ways(
    scorers: Mapping[str, Scorer], batch: Sequence[RewardItem]
) -> tuple[dict[str, list[Outcome]], dict[str, list[Outcome]]]:
    """(scored here, scored by a server in requests of 3)."""
    local = LocalRewards(scorers)
    here = local.submit(batch).result()
    local.close()
    with serving(scorers) as url, RewardClient([url], list(scorers), batch_size=3) as client:
        return here, client.score(batch)


def test_the_scorers_of_the_package(line_ocr: OcrScorer) -> None:
    """Signs read rightly and wrongly, items that lack something, pictures of several sizes."""
    signs = [draw_sign(word, (64, 128 + 16 * (i > 1)), i) for i, word in enumerate(["MOKA", "BERU", "VOLE", "TUSI"])]
    batch = [
        RewardItem(
            i, f"a sign '{s.word}'", np.asarray(s.picture), np.asarray(s.mask), np.asarray(s.ground), metadata=extra
        )
        for i, (s, extra) in enumerate(zip(signs, [{}, {"text": "BERI"}, {}, {"text": 3}], strict=True))
    ]
    batch += [item(4), item(5, prompt="'AB'"), item(6, source=picture(7), mask=half_mask())]
    here, there = both_ways({"ocr": line_ocr, "preservation": PreservationReward().make()}, batch)
    ocr, preservation = values(here["ocr"]), values(here["preservation"])
    assert (ocr[:2], ocr[3:5], preservation[4:6]) == ([1.0, 0.75], ["bad_item"] * 2, ["bad_item"] * 2)
    assert ocr == values(there["ocr"])
    assert here["preservation"] == there["preservation"]  # details and messages too


def test_poison_and_malformed_items() -> None:
    batch = [*items(3), item(3, prompt="poison"), item(4, image=np.zeros((2, 2), np.uint8)), item(5, prompt="refused")]
    here, there = both_ways({"b": Poisoned()}, batch)
    assert here == there
    assert values(here["b"]) == [*map(brightness, batch[:3]), "scorer_error", "bad_item", "bad_item"]


def test_submit_does_not_wait_and_keeps_the_order_of_calls() -> None:
    gate = Gated(gate_score=True)
    local = LocalRewards({"b": gate})
    first, second = local.submit(items(2)), local.submit(items(3))
    assert gate.scoring.wait(60) and not first.done()
    gate.open()
    assert values(second.result(60)["b"]) == [brightness(one) for one in items(3)]
    assert first.done()  # one thread, first come first served
    local.close()


def test_scorers_are_loaded_before_they_score() -> None:
    gate = Gated(gate_load=True)
    local = LocalRewards({"b": gate})
    pending = local.submit(items(1))
    assert local.wait_ready(0.05) == ["b: still loading after 0 s"]
    assert not gate.scoring.is_set()
    gate.open()
    assert local.wait_ready(60) == []
    assert values(pending.result(60)["b"]) == [brightness(item(0))]
    local.close()


def test_what_is_loaded_next_waits_for_the_scorers_of_this_process() -> None:
    """Models are built under settings of the whole process: two that load at a time get weights without data."""
    gate, table = Gated(gate_load=True), RewardTable({}, RewardClientConfig())
    table._backends["here"] = LocalRewards({"b": gate})  # type: ignore[index]
    table._backends["broken"] = LocalRewards({"b": Unloadable()})  # type: ignore[index]
    settled = threading.Thread(target=table.wait_loaded)
    settled.start()
    settled.join(0.1)
    assert settled.is_alive()
    gate.open()
    settled.join(60)
    assert not settled.is_alive()  # what could not load is told when it is asked to score
    for backend in table._backends.values():
        backend.close()


def test_a_scorer_that_cannot_load_raises() -> None:
    local = LocalRewards({"b": Unloadable()})
    with pytest.raises(RuntimeError, match="no weights"):
        local.wait_ready(60)
    local.close()


@pytest.mark.parametrize(
    ("told", "message"),
    [
        (
            "reward 'clip': path: given 'x', which cannot be loaded",
            "rewards.mine.path: given 'x', which cannot be loaded",
        ),
        ("path: given 'x'", "rewards.mine.path: given 'x'"),
        ("size: given 3", "rewards.mine: size: given 3"),  # no option of it
        ("a reward 'clip': no", "rewards.mine: a reward 'clip': no"),
    ],
)
def test_a_problem_is_named_by_the_key_of_its_reward(told: str, message: str) -> None:
    scorer = make_scorer("clip", {"path": "x"})
    assert problem_of("mine", scorer, ConfigError(told)) == message


def test_a_scorer_without_options_has_no_key_in_its_problem() -> None:
    assert problem_of("mine", Brightness(), ConfigError("path: no")) == "rewards.mine: path: no"


def test_close_ends_the_thread_and_cancels_what_has_not_begun() -> None:
    gate = Gated(gate_score=True)
    local = LocalRewards({"b": gate})
    running, waiting = local.submit(items(1)), local.submit(items(1))
    assert gate.scoring.wait(60)
    closing = threading.Thread(target=local.close)
    closing.start()
    gate.open()
    closing.join(60)
    assert running.done() and (waiting.cancelled() or waiting.done())
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("rewards")]


def test_a_probe_waits_for_no_reward_of_weight_0() -> None:
    """Of a scorer that is only logged and does not answer there are no values; the others have theirs."""
    client = RewardClientConfig(logged_wait_s=0.05)
    table = RewardTable({"seam": SeamReward(weight=0.0), "jpeg_size": JpegSizeReward()}, client)
    gate = Gated(gate_score=True)
    for name, scorer in (("seam", gate), ("jpeg_size", Brightness())):
        table._backends[table._places[name]] = LocalRewards({name: scorer})
    found = table.probe()
    assert found["seam"] == {} and len(found["jpeg_size"]["this process"]) == 2
    assert list(table.golden) == ["jpeg_size"]
    gate.open()
    table.close()


def test_a_scorer_that_ran_out_of_memory_gets_no_larger_batch_again() -> None:
    """On a training GPU each such error is a failed forward and an emptied cache."""
    errors: list[int] = []

    def little(batch: Sequence[RewardItem]) -> list[Outcome]:
        if len(batch) > 4:
            errors.append(len(batch))
            raise MemoryError
        return [Score(brightness(one)) for one in batch]

    local = LocalRewards({"b": Scripted(little)})
    batch = items(32)
    for _ in range(5):
        assert values(local.submit(batch).result()["b"]) == [brightness(one) for one in batch]
    local.close()
    assert sorted(errors, reverse=True) == [32, 16, 16, 8, 8, 8, 8]  # of the first batch


def test_an_empty_batch() -> None:
    local = LocalRewards({"a": Brightness(), "b": Brightness()})
    assert local.submit([]).result() == {"a": [], "b": []}
    local.close()


def test_failures_are_typed_on_both_sides() -> None:
    here, there = both_ways({"b": Brightness(needs=("mask",))}, items(1))
    for (outcome,) in (here["b"], there["b"]):
        assert outcome == Failure("bad_item", "brightness needs mask")
