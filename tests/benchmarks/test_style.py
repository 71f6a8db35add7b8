"""What the style benchmark found, as committed: adapters carry font and ink over; GRPO and DiffusionNFT add to it."""

from __future__ import annotations

import json
import sys
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import ImageFilter

REPOSITORY = Path(__file__).parents[2]
FOUND: dict[str, Any] = json.loads((REPOSITORY / "benchmarks/results/style.json").read_text(encoding="utf-8"))
ROWS: list[dict[str, Any]] = FOUND["rows"]

sys.path.insert(0, str(REPOSITORY / "benchmarks"))

import style  # noqa: E402

from retouch.tiny.signs import draw_sign, draw_words  # noqa: E402


def test_three_seeds_each() -> None:
    runs = {(row["algorithm"], row["seed"]) for row in ROWS}
    assert runs >= {(name, seed) for name in ("sft", "grpo", "nft") for seed in range(3)}


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row["run"])
def test_a_row_is_of_the_run_file_base_and_encoder_that_lie_here(row: dict[str, Any]) -> None:
    assert row["inputs"] == style.committed_inputs(row["algorithm"])
    assert row["images"] >= 192


@pytest.mark.parametrize("row", [r for r in ROWS if r["algorithm"] == "sft"], ids=lambda row: row["run"])
def test_supervision_carries_font_and_ink_over_and_reads_better(row: dict[str, Any]) -> None:
    assert row["gain"]["font_right"][1] > 0.3 and row["gain"]["ink_error"][2] < -5 and row["gain"]["ocr"][1] > 0
    held_out = row["held_out"]
    # it is the reference that is followed: by another item's style the same images are no better than the base
    assert held_out["shuffled/font_right"] < 0.35 and held_out["shuffled/ink_error"] > held_out["ink_error"] + 5


@pytest.mark.parametrize("row", [r for r in ROWS if r["algorithm"] != "sft"], ids=lambda row: row["run"])
def test_rl_raises_the_likeness_of_the_font_on_every_seed(row: dict[str, Any]) -> None:
    assert row["gain"]["font_margin"][1] > 0 and row["gain"]["font_right"][0] > 0 and row["gain"]["ocr"][0] > 0


@pytest.mark.parametrize("algorithm", ["grpo", "nft"])
def test_rl_raises_reading_and_font_over_seeds(algorithm: str) -> None:
    gain = FOUND["pooled"][algorithm]
    assert gain["ocr"][1] > 0 and gain["font_right"][1] > 0 and gain["font_margin"][1] > 0


def test_the_page_says_what_was_found() -> None:
    page = " ".join((REPOSITORY / "docs/style-adapter.md").read_text(encoding="utf-8").split())
    assert " ".join(style.table(ROWS).split()) in page
    for algorithm, measure in product(("grpo", "nft"), ("ocr", "font_right", "font_margin")):
        mean, low, high = FOUND["pooled"][algorithm][measure]
        assert f"{mean:+.3f} [{low:+.3f}, {high:+.3f}]" in page
    for algorithm in ("grpo", "nft"):
        mean, low, high = FOUND["pooled"][algorithm]["ink_error"]
        assert low < 0 < high and f"ink error differs by {mean:+.1f} [{low:+.1f}, {high:+.1f}]" in page


def test_font_and_ink_of_true_signs() -> None:
    """Every font is told, inks exactly."""
    signs = [draw_sign(word, (32, 64), 3) for word in draw_words(40, "held_out", 3)]
    images = [(np.asarray(s.picture), np.asarray(s.mask)) for s in signs]

    def font_of(image: tuple[np.ndarray, np.ndarray], word: str) -> str:
        likeness = style.font_likeness(*image, word)
        return max(likeness, key=likeness.__getitem__)

    assert all(font_of(image, s.word) == s.face for image, s in zip(images, signs, strict=True))
    likeness = style.font_likeness(*images[0], signs[0].word)
    assert likeness[signs[0].face] > 0.95 and max(v for f, v in likeness.items() if f != signs[0].face) < 0.9
    blurred = [
        (np.asarray(s.picture.filter(ImageFilter.GaussianBlur(0.7))), m)
        for s, (_, m) in zip(signs, images, strict=True)
    ]
    assert sum(font_of(image, s.word) == s.face for image, s in zip(blurred, signs, strict=True)) >= 38
    for image, sign in zip(images, signs, strict=True):
        assert np.abs(np.subtract(style.ink_colour(*image), sign.ink)).max() <= 1
    assert not any(style.font_likeness(np.full((32, 64, 3), 200, np.uint8), images[0][1], "MOON").values())
