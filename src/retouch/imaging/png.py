"""PNG files: written at once, with texts beside the pixels."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Protocol

from PIL import Image
from PIL.PngImagePlugin import PngInfo

from retouch.process.replacing import beside


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
    with beside(path) as temporary:
        image.save(temporary, "PNG", pnginfo=texts)
        temporary.replace(path)


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
    with beside(path) as temporary:
        image.save(temporary, "PNG")
        while True:
            try:
                os.link(temporary, path)
            except FileExistsError:
                path = next_free()
            except OSError:  # a file system without links: the name is taken before the file is moved there
                try:
                    path.touch(exist_ok=False)
                except FileExistsError:
                    path = next_free()
                else:
                    return temporary.replace(path)
            else:
                return path
