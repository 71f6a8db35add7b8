"""The image encoder of tiny runs is what its recipe writes."""

from __future__ import annotations

from pathlib import Path

import torch
from PIL import Image

from retouch.image_encoder import ImageEncoder
from retouch.recipes.tiny_encoder import build_encoder


def test_the_recipe_writes_an_encoder_of_the_size_that_comes_with_the_package(tmp_path: Path) -> None:
    found = build_encoder(tmp_path / "e", 0, signs=16, steps=3, batch=4)
    assert 0 <= found["held_out"]["font_right"] <= 1
    built, packaged = ImageEncoder.load(str(tmp_path / "e")), ImageEncoder.load("tiny")
    pictures = [Image.new("RGB", (40, 20), colour) for colour in ("red", "navy")]
    assert built(pictures).shape == packaged(pictures).shape
    assert torch.equal(built.pixels(pictures[0]), packaged.pixels(pictures[0]))
