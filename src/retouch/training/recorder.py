"""The records of a run: metrics, alarms, evaluations and checkpoints."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from functools import cached_property
from pathlib import Path
from typing import Any

from torch import Tensor

from retouch.errors import logging_long
from retouch.families.embeddings import base_files
from retouch.observe.guards import StepWatch, score_drifts
from retouch.process.machine import return_memory
from retouch.rewards.table import of_all
from retouch.training.build import Run
from retouch.training.evaluations import Moment, evaluated, keep_evaluation
from retouch.training.progress import Progress, saved
from retouch.training.resume import evaluation_stands, with_keys
from retouch.training.step import ForwardSize
from retouch.training.stopping import StopRequests

logger = logging.getLogger(__name__)

Tensors = Mapping[str, Tensor]


class Recorder:
    """Logs the steps of a run, evaluates, and writes checkpoints.

    Attributes:
        rows_left: what is still to be trained on in the epoch under way, by the last step.
        owes_evaluation: the evaluation of the step that the run resumed at is still due.
    """

    def __init__(self, run: Run, progress: Progress, size: ForwardSize, stops: StopRequests) -> None:
        self.run, self.config, self.progress = run, run.config, progress
        self.rows_left: Tensors | None = None
        self.owes_evaluation = False
        self._size, self._stops = size, stops
        self._counted = run.rewards.state()  # as of the last step: discarded rewards are requested again
        self._watch = StepWatch()
        self._evaluated_at: int | None = None
        self._saved_at: int | None = None

    @cached_property
    def base(self) -> Mapping[str, str | None]:
        """The files of the model, for checkpoints inside an epoch."""
        return base_files(self.config.model)

    # --- steps ---

    def record_step(self, values: Mapping[str, float], epoch: int, rows_left: Tensors | None) -> None:
        """Log a step, evaluate, write a checkpoint.

        Args:
            epoch: of the step.
            rows_left: what is still to be trained on in this epoch, for a checkpoint inside it.
        """
        progress, training = self.progress, self.config.training
        self.rows_left, self._counted = rows_left, self.run.rewards.state()
        last = progress.step >= training.max_steps
        save_now = training.checkpoint_every and progress.step % training.checkpoint_every == 0
        self.run.dir.log("train", progress.step, {"phase": progress.phase, "epoch": epoch, **values}, self.spent())
        for alarm in self._watch.see(values):
            self.alert(alarm, stop=False)
        if self._is_due():
            self.evaluate("step")
        if save_now and not last:
            self.save(rows_left)

    def event(self, name: str, reason: object = None) -> None:
        """Log an event of the run at this step."""
        told = {"event": name} if reason is None else {"event": name, "reason": str(reason)}
        self.run.dir.log("event", self.progress.step, told)

    def alert(self, alarm: str, *, stop: bool) -> None:
        """Log an alarm.

        Args:
            stop: whether the run stops for it.
        """
        self.run.dir.alarm(self.progress.step, alarm)
        if stop:
            self._stops.alarm = alarm

    def probe_rewards(self) -> None:
        """Every `probe_every` epochs (by default never), check on the main process that the scorers still give the same
        images the same rewards."""
        client, rewards = self.config.reward_client, self.run.rewards
        if not client.probe_every or self.progress.epoch % client.probe_every or not self.run.engine.is_main:
            return
        for name, servers in rewards.probe().items():
            for where, values in servers.items():
                before = rewards.golden.get(name, values)
                alarm = score_drifts(f"{name} of {where}", before, values, client.probe_tolerance)
                if alarm is not None:
                    self.alert(alarm, stop=client.on_drift == "stop")

    def spent(self) -> dict[str, float]:
        """Seconds and costs by part since the last call."""
        seconds = self.run.clock.split()
        return seconds | self.run.costs.split(seconds["step"])

    # --- evaluations ---

    @property
    def is_evaluated(self) -> bool:
        """Whether the weights of this step were evaluated."""
        return self._evaluated_at == self.progress.step

    def evaluate(self, moment: Moment) -> None:
        """Evaluate the weights that the run file names on fixed seeds, once a step; processes share the examples."""
        if self.is_evaluated and moment == "step":
            return
        result = evaluated(self.run)
        seconds = self.spent()  # its own, and no step's
        self._evaluated_at = self.progress.step
        if result is not None:
            after_warmup = self.progress.phase == "rl"
            found = keep_evaluation(self.run, self.progress.step, after_warmup, moment, result, seconds)
            for alarm in found.alarms:
                self.alert(alarm.text, stop=alarm.of_gold and self.config.evaluation.on_gold_fall == "stop")
            self._stops.plateau = found.plateau

    def evaluate_at_start(self) -> None:
        """Evaluate the weights that training begins from, or those of a step whose evaluation is still due."""
        with logging_long(logger, "evaluating before the first step"):
            if self.progress.step == 0 and self._evaluated_at is None:
                self.evaluate("start")
            elif self.owes_evaluation:
                self.evaluate("step")  # servers were away when it was due

    def _is_due(self) -> bool:
        """Whether this step is evaluated as one of many; the ends of warm-up and run have evaluations of their own."""
        progress, training = self.progress, self.config.training
        warmed_up = progress.phase == "warmup" and progress.step == self.config.algorithm.supervised_steps(self.config)
        last = progress.step >= training.max_steps
        return bool(training.eval_every) and progress.step % training.eval_every == 0 and not (warmed_up or last)

    # --- checkpoints ---

    def save(self, rows_left: Tensors | None = None, *, pinned: bool = False) -> None:
        """Write a checkpoint of this step."""
        with self.run.clock.part("checkpoint"):
            run, state = self.run, self._state()
            if rows_left is not None:
                rows_left, state["base"] = with_keys(run, rows_left), self.base
            run.checkpoints.save(self.progress.step, run.engine, run.policy, state, rows_left, pinned=pinned)
            return_memory()
        self._saved_at = self.progress.step

    def save_once(self, rows_left: Tensors | None) -> None:
        """Write a checkpoint of this step if there is none."""
        if self._saved_at != self.progress.step:
            self.save(rows_left)

    def restore(self, folder: Path, state: Mapping[str, Any], records: list[dict[str, Any]]) -> None:
        """Go on from a checkpoint.

        Args:
            state: of the checkpoint.
            records: of the metrics of the run.
        """
        run, step = self.run, self.progress.step
        self._evaluated_at = state.get("evaluated_at", step)
        repeated = step in (0, self.config.training.max_steps) or self._is_due()
        lost = not evaluation_stands(records, step, run.rewards)
        if run.engine.any(run.dir.main and repeated and lost):  # others may find the file truncated already
            self._evaluated_at = None
        if run.dir.owns(folder):  # one of another run is no checkpoint that `auto` finds here
            self._saved_at = step
        self.owes_evaluation = self._is_due()
        if "rewards" in state:
            run.rewards.restore(state["rewards"], run.engine.rank, run.engine.world_size)
            self._counted = run.rewards.state()

    def follow(self, records: list[dict[str, Any]]) -> None:
        """Look at the steps before the checkpoint, whose alarms were reported then."""
        for record in records:
            if record["kind"] == "train":
                self._watch.see(record)

    def _state(self) -> dict[str, Any]:
        halved = self._size.rows < self.config.optimizer.batch_size_per_device
        return {
            "progress": saved(self.progress),
            "config": self.run.dir.run_file,
            "evaluated_at": self._evaluated_at,
            "rows_per_forward": self._size.rows if halved else None,
            "rewards": of_all(self.run.engine.gather_list([self._counted])),
        }
