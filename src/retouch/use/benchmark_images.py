"""Sample the outputs of a benchmark that are missing, under their official names."""

from __future__ import annotations

import itertools
import json
import logging
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, cast

import numpy as np
from PIL import Image

from retouch.benchmarks.base import Benchmark
from retouch.benchmarks.outputs import Output, Shard, image_key, own
from retouch.config import ConfigError, RunConfig
from retouch.data.base import DataSection, ImageSection
from retouch.data.buckets import Buckets
from retouch.data.dataset import Dataset, all_embedded, shapes_of
from retouch.data.identity import digest
from retouch.data.item import Reading, read_item
from retouch.data.sampler import derive_seed
from retouch.errors import ModelFilesError
from retouch.files import plain_json
from retouch.files.disk import expanded, locked, read_bounded, write_first, write_whole
from retouch.imaging.file_image import FileImage
from retouch.imaging.png import png_text, write_png
from retouch.imaging.reading import open_image, to_rgb

if TYPE_CHECKING:
    from retouch.families.base import Model
    from retouch.types import Condition, Example

logger = logging.getLogger(__name__)

_ITEM = "retouch item"
"""Name of the text of a sample that identifies its item."""

_MOST_RECORD = 1 << 24
"""Bytes of the record of a folder of images."""


def with_settings(config: RunConfig, benchmark: Benchmark) -> RunConfig:
    """The run file with the solver steps and the guidance scale of the benchmark file."""
    steps = benchmark.num_steps or config.evaluation.num_steps or config.rollout.num_steps
    rollout: dict[str, Any] = {"num_steps": steps}
    if benchmark.guidance_scale is not None:
        rollout["guidance_scale"] = benchmark.guidance_scale
    return config.model_copy(
        update={
            "rollout": config.rollout.model_copy(update=rollout),
            "evaluation": config.evaluation.model_copy(update={"num_steps": None}),
        }
    )


def as_trained(section: DataSection, benchmark: Benchmark, config: RunConfig) -> DataSection:
    """The section of the benchmark with what the model was trained with: the strip of references and, where the
    benchmark sets none, the size."""
    model = config.evaluation.data or config.data
    in_shapes = isinstance(model.resolution, Buckets) and section.has_images
    resolution = model.resolution if in_shapes else model.size_for(None)
    trained: dict[str, Any] = {} if benchmark.size else {"resolution": resolution}
    options = config.data.image_options
    if isinstance(section, ImageSection):
        trained |= {
            "reference_strip": options.reference_strip,
            "reference_strip_fit": options.reference_strip_fit,
        }
    return section.model_copy(update=trained)


def about_weights(config: RunConfig, folder: Path | None, benchmark: Benchmark, section: DataSection) -> dict[str, Any]:
    """Provenance of samples: the model, the weights with their hash, and how they are sampled."""
    shapes = section.resolution
    return {
        "model": config.model.model_dump(mode="json", exclude={"train"}),
        "files": _files_of(config.model),
        "folder": None if folder is None else str(folder),
        "sha256": {} if folder is None else _hashes(folder),
        "read": _read_of(config, section),
        "sampling": {
            "num_steps": config.rollout.num_steps,
            "guidance_scale": config.rollout.guidance_scale,
            "resolution": shapes.model_dump() if isinstance(shapes, Buckets) else list(section.size),
            "seed": benchmark.seed,
            "mixed_precision": config.training.mixed_precision,
        },
    }


def _files_of(model: Model) -> dict[str, str | None]:
    """The base by the content of its files: another one may take its path. None of those that are not here."""
    from retouch.families.embeddings import base_files

    try:
        return base_files(model)
    except ModelFilesError:  # it went away, which sampling reports
        return {}


def _read_of(config: RunConfig, section: DataSection) -> dict[str, Any]:
    """The keys of the run file that sampling reads beside model and settings: the trained weights, the adapter that
    training started from, which the base has too; the options of images; and those of a trained text encoder."""
    train = config.model.train
    found: dict[str, Any] = {
        "train": {
            "kind": train.kind,
            **train.model_dump(mode="json", exclude={"initial_adapter"}, exclude_defaults=True),
        },
        "images": asdict(section.image_options),
    }
    if (initial := getattr(train, "initial_adapter", None)) is not None:
        found["initial_adapter"] = _hashes(expanded(initial))
    if config.algorithm.trains_text_encoder:
        found["algorithm"] = config.algorithm.model_dump(mode="json", exclude_defaults=True)
    return found


def _hashes(place: Path) -> dict[str, str]:
    """Hashes of a file, or of the files in a folder, by name."""
    files = [place] if place.is_file() else sorted(place.glob("*"))
    return {file.name: digest(file) for file in files if file.is_file()}


def chunks_of(
    config: RunConfig, section: DataSection, outputs: Sequence[Output], shard: Shard, benchmark: Benchmark
) -> list[list[Output]]:
    """The outputs of a shard, in the chunks that are sampled together. It scores the same ones: no shard waits for the
    images of another."""
    size = benchmark.count if config.algorithm.trains_text_encoder else config.rollout.batch_size_per_device
    return own(outputs, shard, size, shapes_of([output.item for output in outputs], section))


def claim(folder: Path, about: Mapping[str, Any]) -> None:
    """Record where the images of a folder come from, with files of the base as soon as one process finds them here.
    What a folder has a record of may be given in parts.

    Raises:
        ConfigError: it holds images of other weights or settings, or images without a record.
    """
    record = folder.with_name(f"{folder.name}.json")
    folder.mkdir(parents=True, exist_ok=True)
    with locked(record):
        _record_or_compare(folder, record, about)


def _record_or_compare(folder: Path, record: Path, about: Mapping[str, Any]) -> None:
    filled = any(folder.iterdir())  # before the record of another process is looked for, which then precedes its images
    told = {name: value for name, value in about.items() if name != "folder"}  # a run directory may be moved
    if record.is_file() or not _recorded(record, told, folder, filled):
        try:
            before: object = plain_json.loads(read_bounded(record, _MOST_RECORD))
        except (OSError, ValueError):
            before = None
        if not isinstance(before, dict):
            raise ConfigError(f"--out: {record} is not the record of the images in {folder}; delete both")
        # what earlier versions did not record
        later = {name: told.get(name) for name in ("benchmark", "read", "files")}
        recorded = cast("dict[str, Any]", before)
        known, learned = {**later, **recorded}, dict[str, Any]()
        if isinstance(then := known.get("files"), dict) and isinstance(now := told.get("files"), dict):
            learned = {name: value for name, value in now.items() if value and not then.get(name)}
            both = [name for name, value in now.items() if value and then.get(name)]  # the others were not here
            known["files"], told["files"] = ({name: files[name] for name in both} for files in (then, now))
        if (difference := _difference({name: known.get(name) for name in told}, told)) is not None:
            raise ConfigError(
                f"--out: {folder} holds images of another {difference}; give another --out, or delete that folder and "
                "its .json"
            )
        if learned:  # the first process sampled with a base of the hub that it had yet to download
            write_whole(record, _text({**recorded, "files": {**recorded["files"], **learned}}))


def _difference(was: Mapping[str, Any], now: Mapping[str, Any]) -> str | None:
    """The first key that differs, with both values; None if none does. A key that one of them has not is null: another
    version of this package wrote it."""
    for key in {**was, **now}:
        before, after = was.get(key), now.get(key)
        if isinstance(before, dict) and isinstance(after, dict):
            inner = _difference(cast("dict[str, Any]", before), cast("dict[str, Any]", after))
            if inner is not None:
                return f"{key}.{inner}"
        elif before != after:
            return f"{key} ({str(before)[:80]}, now {str(after)[:80]})"
    return None


def _recorded(record: Path, told: Mapping[str, Any], folder: Path, filled: bool) -> bool:
    """Write the record -> whether this process did; another one may have come first."""
    if filled:
        raise ConfigError(f"--out: {folder} holds files, but {record} is missing, which names their weights; move them")
    return write_first(record, _text(told))


def _text(record: Mapping[str, Any]) -> str:
    return json.dumps(record, indent=2) + "\n"


def sample_outputs(
    config: RunConfig,
    weights: Mapping[str, Path | None],
    section: DataSection,
    outputs: Sequence[Output],
    folder: Path,
    shard: Shard,
    benchmark: Benchmark,
) -> None:
    """Write the outputs of a shard that are missing as PNG to FOLDER/WEIGHTS. An image depends on its item, its index
    and the seed alone.

    Args:
        config: see `with_settings`.
        weights: by the name of their folder; None is the base, which comes first.
    """
    chunks = chunks_of(config, section, outputs, shard, benchmark)
    missing = {
        name: [part for part in chunks if not all(_is_sampled(folder / name, output) for output in part)]
        for name in weights
    }
    if not any(missing.values()):
        return
    if config.algorithm.trains_text_encoder:
        _sample_completions(config, weights, section, missing, folder, benchmark)
        return
    from retouch.use.loaded import Loaded, for_items, free_memory

    free_memory()  # of the run before
    items = [output.item for output in outputs]
    loaded = Loaded(for_items(config, items, section), embedded=all_embedded(items))
    _claim_base(config, weights, folder)
    for name, weights_folder in weights.items():
        loaded.load(weights_folder)
        for done, (read, condition) in enumerate(_encoded(loaded, missing[name], section)):
            _sample_chunk(loaded, read, condition, section, folder / name, benchmark)
            if done % 10 == 9 or done + 1 == len(missing[name]):
                logger.info("%s: sampled %d of %d batches", name, done + 1, len(missing[name]))
    del loaded
    free_memory()


def _claim_base(config: RunConfig, weights: Iterable[str], folder: Path) -> None:
    """`claim` with the files of a base that were not here before it was loaded: it is now downloaded."""
    files = _files_of(config.model)
    for name in weights:
        claim(folder / name, {"files": files})


def _is_sampled(folder: Path, output: Output) -> bool:
    """Whether the image of an output is there.

    Raises:
        ConfigError: it is there, of another item under the same official name.
    """
    path = folder / output.own_file
    if not path.is_file():
        return False
    if png_text(path, _ITEM) not in (None, image_key(output.item)):
        raise ConfigError(
            f"--out: {path} was sampled for another item: other data have the same official names; give another --out, "
            f"or delete {folder}"
        )
    return True


class _Read(NamedTuple):
    """Outputs that are sampled together, with their examples and what was read of each image."""

    part: Sequence[Output]
    examples: list[Example]
    readings: list[Reading]


def _encoded(loaded: Any, parts: Sequence[Sequence[Output]], section: DataSection) -> Iterator[tuple[_Read, Condition]]:
    from retouch.observe import Stopwatch
    from retouch.rollout.encoded import encoded_ahead

    def read(part: Sequence[Output]) -> _Read:
        examples, readings = zip(*(read_item(output.item, section) for output in part), strict=True)
        return _Read(part, list(examples), list(readings))

    batches = ((one, one.examples) for one in map(read, parts))
    return encoded_ahead(loaded.model, batches, loaded.guidance_scale, Stopwatch())


def _sample_chunk(
    loaded: Any, read: _Read, condition: Condition, section: DataSection, folder: Path, benchmark: Benchmark
) -> None:
    """Sample a batch of outputs. It is sampled whole although some of its files may be there: rounding depends on the
    batch."""
    from retouch.use.sampling import draw

    seeds = [derive_seed("benchmark", benchmark.seed, o.item.id, o.index) for o in read.part]
    images = draw(loaded, read.examples, condition, seeds, loaded.config.rollout.num_steps)
    for output, image, reading in zip(read.part, images, read.readings, strict=True):
        placed = _placed(output, image, reading.box, section, benchmark)
        write_png(placed, folder / output.own_file, {_ITEM: image_key(output.item)})


def _placed(
    output: Output, image: Image.Image, box: tuple[int, int, int, int], section: DataSection, benchmark: Benchmark
) -> Image.Image:
    """A sample as it is saved: composited into its source, or at the size of a source that was stretched."""
    from retouch.use.sampling import into_source

    item = output.item
    if item.source_path is None:
        return image
    if item.mask_path is not None and benchmark.composites:
        source = FileImage(np.asarray(to_rgb(open_image(item.source_path))))  # scored as it is read: in sRGB
        return into_source(source, item, image, box, section, 0.0).image()
    if section.image_options.fit == "stretch":
        return image.resize(open_image(item.source_path).size, Image.Resampling.LANCZOS)
    return image


def _sample_completions(
    config: RunConfig,
    weights: Mapping[str, Path | None],
    section: DataSection,
    missing: Mapping[str, Sequence[Sequence[Output]]],
    folder: Path,
    benchmark: Benchmark,
) -> None:
    """Sample with a text encoder that writes its own completions; they are saved beside the images."""
    from retouch.algorithms.vlm_grpo.use import evaluated_dtype, sample_trained

    dtype = evaluated_dtype(config, weights.values())
    for name, weights_folder in weights.items():
        items = [part[0].item for part in missing[name]]
        if not items:
            continue
        counters = {item.id: itertools.count() for item in items}
        by_id = {item.id: item for item in items}

        def path_of(item: int, name: str = name, counters: Any = counters, by_id: Any = by_id) -> Path:
            file = benchmark.file_name(by_id[item], next(counters[item]))
            return (folder / name / file).with_suffix(".png")

        def about(item: int, by_id: Any = by_id) -> dict[str, str]:
            return {_ITEM: image_key(by_id[item])}

        data = Dataset(section, items)
        sample_trained(config, data, weights_folder, benchmark.seed, benchmark.count, None, path_of, about, dtype)
        _claim_base(config, [name], folder)
