"""DiffusionNFT without the forward of the old policy, and with a larger KL: forwards, held-out NED and drift.

Every run is the published file of configs/tiny with a KL weight and a seed, on the data and with the evaluation of
benchmarks/algorithms.py. The rows "before" of benchmarks/results/nft.json are that benchmark's runs of a version that
took a forward of the old policy for every noised copy, with a KL of .01; this version cannot repeat them. `counted` are
the forwards per image of RL that a hook on the network counted: fewer than computed where groups with zero reward
variance are left out.

    python benchmarks/nft.py --out benchmarks/results/nft.json                   # 2 KL weights x 3 seeds
    python benchmarks/nft.py --kl-weights 0.1 --seeds 0 --max-steps 22           # a trial: 2 steps of RL

A finished run is not repeated, an interrupted one is resumed, and other rows of --out are kept.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean

from inputs import inputs

from algorithms import MEASURES, Row, cell, config_file, evaluations, gains, make_data, read_metrics, write

COMPUTING = ("nfe_rollout", "nfe_train_forward", "nfe_train_backward")
FILE = config_file("flux_fill", "nft", "full")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kl-weights", type=float, nargs="+", default=[0.01, 0.1])
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--max-steps", type=int, help="optimizer steps, 20 supervised ones included; 80 if left out")
    parser.add_argument("--work", type=Path, default=Path("runs/nft"), help="folder for data and runs")
    parser.add_argument("--out", type=Path, help="JSON to write, or to add to")
    arguments = parser.parse_args()
    rows: list[Row] = json.loads(arguments.out.read_text())["rows"] if arguments.out and arguments.out.exists() else []
    make_data(arguments.work / "data")
    for seed in arguments.seeds:
        for weight in arguments.kl_weights:
            row = one(weight, seed, arguments.max_steps, arguments.work)
            rows = [r for r in rows if r["run"] != row["run"]] + [row]
            if arguments.out:
                write(sorted(rows, key=order), arguments.out)
    print(table(sorted(rows, key=order)))


def one(weight: float, seed: int, max_steps: int | None, work: Path) -> Row:
    """Run the published file with a KL weight and measure it; with the gain over the run of weight .01, paired by
    word, if that run is in `work`."""
    overrides = {f"kl{weight:g}": f"algorithm.kl_weight={weight:g}"}
    if max_steps is not None:
        overrides[f"to{max_steps}"] = f"training.max_steps={max_steps}"
    row = cell("flux_fill", "nft", "full", seed, work / "data", work, overrides=overrides)
    row["inputs"] = inputs(FILE, overrides=list(overrides.values()))
    row |= {"variant": f"KL {weight:g}", "kl_weight": weight, "counted": round(counted(work / row["run"]), 3)}
    other = work / row["run"].replace(f"kl{weight:g}", "kl0.01")
    if weight != 0.01 and (other / "evaluations").exists():
        apart = gains(evaluations(work / row["run"])["last"], evaluations(other)["last"])
        row["over_kl_0.01"] = {measure: [round(v, 4) for v in apart[measure]] for measure in MEASURES}
    return row


def counted(run: Path) -> float:
    """Forward-equivalents per image of the RL steps of a run."""
    records = read_metrics(run / "metrics.jsonl")
    times = [r["time"] for r in records if r["kind"] == "train" and r["phase"] == "rl"]
    return sum(time.get(name, 0.0) for time in times for name in COMPUTING) / sum(time["images"] for time in times)


def order(row: Row) -> tuple[bool, float, int]:
    return row["variant"] != "before", row["kl_weight"], row["seed"]


def table(rows: Sequence[Row]) -> str:
    """Means over seeds, as markdown."""
    head = "NFT|seeds|forwards per image|counted|NED warmed up → last|gain by seed|glyphs|drift"
    lines = [f"| {' | '.join(head.split('|'))} |", "|---" * 8 + "|"]
    for variant in dict.fromkeys(r["variant"] for r in rows):
        mine = [r for r in rows if r["variant"] == variant]
        forwards = fmean(r["forwards_per_image"] for r in mine)
        seen = [r["counted"] for r in mine if "counted" in r]
        start = fmean(r["held_out"]["warmed up"]["ocr.ned"] for r in mine)
        ned, glyphs, drift = (fmean(r["held_out"]["last"][m] for r in mine) for m in MEASURES)
        each = ", ".join(f"{r['gain']['ocr.ned'][0]:+.3f}" for r in mine)
        lines.append(
            f"| {variant} | {len(mine)} | {forwards:.1f} | {f'{fmean(seen):.1f}' if seen else '–'} | "
            f"{start:.3f} → {ned:.3f} | {each} | {glyphs:.3f} | {drift:.4f} |"
        )
    return "\n".join(lines)


if __name__ == "__main__":
    main()
