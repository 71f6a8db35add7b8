"""The best matching of lines: a table of cases, and a second derivation that tries everything."""

from __future__ import annotations

import itertools
from random import Random
from typing import Any

import numpy as np
import pytest

from retouch.imaging.lines import joined
from retouch.rewards.matching import MOST_EXACT, Order, Weight, assignment, match_lines
from retouch.rewards.scorers.ocr_lines import best_matching
from retouch.rewards.text_distance import edit_distance, text_similarity

SIGN = ["HELLO WORLD", "OPEN DAILY"]
THREE = [*SIGN, "FREE ENTRY"]
TOLD = "BUY ONE GET ONE FREE TODAY HERE"


@pytest.mark.parametrize(
    ("asked", "found", "score"),
    [
        pytest.param(SIGN, SIGN, 1.0, id="exact"),
        pytest.param(THREE, [THREE[2], *SIGN], 1.0, id="another order"),
        pytest.param(THREE, [SIGN[0], THREE[2]], 0.68, id="one of three missing"),
        pytest.param(SIGN, [SIGN[0], *SIGN], 0.74, id="one line twice"),
        pytest.param(SIGN, [*SIGN, "ab"], 0.91, id="one stray token"),
        pytest.param(SIGN, ["HELLO WORLD", "OPEN", "DAILY"], 1.0, id="a line found as two boxes"),
        pytest.param(SIGN, ["HELLO WORLD OPEN DAILY"], 1.0, id="two lines found as one box"),
        pytest.param(SIGN, ["HELLO", "WORLD", "OPEN", "DAILY"], 1.0, id="every word a box"),
        pytest.param(SIGN, ["HELLO WORLD", "OPEN DAILX"], 0.95, id="one letter wrong"),
        pytest.param(["HELLO WORLD", "SALE FRESH"], ["HELLO FRESH", "SALE WORLD"], 0.64, id="words swapped"),
        pytest.param(["GO", TOLD], ["XX", TOLD], 0.94, id="a short line wrong beside a long one"),
        pytest.param(SIGN, [], 0.0, id="nothing found"),
    ],
)
def test_cases_by_hand(asked: list[str], found: list[str], score: float) -> None:
    assert round(match_lines(asked, found).score, 2) == score


def test_a_split_and_a_merge_in_one_image() -> None:
    found = ["HELLO", "WORLD", "OPEN DAILY FREE ENTRY"]
    matching = match_lines(THREE, found)
    assert matching.score == 1.0
    assert [(m.asked, m.found) for m in matching.matches] == [((0, 1), (0, 2)), ((1, 3), (2, 3))]


def test_the_order_of_the_lines_counts_on_request() -> None:
    swapped = SIGN[::-1]
    assert match_lines(SIGN, swapped).score == 1.0
    kept = match_lines(SIGN, swapped, "kept")
    assert kept.score == pytest.approx(11 / (21 + 10)) and len(kept.matches) == 1


def test_weights_by_hand() -> None:
    found = ["XX", TOLD]
    assert match_lines(["GO", TOLD], found, weight="characters").score == pytest.approx(31 / 33)
    assert match_lines(["GO", TOLD], found, weight="lines").score == pytest.approx(1 / 2)
    assert match_lines(["GO", TOLD], [f"GX {TOLD}"], weight="lines").score == pytest.approx(3 / 4)
    assert match_lines(["GO"], ["GO", "ABCDEF"], weight="lines").score == pytest.approx(1 / 2)


def divided(asked: list[str], words: list[str]) -> float:
    """The greatest sum of similarities of the lines to consecutive words."""
    if len(asked) == 1:
        return text_similarity(asked[0], " ".join(words))
    cuts = range(len(words) + 1)
    return max(text_similarity(asked[0], " ".join(words[:k])) + divided(asked[1:], words[k:]) for k in cuts)


def by_trying(asked: list[str], found: list[str], order: Order, weight: Weight) -> float:
    """The greatest value over all sets of matches, one after another."""
    own = [len(text) if weight == "characters" else 1 for text in asked]
    other = [len(text) if weight == "characters" else 1 for text in found]
    best = 0.0

    def extend(first: int, free: list[bool], after: int, gained: float, left: int) -> None:
        nonlocal best
        best = max(best, gained / (sum(own) + left))
        for i in range(first, len(asked)):
            for i_end in range(i + 1, len(asked) + 1):
                for j in range(after if order == "kept" else 0, len(found)):
                    for j_end in range(j + 1, len(found) + 1):
                        if (i_end - i > 1 and j_end - j > 1) or not all(free[j:j_end]):
                            continue
                        similarity = text_similarity(joined(asked[i:i_end]), joined(found[j:j_end]))
                        if weight == "lines" and i_end - i > 1:
                            similarity = divided(asked[i:i_end], found[j].split()) / (i_end - i)
                        rest = [one and not j <= k < j_end for k, one in enumerate(free)]
                        gain = sum(own[i:i_end]) * similarity
                        extend(i_end, rest, j_end, gained + gain, left - sum(other[j:j_end]))

    extend(0, [True] * len(found), 0, 0.0, sum(other))
    return best


@pytest.mark.parametrize("order", ["free", "kept"])
@pytest.mark.parametrize("weight", ["characters", "lines"])
def test_no_other_set_of_matches_scores_more(order: Order, weight: Weight) -> None:
    draw = Random(f"{order} {weight}")

    def texts(least: int, most: int) -> list[str]:
        words = ["".join(draw.choice("ab ") for _ in range(draw.randint(1, 4))).strip() for _ in range(most)]
        return [word or "a" for word in words][: draw.randint(least, most)]

    for _ in range(60):
        asked, found = texts(1, 3), texts(0, 4)
        matching = match_lines(asked, found, order, weight)
        assert matching.score == pytest.approx(by_trying(asked, found, order, weight), abs=1e-12), (asked, found)


@pytest.mark.parametrize("order", ["free", "kept"])
def test_beyond_the_exact_number_rows_are_joined(order: Order) -> None:
    """Ten lines, each found as two boxes side by side; or each as one, two of them in one row."""
    asked = [f"LINE {letter}" for letter in "ABCDEFGHIJ"]
    halves = [line.split() for line in asked]
    assert len(asked) * 2 > MOST_EXACT
    found, matching = best_matching(asked, halves, order, "characters")
    assert matching.score == 1.0 and found == asked
    beside = [asked[:2], *([line] for line in asked[2:])]
    found, matching = best_matching(asked, beside, order, "characters")
    assert matching.score == 1.0 and found == asked


def test_assignments_are_scipys() -> None:
    scipy: Any = pytest.importorskip("scipy.optimize")
    draw = np.random.default_rng(0)
    for _ in range(60):
        gains = draw.random((draw.integers(1, 8), draw.integers(1, 8)))
        rows, columns = scipy.linear_sum_assignment(-gains)
        found = assignment(gains)
        chosen = [(row, column) for row, column in enumerate(found) if column >= 0]
        assert len(chosen) == len(rows) and len({column for _, column in chosen}) == len(rows)
        assert sum(gains[at] for at in chosen) == pytest.approx(gains[rows, columns].sum(), abs=1e-12)


def test_an_assignment_is_the_best_of_all() -> None:
    """Also among equal gains."""
    draw = np.random.default_rng(0)
    for _ in range(60):
        gains = np.round(draw.random(draw.integers(1, 6, 2)), 1)
        few = gains if gains.shape[0] <= gains.shape[1] else gains.T
        orders = itertools.permutations(range(few.shape[1]), few.shape[0])
        best = max(sum(few[i, j] for i, j in enumerate(order)) for order in orders)
        assert sum(gains[i, j] for i, j in enumerate(assignment(gains)) if j >= 0) == pytest.approx(best)


def test_distances_are_those_of_the_table() -> None:
    """The bit-parallel distance against the table that defines it."""

    def table(a: str, b: str) -> int:
        rows = np.zeros((len(a) + 1, len(b) + 1), int)
        rows[:, 0], rows[0] = range(len(a) + 1), range(len(b) + 1)
        for i, one in enumerate(a, 1):
            for j, other in enumerate(b, 1):
                rows[i, j] = min(rows[i - 1, j] + 1, rows[i, j - 1] + 1, rows[i - 1, j - 1] + (one != other))
        return int(rows[-1, -1])

    draw = Random(0)
    for _ in range(200):
        a, b = ("".join(draw.choice("abcd") for _ in range(draw.randint(0, 9))) for _ in range(2))
        assert edit_distance(a, b) == table(a, b), (a, b)
    long = ["x" * 80 + "moka" * 20, "y" + "moka" * 25]
    assert edit_distance(*long) == table(*long)
    assert edit_distance([1, 2, 3], [1, 3]) == 1
