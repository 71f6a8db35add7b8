"""Does the tiny base, which was built on signs with one word, learn to write two texts into one image?

Signs of 64 x 64 pixels with a word in each of two rows (`retouch data synth --texts 2`). A supervised warm-up shows the
base signs with wrong letters in their captions; DiffusionNFT then raises the similarity of each line, read at its own
place (`ocr_lines`). Measured on words that nothing was trained on: the mean similarity of a line, the share of exact
lines, and the glyph correlation (of the ink with the word, independent of OCR), each at the start, after the warm-up
and at the end of the same run.

    python benchmarks/two_texts.py --out benchmarks/results/two_texts.json --grid docs/images/two_texts.png
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from shutil import copyfile
from statistics import fmean
from typing import Any

import numpy as np

REPOSITORY = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(REPOSITORY / "examples"))

from demo import evaluations, retouch  # noqa: E402
from inputs import inputs  # noqa: E402

from retouch.observe.environment import environment  # noqa: E402
from retouch.observe.run_dir import read_metrics  # noqa: E402
from retouch.observe.statistics import paired_difference  # noqa: E402
from retouch.training.evaluation import Evaluation  # noqa: E402

CONFIG = REPOSITORY / "configs/tiny/flux_two_texts_nft.yaml"
MEASURES = {
    "line NED": "ocr_lines.line_ned",
    "exact lines": "ocr_lines.exact",
    "glyph correlation": "glyph_correlation",
}
POINTS = ("base", "warmed up", "last")
Row = dict[str, Any]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--work", type=Path, default=Path("runs/two-texts"), help="folder for data and runs")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--images", type=int, default=96, help="held-out signs to measure on")
    parser.add_argument("--out", type=Path, help="JSON to write")
    parser.add_argument("--grid", type=Path, help="image to write: base, warm-up and end of the first seed")
    parser.add_argument("--option", action="append", default=[], help="of every run, like training.max_steps=3")
    arguments = parser.parse_args()
    make_data(arguments.work / "data", arguments.images)
    rows: list[Row] = []
    found: list[dict[str, Evaluation]] = []
    for seed in arguments.seeds:
        run = train(seed, arguments.work, f"evaluation.num_examples={arguments.images}", *arguments.option)
        found.append(evaluations(run))
        rows.append(describe(seed, run, found[-1]))
        if arguments.out:
            write(rows, pooled(found), arguments.out)
        if arguments.grid and seed == arguments.seeds[0]:
            copyfile(sorted((run / "images").glob("step-*/evaluation.png"))[-1], arguments.grid)
    print(table(rows))


def make_data(data: Path, images: int) -> None:
    """Grounds with prompts, signs for the warm-up, and held-out signs; existing folders are kept."""
    synth = ("data", "synth", "--texts", "2", "--size", "64x64", "--out")
    if not (data / "prompts").is_dir():
        retouch(*synth, str(data / "prompts"), "--count", "1000", "--seed", "1", "--no-targets")
    if not (data / "warmup").is_dir():
        noise = ("--caption-noise", "0.3", "--exclude", str(data / "prompts"))
        retouch(*synth, str(data / "warmup"), "--count", "1000", "--seed", "2", *noise)
    if not (data / "held_out").is_dir():
        retouch(*synth, str(data / "held_out"), "--count", str(images), "--seed", "3", "--half", "held_out")


def train(seed: int, work: Path, *options: str) -> Path:
    """One run; a finished run is not repeated."""
    run = work / f"nft-{seed}"
    common = (f"name={run.name}", f"seed={seed}", f"logging.dir={work}", "resume=auto", "training.eval_every=0")
    retouch("train", str(CONFIG), *common, *options, DATA_PATH=str(work / "data"))
    return run


def describe(seed: int, run: Path, points: Mapping[str, Evaluation]) -> Row:
    """Means of a run at its three points, and the gain of RL over the warm-up, paired over signs."""
    steps = [r for r in read_metrics(run / "metrics.jsonl") if r["kind"] == "train"]
    gain = {
        title: paired_difference(column(points["last"], name), column(points["warmed up"], name))
        for title, name in MEASURES.items()
    }
    return {
        "run": run.name,
        "seed": seed,
        "steps": len(steps),
        "seconds": round(sum(r["time"]["step"] for r in steps), 1),
        "images": len(points["last"].rows),
        "inputs": inputs(CONFIG),
        "means": {
            point: {title: round(fmean(column(points[point], name)), 4) for title, name in MEASURES.items()}
            for point in POINTS
        },
        "gain": {title: [round(value, 4) for value in values] for title, values in gain.items()},
    }


def column(evaluation: Evaluation, name: str) -> list[float]:
    """One measure of every held-out sign.

    Raises:
        SystemExit: a sign was not measured.
    """
    values = [row.get(name) for row in evaluation.rows]
    if None in values:
        sys.exit(f"{name}: {values.count(None)} of {len(values)} signs were not measured")
    return [float(value) for value in values if value is not None]


def pooled(found: Sequence[Mapping[str, Evaluation]]) -> dict[str, list[float]]:
    """Gains of RL of the mean over seeds of each held-out sign, so that a sign counts once: mean and 95 % interval."""
    gains: dict[str, list[float]] = {}
    for title, name in MEASURES.items():
        after, before = (np.mean([column(f[p], name) for f in found], axis=0).tolist() for p in ("last", "warmed up"))
        gains[title] = [round(value, 4) for value in paired_difference(after, before)]
    return gains


def write(rows: Sequence[Row], gains: Mapping[str, list[float]], out: Path) -> None:
    out.parent.mkdir(parents=True, exist_ok=True)
    machine = {"cores": os.cpu_count(), "processor": platform.machine(), **environment()["packages"]}
    told = {"machine": machine, "rows": list(rows), "pooled": dict(gains)}
    out.write_text(json.dumps(told, indent=1) + "\n", encoding="utf-8")


def table(rows: Sequence[Row]) -> str:
    """Means over seeds, as markdown."""
    lines = ["| | " + " | ".join(MEASURES) + " |", "|---" * (len(MEASURES) + 1) + "|"]
    for point in POINTS:
        means = [fmean(row["means"][point][title] for row in rows) for title in MEASURES]
        lines.append(f"| {point} | " + " | ".join(f"{value:.3f}" for value in means) + " |")
    return "\n".join(lines)


if __name__ == "__main__":
    main()
