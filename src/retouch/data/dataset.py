"""A data set: a list of items by file name, turned into `Example`s of one size on access.

A format (`retouch.data.formats`) only lists items; opening, checking, resizing and roles are here, once for all.
"""

from __future__ import annotations

import hashlib
import importlib
import logging
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, overload

from PIL import Image

from retouch.data.checking import Alone, find_problems, memory_of, names_files
from retouch.data.sections import (
    ComplexEditData,
    PictureSection,
    ProtocolData,
    SelfBenchData,
)
from retouch.errors import DataError
from retouch.imaging import (
    Box,
    ImageProblem,
    MaskCrop,
    PackedPicture,
    fit_size,
    halves,
    into_strip,
    mask_box,
    may_be_inverted,
    open_image,
    read_mask,
    resize,
    to_rgb,
)
from retouch.types import Example, Processes

if TYPE_CHECKING:
    from retouch.data.sections import (
        Data,
        DataSection,
    )

logger = logging.getLogger(__name__)

KEPT_SHARE = 0.98
"""Of the masked area that must lie inside the crop: rounding may cost a row of pixels, but never a part of a letter."""

TargetRole = Literal["auto", "source", "none", "file"]


@dataclass(frozen=True)
class ItemFiles:
    """One item as the format lists it, nothing opened yet.

    Attributes:
        target: where the ground truth comes from: "file" is `target_path`; "source" the source itself; "none" there is
            none; "auto", of self_bench, a full-size reference, else the source.
        reference_mask_path: of the item that a reference belongs to; one of the mask's size is cut to its box.
        difficulty: what a curriculum sorts by.
    """

    id: int
    prompt: str
    source_path: Path | PackedPicture | None = None
    mask_path: Path | PackedPicture | None = None
    reference_path: Path | PackedPicture | None = None
    target_path: Path | None = None
    win_path: Path | None = None
    lose_path: Path | None = None
    embedding_path: Path | None = None
    target: TargetRole = "none"
    reference_mask_path: Path | None = None
    metadata: Mapping[str, Any] = field(default_factory=dict[str, Any])
    difficulty: float = 0.0


@dataclass(frozen=True)
class Reading:
    """How an item was brought to the size of its data set.

    Attributes:
        mask_channel: of the mask file; None without a mask.
        mask_may_be_inverted: see `imaging.may_be_inverted`.
        box: the part of the source that the example shows, in pixels of the source.
        cropped: whether the box is a crop around the mask.
        mask_pixels: masked pixels of the example.
        uncropped_mask_pixels: the same without the crop, to within the rounding of its edge.
    """

    mask_channel: str | None
    mask_may_be_inverted: bool
    box: Box
    cropped: bool
    mask_pixels: int
    uncropped_mask_pixels: int


@dataclass(frozen=True)
class ItemError:
    """One item that cannot be used, and why."""

    where: str
    problem: str

    def __str__(self) -> str:
        return f"{self.where}: {self.problem}"


class Dataset(Sequence[Example]):
    """Examples of one size, opened on access. Broken items were dropped by `load_dataset`."""

    def __init__(self, config: DataSection, items: Sequence[ItemFiles]) -> None:
        self.config = config
        self.items = list(items)

    def __len__(self) -> int:
        return len(self.items)

    @overload
    def __getitem__(self, index: int) -> Example: ...
    @overload
    def __getitem__(self, index: slice) -> list[Example]: ...
    def __getitem__(self, index: int | slice) -> Example | list[Example]:
        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(len(self)))]
        return read_item(self.items[index], self.config)[0]

    def __iter__(self) -> Iterator[Example]:
        return (self[i] for i in range(len(self)))

    @property
    def prompts(self) -> list[str]:
        """Every prompt once, in order."""
        return list(dict.fromkeys(item.prompt for item in self.items))

    @property
    def difficulties(self) -> list[float]:
        """Of every example, by position."""
        return [item.difficulty for item in self.items]

    @property
    def stages(self) -> int:
        """Of the curriculum; 1: there is none."""
        return self.config.curriculum if isinstance(self.config, ProtocolData) else 1


def load_dataset(
    config: Data, purpose: str = "data", needs: Collection[str] = (), processes: Processes | None = None
) -> Dataset:
    """List and check every item; skip up to `max_bad_items` broken ones, each with a warning.

    Args:
        purpose: names the section in messages.
        needs: pictures that every item must have: of source, mask, win, lose.
        processes: all of which load the same section at once, and check a share each; None: this one alone.

    Raises:
        DataError: nothing there, too many broken items, or two items with one id.
    """
    processes = processes or Alone()
    listed = list_items(config)
    names = repr([item.id if isinstance(item, ItemFiles) else str(item) for item in listed])
    if len(set(processes.gather_list([hashlib.sha256(names.encode()).digest()]))) > 1:
        raise DataError(f"{purpose}: {config.path} does not list the same items on all machines; give them equal files")
    files = [item for item in listed if isinstance(item, ItemFiles)]
    memory = memory_of(config, needs) if any(map(names_files, files)) else None
    problems = iter(find_problems(files, partial(check_item, config=config, needs=needs), purpose, processes, memory))
    outcomes = [item if isinstance(item, ItemError) else next(problems) or item for item in listed]
    good = [outcome for outcome in outcomes if isinstance(outcome, ItemFiles)]
    bad = [outcome for outcome in outcomes if isinstance(outcome, ItemError)]
    if len(bad) > config.max_bad_items:
        raise DataError(
            f"{purpose}: {len(bad)} of {len(listed)} items are broken, more than max_bad_items {config.max_bad_items}; "
            f"the first: {bad[0]}. `retouch data validate` lists them all"
        )
    if not good:
        raise DataError(f"{purpose}: {config.path} holds no usable item" + (f"; {bad[0]}" if bad else ""))
    if bad and processes.rank == 0:
        for problem in bad:
            logger.warning("%s: skipped %s", purpose, problem)
        logger.warning(
            "%s: skipped %d of %d items (max_bad_items %d)", purpose, len(bad), len(listed), config.max_bad_items
        )
    twice = repeated_ids(good)
    if twice:
        raise DataError(f"{purpose}: item id {twice[0]} appears more than once in {config.path}; ids must differ")
    return Dataset(config, good)


def list_items(config: Data) -> list[ItemFiles | ItemError]:
    """What the format finds, first `limit` items, nothing opened.

    Raises:
        DataError: the list itself is missing or unreadable.
    """
    module = importlib.import_module(f"retouch.data.formats.{config.format}")
    items: list[ItemFiles | ItemError] = module.list_items(config)
    return items if config.limit is None else items[: config.limit]


def all_embedded(items: Iterable[ItemFiles]) -> bool:
    """Whether every item names a file with the text embeddings of its prompt, so that none has to be encoded."""
    return all(item.embedding_path is not None for item in items)


def repeated_ids(items: Sequence[ItemFiles]) -> list[int]:
    """Ids that more than one item has."""
    return [i for i, count in Counter(item.id for item in items).items() if count > 1]


def check_item(
    item: ItemFiles, config: DataSection, needs: Collection[str] = (), crop: MaskCrop | None = None
) -> ItemError | None:
    """Open everything the item names; None where all of it is usable and there."""
    found = examine(item, config, needs, crop)
    return found if isinstance(found, ItemError) else None


def examine(
    item: ItemFiles, config: DataSection, needs: Collection[str] = (), crop: MaskCrop | None = None
) -> tuple[Example, Reading] | ItemError:
    """What `read_item` gives, or why the item cannot be used."""
    if not item.prompt.strip():
        return ItemError(f"item {item.id}", "the prompt is empty; give it a text")
    keys = {"source": "image_path"}  # of a manifest
    made = isinstance(config, PictureSection) and config.reference != "given" and item.source_path and item.mask_path
    needs = set(needs) - {"reference"} if made else needs
    missing = [keys.get(name, f"{name}_path") for name in needs if getattr(item, f"{name}_path") is None]
    if missing:
        return ItemError(f"item {item.id}", f"{', '.join(sorted(missing))} missing, which the run needs")
    try:
        return read_item(item, config, crop)
    except (ImageProblem, DataError) as error:
        return ItemError(f"item {item.id}", str(error))


def read_item(item: ItemFiles, config: DataSection, crop: MaskCrop | None = None) -> tuple[Example, Reading]:
    """The example at the size of the data set, and how it was read.

    Args:
        crop: show a box around the mask where it chooses one, instead of what `data.fit` shows.

    Raises:
        ImageProblem: a file that is missing, unreadable or of the wrong size.
    """
    height, width = config.size
    if item.embedding_path and not item.embedding_path.is_file():
        raise ImageProblem(f"{item.embedding_path}: no such file of embeddings")
    if not isinstance(config, PictureSection | ComplexEditData):
        example = Example(item.id, item.prompt, metadata=item.metadata, size=config.size)
        return example, Reading(None, False, (0, 0, width, height), False, 0, 0)
    source = to_rgb(open_image(item.source_path)) if item.source_path else None
    reference = to_rgb(open_image(item.reference_path)) if item.reference_path else None
    target = to_rgb(open_image(item.target_path)) if item.target_path else None
    win = to_rgb(open_image(item.win_path)) if item.win_path else None
    lose = to_rgb(open_image(item.lose_path)) if item.lose_path else None
    mask, channel, inverted = None, None, False
    if item.mask_path:
        invert = isinstance(config, PictureSection) and config.invert_mask
        mask, channel = read_mask(open_image(item.mask_path), str(item.mask_path), invert=invert)
        _same_size(mask, source, str(item.mask_path), "mask")
        inverted = not invert and may_be_inverted(mask, channel)
    first = next((i for i in (source, target, win, lose) if i is not None), None)
    other_is = "source" if source is not None else "target" if target is not None else "preferred picture"
    _same_size(target, first, str(item.target_path), "target", other_is)
    _same_size(win, first, str(item.win_path), "preferred picture", other_is)
    _same_size(lose, first, str(item.lose_path), "rejected picture", other_is)
    if item.target in ("auto", "source"):
        target = source
        in_layout = isinstance(config, SelfBenchData)
        if in_layout and reference is not None and source is not None and reference.size == source.size:
            # full-size ground truth; its mask box is the style crop
            target = reference if item.target == "auto" else source
            reference = reference.crop(mask_box(mask)) if mask is not None else None
    if reference is not None and item.reference_mask_path is not None and item.reference_mask_path.is_file():
        other, _ = read_mask(open_image(item.reference_mask_path), str(item.reference_mask_path))
        reference = reference.crop(mask_box(other)) if other.size == reference.size else reference
    shown = target or source
    if mask is not None and shown is not None and isinstance(config, PictureSection):
        if config.reference == "half_box":
            reference, mask = _half(shown, mask, second=item.id % 2 == 1, name=str(item.mask_path))
        elif config.reference == "mask_box" and reference is None:
            reference = shown.crop(mask_box(mask))
    box = mask_box(mask) if mask is not None else None
    area = (0, 0, width, height)
    cropped, kept, uncropped = None, 0, 0
    if first is not None:
        scaled, window = fit_size(first.size, (width, height), config.fit, box)
        area = _unscaled(window, scaled, first.size)
        if mask is not None:
            uncropped = round(mask_area(mask) * scaled[0] * scaled[1] / (mask.width * mask.height))
        cropped = None if crop is None or box is None else crop.box(first.size, (width, height), box)
        if cropped is not None:
            source, mask, target, win, lose = (
                None if i is None else i.crop(cropped) for i in (source, mask, target, win, lose)
            )
            area, scaled, window = cropped, (width, height), (0, 0, width, height)
        source, target, win, lose = (
            None if i is None else resize(i, scaled, window) for i in (source, target, win, lose)
        )
        if mask is not None:
            whole = mask_area(mask.resize(scaled, Image.Resampling.BOX))
            mask = resize(mask, scaled, window)
            kept = mask_area(mask)
            if kept == 0:
                raise ImageProblem(
                    f"{item.mask_path}: the masked area vanishes at {width} x {height}; raise data.resolution"
                )
            if kept < KEPT_SHARE * whole:
                raise ImageProblem(
                    f"{item.mask_path}: cropping to {width} x {height} cuts off {1 - kept / whole:.0%} of the masked "
                    "area; set data.fit=stretch or another data.resolution"
                )
            if kept == width * height:
                raise ImageProblem(
                    f"{item.mask_path}: the mask covers all of the {width} x {height} crop; set data.fit=stretch"
                )
    strip = None
    if isinstance(config, PictureSection) and config.reference_strip is not None and source and reference:
        strip = into_strip(reference, config.reference_strip, width, config.reference_strip_fit)
    example = Example(
        item.id, item.prompt, source, mask, target, reference, item.metadata, win, lose, config.size, strip
    )
    example = replace(example, embedding_path=item.embedding_path)
    return example, Reading(channel, inverted, area, cropped is not None, kept, uncropped)


def _unscaled(window: Box, scaled: tuple[int, int], size: tuple[int, int]) -> Box:
    """A box of an image that was scaled from `size`, in pixels of that."""
    x, y = size[0] / scaled[0], size[1] / scaled[1]
    left, top, right, bottom = window
    return round(left * x), round(top * y), round(right * x), round(bottom * y)


def _half(shown: Image.Image, mask: Image.Image, *, second: bool, name: str) -> tuple[Image.Image, Image.Image]:
    """One half of the mask's box as the reference, and the mask with the other half alone.

    Raises:
        ImageProblem: a mask that has no two halves.
    """
    seen, written = halves(mask_box(mask))[:: -1 if second else 1]
    rest = Image.new("L", mask.size, 0)
    rest.paste(mask.crop(written), written[:2])
    if not mask_area(rest):
        raise ImageProblem(f"{name}: one half of the mask's box holds no masked pixel; set data.reference=mask_box")
    return shown.crop(seen), rest


def mask_area(mask: Image.Image) -> int:
    """Masked pixels."""
    return int(sum(mask.histogram()[128:]))


def _same_size(
    image: Image.Image | None, other: Image.Image | None, name: str, what: str, other_is: str = "source"
) -> None:
    if image is not None and other is not None and image.size != other.size:
        raise ImageProblem(
            f"{name}: the {what} is {image.width} x {image.height}, its {other_is} {other.width} x {other.height}; "
            "both must have one size"
        )
