"""Does GRPO teach a text encoder what to say to a frozen editor? The tiny editing task, with an adapter and in full.

For every kind and seed: one run of configs/tiny/qwen_image_edit_vlm_grpo(_full).yaml. Measured are the colour judge on
96 held-out instructions, whose answers are drawn as in training, from fixed seeds, at every evaluation; how many of the
answers name the right colour, which pixels cannot fake; whether it is still the words that decide what is drawn; how
many steps were clipped; and the CPU time of the whole run, start and evaluations included.

    python benchmarks/vlm_edit.py --seeds 0 1 2 --out benchmarks/results/vlm_edit.json
    python benchmarks/vlm_edit.py --again --out ...          # of the runs that lie in --work; their CPU time stays
    python benchmarks/vlm_edit.py --again --kinds full --seeds 0 --picture docs/images/vlm-grpo.png
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import re
import resource
import subprocess
import sys
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any

from inputs import inputs
from PIL import Image
from vlm_words import words_decide

from retouch.config import load_run
from retouch.engine.saved import complete_checkpoints
from retouch.observe.environment import environment
from retouch.observe.grids import grid
from retouch.observe.run_dir import read_metrics, read_rows
from retouch.observe.statistics import paired_difference
from retouch.tiny.edits import (
    COLOURS,
    write_edits,
)

REPOSITORY = Path(__file__).resolve().parents[1]
CONFIGS = {
    "adapter": REPOSITORY / "configs/tiny/qwen_image_edit_vlm_grpo.yaml",
    "full": REPOSITORY / "configs/tiny/qwen_image_edit_vlm_grpo_full.yaml",
}
TRAINED = {"adapter": "adapter", "full": "all weights"}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--kinds", nargs="+", choices=list(CONFIGS), default=list(CONFIGS))
    parser.add_argument("--work", type=Path, default=Path("runs/vlm-edit"), help="folder for data and runs")
    parser.add_argument("--again", action="store_true", help="summarise runs that are there, train nothing")
    parser.add_argument("--picture", type=Path, help="draw the first run's evaluations, before and after")
    parser.add_argument("--out", type=Path, help="JSON to write")
    arguments = parser.parse_args()
    data = arguments.work / "data"
    for half, count, seed in (("train", 256, 1), ("held_out", 96, 2)):
        if not (data / half / "manifest.json").exists():
            write_edits(data / half, count, half, seed)
    one = summary if arguments.again else measure
    rows = [one(arguments.work / f"{kind}-{seed}", kind, seed) for kind in arguments.kinds for seed in arguments.seeds]
    for row in rows:
        print(line(row))
    if arguments.picture:
        picture(arguments.work / rows[0]["run"]).save(arguments.picture)
    if arguments.out:
        write(arguments.out, rows)


def write(out: Path, rows: list[dict[str, Any]]) -> None:
    """Over the rows of the same runs; others stay, and what was not measured again."""
    known: list[dict[str, Any]] = json.loads(out.read_text(encoding="utf-8"))["rows"] if out.exists() else []
    all_rows = {row["run"]: row for row in known}
    all_rows |= {row["run"]: all_rows.get(row["run"], {}) | row for row in rows}
    machine = {"cores": os.cpu_count(), "processor": platform.machine(), **environment()["packages"]}
    out.parent.mkdir(parents=True, exist_ok=True)
    text = json.dumps({"machine": machine, "rows": list(all_rows.values())}, indent=2)
    out.write_text(text + "\n", encoding="utf-8")


def measure(run: Path, kind: str, seed: int) -> dict[str, Any]:
    """Train one run -> its row."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    subprocess.run(
        [sys.executable, "-m", "retouch", "train", str(CONFIGS[kind]), f"name={run.name}", f"seed={seed}",
         f"logging.dir={run.parent}"],
        env={**os.environ, "DATA_PATH": str(run.parent / "data")},
        check=True,
    )  # fmt: skip
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    cpu = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return {"cpu_seconds": round(cpu, 1)} | summary(run, kind, seed)


def summary(run: Path, kind: str, seed: int) -> dict[str, Any]:
    """Of a finished run: held-out means, the paired gain from its first to its last evaluation, what decides what is
    drawn before and after, and gradients."""
    metrics = read_metrics(run / "metrics.jsonl")
    records = [record for record in metrics if record["kind"] == "eval"]
    rows = {r["step"]: read_rows(run / f"evaluations/step-{r['step']:06d}/rows.jsonl") for r in records}
    tasks = json.loads((run.parent / "data/held_out/manifest.json").read_text(encoding="utf-8"))
    asked = [task["colour"] for task in tasks]
    first, last = rows[records[0]["step"]], rows[records[-1]["step"]]
    gain = paired_difference([row["colour"] for row in last], [row["colour"] for row in first])
    said = {step: [row["read"] == colour for row, colour in zip(found, asked)] for step, found in rows.items()}
    held_out = run.parent.resolve() / "data/held_out/manifest.json"
    config = load_run(run / "config.yaml", [f"evaluation.data.path={held_out}", f"logging.dir={run.parent}"])
    published = load_run(CONFIGS[kind])
    for section in ("model", "rollout", "algorithm", "rewards", "training"):
        if getattr(config, section) != getattr(published, section):
            raise SystemExit(f"{run}: {section} is not as in {CONFIGS[kind].name}; train again, without --again")
    weights = complete_checkpoints(run / "checkpoints")[-1] / "weights"
    return {
        "run": run.name,
        "kind": kind,
        "seed": seed,
        "inputs": inputs(CONFIGS[kind]),
        "tasks": len(first),
        "held_out": {str(step): round(sum(r["colour"] for r in found) / len(found), 4) for step, found in rows.items()},
        "says_the_colour": {str(step): round(sum(right) / len(right), 4) for step, right in said.items()},
        "first_eight_drawn_right": [sum(row["colour"] > 0.5 for row in found[:8]) for found in (first, last)],
        "at_the_end": judge_and_words(last, tasks),
        "gain": [round(value, 4) for value in gain],
        "words_decide": {
            "before": words_decide(config, None, [row["read"] for row in first]),
            "after": words_decide(config, weights, [row["read"] for row in last]),
        },
        "grad_norm": gradients(metrics, config.algorithm.trl["max_grad_norm"]),  # type: ignore[union-attr]
    }


def judge_and_words(rows: list[dict[str, Any]], tasks: list[dict[str, str]]) -> dict[str, Any]:
    """In how many tasks both say the same of an answer, and in how many not, by what was said to which instruction."""
    right = [row["colour"] > 0.5 for row in rows]
    named = [row["read"] == task["colour"] for row, task in zip(rows, tasks, strict=True)]
    known = [row["read"] in COLOURS for row in rows]
    pairs = list(zip(right, named, known, strict=True))
    differ = [f"{task['prompt']}: {row['read']}" for r, n, row, task in zip(right, named, rows, tasks) if r != n]
    return {
        "agree": sum(r == n for r, n, _ in pairs),
        "right_word_drawn_wrong": sum(n and not r for r, n, _ in pairs),
        "wrong_word_drawn_right": sum(r and k and not n for r, n, k in pairs),
        "no_colour_drawn_right": sum(r and not k for r, _, k in pairs),
        "no_colour": known.count(False),
        "differ": dict(Counter(differ).most_common()),
    }


def gradients(metrics: list[dict[str, Any]], limit: float) -> dict[str, float]:
    """Share of steps whose gradient was longer than the limit, and how far its length goes over the usual one."""
    norms = [record["grad_norm"] for record in metrics if record["kind"] == "train"]
    return {
        "clipped": round(sum(norm > limit for norm in norms) / len(norms), 4),
        "median_over_limit": round(median(norms) / limit, 2),
        "largest_over_median": round(max(norms) / median(norms), 2),
    }


def picture(run: Path) -> Image.Image:
    """Source with its instruction; what was drawn and said at the first evaluation and at the last; a task a row."""
    tasks = json.loads((run.parent / "data/held_out/manifest.json").read_text(encoding="utf-8"))
    evaluations = sorted((run / "evaluations").iterdir())
    ends = [(folder, read_rows(folder / "rows.jsonl")) for folder in (evaluations[0], evaluations[-1])]
    cells: list[list[tuple[Image.Image, str]]] = []
    for i, name in enumerate(sorted(file.name for file in evaluations[0].glob("*.png"))):
        source = Image.open(run.parent / "data/held_out" / tasks[i]["image_path"])
        edits = [(Image.open(folder / name), found[i]["read"]) for folder, found in ends]
        cells.append([(source, tasks[i]["prompt"]), *edits])
    return grid(cells, ["source", "before", "after"])


def table(rows: Sequence[dict[str, Any]]) -> str:
    """One line for each run, as markdown."""
    judge = "colour judge, before training and after every 20 steps"
    lines = [f"| trained | seed | {judge} | gain [95 %] | answers with the right colour name | CPU time |"]
    lines.append("|---|---|---|---|---|---|")
    for row in rows:
        judged, said = (list(row[key].values()) for key in ("held_out", "says_the_colour"))
        mean, low, high = row["gain"]
        cells = [f"{TRAINED[row['kind']]}, {list(row['held_out'])[-1]} steps", row["seed"]]
        cells += [" → ".join(f"{value:.3f}" for value in judged), f"{mean:+.3f} [{low:+.3f}, {high:+.3f}]"]
        cells += [f"{said[0]:.3f} → {said[-1]:.3f}", f"{row['cpu_seconds']:.0f} s"]
        lines.append(f"| {' | '.join(map(str, cells))} |")
    return "\n".join(lines)


def words_table(rows: Sequence[dict[str, Any]]) -> str:
    """What completions of other tasks, and empty ones, do to the images of each run, as markdown."""
    head = ["trained", "seed", "swapped: colour of the completion", "swapped: colour of the instruction"]
    head += ["empty: target colour", "empty: unchanged", "right name, wrong image", "no colour name, right image"]
    lines = [f"| {' | '.join(head)} |", f"|{'---|' * len(head)}"]
    named = [("the base", "", rows[0]["words_decide"]["before"], {})]
    named += [(TRAINED[row["kind"]], row["seed"], row["words_decide"]["after"], row["at_the_end"]) for row in rows]
    for trained, seed, found, end in named:
        shares = [found["moved"]["as_said"], found["moved"]["as_asked"]]
        shares += [found["blank"]["as_asked"], found["blank"]["as_it_was"]]
        counts = [end.get(name, "") for name in ("right_word_drawn_wrong", "no_colour_drawn_right")]
        cells = " | ".join([trained, str(seed), *(f"{share:.3f}" for share in shares), *map(str, counts)])
        lines.append(re.sub(" +", " ", f"| {cells} |"))
    return "\n".join(lines)


def line(row: dict[str, Any]) -> str:
    path = " -> ".join(f"{value:.3f}" for value in row["held_out"].values())
    low, high = row["gain"][1:]
    return f"{row['run']}: {path} · gain {row['gain'][0]:+.3f} [{low:+.3f}, {high:+.3f}] · {row['words_decide']}"


if __name__ == "__main__":
    main()
