"""How much of what a trained reader gains do readers confirm that nothing was trained on?

The tiny run files of GRPO (the demo), DiffusionNFT and reward gradients on three seeds. Every image of the evaluations
after the supervised warm-up and at the end is kept, and read by PP-OCR (rapidocr, which GRPO and NFT train on),
EasyOCR, tesseract and ddddocr. The reward gradient trains on the package's recognizer, which reads its own images.
`retouch.observe.transfer` has the definitions.

    pip install "retouch[readers]"
    python benchmarks/readers.py --out benchmarks/results/readers.json
    python benchmarks/readers.py --print --out benchmarks/results/readers.json     # the table of what --out holds

A finished run is not repeated, an interrupted one is resumed, and rows of --out that are not asked for stay.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np
from inputs import inputs

from algorithms import REPOSITORY, Row, evaluations, make_data, retouch, write
from retouch.config import load_run
from retouch.data.dataset import Dataset
from retouch.observe.transfer import Transfer, transfers
from retouch.rewards.protocol import RewardItem
from retouch.rewards.scorers.ocr import OcrReward, OcrScorer
from retouch.training.evaluation import Evaluation
from retouch.types import Score
from retouch.use.items import examples_of

ALGORITHMS = {"grpo": "ocr", "nft": "ocr", "reward_gradient": "recognizer"}
"""Run files by their algorithm -> the reader that they train on."""

READERS = {
    "ocr": OcrReward(detect=False, threads=1),
    "easyocr": OcrReward(engine="easyocr", detect=False),
    "tesseract": OcrReward(engine="tesseract", detect=False),
    "ddddocr": OcrReward(engine="ddddocr", detect=False, case_sensitive=False, threads=1),
}

IMAGES = 192


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--algorithms", nargs="+", choices=list(ALGORITHMS), default=list(ALGORITHMS))
    parser.add_argument("--work", type=Path, default=Path("runs/readers"), help="folder for data and runs")
    parser.add_argument("--out", type=Path, help="JSON to write, or to add to")
    parser.add_argument("--print", action="store_true", help="print the table of what --out holds, run nothing")
    arguments = parser.parse_args()
    rows: list[Row] = json.loads(arguments.out.read_text())["rows"] if arguments.out and arguments.out.exists() else []
    if not arguments.print:
        make_data(arguments.work / "data")
        scorers = {name: entry.make() for name, entry in READERS.items()}
        for scorer in scorers.values():
            scorer.load("cpu")
        for seed in arguments.seeds:
            for algorithm in arguments.algorithms:
                run = trained(algorithm, seed, arguments.work)
                row = measured(algorithm, seed, run, scorers)
                rows = sorted([r for r in rows if r["run"] != row["run"]] + [row], key=lambda r: r["run"])
                if arguments.out:
                    write(rows, arguments.out)
    print(table(rows))


def file_of(algorithm: str) -> Path:
    return REPOSITORY / f"configs/tiny/flux_fill_{algorithm}.yaml"


def trained(algorithm: str, seed: int, work: Path) -> Path:
    """The run directory of a published run file with a seed, with all images of its milestones."""
    name = f"{algorithm}-{seed}"
    options = ["training.eval_every=0", f"evaluation.grid_examples={IMAGES}", "resume=auto"]
    options += [f"name={name}", f"seed={seed}", f"logging.dir={work}"]
    retouch("train", str(file_of(algorithm)), *options, DATA_PATH=str(work / "data"))
    return work / name


def measured(algorithm: str, seed: int, run: Path, scorers: Mapping[str, OcrScorer]) -> Row:
    """What every reader reads after the warm-up and at the end of a run, and what the untouched ones confirm."""
    config, points = load_run(run / "config.yaml"), evaluations(run)
    assert config.evaluation.data is not None
    dataset = examples_of(config, config.evaluation.data, "evaluation.data", None, scored=True)
    before, last = (read(points[name], dataset, scorers) for name in ("warmed up", "last"))
    signs = Evaluation(
        [{"example": one.id, "index": 0} for one in dataset], [np.asarray(one.source) for one in dataset]
    )
    reader = ALGORITHMS[algorithm]
    [found] = transfers(before, last, [reader], [name for name in scorers if name != reader])
    return {
        "run": run.name,
        "algorithm": algorithm,
        "seed": seed,
        "inputs": inputs(file_of(algorithm)),
        "readers": {name: scorer.spec.revision for name, scorer in scorers.items()},
        "images": len(last),
        "held_out": {"warmed up": means(before, READERS), "last": means(last, READERS)},
        "signs": means(read(signs, dataset, scorers), READERS),
        **rounded(found),
    }


def read(evaluation: Evaluation, dataset: Dataset, scorers: Mapping[str, OcrScorer]) -> list[Row]:
    """The rows of an evaluation with the NED of every reader. The run's own reading of PP-OCR must repeat."""
    examples = {example.id: example for example in dataset[:IMAGES]}
    items = [
        RewardItem(i, one.prompt, image, mask=np.asarray(one.mask), metadata=one.metadata)
        for i, (row, image) in enumerate(zip(evaluation.rows, evaluation.images, strict=True))
        for one in [examples[row["example"]]]
    ]
    rows = [dict(row) for row in evaluation.rows]
    for name, scorer in scorers.items():
        for row, outcome in zip(rows, scorer.score(items), strict=True):
            assert isinstance(outcome, Score), outcome
            assert f"{name}.ned" not in row or abs(row[f"{name}.ned"] - outcome.value) < 1e-9, (name, row, outcome)
            row[f"{name}.ned"] = outcome.value
    return rows


def means(rows: Sequence[Row], readers: Iterable[str]) -> dict[str, float]:
    return {name: round(fmean(row[f"{name}.ned"] for row in rows), 4) for name in readers}


def rounded(found: Transfer) -> Row:
    def four(values: Sequence[float]) -> list[float]:
        return [round(value, 4) for value in values]

    return {
        "trained": found.trained,
        "gain": {found.trained: four(found.gain)} | {name: four(gain) for name, gain in found.gains.items()},
        "transfer": {name: four(share) for name, share in found.shares.items()},
        "hacking_index": four(found.index),
    }


def table(rows: Sequence[Row]) -> str:
    """One line for each run, as markdown."""
    names = [name for name in READERS if name != "ocr"]
    head = ["algorithm", "seed", "trained reader: gain", "PP-OCR", *(f"{name}" for name in names), "hacking index"]
    lines = [f"| {' | '.join(head)} |", "|---" * len(head) + "|"]
    for row in rows:
        of: dict[str, Any] = row["transfer"]
        cells = [shown(of[name], 2) if name in of else "trained" for name in READERS]
        gain = f"{row['trained']}: {shown(row['gain'][row['trained']], 3, signed=True)}"
        index = shown(row["hacking_index"], 3, signed=True)
        lines.append(f"| {' | '.join([row['algorithm'], str(row['seed']), gain, *cells, index])} |")
    return "\n".join(lines)


def shown(value: Sequence[float], digits: int, *, signed: bool = False) -> str:
    mean, low, high = (f"{one:{'+' if signed else ''}.{digits}f}".replace("0.", ".", 1) for one in value)
    return f"{mean} [{low}, {high}]"


if __name__ == "__main__":
    main()
