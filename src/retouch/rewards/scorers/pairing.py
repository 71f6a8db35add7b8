"""Base of judges that compare two images: both orders of every pair, and values from the pairs of a group.

A judge prefers the first (or the last) image by some margin. Every pair is therefore asked in both orders, and
the two answers are averaged: the result of (b, a) is the mirrored result of (a, b), whatever the judge prefers by
position.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Annotated, Literal, TypeVar

import numpy as np

from retouch.config.base import Count
from retouch.config.reads import ReadIf
from retouch.rewards.base import Question
from retouch.rewards.protocol import RewardItem
from retouch.rewards.scorers.judged import JudgeEntry, JudgeScorer, uncropped, whole
from retouch.types import Failure, Outcome, Score

if TYPE_CHECKING:
    from retouch.config.run import RunConfig

_LEAST_ANSWERED = 0.5
"""Share of an image's pairs that must have an answer."""

ALONE = Failure(
    "bad_item",
    "the group has no other image to compare this one with; set against=reference to compare with the example's "
    "reference image",
)


@dataclass(frozen=True)
class Preference:
    """The answers of a judge about images a and b.

    Attributes:
        forward: probability that the first image is better, with a first.
        backward: probability that the first image is better, with b first.
    """

    forward: float
    backward: float

    @property
    def wins(self) -> float:
        """Probability that a is better, without the position bias."""
        return 0.5 + self.margin

    @property
    def margin(self) -> float:
        """Probability that a is better, minus 1/2. Swapping a and b changes its sign exactly."""
        return (self.forward - self.backward) / 2

    @property
    def bias(self) -> float:
        """How much the first position is preferred, in [-1/2, 1/2]; 0 is a judge without position bias."""
        return (self.forward + self.backward) / 2 - 0.5

    @property
    def depends_on_order(self) -> bool:
        """Whether the two orders name different images as the better one."""
        return (self.forward - 0.5) * (self.backward - 0.5) > 0

    @property
    def mirrored(self) -> Preference:
        """The preference about b and a."""
        return Preference(self.backward, self.forward)


class PairEntry(JudgeEntry):
    """Options of judges that compare two images."""

    against: Annotated[
        Literal["group", "reference"],
        ReadIf(
            "where pairs are compared",
            lambda own: own.compares_pairs(),
            "but only pairs have an opponent; leave it out",
        ),
    ] = "group"
    """Opponents of a sample: the other samples of its group, or the reference image of its example (for example one
    that the untrained model generated for the same input). "group" needs whole groups and is not evaluated, because
    the mean over a group is always 1/2; `retouch eval` with two runs compares their samples instead."""
    rounds: Annotated[
        Count | None,
        ReadIf(
            "where a group is compared",
            lambda own: own.compares_group(),
            "but only pairs of a group have rounds; leave it out",
        ),
    ] = None
    """Number of rounds in a group, in each of which every sample meets two others; null compares all pairs. A group of
    K takes 2 K questions per round, or K (K - 1) in all."""

    def compares_pairs(self) -> bool:
        """Whether the judge is asked about two images at once."""
        return True

    def compares_group(self) -> bool:
        return self.compares_pairs() and self.against == "group"

    def required_images(self) -> frozenset[str]:
        return self.images | ({"reference"} if self.compares_pairs() and self.against == "reference" else set())

    def questions(self, group_size: int) -> tuple[Question, ...]:
        """Every pair is asked in both orders."""
        if not self.compares_pairs():
            return super().questions(group_size)
        number = 2 if not self.compares_group() else group_size - 1 if self.rounds is None else 2 * self.rounds
        return (self._question(2 + ("source" in self.required_images()), number=number, text=90, tokens_out=1),)

    def advice(self, name: str) -> list[str]:
        against_whole = self.compares_pairs() and self.against == "reference" and self.crop == "mask_box"
        return [*super().advice(name), *([uncropped(name)] if against_whole else [])]

    def check(self, run: RunConfig, key: str = "") -> None:
        super().check(run, key)
        if self.role == "gold":
            return
        size = run.rollout.group_size
        if self.rounds is not None and 2 * self.rounds > size - 1:
            raise ValueError(
                f"{key}.rounds: given {self.rounds}, but a group of {size} has "
                f"{(size - 1) // 2} rounds of different pairs; leave rounds out to compare all pairs"
            )


Paired = TypeVar("Paired", bound=PairEntry)


class PairScorer(JudgeScorer[Paired]):
    """Base of scorers whose judge compares two images."""

    def ask_pair(self, first: RewardItem, second: RewardItem) -> float:
        """Probability that the first image is better, as the judge answers with this order.

        Raises:
            JudgeError, BudgetSpent: no answer.
        """
        raise NotImplementedError

    def compare(self, pairs: Sequence[tuple[RewardItem, RewardItem]]) -> list[Preference | Failure]:
        """The preferences about pairs (a, b) of the same example; a failure of either order is one of the pair."""
        if not pairs:
            return []
        both = [ordered for a, b in pairs for ordered in ((a, b), (b, a))]
        answers = self._answers(lambda pair: self.ask_pair(*pair), both)
        return [_joined(answers[i : i + 2]) for i in range(0, len(answers), 2)]

    def score_pairs(self, items: Sequence[RewardItem]) -> list[Outcome]:
        """Each image's mean probability to be better than its opponents. Items with the same `group` are a group."""
        if self.options.against == "reference":
            answers = self.compare([(item, _opponent(item)) for item in items])
            return [a if isinstance(a, Failure) else Score(a.wins, order_statistics([a])) for a in answers]
        groups: dict[int | None, list[int]] = {}
        for place, item in enumerate(items):
            groups.setdefault(item.group, []).append(place)
        pairs = [(g[a], g[b]) for g in groups.values() for a, b in pairs_of(len(g), self.options.rounds)]
        found = self.compare([(items[a], items[b]) for a, b in pairs])
        return group_outcomes(len(items), dict(zip(pairs, found, strict=True)))


def pairs_of(size: int, rounds: int | None = None) -> list[tuple[int, int]]:
    """The pairs (a, b) of a group of `size` images that are compared, each once: all of them, or in round r those at a
    distance of r in a circle: every image has two opponents per round."""
    if rounds is None or 2 * rounds >= size - 1:
        return [(a, b) for a in range(size) for b in range(a + 1, size)]
    return [(a, (a + r) % size) for r in range(1, rounds + 1) for a in range(size)]


def group_outcomes(count: int, found: Mapping[tuple[int, int], Preference | Failure]) -> list[Outcome]:
    """Values of `count` images from the preferences about pairs (a, b).

    The value of an image is its mean probability to be better than its opponents, over the pairs with an answer: a
    failed pair is missing and not a loss. An image fails if fewer than half of its pairs have an answer.
    """
    of: list[list[Preference | Failure]] = [[] for _ in range(count)]
    for (a, b), preference in found.items():
        of[a].append(preference)
        of[b].append(preference if isinstance(preference, Failure) else preference.mirrored)
    return [_of_group(preferences) for preferences in of]


def _of_group(preferences: Sequence[Preference | Failure]) -> Outcome:
    if not preferences:
        return ALONE
    answered = [one for one in preferences if isinstance(one, Preference)]
    failures = [one for one in preferences if isinstance(one, Failure)]
    if len(answered) < _LEAST_ANSWERED * len(preferences):
        first = failures[0]
        told = f"{len(failures)} of {len(preferences)} comparisons failed: {first.message}"
        return Failure(first.code, told, first.retryable)
    value = float(np.mean([one.wins for one in answered]))
    return Score(value, {**order_statistics(answered), "pairs": len(answered), "missing": len(failures)})


def order_statistics(found: Sequence[Preference]) -> dict[str, float]:
    """How much the order of the two images matters: the share of pairs whose two orders name different winners, and the
    mean preference for the first position."""
    return {
        "order_dependent": float(np.mean([one.depends_on_order for one in found])),
        "position_bias": float(np.mean([one.bias for one in found])),
    }


def _opponent(item: RewardItem) -> RewardItem:
    """The item with its reference as the image."""
    assert item.reference is not None  # spec.needs
    return replace(item, image=item.reference)


def _joined(answers: Sequence[float | Failure]) -> Preference | Failure:
    both = whole(answers)
    return both if isinstance(both, Failure) else Preference(*both)
