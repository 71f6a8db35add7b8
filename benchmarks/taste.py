"""Votes of simulated voters whose taste is measured, on samples of a tiny base: what a fit finds of it.

    python benchmarks/taste.py --samples FOLDER/samples.jsonl --out benchmarks/results/taste.json

The samples are those of `retouch sample --count 4 --for-votes` with the checkpoint of step 20 (the warm-up) of
configs/tiny/flux_fill_nft.yaml, on the signs of `retouch data synth --count 60 --seed 4 --no-targets`. A voter prefers
the higher value of a measure, and gives the other answer in 10 % of the votes. Measures: `warm`, the mean of red minus
blue inside the mask; `stroke`, the share of its pixels that are nearer to the darkest or brightest tenth than to the
median, whichever is further from it.

`fit`: for each of 10 repetitions 300 votes by `retouch label`'s choice of pairs: held-out accuracy, its excess over
chance as a share of the ceiling's (accuracy .9), and whether the interval of the voter's consistency contains the truth
(.82). `active`: for 5 seeds the true preference on the pairs of a quarter of the examples, which are not voted on, by
number of votes on the others, for both choices of pairs.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from collections.abc import Callable, Mapping, Sequence
from itertools import combinations
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np
from PIL import Image

from retouch.taste.choosing import Chooser
from retouch.taste.extractor import Extractor
from retouch.taste.fitting import Features, fit_head, measure
from retouch.taste.images import images_to_vote_on
from retouch.taste.information import Information
from retouch.taste.reward import features_of
from retouch.taste.votes import Vote, VotedImage, VoteFile

NOISE = 0.1
CONSISTENCY = (1 - NOISE) ** 2 + NOISE**2
COUNTS = (25, 50, 75, 100, 150, 200, 250, 300)
COMPARED = (100, 150, 200)
"""Numbers of votes whose accuracy by the uniform choice the active one has to reach."""

TASTES = {"warm": "warm background", "stroke": "thick strokes"}

Measure = Callable[[VotedImage], float]


def masked(image: VotedImage) -> np.ndarray[Any, Any]:
    """[N, 3] pixels inside the mask."""
    assert image.mask is not None
    pixels = np.asarray(Image.open(image.image).convert("RGB"), np.float64)
    return pixels[np.asarray(Image.open(image.mask).convert("L")) >= 128]


def warm(image: VotedImage) -> float:
    pixels = masked(image)
    return float((pixels[:, 0] - pixels[:, 2]).mean())


def stroke(image: VotedImage) -> float:
    grey = masked(image).mean(1)
    middle, ends = np.median(grey), np.percentile(grey, [5, 95])
    ink = ends[np.abs(ends - middle).argmax()]
    return float((np.abs(grey - ink) < np.abs(grey - middle)).mean())


MEASURES: Mapping[str, Measure] = {"warm": warm, "stroke": stroke}


def vote(chooser: Chooser, file: VoteFile, value: Mapping[str, float], count: int, seed: int) -> list[Vote]:
    """Votes of a voter until there are `count`."""
    draw = np.random.default_rng(seed)
    while len(votes := file.of("voter")) < count and (asked := chooser.next("voter", votes)) is not None:
        assert asked.right is not None
        is_left = (value[asked.left.key] > value[asked.right.key]) != (draw.random() < NOISE)
        said = "left" if is_left else "right"
        file.add(Vote(0, "voter", said, asked.left, asked.right, asked.repeats, asked.choice))
    return file.of("voter")


def fits(
    images: Sequence[VotedImage], features: Features, value: Mapping[str, float], repetitions: int
) -> dict[str, Any]:
    rows: list[dict[str, Any]] = []
    for seed in range(repetitions):
        with tempfile.TemporaryDirectory() as folder:
            chooser = Chooser(images, seed, alone=False, informative=None)
            found = measure(features, vote(chooser, VoteFile(Path(folder) / "votes.jsonl"), value, 300, seed))
        assert found.accuracy is not None and found.consistency is not None
        rows.append(
            {
                "accuracy": round(found.accuracy.value, 4),
                "of_ceiling": round((found.accuracy.value - 0.5) / (0.5 - NOISE), 3),
                "consistency": [
                    round(x, 3) for x in (found.consistency.value, found.consistency.low, found.consistency.high)
                ],
                "covered": found.consistency.low <= CONSISTENCY <= found.consistency.high,
            }
        )
    return {"rows": rows, "covered": sum(row["covered"] for row in rows)}


def choices(
    images: Sequence[VotedImage], features: Features, value: Mapping[str, float], seeds: int
) -> list[dict[str, Any]]:
    """Accuracy on pairs of examples without votes, by number of votes and choice."""
    examples = sorted({image.example for image in images})
    rows: list[dict[str, Any]] = []
    for seed in range(seeds):
        held = {*np.random.default_rng(seed).permutation(examples)[: len(examples) // 4].tolist()}
        pairs = [
            pair
            for example in held
            for pair in combinations([image for image in images if image.example == example], 2)
        ]
        voted = [image for image in images if image.example not in held]
        row: dict[str, Any] = {"seed": seed, "votes": COUNTS}
        for name in ("uniform", "active"):
            with tempfile.TemporaryDirectory() as folder:
                file = VoteFile(Path(folder) / "votes.jsonl")
                chooser = Chooser(
                    voted, seed, alone=False, informative=Information(features, file) if name == "active" else None
                )
                row[name] = []
                for count in COUNTS:
                    head = fit_head(features, vote(chooser, file, value, count, 1000 * seed + count))
                    score = {k: float(features.values[r] @ head.weights) for k, r in features.keys.items()}
                    right = [(score[a.key] > score[b.key]) == (value[a.key] > value[b.key]) for a, b in pairs]
                    row[name].append(round(float(np.mean(right)), 4))
        rows.append(row)
    return rows


def fit_table(result: Mapping[str, Any]) -> str:
    """Means over the repetitions, as markdown."""
    lines = ["| taste | held-out accuracy | of the ceiling | lowest | consistency in its interval |", "|---" * 5 + "|"]
    for name, found in result["measures"].items():
        rows = found["fit"]["rows"]
        accuracy, share = (fmean(row[key] for row in rows) for key in ("accuracy", "of_ceiling"))
        low = min(row["of_ceiling"] for row in rows)
        covered = f"{found['fit']['covered']} of {len(rows)}"
        lines.append(f"| {TASTES[name]} | {accuracy:.3f} | {share:.2f} | {low:.2f} | {covered} |")
    return "\n".join(lines)


def needed(counts: Sequence[int], curve: Sequence[float], accuracy: float) -> float | None:
    """Votes at which a curve first reaches an accuracy, between two counts in proportion; None: at none."""
    for at, (count, value) in enumerate(zip(counts, curve, strict=True)):
        if value >= accuracy:
            below = curve[at - 1] if at else value
            part = 1.0 if value == below else (accuracy - below) / (value - below)
            return count if not at else counts[at - 1] + part * (count - counts[at - 1])
    return None


def choice_rows(result: Mapping[str, Any]) -> list[tuple[str, int, float, float | None]]:
    """(taste, votes chosen uniformly, mean accuracy, votes chosen actively for as much)."""
    rows: list[tuple[str, int, float, float | None]] = []
    for name, found in result["measures"].items():
        seeds = found["active"]
        uniform, active = ([fmean(p) for p in zip(*(s[k] for s in seeds), strict=True)] for k in ("uniform", "active"))
        counts = seeds[0]["votes"]
        for count, accuracy in zip(counts, uniform, strict=True):
            if count in COMPARED:
                rows.append((TASTES[name], count, accuracy, needed(counts, active, accuracy)))
    return rows


def choice_table(result: Mapping[str, Any]) -> str:
    """Votes that both choices need for the same accuracy, as markdown."""
    lines = ["| taste | accuracy | votes, uniform | votes, active | ratio |", "|---" * 5 + "|"]
    for name, count, accuracy, votes in choice_rows(result):
        shown = "more than 300 | –" if votes is None else f"{votes:.0f} | {votes / count:.2f}"
        lines.append(f"| {name} | {accuracy:.3f} | {count} | {shown} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--samples", type=Path, required=True)
    parser.add_argument("--extractor", default="tiny")
    parser.add_argument("--repetitions", type=int, default=10)
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    images = images_to_vote_on(options.samples, options.samples.parent)
    features, _ = features_of(images, Extractor(options.extractor))
    result: dict[str, Any] = {"images": len(images), "noise": NOISE, "measures": {}}
    for name, of in MEASURES.items():
        value = {image.key: of(image) for image in images}
        told = {
            "fit": fits(images, features, value, options.repetitions),
            "active": choices(images, features, value, options.seeds),
        }
        result["measures"][name] = told
        print(name, json.dumps(told["fit"]), flush=True)
        for row in told["active"]:
            print(row, flush=True)
        options.out.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
