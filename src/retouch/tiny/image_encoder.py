"""A tiny SigLIP that separates fonts and colours, trained from random weights on a CPU in about a minute.

It encodes the references of tiny runs. Linear probes on its output learn the font of a word and the colours of ink and
ground, from signs of the training vocabulary, whatever the word is.
"""

from __future__ import annotations

import json
import logging
from pathlib import Path
from time import monotonic
from typing import Any

import torch
from torch import Tensor, nn

from retouch.data.sampler import derive_seed
from retouch.families.image_encoder import ImageEncoder
from retouch.families.tiny import tiny_image_encoder
from retouch.imaging.glyphs import FONTS
from retouch.imaging.masks import mask_box
from retouch.tiny.signs import Sign, draw_sign, draw_words
from retouch.tiny.training import update

logger = logging.getLogger(__name__)

SIZE = (32, 64)
LETTERS = 4
FACES = tuple(FONTS)


def build_encoder(out: Path, seed: int, signs: int = 4000, steps: int = 600, batch: int = 64) -> dict[str, Any]:
    """Train, write `out` in the hub's layout with fp16 weights, and measure on held-out words.

    Returns:
        `held_out`: share of right fonts, and the mean error of the ink colour in [0, 255]; `seconds`.
    """
    started = monotonic()
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model: Any = tiny_image_encoder()
        probe = nn.Linear(model.config.hidden_size, len(FACES) + 6)
    encoder = ImageEncoder(model, "pooler_output")
    pixels, faces, colours = _examples(encoder, draw_words(signs // 2, "train", seed, LETTERS), seed, 2)
    parameters = [*model.requires_grad_(True).parameters(), *probe.parameters()]
    optimizer = torch.optim.AdamW(parameters, lr=2e-3, betas=(0.9, 0.98), weight_decay=0.01)
    rate = torch.optim.lr_scheduler.OneCycleLR(optimizer, 2e-3, total_steps=steps, pct_start=0.1)
    draw = torch.Generator().manual_seed(derive_seed(seed, "encoder"))
    for step in range(steps):
        rows = torch.randint(len(pixels), (batch,), generator=draw)
        vectors = model(pixel_values=pixels[rows]).pooler_output
        said = probe(vectors)
        wrong = nn.functional.cross_entropy(said[:, : len(FACES)], faces[rows])
        loss = wrong + 20 * nn.functional.mse_loss(said[:, len(FACES) :], colours[rows])
        unit = nn.functional.normalize(vectors, dim=1)
        loss = loss + 5 * nn.functional.mse_loss(unit @ unit.T, style_similarity(faces[rows], colours[rows, :3]))
        update(optimizer, loss, parameters)
        rate.step()
        if step % 100 == 0:
            logger.info("image encoder step %d: loss %.3f", step, float(loss.detach()))
    model.requires_grad_(False)
    pixels, faces, colours = _examples(encoder, draw_words(256, "held_out", seed, LETTERS), seed, 1)
    with torch.no_grad():
        said = probe(model(pixel_values=pixels).pooler_output)
    right = float((said[:, : len(FACES)].argmax(1) == faces).float().mean())
    error = float((said[:, len(FACES) : len(FACES) + 3] - colours[:, :3]).abs().mean()) * 255
    model.half().save_pretrained(out)
    _write_preprocessor(out, encoder.size)
    return {
        "held_out": {"font_right": round(right, 4), "ink_error": round(error, 2)},
        "seconds": round(monotonic() - started, 1),
    }


def style_similarity(faces: Tensor, inks: Tensor) -> Tensor:
    """Training target of the cosine of two signs: half for the same font, half for the same ink.

    Args:
        faces: index of the font, [N].
        inks: colours in [0, 1], [N, 3].

    Returns:
        [N, N] in [0, 1]; inks at a mean distance of 0.2 (51 of 255) or more count as different.
    """
    same_ink = 1 - (torch.cdist(inks, inks, p=1) / 3 / 0.2).clamp(max=1)
    return (faces[:, None] == faces[None]).float() / 2 + same_ink / 2


def _examples(encoder: ImageEncoder, words: list[str], seed: int, each: int) -> tuple[Tensor, Tensor, Tensor]:
    """Pixels [N, 3, S, S], index of the font [N], and colours of ink and ground [N, 6] in [0, 1] of cropped signs."""
    signs = [draw_sign(word, SIZE, derive_seed(seed, "reference", word, i)) for word in words for i in range(each)]
    pixels = torch.stack([encoder.pixels(sign.picture.crop(mask_box(sign.mask))) for sign in signs])
    faces = torch.tensor([FACES.index(sign.face) for sign in signs])
    return pixels, faces, torch.tensor([[*sign.ink, *_ground_of(sign)] for sign in signs]) / 255


def _ground_of(sign: Sign) -> tuple[int, ...]:
    """Colour in the middle of the ground."""
    return sign.ground.convert("RGB").getpixel((SIZE[1] // 2, SIZE[0] // 2))  # type: ignore[return-value]


def _write_preprocessor(out: Path, size: int) -> None:
    options = {
        "image_processor_type": "SiglipImageProcessor",
        "size": {"height": size, "width": size},
        "resample": 3,
        "image_mean": [0.5, 0.5, 0.5],
        "image_std": [0.5, 0.5, 0.5],
    }
    (out / "preprocessor_config.json").write_text(json.dumps(options, indent=2) + "\n", encoding="utf-8")
