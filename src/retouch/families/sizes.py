"""Sizes of networks without the networks: of released ones from `released_sizes.json`, without torch.

`tools/released_sizes.py` writes that file from the networks on the meta device, which take ten seconds of imports.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from importlib import resources
from typing import TYPE_CHECKING, Any, NamedTuple

from retouch.adapters.shape import shape_in

if TYPE_CHECKING:
    from retouch.adapters.shape import AdapterShape
    from retouch.families.base import FamilySpec, Quantization, TrainIpAdapter

FILE = "released_sizes.json"
"""Beside this module; written by `tools/released_sizes.py`."""

BIAS = "+bias"
"""End of the name of a weight in the file whose module has a bias as well, of as many numbers as it has rows."""

BLOCK = 64
"""Weights that share a scale in nf4."""


@dataclass(frozen=True)
class Sizes:
    """Sizes of a network.

    Attributes:
        shapes: of its weights, by name.
        buffers: numbers in its buffers.
        matrices: names of the weights that `model.quantize` stores in 8 or 4 bits.
        tables: bytes of tensors that its modules keep as plain attributes.
    """

    shapes: Mapping[str, tuple[int, ...]]
    buffers: int = 0
    matrices: frozenset[str] = field(default_factory=frozenset[str])
    tables: int = 0

    @property
    def weights(self) -> int:
        """Number of its weights."""
        return sum(map(math.prod, self.shapes.values()))

    def quantized_bytes(self, scheme: Quantization, each: int) -> int:
        """Bytes of its weights under `model.quantize`, `each` for one that is not quantized."""
        stored = sum(stored_bytes(self.shapes[name], scheme) for name in self.matrices)
        return stored + each * sum(math.prod(s) for name, s in self.shapes.items() if name not in self.matrices)


def stored_bytes(shape: Sequence[int], scheme: Quantization) -> int:
    """Bytes of a quantized matrix of (rows, columns), scales included."""
    count = math.prod(shape)
    return -(-count // 2) + 4 * -(-count // BLOCK) if scheme == "nf4" else count + 4 * shape[0]


class Released(NamedTuple):
    """Sizes of a released model.

    Attributes:
        network: of the trained network.
        others: component -> number of weights of each other network.
        more: `decode`: bytes of a number -> factors of `monomials`, without and with checkpointing; and of a family
            with a style adapter, `adapter`.
    """

    network: Sizes
    others: dict[str, int]
    more: dict[str, Any]

    @property
    def image_encoder(self) -> int:
        """Number of weights of the default encoder of references."""
        return self.more["adapter"]["image_encoder"]

    def adapter(self, train: TrainIpAdapter, spec: FamilySpec) -> AdapterShape:
        """Shape of a style adapter with the default encoder of references."""
        stored = self.more["adapter"]
        assert spec.adapter is not None, "`check` refuses other families"
        inner = tuple(width for width, count in stored["inner"] for _ in range(count))
        return shape_in(train, spec, spec.adapter.width, stored["token_width"], inner)

    def decode_bytes(self, bytes_a_number: int, cells: tuple[int, int], *, checkpointing: bool) -> int:
        """Bytes of the activations of a decode with gradient of one image of (h, w) latent cells."""
        terms = self.more["decode"][str(bytes_a_number)][checkpointing]
        return sum(term * monomial for term, monomial in zip(terms, monomials(*cells), strict=True))


def monomials(height: int, width: int) -> tuple[int, int, int]:
    """Terms of the activations of a decoder: numbers a channel, padded rows and columns, and planes."""
    return 1, height + width, height * width


def released_sizes(spec: FamilySpec) -> Released | None:
    """Sizes of a released model; None for a family of a plug-in."""
    stored: Any = json.loads(resources.files("retouch.families").joinpath(FILE).read_text(encoding="utf-8"))
    found = stored.get(spec.family)
    if found is None:
        return None
    weights = [row for row in found["weights"] for row in _unfolded(*row)]
    shapes = {name: shape for name, shape, _ in weights}
    matrices = frozenset(name for name, _, whole in weights if whole)
    network = Sizes(shapes, found["buffers"], matrices, found["tables"])
    return Released(network, found["others"], {name: found[name] for name in ("adapter", "decode") if name in found})


def _unfolded(
    name: str, runs: Sequence[Sequence[int]], shape: Sequence[int], quantized: bool
) -> Iterator[tuple[str, tuple[int, ...], bool]]:
    weight = name.removesuffix(BIAS)
    numbers = [number for first, last in runs for number in range(first, last + 1)] if "*" in name else [0]
    for number in numbers:
        own = weight.replace("*", str(number))
        yield own, tuple(shape), quantized
        if weight != name:
            yield f"{own.removesuffix('weight')}bias", (shape[0],), False
