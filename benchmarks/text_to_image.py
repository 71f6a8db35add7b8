"""Does RL raise the reward of text-to-image models? GRPO and DiffusionNFT on a tiny SD3 and a tiny FLUX.2 klein.

`retouch tiny build` trains each base from random weights; an existing base is used again. Every run is a published run
file of configs/tiny with another seed: RL on prompts without images. All runs of a family are evaluated before and
after on the same 192 held-out words, noise and solver; the gain is paired by word.

    python benchmarks/text_to_image.py --out benchmarks/results/text_to_image.json             # 2 x 2 x 3 runs
    python benchmarks/text_to_image.py --families sd3 --algorithms nft --seeds 0 --out ...     # one of them
    python benchmarks/text_to_image.py --data-only                                             # prompts alone

A finished run is not repeated, an interrupted one is resumed, and other rows of --out are kept.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import sys
from pathlib import Path
from statistics import fmean
from typing import Any

REPOSITORY = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(REPOSITORY / "examples"))

from demo import evaluations, retouch  # noqa: E402
from inputs import inputs  # noqa: E402

from retouch.observe.environment import environment  # noqa: E402
from retouch.observe.run_dir import read_metrics  # noqa: E402
from retouch.tiny.signs import draw_words  # noqa: E402
from retouch.tiny.writing import PROMPT  # noqa: E402
from retouch.use.comparison import gains  # noqa: E402

FAMILIES = ("sd3", "flux2_klein")
ALGORITHMS = ("grpo", "nft")
MEASURES = ("ocr.ned", "ocr.exact", "ocr.confidence", "picture.saturation", "picture.sharpness")

Row = dict[str, Any]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--families", nargs="+", choices=FAMILIES, default=list(FAMILIES))
    parser.add_argument("--algorithms", nargs="+", choices=ALGORITHMS, default=list(ALGORITHMS))
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--work", type=Path, default=Path("runs/text-to-image"), help="folder for bases, data and runs")
    parser.add_argument("--out", type=Path, help="JSON to write, or to add to")
    parser.add_argument("--data-only", action="store_true", help="write the prompts and train nothing")
    arguments = parser.parse_args()
    make_data(arguments.work / "data")
    if arguments.data_only:
        return
    for family in arguments.families:
        make_base(family, arguments.work / family)
    for seed in arguments.seeds:
        for family in arguments.families:
            for algorithm in arguments.algorithms:
                row = cell(family, algorithm, seed, arguments.work)
                print(line(row), flush=True)
                if arguments.out:
                    add(row, arguments.work, arguments.out)


def make_data(folder: Path) -> None:
    """Prompts to train on, and prompts with words of the held-out vocabulary."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, words in (("prompts", draw_words(2000, "train", 1)), ("held_out", draw_words(192, "held_out", 3))):
        (folder / f"{name}.txt").write_text("".join(f"{PROMPT.format(w)}\n" for w in words), encoding="utf-8")


def make_base(family: str, folder: Path) -> None:
    if not (folder / "base.json").exists():
        retouch("tiny", "build", family, "--out", str(folder))


def config_file(family: str, algorithm: str) -> Path:
    return REPOSITORY / f"configs/tiny/{family}_{algorithm}.yaml"


def cell(family: str, algorithm: str, seed: int, work: Path) -> Row:
    """Run one cell and measure it."""
    file, name = config_file(family, algorithm), f"{family}-{algorithm}-{seed}"
    options = (f"name={name}", f"seed={seed}", f"logging.dir={work}", "resume=auto")
    retouch("train", str(file), *options, MODEL_PATH=str(work / family), DATA_PATH=str(work / "data"))
    key = {"run": name, "family": family, "algorithm": algorithm, "seed": seed}
    return key | {"inputs": inputs(file, work / family)} | measured(work / name)


def measured(run: Path) -> Row:
    """Held-out means before and after a run, the paired gain, and the cost."""
    points = evaluations(run)
    gain = gains(points["last"], points["base"])
    records = read_metrics(run / "metrics.jsonl")
    steps = [r["time"] for r in records if r["kind"] == "train"]
    return {
        "images": len(points["last"].rows),
        "steps": len(steps),
        "seconds": round(sum(t["step"] - t["eval"] - t["checkpoint"] for t in steps), 1),
        "held_out": {name: {m: round(e.means()[m], 4) for m in MEASURES} for name, e in points.items()},
        "gain": {m: [round(v, 4) for v in gain[m]] for m in MEASURES},
        "curve": [[r["step"], round(r["ocr.ned"], 4)] for r in records if r["kind"] == "eval"],
    }


def add(row: Row, work: Path, out: Path) -> None:
    """Write a row, and the measures of its base, beside what the file has."""
    found = json.loads(out.read_text(encoding="utf-8")) if out.exists() else {"bases": {}, "rows": []}
    base = json.loads((work / row["family"] / "base.json").read_text(encoding="utf-8"))
    bases = found["bases"] | {row["family"]: base}
    rows = sorted([r for r in found["rows"] if r["run"] != row["run"]] + [row], key=order)
    machine = {"cores": os.cpu_count(), "processor": platform.machine(), **environment()["packages"]}
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(json.dumps({"machine": machine, "bases": bases, "rows": rows}, indent=1) + "\n", encoding="utf-8")


def order(row: Row) -> tuple[int, int, int]:
    return FAMILIES.index(row["family"]), ALGORITHMS.index(row["algorithm"]), row["seed"]


def table(rows: list[Row]) -> str:
    """Gains by seed with their intervals, as markdown."""
    head = "family|algorithm|steps|NED before|gain of seed 0|gain of seed 1|gain of seed 2|saturation|seconds"
    lines = [f"| {' | '.join(head.split('|'))} |", "|---" * 9 + "|"]
    for family in FAMILIES:
        for algorithm in ALGORITHMS:
            mine = [r for r in rows if (r["family"], r["algorithm"]) == (family, algorithm)]
            before, after = (mean_of(mine, name, "picture.saturation") for name in ("base", "last"))
            cells = [
                family,
                algorithm,
                str(mine[0]["steps"]),
                f"{mean_of(mine, 'base', 'ocr.ned'):.3f}",
                *(interval(r) for r in mine),
                f"{before:.3f} → {after:.3f}",
                f"{fmean(r['seconds'] for r in mine):.0f}",
            ]
            lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def mean_of(rows: list[Row], point: str, measure: str) -> float:
    return fmean(r["held_out"][point][measure] for r in rows)


def interval(row: Row) -> str:
    mean, low, high = row["gain"]["ocr.ned"]
    return f"{mean:+.3f} [{low:+.3f}, {high:+.3f}]"


def line(row: Row) -> str:
    before, after = (row["held_out"][name]["ocr.ned"] for name in ("base", "last"))
    mean, low, high = row["gain"]["ocr.ned"]
    return (
        f"{row['run']}: NED {before:.3f} -> {after:.3f}, gain {mean:+.3f} [{low:+.3f}, {high:+.3f}], {row['seconds']} s"
    )


if __name__ == "__main__":
    main()
