"""Colour profiles embedded in image files: to sRGB, which everything in this package reads, and back. No torch."""

from __future__ import annotations

import io
from functools import lru_cache
from typing import Any, Literal

import numpy as np
from PIL import Image, ImageCms

_SAME_AS_SRGB = 2
"""Largest difference to sRGB, in levels of 255, of a profile that is read as sRGB: profiles of sRGB round their curves
differently, and an image with one of them keeps its values."""

_COLOURS_OF = {"RGB": "RGB", "L": "GRAY", "CMYK": "CMYK"}
"""Mode -> colour space of the profiles that describe it. A profile of another space describes no pixel of the image;
viewers ignore it."""

Direction = Literal["to sRGB", "from sRGB"]


def in_srgb(image: Image.Image) -> Image.Image:
    """The image with colours in sRGB and without its profile. Grey stays grey, alpha stays, CMYK becomes RGB; without
    a profile, or with one that is sRGB or cannot be used, no value changes except those of LAB."""
    profile = image.info.pop("icc_profile", None)
    if image.mode == "LAB":
        return image.convert("RGB")
    if not isinstance(profile, bytes) or not profile:
        return image
    # A profile describes colours and no alpha, and littleCMS takes neither palettes nor alpha. Colours are converted
    # alone, grey as grey, and get their alpha back.
    if image.mode in ("RGBA", "LA", "PA") or "transparency" in image.info:
        alpha = image.convert("RGBA").getchannel("A")
        grey = image.mode in ("1", "L", "LA")
        shown = _converted(image.convert("LA").getchannel("L") if grey else _opaque(image), profile)
        if shown is None:
            return image
        shown.putalpha(alpha)
        return shown
    return _converted(image if image.mode in _COLOURS_OF else _opaque(image), profile) or image


def _opaque(image: Image.Image) -> Image.Image:
    """The colours of an image without their alpha."""
    if image.mode == "1":
        return image.convert("L")
    return image.convert("RGBA" if "transparency" in image.info else "RGB").convert("RGB")


def _converted(colours: Image.Image, profile: bytes) -> Image.Image | None:
    """An image of mode RGB, L or CMYK in sRGB; None if its values stay as they are."""
    if is_srgb(profile, colours.mode):
        return None
    transform = transform_of(profile, colours.mode, "to sRGB")
    if transform is None:
        return None
    shown = ImageCms.applyTransform(colours, transform)
    assert shown is not None  # a new image
    shown.info = dict(colours.info)
    return shown.convert("L") if colours.mode == "L" else shown


@lru_cache(maxsize=16)
def is_srgb(profile: bytes, mode: str) -> bool:
    """Whether a profile changes no colour of an image of the mode by more than rounding."""
    if mode == "CMYK":
        return False
    levels = np.linspace(0, 255, 18).astype(np.uint8)
    grid = np.stack(np.meshgrid(levels, levels, levels), -1).reshape(1, -1, 3)
    colours = Image.fromarray(grid if mode == "RGB" else np.arange(256, dtype=np.uint8)[None])
    transform = transform_of(profile, mode, "to sRGB")
    if transform is None:
        return True
    shown = ImageCms.applyTransform(colours, transform)
    assert shown is not None
    change = np.asarray(shown).astype(np.int16) - np.asarray(colours.convert("RGB"))
    return bool(np.abs(change).max() <= _SAME_AS_SRGB)


def transform_of(profile: bytes, mode: str, direction: Direction) -> Any:
    """The transform between the pixels of a mode in a profile, and RGB in sRGB; None if the profile has none."""
    try:
        own: Any = ImageCms.ImageCmsProfile(io.BytesIO(profile))
        if own.profile.xcolor_space.strip() != _COLOURS_OF[mode]:
            return None
        srgb = ImageCms.createProfile("sRGB")
        if direction == "to sRGB":
            return ImageCms.buildTransform(own, srgb, mode, "RGB")
        return ImageCms.buildTransform(srgb, own, "RGB", mode)
    except (ImageCms.PyCMSError, OSError, TypeError, ValueError):  # a damaged profile, or one without this direction
        return None
