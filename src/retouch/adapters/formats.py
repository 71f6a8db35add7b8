"""Files of style adapters: read the layouts of several programs, check every key, and write what they expect.

    standard   image_proj, ip_adapter                                 ComfyUI-IPAdapter-Flux, InstantX
    legacy     image_proj_mlp, attn_adapter
    released   image_proj_mlp, attn_adapter, image_proj_qformer       Calligrapher's own file
    Tencent    image_proj (one Linear), ip_adapter with odd numbers   SD1.5, what diffusers' load_ip_adapter takes

In memory, keys are flat and those of the standard file: `image_proj.proj.0.weight`, `image_proj_qformer.norm.bias`,
`ip_adapter.0.to_k_ip.weight`. A safetensors file has the same keys, and metadata with the scale that the adapter was
trained at; every other file has the scale multiplied into its values (`folded`). `.bin` files are pickles, read only
with weights_only=True.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file
from torch import Tensor

from retouch.adapters.projections import HEADS
from retouch.adapters.shape import AdapterShape, Head
from retouch.adapters.tensor_file import write_tensors
from retouch.errors import AdapterFileError, first_line
from retouch.files import plain_json
from retouch.files.complete import newest_weights
from retouch.files.saved_tensors import DamagedFile, RefusedFile, load_saved

NAME = "ip-adapter"
"""Stem of the files in a checkpoint: ip-adapter.safetensors and ip-adapter.bin."""

SECTIONS = {
    "image_proj": "image_proj",
    "image_proj_mlp": "image_proj",
    "image_proj_qformer": "image_proj_qformer",
    "ip_adapter": "ip_adapter",
    "attn_adapter": "ip_adapter",
}
"""Top-level key of a file -> its name in memory."""

LAYOUTS = (
    {"image_proj", "ip_adapter"},
    {"image_proj", "ip_adapter", "image_proj_qformer"},
    {"image_proj_mlp", "attn_adapter"},
    {"image_proj_mlp", "attn_adapter", "image_proj_qformer"},
)
"""Sets of top-level keys that adapters have. Other parts of a file are not used, except those of `HEADS_AND_BLOCKS`."""

HEADS_AND_BLOCKS = ("image_proj", "ip_adapter", "attn_adapter")
"""Prefixes of parts that compute something: an unknown one is an error, because the adapter would be incomplete."""


@dataclass(frozen=True)
class AdapterFile:
    """An adapter in memory, checked.

    Attributes:
        tensors: by key, complete.
        metadata: of a safetensors file: `family`, `image_encoder`, `scale`, ...; {} for a .bin.
        unused: keys of further tensors in the file, as it names them; no adapter of this construction has them.
    """

    tensors: Mapping[str, Tensor]
    shape: AdapterShape
    metadata: Mapping[str, Any] = field(default_factory=dict[str, Any])
    unused: Sequence[str] = ()

    @property
    def scale(self) -> list[float]:
        """Weight of the reference in each block: 1 if the file has no scale."""
        return self.metadata.get("scale", [1.0] * len(self.shape.inner))

    @property
    def value_norm(self) -> bool | None:
        """Whether it was trained with normalized values; None where the file does not record it. Files that name their
        family but not this are older than the option."""
        return self.metadata.get("value_norm", False if "family" in self.metadata else None)


def read_adapter(path: Path) -> AdapterFile:
    """Read a file of any of the layouts, or the one in a folder of weights, a checkpoint (EMA weights where it has
    them) or the newest checkpoint of a run directory.

    Tensors that no adapter has (of norms that have no parameters here, buffers, further parts) are left out, as
    Calligrapher's own loader does; `unused` names them, and the caller reports them.

    Raises:
        AdapterFileError: no such file, a pickle that holds more than tensors, keys and shapes that do not fit together,
            or NaN. An adapter is never loaded in part.
    """
    if path.is_dir():
        path = newest_weights(path)
        inside = [path / f"{NAME}{suffix}" for suffix in (".safetensors", ".bin")]
        path = next((file for file in inside if file.is_file()), inside[0])
    if not path.is_file():
        raise AdapterFileError(f"{path}: no such adapter file")
    try:
        found, metadata = _read_safetensors(path) if path.suffix == ".safetensors" else (_read_pickle(path), {})
    except RefusedFile:
        raise AdapterFileError(
            f"{path}: refused: it is no plain file of tensors, and to unpickle more can run any program; ask its "
            "author for a safetensors file"
        ) from None
    except (OSError, DamagedFile, RuntimeError, SafetensorError, json.JSONDecodeError) as error:
        raise AdapterFileError(f"{path}: damaged ({first_line(error)})") from None
    top = {key.partition(".")[0] for key in found}
    if {part for part in top if part.startswith(HEADS_AND_BLOCKS)} not in LAYOUTS:
        known = "; or ".join(", ".join(sorted(layout)) for layout in LAYOUTS)
        raise AdapterFileError(f"{path}: has the parts {', '.join(sorted(top)) or 'none'}; an adapter has {known}")
    names = {_inside(key): key for key in found}
    tensors = {key: found[name] for key, name in names.items()}
    shape = _shape_of(tensors, path)
    expected = shape.tensors()
    unused = tuple(name for key, name in names.items() if key not in expected and not _adds_to(key, expected))
    require_same_keys({key: t for key, t in tensors.items() if names[key] not in unused}, expected, path)
    for key in expected:
        if not bool(tensors[key].float().isfinite().all()):  # fp8 has no isfinite
            raise AdapterFileError(f"{path}: {names[key]} contains NaN or Inf")
    file = AdapterFile({key: tensors[key] for key in expected}, shape, metadata, unused)
    blocks, scale = len(shape.inner), cast(Any, file.scale)
    if (
        type(scale) is not list
        or len(scale) != blocks
        or not all(type(s) is float and 0 <= s < math.inf for s in scale)
    ):
        raise AdapterFileError(f"{path}: its scale is {scale!r}, and not a factor for each of {blocks} blocks")
    if type(metadata.get("value_norm", False)) is not bool:
        raise AdapterFileError(f"{path}: its value_norm is {metadata['value_norm']!r}; expected true or false")
    return file


def folded(file: AdapterFile) -> AdapterFile:
    """The same adapter at scale 1, for programs without a scale: the output of a block is linear in its values, and
    these have no bias, so the value weights are multiplied by the scale.

    An adapter that was trained with `value_norm` is returned unchanged: the norm removes every factor of the values."""
    if file.value_norm:
        return file
    values = [f"ip_adapter.{number}.to_v_ip.weight" for number in file.shape.numbers()]
    scaled = {key: file.tensors[key] * scale for key, scale in zip(values, file.scale, strict=True)}
    about = {name: value for name, value in file.metadata.items() if name != "scale"}
    return AdapterFile({**file.tensors, **scaled}, file.shape, about)


def describe_unused(unused: Sequence[str]) -> str:
    """The warning about tensors that were left out."""
    return (
        f"the file has tensors that the adapter has no parameter for ({len(unused)}), which are not used: "
        f"{', '.join(unused[:3])}{' ...' if len(unused) > 3 else ''}; check that they hold no trained weights"
    )


def write_safetensors(path: Path, tensors: Mapping[str, Tensor], metadata: Mapping[str, Any]) -> None:
    """Flat keys, and metadata as JSON under `retouch_adapter`."""
    about = {"format": "pt", "retouch_adapter": json.dumps(dict(metadata), sort_keys=True)}
    write_tensors(_copies(tensors), path, about)


def write_bin(path: Path, tensors: Mapping[str, Tensor]) -> None:
    """A pickle of nested dicts: the standard layout, or with a query-former the one of the released Calligrapher."""
    released = any(key.startswith("image_proj_qformer.") for key in tensors)
    names = {"image_proj": "image_proj_mlp", "ip_adapter": "attn_adapter"} if released else {}
    nested: dict[str, dict[str, Tensor]] = {}
    for key, tensor in _copies(tensors).items():
        section, _, rest = key.partition(".")
        nested.setdefault(names.get(section, section), {})[rest] = tensor
    torch.save(nested, path)


def _inside(name: str) -> str:
    """The flat key of a tensor that the file calls `name`."""
    part, _, rest = name.partition(".")
    return f"{SECTIONS.get(part, part)}.{rest}"


def _adds_to(key: str, expected: Mapping[str, tuple[int, ...]]) -> bool:
    """Whether a tensor belongs to a matrix of the adapter (a bias, factors of LoRA), which would compute something else
    without it."""
    module = key.rpartition(".")[0]
    return any(f"{parent}.weight" in expected for parent in (module, module.rpartition(".")[0]))


def _read_safetensors(path: Path) -> tuple[dict[str, Tensor], dict[str, Any]]:
    with safe_open(path, "pt") as file:
        metadata = file.metadata() or {}
    return load_file(path), cast("dict[str, Any]", plain_json.loads(metadata.get("retouch_adapter", "{}")))


def _read_pickle(path: Path) -> dict[str, Tensor]:
    """Flat keys of a dict of dicts of tensors."""
    nested = load_saved(path)
    flat: dict[str, Tensor] = {}
    sections: dict[Any, Any] = nested if isinstance(nested, dict) else {}
    for section, inside in sections.items():
        if isinstance(inside, Tensor) and not str(section).startswith(HEADS_AND_BLOCKS):
            flat[str(section)] = inside
            continue
        if not isinstance(inside, dict):
            raise AdapterFileError(f"{path}: {section!r} holds no named tensors; an adapter's parts are dicts of them")
        if not inside:
            raise AdapterFileError(f"{path}: {section!r} is empty; an adapter's parts are dicts of tensors")
        for key, tensor in inside.items():
            if not isinstance(tensor, Tensor):
                raise AdapterFileError(f"{path}: {section}.{key} is no tensor")
            flat[f"{section}.{key}"] = tensor
    return flat


def _shape_of(tensors: Mapping[str, Tensor], path: Path) -> AdapterShape:
    """Sizes derived from a few tensors that every adapter has; the caller checks the other tensors against them.

    Raises:
        AdapterFileError: these are missing, or fit no adapter.
    """
    linear = "image_proj.proj.weight" in tensors
    first, last = (("proj.weight",) * 2) if linear else ("proj.0.weight", "proj.2.weight")
    numbers = sorted(
        {int(parts[1]) for key in tensors if (parts := key.split("."))[0] == "ip_adapter" and parts[1].isdecimal()}
    )
    try:
        width = tensors[f"image_proj.{first}"].shape[1]
        token_width = tensors["image_proj.norm.weight"].shape[0]
        flat = tensors[f"image_proj.{last}"].shape[0]
        inner = tuple(tensors[f"ip_adapter.{n}.to_k_ip.weight"].shape[0] for n in numbers)
    except (KeyError, IndexError) as error:
        raise AdapterFileError(f"{path}: {str(error).strip(chr(39))} is missing, or no matrix") from None
    # The last projection writes all tokens in one row, and the norm behind it has the width of one: the number of
    # tokens is their quotient. Only a query former divides that width among heads.
    former = any(key.startswith("image_proj_qformer.") for key in tensors)
    if not (flat and token_width) or flat % token_width or (former and token_width % HEADS):
        raise AdapterFileError(f"{path}: its {flat} outputs are no whole number of tokens of width {token_width}")
    head: Head = "linear" if linear else "mlp+query_former" if former else "mlp"
    return AdapterShape(head, width, flat // token_width, token_width, inner)


def require_same_keys(tensors: Mapping[str, Tensor], expected: Mapping[str, tuple[int, ...]], path: Path) -> None:
    """Raises: AdapterFileError: with the first keys that are missing, unknown or of another shape."""
    missing = [key for key in expected if key not in tensors]
    extra = [key for key in tensors if key not in expected]
    wrong = [
        f"{key} ({list(tensors[key].shape)} instead of {list(shape)})"
        for key, shape in expected.items()
        if key in tensors and tuple(tensors[key].shape) != shape
    ]
    whole = [key for key, t in tensors.items() if not t.is_floating_point()]
    problems = [
        f"{what}: {', '.join(names[:3])}{' ...' if len(names) > 3 else ''}"
        for what, names in (("missing", missing), ("unknown", extra), ("shape", wrong), ("no weights", whole))
        if names
    ]
    if problems:
        raise AdapterFileError(f"{path}: not a whole adapter ({len(expected)} tensors): {'; '.join(problems)}")


def _copies(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Copies on the CPU that share no memory: safetensors rejects shared tensors, and accelerate drops them."""
    return {key: t.detach().to("cpu", copy=True).contiguous() for key, t in tensors.items()}
