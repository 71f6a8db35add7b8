"""The table of rewards: names, weights and pictures reach the right place, and outcomes come back in order."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from retouch.rewards.base import RewardEntry
from retouch.rewards.client.config import RewardClientConfig
from retouch.rewards.protocol import RewardItem, Scorer
from retouch.rewards.scorers.ocr import OcrReward
from retouch.rewards.scorers.preservation import PreservationReward
from retouch.rewards.table import RewardTable, Scores
from retouch.types import Failure, Score
from tests.rewards.fakes import (
    Brightness,
    FakeServer,
    Gated,
    Scripted,
    Unloadable,
    brightness,
    closed_port,
    half_mask,
    honest,
    item,
    items,
    make_with,
    picture,
    serving,
    values,
)

CLIENT = RewardClientConfig(timeout_s=60.0)
Table = Callable[..., RewardTable]


@pytest.fixture
def table(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Any:
    """A started table whose in-process scorers are those given by scorer name; closed when the test ends."""
    made: list[RewardTable] = []

    def make(
        entries: Mapping[str, RewardEntry], client: RewardClientConfig = CLIENT, **scorers: Scorer | type[Scorer]
    ) -> RewardTable:
        make_with(monkeypatch, lambda name, options: scorers[name])
        made.append(RewardTable(entries, client, tmp_path))
        made[-1].start()
        return made[-1]

    yield make
    for one in made:
        one.close()


def scored(table: RewardTable, batch: Sequence[RewardItem]) -> Scores:
    return table.submit(batch).result()


def constant(value: float) -> Scripted:
    return Scripted(lambda batch: [Score(value)] * len(batch))


# --- one score from several ---


def test_the_combined_score_is_the_weighted_sum(table: Table) -> None:
    entries = {"read": OcrReward(weight=0.7), "kept": PreservationReward(weight=-2.0)}
    scores = scored(table(entries, ocr=Brightness(), preservation=constant(0.25)), items(3))
    assert scores.weights == {"read": 0.7, "kept": -2.0}
    assert scores.combined() == pytest.approx([0.7 * brightness(one) - 2.0 * 0.25 for one in items(3)])


def test_one_failure_of_two_rewards_fails_the_item_not_its_value(table: Table) -> None:
    """The other reward keeps its value in the breakdown; there is no half of a combined score."""
    fails_second = Scripted(lambda batch: [Failure("bad_item", "no") if one.id == 1 else Score(1.0) for one in batch])
    entries = {"read": OcrReward(weight=0.5), "kept": PreservationReward(weight=0.5)}
    scores = scored(table(entries, ocr=constant(0.5), preservation=fails_second), items(3))
    assert scores.combined() == [0.75, None, 0.75]
    assert scores.values("read") == [0.5, 0.5, 0.5] and scores.values("kept") == [1.0, None, 1.0]
    assert scores.failures() == [("kept", Failure("bad_item", "no"))]


def test_a_weight_of_0_logs_a_reward_and_its_failures_and_no_more(table: Table) -> None:
    entries = {"read": OcrReward(weight=1.0), "kept": PreservationReward(weight=0.0)}
    watched = Scripted(lambda batch: [Score(9.0), Failure("bad_item", "no")])
    scores = scored(table(entries, ocr=constant(0.5), preservation=watched), items(2))
    assert scores.combined() == [0.5, 0.5]
    assert scores.values("kept") == [9.0, None] and scores.failures() == [("kept", Failure("bad_item", "no"))]


def test_outcomes_come_back_in_the_order_of_the_items(table: Table) -> None:
    """In process and from a server in requests of two, with ids that are neither sorted nor different."""
    batch = [item(i, id=number) for i, number in enumerate([5, 3, 9, 3, 0])]
    with serving({"there": Brightness()}) as url:
        entries = {"here": OcrReward(paste_back=False), "there": PreservationReward(url=url)}
        scores = scored(table(entries, CLIENT.model_copy(update={"batch_size": 2}), ocr=Brightness()), batch)
    expected = [brightness(one) for one in batch]
    assert scores.values("here") == expected == scores.values("there")
    assert list(scores.outcomes) == ["here", "there"]


def test_submit_does_not_wait_for_scores(table: Table) -> None:
    gate = Gated(gate_score=True)
    pending = table({"ocr": OcrReward()}, ocr=gate).submit(items(2))
    assert gate.scoring.wait(60)
    gate.open()
    assert values(pending.result().outcomes["ocr"]) == [brightness(one) for one in items(2)]


# --- which picture ---


def test_each_reward_sees_the_picture_it_asks_for(table: Table) -> None:
    """On one server: pasted back for the one, as it was generated for the other."""
    pasted, raw = Brightness(), Brightness()
    batch = [item(i, source=picture(50 + i), mask=half_mask()) for i in range(2)]
    with serving({"read": pasted, "kept": raw}) as url:
        entries = {"read": OcrReward(url=url), "kept": PreservationReward(url=url)}
        scored(table(entries), batch)
    for given, on_paste, on_raw in zip(batch, pasted.seen, raw.seen, strict=True):
        assert np.array_equal(on_raw.image, given.image)
        assert np.array_equal(on_paste.image[:, :2], given.image[:, :2])
        assert np.array_equal(on_paste.image[:, 2:], given.source[:, 2:])  # type: ignore[index]


@pytest.mark.parametrize("paste_back", [True, False])
def test_paste_back_is_what_the_entry_says(table: Table, paste_back: bool) -> None:
    scorer = Brightness()
    one = item(0, source=picture(50), mask=half_mask())
    scored(table({"ocr": OcrReward(paste_back=paste_back)}, ocr=scorer), [one])
    assert np.array_equal(scorer.seen[0].image, one.image) is not paste_back


# --- which place ---


def test_rewards_of_one_server_share_a_request(table: Table) -> None:
    """So that their pictures travel once."""
    with FakeServer(honest) as server:
        entries = {"a": OcrReward(url=server.url), "b": OcrReward(url=[server.url]), "c": OcrReward(url=server.url)}
        scored(table(entries, CLIENT.model_copy(update={"batch_size": 2})), items(3))
        assert [asked.manifest["rewards"] for asked in server.asked] == [["a", "b", "c"]] * 2


def test_several_servers_are_asked_in_turn(table: Table) -> None:
    with FakeServer(honest) as first, FakeServer(honest) as second:
        entries = {"r": OcrReward(url=[first.url, second.url])}
        scores = scored(table(entries, CLIENT.model_copy(update={"batch_size": 1})), items(4))
        assert scores.values("r") == [0.0] * 4
        assert (len(first.asked), len(second.asked)) == (2, 2)


def test_the_servers_of_an_endpoints_file(table: Table, tmp_path: Path) -> None:
    with FakeServer(honest) as server:
        file = tmp_path / "endpoints.json"
        found = [{"url": server.url, "rewards": ["r"]}, {"url": "http://127.0.0.1:9", "rewards": ["s"]}]
        file.write_text(json.dumps({"endpoints": found}))
        assert scored(table({"r": OcrReward(url=str(file))}), items(1)).values("r") == [0.0]


def test_a_scorer_with_two_sets_of_options(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[tuple[str, dict[str, Any]]] = []

    def make(name: str, options: dict[str, Any]) -> Scorer:
        made.append((name, options))
        return constant(len(made))

    make_with(monkeypatch, make)
    entries = {"line": OcrReward(detect=False), "found": OcrReward(crop_margin=0.1, weight=3.0)}
    one = RewardTable(entries, CLIENT)
    one.start()
    assert scored(one, items(1)).combined() == [1.0 + 3.0 * 2.0]
    one.close()
    assert made == [("ocr", entry.scorer_options()) for entry in entries.values()]
    assert made[0][1] == {
        "score": "ned", "case_sensitive": True, "crop_margin": 0.0, "detect": False, "threads": 0,
        "engine": "rapidocr", "language": None,
    }  # fmt: skip


def test_the_token_of_the_environment_is_sent(table: Table, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RETOUCH_REWARD_TOKEN", "secret")
    with serving({"r": Brightness()}, token="secret") as url:
        assert scored(table({"r": OcrReward(url=url)}), items(1)).values("r") == [brightness(item(0))]


# --- ready ---


def test_ready_when_every_place_is(table: Table) -> None:
    with serving({"there": Brightness()}) as url:
        entries = {"here": OcrReward(), "there": PreservationReward(url=url)}
        assert table(entries, ocr=Brightness()).wait_ready(60) == []


def test_what_is_missing_is_said_for_every_place(table: Table) -> None:
    gate = Gated(gate_load=True)
    dead = f"http://127.0.0.1:{closed_port()}"
    loading, away = table({"here": OcrReward(), "there": OcrReward(url=dead)}, ocr=gate).wait_ready(0.2)
    gate.open()
    assert loading == "here: still loading after 0 s" and away.startswith(f"{dead}: ")


def test_a_reward_of_weight_0_is_not_ready_and_nobody_minds(table: Table, caplog: pytest.LogCaptureFixture) -> None:
    """At the start its server is waited for like any other, and the wait ends in a warning; later it is not asked."""
    dead = f"http://127.0.0.1:{closed_port()}"
    made = table({"here": OcrReward(), "there": PreservationReward(url=dead, weight=0.0)}, ocr=Brightness())
    assert made.wait_ready(60, every_server=False) == [] and "not ready" not in caplog.text
    assert made.wait_ready(0.2) == []
    assert f"rewards of weight 0, which are only logged, are not ready: {dead}: " in caplog.text


def test_a_scorer_that_cannot_load_ends_the_wait(table: Table) -> None:
    with pytest.raises(RuntimeError, match="no weights"):
        table({"ocr": OcrReward()}, ocr=Unloadable()).wait_ready(60)


def test_close_twice(table: Table) -> None:
    one = table({"ocr": OcrReward()}, ocr=Brightness())
    one.close()
    one.close()
