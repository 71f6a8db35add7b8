"""Images and masks in numpy and PIL: composites, mask boxes, crops, colour modes, text distance. No torch.

Arrays are [H, W, 3] uint8 RGB and [H, W] masks, 255 = repaint. Boxes are half-open (left, top, right, bottom).
"""

from __future__ import annotations

import hashlib
import io
import os
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO, Literal, Protocol, get_args

import numpy as np
from numpy.typing import NDArray
from PIL import ExifTags, Image, ImageFilter, ImageOps, UnidentifiedImageError
from PIL.PngImagePlugin import PngInfo

from retouch.colour_profiles import in_srgb
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
    """An image in memory in place of a file: with its own values, profile, EXIF and resolution where a PNG can hold
    them, else `as_shown`.

    Args:
        name: in place of a path in messages.
    """
    stream = io.BytesIO()
    if image.mode in _PNG_MODES:
        exif = _exif_of(image)
        upright = image if exif else ImageOps.exif_transpose(image)  # XMP, which a PNG of Pillow does not keep
        about = {name: value for name, value in (("exif", exif), ("dpi", resolution_of(image))) if value}
        upright.save(stream, "PNG", **about)
    else:
        to_rgb(as_shown(image)).save(stream, "PNG")
    data = stream.getvalue()
    return PackedImage(name, lambda: data, hashlib.sha256(data).hexdigest())


def _exif_of(image: Image.Image) -> bytes | None:
    """The EXIF block of an image in memory: that of its file, unless the orientation was changed since."""
    block = image.info.get("exif")
    if not block:
        return None
    read = Image.Exif()
    read.load(block)
    tag = ExifTags.Base.Orientation
    return block if read.get(tag, 1) == image.getexif().get(tag, 1) else image.getexif().tobytes()


_PNG_MODES = ("1", "L", "LA", "P", "RGB", "RGBA", "I;16")


def resolution_of(image: Image.Image) -> tuple[float, float] | None:
    """Pixels per inch, (x, y), that an image states; None without usable ones."""
    try:
        x, y = map(float, image.info["dpi"])
    except (KeyError, TypeError, ValueError, ZeroDivisionError):
        return None
    return (x, y) if 0 < x < _MOST_DPI and 0 < y < _MOST_DPI else None


_MOST_DPI = 1e6
"""A PNG holds pixels per metre in 32 bits."""


class Writable(Protocol):
    """An image that is written to a file: of Pillow, or in the space of another file."""

    def save(self, fp: Path, format: str) -> None: ...


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


def write_new_png(image: Writable, next_free: Callable[[], Path]) -> Path:
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


@contextmanager
def opened(path: Path | PackedImage) -> Iterator[Image.Image]:
    """An image file that is open and not yet decoded.

    Raises:
        ImageProblem: missing, not an image, or a program in PostScript; truncated, where it is decoded within the
            block.
    """
    if isinstance(path, Path) and os.path.exists(path) and not os.path.isfile(path):  # noqa: PTH110, PTH113  no error
        raise ImageProblem(f"{path}: not a file")  # opening a pipe would wait for its other end
    try:
        with _stream(path) as stream, Image.open(stream) as image:
            if image.format in _PROGRAMS:
                raise ImageProblem(f"{path}: {image.format}, a program for a printer; convert it to PNG or JPEG")
            _scale_key(image)
            yield image
    except FileNotFoundError:
        raise ImageProblem(f"{path}: no such file") from None
    except UnidentifiedImageError:
        raise ImageProblem(f"{path}: not an image that Pillow can read; convert it to PNG or JPEG") from None
    except (OSError, SyntaxError) as error:  # truncated JPEG, broken PNG chunk
        raise ImageProblem(f"{path}: damaged image ({error}); replace the file") from None
    except Image.DecompressionBombError as error:
        raise ImageProblem(f"{path}: too large ({error}); scale it down first") from None


def _stream(path: Path | PackedImage) -> BinaryIO:
    """The bytes of an image. A path alone would let Pillow map an uncompressed file into memory, which it does in a
    wrong size where a TIFF lies on its side."""
    return io.BytesIO(path.read()) if isinstance(path, PackedImage) else path.open("rb")


def open_image(path: Path | PackedImage) -> Image.Image:
    """Open and decode an image, `as_shown`.

    Raises:
        ImageProblem: missing, not an image, truncated, signed, 32-bit or floating-point values, or a program in
            PostScript.
    """
    with opened(path) as image:
        if not _is_scaled(image):  # a mask may hold 0 and 1, or 65535
            low, high = image.getextrema()
            raise ImageProblem(
                f"{path}: holds integers of unknown scale (signed, of 32 bits, or of a format that states none), "
                f"values {low} to {high}; convert it to an 8-bit PNG or JPEG, values 0 to 255"
            )
        shown = as_shown(image)
    if shown.mode == "F":
        raise ImageProblem(f"{path}: holds floating-point values; convert it to an 8-bit PNG or JPEG")
    return shown


def as_shown(image: Image.Image) -> Image.Image:
    """An opened image, decoded: upright (EXIF orientation applied, as viewers and mask editors do), in sRGB
    (`in_srgb`), with 8 bits a channel, except floating-point values."""
    key = image.info.get("transparency")
    if isinstance(key, tuple) and raw_mode(image) == "RGB;16B":  # Pillow keeps the high bytes alone of its values
        image.info["transparency"] = tuple(level >> 8 for level in key)
    image.load()
    upright = ImageOps.exif_transpose(image)
    if upright.mode.startswith("I"):  # 16 bits: Pillow's own conversion clips all but the darkest 255 levels to white
        levels = grey_words(image)
        grey = Image.fromarray((levels >> 8).astype(np.uint8), "L")
        grey.info = {name: upright.info[name] for name in ("icc_profile",) if name in upright.info}
        if isinstance(key := upright.info.get("transparency"), int):
            grey.putalpha(Image.fromarray(np.where(levels == key, np.uint8(0), np.uint8(255))))
        upright = grey
    elif upright.mode in _STRAIGHT:
        upright = upright.convert(_STRAIGHT[upright.mode])
    return in_srgb(upright)


_SCALED = ("PNG", "PPM", "JPEG2000")
"""Formats whose integers Pillow scales to 0 to 65535."""

_BITS, _PHOTOMETRIC = 258, 262
"""Tags of a TIFF: bits of a value, and what its values mean."""


def _is_scaled(image: Image.Image) -> bool:
    """Whether the values of an opened image have a known scale."""
    unsigned = image.mode != "I" and image.format == "TIFF"
    return not image.mode.startswith("I") or unsigned or image.format in _SCALED


def grey_words(image: Image.Image) -> NDArray[np.uint16]:
    """[H, W]: the levels of an opened image of more than 8 bits in one channel, upright, 65535 = white."""
    levels = np.asarray(ImageOps.exif_transpose(image)).clip(0, 65535).astype(np.uint16)
    tags: Mapping[int, object] = getattr(image, "tag_v2", {})
    if tags.get(_BITS) == (12,):  # Pillow leaves them as they are
        levels = (levels << 4 | levels >> 8).astype(np.uint16)
    return (
        np.uint16(65535) - levels if tags.get(_PHOTOMETRIC) == 0 else levels
    )  # 0 is white, which Pillow heeds up to 8 bits alone


def raw_mode(image: Image.Image) -> str:
    """How the bytes of an image that is not decoded yet are laid out, by Pillow's name; "" without one."""
    tiles: Any = getattr(image, "tile", None)
    layout = tiles[0][3] if tiles else ""
    return str(layout[0] if isinstance(layout, tuple) and layout else layout)


def _scale_key(image: Image.Image) -> None:
    """Scale the transparent grey of a PNG of 2 or 4 bits as Pillow scales its levels."""
    most = {"L;2": 3, "L;4": 15}.get(raw_mode(image))
    key = image.info.get("transparency")
    if most is not None and isinstance(key, int):
        image.info["transparency"] = key * 255 // most


_STRAIGHT = {"La": "LA", "RGBa": "RGBA"}
"""Mode whose colours are multiplied by alpha -> the mode whose colours are not."""


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


def read_mask(image: Image.Image, name: str, *, invert: bool = False) -> tuple[Image.Image, str]:
    """A 0/255 mask of mode "L" from `mask_levels`, and its channel.

    Raises:
        ImageProblem: the mask is empty (nothing to repaint) or full (nothing to keep).
    """
    reading = mask_reading(image, name, invert=invert)
    return reading.mask, reading.channel


def mask_reading(image: Image.Image, name: str, *, invert: bool = False) -> MaskReading:
    """As `read_mask`, with a doubt about the file if there is one."""
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
    doubt = MAY_BE_INVERTED if not invert and may_be_inverted(mask, channel) else None
    return MaskReading(mask, channel, doubt or _photograph(values, channel))


MAY_BE_INVERTED = (
    "opaque pixels are repainted, but the border of this mask is opaque, as in an image with an erased region; if "
    "transparent pixels mark the region to repaint, set data.invert_mask=true"
)

_FEW_LEVELS = 64
"""Grey levels of a mask with soft edges; a photograph has more."""

_PLATEAU = 4
"""Distance to the median level of the masked region, and of the kept one, within which most pixels of a mask lie, also
after JPEG."""


_FAR_SHARE = 0.6
"""Share of the pixels far from both levels above which a file is no mask. Photographs have .8 and more, a mask that is
blurred by a tenth of its size has .5."""


def _photograph(values: Pixels, channel: str) -> str | None:
    """The doubt about a mask with the levels of a photograph: many, and most pixels far from two of them."""
    counts = np.bincount(values.ravel(), minlength=256)
    levels = int((counts > 0).sum())
    if levels <= _FEW_LEVELS:
        return None
    kept, masked = _far_from_median(counts[:MASK_THRESHOLD]), _far_from_median(counts[MASK_THRESHOLD:])
    # red paint lies on a photograph; it is of one colour, and what is red in a photograph is not
    far = masked / counts[MASK_THRESHOLD:].sum() if channel == "red" else (kept + masked) / counts.sum()
    if far <= _FAR_SHARE:
        return None
    return (
        f"{levels} grey levels in the {channel} channel, {far:.0%} of the pixels far from two levels: a photograph has "
        "these, a mask has black, white and soft edges; were image and mask exchanged?"
    )


def _far_from_median(counts: NDArray[np.int64]) -> int:
    """The pixels whose level is further than `_PLATEAU` from the median level, of a histogram."""
    median = int(np.searchsorted(np.cumsum(counts), counts.sum() / 2))
    return int(counts.sum() - counts[max(0, median - _PLATEAU) : median + _PLATEAU + 1].sum())


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
