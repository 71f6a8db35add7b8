"""Which cells of a product the default run takes: enough that every two values meet. `make test-all` takes the rest."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Sequence
from itertools import combinations
from typing import Any

import pytest

Pair = tuple[int, Hashable, int, Hashable]


def pairs(row: Sequence[Hashable]) -> set[Pair]:
    """Every two values of a row with their columns."""
    return {(i, row[i], j, row[j]) for i, j in combinations(range(len(row)), 2)}


def pairwise(rows: Iterable[Sequence[Hashable]]) -> list[Sequence[Hashable]]:
    """Some of the rows, in their order, in which every two values meet that meet in any of them. Greedy: the row with
    most pairs that are missing, the first of equals."""
    rows = list(rows)
    missing = set[Pair]().union(*map(pairs, rows))
    chosen: list[int] = []
    while missing:
        best = max(range(len(rows)), key=lambda index: (len(pairs(rows[index]) & missing), -index))
        chosen.append(best)
        missing -= pairs(rows[best])
    return [rows[index] for index in sorted(chosen)]


def default(values: Iterable[Any], chosen: Callable[[Any], bool]) -> list[Any]:
    """Arguments of `parametrize` with one value each; those that are not chosen are marked `full`."""
    return [value if chosen(value) else pytest.param(value, marks=pytest.mark.full) for value in values]


def cells(rows: Iterable[Sequence[Hashable]]) -> list[Any]:
    """Arguments of `parametrize` with several values each; those beyond a pairwise cover are marked `full`."""
    rows = list(rows)
    chosen = pairwise(rows)
    return [row if row in chosen else pytest.param(*row, marks=pytest.mark.full) for row in rows]
