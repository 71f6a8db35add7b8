"""Rewards of samples: submitted while the next batch is sampled, settled when all are in, one pair (values, valid).

A failed reward never becomes a number. Servers that went away are waited for; if they stay away, or too many rewards
fail, the run stops, resumable, before anything was trained on the batch.

Legend: n samples of this process, N of all processes in rank order, R rewards that are trained on.
"""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Callable, Collection, Sequence
from concurrent import futures
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

import numpy as np
import torch
from torch import Tensor

from retouch.core.advantages import RewardRows
from retouch.errors import ConfigError, FailureRateExceeded, RewardOutage
from retouch.rewards.addresses import TOKEN_VARIABLE, start_servers
from retouch.rewards.protocol import Pixels, RewardItem
from retouch.rewards.table import PendingScores, RewardTable
from retouch.types import Example, Failure, Outcome, Scores

if TYPE_CHECKING:
    from retouch.engine import Engine
    from retouch.rewards.client.config import RewardClientConfig

logger = logging.getLogger(__name__)

STARTING_S = 60.0
"""Seconds that servers which are loading get at least, whatever `reward_client.outage_wait_s` allows running ones."""

_PAUSE_S = 1.0
_RUN_IMAGES = 200  # a failure rate over fewer images means little

NOT_FINITE = Failure("bad_item", "the sample contains NaN or Inf")


# --- submit and settle ---


@dataclass(frozen=True)
class PendingBatch:
    """A batch whose rewards are being computed; the items stay, to be submitted again after an outage.

    Attributes:
        scores: of the items that are not broken.
        broken: indices of items with NaN or Inf, all of whose rewards have failed. No scorer receives the image that
            stands in for them: one that compares a group would count it as an opponent.
        padding: number of samples after the items, which only keep processes in step and are not scored.
    """

    items: Sequence[RewardItem]
    scores: PendingScores
    broken: Sequence[int] = ()
    padding: int = 0

    @property
    def sound(self) -> list[RewardItem]:
        """The items that scorers receive."""
        return [item for i, item in enumerate(self.items) if i not in self.broken]


def submitted(
    table: RewardTable,
    items: Sequence[RewardItem],
    broken: Sequence[int],
    padding: int = 0,
    *,
    training: bool = True,
) -> PendingBatch:
    """Start scoring samples.

    Args:
        items: of all samples, those that are padding last.
        broken: indices of items with NaN or Inf.
        training: see `RewardTable.submit`.
    """
    real = items[: len(items) - padding]
    sound = [item for i, item in enumerate(real) if i not in broken]
    lost = [i for i in broken if i < len(real)]
    return PendingBatch(real, table.submit(sound, training=training), lost, padding)


def without_strip(images: Tensor, examples: Sequence[Example]) -> Tensor:
    """Images [B, H, W, 3] without the strip of the in-context reference above them, which all examples have or none."""
    strip = examples[0].strip
    return images if strip is None else images[:, strip.height :]


def items_of(examples: Sequence[Example], images: Tensor, group_ids: Sequence[int]) -> list[RewardItem]:
    """Scorers' inputs for samples: the image, and everything of its example except the target."""
    return [item_of(example, images[i].numpy(), i, group_ids[i]) for i, example in enumerate(examples)]


def item_of(example: Example, image: Pixels, number: int, group: int) -> RewardItem:
    """Scorers' input for one image [H, W, 3] of an example."""
    return RewardItem(
        id=number,
        prompt=example.prompt,
        image=image,
        mask=None if example.mask is None else np.asarray(example.mask),
        source=None if example.source is None else np.asarray(example.source),
        reference=None if example.reference is None else np.asarray(example.reference),
        group=group,
        metadata=dict(example.metadata),
    )


def wait_for_rewards(table: RewardTable, client: RewardClientConfig) -> None:
    """Wait until every reward can be scored. A server is missed for `STARTING_S` if others have its rewards: the client
    finds it once it is ready.

    Raises:
        RewardOutage: a reward cannot be scored; with the command that starts the servers that are not part of the run.
        ConfigError: torch's default dtype is not fp32 any more, in which libraries make tensors.
    """
    problems: list[str] = []
    for patience_s in (STARTING_S, max(0.0, client.outage_wait_s - STARTING_S)):
        problems = table.wait_ready(patience_s)
        if not problems or table.has_a_server_each():
            if problems:
                logger.warning("the run starts without some servers of its rewards: %s", "; ".join(problems))
                table.compare_servers()
            _require_default_dtype()
            return
    started_elsewhere = [n for n, entry in table.entries.items() if entry.url not in (None, "auto") and entry.weight]
    running = all(TOKEN_VARIABLE in problem for problem in problems)
    remedy = [start_servers(started_elsewhere)] if started_elsewhere and not running else []
    raise RewardOutage("rewards are not ready: " + "; ".join([*problems, *remedy]))


def _require_default_dtype() -> None:
    if (dtype := torch.get_default_dtype()) != torch.float32:
        raise ConfigError(
            f"rewards: given {dtype} as torch's default dtype once all were ready; expected torch.float32, which "
            "libraries rely on; remove torch.set_default_dtype from the plugins and scorers of the run"
        )


def arrived(batches: Sequence[PendingBatch], timeout_s: float) -> bool:
    """Wait for the rewards that count, so long at most -> whether all of them are in."""
    counted = [future for batch in batches for future in batch.scores.counted]
    return not futures.wait(counted, timeout_s).not_done


def settle(
    table: RewardTable,
    batches: Sequence[PendingBatch],
    config: RewardClientConfig,
    *,
    training: bool = True,
    stop_heard: Callable[[], bool] = lambda: False,
) -> list[Scores]:
    """Wait for every batch. An outage of a reward of weight 0 is not waited out, and failures of its values stop
    nothing.

    Args:
        training: false for an evaluation, which waits for rewards that are only logged, too.
        stop_heard: whether an outage is not to be waited out any longer, on this process alone; rewards whose
            servers are ready are requested once more before.

    Raises:
        RewardOutage: servers that did not come back within `outage_wait_s`, or before a request to stop.
    """
    for batch in batches:
        batch.scores.wait()
    until = _logged_until(config, training)
    scores = [_settle_one(table, batch, config, until, training, stop_heard) for batch in batches]
    counted = rewards_of(_names(scores, counted=True), scores)
    if counted.failures:
        lost = int((~counted.valid).any(1).sum())
        reasons = summary([failure for *_, failure in counted.failures])
        logger.warning("%d of %d images have no reward: %s", lost, len(counted.valid), reasons)
    aside = rewards_of(_names(scores, counted=False), scores).failures
    if aside:
        reasons = summary([failure for *_, failure in aside])
        logger.warning("%d values of rewards of weight 0 failed: %s", len(aside), reasons)
    return scores


def raise_together(failed: RewardOutage | None, any_rank: Callable[[bool], bool]) -> None:
    """Raise on every process if rewards failed on any, or the others would wait for it forever.

    Args:
        any_rank: whether a flag is set on any process; a collective.
    """
    if any_rank(failed is not None):
        raise failed or RewardOutage("rewards failed on another process; see its log")


def _settle_one(
    table: RewardTable,
    batch: PendingBatch,
    config: RewardClientConfig,
    until: float | None,
    training: bool,
    stop_heard: Callable[[], bool],
) -> Scores:
    scores, items = batch.scores.result(until), batch.sound
    columns = {name: list(column) for name, column in scores.outcomes.items()}
    started = time.monotonic()
    deadline = started + config.outage_wait_s
    while away := _unavailable(columns, scores):
        left = deadline - time.monotonic()
        if left <= 0:
            raise RewardOutage(
                f"rewards stayed unavailable for {time.monotonic() - started:.0f} s (reward_client.outage_wait_s = "
                f"{config.outage_wait_s:g}): " + summary(list(away.values()))
            )
        logger.warning("rewards are unavailable, waiting up to %.0f s more: %s", left, summary(list(away.values())))
        if not table.wait_ready(min(left, 10.0), every_server=False):
            rows = _with_groups(table, items, away)
            pending = table.submit([items[row] for row in rows], training=training)
            pending.wait()
            again = pending.result(_logged_until(config, training))
            for name, column in columns.items():
                for row, outcome in zip(rows, again.outcomes[name], strict=True):
                    # what was scored already stays, or many flaky requests would never all succeed
                    if _is_unavailable(column[row]):
                        column[row] = outcome
        if still := _unavailable(columns, scores):
            if stop_heard():
                raise RewardOutage(f"asked to stop while rewards were unavailable: {summary(list(still.values()))}")
            time.sleep(min(_PAUSE_S, max(0.0, deadline - time.monotonic())))
    for column in columns.values():
        for row in sorted(batch.broken):
            column.insert(row, NOT_FINITE)
    return Scores(columns, scores.weights)


def _logged_until(config: RewardClientConfig, training: bool) -> float | None:
    """The moment until which rewards that are only logged are waited for, from now."""
    return time.monotonic() + config.logged_wait_s if training else None


def _with_groups(table: RewardTable, items: Sequence[RewardItem], rows: Collection[int]) -> list[int]:
    """The rows, and those of their groups where a reward compares samples of a group."""
    if not any(entry.compares_group() for entry in table.entries.values()):
        return list(rows)
    groups = {items[row].group for row in rows}
    return [row for row, item in enumerate(items) if item.group in groups]


def _unavailable(columns: dict[str, list[Outcome]], scores: Scores) -> dict[int, Failure]:
    """Row -> one of its failures, of a reward with a weight, that mean a server is away, not that the item is bad."""
    return {
        row: outcome
        for name, column in columns.items()
        if scores.weights[name]
        for row, outcome in enumerate(column)
        if isinstance(outcome, Failure) and outcome.retryable
    }


def _is_unavailable(outcome: Outcome) -> bool:
    return isinstance(outcome, Failure) and outcome.retryable


def summary(failures: Sequence[Failure]) -> str:
    """Failures by code with one message each."""
    counts = Counter(failure.code for failure in failures)
    first = {failure.code: failure.message for failure in reversed(failures)}
    return "; ".join(f"{code} x {count} ({first[code]})" for code, count in counts.most_common())


# --- values and validity ---

JUDGED = {
    "mass": "judge_mass",
    "order_dependent": "judge_order_dependent",
    "position_bias": "judge_position_bias",
}
"""Detail of a judge's score -> its name in the rollout metrics: the probability that it gave its score tokens, the
share of pairs whose two orders have different winners, and the preference for the first position."""


@dataclass(frozen=True)
class Rewards:
    """Some rewards of n samples.

    Attributes:
        values: [n, R] float64, 0 where a reward failed.
        valid: [n, R] bool.
        judged: [R, D, 2] float64: sum and number of the values of each detail of `JUDGED`.
        failures: (row, column, failure), column by column.
    """

    values: Tensor
    valid: Tensor
    judged: Tensor
    failures: Sequence[tuple[int, int, Failure]]


def rewards_of(names: Sequence[str], scores: Sequence[Scores]) -> Rewards:
    """The named rewards of all batches."""
    columns = [[outcome for batch in scores for outcome in batch.outcomes[name]] for name in names]
    n = sum(len(next(iter(batch.outcomes.values()), ())) for batch in scores)
    values, valid = torch.zeros(n, len(names), dtype=torch.float64), torch.zeros(n, len(names), dtype=torch.bool)
    judged = torch.zeros(len(names), len(JUDGED), 2, dtype=torch.float64)
    failures: list[tuple[int, int, Failure]] = []
    for i, column in enumerate(columns):
        for row, outcome in enumerate(column):
            if isinstance(outcome, Failure):
                failures.append((row, i, outcome))
                continue
            values[row, i], valid[row, i] = outcome.value, True
            for k, detail in enumerate(JUDGED):
                if isinstance(found := outcome.detail.get(detail), float):
                    judged[i, k] += torch.tensor([found, 1.0], dtype=torch.float64)
    return Rewards(values, valid, judged, failures)


def _names(scores: Sequence[Scores], *, counted: bool) -> list[str]:
    """Rewards with a weight, or those without one."""
    weights = scores[0].weights if scores else {}
    return [name for name in (scores[0].outcomes if scores else ()) if bool(weights[name]) == counted]


@dataclass(frozen=True)
class Tally:
    """Images of an epoch on one process.

    Attributes:
        asked: number of images.
        lost: number of those without every weighted reward; they are not trained on.
        failures: the reasons.
        before: number of images in the epochs before, and of those that were lost.
    """

    asked: int
    lost: int
    failures: Sequence[Failure]
    before: tuple[int, int]


def tally_of(table: RewardTable, scores: Sequence[Scores]) -> Tally:
    """The tally of all batches of an epoch so far."""
    found = rewards_of(_names(scores, counted=True), scores)
    return Tally(
        asked=len(found.valid),
        lost=int((~found.valid).any(1).sum()),
        failures=[failure for *_, failure in found.failures],
        before=(table.asked, table.failed),
    )


def refuse_failures(
    tallies: Sequence[Tally], config: RewardClientConfig, missing: Literal["reward", "gradient"] = "reward"
) -> None:
    """Stop if too much of an epoch, or of the run, failed on all processes together: the few images of one process mean
    little, and an item that always fails would stop it again and again.

    Args:
        tallies: of every process; all of them then decide the same.
        missing: what the images that were lost do not have.

    Raises:
        FailureRateExceeded: more than `max_failure_rate` of the epoch's images were lost, or `max_run_failure_rate` of
            those so far.
    """
    asked, lost = (sum(getattr(one, name) for one in tallies) for name in ("asked", "lost"))
    why = summary([failure for one in tallies for failure in one.failures])
    if lost > config.max_failure_rate * asked:
        raise FailureRateExceeded(
            f"{lost} of {asked} images have no {missing}, over reward_client.max_failure_rate "
            f"{config.max_failure_rate}: {why}"
        )
    asked, lost = asked + sum(one.before[0] for one in tallies), lost + sum(one.before[1] for one in tallies)
    if asked >= _RUN_IMAGES and lost > config.max_run_failure_rate * asked:
        raise FailureRateExceeded(
            f"{lost} of the {asked} images of the run had no reward, over reward_client.max_run_failure_rate "
            f"{config.max_run_failure_rate}: {why}"
        )


# --- rewards of all processes ---


def gather_rewards(
    engine: Engine, table: RewardTable, rewards: Rewards, position: Tensor, index: Tensor, padding: Tensor
) -> RewardRows:
    """Rewards of every process's samples, the same on every process.

    Args:
        rewards: of `table.trained`, on this process.
        position, index, padding: [n], see `RewardRows`.
    """
    own = (rewards.values, rewards.valid, position, index, padding)
    values, valid, position, index, padding = (engine.gather(t).cpu() for t in own)
    entries = [table.entries[name] for name in table.trained]
    weights, noise = (
        torch.tensor(column, dtype=torch.float64)
        for column in ([table.weights[name] for name in table.trained], [entry.min_group_std for entry in entries])
    )
    relative = torch.tensor([entry.transform == "win_rate" for entry in entries], dtype=torch.bool)
    return RewardRows(table.trained, values, valid, weights, position, index, padding, noise, relative)


def judge_statistics(engine: Engine, names: Sequence[str], judged: Tensor) -> dict[str, float]:
    """Mean details of judges over all processes, of the rewards that report them, by `JUDGED`."""
    totals = engine.sum(judged).cpu().tolist()
    return {
        f"{label}/{name}": total / count
        for name, details in zip(names, totals, strict=True)
        for label, (total, count) in zip(JUDGED.values(), details, strict=True)
        if count
    }
