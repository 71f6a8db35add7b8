"""An image in the space of its file: a composite changes no value outside the mask, and is written as PNG. No torch.

Pillow reads and writes colours with 8 bits a channel. A file of 16 bits is decoded twice, for the high and for the low
bytes, and its PNG is put together here.
"""

from __future__ import annotations

import io
import logging
import struct
import sys
import zlib
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import ExifTags, Image, ImageCms, ImageOps
from PIL.PngImagePlugin import PngInfo

from retouch.imaging.colour_profiles import is_srgb, transform_of
from retouch.imaging.masks import Box, Pixels, mask_weights
from retouch.imaging.png import resolution_of
from retouch.imaging.reading import PackedImage, as_shown, call_pillow, grey_words, open_image, opened, raw_mode

logger = logging.getLogger(__name__)

Values = NDArray[np.uint8] | NDArray[np.uint16]
"""[H, W, C]: grey, grey and alpha, RGB, or RGB and alpha."""

_MODES = ("L", "LA", "RGB", "RGBA")
"""Mode of an image with 1 to 4 channels."""


@dataclass(frozen=True)
class FileImage:
    """An image with the values of its file, upright.

    Attributes:
        profile: ICC profile; None: sRGB.
        about: EXIF (its orientation is 1), resolution and gamma of the file, as arguments for a PNG of Pillow.
    """

    values: Values
    profile: bytes | None = None
    about: dict[str, Any] = field(default_factory=dict[str, Any])

    @property
    def most(self) -> int:
        """The value of white, and of opaque alpha."""
        return int(np.iinfo(self.values.dtype).max)

    @property
    def mode(self) -> str:
        """Mode of Pillow for the channels, whatever their depth."""
        return _MODES[self.values.shape[-1] - 1]

    def composite(self, generated: Image.Image, box: Box, mask: Pixels, feather: float = 0.0) -> FileImage:
        """The image with `generated`, of the size of `box` and in sRGB, in that box and inside the mask. Repainted
        pixels are opaque; the values of all others stay.

        Args:
            mask: [H, W] of the whole image; `feather` as of `mask_weights`.
        """
        left, top, right, bottom = box
        there = slice(top, bottom), slice(left, right)
        weights = mask_weights(mask, feather)[there][..., None]
        own, new = self.values[there].astype(np.float32), self._from_srgb(generated)
        colours = own[..., : new.shape[-1]]
        blend = colours + weights * (new - colours)
        if self.mode.endswith("A"):  # a blend of what is visible: a file does not multiply its colours by alpha
            alpha = own[..., -1:] / self.most
            opacity = alpha + weights * (1 - alpha)
            visible = (1 - weights) * alpha * colours + weights * new
            blend = np.concatenate([visible / np.maximum(opacity, 1e-6), opacity * self.most], -1)
        values = self.values.copy()
        values[there] = np.where(weights > 0, np.rint(blend).clip(0, self.most), own)
        return replace(self, values=values)

    def _from_srgb(self, image: Image.Image) -> NDArray[np.float32]:
        """[H, W, 1 or 3]: an image in sRGB in the colours and the depth of this one."""
        mode = self.mode.removesuffix("A")
        own = image.convert(mode)
        if self.profile is not None and not is_srgb(self.profile, mode):
            transform = transform_of(self.profile, mode, "from sRGB")
            own = ImageCms.applyTransform(own.convert("RGB"), transform) or own
        levels = np.asarray(own, np.float32)
        return levels.reshape(*levels.shape[:2], -1) * (self.most // 255)

    def image(self) -> Image.Image:
        """The image with 8 bits a channel, for a page."""
        values = (self.values >> 8 if self.most > 255 else self.values).astype(np.uint8)
        return Image.fromarray(values[..., 0] if self.mode == "L" else values)

    def save(self, fp: Path, format: str = "PNG") -> None:
        """Write a PNG with the values, the profile and the EXIF of the file."""
        about = self.about | ({"icc_profile": self.profile} if self.profile else {})
        if self.values.dtype == np.uint8:
            self.image().save(fp, format, **about)
            return
        frame = io.BytesIO()
        Image.new(self.mode, (1, 1)).save(frame, format, **about)
        fp.write_bytes(b"".join(_with_words(frame.getvalue(), self.values)))


def read_file_image(path: Path | PackedImage) -> FileImage:
    """An image with the values of its file. Palettes become RGB, fewer than 8 bits become 8, a transparent colour
    becomes an alpha channel. An image that no PNG can hold becomes sRGB with 8 bits, with a warning.

    Raises:
        ImageProblem: as `open_image`.
    """
    with opened(path) as image:
        raw = raw_mode(image)
        turned = call_pillow(image.getexif).get(ExifTags.Base.Orientation) in (5, 6, 7, 8)
        call_pillow(image.load)
        words = _words(path, image, raw)
        profile, about = image.info.pop("icc_profile", None) or None, _about(image, turned=turned)
        values = words if words is not None or image.mode in _NOT_IN_PNG else _channels(as_shown(image))
    reason = _why_not_png(image.mode, raw, values, profile)
    if reason is None:
        assert values is not None
        return FileImage(values, profile, about)
    logger.warning("%s: %s; samples of it are written in sRGB with 8 bits a channel", path, reason)
    return FileImage(_channels(open_image(path)), None, {name: about[name] for name in about if name != "pnginfo"})


_NOT_IN_PNG = ("CMYK", "LAB")
"""Modes without a colour type of PNG."""


def _why_not_png(mode: str, raw: str, values: Values | None, profile: bytes | None) -> str | None:
    if mode in _NOT_IN_PNG:
        return f"{mode} colours, which a PNG cannot hold"
    assert values is not None
    if ";16" in raw and values.dtype == np.uint8:
        return "16 bits a channel in a layout that Pillow reads with 8 bits"
    own = _MODES[values.shape[-1] - 1].removesuffix("A")
    if profile is None or is_srgb(profile, own) or transform_of(profile, own, "from sRGB"):
        return None
    return "a colour profile without a way back from sRGB"


def _channels(image: Image.Image) -> NDArray[np.uint8]:
    """[H, W, C] of an image of 8 bits a channel, of any mode."""
    mode = ("L" if image.mode in ("1", "L", "LA") else "RGB") + ("A" if image.has_transparency_data else "")
    values = np.asarray(image.convert(mode))
    return values.reshape(*values.shape[:2], -1)


# --- 16 bits a channel ---


def _words(path: Path | PackedImage, image: Image.Image, raw: str) -> NDArray[np.uint16] | None:
    """[H, W, C]: the values of an image of 16 bits a channel, upright; None for another depth or layout."""
    if image.mode.startswith("I"):
        return _with_alpha(grey_words(image)[..., None], image.info.get("transparency"))
    if raw == "LA;16B":  # four bytes of a pixel: high and low byte of grey and of alpha
        return np.ascontiguousarray(_decoded(path, "RGBA")).view(">u2").astype(np.uint16)
    depth, order = raw[:-1], raw[-1:]
    if depth not in ("RGB;16", "RGBA;16"):
        return None
    low_bytes_of = {"L": "B", "B": "L", "N": "B" if sys.byteorder == "little" else "L"}
    high, low = (_decoded(path, layout).astype(np.uint16) for layout in (raw, depth + low_bytes_of[order]))
    return _with_alpha((high << 8 | low).astype(np.uint16), image.info.get("transparency"))


def _decoded(path: Path | PackedImage, raw: str) -> NDArray[np.uint8]:
    """[H, W, C]: an image, upright, with the bytes of a pixel read as another layout of the same length."""
    with opened(path) as image:
        tiles: list[Any] = getattr(image, "tile", [])
        for number, (codec, box, offset, layout) in enumerate(tiles):
            own_layout = raw if isinstance(layout, str) else (raw, *layout[1:])
            make = getattr(type(tiles[number]), "_make", tuple)  # of Pillow before 11: plain tuples
            tiles[number] = make((codec, box, offset, own_layout))
        image.load()
        return np.asarray(ImageOps.exif_transpose(image))


def _with_alpha(words: NDArray[np.uint16], transparent: object) -> NDArray[np.uint16]:
    """The values with an alpha channel, if the file names a transparent one."""
    if not isinstance(transparent, int | tuple):
        return words
    opaque = (words != np.array(transparent)).any(-1, keepdims=True)
    return np.concatenate([words, np.where(opaque, np.uint16(65535), np.uint16(0))], -1)


def _with_words(png: bytes, words: Values) -> Iterator[bytes]:
    """The parts of a PNG with the chunks of another one of 8 bits, and with these values of 16 bits."""
    height, width = words.shape[:2]
    lines = np.ascontiguousarray(words.astype(">u2")).view(np.uint8).reshape(height, -1)
    differences = np.diff(lines, axis=0, prepend=np.zeros_like(lines[:1]))  # filter 2: to the line above
    filtered = np.concatenate([np.full((height, 1), 2, np.uint8), differences], 1)
    yield png[:8]
    at = 8
    while at < len(png):
        (length,) = struct.unpack_from(">I", png, at)
        kind, content = png[at + 4 : at + 8], png[at + 8 : at + 8 + length]
        if kind == b"IHDR":
            content = struct.pack(">II", width, height) + bytes([16]) + content[9:]
        elif kind == b"IDAT":
            content = zlib.compress(filtered.tobytes())
        yield struct.pack(">I", len(content)) + kind + content + struct.pack(">I", zlib.crc32(kind + content))
        at += 12 + length


# --- what a file holds beside its pixels ---

_DESCRIPTIVE = frozenset({0x010E, 0x010F, 0x0110, 0x0131, 0x0132, 0x013B, 0x8298, 0x8769, 0x8825})
"""EXIF tags of a TIFF that describe the image: title, camera, program, time, author, rights, EXIF and GPS. The others
describe the layout of the file."""


def _about(image: Image.Image, *, turned: bool) -> dict[str, Any]:
    """EXIF, resolution and gamma of a decoded image.

    Args:
        turned: whether its orientation exchanges width and height.
    """
    resolution, exif = resolution_of(image), _exif(image)
    about: dict[str, Any] = {"exif": exif} if exif else {}
    if resolution is not None:
        about["dpi"] = resolution[::-1] if turned else resolution
    gamma, chromaticity = image.info.get("gamma"), image.info.get("chromaticity")
    if gamma:  # viewers that read it must show the unmasked pixels as before
        about["pnginfo"] = chunks = PngInfo()
        chunks.add(b"gAMA", struct.pack(">I", round(gamma * 100000)))
        if chromaticity:
            chunks.add(b"cHRM", struct.pack(">8I", *(round(number * 100000) for number in chromaticity)))
    return about


def _exif(image: Image.Image) -> bytes:
    """The EXIF block of an image, with orientation 1."""
    block = image.info.get("exif")
    if isinstance(block, bytes) and image.format != "TIFF":
        return _upright_exif(block)
    exif, kept = image.getexif(), Image.Exif()
    for tag in _DESCRIPTIVE & {*exif}:
        kept[tag] = exif.get_ifd(tag) if tag in (0x8769, 0x8825) else exif[tag]
    try:
        return kept.tobytes() if kept else b""
    except (ValueError, TypeError, KeyError, OverflowError, struct.error) as error:
        logger.warning("the EXIF data of an image is damaged (%s), and its samples have none", error)
        return b""


def _upright_exif(block: bytes) -> bytes:
    """An EXIF block with orientation 1, and without its thumbnail, which shows the image before the change. Every other
    byte stays: notes of a camera hold places of the block."""
    start = 6 if block.startswith(b"Exif\0\0") else 0
    order = {b"II": "<", b"MM": ">"}.get(block[start : start + 2], "<")
    patched = bytearray(block)
    try:
        directory = start + struct.unpack_from(f"{order}I", block, start + 4)[0]
        (entries,) = struct.unpack_from(f"{order}H", block, directory)
        for entry in range(directory + 2, directory + 2 + 12 * entries, 12):
            if struct.unpack_from(f"{order}H", block, entry)[0] == ExifTags.Base.Orientation:
                struct.pack_into(f"{order}HHIHH", patched, entry, ExifTags.Base.Orientation, 3, 1, 1, 0)
        _blank_thumbnail(patched, start, order, directory + 2 + 12 * entries)
    except struct.error:  # damaged: Pillow found no orientation in it either
        return block
    return bytes(patched)


def _blank_thumbnail(block: bytearray, start: int, order: str, link: int) -> None:
    """Overwrite the thumbnail of an EXIF block with zeros, and cut the directory that it has from the first one.

    Args:
        link: place of the number that leads from the first directory to that of the thumbnail.
    """
    (second,) = struct.unpack_from(f"{order}I", block, link)
    if not second:
        return
    struct.pack_into(f"{order}I", block, link, 0)
    (entries,) = struct.unpack_from(f"{order}H", block, start + second)
    found: dict[int, int] = {}
    for entry in range(start + second + 2, start + second + 2 + 12 * entries, 12):
        tag, _, _, value = struct.unpack_from(f"{order}HHII", block, entry)
        found[tag] = value
    place, length = found.get(ExifTags.Base.JpegIFOffset, 0), found.get(ExifTags.Base.JpegIFByteCount, 0)
    end = min(len(block), start + place + length)
    if 0 < place < end - start:
        block[start + place : end] = bytes(end - start - place)
