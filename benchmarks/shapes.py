"""What do images in their own shape cost, and is every shape trained?

    python benchmarks/shapes.py throughput --out benchmarks/results/shapes.json
    python benchmarks/shapes.py gains --out benchmarks/results/shapes.json

`throughput`: epochs of GRPO on images of four shapes of exactly as many pixels (192 x 192, 144 x 256, 256 x 144 and
128 x 288) against as many epochs at 192 x 192, in turns, in one process of one thread; four epochs, one of each shape,
are one measurement of its processor seconds. A random network of the width of --width; decoding takes part, rewards
take no time, examples are encoded before.

`gains`: GRPO on the tiny base of FLUX.1-Fill, on signs of four shapes of about 2,048 pixels; the base is made for the
first. The reward is the brightness inside the mask, which a few steps can raise on each shape; letters at shapes that
the base has never seen take longer. Gains of held-out signs of each shape over the base, paired by image, with 95 %
intervals.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any

import torch
from diffusers import FluxTransformer2DModel
from epochs import epochs
from loop_overhead import NoRewards, machine, timed

from retouch.api import train
from retouch.config import parse_run
from retouch.families.flux_fill.model import FluxFill
from retouch.imaging.masks import MASK_THRESHOLD
from retouch.rewards.protocol import RewardItem
from retouch.tiny.signs import draw_words, write_signs
from retouch.training.build import Run, build
from retouch.training.evaluation import Evaluation, load_evaluation
from retouch.training.session import Session
from retouch.use.comparison import gains

Size = tuple[int, int]

EQUAL: tuple[Size, ...] = ((192, 192), (144, 256), (256, 144), (128, 288))
TINY: tuple[Size, ...] = ((32, 64), (48, 48), (64, 32), (16, 128))
"""(Height, width) of images; each is one of the shapes of its run."""

MEASURE = "light"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("part", choices=("throughput", "gains"))
    parser.add_argument("--width", type=int, default=96, help="of the network of `throughput`, a multiple of 32")
    parser.add_argument("--pairs", type=int, default=5, help="measurements of `throughput`")
    parser.add_argument("--steps", type=int, default=40, help="optimizer steps of `gains`")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, required=True, help="JSON whose entry of this part is written anew")
    options = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as work:
        measured = (throughput if options.part == "throughput" else gained)(options, Path(work))
    before = json.loads(options.out.read_text("utf-8")) if options.out.is_file() else {}
    result = {**before, options.part: {"machine": machine(), **measured}}
    options.out.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    print(json.dumps(measured, indent=1))


def signs_of(folder: Path, sizes: Sequence[Size], each: int, half: Any, seed: int) -> Path:
    """A manifest of signs without targets, `each` of every size, in turn; ids from 1000 times the number of a size."""
    entries: list[list[dict[str, Any]]] = []
    for number, size in enumerate(sizes):
        words = draw_words(each, half, seed + number)
        write_signs(folder / str(number), words, size, seed, with_targets=False, first_id=1000 * number)
        images = [(1000 * number + n, word) for n, word in enumerate(words)]
        entries.append(
            [
                {"id": i, "prompt": f"the text {word}", "text": word}
                | {
                    f"{role}_path": f"{number}/test{i}_{file}.png"
                    for role, file in (("image", "source"), ("mask", "mask"))
                }
                for i, word in images
            ]
        )
    manifest = folder / "manifest.jsonl"
    listed = [entry for turn in zip(*entries, strict=True) for entry in turn]
    manifest.write_text("".join(json.dumps(entry) + "\n" for entry in listed), encoding="utf-8")
    return manifest


def data_of(manifest: Path, pixels: int, aspect: float) -> dict[str, Any]:
    resolution = {"pixels": pixels, "multiple": 16, "max_aspect": aspect}
    return {"format": "manifest", "path": str(manifest), "resolution": resolution, "target": "none"}


# --- throughput ---


def throughput(options: argparse.Namespace, work: Path) -> dict[str, Any]:
    """Processor seconds of four epochs on four shapes and on one, in turns."""
    pipe = FluxFill.tiny()
    heads = options.width // 32
    wider = FluxTransformer2DModel.from_config(pipe.transformer.config, num_attention_heads=heads)
    pipe.register_modules(transformer=wider)
    pipe.save_pretrained(work / "model")
    runs = {"four": running(work, "four", EQUAL, 2), "one": running(work, "one", EQUAL[:1], 8)}
    blocks = {name: four_epochs(run) for name, run in runs.items()}
    for block in blocks.values():
        block()  # examples are encoded, memory is allocated
    seconds: list[dict[str, float]] = []
    for number in range(options.pairs):
        order = list(blocks)[:: 1 if number % 2 else -1]
        taken = {name: timed(blocks[name])[1] for name in order}
        seconds.append({name: round(taken[name], 3) for name in blocks})
    for run in runs.values():
        run.close()
    ratios = sorted(pair["one"] / pair["four"] for pair in seconds)
    return {
        "width": options.width,
        "shapes": EQUAL,
        "images": 4 * 8,
        "seconds": seconds,
        "ratio": round(median(ratios), 4),
        "range": [round(ratios[0], 4), round(ratios[-1], 4)],
    }


def running(work: Path, name: str, sizes: Sequence[Size], each: int) -> Run:
    run = build(parse_run({
        "name": name,
        "model": {
            "path": str(work / "model"),
            "dtype": "fp32",
            "max_sequence_length": 24,
            "train": {"kind": "lora", "rank": 16, "alpha": 16},
        },
        "data": data_of(signs_of(work / name, sizes, each, "train", 1), 36864, 2.5),
        "rollout": {
            "group_size": 4,
            "global_groups_per_batch": 2,
            "batch_size_per_device": 8,
            "num_steps": 4,
            "window": {"size": 2},
            "noise_level": 0.7,
        },
        "algorithm": {"name": "grpo"},
        "rewards": {"preservation": {}},
        "optimizer": {"batch_size_per_device": 4, "gradient_accumulation": 2},
        "training": {"max_steps": 1000, "checkpoint_every": 0, "eval_every": 0, "mixed_precision": "no"},
        "evaluation": {"num_examples": 1, "grid_examples": 0},
        "logging": {"dir": str(work / "runs"), "sinks": []},
    }))  # fmt: skip
    run.rewards = NoRewards(run.rewards)  # type: ignore[assignment]
    return run


def four_epochs(run: Run) -> Any:
    session = Session(run)
    session.__enter__()
    epoch = epochs(session)
    return lambda: [epoch() for _ in EQUAL]


# --- gains ---


def light(items: Sequence[RewardItem]) -> list[float]:
    """Mean brightness in [0, 1] of the masked pixels: the reward of `gains`."""
    found: list[float] = []
    for item in items:
        assert item.mask is not None
        found.append(float(item.image[item.mask >= MASK_THRESHOLD].mean()) / 255)
    return found


def gained(options: argparse.Namespace, work: Path) -> dict[str, Any]:
    """The gain of each shape."""
    held_out = data_of(signs_of(work / "held_out", TINY, 24, "held_out", 9), 2048, 8)
    run = train({
        "name": "shapes",
        "seed": options.seed,
        "model": {
            "family": "flux_fill",
            "path": "tiny",
            "dtype": "fp32",
            "max_sequence_length": 24,
            "train": {"kind": "full"},
        },
        "data": data_of(signs_of(work / "train", TINY, 96, "train", 1), 2048, 8),
        "rollout": {
            "group_size": 8,
            "global_groups_per_batch": 6,
            "shared_noise": True,
            "batch_size_per_device": 48,
            "num_steps": 4,
            "noise_level": 0.7,
            "window": {"size": 2, "range": [0.0, 0.75]},
        },
        "algorithm": {"name": "grpo", "clip_range": 2e-3},
        "rewards": {MEASURE: {"scorer": "fn", "fn": "shapes:light", "needs": ["mask"]}},
        "optimizer": {"lr": 3e-4, "batch_size_per_device": 48, "global_batch_size": 48},
        "training": {
            "max_steps": options.steps,
            "checkpoint_every": 0,
            "eval_every": options.steps,
            "mixed_precision": "no",
            "gradient_checkpointing": False,
        },
        "evaluation": {"data": held_out, "num_examples": 4 * 24, "grid_examples": 0},
        "logging": {"dir": str(work / "runs"), "sinks": []},
    })  # fmt: skip
    first, *_, last = sorted((Path(run.path) / "evaluations").glob("step-*"))
    before, after = (load_evaluation(folder) for folder in (first, last))
    rows = {}
    for number, shape in enumerate(TINY):
        one, two = (of_shape(evaluation, number) for evaluation in (before, after))
        rows["x".join(map(str, shape))] = {
            "images": len(two.rows),
            "before": round(one.means()[MEASURE], 4),
            "after": round(two.means()[MEASURE], 4),
            "gain": [round(value, 4) for value in gains(two, one)[MEASURE]],
        }
    return {"steps": options.steps, "seed": options.seed, "measure": MEASURE, "shapes": rows}


def of_shape(evaluation: Evaluation, number: int) -> Evaluation:
    return Evaluation([row for row in evaluation.rows if row["example"] // 1000 == number], [])


if __name__ == "__main__":
    main()
