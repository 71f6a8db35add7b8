"""Win rates of weights against each other, by judges of two images: the same examples and seeds, both orders.

A judge's preference for a position is measured and does not enter the rate: swapping the two weights mirrors it.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from retouch.observe.statistics import paired_difference
from retouch.process.plain_text import count_of
from retouch.rewards.base import RewardEntry
from retouch.rewards.protocol import RewardItem
from retouch.rewards.scorers.judge_budget import share_budgets
from retouch.rewards.scorers.pairing import PairEntry, PairScorer, Preference, order_statistics
from retouch.rewards.views import View, viewed
from retouch.types import Example

if TYPE_CHECKING:
    from retouch.training.evaluation import Evaluation

logger = logging.getLogger(__name__)


def pair_judges(entries: Mapping[str, RewardEntry]) -> dict[str, PairEntry]:
    """The rewards that compare two images, of scorers that the run makes itself (`is_made_here`)."""
    return {
        name: entry
        for name, entry in entries.items()
        if isinstance(entry, PairEntry) and entry.compares_pairs() and entry.is_made_here
    }


def win_rates(
    judges: Mapping[str, PairEntry],
    results: Mapping[str, Evaluation],
    examples: Sequence[Example],
    pairs: Sequence[tuple[str, str]],
    spending: Path | None = None,
) -> dict[str, dict[str, dict[str, Any]]]:
    """How often a judge prefers the samples of some weights over those of others.

    Args:
        results: evaluations of the same examples and seeds, by the name of the weights.
        pairs: names (a, b) of weights; the rate is that of b over a.
        spending: folder in which judges count what the run spent; None: each counts alone.

    Returns:
        "b over a" -> judge -> `win_rate_of` of its preferences; without judges that gave no answer.

    Raises:
        ConfigError: a judge that cannot be reached.
    """
    found: dict[str, dict[str, dict[str, Any]]] = {}
    for name, entry in judges.items():
        scorer: Any = entry.make()
        assert isinstance(scorer, PairScorer)
        share_budgets({name: scorer}, spending)
        scorer.load("cpu")
        items = {weights: items_of(result, examples, entry) for weights, result in results.items()}
        for before, after in pairs:
            keys = [key for key in items[after] if key in items[before]]
            told = scorer.compare([(items[after][key], items[before][key]) for key in keys])
            answered = {key: one for key, one in zip(keys, told, strict=True) if isinstance(one, Preference)}
            if not answered:
                logger.warning("%s: no pair of %s and %s has an answer: %s", name, after, before, told[:1])
                continue
            rate = win_rate_of([key[0] for key in answered], list(answered.values()))
            found.setdefault(f"{after} over {before}", {})[name] = {**rate, "missing": len(keys) - len(answered)}
    return found


def win_rate_of(examples: Sequence[int], found: Sequence[Preference]) -> dict[str, Any]:
    """The mean probability to win as [rate, low, high], with the 95 % interval of `paired_difference`; the rate minus
    1/2, whose sign changes exactly if the weights are swapped; the number of pairs; the share of pairs whose orders
    have different winners; and the preference for the first image.

    Args:
        examples: of each preference. The images of an example are one unit: they are not independent.
    """
    margins = [one.margin for one in found]
    margin, low, high = paired_difference(margins, [0.0] * len(margins), examples)
    low, high = (min(max(0.5 + one, 0.0), 1.0) for one in (low, high))  # of one example nothing is known
    return {"win_rate": [0.5 + margin, low, high], "margin": margin, "pairs": len(found), **order_statistics(found)}


def items_of(result: Evaluation, examples: Sequence[Example], entry: RewardEntry) -> dict[tuple[int, int], RewardItem]:
    """Items for a judge by example and index, with the view of the options of its entry."""
    from retouch.training.scoring import item_of

    view = View(crop=entry.crop == "mask_box", margin=entry.box_margin, least=entry.box_min_side)
    by_id = {example.id: example for example in examples}
    found: dict[tuple[int, int], RewardItem] = {}
    images = result.images if entry.paste_back else result.raw
    for number, (row, image) in enumerate(zip(result.rows, images, strict=True)):
        example = by_id[row["example"]]
        found[row["example"], row["index"]] = viewed(item_of(example, image, number), view)
    return found


def win_rate_lines(found: Mapping[str, Mapping[str, Mapping[str, Any]]]) -> list[str]:
    """Lines for the terminal."""
    lines: list[str] = []
    for label, judges in found.items():
        for name, told in judges.items():
            rate, low, high = told["win_rate"]
            lines.append(
                f"{name}: {label} in {rate:.1%} [{low:.1%}, {high:.1%}] of {count_of(told['pairs'], 'pair')}, both "
                f"orders; {told['order_dependent']:.0%} depend on the order (first position "
                f"{told['position_bias']:+.2f})"
            )
    return lines
