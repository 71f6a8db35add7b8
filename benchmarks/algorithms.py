"""Which algorithm, at what cost? Every algorithm on the same tiny base and data, its gold reward OCR.

Each cell is a published run file of configs/tiny, unchanged but for its name, its seed and how often it is evaluated:
20 supervised steps, then RL on words without pictures, 7,680 images in all; SFT goes on with supervised steps for five
times as many. A step sees 96 images, that of a reward gradient 48, in 48 steps, 28 of them RL. All cells are measured
on the same 192 held-out words, seeds and solver.

    python benchmarks/algorithms.py --out benchmarks/results/algorithms.json               # 3 seeds, full weights
    python benchmarks/algorithms.py --train lora --seeds 0 --out ...                       # other cells
    python benchmarks/algorithms.py --plot docs/images/algorithms.svg --out ...            # from what is in --out

A run that is there is not made again: what was interrupted goes on, and rows of --out that are not asked for stay.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

REPOSITORY = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(REPOSITORY / "examples"))

from demo import evaluations, make_data, retouch  # noqa: E402
from figures import label_ends, style  # noqa: E402
from inputs import inputs  # noqa: E402

from retouch.config import derive, load_run  # noqa: E402
from retouch.observe.environment import environment  # noqa: E402
from retouch.observe.run_dir import read_metrics  # noqa: E402
from retouch.use.comparison import gains  # noqa: E402

FAMILIES = ("flux_fill", "sd_inpaint")
ALGORITHMS = ("sft", "grpo", "ppo", "dpo", "nft", "reward_gradient")
IMAGES_PER_STEP = 96
MEASURES = ("ocr.ned", "glyph_correlation", "outside_l1")

Row = dict[str, Any]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--families", nargs="+", choices=FAMILIES, default=["flux_fill"])
    parser.add_argument("--algorithms", nargs="+", choices=ALGORITHMS, default=list(ALGORITHMS))
    parser.add_argument("--train", nargs="+", choices=("full", "lora"), default=["full"])
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--work", type=Path, default=Path("runs/algorithms"), help="folder for data and runs")
    parser.add_argument("--out", type=Path, help="JSON to write, or to add to")
    parser.add_argument("--plot", type=Path, help="draw and print what --out holds, run nothing")
    arguments = parser.parse_args()
    rows: list[Row] = json.loads(arguments.out.read_text())["rows"] if arguments.out and arguments.out.exists() else []
    if arguments.plot:
        plot(rows, arguments.plot)
        print(table(rows))
        return
    data = arguments.work / "data"
    make_data(data)
    for seed in arguments.seeds:
        for family in arguments.families:
            for algorithm in arguments.algorithms:
                for train in arguments.train:
                    row = cell(family, algorithm, train, seed, data, arguments.work)
                    rows = [r for r in rows if r["run"] != row["run"]] + [row]
                    if arguments.out:
                        write(sorted(rows, key=order), arguments.out)
    print(table(sorted(rows, key=order)))


def config_file(family: str, algorithm: str, train: str) -> Path:
    """The published run file of a cell."""
    return REPOSITORY / f"configs/tiny/{family}_{algorithm}{'_lora' if train == 'lora' else ''}.yaml"


def cell(
    family: str,
    algorithm: str,
    train: str,
    seed: int,
    data: Path,
    work: Path,
    region: str = "all",
    overrides: Mapping[str, str] | None = None,
) -> Row:
    """Run one cell and measure it.

    Args:
        overrides: suffix of the run's name -> an override of its run file.
    """
    file, name = config_file(family, algorithm, train), f"{family}-{algorithm}-{train}-{seed}"
    changed = {**({} if region == "all" else {region: f"algorithm.region={region}"}), **(overrides or {})}
    name = "-".join([name, *changed])
    options = ["training.eval_every=20", "resume=auto", *changed.values()]
    retouch("train", str(file), f"name={name}", f"seed={seed}", f"logging.dir={work}", *options, DATA_PATH=str(data))
    key = {"run": name, "family": family, "algorithm": algorithm, "train": train, "seed": seed, "region": region}
    run = load_run(file, list(changed.values()))
    images = run.optimizer.rows_per_step(1)
    return key | {"inputs": inputs(file)} | measured(work / name, derive(run).forwards_per_image, images)


def measured(run: Path, forwards_per_image: float, images_per_step: int = IMAGES_PER_STEP) -> Row:
    """What a run reached and what it cost."""
    points = evaluations(run)
    before = points.get("warmed up", points["base"])
    gain = gains(points["last"], before)
    records = read_metrics(run / "metrics.jsonl")
    steps = [r for r in records if r["kind"] == "train"]
    losses = [r["loss"] for r in steps if "loss" in r]
    return {
        "images": len(points["last"].rows),
        "images_seen": images_per_step * len(steps),
        "forwards_per_image": forwards_per_image,
        "seconds": round(sum(r["time"]["step"] - r["time"]["eval"] - r["time"]["checkpoint"] for r in steps), 1),
        "held_out": {name: {m: round(e.means()[m], 4) for m in MEASURES} for name, e in points.items()},
        "gain": {m: [round(v, 4) for v in gain[m]] for m in MEASURES},
        "curve": [
            [images_per_step * r["step"], round(r["ocr.ned"], 4)]
            for r in records
            if r["kind"] == "eval" and r["moment"] != "warmup"
        ],
        "loss": [round(fmean(losses[:10]), 4), round(fmean(losses[-10:]), 4)],
    }


def order(row: Row) -> tuple[int, int, str, int]:
    return FAMILIES.index(row["family"]), ALGORITHMS.index(row["algorithm"]), row["train"], row["seed"]


def write(rows: Sequence[Row], out: Path) -> None:
    out.parent.mkdir(parents=True, exist_ok=True)
    machine = {"cores": os.cpu_count(), "processor": platform.machine(), **environment()["packages"]}
    out.write_text(json.dumps({"machine": machine, "rows": list(rows)}, indent=1) + "\n", encoding="utf-8")


def table(rows: Sequence[Row]) -> str:
    """Means over seeds, as markdown."""
    head = "family|algorithm|trained|seeds|NED warmed up → last|gain by seed|glyphs|drift|forwards per image|seconds"
    lines = [f"| {' | '.join(head.split('|'))} |", "|---" * 10 + "|"]
    cells = dict.fromkeys((r["family"], r["algorithm"], r["train"]) for r in rows)
    for key in cells:
        mine = [r for r in rows if (r["family"], r["algorithm"], r["train"]) == key]
        start = fmean(r["held_out"].get("warmed up", r["held_out"]["base"])["ocr.ned"] for r in mine)
        last = {m: fmean(r["held_out"]["last"][m] for r in mine) for m in MEASURES}
        each = ", ".join(f"{r['gain']['ocr.ned'][0]:+.3f}" for r in mine)
        lines.append(
            f"| {key[0]} | {key[1]} | {key[2]} | {len(mine)} | {start:.3f} → {last['ocr.ned']:.3f} | {each} | "
            f"{last['glyph_correlation']:.3f} | {last['outside_l1']:.4f} | {mine[0]['forwards_per_image']:.1f} | "
            f"{fmean(r['seconds'] for r in mine):.0f} |"
        )
    return "\n".join(lines)


def plot(rows: Sequence[Row], out: Path) -> None:
    """Held-out NED against images seen, full weights: the mean over seeds, and the seeds faintly."""
    import matplotlib.pyplot as plt

    families = [f for f in FAMILIES if any(r["family"] == f and r["train"] == "full" for r in rows)]
    figure, axes = plt.subplots(1, len(families), figsize=(6.2 * len(families), 3.8), squeeze=False, sharey=True)
    for axis, family in zip(axes[0], families, strict=True):
        ends = dict[str, tuple[Sequence[float], str]]()
        for number, algorithm in enumerate(ALGORITHMS):
            own = style(number)
            curves = [
                r["curve"] for r in rows if (r["family"], r["algorithm"], r["train"]) == (family, algorithm, "full")
            ]
            for curve in curves:
                axis.plot(*zip(*curve, strict=True), color=own["color"], alpha=0.25, linewidth=0.8)
            if curves:
                mean = [(points[0][0], fmean(p[1] for p in points)) for points in zip(*curves, strict=False)]
                axis.plot(*zip(*mean, strict=True), **own)
                ends[algorithm] = mean[-1], own["color"]
        axis.set_title(family)
        axis.set_xlabel("images seen")
        label_ends(axis, ends)
    axes[0][0].set_ylabel("held-out NED (OCR)")
    out.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(out, bbox_inches="tight", metadata={"Date": None})


if __name__ == "__main__":
    main()
