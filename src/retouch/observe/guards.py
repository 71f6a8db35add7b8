"""Alarms on reward hacking and stalled training, from statistics of images, rewards and KL.

An alarm is a sentence that names the problem. Over-optimised rewards show in images that become saturated, sharp, empty
or almost identical, in a KL that jumps, and in a gold reward (one of weight 0, not trained on) that falls.
"""

from __future__ import annotations

import io
import logging
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import NormalDist
from typing import Any

import numpy as np
from PIL import Image

from retouch.config.training import gold_share
from retouch.imaging.masks import MASK_THRESHOLD, Pixels, mask_box
from retouch.observe.statistics import MIN_EXAMPLES, paired_difference, student

logger = logging.getLogger(__name__)

Row = dict[str, Any]
"""Measures of one image of an evaluation by name."""

PREFIX = "picture."
"""Prefix of the image statistics in rows and records; run directories of all versions have it."""

_THUMBNAIL = 16
_JPEG_QUALITY = 90


@dataclass(frozen=True)
class Alarm:
    """A sentence that names a problem; `of_gold`: a gold reward fell."""

    text: str
    of_gold: bool = False


def region_of(image: Pixels, mask: Pixels | None) -> Pixels:
    """The generated part of an image: the box of its mask, or all of it without a mask."""
    if mask is None or not (mask >= MASK_THRESHOLD).any():
        return image
    left, top, right, bottom = mask_box(mask)
    return image[top:bottom, left:right]


def image_statistics(image: Pixels) -> dict[str, float]:
    """Statistics of [H, W, 3] uint8: `saturation` (mean of HSV's, in [0, 1]), `sharpness` (mean |Laplacian| of the
    luminance, in [0, 4]) and `jpeg_bits` (bits per pixel as JPEG of quality 90)."""
    values = image.astype(np.float32)
    high, low = values.max(-1), values.min(-1)
    saturation = np.where(high > 0, (high - low) / np.maximum(high, 1), 0).mean()
    grey = np.pad(np.asarray(Image.fromarray(image).convert("L"), np.float32) / 255, 1, mode="edge")
    around = grey[:-2, 1:-1] + grey[2:, 1:-1] + grey[1:-1, :-2] + grey[1:-1, 2:]
    buffer = io.BytesIO()
    Image.fromarray(image).save(buffer, "JPEG", quality=_JPEG_QUALITY)
    return {
        f"{PREFIX}saturation": float(saturation),
        f"{PREFIX}sharpness": float(np.abs(around - 4 * grey[1:-1, 1:-1]).mean()),
        f"{PREFIX}jpeg_bits": 8 * len(buffer.getvalue()) / (image.shape[0] * image.shape[1]),
    }


def nearest_distances(images: Sequence[Pixels]) -> list[float]:
    """For each of two or more images, the mean |difference| in [0, 1] between its thumbnail and the most similar other
    one; 0 is a duplicate."""
    small = [
        np.asarray(Image.fromarray(one).resize((_THUMBNAIL, _THUMBNAIL), Image.Resampling.BOX), np.float32).ravel()
        / 255
        for one in images
    ]
    stack = np.stack(small)
    nearest: list[float] = []
    for i, one in enumerate(stack):
        distances = np.abs(stack - one).mean(1)
        distances[i] = np.inf
        nearest.append(float(distances.min()))
    return nearest


def score_of(row: Row, weights: dict[str, float]) -> float | None:
    """Weighted sum of an image's rewards; None if one of them failed."""
    values = [row.get(name) for name in weights]
    if any(value is None for value in values):
        return None
    return sum(weight * float(row[name]) for name, weight in weights.items())


def gold_level(earlier: int, rewards: int = 1) -> float:
    """Level of the interval that an evaluation compares a gold reward by, with the best of `earlier` evaluations."""
    return 1 - 2 * gold_share(earlier, rewards)  # only a fall counts: one of two sides


@dataclass(frozen=True)
class GoldPairs:
    """The images of two evaluations that have a gold reward and every trained one: the changes of both."""

    examples: Sequence[int]
    rises: Sequence[float]
    falls: Sequence[float]

    @classmethod
    def of(cls, before: Sequence[Row], now: Sequence[Row], weights: dict[str, float], gold: str) -> GoldPairs:
        """The pairs of the images of `now` that `before` has.

        Args:
            weights: weights of the trained rewards.
        """
        earlier = {(row.get("example"), row.get("index")): row for row in before}
        pairs = [(row, earlier.get((row.get("example"), row.get("index")), {})) for row in now]
        sound = [
            (int(row["example"]), score_of(row, weights), score_of(old, weights), row.get(gold), old.get(gold))
            for row, old in pairs
        ]
        complete = [values for values in sound if None not in values]
        return cls(
            [values[0] for values in complete],
            [float(new) - float(old) for _, new, old, _, _ in complete],  # type: ignore[arg-type]
            [float(old) - float(new) for *_, new, old in complete],  # type: ignore[arg-type]
        )

    @property
    def enough(self) -> bool:
        """Whether there are enough examples for a verdict."""
        return len(set(self.examples)) >= MIN_EXAMPLES

    def alarm(self, gold: str, level: float) -> str | None:
        """The alarm for trained rewards that rise while gold falls; the intervals of both exclude 0."""
        if self._as_by_chance(level):
            return None
        zeros = [0.0] * len(self.examples)
        rise = paired_difference(self.rises, zeros, self.examples)
        fall = paired_difference(self.falls, zeros, self.examples, level)
        if rise[1] <= 0 or fall[1] <= 0:
            return None
        return (
            f"the trained rewards rose by {rise[0]:.3g}, but {gold}, which is not trained on, fell by {fall[0]:.3g}: "
            "this may be reward hacking"
        )

    def _as_by_chance(self, level: float) -> bool:
        """Whether as many examples all fall by chance more often than the level permits. Where gold is 0 or 1, equal
        falls have an interval without width, which excludes 0 at every level."""
        return 0.5 ** len(set(self.examples)) > (1 - level) / 2

    def detectable_fall(self, level: float) -> float | None:
        """The true fall of gold that raises its alarm with a probability of about .8 where the trained rewards rise;
        None where none does, or the spread of gold is unknown because all changes are equal."""
        if self._as_by_chance(level) or len(set(self.falls)) < 2:
            return None
        mean, low, _ = paired_difference(self.falls, [0.0] * len(self.examples), self.examples, level)
        half, degrees = mean - low, len(set(self.examples)) - 1
        return half * (1 + NormalDist().inv_cdf(0.8) / student(degrees, level))


def gold_comparisons(
    earlier: Sequence[Sequence[Row]], now: Sequence[Row], weights: dict[str, float], gold: Sequence[str]
) -> dict[str, GoldPairs]:
    """Each gold reward beside the evaluation in which it was highest, if both have enough examples."""
    pairs = {
        name: GoldPairs.of(max(earlier, key=lambda rows, n=name: _mean(rows, n)), now, weights, name)
        for name in gold
        if earlier
    }
    return {name: one for name, one in pairs.items() if one.enough}


def statistic_drifts(name: str, before: float, now: float, factor: float = 2.0) -> str | None:
    """The alarm for an image statistic that grew or shrank by more than `factor`."""
    if before > 0 and math.isfinite(now) and not before / factor <= now <= before * factor:
        return f"{name.removeprefix(PREFIX)} of the images was {before:.3g} and is {now:.3g}"
    return None


def images_collapse(before: float, now: float, factor: float = 2.0) -> str | None:
    """The alarm for images that become too similar to each other.

    Args:
        before, now: means of `nearest_distances`.
    """
    if math.isfinite(now) and now < before / factor:
        return f"images become too similar: the mean distance to the nearest other was {before:.3g} and is {now:.3g}"
    return None


class KlWatch:
    """The alarm for a KL whose mean over the newest `window` steps exceeds `factor` times what the mean of the `window`
    before extrapolates to; once per jump. A resumed run replays the earlier steps.

    A policy that moves steadily has a KL that grows with the square of its steps, and during a learning-rate warm-up
    with their fourth power: without the extrapolation every run with a warm-up would raise the alarm at step 10."""

    def __init__(self, window: int = 5, factor: float = 10.0) -> None:
        self._window, self._factor = window, factor
        self._recent: list[float] = []
        self._steps = 0

    def see(self, value: float | None) -> str | None:
        """Add the KL of a step -> the alarm. None and NaN (a step that overflowed) are ignored."""
        if value is None or not math.isfinite(value):
            return None
        size = self._window
        self._steps += 1
        self._recent = [*self._recent, value][-2 * size :]
        if len(self._recent) < 2 * size:
            return None
        before, now = float(np.mean(self._recent[:size])), float(np.mean(self._recent[size:]))
        if not 0 < self._factor * before * self._growth() < now:
            return None
        self._recent = []
        return f"the KL of the last {size} steps is {now:.3g}, that of the {size} before them {before:.3g}"

    def _growth(self) -> float:
        """Ratio of the means of the fourth powers of the step numbers in both windows."""
        steps = np.arange(self._steps - 2 * self._window, self._steps, dtype=np.float64) + 1
        return float((steps[self._window :] ** 4).mean() / (steps[: self._window] ** 4).mean())


class IdleWatch:
    """The alarm for `limit` consecutive skipped steps; once until a step is not skipped."""

    def __init__(self, limit: int = 10) -> None:
        self._limit, self._idle = limit, 0

    def see(self, idle: float | None) -> str | None:
        """Add whether a step was skipped (None: no) -> the alarm."""
        self._idle = self._idle + 1 if idle else 0
        if self._idle != self._limit:
            return None
        return (
            f"{self._limit} steps in a row had zero reward variance in every group, or failed rewards; check the "
            "rewards and the sampled images"
        )


class StepWatch:
    """The alarms of optimizer steps."""

    def __init__(self) -> None:
        self._kl, self._idle = KlWatch(), IdleWatch()

    def see(self, values: Mapping[str, Any]) -> list[str]:
        """Add the record of a step -> alarms."""
        found = (self._kl.see(values.get("kl")), self._idle.see(values.get("skipped")))
        return [alarm for alarm in found if alarm is not None]


def score_drifts(
    name: str, before: Sequence[float | None], now: Sequence[float | None], tolerance: float
) -> str | None:
    """The alarm for a scorer whose scores of the same images changed since the run began.

    Args:
        tolerance: absolute up to scores of 1, relative above.
    """
    pairs = [(a, b) for a, b in zip(before, now, strict=True) if a is not None and b is not None]
    apart = max((abs(a - b) / max(1.0, abs(a), abs(b)) for a, b in pairs), default=0.0)
    if apart > tolerance:
        return f"{name}: its scores of the same images changed by {apart:.3g} since the run began"
    return None


def evaluation_alarms(
    earlier: Sequence[Sequence[Row]], now: Sequence[Row], weights: dict[str, float], gold: Sequence[str]
) -> list[Alarm]:
    """The alarms of an evaluation.

    Args:
        earlier: rows of the evaluations before, oldest first; statistics are compared with the first.
    """
    if not earlier:
        return []
    # every evaluation compares again, with every gold reward: at one level for each, long runs would alarm by chance
    level = gold_level(len(earlier), max(1, len(gold)))
    compared = gold_comparisons(earlier, now, weights, gold)
    if len(earlier) == 1 and (unjudged := [name for name in gold if name not in compared]):
        logger.warning(
            "%s: no alarm, because fewer than %d examples have its values and all trained rewards in both evaluations; "
            "set evaluation.num_examples to %d or more",
            ", ".join(unjudged),
            MIN_EXAMPLES,
            MIN_EXAMPLES,
        )
    of_gold = [pairs.alarm(name, level) for name, pairs in compared.items()]
    for name, pairs in compared.items():
        if (fall := pairs.detectable_fall(level)) is not None:
            logger.info("%s: where the trained rewards rise, a fall of %.3g raises the alarm in 8 of 10", name, fall)
    found: list[str | None] = []
    for name in ("saturation", "sharpness", "jpeg_bits"):
        key = PREFIX + name
        found.append(statistic_drifts(key, _mean(earlier[0], key), _mean(now, key)))
    found.append(images_collapse(_mean(earlier[0], f"{PREFIX}nearest"), _mean(now, f"{PREFIX}nearest")))
    alarms = [Alarm(text, of_gold=True) for text in of_gold if text is not None]
    return alarms + [Alarm(text) for text in found if text is not None]


def _mean(rows: Sequence[Row], name: str) -> float:
    """Mean over the images that have the measure; -inf, which raises no alarm, if none has."""
    values = [float(row[name]) for row in rows if row.get(name) is not None]
    return float(np.mean(values)) if values else -np.inf
