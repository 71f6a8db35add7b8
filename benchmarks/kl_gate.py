"""Does a KL that acts on suspicious samples alone (GARDO, arXiv 2512.24138) keep more of the reward at equal drift than
one on all? An experiment that is not in the package: it replaces the weights of the KL of NFT in this process.

`over` is the NED over the line through the uniform runs, at the run's drift; the criterion is that it lies above 0 with
each of four weights on each of three seeds.

A sample is suspicious by u = rank of its reward - rank of an auxiliary one, both among the samples of the epoch; the KL
acts on the quarter with the largest u, with four times the weight of the uniform KL that it is compared with.

The runs are those whose drift and NED a uniform KL trades against each other:

    sd_inpaint  NFT on Stable Diffusion 1.5 with a learning rate of 1e-3, for 15 steps after the warm-up, which has no
                KL (benchmarks/nft.py --quarter, whose rows are uniform ones here). The auxiliary reward is
                `preservation`, minus the drift that is measured: no other is more to the point. Seed 0 was run, with
                three weights; the uniform weight of .8 was added to bracket the drift of the gate
    sd3         NFT on Stable Diffusion 3.5 (configs/tiny/sd3_nft.yaml), text to image, whose backgrounds turn purple.
                A background is the median of an image's pixels, by channel: letters cover less than half of a sign.
                Drift is the mean |difference| in [0, 1] between the backgrounds of a held-out image and of the base's
                image of the same prompt and noise. The auxiliary reward is the logarithm, without its constants, of
                the density of a sample's background in the normal distribution with the mean and the covariance of
                those of the first epoch, which the base generated. Seed 0 was run

    retouch tiny build sd3 --out runs/text-to-image/sd3
    python benchmarks/text_to_image.py --data-only
    python benchmarks/kl_gate.py --out benchmarks/results/kl_gate.json
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import pairwise
from math import nan
from pathlib import Path
from statistics import fmean
from typing import Any, NamedTuple

import numpy as np
import text_to_image
import torch
from inputs import inputs
from numpy.typing import NDArray
from scouts import FOLDERS, patched
from torch import Tensor

from algorithms import REPOSITORY, Row, config_file, make_data, measured, write
from retouch.algorithms.nft import recipe
from retouch.algorithms.train import train
from retouch.config import derive, load_run
from retouch.rewards.protocol import RewardItem
from retouch.rewards.scorers.preservation import PreservationReward
from retouch.training import experience
from retouch.training.evaluation import load_evaluation
from retouch.types import Score

Auxiliary = Callable[[Sequence[RewardItem], int], Tensor]
"""Auxiliary rewards [n] of the samples of an epoch, from its number."""


class Trade(NamedTuple):
    """A run whose drift and NED a uniform KL trades against each other.

    Attributes:
        file: its run file.
        changed: overrides of it.
        rl_steps: optimizer steps after the warm-up.
        uniform: weights of the KL on all samples.
        gated: those that the gate divides by its share.
        drift: measure of the drift.
    """

    file: Path
    changed: tuple[str, ...]
    rl_steps: int
    uniform: tuple[float, ...]
    gated: tuple[float, ...]
    drift: str


SHARE = 0.25
HELD_OUT = 192
TRADES = {
    "sd_inpaint": Trade(
        config_file("sd_inpaint", "nft", "full"),
        ("optimizer.lr=1e-3",),
        15,
        (0.2, 0.3, 0.5, 0.8),
        (0.2, 0.3, 0.5),
        "outside_l1",
    ),
    "sd3": Trade(
        text_to_image.config_file("sd3", "nft"), (), 24, (0.01, 0.03, 0.1, 0.3), (0.02, 0.05, 0.1, 0.2), "background_l1"
    ),
}

EARLIER = {("sd_inpaint", "lr 1e-3"): 0.2, ("sd_inpaint", "lr 1e-3, KL .5"): 0.5}
"""Rows of benchmarks/results/nft_quarter.json that are uniform ones."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--families", nargs="+", choices=TRADES, default=list(TRADES))
    parser.add_argument("--arms", nargs="+", choices=("uniform", "gate"), default=["uniform", "gate"])
    parser.add_argument("--weights", type=float, nargs="+", help="of those of the family; all if left out")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0])
    parser.add_argument("--work", type=Path, default=Path("runs/kl-gate"), help="folder for data and runs")
    parser.add_argument(
        "--text-to-image", type=Path, default=Path("runs/text-to-image"), help="base and prompts of sd3"
    )
    parser.add_argument("--out", type=Path, help="JSON to write, or to add to")
    arguments = parser.parse_args()
    rows: list[Row] = json.loads(arguments.out.read_text())["rows"] if arguments.out and arguments.out.exists() else []
    if "sd_inpaint" in arguments.families:
        make_data(arguments.work / "data")
    for seed in arguments.seeds:
        for family in arguments.families:
            trade, known = TRADES[family], {row["weight"] for row in of(earlier_rows(), family, seed)}
            uniform = [weight for weight in trade.uniform if weight not in known]
            for arm in arguments.arms:
                weights = trade.gated if arm == "gate" else uniform
                for weight in [weight for weight in weights if weight in (arguments.weights or weights)]:
                    row = one(family, arm, weight, seed, arguments.work, arguments.text_to_image)
                    rows = [r for r in rows if r["run"] != row["run"]] + [row]
                    print(row["run"], row["held_out"]["last"], flush=True)
                    if arguments.out:
                        write(rows, arguments.out)
    print(table(rows))


def overrides_of(family: str, arm: str, weight: float) -> list[str]:
    return [*TRADES[family].changed, f"algorithm.kl_weight={weight / SHARE if arm == 'gate' else weight}"]


def one(family: str, arm: str, weight: float, seed: int, work: Path, text_to_image_work: Path) -> Row:
    """Train one arm and measure it; a finished run is not repeated."""
    trade, changed = TRADES[family], overrides_of(family, arm, weight)
    name = f"{arm}-{weight}-{seed}" if family == "sd_inpaint" else f"{family}-{arm}-{weight}-{seed}"
    steps = load_run(trade.file).algorithm.supervised_steps(load_run(trade.file)) + trade.rl_steps
    where = [f"name={name}", f"seed={seed}", f"logging.dir={work}", "resume=auto", f"training.max_steps={steps}"]
    base = None
    if family == "sd3":
        base, data = text_to_image_work / family, text_to_image_work / "data"
        where += [f"model.path={base}", f"data.path={data}/prompts.txt", f"evaluation.data.path={data}/held_out.txt"]
        where += [f"evaluation.grid_examples={HELD_OUT}"]  # so many images are kept
    else:
        where += [f"{key}.path={work}/data/{folder}" for key, folder in FOLDERS.items()] + ["training.eval_every=20"]
    config = load_run(trade.file, [*changed, *where])
    auxiliary = BackgroundDensity() if family == "sd3" else preserved
    with gated(auxiliary) if arm == "gate" else patched(recipe, "weighted_mean", recipe.weighted_mean):
        train(config)
    row: Row = {"run": name, "family": family, "arm": arm, "weight": weight, "seed": seed}
    row["inputs"] = inputs(trade.file, base, changed)
    forwards = derive(config).forwards_per_image
    if family != "sd3":
        return row | measured(work / name, forwards)
    row |= text_to_image.measured(work / name) | {"forwards_per_image": forwards}
    row["held_out"]["last"][trade.drift] = round(background_drift(work / name, steps), 4)
    return row


@contextmanager
def gated(auxiliary: Auxiliary) -> Iterator[None]:
    """Weigh the KL of a sample by its gate, which its rows carry as `means`; NFT reads no means."""
    sampled, loss, mean = experience.rewarded_samples, recipe.implicit_policies_loss, recipe.weighted_mean
    gate = torch.zeros(0)

    def with_gates(session: Any, algorithm: Any, policy: Any) -> Any:
        samples, scores, rewards = sampled(session, algorithm, policy)
        items = [item for batch in scores for item in batch.items]
        values = auxiliary(items, session.progress.epoch)
        samples.means = gates(rewards.values[:, 0], values, rewards.usable, SHARE)
        return samples, scores, rewards

    def with_gate(run: Any, algorithm: Any, rows: Any, micro: Any, total: Tensor) -> Any:
        nonlocal gate
        gate = rows.means[micro.rows].repeat_interleave(len(micro.piece))
        return loss(run, algorithm, rows, micro, total)

    def gated_mean(values: Tensor, weight: Tensor, *total: Any) -> Tensor:
        return mean(values * gate, weight, *total)

    with (
        patched(experience, "rewarded_samples", with_gates),
        patched(recipe, "implicit_policies_loss", with_gate),
        patched(recipe, "weighted_mean", gated_mean),
    ):
        yield


def preserved(items: Sequence[RewardItem], _: int) -> Tensor:
    """`preservation` of each sample; nan where it failed."""
    scorer = PreservationReward().make()
    kept = [scorer.score([item])[0] for item in items]
    return torch.tensor([one.value if isinstance(one, Score) else nan for one in kept])


@dataclass
class BackgroundDensity:
    """Minus the squared Mahalanobis distance of each background to those of the first epoch. A run that was interrupted
    has lost them: it ends with an error, and its folder must be deleted."""

    first: list[Tensor] = field(default_factory=list)

    def __call__(self, items: Sequence[RewardItem], epoch: int) -> Tensor:
        colours = torch.from_numpy(np.stack([background(item.image) for item in items]))
        if epoch == 0:
            self.first = [colours.mean(0), torch.linalg.inv(colours.T.cov())]
        mean, precision = self.first
        return -((colours - mean) @ precision * (colours - mean)).sum(1)


def background(image: NDArray[np.uint8]) -> NDArray[np.float64]:
    """[3] median of the pixels [H, W, 3], by channel."""
    return np.median(image.reshape(-1, 3), 0)


def background_drift(run: Path, step: int) -> float:
    """Mean |difference| in [0, 1] between the backgrounds of the evaluations before training and of a step."""
    before, after = (load_evaluation(run / f"evaluations/step-{at:06d}").images for at in (0, step))
    assert len(before) == len(after) == HELD_OUT
    pairs = zip(before, after, strict=True)
    return fmean(float(np.abs(background(a) - background(b)).mean()) / 255 for a, b in pairs)


def gates(rewards: Tensor, auxiliary: Tensor, usable: Tensor, share: float) -> Tensor:
    """[N] 1 for the share of usable rows whose reward outranks the auxiliary one the most, else 0; ties have one
    rank."""
    suspicion = torch.where(usable, ranks(rewards, usable) - ranks(auxiliary, usable), -torch.inf)
    chosen = suspicion.topk(round(share * int(usable.sum()))).indices
    return torch.zeros(len(rewards)).index_fill(0, chosen, 1.0)


def ranks(values: Tensor, usable: Tensor) -> Tensor:
    """[N] number of usable rows with a lower value, an equal one counting half."""
    others = values[usable].double()
    own = values.double()[:, None]
    return (others < own).sum(1) + (others == own).sum(1) / 2


def earlier_rows() -> list[Row]:
    """The uniform rows of benchmarks/results/nft_quarter.json."""
    rows = json.loads((REPOSITORY / "benchmarks/results/nft_quarter.json").read_text(encoding="utf-8"))["rows"]
    return [
        row | {"arm": "uniform", "weight": EARLIER[row["family"], row["arm"]]}
        for row in rows
        if (row["family"], row["arm"]) in EARLIER
    ]


def of(rows: Sequence[Row], family: str, seed: int) -> list[Row]:
    return [row for row in rows if (row["family"], row["seed"]) == (family, seed)]


def rows_of(rows: Sequence[Row], family: str, seed: int) -> tuple[list[Row], list[Row]]:
    """(Uniform rows of a family and seed in order of drift, those with the gate in order of weight)."""
    every = of([*earlier_rows(), *rows], family, seed)
    uniform, gate = ([row for row in every if row["arm"] == arm] for arm in ("uniform", "gate"))
    return sorted(uniform, key=lambda row: place(row)[0]), sorted(gate, key=lambda row: row["weight"])


def place(row: Row) -> tuple[float, float]:
    """(Drift, NED) of the last evaluation."""
    last = row["held_out"]["last"]
    return last[TRADES[row["family"]].drift], last["ocr.ned"]


def above(uniform: Sequence[Row], row: Row) -> float:
    """NED of a row over the line through the uniform ones, at its drift; nan beyond them."""
    drift, ned = place(row)
    for (low, lower), (high, upper) in pairwise(map(place, uniform)):
        if low <= drift <= high:
            return ned - (lower + (upper - lower) * (drift - low) / (high - low))
    return nan


def table(rows: Sequence[Row]) -> str:
    """As markdown."""
    head = "| base | KL on | seed | weight over all samples | NED | drift | over uniform at equal drift |"
    lines = [head, "|---" * 7 + "|"]
    for family, seed in dict.fromkeys((row["family"], row["seed"]) for row in rows):
        uniform, gate = rows_of(rows, family, seed)
        for row in [*uniform, *gate]:
            drift, ned = place(row)
            over = f"{above(uniform, row):+.3f}" if row["arm"] == "gate" else "–"
            lines.append(f"| {family} | {row['arm']} | {seed} | {row['weight']} | {ned:.3f} | {drift:.4f} | {over} |")
    return "\n".join(lines)


if __name__ == "__main__":
    main()
