"""Opening image files as viewers show them: upright, in sRGB, 8 bits a channel, whatever their mode and depth."""

from __future__ import annotations

import hashlib
import io
import os
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar, cast

import numpy as np
from numpy.typing import NDArray
from PIL import ExifTags, Image, ImageOps, UnidentifiedImageError

from retouch.errors import ImageProblem
from retouch.imaging.colour_profiles import in_srgb
from retouch.imaging.png import resolution_of


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

    Raises:
        ImageProblem: floating-point values, or integers of 32 bits.
    """
    stream = io.BytesIO()
    if image.mode in _PNG_MODES:
        exif = _exif_of(image)
        upright = image if exif else ImageOps.exif_transpose(image)  # XMP, which a PNG of Pillow does not keep
        about = {name: value for name, value in (("exif", exif), ("dpi", resolution_of(image))) if value}
        upright.save(stream, "PNG", **about)
    else:
        _require_levels(image, name)
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

_PROGRAMS = ("EPS",)
"""Formats that Pillow passes to another program, which runs them."""


@contextmanager
def opened(path: Path | PackedImage) -> Iterator[Image.Image]:
    """An image file that is open and not yet decoded.

    Raises:
        ImageProblem: missing, not an image, a program in PostScript, or one with longer texts than Pillow reads;
            truncated, where it is decoded within the block.
    """
    if isinstance(path, Path) and os.path.exists(path) and not os.path.isfile(path):  # noqa: PTH110, PTH113  no error
        raise ImageProblem(f"{path}: not a file")  # opening a pipe would wait for its other end
    try:
        # A path alone would let Pillow map an uncompressed file into memory, which it does in a wrong size where a TIFF
        # lies on its side.
        stream = io.BytesIO(path.read()) if isinstance(path, PackedImage) else path.open("rb")
        with stream, call_pillow(Image.open, stream) as image:
            if image.format in _PROGRAMS:
                raise ImageProblem(f"{path}: {image.format}, a program for a printer; convert it to PNG or JPEG")
            # Pillow scales the levels of a PNG of 2 or 4 bits to 0 to 255, but not its transparent grey.
            most, key = {"L;2": 3, "L;4": 15}.get(raw_mode(image)), image.info.get("transparency")
            if most is not None and isinstance(key, int):
                image.info["transparency"] = key * 255 // most
            yield image
    except ImageProblem:
        raise
    except FileNotFoundError:
        raise ImageProblem(f"{path}: no such file") from None
    except UnidentifiedImageError:
        raise ImageProblem(f"{path}: not an image that Pillow can read; convert it to PNG or JPEG") from None
    except (OSError, SyntaxError) as error:  # truncated JPEG, broken PNG chunk
        raise ImageProblem(f"{path}: damaged image ({error}); replace the file") from None
    except Image.DecompressionBombError as error:
        raise ImageProblem(f"{path}: too large ({error}); scale it down first") from None
    except _PillowError as error:
        remedy = "save it again without its texts" if "MAX_TEXT" in str(error) else "replace the file"
        raise ImageProblem(f"{path}: Pillow does not read it ({error}); {remedy}") from None


# Two lines of Pillow's for each image of 89 to 179 megapixels, which are read like others.
warnings.filterwarnings("ignore", category=Image.DecompressionBombWarning)

_Result = TypeVar("_Result")


class _PillowError(ValueError):
    """A ValueError of Pillow about a file: a text that is too long, a level of a plain PPM that is no number."""


def call_pillow(read: Callable[..., _Result], *given: Any) -> _Result:
    """`read(*given)` of what is in the file of an image; within `opened`, its ValueError becomes an ImageProblem."""
    try:
        return read(*given)
    except ValueError as error:
        raise _PillowError(str(error)) from error


def image_size(path: Path | PackedImage) -> tuple[int, int]:
    """(Width, height) of what `open_image` returns, from the head of the file.

    Raises:
        ImageProblem: as `opened`.
    """
    with opened(path) as image:
        if image.format == "TIFF":  # Pillow turns some of them when they are decoded
            return as_shown(image).size
        turned = call_pillow(image.getexif).get(ExifTags.Base.Orientation, 1) in _ON_ITS_SIDE
        return (image.height, image.width) if turned else image.size


_ON_ITS_SIDE = (5, 6, 7, 8)
"""EXIF orientations of images whose width is shown as their height."""


def open_image(path: Path | PackedImage) -> Image.Image:
    """Open and decode an image, `as_shown`.

    Raises:
        ImageProblem: missing, not an image, truncated, signed, 32-bit or floating-point values, or a program in
            PostScript.
    """
    with opened(path) as image:
        _require_levels(image, str(path))
        return as_shown(image)


def _require_levels(image: Image.Image, name: str) -> None:
    """Raises: ImageProblem: values of which it is unknown what white is."""
    if image.mode == "F":
        raise ImageProblem(f"{name}: holds floating-point values; convert it to an 8-bit PNG or JPEG")
    unsigned = image.mode != "I" and image.format == "TIFF"
    if image.mode.startswith("I") and not unsigned and image.format not in _SCALED:  # a mask of 0 and 1, or 65535?
        low, high = call_pillow(image.getextrema)
        raise ImageProblem(
            f"{name}: holds integers of unknown scale (signed, of 32 bits, or of a format that states none), "
            f"values {low} to {high}; convert it to an 8-bit PNG or JPEG, values 0 to 255"
        )


def as_shown(image: Image.Image) -> Image.Image:
    """An opened image, decoded: upright (EXIF orientation applied, as viewers and mask editors do), in sRGB
    (`in_srgb`), with 8 bits a channel, except floating-point values."""
    key = image.info.get("transparency")
    if isinstance(key, tuple) and raw_mode(image) == "RGB;16B":  # Pillow keeps the high bytes alone of its values
        image.info["transparency"] = tuple(level >> 8 for level in key)
    call_pillow(image.load)
    upright = cast("Image.Image", call_pillow(ImageOps.exif_transpose, image))  # None for `in_place` alone
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


_STRAIGHT = {"La": "LA", "RGBa": "RGBA"}
"""Mode whose colours are multiplied by alpha -> the mode whose colours are not."""


def to_rgb(image: Image.Image) -> Image.Image:
    """RGB; transparent pixels over white, as a viewer shows them."""
    if image.mode in ("RGBA", "LA", "PA") or "transparency" in image.info:
        rgba = image.convert("RGBA")
        return Image.alpha_composite(Image.new("RGBA", image.size, (255, 255, 255, 255)), rgba).convert("RGB")
    return image.convert("RGB")
