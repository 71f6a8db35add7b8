"""The image encoder of tiny runs is what its recipe writes."""

from __future__ import annotations

from pathlib import Path

import torch
from PIL import Image

from retouch.families.image_encoder import ImageEncoder
from retouch.imaging.glyphs import FONTS
from retouch.imaging.masks import mask_box
from retouch.tiny.image_encoder import (
    build_encoder,
    style_similarity,
)
from retouch.tiny.signs import (
    draw_sign,
    draw_words,
)


def test_the_recipe_writes_an_encoder_of_the_size_that_comes_with_the_package(tmp_path: Path) -> None:
    found = build_encoder(tmp_path / "e", 0, signs=16, steps=3, batch=4)
    assert 0 <= found["held_out"]["font_right"] <= 1
    built, packaged = ImageEncoder.load(str(tmp_path / "e")), ImageEncoder.load("tiny")
    pictures = [Image.new("RGB", (40, 20), colour) for colour in ("red", "navy")]
    assert built(pictures).shape == packaged(pictures).shape
    assert torch.equal(built.pixels(pictures[0]), packaged.pixels(pictures[0]))


def test_half_of_the_similarity_is_the_font_and_half_the_ink() -> None:
    faces = torch.tensor([0, 0, 1, 1])
    inks = torch.tensor([[0.1, 0.1, 0.1], [0.1, 0.1, 0.4], [0.1, 0.1, 0.1], [0.9, 0.9, 0.9]])
    found = style_similarity(faces, inks)
    assert torch.allclose(found[0], torch.tensor([1.0, 0.75, 0.5, 0.0]))  # 0.1 of 0.2 away: half of the half
    assert torch.equal(found, found.T)


def test_the_packaged_encoder_compares_fonts_and_inks_of_unseen_words() -> None:
    """Same ink in four fonts: the right one is nearest. Same font in two inks: the nearer ink is nearer."""
    encoder = ImageEncoder.load("tiny")
    near, far = (40, 10, 10), (10, 10, 70)
    fonts_right = inks_right = 0
    words = draw_words(24, "held_out", 7)
    for i, word in enumerate(words):
        face = list(FONTS)[i % len(FONTS)]
        reference = draw_sign(words[i - 1], (32, 64), 1, face, near)
        signs = [draw_sign(word, (32, 64), 2, name, near) for name in FONTS]
        signs.append(draw_sign(word, (32, 64), 2, face, far))
        vectors = encoder([s.picture.crop(mask_box(s.mask)) for s in (reference, *signs)])
        cosines = torch.nn.functional.cosine_similarity(vectors[1:], vectors[:1])
        fonts_right += int(cosines[:4].argmax()) == i % len(FONTS)
        inks_right += bool(cosines[i % len(FONTS)] > cosines[4])
    assert fonts_right >= 23 and inks_right >= 23
