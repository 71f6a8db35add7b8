"""What is said about a fit, against voters whose taste is known."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from retouch.errors import ConfigError
from retouch.taste.choosing import Chooser
from retouch.taste.fitting import Features, consistency, fit_head, folds_of, measure, wilson
from retouch.taste.reward import half_of
from retouch.taste.votes import Vote, VoteFile, groups_of
from tests.taste.voters import features_of, first_feature, images_of, vote


def votes_of(features: Features, path: Path, count: int, noise: float, seed: int = 0) -> list[Vote]:
    images = images_of(40, 4)
    chooser = Chooser(images, seed, alone=False, informative=None)
    return vote(chooser, VoteFile(path / f"votes-{seed}.jsonl"), first_feature(features), count, noise, seed)


def test_a_linear_taste_is_found_almost_up_to_the_ceiling(tmp_path: Path) -> None:
    features = features_of(images_of(40, 4))
    votes = votes_of(features, tmp_path, 200, noise=0.1)
    found = measure(features, votes)
    assert found.accuracy is not None and found.is_above_chance
    assert found.accuracy.value - 0.5 >= 0.8 * (0.9 - 0.5)
    assert found.accuracy.low < found.accuracy.value < found.accuracy.high
    assert found.curve[-1][1] == found.accuracy.value  # the whole of the votes
    assert sum(count for _, _, count in found.calibration) == found.accuracy.count == 200
    head = fit_head(features, votes)
    assert abs(head.weights[0]) == max(abs(head.weights)) and head.weights[0] > 0
    assert 0 < head.noise < 0.25


def test_an_answer_of_chance_is_no_taste(tmp_path: Path) -> None:
    features = features_of(images_of(40, 4))
    found = measure(features, votes_of(features, tmp_path, 150, noise=0.5))
    assert not found.is_above_chance


def test_what_tells_examples_apart_is_not_counted_as_taste(tmp_path: Path) -> None:
    """Each example has a feature of its own, and the first image of an example always wins: a split by pair would find
    that; examples that were not seen have nothing of it."""
    images = images_of(30, 3)
    values = np.zeros((90, 30))
    for row, image in enumerate(images):
        values[row, int(image.example)] = 1.0 if row % 3 == 0 else -1.0
    features = Features({image.key: row for row, image in enumerate(images)}, values)
    chooser = Chooser(images, 0, alone=False, informative=None)
    votes = vote(chooser, VoteFile(tmp_path / "votes.jsonl"), lambda one: float(one.sha256.endswith("0")), 80, 0.0)
    found = measure(features, votes)
    assert found.accuracy is not None and not found.is_above_chance


def test_consistency_and_ceiling_are_those_of_the_repeated_pairs(tmp_path: Path) -> None:
    """An error rate of .1 agrees in .82, of which the ceiling is .9. With 10 repetitions intervals contain them nearly
    always."""
    features = features_of(images_of(40, 4))
    inside = 0
    for seed in range(10):
        found, ceiling = consistency(votes_of(features, tmp_path, 200, 0.1, seed))
        assert found is not None and ceiling is not None and found.count == ceiling.count >= 8
        assert ceiling.value == pytest.approx((1 + max(0, 2 * found.value - 1) ** 0.5) / 2)
        inside += found.low <= 0.82 <= found.high
    assert inside >= 9


def test_intervals_of_shares_are_wilsons() -> None:
    found = wilson(9, 10)
    assert found is not None
    assert (found.low, found.high) == pytest.approx((0.5958, 0.9821), abs=1e-4)  # published example of the method
    assert wilson(0, 0) is None
    assert (whole := wilson(5, 5)) is not None and whole.high == pytest.approx(1.0) and whole.low < 0.6


def test_votes_of_an_example_are_in_one_fold_and_few_examples_are_refused(tmp_path: Path) -> None:
    features = features_of(images_of(40, 4))
    votes = votes_of(features, tmp_path, 120, 0.1)
    folds = folds_of(votes)
    fold_of = {v.left.example: f for v, f in zip(votes, folds, strict=True)}
    assert [fold_of[v.left.example] for v in votes] == folds.tolist() and len({*folds.tolist()}) == 5
    with pytest.raises(ConfigError, match=r"9 examples.*40 for --half"):
        folds_of([v for v in votes if v.left.example in sorted(fold_of)[:9]])


def test_masks_of_one_photograph_are_in_one_fold_and_one_half(tmp_path: Path) -> None:
    """By the content of the original, or of the source: a fit had seen the photographs that it is measured on."""
    images = images_of(48, 2)
    plain = [Vote(i, "ann", "left", *pair) for i, pair in enumerate(zip(images[::2], images[1::2], strict=True))]
    votes = list[Vote]()
    for one in plain:
        photograph, image = f"photograph {one.number // 2}", one.left
        if one.number < 24:
            image = replace(image, original=photograph)
        else:
            source = tmp_path / f"{one.number}.png"
            source.write_text(photograph)
            image = replace(image, source=source)
        votes.append(replace(one, left=image))
    assert folds_of(votes)[::2].tolist() == folds_of(votes)[1::2].tolist()
    halves = [half_of(group) for group in groups_of(votes)]
    assert halves[::2] == halves[1::2] and len({*halves}) == 2
    assert folds_of(plain)[::2].tolist() != folds_of(plain)[1::2].tolist()
    with pytest.raises(ConfigError, match="images of 9 examples or photographs"):
        folds_of(votes[:18])


def test_single_images_are_ranked(tmp_path: Path) -> None:
    images = images_of(40, 2)
    features = features_of(images)
    taste, draw = first_feature(features), np.random.default_rng(0)
    votes = [
        Vote(i, "ann", "good" if (taste(m) > 0.3) != (draw.random() < 0.1) else "bad", m) for i, m in enumerate(images)
    ]
    found = measure(features, votes)
    assert found.accuracy is None and found.ranking is not None and found.is_above_chance
    few = measure(features, [v for v in votes if v.answer == "good" or int(v.left.example) < 8]).ranking
    assert few is not None and (few.low, few.high) == (0, 1)  # bad ones of fewer than 10 examples are no evidence
    head = fit_head(features, votes)
    threshold = head.threshold / head.weights[0]
    assert 0 < threshold < 1  # between the rejected and the accepted ones
    assert 0 < head.noise < 0.25  # from the pairs of an example, though nobody voted on pairs


def test_few_votes_on_pairs_keep_what_votes_on_single_images_tell(tmp_path: Path) -> None:
    """5 examples of two images among 60. The pairs agree always, which 5 do by chance in one of 32 tastes."""
    images = [image for e, image in enumerate(images_of(60, 2)) if e % 2 == 0 or e < 10]
    features = features_of(images)
    taste = first_feature(features)
    votes = [Vote(i, "ann", "good" if taste(one) > 0 else "bad", one) for i, one in enumerate(images)]
    for one, other in zip(images[:10:2], images[1:10:2], strict=True):
        votes.append(Vote(len(votes), "ann", "left" if taste(one) > taste(other) else "right", one, other))
    found = measure(features, votes)
    assert found.ranking is not None and found.ranking.value > 0.9
    assert found.accuracy is not None and (found.accuracy.low, found.accuracy.high) == (0, 1)
    assert not replace(found, ranking=None).is_above_chance


def test_rounding_of_a_constant_is_no_feature() -> None:
    values = np.random.default_rng(0).normal(size=(30, 2))
    values[:, 1] = 100 + 1e-6 * values[:, 1]
    features = Features({f"one {row}": row for row in range(30)}, values)
    assert (features.scale * values.std(axis=0) * 2**0.5).tolist() == pytest.approx([1.0, 0.0], abs=1e-5)


def test_features_are_scaled_by_what_differs_within_examples(tmp_path: Path) -> None:
    """The taste is a small difference within examples, in a feature that differs between them 100 times as far."""
    images = images_of(40, 4)
    features = features_of(images)
    features.values[:, 0] += 100 * np.repeat(np.random.default_rng(1).normal(size=40), 4)
    votes = votes_of(features, tmp_path, 200, noise=0.1)
    found = measure(features, votes)
    assert found.accuracy is not None and found.accuracy.value - 0.5 >= 0.8 * (0.9 - 0.5)
    head = fit_head(features, votes)
    scores = features.values @ head.weights - head.threshold
    assert scores.std() == pytest.approx(1.0) and abs(scores.mean()) < 1e-6  # no value is 0 or 1 by its example alone


def test_vectors_that_tell_nothing_of_the_taste_are_left_out(tmp_path: Path) -> None:
    """12 statistics beside 120 numbers of an encoder that only the votes of the training examples fit."""
    images = images_of(40, 4)
    features = features_of(images, width=132)
    votes = vote(
        Chooser(images, 0, alone=False, informative=None),
        VoteFile(tmp_path / "votes.jsonl"),
        lambda image: float(features.values[features.keys[image.key], -1]),
        150,
    )
    both = replace(features, statistics=12)
    head = fit_head(both, votes)
    assert head.share < 1 and abs(head.weights).argmax() == 131
    one, other = measure(both, votes).accuracy, measure(features, votes).accuracy
    assert one is not None and other is not None and one.value > other.value + 0.05
