"""Rewards of rollouts: submitted while the next batch is sampled, settled when all are in.

A failed reward never becomes a number. Servers that went away are waited for; if they stay away, or too many rewards
fail, the run stops, resumable, before anything was trained on the batch.
"""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from retouch.rewards.compose import PendingScores, RewardTable, unavailable
from retouch.rewards.protocol import RewardItem
from retouch.types import Example, Failure, Scores

if TYPE_CHECKING:
    from torch import Tensor

    from retouch.config.schema import RewardClientConfig

logger = logging.getLogger(__name__)

_PAUSE_S = 1.0


class RewardOutage(RuntimeError):
    """Reward servers stayed away. The run can be resumed (exit 3)."""


class FailureRateExceeded(RuntimeError):
    """Too many rewards of a batch failed. The run can be resumed (exit 3)."""


@dataclass(frozen=True)
class PendingBatch:
    """A batch whose rewards are under way; the items stay, to be asked again after an outage."""

    items: Sequence[RewardItem]
    scores: PendingScores


def items_of(examples: Sequence[Example], images: Tensor, group_ids: Sequence[int]) -> list[RewardItem]:
    """What scorers see of rollouts: the picture, and of its example everything but the target."""
    return [
        RewardItem(
            id=i,
            prompt=example.prompt,
            image=images[i].numpy(),
            mask=None if example.mask is None else np.asarray(example.mask),
            source=None if example.source is None else np.asarray(example.source),
            reference=None if example.reference is None else np.asarray(example.reference),
            group=group_ids[i],
            metadata=dict(example.metadata),
        )
        for i, example in enumerate(examples)
    ]


def settle(table: RewardTable, batches: Sequence[PendingBatch], config: RewardClientConfig) -> list[Scores]:
    """Wait for every batch.

    Raises:
        RewardOutage: servers that did not come back within `outage_wait_s`.
        FailureRateExceeded: more than `max_failure_rate` of all rewards failed.
    """
    scores = [_settle_one(table, batch, config) for batch in batches]
    failures = [failure for s in scores for _, failure in s.failures()]
    total = sum(len(s) * len(s.outcomes) for s in scores)
    if failures:
        logger.warning("%d of %d rewards failed: %s", len(failures), total, summary(failures))
    if len(failures) > config.max_failure_rate * total:
        raise FailureRateExceeded(
            f"{len(failures)} of {total} rewards failed, over reward_client.max_failure_rate "
            f"{config.max_failure_rate}: {summary(failures)}"
        )
    return scores


def summary(failures: Sequence[Failure]) -> str:
    """Failures by code with one message each."""
    counts = Counter(failure.code for failure in failures)
    first = {failure.code: failure.message for failure in reversed(failures)}
    return "; ".join(f"{code} x {count} ({first[code]})" for code, count in counts.most_common())


def _settle_one(table: RewardTable, batch: PendingBatch, config: RewardClientConfig) -> Scores:
    scores = batch.scores.result()
    deadline = time.monotonic() + config.outage_wait_s
    while unavailable(scores):
        left = deadline - time.monotonic()
        if left <= 0:
            raise RewardOutage(
                f"rewards stayed unavailable for reward_client.outage_wait_s = {config.outage_wait_s:.0f} s: "
                + summary(unavailable(scores))
            )
        logger.warning("rewards are unavailable, waiting up to %.0f s more: %s", left, summary(unavailable(scores)))
        problems = table.wait_ready(min(left, 10.0))
        if not problems:
            scores = table.submit(batch.items).result()
        time.sleep(min(_PAUSE_S, max(0.0, deadline - time.monotonic())))
    return scores
