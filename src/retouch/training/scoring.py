"""Scores of images: scorers' inputs, the wait for their rewards, and the limits on those that fail.

A failed reward never becomes a number. Servers that went away are waited for; if they stay away, or too many rewards
fail, the run stops, resumable, before anything was trained on the batch.

Legend: n samples of this process, R rewards.
"""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Literal, TypeGuard

import numpy as np
import torch
from torch import Tensor

from retouch.errors import ConfigError, FailureRateExceeded, RewardOutage, logging_long
from retouch.process.plain_text import count_of
from retouch.rewards.addresses import TOKEN_VARIABLE, start_servers
from retouch.rewards.protocol import Pixels, RewardItem
from retouch.rewards.table import RewardTable, Scores
from retouch.types import Example, Failure, Outcome, Score

if TYPE_CHECKING:
    from retouch.rewards.base import RewardEntry
    from retouch.rewards.client.config import RewardClientConfig

logger = logging.getLogger(__name__)

STARTING_S = 60.0
"""Seconds that servers which are loading get at least, whatever `reward_client.outage_wait_s` allows running ones."""

_PAUSE_S, _READY_S = 1.0, 10.0
_RUN_IMAGES = 200  # a failure rate over fewer images means little


# --- submit ---


def item_of(example: Example, image: Pixels, number: int) -> RewardItem:
    """Scorers' input for one image [H, W, 3] of an example: the image, and everything of its example except the
    target. The images of an example are a group."""
    return RewardItem(
        id=number,
        prompt=example.prompt,
        image=image,
        mask=None if example.mask is None else np.asarray(example.mask),
        source=None if example.source is None else np.asarray(example.source),
        reference=None if example.reference is None else np.asarray(example.reference),
        group=example.id,
        metadata=dict(example.metadata),
    )


# --- settle ---


def settle(
    table: RewardTable,
    batches: Sequence[Scores],
    config: RewardClientConfig,
    *,
    training: bool = True,
    stop_heard: Callable[[], bool] = lambda: False,
) -> list[Scores]:
    """Wait for the outcomes of every batch. An outage of a reward of weight 0 is not waited out, and failures of its
    values stop nothing.

    Args:
        training: false for an evaluation, which waits for rewards that are only logged, too.
        stop_heard: whether an outage is not to be waited out any longer, on this process alone; rewards whose
            servers are ready are requested once more before.

    Raises:
        RewardOutage: servers that did not come back within `outage_wait_s`, or before a request to stop.
    """
    for batch in batches:
        batch.wait()
    until = _logged_until(config, training)
    scores = [
        _outage_waited_out(table, batch.result(until, gated=False), config, training, stop_heard) for batch in batches
    ]
    if lost := failures_of(scores):
        without = sum(value is None for batch in scores for value in batch.combined())
        logger.warning("%d of %d images have no reward: %s", without, sum(map(len, scores)), summary(lost))
    if logged := failures_of(scores, weighted=False):
        logger.warning("%s of rewards of weight 0: %s", count_of(len(logged), "failed value"), summary(logged))
    return scores


def failures_of(scores: Sequence[Scores], *, weighted: bool = True) -> list[Failure]:
    """The failures of rewards with a weight, or of those without one."""
    return [f for batch in scores for name, f in batch.failures() if bool(batch.weights[name]) == weighted]


def raise_together(failed: RewardOutage | None, any_rank: Callable[[bool], bool]) -> None:
    """Raise on every process if rewards failed on any, or the others would wait for it forever.

    Args:
        any_rank: whether a flag is set on any process; a collective.
    """
    if any_rank(failed is not None):
        raise failed or RewardOutage("rewards failed on another process; see its log")


def _outage_waited_out(
    table: RewardTable,
    scores: Scores,
    config: RewardClientConfig,
    training: bool,
    stop_heard: Callable[[], bool],
) -> Scores:
    """The scores of a batch once no server of a reward that trains is away: its images are scored again. Gates apply
    to what stays in the end: a reward and its gate need not succeed in the same attempt."""
    columns = {name: list(column) for name, column in scores.outcomes.items()}
    started, tried = time.monotonic(), False
    deadline = started + config.outage_wait_s
    while away := _unavailable(columns, scores):
        left = deadline - time.monotonic()
        if left <= 0:
            # An image that servers which score others never finish is lost: after each restart it would come again.
            if tried and _scores_others(columns, scores) and not table.wait_ready(_READY_S, every_server=False):
                for column in columns.values():
                    column[:] = [replace(o, retryable=False) if isinstance(o, Failure) else o for o in column]
                break
            raise RewardOutage(
                f"rewards stayed unavailable for {time.monotonic() - started:.0f} s (reward_client.outage_wait_s = "
                f"{config.outage_wait_s:g}): " + summary(list(away.values()))
            )
        logger.warning("rewards are unavailable, waiting up to %.0f s more: %s", left, summary(list(away.values())))
        if not table.wait_ready(min(left, _READY_S), every_server=False):
            # Each reward scores again only the rows without its score: the scores of others may have a price.
            asked: dict[tuple[int, ...], list[str]] = {}
            for name, column in columns.items():
                lacking = [row for row in away if _may_succeed(column[row])]
                rows = _with_groups(table.entries[name], scores.items, lacking) - {*scores.broken}
                asked.setdefault(tuple(sorted(rows)), []).append(name)
            pending = {
                rows: table.submit([scores.items[row] for row in rows], training=training, rewards=names)
                for rows, names in asked.items()
                if rows
            }
            for one in pending.values():
                one.wait()
            tried, until = True, _logged_until(config, training)
            for rows, one in pending.items():
                for name, outcomes in one.result(until, gated=False).outcomes.items():
                    column = columns[name]
                    for row, outcome in zip(rows, outcomes, strict=True):
                        # what was scored already stays, or many flaky requests would never all succeed
                        column[row] = outcome if _may_succeed(column[row]) else column[row]
        if still := _unavailable(columns, scores):
            if stop_heard():
                raise RewardOutage(f"asked to stop while rewards were unavailable: {summary(list(still.values()))}")
            time.sleep(min(_PAUSE_S, max(0.0, deadline - time.monotonic())))
    return replace(scores, outcomes=columns).result()


def _scores_others(columns: Mapping[str, Sequence[Outcome]], scores: Scores) -> bool:
    """Whether each reward that trains, or gates one, has scored some row of the batch."""
    return all(any(isinstance(outcome, Score) for outcome in columns[name]) for name in _counting(scores))


def _counting(scores: Scores) -> set[str]:
    """The rewards that train, and the gates of those."""
    trained = {name for name, weight in scores.weights.items() if weight}
    return trained | {gate.reward for name, gate in scores.gates.items() if name in trained}


def _logged_until(config: RewardClientConfig, training: bool) -> float | None:
    """The moment until which rewards that are only logged are waited for, from now."""
    return time.monotonic() + config.logged_wait_s if training else None


def _with_groups(entry: RewardEntry, items: Sequence[RewardItem], rows: Collection[int]) -> set[int]:
    """The rows, and those of their groups if the reward compares samples of a group."""
    groups = {items[row].group for row in rows if entry.compares_group()}
    return {*rows, *(row for row, item in enumerate(items) if item.group in groups)}


def _unavailable(columns: dict[str, list[Outcome]], scores: Scores) -> dict[int, Failure]:
    """Row -> one of its failures, of a reward that counts, that mean a server is away."""
    counting = _counting(scores)
    return {
        row: outcome
        for name, column in columns.items()
        if name in counting
        for row, outcome in enumerate(column)
        if _may_succeed(outcome)
    }


def _may_succeed(outcome: Outcome) -> TypeGuard[Failure]:
    """Whether it is a failure that another attempt may not have."""
    return isinstance(outcome, Failure) and outcome.retryable


def summary(failures: Sequence[Failure]) -> str:
    """Failures by code with one message each."""
    counts = Counter(failure.code for failure in failures)
    first = {failure.code: failure.message for failure in reversed(failures)}
    return "; ".join(f"{code} x {count} ({first[code]})" for code, count in counts.most_common())


# --- the limits on failures ---


@dataclass(frozen=True)
class Tally:
    """Images of an epoch on one process.

    Attributes:
        asked: number of images.
        lost: number of those without every weighted reward; they are not trained on.
        failures: the reasons.
        earlier_asked_and_lost: number of images in the epochs before, and of those that were lost.
    """

    asked: int
    lost: int
    failures: Sequence[Failure]
    earlier_asked_and_lost: tuple[int, int]


def tally_of(table: RewardTable, scores: Sequence[Scores]) -> Tally:
    """The tally of all batches of an epoch so far."""
    combined = [value for batch in scores for value in batch.combined()]
    return Tally(len(combined), combined.count(None), failures_of(scores), (table.asked, table.failed))


def refuse_failures(
    tallies: Sequence[Tally], config: RewardClientConfig, missing: Literal["reward", "gradient"] = "reward"
) -> None:
    """The policy on failures, a function of gathered counts: stop if too much of an epoch, or of the run, failed on all
    processes together. The few images of one process mean little, and an item that always fails would stop it again and
    again.

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
    asked += sum(one.earlier_asked_and_lost[0] for one in tallies)
    lost += sum(one.earlier_asked_and_lost[1] for one in tallies)
    if asked >= _RUN_IMAGES and lost > config.max_run_failure_rate * asked:
        raise FailureRateExceeded(
            f"{lost} of the {asked} images of the run had no reward, over reward_client.max_run_failure_rate "
            f"{config.max_run_failure_rate}: {why}"
        )


# --- values ---

JUDGED = {
    "mass": "judge_mass",
    "order_dependent": "judge_order_dependent",
    "position_bias": "judge_position_bias",
}
"""Detail of a judge's score -> its name in the rollout metrics: the probability that it gave its score tokens, the
share of pairs whose two orders have different winners, and the preference for the first position."""


def values_of(names: Sequence[str], scores: Sequence[Scores]) -> tuple[Tensor, Tensor]:
    """(Values [n, R] float64, 0 where a reward failed; whether it did not [n, R]) of the named rewards."""
    columns = [[value for batch in scores for value in batch.values(name)] for name in names]
    shape = len(names), sum(map(len, scores))  # also where there are no names, or no samples
    values = torch.tensor([[0.0 if v is None else v for v in column] for column in columns], dtype=torch.float64)
    valid = torch.tensor([[v is not None for v in column] for column in columns], dtype=torch.bool)
    return values.reshape(shape).T.contiguous(), valid.reshape(shape).T.contiguous()


def judge_details(names: Sequence[str], scores: Sequence[Scores]) -> Tensor:
    """[R, D, 2] float64: sum and number of the values of each detail of `JUDGED` of the named rewards."""
    found = torch.zeros(len(names), len(JUDGED), 2, dtype=torch.float64)
    for i, name in enumerate(names):
        for outcome in (outcome for batch in scores for outcome in batch.outcomes[name]):
            for k, detail in enumerate(JUDGED):
                if isinstance(outcome, Score) and isinstance(value := outcome.detail.get(detail), float):
                    found[i, k] += torch.tensor([value, 1.0], dtype=torch.float64)
    return found


def judge_statistics(names: Sequence[str], details: Tensor) -> dict[str, float]:
    """Means of the details of judges, of the rewards that report them, by `JUDGED`.

    Args:
        details: of `judge_details`, summed over all processes.
    """
    return {
        f"{label}/{name}": total / count
        for name, of_name in zip(names, details.tolist(), strict=True)
        for label, (total, count) in zip(JUDGED.values(), of_name, strict=True)
        if count
    }


# --- readiness ---


def wait_for_rewards(table: RewardTable, client: RewardClientConfig) -> None:
    """Wait until every reward can be scored. A server is missed for `STARTING_S` if others have its rewards: the client
    finds it once it is ready.

    Raises:
        RewardOutage: a reward cannot be scored; with the command that starts the servers that are not part of the run.
        ConfigError: torch's default dtype is not fp32 any more, in which libraries make tensors.
    """
    problems: list[str] = []
    places = [f"{name} ({'this process' if one.url is None else one.url})" for name, one in table.entries.items()]
    most = max(STARTING_S, client.outage_wait_s)
    told = f"waiting up to {most:.0f} s (reward_client.outage_wait_s) for rewards: {', '.join(places)}"
    with logging_long(logger, told):
        for patience_s in (STARTING_S, most - STARTING_S):
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
