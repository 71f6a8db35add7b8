"""Does a style adapter learn, first supervised, then by RL? On the tiny base, of which not one weight changes.

Words are to be written in the font and colour of a reference that shows another word. Measured on words, colours and
references that nothing was trained on, by a program that knows the truth (`retouch.imaging.glyphs`), not by the encoder
that rewards: how often the font is that of the reference (four fonts; chance is .25, true pictures 1), by how much the
ink correlates better with that font than with the others, how far its colour is from the reference's (mean of three
channels, 0 to 255), and the OCR reward. `shuffled` are the same images judged by another item's style: what an adapter
that ignored its reference would reach.

    python benchmarks/style.py --out benchmarks/results/style.json --grid docs/images/style.png

A supervised run, then GRPO and DiffusionNFT, both from the adapter that it left (`model.train.initial_adapter`).
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import sys
from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image

REPOSITORY = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(REPOSITORY / "examples"))

from demo import retouch  # noqa: E402
from inputs import digest, inputs  # noqa: E402

from retouch.config import load_run  # noqa: E402
from retouch.data.dataset import load_dataset  # noqa: E402
from retouch.files.model_files import tiny_path  # noqa: E402
from retouch.imaging.glyphs import FONTS, Ink, contrast, correlation, ground_colour, write_spaced  # noqa: E402
from retouch.imaging.masks import Box, mask_box  # noqa: E402
from retouch.observe import Stopwatch  # noqa: E402
from retouch.observe.environment import environment  # noqa: E402
from retouch.observe.grids import grid  # noqa: E402
from retouch.observe.run_dir import read_metrics  # noqa: E402
from retouch.observe.statistics import paired_difference  # noqa: E402
from retouch.rewards.client.config import RewardClientConfig  # noqa: E402
from retouch.rewards.scorers.ocr import OcrReward  # noqa: E402
from retouch.rewards.table import RewardTable  # noqa: E402
from retouch.tiny.signs import (  # noqa: E402
    Sign,
    draw_sign,
)
from retouch.training.evaluation import (  # noqa: E402
    Evaluation,
    evaluate,
)
from retouch.use.loaded import Loaded  # noqa: E402

SIZE, HELD_OUT_SEED = (32, 64), 3
MEASURES = ("ocr", "font_right", "font_margin", "ink_error")
Row = dict[str, Any]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--work", type=Path, default=Path("runs/style"), help="folder for data and runs")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--images", type=int, default=192, help="held-out words to measure on")
    parser.add_argument("--algorithms", nargs="*", default=["grpo", "nft"], help="of RL, from the adapter of SFT")
    parser.add_argument("--out", type=Path, help="JSON to write")
    parser.add_argument("--grid", type=Path, help="picture to write: reference, base, SFT, RL of the first seed")
    parser.add_argument("--option", action="append", default=[], help="of every run, like training.max_steps=3")
    arguments = parser.parse_args()
    rows: list[Row] = []
    seeds: list[dict[str, dict[str, list[float]]]] = []
    data, work = arguments.work / "data", arguments.work
    make_data(data, arguments.images)
    for seed in arguments.seeds:
        runs = {"sft": train("sft", seed, work, data, *arguments.option)}
        start = f"model.train.initial_adapter={weights_of(runs['sft'])}"
        for name in arguments.algorithms:
            rl = load_run(config_file(name), ["model.train.initial_adapter=null"])
            steps = rl.training.max_steps - rl.algorithm.sft_steps  # type: ignore[union-attr]
            options = (f"training.max_steps={steps}", "algorithm.sft_steps=0", start)
            runs[name] = train(name, seed, work, data, *options, *arguments.option)
        found, pictures, examples = measured(runs, arguments.images)
        seeds.append(found)
        rows += [describe(name, seed, run, found) for name, run in runs.items()]
        if arguments.out:
            write(sorted(rows, key=lambda r: r["run"]), pooled(seeds), arguments.out)
        if arguments.grid and seed == arguments.seeds[0]:
            picture(examples, pictures, 8).save(arguments.grid)
    print(table(rows))


def config_file(algorithm: str) -> Path:
    """The published tiny run of an algorithm on the adapter."""
    return REPOSITORY / f"configs/tiny/flux_fill_{algorithm}_ip.yaml"


def make_data(data: Path, images: int) -> None:
    """Prompts without pictures, pictures, and held-out words, each with a reference in its own style."""
    synth = ("data", "synth", "--styled", "--out")
    if not (data / "prompts").is_dir():
        retouch(*synth, str(data / "prompts"), "--count", "1000", "--seed", "1", "--no-targets")
    if not (data / "warmup").is_dir():
        exclude = ("--exclude", str(data / "prompts"))
        retouch(*synth, str(data / "warmup"), "--count", "512", "--seed", "2", *exclude)
    if not (data / "held_out").is_dir():
        held_out = ("--count", str(images), "--seed", str(HELD_OUT_SEED), "--half", "held_out")
        retouch(*synth, str(data / "held_out"), *held_out)


def train(algorithm: str, seed: int, work: Path, data: Path, *options: str) -> Path:
    """One run; one that is there is not made again."""
    run = work / f"{algorithm}-{seed}"
    common = (f"name={run.name}", f"seed={seed}", f"logging.dir={work}", "resume=auto", "training.eval_every=0")
    retouch("train", str(config_file(algorithm)), *common, *options, DATA_PATH=str(data))
    return run


def weights_of(run: Path) -> Path:
    """The weights folder of the newest checkpoint."""
    return sorted((run / "checkpoints").glob("step-*"))[-1] / "weights"


def measured(
    runs: dict[str, Path], images: int
) -> tuple[dict[str, dict[str, list[float]]], dict[str, Evaluation], Sequence[Any]]:
    """The base and the end of each run on the same held-out items and noise -> what `agreement` finds, the images,
    and the items."""
    loaded = Loaded(load_run(runs["sft"] / "config.yaml"))
    frozen = base_digest(loaded)
    examples = load_dataset(loaded.config.evaluation.data, "held_out", {"reference"})[:images]  # type: ignore[arg-type]
    pictures: dict[str, Evaluation] = {}
    for name, folder in {"base": None, **{name: weights_of(run) for name, run in runs.items()}}.items():
        loaded.load(folder)
        pictures[name] = draw(loaded, examples)
    assert base_digest(loaded) == frozen, "a run changed weights that are not the adapter's"
    return {name: agreement(result, examples) for name, result in pictures.items()}, pictures, examples


def draw(loaded: Loaded, examples: Sequence[Any]) -> Evaluation:
    rewards = RewardTable({"ocr": OcrReward(detect=False)}, RewardClientConfig())
    rewards.start()
    try:
        return evaluate(loaded.model, loaded.network, examples, 1, 4, loaded.guidance_scale, 32, rewards, Stopwatch())
    finally:
        rewards.close()


def font_likeness(image: NDArray[np.uint8], mask: NDArray[np.uint8], text: str) -> dict[str, float]:
    """Font of `FONTS` -> normalised correlation, in [-1, 1], of the mask's ink with `text` in that font, written across
    the mask by `write_spaced`. All 0 if nothing stands out from the ground.

    Unlike `glyph_correlation` it neither moves nor scales the ink: blur does not change the order of the fonts.
    """
    left, top, right, bottom = box = mask_box(mask)
    ink = contrast(image[top:bottom, left:right].astype(np.float64))
    return {name: correlation(ink, spaced(text, name, box)) for name in FONTS}


@lru_cache(maxsize=4096)
def spaced(text: str, name: str, box: Box) -> Ink:
    """Ink of `text` across a box, at its place in the image: elsewhere letters round to other pixels."""
    page = Image.new("L", box[2:], 255)
    write_spaced(page, text, name, box, 0)
    return 255 - np.asarray(page.crop(box), np.float64)


def ink_colour(image: NDArray[np.uint8], mask: NDArray[np.uint8]) -> tuple[float, float, float]:
    """Median colour of the 5 % of the pixels inside the mask that differ most from the ground."""
    left, top, right, bottom = mask_box(mask)
    pixels = image[top:bottom, left:right].astype(np.float64)
    distance = np.abs(pixels - ground_colour(pixels)).mean(axis=2)
    r, g, b = np.median(pixels[distance >= np.quantile(distance, 0.95)], axis=0)
    return float(r), float(g), float(b)


def agreement(result: Evaluation, examples: Sequence[Any]) -> dict[str, list[float]]:
    """Each measure of each held-out image, and `shuffled/` measures, by the style of the item before."""
    signs = [draw_sign(e.metadata["text"], SIZE, HELD_OUT_SEED) for e in examples]  # the truth, as the data was made
    masks = [np.asarray(e.mask) for e in examples]
    likeness = [font_likeness(i, m, s.word) for i, m, s in zip(result.images, masks, signs, strict=True)]
    inks = [ink_colour(i, m) for i, m in zip(result.images, masks, strict=True)]

    def style(prefix: str, truth: Sequence[Sign]) -> dict[str, list[float]]:
        pairs = list(zip(likeness, truth, strict=True))
        return {
            f"{prefix}font_right": [float(max(found, key=lambda f: found[f]) == sign.face) for found, sign in pairs],
            f"{prefix}font_margin": [
                found[sign.face] - fmean(v for font, v in found.items() if font != sign.face) for found, sign in pairs
            ],
            f"{prefix}ink_error": [
                float(np.abs(np.subtract(ink, sign.ink)).mean()) for ink, sign in zip(inks, truth, strict=True)
            ],
        }

    return {
        "ocr": [row["ocr"] for row in result.rows],
        **style("", signs),
        **style("shuffled/", signs[1:] + signs[:1]),
    }


def describe(name: str, seed: int, run: Path, found: dict[str, dict[str, list[float]]]) -> Row:
    """Means of a run and its gain over what it started from (the base; RL: the supervised adapter)."""
    before = found["base" if name == "sft" else "sft"]
    steps = [r for r in read_metrics(run / "metrics.jsonl") if r["kind"] == "train"]
    return {
        "run": f"{name}-{seed}",
        "algorithm": name,
        "seed": seed,
        "steps": len(steps),
        "seconds": round(sum(r["time"]["step"] for r in steps), 1),
        "images": len(found[name]["ocr"]),
        "inputs": committed_inputs(name),
        "before": {measure: round(fmean(values), 4) for measure, values in before.items()},
        "held_out": {measure: round(fmean(values), 4) for measure, values in found[name].items()},
        "gain": {m: [round(v, 4) for v in paired_difference(found[name][m], before[m])] for m in MEASURES},
    }


def pooled(seeds: Sequence[dict[str, dict[str, list[float]]]]) -> dict[str, dict[str, list[float]]]:
    """Gains of the mean over seeds of each held-out item, so that an item counts once: run -> measure -> mean and 95 %
    interval."""
    gains: dict[str, dict[str, list[float]]] = {}
    for name in [n for n in seeds[0] if n != "base"]:
        before = "base" if name == "sft" else "sft"
        gains[name] = {}
        for measure in MEASURES:
            after, start = (np.mean([s[n][measure] for s in seeds], axis=0).tolist() for n in (name, before))
            gains[name][measure] = [round(v, 4) for v in paired_difference(after, start)]
    return gains


def committed_inputs(algorithm: str) -> dict[str, str]:
    """Digests of the run file, the tiny base and the tiny image encoder."""
    encoder = (tiny_path("image_encoder") / "model.safetensors").read_bytes()
    return inputs(config_file(algorithm)) | {"image_encoder": digest(encoder)}


def write(rows: Sequence[Row], gains: dict[str, dict[str, list[float]]], out: Path) -> None:
    out.parent.mkdir(parents=True, exist_ok=True)
    machine = {"cores": os.cpu_count(), "processor": platform.machine(), **environment()["packages"]}
    out.write_text(
        json.dumps({"machine": machine, "rows": list(rows), "pooled": gains}, indent=1) + "\n", encoding="utf-8"
    )


def table(rows: Sequence[Row]) -> str:
    """Means over seeds, as markdown; the base is what SFT started from."""
    lines = ["| | OCR | font right | font margin | ink error |", "|---" * 5 + "|"]
    start = [r["before"] for r in rows if r["algorithm"] == "sft"]
    groups = {"base": start} | {
        name: [r["held_out"] for r in rows if r["algorithm"] == name]
        for name in dict.fromkeys(r["algorithm"] for r in sorted(rows, key=lambda r: r["algorithm"] != "sft"))
    }
    for name, values in groups.items():
        ocr, right, margin, ink = (fmean(v[m] for v in values) for m in MEASURES)
        lines.append(f"| {name} | {ocr:.3f} | {right:.3f} | {margin:+.3f} | {ink:.1f} |")
    return "\n".join(lines)


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
