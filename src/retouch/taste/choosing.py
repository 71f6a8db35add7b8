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


Informative = Callable[[Sequence[tuple[VotedImage, ...]]], Sequence[float]]
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
        self._questions: dict[str, list[tuple[VotedImage, ...]]] = {
            example: [(one,) for one in ones] if alone else [*filter(_is_pair, combinations(ones, 2))]
            for example, ones in of_example.items()
        }

    def total(self) -> int:
        """Number of different questions."""
        return sum(map(len, self._questions.values()))

    def left(self, votes: Sequence[Vote]) -> int:
        """Number of the questions that a voter with these votes was not asked."""
        return sum(map(len, self._unasked(votes).values()))

    def answered(self, votes: Sequence[Vote]) -> list[Vote]:
        """The votes that are answers to questions about these images."""
        return [
            v for v in votes if (v.right is None) == self._alone and {i.key for i in v.images} <= self._images.keys()
        ]

    def next(self, voter: str, votes: Sequence[Vote]) -> Ballot | None:
        """The next question to a voter with these votes; None if each was asked."""
        draw = random.Random(derive_seed("vote", self._seed, voter, len(votes)))
        if (again := self._repetition(votes, draw)) is not None:
            return again
        unasked = self._unasked(votes)
        if not unasked:
            return None
        seen = Counter(vote.left.example for vote in votes)
        fewest = min(seen[example] for example in unasked)
        spread = [one for example, questions in unasked.items() if seen[example] == fewest for one in questions]
        told = self._informative(spread) if self._informative is not None else ()
        question = max(zip(told, spread, strict=True), key=lambda one: one[0])[1] if told else draw.choice(spread)
        left, right, *_ = *draw.sample(question, len(question)), None
        return Ballot(left, right, choice="active" if told else "uniform")

    def _unasked(self, votes: Sequence[Vote]) -> dict[str, list[tuple[VotedImage, ...]]]:
        """Example -> its questions that no vote answers; without examples that have none."""
        asked = {frozenset(image.key for image in vote.images) for vote in votes}
        unasked = {
            example: [one for one in questions if frozenset(image.key for image in one) not in asked]
            for example, questions in self._questions.items()
        }
        return {example: questions for example, questions in unasked.items() if questions}

    def _repetition(self, votes: Sequence[Vote], draw: random.Random) -> Ballot | None:
        """A pair of long ago in which left and right change places; single images are not repeated."""
        if self._alone or draw.random() >= REPEATED:
            return None
        done = {vote.repeats for vote in votes}
        old = self.answered(votes[:-_APART])
        known = [v for v in old if v.right is not None and v.repeats is None and v.number not in done]
        if not known:
            return None
        vote = draw.choice(known)
        assert vote.right is not None
        return Ballot(vote.right, vote.left, repeats=vote.number, choice=vote.choice)
