"""Two fixed images that every scorer can score: compared between servers, and in probes during a run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from retouch.rewards.protocol import RewardItem
from retouch.types import Outcome, Score


def golden_items() -> list[RewardItem]:
    """The two images with everything that a scorer may need."""
    metadata = {
        "completion": "<think>It shall be plain.</think>A grey wall with one word on it, in gold, seen from the front.",
        "finished": True,
        "knowledge_graph": {"elements": ["wall", "word"], "dependencies": ["Contains(wall, word)"]},
        "text": "GOLD",
    }
    items: list[RewardItem] = []
    for number in range(2):
        noise = np.random.default_rng(number)
        image, source, reference = (noise.integers(0, 256, (64, 128, 3), np.uint8) for _ in range(3))
        mask = np.zeros((64, 128), np.uint8)
        mask[16:48, 16:112] = 255
        prompt = "The text is 'GOLD'."
        items.append(RewardItem(number, prompt, image, mask, source, reference, number, metadata))
    return items


def disagreements(found: Mapping[str, Mapping[str, Sequence[Outcome]]], tolerance: float = 1e-3) -> list[str]:
    """Warnings about servers whose scores of the same images differ by more than rounding and batching explain."""
    problems: list[str] = []
    (first, reference), *others = found.items()
    for url, columns in others:
        for name, column in columns.items():
            pairs = [
                (a.value, b.value)
                for a, b in zip(reference[name], column, strict=True)
                if isinstance(a, Score) and isinstance(b, Score)
            ]
            apart = max((abs(a - b) / max(1.0, abs(a), abs(b)) for a, b in pairs), default=0.0)
            if apart > tolerance:
                problems.append(
                    f"{name}: {first} and {url} differ by {apart:.3g} on the same images; check that they hold "
                    "the same model"
                )
    return problems
