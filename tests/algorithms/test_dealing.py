"""Rows that are left after groups without a signal are dealt evenly to the ranks, and only those that move travel."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from threading import Barrier
from typing import Any

import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from retouch.training.dealing import evenly_dealt, rows_by_rank, rows_of_all, step_batches
from retouch.training.experience import Experience


class Ranks:
    """Processes as threads: `sum` is over all of them, and remembers the shapes that it was given."""

    def __init__(self, world_size: int) -> None:
        self.world_size = world_size
        self.given: dict[int, Tensor] = {}
        self.barrier = Barrier(world_size)
        self.shapes: list[tuple[int, ...]] = []

    def on_each(self, function: Callable[[Any], Any]) -> list[Any]:
        with ThreadPoolExecutor(self.world_size) as pool:
            return list(pool.map(function, [OneRank(self, rank) for rank in range(self.world_size)]))


class OneRank:
    def __init__(self, ranks: Ranks, rank: int) -> None:
        self.ranks, self.rank, self.world_size = ranks, rank, ranks.world_size

    def sum(self, value: Tensor) -> Tensor:
        self.ranks.given[self.rank] = value
        self.ranks.barrier.wait(10)
        total = torch.stack([self.ranks.given[rank] for rank in range(self.world_size)]).sum(0)
        if self.ranks.barrier.wait(10) == 0:
            self.ranks.shapes.append(tuple(value.shape))
        return total

    def gather(self, value: Tensor) -> Tensor:
        self.ranks.given[self.rank] = value
        self.ranks.barrier.wait(10)
        found = torch.cat([self.ranks.given[rank] for rank in range(self.world_size)])
        self.ranks.barrier.wait(10)
        return found


def rows(live: list[bool], rank: int, world_size: int) -> Experience:
    """Row i of all ranks says so in everything that it has; `means` were not asked for."""
    n = len(live) // world_size
    i = torch.arange(rank * n, (rank + 1) * n)
    weight = torch.tensor(live[rank * n : (rank + 1) * n]).float()
    states = i.float().view(-1, 1, 1, 1, 1).expand(n, 3, 2, 2, 2)
    return Experience(i, i + 2**60, i % 2, states, states[:, :2, 0, 0, 0], i / 8, weight, torch.zeros(0), states[:, 1:])


def dealt(live: list[bool], world_size: int) -> tuple[list[Experience], Ranks]:
    ranks, weight = Ranks(world_size), torch.tensor(live).float()
    each = ranks.on_each(lambda engine: evenly_dealt(engine, rows(live, engine.rank, world_size), weight))
    return each, ranks


@given(world_size=st.integers(1, 5), n=st.integers(1, 6), data=st.data())
def test_every_live_row_is_dealt_once_and_evenly(world_size: int, n: int, data: st.DataObject) -> None:
    live = data.draw(st.lists(st.booleans(), min_size=n * world_size, max_size=n * world_size))
    hands = rows_by_rank(live, world_size)
    assert sorted(row for hand in hands for row in hand) == [row for row, is_live in enumerate(live) if is_live]
    share = -(-sum(live) // world_size)
    assert max(map(len, hands)) == share
    for rank, hand in enumerate(hands):
        own = [row for row in range(rank * n, (rank + 1) * n) if live[row]]
        assert hand[: min(len(own), share)] == own[:share]  # what fits stays


def test_deals_by_hand() -> None:
    assert rows_by_rank([True] * 3 + [True, True, False], 2) == [[0, 1, 2], [3, 4]]  # padding alone moves nothing
    assert rows_by_rank([False] * 4 + [True] * 4, 2) == [[6, 7], [4, 5]]
    assert rows_by_rank([True, False, False, False, True, True, True, True, True], 3) == [[0, 8], [4, 5], [6, 7]]
    assert rows_by_rank([False] * 4, 2) == [[], []]
    assert rows_by_rank([True, False, True], 1) == [[0, 2]]


def test_what_a_rank_is_dealt_comes_whole() -> None:
    """Two of rank 1's four rows go to rank 0, which has none, with all that belongs to them; the other two stay."""
    (first, second), ranks = dealt([False] * 4 + [True] * 4, 2)
    for found, expected in ((first, [6, 7]), (second, [4, 5])):
        i = torch.tensor(expected)
        assert found.position.tolist() == expected and torch.equal(found.seed, i + 2**60)
        assert torch.equal(found.first_step, i % 2) and torch.equal(found.advantages, i / 8)
        assert found.counts_in_loss.tolist() == [1.0, 1.0]
        assert torch.equal(found.latents, i.float().view(-1, 1, 1, 1, 1).expand(2, 3, 2, 2, 2))
        assert torch.equal(found.reference_means, found.latents[:, 1:]) and found.means.shape == (0,)
    assert {shape[0] for shape in ranks.shapes} == {2}  # rows that moved


def test_an_uneven_rest_is_filled_up_with_weight_0() -> None:
    each, ranks = dealt([True, True, False, True, False, False], 2)
    assert [e.counts_in_loss.tolist() for e in each] == [[1.0, 1.0], [1.0, 0.0]]
    assert [len(t) for e in each for t in vars(e).values() if len(t)] == [2] * 16
    assert ranks.shapes == []  # nobody had too many
    empty, _ = dealt([False] * 4, 2)
    assert [(len(e.counts_in_loss), tuple(e.latents.shape[1:])) for e in empty] == [(0, (3, 2, 2, 2))] * 2


def test_one_process_keeps_its_rows_in_order() -> None:
    (found,), ranks = dealt([True, False, True, True], 1)
    assert found.position.tolist() == [0, 2, 3] and ranks.shapes == []


def test_rows_of_all_ranks_in_any_order() -> None:
    ranks = Ranks(3)
    found = ranks.on_each(
        lambda engine: rows_of_all(engine, torch.arange(4.0)[:, None] + 4 * engine.rank, [9, 0, 5, 0])
    )
    assert [t.flatten().tolist() for t in found] == [[9.0, 0.0, 5.0, 0.0]] * 3
    assert ranks.shapes == [(4, 1)]


def steps_of(seeds: list[int], live: list[bool], world_size: int, steps: int) -> list[list[list[int]]]:
    """Seeds of the rows that count, by step and rank, of rows that lie on the ranks in this order."""
    ranks, weight = Ranks(world_size), torch.tensor(live).float()

    def on_one(engine: Any) -> Experience:
        n = len(live) // world_size
        own = rows(live, engine.rank, world_size)
        own.seed = torch.tensor(seeds[engine.rank * n : (engine.rank + 1) * n])
        return evenly_dealt(engine, own, weight, steps)

    each = ranks.on_each(on_one)
    sizes = [[int((e.optimizer_step == step).sum()) for step in range(steps)] for e in each]
    assert all(size == sizes[0] for size in sizes)  # every process takes the same forwards
    batches = [step_batches(len(e.counts_in_loss), 0, 0, 1, steps, e.optimizer_step) for e in each]
    return [
        [
            e.seed[batch[step]][e.counts_in_loss[batch[step]] > 0].tolist()
            for e, batch in zip(each, batches, strict=True)
        ]
        for step in range(steps)
    ]


@given(steps=st.integers(2, 4), data=st.data())
def test_a_step_has_the_same_rows_on_any_number_of_processes(steps: int, data: st.DataObject) -> None:
    """Wherever they lie, and shared evenly: they are those of the order of the seeds."""
    seeds = data.draw(st.permutations(range(100, 112)))
    live = data.draw(st.lists(st.booleans(), min_size=12, max_size=12))
    counted = sorted(seed for seed, is_live in zip(seeds, live, strict=True) if is_live)
    expected = [part.tolist() for part in torch.tensor(counted).tensor_split(steps)]
    for world_size in (1, 2, 3, 4):
        found = steps_of(seeds, live, world_size, steps)
        assert [sorted(seed for rank in ranks for seed in rank) for ranks in found] == expected
        assert all(max(map(len, ranks)) == -(-sum(map(len, ranks)) // world_size) for ranks in found)


def test_inner_epochs_repeat_shared_steps() -> None:
    step_of = torch.tensor([1, 0, 1, 0])
    assert [batch.tolist() for batch in step_batches(4, 0, 0, 2, 4, step_of)] == [[1, 3], [0, 2], [1, 3], [0, 2]]
