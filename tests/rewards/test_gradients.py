"""`values` of the scorers with gradients: equal to `score`, a right gradient, and none where a pixel cannot count."""

from __future__ import annotations

import typing
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from transformers import AutoTokenizer

from retouch.imaging.masks import mask_box
from retouch.rewards import REWARDS
from retouch.rewards.pixels import rounded_pixels, unit_pixels, with_image
from retouch.rewards.protocol import RewardItem
from retouch.rewards.scorers import make_scorer
from retouch.rewards.scorers.clip import ClipTowers
from retouch.rewards.scorers.imscore import ImscoreReward
from retouch.rewards.scorers.kept_area import KeptAreaReward
from retouch.rewards.scorers.lpips import LpipsReward
from retouch.rewards.scorers.preservation import PreservationReward
from retouch.tiny.signs import draw_sign
from retouch.types import Failure, Score
from tests.rewards.test_hps import open_clip_weights
from tests.rewards.test_image_distances import WIDTHS
from tests.tiny_models import tiny_clip

WORDS = ("MOKA", "TUFI", "BERU")


@dataclass(frozen=True)
class Case:
    """A scorer with its options.

    Attributes:
        untouched: pixels [H, W] of an item whose gradient is exactly 0; None if every pixel counts.
        tolerance: largest difference of `values` on uint8 pixels to `score`.
    """

    name: str
    options: dict[str, Any]
    untouched: Callable[[RewardItem], Any] | None = None
    tolerance: float = 1e-5


def beside_the_box(item: RewardItem) -> Any:
    assert item.mask is not None
    left, top, right, bottom = mask_box(item.mask)
    beside = np.ones(item.mask.shape, bool)
    beside[top:bottom, left:right] = False
    return beside


def masked(item: RewardItem) -> Any:
    return item.mask == 255


def far_from_the_edge(item: RewardItem) -> Any:
    """Farther inside than the band of 3 pixels and Sobel's neighbour."""
    assert item.mask is not None
    left, top, right, bottom = mask_box(item.mask)
    far = np.zeros(item.mask.shape, bool)
    far[top + 4 : bottom - 4, left + 4 : right - 4] = True
    return far


def beside_the_centre(item: RewardItem) -> Any:
    """A crop of 32 x 32 around the centre of 32 x 64 pixels, which are not resized."""
    beside = np.ones(item.image.shape[:2], bool)
    beside[:, 16:48] = False
    return beside


CASES = (
    Case("recognizer", {}, beside_the_box),
    Case("recognizer", {"value": "probability"}, beside_the_box),
    Case("recognizer", {"line": "ink"}, beside_the_box),
    Case("glyph_structure", {"boxes": "equal"}, beside_the_box),
    Case("glyph_structure", {"boxes": "equal", "over": "worst_quarter"}, beside_the_box),
    Case("seam", {}, far_from_the_edge, 2e-3),  # `score` rounds the luminance
    Case("preservation", {}, masked),
    Case("lpips", {"region": "all"}),
    Case("lpips", {"region": "kept"}, masked),
    Case("clip", {}, beside_the_centre),  # 32 pixels high: nothing is resized
    Case("pickscore", {}, beside_the_centre, 2e-4),
    Case("hpsv2", {}),
    Case("glyph_structure", {"boxes": "fitted"}, beside_the_box),
)


@cache
def folder() -> Path:
    import tempfile

    return Path(tempfile.mkdtemp(prefix="retouch-gradients-"))


@cache
def loaded(index: int) -> Any:
    case = CASES[index]
    given = dict(case.options)
    if case.name == "lpips":
        given |= {"backbone": str(folder() / "vgg16.pth"), "heads": str(folder() / "vgg.pth")}
        draw = torch.Generator().manual_seed(0)
        backbone: dict[str, Tensor] = {}
        for number, (width, out) in WIDTHS.items():
            backbone[f"features.{number}.weight"] = torch.randn(out, width, 3, 3, generator=draw) / (3 * width**0.5)
            backbone[f"features.{number}.bias"] = torch.randn(out, generator=draw) / 10
        torch.save(backbone, given["backbone"])
        taps = (2, 7, 14, 21, 28)
        heads = {
            f"lin{i}.model.1.weight": torch.rand(1, WIDTHS[n][1], 1, 1, generator=draw) for i, n in enumerate(taps)
        }
        torch.save(heads, given["heads"])
    elif case.name in ("clip", "pickscore"):
        given |= {"path": tiny_clip(), "processor": ""}
    elif case.name == "hpsv2":
        weights = open_clip_weights(len(AutoTokenizer.from_pretrained(tiny_clip())))
        torch.save({"state_dict": weights}, folder() / "hps.pt")
        given |= {"path": str(folder() / "hps.pt"), "processor": tiny_clip(), "images_per_forward": 2}
    scorer: Any = make_scorer(case.name, given)
    scorer.load("cpu")
    return scorer


def in_float64(scorer: Any) -> Any:
    """The scorer with its network in float64, if it holds one; the others follow the images."""
    for holder in (getattr(scorer, "_towers", None), getattr(scorer, "_model", None)):
        network = getattr(holder, "model", holder)
        if isinstance(network, nn.Module):
            network.double()
    return scorer


def items() -> list[RewardItem]:
    found: list[RewardItem] = []
    for number, word in enumerate(WORDS):
        sign = draw_sign(word, (32, 64), 3, "CaladeaBold")
        noise = np.random.default_rng(number).integers(-20, 21, (32, 64, 3))
        image = np.clip(np.asarray(sign.picture) + noise, 0, 255).astype(np.uint8)
        ground, mask = np.asarray(sign.ground), np.asarray(sign.mask)
        found.append(RewardItem(number, f"a sign with {word}", image, mask, ground, metadata={"text": word}))
    return found


def images_of(some: list[RewardItem]) -> Tensor:
    return torch.stack([unit_pixels(item.image) for item in some])


def blind(item: RewardItem) -> RewardItem:
    """The item with other pixels: `values` must not read them."""
    return replace(item, image=np.zeros_like(item.image))


every_case = pytest.mark.parametrize(
    "index", range(len(CASES)), ids=[f"{c.name}-{[*c.options.values()]}" for c in CASES]
)


@every_case
def test_values_of_uint8_pixels_are_the_scores(index: int) -> None:
    scorer, some = loaded(index), items()
    scores = [outcome.value for outcome in scorer.score(some)]
    values = scorer.values(images_of(some), [blind(item) for item in some])
    assert [value.shape for value in values] == [()] * len(some)
    assert torch.stack(values).tolist() == pytest.approx(scores, abs=CASES[index].tolerance)
    assert len({round(score, 6) for score in scores}) == len(some)


@every_case
def test_a_value_depends_on_its_own_image_alone(index: int) -> None:
    scorer, some = loaded(index), items()
    images = images_of(some).requires_grad_()
    values = scorer.values(images, some)
    alone = [scorer.values(images[i : i + 1], [item])[0] for i, item in enumerate(some)]
    assert torch.stack(values).tolist() == pytest.approx(torch.stack(alone).tolist(), abs=1e-5)
    [gradient] = torch.autograd.grad(values[1], images)
    assert gradient[1].abs().max() > 0 and gradient[0].abs().max() == gradient[2].abs().max() == 0


@every_case
def test_the_gradient_is_zero_where_a_pixel_cannot_count(index: int) -> None:
    scorer, untouched = loaded(index), CASES[index].untouched
    [item] = items()[:1]
    images = images_of([item]).requires_grad_()
    [gradient] = torch.autograd.grad(scorer.values(images, [item])[0], images)
    assert torch.isfinite(gradient).all()
    pixels = gradient[0].abs().amax(0)
    if untouched is None:
        assert (pixels > 0).float().mean() > 0.9
    else:
        still = torch.from_numpy(untouched(item))
        assert pixels[still].max() == 0 and (pixels[~still] > 0).float().mean() > 0.05


@every_case
def test_the_gradient_equals_finite_differences(index: int) -> None:
    """In float64, along random directions, also beyond [0, 1]; boxes are found on rounded pixels and do not move."""
    loaded.cache_clear()  # a network of its own
    scorer, some = in_float64(loaded(index)), items()[:1]
    loaded.cache_clear()
    draw = torch.Generator().manual_seed(0)
    images = images_of(some).double()
    images = (images + 2e-3 * torch.rand(images.shape, generator=draw, dtype=torch.float64) - 1e-3).requires_grad_()
    [gradient] = torch.autograd.grad(scorer.values(images, some)[0], images)
    for _ in range(3):
        direction = torch.randn(images.shape, generator=draw, dtype=torch.float64)
        step = 1e-8  # small enough that no rectifier changes its side
        with torch.no_grad():
            above, below = (float(scorer.values(images + s * step * direction, some)[0]) for s in (1, -1))
        slope = (above - below) / (2 * step)
        assert float((gradient * direction).sum()) == pytest.approx(slope, rel=1e-4, abs=1e-7)


def test_pixels_beyond_the_range_keep_their_gradient() -> None:
    scorer, some = loaded(0), items()[:1]
    images = (images_of(some) * 3 - 1).requires_grad_()
    [gradient] = torch.autograd.grad(scorer.values(images, some)[0], images)
    beyond = (images < 0) | (images > 1)
    assert (gradient[beyond].abs() > 0).any()


@pytest.mark.parametrize("index", [0, 3, 5, 6, 8])
def test_an_item_that_cannot_be_scored_fails_alone(index: int) -> None:
    scorer, some = loaded(index), items()
    assert some[1].mask is not None
    some[1] = replace(some[1], mask=some[1].mask[:8])
    values = scorer.values(images_of(some), some)
    assert [isinstance(value, Failure) for value in values] == [False, True, False]
    assert values[1].code == "bad_item"


def test_a_flat_image_has_a_finite_gradient() -> None:
    for index in (0, 2, 5, 6, 7, 8):
        some = items()[:1]
        assert some[0].source is not None
        for level in (0.0, 0.5):
            images = torch.full((1, 3, 32, 64), level).requires_grad_()
            some = [replace(some[0], source=rounded_pixels(images[0]))]
            [value] = loaded(index).values(images, some)
            [gradient] = torch.autograd.grad(value, images)
            assert torch.isfinite(gradient).all(), CASES[index].name


@pytest.mark.full
def test_recognised_boxes_have_values_too() -> None:
    scorer: Any = make_scorer("glyph_structure", {"detect": False, "threads": 1})
    scorer.load("cpu")
    some = [
        replace(item, image=np.asarray(draw_sign(w, (64, 128), 3, "CaladeaBold").picture))
        for item, w in zip(items(), WORDS)
    ]
    some = [
        replace(item, mask=np.asarray(draw_sign(w, (64, 128), 3, "CaladeaBold").mask)) for item, w in zip(some, WORDS)
    ]
    images = images_of(some).requires_grad_()
    values = scorer.values(images, some)
    assert torch.stack(values).tolist() == pytest.approx([o.value for o in scorer.score(some)], abs=1e-5)
    [gradient] = torch.autograd.grad(torch.stack(values).sum(), images)
    assert gradient.abs().amax((1, 2, 3)).min() > 0


@pytest.mark.parametrize("size", [(40, 72), (90, 50), (20, 20)])
def test_clip_on_resized_images_is_near_its_processor(size: tuple[int, int]) -> None:
    """The processor rounds what it resizes to 256 levels."""
    towers = ClipTowers(tiny_clip(), "", "cpu")
    pixels = np.random.default_rng(0).integers(0, 256, (*size, 3)).astype(np.uint8)
    smooth = rounded_pixels(nn.functional.avg_pool2d(unit_pixels(pixels), 5, 1, 2))
    with torch.no_grad():
        found = towers.of_pixels(unit_pixels(smooth)[None])
    assert torch.allclose(found, towers.of_images([smooth]), atol=2e-3)


def test_imscore_passes_the_gradient_of_its_model_on() -> None:
    class Mean(nn.Module):
        def score(self, pixels: Tensor, prompts: list[str]) -> Tensor:
            return pixels.mean((1, 2, 3))[:, None] + len(prompts)

    scorer: Any = make_scorer("imagereward", {"images_per_forward": 2})
    scorer._model, scorer._torch, scorer._device = Mean(), torch, "cpu"
    images = images_of(items()).requires_grad_()
    values = scorer.values(images, items())
    assert values[2].item() == pytest.approx(1 + images[2].mean().item())  # the last forward has one image
    [gradient] = torch.autograd.grad(values[0], images)
    assert torch.allclose(gradient[0], torch.full((3, 32, 64), 1 / (3 * 32 * 64))) and gradient[1:].abs().max() == 0


def test_every_differentiable_entry_has_values_and_no_other_has() -> None:
    assert issubclass(REWARDS["aesthetic"], ImscoreReward)
    for name in REWARDS:
        entry = REWARDS[name]
        made = typing.get_type_hints(entry.make)["return"]
        assert hasattr(made, "values") == entry.differentiable, name
    assert {"recognizer", "glyph_structure", "seam", "preservation"} <= {
        n for n in REWARDS if REWARDS[n].differentiable
    }


def test_preservation_of_the_composite_is_advised_against() -> None:
    assert PreservationReward().advice("preservation") == []
    [warning] = PreservationReward(paste_back=True).advice("kept")
    assert warning.startswith("rewards.kept.paste_back: given true") and "gradient 0; set paste_back=false" in warning
    files: dict[str, str] = {"backbone": "vgg16.pth", "heads": "vgg.pth"}
    for entry in (KeptAreaReward(paste_back=True), LpipsReward(**files, region="kept")):
        [warning] = entry.advice("kept")
        assert "every value is" in warning
    assert not KeptAreaReward().advice("kept") and not LpipsReward(**files).advice("kept")
    assert not LpipsReward(**files, region="kept", paste_back=False).advice("kept")


def test_rounding_an_image_and_back() -> None:
    levels = np.arange(256, dtype=np.uint8).repeat(3).reshape(16, 16, 3)
    assert np.array_equal(rounded_pixels(unit_pixels(levels)), levels)
    beyond = torch.tensor([-0.5, 0.4999 / 255, 1.5])[:, None, None].requires_grad_()
    assert rounded_pixels(beyond).tolist() == [[[0, 0, 255]]]
    assert with_image(items()[0], beyond).image.shape == (1, 1, 3)


def test_score_is_a_number() -> None:
    assert all(isinstance(outcome, Score) for outcome in loaded(0).score(items()))
