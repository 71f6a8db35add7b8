"""Simulated voters, and images in which their taste can be measured."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
from PIL import Image

from retouch.taste.choosing import Ballot, Chooser
from retouch.taste.extractor import STATISTICS, Extractor
from retouch.taste.fitting import Features
from retouch.taste.head import TasteFile, Votable, write_taste
from retouch.taste.images import voted_image
from retouch.taste.likelihood import Answer
from retouch.taste.votes import Vote, VotedImage, VoteFile

Taste = Callable[[VotedImage], float]


def images_of(examples: int, each: int) -> list[VotedImage]:
    """Images without files."""
    names = [(e, k) for e in range(examples) for k in range(each)]
    return [VotedImage(Path(f"/images/{e}-{k}.png"), f"{e:08d}{k:08d}", str(e), prompt="a sign") for e, k in names]


def features_of(images: Sequence[VotedImage], width: int = 12, seed: int = 0) -> Features:
    values = np.random.default_rng(seed).normal(size=(len(images), width))
    return Features({image.key: row for row, image in enumerate(images)}, values)


def first_feature(features: Features) -> Taste:
    return lambda image: float(features.values[features.keys[image.key], 0])


def answer_of(question: Ballot, taste: Taste, noise: float, draw: np.random.Generator) -> Answer:
    """The better image; the other one at a rate of `noise`."""
    assert question.right is not None
    is_left = taste(question.left) > taste(question.right)
    return "left" if is_left != (draw.random() < noise) else "right"


def vote(chooser: Chooser, file: VoteFile, taste: Taste, count: int, noise: float = 0.1, seed: int = 0) -> list[Vote]:
    """Up to `count` votes of "ann" on what the chooser asks."""
    draw = np.random.default_rng(seed)
    while len(votes := file.of("ann")) < count and (asked := chooser.next("ann", votes)) is not None:
        said = answer_of(asked, taste, noise, draw)
        file.add(Vote(0, "ann", said, asked.left, asked.right, asked.repeats, asked.choice))
    return file.of("ann")


def random_head(folder: Path) -> Path:
    """A file of `retouch reward fit` with random weights, for the encoder of the package."""
    weights = np.random.default_rng(0).normal(size=2 * 64 + STATISTICS) / 25
    path, near = folder / "taste.safetensors", Votable(np.zeros(STATISTICS), np.eye(STATISTICS), 1.0)
    write_taste(path, TasteFile(weights, 0.1, "tiny", Extractor("tiny").revision, 0.05, near, [], None, {"votes": 0}))
    return path


def warm_votes(folder: Path, count: int = 30) -> Path:
    """Votes for the warmer of two images."""
    draw, path = np.random.default_rng(0), folder / "votes.jsonl"
    warmth = {(e, k): float(draw.uniform(-60, 60)) for e in range(count) for k in range(2)}
    images = [drawn_image(folder, e, k, value) for (e, k), value in warmth.items()]
    value_of = {image.key: value for image, value in zip(images, warmth.values(), strict=True)}
    vote(Chooser(images, 0, alone=False, informative=None), VoteFile(path), lambda i: value_of[i.key], count, 0.0)
    return path


def drawn_image(folder: Path, example: int, number: int, warmth: float) -> VotedImage:
    """A grey image, warmer or cooler, with a mask in its middle."""
    pixels = np.clip(128 + np.array([warmth, 0, -warmth]) + np.zeros((24, 40, 3)), 0, 255).astype(np.uint8)
    pixels[8:16, 10:30] += np.uint8(number + 1)
    file, mask = folder / f"{example}-{number}.png", folder / f"{example}-mask.png"
    Image.fromarray(pixels).save(file)
    if not mask.exists():
        white = np.zeros((24, 40), np.uint8)
        white[8:16, 10:30] = 255
        Image.fromarray(white).save(mask)
    return voted_image(file, str(example), prompt=f"sign {example}", mask=mask)
