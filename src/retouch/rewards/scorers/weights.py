"""Models of published rewards: those of transformers, and files of weights. No torch."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from PIL import Image

from retouch.errors import ConfigError, first_line, why_unreadable
from retouch.files.disk import expanded, files_below
from retouch.files.hub import is_hub_id, require_hub, snapshot
from retouch.files.model_files import fingerprint
from retouch.rewards.protocol import Pixels

if TYPE_CHECKING:
    from torch import Tensor


@contextmanager
def loading(option: str, path: str) -> Iterator[str]:
    """Inside, transformers loads what an option names, by the path that this returns: a hub id that is not to be had,
    or a folder that it cannot read, is a ConfigError of the option."""
    require_hub(option, path)
    try:
        yield model_path(path)
    except Exception as error:
        if (problem := why_unreadable(error)) is None:
            raise
        raise ConfigError(f"{option}: given {path!r}: {problem}") from None


def model_path(path: str) -> str:
    """The path or hub id as libraries take it: they do not expand `~`."""
    return str(expanded(path)) if path.startswith("~") else path


def image_processor(path: str) -> Any:
    """The image processor of a model of transformers, on Pillow. torchvision resizes differently: a score would depend
    on whether it is installed, which no revision names."""
    from transformers import AutoImageProcessor

    return AutoImageProcessor.from_pretrained(path, backend="pil")


def processed(processor: Any, images: Sequence[Pixels]) -> Any:
    """The inputs of a model for images [H, W, 3]. As arrays, those of one or three rows would be taken for [3, H, W].

    Args:
        processor: of `image_processor`.
    """
    return processor(images=[Image.fromarray(image) for image in images], return_tensors="pt")


def named_file(option: str, given: str) -> Path:
    """The file that an option names.

    Raises:
        ConfigError: no such file.
    """
    file = expanded(given)
    if not file.is_file():
        raise ConfigError(f"{option}: given {given!r}; no such file")
    return file


def file_digest(file: Path) -> str:
    """Start of the SHA-256 of a file, for revisions."""
    return hashlib.sha256(file.read_bytes()).hexdigest()[:12]


def version_of(path: str, config: Any = None) -> str:
    """The version of what a path holds, for revisions: a digest of a file, or of the files of a folder; the commit of a
    hub id.

    Args:
        config: that of the loaded model, where transformers records the commit; without one, the commit is the newest
            in the cache, which was loaded just now.
    """
    place = expanded(path)
    if place.exists():
        # hidden files are those of tools: hf writes the time of the download
        # with samples of large files the second hash, which has all of the first
        return (fingerprint([place] if place.is_file() else files_below(place)) or "empty")[-64:][:12]
    commit = getattr(config, "_commit_hash", None) or Path(snapshot(path) or "unknown commit").name
    return str(commit)


def weights_file(path: str, names: Sequence[str], revision: str = "main") -> tuple[Path, str]:
    """The file of weights that a path means, and what identifies its version: the commit of the hub, or a digest.

    Args:
        path: a file, a folder with one of the files `names`, or a hub id with one of them.
        revision: branch, tag or commit of the hub id.

    Raises:
        ConfigError: no such file.
    """
    given = expanded(path)
    if given.is_file():
        return given, version_of(path)
    listed = " or ".join(names)
    if not is_hub_id(path):
        found = next((given / name for name in names if (given / name).is_file()), None)
        if found is None:
            raise ConfigError(
                f"path: given {path!r}, which has no {listed}; set a file, a folder with one, or a hub id"
            )
        return found, version_of(str(found))
    require_hub("path", path)
    from huggingface_hub import hf_hub_download
    from huggingface_hub.errors import EntryNotFoundError, HfHubHTTPError

    problem = "no such file"
    for name in names:
        try:
            file = Path(hf_hub_download(path, name, revision=revision))
        except (EntryNotFoundError, OSError, HfHubHTTPError) as error:  # LocalEntryNotFoundError is one of both
            problem = first_line(error)
            continue
        return file, file.parent.name
    raise ConfigError(f"path: given {path!r} at revision {revision!r}, where {listed} cannot be loaded ({problem})")


def read_weights(file: Path, option: str = "path", *, mmap: bool = True) -> dict[str, Tensor]:
    """The tensors of a safetensors file, or of a torch file without pickled code, on the CPU.

    Args:
        mmap: read tensors as they are used; torch files of before 2020 cannot.

    Raises:
        ConfigError: another format.
    """
    try:
        if file.suffix == ".safetensors":
            from safetensors.torch import load_file

            return load_file(file)
        import torch

        found: Any = torch.load(file, map_location="cpu", weights_only=True, mmap=mmap)
    except Exception as error:  # each library has errors of its own for a broken file
        raise ConfigError(f"{option}: {file} is no file of weights: {first_line(error)}") from None
    for key in ("state_dict", "model"):
        if isinstance(found, Mapping) and isinstance(found.get(key), Mapping):
            found = found[key]
    if not isinstance(found, Mapping):
        raise ConfigError(f"{option}: {file} holds one {type(found).__name__}; expected weights by name")
    return dict(found)


def tensor_of(tensors: Mapping[str, Tensor], option: str, name: str) -> Tensor:
    """A tensor by name, in fp32.

    Raises:
        ConfigError: the file of the option has none of this name.
    """
    found: Any = tensors.get(name)
    if not hasattr(found, "float"):
        raise ConfigError(f"{option}: the file has no tensor {name}")
    return found.float()


def require_all(file: Path | str, missing: Sequence[str], unknown: Sequence[str]) -> None:
    """Raise ConfigError unless the file has all weights of a network and no others: weights that are left random score
    without an error."""
    for found, word in ((missing, "lacks"), (unknown, "has unknown")):
        if found:
            more = f" and {len(found) - 3} more" if len(found) > 3 else ""
            raise ConfigError(f"path: {file} {word} weights ({', '.join(sorted(found)[:3])}{more})")
