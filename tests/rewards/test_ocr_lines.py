"""Reading several lines: on recorded boxes, and on images with the engine."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from PIL import Image, ImageDraw, ImageFont

from retouch.imaging.glyphs import font_path
from retouch.rewards.protocol import Pixels, RewardItem, lines_to_read
from retouch.rewards.scorers import make_scorer
from retouch.rewards.scorers.ocr import OcrScorer
from retouch.rewards.scorers.ocr_lines import OcrLinesReward, OcrLinesScorer
from retouch.rewards.scorers.reading import FoundLine, rows_of
from retouch.rewards.views import cropped
from retouch.types import Failure, Score

BLANK = np.full((100, 200, 3), 255, np.uint8)


def found(text: str, left: float, top: float, right: float, bottom: float) -> FoundLine:
    return FoundLine(text, 1.0, ((left, top), (right, top), (right, bottom), (left, bottom)))


class Recorded(OcrLinesScorer):
    """Boxes and readings instead of an engine's."""

    def __init__(self, options: OcrLinesReward, boxes: Sequence[FoundLine] = (), texts: Sequence[str] = ()) -> None:
        super().__init__(options)
        self.boxes, self.texts, self.crops = boxes, texts, list[Pixels]()

    def find_lines(self, crops: Sequence[Pixels]) -> list[list[FoundLine]]:
        self.crops += crops
        return [list(self.boxes) for _ in crops]

    def read_lines(self, crops: Sequence[Pixels]) -> list[tuple[str, float]]:
        self.crops += crops
        return [(text, 1.0) for text in self.texts]


def scored(boxes: Sequence[FoundLine], lines: list[Any], texts: Sequence[str] = (), **options: Any) -> Any:
    scorer = Recorded(OcrLinesReward(**options), boxes, texts)
    (outcome,) = scorer.score([RewardItem(0, "p", BLANK, metadata={"lines": lines})])
    return outcome


def test_readings_by_hand() -> None:
    boxes = [found("STRAY", 150, 80, 190, 95), found("DAILX", 60, 5, 95, 20), found("OPEN", 5, 5, 50, 20)]
    outcome = scored(boxes, ["COFFEE", "OPEN DAILY"])
    assert isinstance(outcome, Score)
    # COFFEE is matched with STRAY (no letter in common), which leaves nothing over
    assert outcome.value == pytest.approx((10 * 0.9 + 0) / 16)
    assert outcome.detail == {
        "text": "STRAY / OPEN DAILX",
        "lines": [
            {"asked": "COFFEE", "found": "STRAY", "ned": 0.0},
            {"asked": "OPEN DAILY", "found": "OPEN DAILX", "ned": 0.9},
        ],
        "line_ned": 0.45,
        "exact": 0.0,
        "missing": 0,
        "extra": 0,
    }


def test_what_is_missing_and_what_is_extra() -> None:
    boxes = [found("OPEN", 5, 5, 50, 20), found("ABCDEFGHIJKLMNOPQRST", 5, 40, 190, 60)]
    extra = scored(boxes, ["OPEN"]).detail
    assert (extra["extra"], extra["missing"], extra["exact"]) == (20, 0, 1.0)
    assert extra["text"] == "OPEN / ABCDEFGHIJKLMNOPQRST"
    missing = scored(boxes[:1], ["OPEN", "DAILY"]).detail
    assert (missing["extra"], missing["missing"], missing["text"]) == (0, 5, "OPEN / –")
    nothing = scored([], ["OPEN"])
    assert (nothing.value, nothing.detail["text"]) == (0.0, "–")


def test_options_of_the_normal_form() -> None:
    boxes = [found("café  NOIR!", 5, 5, 50, 20)]
    assert scored(boxes, ["Café noir"]).value < 1
    assert scored(boxes, ["Café noir!"], case_sensitive=False).value == 1
    assert scored(boxes, ["CAFÉ, NOIR"], case_sensitive=False, punctuation=False).value == 1
    only = scored(boxes, ["!!"], punctuation=False)
    assert isinstance(only, Failure) and "punctuation" in only.message


def test_too_many_lines_are_a_failure() -> None:
    boxes = [found("a", 5, 5 * i, 10, 5 * i + 4) for i in range(65)]
    outcome = scored(boxes, ["OPEN"])
    assert isinstance(outcome, Failure) and outcome.code == "bad_item" and "65 lines" in outcome.message
    assert isinstance(scored(boxes[:64], ["OPEN"]), Score)


def test_rows_in_reading_order() -> None:
    boxes = [found("D", 60, 32, 90, 44), found("B", 60, 8, 90, 22), found("A", 0, 5, 50, 20), found("C", 0, 30, 50, 45)]
    assert [[line.text for line in row] for row in rows_of(boxes)] == [["A", "B"], ["C", "D"]]
    steps = [found("A", 0, 0, 9, 10), found("B", 10, 5, 19, 15), found("C", 20, 5.2, 29, 15.2)]
    assert [[line.text for line in row] for row in rows_of(steps)] == [["A", "B", "C"]]
    assert [len(row) for row in rows_of([steps[0], found("C", 20, 5.2, 29, 15.2)])] == [1, 1]


def test_words_from_right_to_left_are_joined_in_their_order() -> None:
    """A detector finds the words of a line apart, from the left; a number and Latin letters among them stay there."""
    words = ["سوق", "المدينة", "24", "ab"]
    boxes = [found(word, 150 - 50 * i, 10, 190 - 50 * i, 30) for i, word in enumerate(words)][::-1]
    assert scored(boxes, [" ".join(words)]).value == 1.0
    scorer = Recorded(OcrLinesReward(), [*boxes, found("قديم", 150, 60, 190, 80)])
    assert scorer.read_texts([BLANK]) == [(" ".join([*words, "قديم"]), 1.0)]
    latin = [found("B", 60, 8, 90, 22), found("A", 0, 10, 50, 24)]  # in the engine's order, whatever it is
    assert Recorded(OcrLinesReward(), latin).read_texts([BLANK]) == [("B A", 1.0)]
    assert Recorded(OcrLinesReward()).read_texts([BLANK]) == [("", 0.0)]
    below = [found("A LONG HEADLINE", 0, 0, 190, 8), *boxes[2:]]  # most letters of the image are Latin, not of the row
    assert Recorded(OcrLinesReward(), below).read_texts([BLANK]) == [(" ".join(["A LONG HEADLINE", *words[:2]]), 1.0)]


def test_lines_with_places_are_read_there() -> None:
    lines = [{"text": "OPEN", "box": [10, 10, 50, 30]}, {"text": "DAILY", "box": [60, 50, 70, 90]}]
    scorer = Recorded(OcrLinesReward(), texts=["OPEN", ""])
    (outcome,) = scorer.score([RewardItem(0, "p", BLANK, metadata={"lines": lines})])
    assert isinstance(outcome, Score) and outcome.value == pytest.approx(4 / 9)
    assert [crop.shape for crop in scorer.crops] == [(20, 40, 3), (10, 40, 3)]  # the tall one is turned
    assert (outcome.detail["missing"], outcome.detail["text"]) == (5, "OPEN / –")
    assert scored([], lines, ["OPEN", ""], line_weight="lines").value == pytest.approx(1 / 2)
    anywhere = scored([found("DAILY", 0, 0, 20, 10), found("OPEN", 0, 20, 20, 30)], lines, places=False)
    assert anywhere.value == 1.0
    outside = scored([], [{"text": "OPEN", "box": [300, 10, 350, 30]}], ["OPEN"])
    assert isinstance(outside, Failure) and "outside the image" in outside.message


def test_only_the_mask_is_searched() -> None:
    mask = np.zeros((100, 200), np.uint8)
    mask[20:60, 40:160] = 255
    scorer = Recorded(OcrLinesReward(), [found("OPEN", 0, 0, 9, 9)])
    assert isinstance(scorer.score([RewardItem(0, "p", BLANK, mask, metadata={"text": "OPEN"})])[0], Score)
    assert scorer.crops[0].shape == (40, 120, 3)


# --- the lines of an item ---


@pytest.mark.parametrize(
    ("prompt", "metadata", "texts"),
    [
        ("p", {"lines": ["A", "B"], "text": "A B"}, ["A", "B"]),
        ("p", {"text": "A B"}, ["A B"]),
        ('a "A" and "B C"', {}, ["A", "B C"]),
        ('a "A" and "B C"', {"text": "A"}, ["A"]),
        ("a 'A' and 'B C'", {}, ["A", "B C"]),
    ],
)
def test_the_lines_to_read(prompt: str, metadata: dict[str, Any], texts: list[str]) -> None:
    lines = lines_to_read(RewardItem(0, prompt, BLANK, metadata=metadata))
    assert not isinstance(lines, Failure) and [line.text for line in lines] == texts


def test_items_without_lines_fail() -> None:
    assert isinstance(lines_to_read(RewardItem(0, "p", BLANK)), Failure)
    wrong = lines_to_read(RewardItem(0, "p", BLANK, metadata={"lines": [{"text": ""}]}))
    assert isinstance(wrong, Failure) and wrong.message.startswith("metadata.lines: line 1: text is ''")


def test_places_move_with_the_view() -> None:
    mask = np.zeros((100, 200), np.uint8)
    mask[20:60, 40:160] = 255
    lines = [{"text": "OPEN", "box": [50, 30, 90, 50]}]
    view = cropped(RewardItem(0, "p", BLANK, mask, metadata={"lines": lines, "text": "OPEN"}), 0.0, 1)
    moved = lines_to_read(view)
    assert not isinstance(moved, Failure) and moved[0].bounds == (10, 10, 50, 30) and view.metadata["text"] == "OPEN"


# --- the engine ---


def engine_of(reader: OcrScorer, **options: Any) -> OcrLinesScorer:
    """A scorer of lines with an engine that is loaded already."""
    scorer = OcrLinesReward(threads=1, **options).make()
    scorer._engine = reader._engine
    return scorer


def two_lines() -> Pixels:
    image = Image.new("RGB", (260, 120), "white")
    draw, font = ImageDraw.Draw(image), ImageFont.truetype(font_path("CaladeaBold"), 34)
    draw.text((20, 10), "MOKA", font=font, fill="black")
    draw.text((90, 70), "BERU", font=font, fill="black")
    return np.asarray(image)


def test_lines_are_read_at_their_places(line_ocr: OcrScorer) -> None:
    lines = [{"text": "BERU", "box": [84, 68, 210, 112]}, {"text": "MOKA", "box": [14, 8, 140, 52]}]
    swapped = [{**lines[0], "text": "MOKA"}, {**lines[1], "text": "BERU"}]
    scorer = engine_of(line_ocr)
    items = [RewardItem(0, "p", two_lines(), metadata={"lines": at}) for at in (lines, swapped)]
    right, wrong = scorer.score(items)
    assert isinstance(right, Score) and right.value == 1.0 and right.detail["text"] == "BERU / MOKA"
    assert isinstance(wrong, Score) and wrong.value < 0.3


class Recognizer:
    """Stands in for the recogniser of rapidocr: its settings, and a reading of each image."""

    def __init__(self) -> None:
        self.rec_image_shape, self.rec_batch_num = [3, 48, 320], 6

    def __call__(self, given: Any) -> Any:
        return SimpleNamespace(txts=[f"{self.rec_image_shape[2]}"] * len(given.img), scores=[0.5] * len(given.img))


def test_a_crop_that_is_read_leaves_the_recognizer_as_it_was() -> None:
    scorer, shared = OcrLinesReward().make(), Recognizer()
    scorer._engine = SimpleNamespace(_load_rec_model=lambda: shared)
    before = dict(vars(shared))
    crops = [np.zeros((48, width, 3), np.uint8) for width in (660, 100, 660)]
    assert [text for text, _ in scorer.read_lines(crops)] == ["672", "128", "672"]
    assert vars(shared) == before


@pytest.mark.full
def test_a_line_at_its_place_leaves_the_engine_as_it_was(line_ocr: OcrScorer) -> None:
    """Later lines that are found would be padded to its width: "TO LET" became "TOLET"."""
    recognizer = line_ocr.engine._load_rec_model()
    before = dict(vars(recognizer))
    wide = np.full((60, 660, 3), 255, np.uint8)
    line = {"text": "A", "box": [4, 4, 650, 52]}
    [outcome] = engine_of(line_ocr).score([RewardItem(0, "p", wide, metadata={"lines": [line]})])
    assert isinstance(outcome, Score) and vars(recognizer) == before


def test_lines_are_found_in_an_image(finding_ocr: OcrScorer) -> None:
    (outcome,) = engine_of(finding_ocr).score([RewardItem(0, 'a sign: "BERU" and "MOKA"', two_lines())])
    assert isinstance(outcome, Score) and outcome.value == 1.0 and outcome.detail["text"] == "BERU / MOKA"


def strokes() -> Pixels:
    """Four Chinese characters of straight strokes, drawn as lines: no font of the package has them."""
    box = [(20, 20, 20, 100), (80, 20, 80, 100), (17, 20, 83, 20), (17, 100, 83, 100)]
    characters = [
        [*box, (20, 60, 80, 60)],  # 日
        [*box, (50, 8, 50, 112)],  # 中
        [(15, 25, 85, 25), (15, 60, 85, 60), (15, 100, 85, 100), (50, 25, 50, 100)],  # 王
        [*box, (20, 60, 80, 60), (50, 20, 50, 100)],  # 田
    ]
    image = Image.new("RGB", (470, 120), "white")
    draw = ImageDraw.Draw(image)
    for place, lines in enumerate(characters):
        for x, y, right, bottom in lines:
            draw.line([(x + 110 * place + 20, y), (right + 110 * place + 20, bottom)], fill="black", width=7)
    return np.asarray(image)


def test_a_chinese_line_is_read(line_ocr: OcrScorer) -> None:
    lines = [{"text": "日中王田", "box": [0, 0, 469, 119]}]
    (outcome,) = engine_of(line_ocr).score([RewardItem(0, "p", strokes(), metadata={"lines": lines})])
    assert isinstance(outcome, Score) and (outcome.value, outcome.detail["text"]) == (1.0, "日中王田")


def test_chinese_lines_are_joined_without_spaces() -> None:
    boxes = [found("你好", 5, 5, 50, 20), found("世界", 60, 5, 95, 20)]
    assert scored(boxes, ["你好世界"]).value == 1.0
    assert scored([found("你好世界", 5, 5, 95, 20)], ["你好", "世界"]).value == 1.0


def test_a_language_that_the_engine_does_not_read() -> None:
    with pytest.raises(Exception, match="language: given 'klingon', which rapidocr does not read"):
        make_scorer("ocr_lines", {"language": "klingon"}).load("cpu")
    assert " japan " in make_scorer("ocr", {"language": "japan"}).spec.revision
