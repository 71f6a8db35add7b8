"""DiffusionNFT without the forward of the old policy, with a larger KL, and at a quarter of the forwards: held-out NED
and drift.

Every run is the published file of configs/tiny with a KL weight and a seed, on the data and with the evaluation of
benchmarks/algorithms.py. The rows "before" of benchmarks/results/nft.json are that benchmark's runs of a version that
took a forward of the old policy for every noised copy, with a KL of .01; this version cannot repeat them. `counted` are
the forwards per image of RL that a hook on the network counted: fewer than computed where groups with zero reward
variance are left out.

    python benchmarks/nft.py --out benchmarks/results/nft.json                   # 2 KL weights x 3 seeds
    python benchmarks/nft.py --kl-weights 0.1 --seeds 0 --max-steps 22           # a trial: 2 steps of RL
    python benchmarks/nft.py --quarter --out benchmarks/results/nft_quarter.json

--quarter runs the files of both bases for 15 of their 60 steps of RL, and with the settings of `ARMS`, each for as many
steps as take no more forwards. `over` is the gain over the file of the same seed, paired by word.

A finished run is not repeated, an interrupted one is resumed, and other rows of --out are kept.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean

from inputs import inputs

from algorithms import (
    IMAGES_PER_STEP,
    MEASURES,
    Row,
    cell,
    config_file,
    evaluations,
    gains,
    make_data,
    read_metrics,
    write,
)
from retouch.config import derive, load_run

COMPUTING = ("nfe_rollout", "nfe_train_forward", "nfe_train_backward")
FILE = config_file("flux_fill", "nft", "full")
STEPS = 15
"""Optimizer steps of RL of the published file at a quarter of its forwards."""

SETTINGS = {
    "one copy": ("copies1", "algorithm.timesteps_per_image=1"),
    "lr 1e-3": ("lr1e-3", "optimizer.lr=1e-3"),
    "KL .1": ("kl0.1", "algorithm.kl_weight=0.1"),
    "KL .2": ("kl0.2", "algorithm.kl_weight=0.2"),
    "KL .5": ("kl0.5", "algorithm.kl_weight=0.5"),
}
"""Setting -> (suffix of the run's name, override of the file); "mask" is `algorithm.region`."""

ARMS: dict[str, dict[str, Sequence[int]]] = {
    "flux_fill": {
        "file": (0, 1, 2),
        "lr 1e-3, KL .2": (0, 1, 2),
        "one copy, lr 1e-3, KL .2": (0, 1, 2),
        "mask, lr 1e-3, KL .2": (0, 1, 2),
        "one copy, mask, lr 1e-3, KL .2": (0,),
        "one copy, mask, lr 1e-3, KL .1": (0,),
        "one copy, mask, lr 1e-3": (0,),
        "lr 1e-3, KL .1": (0,),
        "lr 1e-3": (0,),
        "KL .2": (0,),
    },
    "sd_inpaint": {
        "file": (0, 1, 2),
        "lr 1e-3": (0, 1, 2),
        "lr 1e-3, KL .5": (0,),
        "one copy, mask, lr 1e-3": (0,),
    },
}
"""Base -> settings, which are added to its file -> seeds. The KL of sd_inpaint's file is .2."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kl-weights", type=float, nargs="+", default=[0.01, 0.1])
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--max-steps", type=int, help="optimizer steps, 20 supervised ones included; 80 if left out")
    parser.add_argument("--quarter", action="store_true", help="the settings of `ARMS` at a quarter of the forwards")
    parser.add_argument("--work", type=Path, default=Path("runs/nft"), help="folder for data and runs")
    parser.add_argument("--out", type=Path, help="JSON to write, or to add to")
    arguments = parser.parse_args()
    rows: list[Row] = json.loads(arguments.out.read_text())["rows"] if arguments.out and arguments.out.exists() else []
    make_data(arguments.work / "data")
    if arguments.quarter:
        for family, arms in ARMS.items():
            for arm, seed in [(arm, seed) for arm, seeds in arms.items() for seed in seeds if seed in arguments.seeds]:
                row = quarter(family, arm, seed, arguments.work)
                rows = [r for r in rows if r["run"] != row["run"]] + [row]
                if arguments.out:
                    write(rows, arguments.out)
        print(quarter_table(rows))
        return
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


def quarter(family: str, arm: str, seed: int, work: Path) -> Row:
    """Run the file of a base with the settings of an arm, for no more forwards than a quarter of those of the file, and
    measure it; with the gain over the file of the seed."""
    file, names = config_file(family, "nft", "full"), arm.split(", ")
    region = "mask" if "mask" in names else "all"
    overrides = dict(SETTINGS[name] for name in names if name in SETTINGS)
    changed = [*overrides.values(), *(["algorithm.region=mask"] if region == "mask" else [])]
    image, of_file = (derive(load_run(file, given)).forwards_per_image for given in (changed, []))
    steps = int(STEPS * of_file / image)
    length = f"training.max_steps={20 + steps}"
    row = cell(family, "nft", "full", seed, work / "data", work, region, {**overrides, f"to{20 + steps}": length})
    row["inputs"] = inputs(file, overrides=[*changed, length])
    row |= {"arm": arm, "rl_steps": steps, "forwards": round(counted(work / row["run"]) * IMAGES_PER_STEP * steps)}
    if arm != "file":
        plain = work / f"{family}-nft-full-{seed}-to{20 + STEPS}"
        apart = gains(evaluations(work / row["run"])["last"], evaluations(plain)["last"])
        row["over"] = {measure: [round(v, 4) for v in apart[measure]] for measure in MEASURES}
    return row


def quarter_table(rows: Sequence[Row]) -> str:
    """A line for each base and arm, with the values of its seeds, as markdown."""
    lines = ["| base | NFT | forwards | NED | over the file | glyphs | drift |", "|---" * 7 + "|"]
    for family, arm in dict.fromkeys((r["family"], r["arm"]) for r in rows):
        mine = sorted([r for r in rows if (r["family"], r["arm"]) == (family, arm)], key=lambda r: r["seed"])
        ned, glyphs, drift = (
            ", ".join(f"{r['held_out']['last'][m]:.{digits}f}" for r in mine)
            for m, digits in zip(MEASURES, (3, 3, 4), strict=True)
        )
        over = ", ".join(f"{r['over']['ocr.ned'][0]:+.3f}" for r in mine if "over" in r) or "–"
        forwards = fmean(r["forwards"] for r in mine)
        lines.append(f"| {family} | {arm} | {forwards:,.0f} | {ned} | {over} | {glyphs} | {drift} |")
    return "\n".join(lines)


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
