"""How well the lines that were found in an image match the target lines.

A detector splits and merges lines at will. A match therefore joins, on one of its two sides, any number of neighbouring
lines: an asked line may be found as several boxes, and a box may hold several asked lines. The value of a set of
matches, each line in at most one of them, is

    sum of weight(asked lines of the match) * similarity / (weight of all asked lines + weight of found lines left over)

and the score is its maximum over all such sets. The weight of a line is its number of characters, or 1; with 1, the
similarity of several asked lines to a text is the mean over the lines, the text divided between them in the best way:
a short line then counts as much as a long one. The maximum of the ratio is found by Dinkelbach's
iteration: the best set for a fixed ratio is a maximum of a sum.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from retouch.imaging.lines import joined, pieces
from retouch.rewards.text_distance import text_similarity

Order = Literal["free", "kept"]
Weight = Literal["characters", "lines"]

MOST_EXACT = 8
"""Found lines up to which every join is tried: there are 2^(n - 1) ways to join n lines."""

MOST_JOINED = 8
"""Neighbouring lines that one match joins, on either side."""

_GAIN = 1e-12
"""Least difference between two ratios that counts."""


@dataclass(frozen=True)
class LineMatch:
    """Asked lines and found lines that are compared as one text each; one of the two is a single line.

    Attributes:
        asked, found: first line and the line after the last.
    """

    asked: tuple[int, int]
    found: tuple[int, int]
    similarity: float


@dataclass(frozen=True)
class Matching:
    """The best matches, and their score in [0, 1]."""

    score: float
    matches: tuple[LineMatch, ...]


def match_lines(
    asked: Sequence[str], found: Sequence[str], order: Order = "free", weight: Weight = "characters"
) -> Matching:
    """The best matches of two lists of lines in reading order; both are already in their normal form.

    Args:
        order: "kept" takes only matches that do not cross.
        weight: of a line: its characters, or 1.

    Above `MOST_EXACT` found lines no lines are joined: the caller joins those that stand beside each other.
    """
    lines = _Lines(tuple(asked), tuple(found), weight)
    if not lines.total:
        return Matching(0.0, ())
    if order == "kept":
        return _best_ratio(lines, lambda ratio: _in_order(lines, ratio))
    if len(found) <= MOST_EXACT:
        return _best_ratio(lines, lambda ratio: _in_any_order(lines, ratio))
    return _best_ratio(lines, lambda ratio: _one_to_one(lines, ratio))


class _Lines:
    """The two lists, and the similarities of their joined neighbours."""

    def __init__(self, asked: tuple[str, ...], found: tuple[str, ...], weight: Weight) -> None:
        self.asked, self.found, self.by_line = asked, found, weight == "lines"
        self.asked_weights = [len(text) if weight == "characters" else 1 for text in asked]
        self.found_weights = [len(text) if weight == "characters" else 1 for text in found]
        self.total = sum(self.asked_weights)
        self.similarity: Callable[[int, int, int, int], float] = cache(self._similarity)

    def _similarity(self, i: int, i_end: int, j: int, j_end: int) -> float:
        if self.by_line and i_end - i > 1:
            return divided_similarity(self.asked[i:i_end], self.found[j])
        return text_similarity(joined(self.asked[i:i_end]), joined(self.found[j:j_end]))

    def gain(self, i: int, i_end: int, j: int, j_end: int, ratio: float) -> float:
        """Contribution of a match to (sum of matched weights) - ratio * (weights of asked and left-over lines)."""
        matched = sum(self.asked_weights[i:i_end]) * self.similarity(i, i_end, j, j_end)
        return matched + ratio * sum(self.found_weights[j:j_end])

    def ratio(self, matches: Sequence[LineMatch]) -> float:
        """The value of a set of matches."""
        gained = sum(sum(self.asked_weights[slice(*m.asked)]) * m.similarity for m in matches)
        over = sum(self.found_weights) - sum(sum(self.found_weights[slice(*m.found)]) for m in matches)
        return gained / (self.total + over)

    def spans(self, i: int, j: int) -> list[tuple[int, int]]:
        """(end of the asked lines, end of the found lines) of every match that starts at lines i and j."""
        if len(self.found) > MOST_EXACT:
            return [(i + 1, j + 1)]
        ends = [(i + 1, end) for end in range(j + 1, min(j + MOST_JOINED, len(self.found)) + 1)]
        return ends + [(end, j + 1) for end in range(i + 2, min(i + MOST_JOINED, len(self.asked)) + 1)]

    def match(self, i: int, i_end: int, j: int, j_end: int) -> LineMatch:
        return LineMatch((i, i_end), (j, j_end), self.similarity(i, i_end, j, j_end))


def divided_similarity(asked: Sequence[str], text: str) -> float:
    """Mean similarity of the lines to consecutive parts of a text, which is cut at its spaces, and between characters
    of scripts without spaces, in the best way."""
    words = pieces(text)
    best = [0.0, *[-1.0] * len(words)]  # of the lines so far, by the number of words that they take
    for line in asked:
        best = [
            max(
                best[start] + text_similarity(line, joined(words[start:end]))
                for start in range(end + 1)
                if best[start] >= 0
            )
            for end in range(len(words) + 1)
        ]
    return best[-1] / len(asked)


def _best_ratio(lines: _Lines, best: Callable[[float], list[LineMatch]]) -> Matching:
    score, matches = -1.0, list[LineMatch]()
    while True:
        found = best(max(score, 0.0))
        ratio = lines.ratio(found)
        if ratio <= score + _GAIN:
            return Matching(score, tuple(sorted(matches, key=lambda m: m.asked)))
        score, matches = ratio, found


def _in_order(lines: _Lines, ratio: float) -> list[LineMatch]:
    """The best matches that do not cross, by dynamic programming from the last lines on."""
    m, n = len(lines.asked), len(lines.found)
    value = [[0.0] * (n + 1) for _ in range(m + 1)]
    choice: dict[tuple[int, int], tuple[int, int]] = {}
    for i in range(m - 1, -1, -1):
        for j in range(n - 1, -1, -1):
            options = [(value[i + 1][j], (i, j, i + 1, j)), (value[i][j + 1], (i, j, i, j + 1))]
            for i_end, j_end in lines.spans(i, j):
                options.append((lines.gain(i, i_end, j, j_end, ratio) + value[i_end][j_end], (i, j, i_end, j_end)))
            value[i][j], (_, _, *ends) = max(options, key=lambda option: option[0])
            choice[i, j] = (ends[0], ends[1])
    matches, at = list[LineMatch](), (0, 0)
    while at in choice:
        (i, j), at = at, choice[at]
        if at[0] > i and at[1] > j:
            matches.append(lines.match(i, at[0], j, at[1]))
    return matches


def _in_any_order(lines: _Lines, ratio: float) -> list[LineMatch]:
    """The best matches, by dynamic programming over the asked lines in order and the set of found lines in use."""
    m, n = len(lines.asked), len(lines.found)
    sets = np.arange(1 << n)
    value = np.full((m + 1, 1 << n), -np.inf)
    value[0, 0] = 0.0
    steps: list[tuple[int, int, int, int]] = []
    taken = np.full((m + 1, 1 << n), -1)  # index of the step that led here; -1: the asked line before is left out
    for i in range(m):
        better = value[i] > value[i + 1]
        value[i + 1], taken[i + 1] = np.where(better, value[i], value[i + 1]), np.where(better, -1, taken[i + 1])
        for j in range(n):
            for i_end, j_end in lines.spans(i, j):
                used = (1 << j_end) - (1 << j)
                free = sets[(sets & used) == 0]
                reached = value[i, free] + lines.gain(i, i_end, j, j_end, ratio)
                better = reached > value[i_end, free | used]
                value[i_end, (free | used)[better]] = reached[better]
                taken[i_end, (free | used)[better]] = len(steps)
                steps.append((i, i_end, j, j_end))
    matches, i, used = list[LineMatch](), m, int(np.argmax(value[m]))
    while i:
        step = int(taken[i, used])
        if step < 0:
            i -= 1
            continue
        i, i_end, j, j_end = steps[step]
        used &= ~((1 << j_end) - (1 << j))
        matches.append(lines.match(i, i_end, j, j_end))
    return matches


def _one_to_one(lines: _Lines, ratio: float) -> list[LineMatch]:
    gains = [[lines.gain(i, i + 1, j, j + 1, ratio) for j in range(len(lines.found))] for i in range(len(lines.asked))]
    chosen = assignment(np.array(gains))
    return [lines.match(i, i + 1, j, j + 1) for i, j in enumerate(chosen) if j >= 0]


def assignment(gains: NDArray[Any]) -> list[int]:
    """The column of each row [rows, columns] in the one-to-one assignment of greatest sum; -1 for rows beyond the
    columns. The Hungarian algorithm, O(rows^2 columns)."""
    rows, columns = gains.shape
    if rows > columns:
        chosen = [-1] * rows
        for column, row in enumerate(assignment(gains.T)):
            chosen[row] = column
        return chosen
    costs = np.zeros((rows + 1, columns + 1))
    costs[1:, 1:] = -gains
    of_row, of_column = np.zeros(rows + 1), np.zeros(columns + 1)
    row_at = np.zeros(columns + 1, np.int64)  # row of each column; column 0 holds the row that is being placed
    for row in range(1, rows + 1):
        row_at[0], column = row, 0
        least, before = np.full(columns + 1, np.inf), np.zeros(columns + 1, np.int64)
        done = np.zeros(columns + 1, bool)
        while row_at[column]:
            done[column] = True
            at = row_at[column]
            slack = costs[at] - of_row[at] - of_column
            closer = ~done & (slack < least)
            least[closer], before[closer] = slack[closer], column
            nearest = int(np.argmin(np.where(done, np.inf, least)))
            step = least[nearest]
            of_row[row_at[done]] += step
            of_column[done] -= step
            least[~done] -= step
            column = nearest
        while column:
            row_at[column] = row_at[before[column]]
            column = int(before[column])
    placed = [-1] * rows
    for column in range(1, columns + 1):
        if row_at[column]:
            placed[row_at[column] - 1] = column - 1
    return placed
