"""Distances between the outputs of a benchmark and real images: features of both, then `observe.distances`."""

from __future__ import annotations

import logging
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np

from retouch.benchmarks.base import Benchmark, DistanceEntry
from retouch.benchmarks.outputs import SUFFIXES, Output, find_file
from retouch.data.identity import digest
from retouch.errors import ConfigError, ImageProblem, first_line
from retouch.files.disk import expanded, files_below
from retouch.files.hub import looks_local
from retouch.imaging.masks import Pixels
from retouch.imaging.reading import PackedImage, open_image, to_rgb
from retouch.observe.distances import DISTANCES, FEWEST_FOR_FID, Features, interval
from retouch.process.plain_text import count_of
from retouch.rewards.devices import own_device

logger = logging.getLogger(__name__)

Images = Mapping[Path | PackedImage, Hashable]
"""Real image -> the key of its item, or the image itself if it belongs to none."""

Extract = Callable[[Iterable[Pixels]], Features]

_BATCH = 16


def check_distances(benchmark: Benchmark, outputs: Sequence[Output]) -> None:
    """Compute the features of one real image for each distance, on the device of the scorers, before anything is
    sampled: what cannot be had is reported now and not after hours. No extractor stays in memory.

    Raises:
        ConfigError: no such extractor, one that cannot be used, or fewer than two real images.
    """
    for name, entry in benchmark.distances.items():
        where = f"distances.{name}"
        if len(real := _real(entry, outputs, where)) < 2:
            raise ConfigError(
                f"{where}.real: given {entry.real!r}, which has {count_of(len(real), 'image')} of this benchmark; give "
                "source, target, or a folder of 2 or more"
            )
        if entry.extractor == "encoder" and looks_local(entry.path) and not expanded(entry.path).is_dir():
            raise ConfigError(f"{where}.path: given {entry.path!r}; no such folder")
        if not _has_features(entry, where, real):
            first = next(iter(real))
            raise ConfigError(f"{where}.real: given {entry.real!r}, whose images cannot be read, {first} the first")


def _has_features(entry: DistanceEntry, where: str, real: Images) -> bool:
    """Whether an image can be read; of the first that can, the features are computed.

    Raises:
        ConfigError: no such extractor, or one that cannot be used.
    """
    from retouch.use.loaded import free_memory

    extract, _ = _extractor(entry, where, own_device())
    readable = (image for image in map(_read, real) if image is not None)
    found = extract(islice(readable, 1))
    del extract
    free_memory()  # else sampling and the scorers could not have it
    return len(found) > 0


def distances_of(
    benchmark: Benchmark,
    outputs: Sequence[Output],
    places: Mapping[str, Path],
    scored: Callable[[Sequence[tuple[Output, Path]]], Iterator[Pixels | None]],
) -> dict[str, dict[str, dict[str, Any]]]:
    """Column -> name of the distance -> its value, interval, numbers of images, and extractor.

    Args:
        scored: the images of outputs as they are scored; None for those that cannot be read.

    Raises:
        ConfigError: no such extractor, or fewer than two real images.
    """
    found: dict[str, dict[str, dict[str, Any]]] = {name: {} for name in places}
    for name, entry in benchmark.distances.items():
        where = f"distances.{name}"
        extract, extractor = _extractor(entry, where, own_device())
        real_images = _real(entry, outputs, where)
        real, of_real = _of_readable(extract, map(_read, real_images), real_images.values())
        for column, folder in places.items():
            there = [(output, path) for output in outputs if (path := find_file(folder, output.file)) is not None]
            features, examples = _of_readable(extract, scored(there), [output.key for output, _ in there])
            if min(len(features), len(real)) < 2:
                raise ConfigError(
                    f"{where}: {column} has {count_of(len(features), 'image')} and real has {len(real)}; give 2 or more"
                )
            distance = DISTANCES[entry.measure]
            told: dict[str, Any] = {
                "measure": entry.measure,
                "value": distance(features, real),
                "interval": interval(distance, features, real, entry.draws, examples, of_real) if entry.draws else None,
                "images": len(features),
                "real_images": len(real),
                "real": entry.real,
                "extractor": extractor,
            }
            if entry.measure == "fid" and min(len(features), len(real)) < FEWEST_FOR_FID:
                told["warning"] = f"FID of fewer than {FEWEST_FOR_FID} images is mostly bias; use cmmd or kid"
                logger.warning("%s: %s has %s: %s", where, column, count_of(len(features), "image"), told["warning"])
            found[column][name] = told
    return found


def _real(entry: DistanceEntry, outputs: Sequence[Output], where: str) -> Images:
    """The real images: a folder, or the sources or targets of the items, each once."""
    if entry.real in ("source", "target"):
        images = {getattr(output.item, f"{entry.real}_path"): output.key for output in outputs}
        return {image: key for image, key in images.items() if image is not None}
    folder = expanded(entry.real)
    if not folder.is_dir():
        raise ConfigError(f"{where}.real: given {entry.real!r}; expected source, target, or a folder of images")
    return {path: path for path in sorted(files_below(folder)) if path.suffix.lower() in SUFFIXES}


def _of_readable(
    extract: Extract, images: Iterable[Pixels | None], examples: Iterable[Hashable]
) -> tuple[Features, list[Hashable]]:
    """The features of the images that can be read, and the example of each."""
    kept = list[Hashable]()

    def readable() -> Iterator[Pixels]:
        for image, example in zip(images, examples, strict=True):
            if image is not None:
                kept.append(example)
                yield image

    return extract(readable()), kept


def _extractor(entry: DistanceEntry, where: str, device: str) -> tuple[Extract, str]:
    """A function from images to features [N, D], and its name with its revision."""
    if entry.extractor == "torchscript":
        return _torchscript(entry, where, device)
    from retouch.rewards.scorers.image_similarity import Encoder

    try:
        encoder = Encoder(entry.path, device)
    except ConfigError as error:
        raise ConfigError(f"{where}.{error}") from None

    return partial(_features, encoder, _BATCH), encoder.revision


def _torchscript(entry: DistanceEntry, where: str, device: str) -> tuple[Extract, str]:
    import torch

    file = expanded(entry.path)
    if not file.is_file():
        raise ConfigError(f"{where}.path: given {entry.path!r}; expected a TorchScript file")
    try:
        module: Any = torch.jit.load(str(file), map_location=device).eval()
    except RuntimeError as error:
        raise ConfigError(f"{where}.path: {file} is no TorchScript file: {first_line(error)}") from None
    options = {"return_features": True} if "return_features" in str(module.forward.schema) else {}

    @torch.inference_mode()
    def encode(batch: Sequence[Pixels]) -> Any:
        pixels = torch.from_numpy(np.array(batch)).permute(0, 3, 1, 2).to(device)
        try:
            return module(pixels, **options).flatten(1)
        except RuntimeError as error:
            raise ConfigError(f"{where}.path: {file} fails on [1, 3, H, W] uint8: {first_line(error)}") from None

    return partial(_features, encode, 1), f"{file.name} {digest(file)[:12]}"


def _features(encode: Callable[[Sequence[Pixels]], Any], size: int, images: Iterable[Pixels]) -> Features:
    """[N, D] of the images, `size` at a time."""
    left, parts = iter(images), list[Features]()
    while batch := list(islice(left, size)):
        parts.append(encode(batch).cpu().numpy().astype(np.float64))
    return np.concatenate(parts) if parts else np.zeros((0, 1))


def _read(image: Path | PackedImage) -> Pixels | None:
    """[H, W, 3] uint8; None for an image that cannot be read, which scorers report."""
    try:
        return np.asarray(to_rgb(open_image(image)))
    except ImageProblem as problem:
        logger.warning("%s; left out of the distances", problem)
        return None
