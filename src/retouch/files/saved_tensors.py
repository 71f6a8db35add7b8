"""Files that `torch.save` wrote, read without running anything in them: `weights_only=True` alone.

torch's restricted unpickler raises whatever its parts raise on a damaged file (KeyError, struct.error, ...). Here that
is one error with the file's name.
"""

from __future__ import annotations

import pickle
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

import torch
from safetensors.torch import load_file
from torch import nn

from retouch.errors import DamagedFile, RefusedFile

Network = TypeVar("Network", bound=nn.Module)


def load_saved(path: Path, *, mmap: bool = False) -> object:
    """Tensors, on the CPU, and plain values of a file.

    Args:
        mmap: leave tensors on the disk until they are used.

    Raises:
        OSError: the file cannot be opened.
        RefusedFile: a pickle of other objects, which could run any program.
        DamagedFile: anything else that cannot be read.
    """
    with path.open("rb") as stream:
        _refuse_compressed(path, zipped=stream.read(2) == b"PK")
    try:
        return torch.load(path, weights_only=True, map_location="cpu", mmap=mmap)
    except pickle.UnpicklingError as error:
        raise RefusedFile(_first_line(error)) from None
    except Exception as error:
        raise DamagedFile(_first_line(error)) from None


def load_frozen(kind: Callable[[], Network], file: Path) -> Network:
    """A network with the weights of a safetensors file, in fp32, frozen. Its initial weights are never made: a scorer
    may load while a run samples, and must not draw from the global generator.

    Raises:
        RuntimeError: keys or shapes of another network.
    """
    with torch.device("meta"):
        network = kind()
    network.load_state_dict({name: tensor.float() for name, tensor in load_file(file).items()}, assign=True)
    return network.eval().requires_grad_(False)


def _refuse_compressed(path: Path, *, zipped: bool) -> None:
    """torch stores without compression; a compressed archive may grow to any size in memory."""
    if not zipped:
        return
    try:
        with zipfile.ZipFile(path) as archive:
            entries = archive.infolist()
    except (zipfile.BadZipFile, ValueError, NotImplementedError) as error:
        raise DamagedFile(_first_line(error)) from None
    if any(entry.compress_type != zipfile.ZIP_STORED for entry in entries):
        raise DamagedFile("it is compressed, which torch.save never does")
    if sum(entry.file_size for entry in entries) > path.stat().st_size:
        raise DamagedFile("its parts are larger than the file")


def _first_line(error: Exception) -> str:
    return (str(error).partition("\n")[0].partition(". ")[0] or type(error).__name__)[:300]
