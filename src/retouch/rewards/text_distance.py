"""Edit distance of two texts, and the similarity that follows from it."""

from __future__ import annotations

from collections.abc import Hashable, Sequence


def edit_distance(a: Sequence[Hashable], b: Sequence[Hashable]) -> int:
    """Levenshtein distance: insertions, deletions and substitutions of code points, or of the items of two lists.

    Bit-parallel: a whole column of the table is two integers, the places where it rises and falls by 1 (Myers 1999,
    Hyyrö 2003).
    """
    places: dict[Hashable, int] = {}
    for i, item in enumerate(a):
        places[item] = places.get(item, 0) | 1 << i
    every, last, distance = (1 << len(a)) - 1, 1 << len(a) >> 1, len(a)
    rises, falls = every, 0
    for item in b if a else ():
        equal = places.get(item, 0)
        diagonal = (((equal & rises) + rises) ^ rises) | equal | falls
        right, left = falls | (every & ~(diagonal | rises)), rises & diagonal
        distance += bool(right & last) - bool(left & last)
        right, left = (right << 1 | 1) & every, left << 1 & every
        rises, falls = left | (every & ~(diagonal | right)), right & diagonal
    return distance if a else len(b)


def text_similarity(a: str, b: str) -> float:
    """Symmetric normalised edit distance as a similarity: 1 - distance / max(len) in [0, 1]; two empty texts give 1."""
    longest = max(len(a), len(b))
    return 1.0 - edit_distance(a, b) / longest if longest else 1.0
