"""One rule for joining, folding and comparing texts, in every measure of the package: a reading of the text itself
scores 1, however it is typed, cut into lines, composed or spaced, in every script that the reader knows."""

from __future__ import annotations

import unicodedata
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from retouch.imaging.lines import folded, joined, pieces
from retouch.rewards import REWARDS
from retouch.rewards.protocol import RewardItem
from retouch.rewards.scorers.ocr import OcrReward, OcrScorer
from retouch.rewards.scorers.ocr_lines import OcrLinesReward
from retouch.rewards.scorers.reading import missing_characters, packaged_characters, remedy_for
from retouch.types import Failure, Outcome, Score
from tests.test_quotes import WRITTEN

PAGE = np.full((64, 128, 3), 255, np.uint8)


class Scripted:
    """An engine that finds given lines below each other, and has the dictionary of another one."""

    cfg = None

    def __init__(self, engine: Any, lines: Sequence[str]) -> None:
        self._load_rec_model = engine._load_rec_model
        boxes = [[(0, 20 * n), (99, 20 * n), (99, 20 * n + 15), (0, 20 * n + 15)] for n in range(len(lines))]
        self.found = SimpleNamespace(txts=tuple(lines), scores=(0.9,) * len(lines), boxes=boxes)

    def __call__(self, *_: Any, **__: Any) -> Any:
        return self.found


def read(reader: OcrScorer, options: OcrReward | OcrLinesReward, lines: Sequence[str], **fields: Any) -> Outcome:
    scorer: Any = options.make()
    scorer._engine, scorer._known = Scripted(reader.engine, lines), packaged_characters()
    (outcome,) = scorer.score([RewardItem(0, fields.pop("prompt", "p"), PAGE, **fields)])
    return outcome


def halves(text: str) -> list[str]:
    """A text on two lines, where it can be cut."""
    parts = pieces(folded(text))
    middle = len(parts) // 2
    return [line for line in (joined(parts[:middle]), joined(parts[middle:])) if line]


@pytest.mark.parametrize(("prompt", "texts"), WRITTEN)
def test_a_right_reading_of_a_prompt_scores_1_or_its_characters_are_named(
    line_ocr: OcrScorer, prompt: str, texts: list[str]
) -> None:
    text = texts[0]
    lacking = missing_characters(text, packaged_characters())
    readings = [[text], halves(text), [unicodedata.normalize("NFD", text)]]
    for options in (OcrReward(), OcrLinesReward()):
        for lines in readings:
            one = read(line_ocr, options, lines, prompt=prompt if len(texts) == 1 else "p", metadata={"text": text})
            if 2 * len(lacking) > len(set(folded(text)) - {" "}):
                assert isinstance(one, Failure) and lacking[0] in one.message and one.code == "bad_item"
            else:
                assert isinstance(one, Score) and one.value == 1.0, (lines, one)


def test_most_of_the_table_is_readable() -> None:
    """So that the test above does not pass by failures alone."""
    known = packaged_characters()
    assert sum(not missing_characters(texts[0], known) for _, texts in WRITTEN) >= 35


@pytest.mark.parametrize(
    ("asked", "found"),
    [
        ("DON’T", ["DON'T"]),
        ("DON'T", ["DON’T"]),
        ("L´été", ["L'été"]),
        ("“SALE”", ['"SALE"']),
        ("« oui »", ["« oui 》"]),
        ("Tür ‚zu‘", ["Tür ,zu'"]),
        ("9–17", ["9-17"]),
        ("COFFEE — TEA", ["COFFEE - TEA"]),
        ("WAIT…", ["WAIT..."]),
        ("ｃａｆé １２", ["café 12"]),
        ("ｶﾌｪ", ["カフェ"]),
        ("カール・マルクス", ["カール·マルクス"]),
        ("cafe\u0301", ["caf\u00e9"]),
        ("東京 駅前", ["東京駅前"]),
        ("営業中！本日", ["営業中！", "本日"]),
        ("営業中！本日", ["営業中!", "本日"]),
        ("東京 Tower", ["東京", "Tower"]),
        ("soft\u00adware\u200b", ["software"]),
        ("葛\U000e0100城\ufe0f ★\ufe0f", ["葛城★"]),
        ("OPEN DAILY", ["OPEN", "DAILY"]),
    ],
)
def test_variants_of_one_text(line_ocr: OcrScorer, asked: str, found: list[str]) -> None:
    for options in (OcrReward(), OcrLinesReward()):
        outcome = read(line_ocr, options, found, metadata={"text": asked})
        assert isinstance(outcome, Score) and outcome.value == 1.0, outcome
        assert outcome.detail["exact"] == 1.0


def test_lines_of_the_list_are_joined_by_the_same_rule(line_ocr: OcrScorer) -> None:
    asked = {"lines": [{"text": "東京駅前"}, {"text": "営業中！"}]}
    for found in (["東京駅前", "営業中！"], ["東京駅前営業中！"], ["東京", "駅前", "営業中!"]):
        outcome = read(line_ocr, OcrLinesReward(), found, metadata=asked)
        assert isinstance(outcome, Score) and outcome.value == 1.0


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ("A B", "AB"),
        ("東京 Tower", "東京Tower"),
        ("10-12", "1012"),
        ("ー", "-"),
        ("O", "0"),
        ("Cafe", "Café"),
        ("a", "A"),
    ],
)
def test_texts_that_stay_two(one: str, other: str) -> None:
    assert folded(one) != folded(other)


@pytest.mark.parametrize("prompt_and_texts", WRITTEN)
def test_the_normal_form_is_its_own(prompt_and_texts: tuple[str, list[str]]) -> None:
    for text in (prompt_and_texts[0], *prompt_and_texts[1]):
        for case_sensitive in (True, False):
            normal = folded(text, case_sensitive=case_sensitive)
            assert folded(normal, case_sensitive=case_sensitive) == normal
        assert joined(pieces(folded(text))) == folded(text)


def test_texts_of_ascii_letters_are_compared_as_ever() -> None:
    """NFKC and single spaces, as in the runs and the demo of earlier versions."""
    for text in ("MOKA", "Fresh  Coffee\n2 for 1!", "  a.b-c (d) & e's "):
        assert folded(text) == " ".join(unicodedata.normalize("NFKC", text).split())


# --- the reader's dictionary ---


@pytest.mark.parametrize("options", [OcrReward(), OcrLinesReward()], ids=["ocr", "ocr_lines"])
def test_a_text_beyond_the_reader_is_no_score_of_0(line_ocr: OcrScorer, options: OcrReward | OcrLinesReward) -> None:
    outcome = read(line_ocr, options, ["KOOE"], metadata={"text": "Кафе 24"})
    assert isinstance(outcome, Failure) and outcome.code == "bad_item"
    assert outcome.message == (
        f"the reader of {options.scorer} has no К а ф е in its dictionary, for the text 'Кафе 24'; set "
        "language=cyrillic"
    )
    few = read(line_ocr, options, ["I LOVE KO"], metadata={"text": "I LOVE КО"})
    assert isinstance(few, Score) and 0 < few.value < 1  # samples still differ
    invisible = read(line_ocr, options, ["A"], metadata={"text": "\u200b\u00ad"})
    assert isinstance(invisible, Failure) and "no visible character" in invisible.message


def test_the_characters_of_a_loaded_engine_are_those_of_its_package(line_ocr: OcrScorer) -> None:
    known = line_ocr._characters()
    assert known == packaged_characters() and known is line_ocr._characters()
    assert {"A", "é", "東", "カ", "'", "."} <= known and not {"Ж", "한", "ก", "’"} & known


def test_the_lacking_characters_of_an_entry() -> None:
    assert OcrReward().lacking("Кафе Caffè") == ["К", "а", "ф", "е"]
    assert OcrReward().lacking("OPEN") == OcrReward().lacking("営業中 Été") == []
    assert OcrReward(language="cyrillic").lacking("Кафе") == []  # its dictionary comes with its model
    assert OcrReward(url="http://127.0.0.1:1").lacking("Кафе") == []
    assert REWARDS["flow_grpo_ocr"]().lacking("Кафе") == ["К", "а", "ф", "е"]
    assert REWARDS["style"]().lacking("Кафе") == ["К", "а", "ф", "е"]
    assert REWARDS["style"](gate=0).lacking("Кафе") == []
    assert REWARDS["recognizer"]().lacking("Cafe No. 1!") == [".", "!"]
    assert REWARDS["preservation"]().lacking("Кафе") == []


def test_the_language_for_a_script() -> None:
    assert remedy_for(["한"]) == "set language=korean"
    assert remedy_for(["Ж", "α"], "rewards.ocr.") == "set rewards.ocr.language=cyrillic or el"
    assert remedy_for(["ქ"]).startswith("set engine=paddleocr")
    assert remedy_for(["م"]) == "set language=arabic (pip install 'rapidocr[rtl]')"
    assert remedy_for(["🏽", "Ж", "ש"]) == "set language=cyrillic; use other texts for ש"


@pytest.mark.parametrize(
    ("language", "model"),
    [
        ("japan", "PP-OCRv6_rec_small"),
        ("korean", "korean_PP-OCRv5_rec_mobile"),
        ("cyrillic", "cyrillic_PP-OCRv5_rec_mobile"),
        ("arabic", "arabic_PP-OCRv5_rec_mobile"),
        ("ka", "ka_PP-OCR"),
    ],
)
def test_a_language_takes_the_newest_model_that_reads_it(language: str, model: str) -> None:
    """rapidocr's default models read no Korean, Arabic or Cyrillic, and raised at the first image."""
    from rapidocr.inference_engine.base import FileInfo, InferSession

    scorer = OcrReward(language=language).make()
    scorer.load("cpu")
    rec = scorer.engine.cfg.Rec
    kind = FileInfo(rec.engine_type, rec.ocr_version, rec.task_type, rec.lang_type, rec.model_type)
    assert model in InferSession.get_model_url(kind)["model_dir"]


def test_scorers_that_read_a_text_have_another_revision() -> None:
    """A cache of scores of earlier versions is not read."""
    for name in ("ocr", "ocr_lines", "recognizer", "glyph_structure", "style", "flow_grpo_ocr"):
        assert " texts 3" in REWARDS[name]().make().spec.revision, name
    for name in ("preservation", "seam"):
        assert "texts" not in REWARDS[name]().make().spec.revision
