"""From rewards to advantages. Legend: N rollouts; a group is the rollouts of one example."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal, get_args

import torch
from torch import Tensor

Baseline = Literal["group", "batch"]
Scale = Literal["group", "batch", "none"]


def group_advantages(
    rewards: Tensor,
    group_ids: Tensor,
    valid: Tensor | None = None,
    baseline: Baseline = "group",
    scale: Scale = "group",
    eps: float = 1e-4,
    clip: float = 5.0,
    noise: float = 0.0,
) -> Tensor:
    """(reward - baseline) / (std + eps), clipped to ±clip -> [N].

    GRPO is baseline="group", scale="group"; Flow-GRPO's "global std" is group, batch; PPO is batch, batch. Standard
    deviations are population ones; the batch one is of the raw rewards around the batch mean. `eps` is that of
    Flow-GRPO (stat_tracking.py) and TRL: a group whose rewards have a std of 1e-4 trains with half of the advantages,
    one of 1e-6 with a hundredth, so a reward of so small a range needs a larger unit.

    Args:
        rewards: [N]; entries that are not valid may hold anything, NaN included. The advantages have their dtype, those
            of integers or bools are fp32.
        group_ids: [N] integers.
        valid: [N] bool; rows without a valid reward leave every mean and std and get advantage 0. With a group
            baseline so do rows of a group with fewer than two valid rewards (see `comparable_rows`).
        noise: measured standard deviation of the reward on one image. A group whose spread is not above it has
            advantage 0 where rewards are compared with the group or divided by its std, which would train noise alone
            as hard as a signal; with a batch baseline and another scale, the spread is that of the batch.

    Raises:
        ValueError: wrong shapes, non-integer ids, a valid reward of NaN or Inf, or an unknown baseline or scale.
    """
    if scale not in get_args(Scale):
        raise ValueError(f"scale is {scale!r}; it must be group, batch or none")
    ids, ok, r = _checked(rewards, group_ids, valid)
    ok = comparable_rows(group_ids, ok, baseline)
    if not bool(torch.isfinite(r[ok]).all()):
        raise ValueError("a reward marked valid is NaN or Inf; a failed reward must be marked invalid")
    r = torch.where(ok, r, torch.zeros_like(r))
    # Squares of rewards beyond 1e150 would overflow; advantages do not depend on the unit of the rewards.
    largest = float(r.abs().max()) if r.numel() else 0.0
    unit = largest if largest > 1e150 else 1.0
    r, eps, noise = r / unit, eps / unit, noise / unit
    weight = ok.to(r.dtype)
    mean, std = _group_moments(r, ids, weight)
    batch_count = weight.sum().clamp(min=1)
    batch_mean = r.sum() / batch_count
    batch_std = ((r - batch_mean) ** 2 * weight).sum().div(batch_count).sqrt()
    centred = r - (mean[ids] if baseline == "group" else batch_mean)
    if scale == "group":
        centred = centred / (std[ids] + eps)
    elif scale == "batch":
        centred = centred / (batch_std + eps)
    else:
        centred = centred * unit
    spread = std[ids] if "group" in (baseline, scale) else batch_std
    centred = torch.where(spread > noise, centred, torch.zeros_like(centred))
    return torch.where(ok, centred.clamp(-clip, clip), torch.zeros_like(r)).to(
        rewards.dtype if rewards.is_floating_point() else torch.float32
    )


def comparable_rows(group_ids: Tensor, valid: Tensor, baseline: Baseline = "group") -> Tensor:
    """[N] bool: rows that can be trained on: valid, and with a group baseline with another valid row in the group.

    Raises:
        ValueError: an unknown baseline.
    """
    if baseline not in get_args(Baseline):
        raise ValueError(f"baseline is {baseline!r}; it must be group or batch")
    if baseline == "batch":
        return valid.clone()
    ids = torch.as_tensor(group_ids.unique(return_inverse=True)[1], dtype=torch.long)  # pyright: ignore
    count = torch.zeros(int(ids.max()) + 1 if len(ids) else 0, dtype=torch.int64, device=ids.device)
    count = count.index_add_(0, ids, valid.long())
    return valid & (count[ids] >= 2)


def win_rates(rewards: Tensor, group_ids: Tensor, valid: Tensor, noise: float = 0.0) -> Tensor:
    """[N] float64: the share of the group's other valid rows that a row beats, a tie counting half; .5 for
    a row without others, and for rows that are not valid.

    Args:
        noise: rewards that differ by no more are a tie.
    """
    ids, ok, r = _checked(rewards, group_ids, valid)
    rates = torch.full_like(r, 0.5)
    for group in range(int(ids.max()) + 1 if len(ids) else 0):
        members = ((ids == group) & ok).nonzero().flatten()
        if len(members) > 1:
            lead = r[members][:, None] - r[members]
            points = (lead > noise).double() + 0.5 * (lead.abs() <= noise).double()
            rates[members] = (points.sum(1) - 0.5) / (len(members) - 1)  # without the tie with itself
    return rates


def dense_ranks(rewards: Tensor, group_ids: Tensor, valid: Tensor, noise: float = 0.0) -> Tensor:
    """[N] float64: minus the number of distinct values above a row's own among the valid rows of its group; 0 for the
    best, and for rows that are not valid. Summed over rewards, the ensemble of Follow-Your-Preference (arXiv
    2509.23082), whose ranks are 1 for the best.

    Args:
        noise: a value that is above the next lower one by no more has its rank.
    """
    ids, ok, r = _checked(rewards, group_ids, valid)
    ranks = torch.zeros_like(r)
    for group in range(int(ids.max()) + 1 if len(ids) else 0):
        members = ((ids == group) & ok).nonzero().flatten()
        values = r[members].sort().values
        lowest = values[1:][values.diff() > noise]  # of every rank but the last
        ranks[members] = -(lowest > r[members][:, None]).sum(1).double()
    return ranks


TRANSFORMS = {"win_rate": win_rates, "rank": dense_ranks}
"""`transform` of a reward -> the signal of its values, their groups, which are valid, and their noise."""


def zero_std_rows(
    rewards: Tensor, group_ids: Tensor, valid: Tensor, tolerance: float = 1e-6, noise: float = 0.0
) -> Tensor:
    """[N] bool: valid rows of groups with zero reward variance (all within `tolerance`, or a standard deviation of at
    most `noise`); with a group baseline their advantages are 0."""
    ids, ok, r = _checked(rewards, group_ids, valid)
    groups = int(ids.max()) + 1 if len(ids) else 0
    low = torch.full((groups,), float("inf"), dtype=r.dtype, device=r.device)
    high = -low.clone()
    low = low.scatter_reduce(0, ids[ok], r[ok], "amin")
    high = high.scatter_reduce(0, ids[ok], r[ok], "amax")
    _, std = _group_moments(torch.where(ok, r, torch.zeros_like(r)), ids, ok.to(r.dtype))
    return ok & ((high[ids] - low[ids] <= tolerance) | (std[ids] <= noise))


def _checked(rewards: Tensor, group_ids: Tensor, valid: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
    """Ids renumbered 0 .. groups - 1 in their order, validity, and float64 rewards."""
    if rewards.ndim != 1 or group_ids.shape != rewards.shape:
        raise ValueError(f"rewards {tuple(rewards.shape)} and group_ids {tuple(group_ids.shape)} must both be [N]")
    if group_ids.is_floating_point():
        # 64-bit ids collide once they are floats: 2**24 + 1 == 2**24 in fp32
        raise ValueError(f"group_ids are {group_ids.dtype}; they must be integers")
    ok = torch.ones_like(rewards, dtype=torch.bool) if valid is None else valid.bool()
    if ok.shape != rewards.shape:
        raise ValueError(f"valid has shape {tuple(ok.shape)}; it must be [N] = [{rewards.shape[0]}]")
    ids = torch.as_tensor(group_ids.unique(return_inverse=True)[1], dtype=torch.long)  # pyright: ignore
    return ids, ok, rewards.double()


def _group_moments(r: Tensor, ids: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    groups = int(ids.max()) + 1 if len(ids) else 0
    zero = torch.zeros(groups, dtype=r.dtype, device=r.device)
    count = zero.index_add(0, ids, weight)
    mean = zero.index_add(0, ids, r * weight) / count.clamp(min=1)
    square = zero.index_add(0, ids, (r - mean[ids]) ** 2 * weight) / count.clamp(min=1)
    return mean, square.sqrt()


@dataclass
class RewardRows:
    """Rewards of all processes' samples.

    Attributes:
        names: R reward names, in the order of the run file.
        values: [N, R] float64; anything where a reward failed.
        valid: [N, R] bool.
        weights: [R]; one of weight 0 is only logged.
        example_index: [N] int64 of each sample's example in the dataset: the key of its group.
        index: [N] int64 within the group.
        padding: [N] bool.
        noise_std: [R] standard deviation of each reward on one image (`min_group_std`); none where None.
        transforms: [R] keys of `TRANSFORMS`, or "none"; all "none" where empty.
        own: those of the N samples that this process holds.
    """

    names: list[str]
    values: Tensor
    valid: Tensor
    weights: Tensor
    example_index: Tensor
    index: Tensor
    padding: Tensor
    noise_std: Tensor | None = None
    transforms: Sequence[str] = ()
    own: slice = field(default_factory=lambda: slice(None))

    @property
    def usable(self) -> Tensor:
        """[N] bool: samples, not padding, with every reward that has a weight."""
        return self.valid[:, self.weights != 0].all(1) & ~self.padding

    @property
    def combined(self) -> Tensor:
        """[N] weighted sums of the values; 0 where not usable."""
        return self._weighted(self.values)

    def signals(self, combine: str) -> list[tuple[Tensor, Tensor, float]]:
        """([N] signal, its weight, its std on one image) of each reward with a weight, or of their weighted sum if
        `combine` is "sum_then_normalize" or only one reward has a weight. Advantages are computed from these.

        The signal is the value, or its win rate or rank among the usable samples of the group, where differences within
        the std are ties. The errors of a sum are taken as independent.
        """
        count, usable = len(self.names), self.usable
        std = [0.0] * count if self.noise_std is None else [float(s) for s in self.noise_std]
        # A transform takes differences within the std for ties. Its own std is therefore 0, or the same error would
        # count twice.
        columns = self.values.clone()
        for i, name in enumerate(self.transforms):
            if name != "none":
                columns[:, i] = TRANSFORMS[name](self.values[:, i], self.example_index, usable, std[i])
                std[i] = 0.0
        counted = [i for i in range(count) if float(self.weights[i])]
        if combine == "sum_then_normalize" or len(counted) == 1:
            total = math.hypot(*(float(self.weights[i]) * std[i] for i in counted))
            return [(self._weighted(columns), torch.ones((), dtype=torch.float64), total)]
        return [(columns[:, i], self.weights[i], std[i]) for i in counted]

    def zero_variance_rows(self, combine: str) -> Tensor:
        """[N] bool: usable samples of groups with zero reward variance: each reward (or their sum, if that is what is
        normalized) is the same for all of the group, or differs by its noise."""
        usable, signals = self.usable, self.signals(combine)
        return torch.stack([zero_std_rows(c, self.example_index, usable, noise=n) for c, _, n in signals]).all(0)

    def advantages(self, combine: str, baseline: str, scale: str, clip: float) -> Tensor:
        """[N] of each reward, weighted, or of the weighted sum of the rewards."""
        usable, signals = self.usable, self.signals(combine)
        parts = [
            group_advantages(column, self.example_index, usable, baseline, scale, clip=clip, noise=noise)  # type: ignore[arg-type]
            for column, _, noise in signals
        ]
        weights = torch.stack([weight for _, weight, _ in signals])
        return (torch.stack(parts, 1) * weights).sum(1) / weights.abs().sum()

    def statistics(self, combine: str) -> dict[str, float]:
        """Metrics of an epoch over its usable samples, of all processes; values are gated and not transformed."""
        asked, usable = ~self.padding, self.usable
        found = {"images": float(asked.sum()), "failed": float((asked & ~usable).sum())}
        for i, name in enumerate(self.names):
            failed = float((asked & ~self.valid[:, i]).sum())
            if failed and not float(self.weights[i]):  # these failures make no sample unusable
                found[f"failed/{name}"] = failed
        if not bool(usable.any()):
            return found
        for i, name in enumerate(self.names):
            scored = usable & self.valid[:, i]
            if bool(scored.any()):
                found[f"reward/{name}"] = float(self.values[scored, i].mean())
        combined = self.combined[usable]
        found["combined_score"] = float(combined.mean())
        found["combined_std"] = float(combined.std(unbiased=False))
        compared = comparable_rows(self.example_index, usable)
        if bool(compared.any()):  # a group of one image has no std
            flat = compared & self.zero_variance_rows(combine)
            groups = [len(self.example_index[rows].unique()) for rows in (flat, compared)]  # pyright: ignore
            found["zero_std_groups"] = groups[0] / groups[1]
        return found

    def _weighted(self, columns: Tensor) -> Tensor:
        counted = self.usable[:, None] & (self.weights != 0)
        return (torch.where(counted, columns, 0.0) * self.weights).sum(1)
