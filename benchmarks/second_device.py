"""Bytes that a training step copies to and from a device, and how often the CPU waits for it, family by algorithm.

    python benchmarks/second_device.py --offload off --out second_device.json flux_fill,grpo,lora sd3,sft,full

Counted on a device that computes on the CPU (`tests/rehearsal/device.py`), with tiny networks: bytes are those of tiny
weights and images, copies and waits are those of released ones. Each cell FAMILY,ALGORITHM,KIND is a run of three
steps without its evaluations and checkpoints; its numbers must be those of the CPU, to the bit, also after a resume.
Rows of cells that the file has already are replaced.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

REPOSITORY = Path(__file__).parents[1]

COUNTS = ("to_device", "to_host", "copies", "moved", "waits", "placements")
"""Bytes, copies to the device and waits of a step; conditions and other tensors that its steps copy to the device for a
forward; and moves of frozen networks to the device in a whole run."""


def measured(cells: list[str], offload: str) -> list[dict[str, Any]]:
    """A row of each cell; `faults` has what differed from the CPU, in words."""
    with tempfile.TemporaryDirectory(prefix="retouch-second-device-") as folder:
        for where in ("cpu", "rehearsal"):
            command = [sys.executable, "-m", "tests.rehearsal.use", folder, where, offload, *cells]
            subprocess.run(command, check=True, cwd=REPOSITORY)
        found = json.loads((Path(folder) / "rehearsal.json").read_text(encoding="utf-8"))
    return [row(cell, offload, one) for cell, one in found.items()]


def row(cell: str, offload: str, found: dict[str, Any]) -> dict[str, Any]:
    family, algorithm, kind = cell.split(",")
    names = {"family": family, "algorithm": algorithm, "kind": kind, "offload": offload == "on"}
    counts = {name: found[name] for name in COUNTS if name in found}
    return {**names, "faults": found["faults"], **counts}


def identity(one: dict[str, Any]) -> tuple[Any, ...]:
    return tuple(one[name] for name in ("family", "algorithm", "kind", "offload"))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("cells", nargs="+", metavar="FAMILY,ALGORITHM,KIND")
    parser.add_argument("--offload", choices=("on", "off"), default="on", help="text encoders and VAE between uses")
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    before = json.loads(options.out.read_text(encoding="utf-8"))["rows"] if options.out.exists() else []
    rows = {identity(one): one for one in [*before, *measured(options.cells, options.offload)]}
    text = json.dumps({"rows": [rows[name] for name in sorted(rows)]}, indent=1)
    options.out.write_text(text + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
