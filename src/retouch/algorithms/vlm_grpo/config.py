"""`algorithm` of a run of vlm_grpo: its keys, the rules that hold between them and the run, and derived numbers."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Set
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Literal, cast

from pydantic import Field, field_validator

from retouch.algorithms.base import AlgorithmSection
from retouch.algorithms.vlm_grpo import trl_options
from retouch.config.base import Count
from retouch.config.errors import ConfigError
from retouch.config.reads import Reading

if TYPE_CHECKING:
    from retouch.config.run import RunConfig

FAMILIES = ("qwen_image", "qwen_image_edit")
"""Families whose text encoder is a vision-language model."""

_TRL_HAS_IT = (
    "only training of a diffusion model reads it; set TRL's options under algorithm.trl (learning_rate, "
    "num_generations, ...)"
)
_STRIP = "vlm_grpo does not train the diffusion model to read one; leave it out"
_SHARDED = "TRL's trainer shards vlm_grpo; leave it out, and launch with configs/accelerate/zero2.yaml or zero3.yaml"

REMEDIES = {
    "model.train": "vlm_grpo trains the text encoder; leave it out, and set algorithm.trl.use_peft, lora_r, lora_alpha",
    "model.quantize": "vlm_grpo trains the text encoder; leave it out, and set algorithm.trl.use_peft",
    "model.free_text_encoders": "vlm_grpo trains the text encoder; leave it out",
    "model.embeddings": "vlm_grpo trains the text encoder; leave it out",
    "training.compile": "vlm_grpo does not train the diffusion model; leave it out",
    "training.sharding": _SHARDED,
    "training.shard_gradients": _SHARDED,
    "data.reference_strip": _STRIP,
    "evaluation.data.reference_strip": _STRIP,
    "ema": "vlm_grpo keeps no EMA weights; set ema=null",
    "warmup_data": "vlm_grpo has no supervised steps; leave it out",
}
"""Options that only training of a diffusion model reads -> the reason, and what to do; TRL has those of `rollout` and
`optimizer`."""

FEW_STEPS = 20
"""Below this many denoising steps without guidance, a diffusion model must have been distilled for few steps."""


@dataclass(frozen=True)
class VlmDerived:
    """Numbers that follow from the run file on `world_size` processes.

    Attributes:
        global_completions_per_step: completions of one optimizer step: the effective batch size.
        global_completions_per_generation: completions that are generated and scored at once.
        global_prompts_per_generation: distinct prompts among them.
        images_per_generation_per_device: images that a device generates for them.
        optimizer_steps_per_generation: optimizer steps after which generation and optimizer steps coincide: a cycle.
            Checkpoints lie between cycles only, because TRL does not save completions that are still to be trained on.
        forwards_per_image: forwards of the frozen diffusion model; guidance doubles them.
    """

    world_size: int
    global_completions_per_step: int
    global_completions_per_generation: int
    global_prompts_per_generation: int
    images_per_generation_per_device: int
    optimizer_steps_per_generation: int
    generations: int
    forwards_per_image: float

    def as_dict(self) -> dict[str, int | float]:
        return asdict(self)


class VlmGrpoConfig(AlgorithmSection):
    """GRPO of the text encoder (TRL): the vision-language model writes how to edit or what to generate, its completion
    conditions the frozen diffusion transformer, and the image is scored."""

    READS: ClassVar[Set[Reading]] = {"rollouts"}
    trainer: ClassVar[str] = "retouch.algorithms.vlm_grpo.recipe:train"
    trains_text_encoder: ClassVar[bool] = True
    ALIASES: ClassVar[Mapping[str, str]] = {"offload_painter": "offload_diffusion_model"}

    name: Literal["vlm_grpo"] = "vlm_grpo"
    trl: dict[str, Any] = Field(default={})
    """TRL's own options by name: those of its GRPOConfig, and the adapter options of its ModelConfig (use_peft, lora_r,
    lora_alpha, ...). Null takes TRL's default, but of lora_dropout 0. Dr. GRPO is loss_type: dr_grpo with
    scale_rewards: none."""
    conditioning: Literal["response_states", "rewrite_text"] = "response_states"
    """"response_states": the states of prompt and completion, as generated, in one forward; "rewrite_text": the text of
    the completion replaces the prompt, in the family's own chat."""
    negative_encoder: Literal["base", "policy"] | None = None
    """Model that encodes the negative prompt of guidance: "base" is the model without its adapter, whose states are
    cached; "policy" is the model as trained so far. Null is base with an adapter, policy without."""
    images_per_completion: Count = 1
    """Images of each completion, each from its own noise; their rewards are averaged."""
    train_vision_tower: bool = False
    """Train the vision tower in addition to the language model."""
    offload_diffusion_model: bool = False
    """Keep the diffusion model and its autoencoder in CPU memory while the text encoder generates and trains; they are
    moved to the GPU and back for each batch of images."""
    on_overflow: Literal["error", "truncate"] = "error"
    """For a condition of more than model.max_sequence_length tokens: stop the run, or cut the last tokens and count the
    completion in the metric `truncated`."""

    @field_validator("trl")
    @classmethod
    def _are_options_of_trl(cls, value: dict[str, Any]) -> dict[str, Any]:
        given = {name: option for name, option in value.items() if option is not None}
        trl_options.check_names(given)
        return given

    @classmethod
    def completed(cls, run: Mapping[str, Any]) -> dict[str, Any]:
        """Options of TRL that have a key of their own in the run file (`algorithm.trl.max_steps`) are moved there."""
        from retouch.config.presets import section_of

        algorithm = section_of(run, "algorithm")
        given = algorithm.get("trl")
        if not isinstance(given, dict):
            return dict(run)
        rest, moved = trl_options.moved(cast("dict[str, Any]", given), run)
        return {**moved, "algorithm": {**algorithm, "trl": rest}}

    def trained_kind(self, run: RunConfig) -> str:
        return "lora" if self.uses_adapter else "full"

    @property
    def uses_adapter(self) -> bool:
        """Whether LoRA is trained instead of all weights."""
        return bool(self.trl.get("use_peft", False))

    @property
    def encodes_negatives(self) -> Literal["base", "policy"]:
        """`negative_encoder` with its default filled in."""
        return self.negative_encoder or ("base" if self.uses_adapter else "policy")

    def count(self, name: str) -> int:
        """One of TRL's counts, with its default filled in."""
        return self.trl.get(name) or trl_options.DEFAULTS[name]

    def accumulation(self, run: RunConfig, world_size: int) -> int:
        """TRL's gradient_accumulation_steps on so many processes.

        Raises:
            ConfigError: they cannot take steps of optimizer.global_batch_size.
        """
        from retouch.config.derived import require_even_share

        rows, per_device = run.optimizer.global_batch_size, self.count("per_device_train_batch_size")
        if rows is None or self.trl.get("gradient_accumulation_steps"):  # the latter where nothing is trained
            return self.count("gradient_accumulation_steps")
        require_even_share(run, per_device, world_size, "the completions of a step")
        return rows // (per_device * world_size)

    def derive(self, run: RunConfig, world_size: int = 1) -> VlmDerived:
        """Compute the numbers of a run.

        Raises:
            ConfigError: batches that TRL cannot split into groups on this many processes.
        """
        if world_size < 1:
            raise ConfigError(f"--world-size: given {world_size}; it is the number of processes, at least 1")
        per_pass = self.count("per_device_train_batch_size") * world_size
        accumulation, group = self.accumulation(run, world_size), self.count("num_generations")
        generated = self._generation_batch(per_pass, accumulation)
        if generated % group:
            raise ConfigError(
                f"algorithm.trl.num_generations: given {group}, but {generated} completions are generated at once "
                f"(per_device_train_batch_size x processes x steps_per_generation = {per_pass} x "
                f"{generated // per_pass}), which {group} does not divide; set another steps_per_generation, for "
                f"example {math.lcm(per_pass, group) // per_pass}"
            )
        used = generated // per_pass * self.count("num_iterations")
        cycle = math.lcm(used, accumulation) // accumulation
        steps = run.training.max_steps
        for key, given in (("checkpoint_every", run.training.checkpoint_every), ("max_steps", steps)):
            if given % cycle:
                raise ConfigError(
                    f"training.{key}: given {given}, but completions are generated every {cycle} optimizer steps "
                    "(steps_per_generation x num_iterations / gradient_accumulation_steps), and those that are still "
                    f"to be trained on would be lost; set a multiple of {cycle}, such as "
                    f"{max(cycle, given // cycle * cycle)}"
                )
        return VlmDerived(
            world_size=world_size,
            global_completions_per_step=per_pass * accumulation,
            global_completions_per_generation=generated,
            global_prompts_per_generation=generated // group,
            images_per_generation_per_device=generated // world_size * self.images_per_completion,
            optimizer_steps_per_generation=cycle,
            generations=steps * accumulation // used,
            forwards_per_image=float(run.rollout.num_steps * run.model.forwards_of_guidance(run.guidance_scale)),
        )

    def check(self, run: RunConfig, key: str = "") -> None:
        """Reject combinations that cannot work.

        Raises:
            ValueError: the key, the value given, what is expected, and what to set.
        """
        if run.model.family not in FAMILIES:
            raise ValueError(
                f"model.family: given {run.model.family!r}, but vlm_grpo trains a text encoder that is a "
                f"vision-language model; set {' or '.join(FAMILIES)}"
            )
        super().check(run, key)
        trl = self.trl
        if trl.get("generation_batch_size") and trl.get("steps_per_generation"):
            raise ValueError(
                "algorithm.trl: given generation_batch_size and steps_per_generation, each of which follows from the "
                "other; set one"
            )
        self._check_step_size(run)
        if self.count("num_generations") < 2:
            raise ValueError(
                "algorithm.trl.num_generations: given 1, but completions of one prompt are compared with each other; "
                "set 2 or more (8 is usual)"
            )
        if trl.get("beta") and not self.uses_adapter:
            raise ValueError(
                f"algorithm.trl.beta: given {trl['beta']}, but without an adapter TRL loads the reference by the "
                "model's name, which the text encoder of a pipeline does not have; set algorithm.trl.use_peft=true, or "
                "beta=0"
            )
        if trl.get("use_vllm") and trl.get("generation_kwargs"):
            raise ValueError(
                "algorithm.trl.generation_kwargs: given with use_vllm, but evaluations generate without vLLM and would "
                "sample differently; leave it out"
            )
        adapter = sorted(name for name in trl if name.startswith("lora_") or name in ("use_rslora", "use_dora"))
        if adapter and not self.uses_adapter:
            raise ValueError(f"algorithm.trl.{adapter[0]}: given, but use_peft is not; set algorithm.trl.use_peft=true")
        if self.negative_encoder == "base" and not self.uses_adapter:
            raise ValueError(
                "algorithm.negative_encoder: given 'base', but without an adapter training overwrites the base; set "
                "policy, or algorithm.trl.use_peft=true"
            )
        if self.offload_diffusion_model and run.model.offload_vae:
            raise ValueError(
                "model.offload_vae: given true beside algorithm.offload_diffusion_model, which moves the autoencoder "
                "as well; leave it out"
            )

    def unread(self, run: RunConfig, key: str, what: Reading) -> str:
        of_trl = key.startswith(("optimizer.", "rollout."))
        return REMEDIES.get(key) or (_TRL_HAS_IT if of_trl else super().unread(run, key, what))

    def warnings(self, run: RunConfig) -> Iterator[str]:
        """A warning about a number of steps and a guidance scale that the frozen diffusion model was not trained
        for."""
        model: Any = run.model
        steps, scale = run.rollout.num_steps, run.guidance_scale
        if steps < FEW_STEPS and scale <= 1 and model.merged_lora is None and model.path != "tiny":
            yield (
                f"rollout.num_steps: given {steps} with guidance_scale {scale:g} and no model.distillation_lora, for "
                "which the released models are not made: images are blurred; set rollout.num_steps=50 "
                "rollout.guidance_scale=4, or model.distillation_lora (nothing, if a few-step LoRA is merged into "
                "model.path already)"
            )

    def _check_step_size(self, run: RunConfig) -> None:
        """Reject options of TRL that count on each process, beside optimizer.global_batch_size."""
        rows = run.optimizer.global_batch_size
        for name, remedy in (
            ("gradient_accumulation_steps", "leave one of them out"),
            ("steps_per_generation", "set algorithm.trl.generation_batch_size, which counts all, or leave it out"),
        ):
            if rows is not None and (given := self.trl.get(name)):
                raise ValueError(
                    f"algorithm.trl.{name}: given {given}, which counts on each process, beside "
                    f"optimizer.global_batch_size {rows}, which counts on all; {remedy}"
                )

    def _generation_batch(self, per_pass: int, accumulation: int) -> int:
        """Number of completions generated at once over all processes.

        Raises:
            ConfigError: generation_batch_size is not a multiple of `per_pass`.
        """
        given = self.trl.get("generation_batch_size")
        if given is None:
            return per_pass * (self.trl.get("steps_per_generation") or accumulation)
        if given % per_pass:
            raise ConfigError(
                f"algorithm.trl.generation_batch_size: given {given}; set a multiple of {per_pass} "
                "(per_device_train_batch_size x processes)"
            )
        return given
