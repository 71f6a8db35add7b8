"""One item as an `Example`: its files opened and checked, with their roles, at the size of its data set."""

from __future__ import annotations

import math
from collections.abc import Collection
from dataclasses import dataclass, replace
from pathlib import Path

from PIL import Image

from retouch.data.base import DataError, DataSection, ImageOptions, ItemDoubt, ItemError, ItemFiles
from retouch.data.buckets import Buckets, Shape
from retouch.errors import ImageProblem
from retouch.files.disk import is_file
from retouch.imaging.fitting import MaskCrop, fit_size, into_strip, resize
from retouch.imaging.lines import Point, TextLine, parse_lines, placed, share_inside
from retouch.imaging.masks import Box, halves, mask_box, read_mask
from retouch.imaging.reading import PackedImage, image_size, open_image, to_rgb
from retouch.types import Example

KEPT_SHARE = 0.98
"""Share of the masked area that must lie inside the crop: rounding may cut a row of pixels, but no part of a letter."""

_COMPARED = {"target": "target", "win": "preferred image", "lose": "rejected image"}
"""Images that have the size of the source -> their names in messages."""

_SHAPING = ("source", *_COMPARED)
"""The first of these that an item has decides the shape of its example."""


@dataclass(frozen=True)
class Reading:
    """How an item was brought to the size of its example.

    Attributes:
        mask_channel: channel of the mask file; None without a mask.
        mask_doubt: see `imaging.MaskReading`.
        box: the part of the source that the example shows, in pixels of the source.
        cropped: whether the box is a crop around the mask.
        mask_pixels: masked pixels of the example.
        uncropped_mask_pixels: masked pixels without the crop, to within the rounding of its edge.
        scale, offset: a point (x, y) of the source is (x * scale x - offset x, y * scale y - offset y) of the example.
    """

    mask_channel: str | None
    mask_doubt: str | None
    box: Box
    cropped: bool = False
    mask_pixels: int = 0
    uncropped_mask_pixels: int = 0
    scale: Point = (1.0, 1.0)
    offset: Point = (0.0, 0.0)


def shape_of(item: ItemFiles, config: DataSection) -> Shape:
    """(height, width) of the example of an item.

    Raises:
        ImageProblem: a file that cannot be opened.
    """
    paths = (getattr(item, f"{role}_path") for role in _SHAPING) if config.has_images else ()
    first = next(filter(None, paths), None)
    return config.size_for(image_size(first) if first is not None and isinstance(config.resolution, Buckets) else None)


def check_item(
    item: ItemFiles, config: DataSection, needs: Collection[str] = (), crop: MaskCrop | None = None
) -> ItemError | ItemDoubt | None:
    """Open every file of the item; None if all are present and usable, and the mask is not doubtful."""
    found = examine(item, config, needs, crop)
    if isinstance(found, ItemError):
        return found
    doubt = found[1].mask_doubt
    return None if doubt is None else ItemDoubt(item.where, f"{item.mask_path}: {doubt}")


def examine(
    item: ItemFiles, config: DataSection, needs: Collection[str] = (), crop: MaskCrop | None = None
) -> tuple[Example, Reading] | ItemError:
    """The result of `read_item`, or why the item cannot be used."""
    try:
        return missing_of(item, config, needs) or read_item(item, config, crop)
    except (ImageProblem, DataError) as error:
        return ItemError(item.where, str(error))


def missing_of(item: ItemFiles, config: DataSection, needs: Collection[str]) -> ItemError | None:
    """The error of an item without a prompt, or without a file that the run needs."""
    if not item.prompt.strip():
        return ItemError(item.where, "the prompt is empty; give it a text")
    if not needs:
        return None
    if config.image_options.reference != "given" and item.source_path and item.mask_path:
        needs = set(needs) - {"reference"}  # it is cut out of the image
    keys = {"source": "image_path"}  # of a manifest
    missing = [keys.get(name, f"{name}_path") for name in needs if getattr(item, f"{name}_path") is None]
    if missing:
        cut = "reference" in needs and item.source_path and item.mask_path and not item.reference_path
        remedy = "; data.reference=mask_box cuts the reference out of the image" if cut else ""
        return ItemError(item.where, f"{', '.join(sorted(missing))} missing, which the run needs{remedy}")
    return None


def read_item(item: ItemFiles, config: DataSection, crop: MaskCrop | None = None) -> tuple[Example, Reading]:
    """The example at its size in the data set, and how it was read.

    Args:
        crop: show a box around the mask if it chooses one, instead of the part that `data.fit` shows.

    Raises:
        ImageProblem: a file that is missing, unreadable or of the wrong size.
    """
    if item.embedding_path and not is_file(item.embedding_path):
        raise ImageProblem(f"{item.embedding_path}: no such file of embeddings")
    images, options = dict[str, Image.Image](), config.image_options
    for role in ("source", "reference", "target", "win", "lose") if config.has_images else ():
        path = getattr(item, f"{role}_path")
        if path:
            images[role] = to_rgb(open_image(path))
    mask, channel, doubt = None, None, None
    if item.mask_path and config.has_images:
        invert = item.inverts_mask(options)
        read = read_mask(open_image(item.mask_path), str(item.mask_path), invert=invert)
        mask, channel, doubt = read.mask, read.channel, read.doubt
    first = next((role for role in _SHAPING if role in images), None)
    height, width = shape = config.size_for(images[first].size if first else None)
    if first:
        shaping, its = images[first], _COMPARED.get(first, "source")
        masks = {"mask": mask} if mask is not None and first == "source" else {}
        for role, image in (masks | {role: image for role, image in images.items() if role in _COMPARED}).items():
            if image.size != shaping.size:
                raise ImageProblem(
                    f"{getattr(item, f'{role}_path')}: the {_COMPARED.get(role, role)} is {image.width} x "
                    f"{image.height}, its {its} {shaping.width} x {shaping.height}; both must have one size"
                )
    mask = _set_roles(item, images, mask, options)
    reading = Reading(channel, doubt, (0, 0, width, height))
    reference = images.pop("reference", None)
    if first:
        try:
            images, mask, reading = _fitted(images, mask, shape, config, crop, item, reading)
        except ImageProblem as error:  # an inverted mask fits nowhere
            raise ImageProblem(f"{error}; {doubt}" if doubt else str(error)) from None
    lines = _lines_shown(item, reading, (width, height)) if "lines" in item.metadata else ()
    strip = None
    if options.reference_strip is not None and "source" in images and reference is not None:
        strip = into_strip(reference, options.reference_strip, width, options.reference_strip_fit)
    return Example(
        item.id,
        item.prompt,
        mask=mask,
        reference=reference,
        metadata={**item.metadata, "lines": [line.json() for line in lines]} if lines else item.metadata,
        size=shape,
        strip=strip,
        embedding_path=item.embedding_path,
        more_images=tuple(_more_image(path, config, shape) for path in item.more_paths) if config.has_images else (),
        **images,
    ), reading


def _more_image(path: Path | PackedImage, config: DataSection, shape: Shape) -> Image.Image:
    """A further source image at the size of the example, fitted by `data.fit`."""
    image, (height, width) = to_rgb(open_image(path)), shape
    return resize(image, *fit_size(image.size, (width, height), config.image_options.fit, None))


def _set_roles(
    item: ItemFiles, images: dict[str, Image.Image], mask: Image.Image | None, options: ImageOptions
) -> Image.Image | None:
    """Add the target and the reference that are parts of other images -> the mask that is left to repaint.

    Args:
        images: by role, changed in place.
    """
    source, reference = images.get("source"), images.get("reference")
    # The order matters. A reference of full size that the format crops is a target as well, and is cropped before its
    # own mask applies; what `data.reference` cuts out is taken from the target that stands then.
    if item.target in ("auto", "source") and source is not None:
        images["target"] = source
    full_size = source is not None and reference is not None and reference.size == source.size
    if item.crops_reference and reference is not None and mask is not None and full_size:
        images |= {"target": reference} if item.target == "auto" else {}
        reference = images["reference"] = reference.crop(mask_box(mask))
    if reference is not None and item.reference_mask_path is not None and is_file(item.reference_mask_path):
        place = item.reference_mask_path
        other = read_mask(open_image(place), str(place), invert=options.invert_mask).mask
        if other.size == reference.size:
            images["reference"] = reference.crop(mask_box(other))
    shown = images.get("target", source)
    if mask is not None and shown is not None:
        if options.reference == "half_box":
            images["reference"], mask = _half(shown, mask, second=item.id % 2 == 1, name=str(item.mask_path))
        elif options.reference == "mask_box" and "reference" not in images:
            images["reference"] = shown.crop(mask_box(mask))
    return mask


def _fitted(
    images: dict[str, Image.Image],
    mask: Image.Image | None,
    shape: Shape,
    config: DataSection,
    crop: MaskCrop | None,
    item: ItemFiles,
    reading: Reading,
) -> tuple[dict[str, Image.Image], Image.Image | None, Reading]:
    """Images and mask of one size at the size of the example, and how they were read."""
    size = next(iter(images.values())).size
    height, width = shape
    own_shape = isinstance(config.resolution, Buckets)
    box = mask_box(mask) if mask is not None else None
    keep = _lines_box(item, size) if box is None else box
    scaled, window = fit_size(size, (width, height), config.image_options.fit, keep, squeezes=own_shape)
    # A crop around the mask (`crop`) replaces what `data.fit` shows. Both are described as the part of the source
    # (`area`) and as scale and offset of its points: lines and the paste of a sample are placed by these.
    scale, offset = (scaled[0] / size[0], scaled[1] / size[1]), (float(window[0]), float(window[1]))
    x, y = size[0] / scaled[0], size[1] / scaled[1]
    area = round(window[0] * x), round(window[1] * y), round(window[2] * x), round(window[3] * y)
    uncropped = 0 if mask is None else round(mask_area(mask) * scaled[0] * scaled[1] / (mask.width * mask.height))
    cropped = None if crop is None or box is None else crop.box(size, (width, height), box)
    if cropped is not None:
        images = {role: image.crop(cropped) for role, image in images.items()}
        mask = None if mask is None else mask.crop(cropped)
        area, scaled, window = cropped, (width, height), (0, 0, width, height)
        scale = width / (cropped[2] - cropped[0]), height / (cropped[3] - cropped[1])
        offset = cropped[0] * scale[0], cropped[1] * scale[1]
    images = {role: resize(image, scaled, window) for role, image in images.items()}
    reading = replace(
        reading, box=area, cropped=cropped is not None, uncropped_mask_pixels=uncropped, scale=scale, offset=offset
    )
    if mask is None:
        return images, None, reading
    whole = mask_area(mask.resize(scaled, Image.Resampling.BOX))
    mask = resize(mask, scaled, window)
    kept = mask_area(mask)
    problem = None
    if kept == 0:
        problem = f"the masked area vanishes at {width} x {height}; raise data.resolution"
    elif kept < KEPT_SHARE * whole:
        problem = (
            f"cropping to {width} x {height} cuts off {1 - kept / whole:.0%} of the masked area; set data.fit=stretch "
            f"or {'a larger data.resolution.max_aspect' if own_shape else 'another data.resolution'}"
        )
    elif kept == width * height:
        problem = f"the mask covers all of the {width} x {height} crop; set data.fit=stretch"
    if problem:
        raise ImageProblem(f"{item.mask_path}: {problem}")
    return images, mask, replace(reading, mask_pixels=kept)


def _lines_of(item: ItemFiles) -> tuple[TextLine, ...]:
    """The lines of an item, in pixels of its source."""
    try:
        return parse_lines(item.metadata["lines"]) if "lines" in item.metadata else ()
    except ValueError as error:
        raise DataError(f"lines: {error}") from None


def _lines_box(item: ItemFiles, size: tuple[int, int]) -> Box | None:
    """The box around all lines with a place, within a source of `size` (width, height); None without one."""
    bounds = [line.bounds for line in _lines_of(item) if line.bounds is not None]
    if not bounds:
        return None
    left, top, right, bottom = zip(*bounds, strict=True)
    box = math.floor(min(left)), math.floor(min(top)), math.ceil(max(right)), math.ceil(max(bottom))
    return max(0, box[0]), max(0, box[1]), min(size[0], box[2]), min(size[1], box[3])


def _lines_shown(item: ItemFiles, reading: Reading, size: tuple[int, int]) -> tuple[TextLine, ...]:
    """The lines of an item, in pixels of its example, which must hold them."""
    lines = placed(_lines_of(item), reading.scale, reading.offset)
    for line in lines:
        inside = share_inside(line, size)
        if inside < KEPT_SHARE:
            raise ImageProblem(
                f"line {line.text!r}: {1 - inside:.0%} of its place lies outside the {size[0]} x {size[1]} pixels of "
                "the example; set data.fit=stretch or another data.resolution, or mend its polygon"
            )
    return lines


def _half(shown: Image.Image, mask: Image.Image, *, second: bool, name: str) -> tuple[Image.Image, Image.Image]:
    """One half of the mask's box as the reference, and the mask with the other half alone."""
    seen, written = halves(mask_box(mask))[:: -1 if second else 1]
    rest = Image.new("L", mask.size, 0)
    rest.paste(mask.crop(written), written[:2])
    if not mask_area(rest):
        raise ImageProblem(f"{name}: one half of the mask's box holds no masked pixel; set data.reference=mask_box")
    return shown.crop(seen), rest


def mask_area(mask: Image.Image) -> int:
    """Masked pixels."""
    return int(sum(mask.histogram()[128:]))
