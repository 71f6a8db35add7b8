"""How whole each letter of the target text is, by the network of `retouch_glyphs.glyph_structure`.

OCR reads broken letters as if they were whole. This score is no reading: it looks at one letter at a time, in the box
where the recogniser found it or in an equal slice of the line. Use it beside the ocr reward, or gated by it.
"""

from __future__ import annotations

import math
from itertools import pairwise
from typing import TYPE_CHECKING, Annotated, Any, Literal

import numpy as np
from pydantic import Field

from retouch.config.base import Unit
from retouch.config.reads import ReadIf
from retouch.imaging.glyphs import contrast, ink_box
from retouch.imaging.lines import folded
from retouch.imaging.masks import Box
from retouch.rewards.base import PixelScorer, RewardEntry
from retouch.rewards.pixels import unit_pixels, with_image
from retouch.rewards.protocol import Pixels, RewardItem, text_to_read
from retouch.rewards.scorers.ocr import OcrReward, OcrScorer
from retouch.rewards.scorers.reading import crop_box, crop_for, unreadable
from retouch.rewards.scorers.weights import file_digest
from retouch.types import Failure, Outcome, Score
from retouch_glyphs.scorers.character_boxes import aligned, read_characters

if TYPE_CHECKING:
    from numpy.typing import NDArray
    from torch import Tensor

    from retouch.imaging.glyphs import Ink


RECOGNISED = ReadIf(
    "with `boxes: recognised`",
    lambda own: own.boxes == "recognised",
    "but boxes {own.boxes!r} recognises nothing; leave it out",
)


class GlyphStructureReward(RewardEntry):
    """How whole the letters of the target text are, in [0, 1]: 1 - mean P(broken)."""

    differentiable = True
    cpu_only = "the network is small and runs on the CPU; leave device out"

    scorer: Literal["glyph_structure"] = "glyph_structure"
    boxes: Literal["recognised", "fitted", "equal"] = "recognised"
    """Letters in the boxes of rapidocr's characters; or, for one line of evenly spaced letters, slices of equal width
    between the first and the last ink of the crop. Fitted slices are cut where there is least ink, and end around the
    ink of their letter: for letters of few pixels."""
    network: Literal["standard", "robust"] = "standard"
    """The robust one was trained on perturbations of the pixels too: take it for `gradient_weight`. The standard one
    separates single letters better; in words the two differ less than can be measured."""
    over: Literal["mean", "worst_quarter"] = "mean"
    """Mean over all letters, or over the quarter that is most likely broken."""
    crop_margin: Unit = 0.0
    """Widens the mask box by this fraction of its sides."""
    detect: Annotated[bool, RECOGNISED] = True
    """With recognised boxes: find the lines in the crop first; false reads the crop as one line."""
    threads: Annotated[int, Field(ge=0, le=1024), RECOGNISED] = 0
    """CPU threads of the recogniser; 0 uses all cores."""

    def make(self) -> GlyphStructureScorer:
        return GlyphStructureScorer(self)

    def reads_text(self) -> bool:
        return True

    def extras(self) -> frozenset[str]:
        return frozenset({"ocr"} if self.boxes == "recognised" else ())


class GlyphStructureScorer(PixelScorer[GlyphStructureReward]):
    """1 - P(broken) over the letters A-Z, a-z and 0-9 of the target text; other characters are not judged.

    A letter without a box, in a line with others, counts as broken. An image without any box is a failure.
    """

    def __init__(self, options: GlyphStructureReward) -> None:
        o = options
        self._reader: OcrScorer | None = None
        if o.boxes == "recognised":
            self._reader = OcrReward(detect=o.detect, threads=o.threads).make()
        settings = f"boxes={o.boxes} over={o.over} margin={o.crop_margin}"
        super().__init__(options, f"{settings} {self._reader.spec.revision}" if self._reader else settings)

    def load(self, device: str) -> None:
        """Load the network and, for recognised boxes, the recogniser.

        Raises:
            ConfigError: rapidocr is not installed.
        """
        import torch

        from retouch_glyphs.glyph_structure import FOLDERS, WEIGHTS, packaged

        packaged("cpu", torch.float32, self.options.network)  # read before the first item
        self.set_revision(f"{file_digest(FOLDERS[self.options.network] / WEIGHTS)} {self.spec.revision}")
        if self._reader is not None:
            self._reader.load(device)

    def _value(self, image: Tensor, item: RewardItem) -> Tensor | Failure:
        """The boxes are found on the image rounded to uint8 and have no gradient."""
        judged = self._judged(image, with_image(item, image))
        return judged if isinstance(judged, Failure) else judged[0].to(image.dtype)

    def _one(self, item: RewardItem) -> Outcome:
        import torch

        with torch.no_grad():
            judged = self._judged(unit_pixels(item.image), item)
        return judged if isinstance(judged, Failure) else Score(float(judged[0]), judged[1])

    def _recognised(self, crop: Pixels, asked: str) -> list[Box | None]:
        assert self._reader is not None
        found = read_characters(self._reader.engine, crop, self.options.detect)
        ink = ink_box(crop)
        read = "".join(folded(character.text)[:1] or character.text[:1] for character in found)
        places = iter(aligned("".join(asked.split()), read))
        boxes: list[Box | None] = []
        for char in asked:
            place = None if char.isspace() else next(places)
            boxes.append(None if place is None or ink is None else _within(found[place].box, ink))
        return boxes

    def _sliced(self, crop: Pixels, asked: str) -> list[Box | None]:
        line = ink_box(crop)
        if line is None or line[2] - line[0] < len(asked):
            return [None] * len(asked)
        if self.options.boxes == "equal":
            return list(equal_slices(line, len(asked)))
        return fitted_slices(contrast(crop.astype(np.float64)), line, len(asked))

    def _judged(self, image: Tensor, item: RewardItem) -> tuple[Tensor, dict[str, Any]] | Failure:
        """Value and detail of an image [3, H, W] in [0, 1]; `item.image` is the same, rounded, and gives the boxes."""
        import torch

        from retouch_glyphs.glyph_structure import index_of, packaged, structure_of

        margin = self.options.crop_margin
        text = unreadable(item, margin) or text_to_read(item)
        if isinstance(text, Failure):
            return text
        crop, asked = crop_for(item, margin), folded(text)
        boxes = self._sliced(crop, asked) if self._reader is None else self._recognised(crop, asked)
        # Three kinds of characters: those of the network's alphabet with a box are judged; known ones without a
        # box count as broken, or leaving a letter out would pay; others are left out and only counted.
        known = {i: index for i, char in enumerate(asked) if (index := index_of(char)) is not None}
        if not known:
            return Failure("bad_item", f"{asked!r} holds none of the letters A-Z, a-z and 0-9, which alone are judged")
        seen = {i: box for i in known if (box := boxes[i]) is not None}
        if not seen:
            return Failure("bad_item", f"no box of a letter of {asked!r} was found; gate this reward by ocr")
        left, top, right, bottom = crop_box(item, margin)
        pixels = image[None, :, top:bottom, left:right]
        network = packaged(str(pixels.device), pixels.dtype, self.options.network)
        boxes_of_image = [(0, box) for box in seen.values()]
        whole = structure_of(pixels, boxes_of_image, [known[i] for i in seen], network).double()
        values = dict(zip(seen, whole.tolist(), strict=True))
        broken = torch.cat([1 - whole, whole.new_ones(len(known) - len(seen))]).sort(descending=True).values
        taken = broken[: math.ceil(len(broken) / 4)] if self.options.over == "worst_quarter" else broken
        detail: dict[str, Any] = {
            "letters": [[asked[i], round(values[i], 4) if i in values else None] for i in known],
            "missing": len(known) - len(seen),
            "not_judged": len(asked.replace(" ", "")) - len(known),
        }
        return 1 - taken.sum() / len(taken), detail


def _within(box: Box, ink: Box) -> Box:
    """The part of a box in the rows of the ink; the whole box if that has none."""
    left, top, right, bottom = box
    low, high = max(top, ink[1]), min(bottom, ink[3])
    return (left, low, right, high) if low < high else box


def equal_slices(line: Box, count: int) -> list[Box]:
    """A box cut into `count` boxes of equal width, to the pixel."""
    left, top, right, bottom = line
    edges = [left + round(i * (right - left) / count) for i in range(count + 1)]
    return [(a, top, b, bottom) for a, b in pairwise(edges)]


def fitted_slices(distance: Ink, line: Box, count: int) -> list[Box | None]:
    """A box for each of `count` letters: its slice of the line, around its ink.

    A cut is the column with the least ink within a third of a slice of where equal slices are cut, the nearest such
    column. The room around the ink is .08 of the height of the line, at least a pixel. None for a slice without ink.

    Args:
        distance: Distance from the colour of the ground, [h, w].
        line: Box of the ink.
    """
    left, top, right, bottom = line
    columns = distance[top:bottom].sum(axis=0)
    reach = max(1, (right - left) // (3 * count))
    cuts = [
        min(range(b - reach, min(b + reach + 1, right)), key=lambda x: (columns[x], abs(x - b)))
        for _, _, b, _ in equal_slices(line, count)[:-1]
    ]
    room = max(1, round(0.08 * (bottom - top)))
    ink = distance > distance.max() / 2
    return [_around(ink, (a, top, b, bottom), room) for a, b in pairwise([left, *cuts, right])]


def _around(ink: NDArray[np.bool_], box: Box, room: int) -> Box | None:
    """The box of the ink inside `box`, and `room` pixels on each side as far as the crop goes."""
    left, top, right, bottom = box
    rows, columns = np.nonzero(ink[top:bottom, left:right])
    if not len(rows):
        return None
    height, width = ink.shape
    return (
        max(0, left + int(columns.min()) - room),
        max(0, top + int(rows.min()) - room),
        min(width, left + int(columns.max()) + 1 + room),
        min(height, top + int(rows.max()) + 1 + room),
    )
