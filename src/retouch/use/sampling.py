"""Sample images with trained weights."""

from __future__ import annotations

import hashlib
import itertools
import json
import logging
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from retouch.algorithms.vlm_grpo.use import sample_trained
from retouch.config import RunConfig
from retouch.data.base import DataSection, ItemFiles
from retouch.data.dataset import Dataset, all_embedded
from retouch.data.identity import content_of, files_of
from retouch.data.item import Reading, read_item
from retouch.data.sampler import derive_seed
from retouch.errors import ConfigError
from retouch.files.complete import COMPLETE
from retouch.files.disk import real_place
from retouch.imaging.file_image import FileImage, read_file_image
from retouch.imaging.masks import Box, Pixels, mask_weights, read_mask
from retouch.imaging.png import write_new_png
from retouch.imaging.reading import open_image, to_rgb
from retouch.observe import Stopwatch
from retouch.rollout.encoded import encoded_ahead
from retouch.rollout.plan import ode_plan
from retouch.rollout.sampler import broken_rows, require_drawn, sample, to_uint8
from retouch.taste.images import SAMPLES
from retouch.types import Condition, Example
from retouch.use.items import SampleRequest, make_folder, mask_crop, require_multiples
from retouch.use.loaded import Loaded, for_items
from retouch.use.trained import Trained

logger = logging.getLogger(__name__)

_LEAST_SHOWN = 0.5
"""Share of the sample in the middle of a soft edge, below which there is a warning."""


def sample_to_folder(
    trained: Trained,
    request: SampleRequest,
    chosen: tuple[DataSection, list[ItemFiles]],
    out: Path,
    load: Callable[..., Loaded] = Loaded,
) -> list[Path]:
    """Write samples as PNGs with the size and name of their sources -> their paths. Pixels outside the mask stay, and
    no file is overwritten.

    Args:
        chosen: `items_to_sample` of the request.
        load: returns the model of the run, with the arguments of `Loaded`; not called for vlm_grpo.
    """
    section, items = chosen
    make_folder(out)
    free = free_paths(items, out, request.count)
    if trained.config.algorithm.trains_text_encoder:
        if request.for_votes:
            raise ConfigError("--for-votes: this run has trained a text encoder; label the folder of its samples")
        data = Dataset(section, items)
        return sample_trained(trained.config, data, trained.newest, request.seed, request.count, request.steps, free)
    loaded = load(for_items(trained.config, items, section), embedded=all_embedded(items))
    for size in section.sizes:
        require_multiples(size, loaded.model.spec.size_multiple, loaded.model.spec.family)
    loaded.load(trained.newest)
    written: list[Path] = []
    for item, images in generated(loaded, items, section, request):
        inputs = inputs_for_votes(out, item, section) if request.for_votes else {}
        for number, image in enumerate(images):
            written.append(write_new_png(image, partial(free, item.id)))
            if request.for_votes:
                seed = derive_seed("sample", request.seed, item.id, number)
                list_for_votes(out, written[-1], item, inputs, trained, seed)
    return written


def inputs_for_votes(out: Path, item: ItemFiles, section: DataSection) -> dict[str, str]:
    """Paths of the source and the mask of an item's samples, of their size, the mask white where to repaint. Those that
    are no such files are written below `out`."""
    found, inverted = dict[str, Any](), item.inverts_mask(section.image_options)
    if item.source_path is not None:
        found["source"] = item.source_path
        if item.mask_path is None:  # samples have the size of the model, not of the source
            found["source"] = read_item(item, section)[0].source
        elif not isinstance(item.source_path, Path):
            found["source"] = to_rgb(open_image(item.source_path))
    if item.mask_path is not None:
        found["mask"] = item.mask_path
        if inverted or not isinstance(item.mask_path, Path):
            found["mask"] = read_mask(open_image(item.mask_path), str(item.mask_path), invert=inverted).mask
    for name, image in found.items():
        if isinstance(image, Image.Image):
            digest = hashlib.sha256(f"{image.size}".encode() + image.tobytes()).hexdigest()[:12]
            found[name] = out / "inputs" / f"{digest}-{name}.png"
            found[name].parent.mkdir(exist_ok=True)
            image.save(found[name])
    copied = item.source_path is not None and found["source"] != item.source_path
    told = {"original": content_of(item.source_path)} if copied else {}
    return {name: str(path.resolve()) for name, path in found.items()} | told


def list_for_votes(
    out: Path, image: Path, item: ItemFiles, inputs: dict[str, str], trained: Trained, seed: int
) -> None:
    """Append a sample to the list of `retouch label`. The images of one item are one example, by whatever weights. An
    item of another prompt, source or mask is another one, even of the same id: that of a single image is 0."""
    files = {role: str(f.resolve()) if isinstance(f, Path) else f.digest for role, f in files_of(item).items()}
    told = json.dumps([item.prompt, item.metadata.get("text"), files], sort_keys=True)
    weights = "base" if trained.newest is None else f"{trained.config.name} {weights_name(trained.newest)}"
    entry: dict[str, Any] = {
        "image": image.name,
        "example": f"{item.id}-{hashlib.sha256(told.encode()).hexdigest()[:8]}",
        "prompt": item.prompt,
        "text": item.metadata.get("text"),
        **inputs,
        "seed": seed,
        "weights": weights,
    }
    with (out / SAMPLES).open("a", encoding="utf-8") as file:
        file.write(json.dumps(entry, ensure_ascii=False) + "\n")


def weights_name(folder: Path) -> str:
    """A checkpoint's name and what identifies its content, as its record of files has it."""
    place = real_place(folder)
    record = place.parent / COMPLETE
    digest = hashlib.sha256(record.read_bytes()).hexdigest()[:12] if record.is_file() else "unrecorded"
    return f"{place.parent.name}/{place.name} {digest}"


def free_paths(items: Sequence[ItemFiles], out: Path, count: int) -> Callable[[int], Path]:
    """A function from the id of an item to the path of its next image, named after its source (or its id):
    `photo.png`, or `photo-0.png`, `photo-1.png` where `count` > 1. Existing files are skipped."""
    stems = {item.id: item.source_path.stem for item in items if isinstance(item.source_path, Path)}
    shared = {stem for stem, times in Counter(stems.values()).items() if times > 1}

    def free(item: int) -> Path:
        stem = stems.get(item, "")
        name = f"{stem}-{item:05d}" if stem in shared else stem or f"{item:05d}"
        numbered = (out / f"{name}-{k}.png" for k in itertools.count(0 if count > 1 else 1))
        names = numbered if count > 1 else itertools.chain([out / f"{name}.png"], numbered)
        return next(path for path in names if not path.exists())

    return free


def generate(loaded: Loaded, item: ItemFiles, section: DataSection, request: SampleRequest) -> list[FileImage]:
    """Generate `request.count` samples of an item with the loaded weights, composited into its source."""
    [(_, images)] = generated(loaded, [item], section, request)
    return images


def generated(
    loaded: Loaded, items: Iterable[ItemFiles], section: DataSection, request: SampleRequest
) -> Iterator[tuple[ItemFiles, list[FileImage]]]:
    """Each item with its samples, see `generate`."""
    read = ((item, *_read(loaded.config, item, section, request)) for item in items)
    batches = (((item, example, reading.box), [example]) for item, example, reading in read)
    clock = Stopwatch()
    for (item, example, box), condition in encoded_ahead(loaded.model, batches, loaded.guidance_scale, clock):
        yield item, _samples(loaded, item, section, request, example, box, condition)


def _read(config: RunConfig, item: ItemFiles, section: DataSection, request: SampleRequest) -> tuple[Example, Reading]:
    example, reading = read_item(item, section, mask_crop(config, request))
    if reading.cropped:
        _report(item, reading, example.shape or section.size)
    elif request.crop == "mask":
        logger.info("%s: no crop, because a box around the mask would be the whole image", item.source_path)
    return example, reading


def _samples(
    loaded: Loaded,
    item: ItemFiles,
    section: DataSection,
    request: SampleRequest,
    example: Example,
    box: Box,
    condition: Condition,
) -> list[FileImage]:
    """The samples of an item that was read and encoded."""
    steps = request.steps or loaded.config.evaluation.num_steps or loaded.config.rollout.num_steps
    source = read_file_image(item.source_path) if item.source_path and item.mask_path else None
    if source is not None:
        _warn_of_feather(item, section, request.feather)
    images: list[FileImage] = []
    for k in range(request.count):
        seed = derive_seed("sample", request.seed, example.id, k)
        [image] = draw(loaded, [example], condition, [seed], steps)
        images.append(
            FileImage(np.asarray(image))
            if source is None
            else into_source(source, item, image, box, section, request.feather)
        )
    return images


def draw(
    loaded: Loaded, examples: Sequence[Example], condition: Condition, seeds: Sequence[int], steps: int
) -> list[Image.Image]:
    """One sample of each example of a batch, at the size of the examples.

    Args:
        condition: of the examples.
    """
    plan = ode_plan(loaded.model.schedule(steps, condition.size))
    decoded = loaded.model.decode(sample(loaded.model, loaded.network, plan, condition, list(seeds)).final)
    broken = broken_rows(decoded)
    require_drawn(broken, examples[broken[0] if broken else 0].id)
    images = to_uint8(decoded, examples[0].strip)
    return [Image.fromarray(image) for image in images.numpy()]


def into_source(
    source: FileImage, item: ItemFiles, image: Image.Image, box: Box, section: DataSection, feather: float
) -> FileImage:
    """Composite a generated image into the `box` of the source of an item, inside the item's mask only."""
    scaled = image.resize((box[2] - box[0], box[3] - box[1]), Image.Resampling.LANCZOS)
    return source.composite(scaled, box, _mask_of(item, section), feather)


def _mask_of(item: ItemFiles, section: DataSection) -> Pixels:
    """[H, W] of the whole source, white where to repaint."""
    assert item.mask_path is not None
    invert = item.inverts_mask(section.image_options)
    return np.asarray(read_mask(open_image(item.mask_path), str(item.mask_path), invert=invert).mask)


def _warn_of_feather(item: ItemFiles, section: DataSection, feather: float) -> None:
    """Warn of a soft edge that is wider than the masked region: the sample would hardly show, or not at all."""
    if feather and (most := mask_weights(_mask_of(item, section), feather).max()) < _LEAST_SHOWN:
        logger.warning(
            "--feather: given %g, but the masked region of %s is so narrow that at most %.0f %% of the sample shows; "
            "set less",
            feather,
            item.source_path,
            100 * most,
        )


def _report(item: ItemFiles, reading: Reading, size: tuple[int, int]) -> None:
    """Log the effective resolution of the mask with the crop and without."""
    left, top, right, bottom = reading.box
    logger.info(
        "%s: the model receives %d x %d pixels around the mask at %d x %d: %d effective pixels in the mask (%d without "
        "the crop, --crop none)",
        item.source_path,
        right - left,
        bottom - top,
        size[1],
        size[0],
        reading.mask_pixels,
        reading.uncropped_mask_pixels,
    )
