"""Networks of `geneval` in this process: objects by a Mask2Former, their colours by CLIP. Both of transformers.

The arithmetic follows the published detector (Mask2Former of mmdet 2.x): the 100 best pairs of query and class, a mask
where its logit is above 0, a score that is the class probability times the mean probability in the mask, a box that is
the extent of the mask. The weights are others, and therefore the numbers.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from PIL import Image

from retouch.errors import ConfigError, installed
from retouch.rewards.scorers.clip import ClipTowers
from retouch.rewards.scorers.weights import loading, version_of
from retouch_bench.scorers.geneval_verdict import CLASSES, COLORS, Box, Detection

if TYPE_CHECKING:
    from numpy.typing import NDArray
    from torch import Tensor

    Mask = NDArray[np.bool_]

_MOST = 100
"""Pairs of query and class that are looked at."""

_BLANK = "#999"
"""Colour around an object that is cut out."""

_TEMPLATES = ("a photo of a {color} {name}", "a photo of a {color}-colored {name}", "a photo of a {color} object")

_ALIASES = {
    "motorbike": "motorcycle", "aeroplane": "airplane", "sofa": "couch", "pottedplant": "potted plant",
    "diningtable": "dining table", "tvmonitor": "tv", "mouse": "computer mouse", "remote": "tv remote",
    "keyboard": "computer keyboard", "hair dryer": "hair drier",
}  # fmt: skip
"""Names of COCO's classes in published weights -> GenEval's."""


class Networks:
    """A detector and a CLIP, loaded.

    Raises:
        ConfigError: transformers is missing, no such models, or a detector without the classes of COCO.
    """

    def __init__(self, detector: str, color_model: str, device: str) -> None:
        with installed():
            import torch
            from transformers import Mask2FormerForUniversalSegmentation, Mask2FormerImageProcessorPil
        self._torch, self._device = torch, device
        with loading("detector", detector) as place:
            # by default in the precision of its file
            found: Any = Mask2FormerForUniversalSegmentation.from_pretrained(place, dtype=torch.float32)
            self._pixels: Any = Mask2FormerImageProcessorPil.from_pretrained(place)
        self._detector: Any = found.eval().to(device)
        _check_classes(detector, found.config.id2label)
        self._clip = ClipTowers(color_model, "", device, "color_model")
        self._of_colors: dict[str, Tensor] = {}
        self.revision = f"{detector} fp32 {version_of(detector, found.config)}, {self._clip.revision}"

    def detect(self, image: Image.Image) -> list[tuple[Detection, Mask]]:
        """Objects with their masks [H, W], best first; one image per forward: no score depends on others."""
        torch = self._torch
        with torch.inference_mode():
            given = self._pixels(images=[image], return_tensors="pt").to(self._device)
            output = self._detector(pixel_values=given["pixel_values"], pixel_mask=given["pixel_mask"])
            height, width = (int(given["pixel_mask"][0].any(axis).sum()) for axis in (1, 0))
            resized = torch.nn.functional.interpolate(
                output.masks_queries_logits, given["pixel_values"].shape[-2:], mode="bilinear"
            )[..., :height, :width]
            logits = torch.nn.functional.interpolate(resized, image.size[::-1], mode="bilinear")[0]
            probabilities = output.class_queries_logits[0].softmax(-1)[:, :-1]
            scores, index = probabilities.flatten().topk(min(_MOST, probabilities.numel()))
            found: list[tuple[Detection, Mask]] = []
            for score, pair in zip(scores.tolist(), index.tolist(), strict=True):
                query, label = divmod(pair, probabilities.shape[1])
                mask = logits[query] > 0
                if not mask.any():
                    continue
                inside = float(logits[query][mask].sigmoid().mean())
                pixels = mask.cpu().numpy()
                found.append((Detection(CLASSES[label], score * inside, _extent(pixels)), pixels))
        return sorted(found, key=lambda pair: -pair[0].score)

    def colors(self, image: Image.Image, name: str, objects: Sequence[tuple[Box, Mask]]) -> list[str]:
        """The most similar colour of each object of a class, cut out by its mask and cropped to its box."""
        blank = Image.new("RGB", image.size, _BLANK)
        crops = [Image.composite(image, blank, Image.fromarray(mask)).crop(_rounded(box)) for box, mask in objects]
        of_images = self._clip.of_images([np.asarray(crop) for crop in crops])
        return [COLORS[int(row.argmax())] for row in of_images @ self._classifier(name).T]

    def _classifier(self, name: str) -> Tensor:
        """[10, D] unit vectors: of each colour, the mean over the templates."""
        if name not in self._of_colors:
            texts = [template.format(color=color, name=name) for color in COLORS for template in _TEMPLATES]
            means = self._clip.of_texts(texts).unflatten(0, (len(COLORS), len(_TEMPLATES))).mean(1)
            self._of_colors[name] = means / means.norm(dim=-1, keepdim=True)
        return self._of_colors[name]


def _extent(mask: Mask) -> Box:
    rows, columns = np.flatnonzero(mask.any(1)), np.flatnonzero(mask.any(0))
    return float(columns[0]), float(rows[0]), float(columns[-1] + 1), float(rows[-1] + 1)


def _rounded(box: Box) -> tuple[int, int, int, int]:
    left, top, right, bottom = (round(side) for side in box)
    return left, top, right, bottom


def _check_classes(detector: str, names: dict[int, str]) -> None:
    given = [names.get(i, "").lower() for i in range(len(CLASSES))]
    if len(names) != len(CLASSES) or tuple(_ALIASES.get(name, name) for name in given) != CLASSES:
        raise ConfigError(
            f"detector: given {detector!r}, whose {len(names)} classes are not the {len(CLASSES)} of COCO in their "
            "order; set a Mask2Former for COCO instances, like facebook/mask2former-swin-small-coco-instance"
        )
