"""Regions of an image for MMMG's readability: against recorded runs of the published code, and SAM 2's classes."""

from __future__ import annotations

import json
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from retouch.benchmarks.load import load_benchmark
from retouch.config import ConfigError
from retouch.rewards.protocol import Pixels
from retouch.rewards.scorers import regions
from retouch.rewards.scorers.knowledge_graph import readability
from retouch.rewards.scorers.mask_generation import (
    Settings,
    at_edge,
    crop_boxes,
    grid,
    mask_boxes,
    region_boxes,
    stability,
    suppressed,
)
from retouch.rewards.scorers.mmmg import MmmgReward
from retouch.rewards.scorers.reading import FoundLine
from retouch.rewards.scorers.regions import RegionCounter, Sam2Predictor, count_regions, text_lines
from tests.selection import default

RECORDED: dict[str, Any] = json.loads(
    (Path(__file__).parents[1] / "benchmarks_data/mmmg_regions.json").read_text(encoding="utf-8")
)


class Disks:
    """The stand-in of the recorded runs: disks of three sizes around the nearest knot of a grid of 20 pixels."""

    def set_image(self, image: Pixels) -> None:
        self.size = image.shape[:2]

    def predict(self, points: Tensor, masks: Tensor | None = None) -> tuple[Tensor, Tensor, Tensor]:
        height, width = self.size
        knots = ((points / 20).round() * 20).double()
        kinds = torch.arange(3.0).expand(len(points), 3).double() if masks is None else masks[:, 0, 0, None].double()
        radius = torch.tensor([4.0, 10.0, 20.0]).double()[kinds.long()]
        y, x = torch.meshgrid(torch.arange(height), torch.arange(width), indexing="ij")
        far = ((x[None] - knots[:, 0, None, None]) ** 2 + (y[None] - knots[:, 1, None, None]) ** 2).double().sqrt()
        logits = 6 * (radius[:, :, None, None] - far[:, None])
        wave = (knots[:, :1] * 1.3 + knots[:, 1:] * 2.7 + kinds * 5.1 + points[:, :1].double() / 97).sin()
        low = torch.zeros(len(points), kinds.shape[1], 4, 4)
        low[:, :, 0, 0] = kinds.float()
        return logits.float(), (0.75 + 0.25 * wave).float(), low


def found_lines(case: dict[str, Any]) -> list[FoundLine]:
    return [FoundLine(f["text"], f["confidence"], tuple(map(tuple, f["polygon"]))) for f in case["found"]]


@pytest.mark.parametrize(
    "case", default(RECORDED["cases"], lambda case: case["size"] == [96, 128]), ids=lambda case: str(case["size"])
)
def test_regions_equal_the_published_code(case: dict[str, Any]) -> None:
    """The boxes of the masks, the lines of text, and the number of both without text twice."""
    width, height = case["size"]
    boxes = region_boxes(np.zeros((height, width, 3), np.uint8), Disks())
    assert sorted(boxes.int().tolist()) == case["masks"]
    lines = text_lines(found_lines(case))
    assert [list(line) for line in lines] == case["lines"]
    assert count_regions(boxes.tolist(), lines) == case["regions"]


def test_each_mask_is_predicted_again_at_its_own_point() -> None:
    again: list[int] = []

    class Paired(Disks):
        def predict(self, points: Tensor, masks: Tensor | None = None) -> tuple[Tensor, Tensor, Tensor]:
            if masks is not None:
                assert torch.equal(masks[:, 1, :2], points)
                again.append(len(points))
            logits, ious, low = super().predict(points, masks)
            low[:, :, 1, :2] = points[:, None]
            return logits, ious, low

    region_boxes(np.zeros((48, 64, 3), np.uint8), Paired(), Settings(side=4, points_per_batch=8))
    assert sum(again) == 3 * (4**2 + 4 * 2**2) and max(again) == 8


def test_parts_by_hand() -> None:
    assert crop_boxes((100, 150), 512 / 1500)[:3] == [(0, 0, 150, 100), (0, 0, 92, 67), (0, 33, 92, 100)]
    np.testing.assert_allclose(grid(2), [(0.25, 0.25), (0.75, 0.25), (0.25, 0.75), (0.75, 0.75)])
    logits = torch.tensor([[[2.0, 0.0], [-2.0, -2.0]], [[2.0, 2.0], [2.0, 2.0]]])
    assert stability(logits, 0.7).tolist() == [0.5, 1.0]
    masks = torch.zeros(2, 5, 7, dtype=torch.bool)
    masks[0, 1:3, 2:6] = True
    assert mask_boxes(masks).tolist() == [[2, 1, 5, 2], [0, 0, 0, 0]]
    boxes = torch.tensor([[0.0, 0, 10, 10], [1, 0, 11, 10], [50, 50, 60, 60]])
    assert suppressed(boxes, torch.tensor([0.5, 0.9, 0.1]), 0.6).tolist() == [1, 2]
    assert suppressed(boxes, torch.tensor([0.5, 0.9, 0.1]), 0.9).tolist() == [1, 0, 2]
    edges = torch.tensor([[0.0, 0, 10, 10], [30, 30, 60, 60], [60, 60, 95, 95]])
    assert at_edge(edges, (0, 0, 100, 100), (0, 0, 200, 200), 20).tolist() == [False, False, True]
    assert [readability(n) for n in (70, 115, 160)] == [1.0, 0.5, 0.0]


def tiny_sam(folder: Path) -> str:
    """A `Sam2Model` of toy size with random weights."""
    from transformers import Sam2Config, Sam2Model

    backbone = {
        "model_type": "sam2_hiera_det_model", "hidden_size": 8, "image_size": [64, 64],
        "blocks_per_stage": [1, 1, 2, 1], "embed_dim_per_stage": [8, 16, 32, 64],
        "num_attention_heads_per_stage": [1, 1, 1, 1],
        "window_size_per_stage": [4, 4, 4, 4], "global_attention_blocks": [3],
        "window_positional_embedding_background_size": [4, 4],
    }  # fmt: skip
    config = Sam2Config(
        vision_config={
            "backbone_config": backbone, "backbone_channel_list": [64, 32, 16, 8], "fpn_hidden_size": 32,
            "backbone_feature_sizes": [[16, 16], [8, 8], [4, 4]],
        },
        prompt_encoder_config={"hidden_size": 32, "image_size": 64, "patch_size": 16},
        mask_decoder_config={"hidden_size": 32, "mlp_dim": 32, "iou_head_hidden_dim": 16, "num_attention_heads": 2},
    )  # fmt: skip
    torch.manual_seed(0)
    Sam2Model(config).save_pretrained(folder)
    return str(folder)


def test_sam_predicts_masks_of_points_and_of_masks(tmp_path: Path) -> None:
    """As the model's own call does, one point after another, with the mask of each point; in pixels of the image."""
    predictor = Sam2Predictor(tiny_sam(tmp_path), "cpu")
    assert predictor.side == 64 and predictor.model.mask_decoder.dynamic_multimask_via_stability is False
    image = np.random.default_rng(0).integers(0, 256, (48, 96, 3), dtype=np.uint8)
    predictor.set_image(image)
    points = torch.tensor([[10.0, 20], [90, 40], [48, 24]])
    logits, ious, low = predictor.predict(points)
    assert logits.shape == (3, 3, 48, 96) and ious.shape == (3, 3) and low.shape == (3, 3, 16, 16)
    again, again_iou, _ = predictor.predict(points, low[:, 1])
    assert again.shape == (3, 1, 48, 96) and again_iou.shape == (3, 1)
    model, embedded = predictor.model, predictor._seen
    with torch.inference_mode():
        for i, (x, y) in enumerate(points.tolist()):
            asked = {"image_embeddings": embedded, "input_points": torch.tensor([[[[x * 64 / 96, y * 64 / 48]]]])}
            one = model(**asked, multimask_output=True)
            torch.testing.assert_close(ious[i], one.iou_scores[0, 0], atol=1e-5, rtol=1e-5)
            refined = model(**asked, input_masks=low[i : i + 1, 1:2], multimask_output=False)
            torch.testing.assert_close(again_iou[i], refined.iou_scores[0, 0], atol=1e-5, rtol=1e-5)
    boxes = region_boxes(image, predictor, Settings(side=4, least_iou=-10, least_stability=0))
    assert boxes.shape[1] == 4 and bool((boxes[:, 2] <= 95).all())
    with pytest.raises(ConfigError, match="segmenter: given"):
        Sam2Predictor(str(tmp_path / "none"), "cpu")


def test_a_counter_joins_segmenter_and_reader(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    counter = RegionCounter(tiny_sam(tmp_path), "rapidocr", "cpu")
    assert "rapidocr" in counter.revision and counter.revision.startswith(f"{tmp_path} fp32 ")
    monkeypatch.setattr(regions, "region_boxes", lambda image, predictor: torch.tensor([[0.0, 0, 20, 20]] * 3))
    assert counter(np.full((64, 64, 3), 127, np.uint8)) == 3


def test_threads_of_a_judge_take_turns(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The predictor holds one image: another thread's would replace it between two predictions."""
    counter, held, mixed = RegionCounter(tiny_sam(tmp_path), "rapidocr", "cpu"), list[int](), list[int]()

    def boxes(image: Any, predictor: Any) -> torch.Tensor:
        held[:] = [int(image[0, 0, 0])]
        time.sleep(0.1)
        mixed.extend(value for value in held if value != int(image[0, 0, 0]))
        return torch.tensor([[0.0, 0, 20, 20]])

    monkeypatch.setattr(regions, "region_boxes", boxes)
    images = [np.full((64, 64, 3), value, np.uint8) for value in (10, 200)]
    with ThreadPoolExecutor(2) as pool:
        assert list(pool.map(counter, images)) == [1, 1]
    assert mixed == []


def test_sam2_is_an_option_of_mmmg(tmp_path: Path) -> None:
    """It takes a device; the benchmark names the reader that is not the published one."""
    entry = MmmgReward(model="m", readability="sam2", device="cuda")
    assert entry.models() == {"segmenter": "facebook/sam2.1-hiera-large"} and entry.extras() == {"ocr"}
    with pytest.raises(ValueError, match="leave device out"):
        MmmgReward(model="m", device="cuda")
    with pytest.raises(ValueError, match="write sam2, or module:function"):
        MmmgReward(model="m", readability="sam3")
    (tmp_path / "question.txt").write_text("[ELEM_DEPEND]", encoding="utf-8")
    found = load_benchmark("mmmg", tmp_path)
    keys = {"wording": "published", "prompts": str(tmp_path / "question.txt"), "readability": "sam2"}
    named = type(found).model_validate({"name": "mmmg", "path": "data", "rewards": {"mmmg": {"model": "m", **keys}}})
    assert named.departures() == ["lines of text are found by rapidocr, not by PaddleOCR 2.10"]
