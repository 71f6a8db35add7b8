"""Where the model of a run lies: a folder, a tiny base of the package, or the hub. No torch."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from operator import index
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from retouch.errors import ModelFilesError, first_line
from retouch.files import plain_json
from retouch.files.hub import hub_problem, looks_local, refusal, require_hub, variant_hint

if TYPE_CHECKING:
    from retouch.families.base import OtherTransformer


INDEX = "model_index.json"
"""The file of a pipeline folder that names its class and its parts."""


_WHOLE = 3 << 20
"""Bytes of a file up to which `fingerprint` reads all of it."""

_PAGE = 4096
"""Bytes of a sample of a larger file."""

_OF_TENSOR, _OF_FILE = 16 << 20, 1 << 20
"""Bytes from one sample to the next: of a tensor in a safetensors file, and of any other file."""

_MOST_HEADER = 100_000_000
"""Bytes of the header of a safetensors file, at most; the limit of the format."""


def component_path(path: str, family: str) -> str:
    """A hub id or folder as given; "tiny" is the trained base that comes with the package.

    Raises:
        ModelFilesError: a local-looking path that does not exist.
    """
    if path == "tiny":
        if not tiny_path(family).is_dir():
            raise ModelFilesError(f"model.path: given 'tiny', but no tiny base of {family} comes with the package")
        return str(tiny_path(family))
    folder = Path(path).expanduser()
    if folder.is_dir():
        if not (folder / INDEX).is_file():
            raise ModelFilesError(f"model.path: {folder} has no {INDEX}; give the top folder of a diffusers model")
        return str(folder)
    if looks_local(path):
        raise ModelFilesError(f"model.path: {path}: no such folder; give a folder in the diffusers layout or a hub id")
    return path


def transformer_path(other: OtherTransformer) -> tuple[str, str | None]:
    """(hub id or folder, subfolder) of `model.transformer`.

    Raises:
        ModelFilesError: a local-looking path that does not exist, or a folder without the config of a network.
    """
    folder = Path(other.path).expanduser()
    if folder.is_dir():
        if not (folder / (other.subfolder or "") / "config.json").is_file():
            raise ModelFilesError(
                f"model.transformer: {folder / (other.subfolder or '')} has no config.json; give the folder of a "
                "network in the diffusers layout as model.transformer.path, or set model.transformer.subfolder"
            )
        return str(folder), other.subfolder
    if looks_local(other.path):
        raise ModelFilesError(f"model.transformer.path: {other.path}: no such folder; give a folder or a hub id")
    return other.path, other.subfolder


def pipeline_index(path: str) -> dict[str, Any] | None:
    """model_index.json of a model folder or hub id; None where only parts of a hub id were downloaded, and the hub
    cannot be reached now.

    Raises:
        ConfigError: a hub id that is not on this machine, and the hub cannot be reached.
        ModelFilesError: no model_index.json, or a damaged one.
    """
    file = Path(path) / INDEX
    if not file.parent.is_dir():
        from huggingface_hub import hf_hub_download

        require_hub("model.path", path)
        try:
            file = Path(hf_hub_download(path, INDEX))
        except (OSError, ValueError) as error:
            if (refused := refusal(error, path)) is None and hub_problem() is not None:
                return None
            reason = refused or f"{first_line(error)}; check the id and the network (gated models need HF_TOKEN)"
            raise ModelFilesError(f"model.path: {path} has no {INDEX} to be had: {reason}") from None
    return _index(file)


def components(folder: Path) -> list[str]:
    """Names of the parts of a model folder that its model_index.json names a class for.

    Raises:
        ModelFilesError: a damaged model_index.json.
    """
    return named_parts(_index(folder / INDEX))


def named_parts(index: Mapping[str, Any]) -> list[str]:
    """Names of the parts that a model_index.json names a class for; null means that there is none."""
    entries = index.items()
    return [name for name, entry in entries if isinstance(entry, list) and entry and isinstance(entry[0], str)]


UNSUPPORTED = (
    "use_karras_sigmas",
    "use_exponential_sigmas",
    "use_beta_sigmas",
    "invert_sigmas",
    "stochastic_sampling",
)
"""Options of a flow scheduler with which its pipeline samples at other noise levels, or with noise of its own."""


def schedule_problem(config: Mapping[str, Any]) -> str | None:
    """Why a flow model with this config of a scheduler cannot be sampled as its pipeline does; None where it can."""
    if name := next((name for name in UNSUPPORTED if config.get(name)), None):
        return f"scheduler/scheduler_config.json has {name}, which is not supported; set {name} to false there"
    return None


Shapes = dict[str, tuple[int, ...]]
"""Weight name -> shape."""


class Damaged(ValueError):
    """A file of the model is missing, damaged, or of another kind."""


class Incomplete(Damaged):
    """A file of weights that is missing or only begun, as after a download that was cut."""


STEMS = ("model", "pytorch_model")
"""File names of transformers' weights: safetensors, and pickled."""


def weights_of(folder: Path, stem: str, pickled: str, variant: str | None = None) -> Shapes:
    """Shapes of the weights in a folder, by the headers of its files; empty if only torch reads them.

    Args:
        variant: `model.weights_variant`, of files that the folder may have.

    Raises:
        Damaged: no weights, or missing ones.
    """
    part = f".{variant}" if variant and any(folder.glob(f"{stem}*.{variant}[.-]*")) else ""
    index = folder / f"{stem}.safetensors.index{part}.json"
    if (folder / f"{stem}{part}.safetensors").is_file():
        return _shapes_in(folder / f"{stem}{part}.safetensors")
    if index.is_file():
        placed = json_object(index).get("weight_map", {})
        shapes = {
            name: shape for file in sorted(set(placed.values())) for name, shape in _shapes_in(folder / file).items()
        }
        lacking = sorted(placed.keys() - shapes.keys())
        if lacking:
            raise Incomplete(f"{folder.name}/: {lacking[0]} is in none of the files that its index names")
        return shapes
    if (folder / f"{pickled}.bin").is_file() or (folder / f"{pickled}.bin.index.json").is_file():
        return {}
    raise Damaged(f"{folder.name}/ has no {stem}{part}.safetensors{variant_hint(str(folder), None)}")


def _shapes_in(file: Path) -> Shapes:
    """Shapes in a safetensors file; its length must match its header."""
    where = f"{file.parent.name}/{file.name}"
    if not file.is_file():
        raise Incomplete(f"no {where}")
    try:
        begin, tensors = _header(file)
        whole = begin + max((entry["data_offsets"][1] for entry in tensors.values()), default=0)
        shapes = {name: tuple(entry["shape"]) for name, entry in tensors.items()}
    except _NO_HEADER:
        raise Incomplete(f"{where} is no safetensors file, or only the start of one") from None
    if file.stat().st_size != whole:
        raise Incomplete(f"{where} has {file.stat().st_size} bytes, {whole} are expected")
    return shapes


_NO_HEADER = (ValueError, KeyError, TypeError, AttributeError)
"""Errors of `_header` for a file that is no safetensors file."""


def _header(file: Path) -> tuple[int, dict[str, Any]]:
    """Bytes before the tensors of a safetensors file, and the entry of each tensor. Raises `_NO_HEADER`."""
    with file.open("rb") as stream:
        length = int.from_bytes(stream.read(8), "little")
        header = cast("dict[str, Any]", plain_json.loads(stream.read(min(length, _MOST_HEADER))))
    return 8 + length, {name: entry for name, entry in header.items() if name != "__metadata__"}


def stems(config: Mapping[str, Any]) -> tuple[str, str]:
    """Names of a network's weight files, safetensors and pickled, by its config.json: diffusers writes _class_name,
    transformers does not."""
    return ("diffusion_pytorch_model", "diffusion_pytorch_model") if "_class_name" in config else STEMS


def incomplete_weights(folder: Path, variant: str | None) -> str | None:
    """Which of a network's weight files is missing or only begun; None where all of them are whole, or there are
    none."""
    try:
        weights_of(folder, *stems(json_object(folder / "config.json")), variant)
    except Incomplete as error:
        return str(error)
    except Damaged:
        return None
    return None


def json_object(file: Path) -> dict[str, Any]:
    """The object in a JSON file."""
    try:
        value: object = plain_json.loads(file.read_text(encoding="utf-8"))
    except OSError:
        raise Damaged(f"no {file.parent.name}/{file.name}") from None
    except ValueError:
        raise Damaged(f"{file.parent.name}/{file.name} is not valid JSON") from None
    if not isinstance(value, dict):
        raise Damaged(f"{file.parent.name}/{file.name} holds no JSON object")
    return cast("dict[str, Any]", value)


def _index(file: Path) -> dict[str, Any]:
    try:
        found = plain_json.loads(file.read_text(encoding="utf-8"))
        if not isinstance(found, dict):
            raise ValueError("no object")
        return cast("dict[str, Any]", found)
    except ValueError as error:
        raise ModelFilesError(f"model.path: {file} is damaged ({error}); copy the model anew") from None


def tiny_path(family: str) -> Path:
    """Folder of the tiny base of a family inside the installed package."""
    return Path(__file__).resolve().parents[1] / "tiny" / "bases" / family


def fingerprint(places: Iterable[Path]) -> str | None:
    """Hash of the names, sizes and contents of some files and of those in some folders; None without a file.

    Of a file over 3 MiB it reads samples of 4 KiB: of a safetensors file the header, and of every tensor both ends and
    one per 16 MiB; of another file one per MiB and the end. 24 GB of safetensors with 1,000 tensors are about 3,400
    reads of 14 MB in total. A change that spares every sample of every tensor keeps the hash; training changes most
    elements of each tensor that it trains.

    Raises:
        ModelFilesError: a file that cannot be read. Without its content, a hash could be that of two models.
    """
    # Folders of the hub's cache and copies of them lie elsewhere and have other times. Names, sizes and samples of the
    # content are the same for both, and differ for any other weights.
    try:
        files = sorted(file for place in places for file in _files_at(place))
    except OSError as error:
        raise _unreadable(error.filename, error) from None
    if not files:
        return None
    # what earlier versions computed, which checkpoints and stored embeddings hold; and one with all of that and the
    # samples of large files
    first, samples = hashlib.sha256(), hashlib.sha256()
    sampled = False
    for file in files:
        try:
            size = file.stat().st_size
            first.update(f"{file.parent.name}/{file.name} {size}\n".encode())
            sampled |= size > _WHOLE
            with file.open("rb", buffering=_PAGE) as stream:
                third = _WHOLE // 3
                for start in [0] if size <= _WHOLE else [0, (size - third) // 2, size - third]:
                    stream.seek(start)
                    first.update(stream.read(_WHOLE if size <= _WHOLE else third))
                for start in _samples(file, size) if size > _WHOLE else ():
                    stream.seek(start)
                    samples.update(stream.read(_PAGE))
        except OSError as error:
            raise _unreadable(file, error) from None
    samples.update(first.digest())
    return first.hexdigest() + (samples.hexdigest() if sampled else "")


def _files_at(place: Path) -> Iterator[Path]:
    """The file, or those in the folder; none where nothing is. Raises OSError where `Path.rglob` leaves a folder out:
    one that cannot be listed."""

    def fail(error: OSError) -> None:
        raise error

    listed = os.walk(place, onerror=fail) if place.is_dir() else [(place.parent, [], [place.name])]
    yield from (file for folder, _, names in listed for name in names if (file := Path(folder, name)).is_file())


def _unreadable(path: object, error: OSError) -> ModelFilesError:
    problem = (error.strerror or str(error)).lower()
    return ModelFilesError(
        f"{path}: {problem}, but the files of a model identify it; make it readable, or move it out of the folder"
    )


def is_same_model(recorded: object, today: object) -> bool:
    """Whether two fingerprints are equal; one of an earlier version has no samples of large files."""
    old = isinstance(recorded, str) and isinstance(today, str) and len(recorded) == 64 and today.startswith(recorded)
    return old or recorded == today


def _samples(file: Path, size: int) -> Iterator[int]:
    """Where the samples of a file begin."""
    parts, every = [(0, size)], _OF_FILE
    if file.suffix == ".safetensors":
        with suppress(*_NO_HEADER):
            begin, tensors = _header(file)
            offsets = (map(index, entry["data_offsets"]) for entry in tensors.values())
            bounds = [(begin + start, begin + end) for start, end in offsets]
            if begin + sum(b - a for a, b in bounds) <= size and all(begin <= a <= b <= size for a, b in bounds):
                parts, every = bounds, _OF_TENSOR
                yield from range(0, begin, _PAGE)
    for start, end in parts:
        yield from range(start, end, every)
        yield max(start, end - _PAGE)
