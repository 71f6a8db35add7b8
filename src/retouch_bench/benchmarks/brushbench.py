"""BrushBench (BrushNet, arXiv 2403.06976): 600 images, an object or everything around it repainted.

The official script saves outputs under the name of their source, as JPEG of quality 75, and its `blended` rows
composite them into the source by a blurred mask. Sums of squared differences over three channels are divided by the
number of pixels (see the scorer `kept_area`).
"""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Literal

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from retouch.benchmarks.base import Benchmark, ImageRow, Official, PublishedRow, means
from retouch.data.base import DataSection
from retouch.rewards.protocol import Pixels
from retouch_bench.formats.brushbench import BrushBenchData

_PAPER = "arXiv 2403.06976, inside"

_SIDE, _SIGMA = 21, 3.5
"""Gaussian of the official blending: OpenCV's sigma for 21 pixels, 0.3 ((21 - 1) / 2 - 1) + 0.8."""

_DISTRACTORS = 99
"""Captions of other images beside the own one in CLIP-R-precision."""

_SCALES = {
    "imagereward": ("image_reward", 10.0),
    "hpsv2": ("hps_v2.1", 100.0),
    "aesthetic_v1": ("aesthetic_v1", 1.0),
    "clip_r_precision": ("clip_r_precision", 100.0),
}
"""Reward -> its measure and the factor of the published tables."""


class BrushBench(Benchmark):
    """BrushBench: the kept area, the prompt, and the preference models of the paper as far as they are given."""

    name: Literal["brushbench"] = "brushbench"
    region: Literal["inside", "outside"] = "inside"
    """Region to repaint, as in the data format."""
    blended: bool = False
    """Composite outputs into their sources by the blurred mask before they are scored: the published rows with a
    star."""
    saved_as: Literal["png", "jpeg"] = "png"
    """"jpeg" scores outputs after JPEG compression of quality 75, as the official script does; an unchanged image then
    has about 29 dB. Outputs that are JPEG files are not compressed again."""

    title: ClassVar[str] = "BrushBench"
    source: ClassVar[str] = "arXiv 2403.06976; github.com/TencentARC/BrushNet, data/BrushBench"
    file: ClassVar[str] = "{image}"
    official: ClassVar[Official] = Official(
        resolution=(512, 512),
        items=600,
        scorers={"clip": "openai/clip-vit-large-patch14"},
        settings={"steps": 50, "solver": "UniPC", "seed": 1234, "masked source": "black", "files": "JPEG quality 75"},
    )
    composites: ClassVar[bool] = False
    published: ClassVar[Sequence[PublishedRow]] = (
        PublishedRow(
            "BrushNet",
            {"image_reward": 12.36, "hps_v2.1": 27.40, "psnr": 21.65, "mse": 9.31, "clip": 26.48},
            _PAPER,
        ),
        PublishedRow(
            "Blended latent diffusion",
            {"image_reward": 9.78, "hps_v2.1": 25.87, "psnr": 21.33, "mse": 9.76, "clip": 26.15},
            _PAPER,
        ),
    )
    published_blended: ClassVar[Sequence[PublishedRow]] = (
        PublishedRow(
            "BrushNet, blended",
            {"image_reward": 12.64, "hps_v2.1": 27.78, "psnr": 31.94, "mse": 0.80, "clip": 26.39},
            _PAPER,
        ),
    )
    own_rewards: ClassVar[Mapping[str, Mapping[str, Any]]] = {"kept_area": {}, "clip": {}}

    def data(self) -> DataSection:
        distractors = _DISTRACTORS if "clip_r_precision" in self.rewards else 0
        return self.sized(BrushBenchData(path=self.path, region=self.region, fit="stretch", distractors=distractors))

    def prepared(self, image: Image.Image, source: Image.Image | None, mask: Image.Image | None) -> Image.Image:
        sized = super().prepared(image, source, mask)
        if self.blended and source is not None and mask is not None:
            pixels = blend(np.asarray(source), np.asarray(sized.convert("RGB")), np.asarray(mask))
            sized = Image.fromarray(pixels)
        return _as_jpeg(sized) if self.saved_as == "jpeg" and image.format != "JPEG" else sized

    def summary(self, rows: Sequence[ImageRow]) -> dict[str, float]:
        """Plain means over images. `psnr` and `mse` (x 1000) are as published; `psnr_usual` and `mse_usual` divide by
        all values. `clip` is 100 max(0, cosine) of the whole image and the caption."""
        kept = [score.detail for row in rows if (score := row.score("kept_area"))]
        columns = {
            "psnr": [float(detail["brushbench_psnr"]) for detail in kept],
            "mse": [1000 * float(detail["brushbench_mse"]) for detail in kept],
            "psnr_usual": [float(detail["psnr"]) for detail in kept],
            "mse_usual": [1000 * float(detail["mse"]) for detail in kept],
            "clip": [100 * max(0.0, score.value) for row in rows if (score := row.score("clip"))],
        }
        for reward, (measure, factor) in _SCALES.items():
            columns[measure] = [factor * score.value for row in rows if (score := row.score(reward))]
        columns["lpips_vgg"] = [1000 * float(s.detail["lpips"]) for row in rows if (s := row.score("lpips"))]
        return means(columns)

    def departures(self) -> list[str]:
        jpeg = [] if self.saved_as == "jpeg" else ["scored as PNG; saved_as: jpeg compresses as the paper does"]
        return [*super().departures(), *jpeg]

    def published_rows(self) -> Sequence[PublishedRow]:
        if self.region == "outside":
            return ()
        return self.published_blended if self.blended else self.published


def blend(source: Pixels, image: Pixels, mask: Pixels) -> Pixels:
    """The official composite: image · b + source · (1 - b), truncated to whole levels; b is 1 in the mask, and outside
    of it the mask of 0 and 255 after `cv2.GaussianBlur(mask, (21, 21), 0)`, over 255.

    Args:
        source, image: [H, W, 3].
        mask: [H, W], 128 or more where to repaint.
    """
    masked = (mask >= 128).astype(np.int64)
    blurred = _gaussian_blur(255 * masked) / 255
    share = (1 - (1 - masked) * (1 - blurred))[..., None]  # as it is rounded there, before levels are cut
    return (source * (1 - share) + image * share).astype(np.uint8)


def _gaussian_blur(levels: NDArray[np.int64]) -> NDArray[np.int64]:
    """OpenCV's blur of whole levels [H, W], to the bit: in fixed point, with weights of 1/256 that each take over the
    rounding error of the one before, the middle one taking the rest, and the border reflected."""
    offsets = np.arange(_SIDE) - _SIDE // 2
    exact = np.exp(-(offsets**2) / (2 * _SIGMA**2))
    weights, error = [0] * _SIDE, 0.0
    for i, weight in enumerate(256 * exact[: _SIDE // 2] / exact.sum()):
        weights[i] = weights[-1 - i] = round(weight + error)
        error += weight - weights[i]
    weights[_SIDE // 2] = 256 - sum(weights)
    height, width = levels.shape
    rows = np.pad(levels, _SIDE // 2, mode="reflect")
    columns = np.sum([weight * rows[i : i + height] for i, weight in enumerate(weights)], axis=0)
    blurred = np.sum([weight * columns[:, i : i + width] for i, weight in enumerate(weights)], axis=0)
    return (blurred.astype(np.int64) + 2**15) >> 16


def _as_jpeg(image: Image.Image) -> Image.Image:
    """The image after Pillow's default JPEG compression, quality 75."""
    buffer = io.BytesIO()
    image.convert("RGB").save(buffer, "JPEG")
    return Image.open(buffer).convert("RGB")
