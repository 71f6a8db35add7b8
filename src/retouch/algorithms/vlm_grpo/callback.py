"""Between the trainer's loop and a run directory."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from contextlib import ExitStack
from typing import Any

from transformers import TrainerCallback

from retouch.observe.guards import IdleWatch
from retouch.observe.run_dir import read_metrics

logger = logging.getLogger(__name__)


class RunCallback(TrainerCallback):
    """Writes what the trainer logs to the run directory; says when to save, to evaluate and to stop."""

    def __init__(self, trainer: Any) -> None:  # retouch.algorithms.vlm_grpo.trainer.RunTrainer
        self.trainer = trainer
        self._optimizing = ExitStack()
        self._idle = IdleWatch()

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        for record in read_metrics(self.trainer.parts.dir.path / "metrics.jsonl"):
            if record["kind"] == "train":
                self._idle_alarm(record)  # it was told
        self.trainer.spent()  # opening the run is no part of its first step
        if self.trainer.owes_evaluation:  # here weights are where they are trained
            self.trainer.evaluate_now("step" if state.global_step else "start")

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if self.trainer.between_cycles():
            self.trainer.remember()

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._optimizing.enter_context(self.trainer.parts.clock.part("optimizer"))

    def on_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._optimizing.close()

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        training, step = self.trainer.parts.config.training, state.global_step
        last = step >= training.max_steps
        if self.trainer.between_cycles() and not last:
            self.trainer.stopping = self.trainer.asked_to_stop()
            control.should_training_stop = control.should_training_stop or self.trainer.stopping is not None
        due = training.checkpoint_every and step % training.checkpoint_every == 0
        control.should_save = bool((due or self.trainer.stopping) and not last)
        control.should_evaluate = bool(training.eval_every and step % training.eval_every == 0 and not last)

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
        values = dict(logs or {})
        if "loss" not in values:  # the summary at the end
            return
        seconds = {name: values.pop(name) for name in list(values) if _is_of_time(name)}
        values = {name: value for name, value in values.items() if name not in ("total_flos", "epoch")}
        values["lr"] = values.pop("learning_rate")
        self.trainer.parts.dir.log("train", state.global_step, {"phase": "rl", **values}, self.trainer.spent())
        alarm = self._idle_alarm(values)
        if alarm is not None:
            self.trainer.parts.dir.alarm(state.global_step, alarm)
        logger.debug("step %d: %s, %s", state.global_step, values, seconds)

    def _idle_alarm(self, values: Mapping[str, Any]) -> str | None:
        """Of a step that generated; others say nothing of rewards."""
        alike = values.get("frac_reward_zero_std")
        return None if alike is None else self._idle.see(alike == 1.0)


def _is_of_time(name: str) -> bool:
    """Whether it is one of TRL's own timings, which the clock of the run has by its parts."""
    return name == "step_time" or name.startswith("profiling/")
