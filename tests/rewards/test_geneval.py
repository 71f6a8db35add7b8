"""The scorer of GenEval with a tiny random Mask2Former and CLIP, and with a detection server."""

from __future__ import annotations

import importlib.util
import json
import os
import sys
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
from PIL import Image

from retouch.config import ConfigError
from retouch.errors import RewardOutage
from retouch.process.machine import SLEEPING, WAIT_POLICY
from retouch.rewards.scorers import make_scorer
from retouch.types import Failure, Score
from retouch_bench.scorers.geneval_verdict import CLASSES, COLORS
from tests.rewards.fakes import item, score_checked, values

EXAMPLE = Path(__file__).parents[2] / "examples/geneval_detector.py"
TWO_DOGS = {"tag": "colors", "include": [{"class": "dog", "count": 2, "color": "red"}]}


@pytest.fixture(scope="module")
def example() -> ModuleType:
    spec = importlib.util.spec_from_file_location("geneval_detector", EXAMPLE)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@contextmanager
def served(example: ModuleType, detect: Any) -> Iterator[str]:
    server = example.server(detect, "made up", "127.0.0.1", 0)
    threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    server.server_close()


# --- a detection server ---


def test_detections_of_a_server_are_judged_here(example: ModuleType) -> None:
    asked: list[tuple[Any, ...]] = []

    def detect(image: Image.Image, *given: Any) -> list[dict[str, Any]]:
        asked.append((image.size, *given))
        dog = {"class": "dog", "score": 0.8, "box": [0, 0, 4, 5], "color": "red"}
        return [dog, {**dog, "score": 0.4}, {"class": "cup", "score": 0.2, "box": [0, 0, 1, 1]}]

    with served(example, detect) as url:
        scorer = make_scorer("geneval", {"detector_url": url})
        scorer.load("cpu")
        (right,) = score_checked(scorer, [item(0, metadata=TWO_DOGS)])
        strict = {"tag": "counting", "include": [{"class": "dog", "count": 2}]}
        (wrong,) = score_checked(scorer, [item(1, metadata=strict)])
    assert isinstance(right, Score) and isinstance(wrong, Score)
    assert (right.value, right.detail["correct"], right.detail["detector"]) == (1.0, 1.0, "made up")
    assert [one["label"] for one in right.detail["detections"]] == ["dog", "dog"]
    assert (wrong.value, wrong.detail["problems"]) == (0.0, ["dog: 0 of 2 found"])
    assert asked[1:] == [((5, 6), 0.3, 16, {"dog": 2}), ((5, 6), 0.9, 16, {})]
    assert scorer.spec.revision == "strict made up"


def test_partial_credit_is_an_option(example: ModuleType) -> None:
    one = [{"class": "dog", "score": 0.8, "box": [0, 0, 4, 5], "color": "red"}]
    with served(example, lambda *given: one) as url:
        scorer = make_scorer("geneval", {"detector_url": url, "value": "soft"})
        metadata = {"tag": "counting", "include": [{"class": "dog", "count": 2}]}
        assert values(score_checked(scorer, [item(0, metadata=metadata)])) == [0.0]  # nothing above 0.9
        metadata["tag"] = "two_object"
        assert values(score_checked(scorer, [item(0, metadata=metadata)])) == [0.5]


def test_failures_are_typed(example: ModuleType) -> None:
    def broken(*given: Any) -> list[dict[str, Any]]:
        raise RuntimeError("no memory")

    unknown = [{"class": "unicorn", "score": 0.8, "box": [0, 0, 4, 5]}]
    for detect, code, at_start in (
        (broken, "unavailable", RewardOutage),
        (lambda *given: unknown, "scorer_error", ConfigError),
    ):
        with served(example, detect) as url:
            scorer = make_scorer("geneval", {"detector_url": url, "timeout_s": 5.0})
            (outcome,) = score_checked(scorer, [item(0, metadata=TWO_DOGS)])
            assert isinstance(outcome, Failure) and outcome.code == code
            with pytest.raises(at_start, match=r"detector_url: .*; start the server \(examples/geneval_detector.py"):
                scorer.load("cpu")
    assert values(score_checked(scorer, [item(0, metadata={"tag": "colours"})])) == ["bad_item"]
    assert values(score_checked(scorer, [item(0, metadata=TWO_DOGS)])) == ["unavailable"]  # it is gone


def test_the_detector_lets_threads_sleep_before_it_imports_torch(
    example: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As the commands do, whose variables it cannot import."""
    seen: list[dict[str, str | None]] = []

    def detector(*_: str) -> None:
        seen.append({name: os.environ.get(name) for name in SLEEPING})
        raise InterruptedError

    monkeypatch.setattr(example, "Detector", detector)
    monkeypatch.setattr(sys, "argv", ["geneval_detector.py", "--config", "c", "--weights", "w"])
    for policy in (None, "ACTIVE"):
        for name in SLEEPING:
            monkeypatch.setenv(name, "to be restored")
            monkeypatch.delenv(name)
        if policy is not None:
            monkeypatch.setenv(WAIT_POLICY, policy)
        with pytest.raises(InterruptedError):
            example.main()
    assert seen == [SLEEPING, {**dict.fromkeys(SLEEPING), WAIT_POLICY: "ACTIVE"}]


def test_options_that_exclude_each_other() -> None:
    for options, problem in (
        ({"detector_url": "ftp://x"}, "detector_url: "),
        ({"detector_url": "http://127.0.0.1:9", "detector": ""}, "detector"),
    ):
        with pytest.raises(ConfigError, match=problem):
            make_scorer("geneval", options)


def test_the_published_detector_is_asked_as_it_was_trained(
    example: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With stand-ins for mmdet and open_clip: channel order, threshold, order of boxes, names, cut-outs, colours."""
    torch = pytest.importorskip("torch")
    seen: dict[str, Any] = {}
    boxes = [np.zeros((0, 5)) for _ in CLASSES]
    masks: list[list[Any]] = [[] for _ in CLASSES]
    mouse = CLASSES.index("computer mouse")
    boxes[mouse] = np.array([[0, 0, 2, 2, 0.5], [1, 1, 4, 3, 0.9], [0, 0, 1, 1, 0.3]])
    masks[mouse] = [np.ones((6, 5), bool), np.eye(6, 5, dtype=bool), np.ones((6, 5), bool)]

    def inference_detector(model: Any, pixels: Any) -> Any:
        seen["pixels"] = pixels
        return boxes, masks

    class Clip:
        def eval(self) -> None: ...

        def encode_text(self, texts: Any) -> Any:
            return torch.eye(10)[texts]

        def encode_image(self, pixels: Any) -> Any:
            return torch.eye(10)[[COLORS.index("pink")]]

    def pixels(crop: Image.Image) -> Any:
        seen["crop"] = np.asarray(crop)
        return torch.zeros(3)

    model = SimpleNamespace(CLASSES=[{"computer mouse": "mouse"}.get(name, name) for name in CLASSES])
    apis = SimpleNamespace(init_detector=lambda *given, device: model, inference_detector=inference_detector)
    clip = SimpleNamespace(
        create_model_and_transforms=lambda *given, **options: (Clip(), None, pixels),
        get_tokenizer=lambda name: (
            lambda texts: torch.tensor([COLORS.index(next(c for c in COLORS if f" {c}" in text)) for text in texts])
        ),
    )
    for name, module in {"mmdet.apis": apis, "open_clip": clip}.items():
        monkeypatch.setitem(sys.modules, name, module)
    image = np.random.default_rng(0).integers(0, 256, (6, 5, 3), np.uint8)
    detector = example.Detector("config.py", "folder/weights.pth", "cpu")
    found = detector(Image.fromarray(image), 0.3, 16, {"computer mouse": 1})
    assert found == [
        {"class": "computer mouse", "score": 0.9, "box": [1, 1, 4, 3], "color": "pink"},
        {"class": "computer mouse", "score": 0.5, "box": [0, 0, 2, 2]},
    ]
    assert detector.name == "weights.pth" and np.array_equal(seen["pixels"], image[..., ::-1])
    expected = np.where(np.eye(6, 5, dtype=bool)[..., None], image, 0x99)[1:3, 1:4]
    assert np.array_equal(seen["crop"], expected)


# --- networks of this process ---


def tiny_detector(folder: Path, labels: Mapping[int, str] = dict(enumerate(CLASSES))) -> Path:
    """A random Mask2Former of toy size with COCO's classes, and its processor, as they are released."""
    torch = pytest.importorskip("torch")
    from transformers import Mask2FormerConfig, Mask2FormerForUniversalSegmentation, SwinConfig

    backbone = SwinConfig(
        embed_dim=16, depths=[1, 1, 1, 1], num_heads=[1, 1, 1, 1], window_size=2, image_size=32, patch_size=4,
        out_features=["stage1", "stage2", "stage3", "stage4"],
    )  # fmt: skip
    config = Mask2FormerConfig(
        backbone_config=backbone, feature_size=32, mask_feature_size=32, hidden_dim=32, encoder_feedforward_dim=16,
        encoder_layers=1, decoder_layers=2, num_attention_heads=2, dim_feedforward=16, num_queries=5,
        id2label=dict(labels), label2id={name: i for i, name in labels.items()},
    )  # fmt: skip
    torch.manual_seed(0)
    Mask2FormerForUniversalSegmentation(config).save_pretrained(folder)
    processor = {
        "image_processor_type": "Mask2FormerImageProcessor", "do_resize": True, "size_divisor": 32,
        "size": {"shortest_edge": 64, "longest_edge": 96}, "do_rescale": True, "rescale_factor": 1 / 255,
        "do_normalize": True, "image_mean": [0.485, 0.456, 0.406], "image_std": [0.229, 0.224, 0.225],
    }  # fmt: skip
    (folder / "preprocessor_config.json").write_text(json.dumps(processor))
    return folder


@pytest.mark.full
def test_networks_of_transformers_in_this_process(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    from retouch_bench.scorers.geneval_networks import Networks
    from tests.tiny_models import tiny_clip

    folder = tiny_detector(tmp_path / "detector")
    networks = Networks(str(folder), tiny_clip(), "cpu")
    pixels = np.random.default_rng(1).integers(0, 256, (40, 56, 3), np.uint8)
    image = Image.fromarray(pixels)
    found = networks.detect(image)
    assert 10 < len(found) <= 100
    assert [one.score for one, _ in found] == sorted((one.score for one, _ in found), reverse=True)
    for one, mask in found:
        rows, columns = np.nonzero(mask)
        assert mask.shape == (40, 56) and 0 < one.score < 1 and one.label in CLASSES
        assert one.box == (columns.min(), rows.min(), columns.max() + 1, rows.max() + 1)
    # scores by transformers' own arithmetic, whose masks have another size: class probability and mean in the mask
    given = networks._pixels(images=[image], return_tensors="pt")
    with torch.inference_mode():
        output = networks._detector(**given)
    best = output.class_queries_logits[0].softmax(-1)[:, :-1].max()
    assert found[0][0].score < best < 3 * found[0][0].score
    # colours: the largest cosine to the mean of the templates
    (one, mask), *_ = found
    box = tuple(int(side) for side in one.box)
    cut = np.where(mask[..., None], pixels, 0x99)[box[1] : box[3], box[0] : box[2]]
    clip = networks._clip
    classifier = [
        clip.of_texts([f"a photo of a {c} dog", f"a photo of a {c}-colored dog", f"a photo of a {c} object"]).mean(0)
        for c in COLORS
    ]
    cosines = [float(clip.of_images([cut])[0] @ (row / row.norm())) for row in classifier]
    assert networks.colors(image, "dog", [(one.box, mask)]) == [COLORS[int(np.argmax(cosines))]]
    # the scorer: the same detections, whatever the batch, with colours where they are asked for
    scorer: Any = make_scorer("geneval", {"detector": str(folder), "color_model": tiny_clip()})
    scorer.load("cpu")
    label = one.label
    metadata = {"tag": "colors", "include": [{"class": label, "count": 1, "color": "red"}]}
    clauses = [SimpleNamespace(label=label, count=count, color="red") for count in (2, 1)]  # in either order
    wider = scorer._detect(pixels, 0.0, clauses)[label]
    assert len(wider) > 1 and all(one.color in COLORS for one in wider[:2])
    assert wider[:3] == scorer._detect(pixels, 0.0, clauses[::-1])[label][:3]
    objects = scorer._detect(pixels, 0.0, [SimpleNamespace(label=label, count=1, color="red")])
    assert objects[label][0].color in COLORS and objects[label][0].box == one.box
    outcomes = score_checked(scorer, [item(0, image=pixels, metadata=metadata), item(1, metadata=metadata)])
    assert all(isinstance(outcome, Score) and outcome.value == 0 for outcome in outcomes)
    assert str(folder) in scorer.spec.revision and tiny_clip() in scorer.spec.revision
    other = tiny_detector(tmp_path / "other", dict(enumerate(["cat", "dog"])))
    with pytest.raises(ConfigError, match="whose 2 classes are not the 80 of COCO"):
        Networks(str(other), tiny_clip(), "cpu")
