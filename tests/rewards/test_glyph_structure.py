"""The structure reward: whole letters above broken and other ones in any batch; boxes; a right gradient."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch
from benchmarks.words import draw_word
from pydantic import ValidationError

from retouch.rewards.protocol import RewardItem
from retouch.rewards.scorers.weights import file_digest
from retouch.tiny.signs import draw_sign
from retouch.types import Failure, Score
from retouch_glyphs.glyph_structure import FOLDERS, LETTERS, WEIGHTS, letter_pixels, packaged, structure_of
from retouch_glyphs.scorers.character_boxes import aligned, spans
from retouch_glyphs.scorers.glyph_structure import (
    GlyphStructureReward,
    GlyphStructureScorer,
    equal_slices,
    fitted_slices,
)


def sign(word: str = "MOKA", text: str | None = None, height: int = 64) -> RewardItem:
    drawn = draw_sign(word, (height, 2 * height), 3, "CaladeaBold")
    return RewardItem(0, "", np.asarray(drawn.picture), np.asarray(drawn.mask), metadata={"text": text or word})


def scored(items: list[RewardItem], **options: Any) -> list[Any]:
    return loaded(tuple(sorted(options.items()))).score(items)


@cache
def loaded(options: tuple[tuple[str, Any], ...]) -> GlyphStructureScorer:
    given = {"boxes": "equal", **dict(options)}
    scorer = GlyphStructureReward(**given, **({"threads": 1} if given["boxes"] == "recognised" else {})).make()
    scorer.load("cpu")
    return scorer


@pytest.mark.parametrize("options", [{"boxes": "equal"}, {"boxes": "fitted"}, {"boxes": "recognised", "detect": False}])
def test_whole_words_score_above_broken_ones(options: dict[str, Any]) -> None:
    """Means over words: of the strokes, a third is gone."""
    whole = [sign(word) for word in ("MOKA", "TUFI", "BERU", "HADE")]
    broken = [replace(item, image=item.image.copy()) for item in whole]
    for item in broken:
        item.image[::3] = item.image[2, 2]
    values = [np.mean([o.value for o in scored(items, **options)]) for items in (whole, broken)]
    assert values[0] > values[1] + 0.2


def test_another_network_gives_other_values_and_another_revision() -> None:
    items = [sign(word) for word in ("MOKA", "TUFI", "BERU", "HADE")]
    values = [[one.value for one in scored(items, network=network)] for network in ("standard", "robust")]
    assert values[0] == [one.value for one in scored(items)] and not set(values[0]) & set(values[1])
    assert all(np.mean(of) > 0.5 for of in values)
    revisions = {network: loaded((("network", network),)).spec.revision for network in ("standard", "robust")}
    for network, revision in revisions.items():  # the option alone makes them two
        assert file_digest(FOLDERS[network] / WEIGHTS) in revision


def test_another_word_scores_lower() -> None:
    """Whole letters, but not the asked ones."""
    words = ("MOKA", "TUFI", "BERU", "HADE")
    asked = [sign(word) for word in words]
    other = [sign(word, words[i - 1]) for i, word in enumerate(words)]
    for right, wrong in zip(scored(asked), scored(other), strict=True):
        assert right.value > wrong.value + 0.3


def test_light_on_dark_counts_as_dark_on_light() -> None:
    pixels = torch.rand((3, 1, 32, 32), generator=torch.Generator().manual_seed(4)) * 2 - 1
    letters = torch.tensor([0, 30, 55])
    assert torch.equal(packaged()(pixels, letters), packaged()(-pixels, letters))


def test_scores_do_not_depend_on_the_batch_and_repeat_exactly() -> None:
    items = [sign(word) for word in ("MOKA", "TUFI", "BERU")]
    together, again = scored(items), scored(items)
    alone = [scored([item])[0] for item in items]
    assert together == again == alone


def test_a_letter_that_is_not_found_counts_as_broken_and_no_letter_is_a_failure() -> None:
    [found] = scored([sign("MOKA", "MOKA1")], boxes="recognised", detect=False)
    assert isinstance(found, Score) and found.detail["missing"] == 1
    judged = [value for _, value in found.detail["letters"]]
    assert judged[-1] is None and found.value == pytest.approx(sum(judged[:-1]) / 5, abs=1e-3)
    blank = replace(sign(), image=np.full((64, 128, 3), 200, np.uint8))
    for options in ({"boxes": "equal"}, {"boxes": "fitted"}, {"boxes": "recognised", "detect": False}):
        [outcome] = scored([blank], **options)
        assert isinstance(outcome, Failure) and outcome.code == "bad_item" and "no box" in outcome.message
    [outcome] = scored([sign(text="你好")])
    assert isinstance(outcome, Failure) and "none of the letters" in outcome.message


def test_characters_that_the_network_does_not_know_are_not_judged() -> None:
    [outcome] = scored([sign("MOKA", "MÖ-A")])
    assert isinstance(outcome, Score) and outcome.detail["not_judged"] == 2
    assert [letter for letter, _ in outcome.detail["letters"]] == ["M", "A"]


def test_the_worst_quarter_is_that_of_the_letters() -> None:
    mean, worst = (scored([sign()], over=over)[0] for over in ("mean", "worst_quarter"))
    values = [value for _, value in mean.detail["letters"]]
    assert mean.value == pytest.approx(np.mean(values), abs=1e-3)
    assert worst.value == pytest.approx(min(values), abs=1e-3)


@pytest.mark.full
def test_lines_are_found_and_their_characters_in_order() -> None:
    first, second = (draw_word(["FredokaOne"], seed, None, height=64).pixels for seed in (2, 5))
    texts = [draw_word(["FredokaOne"], seed, None, height=64).text for seed in (2, 5)]
    page = np.full((260, 420, 3), 255, np.uint8)
    for top, word in ((40, first), (160, second)):
        page[top : top + word.shape[0], 60 : 60 + word.shape[1]] = word
    [outcome] = scored([RewardItem(0, "", page, metadata={"text": " ".join(texts)})], boxes="recognised")
    assert isinstance(outcome, Score) and outcome.detail["missing"] == 0
    assert [letter for letter, _ in outcome.detail["letters"]] == list("".join(texts))


def test_boxes_by_hand() -> None:
    assert np.allclose(spans([0.2, 0.4, 0.8]), [(0.1, 0.3), (0.3, 0.6), (0.6, 1.0)])
    assert spans([0.3]) == [(0.0, 1.0)]
    assert aligned("SHOP", "shqp") == [0, 1, 2, 3]
    assert aligned("SHOP", "SOP") == [0, None, 1, 2]
    assert aligned("SHOP", "xSHOPx") == [1, 2, 3, 4]
    assert equal_slices((3, 1, 13, 9), 4) == [(3, 1, 5, 9), (5, 1, 8, 9), (8, 1, 11, 9), (11, 1, 13, 9)]


def test_fitted_slices_by_hand() -> None:
    """A wide and a narrow letter: the cut leaves the middle for the gap, and each box ends a pixel beside its ink."""
    distance = np.zeros((12, 20))
    distance[3:9, 2:12] = 200
    distance[4:9, 14:17] = 200
    assert equal_slices((2, 3, 17, 9), 2)[0][2] == 10
    assert fitted_slices(distance, (2, 3, 17, 9), 2) == [(1, 2, 13, 10), (13, 3, 18, 10)]
    distance[4:9, 14:17] = 90  # less than half of the greatest contrast is no ink
    assert fitted_slices(distance, (2, 3, 17, 9), 2)[1] is None


def test_fitted_slices_stay_within_the_crop() -> None:
    assert fitted_slices(np.full((6, 9), 50.0), (0, 0, 9, 6), 1) == [(0, 0, 9, 6)]
    for width in range(3, 12):
        found = fitted_slices(np.full((6, width), 50.0), (0, 0, width, 6), 3)
        assert all(box is None or (0 <= box[0] < box[2] <= width and (box[1], box[3]) == (0, 6)) for box in found)


def test_small_whole_letters_score_higher_in_fitted_slices() -> None:
    """Signs of 32 x 64 pixels, the size of the tiny base's."""
    words = ("MOKA", "TUFI", "BERU", "HADE", "KEGI", "ZERU")
    small = [sign(word, height=32) for word in words]
    equal, fitted = ([o.value for o in scored(small, boxes=boxes)] for boxes in ("equal", "fitted"))
    assert np.mean(fitted) > np.mean(equal) + 0.1


@pytest.mark.parametrize("boxes", ["equal", "fitted"])
def test_options_of_the_recogniser_without_it(boxes: str) -> None:
    with pytest.raises(ValidationError, match=f"but boxes '{boxes}' recognises nothing"):
        GlyphStructureReward.model_validate({"boxes": boxes, "detect": False})


# --- the differentiable function ---


def test_the_gradient_equals_finite_differences() -> None:
    """In float64, along random directions: the median and the largest value move too."""
    draw = torch.Generator().manual_seed(0)
    item = sign()
    images = torch.from_numpy(item.image.copy()).permute(2, 0, 1)[None].double() / 255
    images = (images + 0.01 * torch.rand(images.shape, generator=draw, dtype=torch.float64)).requires_grad_()
    boxes = [(0, box) for box in equal_slices((8, 8, 120, 56), 4)]
    letters = [LETTERS.index(c) for c in "MOKA"]

    def value(shown: torch.Tensor) -> torch.Tensor:
        return torch.logit(structure_of(shown, boxes, letters)).sum()

    [gradient] = torch.autograd.grad(value(images), images)
    for _ in range(4):
        direction = torch.randn(images.shape, generator=draw, dtype=torch.float64)
        step = 1e-8  # small enough that no rectifier changes its side
        with torch.no_grad():
            slope = (value(images + step * direction) - value(images - step * direction)) / (2 * step)
        assert float((gradient * direction).sum()) == pytest.approx(float(slope), rel=1e-4)


def test_the_value_depends_on_the_pixels_of_its_box_alone() -> None:
    images = torch.rand((2, 3, 20, 30), generator=torch.Generator().manual_seed(1)).requires_grad_()
    whole = structure_of(images, [(1, (4, 2, 14, 18))], [0])
    [gradient] = torch.autograd.grad(whole.sum(), images)
    inside = torch.zeros(images.shape, dtype=torch.bool)
    inside[1, :, 2:18, 4:14] = True
    assert gradient[~inside].abs().max() == 0 and gradient[inside].abs().max() > 0
    assert 0 < float(whole.detach()) < 1


def test_normalisation_by_hand() -> None:
    """Half the pixels black, a third white on a grey of 0.5: the median is 0, the largest absolute value 1."""
    crop = torch.full((3, 32, 16), 0.5)
    crop[:, :, 2:5] = 1.0
    pixels = letter_pixels(crop)
    assert pixels.shape == (1, 32, 32)
    assert pixels[0, 5, 8:24].tolist() == pytest.approx([0.0] * 2 + [1.0] * 3 + [0.0] * 11, abs=1e-6)
    assert pixels[:, :, :8].abs().max() == 0 and pixels[:, :, 24:].abs().max() == 0
    assert float(letter_pixels(torch.full((3, 9, 9), 0.3)).abs().max()) < 1e-4


@pytest.mark.parametrize(
    ("boxes", "letters", "message"),
    [([(0, (0, 0, 0, 5))], [1], "expected a box within 10 x 8"), ([(0, (0, 0, 11, 5))], [1], "box"),
     ([(1, (0, 0, 5, 5))], [1], "image 1"), ([(0, (0, 0, 5, 5))], [1, 2], "give one for each")],
)  # fmt: skip
def test_boxes_that_cannot_be_cut(boxes: Any, letters: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        structure_of(torch.zeros((1, 3, 8, 10)), boxes, letters)


def test_no_letters_give_no_values_and_the_network_is_frozen() -> None:
    assert structure_of(torch.zeros((1, 3, 8, 10)), [], []).shape == (0,)
    assert not any(p.requires_grad for p in packaged().parameters())
