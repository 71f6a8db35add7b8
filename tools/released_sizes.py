"""Write src/retouch/families/released_sizes.json: shapes of the trained network of every family at its released size,
and weights of the networks beside it.

python tools/released_sizes.py

Counted on the meta device from the configs in `FamilySpec.released`: no download, no weights. `retouch check --memory`
reads the file, because the imports alone take ten seconds.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from retouch.doctor.memory import weights_in
from retouch.doctor.networks import released_parts
from retouch.families import FAMILIES
from retouch.families.base import FamilySpec
from retouch.families.quantized import sizes_of
from retouch.families.sizes import FILE, as_stored

PLACE = Path(__file__).resolve().parents[1] / "src/retouch/families" / FILE


def counted(spec: FamilySpec) -> dict[str, Any]:
    """What the file has of a family."""
    parts = released_parts(spec)
    network = parts.pop(spec.network_name)
    return as_stored(sizes_of(network), {name: weights_in(made) for name, made in parts.items()})


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
