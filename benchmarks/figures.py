"""Lines of the figures of docs/images: told apart by colour, marker and a label at the end.

The colours are those of Okabe and Ito, which people with any colour vision tell apart.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

COLORS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
MARKERS = "os^Dv<P"

_GAP, _WIDTH = 0.045, 0.25
"""Distance between two labels, and the width of one, as parts of the axes."""


def style(number: int) -> dict[str, Any]:
    """Colour and marker of the line of a number."""
    return {"color": COLORS[number % len(COLORS)], "marker": MARKERS[number % len(MARKERS)], "markersize": 4}


def label_ends(axis: Any, ends: Mapping[str, tuple[Sequence[float], str]]) -> None:
    """Write the name of each line behind its last point; names that would lie on each other move apart.

    Args:
        ends: name -> (last point, colour).
    """
    (left, right), (low, high) = axis.get_xlim(), axis.get_ylim()
    placed = list[tuple[float, float]]()
    for name, (point, color) in sorted(ends.items(), key=lambda end: end[1][0][1]):
        beside = [y for x, y in placed if abs(x - point[0]) < _WIDTH * (right - left)]
        place = max(point[1], *(y + _GAP * (high - low) for y in beside)) if beside else point[1]
        placed.append((point[0], place))
        axis.text(point[0] + 0.02 * (right - left), place, name, color=color, fontsize=8, va="center")
    axis.spines[["top", "right"]].set_visible(False)
