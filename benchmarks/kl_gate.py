"""Does a KL that acts on suspicious samples alone (GARDO, arXiv 2512.24138) keep more of the reward at equal drift than
one on all? An experiment that is not in the package: it replaces the weights of the KL of NFT in this process.

`over` is the NED over the line through the uniform runs, at the run's drift; the criterion is that it lies above 0 with
each of four weights on each of three seeds. Seed 0 was run, with three weights; the uniform weight of .8 was added to
bracket the drift of the gate. Runs of a seed have the same warm-up, which has no KL.

A sample is suspicious by u = rank of its reward - rank of its `preservation`, both among the samples of the epoch; the
KL acts on the quarter with the largest u, with four times the weight of the uniform KL that it is compared with. The
auxiliary reward is minus the drift that is measured: no other is more to the point.

The run is the one whose drift and NED a uniform KL trades against each other: NFT on Stable Diffusion 1.5 with a
learning rate of 1e-3, for 15 steps after the warm-up (benchmarks/nft.py --quarter, whose rows are uniform ones here).

    python benchmarks/kl_gate.py --out benchmarks/results/kl_gate.json
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import pairwise
from math import nan
from pathlib import Path
from typing import Any

import torch
from inputs import inputs
from scouts import FOLDERS, patched
from torch import Tensor

from algorithms import MEASURES, REPOSITORY, Row, config_file, make_data, measured, write
from retouch.algorithms.nft import recipe
from retouch.algorithms.train import train
from retouch.config import derive, load_run
from retouch.rewards.scorers.preservation import PreservationReward
from retouch.training import experience
from retouch.types import Score

FILE = config_file("sd_inpaint", "nft", "full")
RL_STEPS, SHARE = 15, 0.25
UNIFORM = (0.2, 0.3, 0.5, 0.8)
"""Weights of the KL on all samples."""

GATED = UNIFORM[:3]
"""Those that the gate divides by its share."""

EARLIER = {("sd_inpaint", "lr 1e-3"): 0.2, ("sd_inpaint", "lr 1e-3, KL .5"): 0.5}
"""Rows of benchmarks/results/nft_quarter.json that are uniform ones."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--arms", nargs="+", choices=("uniform", "gate"), default=["uniform", "gate"])
    parser.add_argument("--seeds", type=int, nargs="+", default=[0])
    parser.add_argument("--work", type=Path, default=Path("runs/kl-gate"), help="folder for data and runs")
    parser.add_argument("--out", type=Path, help="JSON to write, or to add to")
    arguments = parser.parse_args()
    rows: list[Row] = json.loads(arguments.out.read_text())["rows"] if arguments.out and arguments.out.exists() else []
    make_data(arguments.work / "data")
    for seed in arguments.seeds:
        known = {row["weight"] for row in earlier_rows() if row["seed"] == seed}
        for arm in arguments.arms:
            for weight in GATED if arm == "gate" else [weight for weight in UNIFORM if weight not in known]:
                row = one(arm, weight, seed, arguments.work)
                rows = [r for r in rows if r["run"] != row["run"]] + [row]
                print(row["run"], row["held_out"]["last"], flush=True)
                if arguments.out:
                    write(rows, arguments.out)
    print(table(rows))


def overrides_of(weight: float) -> list[str]:
    return ["optimizer.lr=1e-3", f"algorithm.kl_weight={weight}"]


def one(arm: str, weight: float, seed: int, work: Path) -> Row:
    """Train one arm and measure it; a finished run is not repeated."""
    name, steps = f"{arm}-{weight}-{seed}", load_run(FILE).algorithm.supervised_steps(load_run(FILE)) + RL_STEPS
    where = [f"name={name}", f"seed={seed}", f"logging.dir={work}", "resume=auto"]
    where += [f"{key}.path={work}/data/{folder}" for key, folder in FOLDERS.items()]
    where += [f"training.max_steps={steps}", "training.eval_every=20"]
    changed = overrides_of(weight / SHARE if arm == "gate" else weight)
    config = load_run(FILE, [*changed, *where])
    with gated() if arm == "gate" else patched(recipe, "weighted_mean", recipe.weighted_mean):
        train(config)
    row: Row = {"run": name, "arm": arm, "weight": weight, "seed": seed, "inputs": inputs(FILE, overrides=changed)}
    return row | measured(work / name, derive(config).forwards_per_image)


@contextmanager
def gated() -> Iterator[None]:
    """Weigh the KL of a sample by its gate, which its rows carry as `means`; NFT reads no means."""
    sampled, loss, mean = experience.rewarded_samples, recipe.implicit_policies_loss, recipe.weighted_mean
    gate = torch.zeros(0)

    def with_gates(session: Any, algorithm: Any, policy: Any) -> Any:
        samples, scores, rewards = sampled(session, algorithm, policy)
        scorer = PreservationReward().make()
        kept = [scorer.score([item])[0] for batch in scores for item in batch.items]
        values = torch.tensor([one.value if isinstance(one, Score) else float("nan") for one in kept])
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


def rows_of(rows: Sequence[Row], seed: int) -> tuple[list[Row], list[Row]]:
    """(Uniform rows of a seed in order of drift, those with the gate in order of weight)."""
    every = [row for row in [*earlier_rows(), *rows] if row["seed"] == seed]
    uniform, gate = ([row for row in every if row["arm"] == arm] for arm in ("uniform", "gate"))
    return sorted(uniform, key=lambda row: place(row)[0]), sorted(gate, key=lambda row: row["weight"])


def place(row: Row) -> tuple[float, float]:
    """(Drift, NED) of the last evaluation."""
    ned, _, drift = (row["held_out"]["last"][measure] for measure in MEASURES)
    return drift, ned


def above(uniform: Sequence[Row], row: Row) -> float:
    """NED of a row over the line through the uniform ones, at its drift; nan beyond them."""
    drift, ned = place(row)
    for (low, lower), (high, upper) in pairwise(map(place, uniform)):
        if low <= drift <= high:
            return ned - (lower + (upper - lower) * (drift - low) / (high - low))
    return nan


def table(rows: Sequence[Row]) -> str:
    """As markdown."""
    lines = ["| KL on | seed | weight over all samples | NED | drift | over uniform at equal drift |", "|---" * 6 + "|"]
    for seed in sorted({row["seed"] for row in rows}):
        uniform, gate = rows_of(rows, seed)
        for row in [*uniform, *gate]:
            drift, ned = place(row)
            over = f"{above(uniform, row):+.3f}" if row["arm"] == "gate" else "–"
            lines.append(f"| {row['arm']} | {seed} | {row['weight']} | {ned:.3f} | {drift:.4f} | {over} |")
    return "\n".join(lines)


if __name__ == "__main__":
    main()
