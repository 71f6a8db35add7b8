"""The regions of one image to repaint, and the texts to write into them: masks or boxes, one for all texts or one for
each. No torch."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from retouch.data.lists import line_fields
from retouch.errors import ConfigError, ImageProblem
from retouch.imaging.lines import TextLine
from retouch.imaging.masks import Box, box_mask, read_mask
from retouch.imaging.reading import PackedImage, open_image
from retouch.rewards.quotes import CLOSERS

ImageFile = Path | PackedImage

_QUOTED = re.compile(rf"([{''.join(CLOSERS)}]\s?)\{{text\}}(\s?[{''.join(CLOSERS.values())}])")


def template_prompt(template: str, texts: Sequence[str]) -> str:
    """The prompt of a template with one or more texts for {text}; every text has the quotes of the template."""
    if len(texts) == 1:
        return template.replace("{text}", texts[0])

    def each(found: re.Match[str]) -> str:
        paired = found[2].strip() in CLOSERS[found[1][0]]
        return ", ".join(f"{found[1]}{text}{found[2]}" for text in texts) if paired else found[0]

    return _QUOTED.sub(each, template).replace("{text}", ", ".join(texts))


def boxes_mask(boxes: Sequence[Box], size: tuple[int, int]) -> Image.Image:
    """The mask of all boxes.

    Raises:
        ConfigError: a box without pixels, or one outside the image.
    """
    try:
        return united([box_mask(box, size) for box in boxes])
    except ImageProblem as error:
        raise ConfigError(f"--box: {error}") from None


def masks_of(files: Sequence[ImageFile], size: tuple[int, int], invert: bool) -> list[Image.Image]:
    """Every mask of several, white where to repaint.

    Raises:
        ConfigError: a mask of another size than the image.
        ImageProblem: a mask that is empty or full.
    """
    masks = [read_mask(open_image(file), str(file), invert=invert).mask for file in files]
    for file, mask in zip(files, masks, strict=True):
        if mask.size != size:
            raise ConfigError(
                f"--mask: given {file}, which is {mask.width} x {mask.height}; with several masks each must have the "
                f"size of the image, {size[0]} x {size[1]}"
            )
    return masks


def united(masks: Sequence[Image.Image]) -> Image.Image:
    """The union of several masks."""
    return Image.fromarray(np.maximum.reduce([np.asarray(mask) for mask in masks]))


def text_metadata(texts: Sequence[str], places: Sequence[Box]) -> dict[str, Any]:
    """Metadata of an example: its texts, each with its place if there is one for each.

    Raises:
        ConfigError: several places, and another number of texts.
    """
    if len(places) > 1 and len(texts) not in (0, 1, len(places)):
        raise ConfigError(
            f"--text: given {len(texts)} times with {len(places)} boxes or masks; expected one for all texts or one "
            f"for each, in the same order; set {len(places)} texts, or one --box or --mask"
        )
    if len(texts) < 2:
        return {"text": texts[0]} if texts else {}
    if len(places) < 2:
        return line_fields([TextLine(text) for text in texts])
    return line_fields([TextLine(text, _corners(place)) for text, place in zip(texts, places, strict=True)])


def _corners(box: Box) -> tuple[tuple[float, float], ...]:
    left, top, right, bottom = (float(side) for side in box)
    return (left, top), (right, top), (right, bottom), (left, bottom)
