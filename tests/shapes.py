"""Signs of four shapes, for runs that train images in their own shape."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

from retouch.tiny.signs import draw_words, write_signs

OWN_SHAPE = {"pixels": 2048, "max_aspect": 8}
"""The resolution of such a run."""

SHAPES = {(32, 64): (32, 64), (48, 48): (40, 40), (64, 32): (62, 32), (16, 128): (20, 144)}
"""Shape of an example under it -> (height, width) of an image; only the first is one of the shapes itself."""


def write_shapes(folder: Path, each: int = 4, sizes: Mapping[tuple[int, int], tuple[int, int]] = SHAPES) -> Path:
    """`each` signs with targets of every size -> a manifest that lists them in turn."""
    entries: list[list[dict[str, object]]] = []
    for number, size in enumerate(sizes.values()):
        words, first = draw_words(each, "train", 7 + number), 100 * number
        write_signs(folder / str(number), words, size, 7, first_id=first)
        entries.append(
            [
                {
                    "id": first + n,
                    "prompt": f"the text {word}",
                    "text": word,
                    "image_path": f"{number}/test{first + n}_source.png",
                    "mask_path": f"{number}/test{first + n}_mask.png",
                    "target_path": f"{number}/test{first + n}_source.png",
                    "win_path": f"{number}/test{first + n}_source.png",
                    "lose_path": f"{number}/test{first + (n + 1) % each}_source.png",
                    "label": ("good", "bad")[n % 2],
                }
                for n, word in enumerate(words)
            ]
        )
    listed = [entry for turn in zip(*entries, strict=True) for entry in turn]
    manifest = folder / "manifest.jsonl"
    manifest.write_text("".join(json.dumps(entry) + "\n" for entry in listed), encoding="utf-8")
    return manifest
