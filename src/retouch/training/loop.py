"""The loop of every recipe: epochs of rows, their optimizer steps, the learning rate, and requests to stop."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import MISSING, fields

import torch
from torch import Tensor

from retouch.data.dataset import Dataset
from retouch.data.sampler import batch_examples, derive_seed
from retouch.engine import CheckpointError
from retouch.rollout.encoded import EncodedData
from retouch.training.build import Run
from retouch.training.dealing import step_batches
from retouch.training.progress import SAVED_AS, EpochRows, Progress, Rows, first_phase, restored, saved
from retouch.training.recorder import Recorder, Tensors
from retouch.training.step import ForwardSize, Step, learning_rate
from retouch.training.stopping import StopRequests
from retouch.types import Stopped


class Loop:
    """Epochs and optimizer steps of a run, counted in `progress` and recorded by `recorder`.

    Attributes:
        size: rows of a forward in training.
        supervised_steps: number of the steps before RL; all steps of SFT.
        shared_steps: steps of a pass over an epoch to which all processes deal their rows together (`shared_batches`);
            1 where each process deals its own.
        log_ratio: largest |log ratio| of what the sampler recorded in this epoch, if the record was replaced.
        resumed_epoch: the rows of the epoch under way come from a checkpoint inside it.
    """

    def __init__(self, run: Run) -> None:
        self.run = run
        self.config = run.config
        self.progress = Progress(phase=first_phase(run.config))
        self.size = ForwardSize(run.config, run.engine)
        training = run.config.training
        self.stops = StopRequests(
            training.max_minutes, run.engine.any, "the next step", on_plateau=training.stop_on_plateau is not False
        )
        self.recorder = Recorder(run, self.progress, self.size, self.stops)
        self.supervised_steps = run.config.algorithm.supervised_steps(run.config)
        passes = getattr(run.config.algorithm, "inner_epochs", 1)
        together = run.config.optimizer.global_batch_size
        self.shared_steps = run.derived.optimizer_steps_per_epoch // passes if together else 1
        self.log_ratio = 0.0
        self.resumed_epoch = False
        self._resumed_rows: dict[str, Tensor] | None = None

    # --- epochs ---

    def epochs(self, kind: type[Rows], collect: Callable[..., Rows], *arguments: object) -> Iterator[Rows]:
        """The rows of each epoch, up to max_steps: those that a checkpoint inside it kept, or what `collect` samples.

        Args:
            kind: a dataclass of tensors.
            collect: takes the session and these arguments.
        """
        while self.progress.step < self.config.training.max_steps:
            self.log_ratio = 0.0
            yield self.take_resumed_rows(kind) or collect(self, *arguments)

    def take_resumed_rows(self, kind: type[Rows]) -> Rows | None:
        """The rows of the epoch under way that a checkpoint inside it kept, once; else None.

        Raises:
            CheckpointError: it kept those of another algorithm or version.
        """
        tensors, self._resumed_rows = self._resumed_rows, None
        self.resumed_epoch = tensors is not None
        if tensors is None:
            return None
        names = {SAVED_AS.get(f.name, f.name) for f in fields(kind)}
        later = {SAVED_AS.get(f.name, f.name) for f in fields(kind) if f.default_factory is not MISSING}
        if not names - later <= tensors.keys() <= names:  # later versions added those with a default
            raise CheckpointError(
                f"rollouts.safetensors holds {', '.join(sorted(tensors))}, but this algorithm goes on with "
                f"{', '.join(sorted(names))}; resume from a checkpoint without rollouts.safetensors"
            )
        return kind(**restored(kind, tensors))

    # --- optimizer steps ---

    def steps(self, rows: EpochRows) -> Iterator[Step]:
        """Every optimizer step on the rows of an epoch that has not been taken yet; again, with half the rows in a
        forward, if memory ran out.

        Args:
            rows: a dataclass of tensors [n, ...]; kept in checkpoints inside the epoch.
        """
        progress, optimizer, before = self.progress, self.config.optimizer, self.supervised_steps
        counts = rows.counts_in_loss
        steps, inner = self.run.derived.optimizer_steps_per_epoch, self.config.algorithm.inner_epochs  # type: ignore[union-attr]
        batches = step_batches(len(counts), self.config.seed, progress.epoch, inner, steps, rows.optimizer_step)
        for batch in batches[progress.step_in_epoch :]:
            if progress.step >= self.config.training.max_steps:
                return
            ends_epoch = progress.step_in_epoch + 1 == len(batches)
            step = Step(
                self.run,
                self.size,
                batch,
                self.run.engine.sum(counts[batch].sum()),
                learning_rate(optimizer, optimizer.lr, progress.step - before, self.config.training.max_steps - before),
                data=self.run.data,
                positions=rows.position[batch].tolist(),
                seeds=rows.seed[batch].tolist(),
                before_first_update=progress.on_policy and progress.updates_in_epoch == 0,
                ends_epoch=ends_epoch,
                log_ratio=self.log_ratio,
            )
            yield from step.until_it_fits()
            epoch = progress.epoch
            progress.step_in_epoch += 1
            progress.updates_in_epoch += step.updated
            if ends_epoch:
                progress.epoch, progress.step_in_epoch, progress.updates_in_epoch = epoch + 1, 0, 0
            self.end_step(step.values, updated=step.updated, epoch=epoch, rows_left=None if ends_epoch else saved(rows))

    def steps_on_examples(
        self, until: int, data: EncodedData, purpose: str, lr: float | None = None, images: int = 1
    ) -> Iterator[Step]:
        """Optimizer steps on examples of a dataset, in its shuffled order, up to step `until` of the run; again, with
        half the rows in a forward, if memory ran out.

        Args:
            purpose: of the noise, in its seeds.
            lr: peak learning rate of supervised steps; None for a step of RL.
            images: of each example.
        """
        optimizer, progress, engine = self.config.optimizer, self.progress, self.run.engine
        before = self.supervised_steps if lr is None else 0
        rows = torch.arange(optimizer.rows_per_device(engine.world_size), dtype=torch.int64)
        normalizer = torch.tensor(float(len(rows) * engine.world_size), dtype=torch.float32)
        global_rows = range(engine.rank * len(rows), (engine.rank + 1) * len(rows))
        while progress.step < until:
            rate = learning_rate(optimizer, optimizer.lr if lr is None else lr, progress.step - before, until - before)
            positions = self._positions(data.data, progress.step, global_rows)
            following = self._positions(data.data, progress.step + 1, global_rows) if progress.step + 1 < until else []
            data.read_ahead([*positions, *following])
            self.run.costs.images += images * len(rows)
            step = Step(
                self.run,
                self.size,
                rows,
                normalizer,
                rate,
                data=data.data,
                positions=positions,
                seeds=[derive_seed(self.config.seed, purpose, progress.step, row) for row in global_rows],
                supervised=lr is not None,
            )
            yield from step.until_it_fits()
            self.end_step(step.values, updated=step.updated, epoch=progress.epoch)

    def end_step(
        self, values: Mapping[str, float], *, updated: bool, epoch: int, rows_left: Tensors | None = None
    ) -> None:
        """After every optimizer step: average, log, evaluate, checkpoint, and stop where requested.

        Args:
            updated: whether the weights changed.
            epoch: of the step.
            rows_left: what is still to be trained on in this epoch, for a checkpoint inside it.

        Raises:
            Stopped: on a signal or when the time is up, after a checkpoint.
        """
        progress, ema = self.progress, self.config.ema
        progress.step += 1
        if updated:
            progress.updates += 1
            if ema and progress.updates % ema.update_interval == 0:
                decay = (1 + progress.updates) / (10 + progress.updates)
                self.run.policy.blend("ema", min(decay, ema.decay))
        self.recorder.record_step(values, epoch, rows_left)
        self.check_stop(rows_left)

    def check_stop(self, rows_left: Tensors | None = None) -> None:
        """Stop if requested, after a checkpoint: between steps, and, without the rollouts of the epoch, between rollout
        batches and while rewards are computed.

        Raises:
            Stopped: on a signal, an alarm, a plateau, or when the time is up.
        """
        requested = self.stops.asked()
        if requested is None:
            return
        self.recorder.save_once(rows_left)
        self.recorder.event("stopped", requested.reason)
        raise Stopped(requested.message(self.progress.step, self.run.dir.path), code=requested.exit_code)

    def _positions(self, data: Dataset, step: int, global_rows: range) -> list[int]:
        """Positions in `data` of this process's rows of a step."""
        count = len(global_rows) * self.run.engine.world_size
        of_all = batch_examples(len(data), count, self.config.seed, step, data.counted_shapes)
        return of_all[global_rows.start : global_rows.stop]
