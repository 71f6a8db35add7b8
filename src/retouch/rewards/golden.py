"""Two fixed images that the scorers can score: compared between servers, and in probes during a run. `anytext` fails on
them, because lines with places would change what `ocr_lines` reads."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from retouch.rewards.protocol import RewardItem
from retouch.types import Failure, Outcome, Score


def golden_items() -> list[RewardItem]:
    """The two images with everything that a scorer may need."""
    metadata = {
        "completion": "<think>It shall be plain.</think>A grey wall with one word on it, in gold, seen from the front.",
        "edit_type": "replace",
        "finished": True,
        "include": [{"class": "bench", "count": 1}],
        "knowledge_graph": {"elements": ["wall", "word"], "dependencies": ["Contains(wall, word)"]},
        "other_prompts": ["The text is 'SILVER'."],
        "source_text": "SILVER",
        "tag": "single_object",
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
    """Warnings about servers whose scores of the same images differ by more than rounding and batching explain, or that
    have none to compare."""
    problems: list[str] = []
    for name in next(iter(found.values())):
        values = {url: [o.value if isinstance(o, Score) else None for o in told[name]] for url, told in found.items()}
        scored = {url: column for url, column in values.items() if any(value is not None for value in column)}
        if silent := [url for url in values if url not in scored]:
            failure = next(outcome for outcome in found[silent[0]][name] if isinstance(outcome, Failure))
            problems.append(
                f"{name}: {', '.join(silent)} cannot score the golden images ({failure.code}: {failure.message}): "
                "whether all servers hold the same model is not known"
            )
        for url, column in list(scored.items())[1:]:
            first, reference = next(iter(scored.items()))
            pairs = [(a, b) for a, b in zip(reference, column, strict=True) if a is not None and b is not None]
            # Relative to the larger value, and absolute below 1: a score near 0 has no size to compare with.
            apart = max((abs(a - b) / max(1.0, abs(a), abs(b)) for a, b in pairs), default=0.0)
            if apart > tolerance:
                problems.append(
                    f"{name}: {first} and {url} differ by {apart:.3g} on the same images; check that they hold "
                    "the same model"
                )
    return problems
