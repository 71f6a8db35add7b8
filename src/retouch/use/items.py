"""The images to sample or evaluate on, read as the run reads its own. No torch."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal, get_args

from PIL import Image

from retouch.config import ConfigError, RunConfig
from retouch.config.base import MOST_IMAGES, MOST_STEPS
from retouch.config.errors import nearest
from retouch.config.needs import needed_pictures, takes_references
from retouch.data.base import FOLDERS, DataError, DataSection, ItemError, ItemFiles, ProtocolData
from retouch.data.dataset import Dataset, in_place, load_dataset
from retouch.data.discover import data_at
from retouch.data.formats.calligrapher import DEFAULT_TEMPLATE
from retouch.data.formats.manifest import ManifestData
from retouch.data.formats.prompts import PromptsData
from retouch.data.item import check_item
from retouch.data.rules import require_more_images
from retouch.families.prompts import PromptCheck, require_read
from retouch.files.disk import on_disk
from retouch.imaging.fitting import FITS, MaskCrop
from retouch.imaging.masks import Box, mask_box
from retouch.imaging.reading import PackedImage, open_image, packed, to_rgb
from retouch.use.regions import ImageFile, boxes_mask, masks_of, template_prompt, text_metadata, united

logger = logging.getLogger(__name__)

_WIDEST_EDGE = 1000
"""Pixels of a soft edge."""

Crop = Literal["auto", "mask", "none"]


@dataclass(frozen=True)
class SampleRequest:
    """A dataset or one image to sample on, and how. Images are files, or PIL images in memory.

    Attributes:
        masks: white = repaint; several are united; in a dataset every item has its own.
        texts: target texts; with several boxes or masks each has the place of the same number.
        prompt: the whole prompt, instead of the run's template with `texts`.
        more_images: source images beside `image`, for a model that reads several.
        reference: style reference, instead of the items' own; for a run that trained a style adapter.
        size: (height, width) to sample at; None: the run's.
        fit: as `data.fit`, for images that are not cropped around the mask; None: the run's.
        feather: radius in pixels of a soft edge inside the mask.
        boxes: (left, top, right, bottom) in pixels to repaint, instead of masks.
        invert_mask: as `data.invert_mask`; None: the run's.
        crop: part of a masked source passed to the model. "auto": in sources with more pixels than the model's
            size, a box around the mask with at least as many; the whole image with an explicit `fit`, `for_votes` and
            for editing models. "mask": always a box around the mask, enlarged if it is smaller. "none": what `fit`
            shows.
        context: margin of that box on each side, as a share of the mask box's longer side.
        for_votes: list the samples in samples.jsonl of their folder, which other runs may have begun.
    """

    data: Path | None = None
    image: Path | Image.Image | None = None
    masks: tuple[Path | Image.Image, ...] = ()
    texts: tuple[str, ...] = ()
    prompt: str | None = None
    reference: Path | Image.Image | None = None
    seed: int = 0
    count: int = 1
    steps: int | None = None
    size: tuple[int, int] | None = None
    fit: str | None = None
    feather: float = 0.0
    boxes: tuple[Box, ...] = ()
    invert_mask: bool | None = None
    crop: str = "auto"
    context: float = 0.25
    more_images: tuple[Path | Image.Image, ...] = ()
    for_votes: bool = False


def mask_crop(config: RunConfig, request: SampleRequest) -> MaskCrop | None:
    """How sources are cropped around their masks; None: not at all."""
    whole = request.fit is not None or request.for_votes or config.model.spec.edits
    if request.crop == "none" or (request.crop == "auto" and whole):
        return None
    return MaskCrop(request.context, enlarge=request.crop == "mask")


def items_to_sample(config: RunConfig, request: SampleRequest) -> tuple[DataSection, list[ItemFiles]]:
    """The checked items of a request, and the data section to read them by.

    Raises:
        ConfigError: options that are unknown, missing or exclude each other.
        DataError, ImageProblem: a broken image or mask, a box outside the image, or more broken items than the run
            allows.
    """
    require_options(config, request)
    given = {"resolution": request.size, "fit": request.fit, "invert_mask": request.invert_mask}
    update = {name: value for name, value in given.items() if value is not None}
    if request.data is not None:
        section = like(config, request.data).model_copy(update=update)
        try:
            return section, examples_of(config, section, "--data", request.reference, scored=False).items
        except DataError as error:
            raise DataError(_with_options(str(error))) from None
    if _prompt_alone(config, request):
        prompts = PromptsData(path="").model_copy(update=_shared(config.data, PromptsData) | update)
        item = _one_prompt(config, request)
        require_read(config, prompts, item)
        return prompts, [item]
    section = ManifestData(path="").model_copy(
        update=_shared(config.data, ManifestData) | {"reference": "given"} | update
    )
    item = _one_item(config, request, section.invert_mask)
    problem = check_item(
        item, section, needed_pictures(config, training=False, scored=False), mask_crop(config, request)
    )
    if isinstance(problem, ItemError):
        raise DataError(_with_options(in_place(problem.problem, "--mask")))
    if problem is not None:
        logger.warning("%s", in_place(problem.doubt, "--mask"))
    require_read(config, section, item)
    return section, [item]


def require_options(config: RunConfig, request: SampleRequest) -> None:
    """Refuse options that are unknown, missing or exclude each other, before any file is read.

    Raises:
        ConfigError: naming the option.
    """
    # Three ways to name what to sample: a data set, one image, or for text to image a prompt alone. Each has options of
    # its own; those of another way are an error, because they would be ignored.
    prompt_alone = _prompt_alone(config, request)
    if prompt_alone and not request.texts and request.prompt is None:
        raise ConfigError("give either --data, or --prompt (or --text)")
    if not prompt_alone and (request.data is None) == (request.image is None):
        raise ConfigError("give either --data, or --image with --mask (or --box) and --text (or --prompt)")
    require_count("--count", request.count, MOST_IMAGES)
    require_count("--steps", request.steps, MOST_STEPS)
    if request.fit not in (None, *FITS):
        raise ConfigError(f"--fit: given {request.fit!r}; {nearest(request.fit, FITS)}")
    _check_crop(config, request)
    if request.size is not None:
        require_multiples(request.size, config.model.size_multiple, config.model.family)
    for option, text in (("--prompt", request.prompt), *(("--text", text) for text in request.texts)):
        require_utf_8(option, text or "")
    _takes_references(config, request.reference, scored=False)
    if request.data is not None:
        own = {"masks": "mask", "boxes": "box", "texts": "text", "prompt": "prompt", "more_images": "more-image"}
        if named := [option for name, option in own.items() if getattr(request, name) not in (None, ())]:
            raise ConfigError(f"--{named[0]}: given with --data, whose items have their own masks and prompts; omit it")
        return
    if request.texts and request.prompt is not None:
        raise ConfigError("--text: given beside --prompt, which is the whole prompt; leave one of them out")
    if prompt_alone:
        given = {"mask": request.masks, "box": request.boxes, "more-image": request.more_images}
        if masked := [option for option, value in given.items() if value]:
            raise ConfigError(
                f"--{masked[0]}: given, but {config.model.family} generates whole images from prompts; omit it"
            )
    else:
        _check_one_image(config, request)
    if takes_references(config, scored=False) and request.reference is None:
        raise ConfigError(
            "--image needs --reference: the run trained with references (a style adapter, model.reference_images or "
            "data.reference_strip)"
        )


def _prompt_alone(config: RunConfig, request: SampleRequest) -> bool:
    return not takes_source(config) and request.data is None and request.image is None


def _with_options(message: str) -> str:
    """A message about an item, with the options of `retouch sample` in place of keys."""
    return message.replace("data.fit=stretch", "--fit stretch").replace("data.resolution", "--resolution")


def require_count(option: str, count: int | None, most: int) -> None:
    """Raises: ConfigError: a count of a program that the command line would not take; None: not given."""
    if count is not None and not 1 <= count <= most:
        raise ConfigError(f"{option}: given {count}; expected 1 to {most}")


def require_multiples(size: tuple[int, int], multiple: int, family: str) -> None:
    """Raises: ConfigError: a size that a model of a family cannot generate."""
    if any(side < 1 or side % multiple for side in size):
        near = "x".join(str(max(multiple, round(side / multiple) * multiple)) for side in size)
        raise ConfigError(f"resolution: given {size[0]}x{size[1]}; {family} needs multiples of {multiple}; set {near}")


def require_utf_8(option: str, text: str) -> None:
    """Raises: ConfigError: a text of a terminal with bytes that are not UTF-8, which no text encoder can read."""
    if not text.isascii() and any("\ud800" <= character <= "\udfff" for character in text):
        raise ConfigError(f"{option}: given {text[:80]!r}, which is not UTF-8; write it in UTF-8")


def takes_source(config: RunConfig) -> bool:
    """Whether the model of a run reads a source image; others generate from prompts."""
    return "source" in config.model.needs or config.model.spec.edits


def _one_prompt(config: RunConfig, request: SampleRequest) -> ItemFiles:
    """The prompt of a request without an image."""
    return ItemFiles(0, _prompt_of(config, request), reference_path=_file(request.reference, "reference"))


def _one_item(config: RunConfig, request: SampleRequest, invert: bool) -> ItemFiles:
    """The image of a request with its mask and prompt."""
    reference = _file(request.reference, "reference")
    source = _file(request.image, "image")
    assert source is not None  # `items_to_sample`
    mask, places = _region(source, request, invert)
    more = tuple(file for image in request.more_images if (file := _file(image, "more-image")) is not None)
    told = text_metadata(request.texts, places)
    is_made, prompt = bool(request.boxes) or len(request.masks) > 1, _prompt_of(config, request)
    item = ItemFiles(0, prompt, source, mask, reference, metadata=told, more_paths=more, mask_is_made=is_made)
    require_more_images(config, "--more-image", [item])
    return item


def _prompt_of(config: RunConfig, request: SampleRequest) -> str:
    template = getattr(config.data, "prompt_template", DEFAULT_TEMPLATE)
    return request.prompt if request.prompt is not None else template_prompt(template, request.texts)


def _check_one_image(config: RunConfig, request: SampleRequest) -> None:
    edits = config.model.edits_whole_images
    if request.masks and request.boxes:
        raise ConfigError("--box: given beside --mask; leave one of them out")
    unmasked = not request.masks and not request.boxes
    if (unmasked and not edits) or (not request.texts and request.prompt is None):
        raise ConfigError(f"--image needs {'' if edits else '--mask (or --box) and '}--text (or --prompt)")
    if unmasked and request.crop == "mask":
        raise ConfigError("--crop: given mask, but there is no mask; set --mask or --box, or leave --crop out")
    if not all(text.strip() for text in request.texts):
        raise ConfigError("--text: given an empty text; give the text to write into the mask")


def _region(source: ImageFile, request: SampleRequest, invert: bool) -> tuple[ImageFile | None, Sequence[Box]]:
    """The mask of a request, and the place of each of several regions."""
    files = [file for given in request.masks if (file := _file(given, "mask")) is not None]
    if request.boxes:
        return packed(boxes_mask(request.boxes, open_image(source).size), "--box"), request.boxes
    if len(files) < 2:
        return next(iter(files), None), ()
    masks = masks_of(files, open_image(source).size, invert)
    return packed(united(masks), "--mask"), [mask_box(mask) for mask in masks]


def _check_crop(config: RunConfig, request: SampleRequest) -> None:
    allowed = get_args(Crop)
    if request.crop not in allowed:
        raise ConfigError(f"--crop: given {request.crop!r}; {nearest(request.crop, allowed)}")
    if request.crop == "mask" and request.for_votes:
        raise ConfigError(
            "--crop: given mask, but --for-votes lists images to train on, and training passes whole images to the "
            "model; leave --crop out, or vote on crops in a folder sampled without --for-votes"
        )
    if request.crop == "mask" and config.algorithm.trains_text_encoder:
        raise ConfigError("--crop: given mask, but a vlm_grpo run generates whole images; leave --crop out")
    if not 0 <= request.feather <= _WIDEST_EDGE:
        raise ConfigError(f"--feather: given {request.feather:g}; expected 0 to {_WIDEST_EDGE} pixels")
    if not request.context >= 0:
        raise ConfigError(
            f"--context: given {request.context:g}; expected a share of 0 or more; set 0.25 (the default)"
        )


def _file(image: Path | Image.Image | None, name: str) -> Path | PackedImage | None:
    if isinstance(image, Image.Image):
        return packed(image, name)
    return None if image is None else on_disk(image)


def examples_of(
    config: RunConfig, section: Any, purpose: str, reference: Path | Image.Image | None, *, scored: bool
) -> Dataset:
    """The usable examples of a section, all with `reference` if it is given.

    Raises:
        ConfigError: a reference that the run cannot take.
        DataError: more broken items than the section allows, or a broken reference.
    """
    _takes_references(config, reference, scored=scored)
    needs = needed_pictures(config, training=False, scored=scored)
    load = partial(load_dataset, check_prompts=PromptCheck(config))
    if reference is None:
        found = load(section, purpose, needs).each_once
        require_more_images(config, purpose, found.items)
        return found
    file = _file(reference, "reference")
    assert file is not None
    to_rgb(open_image(file))  # one message, not one for each item
    found = load(section, purpose, needs - {"reference"}).each_once
    require_more_images(config, purpose, found.items)
    return Dataset(section, [replace(item, reference_path=file) for item in found.items])


def like(config: RunConfig, path: Path) -> Any:
    """A data section for `path` with the options of the run's evaluation data (or training data)."""
    model = config.evaluation.data or config.data
    if isinstance(model, ProtocolData):  # a path alone does not identify these formats
        return model.model_copy(update={"path": str(path), "limit": None, "part": "all", "curriculum": 1})
    section = data_at(path, config.data.size)
    same = _shared(model, type(section))
    same |= {"reference": "mask_box"} if same.get("reference") == "half_box" else {}  # half boxes are for training
    return section.model_copy(update={k: v for k, v in same.items() if k not in ("format", "limit")})


def make_folder(out: Path) -> None:
    """Create the output folder.

    Raises:
        ConfigError: a file has that name, or it cannot be made there.
    """
    if out.exists() and not out.is_dir():
        raise ConfigError(f"--out: given {out}, which is a file; give a folder")
    try:
        out.mkdir(parents=True, exist_ok=True)
    except FileNotFoundError:  # in a file system that makes no folders, like /proc
        raise ConfigError(f"--out: given {out}, which cannot be made; give another folder") from None


def _takes_references(config: RunConfig, reference: Path | Image.Image | None, *, scored: bool) -> None:
    if reference is not None and not takes_references(config, scored=scored):
        unjudged = ", and no reward does" if scored else ""
        raise ConfigError(
            f"--reference: given {reference}, but the run trained {config.model.train.kind} weights, which take no "
            f"reference{unjudged}; leave it out"
        )


def _shared(model: DataSection, kind: type[DataSection]) -> dict[str, Any]:
    """The options of a section that another format has too."""
    return {
        name: getattr(model, name)
        for name in kind.model_fields
        if name not in ("path", "format", "limit", "list_file", *FOLDERS) and hasattr(model, name)
    }
