"""`retouch reward fit`: from a file of votes to a file that the reward `taste` scores with."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch

from retouch.errors import ConfigError, DataError
from retouch.imaging.masks import read_mask
from retouch.imaging.reading import open_image, to_rgb
from retouch.rewards.scorers.weights import file_digest
from retouch.taste.extractor import STATISTICS, Extractor
from retouch.taste.fitting import Features, FittedTaste, Quality, fit_head, folds_of, measure
from retouch.taste.head import TasteFile, write_taste
from retouch.taste.votes import REPLACED, Vote, VotedImage, read_votes, replaced

logger = logging.getLogger(__name__)

Half = Literal["first", "second"]


def fit_reward(
    votes: Path, out: Path, extractor: str, *, voter: str | None = None, half: Half | None = None, device: str = "cpu"
) -> tuple[TasteFile, Quality]:
    """Fit the votes of a file, measure the fit, and write it if it is above chance.

    Args:
        extractor: see `Extractor`.
        voter: whose votes; None: everybody's.
        half: of the examples, for a second head on other votes than the first; None: all.

    Raises:
        ConfigError: too few votes, or a fit that is not above chance on held-out examples.
        DataError: no votes.
    """
    chosen = [vote for vote in read_votes(votes) if voter in (None, vote.voter)]
    if half is not None:
        folds = folds_of(chosen, 2)
        chosen = [vote for vote, fold in zip(chosen, folds, strict=True) if (fold == 0) == (half == "first")]
    folds_of(chosen)  # before the images are encoded
    encoder = Extractor(extractor, device)
    features = features_of((image for vote in chosen for image in vote.images), encoder)
    quality = measure(features, chosen)
    if not quality.is_above_chance:
        raise ConfigError(_refusal(quality, len(chosen)))
    head = fit_head(features, chosen)
    about = {"votes": len(chosen), "voters": sorted({vote.voter for vote in chosen}), "half": half}
    about |= {"votes_file": f"{votes.name} {file_digest(votes)}", **asdict(quality)}
    write_taste(out, taste := _file_of(head, encoder, about))
    return taste, quality


def features_of(images: Iterable[VotedImage], encoder: Extractor) -> Features:
    """The features of images, each once.

    Raises:
        ImageProblem, OSError: an image or mask that cannot be read any more.
        DataError: an image that was replaced.
    """
    unique = {image.key: image for image in images}
    for image in replaced(unique.values()):
        raise DataError(f"{image.image}: {REPLACED}")
    rows = [encode(image, encoder) for image in unique.values()]
    return Features({key: row for row, key in enumerate(unique)}, np.stack(rows).astype(np.float64), STATISTICS)


def encode(image: VotedImage, encoder: Extractor) -> np.ndarray[Any, Any]:
    """[D] features of an image and its mask."""
    mask = None
    if image.mask is not None:
        read, _ = read_mask(open_image(image.mask), str(image.mask))
        mask = np.asarray(read)
    pixels = np.asarray(to_rgb(open_image(image.image)))
    with torch.no_grad():
        return encoder(torch.tensor(pixels).permute(2, 0, 1) / 255, mask).cpu().numpy()


def _file_of(head: FittedTaste, encoder: Extractor, about: Mapping[str, Any]) -> TasteFile:
    return TasteFile(head.weights, head.threshold, encoder.name, encoder.revision, head.noise, about)


def _refusal(quality: Quality, votes: int) -> str:
    found = quality.accuracy or quality.ranking
    least = "" if found is None else f": held-out accuracy {found}, which contains .5"
    advice = "vote on more examples"
    if quality.consistency is not None and quality.consistency.high < 0.7:
        advice = "the voter's own repeated answers differ in most cases: vote on one quality at a time"
    return f"{votes} votes, and no score is above chance at 95 %{least}; {advice}, or give another --extractor"


def lines_of(quality: Quality, votes: Sequence[Vote] | int) -> list[str]:
    """Quality of a fit, line by line."""
    count = votes if isinstance(votes, int) else len(votes)
    told = [f"{count} votes"]
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
