"""The recogniser: what it reads, CTC against an enumeration of all alignments, and the reward on it."""

from __future__ import annotations

import itertools
import json
import math
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from pydantic import ValidationError

from retouch.config import ConfigError
from retouch.imaging.glyphs import FONTS
from retouch.rewards.pixels import unit_pixels
from retouch.rewards.protocol import CheckedScorer, RewardItem
from retouch.rewards.scorers import make_scorer
from retouch.rewards.text_distance import edit_distance
from retouch.tiny.signs import draw_sign, draw_words
from retouch.types import Failure, Score
from retouch_glyphs.scorers.recognizer import LOWEST, RecognizerReward, RecognizerScorer
from retouch_glyphs.text_recognizer import (
    CHARACTERS,
    FOLDER,
    HEIGHT,
    WEIGHTS,
    classes_of,
    columns_needed,
    line_pixels,
    log_likelihood,
    packaged,
    read_greedily,
    width_of,
)
from retouch_glyphs.tiny.broken_letters import TEST_FONTS, names_of
from retouch_glyphs.tiny.text_recognizer import RecognizerTraining, accuracy, batches_of, build_recognizer, sign_crops
from retouch_glyphs.tiny.written_lines import (
    LINE_FONTS,
    TESTED,
    UNSEEN_FONTS,
    LineSetting,
    draw_line,
    draw_lines,
    random_text,
)

INSTALLED = [name for name in names_of(TEST_FONTS) if name != "Aileron"]
"""Fonts of the packages that tests have; the training needs more."""


def sign(word: str = "MOKA", text: str | None = None, size: tuple[int, int] = (32, 64)) -> RewardItem:
    drawn = draw_sign(word, size, 3, "CaladeaBold")
    return RewardItem(0, "", np.asarray(drawn.picture), np.asarray(drawn.mask), metadata={"text": text or word})


def loaded(**options: Any) -> RecognizerScorer:
    scorer = RecognizerReward(**options).make()
    scorer.load("cpu")
    return scorer


# --- the network ---


def test_it_reads_unseen_fonts_and_signs() -> None:
    """The floors of the card, on other lines than it was measured on."""
    network = packaged()
    lines = [(unit_pixels(line.pixels), line.text) for line in draw_lines(60, INSTALLED, 99, TESTED)]
    assert accuracy(network, lines) >= 0.95
    signs = [draw_sign(word, (32, 64), 5) for word in draw_words(60, "held_out", 5)]
    crops = [(unit_pixels(np.asarray(s.picture.crop(s.mask.getbbox()))), s.word) for s in signs]
    assert accuracy(network, crops) >= 0.97
    assert accuracy(network, [(1 - crop, word) for crop, word in crops]) >= 0.97  # light on dark


def test_the_card_is_of_the_weights_and_its_fonts_are_disjoint() -> None:
    card = json.loads((FOLDER / "card.json").read_text())
    assert card["letters"]["unseen fonts, 32 pixels"] >= 0.95 and card["letters"]["signs"] >= 0.97
    assert card["fonts"]["train"] == LINE_FONTS and card["fonts"]["unseen"] == UNSEEN_FONTS
    family = re.compile("[A-Z][a-z]+")
    families = [{family.match(name)[0] for name in names} for names in (LINE_FONTS, UNSEEN_FONTS)]  # pyright: ignore[reportOptionalSubscript]
    assert not families[0] & families[1]
    assert {*FONTS} - {"CaladeaBold"} <= {*UNSEEN_FONTS} and {family.match(f)[0] for f in FONTS} <= families[1]  # pyright: ignore[reportOptionalSubscript]
    assert (FOLDER / WEIGHTS).stat().st_size < 2e6
    assert sum(p.numel() for p in packaged().parameters()) <= 1e6


def test_the_likelihood_is_the_sum_over_all_alignments() -> None:
    names = torch.randn((5, 4), generator=torch.Generator().manual_seed(0), dtype=torch.float64).log_softmax(-1)

    def collapsed(path: tuple[int, ...]) -> list[int]:
        return [name for name, _ in itertools.groupby(path) if name]

    for classes in ([1], [1, 2], [2, 2], [3, 1, 3]):
        paths = [p for p in itertools.product(range(4), repeat=5) if collapsed(p) == classes]
        total = sum(math.exp(sum(float(names[t, name]) for t, name in enumerate(path))) for path in paths)
        assert float(log_likelihood(names, classes).exp()) == pytest.approx(total, rel=1e-12)
    assert float(log_likelihood(names, [1, 1, 1, 1])) == -math.inf and columns_needed([1, 1, 1, 1]) == 7
    assert columns_needed([1, 2, 2, 1]) == 5


def test_greedy_reading_removes_repeats_and_blanks() -> None:
    columns = torch.full((6, len(CHARACTERS) + 1), 0.001)
    for column, name in enumerate([0, 1, 1, 0, 1, 63]):
        columns[column, name] = 0.9
    assert read_greedily(columns.log()) == ("AA ", pytest.approx(0.9))
    assert read_greedily(columns[:1].log()) == ("", 0.0)


def test_classes_and_widths() -> None:
    assert classes_of("Az9 ") == [1, 52, 62, 63] and classes_of("é") is None
    assert width_of(24, 56) == 76 and width_of(10, 1) == 4 and width_of(1, 1000) == 1024


def test_input_does_not_depend_on_brightness_and_contrast() -> None:
    crop = unit_pixels(sign().image)
    found = line_pixels(crop)
    assert found.shape == (1, HEIGHT, 64)
    assert float(found.mean()) == pytest.approx(0, abs=1e-5) and float(found.std()) == pytest.approx(1, abs=0.05)
    assert torch.allclose(line_pixels(0.5 * crop + 0.2), found, rtol=0.05, atol=0.01)
    assert line_pixels(torch.full((3, 9, 30), 0.4)).abs().max() < 1e-4


# --- the lines ---


def test_a_line_depends_on_its_number_and_the_seed_alone() -> None:
    first, again = draw_lines(3, INSTALLED, 1), draw_lines(2, INSTALLED, 1)
    assert [line.text for line in first[:2]] == [line.text for line in again]
    assert np.array_equal(first[1].pixels, again[1].pixels)
    assert not np.array_equal(first[0].pixels, draw_lines(1, INSTALLED, 2)[0].pixels)


def test_centres_are_in_order_and_over_the_ink() -> None:
    for seed in range(12):
        line = draw_line(["FredokaOne"], seed, LineSetting((48, 48), hard=seed % 2 == 0))
        assert len(line.centres) == len(line.text) and list(line.centres) == sorted(line.centres)
        assert 12 <= len(line.pixels) <= 48 and line.centres[0] >= 0 and line.centres[-1] < 1
    line = draw_line(["FredokaOne"], 3, LineSetting((48, 48), hard=False))
    grey = line.pixels.astype(float).mean(2)
    ink = np.abs(grey - np.median(grey[[0, -1]])).mean(0)
    places = [int(c * len(ink)) for c, letter in zip(line.centres, line.text, strict=True) if letter not in " uvUV"]
    assert np.mean([ink[max(0, p - 3) : p + 4].max() for p in places]) > ink[:2].mean() + 10


def test_texts_are_of_the_network_s_characters() -> None:
    draw = np.random.default_rng(0)
    texts = [random_text(draw, 10) for _ in range(300)]
    assert all(0 < len(text) <= 10 and classes_of(text) and text == text.strip() for text in texts)
    assert any(" " in text for text in texts) and any(text.islower() for text in texts)
    assert all(not any(c.islower() for c in random_text(draw, 8, capitals=True)) for _ in range(50))


def test_batches_have_one_width_and_every_line_once() -> None:
    pixels = [torch.zeros(1, HEIGHT, 16 * (1 + i % 3)) for i in range(20)]
    batches = batches_of(pixels, 4, torch.Generator().manual_seed(0))
    assert sorted(i for batch in batches for i in batch) == list(range(20))
    assert all(len({pixels[i].shape for i in batch}) == 1 and len(batch) <= 4 for batch in batches)


def test_sign_crops_are_held_out_words() -> None:
    crops = sign_crops(5, 0)
    assert [word for _, word in crops] == draw_words(5, "held_out", 0)
    assert all(crop.shape == (3, 24, 56) for crop, _ in crops)


@pytest.mark.full
def test_a_small_training_learns_and_repeats(tmp_path: Path) -> None:
    training = RecognizerTraining(lines=96, epochs=2, batch=16, test_lines=12)
    cards = [build_recognizer(tmp_path / name, 1, training, ["FredokaOne"]) for name in ("a", "b")]
    files = [(tmp_path / name / WEIGHTS).read_bytes() for name in ("a", "b")]
    assert files[0] == files[1] and cards[0]["letters"] == cards[1]["letters"]
    assert {path.name for path in (tmp_path / "a").iterdir()} == {WEIGHTS, "card.json"}
    with pytest.raises(ConfigError, match="is not empty"):
        build_recognizer(tmp_path / "a", 1, training, ["FredokaOne"])


# --- the reward ---


def test_right_text_scores_above_wrong_text_and_no_text() -> None:
    scorer = loaded()
    words = ("MOKA", "TUFI", "BERU", "HADE")
    right = [o.value for o in scorer.score([sign(word) for word in words]) if isinstance(o, Score)]
    wrong = [
        o.value
        for o in scorer.score([sign(word, words[i - 1]) for i, word in enumerate(words)])
        if isinstance(o, Score)
    ]
    one = [o.value for o in scorer.score([sign(word, word[:3] + "X") for word in words]) if isinstance(o, Score)]
    [blank] = scorer.score([replace(sign(), image=np.full((32, 64, 3), 200, np.uint8))])
    assert isinstance(blank, Score) and len(right) == len(wrong) == len(one) == 4
    assert min(right) > -0.5 and max(wrong) < -2 and all(w < o < r for w, o, r in zip(wrong, one, right, strict=True))
    assert -LOWEST <= blank.value < -2


def test_both_values_are_functions_of_the_mean_log_probability() -> None:
    items = [sign("MOKA"), sign("MOKA", "TUFI")]
    for log, probability in zip(loaded().score(items), loaded(value="probability").score(items), strict=True):
        assert isinstance(log, Score) and isinstance(probability, Score)
        mean = log.detail["log_probability"]
        assert log.value == pytest.approx(LOWEST * math.tanh(mean / LOWEST), abs=1e-5)
        assert probability.value == pytest.approx(math.exp(mean), abs=1e-6)


def test_the_detail_is_what_ocr_reports() -> None:
    [outcome] = loaded().score([sign("MOKA", "MOKO")])
    assert isinstance(outcome, Score)
    assert outcome.detail["text"] == "MOKA" and outcome.detail["ned"] == 1 - edit_distance("MOKA", "MOKO") / 4
    assert 0.5 < outcome.detail["confidence"] <= 1


def test_scores_do_not_depend_on_the_batch_and_repeat_exactly() -> None:
    scorer, items = loaded(), [sign(word) for word in ("MOKA", "TUFI", "BERU")]
    assert scorer.score(items) == [scorer.score([item])[0] for item in items]


def test_it_reads_the_whole_image_without_a_mask_and_a_wider_box_with_a_margin() -> None:
    item = sign("MOKA")
    [whole] = loaded().score([replace(item, mask=None)])
    [margin] = loaded(crop_margin=1.0).score([item])
    assert isinstance(whole, Score) and isinstance(margin, Score)
    assert whole.detail["text"] == "MOKA" and margin.value == whole.value


def test_the_ink_of_a_high_box_is_read_where_the_box_is_not() -> None:
    """Signs of 512 x 512 pixels; a blank one is read as a whole."""
    items = [sign(word, size=(512, 512)) for word in ("MOKA", "TUFI", "BERU", "HADE")]
    box, ink = ([o.detail["ned"] for o in loaded(line=line).score(items)] for line in ("box", "ink"))  # pyright: ignore[reportAttributeAccessIssue]
    assert np.mean(ink) > 0.95 and np.mean(box) < 0.7
    blank = replace(items[0], image=np.full((512, 512, 3), 200, np.uint8))
    assert [o.value for o in loaded(line="ink").score([blank])] == [o.value for o in loaded().score([blank])]  # pyright: ignore[reportAttributeAccessIssue]


@pytest.mark.parametrize(
    ("metadata", "reason"),
    [
        ({"text": "TWO\nLINES"}, "2 lines to read, but the recogniser reads one; use ocr_lines"),
        ({"lines": ["TWO", "LINES"]}, "2 lines to read"),
        ({"text": "NAÏVE"}, "holds characters other than A-Z, a-z, 0-9 and the space; use ocr"),
        ({"text": "A" * 30}, "needs 59 columns, but a box of 56 x 24 pixels has 19; use a wider mask"),
        ({}, "no text to read"),
    ],
)
def test_texts_that_it_cannot_read_are_failures(metadata: dict[str, Any], reason: str) -> None:
    [outcome] = CheckedScorer(loaded()).score([replace(sign(), metadata=metadata)])
    assert isinstance(outcome, Failure) and outcome.code == "bad_item" and reason in outcome.message


def test_one_line_with_spaces_is_read_with_single_spaces() -> None:
    [outcome] = loaded().score([replace(sign(), metadata={"text": "  MO  KA\n"})])
    [same] = loaded().score([replace(sign(), metadata={"text": "MO KA"})])
    assert outcome == same and isinstance(outcome, Score)


def test_options_and_revision() -> None:
    with pytest.raises(ValidationError):
        RecognizerReward.model_validate({"scorer": "recognizer", "value": "nats"})
    revisions = {
        loaded(**options).spec.revision
        for options in ({}, {"value": "probability"}, {"crop_margin": 0.5}, {"line": "ink"})
    }
    assert len(revisions) == 4 and all(len(revision.split()[0]) == 12 for revision in revisions)
    assert make_scorer("recognizer").spec.range == (-LOWEST, 1.0)
