"""Regions of an image as MMMG counts them for its readability (arXiv 2506.10963, mmmg_eval/step2_readability.py): the
masks of SAM 2.1 that are no text, and each line of text as one.

The published reader is PaddleOCR 2.10 (Chinese, with the angle classifier); rapidocr's lines differ.
"""

from __future__ import annotations

from collections.abc import Sequence
from threading import Lock
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from retouch.errors import installed
from retouch.imaging.lines import Bounds
from retouch.rewards.protocol import Pixels
from retouch.rewards.scorers.mask_generation import region_boxes
from retouch.rewards.scorers.ocr_lines import OcrLinesReward
from retouch.rewards.scorers.reading import FoundLine
from retouch.rewards.scorers.weights import loading, version_of

if TYPE_CHECKING:
    from torch import Tensor

_LEAST_CONFIDENCE = 0.85
_LEAST_EDGE = 20.0
_SAME_LINE = 20.0
_OVERLAP = 0.8
_LEAST_SIDE = 10
_MEAN, _STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
_CLAMP = 32.0


def text_lines(found: Sequence[FoundLine]) -> list[tuple[int, int, int, int]]:
    """Boxes of the lines of text: sure and large enough boxes, joined while their vertical centre is within 20 pixels
    of the running centre of the line."""
    sure = [line for line in found if line.confidence >= _LEAST_CONFIDENCE and _shortest(line) >= _LEAST_EDGE]
    lines: list[list[FoundLine]] = []
    centre = 0.0
    for one in sorted(sure, key=_centre):
        near = bool(lines) and abs(_centre(one) - centre) <= _SAME_LINE
        centre = (centre + _centre(one)) / 2 if near else _centre(one)
        lines = [*lines[:-1], [*lines[-1], one]] if near else [*lines, [one]]
    return [_union([one.bounds for one in line]) for line in lines]


def _shortest(line: FoundLine) -> float:
    corners = np.array(line.polygon)
    return float(np.linalg.norm(corners - np.roll(corners, -1, 0), axis=1).min())


def _centre(line: FoundLine) -> float:
    return float(np.mean([y for _, y in line.polygon]))


def _union(boxes: Sequence[Bounds]) -> tuple[int, int, int, int]:
    lefts, tops, rights, bottoms = zip(*boxes, strict=True)
    return int(min(lefts)), int(min(tops)), int(max(rights)), int(max(bottoms))


def count_regions(masks: Sequence[Sequence[float]], lines: Sequence[Sequence[float]]) -> int:
    """Masks that share at most .8 of the smaller box with each line, and lines of at least 10 x 10 pixels.

    Args:
        masks, lines: left, top, right, bottom.
    """
    kept = [mask for mask in masks if not any(_shared(mask, line) > _OVERLAP for line in lines)]
    large = [line for line in lines if min(line[2] - line[0], line[3] - line[1]) >= _LEAST_SIDE]
    return len(kept) + len(large)


def _shared(a: Sequence[float], b: Sequence[float]) -> float:
    """Intersection of two boxes over the smaller of them."""
    common = max(0.0, min(a[2], b[2]) - max(a[0], b[0])) * max(0.0, min(a[3], b[3]) - max(a[1], b[1]))
    smaller = min((box[2] - box[0]) * (box[3] - box[1]) for box in (a, b))
    return common / smaller if common else 0.0


class Sam2Predictor:
    """A `Sam2Model` of transformers, which segments one image after another."""

    def __init__(self, path: str, device: str) -> None:
        """
        Raises:
            ConfigError: transformers is missing, or there is no such model.
        """
        with installed():
            import torch
            from transformers import Sam2Model
        with loading("segmenter", path) as place:
            # by default in the precision of its file
            model: Any = Sam2Model.from_pretrained(place, dtype=torch.float32)
        self.torch, self.device = torch, device
        self.model: Any = model.eval().requires_grad_(False).to(device)
        self.model.mask_decoder.dynamic_multimask_via_stability = False  # as MMMG builds its network
        self.revision = f"{path} fp32 {version_of(path, model.config)}"
        self.side = int(model.config.prompt_encoder_config.image_size)
        self._seen: list[Tensor] = []
        self._size = (1, 1)

    def set_image(self, image: Pixels) -> None:
        """Encode an image [h, w, 3]; the calls of `predict` refer to it."""
        torch = self.torch
        self._size = image.shape[:2]
        pixels = torch.from_numpy(image).to(self.device).permute(2, 0, 1)[None] / 255
        square = [self.side, self.side]
        pixels = torch.nn.functional.interpolate(pixels, square, mode="bilinear", align_corners=False, antialias=True)
        mean, std = (pixels.new_tensor(values)[:, None, None] for values in (_MEAN, _STD))
        with torch.inference_mode():
            self._seen = self.model.get_image_embeddings((pixels - mean) / std)

    def predict(self, points: Tensor, masks: Tensor | None = None) -> tuple[Tensor, Tensor, Tensor]:
        torch = self.torch
        height, width = self._size
        count = len(points)
        placed = points.to(self.device) * points.new_tensor([self.side / width, self.side / height]).to(self.device)
        with torch.inference_mode():
            output = self.model(
                image_embeddings=[level.expand(count, -1, -1, -1) for level in self._seen],
                input_points=placed[:, None, None],
                input_labels=torch.ones(count, 1, 1, dtype=torch.int, device=self.device),
                input_masks=None if masks is None else masks[:, None],
                multimask_output=masks is None,
            )
            low = output.pred_masks[:, 0].float()
            logits = torch.nn.functional.interpolate(low, (height, width), mode="bilinear", align_corners=False)
        return logits, output.iou_scores[:, 0], low.clamp(-_CLAMP, _CLAMP)


class RegionCounter:
    """Counts the regions of images with SAM 2.1 and a reader of text."""

    def __init__(self, path: str, engine: Literal["rapidocr", "paddleocr"], device: str) -> None:
        """Raises as `Sam2Predictor`; ConfigError also if the reader is not installed."""
        self.predictor = Sam2Predictor(path, device)
        self.reader = OcrLinesReward(engine=engine).make()
        self.reader.load(device if engine == "paddleocr" else "cpu")
        self.revision = f"{self.predictor.revision} {self.reader.options.reader()}"
        self._in_use = Lock()  # a judge's threads share the counter, whose predictor holds one image

    def __call__(self, image: Pixels) -> int:
        with self._in_use:
            [found] = self.reader.find_lines([image])
            return count_regions(region_boxes(image, self.predictor).tolist(), text_lines(found))
