"""Does training on votes raise what the voter likes, and does a second reward notice when it is exploited?

    python benchmarks/taste_runs.py --samples FOLDER/samples.jsonl --out benchmarks/results/taste_runs.json

Votes are those of benchmarks/taste.py for the measure `stroke`: 300, of which 10 % are errors. DiffusionNFT trains on
OCR and on a reward that is fitted to the votes on half of the examples; a fit to the other half is the cautious gold
reward. KTO and offline DPO train on all votes, for as many network forwards. Each run begins with the 20
supervised steps of configs/tiny. The attack trains without KL on the reward of the votes alone.

Ink share and NED are measured on held-out words with the same seeds before and after, and paired.
"""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Mapping, Sequence
from itertools import product
from pathlib import Path
from typing import Any

from structure_reward import interval

from algorithms import REPOSITORY, Row, make_data, read_metrics, retouch, write
from retouch.config import derive, load_run
from retouch.taste.choosing import Chooser
from retouch.taste.images import images_to_vote_on
from retouch.taste.reward import fit_reward
from retouch.taste.votes import VotedImage, VoteFile
from retouch.training.evaluation import Evaluation, load_evaluation
from retouch.use.comparison import gains
from taste import stroke, vote

STEPS, WARMUP, HELD_OUT = 20, 20, 96
VOTES = 300
RATE = 1e-4
"""Learning rate of every arm."""
SHOWN = ("stroke", "ocr.ned", "taste", "gold")

ATTACK, PLAIN = "attack", "attack, plain gold"
_OF_ATTACK = ("algorithm.kl_weight=0", "evaluation.on_gold_fall=stop", "training.eval_every=5")
ARMS: Mapping[str, tuple[str, tuple[str, ...]]] = {
    "RL: taste + OCR": ("nft", ("rewards.taste.weight=0.3", "algorithm.kl_weight=0.2")),
    "KTO": ("kto", ("algorithm.good_weight=1",)),
    "offline DPO": ("dpo", ("algorithm.pairs=offline", "algorithm.reference_refresh_every=null")),
    ATTACK: ("nft", _OF_ATTACK),
    PLAIN: ("nft", _OF_ATTACK),
}
"""Arm -> the file of configs/tiny and its overrides."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--samples", type=Path, required=True)
    parser.add_argument("--arms", nargs="+", choices=ARMS, default=list(ARMS))
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--work", type=Path, default=Path("runs/taste"), help="folder for data and runs")
    parser.add_argument("--out", type=Path, required=True, help="JSON to write, or to add to")
    parser.add_argument("--set", nargs="*", default=[], metavar="KEY=VALUE", help="overrides, for a trial")
    options = parser.parse_args()
    rows: list[Row] = json.loads(options.out.read_text())["rows"] if options.out.exists() else []
    make_data(options.work / "data")
    images = images_to_vote_on(options.samples, options.samples.parent)
    noise = vote_and_fit(images, options.work)
    voted = [stroke(image) for image in images]
    for arm, seed in product(options.arms, options.seeds):
        row = trained(arm, seed, noise, options.work, options.set) | {"voted": [round(f(voted), 4) for f in (min, max)]}
        rows = [r for r in rows if r["run"] != row["run"]] + [row]
        write(rows, options.out)
    print(table(rows))


def vote_and_fit(images: Sequence[VotedImage], work: Path) -> float:
    """Votes and the two rewards, if they are missing -> `min_group_std` of the first."""
    votes = work / "votes.jsonl"
    if not votes.exists():
        value = {image.key: stroke(image) for image in images}
        vote(Chooser(images, 0, alone=False, informative=None), VoteFile(votes), value, VOTES, 0)
    fits = [fit_reward(votes, work / f"{half}.safetensors", "tiny", half=half) for half in ("first", "second")]
    return round(fits[0][0].noise, 4)


def trained(arm: str, seed: int, noise: float, work: Path, more: Sequence[str]) -> Row:
    """Train one arm and measure it on held-out words."""
    algorithm, own = ARMS[arm]
    file = REPOSITORY / f"configs/tiny/flux_fill_{algorithm}.yaml"
    name = f"{arm.split(':')[0].replace(', ', '-').replace(' ', '-')}-{seed}"
    taste = f"path: {work}/first.safetensors" + (f", min_group_std: {noise}" if algorithm == "nft" else "")
    rewards = f"taste: {{{taste}}}"
    rewards += (
        f", gold: {{scorer: taste, path: {work}/second.safetensors, role: gold, cautious: {json.dumps(arm != PLAIN)}}}"
    )
    rewards += "" if arm in (ATTACK, PLAIN) else ", ocr: {detect: false, threads: 1}"
    overrides = [f"seed={seed}", f"rewards={{{rewards}}}", f"algorithm.sft_steps={WARMUP}", f"optimizer.lr={RATE}"]
    overrides += [*own, *more]
    data = {"DATA_PATH": str(work / "data"), "LABELS_PATH": "unused"}
    if algorithm != "nft":
        kind = "labels" if algorithm == "kto" else "pairs"
        given = {
            "data": f"format: votes, votes_as: {kind}, path: {work}/votes.jsonl",
            "warmup_data": f"format: self_bench, path: {work}/data/warmup",
        }
        overrides += [f"{name}={{{section}, resolution: [32, 64]}}" for name, section in given.items()]
    os.environ.update(data)
    steps, forwards = equal_steps(file, overrides)
    overrides += [f"training.max_steps={WARMUP + steps}"]
    kept = [f"evaluation.num_examples={HELD_OUT}", f"evaluation.grid_examples={HELD_OUT}", "training.eval_every=10"]
    stopped = arm in (ATTACK, PLAIN) and alarms(work / name)
    try:
        if not stopped:
            options = [f"name={name}", f"logging.dir={work}", "logging.sinks=[]", "resume=auto"]
            retouch("train", str(file), *options, *kept, *overrides)
    except SystemExit as stop:
        if arm not in (ATTACK, PLAIN) or stop.code != 3:  # of an alarm
            raise
    records = read_metrics(work / name / "metrics.jsonl")
    data = work / "data/held_out"
    curve = {r["step"]: with_strokes(work / name, r["step"], data) for r in records if r["kind"] == "eval"}
    points = {"warmed up": curve[WARMUP], "last": curve[max(curve)]}
    change = gains(points["last"], points["warmed up"])
    shown = [measure for measure in SHOWN if measure in change]
    return {
        "run": name,
        "arm": arm,
        "seed": seed,
        "forwards": round(forwards * (max(curve) - WARMUP) / steps),  # an alarm may have stopped it
        "held_out": {n: {m: round(point.means()[m], 4) for m in shown} for n, point in points.items()},
        "gain": {m: [round(v, 4) for v in change[m]] for m in shown},
        "curve": [[step, *(round(point.means()[m], 4) for m in shown)] for step, point in curve.items()],
        "alarms": alarms(work / name),
    }


def alarms(run: Path) -> list[list[Any]]:
    """Step and text of each alarm of a run."""
    file = run / "metrics.jsonl"
    records = read_metrics(file) if file.exists() else ()
    return [[r["step"], r["alarm"]] for r in records if r.get("event") == "alarm"]


def equal_steps(file: Path, overrides: Sequence[str]) -> tuple[int, int]:
    """Optimizer steps after the warm-up with about the forwards of `STEPS` steps of RL, and these forwards."""

    def of_a_step(path: Path, changed: Sequence[str]) -> float:
        run = load_run(path, list(changed))
        return derive(run).forwards_per_image * run.optimizer.rows_per_step(1)

    rl = of_a_step(REPOSITORY / "configs/tiny/flux_fill_nft.yaml", ["rewards.ocr.url=null"])
    own = of_a_step(file, overrides)
    steps = round(STEPS * rl / own)
    return steps, round(steps * own)


def with_strokes(run: Path, step: int, data: Path) -> Evaluation:
    """An evaluation with the ink share of each image."""
    folder = run / f"evaluations/step-{step:06d}"
    found = load_evaluation(folder)
    for number, row in enumerate(found.rows):
        mask = data / f"test{row['example']}_mask.png"
        row["stroke"] = stroke(VotedImage(folder / f"{number:05d}.png", "", "", mask=mask))
    return found


def table(rows: Sequence[Row]) -> str:
    """One line for each run, as markdown."""
    lines = ["| trained by | seed | forwards | ink share | gain | NED | gain | alarms |", "|---" * 8 + "|"]
    for row in sorted(rows, key=lambda r: (list(ARMS).index(r["arm"]), r["seed"])):
        shown = [row["arm"], str(row["seed"]), f"{row['forwards']:,}"]
        for measure in SHOWN[:2]:
            before, after = (row["held_out"][n].get(measure) for n in ("warmed up", "last"))
            shown += ["–", "–"] if before is None else [f"{before:.3f} → {after:.3f}", interval(row["gain"][measure])]
        lines.append(f"| {' | '.join([*shown, ', '.join(f'step {step}' for step, _ in row['alarms']) or 'none'])} |")
    return "\n".join(lines)


if __name__ == "__main__":
    main()
