"""A tiny editing task that a program can judge: recolour the one shape of an image as an instruction implies.

"make it like a lemon" means yellow. An instruction names a thing, never a colour; images are 32 x 32. The text encoder
turns the instruction into a colour word for the diffusion model (`retouch.tiny.editing`, algorithm `vlm_grpo`).
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageDraw

from retouch.data.sampler import derive_seed
from retouch.files.disk import write_whole
from retouch.imaging.png import write_png
from retouch.tiny.signs import new_data

SIDE = 32

COLOURS: dict[str, tuple[int, int, int]] = {
    "red": (215, 45, 40),
    "green": (45, 165, 65),
    "blue": (50, 85, 215),
    "yellow": (235, 205, 50),
}
GROUND = (225, 225, 225)

THINGS = {
    "tomato": "red",
    "cherry": "red",
    "rose": "red",
    "grass": "green",
    "frog": "green",
    "pea": "green",
    "ocean": "blue",
    "jeans": "blue",
    "violet": "blue",
    "lemon": "yellow",
    "sun": "yellow",
    "butter": "yellow",
}
"""Things that an instruction may name -> their colours."""

PHRASES = ("like {}", "as {}", "make it {}", "{} look", "paint it {}", "turn to {}")

Half = Literal["train", "held_out"]


@dataclass(frozen=True)
class Edit:
    """One task: the source, the mask of its shape (white), the instruction and the colour that it means."""

    source: Image.Image
    mask: Image.Image
    instruction: str
    colour: str


def instructions(half: Half) -> list[tuple[str, str]]:
    """(thing, phrase) of a half; both halves have every thing and every phrase, but no common combination."""
    parity = 0 if half == "train" else 1
    return [(t, p) for i, t in enumerate(THINGS) for j, p in enumerate(PHRASES) if (i + j) % 2 == parity]


def draw_edit(random: Random, half: Half) -> Edit:
    """A task whose shape has another colour than the instruction means."""
    thing, phrase = random.choice(instructions(half))
    colour = THINGS[thing]
    old = random.choice([name for name in COLOURS if name != colour])
    mask = draw_shape(random)
    return Edit(painted(mask, old), mask, phrase.format(thing), colour)


def draw_shape(random: Random) -> Image.Image:
    """Mask of a disc or a square at a random place."""
    mask = Image.new("L", (SIDE, SIDE), 0)
    size = random.randint(12, 18)
    left, top = random.randint(2, SIDE - size - 3), random.randint(2, SIDE - size - 3)
    box = (left, top, left + size, top + size)
    pen = ImageDraw.Draw(mask)
    pen.ellipse(box, fill=255) if random.random() < 0.5 else pen.rectangle(box, fill=255)
    return mask


def painted(mask: Image.Image, colour: str) -> Image.Image:
    """Image of a shape in a colour."""
    page = Image.new("RGB", mask.size, GROUND)
    page.paste(COLOURS[colour], mask=mask)
    return page


def write_edits(folder: Path, count: int, half: Half, seed: int) -> int:
    """Write `count` tasks as a manifest with images -> `count`.

    Raises:
        DataError, ConfigError: as `new_data`.
    """
    with new_data(folder, folder / "manifest.json"):
        _write(folder, count, half, seed)
    return count


def _write(folder: Path, count: int, half: Half, seed: int) -> None:
    random = Random(derive_seed("edits", half, seed))
    entries: list[dict[str, str]] = []
    for number in range(count):
        edit = draw_edit(random, half)
        names = {"image_path": f"{number:04d}_source.png", "mask_path": f"{number:04d}_shape.png"}
        write_png(edit.source, folder / names["image_path"])
        write_png(edit.mask, folder / names["mask_path"])
        entries.append({**names, "prompt": edit.instruction, "colour": edit.colour})
    write_whole(folder / "manifest.json", json.dumps(entries, indent=1) + "\n")


def recoloured(items: Sequence[Any]) -> list[float]:
    """Share of the shape's pixels whose nearest colour is `metadata["colour"]`, in [0, 1]; a reward for `scorer: fn`.

    Args:
        items: reward items with a mask and `metadata["colour"]`.
    """
    return [colour_share(item.image, item.mask, str(item.metadata["colour"])) for item in items]


def colour_share(image: NDArray[np.uint8], mask: NDArray[np.uint8], colour: str) -> float:
    """Share of the masked pixels of an image [H, W, 3] whose nearest colour among ground and task is `colour`."""
    palette = np.array([*COLOURS.values(), GROUND], np.float32)
    pixels = image[mask >= 128].astype(np.float32)
    nearest = np.square(pixels[:, None] - palette).sum(-1).argmin(1)
    return float((nearest == list(COLOURS).index(colour)).mean())
