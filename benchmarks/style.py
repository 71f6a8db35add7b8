"""Does a style adapter learn, first supervised, then by RL? On the tiny base, of which not one weight changes.

Words are to be written in the font and colour of a reference that shows another word. Measured on words, colours and
references that nothing was trained on, by a program that knows the truth (`retouch.glyphs`): how often the font is that
of the reference (four fonts; chance is .25, and .85 is what the program finds in true pictures), how far the colour of
the ink is from the reference's (mean of three channels, 0 to 255), and the OCR reward. `shuffled` are the same images
judged by another item's style: what an adapter that ignored its reference would reach.

    python benchmarks/style.py --out benchmarks/results/style.json --grid docs/images/style.png

SFT, then GRPO and DiffusionNFT, both from the adapter that SFT left (`model.train.initial_adapter`).
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import sys
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np
import torch
from PIL import Image

REPOSITORY = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(REPOSITORY / "examples"))

from demo import retouch  # noqa: E402

from retouch.config import load_run  # noqa: E402
from retouch.config.reward_sections import OcrReward, RewardClientConfig  # noqa: E402
from retouch.data import load_dataset  # noqa: E402
from retouch.data.synth import draw_sign  # noqa: E402
from retouch.evaluate import Evaluation, evaluate  # noqa: E402
from retouch.glyphs import font_of, ink_colour  # noqa: E402
from retouch.models.loading import tiny_path  # noqa: E402
from retouch.observe import Stopwatch  # noqa: E402
from retouch.observe.grids import grid  # noqa: E402
from retouch.observe.run_dir import environment  # noqa: E402
from retouch.rewards.compose import RewardTable  # noqa: E402
from retouch.use import Loaded  # noqa: E402

SIZE, HELD_OUT_SEED = (32, 64), 3


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--work", type=Path, default=Path("runs/style"), help="folder for data and runs")
    parser.add_argument("--sft-steps", type=int, default=250)
    parser.add_argument("--rl-steps", type=int, default=30)
    parser.add_argument("--images", type=int, default=96, help="held-out words to measure on")
    parser.add_argument("--algorithms", nargs="*", default=["grpo", "nft"], help="of RL, from the adapter of SFT")
    parser.add_argument("--out", type=Path, help="JSON to write")
    parser.add_argument("--grid", type=Path, help="picture to write: reference, base, SFT, RL")
    arguments = parser.parse_args()
    data, work = arguments.work / "data", arguments.work
    make_data(data, arguments.images)
    runs = {"sft": train("sft", work, data, f"training.max_steps={arguments.sft_steps}", "optimizer.schedule=cosine")}
    start = weights_of(runs["sft"])
    for name in arguments.algorithms:
        options = ("algorithm.warmup_steps=0", f"training.max_steps={arguments.rl_steps}")
        runs[name] = train(name, work, data, *options, f"model.train.initial_adapter={start}")
    results: dict[str, Evaluation] = {}
    loaded = Loaded(load_run(runs["sft"] / "config.yaml"))
    frozen = base_digest(loaded)
    examples = load_dataset(loaded.config.evaluation.data, "held_out", {"reference"})[: arguments.images]  # type: ignore[arg-type]
    for name, folder in {"base": None, **{name: weights_of(run) for name, run in runs.items()}}.items():
        loaded.load(folder)
        results[name] = measure(loaded, examples)
    assert base_digest(loaded) == frozen
    found = {name: agreement(result, examples) for name, result in results.items()}
    for name, values in found.items():
        print(f"{name:6}", ", ".join(f"{k} {v:.3f}" for k, v in values.items()))
    if arguments.out:
        arguments.out.parent.mkdir(parents=True, exist_ok=True)
        steps = {"sft": arguments.sft_steps, "rl": arguments.rl_steps}
        machine = {"cores": os.cpu_count(), "processor": platform.machine(), **environment()["packages"]}
        result = {"machine": machine, "images": len(examples), "steps": steps, "held_out": found}
        arguments.out.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    if arguments.grid:
        picture(examples, results, 8).save(arguments.grid)


def make_data(data: Path, images: int) -> None:
    """Prompts without pictures, pictures, and held-out words, each with a reference in its own style."""
    synth = ("data", "synth", "--styled", "--out")
    if not (data / "prompts").is_dir():
        retouch(*synth, str(data / "prompts"), "--count", "1000", "--seed", "1", "--no-targets")
    if not (data / "warmup").is_dir():
        exclude = ("--exclude", str(data / "prompts"))
        retouch(*synth, str(data / "warmup"), "--count", "480", "--seed", "2", *exclude)
    if not (data / "held_out").is_dir():
        held_out = ("--count", str(images), "--seed", str(HELD_OUT_SEED), "--half", "held_out")
        retouch(*synth, str(data / "held_out"), *held_out)


def train(algorithm: str, work: Path, data: Path, *options: str) -> Path:
    """The published tiny run of an algorithm on the adapter; one that is there is not made again."""
    run = work / algorithm
    common = (f"name={algorithm}", f"logging.dir={work}", "resume=auto", "training.eval_every=0")
    file = REPOSITORY / f"configs/tiny/flux_fill_{algorithm}_ip.yaml"
    retouch("train", str(file), *common, *options, DATA_PATH=str(data))
    return run


def weights_of(run: Path) -> Path:
    """The weights folder of the newest checkpoint."""
    return sorted((run / "checkpoints").glob("step-*"))[-1] / "weights"


def measure(loaded: Loaded, examples: Sequence[Any]) -> Evaluation:
    rewards = RewardTable({"ocr": OcrReward(detect=False)}, RewardClientConfig())
    rewards.start()
    try:
        return evaluate(loaded.model, loaded.network, examples, 1, 4, loaded.guidance_scale, 32, rewards, Stopwatch())
    finally:
        rewards.close()


def agreement(result: Evaluation, examples: Sequence[Any]) -> dict[str, float]:
    """Means over the held-out images."""
    signs = [draw_sign(e.metadata["text"], SIZE, HELD_OUT_SEED) for e in examples]  # the truth, as the data was made
    others = signs[1:] + signs[:1]
    masks = [np.asarray(e.mask) for e in examples]
    fonts = [font_of(i, m, s.word) for i, m, s in zip(result.images, masks, signs, strict=True)]
    inks = [ink_colour(i, m) for i, m in zip(result.images, masks, strict=True)]

    def error(truth: Sequence[Any]) -> float:
        return fmean(float(np.abs(np.subtract(ink, sign.ink)).mean()) for ink, sign in zip(inks, truth, strict=True))

    return {
        "ocr": round(result.means()["ocr"], 4),
        "font_right": round(fmean(f == s.face for f, s in zip(fonts, signs, strict=True)), 4),
        "font_right_shuffled": round(fmean(f == s.face for f, s in zip(fonts, others, strict=True)), 4),
        "ink_error": round(error(signs), 2),
        "ink_error_shuffled": round(error(others), 2),
    }


def base_digest(loaded: Loaded) -> float:
    """A sum over every weight that is not the adapter's; any change shows in it."""
    names = set(loaded.trainee.adapter.names.values())  # type: ignore[attr-defined]
    rest = [p for n, p in loaded.model.network.named_parameters() if n not in names]
    return float(sum(torch.sum(p.double() * torch.arange(1, p.numel() + 1).view_as(p)) for p in rest))


def picture(examples: Sequence[Any], results: dict[str, Evaluation], count: int) -> Image.Image:
    """Rows of examples: the reference, then one picture a run."""
    rows = [
        [(fitted(e.reference), e.metadata["text"]), *((r.images[i], "") for r in results.values())]
        for i, e in enumerate(examples[:count])
    ]
    return grid(rows, ["reference: text to write", *results])


def fitted(reference: Image.Image) -> np.ndarray[Any, Any]:
    """The reference in the middle of a page as large as the signs."""
    page = Image.new("RGB", (SIZE[1], SIZE[0]), "white")
    page.paste(reference, ((SIZE[1] - reference.width) // 2, (SIZE[0] - reference.height) // 2))
    return np.asarray(page)


if __name__ == "__main__":
    print(f"base: {tiny_path('flux_fill')}")
    main()
