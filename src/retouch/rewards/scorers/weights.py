"""Weights of a published reward: from a file, a folder, or a repository of the hub at one revision. No torch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from retouch.disk import expanded
from retouch.errors import ConfigError
from retouch.hub import is_hub_id, require_hub

if TYPE_CHECKING:
    from torch import Tensor


def weights_file(path: str, names: Sequence[str], revision: str = "main") -> tuple[Path, str]:
    """The file of weights that a path means, and what identifies its version: the commit of the hub, or "local".

    Args:
        path: a file, a folder with one of the files `names`, or a hub id with one of them.
        revision: branch, tag or commit of the hub id.

    Raises:
        ConfigError: no such file.
    """
    given = expanded(path)
    if given.is_file():
        return given, "local"
    listed = " or ".join(names)
    if not is_hub_id(path):
        found = next((given / name for name in names if (given / name).is_file()), None)
        if found is None:
            raise ConfigError(
                f"path: given {path!r}, which has no {listed}; set a file, a folder with one, or a hub id"
            )
        return found, "local"
    require_hub("path", path)
    from huggingface_hub import hf_hub_download
    from huggingface_hub.errors import EntryNotFoundError, HfHubHTTPError

    problem = "no such file"
    for name in names:
        try:
            file = Path(hf_hub_download(path, name, revision=revision))
        except (EntryNotFoundError, OSError, HfHubHTTPError) as error:  # LocalEntryNotFoundError is one of both
            problem = str(error).strip().splitlines()[0]
            continue
        return file, file.parent.name
    raise ConfigError(f"path: given {path!r} at revision {revision!r}, where {listed} cannot be loaded ({problem})")


def read_weights(file: Path) -> dict[str, Tensor]:
    """The tensors of a safetensors file, or of a torch file without pickled code, on the CPU.

    Raises:
        ConfigError: another format.
    """
    try:
        if file.suffix == ".safetensors":
            from safetensors.torch import load_file

            return load_file(file)
        import torch

        found: Any = torch.load(file, map_location="cpu", weights_only=True, mmap=True)
    except Exception as error:  # each library has errors of its own for a broken file
        raise ConfigError(f"path: {file} is no file of weights: {str(error).strip().splitlines()[0]}") from None
    for key in ("state_dict", "model"):
        if isinstance(found, Mapping) and isinstance(found.get(key), Mapping):
            found = found[key]
    return dict(found)


def require_all(file: Path | str, missing: Sequence[str], unknown: Sequence[str]) -> None:
    """Raise ConfigError unless the file has all weights of a network and no others: weights that are left random score
    without an error."""
    for found, word in ((missing, "lacks"), (unknown, "has unknown")):
        if found:
            more = f" and {len(found) - 3} more" if len(found) > 3 else ""
            raise ConfigError(f"path: {file} {word} weights ({', '.join(sorted(found)[:3])}{more})")
