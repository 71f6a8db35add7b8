"""Section `optimizer` of a run file."""

from __future__ import annotations

import math
from collections.abc import Mapping, Set
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal

from pydantic import BeforeValidator, Field, ValidationInfo

from retouch.config.base import Count, Decay, Names, NonNegative, Positive, Section
from retouch.config.reads import ReadBy, ReadIf, ReadIn, Reading
from retouch.registry import PLUGINS

if TYPE_CHECKING:
    from retouch.config.run import RunConfig

DEFAULT_ACCUMULATION = 4
"""`optimizer.gradient_accumulation` if neither it nor `global_batch_size` is given."""


def _accumulated(optimizer: dict[str, object]) -> int | None:
    """The default of `gradient_accumulation` beside the options before it."""
    return DEFAULT_ACCUMULATION if optimizer.get("global_batch_size") is None else None


def _null_is_the_default(value: object, info: ValidationInfo) -> object:
    return _accumulated(info.data) if value is None else value


def _has_a_warm_up(own: object, run: RunConfig) -> bool:
    """A 0 that is written is meant, and a run file keeps its rate for another time."""
    return bool(getattr(run.algorithm, "sft_steps", 1)) or "sft_steps" in run.algorithm.model_fields_set


ADAMW = ReadIf(
    "without `factory`",
    lambda own: own.factory is None,
    "which AdamW reads, but optimizer.factory is {own.factory!r}; leave {name} out, and set "
    "optimizer.options={{...}} to the options of that class",
)


class OptimizerConfig(Section):
    """AdamW, or another optimizer, and its batches."""

    FREE_IN_EPOCH: ClassVar[Set[str]] = {
        "lr", "sft_lr", "betas", "weight_decay", "eps", "schedule", "ramp_steps", "max_grad_norm",
        "steps_per_forward", "on_out_of_memory",
        "batch_size_per_device", "gradient_accumulation",  # `_same_rows` has their product
    }  # fmt: skip
    ALIASES: ClassVar[Mapping[str, str]] = {"warmup_lr": "sft_lr", "moments": "state"}
    READ_BY: ClassVar[Reading | None] = "diffusion"
    READ_BY_ALL: ClassVar[Set[str]] = {"global_batch_size"}
    VALUE_ALIASES: ClassVar[Mapping[str, Mapping[str, str]]] = {"state": {"int8": "8bit"}}

    lr: Positive = 1e-4
    """Peak learning rate, of RL and of SFT runs."""
    sft_lr: Annotated[
        Positive | None,
        ReadBy("warm_up"),
        ReadIn(
            "with `algorithm.sft_steps` above 0",
            _has_a_warm_up,
            "but algorithm.sft_steps is 0: there is no supervised warm-up; set sft_steps, or leave it out",
            warns=True,
        ),
    ] = None
    """Learning rate of the supervised warm-up (SFT) of RL runs; null is `lr`."""
    factory: Annotated[str | None, Names("code", own=("torch.optim",), variables=(PLUGINS,))] = None
    """Another optimizer than AdamW, as "module:Class", like torch.optim:Muon or prodigyopt:Prodigy: a subclass of
    torch.optim.Optimizer, called with the trained weights, `lr` and `options`. `lr`, `sft_lr`, `schedule` and
    `ramp_steps` set the rate of every step, and checkpoints have its state: a run resumes bitwise if the class restores
    all of it. A module that is not installed is searched for in the working directory. Memory is counted as AdamW's."""
    options: Annotated[
        dict[str, Any],
        ReadIf(
            "with `factory`",
            lambda own: own.factory is not None,
            "but optimizer.factory is not set, and AdamW has keys of its own; set betas, weight_decay or eps",
        ),
    ] = Field(default={})
    """Keyword arguments of `factory` by name, except lr."""
    betas: Annotated[tuple[Decay, Decay], ReadBy("diffusion"), ADAMW] = (0.9, 0.999)
    """Decay rates of the two moments."""
    weight_decay: Annotated[NonNegative, ReadBy("diffusion"), ADAMW] = 1e-4
    """Decoupled weight decay; it is multiplied by the learning rate."""
    eps: Annotated[Positive, ReadBy("diffusion"), ADAMW] = 1e-8
    """Added to the root of the second moment."""
    schedule: Literal["constant", "linear", "cosine"] = "constant"
    """Learning rate after its warm-up: constant, or decaying to 0 at max_steps."""
    ramp_steps: Annotated[int, Field(ge=0)] = 0
    """Optimizer steps of linear learning-rate warm-up at the start of each phase."""
    batch_size_per_device: Count = 1
    """Rows (images) of one forward and backward."""
    global_batch_size: Count | None = None
    """Images of one optimizer step over all processes (DPO: pairs; reward gradients: trained steps of images; vlm_grpo:
    completions). The file is then the same run on any number of processes: an epoch of rollouts is divided into as many
    steps as it has batches of this size, with the same images in each. Null takes batch_size_per_device x
    gradient_accumulation x processes."""
    gradient_accumulation: Annotated[Count | None, BeforeValidator(_null_is_the_default)] = Field(
        default_factory=_accumulated
    )
    """Micro-batches of one optimizer step on each process: more processes take fewer and larger steps. Null is 4, and
    none beside global_batch_size."""
    on_out_of_memory: Literal["halve", "stop"] = "halve"
    """Action when an optimizer step runs out of device memory. "halve" repeats it, and all later steps, with half the
    rows per forward: bitwise identical to a file with batch_size_per_device halved, a step of as many rows and as many
    steps per forward. "stop" ends the run; on several processes both do."""
    state: Annotated[Literal["fp32", "8bit"], ReadBy("diffusion"), ADAMW] = "fp32"
    """Precision of AdamW's two moments: "8bit" (bitsandbytes, arXiv 2110.02861) takes 2 bytes for a trained weight
    instead of 8; its steps are not exactly the same. For full weights: the moments of a LoRA are small."""
    steps_per_forward: Annotated[Count | Literal["auto"] | None, ReadBy("parts")] = "auto"
    """Trained denoising steps of a sample (NFT, DPO, KTO: its noised copies) in one forward. "auto" takes as many as
    make a forward of at most 8 rows of the network on a CPU and 24 on an accelerator, and of no more than a forward of
    sampling has; batch_size_per_device and guidance multiply them, and `retouch check` prints the result. Null is all
    of them, 1 takes the least memory. The gradients are equal up to rounding."""
    max_grad_norm: Positive = 1.0
    """Maximum gradient norm; a larger gradient is scaled down to it."""

    def check(self, run: RunConfig, key: str = "") -> None:
        if self.gradient_accumulation is not None and self.global_batch_size is not None:
            raise ValueError(
                f"{key}.gradient_accumulation: given {self.gradient_accumulation} beside {key}.global_batch_size "
                f"{self.global_batch_size}, which already sets the rows of a step; leave one of them out"
            )
        if self.factory is not None and run.training.sharding != "none":
            raise ValueError(
                f"{key}.factory: given {self.factory!r} beside training.sharding={run.training.sharding}, which shards "
                "the state of AdamW alone; leave factory out, or set training.sharding=none"
            )
        if self.factory is not None and not all(self.factory.partition(":")):
            raise ValueError(f"{key}.factory: given {self.factory!r}; expected a class; set it to 'module:Class'")
        if "lr" in self.options:
            raise ValueError(f"{key}.options: given lr, which is {key}.lr; leave it out of options")
        if self.state == "8bit" and run.training.sharding != "none":
            raise ValueError(
                f"{key}.state: given '8bit' beside training.sharding={run.training.sharding}, which shards them "
                "already, in fp32; set state=fp32"
            )

    def rows_per_step(self, world_size: int) -> int:
        """Rows of an optimizer step over all of so many processes at most."""
        accumulated = self.batch_size_per_device * (self.gradient_accumulation or DEFAULT_ACCUMULATION)
        return self.global_batch_size or accumulated * world_size

    def rows_per_device(self, world_size: int) -> int:
        """Those of one process at most."""
        return math.ceil(self.rows_per_step(world_size) / world_size)

    @property
    def step_size_key(self) -> str:
        """The key that sets the rows of a step, for messages."""
        return f"optimizer.{'global_batch_size' if self.global_batch_size else 'gradient_accumulation'}"
