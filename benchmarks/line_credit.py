"""Does credit for each line of a text train two texts better than one advantage for the image? An experiment that is
not in the package: it replaces the rows and the loss of the NFT recipe in this process.

`ocr_lines` has a similarity for each line. Each line is compared with the same line of the group's other samples, and
each latent cell of the mask takes the advantage A_l of its line, the nearest one where none covers it; cells outside
keep the advantage of the image. With r of each cell in place of the row's, the loss is that of NFT:

    loss = mean over cells of c [r (x0+ - x0)^2 / w+ + (1 - r) (x0- - x0)^2 / w-] / m

w+ and w- stay those of the row, so that equal advantages give the loss and the gradient of NFT. Groups in which the
sums of the lines are equal are left out, as in the file.

Both arms are configs/tiny/flux_two_texts_nft.yaml at its published length, with the data and the evaluation of
benchmarks/two_texts.py, from one warm-up, which takes no advantages: --warm-up names the folder of a run of the seed
that has its checkpoint of step 240. The file's own rows are those of benchmarks/results/two_texts.json; an arm `file`
is trained here as well for intervals paired by sign, and for drift.

    python benchmarks/line_credit.py --seeds 2 --arms lines --out benchmarks/results/line_credit.json
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial
from pathlib import Path
from statistics import fmean
from typing import Any

import torch
from inputs import inputs
from nft import COMPUTING
from scouts import patched
from torch import Tensor
from two_texts import CONFIG, MEASURES, column, make_data

from algorithms import Row, evaluations, read_metrics, write
from retouch.algorithms.nft import recipe
from retouch.algorithms.nft.config import NftConfig
from retouch.algorithms.train import train
from retouch.config import load_run
from retouch.core.advantages import group_advantages
from retouch.core.objectives.nft import SMALLEST_SCALE, effective_advantages, positive_share
from retouch.core.reduce import weighted_mean
from retouch.imaging.lines import Bounds, parse_lines
from retouch.observe.statistics import paired_difference
from retouch.rewards.protocol import RewardItem
from retouch.training.dealing import evenly_dealt
from retouch.training.experience import Experience, advantages_of, rewarded_samples
from retouch.types import Outcome, Score

IMAGES = 96
ALL = {**MEASURES, "drift": "outside_l1"}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--arms", nargs="+", choices=["lines", "file"], default=["lines", "file"])
    parser.add_argument("--warm-up", type=Path, help="folder of a run of the seed with its checkpoint of step 240")
    parser.add_argument("--work", type=Path, default=Path("runs/line-credit"), help="folder for data and runs")
    parser.add_argument("--out", type=Path, help="JSON to write, or to add to")
    arguments = parser.parse_args()
    rows: list[Row] = json.loads(arguments.out.read_text())["rows"] if arguments.out and arguments.out.exists() else []
    make_data(arguments.work / "data", IMAGES)
    for seed in arguments.seeds:
        for arm in arguments.arms:
            row = one(arm, seed, arguments.work, arguments.warm_up)
            rows = [r for r in rows if r["run"] != row["run"]] + [row]
            if arguments.out:
                write(rows, arguments.out)
    print(table(rows))


def one(arm: str, seed: int, work: Path, warm_up: Path | None) -> Row:
    """Train one arm and measure it; a finished run is not repeated, an interrupted one is resumed."""
    run = work / f"{arm}-{seed}"
    if warm_up is not None and not run.exists():
        shutil.copytree(warm_up, run)
    os.environ["DATA_PATH"] = str(work / "data")
    options = [f"name={run.name}", f"seed={seed}", f"logging.dir={work}", "resume=auto", "training.eval_every=0"]
    config = load_run(CONFIG, [*options, f"evaluation.num_examples={IMAGES}"])
    assert isinstance(config.algorithm, NftConfig)
    with credit_for_lines(config.algorithm.timesteps_per_image) if arm == "lines" else nullcontext():
        train(config)
    return described(arm, seed, run, work)


def described(arm: str, seed: int, run: Path, work: Path) -> Row:
    """Means of a run after the warm-up and at its end, the seconds of RL and the share of them that waited for OCR; and
    the gain over the arm `file` of the seed, paired by sign, if it was trained here."""
    points, file = evaluations(run), work / f"file-{seed}"
    steps = [r["time"] for r in read_metrics(run / "metrics.jsonl") if r["kind"] == "train" and r["phase"] == "rl"]
    seconds = sum(time["step"] for time in steps)
    row: Row = {
        "run": run.name,
        "arm": arm,
        "seed": seed,
        "inputs": inputs(CONFIG),
        "images": len(points["last"].rows),
        "forwards": round(sum(v for time in steps for k, v in time.items() if k in COMPUTING)),
        "seconds": round(seconds, 1),
        "waiting for OCR": round(sum(time["reward_wait"] for time in steps) / seconds, 3),
        "means": {
            point: {title: round(fmean(column(points[point], name)), 4) for title, name in ALL.items()}
            for point in ("warmed up", "last")
        },
    }
    if arm == "lines" and file.exists():
        others = evaluations(file)["last"]
        row["over the file"] = {
            title: [round(v, 4) for v in paired_difference(column(points["last"], name), column(others, name))]
            for title, name in ALL.items()
        }
    return row


# --- the loss ---


@contextmanager
def credit_for_lines(copies: int) -> Iterator[None]:
    """Train NFT in this process with an advantage for each cell.

    Args:
        copies: noised copies of a sample in a forward.
    """
    with patched(recipe, "collect", collect), patched(recipe, "nft_loss", partial(loss_of_cells, copies)):
        yield


def collect(session: Any, algorithm: Any, policy: str | None) -> Experience:
    """The rows of an epoch, on one process, with advantages [n, 1, h, w]."""
    rows, scores, rewards = rewarded_samples(session, algorithm, policy)
    image, counts = advantages_of(algorithm, rewards)
    outcomes = [outcome for batch in scores for outcome in batch.outcomes["ocr_lines"]]
    how = (rewards.example_index, rewards.usable, algorithm.baseline, algorithm.scale)
    lines, size = line_advantages(outcomes, *how, clip=algorithm.advantage_clip), rows.latents.shape[-2:]
    items = [item for batch in scores for item in batch.items]
    rows.advantages = torch.stack([cells(*row, size) for row in zip(items, image, lines, strict=True)])
    rows.counts_in_loss = counts
    return evenly_dealt(session.run.engine, rows, counts, session.shared_steps)


def line_advantages(outcomes: Sequence[Outcome], *how: Any, clip: float) -> Tensor:
    """[n, L]: each line compared with the same line of the group's other samples."""
    values = [[line["ned"] for line in o.detail["lines"]] if isinstance(o, Score) else None for o in outcomes]
    width = max(len(row) for row in values if row)
    columns = torch.tensor([row or [0.0] * width for row in values]).unbind(1)
    return torch.stack([group_advantages(column, *how, clip=clip) for column in columns], 1)


def cells(item: RewardItem, image: Tensor, lines: Tensor, size: Sequence[int]) -> Tensor:
    """[1, h, w]: the advantage of the nearest line at cells with a repainted pixel, that of the image elsewhere."""
    assert item.mask is not None
    mask = torch.nn.functional.adaptive_max_pool2d(torch.from_numpy(item.mask.copy())[None].float(), tuple(size))
    bounds = [line.bounds for line in parse_lines(item.metadata["lines"])]
    nearest = nearest_line([b for b in bounds if b is not None], size, item.mask.shape[0] // size[0])
    return torch.where(mask > 0, lines[nearest], image)


def nearest_line(bounds: Sequence[Bounds], size: Sequence[int], cell: int) -> Tensor:
    """[h, w] index of the line whose box is nearest to the centre of each cell of `cell` pixels; of equally near ones
    the first."""
    y, x = ((torch.arange(n) + 0.5) * cell for n in size)
    gaps = [
        ((left - x).clamp(min=0) + (x - right).clamp(min=0), (top - y).clamp(min=0) + (y - bottom).clamp(min=0))
        for left, top, right, bottom in bounds
    ]
    return torch.stack([torch.hypot(across, down[:, None]) for across, down in gaps]).min(0).indices


def loss_of_cells(
    copies: int,
    velocity: Tensor,
    old_velocity: Tensor,
    x_t: Tensor,
    x0: Tensor,
    sigma: Tensor,
    advantages: Tensor,
    mix: float,
    advantage_clip: float,
    mode: Any,
    region: None,
    weight: Tensor,
    normalizer: Tensor,
) -> tuple[Tensor, dict[str, Tensor]]:
    """`nft_loss` with an advantage for each cell.

    Args:
        advantages: maps [h, w] of B / copies samples, flat, each number repeated `copies` times: the recipe repeats
            numbers.
    """
    cells = advantages.view(-1, velocity[0, 0].numel(), copies).movedim(2, 1).reshape(velocity[:, :1].shape)
    share, s = (
        positive_share(effective_advantages(cells, advantage_clip, mode), advantage_clip),
        sigma.view(-1, 1, 1, 1),
    )
    positive, negative = (
        (difference := x_t - s * v - x0) ** 2
        / difference.detach().abs().mean((1, 2, 3), keepdim=True).clamp(min=SMALLEST_SCALE)
        for v in (mix * velocity + (1 - mix) * old_velocity, (1 + mix) * old_velocity - mix * velocity)
    )
    rows = (advantage_clip * (share * positive + (1 - share) * negative) / mix).mean((1, 2, 3))
    return weighted_mean(rows, weight, normalizer), {"positive_share": share.mean()}


def table(rows: Sequence[Row]) -> str:
    """Means after the warm-up and at the end, as markdown."""
    lines = [f"| arm | seed | {' | '.join(ALL)} |", "|---" * (len(ALL) + 2) + "|"]
    for row in rows:
        before, after = (row["means"][point] for point in ("warmed up", "last"))
        means = " | ".join(f"{before[title]:.3f} → {after[title]:.3f}" for title in ALL)
        lines.append(f"| {row['arm']} | {row['seed']} | {means} |")
    return "\n".join(lines)


if __name__ == "__main__":
    main()
