"""Masks of any image mode, their boxes, and composites along them.

Arrays are [H, W, 3] uint8 RGB and [H, W] masks, 255 = repaint. Boxes are half-open (left, top, right, bottom).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageFilter

from retouch.errors import ImageProblem

Pixels = NDArray[np.uint8]

Box = tuple[int, int, int, int]

MASK_THRESHOLD = 128
"""Least grey level of a masked pixel; painted masks have soft edges and JPEG noise."""

MASK_NOISE = 8
"""Range of grey levels up to which a channel carries no mask."""


def mask_levels(image: Image.Image) -> tuple[Pixels, str]:
    """[H, W] grey levels of the mask in an image of any mode, and its channel; pixels of MASK_THRESHOLD or more count.

    In this order: alpha, if it varies; luminance, if the colour channels agree; else red: red paint (red above green
    and blue, which excludes a white wall) if there is any, else the red channel.
    """
    if image.mode in ("1", "L") and "transparency" not in image.info:
        return np.asarray(image.convert("L")), "luminance"
    rgba = np.asarray(image.convert("RGBA"))
    red, green, blue = (rgba[..., c].astype(np.int16) for c in range(3))
    alpha = rgba[..., 3]
    if np.ptp(alpha) > MASK_NOISE:
        return alpha, "alpha"
    if max(np.abs(red - green).max(), np.abs(red - blue).max()) <= MASK_NOISE:
        return np.asarray(image.convert("RGB").convert("L")), "luminance"
    paint = (red - np.maximum(green, blue)).clip(0).astype(np.uint8)
    return (paint if (paint >= MASK_THRESHOLD).any() else rgba[..., 0]), "red"


@dataclass(frozen=True)
class MaskReading:
    """A mask, and how it was read.

    Attributes:
        mask: mode "L", 0 and 255.
        channel: channel of the file that the mask was read from.
        doubt: why the file may be no mask, or an inverted one, with its levels; None: nothing speaks for it.
    """

    mask: Image.Image
    channel: str
    doubt: str | None = None


def read_mask(image: Image.Image, name: str, *, invert: bool = False) -> MaskReading:
    """A 0/255 mask of mode "L" from `mask_levels`, its channel, and a doubt about the file if there is one.

    Raises:
        ImageProblem: the mask is empty (nothing to repaint) or full (nothing to keep).
    """
    values, channel = mask_levels(image)
    masked = (values >= MASK_THRESHOLD) != invert
    share = float(masked.mean())
    if share == 0.0 or share == 1.0:
        what = "empty: nothing to repaint" if share == 0.0 else "full: nothing to keep"
        seen = f"{channel} channel, values {values.min()} to {values.max()}, threshold {MASK_THRESHOLD}"
        paint, rest = ("black", "white") if invert else ("white", "black")
        hint = f"paint the area to repaint {paint}, the rest {rest} (data.invert_mask={str(invert).lower()})"
        raise ImageProblem(f"{name}: the mask ({seen}) is {what}; {hint}")
    mask = Image.fromarray(masked.astype(np.uint8) * 255, "L")
    doubt = _doubt(values, masked, channel, invert)
    if doubt is None and channel == "red":
        doubt = _label_colours(image, masked)
    return MaskReading(mask, channel, doubt)


MAY_BE_INVERTED = (
    "opaque pixels are repainted, but the border of this mask is opaque, as in an image with an erased region; if "
    "transparent pixels mark the region to repaint, set data.invert_mask=true"
)

_FEW_LEVELS = 64
"""Grey levels of a mask with soft edges; a photograph has more."""

_PLATEAU = 4
"""Distance to the median level of the masked region, and of the kept one, within which most pixels of a mask lie, also
after JPEG."""

_FLAT_SHARE = 0.1
"""Least share of the pixels of a flat level; the levels of a soft edge have a few per cent, even in small images."""

_FAR_SHARE = 0.6
"""Share of the pixels far from both levels above which a file is no mask. Photographs have .8 and more, a mask that is
blurred by a tenth of its size has .5."""


def _doubt(values: Pixels, masked: NDArray[np.bool_], channel: str, invert: bool) -> str | None:
    """The doubt about a mask [H, W] that was read from such levels."""
    # An image with an erased region is opaque (repaint) at most of its border; that of a painted layer is transparent.
    edge = np.concatenate([masked[0], masked[-1], masked[1:-1, 0], masked[1:-1, -1]])
    if channel == "alpha" and not invert and edge.mean() > 0.5:
        return MAY_BE_INVERTED
    # A photograph has many levels, and most of its pixels are far from two of them; a map of labels has several flat
    # ones, a mask two.
    counts = np.bincount(values.ravel(), minlength=256)
    flat = np.flatnonzero(counts >= _FLAT_SHARE * values.size)
    if channel == "luminance" and (np.diff(flat) > _PLATEAU).sum() > 1:
        return (
            f"the flat levels {', '.join(map(str, flat))}, as in a map of labels; those from {MASK_THRESHOLD} on count"
        )
    levels = int((counts > 0).sum())
    if levels <= _FEW_LEVELS:
        return None
    dark, light = _far_from_median(counts[:MASK_THRESHOLD]), _far_from_median(counts[MASK_THRESHOLD:])
    # red paint lies on a photograph; it is of one colour, and what is red in a photograph is not
    far = light / counts[MASK_THRESHOLD:].sum() if channel == "red" else (dark + light) / counts.sum()
    if far <= _FAR_SHARE:
        return None
    return (
        f"{levels} grey levels in the {channel} channel, {far:.0%} of the pixels far from two levels: a photograph has "
        "these, a mask has black, white and soft edges; were image and mask exchanged?"
    )


_MOST_LABELS = 64
"""Colours of a map of labels (DAVIS, VOC, SAM), which have no soft edges; red paint on a photograph has more."""

_COLOURED = 64
"""Least difference between the channels of a label's colour."""

_BLEND = 16
"""Distance to a blend of two colours within which a colour is one, of a soft edge between them."""


def _label_colours(image: Image.Image, masked: NDArray[np.bool_]) -> str | None:
    """The doubt about a mask of the red channel in an image of a few colours, of which two or more are not masked, and
    one of these is no black, grey or white: of a map of labels only the red objects would be repainted. The colours of
    a soft edge around the red are none."""
    colours = image.convert("RGB")
    if colours.getcolors(_MOST_LABELS) is None:
        return None
    pixels = np.asarray(colours)
    (kept, counts), (painted, _) = _by_area(pixels[~masked]), _by_area(pixels[masked])
    flat = counts >= _FLAT_SHARE * masked.size  # an edge has few pixels
    way, steps = painted[0] - kept[0], kept - kept[0]
    along = (steps @ way / (way @ way)).clip(0, 1)
    blended = np.abs(steps - along[:, None] * way).max(-1) <= _BLEND
    blended[0] = False
    kept, flat = kept[flat | ~blended], flat[flat | ~blended]
    red, green, blue = kept.T
    # red over grey of any level is redder than that, and as green as blue
    coloured = np.where(flat, np.ptp(kept, axis=-1), np.maximum(np.abs(green - blue), np.maximum(green, blue) - red))
    if len(kept) < 2 or coloured.max() < _COLOURED:
        return None
    return (
        f"{len(kept)} colours beside the masked red, as in a map of labels, of which {masked.mean():.0%} of the pixels "
        "are repainted; write one object white and the rest black"
    )


def _by_area(pixels: Pixels) -> tuple[NDArray[np.float64], NDArray[np.int64]]:
    """The colours [C, 3] of pixels [N, 3], the most frequent first, and how many each has."""
    codes, counts = np.unique(pixels @ np.array([1 << 16, 1 << 8, 1], np.int32), return_counts=True)
    order = np.argsort(-counts, kind="stable")
    ordered = codes[order]
    return np.stack([ordered >> 16, ordered >> 8 & 255, ordered & 255], -1).astype(np.float64), counts[order]


def _far_from_median(counts: NDArray[np.int64]) -> int:
    """The pixels whose level is further than `_PLATEAU` from the median level, of a histogram."""
    median = int(np.searchsorted(np.cumsum(counts), counts.sum() / 2))
    return int(counts.sum() - counts[max(0, median - _PLATEAU) : median + _PLATEAU + 1].sum())


def box_mask(box: Box, size: tuple[int, int]) -> Image.Image:
    """A 0/255 mask of `size` (width, height) whose masked region is `box`.

    Raises:
        ImageProblem: a box without pixels, or one that is not inside the image.
    """
    left, top, right, bottom = box
    width, height = size
    given = f"given {left},{top},{right},{bottom}"
    if not (left < right and top < bottom):
        raise ImageProblem(f"{given}; expected LEFT,TOP,RIGHT,BOTTOM with LEFT < RIGHT and TOP < BOTTOM, in pixels")
    if left < 0 or top < 0 or right > width or bottom > height:
        raise ImageProblem(
            f"{given}; expected a box inside the image, which is {width} x {height}; set RIGHT to {width} and BOTTOM "
            f"to {height} or less, LEFT and TOP to 0 or more"
        )
    mask = Image.new("L", size, 0)
    mask.paste(255, box)
    return mask


def mask_box(mask: Image.Image | Pixels) -> Box:
    """The smallest half-open box around the masked pixels.

    Raises:
        ImageProblem: an empty mask.
    """
    inside = np.asarray(mask) >= MASK_THRESHOLD
    rows, columns = np.flatnonzero(inside.any(1)), np.flatnonzero(inside.any(0))
    if not len(rows):
        raise ImageProblem("the mask is empty: it has no box")
    return int(columns[0]), int(rows[0]), int(columns[-1]) + 1, int(rows[-1]) + 1


def halves(box: Box) -> tuple[Box, Box]:
    """The box cut in the middle of its longer side: left and right, or top and bottom.

    Raises:
        ImageProblem: one pixel, which has no halves.
    """
    left, top, right, bottom = box
    if max(right - left, bottom - top) < 2:
        raise ImageProblem("the masked area is one pixel: it has no halves")
    if right - left >= bottom - top:
        middle = (left + right) // 2
        return (left, top, middle, bottom), (middle, top, right, bottom)
    middle = (top + bottom) // 2
    return (left, top, right, middle), (left, middle, right, bottom)


def widen(box: Box, margin: float, width: int, height: int) -> Box:
    """The box grown by `margin` of its sides in each direction, inside the image."""
    left, top, right, bottom = box
    dx, dy = round((right - left) * margin), round((bottom - top) * margin)
    return max(0, left - dx), max(0, top - dy), min(width, right + dx), min(height, bottom + dy)


def paste_back(source: Pixels, generated: Pixels, mask: Pixels, feather: float = 0.0) -> Pixels:
    """`generated` inside the mask, `source` outside, per pixel.

    Args:
        feather: as of `mask_weights`.
    """
    weights = mask_weights(mask, feather)[..., None]
    return np.rint(source + weights * (generated.astype(np.float32) - source)).clip(0, 255).astype(np.uint8)


def mask_weights(mask: Pixels, feather: float = 0.0) -> NDArray[np.float32]:
    """Share of the generated image in each pixel of a composite: 1 inside the mask, 0 outside.

    Args:
        feather: radius in pixels of a soft edge, inside the mask only: outside it the source is kept bit for bit.
    """
    alpha = (mask >= MASK_THRESHOLD).astype(np.float32)
    if feather > 0:
        soft = Image.fromarray((alpha * 255).astype(np.uint8), "L").filter(ImageFilter.GaussianBlur(feather))
        alpha *= np.clip(np.asarray(soft, np.float32) / 127.5 - 1, 0, 1)
    return alpha
