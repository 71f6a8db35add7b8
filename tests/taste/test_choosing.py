"""What a voter is asked."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest

from retouch.taste.choosing import Chooser
from retouch.taste.information import Information
from retouch.taste.likelihood import Floats
from retouch.taste.votes import Vote, VoteFile
from tests.taste.voters import features_of, first_feature, images_of, vote

IMAGES = images_of(12, 4)  # 72 pairs


def voted(path: Path, count: int, seed: int = 0) -> list[Vote]:
    chooser = Chooser(IMAGES, seed, alone=False, informative=None)
    return vote(chooser, VoteFile(path / "votes.jsonl"), first_feature(features_of(IMAGES)), count)


def test_questions_spread_over_examples_and_sides_and_repeat_a_tenth_mirrored(tmp_path: Path) -> None:
    votes = voted(tmp_path, 72)
    fresh = [v for v in votes if v.repeats is None]
    pairs = [frozenset(image.key for image in v.images) for v in fresh]
    assert len(pairs) == len(set(pairs))  # none twice
    counts = Counter(v.left.example for v in votes)
    assert max(counts.values()) - min(counts.values()) <= 2
    lefts = sum(v.right is not None and v.left.key < v.right.key for v in fresh)
    assert 0.3 < lefts / len(fresh) < 0.7
    by_number = {v.number: v for v in votes}
    repeated = [v for v in votes if v.repeats is not None]
    assert 3 <= len(repeated) <= 12
    for again in repeated:
        assert again.repeats is not None
        first = by_number[again.repeats]
        assert (again.left, again.right) == (first.right, first.left)
        assert votes.index(again) - votes.index(first) >= 10


def test_every_pair_is_asked_in_the_end_and_then_nothing(tmp_path: Path) -> None:
    votes = voted(tmp_path, 1000)
    assert len([v for v in votes if v.repeats is None]) == 72
    assert Chooser(IMAGES, 0, alone=False, informative=None).next("ann", votes) is None


def test_the_draw_goes_on_after_a_restart_and_differs_between_voters_and_seeds(tmp_path: Path) -> None:
    votes = voted(tmp_path, 30)
    asked = [Chooser(IMAGES, 0, alone=False, informative=None).next("ann", votes) for _ in range(2)]
    assert asked[0] == asked[1] is not None

    def first(voter: str, seed: int) -> object:
        return Chooser(IMAGES, seed, alone=False, informative=None).next(voter, [])

    assert len({repr(first(voter, seed)) for voter in ("ann", "bob") for seed in range(5)}) > 5


def test_single_images_are_asked_once_each(tmp_path: Path) -> None:
    chooser, asked = Chooser(IMAGES, 0, alone=True, informative=None), list[Vote]()
    while (question := chooser.next("ann", asked)) is not None:
        assert question.right is None
        asked.append(Vote(len(asked), "ann", "good", question.left))
    assert len({v.left.key for v in asked}) == len(asked) == chooser.total() == 48


def test_an_active_choice_asks_what_tells_most(tmp_path: Path) -> None:
    features, file = features_of(IMAGES), VoteFile(tmp_path / "votes.jsonl")
    information = Information(features, file)
    pair = (IMAGES[0], IMAGES[1])
    before: Floats = information([pair])[0]
    for number in range(10):  # ten votes on a pair: the next one tells less
        file.add(Vote(number, "ann", "left", *pair))
    assert 0 < information([pair])[0] < 0.5 * before
    chooser = Chooser(IMAGES[:4], 0, alone=False, informative=information)
    asked = chooser.next("bob", [])
    assert asked is not None and asked.right is not None and asked.choice == "active"
    told = {
        frozenset((a.key, b.key)): information([(a, b)])[0] for a in IMAGES[:4] for b in IMAGES[:4] if a.key < b.key
    }
    assert told[frozenset((asked.left.key, asked.right.key))] == pytest.approx(max(told.values()))
