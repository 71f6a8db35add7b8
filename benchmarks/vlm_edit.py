"""Does GRPO teach a text encoder what to say to a frozen editor? The tiny editing task, with an adapter and in full.

For every kind and seed: one run of configs/tiny/qwen_image_edit_vlm_grpo(_full).yaml. Measured are the colour judge on
96 held-out instructions, whose answers are drawn as in training, from fixed seeds, before and after; how many answers
name the right colour, which pixels cannot fake; and the CPU time of the whole run, start and evaluations included.

    python benchmarks/vlm_edit.py --seeds 0 1 2 --out benchmarks/results/vlm_edit.json
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import resource
import subprocess
import sys
from pathlib import Path
from typing import Any

from inputs import inputs

from retouch.data.edits import write_edits
from retouch.observe.run_dir import environment, read_metrics
from retouch.observe.statistics import paired_difference

REPOSITORY = Path(__file__).resolve().parents[1]
CONFIGS = {
    "adapter": REPOSITORY / "configs/tiny/qwen_image_edit_vlm_grpo.yaml",
    "full": REPOSITORY / "configs/tiny/qwen_image_edit_vlm_grpo_full.yaml",
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--kinds", nargs="+", choices=list(CONFIGS), default=list(CONFIGS))
    parser.add_argument("--work", type=Path, default=Path("runs/vlm-edit"), help="folder for data and runs")
    parser.add_argument("--out", type=Path, help="JSON to write")
    arguments = parser.parse_args()
    data = arguments.work / "data"
    write_edits(data / "train", 256, "train", 1)
    write_edits(data / "held_out", 96, "held_out", 2)
    rows = [measure(kind, seed, data, arguments.work) for kind in arguments.kinds for seed in arguments.seeds]
    for row in rows:
        print(line(row))
    if arguments.out:
        write(arguments.out, rows)


def write(out: Path, rows: list[dict[str, Any]]) -> None:
    """Over the rows of the same runs; others stay."""
    known: list[dict[str, Any]] = json.loads(out.read_text(encoding="utf-8"))["rows"] if out.exists() else []
    all_rows = {row["run"]: row for row in [*known, *rows]}
    machine = {"cores": os.cpu_count(), "processor": platform.machine(), **environment()["packages"]}
    out.parent.mkdir(parents=True, exist_ok=True)
    text = json.dumps({"machine": machine, "rows": list(all_rows.values())}, indent=2)
    out.write_text(text + "\n", encoding="utf-8")


def measure(kind: str, seed: int, data: Path, work: Path) -> dict[str, Any]:
    """Train one run -> its row."""
    name = f"{kind}-{seed}"
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    subprocess.run(
        [sys.executable, "-m", "retouch", "train", str(CONFIGS[kind]), f"name={name}", f"seed={seed}",
         f"logging.dir={work}"],
        env={**os.environ, "DATA_PATH": str(data)},
        check=True,
    )  # fmt: skip
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return {"cpu_seconds": round(after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime, 1)} | summary(
        work / name, kind, seed
    )


def summary(run: Path, kind: str, seed: int) -> dict[str, Any]:
    """Held-out means over the run, and the paired gain from its first to its last evaluation."""
    records = [record for record in read_metrics(run / "metrics.jsonl") if record["kind"] == "eval"]
    rows = {r["step"]: read_metrics(run / f"evaluations/step-{r['step']:06d}/rows.jsonl") for r in records}
    asked = [entry["colour"] for entry in json.loads((run.parent / "data/held_out/manifest.json").read_text())]
    first, last = rows[records[0]["step"]], rows[records[-1]["step"]]
    gain = paired_difference([row["colour"] for row in last], [row["colour"] for row in first])
    said = {step: [row["read"] == colour for row, colour in zip(found, asked)] for step, found in rows.items()}
    agreed = [(row["colour"] > 0.5) == right for row, right in zip(last, said[records[-1]["step"]])]
    return {
        "run": run.name,
        "kind": kind,
        "seed": seed,
        "inputs": inputs(CONFIGS[kind]),
        "tasks": len(first),
        "held_out": {str(step): round(sum(r["colour"] for r in found) / len(found), 4) for step, found in rows.items()},
        "says_the_colour": {str(step): round(sum(right) / len(right), 4) for step, right in said.items()},
        "judge_and_words_agree_at_the_end": sum(agreed),
        "gain": [round(value, 4) for value in gain],
    }


def line(row: dict[str, Any]) -> str:
    path = " -> ".join(f"{value:.3f}" for value in row["held_out"].values())
    low, high = row["gain"][1:]
    return (
        f"{row['run']}: {path} · gain {row['gain'][0]:+.3f} [{low:+.3f}, {high:+.3f}] · {row['cpu_seconds']:.0f} CPU s"
    )


if __name__ == "__main__":
    main()
