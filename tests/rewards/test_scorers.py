"""The scorers of the package on pictures whose score is known: rendered signs, and drift counted by hand."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from PIL import Image

from retouch.config import ConfigError
from retouch.errors import installed
from retouch.imaging.glyphs import write_spaced
from retouch.imaging.masks import mask_box, paste_back, widen
from retouch.rewards.protocol import Pixels, RewardItem
from retouch.rewards.scorers import make_scorer
from retouch.rewards.scorers.ocr import OcrReward, OcrScorer, crop_for
from retouch.rewards.scorers.preservation import PreservationReward
from retouch.rewards.views import paste
from retouch.tiny.signs import draw_sign
from retouch.types import Failure, Outcome, Score
from tests.rewards.fakes import half_mask, item, picture, score_checked

WORDS = ["MOKA", "BERU", "VOLE", "TUSI", "KAPA", "NIDO"]


def sign(word: str, wanted: str | None = None, seed: int = 0, size: tuple[int, int] = (64, 128)) -> RewardItem:
    """A picture that says `word`, to be read as `wanted`."""
    drawn = draw_sign(word, size, seed)
    text = {"text": word if wanted is None else wanted}
    return RewardItem(seed, "p", np.asarray(drawn.picture), np.asarray(drawn.mask), metadata=text)


def blank(wanted: str) -> RewardItem:
    drawn = draw_sign("MOKA", (64, 128), 0)
    return RewardItem(0, "p", np.asarray(drawn.ground), np.asarray(drawn.mask), metadata={"text": wanted})


def details(outcomes: Sequence[Outcome]) -> list[dict[str, Any]]:
    assert all(isinstance(one, Score) for one in outcomes), outcomes
    return [dict(one.detail) for one in outcomes if isinstance(one, Score)]


# --- ocr: what is read ---


def test_known_words_are_read(line_ocr: OcrScorer) -> None:
    outcomes = line_ocr.score([sign(word, seed=i) for i, word in enumerate(WORDS)])
    assert [one["text"] for one in details(outcomes)] == WORDS
    assert all(one["exact"] and one["length_ratio"] == 1.0 and one["confidence"] > 0.9 for one in details(outcomes))
    assert [one.value for one in outcomes if isinstance(one, Score)] == [1.0] * 6


def test_lines_are_found_in_a_large_mask(line_ocr: OcrScorer, finding_ocr: OcrScorer) -> None:
    """Two words one above the other: read as one line they are none."""
    page = Image.new("RGB", (160, 96), "white")
    for top, word in ((4, "MOKA"), (50, "BERU")):
        write_spaced(page, word, "CaladeaBold", (10, top, 150, top + 42), (20, 20, 60))
    both = RewardItem(0, "p", np.asarray(page), metadata={"text": "MOKA BERU"})
    (found,), (as_line,) = finding_ocr.score([both]), line_ocr.score([both])
    assert isinstance(found, Score) and found.value == 1.0
    assert isinstance(as_line, Score) and as_line.value < 0.5


def test_only_the_mask_is_read(line_ocr: OcrScorer) -> None:
    """The word asked for stands beside the mask, another one inside."""
    wide = np.concatenate([sign("MOKA").image, sign("BERU", seed=1).image], axis=1)
    right = np.concatenate([np.zeros((64, 128), np.uint8), sign("BERU", seed=1).mask], axis=1)  # type: ignore[list-item]
    read = [RewardItem(0, "p", wide, right, metadata={"text": text}) for text in ("MOKA", "BERU")]
    assert [one["text"] for one in details(line_ocr.score(read))] == ["BERU", "BERU"]
    assert [one["exact"] for one in details(line_ocr.score(read))] == [False, True]


def test_what_lies_outside_the_mask_changes_nothing(line_ocr: OcrScorer) -> None:
    one = sign("MOKA")
    assert one.mask is not None
    noisy = np.where(one.mask[..., None] >= 128, one.image, picture(3, 64, 128))
    assert line_ocr.score([one]) == line_ocr.score([RewardItem(0, "p", noisy, one.mask, metadata=one.metadata)])


def test_without_a_mask_the_whole_picture_is_read() -> None:
    one = RewardItem(0, "p", picture(0, 64, 128))
    assert np.array_equal(crop_for(one, 0.0), one.image)


@pytest.mark.parametrize("level", [0, 127])
def test_of_a_mask_that_repaints_nothing_nothing_is_read(line_ocr: OcrScorer, level: int) -> None:
    """The word asked for stands in the picture, outside the mask as all of it."""
    (outcome,) = line_ocr.score([replace(sign("MOKA"), mask=np.full((64, 128), level, np.uint8))])
    assert isinstance(outcome, Failure) and outcome.code == "bad_item" and not outcome.retryable
    assert "the mask is empty" in outcome.message


def test_the_margin_widens_the_crop_inside_the_picture() -> None:
    assert widen((10, 20, 30, 30), 0.1, 100, 100) == (8, 19, 32, 31)
    assert widen((1, 0, 99, 100), 0.5, 100, 100) == (0, 0, 100, 100)
    one = sign("MOKA")
    assert one.mask is not None
    left, top, right, bottom = mask_box(one.mask)
    assert crop_for(one, 0.0).shape == (bottom - top, right - left, 3)
    assert np.array_equal(crop_for(one, 1.0), one.image)


@pytest.mark.parametrize("detect", [True, False], ids=["lines", "one line"])
def test_the_engine_is_fed_what_it_makes_of_the_picture_itself(detect: bool) -> None:
    """BGR, as rapidocr turns a picture into; arrays it takes as they are, so that red and blue would be swapped."""
    from rapidocr.utils.load_image import LoadImage

    fed: list[Any] = []

    class Engine:
        def __call__(self, picture: Any, **_: Any) -> Any:
            fed.append(picture)
            return SimpleNamespace(txts=("MOKA",), scores=(1.0,), boxes=[[(0, 0), (99, 0), (99, 40), (0, 40)]])

        def _load_rec_model(self) -> Any:
            def recognizer(given: Any) -> Any:
                fed.extend(given.img)
                return SimpleNamespace(txts=["MOKA"], scores=[1.0])

            return recognizer

    scorer = OcrReward(detect=detect).make()
    scorer._engine = Engine()
    red = replace(sign("MOKA"), image=np.full((64, 128, 3), (200, 30, 10), np.uint8))
    scorer.score([red])
    (found,) = fed
    assert found[0, 0].tolist() == [10, 30, 200] and found.flags.c_contiguous
    np.testing.assert_array_equal(found, LoadImage()(Image.fromarray(crop_for(red, 0.0))))


# --- ocr: how it is compared ---


@pytest.mark.parametrize(
    ("wanted", "ned"),
    [
        ("MOKA", 1.0),
        ("MOKAMOKA", 0.5),  # half is missing: as bad as
        ("MO", 0.5),  # twice too much
        ("MAKO", 0.5),  # two substitutions of four
        ("ZZZZ", 0.0),
        ("moka", 0.0),  # no letter in common but for its case
        (" MOKA\n", 1.0),
        ("ＭＯＫＡ", 1.0),  # full width: the same text in NFKC
    ],
)
def test_similarity_of_a_sign_that_says_moka(line_ocr: OcrScorer, wanted: str, ned: float) -> None:
    (outcome,) = line_ocr.score([sign("MOKA", wanted)])
    assert isinstance(outcome, Score)
    assert (outcome.value, outcome.detail["ned"], outcome.detail["exact"]) == (ned, ned, ned == 1.0)


def test_length_ratio_says_which_way_it_errs(line_ocr: OcrScorer) -> None:
    short, long = details(line_ocr.score([sign("MOKA", "MOKAMOKA"), sign("MOKA", "MO")]))
    assert (short["length_ratio"], long["length_ratio"]) == (0.5, 2.0)


def test_nothing_read_is_0_not_a_failure(line_ocr: OcrScorer, finding_ocr: OcrScorer) -> None:
    for scorer in (line_ocr, finding_ocr):
        (outcome,) = scorer.score([blank("MOKA")])
        assert isinstance(outcome, Score)
        assert (outcome.value, outcome.detail["text"], outcome.detail["confidence"]) == (0.0, "", 0.0)


def test_case_is_folded_on_request(line_ocr: OcrScorer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(line_ocr, "options", line_ocr.options.model_copy(update={"case_sensitive": False}))
    (outcome,) = line_ocr.score([sign("MOKA", "Moka")])
    assert isinstance(outcome, Score) and outcome.value == 1.0 and outcome.detail["text"] == "moka"


def test_confidence_ignores_what_was_asked_for(line_ocr: OcrScorer, monkeypatch: pytest.MonkeyPatch) -> None:
    """Why it is not the default: nonsense scores as well."""
    monkeypatch.setattr(line_ocr, "options", line_ocr.options.model_copy(update={"score": "confidence"}))
    right, wrong = line_ocr.score([sign("MOKA"), sign("MOKA", "ZZZZ")])
    assert isinstance(right, Score) and isinstance(wrong, Score)
    assert right.value == right.detail["confidence"] == wrong.value > 0.9
    assert wrong.detail["ned"] == 0.0


def test_the_text_may_stand_in_quotes_in_the_prompt(line_ocr: OcrScorer) -> None:
    one = sign("MOKA")
    read = [RewardItem(0, prompt, one.image, one.mask) for prompt in ('a sign "MOKA"', "a sign 'BERU'")]
    assert [found["exact"] for found in details(line_ocr.score(read))] == [True, False]


# --- ocr: failures and batches ---


def bad_items() -> dict[str, RewardItem]:
    one = sign("MOKA")
    sliver = np.zeros((64, 128), np.uint8)
    sliver[:, 5] = 255
    return {
        "no text": RewardItem(0, "a sign", one.image, one.mask),
        "empty text": RewardItem(0, "a sign", one.image, one.mask, metadata={"text": "  "}),
        "an empty mask": replace(one, mask=np.zeros((64, 128), np.uint8)),
        "a mask of another size": RewardItem(0, "p", one.image, half_mask(), metadata={"text": "MOKA"}),
        "a sliver": RewardItem(0, "p", one.image, sliver, metadata={"text": "MOKA"}),
        "no picture": RewardItem(0, "p", np.zeros((0, 4, 3), np.uint8), metadata={"text": "MOKA"}),
    }


@pytest.mark.parametrize("bad", bad_items().values(), ids=bad_items())
def test_an_item_that_cannot_be_read_fails_alone(line_ocr: OcrScorer, bad: RewardItem) -> None:
    good = [sign("MOKA"), sign("BERU", "BERI", seed=1)]
    first, failed, second = score_checked(line_ocr, [good[0], bad, good[1]])
    assert isinstance(failed, Failure) and failed.code == "bad_item" and not failed.retryable
    assert [first, second] == [score_checked(line_ocr, [one])[0] for one in good]
    assert isinstance(second, Score) and second.value == 0.75


def test_a_score_does_not_depend_on_its_batch(line_ocr: OcrScorer) -> None:
    """Crops of several sizes: text and similarity bit for bit, the confidence within the rounding of a batch."""
    batch = [sign(word, seed=i, size=(48 + 8 * (i % 3), 96 + 24 * (i % 4))) for i, word in enumerate(WORDS * 3)]
    alone = [details(line_ocr.score([one]))[0] for one in batch]
    for together in (details(line_ocr.score(batch)), details(line_ocr.score(batch[::-1]))[::-1]):
        confidences = [(one.pop("confidence"), other["confidence"]) for one, other in zip(together, alone, strict=True)]
        assert all(a == pytest.approx(b, abs=5e-5) for a, b in confidences)
        assert together == [{k: v for k, v in one.items() if k != "confidence"} for one in alone]


def test_calls_leave_no_state_behind(line_ocr: OcrScorer, monkeypatch: pytest.MonkeyPatch) -> None:
    """rapidocr keeps its switches between calls; one engine reads both ways in turn as if it were new."""
    one = sign("MOKA")
    as_line = line_ocr.score([one])
    monkeypatch.setattr(line_ocr, "options", line_ocr.options.model_copy(update={"detect": True}))
    found = line_ocr.score([one])
    monkeypatch.setattr(line_ocr, "options", line_ocr.options.model_copy(update={"detect": False}))
    assert line_ocr.score([one]) == as_line
    monkeypatch.setattr(line_ocr, "options", line_ocr.options.model_copy(update={"detect": True}))
    assert line_ocr.score([one]) == found


@pytest.mark.parametrize("threads", [0, 1])  # rapidocr passes over more than there are cores
def test_threads_reach_the_recogniser(threads: int) -> None:
    scorer = OcrReward(threads=threads).make()
    scorer.load("cpu")
    options = scorer._engine._load_rec_model().session.session.get_session_options()
    assert options.intra_op_num_threads == threads
    for pool in ("intra_op", "inter_op"):  # they share the cores with torch
        assert options.get_session_config_entry(f"session.{pool}.allow_spinning") == "0"


def test_the_revision_tells_settings_apart() -> None:
    """Whatever may change a score changes it; what cannot (threads) does not."""
    made = [
        OcrReward().make(),
        OcrReward(score="confidence").make(),
        OcrReward(case_sensitive=False).make(),
        OcrReward(crop_margin=0.1).make(),
    ]
    assert len({scorer.spec.revision for scorer in [*made, OcrReward(detect=False).make()]}) == 5
    assert OcrReward(threads=2).make().spec.revision == OcrReward().make().spec.revision


# --- preservation ---


def kept(image: Pixels, source: Pixels, mask: Pixels) -> Outcome:
    return score_checked(PreservationReward().make(), [item(0, image=image, source=source, mask=mask)])[0]


def test_preservation_by_hand() -> None:
    """Outside 18 of 30 pixels: one channel of one of them off by 51, which is .2 of 255."""
    source = np.full((6, 5, 3), 100, np.uint8)
    image = source.copy()
    image[:, :2] = 255  # inside the mask anything goes
    image[3, 4, 1] += 51
    outcome = kept(image, source, half_mask())
    assert isinstance(outcome, Score)
    assert outcome.detail["outside_l1"] == pytest.approx(0.2 / (18 * 3))
    assert outcome.value == pytest.approx(1 - 0.2 / (18 * 3))


def test_preservation_goes_from_1_to_0() -> None:
    black, white = np.zeros((6, 5, 3), np.uint8), np.full((6, 5, 3), 255, np.uint8)
    assert kept(black, black, half_mask()) == Score(1.0, {"outside_l1": 0.0})
    for image, source in ((black, white), (white, black)):  # uint8 must not wrap around
        assert kept(image, source, half_mask()) == Score(0.0, {"outside_l1": 1.0})


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"source": None}, "needs source"),
        ({"mask": None, "source": None}, "needs mask, source"),
        ({"source": picture(1, 4, 4)}, "must have one size"),
        ({"mask": half_mask(4, 4)}, "must have one size"),
        ({"mask": np.full((6, 5), 255, np.uint8)}, "the mask is full"),
    ],
    ids=str,
)
def test_preservation_fails_where_there_is_nothing_to_compare(changes: dict[str, Any], words: str) -> None:
    given = {"source": picture(1), "mask": half_mask(), **changes}
    (outcome,) = score_checked(PreservationReward().make(), [item(0, **given)])
    assert isinstance(outcome, Failure) and outcome.code == "bad_item" and words in outcome.message


# --- paste-back ---


def test_paste_back_keeps_the_mask_of_the_image_and_the_rest_of_the_source() -> None:
    one = item(0, source=picture(1), mask=half_mask())
    pasted = paste(one)
    assert np.array_equal(pasted.image[:, :2], one.image[:, :2])
    assert np.array_equal(pasted.image[:, 2:], one.source[:, 2:])  # type: ignore[index]
    assert np.array_equal(pasted.image, paste_back(one.source, one.image, one.mask))  # type: ignore[arg-type]
    assert kept(pasted.image, pasted.source, pasted.mask) == Score(1.0, {"outside_l1": 0.0})  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "fields",
    [
        {"mask": half_mask()},
        {"source": picture(1)},
        {"source": picture(1, 4, 4), "mask": half_mask()},
        {"source": picture(1), "mask": half_mask(4, 4)},
        {"source": picture(1), "mask": np.zeros((6, 5, 1), np.uint8)},
    ],
    ids=["no source", "no mask", "another source", "another mask", "a mask with channels"],
)
def test_what_cannot_be_pasted_stays_as_it_is(fields: dict[str, Any]) -> None:
    one = item(0, **fields)
    assert paste(one) is one


# --- the table of scorers ---


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("orc", {}, "reward 'orc': no such scorer; did you mean 'ocr'"),
        ("zzz", {}, "no such scorer; known: .*; if a custom module registers it, set RETOUCH_PLUGINS=MODULE"),
        ("ocr", {"thread": 1}, "no such option 'thread'; did you mean 'threads'"),
        ("ocr", {"threads": -1}, "threads: given -1"),
        ("ocr", {"detect": "no"}, "detect: given 'no'"),
        ("ocr", {"score": "cer"}, "score: given 'cer'; input should be 'ned' or 'confidence'"),
        ("preservation", {"margin": 1}, "no such option 'margin'; it has none"),
    ],
)
def test_wrong_names_and_options(name: str, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message.replace("(", r"\(")):
        make_scorer(name, options)


def test_options_reach_the_scorer() -> None:
    made = make_scorer("ocr", {"score": "confidence", "case_sensitive": False, "crop_margin": 0.5, "threads": 2})
    assert isinstance(made, OcrScorer)
    assert made.options == OcrReward(score="confidence", case_sensitive=False, crop_margin=0.5, threads=2)


@pytest.mark.parametrize(
    ("error", "says"),
    [
        (ImportError("No module named 'rapidocr'", name="rapidocr"), 'needs rapidocr: pip install "retouch[ocr]"'),
        (ImportError("No module named 'torch'", name="torch"), 'needs torch: pip install "retouch[train]"'),
        (ImportError("tokenizers>=0.22 is required."), "needs another version (tokenizers>=0.22 is required): pip"),
    ],
)
def test_a_library_that_is_missing_or_too_old_is_named(error: ImportError, says: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(f"the ocr reward {says}")), installed("the ocr reward", "ocr"):
        raise error
