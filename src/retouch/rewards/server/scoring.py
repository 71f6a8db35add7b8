"""Loading the scorers of a worker, and scoring one batch by every reward."""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from retouch.errors import ConfigError, RewardOutage
from retouch.rewards.base import problem_of
from retouch.rewards.protocol import CheckedScorer, RewardItem, Scorer
from retouch.types import Failure, Outcome

logger = logging.getLogger(__name__)

LATE = Failure("deadline", "the deadline passed before the item was scored", retryable=True)


@dataclass(frozen=True)
class Work:
    """Cost of a batch: reward -> calls of its scorer, and their seconds.

    Attributes:
        raising: rewards whose scorer raised for every item. A judge without an answer raises nothing: another process
            would get none either, and count its budget from 0 again.
    """

    calls: Mapping[str, int]
    seconds: Mapping[str, float]
    raising: Sequence[str] = ()


_AGAIN_S = 5.0
"""Seconds until a scorer is loaded again after an outage."""

Scored = tuple[dict[str, list[Outcome]], Work]


def load_all(scorers: Mapping[str, Scorer], device: str) -> None:
    """Load every scorer and log the seconds of each; an outage, like that of a judge, is waited for.

    Raises:
        ConfigError: one of them cannot be loaded as it is set; the message begins with its name.
    """
    for name, scorer in scorers.items():
        started = time.monotonic()
        try:
            while not _loaded(name, scorer, device):
                time.sleep(_AGAIN_S)
        except ConfigError as error:
            raise ConfigError(problem_of(name, scorer, error)) from None
        options = getattr(scorer, "options", None)
        place = "cpu" if getattr(options, "cpu_only", None) else device
        logger.info("%s loaded on %s in %.1f s", name, place, time.monotonic() - started)


def _loaded(name: str, scorer: Scorer, device: str) -> bool:
    """Load a scorer -> whether it could be loaded; an outage is logged.

    Raises:
        ConfigError: it cannot be loaded as it is set.
    """
    try:
        scorer.load(device)
    except RewardOutage as outage:
        logger.warning("%s; it is loaded again in %g s", problem_of(name, scorer, outage), _AGAIN_S)
        return False
    return True


def score_rewards(
    scorers: Mapping[str, CheckedScorer],
    names: Sequence[str],
    items: Sequence[RewardItem],
    deadlines: Sequence[float],
) -> Scored:
    """Score one batch by each reward in turn.

    Args:
        deadlines: one per item, on the clock of `time.monotonic`; an item that is late at its turn is not scored.
    """
    outcomes: dict[str, list[Outcome]] = {}
    calls: dict[str, int] = {}
    seconds: dict[str, float] = {}
    raising: list[str] = []
    for name in names:
        if name not in scorers:
            known = ", ".join(scorers)
            outcomes[name] = [Failure("unknown_reward", f"no reward {name!r} here; there are: {known}")] * len(items)
            continue
        scorer, started = scorers[name], time.monotonic()
        before, raised = scorer.calls, scorer.raised
        timely = [i for i, deadline in enumerate(deadlines) if started <= deadline]
        scored = dict(zip(timely, scorer.score([items[i] for i in timely]), strict=True)) if timely else {}
        outcomes[name] = [scored.get(i, LATE) for i in range(len(items))]
        calls[name], seconds[name] = scorer.calls - before, time.monotonic() - started
        raising += [name] if timely and scorer.raised - raised == len(timely) else []
    return outcomes, Work(calls, seconds, raising)
