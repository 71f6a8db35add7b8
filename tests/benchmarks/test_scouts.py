"""The experiment with scouts: what it chooses, its committed runs, and the page, which says that it failed."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

REPOSITORY = Path(__file__).parents[2]

sys.path.insert(0, str(REPOSITORY / "benchmarks"))

import inputs  # noqa: E402
import scouts  # noqa: E402

from retouch.config import RunConfig, load_run  # noqa: E402
from retouch.data.sampler import Slot, rank_slots  # noqa: E402
from retouch.training import experience  # noqa: E402

ROWS: list[dict[str, Any]] = json.loads((REPOSITORY / "benchmarks/results/scouts.json").read_text(encoding="utf-8"))[
    "rows"
]
COMPARED = scouts.compared_rows(ROWS)
NED = {(row["arm"], row["seed"]): row["held_out"]["last"]["ocr.ned"] for row in COMPARED}
BEST = "scouts 16 x 2, 9 groups"


class Scored:
    """Stands in for the scores of a batch."""

    def __init__(self, values: list[float | None]) -> None:
        self.values = values

    def combined(self) -> list[float | None]:
        return self.values


def sampled(session: Any, algorithm: Any, examples: Any, policy: Any) -> Any:
    """Samples whose reward is best at index 1, worst at index 2, and the solver steps as what was recorded of them."""
    rollout = session.run.config.rollout
    slots = experience.rank_slots(list(examples), rollout.group_size, 0, 1)
    values = [{1: 2.0, 2: -1.0}.get(slot.index, 0.5) for slot in slots]
    session.run.costs.images += len(slots)
    return slots, [rollout.num_steps] * len(slots), [Scored(values)]


@pytest.fixture
def session(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Of a run with groups of two samples in four steps, whose sampling is `sampled`."""
    monkeypatch.setattr(experience, "sample_and_score", sampled)
    config: RunConfig = load_run(scouts.FILE, ["rollout.group_size=2"])
    return SimpleNamespace(run=SimpleNamespace(config=config, costs=SimpleNamespace(images=0)))


def test_scouts_choose_the_extremes_and_sample_them_in_full(session: Any) -> None:
    with scouts.choosing(4, 2):
        slots, recorded, _ = experience.sample_and_score(session, None, [7, 3], None)  # type: ignore[arg-type]
    assert slots == [Slot(7, 1), Slot(7, 2), Slot(3, 1), Slot(3, 2)]
    assert recorded == [4] * 4
    assert session.run.config.rollout.num_steps == 4 and session.run.costs.images == 12
    assert experience.sample_and_score is sampled and experience.rank_slots is rank_slots


def test_down_sampling_keeps_the_extremes_of_full_samples(session: Any) -> None:
    with scouts.choosing(4, None):
        slots, recorded, _ = experience.sample_and_score(session, None, [7], None)  # type: ignore[arg-type]
    assert [slot.padding for slot in slots] == [True, False, False, True]
    assert recorded == [4] * 4


def test_extremes_are_of_each_example() -> None:
    assert scouts.extremes([0.1, 0.9, 0.5, 0.4, 3.0, 1.0, 2.0, 4.0], 4, 2) == [0, 1, 5, 7]
    assert scouts.extremes([0.1, 0.9, 0.5, 0.4], 4, 4) == [0, 1, 2, 3]
    assert scouts.extremes([0.1, 0.9, 0.5, 0.4], 4, 3) == [0, 1, 2]


def test_correlations_are_within_examples() -> None:
    assert scouts.correlation([1, 2, 3, 30, 20, 10], [5, 6, 7, 1, 2, 3], 3) == pytest.approx(0.0)
    assert scouts.correlation([1, 2, 3, 0, 0, 0], [5, 6, 7, 1, 2, 3], 3) == pytest.approx(1.0)


def test_the_runs_are_of_the_run_file_and_base_in_the_tree() -> None:
    for row in ROWS:
        assert row["inputs"] == inputs.inputs(scouts.FILE, overrides=[scouts.KL])
    for arm in (scouts.PLAIN, BEST):
        assert [seed for name, seed in NED if name == arm] == [0, 1, 2]
    assert [row["seed"] for row in ROWS if row["arm"] == scouts.RANKS] == [0, 1, 2]


def test_scouts_and_plain_nft_take_equal_forwards() -> None:
    plain = {row["seed"]: row["forwards"] for row in COMPARED if row["arm"] == scouts.PLAIN}
    for row in COMPARED:
        share = row["forwards"] / plain[row["seed"]]
        assert share > 1.2 if row["arm"].startswith("free") else 0.98 <= share <= 1.03


def test_scouts_missed_the_criterion_and_the_page_has_the_numbers() -> None:
    """At equal forwards +.03 NED over plain NFT on every seed would have made them an option of the package."""
    page = " ".join((REPOSITORY / "docs/measured.md").read_text(encoding="utf-8").split())
    over = [f"{NED[BEST, seed] - NED[scouts.PLAIN, seed]:+.3f}".replace("0.", ".", 1) for seed in range(3)]
    assert "the best of three variants differed by {}, {} and {}".format(*over) in page
    ranks = scouts.ranks_table(ROWS).splitlines()
    one, two = (f"{line.split(' | ')[2]}".lstrip("0") for line in ranks[2:4])
    assert f"correlate with those of full ones by {one}, of two steps by {two}" in page
    for arm, seed in NED:
        assert NED[arm, seed] < NED[scouts.PLAIN, seed] + 0.03
    for arm in ("down-sampling 16", "free 16"):  # within the noise of a pair of runs, .02
        assert abs(NED[arm, 0] - NED[scouts.PLAIN, 0]) < 0.022
