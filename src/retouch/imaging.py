"""Images and masks in numpy and PIL: composites, mask boxes, crops, colour modes, text distance. No torch.

Arrays are [H, W, 3] uint8 RGB and [H, W] masks, 255 = repaint. Boxes are half-open (left, top, right, bottom).
"""

from __future__ import annotations

import hashlib
import io
import os
import unicodedata
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, get_args

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageFilter, ImageOps, UnidentifiedImageError
from PIL.PngImagePlugin import PngInfo

from retouch.errors import ImageProblem

Pixels = NDArray[np.uint8]
Box = tuple[int, int, int, int]
Fit = Literal["crop", "stretch"]
FITS = get_args(Fit)
StripFit = Literal["contain", "full_width"]

MASK_THRESHOLD = 128
"""Least grey level of a masked pixel; painted masks have soft edges and JPEG noise."""

MASK_NOISE = 8
"""Range of grey levels up to which a channel carries no mask."""


@dataclass(frozen=True)
class PackedImage:
    """An image inside another file, read when it is opened.

    Attributes:
        name: in place of a path in messages.
        digest: of its bytes; it identifies the image.
    """

    name: str = field(compare=False)
    read: Callable[[], bytes] = field(compare=False, repr=False)
    digest: str

    def __str__(self) -> str:
        return self.name


def packed(image: Image.Image, name: str) -> PackedImage:
    """An image in memory in place of a file.

    Args:
        name: in place of a path in messages.
    """
    stream = io.BytesIO()
    shown = as_shown(image)
    (shown if shown.mode in _PNG_MODES else to_rgb(shown)).save(stream, "PNG")
    data = stream.getvalue()
    return PackedImage(name, lambda: data, hashlib.sha256(data).hexdigest())


_PNG_MODES = ("1", "L", "LA", "P", "RGB", "RGBA")


def write_png(image: Image.Image, path: Path, about: Mapping[str, str] | None = None) -> None:
    """Write an image at once: a reader, or a start after a kill, never finds a part of the file.

    Args:
        about: texts that the file holds beside the pixels; see `png_text`.
    """
    texts = PngInfo()
    for name, text in (about or {}).items():
        texts.add_text(name, text)
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name[:48]}.{os.getpid()}.tmp")
    temporary.unlink(missing_ok=True)  # nothing is written through a link
    try:
        image.save(temporary, "PNG", pnginfo=texts)
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)


def png_text(path: Path, name: str) -> str | None:
    """A text that a PNG file holds beside its pixels; None if it has none of the name, or cannot be read."""
    try:
        with Image.open(path) as image:
            text = image.info.get(name)
    except (OSError, ValueError, SyntaxError, Image.DecompressionBombError):
        return None
    return text if isinstance(text, str) else None


def write_new_png(image: Image.Image, next_free: Callable[[], Path]) -> Path:
    """Write an image at once to a path that does not exist -> the path. No file is replaced, also not one that another
    process writes at the same time.

    Args:
        next_free: returns a path that does not exist at the moment.
    """
    path = next_free()
    temporary = path.with_name(f".{path.name[:48]}.{os.getpid()}.tmp")
    temporary.unlink(missing_ok=True)  # nothing is written through a link
    try:
        image.save(temporary, "PNG")
        while True:
            try:
                os.link(temporary, path)
            except FileExistsError:
                path = next_free()
            except OSError:  # a file system without links
                temporary.replace(path)
                return path
            else:
                return path
    finally:
        temporary.unlink(missing_ok=True)


_PROGRAMS = ("EPS",)
"""Formats that Pillow passes to another program, which runs them."""


def open_image(path: Path | PackedImage) -> Image.Image:
    """Open and decode an image, `as_shown`.

    Raises:
        ImageProblem: missing, not an image, truncated, floating-point values, or a program in PostScript.
    """
    if isinstance(path, Path) and os.path.exists(path) and not os.path.isfile(path):  # noqa: PTH110, PTH113  no error
        raise ImageProblem(f"{path}: not a file")  # opening a pipe would wait for its other end
    try:
        with Image.open(io.BytesIO(path.read()) if isinstance(path, PackedImage) else path) as image:
            if image.format in _PROGRAMS:
                raise ImageProblem(f"{path}: {image.format}, a program for a printer; convert it to PNG or JPEG")
            shown = as_shown(image)
    except FileNotFoundError:
        raise ImageProblem(f"{path}: no such file") from None
    except UnidentifiedImageError:
        raise ImageProblem(f"{path}: not an image that Pillow can read; convert it to PNG or JPEG") from None
    except (OSError, SyntaxError) as error:  # truncated JPEG, broken PNG chunk
        raise ImageProblem(f"{path}: damaged image ({error}); replace the file") from None
    except Image.DecompressionBombError as error:
        raise ImageProblem(f"{path}: too large ({error}); scale it down first") from None
    if shown.mode == "F":
        raise ImageProblem(f"{path}: holds floating-point values; convert it to an 8-bit PNG or JPEG")
    return shown


def as_shown(image: Image.Image) -> Image.Image:
    """An opened image, decoded: upright (EXIF orientation applied, as viewers and mask editors do), with 8 bits a
    channel, except floating-point values."""
    image.load()
    upright = ImageOps.exif_transpose(image)
    if upright.mode.startswith("I"):  # 16 bits: Pillow's own conversion clips all but the darkest 255 levels to white
        return Image.fromarray((np.asarray(upright) >> 8).clip(0, 255).astype(np.uint8), "L")
    return upright


def to_rgb(image: Image.Image) -> Image.Image:
    """RGB; transparent pixels over white, as a viewer shows them."""
    if image.mode in ("RGBA", "LA", "PA") or "transparency" in image.info:
        rgba = image.convert("RGBA")
        return Image.alpha_composite(Image.new("RGBA", image.size, (255, 255, 255, 255)), rgba).convert("RGB")
    return image.convert("RGB")


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


def read_mask(image: Image.Image, name: str, *, invert: bool = False) -> tuple[Image.Image, str]:
    """A 0/255 mask of mode "L" from `mask_levels`, and its channel.

    Raises:
        ImageProblem: the mask is empty (nothing to repaint) or full (nothing to keep).
    """
    values, channel = mask_levels(image)
    mask = (values >= MASK_THRESHOLD) != invert
    share = float(mask.mean())
    if share == 0.0 or share == 1.0:
        what = "empty: nothing to repaint" if share == 0.0 else "full: nothing to keep"
        seen = f"{channel} channel, values {values.min()} to {values.max()}, threshold {MASK_THRESHOLD}"
        paint, rest = ("black", "white") if invert else ("white", "black")
        hint = f"paint the area to repaint {paint}, the rest {rest} (data.invert_mask={str(invert).lower()})"
        raise ImageProblem(f"{name}: the mask ({seen}) is {what}; {hint}")
    return Image.fromarray(mask.astype(np.uint8) * 255, "L"), channel


def may_be_inverted(mask: Image.Image, channel: str) -> bool:
    """Whether a mask read from alpha (opaque = repaint) looks like an image with an erased region: most of its border
    is opaque. The border of a painted layer is transparent."""
    inside = np.asarray(mask) >= MASK_THRESHOLD
    edge = np.concatenate([inside[0], inside[-1], inside[1:-1, 0], inside[1:-1, -1]])
    return channel == "alpha" and bool(edge.mean() > 0.5)


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


def widen(box: Box, margin: float, width: int, height: int) -> Box:
    """The box grown by `margin` of its sides in each direction, inside the image."""
    left, top, right, bottom = box
    dx, dy = round((right - left) * margin), round((bottom - top) * margin)
    return max(0, left - dx), max(0, top - dy), min(width, right + dx), min(height, bottom + dy)


def paste_back(source: Pixels, generated: Pixels, mask: Pixels, feather: float = 0.0) -> Pixels:
    """`generated` inside the mask, `source` outside, per pixel.

    Args:
        feather: radius in pixels of a soft edge, inside the mask only: outside it the source is kept bit for bit.
    """
    alpha = (mask >= MASK_THRESHOLD).astype(np.float32)
    if feather > 0:
        soft = Image.fromarray((alpha * 255).astype(np.uint8), "L").filter(ImageFilter.GaussianBlur(feather))
        alpha *= np.clip(np.asarray(soft, np.float32) / 127.5 - 1, 0, 1)
    blend = source + alpha[..., None] * (generated.astype(np.float32) - source)
    return np.rint(blend).clip(0, 255).astype(np.uint8)


def fit_size(size: tuple[int, int], target: tuple[int, int], fit: Fit, keep: Box | None) -> tuple[tuple[int, int], Box]:
    """Scaled size of an image of `size` (width, height), and the box in it that is cropped to `target`.

    "stretch" scales both sides; "crop" scales to cover the target and crops a window centred on `keep` (the mask box),
    or on the middle, moved to lie inside the image.
    """
    width, height = size
    target_width, target_height = target
    if fit == "stretch":
        return target, (0, 0, target_width, target_height)
    scale = max(target_width / width, target_height / height)
    scaled = max(target_width, round(width * scale)), max(target_height, round(height * scale))
    centre_x, centre_y = (
        (scaled[0] / 2, scaled[1] / 2)
        if keep is None
        else ((keep[0] + keep[2]) / 2 * scaled[0] / width, (keep[1] + keep[3]) / 2 * scaled[1] / height)
    )
    left = min(max(0, round(centre_x - target_width / 2)), scaled[0] - target_width)
    top = min(max(0, round(centre_y - target_height / 2)), scaled[1] - target_height)
    return scaled, (left, top, left + target_width, top + target_height)


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


def normalize_text(text: str, *, case_sensitive: bool = True) -> str:
    """NFKC with single spaces between words; case folded on request."""
    folded = " ".join(unicodedata.normalize("NFKC", text).split())
    return folded if case_sensitive else folded.casefold()


def edit_distance(a: Sequence[Hashable], b: Sequence[Hashable]) -> int:
    """Levenshtein distance: insertions, deletions and substitutions of code points, or of the items of two lists.

    Bit-parallel: a whole column of the table is two integers, the places where it rises and falls by 1 (Myers 1999,
    Hyyrö 2003).
    """
    places: dict[Hashable, int] = {}
    for i, item in enumerate(a):
        places[item] = places.get(item, 0) | 1 << i
    every, last, distance = (1 << len(a)) - 1, 1 << len(a) >> 1, len(a)
    rises, falls = every, 0
    for item in b if a else ():
        equal = places.get(item, 0)
        diagonal = (((equal & rises) + rises) ^ rises) | equal | falls
        right, left = falls | (every & ~(diagonal | rises)), rises & diagonal
        distance += bool(right & last) - bool(left & last)
        right, left = (right << 1 | 1) & every, left << 1 & every
        rises, falls = left | (every & ~(diagonal | right)), right & diagonal
    return distance if a else len(b)


def text_similarity(a: str, b: str) -> float:
    """Symmetric normalised edit distance as a similarity: 1 - distance / max(len) in [0, 1]; two empty texts give 1."""
    longest = max(len(a), len(b))
    return 1.0 - edit_distance(a, b) / longest if longest else 1.0
