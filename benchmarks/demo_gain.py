"""What does reinforcement learning gain that more supervision does not? The demo on several seeds, with its control.

For every seed: the demo's run (warm-up on 64 pictures, then GRPO on words without pictures) and a control, supervised
steps on the same 64 pictures for as long as the whole run took. For the first seed also a control that nobody has: the
same pictures with right captions. All are measured on the same held-out words, seeds and solver. `--minutes 30` makes
one long run of the same YAML instead.

    python benchmarks/demo_gain.py --seeds 0 1 2 --out benchmarks/results/demo_gain.json
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import sys
from pathlib import Path
from typing import Any

REPOSITORY = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(REPOSITORY / "examples"))

from demo import MEASURES, evaluations, make_data, retouch  # noqa: E402
from inputs import inputs  # noqa: E402

from retouch.config import load_run  # noqa: E402
from retouch.observe.environment import environment  # noqa: E402
from retouch.observe.run_dir import read_metrics  # noqa: E402
from retouch.use.comparison import gains  # noqa: E402

CONFIG = REPOSITORY / "configs/tiny/flux_fill_grpo.yaml"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--minutes", type=float, help="one long run of the first seed, without control")
    parser.add_argument("--work", type=Path, default=Path("runs/demo-gain"), help="folder for data and runs")
    parser.add_argument("--out", type=Path, help="JSON to write")
    arguments = parser.parse_args()
    data = arguments.work / "data"
    make_data(data)
    if arguments.minutes:
        rows = [long_run(arguments.seeds[0], arguments.minutes, data, arguments.work)]
    else:
        rows = [row for seed in arguments.seeds for row in seed_and_control(seed, data, arguments.work)]
        rows.append(right_captions(arguments.seeds[0], rows[1]["steps"], data, arguments.work))
    for row in rows:
        print(line(row))
    if arguments.out:
        arguments.out.parent.mkdir(parents=True, exist_ok=True)
        machine = {"cores": os.cpu_count(), "processor": platform.machine(), **environment()["packages"]}
        result = {"machine": machine, "inputs": inputs(CONFIG), "rows": rows}
        arguments.out.write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")


def seed_and_control(seed: int, data: Path, work: Path) -> list[dict[str, Any]]:
    """The demo's run, and as long of supervision alone."""
    run = train(f"grpo-{seed}", seed, data, work)
    found = summary(run, seed)
    records = [r for r in read_metrics(run / "metrics.jsonl") if r["kind"] == "train"]
    supervised = [r["time"]["step"] for r in records if r["phase"] == "warmup"]
    steps = round(found["train_seconds"] * len(supervised) / sum(supervised))
    return [found, summary(train(f"sft-{seed}", seed, data, work, *supervision(steps)), seed)]


def right_captions(seed: int, steps: int, data: Path, work: Path) -> dict[str, Any]:
    """The control with the words that the pictures show."""
    right = data / "warmup-right"
    if not (right / "self_bench.txt").exists():
        retouch("data", "synth", "--out", str(right), "--count", "64", "--seed", "2", "--exclude", f"{data}/prompts")
    run = train(f"sft-right-{seed}", seed, data, work, *supervision(steps), f"warmup_data.path={right}")
    return summary(run, seed)


def supervision(steps: int) -> tuple[str, ...]:
    """Overrides that make the demo's run its warm-up alone."""
    lr = load_run(CONFIG).optimizer.sft_lr
    return ("algorithm={name: sft}", f"training.max_steps={steps}", f"optimizer.lr={lr}")


def long_run(seed: int, minutes: float, data: Path, work: Path) -> dict[str, Any]:
    """The demo's YAML with as many steps as fill so many minutes, at the pace of the demo's run."""
    config = load_run(CONFIG)
    short = work / f"grpo-{seed}"
    if not short.is_dir():
        train(short.name, seed, data, work)
    steps = round(config.training.max_steps * 60 * minutes / summary(short, seed)["train_seconds"])
    return summary(train(f"long-{seed}", seed, data, work, f"training.max_steps={steps}"), seed)


def train(name: str, seed: int, data: Path, work: Path, *overrides: str) -> Path:
    """Run the demo's YAML -> the run directory."""
    common = (f"name={name}", f"seed={seed}", f"logging.dir={work}", "resume=auto")
    retouch("train", str(CONFIG), *common, *overrides, DATA_PATH=str(data))
    return work / name


def summary(run: Path, seed: int) -> dict[str, Any]:
    """Held-out means at the milestones of a run and the paired gain after the warm-up (or after the base)."""
    points = evaluations(run)
    before = points.get("warmed up", points["base"])
    gain = gains(points["last"], before)
    records = read_metrics(run / "metrics.jsonl")
    steps = [r["time"] for r in records if r["kind"] == "train"]
    curve = [r["ocr.ned"] for r in records if r["kind"] == "eval"]
    return {
        "run": run.name,
        "seed": seed,
        "images": len(points["last"].rows),
        "steps": len(steps),
        "train_seconds": round(sum(t["step"] - t["eval"] - t["checkpoint"] for t in steps), 1),
        "held_out": {name: {m: round(e.means()[m], 4) for m in MEASURES.values()} for name, e in points.items()},
        "gain": {m: [round(v, 4) for v in gain[m]] for m in MEASURES.values()},
        "highest": round(max(curve), 4),
    }


def line(row: dict[str, Any]) -> str:
    means = row["held_out"]
    path = " -> ".join(f"{name} {values['ocr.ned']:.3f}" for name, values in means.items())
    ned, glyph = row["gain"]["ocr.ned"], row["gain"]["glyph_correlation"]
    return (
        f"{row['run']}: NED {path} · gain {ned[0]:+.3f} [{ned[1]:+.3f}, {ned[2]:+.3f}] · "
        f"glyph correlation {glyph[0]:+.3f} [{glyph[1]:+.3f}, {glyph[2]:+.3f}] · {row['train_seconds']:.0f} s"
    )


if __name__ == "__main__":
    main()
