"""Sizes of networks without the networks, and FLOPs of a forward: of released ones from `released_sizes.json`, without
torch.

`tools/released_sizes.py` writes that file from the networks on the meta device, which take ten seconds of imports.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from importlib import resources
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from retouch.families.base import FamilySpec, Quantization

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

    def lora_weights(self, targets: Iterable[str], rank: int) -> int:
        """Number of weights of the LoRA on modules whose names end so: rank times the two sides of every matrix."""
        ends = tuple(f".{target}.weight" for target in targets)
        adapted = [s for name, s in self.shapes.items() if len(s) > 1 and f".{name}".endswith(ends)]
        return rank * sum(shape[0] + math.prod(shape[1:]) for shape in adapted)


def stored_bytes(shape: Sequence[int], scheme: Quantization) -> int:
    """Bytes of a quantized matrix of (rows, columns), scales included."""
    count = math.prod(shape)
    return -(-count // 2) + 4 * -(-count // BLOCK) if scheme == "nf4" else count + 4 * shape[0]


class Released(NamedTuple):
    """Sizes of a released model.

    Attributes:
        network: of the trained network.
        others: component -> number of weights of each other network.
        more: `decode`: bytes of a number -> factors of `monomials`, without and with checkpointing; `flops`: factors of
            `flop_monomials`; `padded`: number that tokens are padded to a multiple of; and of a family with a style
            adapter, `adapter`.
    """

    network: Sizes
    others: dict[str, int]
    more: dict[str, Any]

    @property
    def image_encoder(self) -> int:
        """Number of weights of the default encoder of references."""
        return self.more["adapter"]["image_encoder"]

    def decode_bytes(self, bytes_a_number: int, cells: tuple[int, int], *, checkpointing: bool) -> int:
        """Bytes of the activations of a decode with gradient of one image of (h, w) latent cells."""
        terms = self.more["decode"][str(bytes_a_number)][checkpointing]
        return sum(term * monomial for term, monomial in zip(terms, monomials(*cells), strict=True))

    def flops(self, image: int, text: int) -> float:
        """FLOPs of a forward of one sample (a multiply-add is two), without adapters.

        Args:
            image, text: tokens in the sequence of the network; of a U-Net, `image` counts the cells of the latents.
        """
        image, text = (-(-count // self.more["padded"]) * self.more["padded"] for count in (image, text))
        return sum(
            term * monomial for term, monomial in zip(self.more["flops"], flop_monomials(image, text), strict=True)
        )


def flop_monomials(image: int, text: int) -> tuple[int, ...]:
    """Terms of the FLOPs of a forward: of vectors of a sample, of matrices on each token, and of attention."""
    return 1, image, text, image * image, image * text, text * text


def monomials(height: int, width: int) -> tuple[int, int, int]:
    """Terms of the activations of a decoder: numbers a channel, padded rows and columns, and planes."""
    return 1, height + width, height * width


def released_sizes(spec: FamilySpec) -> Released | None:
    """Sizes of a released model; None for a family of a plug-in."""
    return _released(spec.family)


@cache
def _released(family: str) -> Released | None:
    stored: Any = json.loads(resources.files("retouch.families").joinpath(FILE).read_text(encoding="utf-8"))
    found = stored.get(family)
    if found is None:
        return None
    weights = [row for row in found["weights"] for row in _unfolded(*row)]
    shapes = {name: shape for name, shape, _ in weights}
    matrices = frozenset(name for name, _, whole in weights if whole)
    network = Sizes(shapes, found["buffers"], matrices, found["tables"])
    known = ("weights", "buffers", "tables", "others")
    return Released(network, found["others"], {name: value for name, value in found.items() if name not in known})


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
