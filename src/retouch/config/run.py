"""A run, typed. One YAML file is one `RunConfig`; every key has a default or is required.

Rules of this file: no torch; `extra="forbid"`; every option is read somewhere (tests/config/test_leaves.py); two
quantities never share a name; the name of every batch size has `_per_device` or `global_`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Set
from typing import Annotated, ClassVar, Literal, cast

from pydantic import Field, field_validator, model_validator

from retouch.algorithms import ALGORITHMS
from retouch.algorithms.base import AlgorithmSection
from retouch.config.base import (
    Count,
    Decay,
    Name,
    Names,
    NonNegative,
    Positive,
    Section,
    SolverSteps,
    Text,
    Unit,
)
from retouch.config.errors import CUSTOM, nearest
from retouch.config.presets import Preset, fill_in
from retouch.core.rules import STEP_RULES
from retouch.data.formats import Data
from retouch.families import DEFAULT_FAMILY
from retouch.families.base import Model
from retouch.registry import PLUGINS, Chosen
from retouch.rewards.base import Reward
from retouch.rewards.client.config import RewardClientConfig
from retouch.rewards.judge import JudgeConfig, with_judge


class Window(Section):
    """The consecutive stochastic steps that are trained; the others follow the ODE (Flow-GRPO-Fast, MixGRPO)."""

    size: Count = 2
    """Steps in the window."""
    range: tuple[Unit, Unit] = (0.0, 0.5)
    """Share of the run in which the window may lie: [0, 0.5] keeps it in the first half."""
    position: Literal["random", "fixed", "sliding"] = "random"
    """"random" samples a new position for each rollout batch from the run's seed; "fixed" keeps the start of the range;
    "sliding" moves through the range during training (MixGRPO), and starts over at its end. Every window has `size`
    steps; in MixGRPO's code the last ones are cut at the end of the range."""
    stride: Count = 1
    """Steps that a sliding window moves at a time."""
    batches_per_position: Count = 25
    """Rollout batches that a sliding window stays at a position."""


Solver = Literal["first_order", "dpm2"]


class RolloutConfig(Section):
    """How images are sampled for the rewards: by a stochastic rule for GRPO and PPO, by the ODE for DPO and NFT."""

    FREE_IN_EPOCH: ClassVar[Set[str]] = {"batch_size_per_device", "preset"}

    preset: Preset | None = None
    """Defaults of grpo, ppo and nft for keys that the run file leaves out, here and under algorithm. "reference" has
    the published values; "fast" takes a fraction of the forwards, by lossy settings (docs/speed.md). Written keys win;
    `retouch check` prints the result. Null fills in nothing."""
    group_size: Count = 8
    """K: samples of one example; a group baseline compares them."""
    global_groups_per_batch: Count = 8
    """Examples of one rollout batch over all devices; images = this times group_size."""
    batches_per_epoch: Count = 1
    """Rollout batches of an epoch; the policy is then trained on them."""
    batch_size_per_device: Count = 8
    """Images sampled in one forward; changes memory and speed, not results."""
    num_steps: SolverSteps = 10
    """T: solver steps."""
    guidance_scale: NonNegative | None = None
    """Guidance scale; null takes the model's default (30 for FLUX.1-Fill; 7.5 for SD1.5, where above 1 it doubles the
    forwards)."""
    step_rule: str | None = None
    """Stochastic step of GRPO and PPO: flow_sde, dance_sde or cps for a flow model, ddim for an epsilon model, or one
    of a plug-in. Null is flow_sde or ddim. retouch.core.steps names the papers."""
    noise_level: Positive | None = None
    """Noise of flow_sde and cps; null is 0.9 and 0.8. Published: SD3 0.7, FLUX 0.9, Qwen-Image 1.2, cps 0.8."""
    eta: Positive | None = None
    """Noise of dance_sde and ddim; null is the published value, 0.3 and 1.0."""
    solver: Solver = "first_order"
    """Solver of the deterministic steps: those outside of a window, or all steps of ODE sampling. "first_order" is
    Euler or DDIM; "dpm2" (flow models only) is DPM-Solver++(2M), mostly nearer to the ODE's solution in as many steps.
    Evaluation, `retouch sample` and `eval` keep the first order."""
    window: Window | None = None
    """Window of stochastic steps; null makes every step stochastic. See also algorithm.timestep_fraction."""
    shared_noise: bool = False
    """All images of a group start from one noise (their SDE noise still differs). The ODE steps before a window are
    then the same for all, and computed once a group."""

    @field_validator("step_rule")
    @classmethod
    def _is_registered(cls, value: str | None) -> str | None:
        if value is not None and value not in STEP_RULES:
            hint = nearest(value, STEP_RULES)
            raise ValueError(f"given {value!r}; {hint}{CUSTOM if hint.startswith('known') else ''}")
        return value


DEFAULT_ACCUMULATION = 4
"""`optimizer.gradient_accumulation` if neither it nor `global_batch_size` is given."""


def _accumulated(optimizer: dict[str, object]) -> int | None:
    """The default of `gradient_accumulation` beside the options before it."""
    return DEFAULT_ACCUMULATION if optimizer.get("global_batch_size") is None else None


class OptimizerConfig(Section):
    """AdamW and its batches."""

    FREE_IN_EPOCH: ClassVar[Set[str]] = {
        "lr", "sft_lr", "betas", "weight_decay", "eps", "schedule", "ramp_steps", "max_grad_norm", "steps_per_forward",
        "batch_size_per_device", "gradient_accumulation", "on_out_of_memory",  # `_same_rows` has their product
    }  # fmt: skip
    ALIASES: ClassVar[Mapping[str, str]] = {"warmup_lr": "sft_lr", "moments": "state"}
    VALUE_ALIASES: ClassVar[Mapping[str, Mapping[str, str]]] = {"state": {"int8": "8bit"}}

    lr: Positive = 1e-4
    """Peak learning rate, of RL and of SFT runs."""
    sft_lr: Positive | None = None
    """Learning rate of the supervised warm-up (SFT) of RL runs; null is `lr`."""
    betas: tuple[Decay, Decay] = (0.9, 0.999)
    """Decay rates of the two moments."""
    weight_decay: NonNegative = 1e-4
    """Decoupled weight decay; it is multiplied by the learning rate."""
    eps: Positive = 1e-8
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
    gradient_accumulation: Count | None = Field(default_factory=_accumulated)
    """Micro-batches of one optimizer step on each process: more processes take fewer and larger steps. 4 unless
    global_batch_size is given."""
    on_out_of_memory: Literal["halve", "stop"] = "halve"
    """Action when an optimizer step runs out of device memory. "halve" repeats it, and all later steps, with half the
    rows per forward: bitwise identical to a file with batch_size_per_device halved, a step of as many rows and as many
    steps per forward. "stop" ends the run; on several processes both do."""
    state: Literal["fp32", "8bit"] = "fp32"
    """Precision of AdamW's two moments: "8bit" (bitsandbytes, arXiv 2110.02861) takes 2 bytes for a trained weight
    instead of 8; its steps are not exactly the same. For full weights: the moments of a LoRA are small."""
    steps_per_forward: Count | Literal["auto"] | None = "auto"
    """Trained denoising steps of a sample (NFT, DPO, KTO: its noised copies) in one forward. "auto" takes as many as
    make a forward of at most 8 rows of the network on a CPU and 24 on an accelerator, and of no more than a forward of
    sampling has; batch_size_per_device and guidance multiply them, and `retouch check` prints the result. Null is all
    of them, 1 takes the least memory. The gradients are equal up to rounding."""
    max_grad_norm: Positive = 1.0
    """Maximum gradient norm; a larger gradient is scaled down to it."""

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


class EmaConfig(Section):
    """Exponential moving average of the trained weights; decay_t = min((1 + t) / (10 + t), decay). t counts the
    optimizer steps that changed the weights, from 1 at the first, as in Flow-GRPO (which counts from 0), and not the
    updates of the average, as in diffusers (EMAModel): with an `update_interval` of 8 the decay rises 8 times as
    fast."""

    decay: Annotated[float, Field(gt=0.0, lt=1.0)] = 0.999
    """Maximum decay; early updates use less."""
    update_interval: Count = 1
    """Optimizer steps between updates."""


class TrainingConfig(Section):
    FREE_IN_EPOCH: ClassVar[Set[str]] = {
        "max_steps", "max_minutes", "checkpoint_every", "keep_checkpoints", "eval_every", "stop_on_plateau",
        "gradient_checkpointing", "compile", "deterministic", "sharding", "shard_gradients",
    }  # fmt: skip

    max_steps: Annotated[int, Field(ge=1, le=1_000_000_000)] = 10000
    """Optimizer steps of the whole run, warm-up included."""
    max_minutes: Positive | None = None
    """Minutes after which this process stops at the next step boundary, resumable and with exit code 0; null: never."""
    checkpoint_every: Annotated[int, Field(ge=0)] = 500
    """Optimizer steps between checkpoints; 0 writes them only at the end of warm-up and of the run."""
    keep_checkpoints: Count | None = None
    """Number of checkpoints to keep; older ones are deleted, except those at the end of warm-up and of the run. Null
    keeps all."""
    eval_every: Annotated[int, Field(ge=0)] = 100
    """Optimizer steps between evaluations; 0 evaluates only at the start, at the end of warm-up and at the end."""
    stop_on_plateau: bool | Name = False
    """Stop, resumable and with exit code 0, when the evaluations no longer rise: their last third adds less than a
    tenth of the gain since the start of RL, with confidence (docs/expect.md). True reads the weighted sum of the
    rewards of role train, a name the values of that reward."""
    mixed_precision: Literal["no", "bf16", "fp16"] = "bf16"
    """Autocast of forward and backward; trained weights stay fp32. "no" computes in model.dtype: a bf16 base and its
    LoRA then compute in bf16 throughout, as diffusers' pipelines do; autocast has norms and sums in fp32."""
    gradient_checkpointing: bool = True
    """Recompute activations in the backward pass: less memory, one more forward."""
    compile: bool = False
    """Compile the repeated blocks of the network (torch.compile), in rollout and training. Needs a C++ compiler,
    on a GPU Triton; the first step of each shape takes minutes."""
    deterministic: bool = False
    """On a GPU, use only deterministic kernels, at some cost in speed: runs with the same seed, and resumed runs, are
    then bitwise identical, as they always are on a CPU; without it they are equal up to rounding. If torch has no
    deterministic kernel of an operation, the run stops with an error that names it."""
    sharding: Literal["none", "fsdp2", "zero2", "zero3"] = "none"
    """On several processes: "none" gives each the whole network (DDP); "fsdp2" gives each 1/N of every weight,
    gradient, moment and snapshot, and gathers weights block by block in each forward and backward; "zero3" is the same
    by DeepSpeed, layer by layer; "zero2", by DeepSpeed, shards only gradients and moments. The results are the same."""
    shard_gradients: bool = True
    """With sharding, exchange gradients after every backward and keep only a shard of them (zero3 always does); false
    keeps them whole over the accumulation (4 bytes for each trained weight on every device) and exchanges them once."""


class EvaluationConfig(Section):
    """Fixed seeds, plain ODE, the same for every checkpoint of the run."""

    data: Data | None = None
    """Held-out examples; null falls back to the first training examples, with a warning."""
    allow_overlap: bool = False
    """Evaluate although data or warmup_data holds some of the same images (by the bytes of the files); false rejects
    the run."""
    num_examples: Count = 64
    """Number of examples, from the start of the data."""
    images_per_example: Count = 1
    """Images of each example, each with its own seed."""
    num_steps: SolverSteps | None = None
    """Solver steps; null is rollout.num_steps."""
    weights: Literal["ema", "raw"] | None = None
    """Weights to evaluate, in the run and by `retouch eval` and `sample`: the EMA weights, or the raw trained ones.
    Null takes the EMA weights if the run file has an ema section."""
    on_gold_fall: Literal["warn", "stop"] = "warn"
    """Action when rewards of role train rise while one of role gold falls: a warning in the log, or the end of the run,
    resumable (exit 3)."""
    grid_examples: Annotated[int, Field(ge=0)] = 8
    """Examples shown in the image grids."""


class LoggingConfig(Section):
    dir: str = "runs"
    """Parent of the run directory, which is named after the run."""
    sinks: list[Literal["tensorboard", "wandb", "trackio"]] = Field(default=["tensorboard"])
    """Trackers that receive the same numbers and grids as metrics.jsonl, which is always written. wandb and trackio are
    extras of the package and also receive the run file; their own environment variables set the destination
    (WANDB_MODE, WANDB_ENTITY, TRACKIO_SPACE_ID). A resumed run continues the same run there; steps that it repeats
    after its checkpoint appear twice. If a tracker is slow or offline, training continues."""
    project: Name = "retouch"
    """Project of the run in wandb and trackio."""
    group: Name | None = None
    """Group of the run in wandb and trackio; null is no group."""
    rollout_images_every: Annotated[int, Field(ge=0)] = 0
    """Epochs between grids of sampled groups with their rewards; 0 writes none."""


def with_family(model: object) -> object:
    """A section `model`; without `family` it is one of the default family."""
    return {"family": DEFAULT_FAMILY, **model} if isinstance(model, dict) else model  # pyright: ignore[reportUnknownVariableType]


class RunConfig(Section):
    """One run."""

    FREE_IN_EPOCH: ClassVar[Set[str]] = {
        "name", "plugins", "resume", "warmup_data", "judge", "reward_client", "ema", "evaluation", "logging",
    }  # fmt: skip

    name: Name
    """Name of the run directory; letters, digits, '.', '_' and '-'."""
    seed: Annotated[int, Field(ge=0, lt=2**31)] = 0
    """Seed of every random number of the run."""
    plugins: Annotated[list[Text], Names("code", variables=(PLUGINS,))] = Field(default=[])
    """Modules that register components of other packages (docs/extending.md), imported before the run file is
    validated; those that are not installed are searched for in the working directory. Packages with entry points need
    none."""
    resume: str | None = None
    """"auto" continues from the newest complete checkpoint of the run directory; without one it begins again, from the
    checkpoint of another run that the run was begun from, if there is one. A path continues from that checkpoint; null
    starts, and rejects a directory that holds a run."""
    model: Model
    data: Data
    """Examples to train on; RL needs no targets."""
    warmup_data: Data | None = None
    """Examples with targets for supervised steps (warm-up, SFT); null is `data`."""
    rollout: RolloutConfig = RolloutConfig()
    algorithm: Annotated[AlgorithmSection, Chosen(ALGORITHMS, "name")]
    rewards: dict[str, Reward] = Field(default={})
    """Name -> reward; the objective is their weighted sum."""
    judge: JudgeConfig | None = None
    """Options of all rewards that ask a judge, and one budget for them; null: each entry has its own."""
    reward_client: RewardClientConfig = RewardClientConfig()
    optimizer: OptimizerConfig = OptimizerConfig()
    ema: EmaConfig | None = None
    """EMA of the trained weights; null keeps none."""
    training: TrainingConfig = TrainingConfig()
    evaluation: EvaluationConfig = EvaluationConfig()
    logging: LoggingConfig = LoggingConfig()

    @property
    def guidance_scale(self) -> float:
        """The scale of guidance of its samples: that of rollouts, else of the model, which may be distilled."""
        given = self.rollout.guidance_scale
        return self.model.guidance_scale if given is None else given

    @model_validator(mode="before")
    @classmethod
    def _algorithm_completes(cls, value: object) -> object:
        """A preset and the section `judge` fill in keys; an algorithm reads some of its own options as keys of other
        sections."""
        return with_judge(fill_in(cast("Mapping[str, object]", value))) if isinstance(value, Mapping) else value

    _family_has_a_default = field_validator("model", mode="before")(with_family)

    @field_validator("rewards", mode="before")
    @classmethod
    def _name_is_scorer(cls, value: object) -> object:
        """`rewards: {ocr: {weight: 1}}` means `scorer: ocr`."""
        if not isinstance(value, dict):
            return value
        table: dict[str, object] = {}
        for name, entry in value.items():  # pyright: ignore[reportUnknownVariableType]
            entry = {} if entry is None else entry  # pyright: ignore[reportUnknownVariableType]
            table[str(name)] = {"scorer": name, **entry} if isinstance(entry, dict) else entry  # pyright: ignore[reportUnknownArgumentType]
        return table

    @model_validator(mode="after")
    def _combination(self) -> RunConfig:
        from retouch.config.check import check

        check(self)
        return self
