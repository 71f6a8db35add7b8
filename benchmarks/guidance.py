"""Does an unguided student replace a tiny base under classifier-free guidance? An experiment that is not in the
package: it replaces the loss of reward gradients in this process.

    base     held-out NED of the bases at each guidance scale and number of solver steps. Without a gain there is
             nothing to distil. Both bases learned with one caption in ten left out
    student  full weights, trained on the predictions of the base under guidance at every state of its own unguided
             rollouts: loss = mean (prediction - guided prediction of the base)². An image takes 24 forwards: 4 to
             sample, 8 of the guided base, 12 of the student's with their backward
    nft      DiffusionNFT (configs/tiny/sd_inpaint_nft.yaml without its warm-up) of the base under guidance, and of the
             student without, for half the forwards: 16 and 12 an image, 96 images a step

Every number is of the 192 held-out words, the noise and the solver of the run files; `over` is the difference to the
base without guidance, paired by word, with its 95 % interval. The criterion is a student within .02 of the guided base
on each of three seeds, and that its NFT reaches at least the NED of the guided base's.

    python benchmarks/guidance.py --out benchmarks/results/guidance.json
    python benchmarks/guidance.py --arms student --images 24 --seeds 1 2 --out benchmarks/results/guidance.json

needs the base and the prompts of sd3 (benchmarks/text_to_image.py); that of Stable Diffusion 1.5 is in the package.
"""

from __future__ import annotations

import argparse
import json
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache, partial
from pathlib import Path
from typing import Any

import torch
from diffusers import UNet2DConditionModel
from inputs import inputs
from scouts import patched
from teachers import distil, keeping_weights
from torch import Tensor

from algorithms import Row, config_file, make_data, write
from retouch.algorithms.reward_gradient import recipe
from retouch.algorithms.train import train
from retouch.config import derive, load_run
from retouch.data.dataset import load_dataset
from retouch.families.loading import load_model
from retouch.files.model_files import tiny_path
from retouch.observe import Stopwatch
from retouch.rewards.table import RewardTable
from retouch.training.evaluation import Evaluation, evaluate, load_evaluation, save_evaluation
from retouch.use.comparison import gains

ARMS = ("base", "student", "nft")
FAMILIES = ("sd_inpaint", "sd3")
SCALES = (1.0, 1.5, 2.0, 3.0)
SOLVER_STEPS = (4, 8)
"""Those of the run files, and those that `retouch tiny build` measures a base with."""

TAUGHT = "sd_inpaint"
STEPS, IMAGES = 40, (24, 48)
"""Optimizer steps of the student, and images a step of its two budgets."""

FORWARDS = 24
NFT_FORWARDS = {"guided": 16, "unguided": 12}
NFT_STEPS = {"guided": 15, "unguided": 10}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--arms", nargs="+", choices=ARMS, default=ARMS)
    parser.add_argument("--families", nargs="+", choices=FAMILIES, default=FAMILIES, help="bases to evaluate")
    parser.add_argument("--scale", type=float, default=SCALES[-1], help="guidance scale that is distilled")
    parser.add_argument("--images", type=int, nargs="+", default=IMAGES, help="images a step of the student")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0])
    parser.add_argument("--work", type=Path, default=Path("runs/guidance"), help="folder for data and runs")
    parser.add_argument(
        "--text-to-image", type=Path, default=Path("runs/text-to-image"), help="base and prompts of sd3"
    )
    parser.add_argument("--out", type=Path, help="JSON to write, or to add to")
    arguments = parser.parse_args()
    rows: list[Row] = json.loads(arguments.out.read_text())["rows"] if arguments.out and arguments.out.exists() else []
    make_data(arguments.work / "data")

    def add(new: list[Row]) -> None:
        nonlocal rows
        rows = [row for row in rows if row["run"] not in {one["run"] for one in new}] + new
        if arguments.out:
            write(rows, arguments.out)

    if "base" in arguments.arms:
        for family in arguments.families:
            for steps in SOLVER_STEPS:
                add(bases(family, steps, arguments.work, arguments.text_to_image))
    if "student" in arguments.arms:
        for seed in arguments.seeds:
            for images in arguments.images:
                add([student(arguments.scale, images, seed, arguments.work)])
    if "nft" in arguments.arms:
        for seed in arguments.seeds:
            for arm in NFT_STEPS:
                add([nft(arm, arguments.scale, arguments.images[-1], seed, arguments.work)])
    print(table(rows))


def file_of(family: str) -> Path:
    return config_file(family, "nft" if family == "sd3" else "reward_gradient", "full")


def where(family: str, work: Path, text_to_image: Path | None = None) -> list[str]:
    """Overrides with the places of a base and of its data."""
    if family == "sd3":
        data = f"{text_to_image}/data"
        places = {"model": f"{text_to_image}/sd3", "data": f"{data}/prompts.txt"}
        return [f"{key}.path={path}" for key, path in {**places, "evaluation.data": f"{data}/held_out.txt"}.items()]
    return [f"data.path={work}/data/prompts", f"evaluation.data.path={work}/data/held_out"]


# --- bases ---


def bases(family: str, steps: int, work: Path, text_to_image: Path) -> list[Row]:
    """One row for each guidance scale."""
    config = load_run(file_of(family), [*supervised(family), *where(family, work, text_to_image)])
    model = load_model(config.model)
    data = load_dataset(config.evaluation.data, "evaluation.data")
    rewards = RewardTable({"ocr": config.rewards["ocr"]}, config.reward_client)
    rewards.start()
    try:
        rewards.wait_loaded()
        at = {
            scale: evaluate(
                model, model.network, data[: config.evaluation.num_examples], 1, steps, scale, 48, rewards, Stopwatch()
            )
            for scale in SCALES
        }
    finally:
        rewards.close()
    base = Path(config.model.path) if family == "sd3" else None
    key = {"arm": "base", "family": family, "inputs": inputs(file_of(family), base), "solver_steps": steps}
    for scale, one in at.items():
        save_evaluation(one, kept(work, family, steps, scale), 0)
    return [
        {"run": f"{family}-{steps}-{scale:g}", **key, "scale": scale} | {"last": means(one), "over": over(one, at[1.0])}
        for scale, one in at.items()
    ]


def kept(work: Path, family: str, steps: int, scale: float) -> Path:
    """Folder with the evaluation of a base."""
    return work / f"{family}-base-{steps}-{scale:g}"


def means(evaluation: Evaluation) -> dict[str, float]:
    found = evaluation.means()
    return {name: round(found[name], 4) for name in ("ocr.ned", "ocr.exact", "outside_l1") if name in found}


def over(evaluation: Evaluation, base: Evaluation) -> list[float]:
    """(Mean, low, high) of the difference in NED, paired by word."""
    return [round(value, 4) for value in gains(evaluation, base)["ocr.ned"]]


# --- student ---


def supervised(family: str) -> list[str]:
    """Overrides that leave out the supervised warm-up."""
    return ["algorithm.sft_steps=0", *([] if family == "sd3" else ["warmup_data=null"])]


def student(scale: float, images: int, seed: int, work: Path) -> Row:
    """Train a student and measure it, after the bases; a finished run is not repeated.

    Args:
        images: images a step.
    """
    name = f"{TAUGHT}-student-{scale:g}-{images}-{seed}"
    changed = [
        f"training.max_steps={STEPS}",
        f"training.eval_every={STEPS // 2}",
        "algorithm.trained_step=all",
        f"rollout.global_groups_per_batch={images}",
        f"optimizer.global_batch_size={4 * images}",
        *supervised(TAUGHT),
    ]
    places = [f"name={name}", f"seed={seed}", f"logging.dir={work}", "resume=auto", *where(TAUGHT, work)]
    with keeping_weights(work / name), distilling(scale):
        train(load_run(file_of(TAUGHT), [*changed, *places]))
    base, half, last = (load_evaluation(work / name / f"evaluations/step-{at:06d}") for at in (0, STEPS // 2, STEPS))
    guided = load_evaluation(kept(work, TAUGHT, 4, scale))
    row: Row = {"run": name, "arm": "student", "family": TAUGHT, "inputs": inputs(file_of(TAUGHT)), "solver_steps": 4}
    row |= {"scale": scale, "seed": seed, "forwards": FORWARDS * images * STEPS}
    row |= {"base": means(base), "half": means(half), "last": means(last)}
    return row | {"over": over(last, base), "over_guided": over(last, guided)}


def nft(arm: str, scale: float, images: int, seed: int, work: Path) -> Row:
    """Train the guided base or the student with DiffusionNFT and measure it; a finished run is not repeated."""
    file, steps, name = config_file(TAUGHT, "nft", "full"), NFT_STEPS[arm], f"{TAUGHT}-nft-{arm}-{scale:g}-{seed}"
    changed = [f"training.max_steps={steps}", f"training.eval_every={steps}", *supervised(TAUGHT)]
    if arm == "guided":
        changed += [f"rollout.guidance_scale={scale}"]
    places = [f"name={name}", f"seed={seed}", f"logging.dir={work}", "resume=auto", *where(TAUGHT, work)]
    if arm == "unguided":
        places += [f"model.path={base_of(work / f'{TAUGHT}-student-{scale:g}-{images}-{seed}')}"]
    config = load_run(file, [*changed, *places])
    assert derive(config).forwards_per_image == NFT_FORWARDS[arm]
    train(config)
    base, last = (load_evaluation(work / name / f"evaluations/step-{at:06d}") for at in (0, steps))
    row: Row = {"run": name, "arm": f"nft {arm}", "family": TAUGHT, "inputs": inputs(file), "solver_steps": 4}
    row |= {"scale": scale if arm == "guided" else 1.0, "seed": seed}
    row |= {"forwards": NFT_FORWARDS[arm] * config.optimizer.rows_per_step(1) * steps}
    row |= {"base": means(base), "last": means(last), "over": over(last, load_evaluation(kept(work, TAUGHT, 4, 1.0)))}
    return row


def base_of(run: Path) -> Path:
    """A base with the weights of a student."""
    folder = run / "base"
    if not folder.exists():
        network = UNet2DConditionModel.from_pretrained(tiny_path(TAUGHT), subfolder="unet").float()
        network.load_state_dict(torch.load(run / "trained.pt"))
        shutil.copytree(tiny_path(TAUGHT), folder)
        network.save_pretrained(folder / "unet")
    return folder


@contextmanager
def distilling(scale: float) -> Iterator[None]:
    """Train on the predictions of the base under guidance."""

    def no_gradient(run: Any, algorithm: Any, scorers: Any, states: Tensor, steps: Tensor, *_: Any) -> Any:
        return torch.zeros(len(steps), *states.shape[1:]), torch.zeros(len(steps))

    with (
        patched(recipe, "sample_gradient", no_gradient),
        patched(recipe, "train_step", partial(distil, partial(reference_prediction, scale))),
    ):
        yield


@cache
def guided_data(run_encoded: Any, scale: float) -> Any:
    """The same data under guidance, encoded once."""
    return run_encoded.guided(scale)


@torch.no_grad()
def reference_prediction(scale: float, run: Any, rows: Any, chosen: Tensor) -> Tensor:
    """[B, C, h, w]: `guided_prediction` of the base."""
    with run.policy.use("reference"):
        return guided_prediction(run, rows, chosen, scale)


def guided_prediction(run: Any, rows: Any, chosen: Tensor, scale: float) -> Tensor:
    """[B, C, h, w]: without prompt + scale (with prompt - without), of the weights in use."""
    data = guided_data(run.encoded, scale)
    return recipe.predict(run, rows, chosen, data.conditions(rows.position[chosen].tolist(), run.engine.device))


def table(rows: list[Row]) -> str:
    """As markdown."""
    lines = ["| base | run | guidance | solver steps | forwards | NED | over the base |", "|---" * 7 + "|"]
    for row in rows:
        mean, low, high = row["over"]
        lines.append(
            f"| {row['family']} | {row['arm']} | {row['scale']:g} | {row['solver_steps']} | "
            f"{row.get('forwards', '–')} | {row['last']['ocr.ned']:.3f} | {mean:+.3f} [{low:+.3f}, {high:+.3f}] |"
        )
    return "\n".join(lines)


if __name__ == "__main__":
    main()
