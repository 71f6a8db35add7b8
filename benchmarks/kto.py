"""Does KTO learn from labels alone? Samples of the tiny bases, labelled by OCR, without pairs or groups.

The labels: 480 samples of the base, one for each word, good if OCR reads at most one letter of four wrong (two of four
for Stable Diffusion, whose samples are worse). KTO trains on both labels (configs/tiny/*_kto.yaml), three seeds.
The control, `sft good`, are supervised steps on the good samples alone: the same images per step, learning rate and
schedule, for as many forwards.
Forwards are those of training; held-out words, seeds and solver are those of benchmarks/algorithms.py.

    python benchmarks/kto.py --out benchmarks/results/kto.json                    # 3 seeds
    python benchmarks/kto.py --labels flux_fill --work runs/kto                   # the data of the published file alone

A finished run is not repeated, an interrupted one is resumed, and other rows of --out are kept.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from itertools import product
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np
from inputs import inputs
from PIL import Image

from algorithms import MEASURES, REPOSITORY, Row, evaluations, make_data, read_metrics, retouch, write
from retouch.config import derive, load_run
from retouch.data.base import ItemFiles
from retouch.rewards.protocol import RewardItem
from retouch.rewards.scorers.ocr import OcrReward
from retouch.types import Score
from retouch.use.comparison import gains

FAMILIES = ("flux_fill", "sd_inpaint")
ARMS = ("kto", "sft good")
WORDS, SEED = 480, 4
GOOD = {"flux_fill": 0.75, "sd_inpaint": 0.5}
"""NED from which a sample of a base is labelled good."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--labels", choices=FAMILIES, help="write the labelled samples of one base, run nothing")
    parser.add_argument("--families", nargs="+", choices=FAMILIES, default=FAMILIES)
    parser.add_argument("--arms", nargs="+", choices=ARMS, default=ARMS)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--work", type=Path, default=Path("runs/kto"), help="folder for data and runs")
    parser.add_argument("--out", type=Path, help="JSON to write, or to add to")
    parser.add_argument("--set", nargs="*", default=[], metavar="KEY=VALUE", help="overrides of KTO, for a trial")
    arguments = parser.parse_args()
    rows: list[Row] = json.loads(arguments.out.read_text())["rows"] if arguments.out and arguments.out.exists() else []
    make_data(arguments.work / "data")
    if arguments.labels:
        make_labels(arguments.labels, arguments.work)
        return
    for arm, seed, family in product(arguments.arms, arguments.seeds, arguments.families):
        make_labels(family, arguments.work)
        row = trained(family, arm, seed, arguments.work, arguments.set)
        rows = sorted([r for r in rows if r["run"] != row["run"]] + [row], key=order)
        if arguments.out:
            write(rows, arguments.out)
    print(table(rows))


def order(row: Row) -> tuple[int, int, int]:
    return FAMILIES.index(row["family"]), ARMS.index(row["arm"]), row["seed"]


def config_file(family: str, arm: str = "kto") -> Path:
    return REPOSITORY / f"configs/tiny/{family}_{arm.split()[0]}.yaml"


# --- labels ---


def make_labels(family: str, work: Path) -> None:
    """Sample the base once for each word, read the samples, and write labels.json."""
    folder, words = work / family, work / "data/labelled"
    if (folder / "labels.json").exists():
        return
    if not (words / "self_bench.txt").exists():
        excluded = ("--exclude", str(work / "data/held_out"))
        retouch(
            "data", "synth", "--out", str(words), "--count", f"{WORDS}", "--seed", f"{SEED}", "--no-targets", *excluded
        )
    config = REPOSITORY / f"configs/tiny/{family}_nft.yaml"
    base = ("--config", str(config), "--data", str(words), "--out", str(folder / "images"), "--seed", f"{SEED}")
    retouch("sample", *base, DATA_PATH=str(work / "data"))
    section = load_run(config, [f"data.path={words}"]).data
    entries = [entry(item, folder / "images") for item in section.items() if isinstance(item, ItemFiles)]
    scorer = OcrReward(detect=False, threads=1).make()
    scorer.load("cpu")
    for one, outcome in zip(entries, scorer.score([reward_item(one) for one in entries]), strict=True):
        assert isinstance(outcome, Score)
        one["label"] = "good" if outcome.value >= GOOD[family] else "bad"
    (folder / "labels.json").write_text(json.dumps(entries, indent=1) + "\n", encoding="utf-8")


def entry(item: ItemFiles, images: Path) -> dict[str, Any]:
    """The entry of a manifest for the sample of an item, without its label."""
    source = Path(str(item.source_path)).resolve()
    files = {"image_path": str(source), "mask_path": str(Path(str(item.mask_path)).resolve())}
    sample = {"target_path": str((images / source.name).resolve())}
    return {"id": item.id, "prompt": item.prompt, "text": item.metadata["text"], **files, **sample}


def reward_item(one: dict[str, Any]) -> RewardItem:
    image, mask = (
        np.asarray(Image.open(one[key]).convert(mode)) for key, mode in (("target_path", "RGB"), ("mask_path", "L"))
    )
    return RewardItem(one["id"], one["prompt"], image, mask, metadata={"text": one["text"]})


# --- runs ---


def control(family: str, work: Path) -> list[str]:
    """Overrides that make the published file of supervised steps the control of KTO."""
    kto, good = load_run(config_file(family)), work / family / "good.json"
    entries = json.loads((work / family / "labels.json").read_text(encoding="utf-8"))
    kept = [{k: v for k, v in one.items() if k != "label"} for one in entries if one["label"] == "good"]
    good.write_text(json.dumps(kept, indent=1) + "\n", encoding="utf-8")
    optimizer = kto.optimizer
    images = optimizer.rows_per_step(1)
    shared = [
        f"optimizer.lr={optimizer.lr}",
        f"optimizer.schedule={optimizer.schedule}",
        f"optimizer.batch_size_per_device={images}",
        "optimizer.gradient_accumulation=1",
    ]
    each = derive(load_run(config_file(family, "sft good"), shared)).forwards_per_image
    steps = round(kto.training.max_steps * derive(kto).forwards_per_image / each)
    data = f"data={{format: manifest, path: {good}, resolution: [32, 64]}}"
    return [data, *shared, f"training.max_steps={steps}"]


def trained(family: str, arm: str, seed: int, work: Path, changed: Sequence[str]) -> Row:
    """Train on the labels, or on the good samples, and measure the run."""
    file, labels = config_file(family, arm), work / family / "labels.json"
    name = f"{family}-{arm.replace(' ', '-')}-{seed}"
    overrides = [*([f"data.path={labels}"] if arm == "kto" else control(family, work)), *changed]
    options = [f"name={name}", f"seed={seed}", f"logging.dir={work}", "training.eval_every=20", "resume=auto"]
    environment = {"DATA_PATH": str(work / "data"), "LABELS_PATH": str(labels)}
    retouch("train", str(file), *options, *overrides, **environment)
    run = load_run(file, overrides)
    points, counted = evaluations(work / name), json.loads(labels.read_text())
    gain = gains(points["last"], points["base"])
    steps = [r for r in read_metrics(work / name / "metrics.jsonl") if r["kind"] == "train"]
    images = run.optimizer.rows_per_step(1) * len(steps)
    return {
        "run": name, "family": family, "arm": arm, "seed": seed,
        "inputs": inputs(file, overrides=overrides[1:]),
        "labels": {label: sum(one["label"] == label for one in counted) for label in ("good", "bad")},
        "forwards": round(images * derive(run).forwards_per_image),
        "held_out": {n: {m: round(e.means()[m], 4) for m in MEASURES} for n, e in points.items() if n != "warmed up"},
        "gain": {m: [round(v, 4) for v in gain[m]] for m in MEASURES},
        "label_margin": [round(r["label_margin"], 5) for r in (steps[0], steps[-1]) if "label_margin" in r],
        "seconds": round(sum(r["time"]["step"] - r["time"]["eval"] - r["time"]["checkpoint"] for r in steps), 1),
    }  # fmt: skip


def table(rows: Sequence[Row]) -> str:
    """Means over seeds, as markdown."""
    head = "family|trained on|seeds|forwards|NED base → last|gain by seed|glyphs|drift"
    lines = [f"| {' | '.join(head.split('|'))} |", "|---" * 8 + "|"]
    for family, arm in dict.fromkeys((r["family"], r["arm"]) for r in rows):
        mine = [r for r in rows if (r["family"], r["arm"]) == (family, arm)]
        start = fmean(r["held_out"]["base"]["ocr.ned"] for r in mine)
        ned, glyphs, drift = (fmean(r["held_out"]["last"][m] for r in mine) for m in MEASURES)
        each = ", ".join(f"{r['gain']['ocr.ned'][0]:+.3f}" for r in mine)
        lines.append(
            f"| {family} | {arm} | {len(mine)} | {mine[0]['forwards']:,} | {start:.3f} → {ned:.3f} | {each} | "
            f"{glyphs:.3f} | {drift:.4f} |"
        )
    return "\n".join(lines)


if __name__ == "__main__":
    main()
