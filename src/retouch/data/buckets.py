"""Images in their own shape: the shapes of a run, and the one that an image gets. No torch.

A shape is (height, width). All have about one area: short sides are the multiples up to the square's, and the long side
is the multiple nearest to area / short side. Upright shapes are the wide ones turned. An image gets the shape with the
nearest ratio of its sides. Legend: P pixels, m multiple, s short side; areas lie within s m / 2 of P.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Hashable, Iterable, Mapping, Sequence
from functools import lru_cache
from typing import TYPE_CHECKING, Annotated

from pydantic import Field, model_validator

from retouch.config.base import Count, Section

if TYPE_CHECKING:
    from retouch.config.run import RunConfig

Shape = tuple[int, int]
"""(height, width) in pixels."""


class Buckets(Section):
    """Each image keeps about its own ratio of sides: examples are sorted into shapes of about one area, and an epoch, a
    supervised step and a forward hold examples of one shape."""

    pixels: Annotated[int, Field(ge=1, le=16384**2)] = 262144
    """Area of every shape, up to rounding to `multiple`; 262144 is 512 x 512."""
    multiple: Count = 16
    """Sides are multiples of it; a multiple of the family's size multiple (16 for FLUX). A larger one makes fewer
    shapes, which crop more of an image."""
    max_aspect: Annotated[float, Field(ge=1.0, le=32.0)] = 2.5
    """Largest ratio of the sides of a shape; longer images are cropped."""

    @model_validator(mode="after")
    def _holds_a_square(self) -> Buckets:
        if self.pixels < self.multiple**2:
            raise ValueError(
                f"pixels: given {self.pixels}, less than one square of multiple {self.multiple}; set pixels to at "
                f"least {self.multiple**2}"
            )
        return self

    @property
    def shapes(self) -> tuple[Shape, ...]:
        """Every shape, from the square to the longest."""
        wide = _wide(self.pixels, self.multiple, self.max_aspect)
        return tuple(dict.fromkeys(shape for short, long in wide for shape in ((short, long), (long, short))))

    @property
    def largest(self) -> Shape:
        """The shape of the largest area, which decides what fits into memory."""
        return max(self.shapes, key=math.prod)

    def nearest(self, width: int, height: int) -> Shape:
        """The shape of an image: that of the nearest ratio of sides; of two as near, the one closer to the square."""
        long, short = max(width, height), min(width, height)

        def crops(shape: Shape) -> float:
            one, other = shape[0] * long, shape[1] * short
            return max(one, other) / min(one, other)

        found = min(_wide(self.pixels, self.multiple, self.max_aspect), key=crops)
        return found if width >= height else (found[1], found[0])

    def check(self, run: RunConfig, key: str = "") -> None:
        unit = run.model.size_multiple
        if self.multiple % unit:
            raise ValueError(
                f"{key}.multiple: given {self.multiple}; {run.model.family} needs multiples of {unit}; set "
                f"{math.lcm(self.multiple, unit)}"
            )

    def warnings(self, run: RunConfig) -> Iterable[str]:
        if run.training.compile:
            yield (
                f"training.compile: given true beside a resolution of {len(self.shapes)} shapes: blocks are compiled "
                "anew for other shapes than the first, at worst for each; set training.compile=false unless the run is "
                "long"
            )


@lru_cache(maxsize=64)
def _wide(pixels: int, multiple: int, max_aspect: float) -> tuple[Shape, ...]:
    """The square and the wide shapes, in the order of their ratios, no two of which are equal. In integers: a rounded
    root would move a shape."""
    square = (math.isqrt(4 * pixels) + multiple) // (2 * multiple)
    found = [(square * multiple, square * multiple)]
    for short in range(square - 1, 0, -1):
        cell = short * multiple**2
        long = (2 * pixels + cell) // (2 * cell)
        if long > max_aspect * short:
            break
        found.append((short * multiple, long * multiple))
    return tuple(found)


class Shapes:
    """The shape of every example, counted once. It equals itself alone: a key of caches without a look at each."""

    def __init__(self, of: Sequence[Hashable]) -> None:
        self.of = of
        self.counts: Mapping[Hashable, int] = Counter(of)


def by_shape(shapes: Sequence[Hashable]) -> list[list[int]]:
    """Positions of each shape, in the order in which shapes come first."""
    found: dict[Hashable, list[int]] = {}
    for position, shape in enumerate(shapes):
        found.setdefault(shape, []).append(position)
    return list(found.values())


def batches_of_one_shape(shapes: Sequence[Hashable], size: int) -> list[list[int]]:
    """All positions in batches of at most `size`, each of one shape."""
    return [rows[start : start + size] for rows in by_shape(shapes) for start in range(0, len(rows), size)]
