"""`retouch reward fit`: from a file of votes to a file that the reward `taste` scores with."""

from __future__ import annotations

import logging
from collections.abc import Iterable
from dataclasses import asdict
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch

from retouch.config.run import RunConfig
from retouch.data.base import ItemFiles
from retouch.data.buckets import Shape
from retouch.data.formats.votes import VotesData
from retouch.data.item import read_item
from retouch.data.sampler import derive_seed
from retouch.errors import ConfigError, DataError
from retouch.imaging.reading import image_size
from retouch.rewards.scorers.weights import file_digest
from retouch.taste.extractor import STATISTICS, Extractor
from retouch.taste.fitting import Features, Quality, fit_head, folds_of, measure, votable
from retouch.taste.head import TasteFile, write_taste
from retouch.taste.votes import REPLACED, VotedImage, groups_of, read_votes, replaced

logger = logging.getLogger(__name__)

Half = Literal["first", "second"]


def fit_reward(
    votes: Path,
    out: Path,
    extractor: str,
    *,
    run: RunConfig | None = None,
    voter: str | None = None,
    half: Half | None = None,
    device: str = "cpu",
) -> tuple[TasteFile, Quality]:
    """Fit the votes of a file, measure the fit, and write it if it is above chance.

    Args:
        extractor: see `Extractor`.
        run: the fit reads the images as this run does, at its `data.resolution` and with its `data.fit`; None: as they
            are.
        voter: whose votes; None: everybody's.
        half: of the examples or photographs, for a second head on other votes than the first; None: all.

    Raises:
        ConfigError: too few votes, or a fit that is not above chance on held-out examples.
        DataError: no votes.
    """
    chosen = [vote for vote in read_votes(votes) if voter in (None, vote.voter)]
    if half is not None:
        chosen = [vote for vote, group in zip(chosen, groups_of(chosen), strict=True) if half_of(group) == half]
    folds_of(chosen)  # before the images are encoded
    encoder = Extractor(extractor, device)
    shown = None
    if run is not None:
        shown = VotesData(path=str(votes), resolution=run.data.resolution, fit=run.data.image_options.fit)
    features, sizes = features_of((image for vote in chosen for image in vote.images), encoder, shown)
    quality = measure(features, chosen)
    if not quality.is_above_chance:
        raise ConfigError(_refusal(quality, len(chosen)))
    head = fit_head(features, chosen)
    about = {"votes": len(chosen), "voters": sorted({vote.voter for vote in chosen}), "half": half}
    near = votable(features.values[:, -STATISTICS:])
    about |= {"votes_file": f"{votes.name} {file_digest(votes)}", **asdict(quality)}
    encoded = encoder.name, encoder.revision, head.noise, near, sorted(sizes), shown and shown.fit
    masked = any(image.mask is not None for vote in chosen for image in vote.images)
    taste = TasteFile(head.weights, head.threshold, *encoded, about, masked)
    write_taste(out, taste)
    return taste, quality


def half_of(group: str) -> Half:
    """The half of the votes that a group (`groups_of`) is in, whichever others were voted on: votes that come later
    change neither half."""
    return "second" if derive_seed("half", group) % 2 else "first"


def features_of(
    images: Iterable[VotedImage], encoder: Extractor, section: VotesData | None = None
) -> tuple[Features, set[Shape]]:
    """The features of images, each once, and every (height, width) at which they were encoded.

    Args:
        section: reads the images as a run does; None: as they are.

    Raises:
        ImageProblem, OSError: an image or mask that cannot be read any more.
        DataError: an image that was replaced.
    """
    unique = {image.key: image for image in images}
    for image in replaced(unique.values()):
        raise DataError(f"{image.image}: {REPLACED}")
    rows, sizes = list[Any](), set[Shape]()
    for image in unique.values():
        width, height = image_size(image.image)
        own = section or VotesData(path=str(image.image), resolution=(height, width))
        item = ItemFiles(0, image.prompt, None, image.mask, target_path=image.image, target="file", mask_is_made=True)
        example, _ = read_item(item, own)
        mask = None if example.mask is None else np.asarray(example.mask)
        with torch.no_grad():
            pixels = torch.tensor(np.asarray(example.target), dtype=torch.float32).permute(2, 0, 1) / 255
            rows.append(encoder(pixels, mask).cpu().numpy())
        sizes.add((pixels.shape[1], pixels.shape[2]))
    keys = {key: row for row, key in enumerate(unique)}
    return Features(keys, np.stack(rows).astype(np.float64), STATISTICS), sizes


def _refusal(quality: Quality, votes: int) -> str:
    named = {"accuracy": quality.accuracy, "ranking": quality.ranking}
    found = " and ".join(f"{name} {one}" for name, one in named.items() if one is not None)
    least = f": held-out {found}, which may be .5" if found else ""
    advice = "vote on more examples"
    if quality.consistency is not None and quality.consistency.high < 0.7:
        advice = "the voter's own repeated answers differ in most cases: vote on one quality at a time"
    return f"{votes} votes, and no score is above chance at 95 %{least}; {advice}, or give another --extractor"


def lines_of(quality: Quality, votes: int) -> list[str]:
    """Quality of a fit, line by line."""
    told = [f"{votes} votes"]
    for name, value in (
        ("held-out accuracy", quality.accuracy),
        ("held-out ranking of good above bad", quality.ranking),
        ("the voter's own consistency", quality.consistency),
        ("best accuracy possible for such a voter", quality.ceiling),
    ):
        if value is not None:
            told.append(f"{name}: {value}")
    if quality.curve:
        told.append("accuracy by share of the votes: " + ", ".join(f"{s:.0%} {a:.3f}" for s, a in quality.curve))
    told += [f"expected {e:.2f}, observed {o:.2f} in {n} votes" for e, o, n in quality.calibration]
    return told
