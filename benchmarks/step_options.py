"""GRPO with Flow-DPPO's mask in place of the clip, and with TempFlow-GRPO's step weight: held-out NED and drift.

Every run is the published file of configs/tiny for GRPO with the options of an arm, 20 steps of warm-up and 20 of RL,
on the data and with the evaluation of benchmarks/algorithms.py. Clip and mask act from the second update on a batch of
rollouts on: those arms take two passes over each (`inner_epochs`), hence half as many rollouts.

    python benchmarks/step_options.py --out benchmarks/results/step_options.json          # 4 arms x 2 bases x 3 seeds
    python benchmarks/step_options.py --arms plain --families flux_fill --seeds 0         # a trial

A finished run is not repeated, an interrupted one is resumed, and other rows of --out are kept.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean

from inputs import inputs

from algorithms import MEASURES, Row, cell, config_file, make_data, read_metrics, write

FAMILIES = ("flux_fill", "sd_inpaint")
STEPS = "training.max_steps=40"
TWO = "algorithm.inner_epochs=2"
ARMS: dict[str, tuple[str, ...]] = {
    "plain": (),
    "step weight std": ("algorithm.step_weight=std",),
    "2 passes, clip": (TWO,),
    "2 passes, mask 1e-5": (TWO, "algorithm.clip_range=1e-4", "algorithm.kl_mask_threshold=1e-5"),
}
"""Arm -> its overrides; the mask needs the default of the clip range, which it does not read."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--arms", nargs="+", choices=list(ARMS), default=list(ARMS))
    parser.add_argument("--families", nargs="+", choices=FAMILIES, default=FAMILIES)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--work", type=Path, default=Path("runs/step_options"), help="folder for data and runs")
    parser.add_argument("--out", type=Path, help="JSON to write, or to add to")
    arguments = parser.parse_args()
    rows: list[Row] = json.loads(arguments.out.read_text())["rows"] if arguments.out and arguments.out.exists() else []
    make_data(arguments.work / "data")
    for seed in arguments.seeds:
        for family in arguments.families:
            for arm in arguments.arms:
                row = one(arm, family, seed, arguments.work)
                rows = sorted([r for r in rows if r["run"] != row["run"]] + [row], key=order)
                if arguments.out:
                    write(rows, arguments.out)
    print(table(rows))


def one(arm: str, family: str, seed: int, work: Path) -> Row:
    """Run the published file with the options of an arm and measure it, with its mean clip fraction."""
    overrides = [STEPS, *ARMS[arm]]
    names = {f"{arm.replace(' ', '-').replace(',', '')}-{i}" if i else "to40": o for i, o in enumerate(overrides)}
    row = cell(family, "grpo", "full", seed, work / "data", work, overrides=names)
    row["inputs"] = inputs(config_file(family, "grpo", "full"), overrides=overrides)
    steps = [r for r in read_metrics(work / row["run"] / "metrics.jsonl") if r.get("phase") == "rl"]
    return row | {"arm": arm, "clip_fraction": round(fmean(r["clip_fraction"] for r in steps), 4)}


def order(row: Row) -> tuple[int, int, int]:
    return FAMILIES.index(row["family"]), list(ARMS).index(row["arm"]), row["seed"]


def table(rows: Sequence[Row]) -> str:
    """Means over seeds, as markdown."""
    head = "family|GRPO|seeds|clipped or masked|NED warmed up → last|gain by seed|glyphs|drift"
    lines = [f"| {' | '.join(head.split('|'))} |", "|---" * 8 + "|"]
    for family, arm in dict.fromkeys((r["family"], r["arm"]) for r in rows):
        mine = [r for r in rows if (r["family"], r["arm"]) == (family, arm)]
        start = fmean(r["held_out"]["warmed up"]["ocr.ned"] for r in mine)
        ned, glyphs, drift = (fmean(r["held_out"]["last"][m] for r in mine) for m in MEASURES)
        each = ", ".join(f"{r['gain']['ocr.ned'][0]:+.3f}" for r in mine)
        lines.append(
            f"| {family} | {arm} | {len(mine)} | {fmean(r['clip_fraction'] for r in mine):.3f} | "
            f"{start:.3f} → {ned:.3f} | {each} | {glyphs:.3f} | {drift:.4f} |"
        )
    return "\n".join(lines)


if __name__ == "__main__":
    main()
