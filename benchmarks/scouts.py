"""Do cheap candidates improve DiffusionNFT at equal forwards? An experiment that is not in the package: it replaces the
sampling of an epoch in this process.

    scouts M x n     M candidates of each example in n solver steps, scored; the best half and the worst half of the
                     group size are sampled in full from the same noise, scored and trained on
    down-sampling M  M full samples of each example, scored; the best and the worst are trained on
    free M           down-sampling for as many optimizer steps as plain NFT, with more forwards: what scouts would reach
                     if they cost nothing and ranked like full samples

Every run is the published file of configs/tiny with a KL of .1. It is compared with the rows of the same seed and KL of
benchmarks/results/nft.json (`plain`), which are the best setting of NFT measured there. Scouts and down-sampling take
fewer optimizer steps, or fewer examples a step, for as many forwards in all: those of candidates, full samples and
training, counted by a hook on the network, without the warm-up. The data and the evaluation are those of
benchmarks/algorithms.py; `curve` is the held-out NED by optimizer step.

`ranks` are Spearman's correlations between the rewards of few and of all solver steps from the same noise, among the
samples of an example right after the warm-up, and the standard deviation of the full reward among the chosen ones.

    python benchmarks/scouts.py --seeds 0 --out benchmarks/results/scouts.json
    python benchmarks/scouts.py --arms "scouts 16 x 2, 9 groups" ranks --out benchmarks/results/scouts.json    # 3 seeds

A finished run is not repeated, an interrupted one is resumed, and other rows of --out are kept.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from statistics import fmean, stdev
from typing import Any, NamedTuple

from inputs import inputs
from nft import counted
from reward_gradient import nft_rows

from algorithms import MEASURES, Row, config_file, make_data, measured, write
from retouch.algorithms.train import train
from retouch.config import load_run
from retouch.config.run import RunConfig
from retouch.observe.run_dir import read_metrics
from retouch.rewards.probe import spearman
from retouch.rewards.table import Scores
from retouch.training import experience
from retouch.training.experience import Samples

FILE = config_file("flux_fill", "nft", "full")
KL = "algorithm.kl_weight=0.1"
FOLDERS = {"data": "prompts", "warmup_data": "warmup", "evaluation.data": "held_out"}
IMAGES = 96
"""Images of an optimizer step."""

RANKED = (1, 2, 3)
"""Solver steps whose rewards are compared with those of the full sample."""

CANDIDATES = 32
"""Samples of an example among which they are compared."""


class Arm(NamedTuple):
    """How an epoch is sampled.

    Attributes:
        images: candidates of an example.
        num_steps: solver steps of a candidate; None if candidates are full samples.
        rl_steps: optimizer steps after the warm-up.
        groups: examples of an epoch, which is one optimizer step; those of the run file if None.
    """

    images: int
    num_steps: int | None
    rl_steps: int
    groups: int | None = None


ARMS = {
    "scouts 16 x 2": Arm(16, 2, 45),
    "scouts 16 x 2, 9 groups": Arm(16, 2, 60, 9),
    "scouts 12 x 2": Arm(12, 2, 48),
    "down-sampling 16": Arm(16, None, 45),
    "free 16": Arm(16, None, 60),
}
RANKS, PLAIN = "ranks", "plain"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--arms", nargs="+", choices=[RANKS, *ARMS], default=[RANKS, *ARMS])
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--work", type=Path, default=Path("runs/scouts"), help="folder for data and runs")
    parser.add_argument("--out", type=Path, help="JSON to write, or to add to")
    arguments = parser.parse_args()
    rows: list[Row] = json.loads(arguments.out.read_text())["rows"] if arguments.out and arguments.out.exists() else []
    make_data(arguments.work / "data")
    for seed in arguments.seeds:
        for arm in arguments.arms:
            make = ranks if arm == RANKS else trained
            row = make(arm, seed, arguments.work)
            rows = sorted([r for r in rows if r["run"] != row["run"]] + [row], key=order)
            if arguments.out:
                write(rows, arguments.out)
    print(table(rows), ranks_table(rows), sep="\n\n")


def order(row: Row) -> tuple[int, int]:
    return [*ARMS, RANKS].index(row["arm"]), row["seed"]


def run_config(arm: str, seed: int, rl_steps: int, work: Path, groups: int | None = None) -> RunConfig:
    """The published file with the name, seed, length and folders of a run."""
    name = f"{arm.replace(',', '').replace(' ', '-')}-{seed}"
    length = load_run(FILE).algorithm.supervised_steps(load_run(FILE)) + rl_steps
    where = [f"name={name}", f"seed={seed}", f"logging.dir={work}", "resume=auto"]
    data = [f"{key}.path={work}/data/{folder}" for key, folder in FOLDERS.items()]
    fewer = [f"rollout.global_groups_per_batch={groups}"] if groups else []
    return load_run(FILE, [KL, f"training.max_steps={length}", "training.eval_every=20", *fewer, *where, *data])


def trained(arm: str, seed: int, work: Path) -> Row:
    """Train one arm and measure it."""
    images, num_steps, rl_steps, groups = ARMS[arm]
    config = run_config(arm, seed, rl_steps, work, groups)
    with choosing(images, num_steps):
        train(config)
    run = work / config.name
    row: Row = {"run": config.name, "arm": arm, "seed": seed, "inputs": inputs(FILE, overrides=[KL])}
    found = measured(run, 0.0, 1)
    row |= {key: value for key, value in found.items() if key not in ("forwards_per_image", "images_seen")}
    return row | {"rl_steps": rl_steps, "forwards": round(forwards(run))}


def forwards(run: Path) -> float:
    """Forward-equivalents of the RL steps of a run."""
    steps = [r for r in read_metrics(run / "metrics.jsonl") if r["kind"] == "train" and r["phase"] == "rl"]
    return counted(run) * sum(step["time"]["images"] for step in steps)


# --- sampling ---


@contextmanager
def choosing(images: int, num_steps: int | None) -> Iterator[None]:
    """Sample the epochs of this process by scouts, or by down-sampling if `num_steps` is None."""
    plain = experience.sample_and_score

    def chosen(session: Any, algorithm: Any, examples: Sequence[int], policy: str | None) -> Samples:
        rollout = session.run.config.rollout
        with rollout_keys(session.run, group_size=images, num_steps=num_steps or rollout.num_steps):
            slots, recorded, scores = plain(session, algorithm, examples, policy)
        kept = extremes(rewards(scores), images, rollout.group_size)
        if num_steps is None:
            return [replace(slot, padding=row not in kept) for row, slot in enumerate(slots)], recorded, scores
        slots = [slots[row] for row in kept]
        with patched(experience, "rank_slots", lambda few, *_: [slot for slot in slots if slot.example in few]):
            return plain(session, algorithm, examples, policy)

    with patched(experience, "sample_and_score", chosen):
        yield


def rewards(scores: Sequence[Scores]) -> list[float]:
    """The combined reward of each sample; 0 where it failed."""
    return [score or 0.0 for batch in scores for score in batch.combined()]


def extremes(scores: Sequence[float], images: int, keep: int) -> list[int]:
    """Of each `images` consecutive rows, the `keep` with the highest and lowest scores, half each, in their order."""
    kept: list[int] = []
    for start in range(0, len(scores), images):
        ranked = sorted(range(start, start + images), key=lambda row: scores[row])
        kept += sorted([*ranked[: keep // 2], *ranked[images - keep + keep // 2 :]])
    return kept


@contextmanager
def rollout_keys(run: Any, **keys: int) -> Iterator[None]:
    """Other values of keys of the section `rollout`."""
    config = run.config
    with patched(run, "config", config.model_copy(update={"rollout": config.rollout.model_copy(update=keys)})):
        yield


@contextmanager
def patched(owner: Any, name: str, value: Any) -> Iterator[None]:
    before = getattr(owner, name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        setattr(owner, name, before)


# --- ranks ---


def ranks(arm: str, seed: int, work: Path) -> Row:
    """Compare the rewards of few and of all solver steps after the warm-up; the run takes one step of RL."""
    plain = experience.sample_and_score
    found: dict[int, list[float]] = {}

    def compared(session: Any, algorithm: Any, examples: Sequence[int], policy: str | None) -> Samples:
        for steps in (*RANKED, session.run.config.rollout.num_steps):
            with rollout_keys(session.run, group_size=CANDIDATES, num_steps=steps):
                found[steps] = rewards(plain(session, algorithm, examples, policy)[2])
        return plain(session, algorithm, examples, policy)

    config = run_config(arm, seed, 1, work)
    with patched(experience, "sample_and_score", compared):
        train(config)
    full, keep = found[config.rollout.num_steps], config.rollout.group_size
    row: Row = {"run": config.name, "arm": arm, "seed": seed, "inputs": inputs(FILE, overrides=[KL])}
    row |= {"examples": len(full) // CANDIDATES, "images_per_example": CANDIDATES}
    row["ned"] = {str(steps): round(fmean(column), 4) for steps, column in found.items()}
    row["spearman"] = {str(steps): round(correlation(found[steps], full, CANDIDATES), 3) for steps in RANKED}
    first = [row for start in range(0, len(full), CANDIDATES) for row in range(start, start + keep)]
    row["std"] = {"random": round(spread(full, first, keep), 4)}
    for images in (CANDIDATES // 2, CANDIDATES):
        for steps, column in found.items():
            kept = extremes(column, images, keep)
            row["std"][f"{images} x {steps}"] = round(spread(full, kept, keep), 4)
    return row


def correlation(few: Sequence[float], full: Sequence[float], images: int) -> float:
    """Mean over examples of Spearman's correlation; an example whose scores are all equal has none."""
    pairs = [(few[i : i + images], full[i : i + images]) for i in range(0, len(full), images)]
    return fmean(value for a, b in pairs if (value := spearman(a, b)) is not None)


def spread(scores: Sequence[float], kept: Sequence[int], keep: int) -> float:
    """Mean over groups of `keep` rows of the standard deviation of their scores."""
    return fmean(stdev(scores[row] for row in kept[i : i + keep]) for i in range(0, len(kept), keep))


# --- tables ---


def compared_rows(rows: Sequence[Row]) -> list[Row]:
    """The trained rows, before them plain NFT of their seeds."""
    runs = [row for row in rows if row["arm"] != RANKS]
    seeds = {row["seed"] for row in runs}
    steps = load_run(FILE).training.max_steps - load_run(FILE).algorithm.supervised_steps(load_run(FILE))
    plain = [
        row | {"arm": PLAIN, "rl_steps": steps, "forwards": round(row["counted"] * IMAGES * steps)}
        for row in nft_rows()
        if row["seed"] in seeds
    ]
    return [*plain, *runs]


def table(rows: Sequence[Row]) -> str:
    """One line per arm, as markdown."""
    head = "run|seeds|RL steps|forwards|NED by seed|difference to plain|glyphs|drift"
    lines = [f"| {' | '.join(head.split('|'))} |", "|---" * 8 + "|"]
    every = compared_rows(rows)
    plain = {row["seed"]: row["held_out"]["last"]["ocr.ned"] for row in every if row["arm"] == PLAIN}
    for arm in dict.fromkeys(row["arm"] for row in every):
        mine = [row for row in every if row["arm"] == arm]
        ned = [row["held_out"]["last"]["ocr.ned"] for row in mine]
        apart = [f"{value - plain[row['seed']]:+.3f}" for value, row in zip(ned, mine, strict=True)]
        _, glyphs, drift = (fmean(row["held_out"]["last"][m] for row in mine) for m in MEASURES)
        lines.append(
            f"| {arm} | {', '.join(str(row['seed']) for row in mine)} | {mine[0]['rl_steps']} | "
            f"{fmean(row['forwards'] for row in mine):,.0f} | {', '.join(f'{value:.3f}' for value in ned)} | "
            f"{'–' if arm == PLAIN else ', '.join(apart)} | {glyphs:.3f} | {drift:.4f} |"
        )
    return "\n".join(lines)


def ranks_table(rows: Sequence[Row]) -> str:
    """One line per number of solver steps, means over seeds, as markdown."""
    mine = [row for row in rows if row["arm"] == RANKS]
    lines = [f"| solver steps | NED | rank correlation | std of the chosen, of {CANDIDATES // 2} | of {CANDIDATES} |"]
    lines.append("|---" * 5 + "|")
    for steps in mine[0]["ned"] if mine else ():
        ranked = [row["spearman"][steps] for row in mine if steps in row["spearman"]]
        chosen = [fmean(row["std"][f"{n} x {steps}"] for row in mine) for n in (CANDIDATES // 2, CANDIDATES)]
        lines.append(
            f"| {steps} | {fmean(row['ned'][steps] for row in mine):.3f} | "
            f"{f'{fmean(ranked):.2f}' if ranked else '–'} | {' | '.join(f'{one:.3f}' for one in chosen)} |"
        )
    if mine:
        lines.append(f"| random choice | – | – | {fmean(row['std']['random'] for row in mine):.3f} | – |")
    return "\n".join(lines)


if __name__ == "__main__":
    main()
