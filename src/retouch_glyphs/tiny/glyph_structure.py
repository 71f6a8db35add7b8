"""Train the network of `retouch_glyphs.glyph_structure` on rendered letters, on a CPU in minutes.

Half of the letters are broken; the loss is binary cross-entropy. The robust network starts from the standard one of the
package and is trained on every letter a second time, with a perturbation that raises this loss (adversarial training:
Madry et al., "Towards Deep Learning Models Resistant to Adversarial Attacks", 2018). The card beside the weights has
the seed, the fonts, and how well the network separates broken letters from whole ones, in fonts of which no training
letter has a family.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from time import monotonic
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional

from retouch.data.sampler import derive_seed
from retouch.files.saved_tensors import load_frozen
from retouch.rewards.pixels import unit_pixels
from retouch.tiny.training import Updates, require_empty, save_weights, write_card
from retouch_glyphs.glyph_structure import WEIGHTS, GlyphNetwork, letter_pixels, packaged
from retouch_glyphs.tiny.broken_letters import (
    STRUCTURAL,
    TEST_FONTS,
    TRAIN_FONTS,
    Letter,
    LetterSetting,
    draw_letters,
    names_of,
)

SHARES = {"erase": 0.28, "add": 0.32, "warp": 0.06, "splice": 0.12, "merge": 0.08, "other": 0.08, "nothing": 0.06}
"""Share of each defect among the broken letters of the training."""

UNNAMED = frozenset({"splice", "other", "nothing"})
"""Defects that show no letter, or not the asked one."""

ALONE = LetterSetting(alone=True, heights=(32, 32), lowest=None)
"""Test letters: one in an image of 32 pixels, as a reader gets it too."""


@dataclass(frozen=True)
class StructureTraining:
    """How the standard network of the package is trained."""

    letters: int = 40_000
    epochs: int = 14
    batch: int = 128
    lr: float = 3e-3
    test_letters: int = 1000


@dataclass(frozen=True)
class RobustTraining(StructureTraining):
    """How the robust network of the package is trained.

    Attributes:
        epsilon: largest Euclidean norm of a perturbation of a letter; pixels lie in [-1, 1].
        ascents: steps that find a perturbation.
    """

    epochs: int = 7
    lr: float = 1e-3
    epsilon: float = 1.0
    ascents: int = 2


def build_structure(
    out: Path, seed: int, training: StructureTraining | None = None, fonts: Sequence[str] | None = None
) -> dict[str, Any]:
    """Train, write `out`: fp16 weights and the card, and measure on letters of other fonts.

    Args:
        training: None is that of the standard network; `RobustTraining` starts from it.
        fonts: of the training letters; None takes all of `TRAIN_FONTS`.

    Returns:
        The card, and `seconds`.

    Raises:
        ConfigError: an `out` that holds files.
        FontsMissing: a font package is not installed.
    """
    require_empty(out)
    training = training or StructureTraining()
    test = held_out_letters(training.test_letters, seed)  # first: a missing font is reported at once
    started = monotonic()
    fonts = fonts or names_of(TRAIN_FONTS)
    letters = draw_letters(training.letters, fonts, derive_seed(seed, "train"), SHARES)
    drawn = monotonic()
    network = train(letters, training, seed)
    save_weights(network, out / WEIGHTS)
    network = load_frozen(GlyphNetwork, out / WEIGHTS)
    in_words = draw_letters(training.test_letters, names_of(TEST_FONTS), derive_seed(seed, "words"), SHARES)
    name = "glyph_structure_robust" if isinstance(training, RobustTraining) else "glyph_structure"
    card = {
        "command": f"retouch tiny build {name} --out FOLDER --seed {seed}",
        "seed": seed,
        "training": asdict(training),
        "defects": SHARES,
        "fonts": {"train": list(fonts), "test": names_of(TEST_FONTS)},
        "auc": {
            "letters of test fonts": aucs(test, broken_probabilities(network, test)),
            "crops of words in test fonts": aucs(in_words, broken_probabilities(network, in_words)),
        },
    }
    if isinstance(training, RobustTraining):
        card["auc under attack"] = {
            variant: aucs(test, attacked_probabilities(attacked, test, training.epsilon))["all"]
            for variant, attacked in (("standard", packaged()), ("robust", network))
        }
    return write_card(out, card, started, drawn)


build_robust = partial(build_structure, training=RobustTraining())


def held_out_letters(count: int, seed: int) -> list[Letter]:
    """Letters alone in an image, in fonts that the training never shows; half have one of the `STRUCTURAL` defects."""
    shares: dict[str, float] = dict.fromkeys(STRUCTURAL, 1 / len(STRUCTURAL))
    return draw_letters(count, names_of(TEST_FONTS), derive_seed(seed, "test"), shares, ALONE)


def train(letters: Sequence[Letter], training: StructureTraining, seed: int) -> GlyphNetwork:
    """A network trained on batches of pairs (`draw_letters`), which are shifted by up to 2 pixels and change polarity
    at random: from random weights, or for `RobustTraining` from those of the standard network, on each pair and its
    perturbation.

    The names of the shown letters are learned too: strokes that make letters are learned from them in few steps, and
    from broken or whole alone in many.
    """
    robust = training if isinstance(training, RobustTraining) else None
    if robust:
        network = copy.deepcopy(packaged()).requires_grad_(True).train()
    else:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(derive_seed(seed, "weights"))
            network = GlyphNetwork()
    pixels, asked, broken = tensors_of(letters)
    named = torch.tensor([-100 if letter.defect in UNNAMED else letter.asked for letter in letters])
    pixels = pixels.to(memory_format=torch.channels_last)
    network.to(memory_format=torch.channels_last)  # pyright: ignore[reportCallIssue]
    draw = torch.Generator().manual_seed(derive_seed(seed, "order"))
    steps = training.epochs * (len(letters) // training.batch)
    updates = Updates("glyph structure", network.parameters(), steps, training.lr, ramp=max(1, steps // 10))
    order = torch.empty(0, dtype=torch.long)
    for _ in updates:
        if len(order) < training.batch // 2:
            order = torch.randperm(len(letters) // 2, generator=draw)
        pairs, order = order[: training.batch // 2], order[training.batch // 2 :]
        rows = torch.cat([2 * pairs, 2 * pairs + 1])
        shift = torch.randint(-2, 3, (2,), generator=draw).tolist()
        polarity = torch.randint(0, 2, (len(pairs), 1, 1, 1), generator=draw).repeat(2, 1, 1, 1) * 2.0 - 1
        shown = shifted(pixels[rows], *shift) * polarity
        if robust:
            noise = torch.randn(shown.shape, generator=draw)
            change = attack(network, shown, asked[rows], broken[rows], robust.epsilon, robust.ascents, noise)
            shown, rows = torch.cat([shown, shown + change]), rows.repeat(2)
        with torch.autocast("cpu", torch.bfloat16):  # half the time where the CPU has bf16
            features = network.features(shown).float()
        logits, names = network.judge(features, asked[rows])
        wrong = functional.binary_cross_entropy_with_logits(logits, broken[rows])
        updates.apply(wrong + 0.3 * functional.cross_entropy(names, named[rows]))
    return network.eval().requires_grad_(False)


def attack(
    network: GlyphNetwork, pixels: Tensor, asked: Tensor, broken: Tensor, epsilon: float, ascents: int, noise: Tensor
) -> Tensor:
    """Perturbations [N, 1, H, W] that make the network take whole letters for broken ones and broken ones for whole:
    projected gradient ascent on its loss, in evaluation mode, with steps of 2 epsilon / `ascents`.

    Args:
        pixels: [N, 1, H, W] in [-1, 1].
        asked: indices [N] of `LETTERS`.
        broken: 0 or 1, [N].
        epsilon: largest Euclidean norm of the perturbation of a letter.
        noise: [N, 1, H, W]; the ascent starts in its direction, at half of `epsilon`.
    """
    training = network.training
    network.eval()
    change = _of_norm(noise, epsilon / 2)
    for _ in range(ascents):
        change.requires_grad_()
        with torch.enable_grad():
            with torch.autocast("cpu", torch.bfloat16):
                features = network.features(pixels + change).float()
            logits, _ = network.judge(features, asked)
            loss = functional.binary_cross_entropy_with_logits(logits, broken, reduction="sum")
        [ascent] = torch.autograd.grad(loss, change)
        moved = change.detach() + _of_norm(ascent, 2 * epsilon / ascents)
        change = moved * (epsilon / _norms(moved)).clamp(max=1)
    network.train(training)
    return change.detach()


def _of_norm(x: Tensor, norm: float) -> Tensor:
    return x * (norm / _norms(x))


def _norms(x: Tensor) -> Tensor:
    """Euclidean norms [N, 1, 1, 1], at least 1e-9."""
    return x.flatten(1).norm(dim=1).clamp(min=1e-9).view(-1, 1, 1, 1)


def attacked_probabilities(network: GlyphNetwork, letters: Sequence[Letter], epsilon: float) -> NDArray[np.float64]:
    """P(broken) of each letter, [N], perturbed by an `attack` of ten steps on the network."""
    pixels, asked, broken = tensors_of(letters)
    noise = torch.randn(pixels.shape, generator=torch.Generator().manual_seed(0))
    change = attack(network, pixels, asked, broken, epsilon, 10, noise)
    with torch.no_grad():
        return torch.sigmoid(network.judge(network.features(pixels + change), asked)[0]).double().numpy()


def shifted(pixels: Tensor, down: int, right: int) -> Tensor:
    """[N, 1, H, W] moved by up to some pixels, with 0 at the edges that become free."""
    padded = functional.pad(pixels, (2, 2, 2, 2))
    height, width = pixels.shape[2:]
    return padded[:, :, 2 - down : 2 - down + height, 2 - right : 2 - right + width]


def tensors_of(letters: Sequence[Letter]) -> tuple[Tensor, Tensor, Tensor]:
    """Inputs [N, 1, 32, 32], asked letters [N], and 1 for broken ones [N]."""
    pixels = torch.stack([letter_pixels(unit_pixels(letter.pixels)) for letter in letters])
    asked = torch.tensor([letter.asked for letter in letters])
    return pixels, asked, torch.tensor([float(letter.defect is not None) for letter in letters])


def broken_probabilities(network: GlyphNetwork, letters: Sequence[Letter]) -> NDArray[np.float64]:
    """P(broken) of each letter, [N]."""
    pixels, asked, _ = tensors_of(letters)
    with torch.no_grad():
        return torch.sigmoid(network(pixels, asked)).double().numpy()


def aucs(letters: Sequence[Letter], scores: NDArray[np.float64]) -> dict[str, float]:
    """Area under the ROC curve of broken letters against all whole ones: of all, and by defect.

    Args:
        scores: higher for broken letters.
    """
    whole = scores[[letter.defect is None for letter in letters]]
    found = {"all": scores[[letter.defect is not None for letter in letters]]}
    for name in dict.fromkeys(letter.defect for letter in letters if letter.defect):
        found[name] = scores[[letter.defect == name for letter in letters]]
    return {name: round(auc(some, whole), 4) for name, some in sorted(found.items())}


def auc(higher: NDArray[np.float64], lower: NDArray[np.float64]) -> float:
    """Share of pairs in which a value of the first sample exceeds one of the second; a tie counts half."""
    return float(np.mean((higher[:, None] > lower).astype(float) + 0.5 * (higher[:, None] == lower)))
