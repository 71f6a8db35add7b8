"""How an image, its mask and a reference are brought to the size of the model. Sizes are (width, height)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

import numpy as np
from PIL import Image

from retouch.imaging.masks import MASK_THRESHOLD, Box, Pixels

Fit = Literal["crop", "stretch"]

FITS = get_args(Fit)

StripFit = Literal["contain", "full_width"]

STRIP_MULTIPLE = 16
"""Heights of references at full width are multiples of it: pixels of a FLUX token's side."""


def into_strip(image: Image.Image, height: int, width: int, fit: StripFit) -> Image.Image:
    """The whole reference in a white strip: as large as fits, centred ("contain"), or as wide as the strip, at its
    lower edge ("full_width").

    At full width the height keeps the aspect ratio, rounded to the nearest multiple of STRIP_MULTIPLE (ties down, as in
    Calligrapher), and is at most that of the strip.
    """
    strip = Image.new("RGB", (width, height), (255, 255, 255))
    if fit == "full_width":
        asked = int(width / image.width * image.height)
        rounded = (asked + STRIP_MULTIPLE // 2 - 1) // STRIP_MULTIPLE * STRIP_MULTIPLE
        size = width, min(height, max(STRIP_MULTIPLE, rounded))
        strip.paste(image.resize(size, Image.Resampling.BILINEAR), (0, height - size[1]))
        return strip
    scale = min(height / image.height, width / image.width)
    size = max(1, round(image.width * scale)), max(1, round(image.height * scale))
    strip.paste(image.resize(size, Image.Resampling.LANCZOS), ((width - size[0]) // 2, (height - size[1]) // 2))
    return strip


def stack_above(strip: Image.Image | None, image: Image.Image) -> Image.Image:
    """`image` with a strip of its width above it; for a mask ("L") the strip is kept (0)."""
    if strip is None:
        return image
    page = Image.new(image.mode, (image.width, strip.height + image.height))
    if image.mode != "L":
        page.paste(strip)
    page.paste(image, (0, strip.height))
    return page


MOST_SQUEEZED = 1.15
"""Largest ratio by which one side is scaled more than the other to show all of a mask, where shapes of images differ
from the images themselves by their rounding: letters keep their form within it."""


def fit_size(
    size: tuple[int, int], target: tuple[int, int], fit: Fit, keep: Box | None, *, squeezes: bool = False
) -> tuple[tuple[int, int], Box]:
    """Scaled size of an image of `size` (width, height), and the box in it that is cropped to `target`.

    "stretch" scales both sides; "crop" scales to cover the target and crops a window centred on `keep` (the mask box),
    or on the middle, moved to lie inside the image.

    Args:
        squeezes: where the window would cut `keep`, scale its side by up to `MOST_SQUEEZED` less, until it does not.
    """
    width, height = size
    target_width, target_height = target
    if fit == "stretch":
        return target, (0, 0, target_width, target_height)
    scale = max(target_width / width, target_height / height)
    scaled = max(target_width, round(width * scale)), max(target_height, round(height * scale))
    if squeezes and keep is not None:
        needed = (keep[2] - keep[0], keep[3] - keep[1])
        across, down = zip(scaled, size, target, needed, strict=True)
        scaled = _squeezed(*across), _squeezed(*down)
    centre_x, centre_y = (
        (scaled[0] / 2, scaled[1] / 2)
        if keep is None
        else ((keep[0] + keep[2]) / 2 * scaled[0] / width, (keep[1] + keep[3]) / 2 * scaled[1] / height)
    )
    left = min(max(0, round(centre_x - target_width / 2)), scaled[0] - target_width)
    top = min(max(0, round(centre_y - target_height / 2)), scaled[1] - target_height)
    return scaled, (left, top, left + target_width, top + target_height)


def _squeezed(scaled: int, side: int, target: int, kept: int) -> int:
    """A scaled side of an image, or the largest at which the kept part of its `side` pixels fits into `target`."""
    whole = max(target, target * side // kept)
    return whole if whole < scaled <= MOST_SQUEEZED * whole else scaled


MOST_ENLARGED = 8
"""Most model pixels per source pixel and side in a crop around a mask: a smaller box shows no context."""


@dataclass(frozen=True)
class MaskCrop:
    """Choice of a box around a mask that is passed to the model instead of the whole image.

    Attributes:
        context: margin on each side, as a share of the mask box's longer side.
        enlarge: whether the box may hold fewer pixels than the model's size, and be enlarged to it.
    """

    context: float
    enlarge: bool

    def box(self, size: tuple[int, int], target: tuple[int, int], keep: Box) -> Box | None:
        """The box around `keep` inside an image of `size`, with the aspect ratio of `target` (both width, height) to
        within a pixel; None where that is the whole image, where the image holds no more pixels than the model's size,
        or where no box of that aspect ratio holds `keep`."""
        width, height = keep[2] - keep[0], keep[3] - keep[1]
        margin = 2 * self.context * max(width, height)
        needed = max(width / target[0], height / target[1])  # source pixels per model pixel and side
        wanted = max((width + margin) / target[0], (height + margin) / target[1])
        largest = min(size[0] / target[0], size[1] / target[1])
        least = 1 / MOST_ENLARGED if self.enlarge else 1.0
        if needed > largest or least >= largest:
            return None
        scale = min(max(wanted, least), largest)
        sides = (
            min(size[0], max(width, round(scale * target[0]))), min(size[1], max(height, round(scale * target[1])))
        )  # fmt: skip
        if sides == size:
            return None
        left = min(max(0, round((keep[0] + keep[2] - sides[0]) / 2)), size[0] - sides[0])
        top = min(max(0, round((keep[1] + keep[3] - sides[1]) / 2)), size[1] - sides[1])
        return left, top, left + sides[0], top + sides[1]


def resize(image: Image.Image, scaled: tuple[int, int], box: Box) -> Image.Image:
    """Scale and crop to the result of `fit_size`. Masks ("L") are averaged over area and thresholded again."""
    if image.mode == "L":
        soft = image.resize(scaled, Image.Resampling.BOX).crop(box)
        return Image.fromarray(np.where(np.asarray(soft) >= MASK_THRESHOLD, np.uint8(255), np.uint8(0)), "L")
    if image.size == scaled:
        return image.crop(box)
    return image.resize(scaled, Image.Resampling.LANCZOS).crop(box)


def of_size(pixels: Pixels, other: Pixels, resampling: Image.Resampling) -> Pixels:
    """An image [h, w, 3] at the size of another one [H, W, 3]."""
    height, width = other.shape[:2]
    if pixels.shape[:2] == (height, width):
        return pixels
    return np.asarray(Image.fromarray(pixels).resize((width, height), resampling))
