"""The arithmetic of published text benchmarks: ours is the official scripts', which ran elsewhere on the same made-up
readings; `text_oracles.json` names repository, commit and files."""

from __future__ import annotations

import json
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from random import Random
from statistics import fmean
from typing import Any

import numpy as np
import pytest

from retouch.rewards.line_crops import HEIGHT, WIDTH, as_pixels, scaled, upright
from retouch.rewards.protocol import Pixels, RewardItem
from retouch.rewards.scorers import make_scorer
from retouch.rewards.scorers.flow_grpo_ocr import FlowGrpoOcrReward, FlowGrpoOcrScorer, substring_reward
from retouch.rewards.scorers.reading import FoundLine
from retouch.types import Failure, Score
from retouch_bench.scorers.anytext import AnyTextReward, AnyTextScorer, compare
from retouch_bench.scorers.cvtg import CvtgReward, CvtgScorer, word_counts
from retouch_bench.scorers.longtext import recall
from retouch_bench.scorers.textedit import BoxedText, EditScores, TextEditReward, TextEditScorer, edit_scores
from tests.rewards.openai_server import KEY, OpenAIServer

ORACLES: dict[str, Any] = json.loads(
    (Path(__file__).parents[1] / "benchmarks_data" / "text_oracles.json").read_text(encoding="utf-8")
)
GREY = np.full((40, 80, 3), 127, np.uint8)


def cases(name: str) -> list[Any]:
    return ORACLES[name]["cases"]


def boxed(text: str, box: Sequence[float]) -> FoundLine:
    left, top, right, bottom = box
    return FoundLine(text, 0.9, ((left, top), (right, top), (right, bottom), (left, bottom)))


# --- LongText-Bench ---


@pytest.mark.parametrize("case", cases("longtext"), ids=lambda case: case["reading"][:20])
def test_longtext_counts(case: Any) -> None:
    found = recall(case["asked"], case["reading"], case["language"])
    assert (found.matched, found.asked) == (case["matched"], case["units"])


def test_longtext_asks_a_reader(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", KEY)
    with OpenAIServer() as server:
        scorer = make_scorer("longtext", {"model": "judge", "address": server.url})
        monkeypatch.setattr(scorer, "_read", lambda item: "Fresh brews! Every morning")
        lines = [{"text": "FRESH BREWS, EVERY DAY"}]
        told, empty, chinese = scorer.score([
            RewardItem(0, "p", GREY, metadata={"lines": lines, "language": "en"}),
            RewardItem(1, "p", GREY, metadata={"text": "!?"}),
            RewardItem(2, "p", GREY, metadata={"text": "早晨", "language": "zh"}),
        ])  # fmt: skip
        assert isinstance(told, Score) and told.value == pytest.approx(3 / 4)
        assert told.detail == {"text": "Fresh brews! Every morning", "matched": 3, "asked": 4}
        assert isinstance(empty, Failure) and "nothing is left of '!?'" in empty.message
        assert isinstance(chinese, Failure) and "set language=zh" in chinese.message
        assert isinstance(scorer.score([RewardItem(0, "p", GREY)])[0], Failure)
        monkeypatch.undo()
        monkeypatch.setenv("OPENAI_API_KEY", KEY)
        scorer.load("cpu")
        (asked,) = server.asked
    image, text = asked["messages"][0]["content"]
    assert image["type"] == "image_url" and text["text"].startswith("Recognize the text in the image")
    assert (asked["max_tokens"], asked["temperature"]) == (1024, 0) and "response_format" not in asked


# --- AnyText ---


@pytest.mark.parametrize("case", cases("anytext"), ids=lambda case: f"{case['asked']} {case['found']}")
def test_anytext_lines(case: Any) -> None:
    line = compare(case["asked"], case["found"], case["table"])
    assert (line.exact, line.ned) == (bool(case["exact"]), pytest.approx(case["ned"], abs=1e-9))


@cache
def pattern() -> Pixels:
    y, x = np.mgrid[0:512, 0:512].astype(np.float64)
    waves = 127.5 + 127.5 * np.sin(x / 17 + y / 29), 127.5 + 127.5 * np.cos(y / 13), x / 4 + y / 4
    return np.stack(waves, axis=-1).astype(np.uint8)


@pytest.mark.parametrize("case", ORACLES["anytext"]["crops"], ids=lambda case: str(case["polygon"][0]))
def test_anytext_crops(case: Any) -> None:
    """Values 0 to 255 of the official crop at 48 x 320, padded with 0, which float32 keeps to 1e-3."""
    crop = upright(pattern(), case["polygon"])
    assert crop is not None
    height, width = case["size"]
    assert crop.shape[:2] == ((width, height) if height > width * 1.2 else (height, width))
    line = scaled(crop)
    padded = np.zeros((HEIGHT, WIDTH, 3))
    padded[:, : line.shape[1]] = line
    assert padded.mean() == pytest.approx(case["mean"], abs=1e-3)
    for y, x, values in case["at"]:
        np.testing.assert_allclose(padded[y, x], values, atol=1e-2)


def test_a_polygon_outside_the_image_has_no_crop() -> None:
    assert upright(GREY, [(100, 10), (120, 10), (120, 20), (100, 20)]) is None
    assert upright(GREY, [(10, 10), (20, 10), (20, 10.4), (10, 10.4)]) is None


def test_a_crop_keeps_the_pixels_of_an_upright_box() -> None:
    image = np.random.default_rng(0).integers(0, 256, (40, 80, 3), dtype=np.uint8)
    crop = upright(image, [(10, 5), (50, 5), (50, 25), (10, 25)])
    assert crop is not None
    # grid_sample's corners are aligned and affine_grid's unit is not: up to a quarter of a pixel off
    assert crop.shape == (20, 40, 3) and np.abs(as_pixels(crop)[0, 0].astype(int) - image[5, 10]).max() < 130
    smooth = upright(pattern(), [(100, 100), (200, 100), (200, 150), (100, 150)])
    assert smooth is not None and np.abs(smooth - pattern()[100:150, 100:200]).max() < 8


def test_anytext_reads_every_line_at_its_polygon(monkeypatch: pytest.MonkeyPatch) -> None:
    scorer = AnyTextReward(table="en").make()
    shown: list[Pixels] = []

    def read(self: AnyTextScorer, crops: Sequence[Pixels]) -> list[tuple[str, float]]:
        shown.extend(crops)
        return [("OPEN", 1.0), ("dAILY", 1.0)]

    monkeypatch.setattr(AnyTextScorer, "read_lines", read)
    lines = [{"text": "OPEN", "box": [5, 5, 45, 15]}, {"text": "DAILY", "box": [5, 20, 75, 38]}]
    (outcome,) = scorer.score([RewardItem(0, "p", GREY, metadata={"lines": lines})])
    assert isinstance(outcome, Score)
    assert outcome.value == pytest.approx((1 + 1 - 1 / 5.00001) / 2)
    assert outcome.detail["lines"][1] == {"asked": "DAILY", "found": "dAILY"} and outcome.detail["exact"] == 0.5
    assert [crop.shape for crop in shown[:2]] == [(48, 192, 3), (48, 187, 3)]
    cut = {"lines": lines, "asked_texts": ["OPEN", "DAILY "]}  # behind a space, which the published script keeps
    (outcome,) = scorer.score([RewardItem(0, "p", GREY, metadata=cut)])
    assert isinstance(outcome, Score) and outcome.value == pytest.approx((1 + 1 - 2 / 6.00001) / 2)
    nowhere = scorer.score([RewardItem(0, "p", GREY, metadata={"text": "OPEN"})])[0]
    assert isinstance(nowhere, Failure) and "no polygons" in nowhere.message


# --- Flow-GRPO ---


@pytest.mark.parametrize("case", cases("flow_grpo_ocr"), ids=lambda case: case["prompt"])
def test_flow_grpo_rewards(case: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    lines = [FoundLine(text, confidence, ((0, 0), (1, 0), (1, 1), (0, 1))) for text, confidence in case["boxes"]]
    monkeypatch.setattr(FlowGrpoOcrScorer, "find_lines", lambda self, crops: [lines])
    (outcome,) = FlowGrpoOcrReward().make().score([RewardItem(0, case["prompt"], GREY)])
    assert isinstance(outcome, Score) and outcome.value == pytest.approx(case["reward"], abs=1e-12)


def test_flow_grpo_by_hand() -> None:
    assert substring_reward("OP EN", ["the op", "en door"]) == 1.0
    assert substring_reward("OPEN", ["OPN"]) == 0.75
    assert substring_reward("OPEN", ["x" * 20]) == 0.0


# --- CVTG-2K: no evaluator is published in the repository; a second derivation by dynamic programming and scans ---


def ratcliff(a: str, b: str) -> float:
    """2 M / T of Ratcliff and Obershelp: the longest common block, then left and right of it."""

    def matched(a: str, b: str) -> int:
        best, at, there = 0, 0, 0
        for i in range(len(a)):
            for j in range(len(b)):
                k = 0
                while i + k < len(a) and j + k < len(b) and a[i + k] == b[j + k]:
                    k += 1
                if k > best:
                    best, at, there = k, i, j
        return best and best + matched(a[:at], b[:there]) + matched(a[at + best :], b[there + best :])

    return 2 * matched(a, b) / (len(a) + len(b))


def test_cvtg_counts_by_hand_and_by_a_second_derivation() -> None:
    words = word_counts(["Grand Opening", "grand sale"], ["GRAND", "opening sole"])
    assert (words.asked, words.found) == (4, 3)  # one "grand" satisfies both
    assert words.ratios == pytest.approx(3 + 2 * 3 / 8)
    assert word_counts(["A"], []).ratios == 0.0
    draw = Random(0)

    def word() -> str:
        return "".join(draw.choice("abC") for _ in range(draw.randint(1, 6)))

    for _ in range(40):
        asked, boxes = [[f"{word()} {word()}" for _ in range(2)] for _ in range(2)]
        words, found = word_counts(asked, boxes), " ".join(boxes).lower().split()
        wanted = " ".join(asked).lower().split()
        assert words.found == len([word for word in wanted if any(word == other for other in found)])
        assert words.ratios == pytest.approx(sum(max(ratcliff(word, other) for other in found) for word in wanted))


def test_cvtg_takes_every_asked_text(monkeypatch: pytest.MonkeyPatch) -> None:
    boxes = [boxed("Grand", (0, 0, 9, 9)), boxed("SALE", (0, 20, 9, 29))]
    monkeypatch.setattr(CvtgScorer, "find_lines", lambda self, crops: [boxes])
    (outcome,) = CvtgReward().make().score([RewardItem(0, "p", GREY, metadata={"lines": ["Grand Sale", "Open"]})])
    assert isinstance(outcome, Score) and outcome.value == pytest.approx(2 / 3)
    assert (outcome.detail["asked_words"], outcome.detail["found_words"]) == (3, 2)


# --- TextEdit ---


def texts(boxes: Any) -> list[BoxedText]:
    return [BoxedText(text, tuple(box)) for text, box in boxes]


@pytest.mark.parametrize("number", range(len(cases("textedit"))))
def test_textedit_scores(number: int) -> None:
    case = cases("textedit")[number]
    found = edit_scores(texts(case["source"]), texts(case["output"]), case["source_text"], case["target_text"])
    official = case["scores"]
    assert (found.accuracy, found.precision, found.recall, found.f1, found.ned) == pytest.approx(
        [official[name] for name in ("target_accuracy", "precision", "recall", "f1", "roi_ned")], abs=1e-9
    )


def test_textedit_reads_the_source_and_the_output(monkeypatch: pytest.MonkeyPatch) -> None:
    shapes: list[Any] = []

    def find(self: TextEditScorer, crops: Sequence[Pixels]) -> list[list[FoundLine]]:
        shapes.extend(crop.shape for crop in crops)
        return [[boxed("SALE", (5, 5, 60, 20))], [boxed("MENU", (5, 5, 60, 20))]]

    monkeypatch.setattr(TextEditScorer, "find_lines", find)
    scorer = TextEditReward().make()
    about = {"text": "Menu", "source_text": "Sale"}
    small = np.zeros((20, 40, 3), np.uint8)
    (outcome,) = scorer.score([RewardItem(0, "p", small, source=GREY, metadata=about)])
    assert shapes == [(40, 80, 3), (40, 80, 3)]  # the output is brought to the size of the source
    assert isinstance(outcome, Score) and outcome.value == pytest.approx(1.0, abs=1e-5)
    assert outcome.detail["output_boxes"] == [{"text": "MENU", "box": [5, 5, 60, 20]}]
    (missing,) = scorer.score([RewardItem(0, "p", GREY, source=GREY, metadata={"text": "Menu"})])
    assert isinstance(missing, Failure) and "metadata.source_text is None" in missing.message


def test_official_means_are_plain_means() -> None:
    found = [
        edit_scores(texts(c["source"]), texts(c["output"]), c["source_text"], c["target_text"])
        for c in cases("textedit")
    ]
    assert fmean(one.f1 for one in found) == pytest.approx(ORACLES["textedit"]["means"]["f1"], abs=1e-9)
    assert edit_scores([], [], "a", "b") == EditScores()
