"""The style reward: alike is alike, unreadable is worth less, and the reference itself is no way out."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from retouch.imaging.glyphs import FONTS
from retouch.imaging.masks import mask_box
from retouch.rewards.protocol import RewardItem
from retouch.rewards.scorers.style import StyleReward, StyleScorer
from retouch.tiny.signs import (
    Sign,
    draw_sign,
    draw_words,
)
from retouch.types import Failure, Score

RED, BLUE = (150, 20, 20), (20, 20, 150)


def sign(word: str, face: str, ink: tuple[int, int, int], seed: int = 0) -> Sign:
    return draw_sign(word, (32, 64), seed, face, ink)


def item(drawn: Sign, reference: Sign, text: str | None = None) -> RewardItem:
    style = np.asarray(reference.picture.crop(mask_box(reference.mask)))
    metadata = {"text": text or drawn.word}
    return RewardItem(0, "", np.asarray(drawn.picture), np.asarray(drawn.mask), reference=style, metadata=metadata)


@pytest.fixture(scope="module")
def scorer() -> StyleScorer:
    made = StyleReward(image_encoder="tiny", gate=0.5, detect=False, threads=1).make()
    made.load("cpu")
    return made


def values(scorer: StyleScorer, items: list[RewardItem]) -> list[float]:
    return [o.value for o in scorer.score(items) if isinstance(o, Score)]


def test_the_same_style_scores_above_another_font_or_ink(scorer: StyleScorer) -> None:
    """Over words, fonts and seeds, the words differing from that of the reference."""
    faces = list(FONTS)
    words = draw_words(12, "held_out", 5)
    for other in ("font", "ink"):
        same, different = [], []
        for i, word in enumerate(words):
            reference = sign(words[i - 1], faces[i % 4], RED, seed=50 + i)
            face = faces[(i + 1) % 4] if other == "font" else faces[i % 4]
            same.append(item(sign(word, faces[i % 4], RED, i), reference))
            different.append(item(sign(word, face, BLUE if other == "ink" else RED, i), reference))
        assert np.mean(values(scorer, same)) > np.mean(values(scorer, different)) + 0.02


def test_what_cannot_be_read_counts_in_proportion(scorer: StyleScorer) -> None:
    """A copy of the reference is as similar as can be; asked for another word it is worth nothing or little."""
    shown = sign("KIGE", "ManropeExtraBold", RED)
    copy = RewardItem(
        0,
        "",
        np.asarray(shown.picture),
        np.asarray(shown.mask),
        reference=np.asarray(shown.picture.crop(mask_box(shown.mask))),
        metadata={"text": "KIGE"},
    )
    for wanted, share in (("KIGE", 1.0), ("KIXX", 1.0), ("KXXX", 0.5), ("XXXX", 0.0)):
        [outcome] = scorer.score([replace(copy, metadata={"text": wanted})])
        assert isinstance(outcome, Score)
        assert outcome.detail["similarity"] == pytest.approx(1.0, abs=1e-5)
        assert outcome.value == pytest.approx(share, abs=1e-5)


def test_without_a_gate_nothing_is_read() -> None:
    made = StyleReward(image_encoder="tiny", gate=0.0).make()
    made.load("cpu")
    shown = sign("KIGE", "ManropeExtraBold", RED)
    [outcome] = made.score([item(shown, shown, "XXXX")])
    assert isinstance(outcome, Score) and set(outcome.detail) == {"similarity"}
    for mask, words in ((np.zeros((32, 64), np.uint8), "mask is empty"), (np.full((9, 9), 255, np.uint8), "one size")):
        [outcome] = made.score([replace(item(shown, shown), mask=mask)])
        assert isinstance(outcome, Failure) and outcome.code == "bad_item" and words in outcome.message


def test_the_encoder_moves_to_its_device_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """A SigLIP so400m is 1.7 GB: it must not travel with every image, nor with every batch."""
    moves: list[str] = []
    original = torch.nn.Module.to

    def counted(module: torch.nn.Module, *args: Any, **options: Any) -> Any:
        moves.append(type(module).__name__)
        return original(module, *args, **options)

    made = StyleReward(image_encoder="tiny", gate=0.0).make()
    with monkeypatch.context() as patched:
        patched.setattr(torch.nn.Module, "to", counted)
        made.load("cpu")
        for seed in range(3):
            shown = sign("KIGE", "ManropeExtraBold", RED, seed)
            assert isinstance(
                made.score([item(shown, shown), item(shown, sign("BERU", "CaladeaBold", BLUE, seed))])[0], Score
            )
    assert moves.count("SiglipVisionModel") == 1


def test_a_text_that_is_not_there_is_a_failure(scorer: StyleScorer) -> None:
    shown = sign("KIGE", "ManropeExtraBold", RED)
    [outcome] = scorer.score([replace(item(shown, shown), metadata={})])
    assert isinstance(outcome, Failure)
    assert scorer.spec.needs == {"reference"}
