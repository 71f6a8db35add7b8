"""GRPO of a text encoder (arXiv 2402.03300, on TRL's trainer): completions of a vision-language model condition a
frozen diffusion transformer, the images are scored, and the completions are trained on the scores.

    1. TRL samples K completions of a prompt (instruction and image, in the diffusion model's own chat).
    2. Exactly the ids that it read and sampled go once through the same model; the states behind the system part are
       the text condition (`responses.encode_response`): the pipeline's text encoder is the model in training.
    3. The frozen transformer generates the images of a group from one noise (`images.generate_images`).
    4. The rewards of the run file score the images; advantages and loss are TRL's, by the options under
       `algorithm.trl` (Dr. GRPO, arXiv 2503.20783: loss_type dr_grpo with scale_rewards none).

Departures from TRL: one combined reward, because TRL counts a failed one of several as 0; a completion whose reward
failed is removed from the loss with its KL, its entropy and its share of the denominator (advantage 0 alone would not
remove these), and so is one that has nothing left in its group to be compared with; a run is one pass over an endless
order of prompts, and checkpoints lie between generations: resuming is exact.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset as Table
from datasets.utils.logging import set_verbosity_error
from trl import GRPOConfig

from retouch.algorithms.vlm_grpo.checkpoint import require_between_cycles, require_same_engine
from retouch.algorithms.vlm_grpo.config import VlmGrpoConfig
from retouch.algorithms.vlm_grpo.responses import Responses
from retouch.algorithms.vlm_grpo.run import PromptOrder, Rows, VlmRun, build_run, name_for_vllm
from retouch.algorithms.vlm_grpo.scoring import ScoredCompletion, noise_seeds, reward_means, scored_grid
from retouch.algorithms.vlm_grpo.trainer import RunTrainer, adapter_config, trl_arguments
from retouch.config import RunConfig
from retouch.core.advantages import comparable_rows
from retouch.data.sampler import curriculum_order
from retouch.engine import Diverged, Launched, gather_list
from retouch.engine.checkpoint import verify_once
from retouch.engine.saved import sound_state
from retouch.engine.zero import note_compiling
from retouch.observe.bar import Work
from retouch.observe.run_dir import read_metrics
from retouch.rewards.table import Scores
from retouch.training.opening import log_header, open_run
from retouch.training.resume import (
    evaluation_stands,
    has_finished,
    resume_folder,
    resumed_run_file,
    same_kind,
    with_kept_defaults,
)
from retouch.training.scoring import FailureRateExceeded, RewardOutage, raise_together, refuse_failures, tally_of

logger = logging.getLogger(__name__)

DROPOUT = "lora_dropout"


def train(config: RunConfig) -> Path:
    """Train what the run file describes -> the run directory.

    Raises:
        Stopped: on a signal, when the time is up, or when rewards stay unavailable; resumable.
    """
    config = with_dropout(with_kept_defaults(config))
    arguments = trl_arguments(config)
    run = build_run(config, arguments.device, arguments.world_size, main=arguments.process_index == 0)
    try:
        _train(run, arguments)
    finally:
        run.close()
    return run.dir.path


def with_dropout(config: RunConfig) -> RunConfig:
    """The run file with a dropout of 0 where its adapter has none. TRL's default of 0.05 would train another policy
    than the one that sampled; a run that began under it goes on under it."""
    algorithm = config.algorithm
    assert isinstance(algorithm, VlmGrpoConfig)
    if not algorithm.uses_adapter or DROPOUT in algorithm.trl:
        return config
    before = resumed_run_file(config)
    if before is not None and DROPOUT not in before["algorithm"].get("trl", {}):
        return config
    update = {"trl": {**algorithm.trl, DROPOUT: 0.0}}
    return config.model_copy(update={"algorithm": algorithm.model_copy(update=update)})


def _train(run: VlmRun, arguments: GRPOConfig) -> None:
    config = run.config
    run.dir.lock()
    folder, step = resume_folder(config, run.dir), 0
    metrics = run.dir.path / "metrics.jsonl"
    if folder is not None:
        verify_once(folder, Launched())
        state = sound_state(folder)
        same_kind(folder, state, config)
        plugin = arguments.deepspeed_plugin
        require_same_engine(folder, plugin and plugin.zero_stage, arguments.world_size)
        rewards = state.get("rewards") or run.rewards.state()  # old checkpoints hold none
        run.rewards.restore(rewards, arguments.process_index, arguments.world_size)
        step = int(state["progress"]["step"])
        if has_finished(config, step, read_metrics(metrics)):
            logger.info("the run had already ended at step %d", step)
            return
        require_between_cycles(folder, step, run.derived.optimizer_steps_per_generation)
    every = config.training.eval_every
    due = step == 0 or (bool(every) and step % every == 0 and step < config.training.max_steps)
    stands = evaluation_stands(read_metrics(metrics), step, run.rewards)
    open_run(run, gather_list, folder, step, evaluated=stands or not due)
    if arguments.use_vllm:
        name_for_vllm(run)
        processes: Any = arguments.distributed_state
        processes.wait_for_everyone()
    if arguments.deepspeed_plugin:
        note_compiling(run.dir.main)
    trainer = VlmTrainer(run, arguments)
    missing = ("eval", step) not in [(record["kind"], record["step"]) for record in read_metrics(metrics)]
    trainer.owes_evaluation = trainer.any_rank(run.dir.main and due and missing)
    log_header(run, trainer.trained_parameters(), folder)
    evaluated = min(len(run.eval_data), config.evaluation.num_examples)
    work = Work(config, run.derived, trainer.costs, run.rewards.awaiting, evaluated)
    with trainer.stops.handling_signals(), run.dir.bar(run.clock, lambda: "rl", step, work):
        try:
            trainer.train(resume_from_checkpoint=str(folder) if folder else None)
            trainer.finish()
        except (RewardOutage, FailureRateExceeded) as error:
            trainer.stop_without_rewards(error)
        except Diverged as error:
            logger.error("%s", error)
            run.dir.log("event", trainer.state.global_step, {"event": "diverged", "reason": str(error)})
            raise


def leave_out_of_backward(tower: Any) -> None:
    """Freeze the vision tower. With gradient checkpointing, transformers makes the output of every embedding require a
    gradient; behind the patch embedding nothing needs one."""
    tower.requires_grad_(False)
    tower.get_input_embeddings = _no_embedding


def _no_embedding() -> None:
    """The answer of a model without an embedding, which transformers passes over."""


class VlmTrainer(RunTrainer):
    """The trainer whose completions are scored by the images that they condition."""

    def __init__(self, run: VlmRun, arguments: GRPOConfig) -> None:
        self._responses = Responses([], [])
        self._valid = torch.ones(0, dtype=torch.float32)
        self._factors = 1.0, 1.0
        algorithm, config = run.algorithm, run.config
        if not algorithm.uses_adapter:
            run.policy.requires_grad_(True)
        if not algorithm.train_vision_tower:
            leave_out_of_backward(run.policy.model.visual)
        if run.tokenizer.padding_side != "left":
            raise ValueError("the tokenizer pads on the right, which misaligns images in a batch")
        self.rows = Rows(run)
        set_verbosity_error()  # datasets warns that it cannot hash `rows`, which needs no cache
        positions = Table.from_dict({"position": list(range(len(run.data)))})
        super().__init__(
            run,
            arguments,
            model=run.policy,
            reward_funcs=[self.reward],
            train_dataset=positions.with_transform(self.rows),
            processing_class=run.processor,
            peft_config=adapter_config(algorithm),
        )
        derived, count = run.derived, run.derived.generations * run.derived.global_prompts_per_generation
        repeats = arguments.num_iterations * (arguments.steps_per_generation or 1)  # TRL has filled it in
        self.order = PromptOrder(
            curriculum_order(run.data.difficulties, count, config.seed, run.data.config.stages),
            derived.global_prompts_per_generation,
            algorithm.count("num_generations"),
            repeats,
            derived.generations,
        )

    # --- called by TRL ---

    def _get_train_sampler(self, dataset: Any = None) -> Any:
        return self.order

    def _generate_single_turn(
        self, prompt_ids: Any, images: Any, multimodal_fields: Any, num_generations: Any, has_tool_images: Any = False
    ) -> Any:
        """Keep the ids, and everything that the processor computed of the images, unchanged."""
        completion_ids, log_probs = super()._generate_single_turn(
            prompt_ids, images, multimodal_fields, num_generations, has_tool_images
        )
        counts = [len(row or ()) for row in images] if images else [0] * len(prompt_ids)
        self._responses = Responses(prompt_ids, completion_ids, multimodal_fields, counts)
        return completion_ids, log_probs

    def reward(self, prompts: Any, completions: Any, completion_ids: Any, **columns: Any) -> list[float | None]:
        """The reward passed to TRL: the weighted sum of the run file's rewards, None where one of them failed."""
        if list(completion_ids) != list(self._responses.completion_ids):
            raise RuntimeError("these are not the completions that were generated last")
        run, step = self.run, self.state.global_step
        examples = [self.rows.example(position) for position in columns["position"]]
        seeds = noise_seeds("draw", run.config.seed, examples, step)
        found: tuple[list[ScoredCompletion], Scores] | None = None
        failed: RewardOutage | None = None
        self.scoring = True
        with self.whole_policy() as policy:
            try:
                found = self.scorer.score(policy, examples, self._responses, seeds)
            except RewardOutage as error:
                failed = error
        raise_together(failed, self.any_rank)
        assert found is not None
        scored, scores = found
        tally = tally_of(run.rewards, [scores])
        refuse_failures(gather_list([tally]), run.config.reward_client)
        run.rewards.count(tally.asked, tally.lost)
        self.scoring = False
        self.costs.images += len(scores)
        self._log_scores(scored, scores, columns["log_metric"])
        return [one.reward for one in scored]

    def _calculate_rewards(self, inputs: Any, prompts: Any, completions: Any, completion_ids_list: Any) -> Any:
        rewards = super()._calculate_rewards(inputs, prompts, completions, completion_ids_list)
        first = self.accelerator.process_index * len(prompts)
        of_group: int = self.num_generations  # type: ignore[assignment]
        groups = torch.arange(len(rewards), dtype=torch.int64, device=rewards.device) // of_group
        self._valid = comparable_rows(groups, ~rewards.isnan().any(1))[first : first + len(prompts)]
        return rewards

    def _generate_and_score_completions(self, inputs: Any) -> Any:
        """Give completions without a reward, or without another one to compare it with, weight 0 in everything, KL and
        entropy included."""
        output = super()._generate_and_score_completions(inputs)
        mask = self._valid.to(output["completion_mask"])[:, None].expand_as(output["completion_mask"])
        output["tool_mask"] = mask.clone()  # TRL multiplies it into the mask of the loss, and uses it nowhere else
        counted: Any = self.accelerator.gather((output["completion_mask"] * output["tool_mask"]).sum())
        output["num_items_in_batch"] = counted.sum()
        return output

    def _prepare_inputs(self, generation_batch: Any) -> Any:
        before: Any = self._buffered_inputs
        inputs = super()._prepare_inputs(generation_batch)
        if self._buffered_inputs is not before:
            self._factors = self._loss_factors()
        return inputs

    def _loss_factors(self) -> tuple[float, float]:
        """(Factor of advantages and KL, factor of the whole loss) that remove failed completions from its denominators.

        With grpo, dr_grpo, sapo and luspo the denominator counts completions, with bnpo, and of the entropy bonus,
        micro-batches (each a mean over its own tokens); all of a generation, on all processes. The others divide by
        `num_items_in_batch`, which counts valid tokens already.
        """
        batches: Any = self._buffered_inputs
        rows = torch.stack([batch["tool_mask"].any(1) for batch in batches])  # [micro-batches, B], of valid ones
        own = [int(count) for valid in (rows, rows.any(1)) for count in (valid.sum(), valid.numel())]
        counts = torch.tensor(own, dtype=torch.int64, device=self.accelerator.device)
        gathered: Any = self.accelerator.gather(counts[None])
        kept, everything, kept_batches, all_batches = gathered.sum(0).tolist()
        of_batches = all_batches / max(1, kept_batches)
        whole = everything / max(1, kept)
        if self.loss_type == "bnpo":
            whole = of_batches
        elif self.loss_type in ("dapo", "cispo", "vespo"):
            whole = 1.0
        return (whole / of_batches, of_batches) if self._entropy_bonus_enabled else (1.0, whole)

    def _compute_loss(self, model: Any, inputs: Any) -> Any:
        inner, whole = self._factors
        beta, self.beta = self.beta, self.beta * inner
        try:
            return super()._compute_loss(model, {**inputs, "advantages": inputs["advantages"] * inner}) * whole
        finally:
            self.beta = beta

    def _log_scores(self, scored: Sequence[ScoredCompletion], scores: Scores, log_metric: Any) -> None:
        processes = self.accelerator.num_processes  # TRL logs the mean over them, of counts as well
        for name, value in reward_means(scores).items():
            log_metric(name, value * processes if name.startswith("failed/") else value)
        log_metric("truncated", float(sum(one.truncated for one in scored) * processes))
        every, step = self.run.config.logging.rollout_images_every, self.state.global_step
        if every and step // self.run.derived.optimizer_steps_per_generation % every == 0:
            grid = scored_grid(scored[: self.run.algorithm.count("num_generations")])
            self.run.dir.save_image(step + 1, "rollouts", grid)
