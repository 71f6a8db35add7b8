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

from retouch.errors import FailureRateExceeded, RewardOutage
from retouch.rewards.protocol import RewardItem
from retouch.rewards.table import PendingScores, RewardTable
from retouch.types import Example, Failure, Outcome, Scores

if TYPE_CHECKING:
    from torch import Tensor

    from retouch.rewards.client.config import RewardClientConfig

logger = logging.getLogger(__name__)

_PAUSE_S = 1.0
_RUN_IMAGES = 200  # fewer say little about a rate


@dataclass(frozen=True)
class PendingBatch:
    """A batch whose rewards are under way; the items stay, to be asked again after an outage.

    Attributes:
        broken: rows that were not drawn in finite numbers. Whatever is said of what stands in for them, all of their
            rewards have failed.
    """

    items: Sequence[RewardItem]
    scores: PendingScores
    broken: Sequence[int] = ()


def without_strip(images: Tensor, examples: Sequence[Example]) -> Tensor:
    """Pictures [B, H, W, 3] without the strip of the in-context reference above them, which all examples have or
    none."""
    strip = examples[0].strip
    return images if strip is None else images[:, strip.height :]


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


def settle(
    table: RewardTable, batches: Sequence[PendingBatch], config: RewardClientConfig, *, training: bool = True
) -> list[Scores]:
    """Wait for every batch. A reward of weight 0 is only logged: an outage of it is not waited out, its failures stop
    nothing.

    Args:
        training: false for an evaluation, which waits for rewards that are only logged, too.

    Raises:
        RewardOutage: servers that did not come back within `outage_wait_s`.
    """
    scores = [_settle_one(table, batch, config, training) for batch in batches]
    failures = [failure for s in scores for _, failure in s.counted().failures()]
    if failures:
        lost, asked = sum(s.combined().count(None) for s in scores), sum(map(len, scores))
        logger.warning("%d of %d images lack a reward: %s", lost, asked, summary(failures))
    aside = [failure for s in scores for name, failure in s.failures() if not s.weights[name]]
    if aside:
        logger.warning("%d rewards of weight 0 failed, which are only logged: %s", len(aside), summary(aside))
    return scores


@dataclass(frozen=True)
class Tally:
    """What came of the images of an epoch on one process, those that are padding aside.

    Attributes:
        asked: how many there are.
        lost: how many of them lack a reward with a weight, and cannot be trained on.
        failures: why.
        before: how many there were in the epochs before, and how many of them were lost.
    """

    asked: int
    lost: int
    failures: Sequence[Failure]
    before: tuple[int, int]


def tally_of(table: RewardTable, scores: Sequence[Scores], padding: Sequence[bool] | None = None) -> Tally:
    """Of all batches of an epoch so far.

    Args:
        padding: of each image; None: there is none.
    """
    totals = [total for batch in scores for total in batch.combined()]
    kept = [True] * len(totals) if padding is None else [not one for one in padding]
    counted = scores[0].counted().outcomes if scores else []
    columns = [[one for batch in scores for one in batch.outcomes[name]] for name in counted]
    return Tally(
        asked=sum(kept),
        lost=sum(total is None for total, real in zip(totals, kept, strict=True) if real),
        failures=[o for c in columns for o, real in zip(c, kept, strict=True) if real and isinstance(o, Failure)],
        before=(table.asked, table.failed),
    )


def refuse_failures(tallies: Sequence[Tally], config: RewardClientConfig) -> None:
    """Stop where too much of an epoch, or of the run, failed on all processes together: the few images of one say
    nothing, and an item that always fails would stop it again and again.

    Args:
        tallies: of every process, so that all of them decide alike.

    Raises:
        FailureRateExceeded: more than `max_failure_rate` of the epoch's images were lost, or `max_run_failure_rate` of
            those so far.
    """
    asked, lost = (sum(getattr(one, name) for one in tallies) for name in ("asked", "lost"))
    why = summary([failure for one in tallies for failure in one.failures])
    if lost > config.max_failure_rate * asked:
        raise FailureRateExceeded(
            f"{lost} of {asked} images lack a reward, over reward_client.max_failure_rate {config.max_failure_rate}: "
            f"{why}"
        )
    asked, lost = asked + sum(one.before[0] for one in tallies), lost + sum(one.before[1] for one in tallies)
    if asked >= _RUN_IMAGES and lost > config.max_run_failure_rate * asked:
        raise FailureRateExceeded(
            f"{lost} of the {asked} images so far lacked a reward, over reward_client.max_run_failure_rate "
            f"{config.max_run_failure_rate}: {why}"
        )


def summary(failures: Sequence[Failure]) -> str:
    """Failures by code with one message each."""
    counts = Counter(failure.code for failure in failures)
    first = {failure.code: failure.message for failure in reversed(failures)}
    return "; ".join(f"{code} x {count} ({first[code]})" for code, count in counts.most_common())


def _settle_one(table: RewardTable, batch: PendingBatch, config: RewardClientConfig, training: bool) -> Scores:
    aside_s = config.logged_wait_s if training else None
    scores = batch.scores.result(aside_s)
    deadline = time.monotonic() + config.outage_wait_s
    while away := unavailable(scores):
        left = deadline - time.monotonic()
        if left <= 0:
            raise RewardOutage(
                f"rewards stayed unavailable for reward_client.outage_wait_s = {config.outage_wait_s:g} s: "
                + summary(list(away.values()))
            )
        logger.warning("rewards are unavailable, waiting up to %.0f s more: %s", left, summary(list(away.values())))
        if not table.wait_ready(min(left, 10.0), every_server=False):
            rows = list(away)
            again = table.submit([batch.items[row] for row in rows], training=training).result(aside_s)
            scores = _filled_in(scores, again, rows)
        if unavailable(scores):
            time.sleep(min(_PAUSE_S, max(0.0, deadline - time.monotonic())))
    return _without(scores, batch.broken) if batch.broken else scores


def _without(scores: Scores, broken: Sequence[int]) -> Scores:
    failed = Failure("bad_item", "the network did not draw it in finite numbers")
    outcomes: dict[str, list[Outcome]] = {name: list(column) for name, column in scores.outcomes.items()}
    for column in outcomes.values():
        for row in broken:
            column[row] = failed
    return Scores(outcomes, scores.weights)


def _filled_in(scores: Scores, again: Scores, rows: Sequence[int]) -> Scores:
    """Rows scored anew in place of those that were unavailable; what was scored already stays as it is, or many flaky
    requests would never all succeed."""
    outcomes = {name: list(column) for name, column in scores.outcomes.items()}
    for name, column in outcomes.items():
        for row, outcome in zip(rows, again.outcomes[name], strict=True):
            if _is_unavailable(column[row]):
                column[row] = outcome
    return Scores(outcomes, scores.weights)


def unavailable(scores: Scores) -> dict[int, Failure]:
    """Row -> one of its failures that say a server is away, not that the item is bad, of a reward with a weight."""
    return {
        row: outcome
        for column in scores.counted().outcomes.values()
        for row, outcome in enumerate(column)
        if isinstance(outcome, Failure) and outcome.retryable
    }


def _is_unavailable(outcome: Outcome) -> bool:
    return isinstance(outcome, Failure) and outcome.retryable
