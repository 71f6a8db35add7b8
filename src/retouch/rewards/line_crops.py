"""The upright crop of a line by its polygon, as AnyText's evaluation cuts it (arXiv 2311.03054, eval/eval_dgocr.py). No
torch."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from retouch.imaging.lines import Point
from retouch.rewards.protocol import Pixels

Floats = NDArray[np.floating[Any]]

HEIGHT, WIDTH = 48, 320
"""Pixels of a line that the recogniser receives; a longer line is squeezed."""

_TALL = 1.2  # height by width above which a crop is turned


def corners_of(polygon: Sequence[Point], size: tuple[int, int]) -> NDArray[np.int64] | None:
    """Corners [4, 2] of the smallest rectangle around the pixels of a polygon: top left, top right, bottom right,
    bottom left; None where no pixel of it lies in an image of `size` (height, width).

    Corners are whole pixels, rounded towards 0, and ordered by x and then by y, as published.
    """
    import cv2

    mask = np.zeros(size, np.uint8)
    cv2.fillPoly(mask, [np.array(polygon).astype(np.int32).reshape(-1, 1, 2)], (255,))
    contours, _ = cv2.findContours(mask, cv2.RETR_EXTERNAL, cv2.CHAIN_APPROX_SIMPLE)
    if not contours:
        return None
    box = cv2.boxPoints(cv2.minAreaRect(max(contours, key=cv2.contourArea))).astype(np.int64)
    by_x = box[np.argsort(box[:, 0], kind="stable")]
    left, right = (side[np.argsort(side[:, 1], kind="stable")] for side in (by_x[:2], by_x[2:]))
    return np.stack([left[0], right[0], right[1], left[1]])


def upright(image: Pixels | Floats, polygon: Sequence[Point]) -> Floats | None:
    """The crop [h, w, 3] of a polygon of an image [H, W, 3], values 0 to 255 in float32, turned by 90 degrees where it
    is higher than 1.2 times its width; None for a polygon outside the image or without a whole pixel.

    A similarity transform (no shear), sampled bilinearly, as torch's affine_grid and grid_sample with aligned corners.
    """
    corners = corners_of(polygon, image.shape[:2])
    if corners is None:
        return None
    points = corners.astype(np.float64)
    sides = np.linalg.norm(points - np.roll(points, -1, axis=0), axis=1)
    width, height = max(sides[0], sides[2]), max(sides[1], sides[3])
    if width < 1 or height < 1:
        return None
    flat = np.array([[0, 0], [width, 0], [width, height], [0, height]]).astype(np.float32).astype(np.float64)
    crop = _warped(image, _similarity(points, flat), math.floor(height), math.floor(width))
    turned = crop.shape[0] > crop.shape[1] * _TALL
    return np.rot90(crop, axes=(0, 1)) if turned else crop


def _similarity(source: Floats, target: Floats) -> Floats:
    """The rotation, uniform scale and shift [3, 3] that take points nearest to others (Umeyama 1991)."""
    from_mean, to_mean = source.mean(0), target.mean(0)
    centred = source - from_mean
    u, spread, v = np.linalg.svd((target - to_mean).T @ centred / len(source))
    signs = np.array([1.0, np.sign(np.linalg.det(u) * np.linalg.det(v))])
    rotation = u @ np.diag(signs) @ v
    scale = (spread @ signs) / centred.var(0).sum()
    found = np.eye(3)
    found[:2, :2] = scale * rotation
    found[:2, 2] = to_mean - scale * rotation @ from_mean
    return found


def _warped(image: Pixels | Floats, transform: Floats, height: int, width: int) -> Floats:
    """The top left `height` x `width` pixels of the transformed image; 0 outside."""
    rows, columns = image.shape[:2]
    unit = np.array([[2 / columns, 0, -1], [0, 2 / rows, -1], [0, 0, 1]])
    back = np.linalg.inv(unit @ transform @ np.linalg.inv(unit)).astype(np.float32)
    x = np.linspace(-1, 1, columns, dtype=np.float32)[:width]
    y = np.linspace(-1, 1, rows, dtype=np.float32)[:height]
    grid = np.stack(np.broadcast_arrays(x[None], y[:, None], np.float32(1)), axis=-1) @ back[:2].T
    return np.clip(_sampled(image, (grid[..., 0] + 1) / 2 * (columns - 1), (grid[..., 1] + 1) / 2 * (rows - 1)), 0, 255)


def _sampled(image: Pixels | Floats, x: Floats, y: Floats) -> Floats:
    """Bilinear values of an image at points; neighbours outside are 0."""
    rows, columns = image.shape[:2]
    left, top = np.floor(x), np.floor(y)
    total = np.zeros((*x.shape, image.shape[2]), np.float32)
    for dx in (0, 1):
        for dy in (0, 1):
            i, j = top + dy, left + dx
            share = (1 - np.abs(x - j)) * (1 - np.abs(y - i))
            inside = (i >= 0) & (i < rows) & (j >= 0) & (j < columns)
            at = np.where(inside, i, 0).astype(np.int64), np.where(inside, j, 0).astype(np.int64)
            total += np.where(inside, share, 0)[..., None].astype(np.float32) * image[at]
    return total


def scaled(crop: Floats) -> Floats:
    """A crop at the height that the recogniser reads, its width in proportion but at most `WIDTH`: bilinear with
    aligned corners."""
    height, width = crop.shape[:2]
    wide = min(WIDTH, math.ceil(HEIGHT * (width / height)))
    x = np.arange(wide) * ((width - 1) / (wide - 1) if wide > 1 else 0.0)
    y = np.arange(HEIGHT) * ((height - 1) / (HEIGHT - 1))
    return _sampled(crop, *np.broadcast_arrays(x[None], y[:, None]))


def as_pixels(crop: Floats) -> Pixels:
    """Values 0 to 255 as whole numbers."""
    return np.ascontiguousarray(np.rint(np.clip(crop, 0, 255)).astype(np.uint8))
