"""The life of a run: lock, resume, evaluate, train, stop or end.

The state of a run is its weights and a few numbers (`Progress`): every random number derives from the run's seed and
these, and a resumed run is bitwise identical.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from retouch.adapters.lora import is_update
from retouch.engine import CheckpointError, Diverged
from retouch.engine.saved import saved_run_file, sound_state
from retouch.observe.bar import Work
from retouch.observe.report import leave_report
from retouch.observe.run_dir import read_metrics
from retouch.training.build import Run
from retouch.training.loop import Loop
from retouch.training.opening import log_header, open_run
from retouch.training.progress import Progress, restored
from retouch.training.resume import has_finished, may_go_on, resume_folder, without_keys
from retouch.training.scoring import FailureRateExceeded, RewardOutage
from retouch.training.stopping import continuing
from retouch.types import Stopped

logger = logging.getLogger(__name__)


class Session(Loop):
    """One run from start or resume to its end; use as a context manager around its loop.

    Attributes:
        resumed_from: the checkpoint; None in a new run.
    """

    def __init__(self, run: Run) -> None:
        super().__init__(run)
        self.resumed_from: Path | None = None
        self._finished = self._dropped_ema = False
        self._shown = ExitStack()  # signal handlers and bar, once the run is open

    def __enter__(self) -> Session:
        run, recorder = self.run, self.recorder
        run.engine.new_optimizer()
        run.dir.lock()
        self.resumed_from = resume_folder(self.config, run.dir)
        if self.resumed_from is not None:
            self._restore(self.resumed_from)
        elif self.config.ema:
            run.policy.snapshot("ema")
        if self.progress.step == 0 and self.progress.phase == "rl":
            self.take_snapshots()  # before the first evaluation, which may leave a checkpoint
        gather, step = run.engine.gather_list, self.progress.step
        open_run(run, gather, self.resumed_from, step, evaluated=recorder.is_evaluated)
        if self.resumed_from is not None:
            records = self._records()
            recorder.follow(records)
            self._finished = has_finished(self.config, step, records)
        if self._dropped_ema:
            logger.warning("%s: its EMA weights are dropped, since the run file has no ema section", self.resumed_from)
        log_header(run, run.policy.size, self.resumed_from)
        recorder.spent()  # opening the run is no part of its first step
        with ExitStack() as failed:
            failed.push(self)  # an evaluation that fails here ends as one within the run
            self._shown.enter_context(self.stops.handling_signals())
            evaluated = min(len(run.eval_data), self.config.evaluation.num_examples)
            work = Work(self.config, run.derived, run.costs, run.rewards.awaiting, evaluated)
            self._shown.enter_context(run.dir.bar(run.clock, lambda: self.progress.phase, step, work))
            recorder.evaluate_at_start()
            failed.pop_all()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        self._shown.close()
        away = isinstance(error, RewardOutage | FailureRateExceeded)
        if away:
            # inside an epoch it was an evaluation that met the outage, after a step that left these rollouts
            self.recorder.save_once(self.recorder.rows_left)
            self.recorder.event("stopped", error)
        if isinstance(error, Diverged):
            logger.error("%s", error)
            self.recorder.event("diverged", error)
        if (error is None or away or isinstance(error, Stopped)) and self.run.engine.is_main:
            leave_report(self.run.dir.path)
        if away:
            raise Stopped(
                f"{error}; nothing was trained on that batch; {continuing(self.run.dir.path)}", code=3
            ) from None

    def finish(self) -> None:
        """The end of the run: last evaluation, last checkpoint. Nothing where the run had already ended."""
        if self._finished:
            logger.info("the run had already ended at step %d", self.progress.step)
            return
        self.recorder.evaluate("end")
        self.recorder.save(self.recorder.rows_left, pinned=True)
        self.recorder.event("finished")

    def take_snapshots(self) -> None:
        """At the start of RL: the snapshots of the algorithm that there are not, of the policy, or as the reference of
        the base (LoRA off)."""
        run, algorithm = self.run, self.config.algorithm
        for name in sorted(algorithm.snapshots - {*run.policy.snapshots}):
            if name == "reference" and getattr(algorithm, "kl_reference", "initial") == "base":
                run.policy.snapshot(name, zero=is_update)
            else:
                run.policy.snapshot(name)

    # --- resume ---

    def _restore(self, folder: Path) -> None:
        """Everything that a checkpoint holds, before the run directory is opened: a checkpoint that cannot be read must
        not cost the metrics of the steps after it.

        Raises:
            CheckpointError: it cannot be read, or does not fit the run file.
        """
        state = sound_state(folder)
        taken = state["progress"]
        # not in older checkpoints: assume that every step updated the weights, and that an old policy differs
        missing = {"updates_in_epoch": taken["position"], "on_policy": "old" not in self.config.algorithm.snapshots}
        vars(self.progress).update(restored(Progress, {**missing, **taken}))
        self._require_fit(folder, state)
        optimizer: Mapping[str, Any] = saved_run_file(state, folder)["optimizer"]
        options = optimizer.get("options") or ()  # not in older checkpoints
        _, rollouts = self.run.checkpoints.load(folder, self.run.engine, self.run.policy, options)
        self._resumed_rows = None if rollouts is None else without_keys(self.run, folder, rollouts)
        self.recorder.rows_left = self._resumed_rows
        # halved before the checkpoint: sums of other forwards would round differently
        self.size.rows = min(self.size.rows, state.get("rows_per_forward") or self.size.rows)
        if self.config.ema and "ema" not in self.run.policy.snapshots:
            raise CheckpointError(
                f"{folder}: has no EMA weights, but the run file has an ema section; set ema=null "
                "evaluation.weights=raw to go on without them"
            )
        self._dropped_ema = not self.config.ema and self.run.policy.snapshots.pop("ema", None) is not None
        self.recorder.restore(folder, state, self._records())

    def _require_fit(self, folder: Path, state: Mapping[str, Any]) -> None:
        """Files of the model may differ between machines: all processes go on, or none does.

        Raises:
            CheckpointError: it does not fit the run file, here or elsewhere.
        """
        problem: CheckpointError | None = None
        try:
            may_go_on(folder, state, self.config, self.recorder.base)
        except CheckpointError as error:
            problem = error
        if self.run.engine.any(problem is not None):
            raise problem or CheckpointError(f"{folder}: another process cannot go on from it; see its log")

    def _records(self) -> list[dict[str, Any]]:
        return read_metrics(self.run.dir.path / "metrics.jsonl")
