"""Does a structure reward beside OCR make letters more whole? Online DPO on the tiny SD1.5 base with OCR alone, and
with OCR and glyph_structure: the same steps, seeds, data and held-out words.

The measure is glyph correlation: the ink of the sample against renderings of the word. No reward is computed from it.
Runs of OCR alone are those of benchmarks/algorithms.py (give the same --work and they are not made again).

    python benchmarks/structure_reward.py --out benchmarks/results/structure_reward.json
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path

from inputs import digest, inputs

from algorithms import REPOSITORY, Row, evaluations, make_data, measured, retouch, write
from retouch.config import derive, load_run
from retouch.glyph_structure import FOLDER, WEIGHTS
from retouch.use.comparison import gains

ARMS = {
    "ocr": ("sd_inpaint-dpo-full", REPOSITORY / "configs/tiny/sd_inpaint_dpo.yaml"),
    "ocr + glyph_structure": ("sd_inpaint-dpo-structure", REPOSITORY / "configs/tiny/sd_inpaint_dpo_structure.yaml"),
}
"""Arm -> first part of the names of its runs, run file."""

COMPARED = ("ocr.ned", "glyph_correlation", "outside_l1")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--work", type=Path, default=Path("runs/algorithms"), help="folder for data and runs")
    parser.add_argument("--out", type=Path, help="JSON to write, or to add to")
    parser.add_argument("--set", nargs="*", default=[], metavar="KEY=VALUE", help="overrides of both arms, for a trial")
    arguments = parser.parse_args()
    rows: list[Row] = json.loads(arguments.out.read_text())["rows"] if arguments.out and arguments.out.exists() else []
    data = arguments.work / "data"
    make_data(data)
    for seed in arguments.seeds:
        for arm in ARMS:
            row = trained(arm, seed, data, arguments.work, arguments.set)
            rows = [r for r in rows if r["run"] != row["run"]] + [row]
        compare([r for r in rows if r["seed"] == seed], arguments.work)
        if arguments.out:
            write(sorted(rows, key=lambda r: r["run"]), arguments.out)
    print(table(rows))


def trained(arm: str, seed: int, data: Path, work: Path, overrides: Sequence[str]) -> Row:
    """Train one arm and measure it."""
    prefix, file = ARMS[arm]
    name = f"{prefix}-{seed}"
    options = [f"name={name}", f"seed={seed}", f"logging.dir={work}", "training.eval_every=20", "resume=auto"]
    retouch("train", str(file), *options, *overrides, DATA_PATH=str(data))
    read = {**inputs(file), "glyph_structure": digest((FOLDER / WEIGHTS).read_bytes())}
    key = {"run": name, "arm": arm, "seed": seed, "inputs": read}
    return key | measured(work / name, derive(load_run(file)).forwards_per_image)


def compare(rows: Sequence[Row], work: Path) -> None:
    """Add to the row of the second arm its paired differences to the first on the same held-out words and noise."""
    first, second = (next(r for r in rows if r["arm"] == arm) for arm in ARMS)
    last = [evaluations(work / row["run"])["last"] for row in (second, first)]
    found = gains(*last)
    second["against_ocr"] = {measure: [round(v, 4) for v in found[measure]] for measure in COMPARED}


def table(rows: Sequence[Row]) -> str:
    """One line a seed, as markdown."""
    lines = ["| seed | NED | glyph correlation | difference in NED | in glyph correlation |", "|---" * 5 + "|"]
    for row in sorted((r for r in rows if "against_ocr" in r), key=lambda r: r["seed"]):
        alone = next(r for r in rows if r["seed"] == row["seed"] and r["arm"] == "ocr")
        shown = [
            f"{alone['held_out']['last'][m]:.3f} → {row['held_out']['last'][m]:.3f}"
            for m in ("ocr.ned", "glyph_correlation")
        ]
        changes = [
            "{:+.3f} [{:+.3f}, {:+.3f}]".format(*row["against_ocr"][m]) for m in ("ocr.ned", "glyph_correlation")
        ]
        lines.append(f"| {row['seed']} | {' | '.join([*shown, *changes])} |")
    return "\n".join(lines)


if __name__ == "__main__":
    main()
