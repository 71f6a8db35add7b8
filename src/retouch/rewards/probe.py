"""What a scorer is worth before a run relies on it: what `retouch reward probe` measures."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from retouch.config.errors import ConfigError
from retouch.rewards.protocol import RewardItem
from retouch.rewards.score_one import item_of
from retouch.types import Failure, Outcome, Score

Ask = Callable[[Sequence[RewardItem]], list[Outcome]]
"""Scores items, wherever."""

_LABELLED = {"image", "prompt", "mask", "source", "reference", "text", "label"}


def probe(ask: Ask, item: RewardItem, repeats: int, batch: int) -> dict[str, Any]:
    """Measure a scorer with one picture.

    Args:
        repeats: times that it is scored alone.
        batch: variants of it (moved sideways) that are scored alone and then together.

    Returns:
        `value`; `seconds` (p50 and p95 of one picture, and of one picture in a batch); `repeatability` (standard
        deviation, n - 1, and largest difference: what `noise` of the reward is to be); `batch_difference` (the largest
        between alone and together); `failures`.
    """
    alone, seconds = [], list[float]()
    for _ in range(repeats):
        started = time.monotonic()
        alone += ask([item])
        seconds.append(time.monotonic() - started)
    variants = [
        replace(item, id=i, image=np.ascontiguousarray(np.roll(item.image, i, axis=1))) for i in range(max(1, batch))
    ]
    single = [outcome for one in variants for outcome in ask([one])]
    started = time.monotonic()
    together = ask(variants)
    each = (time.monotonic() - started) / len(variants)
    values = [outcome.value for outcome in alone if isinstance(outcome, Score)]
    apart = [
        abs(a.value - b.value)
        for a, b in zip(single, together, strict=True)
        if isinstance(a, Score) and isinstance(b, Score)
    ]
    failures = [outcome for outcome in (*alone, *single, *together) if isinstance(outcome, Failure)]
    return {
        "value": values[0] if values else None,
        "seconds": {"p50": percentile(seconds, 0.5), "p95": percentile(seconds, 0.95), "in_a_batch": each},
        "repeatability": {
            "std": float(np.std(values, ddof=1)) if len(values) > 1 else None,
            "largest_difference": max(values) - min(values) if values else None,
        },
        "batch_difference": max(apart, default=None),
        "failures": len(failures),
        **({"first_failure": f"{failures[0].code}: {failures[0].message}"} if failures else {}),
    }


def agreement(ask: Ask, labelled: Sequence[tuple[RewardItem, float]], batch: int) -> dict[str, Any]:
    """How scores agree with labels: Spearman's rank correlation, and the share of the pairs with different labels that
    the scorer puts in their order, ties half. None where there is nothing to compare."""
    outcomes: list[Outcome] = []
    items = [replace(item, id=i) for i, (item, _) in enumerate(labelled)]
    for start in range(0, len(items), batch):
        outcomes += ask(items[start : start + batch])
    pairs = [(o.value, label) for o, (_, label) in zip(outcomes, labelled, strict=True) if isinstance(o, Score)]
    scores, labels = [a for a, _ in pairs], [b for _, b in pairs]
    return {
        "pictures": len(labelled),
        "failures": len(labelled) - len(pairs),
        "spearman": spearman(scores, labels),
        "pairs_in_order": pairs_in_order(scores, labels),
    }


def read_labels(path: Path) -> list[tuple[RewardItem, float]]:
    """Items and labels of a JSONL file: {"image", "prompt", "label", and optionally "mask", "source", "reference",
    "text"}; pictures lie relative to the file.

    Raises:
        ConfigError: a line that is not so.
    """
    found: list[tuple[RewardItem, float]] = []
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except OSError as error:
        raise ConfigError(f"--labels: given {str(path)!r}: {(error.strerror or str(error)).lower()}") from None
    except UnicodeDecodeError as error:
        raise ConfigError(f"--labels: {path}: not UTF-8 (byte {error.start}); save it as UTF-8") from None
    for number, line in enumerate(lines, 1):
        where = f"{path}:{number}"
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except ValueError as error:
            raise ConfigError(f"{where}: not JSON: {error}") from None
        if not isinstance(row, dict) or not {"image", "prompt", "label"} <= row.keys() <= _LABELLED:
            raise ConfigError(
                f"{where}: a line has image, prompt and label, and may have mask, source, reference, text"
            )
        absent = {n: row[n] for n in sorted(_LABELLED - {"label"}) if n in row and not isinstance(row[n], str)}
        wrong = [n for n, value in absent.items() if value is not None or n in ("image", "prompt")]
        if wrong:
            raise ConfigError(f"{where}: {wrong[0]}: given {row[wrong[0]]!r}; it must be a string")
        label = row["label"]
        if isinstance(label, bool) or not isinstance(label, int | float) or not math.isfinite(label):
            raise ConfigError(f"{where}: label: given {label!r}; it must be a finite number")
        pictures = {n: path.parent / row[n] if row.get(n) else None for n in ("mask", "source", "reference")}
        item = item_of(path.parent / row["image"], row["prompt"], **pictures)
        found.append((replace(item, metadata={"text": row["text"]} if "text" in row else {}), float(label)))
    if len(found) < 2:
        raise ConfigError(f"--labels: {path} has {len(found)} pictures; agreement needs two or more")
    return found


def percentile(values: Sequence[float], share: float) -> float:
    """The value that this share of them does not exceed."""
    return sorted(values)[max(0, math.ceil(share * len(values)) - 1)]


def spearman(a: Sequence[float], b: Sequence[float]) -> float | None:
    """Pearson's correlation of the ranks, ties sharing theirs; None where one side is all alike."""
    first, second = _ranks(a), _ranks(b)
    if len(a) < 2 or first.std() == 0 or second.std() == 0:
        return None
    return float(np.corrcoef(first, second)[0, 1])


def pairs_in_order(scores: Sequence[float], labels: Sequence[float]) -> float | None:
    """Share of the pairs of different labels whose scores are in the same order, equal scores counting half."""
    points = [
        0.5 if scores[i] == scores[j] else float((scores[i] > scores[j]) == (labels[i] > labels[j]))
        for i in range(len(scores))
        for j in range(i)
        if labels[i] != labels[j]
    ]
    return sum(points) / len(points) if points else None


def _ranks(values: Sequence[float]) -> np.ndarray[Any, np.dtype[np.float64]]:
    column = np.asarray(values, np.float64)
    return np.asarray([(column < v).sum() + ((column == v).sum() - 1) / 2 for v in column], np.float64)
