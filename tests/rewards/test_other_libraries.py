"""Scorers of libraries that cannot be installed beside the rest: what they ask of stand-ins that keep to the libraries'
interfaces (imscore's `from_pretrained` and `score(pixels, prompts)`; PaddleOCR 3's `predict`), and the composite."""

from __future__ import annotations

import importlib.metadata
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from retouch.config import ConfigError
from retouch.rewards.protocol import RewardItem, ScorerSpec
from retouch.rewards.scorers import make_scorer, paddle
from retouch.rewards.scorers.hps import HpsV2Reward
from retouch.rewards.scorers.mask_composite import MaskCompositeScorer
from retouch.rewards.scorers.seam import SeamReward
from retouch.types import Failure, Score
from tests.rewards.fakes import item, picture, score_checked, values

# --- imscore ---

KINDS = {
    "imagereward": ("imscore.imreward.model", "ImageReward"),
    "aesthetic": ("imscore.aesthetic.model", "LAIONAestheticScorer"),
}


class Model(nn.Module):
    """Of imscore's interface: half the brightness plus a tenth of the length of the prompt, [B, 1]."""

    calls: list[tuple[tuple[int, ...], list[str]]] = []  # noqa: RUF012
    paths: list[str] = []  # noqa: RUF012

    @classmethod
    def from_pretrained(cls, path: str, strict: bool = False) -> Model:
        if path == "missing":
            raise OSError("no such model\nand more")
        cls.paths.append(path)
        return cls()

    def score(self, pixels: Tensor, prompts: Sequence[str]) -> Tensor:
        assert pixels.dtype == torch.float32 and float(pixels.min()) >= 0 and float(pixels.max()) <= 1
        assert not self.training and torch.is_inference_mode_enabled()
        self.calls.append((tuple(pixels.shape), list(prompts)))
        return (pixels.mean((1, 2, 3)) / 2 + torch.tensor([len(p) / 10 for p in prompts]))[:, None]


@pytest.fixture
def imscore(monkeypatch: pytest.MonkeyPatch) -> type[Model]:
    for module, name in KINDS.values():
        made = ModuleType(module)
        setattr(made, name, Model)
        monkeypatch.setitem(sys.modules, module, made)
    Model.calls, Model.paths = [], []
    return Model


@pytest.mark.parametrize("name", KINDS)
def test_a_model_of_imscore(name: str, imscore: type[Model]) -> None:
    """Pictures of several shapes, in batches of one shape and of at most two; every score is its own item's."""
    scorer = make_scorer(name, {"path": "somewhere", "images_per_forward": 2})
    scorer.load("cpu")
    sizes = [(6, 5), (8, 8), (6, 5), (6, 5)]
    batch = [item(i, image=picture(i, *size), prompt="p" * i) for i, size in enumerate(sizes)]
    expected = [one.image.mean() / 510 + i / 10 for i, one in enumerate(batch)]
    assert values(score_checked(scorer, batch)) == pytest.approx(expected, abs=1e-5)
    assert sorted(shape for shape, _ in imscore.calls) == [(1, 3, 6, 5), (1, 3, 8, 8), (2, 3, 6, 5)]
    assert imscore.paths == ["somewhere"] and "somewhere" in scorer.spec.revision and name in scorer.spec.revision


def test_without_imscore_the_message_has_the_command() -> None:
    with pytest.raises(ConfigError, match="an environment of its own, which `retouch reward env aesthetic` makes"):
        make_scorer("aesthetic").load("cpu")


def test_a_model_that_is_not_there(imscore: type[Model]) -> None:
    with pytest.raises(
        ConfigError,
        match=r"path: given 'missing', which cannot be loaded \(no such model\); it needs that model and openai/clip",
    ):
        make_scorer("aesthetic", {"path": "missing"}).load("cpu")


# --- PaddleOCR ---


class Paddle:
    """paddleocr 3: results that are mappings, one a picture; remembers how it was made and asked."""

    def __init__(self, log: list[Any], result: Callable[[Any], dict[str, Any]], **options: Any) -> None:
        log.append(options)
        self.log, self.result = log, result

    def predict(self, picture: Any) -> list[dict[str, Any]]:
        assert isinstance(picture, np.ndarray) and picture.flags["C_CONTIGUOUS"]
        self.log.append(picture)
        return [self.result(picture)]


@pytest.fixture
def paddleocr(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    log: list[Any] = []
    made = ModuleType("paddleocr")

    def lines(picture: Any) -> dict[str, Any]:
        found = bool(picture[..., 2].max())  # BGR: the red channel comes last
        corners = [[[x, 0], [x + 4, 0], [x + 4, 4], [x, 4]] for x in (0, 4)]
        columns = {"rec_texts": ["MO", "KA"], "rec_scores": [0.9, 0.7], "rec_polys": corners}
        return {name: column if found else [] for name, column in columns.items()}

    setattr(made, "PaddleOCR", lambda **o: Paddle(log, lines, **o))  # noqa: B010
    one = {"rec_text": "MOKA", "rec_score": 0.8}
    setattr(made, "TextRecognition", lambda **o: Paddle(log, lambda p: one, **o))  # noqa: B010
    monkeypatch.setitem(sys.modules, "paddleocr", made)
    monkeypatch.setattr(paddle, "version", lambda: "3.7.0")
    return log


def red_hole() -> Any:
    """A black picture with a red hole of 4 x 8."""
    image, mask = np.zeros((16, 16, 3), np.uint8), np.zeros((16, 16), np.uint8)
    image[2:6, 4:12, 0] = mask[2:6, 4:12] = 255
    return item(0, image=image, mask=mask, metadata={"text": "MO KA"})


def test_paddleocr_reads_the_lines_of_the_hole(paddleocr: list[Any]) -> None:
    scorer = make_scorer("ocr", {"engine": "paddleocr", "threads": 2})
    scorer.load("cuda:1")
    found, nothing = score_checked(
        scorer, [red_hole(), item(1, metadata={"text": "A"}, image=np.zeros((8, 8, 3), np.uint8))]
    )
    assert isinstance(found, Score) and (found.value, found.detail["text"]) == (1.0, "MO KA")
    assert found.detail["confidence"] == pytest.approx(0.8)
    assert isinstance(nothing, Score) and (nothing.value, nothing.detail["text"]) == (0.0, "")
    made, crop, _ = paddleocr
    assert made == {
        "use_doc_orientation_classify": False, "use_doc_unwarping": False, "use_textline_orientation": False,
        "text_rec_score_thresh": 0.0, "device": "gpu:1", "cpu_threads": 2,
    }  # fmt: skip
    assert crop.shape == (4, 8, 3) and crop[..., 2].min() == 255 and crop[..., :2].max() == 0
    assert scorer.spec.revision.startswith("paddleocr 3.7.0 ")


def test_paddleocr_reads_a_crop_as_one_line(paddleocr: list[Any]) -> None:
    scorer = make_scorer("ocr", {"engine": "paddleocr", "detect": False, "score": "confidence"})
    scorer.load("cpu")
    (found,) = score_checked(scorer, [red_hole()])
    assert isinstance(found, Score) and (found.value, found.detail["text"]) == (0.8, "MOKA")
    assert paddleocr[0] == {"device": "cpu"}


@pytest.mark.parametrize("detect", [True, False])
def test_paddleocr_has_no_score_for_texts_beyond_its_dictionary(paddleocr: list[Any], detect: bool) -> None:
    """The places of the dictionary are those of paddleocr 3.3.1 on paddlex 3.3.6; where it is not, nothing is known."""
    scorer: Any = make_scorer("ocr", {"engine": "paddleocr", "detect": detect})
    scorer.load("cpu")
    asked = item(0, metadata={"text": "Кафе 24"})
    assert isinstance(score_checked(scorer, [asked])[0], Score)
    predictor = SimpleNamespace(post_op=SimpleNamespace(character=["blank", *"MOKA24e", " "]))
    if detect:
        scorer._paddle._finder.paddlex_pipeline = SimpleNamespace(text_rec_model=predictor)
    else:
        scorer._paddle._recognizer.paddlex_predictor = predictor
    beyond, within = score_checked(scorer, [asked, item(1, metadata={"text": "MOKÄ"})])
    assert isinstance(beyond, Failure) and beyond.code == "bad_item" and isinstance(within, Score)
    assert beyond.message == (
        "the reader of ocr has no К а ф е in its dictionary, for the text 'Кафе 24'; set language to one of "
        "PaddleOCR's that has them, or use another text"
    )
    assert scorer.spec.revision.startswith("paddleocr 3.7.0 2 ")


def test_paddleocr_that_is_missing_or_old(paddleocr: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(paddle, "version", lambda: "2.10.0")
    with pytest.raises(ConfigError, match=r"paddleocr is 2\.10\.0; version 3 or newer"):
        make_scorer("ocr", {"engine": "paddleocr"}).load("cpu")
    monkeypatch.setitem(sys.modules, "paddleocr", None)
    with pytest.raises(ConfigError, match="pip install paddleocr paddlepaddle"):
        make_scorer("ocr", {"engine": "paddleocr"}).load("cpu")


def test_the_version_of_a_missing_library() -> None:
    with pytest.raises(importlib.metadata.PackageNotFoundError):
        importlib.metadata.version("paddleocr")
    assert paddle.version() == "0"


# --- composite ---


class Brightness:
    """As HPSv2.1 would be called: half the brightness plus a tenth of the length of the prompt."""

    spec = ScorerSpec("hpsv2", (-1.0, 1.0), frozenset(), "hpsv2 fake", "Apache-2.0")

    def __init__(self) -> None:
        self.shapes: list[tuple[int, ...]] = []

    def load(self, device: str) -> None: ...

    def score(self, items: Sequence[RewardItem]) -> list[Score]:
        self.shapes += [one.image.shape for one in items]
        return [Score(float(one.image.mean()) / 510 + len(one.prompt) / 10) for one in items]


@pytest.fixture
def brightness(monkeypatch: pytest.MonkeyPatch) -> Brightness:
    made = Brightness()
    monkeypatch.setattr(HpsV2Reward, "make", lambda self: made)
    return made


def test_the_composite_by_hand(brightness: Brightness) -> None:
    """A quarter is masked; the judge sees the box of at least 224 pixels, the seam the whole picture."""
    scorer = make_scorer("mask_composite", {"judge": "hpsv2", "path": "x", "low": 0.0, "high": 2.0})
    scorer.load("cpu")
    image, mask = picture(0, 300, 400), np.zeros((300, 400), np.uint8)
    mask[:150, :200] = 255
    one = item(0, image=image, mask=mask, prompt="p")
    (found,) = score_checked(scorer, [one])
    (seam,) = SeamReward().make().score([one])
    assert isinstance(found, Score) and isinstance(seam, Score)
    assert brightness.shapes == [(224, 224, 3)]
    fit = image[:224, :224].mean() / 510 + 0.1
    assert found.detail == {"mask_share": 0.25, "judge": pytest.approx(fit, abs=1e-5), "seam": seam.value}
    assert found.value == pytest.approx(0.25 * fit / 2 + 0.75 * (1 + seam.value), abs=1e-5)
    assert scorer.score([replace(one, source=picture(1, 30, 40))]) == [found]  # a source of another size is not scored


def test_the_composite_of_a_failed_part_is_a_failure(brightness: Brightness) -> None:
    scorer = make_scorer("mask_composite", {"judge": "hpsv2"})
    scorer.load("cpu")
    (found,) = score_checked(scorer, [item(0, mask=np.full((6, 5), 255, np.uint8))])
    assert isinstance(found, Failure) and "no edge" in found.message


def test_the_composite_holds_its_judge_to_its_bounds(brightness: Brightness) -> None:
    assert isinstance(make_scorer("mask_composite"), MaskCompositeScorer)
    with pytest.raises(ConfigError, match=r"high: given 0\.1, but low is 0\.15"):
        make_scorer("mask_composite", {"high": 0.1})
    scorer = make_scorer("mask_composite", {"judge": "hpsv2", "low": 5.0, "high": 6.0})
    scorer.load("cpu")
    mask = np.zeros((6, 5), np.uint8)
    mask[:3] = 255
    one = item(0, mask=mask, prompt="p")
    (found,), (seam,) = score_checked(scorer, [one]), SeamReward().make().score([one])
    assert isinstance(found, Score) and isinstance(seam, Score)
    assert found.value == pytest.approx(0.5 * 0 + 0.5 * (1 + seam.value))
