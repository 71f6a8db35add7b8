"""What does `algorithm.region: mask` change? The same runs with losses over the whole picture and over the hole alone.

After paste-back only the hole is used, so only it is rewarded; `outside` is how far the raw generation drifts from the
source elsewhere. Runs are those of benchmarks/algorithms.py (give the same --work and they are not made again), beside
their twins with `algorithm.region=mask`.

    python benchmarks/region.py --out benchmarks/results/region.json
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean

from algorithms import ALGORITHMS, FAMILIES, MEASURES, Row, cell, make_data, write

REGIONS = ("all", "mask")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--families", nargs="+", choices=FAMILIES, default=["flux_fill"])
    parser.add_argument("--algorithms", nargs="+", choices=ALGORITHMS, default=["grpo", "nft"])
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--work", type=Path, default=Path("runs/algorithms"), help="folder for data and runs")
    parser.add_argument("--out", type=Path, help="JSON to write, or to add to")
    arguments = parser.parse_args()
    rows: list[Row] = json.loads(arguments.out.read_text())["rows"] if arguments.out and arguments.out.exists() else []
    data = arguments.work / "data"
    make_data(data)
    for seed in arguments.seeds:
        for family in arguments.families:
            for algorithm in arguments.algorithms:
                for region in REGIONS:
                    row = cell(family, algorithm, "full", seed, data, arguments.work, region)
                    rows = [r for r in rows if r["run"] != row["run"]] + [row]
                    if arguments.out:
                        write(sorted(rows, key=lambda r: r["run"]), arguments.out)
    print(table(rows))


def table(rows: Sequence[Row]) -> str:
    """Means over seeds, as markdown."""
    lines = ["| family | algorithm | region | seeds | NED | glyph correlation | outside |", "|---" * 7 + "|"]
    for key in dict.fromkeys((r["family"], r["algorithm"], r["region"]) for r in rows):
        mine = [r for r in rows if (r["family"], r["algorithm"], r["region"]) == key]
        ned, glyphs, outside = (fmean(r["held_out"]["last"][m] for r in mine) for m in MEASURES)
        lines.append(f"| {' | '.join(key)} | {len(mine)} | {ned:.3f} | {glyphs:.3f} | {outside:.4f} |")
    return "\n".join(lines)


if __name__ == "__main__":
    main()
