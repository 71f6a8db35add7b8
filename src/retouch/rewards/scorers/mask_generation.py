"""Boxes of the regions that a promptable segmenter finds with a grid of points, by the automatic mask generation of SAM
2 (arXiv 2408.00714) with the settings of MMMG: one layer of four overlapping crops, and each mask refined once from its
own low-resolution prediction. torch is imported where tensors are made.

Legend: P points, M masks, h x w pixels of a crop.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product
from typing import TYPE_CHECKING

import numpy as np

from retouch.imaging.masks import Box
from retouch.rewards.protocol import Pixels

if TYPE_CHECKING:
    from torch import Tensor

    from retouch.rewards.scorers.regions import Sam2Predictor


@dataclass(frozen=True)
class Settings:
    """Settings of the generation; the defaults are MMMG's.

    Attributes:
        side: points of a side of the grid; the crops have half as many.
        least_iou: a mask needs a higher predicted IoU.
        least_stability: IoU of the masks at `offset` above and below the threshold 0.
        same: IoU of boxes above which the worse of two masks of a crop is dropped; `same_across` over all crops.
        overlap: of crops, as a share of the shorter side of the image.
        edge: a box this near to the edge of its crop, which is no edge of the image, is dropped; in pixels.
    """

    side: int = 32
    points_per_batch: int = 256
    least_iou: float = 0.7
    least_stability: float = 0.95
    offset: float = 0.7
    same: float = 0.6
    same_across: float = 0.7
    overlap: float = 512 / 1500
    edge: float = 20.0


def region_boxes(image: Pixels, predictor: Sam2Predictor, settings: Settings | None = None) -> Tensor:
    """[M, 4] left, top, right, bottom of the masks in pixels of the image, the last row and column included."""
    import torch

    s = settings or Settings()
    crops = crop_boxes((image.shape[0], image.shape[1]), s.overlap)
    found: list[Tensor] = []
    areas: list[Tensor] = []
    for number, crop in enumerate(crops):
        boxes = _of_crop(image, crop, s.side if number == 0 else s.side // 2, predictor, s)
        found.append(boxes)
        size = (crop[2] - crop[0]) * (crop[3] - crop[1])
        areas.append(torch.full((len(boxes),), float(size), dtype=torch.float32))
    boxes, sizes = torch.cat(found), torch.cat(areas)
    return boxes[suppressed(boxes, 1 / sizes, s.same_across)]


def crop_boxes(size: tuple[int, int], overlap: float) -> list[Box]:
    """The whole image of `size` (height, width), and four overlapping crops, column by column."""
    height, width = size
    shared = int(overlap * min(size))
    sides = [math.ceil((shared + side) / 2) for side in (width, height)]
    starts = [(0, side - shared) for side in sides]
    return [
        (0, 0, width, height),
        *(
            (left, top, min(left + sides[0], width), min(top + sides[1], height))
            for left, top in product(starts[0], starts[1])
        ),
    ]


def grid(side: int) -> np.ndarray:
    """[side², 2] points in the unit square, row by row, half a step from its edges."""
    steps = (np.arange(side) + 0.5) / side
    return np.stack([np.tile(steps, side), np.repeat(steps, side)], -1)


def _of_crop(image: Pixels, crop: Box, side: int, predictor: Sam2Predictor, s: Settings) -> Tensor:
    import torch

    left, top, right, bottom = crop
    predictor.set_image(np.ascontiguousarray(image[top:bottom, left:right]))
    points = torch.tensor(grid(side) * (right - left, bottom - top), dtype=torch.float32)
    boxes: list[Tensor] = [torch.zeros(0, 4, dtype=torch.float32)]
    ious: list[Tensor] = [torch.zeros(0, dtype=torch.float32)]
    for batch in points.split(s.points_per_batch):
        for logits, iou in _refined(batch, predictor, s.points_per_batch):
            good = (iou > s.least_iou) & (stability(logits, s.offset) >= s.least_stability)
            boxes.append(mask_boxes(logits[good] > 0))
            ious.append(iou[good].float().cpu())
    offset = torch.tensor([left, top, left, top], dtype=torch.float32)
    placed, scores = torch.cat(boxes) + offset, torch.cat(ious)
    inside = ~at_edge(placed, crop, (0, 0, image.shape[1], image.shape[0]), s.edge)
    placed, scores = placed[inside], scores[inside]
    return placed[suppressed(placed, scores, s.same)]


def _refined(points: Tensor, predictor: Sam2Predictor, size: int) -> Iterator[tuple[Tensor, Tensor]]:
    """(logits [M, h, w], IoU [M]) of the three masks of each point, each predicted again from itself."""
    _, _, low = predictor.predict(points)
    again, low = points.repeat_interleave(low.shape[1], 0), low.flatten(0, 1)
    for some, masks in zip(again.split(size), low.split(size), strict=True):
        logits, iou, _ = predictor.predict(some, masks)
        yield logits[:, 0], iou[:, 0]


def stability(logits: Tensor, offset: float) -> Tensor:
    """[M] IoU of the masks at thresholds `offset` and -`offset`; NaN for a mask without pixels at both."""
    return (logits > offset).flatten(1).sum(1) / (logits > -offset).flatten(1).sum(1)


def mask_boxes(masks: Tensor) -> Tensor:
    """[M, 4] left, top, right, bottom of masks [M, h, w], the last row and column included; zeros for an empty one."""
    import torch

    found = torch.zeros(len(masks), 4, dtype=torch.float32)
    for i, mask in enumerate(masks):
        rows, columns = mask.any(1).nonzero()[:, 0], mask.any(0).nonzero()[:, 0]
        if len(rows):
            found[i] = torch.stack([columns[0], rows[0], columns[-1], rows[-1]]).float().cpu()
    return found


def at_edge(boxes: Tensor, crop: Box, image: Box, near: float) -> Tensor:
    """[M] whether a box touches an edge of its crop that is no edge of the image."""
    import torch

    by_crop, by_image = ((boxes - torch.tensor(edges, dtype=torch.float32)).abs() <= near for edges in (crop, image))
    return (by_crop & ~by_image).any(1)


def suppressed(boxes: Tensor, scores: Tensor, limit: float) -> Tensor:
    """Positions of the boxes, best first, that no better kept box overlaps by an IoU above `limit`."""
    import torch

    order = scores.argsort(descending=True, stable=True)
    areas = (boxes[:, 2] - boxes[:, 0]) * (boxes[:, 3] - boxes[:, 1])
    kept: list[int] = []
    while len(order):
        best, order = int(order[0]), order[1:]
        kept.append(best)
        low, high = torch.maximum(boxes[best, :2], boxes[order, :2]), torch.minimum(boxes[best, 2:], boxes[order, 2:])
        common = (high - low).clamp(min=0).prod(1)
        order = order[~(common / (areas[best] + areas[order] - common) > limit)]
    return torch.tensor(kept, dtype=torch.long)
