"""Pictures whose pixels tell where they were cut from, and self_bench folders made of them."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from retouch.data.formats.calligrapher import SelfBenchData
from retouch.imaging.masks import Box

SIZE = (48, 32)  # width, height
HOLE: Box = (8, 4, 40, 20)
"""Left, top, right, bottom of the mask in the folders below; about a third of the picture."""


def picture(size: tuple[int, int] = SIZE, blue: int = 0) -> Image.Image:
    """RGB; the pixel at (x, y) is (x, y, blue): a crop shows where it comes from."""
    width, height = size
    pixels = np.zeros((height, width, 3), np.uint8)
    pixels[..., 0], pixels[..., 1], pixels[..., 2] = np.arange(width), np.arange(height)[:, None], blue
    return Image.fromarray(pixels)


def box_mask(size: tuple[int, int] = SIZE, box: Box = HOLE) -> Image.Image:
    mask = Image.new("L", size, 0)
    mask.paste(255, box)
    return mask


def pixels(image: Image.Image | None) -> list[object]:
    """For comparisons with ==: size, mode and every byte."""
    assert image is not None
    return [image.size, image.mode, image.tobytes()]


class Bench:
    """A self_bench folder under construction."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def add(
        self,
        number: int,
        source: Image.Image | None = None,
        mask: Image.Image | None = None,
        ref: Image.Image | None = None,
    ) -> Bench:
        """An item with the standard picture and mask unless given."""
        (source or picture(blue=number)).save(self.folder / f"test{number}_source.png")
        (mask or box_mask()).save(self.folder / f"test{number}_mask.png")
        if ref is not None:
            ref.save(self.folder / f"test{number}_ref.png")
        return self

    def list(self, lines: Iterable[str] | bytes) -> Bench:
        """The list file, as lines or as bytes."""
        content = lines if isinstance(lines, bytes) else "".join(f"{line}\n" for line in lines).encode()
        (self.folder / "self_bench.txt").write_bytes(content)
        return self

    def config(self, **options: object) -> SelfBenchData:
        """A data section for the folder at the size of its pictures."""
        given: dict[str, object] = {"path": str(self.folder), "resolution": (SIZE[1], SIZE[0]), **options}
        return SelfBenchData.model_validate(given)


@pytest.fixture
def bench(tmp_path: Path) -> Bench:
    return Bench(tmp_path)
