"""Write src/retouch/families/released_sizes.json: shapes of the trained network of every family at its released size,
and weights of the networks beside it.

python tools/released_sizes.py

Counted on the meta device from the configs in `FamilySpec.released`: no download, no weights. `retouch check --memory`
reads the file, because the imports alone take ten seconds.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterable, Mapping
from itertools import groupby
from pathlib import Path
from typing import Any

from retouch.doctor.memory import weights_in
from retouch.doctor.networks import released_parts
from retouch.families import FAMILIES
from retouch.families.base import FamilySpec
from retouch.families.quantized import sizes_of
from retouch.families.sizes import FILE, Sizes

PLACE = Path(__file__).resolve().parents[1] / "src/retouch/families" / FILE


def counted(spec: FamilySpec) -> dict[str, Any]:
    """What the file has of a family."""
    parts = released_parts(spec)
    network = parts.pop(spec.network_name)
    return as_stored(sizes_of(network), {name: weights_in(made) for name, made in parts.items()})


def as_stored(network: Sizes, others: Mapping[str, int]) -> dict[str, Any]:
    """The entry of a family in the file; `weights` has [name with * for the number of its block, [[first, last] of
    these numbers], shape, whether `model.quantize` stores it in fewer bits] for all weights that differ in that
    number."""
    alike: dict[tuple[str, tuple[int, ...], bool], list[int]] = defaultdict(list)
    for name, shape in network.shapes.items():
        parts = name.split(".")
        numbers = [i for i, part in enumerate(parts) if part.isdecimal()]
        inner = [i for i in numbers if parts[i - 1] == "transformer_blocks"]  # ten in a block of a U-Net
        at = next(iter(inner or numbers), None)
        folded = name if at is None else ".".join([*parts[:at], "*", *parts[at + 1 :]])
        alike[folded, shape, name in network.matrices] += [] if at is None else [int(parts[at])]
    rows = [[name, _runs(numbers), list(shape), whole] for (name, shape, whole), numbers in alike.items()]
    return {"weights": rows, "buffers": network.buffers, "tables": network.tables, "others": dict(others)}


def _runs(numbers: Iterable[int]) -> list[list[int]]:
    """[first, last] of each run of consecutive numbers."""
    runs = (list(run) for _, run in groupby(enumerate(sorted(numbers)), lambda pair: pair[1] - pair[0]))
    return [[run[0][1], run[-1][1]] for run in runs]


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
