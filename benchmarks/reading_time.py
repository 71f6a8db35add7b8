"""Processor seconds in which the `ocr` reward finds and reads the lines of an image, one image at a time.

python benchmarks/reading_time.py --out benchmarks/results/reading_time.json
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
from loop_overhead import machine
from PIL import Image, ImageDraw, ImageFont

from retouch.rewards.protocol import Pixels
from retouch.rewards.scorers.ocr import OcrReward

PAGES = ((256, 1), (512, 1), (512, 6), (1024, 6))
"""Side in pixels, and lines of text."""

IMAGES = 8


def page(side: int, lines: int, seed: int) -> Pixels:
    """Lines of two words of six letters."""
    rng = np.random.default_rng(seed)
    image = Image.new("RGB", (side, side), (230, 225, 210))
    draw, font = ImageDraw.Draw(image), ImageFont.load_default(side // 12)
    for line in range(lines):
        letters = "".join(rng.choice(list("abcdefghijklmnop"), 12))
        place = (side // 10, side // 10 + line * side // (lines + 1))
        draw.text(place, f"{letters[:6]} {letters[6:]}", fill=(20, 20, 60), font=font)
    return np.asarray(image)


def seconds_of(scorer: Any, images: Sequence[Pixels]) -> list[float]:
    """Processor seconds of each image."""
    found: list[float] = []
    for image in images:
        before = time.process_time()
        scorer.read([image])
        found.append(time.process_time() - before)
    return found


def main(arguments: Sequence[str] | None = None) -> dict[str, Any]:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--images", type=int, default=IMAGES, help="of each kind")
    parser.add_argument("--out", type=Path, help="JSON to write")
    given = parser.parse_args(arguments)
    scorer = OcrReward(threads=1).make()
    scorer.load("cpu")
    scorer.read([page(512, 1, 0)])  # the first one allocates
    rows: list[dict[str, Any]] = []
    for side, lines in PAGES:
        seconds = seconds_of(scorer, [page(side, lines, seed) for seed in range(given.images)])
        row = {"side": side, "lines": lines, "seconds": round(median(seconds), 3)}
        rows.append({**row, "range": [round(min(seconds), 3), round(max(seconds), 3)]})
    result = {"machine": machine(), "rows": rows}
    print(json.dumps(rows))
    if given.out:
        given.out.write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")
    return result


if __name__ == "__main__":
    main()
