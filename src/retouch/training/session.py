"""Work around the optimizer steps of every recipe: count, average, log, evaluate, checkpoint, resume, stop.

The state of a run is its weights and a few numbers (`Progress`): every random number derives from the run's seed and
these, and a resumed run is bitwise identical.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from dataclasses import MISSING, asdict, fields
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from retouch.adapters.lora import is_update
from retouch.config.check import warnings_of
from retouch.config.derived import parts_per_forward, spans
from retouch.config.presets import preset_lines
from retouch.data.dataset import Dataset
from retouch.data.sampler import derive_seed
from retouch.engine import CheckpointError, Diverged
from retouch.engine.saved import sound_state
from retouch.families.embeddings import base_files
from retouch.observe.guards import StepWatch, score_drifts
from retouch.observe.log import header, log_cost
from retouch.observe.report import leave_report
from retouch.observe.run_dir import read_metrics
from retouch.process.machine import return_memory
from retouch.rewards.table import of_all
from retouch.training.build import Run
from retouch.training.evaluation import (
    Moment,
    evaluated,
    keep_evaluation,
)
from retouch.training.progress import EpochRows, Progress, Rows, first_phase
from retouch.training.resume import (
    evaluation_stands,
    has_finished,
    may_go_on,
    resume_folder,
    with_keys,
    without_keys,
)
from retouch.training.scoring import (
    FailureRateExceeded,
    RewardOutage,
    wait_for_rewards,
)
from retouch.training.step import Step, learning_rate, step_batches, step_positions
from retouch.training.stopping import CONTINUE, StopRequests
from retouch.types import Stopped

logger = logging.getLogger(__name__)

Tensors = Mapping[str, Tensor]


class Session:
    """One run from start or resume to its end; use as a context manager.

    Attributes:
        rows_per_forward: of training; halved when memory runs out.
        supervised_steps: number of the steps before RL; all steps of SFT.
        off_policy: largest |log ratio| of what the sampler recorded in this epoch, if the record was replaced.
        resumed_epoch: the rows of the epoch under way come from a checkpoint inside it.
    """

    def __init__(self, run: Run) -> None:
        self.run = run
        self.config = run.config
        self.progress = Progress(phase=first_phase(run.config))
        self.supervised_steps = run.config.algorithm.supervised_steps(run.config)
        self.off_policy = 0.0
        self.resumed_epoch = False
        self.rows_per_forward = run.config.optimizer.batch_size_per_device
        self.resumed_from: Path | None = None
        self._rollouts: dict[str, Tensor] | None = None
        self._left: Tensors | None = None  # rows of the epoch under way
        self._counted = run.rewards.state()  # as of the last step: discarded rewards are requested again
        training = run.config.training
        self._stops = StopRequests(
            training.max_minutes,
            lambda flag: run.engine.any(flag),
            "the next step",
            on_plateau=training.stop_on_plateau is not False,
        )
        self._owes_evaluation = False
        self._watch = StepWatch()
        self._evaluated_at: int | None = None
        self._saved_at: int | None = None
        self._finished = False
        self._shown = ExitStack()  # signal handlers and bar, once the run is open

    @cached_property
    def _base(self) -> Mapping[str, str | None]:
        """The files of the model, for checkpoints inside an epoch."""
        return base_files(self.config.model)

    # --- begin and end ---

    def __enter__(self) -> Session:
        run = self.run
        run.engine.new_optimizer()
        run.dir.lock()
        folder = resume_folder(self.config, run.dir)
        if folder is None:
            run.dir.open(None)
            if self.config.ema:
                run.policy.snapshot("ema")
        else:
            self._restore(folder)
        if self.progress.step == 0 and self.progress.phase == "rl":
            self.take_snapshots()  # before the first evaluation, which may leave a checkpoint
        if run.rewards.entries:
            run.rewards.start(run.engine.gather_list)
            wait_for_rewards(run.rewards, self.config.reward_client)
        self._log_header(folder)
        self._spent()  # opening the run is no part of its first step
        with ExitStack() as failed:
            failed.push(self)  # an evaluation that fails here ends as one within the run
            self._shown.enter_context(self._stops.handling_signals())
            self._shown.enter_context(run.dir.bar(run.clock, lambda: self.progress.phase, self.progress.step))
            if self.progress.step == 0 and self._evaluated_at is None:
                self.evaluate("start")
            elif self._owes_evaluation:
                self.evaluate("step")  # servers were away when it was due
            failed.pop_all()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        self._shown.close()
        away = isinstance(error, RewardOutage | FailureRateExceeded)
        if away:
            # inside an epoch it was an evaluation that met the outage, after a step that left these rollouts
            self._save_once(self._left)
            self.run.dir.log("event", self.progress.step, {"event": "stopped", "reason": str(error)})
        if isinstance(error, Diverged):
            logger.error("%s", error)
            self.run.dir.log("event", self.progress.step, {"event": "diverged", "reason": str(error)})
        if (error is None or away or isinstance(error, Stopped)) and self.run.engine.is_main:
            leave_report(self.run.dir.path)
        if away:
            raise Stopped(f"{error}; nothing was trained on that batch; {CONTINUE}", code=3) from None

    def finish(self) -> None:
        """The end of the run: last evaluation, last checkpoint. Nothing where the run had already ended."""
        if self._finished:
            logger.info("the run had already ended at step %d", self.progress.step)
            return
        self.evaluate("end")
        self.save(self._left, pinned=True)
        self.run.dir.log("event", self.progress.step, {"event": "finished"})

    # --- one step ---

    def epochs(self) -> Iterator[int]:
        """Epochs of rollouts, up to max_steps."""
        while self.progress.step < self.config.training.max_steps:
            self.off_policy = 0.0
            yield self.progress.epoch

    def kept(self, kind: type[Rows]) -> Rows | None:
        """The rows of the epoch under way that a checkpoint inside it kept, once; else None.

        Raises:
            CheckpointError: it kept those of another algorithm or version.
        """
        tensors, self._rollouts = self._rollouts, None
        self.resumed_epoch = tensors is not None
        if tensors is None:
            return None
        names = {f.name for f in fields(kind)}
        needed = {f.name for f in fields(kind) if f.default_factory is MISSING}  # the others came with later versions
        if not needed <= tensors.keys() <= names:
            raise CheckpointError(
                f"rollouts.safetensors holds {', '.join(sorted(tensors))}, but this algorithm goes on with "
                f"{', '.join(sorted(names))}; resume from a checkpoint without rollouts.safetensors"
            )
        return kind(**tensors)

    def steps(self, rows: EpochRows, step_of: Tensor | None = None) -> Iterator[Step]:
        """Every optimizer step on the rows of an epoch that has not been taken yet.

        Args:
            rows: a dataclass of tensors [n, ...], `weight` [n] among them; kept in checkpoints inside the epoch.
            step_of: [n] step of each row; None or [0] deals them, see `step_batches`.
        """
        progress, weight = self.progress, rows.weight
        steps, inner = self.run.derived.optimizer_steps_per_epoch, self.config.algorithm.inner_epochs  # type: ignore[union-attr]
        batches = step_batches(len(weight), self.config.seed, progress.epoch, inner, steps, step_of)
        for batch in batches[progress.position :]:
            if progress.step >= self.config.training.max_steps:
                return
            fresh = progress.on_policy and progress.updates_in_epoch == 0
            ends_epoch = progress.position + 1 == len(batches)
            total = self.run.engine.sum(weight[batch].sum())
            which = {"data": self.run.data, "positions": rows.position[batch].tolist()}
            seeds, lr = rows.seed[batch].tolist(), self._rl_learning_rate()
            step = Step(self, batch, total, lr, **which, seeds=seeds, fresh=fresh, ends_epoch=ends_epoch)
            yield step
            epoch = progress.epoch
            progress.position += 1
            progress.updates_in_epoch += step.updated
            if ends_epoch:
                progress.epoch, progress.position, progress.updates_in_epoch = epoch + 1, 0, 0
            left = None if ends_epoch else vars(rows)
            self.end_step(step.values, updated=step.updated, left=left, epoch=epoch)

    def pieces(self, parts: int) -> list[range]:
        """Trained steps, or noised copies, of a row by forwards: `optimizer.steps_per_forward`."""
        return spans(parts, parts_per_forward(self.config, self.run.engine.device.type))

    @property
    def shared_steps(self) -> int:
        """Steps of a pass over an epoch to which all processes deal their rows together (`shared_batches`); 1 where
        each process deals its own."""
        inner = getattr(self.config.algorithm, "inner_epochs", 1)
        return self.run.derived.optimizer_steps_per_epoch // inner if self.config.optimizer.global_batch_size else 1

    def single_steps(self, until: int, data: Dataset, purpose: str, lr: float | None = None) -> Iterator[Step]:
        """Optimizer steps on rows of their own, up to step `until` of the run.

        Args:
            data: dataset of the rows, see `step_positions`.
            purpose: of the noise, in its seeds.
            lr: peak learning rate of supervised steps; None for a step of RL.
        """
        optimizer, progress = self.config.optimizer, self.progress
        rows = torch.arange(optimizer.rows_per_device(self.run.engine.world_size), dtype=torch.int64)
        total = torch.tensor(float(len(rows) * self.run.engine.world_size), dtype=torch.float32)
        places = range(self.run.engine.rank * len(rows), (self.run.engine.rank + 1) * len(rows))
        while progress.step < until:
            rate = self._rl_learning_rate() if lr is None else learning_rate(optimizer, lr, progress.step, until)
            positions = step_positions(self, len(data), until)[0]
            seeds = [derive_seed(self.config.seed, purpose, progress.step, place) for place in places]
            step = Step(self, rows, total, rate, data=data, positions=positions, seeds=seeds)
            yield step
            self.end_step(step.values, updated=step.updated)

    def end_step(
        self,
        values: Mapping[str, float],
        *,
        updated: bool,
        left: Tensors | None = None,
        epoch: int | None = None,
    ) -> None:
        """After every optimizer step: average, log, evaluate, checkpoint, and stop where asked to.

        Args:
            updated: whether the weights changed.
            left: what is still to be trained on in this epoch, for a checkpoint inside it.
            epoch: what the step was of; None where that is the epoch under way.

        Raises:
            Stopped: on a signal or when the time is up, after a checkpoint.
        """
        progress, training = self.progress, self.config.training
        progress.step += 1
        self._left, self._counted = left, self.run.rewards.state()
        if updated:
            progress.updates += 1
            self._blend()
        last = progress.step >= training.max_steps
        save_now = training.checkpoint_every and progress.step % training.checkpoint_every == 0
        told = {"phase": progress.phase, "epoch": progress.epoch if epoch is None else epoch, **values}
        self.run.dir.log("train", progress.step, told, self._spent())
        for alarm in self._watch.see(values):
            self._alert(alarm, stop=False)
        if self._is_due():
            self.evaluate("step")
        if save_now and not last:
            self.save(left)
        self._stop_if_asked(left)

    def check_stop(self) -> None:
        """Between rollout batches, and while rewards are computed: stop now, at the state before this epoch's rollouts.

        Raises:
            Stopped: on a signal or when the time is up.
        """
        self._stop_if_asked(None)

    def stop_heard(self) -> bool:
        """Whether this process got a signal to stop; others may not have."""
        return self._stops.heard

    def probe_rewards(self) -> None:
        """Every `probe_every` epochs, check that the scorers still give the same images the same rewards."""
        client, rewards = self.config.reward_client, self.run.rewards
        if not client.probe_every or self.progress.epoch % client.probe_every or not self.run.engine.is_main:
            return
        for name, servers in rewards.probe().items():
            for where, values in servers.items():
                before = rewards.golden.get(name, values)
                alarm = score_drifts(f"{name} of {where}", before, values, client.probe_tolerance)
                if alarm is not None:
                    self._alert(alarm, stop=client.on_drift == "stop")

    def _rl_learning_rate(self) -> float:
        """Learning rate of the next step of the RL phase."""
        steps = self.config.training.max_steps - self.supervised_steps
        return learning_rate(
            self.config.optimizer, self.config.optimizer.lr, self.progress.step - self.supervised_steps, steps
        )

    # --- evaluation and checkpoints ---

    def evaluate(self, moment: Moment) -> None:
        """Evaluate the weights that the run file names on fixed seeds, once a step; processes share the examples."""
        if self._evaluated_at == self.progress.step and moment == "step":
            return
        result = evaluated(self.run)
        seconds = self._spent()  # its own, and no step's
        self._evaluated_at = self.progress.step
        if result is not None:
            after_warmup = self.progress.phase == "rl"
            found = keep_evaluation(self.run, self.progress.step, after_warmup, moment, result, seconds)
            for alarm in found.alarms:
                self._alert(alarm.text, stop=alarm.of_gold and self.config.evaluation.on_gold_fall == "stop")
            self._stops.plateau = found.plateau

    def take_snapshots(self) -> None:
        """At the start of RL: the snapshots of the algorithm that there are not, of the policy, or as the reference of
        the base (LoRA off)."""
        run, algorithm = self.run, self.config.algorithm
        for name in sorted(algorithm.snapshots - {*run.policy.snapshots}):
            if name == "reference" and getattr(algorithm, "kl_reference", "initial") == "base":
                run.policy.snapshot(name, zero=is_update)
            else:
                run.policy.snapshot(name)

    def save(self, rollouts: Tensors | None = None, *, pinned: bool = False) -> None:
        """Write a checkpoint of this step."""
        with self.run.clock.part("checkpoint"):
            run, state = self.run, self._state()
            if rollouts is not None:
                rollouts, state["base"] = with_keys(run, rollouts), self._base
            run.checkpoints.save(self.progress.step, run.engine, run.policy, state, rollouts, pinned=pinned)
            return_memory()
        self._saved_at = self.progress.step

    # --- inside ---

    def _spent(self) -> dict[str, float]:
        """Seconds and costs by part since the last call."""
        seconds = self.run.clock.split()
        return seconds | self.run.costs.split(seconds["step"])

    def _is_due(self) -> bool:
        """Whether this step is evaluated as one of many; the ends of warm-up and run have evaluations of their own."""
        progress, training = self.progress, self.config.training
        warmed_up = progress.phase == "warmup" and progress.step == self.supervised_steps
        last = progress.step >= training.max_steps
        return bool(training.eval_every) and progress.step % training.eval_every == 0 and not (warmed_up or last)

    def _alert(self, alarm: str, *, stop: bool) -> None:
        self.run.dir.alarm(self.progress.step, alarm)
        if stop:
            self._stops.alarm = alarm

    def _restore(self, folder: Path) -> None:
        state = sound_state(folder)
        taken = state["progress"]
        # not in older checkpoints: assume that every step updated the weights, and that an old policy differs
        missing = {"updates_in_epoch": taken["position"], "on_policy": "old" not in self.config.algorithm.snapshots}
        self.progress = Progress(**{**missing, **taken})
        self._require_fit(folder, state)
        self.resumed_from = folder
        # the checkpoint first: one that cannot be read must not cost the metrics of the steps after it
        _, rollouts = self.run.checkpoints.load(folder, self.run.engine, self.run.policy)
        self._rollouts = None if rollouts is None else without_keys(self.run, folder, rollouts)
        self._left = self._rollouts
        # halved before the checkpoint: sums of other forwards would round differently
        self.rows_per_forward = min(self.rows_per_forward, state.get("rows_per_forward") or self.rows_per_forward)
        self._evaluated_at = state.get("evaluated_at", self.progress.step)
        records = read_metrics(self.run.dir.path / "metrics.jsonl")
        repeated = self.progress.step in (0, self.config.training.max_steps) or self._is_due()
        lost = not evaluation_stands(records, self.progress.step, self.run.rewards)
        if self.run.engine.any(self.run.dir.main and repeated and lost):  # others may find the file truncated already
            self._evaluated_at = None
        self.run.dir.open(self.progress.step, evaluated=self._evaluated_at == self.progress.step, checkpoint=folder)
        if self.run.dir.owns(folder):  # one of another run is no checkpoint that `auto` finds here
            self._saved_at = self.progress.step
        self._owes_evaluation = self._is_due()
        if "rewards" in state:
            self.run.rewards.restore(state["rewards"], self.run.engine.rank, self.run.engine.world_size)
            self._counted = self.run.rewards.state()
        records = read_metrics(self.run.dir.path / "metrics.jsonl")
        for record in records:
            if record["kind"] == "train":
                self._watch.see(record)  # its alarms were reported before
        self._finished = has_finished(self.config, self.progress.step, records)
        if self.config.ema and "ema" not in self.run.policy.snapshots:
            raise CheckpointError(
                f"{folder}: has no EMA weights, but the run file has an ema section; set ema=null "
                "evaluation.weights=raw to go on without them"
            )
        if not self.config.ema and self.run.policy.snapshots.pop("ema", None) is not None:
            logger.warning("%s has EMA weights, but the run file has no ema section: they are dropped", folder)

    def _require_fit(self, folder: Path, state: Mapping[str, Any]) -> None:
        """Files of the model may differ between machines: all processes go on, or none does.

        Raises:
            CheckpointError: it does not fit the run file, here or elsewhere.
        """
        problem: CheckpointError | None = None
        try:
            may_go_on(folder, state, self.config, self._base)
        except CheckpointError as error:
            problem = error
        if self.run.engine.any(problem is not None):
            raise problem or CheckpointError(f"{folder}: another process cannot go on from it; see its log")

    @property
    def _halved(self) -> bool:
        return self.rows_per_forward < self.config.optimizer.batch_size_per_device

    def _state(self) -> dict[str, Any]:
        return {
            "progress": asdict(self.progress),
            "config": self.run.dir.run_file,
            "evaluated_at": self._evaluated_at,
            "rows_per_forward": self.rows_per_forward if self._halved else None,
            "rewards": of_all(self.run.engine.gather_list([self._counted])),
        }

    def _save_once(self, rollouts: Tensors | None) -> None:
        if self._saved_at != self.progress.step:
            self.save(rollouts)

    def _stop_if_asked(self, left: Tensors | None) -> None:
        asked = self._stops.asked()
        if asked is None:
            return
        if self._saved_at != self.progress.step:
            self.save(left)
        self.run.dir.log("event", self.progress.step, {"event": "stopped", "reason": asked.reason})
        raise Stopped(asked.message(self.progress.step), code=asked.exit_code)

    def _blend(self) -> None:
        ema, t = self.config.ema, self.progress.updates
        if ema and t % ema.update_interval == 0:
            self.run.policy.blend("ema", min((1 + t) / (10 + t), ema.decay))

    def _log_header(self, folder: Path | None) -> None:
        run = self.run
        logger.info("%s", header(self.config, run.derived, run.policy.size, folder))
        if run.dir.main:
            log_cost(self.config, run.engine.world_size)
        for line in warnings_of(self.config, run.derived.world_size) if run.dir.main else ():
            logger.warning("%s", line)
        for line in preset_lines(self.config):
            logger.info("%s", line)
        if not run.eval_is_held_out:
            logger.warning("evaluating on training examples, not on a held-out set; set evaluation.data")
