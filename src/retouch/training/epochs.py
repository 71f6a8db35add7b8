"""Optimizer steps of an epoch of rollouts. They wait for all rewards or, with `algorithm.late_rewards: next_step`, do
not wait for the slowest: a step then trains on groups whose rewards are in, the last step of the epoch on all that are
left.

Which groups such a step takes depends on when their rewards arrive. Its gradient does not: baselines, advantages and
the normalizer are those of its groups, and every group is trained on once an epoch. A checkpoint inside an epoch waits
for all rewards: a resumed run trains on the same rows in the same steps.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Iterator, Sequence

import torch

from retouch.algorithms.base import AdvantageConfig
from retouch.data.sampler import Slot
from retouch.errors import FailureRateExceeded, RewardOutage
from retouch.training.experience import Experience, collect, evenly_dealt, give_advantages, recorded
from retouch.training.rollouts import (
    accepted,
    epoch_examples,
    gathered,
    log_rollouts,
    sample_groups,
    settle_together,
)
from retouch.training.session import Session
from retouch.training.step import Step, step_batches
from retouch.types import Scores

POLL_S = 0.02
"""Seconds between two looks at which rewards are in."""

Finish = Callable[[Experience], Experience]


def epoch_steps(
    session: Session, algorithm: AdvantageConfig, policy: str | None = None, finish: Finish = lambda rows: rows
) -> Iterator[tuple[Experience, Step]]:
    """Every optimizer step of an epoch that has not been taken yet, with the rows that it trains on.

    Args:
        policy: snapshot that samples; None is the current policy.
        finish: completes new rows before they are trained on.

    Raises:
        RewardOutage, FailureRateExceeded: on every process; the groups that no step has taken are dropped.
        Stopped: asked to stop between rollout batches or after a step.
    """
    kept = session.kept(Experience)
    if kept is None and algorithm.late_rewards == "next_step":
        yield from _as_they_arrive(session, Arrivals(session, algorithm, policy, finish))
        return
    rows = kept or finish(collect(session, algorithm, policy))
    for step in session.steps(rows, rows.step_of):
        yield rows, step


def _as_they_arrive(session: Session, arrivals: Arrivals) -> Iterator[tuple[Experience, Step]]:
    rows = arrivals.take()
    while True:
        later = arrivals.rest if arrivals.waiting else None
        for step in session.steps(rows, rows.step_of, later):
            yield rows, step
        if later is None or session.progress.step >= session.config.training.max_steps:
            return
        rows = arrivals.take()


class Arrivals:
    """The groups of an epoch, all sampled, in the order in which their rewards arrive.

    Attributes:
        waiting: examples whose groups no step has taken, in the order of sampling; the same on every process.
    """

    def __init__(self, session: Session, algorithm: AdvantageConfig, policy: str | None, finish: Finish) -> None:
        """Sample them.

        Raises:
            Stopped: asked to stop between rollout batches.
        """
        self._session, self._algorithm, self._finish = session, algorithm, finish
        session.probe_rewards()
        self.waiting = epoch_examples(session)
        self._rollouts = sample_groups(session, algorithm, self.waiting, policy, by_group=True)
        self._recorded = recorded(self._rollouts)
        sizes = [len(batch.items) for batch in self._rollouts.batches]
        self._rows = [rows.tolist() for rows in torch.arange(sum(sizes)).split(sizes)]
        self._examples = [self._rollouts.slots[rows[0]].example for rows in self._rows]  # a batch is of one
        self._scores: dict[int, Scores] = {}  # by batch, once settled
        self._rest: Experience | None = None

    def take(self) -> Experience:
        """The rows of the next optimizer step: an equal share of the groups that are waiting, once as many are in. For
        the last step, or after `rest`, all that are left.

        Raises:
            RewardOutage, FailureRateExceeded: on every process.
        """
        session = self._session
        steps = session.run.derived.optimizer_steps_per_epoch - session.progress.position
        if steps == 1 or self._rest is not None:
            return self.rest()
        wanted = math.ceil(len(self.waiting) / steps)
        with session.run.clock.part("reward_wait"):
            while len(ready := self._ready()) < wanted:
                time.sleep(POLL_S)
        rows = self._rows_of(ready[:wanted])
        rows.step_of = torch.full((len(rows.weight),), session.progress.position)
        return rows

    def rest(self) -> Experience:
        """The rows of all groups that are left, dealt to the steps that are left; waits for their rewards.

        Raises:
            RewardOutage, FailureRateExceeded: on every process.
        """
        if self._rest is None:
            session, progress = self._session, self._session.progress
            rows = self._rows_of(self.waiting)
            steps = session.run.derived.optimizer_steps_per_epoch - progress.position
            rows.step_of = torch.zeros(len(rows.weight), dtype=torch.long)
            for i, batch in enumerate(step_batches(len(rows.weight), session.config.seed, progress.epoch, 1, steps)):
                rows.step_of[batch] = progress.position + i
            self._rest = rows
        return self._rest

    def _ready(self) -> list[int]:
        """Examples of `waiting` whose rewards are in, on all processes."""
        mine = {e for e, batch in zip(self._examples, self._rollouts.batches, strict=True) if not batch.scores.done()}
        late = set(self._session.run.engine.gather_list(sorted(mine)))
        return [example for example in self.waiting if example not in late]

    def _rows_of(self, examples: Sequence[int]) -> Experience:
        """The rows of some groups with their advantages, dealt evenly to the processes."""
        session, run, chosen = self._session, self._session.run, set(examples)
        numbers = [number for number, example in enumerate(self._examples) if example in chosen]
        try:
            settled = settle_together(run, [self._rollouts.batches[number] for number in numbers])
            self._scores |= zip(numbers, settled, strict=True)
            tally = accepted(run, *self._of(sorted(self._scores)))
        except (RewardOutage, FailureRateExceeded):
            session.drop_epoch()
            raise
        self.waiting = [example for example in self.waiting if example not in chosen]
        rewards = gathered(run, *self._of(numbers))
        index = torch.zeros(len(rewards.position) // run.engine.world_size, dtype=torch.long)  # the first pads
        own = [row for number in numbers for row in self._rows[number]]
        index[: len(own)] = torch.tensor(own, dtype=torch.long)
        rows = Experience(**{name: t[index] if len(t) else t for name, t in vars(self._recorded).items()})
        weight = give_advantages(rows, rewards, self._algorithm, run.engine)
        if not self.waiting:
            everything = self._of(range(len(self._rows)))
            self._rollouts.scores = everything[1]
            log_rollouts(session, self._algorithm, self._rollouts, gathered(run, *everything), tally)
        return self._finish(evenly_dealt(run.engine, rows, weight))

    def _of(self, numbers: Iterable[int]) -> tuple[list[Slot], list[Scores]]:
        """Slots and scores of settled batches."""
        chosen = list(numbers)
        slots = [self._rollouts.slots[row] for number in chosen for row in self._rows[number]]
        return slots, [self._scores[number] for number in chosen]
