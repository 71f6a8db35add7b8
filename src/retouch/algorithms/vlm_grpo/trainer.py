"""TRL's trainer with the lifecycle of every run: evaluations and checkpoints in a run directory, resumable stops."""

from __future__ import annotations

import logging
import math
import os
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import torch
from transformers import TrainerCallback
from transformers.trainer_callback import PrinterCallback
from trl import GRPOConfig, GRPOTrainer, ModelConfig, get_peft_config
from trl.models import unwrap_model_for_generation

from retouch.algorithms.vlm_grpo.checkpoint import finish_checkpoint, load_weights
from retouch.algorithms.vlm_grpo.config import VlmGrpoConfig
from retouch.algorithms.vlm_grpo.responses import finite_probabilities, template_options
from retouch.algorithms.vlm_grpo.run import VlmRun
from retouch.algorithms.vlm_grpo.scoring import CompletionScorer, ScoredCompletion, evaluation_of, scored_grid
from retouch.algorithms.vlm_grpo.trl_options import grpo_fields, model_fields
from retouch.config import ConfigError, RunConfig
from retouch.data.sampler import own_share
from retouch.engine import gather_list
from retouch.engine.checkpoint import drop_unfinished
from retouch.errors import logging_long
from retouch.families.qwen.text import Task
from retouch.observe.cost import Costs
from retouch.observe.guards import IdleWatch
from retouch.observe.report import leave_report
from retouch.observe.run_dir import read_metrics
from retouch.process.process_wide import leave_to_the_run_file, rng_state, set_rng_state
from retouch.rewards.table import of_all
from retouch.training.evaluations import Moment, record_evaluation
from retouch.training.scoring import RewardOutage, raise_together
from retouch.training.stopping import Stop, StopRequests, continuing
from retouch.types import Diverged, Stopped

logger = logging.getLogger(__name__)

ADAPTED = ("q_proj", "k_proj", "v_proj", "o_proj")
"""Default of `lora_target_modules`: attention of the language model."""


def trl_arguments(config: RunConfig) -> GRPOConfig:
    """TRL's arguments: the options under `algorithm.trl`, and those that the run file sets elsewhere.

    Raises:
        ConfigError: options that TRL rejects, and FSDP.
    """
    algorithm, training = config.algorithm, config.training
    assert isinstance(algorithm, VlmGrpoConfig)
    given = {name: value for name, value in algorithm.trl.items() if name in grpo_fields()}
    task: Task = getattr(config.model, "variant", "draw")
    cpu = not torch.cuda.is_available()
    leave_to_the_run_file(training.mixed_precision)
    if _launched_with("FSDP"):
        raise ConfigError(
            "accelerate's configuration: given FSDP, whose hooks vlm_grpo would bypass when it reads the text "
            "encoder's states; launch with configs/accelerate/zero3.yaml"
        )
    if training.mixed_precision == "fp16" and cpu:
        raise ConfigError("training.mixed_precision: given 'fp16', which needs a GPU; set bf16, or \"no\" for fp32")
    options: dict[str, Any] = {
        # with use_cpu accelerate would ignore DeepSpeed; with the backend alone it finds its processes
        **({"ddp_backend": "gloo"} if cpu and _launched_with("DEEPSPEED") else {"use_cpu": cpu}),
        "disable_tqdm": True,
        "ddp_timeout": int(config.reward_client.collective_s),
        **given,
        "gradient_accumulation_steps": algorithm.accumulation(config, int(os.environ.get("WORLD_SIZE", "1"))),
        "chat_template_kwargs": {**template_options(task), **(given.get("chat_template_kwargs") or {})},
        "output_dir": str(Path(config.logging.dir).expanduser() / config.name),
        "seed": config.seed,
        "max_steps": training.max_steps,
        "bf16": training.mixed_precision == "bf16",
        "fp16": training.mixed_precision == "fp16",
        "gradient_checkpointing": training.gradient_checkpointing,
        "logging_steps": 1,
        "logging_nan_inf_filter": False,
        "save_strategy": "no",
        "eval_strategy": "no",
        "report_to": "none",
    }
    try:
        arguments = GRPOConfig(**options)
    except (ValueError, TypeError) as error:
        raise ConfigError(f"algorithm.trl: {error}") from None
    # without a launcher transformers counts every GPU of the machine, and TRL refuses more than one: a process has one
    arguments._n_gpu = min(arguments.n_gpu, 1)
    return arguments


def _launched_with(engine: str) -> bool:
    """Whether accelerate's launcher configured DEEPSPEED, or FSDP."""
    return os.environ.get(f"ACCELERATE_USE_{engine}", "false").lower() == "true"


def adapter_config(algorithm: VlmGrpoConfig) -> Any:
    """PEFT's config of the adapter, by TRL's options; None for full fine-tuning. The vision tower is excluded unless
    requested: its layers share names with those of the language model."""
    given = {name: value for name, value in algorithm.trl.items() if name in model_fields() - grpo_fields()}
    config: Any = get_peft_config(ModelConfig(**{"lora_target_modules": list(ADAPTED), **given}))
    if config is not None and not algorithm.train_vision_tower:
        config.exclude_modules = r".*visual\..*"
    return config


def _timed(method: str, part: str) -> Any:
    """A method of TRL's trainer whose time counts as a part of the run's clock."""

    def timed(self: RunTrainer, *args: Any, **options: Any) -> Any:
        with self.run.clock.part(part):
            return getattr(GRPOTrainer, method)(self, *args, **options)

    return timed


class RunTrainer(GRPOTrainer):
    """The parts of a run other than the algorithm: evaluation, checkpoints, stops, timings.

    Args:
        given: further arguments of TRL's trainer.

    Attributes:
        owes_evaluation: the initial weights are still to be evaluated.
        stopping: reason and exit code, once a stop was requested.
        scoring: a training step waits for the rewards of its completions.
        costs: images, and forwards of the diffusion model.
    """

    def __init__(self, run: VlmRun, arguments: GRPOConfig, **given: Any) -> None:
        self.run = run
        self.scorer = CompletionScorer(run)
        self.owes_evaluation = True
        self.stopping: Stop | None = None
        self.scoring = False
        training = run.config.training
        self.stops = StopRequests(
            training.max_minutes,
            self.any_rank,
            "the end of this cycle",
            on_plateau=training.stop_on_plateau is not False,
        )
        self._before: Mapping[str, Any] = {}
        self.costs = Costs(run.diffusion_model.network, run.clock, frozen=True, recomputes=False)
        self.costs.peak = None  # the policy computes as well, and would be missing from the FLOPs
        super().__init__(args=arguments, callbacks=[RunCallback(self)], **given)
        self.remove_callback(PrinterCallback)

    def _evaluate(self, trial: Any, ignore_keys_for_eval: Any, skip_scheduler: bool = False) -> Any:
        self.evaluate_now("step")
        self.control.should_evaluate = False  # or a run that stops here would evaluate once more
        asked = self.stops.asked()  # the evaluation may have found a reason
        if asked is not None and self.between_cycles():
            self.stopping = asked
            self.control.should_training_stop = self.control.should_save = True
        return {}

    def create_model_card(self, *args: Any, **options: Any) -> None:
        """Write no model card: the run directory documents the run."""

    def _save_checkpoint(self, model: Any, trial: Any) -> None:
        self.save(pinned=False)

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """Write `weights/`. Under ZeRO-1 and 2 every process has the adapter whole: the trainer would first copy all
        weights of the text encoder into host memory, on every process."""
        plugin = self.args.deepspeed_plugin if self.is_deepspeed_enabled else None
        if plugin is not None and plugin.zero_stage < 3 and self.run.algorithm.uses_adapter:
            self._save(output_dir)
        else:
            super().save_model(output_dir, _internal_call)

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: Any = None) -> None:
        load_weights(self.model if model is None else model, Path(resume_from_checkpoint) / "weights")

    # --- timings: the text encoder's inference is "text", image generation "rollout" and "vae" ---

    training_step = _timed("training_step", "train_backward")
    """Without its nested timers this is the backward, with the optimizer step if DeepSpeed takes it there."""
    _prepare_inputs = _timed("_prepare_inputs", "other")
    _get_per_token_logps_and_entropies = _timed("_get_per_token_logps_and_entropies", "train_forward")
    compute_loss = _timed("compute_loss", "train_forward")
    _clip_grad_norm = _timed("_clip_grad_norm", "optimizer")

    def _generate(self, *args: Any, **options: Any) -> Any:
        with self.run.clock.part("text"), finite_probabilities():
            return super()._generate(*args, **options)

    def _get_grad_norm(self, model: Any, grad_norm: Any = None) -> Any:
        """The gradient norm, before the weights change.

        Raises:
            Diverged: it is NaN or Inf, which TRL would write into the weights. Under fp16 the loss scaler skips the
                step.
        """
        norm = super()._get_grad_norm(model, grad_norm=grad_norm)
        if norm is not None and not self.args.fp16 and not math.isfinite(float(norm)):
            raise Diverged(
                f"the gradient norm is {float(norm)} at step {self.state.global_step + 1}; lower "
                "algorithm.trl.learning_rate, or check the rewards of the last batch; "
                f"{continuing(self.run.dir.path)}"
            )
        return norm

    def trained_parameters(self) -> int:
        """Number of trained parameters, including those that ZeRO-3 keeps on other processes."""
        model: Any = self.model
        return sum(getattr(p, "ds_numel", p.numel()) for p in model.parameters() if p.requires_grad)

    def spent(self) -> dict[str, float]:
        """Seconds and costs by part since the last call."""
        seconds = self.run.clock.split()
        return seconds | self.costs.split(seconds["step"])

    # --- evaluation and checkpoints ---

    @contextmanager
    def whole_policy(self) -> Iterator[Any]:
        """The policy without wrappers, with whole weights: under ZeRO-3 gathered from all ranks."""
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

    def evaluate_now(self, moment: Moment) -> None:
        """Evaluate completions and images on fixed seeds; the ranks share the examples."""
        run, c, step = self.run, self.run.config.evaluation, self.state.global_step
        examples = run.eval_data[: c.num_examples]
        own, padding = own_share(examples, self.accelerator.process_index, self.accelerator.num_processes)
        failed: RewardOutage | None = None
        rounds: list[list[ScoredCompletion]] = []
        with run.clock.part("eval"), self.whole_policy() as policy:
            try:
                for k in range(c.images_per_example):
                    scored = self.scorer.complete(policy, own + examples[:1] * padding, 0, "eval", k, score=True)
                    rounds.append(scored[: len(own)])
            except RewardOutage as error:
                failed = error
        raise_together(failed, self.any_rank)
        gathered = gather_list([rounds])
        seconds = self.spent()
        if not self.accelerator.is_main_process:
            return
        rounds = [[one for of_rank in gathered for one in of_rank[k]] for k in range(c.images_per_example)]
        evaluation = evaluation_of(rounds)
        found = record_evaluation(run, step, moment, evaluation, seconds, images=c.grid_examples, compared_from=0)
        self.stops.plateau = found.plateau
        for alarm in found.alarms:
            run.dir.alarm(step, alarm.text)
            if alarm.of_gold and c.on_gold_fall == "stop":
                self.stops.alarm = alarm.text
        if c.grid_examples:
            run.dir.save_image(step, "evaluation", scored_grid(rounds[0][: c.grid_examples]))

    def save(self, *, pinned: bool) -> None:
        """Write a checkpoint of this step."""
        writing = self.run.dir.checkpoints / f".writing-step-{self.state.global_step:06d}"
        with self.run.clock.part("checkpoint"):
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
            rewards = of_all(gather_list([self.run.rewards.state()]))
            if self.accelerator.is_main_process:
                finish_checkpoint(writing, self.state.global_step, self.run.config, rewards, pinned=pinned)
            self.accelerator.wait_for_everyone()

    def finish(self) -> None:
        """End the run: last checkpoint, last evaluation, report; or raise the reason why it stops early.

        Raises:
            Stopped: a stop was requested before the last step.
        """
        if self.stopping is not None:
            self._end("stopped", reason=self.stopping.reason)
            message = self.stopping.message(self.state.global_step, self.run.dir.path)
            raise Stopped(message, code=self.stopping.exit_code)
        self.save(pinned=True)
        self.evaluate_now("end")
        self._end("finished")

    def _end(self, event: str, **about: str) -> None:
        self.run.dir.log("event", self.state.global_step, {"event": event, **about})
        if self.accelerator.is_main_process:
            leave_report(self.run.dir.path)

    # --- stopping ---

    def stop_without_rewards(self, error: Exception) -> None:
        """Write a checkpoint of the state before the completions whose rewards are missing. An evaluation changes no
        state; inside a cycle the last checkpoint stays the newest.

        Raises:
            Stopped: always.
        """
        if self.scoring:
            set_rng_state(dict(self._before["generators"]))
            self.state.num_input_tokens_seen = self._before["tokens"]
        if self.between_cycles():
            self.save(pinned=self.state.global_step >= self.run.config.training.max_steps)
        self._end("stopped", reason=str(error))
        raise Stopped(f"{error}; nothing was trained on that batch; {continuing(self.run.dir.path)}", code=3) from None

    def any_rank(self, flag: bool) -> bool:
        """Whether the flag is set on any rank."""
        return any(gather_list([flag]))

    def between_cycles(self) -> bool:
        """Whether no completions are left to train on."""
        return self.state.global_step % self.run.derived.optimizer_steps_per_generation == 0

    def remember(self) -> None:
        """Keep generators and the count of tokens as they are before completions are generated."""
        self._before = {"generators": rng_state(), "tokens": self.state.num_input_tokens_seen}


class RunCallback(TrainerCallback):
    """Writes the trainer's metrics to the run directory; decides when to save, to evaluate and to stop."""

    def __init__(self, trainer: RunTrainer) -> None:
        self.trainer = trainer
        self._optimizing = ExitStack()
        self._idle = IdleWatch()

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        for record in read_metrics(self.trainer.run.dir.path / "metrics.jsonl"):
            if record["kind"] == "train":
                self._idle_alarm(record)  # already reported
        self.trainer.spent()  # opening the run does not count towards its first step
        if self.trainer.owes_evaluation:  # only now are the weights on their device
            with logging_long(logger, "evaluating before the first step"):
                self.trainer.evaluate_now("step" if state.global_step else "start")

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if self.trainer.between_cycles():
            self.trainer.remember()

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._optimizing.enter_context(self.trainer.run.clock.part("optimizer"))

    def on_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._optimizing.close()

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        training, step = self.trainer.run.config.training, state.global_step
        last = step >= training.max_steps
        if self.trainer.between_cycles() and not last:
            self.trainer.stopping = self.trainer.stops.asked()
            control.should_training_stop = control.should_training_stop or self.trainer.stopping is not None
        due = training.checkpoint_every and step % training.checkpoint_every == 0
        control.should_save = bool((due or self.trainer.stopping) and not last)
        control.should_evaluate = bool(training.eval_every and step % training.eval_every == 0 and not last)

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
        values = dict(logs or {})
        if "loss" not in values:  # the summary at the end
            return
        dropped = ("total_flos", "epoch", "step_time")  # TRL's own timings: the run's clock has them by part
        values = {n: v for n, v in values.items() if n not in dropped and not n.startswith("profiling/")}
        values["lr"] = values.pop("learning_rate")
        self.trainer.run.dir.log("train", state.global_step, {"phase": "rl", **values}, self.trainer.spent())
        alarm = self._idle_alarm(values)
        if alarm is not None:
            self.trainer.run.dir.alarm(state.global_step, alarm)

    def _idle_alarm(self, values: Mapping[str, Any]) -> str | None:
        """The alarm after a step that generated completions; other steps log no rewards."""
        share = values.get("frac_reward_zero_std")
        return None if share is None else self._idle.see(share == 1.0)
