"""Which examples when and where: exactly K each, whatever the number of processes."""

from __future__ import annotations

import hashlib
from collections import Counter
from itertools import product
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from retouch.data import sampler
from retouch.data.base import DataError
from retouch.data.sampler import (
    Slot,
    batch_examples,
    curriculum_examples,
    curriculum_order,
    curriculum_pool,
    derive_seed,
    easiest,
    epoch_examples,
    other_examples,
    rank_slots,
)

# --- slots ---


@pytest.mark.parametrize(("world_size", "groups", "group_size"), product(range(1, 6), (1, 2, 3, 7), (1, 2, 5, 8)))
def test_every_example_gets_exactly_k_rollouts(world_size: int, groups: int, group_size: int) -> None:
    examples = [10 + 3 * n for n in range(groups)]
    ranks = [rank_slots(examples, group_size, rank, world_size) for rank in range(world_size)]
    per_rank = -(-groups * group_size // world_size)
    assert [len(slots) for slots in ranks] == [per_rank] * world_size
    every = [slot for slots in ranks for slot in slots]
    real = groups * group_size
    # rank after rank, the global order; padding only after it
    assert every[:real] == [Slot(example, index) for example in examples for index in range(group_size)]
    assert [slot.padding for slot in every] == [False] * real + [True] * (per_rank * world_size - real)
    assert {slot.example for slot in every} == set(examples)
    assert Counter((slot.example, slot.index) for slot in every if not slot.padding) == dict.fromkeys(
        product(examples, range(group_size)), 1
    )


@pytest.mark.parametrize(("world_size", "groups", "group_size"), product(range(1, 6), (1, 2, 3, 7), (1, 2, 5, 8)))
def test_whole_groups_lie_on_one_rank(world_size: int, groups: int, group_size: int) -> None:
    """In the global order, as many slots on each rank; ranks that need none have padding alone, of whole groups."""
    examples = [10 + 3 * n for n in range(groups)]
    ranks = [rank_slots(examples, group_size, rank, world_size, whole_groups=True) for rank in range(world_size)]
    assert {len(slots) for slots in ranks} == {-(-groups // world_size) * group_size}
    real = [slot for slots in ranks for slot in slots if not slot.padding]
    assert real == [Slot(example, index) for example in examples for index in range(group_size)]
    for slots in ranks:
        counts = Counter(slot.example for slot in slots if not slot.padding)
        assert set(counts.values()) <= {group_size}
        assert sum(slot.padding for slot in slots) % group_size == 0
        assert [slot.padding for slot in slots] == sorted(slot.padding for slot in slots)


def test_slots_by_hand() -> None:
    pad = Slot(9, 2, padding=True)
    assert rank_slots([4, 9], 3, 0, 4) == [Slot(4, 0), Slot(4, 1)]
    assert rank_slots([4, 9], 3, 1, 4) == [Slot(4, 2), Slot(9, 0)]
    assert rank_slots([4, 9], 3, 2, 4) == [Slot(9, 1), Slot(9, 2)]
    assert rank_slots([4, 9], 3, 3, 4) == [pad, pad]


# --- epochs ---


@pytest.mark.parametrize(("size", "groups"), [(12, 4), (13, 4), (5, 5), (7, 1), (9, 6)])
def test_a_pass_takes_each_example_at_most_once_and_all_equally_often(size: int, groups: int) -> None:
    epochs = size // groups
    for number in range(3):
        chosen = [epoch_examples(size, groups, seed=5, epoch=number * epochs + part) for part in range(epochs)]
        assert [len(epoch) for epoch in chosen] == [groups] * epochs
        counts = Counter(example for epoch in chosen for example in epoch)
        assert set(counts.values()) == {1}
        assert set(counts) <= set(range(size))
        assert size - len(counts) == size % groups  # these sit the pass out


def test_who_sits_out_changes_with_the_pass() -> None:
    out = [set(range(7)) - set(epoch_examples(7, 6, seed=0, epoch=epoch)) for epoch in range(20)]
    assert len({tuple(left) for left in out}) > 3


def test_epochs_follow_from_the_seed() -> None:
    first = [epoch_examples(50, 8, seed=3, epoch=epoch) for epoch in range(12)]
    assert first == [epoch_examples(50, 8, seed=3, epoch=epoch) for epoch in range(12)]
    assert epoch_examples(50, 8, seed=3, epoch=11) == first[11]  # nothing before it needs to be drawn
    assert first != [epoch_examples(50, 8, seed=4, epoch=epoch) for epoch in range(12)]
    taken = [example for epoch in first[:6] for example in epoch]
    assert sorted(taken) != taken  # shuffled


def test_an_epoch_needs_that_many_examples() -> None:
    assert sorted(epoch_examples(4, 4, 0, 0)) == [0, 1, 2, 3]
    with pytest.raises(DataError) as caught:
        epoch_examples(4, 5, 0, 0)
    assert str(caught.value) == (
        "an epoch takes 5 groups, but the data set has 4 examples; lower rollout.global_groups_per_batch x "
        "rollout.batches_per_epoch to at most 4, or add data"
    )


# --- new groups for those that carry no signal ---


@given(
    size=st.integers(1, 30),
    groups=st.integers(1, 30),
    count=st.integers(0, 30),
    epoch=st.integers(0, 20),
    again=st.integers(0, 3),
)
def test_other_examples_are_new_ones_as_many_as_there_are(
    size: int, groups: int, count: int, epoch: int, again: int
) -> None:
    taken = epoch_examples(size, min(groups, size), 0, epoch)
    more = other_examples(size, taken, count, 0, epoch, again)
    assert len(more) == min(count, size - len(taken))  # a short supply gives what it has
    assert len(set(more)) == len(more)
    assert set(more).isdisjoint(taken) and set(more) <= set(range(size))


def test_rounds_of_resampling_never_take_an_example_twice() -> None:
    taken = epoch_examples(40, 8, 0, 3)
    for again in range(6):
        taken = taken + other_examples(40, taken, 6, 0, 3, again)
    assert sorted(taken) == list(range(40))
    assert other_examples(40, taken, 1, 0, 3, 6) == []


def test_other_examples_follow_from_seed_epoch_and_round() -> None:
    taken = list(range(10))
    first = other_examples(100, taken, 8, 0, 3, 0)
    assert first == other_examples(100, set(taken), 8, 0, 3, 0)
    others = [other_examples(100, taken, 8, *parts) for parts in ((1, 3, 0), (0, 4, 0), (0, 3, 1))]
    assert len({tuple(more) for more in (first, *others)}) == 4
    assert first != sorted(first)  # drawn, not the next ones in line
    drawn = Counter(i for epoch in range(300) for i in other_examples(20, range(10), 5, 0, epoch, 0))
    assert set(drawn) == set(range(10, 20)) and 110 < min(drawn.values()) <= max(drawn.values()) < 190


class Slow(list[int]):
    """Counts how often it was searched."""

    searches = 0

    def __contains__(self, key: object) -> bool:
        self.searches += 1
        return super().__contains__(key)


def test_the_taken_examples_are_not_searched_one_by_one() -> None:
    """A data set of N and an epoch of G would be N x G comparisons."""
    taken = Slow(range(10))
    assert set(other_examples(30, taken, 20, 0, 0, 0)) == set(range(10, 30))
    assert taken.searches == 0


# --- supervised steps ---


@given(size=st.integers(1, 12), rows=st.integers(1, 30), seed=st.integers(0, 5))
def test_steps_deal_out_each_pass_exactly(size: int, rows: int, seed: int) -> None:
    steps = -(-3 * size // rows)
    stream = [row for step in range(steps) for row in batch_examples(size, rows, seed, step)]
    assert len(stream) == steps * rows
    for number in range(3):
        assert sorted(stream[number * size : (number + 1) * size]) == list(range(size))


def test_the_stream_does_not_depend_on_the_batch_size() -> None:
    def stream(rows: int) -> list[int]:
        return [row for step in range(24 // rows) for row in batch_examples(5, rows, 1, step)]

    assert stream(1) == stream(2) == stream(8) == stream(24)


def test_steps_follow_from_the_seed_and_passes_differ() -> None:
    passes = [batch_examples(20, 20, 0, step) for step in range(3)]
    assert passes == [batch_examples(20, 20, 0, step) for step in range(3)]
    assert len({tuple(order) for order in passes}) == 3
    assert batch_examples(20, 20, 1, 0) != passes[0]


def test_the_order_of_a_pass_is_drawn_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not once a step, which would be a shuffle of the whole data set for a handful of rows."""
    passes: list[tuple[int | str, ...]] = []
    real = sampler.derive_seed
    monkeypatch.setattr(sampler, "derive_seed", lambda *parts: passes.append(parts) or real(*parts))
    size, seed = 1001, 77  # of no other test: orders are kept
    for step in range(2 * size // 7):
        batch_examples(size, 7, seed, step)
    for epoch in range(2 * (size // 10)):
        epoch_examples(size, 10, seed, epoch)
    assert passes == [(seed, "pass", 0), (seed, "pass", 1)]
    epoch_examples(size, 10, seed, 0).sort()  # what is handed out is no part of what is kept
    assert epoch_examples(size, 10, seed, 0) != sorted(epoch_examples(size, 10, seed, 0))


def test_orders_are_those_of_the_generator() -> None:
    expected = list(range(9))
    Random(derive_seed(3, "pass", 2)).shuffle(expected)
    assert batch_examples(9, 9, 3, 2) == expected
    assert epoch_examples(9, 3, 3, 7) == expected[3:6]


# --- seeds ---


def test_seeds_are_stable() -> None:
    # 63 bits of BLAKE2b of the parts; a change would change every run
    assert derive_seed(0, "rollout", 11, 3, 7) == 1244718664982527329
    assert derive_seed(0, "rollout", 11, 3, 7) == (
        int.from_bytes(hashlib.blake2b(b"0/rollout/11/3/7", digest_size=8).digest(), "big") // 2
    )


@pytest.mark.parametrize(
    ("a", "b"),
    [
        (("1", "23"), ("12", "3")),
        ((1, 23), (12, 3)),
        (("a", 1), ("a", 10)),
        (("a", 1), (1, "a")),
        ((0,), (0, 0)),
        (("x", ""), ("x",)),
        (("noise", 1, 2), ("rollout", 1, 2)),
    ],
)
def test_other_parts_give_another_seed(a: tuple[int | str, ...], b: tuple[int | str, ...]) -> None:
    assert derive_seed(*a) != derive_seed(*b)


def test_seeds_are_spread_over_63_bits() -> None:
    seeds = [derive_seed(0, "rollout", example, epoch, k) for example, epoch, k in product(range(20), repeat=3)]
    assert len(set(seeds)) == 8000
    assert min(seeds) >= 0
    assert max(seeds) < 2**63
    assert sum(seeds) / len(seeds) / 2**63 == pytest.approx(0.5, abs=0.02)


# --- curriculum ---


DIFFICULTY = [3.0, 1.0, 2.0, 1.0, 5.0, 4.0, 2.0, 9.0, 0.5, 7.0]


def test_the_easiest_come_first_and_all_in_the_end() -> None:
    assert easiest(DIFFICULTY, 1, 3) == [1, 2, 3, 8]  # 4 of 10; of the two of 2.0 the first
    assert easiest(DIFFICULTY, 2, 3) == [0, 1, 2, 3, 5, 6, 8]
    assert easiest(DIFFICULTY, 3, 3) == list(range(10))
    for epoch in range(9):
        pool = curriculum_pool(DIFFICULTY, epoch, 9, 3)
        assert pool == easiest(DIFFICULTY, 1 + epoch // 3, 3)
        chosen = curriculum_examples(DIFFICULTY, 4, 0, epoch, 9, 3)
        assert len(set(chosen)) == 4 and set(chosen) <= set(pool)
    assert curriculum_pool(DIFFICULTY, 20, 9, 3) == list(range(10))


def test_a_stage_passes_over_its_examples() -> None:
    """Stage 2 of 2, epochs 5 to 9: two groups an epoch see all ten once."""
    seen = [i for epoch in range(5, 10) for i in curriculum_examples(DIFFICULTY, 2, 7, epoch, 10, 2)]
    assert sorted(seen) == list(range(10))


def test_one_stage_is_no_curriculum() -> None:
    for epoch in range(6):
        assert curriculum_examples(DIFFICULTY, 3, 5, epoch, 6, 1) == epoch_examples(10, 3, 5, epoch)


def test_a_stage_too_small_for_an_epoch_says_so() -> None:
    with pytest.raises(DataError, match="an epoch takes 5 groups, but the data set has 4 examples"):
        curriculum_examples(DIFFICULTY, 5, 0, 0, 9, 3)


@pytest.mark.parametrize("count", [1, 2, 29, 30, 31])
def test_the_order_of_a_curriculum(count: int) -> None:
    order = curriculum_order(DIFFICULTY, count, 3, 3)
    assert len(order) == count and order == curriculum_order(DIFFICULTY, count, 3, 3)
    bounds = [-(-s * count // 3) for s in range(4)]
    for stage in (1, 2, 3):
        assert set(order[bounds[stage - 1] : bounds[stage]]) <= set(easiest(DIFFICULTY, stage, 3))
    assert count < 29 or sorted(order[bounds[2] : bounds[2] + 9]) != sorted(order[:9])
    assert count < 29 or order != curriculum_order(DIFFICULTY, count, 4, 3)


def test_the_order_without_stages_is_shuffled_passes() -> None:
    order = curriculum_order(DIFFICULTY, 30, 3, 1)
    assert all(sorted(order[i : i + 10]) == list(range(10)) for i in (0, 10, 20)) and order[:10] != order[10:20]
