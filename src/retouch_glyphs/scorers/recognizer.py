"""How likely the target text is to the recogniser of `retouch_glyphs.text_recognizer`, with a gradient.

OCR reports which text it reads; this score measures how far the image is from the target text, and its gradient has the
direction. A run that trains on it can exploit the network: keep `ocr` as gold.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal

from retouch.config.base import Unit
from retouch.imaging.glyphs import ink_box
from retouch.imaging.lines import folded
from retouch.imaging.masks import Box
from retouch.rewards.base import PixelScorer, RewardEntry
from retouch.rewards.pixels import unit_pixels, with_image
from retouch.rewards.protocol import RewardItem, lines_to_read
from retouch.rewards.scorers.reading import crop_box, unreadable
from retouch.rewards.scorers.weights import file_digest
from retouch.rewards.text_distance import text_similarity
from retouch.types import Failure, Outcome, Score

if TYPE_CHECKING:
    from torch import Tensor

LOWEST = 20.0
"""Mean log-probabilities are bounded softly by -LOWEST: LOWEST tanh(mean / LOWEST), about the mean near 0."""


_ROOM = 0.3
"""Room around the ink, in heights of the ink: what the network was trained on, about."""


class RecognizerReward(RewardEntry):
    """Likelihood of the target text, one line, by the recogniser of the package; differentiable."""

    value_range = (-LOWEST, 1.0)
    differentiable = True
    cpu_only = "the network is small and runs on the CPU; leave device out"

    scorer: Literal["recognizer"] = "recognizer"
    value: Literal["probability", "log"] = "log"
    """"log" is the mean log-probability of a character, in [-20, 0]; "probability" is its exponential, in [0, 1], whose
    gradient vanishes while the text cannot be read."""
    crop_margin: Unit = 0.0
    """Widens the mask box by this fraction of its sides."""
    line: Literal["box", "ink"] = "box"
    """Whether the line is the whole box, or its part around the ink: for boxes much higher than their text, on an even
    ground."""

    def make(self) -> RecognizerScorer:
        return RecognizerScorer(self)

    def reads_text(self) -> bool:
        return True

    def lacking(self, text: str) -> list[str]:
        from retouch_glyphs.text_recognizer import CHARACTERS

        return [character for character in dict.fromkeys(folded(text)) if character not in CHARACTERS]


class RecognizerScorer(PixelScorer[RecognizerReward]):
    """CTC log-likelihood of the target text in the mask box, divided by the number of its characters."""

    def __init__(self, options: RecognizerReward) -> None:
        super().__init__(options, f"value={options.value} margin={options.crop_margin} line={options.line}")

    def load(self, device: str) -> None:
        """Load the network."""
        import torch

        from retouch_glyphs.text_recognizer import FOLDER, WEIGHTS, packaged

        packaged("cpu", torch.float32)  # read before the first item
        self.set_revision(f"{file_digest(FOLDER / WEIGHTS)} {self.spec.revision}")

    def _value(self, image: Tensor, item: RewardItem) -> Tensor | Failure:
        read = self._read(image, with_image(item, image))
        return read if isinstance(read, Failure) else self._of_mean(read[0])

    def _one(self, item: RewardItem) -> Outcome:
        import torch

        with torch.no_grad():
            read = self._read(unit_pixels(item.image), item)
        if isinstance(read, Failure):
            return read
        mean, detail = read
        return Score(float(self._of_mean(mean)), {**detail, "log_probability": float(mean)})

    def _of_mean(self, mean: Tensor) -> Tensor:
        return mean.exp() if self.options.value == "probability" else LOWEST * (mean / LOWEST).tanh()

    def _read(self, image: Tensor, item: RewardItem) -> tuple[Tensor, dict[str, Any]] | Failure:
        """Mean log-probability of a character, and what was read, of an image [3, H, W] in [0, 1].

        Args:
            item: its image has the size of `image`.
        """
        from retouch_glyphs.text_recognizer import (
            COLUMN,
            classes_of,
            columns_needed,
            line_pixels,
            log_likelihood,
            packaged,
            read_greedily,
            width_of,
        )

        text = unreadable(item, self.options.crop_margin) or one_line_to_read(item)
        if isinstance(text, Failure):
            return text
        asked = folded(text)
        if (classes := classes_of(asked)) is None:
            return Failure("bad_item", f"{asked!r} holds characters other than A-Z, a-z, 0-9 and the space; use ocr")
        left, top, right, bottom = self._line_box(item)
        columns, needed = width_of(bottom - top, right - left) // COLUMN, columns_needed(classes)
        if columns < needed:
            return Failure(
                "bad_item",
                f"{asked!r} needs {needed} columns, but a box of {right - left} x {bottom - top} pixels has {columns}; "
                "use a wider mask or a shorter text",
            )
        names = packaged(str(image.device), image.dtype)(line_pixels(image[:, top:bottom, left:right])[None])[0]
        found, confidence = read_greedily(names.detach())
        detail = {"text": found, "ned": text_similarity(asked, found), "confidence": confidence}
        return log_likelihood(names, classes) / len(classes), detail

    def _line_box(self, item: RewardItem) -> Box:
        left, top, right, bottom = box = crop_box(item, self.options.crop_margin)
        ink = ink_box(item.image[top:bottom, left:right]) if self.options.line == "ink" else None
        if ink is None:
            return box
        room = round(_ROOM * (ink[3] - ink[1]))
        inner = left + ink[0] - room, top + ink[1] - room, left + ink[2] + room, top + ink[3] + room
        return max(left, inner[0]), max(top, inner[1]), min(right, inner[2]), min(bottom, inner[3])


def one_line_to_read(item: RewardItem) -> str | Failure:
    """The target text, which must be one line."""
    lines = lines_to_read(item)
    if isinstance(lines, Failure):
        return lines
    parts = [part for line in lines for part in line.text.splitlines() if part.strip()]
    if len(parts) > 1:
        return Failure("bad_item", f"{len(parts)} lines to read, but the recogniser reads one; use ocr_lines")
    return parts[0]
