"""The next images of a voter. The draw follows a seed and the votes so far: it goes on after a restart."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import combinations

from retouch.data.sampler import derive_seed
from retouch.taste.votes import Vote, VotedImage

REPEATED = 0.1
"""Share of the votes that are on a pair which the voter has seen, mirrored."""

_APART = 10
"""Votes between a pair and its repetition, at least: the voter has forgotten the answer, not the taste."""


def _is_pair(images: tuple[VotedImage, VotedImage]) -> bool:
    """Whether two images of an example differ in their weights or in their seed, not in both."""
    one, other = images
    return one.weights == other.weights or one.seed == other.seed


@dataclass(frozen=True)
class Ballot:
    """Images to vote on; `right` is None for an image alone."""

    left: VotedImage
    right: VotedImage | None = None
    repeats: int | None = None
    choice: str = "uniform"


Informative = Callable[[Sequence[tuple[VotedImage, VotedImage]]], Sequence[float]]
"""Expected information of an answer on each pair."""


class Chooser:
    """Chooses questions about images.

    Args:
        alone: ask about single images.
        informative: for the choice "active"; None chooses uniformly.
    """

    def __init__(
        self, images: Sequence[VotedImage], seed: int, *, alone: bool, informative: Informative | None
    ) -> None:
        self._images = {image.key: image for image in images}
        self._seed, self._alone, self._informative = seed, alone, informative
        of_example: dict[str, list[VotedImage]] = {}
        for image in images:
            of_example.setdefault(image.example, []).append(image)
        pairs = {example: [*filter(_is_pair, combinations(ones, 2))] for example, ones in of_example.items()}
        self._pairs = {example: found for example, found in pairs.items() if found}

    def total(self) -> int:
        """Number of different questions."""
        return len(self._images) if self._alone else sum(map(len, self._pairs.values()))

    def next(self, voter: str, votes: Sequence[Vote]) -> Ballot | None:
        """The next question to a voter with these votes; None if each was asked."""
        draw = random.Random(derive_seed("vote", self._seed, voter, len(votes)))
        if (again := self._repetition(votes, draw)) is not None:
            return again
        asked = {frozenset(image.key for image in vote.images) for vote in votes}
        if self._alone:
            left = [image for key, image in self._images.items() if frozenset([key]) not in asked]
            return Ballot(draw.choice(left)) if left else None
        open_pairs = {
            example: kept
            for example, pairs in self._pairs.items()
            if (kept := [pair for pair in pairs if frozenset((pair[0].key, pair[1].key)) not in asked])
        }
        if not open_pairs:
            return None
        seen = Counter(vote.left.example for vote in votes)
        fewest = min(seen[example] for example in open_pairs)
        spread = [pair for example, pairs in open_pairs.items() if seen[example] == fewest for pair in pairs]
        told = self._informative(spread) if self._informative is not None else ()
        pair = max(zip(told, spread, strict=True), key=lambda one: one[0])[1] if told else draw.choice(spread)
        left, right = draw.sample(pair, 2)
        return Ballot(left, right, choice="active" if told else "uniform")

    def _repetition(self, votes: Sequence[Vote], draw: random.Random) -> Ballot | None:
        """A pair of long ago in which left and right change places; single images are not repeated."""
        if self._alone or draw.random() >= REPEATED:
            return None
        done = {vote.repeats for vote in votes}
        old = [v for v in votes[:-_APART] if v.right is not None and v.repeats is None and v.number not in done]
        known = [v for v in old if v.right is not None and {v.left.key, v.right.key} <= self._images.keys()]
        if not known:
            return None
        vote = draw.choice(known)
        assert vote.right is not None
        return Ballot(vote.right, vote.left, repeats=vote.number, choice=vote.choice)
