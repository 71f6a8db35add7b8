"""Do other weights of the denoising errors train better than DiffusionNFT's? An experiment that is not in the package:
it replaces the loss of the NFT recipe in this process.

Each loss is a weight times the flow-matching error `fm` of the same noised copies, of the same policy and reference:

    AWM uniform       A fm
    RWR               softmax(A) K fm, over the K samples of a group: reward-weighted regression, the baseline
    DGPO b            sigmoid(z) A fm, z = b / K sum A (fm - fm_ref) over a group, whose copies share time and noise
    KTO b             4 / b (1 - sigmoid(z)), z = b sign(A) (g - max(mean g, 0)), g = fm_ref - fm: labels good and bad
                      in place of advantages; its first gradient is that of sign(A) fm

All run with one optimizer step per epoch, where the policy that samples is the one that trains: ratios are 1, and no
trust region acts. Every run is the published file of configs/tiny, 20 supervised steps and then RL, with the data and
the evaluation of benchmarks/algorithms.py. --max-steps ends a run early, at the learning rates of the whole one. The
forwards per image are those of NFT with a KL: a policy, its backward and a reference per copy. Runs are compared with
the rows of the same seed and KL .1 of benchmarks/results/nft.json (`NFT`), at as many optimizer steps.

    python benchmarks/row_weights.py --arms "KTO 100" --seeds 0 --out benchmarks/results/row_weights.json
    python benchmarks/row_weights.py --arms RWR "AWM uniform" "DGPO 100" --seeds 0 --max-steps 40 --out ...

A finished run is not repeated, an interrupted one is resumed, and other rows of --out are kept.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from statistics import fmean
from typing import Any, NamedTuple

import torch
from inputs import inputs
from nft import counted
from reward_gradient import nft_rows
from scouts import FOLDERS, IMAGES, patched
from scouts import forwards as forwards_of
from torch import Tensor

from algorithms import MEASURES, Row, config_file, make_data, measured, write
from retouch.algorithms.nft import recipe
from retouch.algorithms.train import train
from retouch.config import load_run
from retouch.config.run import RunConfig
from retouch.core.objectives.sft import denoising_rows
from retouch.core.reduce import row_mean, weighted_mean
from retouch.data.sampler import derive_seed
from retouch.training import loop
from retouch.training.experience import Experience

FILE = config_file("flux_fill", "nft", "full")
NFT = "NFT"


class Errors(NamedTuple):
    """B rows, each a noised copy of a sample.

    Attributes:
        fm, reference: [B] mean-squared errors of the velocity, of the policy with gradient.
        advantages, weight: [B].
        group: [B] the sample's example and the number of the copy, as one number.
    """

    fm: Tensor
    reference: Tensor
    advantages: Tensor
    weight: Tensor
    group: Tensor


class Arm(NamedTuple):
    """A loss.

    Attributes:
        rows: its value for each row [B].
        kl_weight: of the run.
        whole_groups: a micro-batch holds all rows, and the copies of a group share time and noise.
        finish: what is done with the rows of an epoch first.
    """

    rows: Callable[[Errors], Tensor]
    kl_weight: float = 0.1
    whole_groups: bool = False
    finish: Callable[[Experience], Experience] = lambda rows: rows


def awm(errors: Errors) -> Tensor:
    return errors.advantages * errors.fm


def dgpo(beta: float) -> Callable[[Errors], Tensor]:
    def rows(errors: Errors) -> Tensor:
        each = errors.weight * errors.advantages * (errors.fm.detach() - errors.reference)
        _, group = errors.group.unique(return_inverse=True)
        zeros = each.new_zeros(int(group.max()) + 1)
        size = zeros.index_add(0, group, errors.weight).clamp(min=1)
        z = beta * zeros.index_add(0, group, each) / size
        return torch.sigmoid(z)[group] * errors.advantages * errors.fm

    return rows


def kto(beta: float) -> Callable[[Errors], Tensor]:
    """1 - sigmoid(y beta (g - z0)), times 4 / beta: at the reference its gradient is sign(A) times that of fm."""

    def rows(errors: Errors) -> Tensor:
        label, gain = errors.advantages.sign(), errors.reference - errors.fm
        origin = weighted_mean(gain.detach(), errors.weight).clamp(min=0)
        return 4 / beta * torch.sigmoid(-label * beta * (gain - origin)) * (label != 0)

    return rows


def softmax_of_groups(rows: Experience) -> Experience:
    """Advantages replaced by their softmax over the samples of an example, times how many there are."""
    weights = torch.where(rows.counts_in_loss > 0, rows.advantages.exp(), 0.0)
    _, group = rows.position.unique(return_inverse=True)
    zeros = weights.new_zeros(int(group.max()) + 1)
    total, count = zeros.index_add(0, group, weights), zeros.index_add(0, group, (rows.counts_in_loss > 0).float())
    rows.advantages = weights / total.clamp(min=1e-8)[group] * count[group]
    return rows


ARMS = {
    "RWR": Arm(awm, finish=softmax_of_groups),
    "AWM uniform": Arm(awm),
    "DGPO 100": Arm(dgpo(100), 0.0, True),
    "KTO 100": Arm(kto(100)),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--arms", nargs="+", choices=list(ARMS), default=list(ARMS))
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--max-steps", type=int, default=80, help="optimizer steps, 20 supervised ones included")
    parser.add_argument("--work", type=Path, default=Path("runs/row_weights"), help="folder for data and runs")
    parser.add_argument("--out", type=Path, help="JSON to write, or to add to")
    arguments = parser.parse_args()
    rows: list[Row] = json.loads(arguments.out.read_text())["rows"] if arguments.out and arguments.out.exists() else []
    make_data(arguments.work / "data")
    for seed in arguments.seeds:
        for arm in arguments.arms:
            row = trained(arm, seed, arguments.max_steps, arguments.work)
            rows = sorted([r for r in rows if r["run"] != row["run"]] + [row], key=order)
            if arguments.out:
                write(rows, arguments.out)
    print(table(rows))


def order(row: Row) -> tuple[int, int]:
    return list(ARMS).index(row["arm"]), row["seed"]


def overrides_of(arm: Arm) -> list[str]:
    """What an arm changes in the published file. A KL of 0 keeps the reference, which the losses need."""
    whole = ["optimizer.batch_size_per_device=96", "optimizer.gradient_accumulation=1"] if arm.whole_groups else []
    return [f"algorithm.kl_weight={arm.kl_weight or 1e-12:g}", *whole]


def run_config(name: str, seed: int, max_steps: int, work: Path) -> RunConfig:
    """The published file with the name, seed, length and folders of a run."""
    run = f"{name.replace(',', '').replace(' ', '-')}-{seed}"
    where = [f"name={run}", f"seed={seed}", f"logging.dir={work}", "resume=auto"]
    data = [f"{key}.path={work}/data/{folder}" for key, folder in FOLDERS.items()]
    length = [f"training.max_steps={max_steps}", "training.eval_every=20"]
    return load_run(FILE, [*overrides_of(ARMS[name]), *length, *where, *data])


def trained(name: str, seed: int, max_steps: int, work: Path) -> Row:
    """Train one arm and measure it."""
    config = run_config(name, seed, max_steps, work)
    with replaced(ARMS[name]):
        train(config)
    run = work / config.name
    row: Row = {"run": config.name, "arm": name, "seed": seed}
    row["inputs"] = inputs(FILE, overrides=overrides_of(ARMS[name]))
    row["rl_steps"] = max_steps - load_run(FILE).algorithm.supervised_steps(load_run(FILE))
    row |= {key: value for key, value in measured(run, 0.0).items() if key != "forwards_per_image"}
    return row | {"counted": round(counted(run), 3), "forwards": round(forwards_of(run))}


@contextmanager
def replaced(arm: Arm) -> Iterator[None]:
    """Train with the loss of an arm in this process."""
    plain, plain_rate, whole = recipe.collect, loop.learning_rate, load_run(FILE)
    rl_steps = whole.training.max_steps - whole.algorithm.supervised_steps(whole)

    def rate(optimizer: Any, base: float, step: int, steps: int) -> float:
        return plain_rate(optimizer, base, step, rl_steps if base == optimizer.lr else steps)

    def collect(session: Any, algorithm: Any, policy: str | None) -> Experience:
        rows = plain(session, algorithm, policy)
        if arm.whole_groups:  # one seed per example and epoch, from which the copies draw time and noise
            seeds = [derive_seed(p, session.progress.epoch) for p in rows.position.tolist()]
            rows.seed = torch.tensor(seeds)
        return arm.finish(rows)

    def loss(run: Any, algorithm: Any, experience: Experience, micro: Any, total: Tensor) -> Any:
        return row_loss(arm, run, algorithm, experience, micro, total)

    with (
        patched(recipe, "collect", collect),
        patched(recipe, "implicit_policies_loss", loss),
        patched(loop, "learning_rate", rate),
    ):
        yield


def row_loss(
    arm: Arm, run: Any, algorithm: Any, experience: Experience, micro: Any, total: Tensor
) -> tuple[Tensor, Mapping[str, Tensor], Tensor]:
    """The loss of an arm on one forward, as the recipe's -> (loss, metrics, rows that count)."""
    copies, noised = algorithm.timesteps_per_image, micro.noised()
    weight = experience.counts_in_loss[micro.rows]
    wide = weight.repeat_interleave(copies)
    position = experience.position[micro.rows].repeat_interleave(copies) * copies
    prediction = recipe.predict(run, noised)
    target = noised.schedule.target(noised.x0, noised.noise)
    fm = denoising_rows(prediction, target)
    rows = arm.rows(
        Errors(
            fm,
            denoising_rows(micro.reference, target),
            experience.advantages[micro.rows].repeat_interleave(copies),
            wide,
            position + torch.arange(copies).repeat(len(weight)),
        )
    )
    kl = row_mean((prediction - micro.reference) ** 2)
    loss = weighted_mean(rows + algorithm.kl_weight * kl, wide, total * copies)
    return loss, {"kl": weighted_mean(kl.detach(), wide)}, weight.sum()


# --- table ---


def compared_rows(rows: Sequence[Row]) -> list[Row]:
    """The rows, before them NFT of their seeds: its NED, and its forwards, by optimizer step of RL."""
    seeds = {row["seed"] for row in rows}
    return [*(row | {"arm": NFT, "rl_steps": 60} for row in nft_rows() if row["seed"] in seeds), *rows]


def ned_after(row: Row, rl_steps: int, warmup: int = 20) -> float:
    """Held-out NED of a run after some optimizer steps of RL."""
    return next(ned for images, ned in row["curve"] if images == IMAGES * (warmup + rl_steps))


def table(rows: Sequence[Row]) -> str:
    """One line per arm, as markdown."""
    head = "loss|seeds|RL steps|forwards|NED by seed|difference to NFT|glyphs|drift"
    lines = [f"| {' | '.join(head.split('|'))} |", "|---" * 8 + "|"]
    every = compared_rows(rows)
    plain = {row["seed"]: row for row in every if row["arm"] == NFT}
    for arm in dict.fromkeys(row["arm"] for row in every):
        mine = [row for row in every if row["arm"] == arm]
        ned = [row["held_out"]["last"]["ocr.ned"] for row in mine]
        apart = [ned_after(row, row["rl_steps"]) - ned_after(plain[row["seed"]], row["rl_steps"]) for row in mine]
        _, glyphs, drift = (fmean(row["held_out"]["last"][m] for row in mine) for m in MEASURES)
        forwards = fmean(row.get("forwards", row["counted"] * IMAGES * row["rl_steps"]) for row in mine)
        lines.append(
            f"| {arm} | {', '.join(str(row['seed']) for row in mine)} | {mine[0]['rl_steps']} | {forwards:,.0f} | "
            f"{', '.join(f'{value:.3f}' for value in ned)} | "
            f"{'–' if arm == NFT else ', '.join(f'{value:+.3f}' for value in apart)} | {glyphs:.3f} | {drift:.4f} |"
        )
    return "\n".join(lines)


if __name__ == "__main__":
    main()
