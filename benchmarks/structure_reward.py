"""Does a structure reward beside OCR make letters more whole? The tiny SD1.5 base trained with OCR alone, and with OCR
and glyph_structure: the same steps, seeds, data and held-out words. Online DPO adds the value of glyph_structure to
that of OCR; DiffusionNFT trains on its gradient by the pixels (`gradient_weight`).

The measure is glyph correlation: the ink of the sample against renderings of the word. No reward is computed from it.
Runs of online DPO with OCR alone are those of benchmarks/algorithms.py (give the same --work and they are not made
again).

    python benchmarks/structure_reward.py --out benchmarks/results/structure_reward.json
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from itertools import product
from pathlib import Path

from inputs import digest, inputs

from algorithms import REPOSITORY, Row, evaluations, make_data, measured, retouch, write
from retouch.config import derive, load_run
from retouch.glyph_structure import FOLDER, WEIGHTS
from retouch.use.comparison import gains

CONFIGS = REPOSITORY / "configs/tiny"
ARMS = {
    "dpo": {
        "ocr": ("sd_inpaint-dpo-full", CONFIGS / "sd_inpaint_dpo.yaml"),
        "ocr + glyph_structure": ("sd_inpaint-dpo-structure", CONFIGS / "sd_inpaint_dpo_structure.yaml"),
    },
    "nft": {
        "ocr": ("sd_inpaint-nft-ocr", CONFIGS / "sd_inpaint_nft.yaml"),
        "ocr + glyph_structure": ("sd_inpaint-nft-structure", CONFIGS / "sd_inpaint_nft_structure.yaml"),
    },
}
"""Algorithm -> arm -> first part of the names of its runs, run file."""

COMPARED = ("ocr.ned", "glyph_correlation", "outside_l1")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--algorithms", nargs="+", choices=ARMS, default=list(ARMS))
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--work", type=Path, default=Path("runs/algorithms"), help="folder for data and runs")
    parser.add_argument("--out", type=Path, help="JSON to write, or to add to")
    parser.add_argument("--set", nargs="*", default=[], metavar="KEY=VALUE", help="overrides of both arms, for a trial")
    arguments = parser.parse_args()
    rows: list[Row] = json.loads(arguments.out.read_text())["rows"] if arguments.out and arguments.out.exists() else []
    data = arguments.work / "data"
    make_data(data)
    for algorithm, seed in product(arguments.algorithms, arguments.seeds):
        for arm in ARMS[algorithm]:
            row = trained(algorithm, arm, seed, data, arguments.work, arguments.set)
            rows = [r for r in rows if r["run"] != row["run"]] + [row]
        compare([r for r in rows if (r["algorithm"], r["seed"]) == (algorithm, seed)], arguments.work)
        if arguments.out:
            write(sorted(rows, key=lambda r: r["run"]), arguments.out)
    print(table(rows))


def trained(algorithm: str, arm: str, seed: int, data: Path, work: Path, overrides: Sequence[str]) -> Row:
    """Train one arm and measure it."""
    prefix, file = ARMS[algorithm][arm]
    name = f"{prefix}-{seed}"
    options = [f"name={name}", f"seed={seed}", f"logging.dir={work}", "training.eval_every=20", "resume=auto"]
    retouch("train", str(file), *options, *overrides, DATA_PATH=str(data))
    read = {**inputs(file), "glyph_structure": digest((FOLDER / WEIGHTS).read_bytes())}
    key = {"run": name, "algorithm": algorithm, "arm": arm, "seed": seed, "inputs": read}
    return key | measured(work / name, derive(load_run(file)).forwards_per_image)


def compare(rows: Sequence[Row], work: Path) -> None:
    """Add to the row of the second arm its paired differences to the first on the same held-out words and noise."""
    by_arm = {r["arm"]: r for r in rows}
    first, second = (by_arm[arm] for arm in ("ocr", "ocr + glyph_structure"))
    last = [evaluations(work / row["run"])["last"] for row in (second, first)]
    found = gains(*last)
    second["against_ocr"] = {measure: [round(v, 4) for v in found[measure]] for measure in COMPARED}


def table(rows: Sequence[Row]) -> str:
    """One line per algorithm and seed, as markdown."""
    lines = ["| algorithm | seed | NED | glyph correlation | difference in NED | in glyph correlation |"]
    lines.append("|---" * 6 + "|")
    alone_of = {(r["algorithm"], r["seed"]): r for r in rows if r["arm"] == "ocr"}
    for row in sorted((r for r in rows if "against_ocr" in r), key=lambda r: (r["algorithm"], r["seed"])):
        alone = alone_of[row["algorithm"], row["seed"]]
        shown = [
            f"{alone['held_out']['last'][m]:.3f} → {row['held_out']['last'][m]:.3f}"
            for m in ("ocr.ned", "glyph_correlation")
        ]
        changes = [
            "{:+.3f} [{:+.3f}, {:+.3f}]".format(*row["against_ocr"][m]) for m in ("ocr.ned", "glyph_correlation")
        ]
        lines.append(f"| {row['algorithm']} | {row['seed']} | {' | '.join([*shown, *changes])} |")
    return "\n".join(lines)


if __name__ == "__main__":
    main()
