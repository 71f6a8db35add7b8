"""A safetensors file with metadata, written deterministically: equal contents give equal bytes."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

from safetensors.torch import save
from torch import Tensor


def write_tensors(tensors: Mapping[str, Tensor], path: Path, metadata: Mapping[str, str]) -> None:
    """Write tensors with metadata in the order of its keys, in which safetensors itself writes it at random."""
    whole = save(dict(tensors), dict(metadata))
    end = 8 + int.from_bytes(whole[:8], "little")
    header = json.loads(whole[8:end])
    header["__metadata__"] = dict(sorted(metadata.items()))
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)  # tensors begin at multiples of 8
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        file.write(memoryview(whole)[end:])
