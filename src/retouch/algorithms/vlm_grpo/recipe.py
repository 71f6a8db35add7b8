"""GRPO of a text encoder (arXiv 2402.03300, on TRL's trainer): what a vision-language model says conditions a frozen
diffusion transformer, the picture is scored, and the words learn from the score.

    1. TRL samples K completions of a prompt (instruction and picture, in the diffusion model's own chat).
    2. The very ids that it saw and sampled go once through the same model; the states behind the system part are the
       text condition (`models.response`), so that the pipeline's text encoder is the model in training.
    3. The frozen transformer draws all of a group from one noise (`rollout.draw`).
    4. The rewards of the run file score the pictures; advantages and loss are TRL's, by the options under
       `algorithm.trl` (Dr. GRPO, arXiv 2503.20783: loss_type dr_grpo with scale_rewards none).

Departures from TRL: one combined reward, because of several it counts one that failed as 0; a completion whose reward
failed is out of the loss altogether, its KL, its entropy and its share of the denominator included, not only of
advantage 0; a run is one pass over an
endless order of prompts, and checkpoints lie between generations, so that resuming is exact.
"""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset as Table
from datasets.utils.logging import set_verbosity_error
from trl import GRPOConfig

from retouch.algorithms.vlm_grpo.arguments import (
    adapter_config,
    trl_arguments,
)
from retouch.algorithms.vlm_grpo.checkpoint import (
    may_go_on_with,
    newest_or,
    read_step,
    rewards_state,
)
from retouch.algorithms.vlm_grpo.generation import name_for_vllm
from retouch.algorithms.vlm_grpo.judge import (
    Judged,
    judged_grid,
    reward_means,
    seeds_of,
)
from retouch.algorithms.vlm_grpo.parts import (
    Parts,
    PromptOrder,
    Rows,
    build_parts,
)
from retouch.algorithms.vlm_grpo.response import Responses
from retouch.algorithms.vlm_grpo.trainer import (
    RunTrainer,
    has_ended,
    owes_evaluation,
)
from retouch.config import RunConfig
from retouch.config.advice import warnings_of
from retouch.data.sampler import curriculum_order
from retouch.engine import Launched, gather_list
from retouch.engine.checkpoint import verify_once
from retouch.observe.header import header
from retouch.rollout.scorer import (
    FailureRateExceeded,
    RewardOutage,
    refuse_failures,
    tally_of,
)
from retouch.training.readiness import wait_for_rewards

logger = logging.getLogger(__name__)


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
    parts.dir.lock()
    folder = newest_or(parts.config, parts.dir.checkpoints)
    step = None if folder is None else read_step(folder)
    if folder is not None:
        verify_once(folder, Launched())
        plugin = arguments.deepspeed_plugin
        may_go_on_with(folder, plugin and plugin.zero_stage, arguments.world_size)
        counted = rewards_state(folder) or parts.rewards.state()
        parts.rewards.restore(counted, arguments.process_index, arguments.world_size)
    if step is not None and has_ended(parts, step):
        logger.info("the run had already ended at step %d", step)
        return
    parts.dir.open(step)
    parts.rewards.start(gather_list)
    wait_for_rewards(parts.rewards, parts.config.reward_client)
    if arguments.use_vllm:
        name_for_vllm(parts)
        processes: Any = arguments.distributed_state
        processes.wait_for_everyone()
    trainer = VlmTrainer(parts, arguments)
    trainer.owes_evaluation = trainer.any_rank(parts.dir.main and owes_evaluation(parts, step or 0))
    logger.info("%s", header(parts.config, parts.derived, trainer.trained_parameters(), folder))
    for line in warnings_of(parts.config) if parts.dir.main else ():
        logger.warning("%s", line)
    with trainer.handling_signals(), parts.dir.bar(parts.clock, lambda: "rl", step or 0):
        try:
            trainer.train(resume_from_checkpoint=str(folder) if folder else None)
            trainer.finish()
        except (RewardOutage, FailureRateExceeded) as error:
            trainer.stop_without_rewards(error)


class VlmTrainer(RunTrainer):
    """The trainer whose completions are drawn and judged."""

    def __init__(self, parts: Parts, arguments: GRPOConfig) -> None:
        self._responses = Responses([], [])
        self._valid = torch.ones(0)
        self._scale = 1.0
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
            parts,
            arguments,
            model=parts.policy,
            reward_funcs=[self.reward],
            train_dataset=positions.with_transform(self.rows),
            processing_class=parts.processor,
            peft_config=adapter_config(algorithm),
        )
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
        failed: RewardOutage | None = None
        self.scoring = True
        with self.policy_at_hand() as policy:
            try:
                judged = self.judge(policy, examples, self._responses, seeds)
            except RewardOutage as error:
                failed = error
        self.together(failed)
        assert judged is not None
        counted = tally_of(self.parts.rewards, [judged.scores])
        refuse_failures(gather_list([counted]), self.parts.config.reward_client)
        self.parts.rewards.count(counted.asked, counted.lost)
        self.scoring = False
        self.costs.images += len(examples) * judged.pictures_each
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

    def _prepare_inputs(self, generation_batch: Any) -> Any:
        before: Any = self._buffered_inputs
        inputs = super()._prepare_inputs(generation_batch)
        if self._buffered_inputs is not before:
            self._scale = self._loss_scale()
        return inputs

    def _loss_scale(self) -> float:
        """What the loss is multiplied by, so that failed completions leave its denominator.

        With grpo, dr_grpo, sapo and luspo the denominator counts completions, with bnpo micro-batches (each a mean over
        its own tokens); all of a generation, on all processes. The others divide by `num_items_in_batch`, which counts
        valid tokens already.
        """
        if self.loss_type in ("dapo", "cispo", "vespo"):
            return 1.0
        batches: Any = self._buffered_inputs
        valid = torch.stack([batch["tool_mask"].any(1) for batch in batches])  # [micro-batches, B]
        counted = valid.any(1) if self.loss_type == "bnpo" else valid
        own = torch.tensor([counted.sum(), counted.numel()], device=self.accelerator.device)
        gathered: Any = self.accelerator.gather(own[None])
        kept, everything = gathered.sum(0).tolist()
        return everything / max(1, kept)

    def _compute_loss(self, model: Any, inputs: Any) -> Any:
        return super()._compute_loss(model, inputs) * self._scale

    def _log_judged(self, judged: Judged, log_metric: Any) -> None:
        processes = self.accelerator.num_processes  # TRL logs the mean over them, of counts as well
        for name, value in reward_means(judged.scores).items():
            log_metric(name, value * processes if name.startswith("failed/") else value)
        log_metric("truncated", float(judged.truncated * processes))
        every, step = self.parts.config.logging.rollout_images_every, self.state.global_step
        if every and step // self.parts.derived.optimizer_steps_per_generation % every == 0:
            self.parts.dir.save_image(
                step + 1, "rollouts", judged_grid(judged, self.parts.algorithm.count("num_generations"))
            )
