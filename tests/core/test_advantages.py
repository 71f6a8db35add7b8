"""Advantages: reference values, masks, and the traps of public code."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from retouch.core.advantages import comparable_rows, dense_ranks, group_advantages, win_rates, zero_std_rows

REWARDS = torch.tensor([1.0, 2.0, 3.0, 4.0], dtype=torch.float64)
GROUPS = torch.tensor([7, 7, 9, 9])


def test_reference_values() -> None:
    group = group_advantages(REWARDS, GROUPS)
    assert group.tolist() == pytest.approx([-0.99980, 0.99980, -0.99980, 0.99980], abs=5e-6)
    batch_scale = group_advantages(REWARDS, GROUPS, scale="batch")
    assert batch_scale.tolist() == pytest.approx([-0.44717, 0.44717, -0.44717, 0.44717], abs=5e-6)
    ppo = group_advantages(REWARDS, GROUPS, baseline="batch", scale="batch")
    std = 1.25**0.5 + 1e-4
    assert ppo.tolist() == pytest.approx([-1.5 / std, -0.5 / std, 0.5 / std, 1.5 / std], abs=1e-9)
    assert group_advantages(REWARDS, GROUPS, scale="none").tolist() == [-0.5, 0.5, -0.5, 0.5]


def test_order_and_ids_do_not_matter() -> None:
    order = torch.tensor([2, 0, 3, 1])
    shuffled = group_advantages(REWARDS[order], GROUPS[order])
    assert torch.equal(shuffled, group_advantages(REWARDS, GROUPS)[order])
    assert torch.equal(group_advantages(REWARDS, GROUPS + 10**12), group_advantages(REWARDS, GROUPS))


def test_64_bit_ids_do_not_collide() -> None:
    """2**24 and 2**24 + 1 are one number in float32."""
    ids = torch.tensor([2**24, 2**24, 2**24 + 1, 2**24 + 1])
    assert torch.equal(group_advantages(REWARDS, ids), group_advantages(REWARDS, GROUPS))
    with pytest.raises(ValueError, match="integers"):
        group_advantages(REWARDS, ids.float())


def test_a_failed_reward_leaves_the_baseline() -> None:
    rewards = torch.tensor([0.0, 1.0, 2.0, float("nan")])
    valid = torch.tensor([True, True, True, False])
    ids = torch.tensor([0, 0, 0, 0])
    masked = group_advantages(rewards, ids, valid)
    alone = group_advantages(rewards[:3], ids[:3])
    assert torch.equal(masked[:3], alone)
    assert float(masked[3]) == 0.0


def test_nan_in_batch_statistics_does_not_spread() -> None:
    rewards = torch.tensor([0.0, 1.0, float("nan"), 3.0])
    valid = torch.tensor([True, True, False, True])
    for scale in ("group", "batch", "none"):
        found = group_advantages(rewards, torch.tensor([0, 0, 1, 1]), valid, "batch", scale)
        assert bool(torch.isfinite(found).all()) and float(found[2]) == 0.0


def test_a_group_with_one_valid_row_is_dropped() -> None:
    valid = torch.tensor([True, False, True, True])
    assert group_advantages(REWARDS, GROUPS, valid)[:2].tolist() == [0.0, 0.0]
    assert comparable_rows(GROUPS, valid).tolist() == [False, False, True, True]
    assert comparable_rows(GROUPS, valid, "batch").tolist() == [True, False, True, True]


def test_a_dropped_group_leaves_batch_statistics() -> None:
    rewards = torch.tensor([100.0, 0.0, 1.0, 2.0])
    valid = torch.tensor([True, False, True, True])
    found = group_advantages(rewards, GROUPS, valid, scale="batch")
    assert found[2:].tolist() == pytest.approx([-0.5 / 0.5001, 0.5 / 0.5001], abs=1e-6)


def test_a_valid_reward_must_be_finite() -> None:
    with pytest.raises(ValueError, match="NaN or Inf"):
        group_advantages(torch.tensor([1.0, float("inf")]), torch.tensor([0, 0]))


@pytest.mark.parametrize("scale", ["group", "batch", "none"])
def test_the_largest_floats_do_not_overflow(scale: Any) -> None:
    largest = torch.tensor([1e308, -1e308, 1e308, -1e308], dtype=torch.float64)
    found = group_advantages(largest, torch.tensor([0, 0, 1, 1]), scale=scale)
    expected = 5.0 if scale == "none" else 1.0
    assert found.tolist() == pytest.approx([expected, -expected, expected, -expected])


def test_clip() -> None:
    rewards = torch.tensor([0.0] * 99 + [1.0])
    found = group_advantages(rewards, torch.zeros(100, dtype=torch.long), clip=5.0)
    assert float(found[-1]) == 5.0 and float(found[0]) > -0.2


def test_zero_std_rows() -> None:
    rewards = torch.tensor([0.5, 0.5, 0.5, 0.7, float("nan"), 0.2])
    ids = torch.tensor([1, 1, 2, 2, 3, 3])
    valid = torch.tensor([True, True, True, True, False, True])
    assert zero_std_rows(rewards, ids, valid).tolist() == [True, True, False, False, False, True]
    assert group_advantages(rewards, ids, valid)[:2].tolist() == [0.0, 0.0]


def test_a_spread_within_the_noise_gives_no_advantage() -> None:
    """The std of the first group is .1, that of the second .2, of the batch .35."""
    rewards = torch.tensor([0.0, 0.2, 0.5, 0.9], dtype=torch.float64)
    every = torch.ones(4).bool()
    found = group_advantages(rewards, GROUPS, noise=0.15)
    assert found[:2].tolist() == [0.0, 0.0] and found[2:].tolist() == pytest.approx([-1, 1], abs=1e-3)
    assert zero_std_rows(rewards, GROUPS, every, noise=0.15).tolist() == [True, True, False, False]
    whole = group_advantages(rewards, GROUPS, baseline="batch", scale="batch", noise=0.15)
    assert whole.abs().min() > 0
    assert group_advantages(rewards, GROUPS, baseline="batch", scale="batch", noise=0.4).tolist() == [0.0] * 4


def test_win_rates_by_hand() -> None:
    """A failure is beaten by nobody and beats nobody; who is alone has won half."""
    rewards = torch.tensor([3.0, 1.0, float("nan"), 3.0, 0.0, 7.0, 7.05])
    ids = torch.tensor([4, 4, 4, 4, 9, 2, 2])
    valid = torch.tensor([True, True, False, True, True, True, True])
    assert win_rates(rewards, ids, valid).tolist() == [0.75, 0.0, 0.5, 0.75, 0.5, 0.0, 1.0]
    assert win_rates(rewards, ids, valid, noise=0.1)[5:].tolist() == [0.5, 0.5]


def test_ranks_by_hand() -> None:
    """Equal values share a rank, and the next value has the next one; a failure takes up none."""
    rewards = torch.tensor([3.0, 1.0, float("nan"), 3.0, 2.0, 0.0, 7.0, 7.05, 6.0])
    ids = torch.tensor([4, 4, 4, 4, 4, 9, 2, 2, 2])
    valid = torch.tensor([True, True, False, True, True, True, True, True, True])
    assert dense_ranks(rewards, ids, valid).tolist() == [0, -2, 0, 0, -1, 0, -1, 0, -2]
    assert dense_ranks(rewards, ids, valid, noise=0.1)[6:].tolist() == [0, 0, -1]


def test_win_rates_are_those_without_the_failed_rows() -> None:
    generator = torch.Generator().manual_seed(0)
    rewards, ids = torch.randn(40, generator=generator), torch.arange(40) % 5
    valid = torch.rand(40, generator=generator) > 0.2
    found = win_rates(rewards, ids, valid)[valid]
    rest = win_rates(rewards[valid], ids[valid], torch.ones(int(valid.sum())).bool())
    assert torch.equal(found, rest) and 0 < int(valid.sum()) < 40


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ({"baseline": "x"}, "baseline is 'x'; it must be group or batch"),
        ({"scale": "x"}, "scale is 'x'; it must be group, batch or none"),
    ],
)
def test_an_unknown_word_is_an_error(words: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        group_advantages(REWARDS, GROUPS, **words)


def test_advantages_of_whole_numbers_are_fractions() -> None:
    for rewards in (REWARDS.long(), REWARDS.int()):
        found = group_advantages(rewards, GROUPS, scale="batch")
        assert found.tolist() == pytest.approx([-0.44717, 0.44717, -0.44717, 0.44717], abs=5e-6)
    passed = group_advantages(torch.tensor([True, False, False, False]), torch.zeros(4).int(), scale="none")
    assert passed.tolist() == [0.75, -0.25, -0.25, -0.25]
    assert group_advantages(REWARDS, GROUPS).dtype == torch.float64


def test_empty_batch() -> None:
    none = torch.zeros(0)
    assert group_advantages(none, none.long()).shape == (0,)


def test_a_group_without_spread_has_no_scale() -> None:
    """With a batch baseline its distance to the batch would be divided by eps, and clipped: the greatest advantage of
    all. The same of a group of which one reward is left."""
    rewards = torch.tensor([0.5, 0.5, 0.0, 1.0, 0.2, float("nan")], dtype=torch.float64)
    ids, valid = torch.tensor([0, 0, 1, 1, 2, 2]), torch.tensor([True] * 5 + [False])
    mean = 2.2 / 5
    found = group_advantages(rewards, ids, valid, baseline="batch", scale="group")
    assert found[[0, 1, 4, 5]].tolist() == [0.0] * 4
    assert found[2:4].tolist() == pytest.approx([-mean / 0.5001, (1 - mean) / 0.5001])
    by_batch = group_advantages(rewards, ids, valid, baseline="batch", scale="batch")
    assert bool((by_batch[:5] != 0).all())  # there every sample counts


def test_a_spread_as_small_as_eps_halves_the_advantages() -> None:
    """As with Flow-GRPO, which adds 1e-4 to the std as well."""
    ids = torch.tensor([0, 0])
    for spread, size in ((1e-4, 0.5), (1e-6, 1 / 101), (1.0, 1 / 1.0001)):
        rewards = torch.tensor([-spread, spread], dtype=torch.float64)
        torch.testing.assert_close(group_advantages(rewards, ids), torch.tensor([-size, size], dtype=torch.float64))
