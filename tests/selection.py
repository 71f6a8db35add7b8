"""Which cells of a product `make test-ci` takes: so many that every value, or every two values, are in one. `make
test-all` takes the rest."""

from __future__ import annotations

from collections.abc import Callable, Collection, Hashable, Iterable, Sequence
from itertools import combinations
from typing import Any

import pytest

Values = tuple[tuple[int, Hashable], ...]


def meetings(row: Sequence[Hashable], strength: int) -> set[Values]:
    """Every `strength` values of a row, with their columns."""
    return set(combinations(enumerate(row), strength))


def covering(rows: Iterable[Sequence[Hashable]], strength: int = 2) -> list[Sequence[Hashable]]:
    """Some of the rows, in their order, in which every `strength` values meet that meet in any of them. Greedy: the
    row with most meetings that are missing, the first of equals."""
    rows = list(rows)
    missing = set[Values]().union(*(meetings(row, strength) for row in rows))
    chosen: list[int] = []
    while missing:
        best = max(range(len(rows)), key=lambda index: (len(meetings(rows[index], strength) & missing), -index))
        chosen.append(best)
        missing -= meetings(rows[best], strength)
    return [rows[index] for index in sorted(chosen)]


def default(values: Iterable[Any], chosen: Callable[[Any], bool]) -> list[Any]:
    """Arguments of `parametrize` with one value each; those that are not chosen are marked `full`."""
    return [value if chosen(value) else pytest.param(value, marks=pytest.mark.full) for value in values]


def cells(
    rows: Iterable[Sequence[Hashable]], strength: int = 2, fast: Collection[Sequence[Hashable]] = ()
) -> list[Any]:
    """Arguments of `parametrize` with several values each; those beyond a cover are marked `full`. Of strength 1,
    every value is in some row of the cover. Those in `fast` are in `make test`, whatever they cost."""
    rows = list(rows)
    marks = dict.fromkeys(rows, pytest.mark.full)
    marks |= dict.fromkeys(covering(rows, strength), None) | dict.fromkeys(fast, pytest.mark.fast)
    return [pytest.param(*row, marks=[mark] if (mark := marks[row]) else []) for row in rows]


def rows(
    given: Iterable[tuple[Any, ...]], chosen: Collection[tuple[Any, ...]], fast: Collection[tuple[Any, ...]] = ()
) -> list[Any]:
    """Arguments of `parametrize` with several values each; those that are not chosen are marked `full`. Those in `fast`
    are in `make test`, whatever they cost."""
    marks = {row: pytest.mark.full for row in given if row not in chosen} | dict.fromkeys(fast, pytest.mark.fast)
    return [pytest.param(*row, marks=marks[row]) if row in marks else row for row in given]
