"""GRPO of a text encoder (arXiv 2402.03300, on TRL's trainer): what a vision-language model says conditions a frozen
diffusion transformer, the picture is scored, and the words learn from the score.

    1. TRL samples K completions of a prompt (instruction and picture, in the diffusion model's own chat).
    2. The very ids that it saw and sampled go once through the same model; the states behind the system part are the
       text condition (`models.response`), so that the pipeline's text encoder is the model in training.
    3. The frozen transformer draws all of a group from one noise (`rollout.draw`).
    4. The rewards of the run file score the pictures; advantages and loss are TRL's, by the options under
       `algorithm.trl` (Dr. GRPO, arXiv 2503.20783: loss_type dr_grpo with scale_rewards none).

Departures from TRL: one combined reward, because of several it counts one that failed as 0; a completion whose reward
failed is out of the loss altogether, its KL and entropy included, not only of advantage 0; a run is one pass over an
endless order of prompts, and checkpoints lie between generations, so that resuming is exact. TRL is imported
here alone.
"""

from __future__ import annotations

import logging
import os
import signal
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from datasets import Dataset as Table
from datasets.utils.logging import set_verbosity_error
from transformers.trainer_callback import PrinterCallback
from trl import GRPOConfig, GRPOTrainer, ModelConfig, get_peft_config
from trl.models import unwrap_model_for_generation

from retouch.config import ConfigError, RunConfig
from retouch.config.algorithm_sections import VlmGrpoConfig
from retouch.config.trl_fields import grpo_fields, model_fields
from retouch.data import curriculum_order
from retouch.engine import gather_list
from retouch.engine.checkpoint import rng_state, set_rng_state
from retouch.evaluate import save_evaluation
from retouch.models.qwen_text import Task
from retouch.models.response import Responses
from retouch.observe.report import write_report
from retouch.observe.run_dir import read_metrics
from retouch.recipes.session import Stopped
from retouch.rollout import FailureRateExceeded, RewardOutage
from retouch.types import Example
from retouch.vlm.callback import RunCallback
from retouch.vlm.checkpoint import finish_checkpoint, load_weights, may_go_on_with, newest_or, read_step
from retouch.vlm.judge import Judge, Judged, evaluation_of, first_of, joined, judged_grid, reward_means, seeds_of, speak
from retouch.vlm.parts import Parts, PromptOrder, Rows, build_parts, template_options

logger = logging.getLogger(__name__)

ADAPTED = ("q_proj", "k_proj", "v_proj", "o_proj")
"""Modules of an adapter whose `lora_target_modules` says nothing: attention of the language model."""


def train(config: RunConfig) -> Path:
    """Train what the run file says -> the run directory.

    Raises:
        Stopped: on a signal, when the time is up, or when rewards stayed away; a checkpoint is there to go on from.
    """
    arguments = trl_arguments(config)
    parts = build_parts(config, arguments.device, arguments.world_size, main=arguments.process_index == 0)
    try:
        _run(parts, arguments)
    finally:
        parts.close()
    return parts.dir.path


def _run(parts: Parts, arguments: GRPOConfig) -> None:
    folder = newest_or(parts.config, parts.dir.checkpoints)
    step = None if folder is None else read_step(folder)
    if folder is not None:
        plugin = arguments.deepspeed_plugin
        may_go_on_with(folder, plugin and plugin.zero_stage, arguments.world_size)
    parts.dir.open(step)
    parts.rewards.start()
    _wait_for_rewards(parts)
    trainer = VlmTrainer(parts, arguments)
    trainer.owes_evaluation = trainer.any_rank(parts.dir.main and owes_evaluation(parts, step or 0))
    logger.info("%s: %s", parts.config.name, f"resumed from {folder}" if folder else "new run")
    for name, value in parts.derived.as_dict().items():
        logger.info("  %s: %g", name.replace("_", " "), value)
    with trainer.handling_signals():
        try:
            trainer.train(resume_from_checkpoint=str(folder) if folder else None)
            trainer.finish()
        except (RewardOutage, FailureRateExceeded) as error:
            trainer.stop_without_rewards(error)


class VlmTrainer(GRPOTrainer):
    """TRL's trainer whose completions are drawn and judged, and whose files are those of a run directory."""

    def __init__(self, parts: Parts, arguments: GRPOConfig) -> None:
        self.parts = parts
        self.judge = Judge(parts)
        self.owes_evaluation = True  # before the next step
        self.stopping: tuple[str, int] | None = None
        self._signal: str | None = None
        self._started = time.monotonic()
        self._responses = Responses([], [])
        self._valid = torch.ones(0)
        self._scoring = False  # completions of a training step are out to be judged
        self._before: Mapping[str, Any] = {}
        self._tokens_before = 0
        algorithm, config = parts.algorithm, parts.config
        if not algorithm.uses_adapter:
            parts.policy.requires_grad_(True)
        if not algorithm.train_vision_tower:
            parts.policy.model.visual.requires_grad_(False)
        if parts.tokenizer.padding_side != "left":
            raise ValueError("the tokenizer pads on the right, which misaligns pictures in a batch")
        self.rows = Rows(parts)
        set_verbosity_error()  # rows are opened by an object that cannot be hashed, and need no cache
        positions = Table.from_dict({"position": list(range(len(parts.data)))})
        super().__init__(
            model=parts.policy,
            reward_funcs=[self.reward],
            args=arguments,
            train_dataset=positions.with_transform(self.rows),
            processing_class=parts.processor,
            peft_config=adapter_config(algorithm),
            callbacks=[RunCallback(self)],
        )
        self.remove_callback(PrinterCallback)
        derived, count = parts.derived, parts.derived.generations * parts.derived.global_prompts_per_generation
        repeats = arguments.num_iterations * (arguments.steps_per_generation or 1)  # TRL has filled it in
        self.order = PromptOrder(
            curriculum_order(parts.data.difficulties, count, config.seed, parts.data.stages),
            derived.global_prompts_per_generation,
            algorithm.count("num_generations"),
            repeats,
            derived.generations,
        )

    # --- what TRL asks for ---

    def _get_train_sampler(self, dataset: Any = None) -> Any:
        return self.order

    def _generate_single_turn(
        self, prompt_ids: Any, images: Any, multimodal_fields: Any, num_generations: Any, has_tool_images: Any = False
    ) -> Any:
        """Keep the ids, and all that the processor made of the pictures, as they are."""
        completion_ids, log_probs = super()._generate_single_turn(
            prompt_ids, images, multimodal_fields, num_generations, has_tool_images
        )
        counts = [len(row or ()) for row in images] if images else [0] * len(prompt_ids)
        self._responses = Responses(prompt_ids, completion_ids, multimodal_fields, counts)
        return completion_ids, log_probs

    def reward(self, prompts: Any, completions: Any, completion_ids: Any, **columns: Any) -> list[float | None]:
        """The one reward that TRL sees: the weighted sum of those of the run file, None where one of them failed."""
        if list(completion_ids) != list(self._responses.completion_ids):
            raise RuntimeError("these are not the completions that were generated last")
        step = self.state.global_step
        examples = [self.rows.example(position) for position in columns["position"]]
        seeds = seeds_of("draw", self.parts.config.seed, examples, step)
        judged: Judged | None = None
        failed: RewardOutage | FailureRateExceeded | None = None
        self._scoring = True
        with self.policy_at_hand() as policy:
            try:
                judged = self.judge(policy, examples, self._responses, seeds)
            except (RewardOutage, FailureRateExceeded) as error:
                failed = error
        self.together(failed)
        assert judged is not None
        self._scoring = False
        self._log_judged(judged, columns["log_metric"])
        return judged.rewards

    def _calculate_rewards(self, inputs: Any, prompts: Any, completions: Any, completion_ids_list: Any) -> Any:
        rewards = super()._calculate_rewards(inputs, prompts, completions, completion_ids_list)
        first = self.accelerator.process_index * len(prompts)
        self._valid = ~rewards[first : first + len(prompts)].isnan().any(1)
        return rewards

    def _generate_and_score_completions(self, inputs: Any) -> Any:
        """Rows whose reward failed have weight 0 in everything, KL and entropy included."""
        output = super()._generate_and_score_completions(inputs)
        mask = self._valid.to(output["completion_mask"])[:, None].expand_as(output["completion_mask"])
        output["tool_mask"] = mask.clone()  # what TRL multiplies into the mask of the loss, and of nothing else
        counted: Any = self.accelerator.gather((output["completion_mask"] * output["tool_mask"]).sum())
        output["num_items_in_batch"] = counted.sum()
        return output

    def _evaluate(self, trial: Any, ignore_keys_for_eval: Any, skip_scheduler: bool = False) -> Any:
        self.evaluate_now("step")
        return {}

    def create_model_card(self, *args: Any, **options: Any) -> None:
        """None: the run directory says what the run was."""

    def _save_checkpoint(self, model: Any, trial: Any) -> None:
        self.save(pinned=False)

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: Any = None) -> None:
        if self.is_fsdp_enabled:
            super()._load_from_checkpoint(resume_from_checkpoint, model)
        else:
            load_weights(self.model if model is None else model, Path(resume_from_checkpoint) / "weights")

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
        rank, ranks = self.accelerator.process_index, self.accelerator.num_processes
        examples = parts.eval_data[: c.num_examples]
        each = -(-len(examples) // ranks)
        own = examples[rank * each : (rank + 1) * each]
        padding = each - len(own)  # every rank runs as many forwards, which sharded engines need
        failed: RewardOutage | None = None
        rounds: list[Judged] = []
        with parts.clock.part("eval"), self.policy_at_hand() as policy:
            try:
                for k in range(c.images_per_example):
                    judged = self._answered(policy, own + examples[:1] * padding, k)
                    rounds.append(first_of(judged, len(own)))
            except RewardOutage as error:
                failed = error
        self.together(failed)
        gathered = gather_list([rounds])
        rounds = [joined([of_rank[k] for of_rank in gathered]) for k in range(c.images_per_example)]
        evaluation = evaluation_of(rounds)
        held_out = "held_out" if parts.eval_is_held_out else "train"
        means = evaluation.means()
        parts.dir.log("eval", step, {"moment": moment, "examples": held_out, "images": len(evaluation.rows), **means})
        if not self.accelerator.is_main_process:
            return
        told = ", ".join(f"{name} {value:.3f}" for name, value in means.items())
        logger.info("step %d, %d %s images: %s", step, len(evaluation.rows), held_out.replace("_", "-"), told)
        save_evaluation(evaluation, parts.dir.path / "evaluations" / f"step-{step:06d}", c.grid_examples)
        if c.grid_examples:
            parts.dir.save_image(step, "evaluation", judged_grid(rounds[0], c.grid_examples))

    def _answered(self, policy: Any, examples: Sequence[Example], k: int) -> Judged:
        """Round `k` of an evaluation of examples, in batches."""
        batch = self.parts.config.rollout.batch_size_per_device
        options = {**self.generation_kwargs, "generation_config": None}
        found: list[Judged] = []
        for start in range(0, len(examples), batch):
            chunk = examples[start : start + batch]
            said = speak(policy, self.parts, chunk, options, seeds_of("say", 0, chunk, k)[0])
            found.append(self.judge(policy, chunk, said, seeds_of("eval", 0, chunk, k), training=False))
        return joined(found)

    def save(self, *, pinned: bool) -> None:
        """Write a checkpoint of this step."""
        writing = self.parts.dir.checkpoints / f".writing-step-{self.state.global_step:06d}"
        with self.parts.clock.part("checkpoint"):
            given, self.args.output_dir = self.args.output_dir, str(writing)
            try:
                model: Any = self.model
                super()._save_checkpoint(model, None)
            finally:
                self.args.output_dir = given
            self.accelerator.wait_for_everyone()
            if self.accelerator.is_main_process:
                finish_checkpoint(writing, self.state.global_step, self.parts.config, pinned=pinned)
            self.accelerator.wait_for_everyone()

    def finish(self) -> None:
        """The end of the run: last checkpoint, last evaluation, report; or why it ends here.

        Raises:
            Stopped: asked to stop before the last step.
        """
        if self.stopping is not None:
            reason, code = self.stopping
            self.parts.dir.log("event", self.state.global_step, {"event": "stopped", "reason": reason})
            raise Stopped(f"{reason} at step {self.state.global_step}", code=code)
        self.save(pinned=True)
        self.evaluate_now("end")
        self.parts.dir.log("event", self.state.global_step, {"event": "finished"})
        if self.accelerator.is_main_process:
            write_report(self.parts.dir.path)

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
        if self._scoring:
            set_rng_state(dict(self._before))
            self.state.num_input_tokens_seen = self._tokens_before
        if self.between_cycles():
            self.save(pinned=False)
        self.parts.dir.log("event", self.state.global_step, {"event": "stopped", "reason": str(error)})
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
        """The generators as they are before completions are generated."""
        self._before, self._tokens_before = rng_state(), self.state.num_input_tokens_seen

    def asked_to_stop(self) -> tuple[str, int] | None:
        """Reason and exit code, the same on every rank."""
        limit = self.parts.config.training.max_minutes
        if self.any_rank(self._signal is not None):
            return f"received {self._signal or 'a signal on another process'}", 3
        if limit is not None and self.any_rank(time.monotonic() - self._started > 60 * limit):
            return f"training.max_minutes = {limit:g} reached", 0
        return None

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        if self._signal is not None:
            raise KeyboardInterrupt  # asked twice: leave now; the last checkpoint stands
        self._signal = signal.Signals(number).name
        logger.warning("%s: stopping after this cycle; once more to leave at once", self._signal)

    def _log_judged(self, judged: Judged, log_metric: Any) -> None:
        for name, value in reward_means(judged.scores).items():
            log_metric(name, value)
        log_metric("truncated", float(judged.truncated))
        every, step = self.parts.config.logging.rollout_images_every, self.state.global_step
        if every and step // self.parts.derived.optimizer_steps_per_generation % every == 0:
            self.parts.dir.save_image(
                step + 1, "rollouts", judged_grid(judged, self.parts.algorithm.count("num_generations"))
            )


def owes_evaluation(parts: Parts, step: int) -> bool:
    """Whether the weights of a step were to be evaluated, and were not: at the start, or where rewards were away."""
    training = parts.config.training
    due = step == 0 or (bool(training.eval_every) and step % training.eval_every == 0 and step < training.max_steps)
    records = read_metrics(parts.dir.path / "metrics.jsonl")
    return due and not any((record["kind"], record["step"]) == ("eval", step) for record in records)


def trl_arguments(config: RunConfig) -> GRPOConfig:
    """TRL's arguments: those of the run file under `algorithm.trl`, and what the run file says itself.

    Raises:
        ConfigError: what TRL refuses.
    """
    algorithm, training = config.algorithm, config.training
    assert isinstance(algorithm, VlmGrpoConfig)
    given = {name: value for name, value in algorithm.trl.items() if name in grpo_fields()}
    task: Task = getattr(config.model, "variant", "draw")
    cpu = not torch.cuda.is_available()
    options: dict[str, Any] = {
        # told of a CPU, accelerate would leave DeepSpeed out; without, it finds its processes by their backend alone
        **({"ddp_backend": "gloo"} if cpu and _launched_by_deepspeed() else {"use_cpu": cpu}),
        "disable_tqdm": True,
        **given,
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
    if training.mixed_precision == "fp16" and cpu:
        raise ConfigError("training.mixed_precision: given 'fp16', which needs a GPU; set bf16, or \"no\" for fp32")
    try:
        return GRPOConfig(**options)
    except (ValueError, TypeError) as error:
        raise ConfigError(f"algorithm.trl: {error}") from None


def _launched_by_deepspeed() -> bool:
    """Whether accelerate's configuration says DeepSpeed: how its launcher tells the processes."""
    return os.environ.get("ACCELERATE_USE_DEEPSPEED", "false").lower() == "true"


def adapter_config(algorithm: VlmGrpoConfig) -> Any:
    """PEFT's config of the adapter, by TRL's options; None for full fine-tuning. The vision tower gets none unless
    asked: its layers share names with those of the language model."""
    given = {name: value for name, value in algorithm.trl.items() if name in model_fields() - grpo_fields()}
    config: Any = get_peft_config(ModelConfig(**{"lora_target_modules": list(ADAPTED), **given}))
    if config is not None and not algorithm.train_vision_tower:
        config.exclude_modules = r".*visual\..*"
    return config


def _wait_for_rewards(parts: Parts) -> None:
    problems = parts.rewards.wait_ready(max(parts.config.reward_client.outage_wait_s, 60.0))
    if problems:
        raise RewardOutage("rewards are not ready: " + "; ".join(problems))
