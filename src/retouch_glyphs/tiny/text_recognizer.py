"""Train the network of `retouch_glyphs.text_recognizer` on rendered lines, on a CPU in minutes.

The loss is CTC; in the first third of the training a cross-entropy on the columns of the characters' centres is added,
without which CTC learns nothing for many steps. The card beside the weights has the seed, the fonts, and the share of
characters that are read right: in fonts of which no training line has a family, and on signs.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from time import monotonic
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from retouch.data.sampler import derive_seed
from retouch.files.model_files import tiny_path
from retouch.files.saved_tensors import load_frozen
from retouch.imaging.masks import mask_box
from retouch.rewards.pixels import unit_pixels
from retouch.rewards.text_distance import edit_distance
from retouch.tiny.signs import draw_sign, draw_words
from retouch.tiny.training import Updates, require_empty, save_weights, write_card
from retouch_glyphs.text_recognizer import (
    COLUMN,
    HEIGHT,
    WEIGHTS,
    RecognizerNetwork,
    classes_of,
    line_pixels,
    read_greedily,
)
from retouch_glyphs.tiny.written_lines import LINE_FONTS, TESTED, UNSEEN_FONTS, Line, LineSetting, draw_lines

REDRAWING = "flux_fill"
"""Tiny base whose autoencoder redraws some training lines, with noise on the latents."""

_REDRAWN = 0.25  # share of the lines
_LOWEST_REDRAWN, _HIGHEST_REDRAWN = 16, 36  # heights in pixels at which the autoencoder was trained, about
_BUCKET = 4  # columns: lines of a batch have one width, a multiple of it
_WIDEST = 88  # columns of a training line


@dataclass(frozen=True)
class RecognizerTraining:
    """How the network of the package is trained."""

    lines: int = 18_000
    epochs: int = 6
    batch: int = 32
    lr: float = 3e-3
    test_lines: int = 500


def build_recognizer(
    out: Path, seed: int, training: RecognizerTraining | None = None, fonts: Sequence[str] | None = None
) -> dict[str, Any]:
    """Train, write `out`: fp16 weights and the card, and measure on lines of other fonts and on signs.

    Args:
        fonts: of the training lines; None takes `LINE_FONTS`.

    Returns:
        The card, and `seconds`.

    Raises:
        ConfigError: an `out` that holds files.
        FontsMissing: a font package is not installed.
    """
    require_empty(out)
    training = training or RecognizerTraining()
    unseen = {
        f"{low} pixels": draw_lines(
            training.test_lines, UNSEEN_FONTS, derive_seed(seed, "test", low), LineSetting((low, high), False, 10)
        )
        for low, high in (TESTED.heights, (16, 24))
    }  # first: a missing font is reported at once
    started = monotonic()
    fonts = fonts or LINE_FONTS
    lines = draw_lines(training.lines, fonts, derive_seed(seed, "train"))
    pixels = inputs_of(lines, seed)
    drawn = monotonic()
    network = train(pixels, lines, training, seed)
    save_weights(network, out / WEIGHTS)
    network = load_frozen(RecognizerNetwork, out / WEIGHTS)
    signs = sign_crops(training.test_lines, seed)
    redrawn = [(_redrawn(crop, 0.0, torch.Generator()), word) for crop, word in signs]
    lines_of = {font: [line for line in unseen["32 pixels"] if line.font == font] for font in UNSEEN_FONTS}
    card = {
        "command": f"retouch tiny build text_recognizer --out FOLDER --seed {seed}",
        "seed": seed,
        "training": asdict(training),
        "fonts": {
            "train": list(fonts),
            "unseen": UNSEEN_FONTS,
            "shared": "train: with glyph_structure's training letters; unseen: all fonts of the signs and of "
            "glyph_correlation, glyph_structure's test letters, and its training letters in Hanken Grotesk",
        },
        "autoencoder": f"of the tiny base {REDRAWING}; it redrew a share of {_REDRAWN} of the training lines",
        "letters": {
            **{f"unseen fonts, {name}": accuracy(network, crops_of(lines)) for name, lines in unseen.items()},
            "signs": accuracy(network, signs),
            "signs, redrawn by the autoencoder": accuracy(network, redrawn),
            "by unseen font": {font: accuracy(network, crops_of(lines)) for font, lines in lines_of.items()},
        },
    }
    return write_card(out, card, started, drawn)


def crops_of(lines: Sequence[Line]) -> list[tuple[Tensor, str]]:
    """Pixels [3, h, w] of lines, and their texts."""
    return [(unit_pixels(line.pixels), line.text) for line in lines]


def sign_crops(count: int, seed: int) -> list[tuple[Tensor, str]]:
    """Mask boxes [3, h, w] of held-out signs of the tiny bases' size, and their words."""
    signs = [draw_sign(word, (32, 64), seed) for word in draw_words(count, "held_out", seed)]
    crops = [unit_pixels(np.asarray(sign.picture.crop(mask_box(sign.mask)))) for sign in signs]
    return [(crop, sign.word) for crop, sign in zip(crops, signs, strict=True)]


def inputs_of(lines: Sequence[Line], seed: int) -> list[Tensor]:
    """Input [1, 32, W] of each line, W a multiple of `_BUCKET` columns; some of them redrawn."""
    draw = np.random.default_rng(derive_seed(seed, "redraw"))
    noise = torch.Generator().manual_seed(derive_seed(seed, "latents"))
    made: list[Tensor] = []
    for line in lines:
        crop = unit_pixels(line.pixels)
        if draw.random() < _REDRAWN and len(line.pixels) <= _HIGHEST_REDRAWN:
            crop = _redrawn(crop, float(draw.uniform(0, 0.5)), noise)
        width = max(1, round(HEIGHT * crop.shape[2] / crop.shape[1] / COLUMN / _BUCKET)) * COLUMN * _BUCKET
        wide = functional.interpolate(
            crop[None], (HEIGHT, min(width, _WIDEST * COLUMN)), mode="bilinear", align_corners=False, antialias=True
        )
        made.append(line_pixels(wide[0]))
    return made


def train(
    pixels: Sequence[Tensor], lines: Sequence[Line], training: RecognizerTraining, seed: int
) -> RecognizerNetwork:
    """A network trained from random weights on batches of one width, with noise, shifts by up to 2 pixels, and random
    polarity."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(derive_seed(seed, "weights"))
        network = RecognizerNetwork()
    network.to(memory_format=torch.channels_last)  # pyright: ignore[reportCallIssue]
    draw = torch.Generator().manual_seed(derive_seed(seed, "order"))
    batches = [batch for _ in range(training.epochs) for batch in batches_of(pixels, training.batch, draw)]
    updates = Updates("text recognizer", network.parameters(), len(batches), training.lr, ramp=len(batches) // 10 + 1)
    for step in updates:
        chosen = batches[step]
        shown = _varied(torch.stack([pixels[i] for i in chosen]), draw).contiguous(memory_format=torch.channels_last)
        with torch.autocast("cpu", torch.bfloat16):  # half the time where the CPU has bf16
            logits = network.logits(shown)
        names = logits.float().log_softmax(-1)
        loss = _ctc(names, [lines[i].text for i in chosen])
        guide = max(0.0, 1 - 3 * step / len(batches))
        if guide:
            columns = torch.stack([_columns(lines[i], names.shape[1]) for i in chosen])
            weight = torch.where(columns > 0, 1.0, 0.3)
            wrong = functional.nll_loss(names.flatten(0, 1), columns.flatten(), reduction="none")
            loss = loss + guide * (wrong * weight.flatten()).sum() / weight.sum()
        updates.apply(loss)
    return network.eval().requires_grad_(False)


def batches_of(pixels: Sequence[Tensor], size: int, draw: torch.Generator) -> list[list[int]]:
    """Numbers of the lines of each batch, in random order; the lines of a batch have one width."""
    widths: dict[int, list[int]] = {}
    for i in torch.randperm(len(pixels), generator=draw).tolist():
        widths.setdefault(pixels[i].shape[2], []).append(i)
    batches = [same[i : i + size] for same in widths.values() for i in range(0, len(same), size)]
    return [batches[i] for i in torch.randperm(len(batches), generator=draw).tolist()]


def _varied(pixels: Tensor, draw: torch.Generator) -> Tensor:
    down, right = torch.randint(-2, 3, (2,), generator=draw).tolist()
    moved = pixels.roll((down, right), (2, 3))
    polarity = torch.randint(0, 2, (len(pixels), 1, 1, 1), generator=draw) * 2.0 - 1
    strength = 0.3 * torch.rand((len(pixels), 1, 1, 1), generator=draw)
    return moved * polarity + strength * torch.randn(pixels.shape, generator=draw)


def _ctc(names: Tensor, texts: Sequence[str]) -> Tensor:
    """Mean over the lines of -log-likelihood / characters."""
    classes = [_known(text) for text in texts]
    target = torch.tensor([one for some in classes for one in some])
    lengths = torch.tensor([len(some) for some in classes])
    columns = torch.full((len(texts),), names.shape[1])
    return functional.ctc_loss(names.transpose(0, 1), target, columns, lengths, zero_infinity=True)


def _columns(line: Line, count: int) -> Tensor:
    """Class of each of `count` columns [T]: of a character at its centre, else blank."""
    found = torch.zeros(count, dtype=torch.long)
    for place, name in zip(line.centres, _known(line.text), strict=True):
        found[int(place * count)] = name
    return found


def _known(text: str) -> list[int]:
    classes = classes_of(text)
    assert classes is not None  # the text has only characters of the network
    return classes


def accuracy(network: RecognizerNetwork, crops: Sequence[tuple[Tensor, str]]) -> float:
    """1 - edit distances / characters over all lines, with case."""
    wrong = 0
    for crop, text in crops:
        with torch.no_grad():
            wrong += edit_distance(read_greedily(network(line_pixels(crop)[None])[0])[0], text)
    return round(1 - wrong / sum(len(text) for _, text in crops), 4) if crops else 0.0


def _redrawn(crop: Tensor, noise: float, draw: torch.Generator) -> Tensor:
    """A crop [3, h, w] in [0, 1] as the tiny autoencoder decodes it.

    Args:
        noise: standard deviation of what is added to the latents, in theirs.
    """
    global _autoencoder
    if _autoencoder is None:
        from diffusers import AutoencoderKL

        _autoencoder = AutoencoderKL.from_pretrained(tiny_path(REDRAWING) / "vae").float().eval()
    height, width = crop.shape[1:]
    down, right = -height % 8, -width % 8
    padded = functional.pad(crop[None] * 2 - 1, (0, right, 0, down), mode="replicate")
    with torch.no_grad():
        latents = _autoencoder.encode(padded).latent_dist.mean
        latents = latents + noise * latents.std() * torch.randn(latents.shape, generator=draw)
        decoded = _autoencoder.decode(latents).sample
    return (decoded[0, :, :height, :width] / 2 + 0.5).clamp(0, 1)


_autoencoder: Any = None
