"""A reward that compares the samples of a group gets whole groups, without padding and without images of no numbers,
on any number of processes."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from retouch.rewards.client.config import RewardClientConfig
from retouch.rewards.protocol import CheckedScorer, RewardItem, ScorerSpec
from retouch.rewards.scorers.jpeg_size import JpegSizeReward
from retouch.rewards.scorers.pairwise import PairwiseReward
from retouch.rewards.table import RewardTable
from retouch.training import experience
from retouch.training.build import Run, build
from retouch.training.experience import gathered, items_by_row, sample_groups
from retouch.training.scoring import settle
from retouch.types import Failure, Outcome, Score
from tests.rewards.fakes import brightness, item

from .runs import Config, of_kind, train

pytestmark = pytest.mark.usefixtures("shallow")


class Brightest:
    """The share of the other samples of its group that are darker; fails without another one."""

    compares_group = True

    def __init__(self, *raises: int) -> None:
        self.spec = ScorerSpec("pairwise", (0.0, 1.0), frozenset(), "test", "-")
        self.raises = raises
        self.seen: list[list[RewardItem]] = []

    def load(self, device: str) -> None: ...

    def score(self, items: Sequence[RewardItem]) -> list[Outcome]:
        self.seen.append(list(items))
        if any(one.group in self.raises for one in items):
            raise RuntimeError("no")
        return [self._of(one, [other for other in items if other.group == one.group]) for one in items]

    def _of(self, one: RewardItem, group: list[RewardItem]) -> Outcome:
        if len(group) < 2:
            return Failure("bad_item", "alone")
        return Score(sum(float(one.image.mean()) > float(other.image.mean()) for other in group) / (len(group) - 1))


@pytest.fixture
def scorer(monkeypatch: pytest.MonkeyPatch) -> Brightest:
    made = Brightest()
    monkeypatch.setattr(PairwiseReward, "make", lambda entry: made)
    return made


PAIRWISE: dict[str, Any] = {"pairwise": {"model": "judge", "address": "http://127.0.0.1:9/v1", "paste_back": False}}


@contextmanager
def running(config: Any) -> Iterator[Run]:
    run = build(config)
    run.rewards.start()
    try:
        yield run
    finally:
        run.close()


def scored_on(run: Run, processes: int, examples: list[int]) -> dict[tuple[int, int], float]:
    """(example, index) -> value, as that many processes score samples of these examples, one after the other."""
    values: dict[tuple[int, int], float] = {}
    engine = run.engine
    for rank in range(processes):
        alone = SimpleNamespace(
            rank=rank, world_size=processes, device=engine.device, gather_list=list, gather=lambda value: value
        )
        run.engine = alone  # type: ignore[assignment]
        session: Any = SimpleNamespace(run=run, progress=SimpleNamespace(epoch=0), check_stop=lambda: None)
        slots, _, pending = sample_groups(session, run.config.algorithm, examples, None)  # type: ignore[arg-type]
        scores = settle(run.rewards, pending, run.config.reward_client)
        rewards = gathered(alone, run.rewards, slots, scores)  # type: ignore[arg-type]
        items = items_by_row(rewards.padding, scores)
        for row, slot in enumerate(slots):
            assert bool(rewards.padding[row]) == slot.padding
            assert bool(rewards.usable[row]) != slot.padding
            assert (items[row] is None) == slot.padding
            if not slot.padding:
                assert (slot.example, slot.index) not in values
                values[slot.example, slot.index] = float(rewards.values[row, 0])
    run.engine = engine
    return values


@pytest.mark.parametrize("group_size", [2, pytest.param(3, marks=pytest.mark.full)])
def test_resampled_groups_have_the_values_of_one_process(group_size: int, config: Config, scorer: Brightest) -> None:
    """Any number of missing groups on any number of processes; each process samples as many images."""
    options = {"rollout__group_size": group_size, "rollout__batch_size_per_device": 2 * group_size}
    with running(config(rewards=PAIRWISE, rollout__global_groups_per_batch=4, **options)) as run:
        expected = scored_on(run, 1, [0, 1, 2, 3, 4])
        assert len(expected) == 5 * group_size and len(set(expected.values())) == group_size
        for missing, processes in ((1, 2), (1, 4), (3, 2), (5, 3)):
            found = scored_on(run, processes, [0, 1, 2, 3, 4][:missing])
            assert found == {key: expected[key] for key in expected if key[0] < missing}
    groups = [[one.group for one in call] for call in scorer.seen]
    assert all(call.count(group) == group_size for call in groups for group in call)


def test_a_run_that_resamples(config: Config, scorer: Brightest, monkeypatch: pytest.MonkeyPatch) -> None:
    """As one of four processes has it, with a missing group on another: it samples padding, which no scorer gets."""
    real = experience.rank_slots
    monkeypatch.setattr(experience, "rank_slots", lambda *share: [*real(*share), *padding_of(real(*share))])
    shape = {"rollout__batch_size_per_device": 6, "training__max_steps": 1, "evaluation__num_examples": 1}
    _, records = train(config(rewards=PAIRWISE, algorithm={"name": "grpo", "resample_rounds": 2}, **shape))
    (rollout,) = of_kind(records, "rollout")
    assert rollout["images"] == 4.0 and rollout["failed"] == 0.0
    assert [len(call) for call in scorer.seen if call[0].group < 200] == [4]  # type: ignore[operator]


def padding_of(slots: Sequence[Any]) -> list[Any]:
    return [experience.Slot(slot.example, slot.index, padding=True) for slot in slots[-2:]]


def test_an_evaluation_asks_no_judge_of_groups_that_shares_a_place(scorer: Brightest) -> None:
    """Its values were dropped, and its questions paid."""
    entries = {"pairwise": PairwiseReward(**PAIRWISE["pairwise"]), "jpeg_size": JpegSizeReward(paste_back=False)}
    table = RewardTable(entries, RewardClientConfig())
    table.start()
    [scores] = settle(table, [table.submit([item(i, group=0) for i in range(4)], training=False)], RewardClientConfig())
    table.close()
    assert list(scores.outcomes) == ["jpeg_size"] and scorer.seen == []


# --- samples without numbers, and calls that fail ---


def test_an_image_of_no_numbers_is_no_opponent(scorer: Brightest) -> None:
    """Black stands in for it, which every other image would beat."""
    table = RewardTable({"pairwise": PairwiseReward(**PAIRWISE["pairwise"])}, RewardClientConfig())
    table.start()
    group = [item(i, group=0) for i in range(4)]
    [scores] = settle(table, [table.submit(group, broken=[1])], RewardClientConfig())
    table.close()
    assert [[one.id for one in call] for call in scorer.seen] == [[0, 2, 3]]
    levels = [brightness(one) for one in group]
    others = [[level for j, level in enumerate(levels) if j not in (1, i)] for i in range(4)]
    expected = [sum(levels[i] > other for other in others[i]) / 2 for i in range(4)]
    assert scores.values("pairwise") == [expected[0], None, *expected[2:]]
    assert "NaN or Inf" in scores.outcomes["pairwise"][1].message  # type: ignore[union-attr]


def test_a_call_that_raises_is_halved_between_groups() -> None:
    """A failing image would otherwise leave the rest of its group fewer opponents, or none."""
    made = Brightest(1)
    batch = [item(i, group=i // 3) for i in range(12)]
    outcomes = CheckedScorer(made).score(batch)
    assert [isinstance(one, Failure) for one in outcomes] == [3 <= i < 6 for i in range(12)]
    assert {len({one.group for one in call}) * 3 == len(call) for call in made.seen} == {True}
    assert [len(call) for call in made.seen] == [12, 6, 3, 3, 6]


def test_a_call_without_memory_is_halved_between_groups() -> None:
    class Small(Brightest):
        def score(self, items: Sequence[RewardItem]) -> list[Outcome]:
            if len(items) > 3:
                raise MemoryError
            return super().score(items)

    made: Callable[..., Any] = Small
    checked = CheckedScorer(made())
    batch = [item(i, group=i // 3) for i in range(12)]
    assert all(isinstance(one, Score) for one in checked.score(batch)) and checked.largest == 1
    assert all(isinstance(one, Score) for one in checked.score(batch))
    assert torch.tensor([len(call) for call in checked.scorer.seen]).eq(3).all()  # type: ignore[attr-defined]
