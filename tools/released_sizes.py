"""Write src/retouch/families/released_sizes.json: shapes of the trained network of every family at its released size,
weights of the networks beside it, and bytes of a decode with gradient.

python tools/released_sizes.py

Counted on the meta device from the configs in `FamilySpec.released`: no download, no weights. `retouch check --memory`
reads the file, because the imports alone take ten seconds.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from itertools import groupby
from pathlib import Path
from typing import Any

from retouch.adapters.hosts import host_of
from retouch.doctor.memory import BYTES, traced_decode, weights_in
from retouch.doctor.networks import released_encoder, released_parts
from retouch.families import FAMILIES
from retouch.families.base import FamilySpec
from retouch.families.quantized import sizes_of
from retouch.families.sizes import BIAS, FILE, Sizes, monomials

PLACE = Path(__file__).resolve().parents[1] / "src/retouch/families" / FILE

SIDES = ((32, 32), (32, 64), (64, 64), (32, 96))
"""Latent cells of the decodes that are traced; the last is a test of the terms of the others."""


def decode_terms(measured: Sequence[int]) -> list[int]:
    """The whole factors of `monomials` whose sum `measured` is, at SIDES.

    Raises:
        ValueError: it is no such sum.
    """
    small, wide, large, other = measured
    plane, left = divmod(large - 2 * wide + small, 32 * 32)
    side, more = divmod(wide - small - 32 * 32 * plane, 32)
    terms = [small - 64 * side - 32 * 32 * plane, side, plane]
    if left or more or other != sum(a * b for a, b in zip(terms, monomials(*SIDES[3]), strict=True)):
        raise ValueError(f"the bytes of a decode are no sum of its monomials: {measured}")
    return terms


def counted(spec: FamilySpec) -> dict[str, Any]:
    """What the file has of a family."""
    parts = released_parts(spec)
    network = parts.pop(spec.network_name)
    others = {name: weights_in(made) for name, made in parts.items()}
    return as_stored(sizes_of(network), others, {"decode": decode(spec, parts["vae"]), **adapter(spec, network)})


def as_stored(network: Sizes, others: Mapping[str, int], more: Mapping[str, Any]) -> dict[str, Any]:
    """The entry of a family in the file; `weights` has [name with * for the number of its block, [[first, last] of
    these numbers], shape, whether `model.quantize` stores it in fewer bits] for all weights that differ in that
    number; a name that ends in `BIAS` is that of a weight and its bias."""
    alike: dict[tuple[str, tuple[int, ...], bool], list[int]] = defaultdict(list)
    for name, shape in network.shapes.items():
        parts = name.split(".")
        numbers = [i for i, part in enumerate(parts) if part.isdecimal()]
        inner = [i for i in numbers if parts[i - 1] == "transformer_blocks"]  # ten in a block of a U-Net
        at = next(iter(inner or numbers), None)
        folded = name if at is None else ".".join([*parts[:at], "*", *parts[at + 1 :]])
        alike[folded, shape, name in network.matrices] += [] if at is None else [int(parts[at])]
    rows = [[name, _runs(numbers), list(shape), whole] for (name, shape, whole), numbers in alike.items()]
    return {
        "weights": with_biases(rows),
        "buffers": network.buffers,
        "tables": network.tables,
        "others": dict(others),
        **more,
    }


def with_biases(rows: Sequence[list[Any]]) -> list[list[Any]]:
    """The rows, with one for a weight and its bias where both are in the same blocks."""
    biases = [row for row in rows if row[0].endswith(".bias")]
    found, paired = list[list[Any]](), list[list[Any]]()
    for name, runs, shape, whole in rows:
        bias = [f"{name.removesuffix('weight')}bias", runs, shape[:1], False]
        has_one = name.endswith(".weight") and bias in biases
        paired += [bias] if has_one else []
        found.append([name + BIAS if has_one else name, runs, shape, whole])
    return [row for row in found if row not in paired]


def _runs(numbers: Iterable[int]) -> list[list[int]]:
    """[first, last] of each run of consecutive numbers."""
    runs = (list(run) for _, run in groupby(enumerate(sorted(numbers)), lambda pair: pair[1] - pair[0]))
    return [[run[0][1], run[-1][1]] for run in runs]


def decode(spec: FamilySpec, vae: Any) -> dict[str, list[list[int]]]:
    """Bytes of a number -> `decode_terms` without and with checkpointing."""
    found = dict[str, list[list[int]]]()
    for dtype in ("bf16", "fp32"):
        sizes = [(height * spec.downsampling, width * spec.downsampling) for height, width in SIDES]
        both = zip(*(traced_decode(spec, vae, size, dtype) for size in sizes), strict=True)
        found[str(BYTES[dtype])] = [decode_terms(measured) for measured in both]
    return found


def adapter(spec: FamilySpec, network: Any) -> dict[str, Any]:
    """What a style adapter takes from the network, and the weights of the default image encoder."""
    if spec.adapter is None:
        return {}
    host = host_of(network)
    inner = [[width, len(list(run))] for width, run in groupby(host.inner())]
    encoder, _ = released_encoder(spec.adapter)
    return {"adapter": {"token_width": host.token_width(), "inner": inner, "image_encoder": weights_in(encoder)}}


def text(families: dict[str, dict[str, Any]]) -> str:
    """The file, a line for each group of weights."""
    made: list[str] = []
    for family, found in families.items():
        rows = ",\n".join(f"   {json.dumps(row)}" for row in found["weights"])
        rest = json.dumps({name: value for name, value in found.items() if name != "weights"})
        made.append(f' "{family}": {{\n  "weights": [\n{rows}\n  ],\n  {rest[1:]}')
    return "{\n" + ",\n".join(made) + "\n}\n"


def main() -> None:
    PLACE.write_text(text({name: counted(section.spec) for name, section in FAMILIES.available().items()}))
    print(PLACE)


if __name__ == "__main__":
    main()
