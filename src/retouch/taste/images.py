"""The images to vote on: of a run's evaluations, of a folder, or of a list."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from retouch.config import load_run
from retouch.data.base import DataError, DataSection, ItemFiles
from retouch.data.dataset import load_dataset
from retouch.data.discover import CAPTIONS, MASKS
from retouch.data.identity import content_of
from retouch.data.item import read_item
from retouch.data.lists import SUFFIXES, entries_of, read_text, suffix_of
from retouch.errors import ConfigError, ImageProblem
from retouch.files.disk import is_file
from retouch.imaging.reading import image_size, open_image
from retouch.observe.kept import images_of, kept_rows, steps_kept
from retouch.observe.run_dir import read_metrics
from retouch.taste.votes import VotedImage, image_digest

_ENDINGS = (".png", ".jpg", ".jpeg", ".webp")
_NUMBER = re.compile(r"-\d+$")
"""End of the name of a sample of `retouch sample --count`: photo-0.png, photo-1.png."""

_MASK = re.compile(rf"(.+)[_.-](?:{'|'.join(MASKS)})", re.IGNORECASE)
"""Name of a mask beside its image: photo_mask.png."""

SAMPLES = "samples.jsonl"
"""The list that `retouch sample --for-votes` writes into the folder of its images."""

_TEXTS = ("prompt", "text", "weights", "original")


def images_to_vote_on(path: Path, beside: Path, *, trust: bool = False) -> list[VotedImage]:
    """The images of a run directory, a folder or a list, without copies and without those that cannot be read.

    A list is a JSON, JSONL or CSV file of `{"image", "example"?, "prompt"?, "text"?, "source"?, "mask"?, "seed"?,
    "weights"?, "original"?}`, as `retouch sample --for-votes` writes it into a folder, which is then read by its list.
    In another folder with subfolders, images of the same name are of one example, one of each subfolder; else those
    whose names differ by a number at the end. `photo_mask.png` and `photo.txt` beside `photo.png` are its mask and its
    prompt.

    Args:
        beside: folder of the votes; sources and masks of a run are written below it.
        trust: use the code and hosts that the run file of a run directory names.

    Raises:
        DataError: nothing to vote on.
    """
    of_run = is_run(path)
    path = path / SAMPLES if (path / SAMPLES).is_file() else path
    if of_run:
        found = _of_run(path, beside, trust)
    elif path.is_dir():
        found = _of_folder(path)
    elif path.is_file() and suffix_of(path) in SUFFIXES:
        found = _of_list(path)
    else:
        raise DataError(f"{path}: expected a run directory, a folder of images, or a list ({', '.join(SUFFIXES)})")
    unique = {image.key: image for image in found}
    if not unique:
        raise DataError(f"{path}: no images to vote on")
    return [*unique.values()]


def is_run(path: Path) -> bool:
    """Whether the images there are those of a run's evaluations; a folder with a list is read by its list."""
    return (path / "config.yaml").is_file() and not (path / SAMPLES).is_file()


def voted_image(image: Path, example: str, **about: Any) -> VotedImage:
    """Raises: DataError: no image that can be read, or a mask of another size."""
    found = VotedImage(image, image_digest(image) if is_file(image) else "", example, **about)
    try:
        size = open_image(image).size
        if found.mask is not None and (other := image_size(found.mask)) != size:
            raise ImageProblem(f"the mask {found.mask} is {other[0]} x {other[1]}, the image {size[0]} x {size[1]}")
    except (ImageProblem, OSError) as error:
        raise DataError(f"{image}: {error}") from None
    return found


def _of_list(path: Path) -> Iterator[VotedImage]:
    for number, entry in enumerate(entries_of(path)):
        if not isinstance(entry, dict) or not isinstance(entry.get("image"), str):  # pyright: ignore
            raise DataError(f"{path} entry {number}: no image; each entry needs one")
        told: Mapping[str, Any] = entry
        files = {name: path.parent / told[name] for name in ("source", "mask") if told.get(name)}
        if missing := [name for name, file in files.items() if not is_file(file)]:
            raise DataError(f"{path} entry {number}: {missing[0]}: {files[missing[0]]}: no such file")
        texts = {name: str(told[name]) for name in _TEXTS if told.get(name)}
        image = path.parent / told["image"]
        example = told.get("example")
        example = _NUMBER.sub("", image.stem) if example is None else str(example)
        yield voted_image(image, example, **files, **texts, seed=told.get("seed"))


def _of_folder(path: Path) -> Iterator[VotedImage]:
    # Two layouts: with folders inside, each is a set of weights and equal names are of one example; without, numbers at
    # the end of a name distinguish the samples of one example. A mask beside its image is no image to vote on.
    def images(folder: Path) -> list[Path]:
        return sorted(file for file in folder.iterdir() if file.suffix.lower() in _ENDINGS)

    parts = [part for part in sorted(path.iterdir()) if part.is_dir() and part.name.lower() not in MASKS]
    parts = [part for part in parts if images(part)]
    for folder in parts or [path]:
        files = images(folder)
        names = {file.stem for file in files}
        masks = {made[1]: file for file in files if (made := _MASK.fullmatch(file.stem)) and made[1] in names}
        for image in [file for file in files if file not in masks.values()]:
            example = image.stem if parts else _NUMBER.sub("", image.stem)
            weights = folder.name if parts else ""
            captions = [file for ending in CAPTIONS if is_file(file := image.with_suffix(ending))]
            prompt = " ".join(read_text(captions[0]).split()) if captions else ""
            yield voted_image(image, example, mask=masks.get(image.stem), prompt=prompt, weights=weights)


def _of_run(run: Path, beside: Path, trust: bool) -> Iterator[VotedImage]:
    """The images that evaluations kept."""
    config = load_run(run / "config.yaml", trust=trust)
    data = load_dataset(config.evaluation.data or config.data, "evaluation.data")
    items = {item.id: item for item in (*data.items, *data.each_once.items)}  # earlier versions evaluated all
    name = run.resolve().name
    written, counts = beside / f"{name}-inputs", images_of(read_metrics(run / "metrics.jsonl"))
    inputs: dict[int, Mapping[str, Any]] = {}
    for step, folder in steps_kept(run / "evaluations").items():
        rows: Sequence[Mapping[str, Any]] = kept_rows(folder, counts.get(step)) or ()
        for number, row in enumerate(rows):
            if not (image := folder / f"{number:05d}.png").is_file():
                break  # the first ones are kept
            if row["example"] not in inputs:
                inputs[row["example"]] = _inputs(items, row["example"], data.config, written)
            about = {**inputs[row["example"]], "text": row.get("text"), "seed": row["index"]}
            yield voted_image(image, str(row["example"]), **about, weights=f"{name} step {step}")


def _inputs(items: Mapping[int, ItemFiles], number: int, config: DataSection, written: Path) -> Mapping[str, Any]:
    """Prompt, source and mask of an example; the images as the run reads them, written below `written`."""
    item = items.get(number)
    if item is None:
        raise ConfigError(f"evaluation.data no longer has example {number}; give the data of the run")
    example, files = read_item(item, config)[0], dict[str, Path]()
    for name in ("source", "mask"):
        if (image := getattr(example, name)) is not None:
            written.mkdir(parents=True, exist_ok=True)
            digest = hashlib.sha256(image.tobytes()).hexdigest()[:8]  # of two runs of one name, with other data
            files[name] = written / f"{number:05d}-{name}-{digest}.png"
            if not files[name].exists():
                image.save(files[name])
    return {"prompt": example.prompt, "original": content_of(item.source_path), **files}
