"""Can a reward gradient do without rollouts? Direct-Align (SRPO, arXiv 2509.06942) on the tiny bases, an experiment
that is not in the package: it replaces the samples of an epoch in this process.

A data image x0 (here the source, on which nothing is written) gets known noise, the policy takes one Euler step to s',
and the noise is taken away; the reward is that of the result:

    x = (1 - s) x0 + s eps        x' = x - (s - s') v(x)        x^ = (x' - s' eps) / (1 - s')

(an epsilon model takes the step of DDIM). d x^ / d v = -(s - s') / (1 - s') is the coefficient of the trained step, one
of the `noisiest` of the solver. With `relative`, the reward is (1 + k) f(x^, text) - f(x^, another text). An image
takes 4 forwards: the forward and backward that train it, in which v is also what x^ is made of, and the reference. This
process computes v twice, and samples an epoch to have prompts to score; neither is counted.

The run files are those of reward gradients in configs/tiny with their number of steps, and therefore half of their
forwards; the rows are compared with those of the same seed in benchmarks/results/algorithms.json.

    python benchmarks/direct_align.py --out benchmarks/results/direct_align.json
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Any

import torch
from inputs import inputs
from scouts import FOLDERS
from torch import Tensor

from algorithms import MEASURES, Row, config_file, make_data, measured, write
from retouch.algorithms.reward_gradient import recipe
from retouch.algorithms.train import train
from retouch.config import load_run
from retouch.data.sampler import derive_seed
from retouch.families.inputs import image_pixels
from retouch.rewards.gradient import pixel_rewards
from retouch.training.pixel_gradients import divisor, latent_gradient, region_rms
from retouch.types import Failure

ARMS: dict[str, tuple[str, int, float | None, Sequence[int]]] = {
    "three noisiest steps": ("flux_fill", 3, None, (0,)),
    "two noisiest steps": ("flux_fill", 2, None, (0,)),
    "three noisiest steps, relative, k = 1": ("flux_fill", 3, 1.0, (0, 1, 2)),
    "sd_inpaint, three noisiest steps, relative, k = 1": ("sd_inpaint", 3, 1.0, (0, 1, 2)),
}
"""Name -> base; steps that are trained, counted from the noise; k; seeds."""

FORWARDS = 4


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--arms", nargs="+", choices=list(ARMS), default=list(ARMS))
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--work", type=Path, default=Path("runs/direct-align"), help="folder for data and runs")
    parser.add_argument("--out", type=Path, help="JSON to write, or to add to")
    arguments = parser.parse_args()
    rows: list[Row] = json.loads(arguments.out.read_text())["rows"] if arguments.out and arguments.out.exists() else []
    make_data(arguments.work / "data")
    for arm in arguments.arms:
        for seed in [seed for seed in ARMS[arm][3] if seed in arguments.seeds]:
            row = one(arm, seed, arguments.work)
            rows = [r for r in rows if r["run"] != row["run"]] + [row]
            if arguments.out:
                write(rows, arguments.out)
    print(table(rows))


def one(arm: str, seed: int, work: Path) -> Row:
    """Train one arm and measure it; a finished run is not repeated."""
    name = f"{arm.replace(',', '').replace(' = ', '').replace(' ', '-')}-{seed}"
    where = [f"name={name}", f"seed={seed}", f"logging.dir={work}", "resume=auto", "training.eval_every=20"]
    where += [f"{key}.path={work}/data/{folder}" for key, folder in FOLDERS.items()]
    with without_rollouts(*ARMS[arm][1:3]):
        train(load_run(file_of(arm), where))
    return described(arm, seed, work / name)


def file_of(arm: str) -> Path:
    return config_file(ARMS[arm][0], "reward_gradient", "full")


def described(arm: str, seed: int, run: Path) -> Row:
    """The row of a finished run."""
    config = load_run(file_of(arm))
    found = measured(run, FORWARDS, config.optimizer.rows_per_step(1))
    steps = config.training.max_steps - config.algorithm.supervised_steps(config)
    row: Row = {"run": run.name, "arm": arm, "seed": seed, "inputs": inputs(file_of(arm)), **found}
    return row | {"forwards": FORWARDS * config.optimizer.rows_per_step(1) * steps}


@contextmanager
def without_rollouts(noisiest: int, k: float | None) -> Iterator[None]:
    """Take the rows of reward gradients in this process from noised sources."""
    plain = recipe.collect

    def collect(session: Any, algorithm: Any) -> recipe.TrainedSteps:
        return rows_of_sources(session, algorithm, noisiest, k)

    recipe.collect = collect
    try:
        yield
    finally:
        recipe.collect = plain


def rows_of_sources(session: Any, algorithm: Any, noisiest: int, k: float | None) -> recipe.TrainedSteps:
    """A trained step of each example of an epoch, with the gradient of the reward by the aligned image."""
    run = session.run
    samples, scores, rewards = recipe.rewarded_samples(session, algorithm, None)
    usable, items = rewards.usable[rewards.own], recipe.items_by_row(rewards.padding[rewards.own], scores)
    shape = samples.latents.shape[2:]
    chosen = [Random(derive_seed(seed, "da")).randrange(noisiest) for seed in samples.seed.tolist()]
    steps = torch.tensor(chosen, dtype=torch.int64)
    latents, gradient = torch.zeros(len(steps), *shape), torch.zeros(len(steps), *shape)
    coefficient = torch.zeros(len(steps))
    scorers, others = pixel_rewards(run.rewards, run.rewards.weights), [item for item in items if item is not None]
    with run.model.encoding():
        for i in usable.nonzero().flatten().tolist():
            [example], item = run.encoded.examples([int(samples.position[i])]), items[i]
            assert item is not None
            x0 = run.model.encode_images(image_pixels(example.source)[None]).cpu()
            condition = run.encoded.conditions([int(samples.position[i])], run.engine.device)
            schedule = run.schedule(condition.size)
            time, after = schedule.times[int(steps[i]) :][:2]
            noise = torch.randn(x0.shape, generator=torch.Generator().manual_seed(int(samples.seed[i])))
            latents[i] = schedule.add_noise(x0, noise, time[None])[0]
            with torch.no_grad():
                velocity = run.model.predict(run.network, latents[i][None], time[None], condition)
            levels = schedule.level(time), schedule.level(after)
            align = aligned if schedule.prediction == "flow" else aligned_by_ddim
            image, coefficient[i] = align(latents[i][None], velocity, noise, *levels)
            found = latent_gradient(run, scorers, image, item)
            if k is not None:
                other = others[(i * 7 + 1) % len(others)]
                wrong = replace(item, prompt=other.prompt, metadata=other.metadata)
                found = relative(found, latent_gradient(run, scorers, image, wrong), k)
            if isinstance(found, Failure):
                usable[i] = False
            else:
                gradient[i] = -found[0]
    counts = usable.float()
    rows = recipe.TrainedSteps(samples.position, samples.seed, steps, latents, gradient, coefficient, counts)
    rows.coefficient /= divisor(*region_rms(run, algorithm, rows.position, rows.gradient, counts))
    return recipe.evenly_dealt(run.engine, rows, run.engine.gather(counts).cpu(), session.shared_steps)


def aligned(x: Tensor, velocity: Tensor, noise: Tensor, time: Tensor, after: Tensor) -> tuple[Tensor, Tensor]:
    """The image after one Euler step from `time` to `after` without the known noise, and its derivative by the
    velocity; at the true velocity it is x0."""
    return (x - (time - after) * velocity - after * noise) / (1 - after), -(time - after) / (1 - after)


def aligned_by_ddim(
    x: Tensor, prediction: Tensor, noise: Tensor, before: Tensor, after: Tensor
) -> tuple[Tensor, Tensor]:
    """The same of an epsilon model, with the cumulative products alpha_bar of the two times."""
    data = (x - (1 - before).sqrt() * prediction) / before.sqrt()
    state = after.sqrt() * data + (1 - after).sqrt() * prediction
    slope = ((1 - after) / after).sqrt() - ((1 - before) / before).sqrt()
    return (state - (1 - after).sqrt() * noise) / after.sqrt(), slope


def relative(right: Tensor | Failure, wrong: Tensor | Failure, k: float) -> Tensor | Failure:
    """(1 + k) right - wrong, or the first failure."""
    if isinstance(right, Failure) or isinstance(wrong, Failure):
        return right if isinstance(right, Failure) else wrong
    return (1 + k) * right - wrong


def table(rows: Sequence[Row]) -> str:
    """As markdown."""
    lines = ["| Direct-Align | seed | forwards | NED | glyphs | drift |", "|---" * 6 + "|"]
    for row in rows:
        ned, glyphs, drift = (row["held_out"]["last"][measure] for measure in MEASURES)
        lines.append(f"| {row['arm']} | {row['seed']} | {row['forwards']:,} | {ned:.3f} | {glyphs:.3f} | {drift:.4f} |")
    return "\n".join(lines)


if __name__ == "__main__":
    main()
