"""TRL's trainer with the life of a run: evaluations and checkpoints in a run directory, stops that can be resumed."""

from __future__ import annotations

import logging
import signal
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from transformers.trainer_callback import PrinterCallback
from trl import GRPOConfig, GRPOTrainer
from trl.models import unwrap_model_for_generation

from retouch.algorithms.vlm_grpo.callback import RunCallback
from retouch.algorithms.vlm_grpo.checkpoint import (
    finish_checkpoint,
    load_weights,
)
from retouch.algorithms.vlm_grpo.judge import (
    Judge,
    Judged,
    answer,
    evaluation_of,
    first_of,
    joined,
    judged_grid,
)
from retouch.algorithms.vlm_grpo.parts import Parts
from retouch.data.sampler import own_share
from retouch.engine import gather_list
from retouch.engine.checkpoint import drop_unfinished, rng_state, set_rng_state
from retouch.observe.cost import Costs
from retouch.observe.guards import evaluation_alarms
from retouch.observe.report import leave_report
from retouch.observe.run_dir import read_metrics
from retouch.observe.step_log import means_text
from retouch.rewards.table import of_all
from retouch.rollout.scorer import RewardOutage
from retouch.training.evaluation import (
    Evaluation,
    save_evaluation,
)
from retouch.types import Stopped

logger = logging.getLogger(__name__)


class RunTrainer(GRPOTrainer):
    """Everything of a run that is not the algorithm.

    Args:
        given: further arguments of TRL's trainer.

    Attributes:
        owes_evaluation: the weights that it begins with were to be evaluated, and were not.
        stopping: reason and exit code, once asked to stop.
        scoring: completions of a training step are out to be judged.
        costs: pictures, and forwards of the network that draws them.
    """

    def __init__(self, parts: Parts, arguments: GRPOConfig, **given: Any) -> None:
        self.parts = parts
        self.judge = Judge(parts)
        self.owes_evaluation = True
        self.stopping: tuple[str, int] | None = None
        self.scoring = False
        self._signal: str | None = None
        self._alarm: str | None = None
        self._started = time.monotonic()
        self._before: Mapping[str, Any] = {}
        self._tokens_before = 0
        self._counted_before: Mapping[str, Any] = {}
        self.costs = Costs(parts.painter.network, parts.clock, frozen=True, recomputes=False)
        self.costs.peak = None  # the policy computes besides, and would be missing from the FLOPs
        super().__init__(args=arguments, callbacks=[RunCallback(self)], **given)
        self.remove_callback(PrinterCallback)

    def _evaluate(self, trial: Any, ignore_keys_for_eval: Any, skip_scheduler: bool = False) -> Any:
        self.evaluate_now("step")
        self.control.should_evaluate = False  # or a run that stops here evaluates once more
        if self.any_rank(self._alarm is not None) and self.between_cycles():
            self.stopping = self.asked_to_stop()
            self.control.should_training_stop = self.control.should_save = True
        return {}

    def create_model_card(self, *args: Any, **options: Any) -> None:
        """None: the run directory says what the run was."""

    def _save_checkpoint(self, model: Any, trial: Any) -> None:
        self.save(pinned=False)

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: Any = None) -> None:
        load_weights(self.model if model is None else model, Path(resume_from_checkpoint) / "weights")

    # --- where the time goes: words are "text", pictures "rollout" and "vae" ---

    def training_step(self, *args: Any, **options: Any) -> Any:
        """Whatever is no part of its own is the backward, with the optimizer's step where DeepSpeed takes it there."""
        with self.parts.clock.part("train_backward"):
            return super().training_step(*args, **options)

    def _prepare_inputs(self, generation_batch: Any) -> Any:
        with self.parts.clock.part("other"):
            return super()._prepare_inputs(generation_batch)

    def _generate(self, prompts: Any) -> Any:
        with self.parts.clock.part("text"):
            return super()._generate(prompts)

    def _get_per_token_logps_and_entropies(self, *args: Any, **options: Any) -> Any:
        """Of the policy in the loss, and before it of the reference and of the policy that generated."""
        with self.parts.clock.part("train_forward"):
            return super()._get_per_token_logps_and_entropies(*args, **options)

    def compute_loss(self, *args: Any, **options: Any) -> Any:
        with self.parts.clock.part("train_forward"):
            return super().compute_loss(*args, **options)

    def _clip_grad_norm(self, model: Any) -> Any:
        with self.parts.clock.part("optimizer"):
            return super()._clip_grad_norm(model)

    def trained_parameters(self) -> int:
        """Number of trained parameters, also where ZeRO-3 has left a share of each here."""
        model: Any = self.model
        return sum(getattr(p, "ds_numel", p.numel()) for p in model.parameters() if p.requires_grad)

    def spent(self) -> dict[str, float]:
        """Seconds and costs by part since they were asked for last."""
        seconds = self.parts.clock.split()
        return seconds | self.costs.split(seconds["step"])

    # --- evaluation and checkpoints ---

    @contextmanager
    def policy_at_hand(self) -> Iterator[Any]:
        """The policy without wrappers, its weights whole: under ZeRO-3 gathered from all ranks."""
        checkpointing: Any = self.args.gradient_checkpointing_kwargs
        with (
            unwrap_model_for_generation(
                self.model_wrapped,
                self.accelerator,
                gather_deepspeed3_params=True,
                gradient_checkpointing_kwargs=checkpointing,
            ) as policy,
            self._dist.summon_full_params(self.model_wrapped),
        ):
            yield policy

    def evaluate_now(self, moment: str) -> None:
        """Answers, edits and rewards of the evaluation data from fixed seeds, its examples split over the ranks."""
        parts, c, step = self.parts, self.parts.config.evaluation, self.state.global_step
        examples = parts.eval_data[: c.num_examples]
        own, padding = own_share(examples, self.accelerator.process_index, self.accelerator.num_processes)
        failed: RewardOutage | None = None
        rounds: list[Judged] = []
        with parts.clock.part("eval"), self.policy_at_hand() as policy:
            try:
                for k in range(c.images_per_example):
                    judged = answer(self.judge, policy, own + examples[:1] * padding, 0, "eval", k, score=True)
                    rounds.append(first_of(judged, len(own)))
            except RewardOutage as error:
                failed = error
        self.together(failed)
        gathered = gather_list([rounds])
        rounds = [joined([of_rank[k] for of_rank in gathered]) for k in range(c.images_per_example)]
        evaluation = evaluation_of(rounds)
        held_out = "held_out" if parts.eval_is_held_out else "train"
        means = evaluation.means()
        about = {"moment": moment, "examples": held_out, "images": len(evaluation.rows)}
        parts.dir.log("eval", step, {**about, **means}, self.spent())
        if not self.accelerator.is_main_process:
            return
        logger.info(
            "step %d, %d %s images: %s", step, len(evaluation.rows), held_out.replace("_", "-"), means_text(means)
        )
        self._watch(parts.dir.path / "evaluations", evaluation)
        save_evaluation(evaluation, parts.dir.path / "evaluations" / f"step-{step:06d}", c.grid_examples)
        if c.grid_examples:
            parts.dir.save_image(step, "evaluation", judged_grid(rounds[0], c.grid_examples))

    def _watch(self, folder: Path, evaluation: Evaluation) -> None:
        """Alarms on an evaluation, beside those before it."""
        table, step = self.parts.rewards, self.state.global_step
        weights = {name: table.weights[name] for name in table.trained if table.weights[name]}
        gold = [name for name in table.entries if name not in table.trained]
        past = [path for path in sorted(folder.glob("step-*")) if int(path.name[5:]) < step]
        earlier = [read_metrics(path / "rows.jsonl") for path in past]
        for alarm in evaluation_alarms(earlier, evaluation.rows, weights, gold):
            self.parts.dir.alarm(step, alarm.text)
            if alarm.of_gold and self.parts.config.evaluation.on_gold_fall == "stop":
                self._alarm = alarm.text

    def save(self, *, pinned: bool) -> None:
        """Write a checkpoint of this step."""
        writing = self.parts.dir.checkpoints / f".writing-step-{self.state.global_step:06d}"
        with self.parts.clock.part("checkpoint"):
            if self.accelerator.is_main_process:
                drop_unfinished(writing.parent)
            self.accelerator.wait_for_everyone()
            given, self.args.output_dir = self.args.output_dir, str(writing)
            try:
                model: Any = self.model
                super()._save_checkpoint(model, None)
            finally:
                self.args.output_dir = given
            self.accelerator.wait_for_everyone()
            told = of_all(gather_list([self.parts.rewards.state()]))
            if self.accelerator.is_main_process:
                finish_checkpoint(writing, self.state.global_step, self.parts.config, told, pinned=pinned)
            self.accelerator.wait_for_everyone()

    def finish(self) -> None:
        """The end of the run: last checkpoint, last evaluation, report; or why it ends here.

        Raises:
            Stopped: asked to stop before the last step.
        """
        if self.stopping is not None:
            reason, code = self.stopping
            self._end("stopped", reason=reason)
            raise Stopped(f"{reason} at step {self.state.global_step}", code=code)
        self.save(pinned=True)
        self.evaluate_now("end")
        self._end("finished")

    def _end(self, event: str, **about: str) -> None:
        self.parts.dir.log("event", self.state.global_step, {"event": event, **about})
        if self.accelerator.is_main_process:
            leave_report(self.parts.dir.path)

    # --- stopping ---

    def together(self, failed: Exception | None) -> None:
        """All ranks stop with the one whose rewards are missing, or they would wait for it for ever."""
        if self.any_rank(failed is not None):
            raise failed or RewardOutage("rewards failed on another process; see its log")

    def stop_without_rewards(self, error: Exception) -> None:
        """Leave a checkpoint of the state before the completions whose rewards are missing. An evaluation has changed
        nothing; inside a cycle the last checkpoint stands.

        Raises:
            Stopped: always.
        """
        if self.scoring:
            set_rng_state(dict(self._before))
            self.state.num_input_tokens_seen = self._tokens_before
            self.parts.rewards.restore(self._counted_before)
        if self.between_cycles():
            self.save(pinned=self.state.global_step >= self.parts.config.training.max_steps)
        self._end("stopped", reason=str(error))
        raise Stopped(f"{error}; nothing was trained on that batch", code=3) from None

    @contextmanager
    def handling_signals(self) -> Iterator[None]:
        """SIGINT and SIGTERM stop the run at the next cycle; a second one leaves at once."""
        before = {number: signal.signal(number, self._on_signal) for number in (signal.SIGINT, signal.SIGTERM)}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def any_rank(self, flag: bool) -> bool:
        """True where any rank says so."""
        votes: Any = self.accelerator.gather(torch.tensor([float(flag)], device=self.accelerator.device))
        return bool(votes.sum() > 0)

    def between_cycles(self) -> bool:
        """Whether no completions are left to train on."""
        return self.state.global_step % self.parts.derived.optimizer_steps_per_generation == 0

    def remember(self) -> None:
        """The generators and counts as they are before completions are generated."""
        self._before, self._tokens_before = rng_state(), self.state.num_input_tokens_seen
        self._counted_before = self.parts.rewards.state()

    def asked_to_stop(self) -> tuple[str, int] | None:
        """Reason and exit code, the same on every rank."""
        limit = self.parts.config.training.max_minutes
        if self.any_rank(self._signal is not None):
            return f"received {self._signal or 'a signal on another process'}", 3
        if self.any_rank(self._alarm is not None):
            return self._alarm or "an alarm on the first process", 3
        if limit is not None and self.any_rank(time.monotonic() - self._started > 60 * limit):
            return f"training.max_minutes = {limit:g} reached", 0
        return None

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        if self._signal is not None:
            raise KeyboardInterrupt  # asked twice: leave now; the last checkpoint stands
        self._signal = signal.Signals(number).name
        logger.warning("%s: stopping after this cycle; once more to leave at once", self._signal)


def has_ended(parts: Parts, step: int) -> bool:
    """Whether a run that is resumed at a step has nothing left to do."""
    if step < parts.config.training.max_steps:
        return False
    records = read_metrics(parts.dir.path / "metrics.jsonl")
    return any((record["step"], record.get("event")) == (step, "finished") for record in records)


def owes_evaluation(parts: Parts, step: int) -> bool:
    """Whether the weights of a step were to be evaluated, and were not: at the start, or where rewards were away."""
    training = parts.config.training
    due = step == 0 or (bool(training.eval_every) and step % training.eval_every == 0 and step < training.max_steps)
    records = read_metrics(parts.dir.path / "metrics.jsonl")
    return due and not any((record["kind"], record["step"]) == ("eval", step) for record in records)
