"""Expected information of an answer on a pair: the active choice of `retouch label`."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from retouch.taste.fitting import Features
from retouch.taste.likelihood import Floats, fit
from retouch.taste.votes import VotedImage, VoteFile

_PENALTY = 1.0
_EVERY = 5
"""Votes between two fits."""


class Information:
    """Expected information of a vote on a pair: p (1 - p) d' C d, with d the difference of the features, C the
    covariance of the fitted weights and p the probability of the left image. It is high for near ties in directions
    that few votes have been about."""

    def __init__(self, features: Features, file: VoteFile) -> None:
        self._features, self._file = features, file
        self._fitted: tuple[int, Floats, Floats] | None = None

    def __call__(self, pairs: Sequence[tuple[VotedImage, ...]]) -> Sequence[float]:
        weights, covariance = self._fit()
        rows = self._features.components[[[self._features.keys[one.key] for one in pair] for pair in pairs]]
        difference = rows[:, 0] - rows[:, 1]
        probability = 1 / (1 + np.exp(-difference @ weights))
        spread = np.einsum("np,pq,nq->n", difference, covariance, difference)
        return (probability * (1 - probability) * spread).tolist()

    def _fit(self) -> tuple[Floats, Floats]:
        """Weights and covariance by the votes so far."""
        votes = [vote for vote in self._file.all() if all(image.key in self._features.keys for image in vote.images)]
        stage = len(votes) // _EVERY
        if self._fitted is None or self._fitted[0] != stage:
            width = self._features.components.shape[1]
            if votes:
                found = fit(self._features.choices(votes), _PENALTY)
                self._fitted = stage, found.weights, found.covariance[:-2, :-2]
            else:
                self._fitted = stage, np.zeros(width), np.eye(width) / _PENALTY
        return self._fitted[1:]
