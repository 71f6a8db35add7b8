"""The file of a fitted taste: a safetensors file with the weights of the score, and what it was fitted with."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from retouch.errors import ConfigError, first_line
from retouch.taste.likelihood import Floats

_FORMAT = "retouch.taste 2"
_TENSORS = ("weights", "center", "whitening")


@dataclass(frozen=True)
class Votable:
    """Images like those that were voted on: their statistics x have |(x - center) @ whitening| <= reach, nearly all.

    Attributes:
        center: [S].
        whitening: [S, S].
    """

    center: Floats
    whitening: Floats
    reach: float


@dataclass(frozen=True)
class TasteFile:
    """The content of a file.

    Attributes:
        weights: [D] fp32 of the score.
        threshold: score of an image that the voter would as soon have as not.
        extractor, extractor_revision: name and weights of the image encoder.
        noise: `min_group_std` of the reward.
        sizes: every (height, width) of the images that it was fitted to.
        fit: `data.fit` that brought them to it; None: they were taken as they are.
        about: votes, voters and measured quality, for people.
        masked: whether any of the images had a mask: without one, the features of the mask are those of the whole.
        digest: of the file.
    """

    weights: Floats
    threshold: float
    extractor: str
    extractor_revision: str
    noise: float
    votable: Votable
    sizes: Sequence[tuple[int, int]]
    fit: str | None
    about: Mapping[str, Any]
    masked: bool = True
    digest: str = ""


def write_taste(path: Path, taste: TasteFile) -> None:
    from safetensors.numpy import save

    metadata = {
        "format": _FORMAT,
        "extractor": taste.extractor,
        "extractor_revision": taste.extractor_revision,
        "threshold": repr(taste.threshold),
        "noise": repr(taste.noise),
        "reach": repr(taste.votable.reach),
        "seen": json.dumps([taste.sizes, taste.fit, taste.masked]),
        "about": json.dumps(taste.about, ensure_ascii=False),
    }
    tensors = {"weights": taste.weights, "center": taste.votable.center, "whitening": taste.votable.whitening}
    path.write_bytes(save({name: tensor.astype(np.float32) for name, tensor in tensors.items()}, metadata))


def read_taste(path: Path, option: str = "path") -> TasteFile:
    """Raises: ConfigError: no such file, or none of `retouch reward fit`."""
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, "numpy") as file:
            told = file.metadata() or {}
            if (version := told.get("format")) != _FORMAT:
                old = "; fit again" if str(version).startswith(_FORMAT.split()[0]) else ""
                raise ValueError(f"its format is {version!r}; expected {_FORMAT!r}{old}")
            weights, *votable = (file.get_tensor(name).astype(np.float64) for name in _TENSORS)
        threshold, noise, reach = (float(told[name]) for name in ("threshold", "noise", "reach"))
        numbers = np.concatenate([weights, *map(np.ravel, votable), [threshold, noise, reach]])
        if weights.ndim != 1 or not np.isfinite(numbers).all():
            raise ValueError("it contains NaN or Inf")
        digest = hashlib.sha256(path.read_bytes()).hexdigest()[:12]
        about, (sizes, window, *masked) = json.loads(told["about"]), json.loads(told["seen"])
    except (OSError, SafetensorError, KeyError, ValueError) as error:
        raise ConfigError(
            f"{option}: given {str(path)!r}, no file of `retouch reward fit` ({first_line(error)})"
        ) from None
    return TasteFile(
        weights,
        threshold,
        told["extractor"],
        told["extractor_revision"],
        noise,
        Votable(votable[0], votable[1], reach),
        [(height, width) for height, width in sizes],
        window,
        about,
        masked != [False],  # absent in earlier files
        digest,
    )
