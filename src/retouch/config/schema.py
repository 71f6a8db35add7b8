"""A run, typed. One YAML file is one `RunConfig`; every key has a default or says that it is required.

Rules of this file: no torch; `extra="forbid"`; every option is read somewhere (tests/config/test_leaves.py); two
quantities never share a name; every batch size says `_per_device` or `global_`.
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    PositiveInt,
    ValidationError,
    ValidatorFunctionWrapHandler,
    field_validator,
    model_validator,
)

Unit = Annotated[float, Field(ge=0.0, le=1.0)]
NonNegative = Annotated[float, Field(ge=0.0)]
Positive = Annotated[float, Field(gt=0.0)]
Decay = Annotated[float, Field(ge=0.0, lt=1.0)]
Text = Annotated[str, Field(min_length=1)]


class Section(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False, use_attribute_docstrings=True)


# --- model ---


class TrainFull(Section):
    """Train every weight of the network, in fp32 (autocast by `training.mixed_precision`)."""

    kind: Literal["full"] = "full"


class TrainLora(Section):
    """Train low-rank adapters (arXiv 2106.09685) on the frozen network, in fp32."""

    kind: Literal["lora"] = "lora"
    rank: PositiveInt = 32
    """Columns of the two factors that each adapted weight gets."""
    alpha: Positive = 64
    """Updates are scaled by alpha / rank."""
    targets: Annotated[list[Text], Field(min_length=1)] | None = None
    """Module-name suffixes to adapt; null takes those of the family."""


Train = Annotated[TrainFull | TrainLora, Field(discriminator="kind")]


class FluxFillModel(Section):
    """FLUX.1-Fill (`FluxTransformer2DModel`, mask-conditioned flow model)."""

    family: Literal["flux_fill"] = "flux_fill"
    path: str = "black-forest-labs/FLUX.1-Fill-dev"
    """A hub id or a folder in the diffusers layout; "tiny" is the base that comes with the package."""
    dtype: Literal["fp32", "bf16", "fp16"] = "bf16"
    """Of frozen weights (network under LoRA, VAE, text encoders). Trained weights are fp32."""
    max_sequence_length: Annotated[int, Field(ge=1, le=512)] = 512
    """T5 tokens a prompt is padded or cut to."""
    offload_text_encoders: bool = True
    """Keep the text encoders on the CPU and move them to the device only while they encode."""
    free_text_encoders: bool = False
    """Encode every prompt of the run at the start, then drop the text encoders from memory altogether."""
    train: Train = TrainLora()
    """What of the network is trained, and how it is saved."""


Model = FluxFillModel


# --- data ---


class DataSection(Section):
    path: str
    """A folder, or a manifest file; required."""
    resolution: PositiveInt | tuple[PositiveInt, PositiveInt] = 512
    """Side of a square in pixels, or [height, width]; multiples of what the family needs (16 for FLUX)."""
    fit: Literal["crop", "stretch"] = "crop"
    """"crop" scales to cover and cuts a window around the mask; "stretch" ignores the aspect ratio."""
    invert_mask: bool = False
    """For masks that mark what to keep."""
    max_bad_items: Annotated[int, Field(ge=0)] = 10
    """Broken items are skipped with a warning up to this many; one more is an error."""
    limit: PositiveInt | None = None
    """Use only the first so many items."""

    @field_validator("resolution", mode="wrap")
    @classmethod
    def _is_a_size(cls, value: object, handler: ValidatorFunctionWrapHandler) -> object:
        try:
            return handler(value)
        except ValidationError:  # two lines, one for each kind of size
            raise ValueError(
                f"given {value!r}; write the side of a square in pixels, like 512, or [height, width], like [512, 768]"
            ) from None

    @property
    def size(self) -> tuple[int, int]:
        """(height, width) in pixels."""
        return (self.resolution, self.resolution) if isinstance(self.resolution, int) else self.resolution


DEFAULT_TEMPLATE = "The text is '{text}'."
"""Calligrapher's prompt."""


class SelfBenchData(DataSection):
    """Calligrapher's layout: `self_bench.txt` with `{int}-{text}` lines, `test{N}_source/_mask/_ref.png`."""

    format: Literal["self_bench"] = "self_bench"
    list_file: str = "self_bench.txt"
    """File of the folder that lists the items."""
    prompt_template: str = DEFAULT_TEMPLATE
    """Prompt of an item; {text} stands for its text."""
    target: Literal["auto", "source", "none"] = "auto"
    """Ground truth: "auto" takes a full-size `_ref`, else the source (the text is already in it); "none": no item has
    one, for sources whose hole holds nothing to imitate."""

    @field_validator("prompt_template")
    @classmethod
    def _has_text(cls, value: str) -> str:
        if "{text}" not in value:
            raise ValueError(f"given {value!r}; it must contain {{text}}, the place of the text to write")
        return value


class ManifestData(DataSection):
    """A JSON list or JSONL file of `{"image_path", "mask_path", "prompt", "target_path"?, "reference_path"?, ...}`."""

    format: Literal["manifest"] = "manifest"
    image_root: str | None = None
    """Folder that relative paths start from; null is the manifest's own."""


Data = Annotated[SelfBenchData | ManifestData, Field(discriminator="format")]


# --- rollout ---


class Window(Section):
    """The consecutive stochastic steps that are trained; the others follow the ODE (Flow-GRPO-Fast, MixGRPO)."""

    size: PositiveInt = 2
    """Steps in the window."""
    range: tuple[Unit, Unit] = (0.0, 0.5)
    """Share of the run in which the window may lie: [0, 0.5] keeps it in the first half."""
    position: Literal["random", "fixed"] = "random"
    """"random" draws a new place for each rollout batch from the run's seed; "fixed" starts at the range's start."""


class RolloutConfig(Section):
    """How images are sampled for the rewards."""

    group_size: PositiveInt = 8
    """K: images of one example that are compared with each other."""
    global_groups_per_batch: PositiveInt = 8
    """Examples of one rollout batch over all devices; images = this times group_size."""
    batches_per_epoch: PositiveInt = 1
    """Rollout batches before the policy is trained on them."""
    batch_size_per_device: PositiveInt = 8
    """Images sampled in one forward; changes memory and speed, not results."""
    num_steps: PositiveInt = 10
    """T: solver steps."""
    guidance_scale: NonNegative | None = None
    """Null takes the model's own (30 for FLUX.1-Fill)."""
    step_rule: Literal["flow_sde", "dance_sde", "cps"] = "flow_sde"
    """Stochastic step; the paper is named in retouch.core.steps."""
    noise_level: Positive = 0.9
    """Of flow_sde and cps. Published: SD3 0.7, FLUX 0.9, Qwen-Image 1.2, cps 0.8."""
    eta: Positive = 0.3
    """Of dance_sde. Published: 0.3."""
    window: Window | None = None
    """Null makes every step stochastic; see also algorithm.timestep_fraction."""
    shared_noise: bool = False
    """All images of a group start from one noise (their SDE noise still differs)."""

    @model_validator(mode="after")
    def _noise_is_drawn(self) -> RolloutConfig:
        cps = self.step_rule == "cps"
        if cps and self.noise_level > 1:
            raise ValueError(
                f"noise_level: given {self.noise_level}, but for step_rule cps it is a share in (0, 1]; set 0.8, as "
                "published, or another step_rule"
            )
        last = self.num_steps - 1 if cps else self.num_steps
        if last < 1:
            raise ValueError(
                "num_steps: given 1, but step_rule cps draws no noise in the last step; set num_steps to 2 or more, or "
                "another step_rule"
            )
        if self.window:
            low, high = (round(share * self.num_steps) for share in self.window.range)
            held = max(0, min(high, last) - low)
            if held < self.window.size:
                raise ValueError(
                    f"window.size: given {self.window.size}, but window.range {list(self.window.range)} of num_steps "
                    f"{self.num_steps} holds {held} stochastic steps of {self.step_rule}; widen the range or lower the "
                    "size"
                )
        return self


# --- algorithm ---


class SftConfig(Section):
    """Supervised fine-tuning on examples with a target."""

    name: Literal["sft"] = "sft"
    shifted_times: bool = True
    """Draw training times through the same shift as sampling."""
    region: Literal["all", "mask"] = "all"
    """"mask" takes the loss over the repainted latents only."""


class GrpoConfig(Section):
    """Group relative policy optimisation over denoising steps (Flow-GRPO, arXiv 2505.05470)."""

    name: Literal["grpo"] = "grpo"
    warmup_steps: Annotated[int, Field(ge=0)] = 0
    """Optimizer steps of SFT before the first rollout; they count towards training.max_steps."""
    inner_epochs: PositiveInt = 1
    """Passes over the rollouts of an epoch."""
    clip_range: Positive = 1e-4
    """c of the ratio clip. Log-probabilities are means over dims, so that 0.2 would never clip."""
    advantage_clip: Positive = 5.0
    """Advantages are clipped to plus and minus this."""
    baseline: Literal["group", "batch"] = "group"
    """What an image is compared with: its group (per-prompt statistics) or the whole batch (PPO)."""
    scale: Literal["group", "batch", "none"] = "group"
    """Whose standard deviation divides the advantage; "batch" is Flow-GRPO's global std."""
    combine: Literal["normalize_then_sum", "sum_then_normalize"] = "normalize_then_sum"
    """Several rewards: advantages of each, weighted, so that the widest does not win; or of their weighted sum."""
    kl_weight: NonNegative = 0.0
    """Of the KL to the policy at the start of RL; 0 keeps no reference."""
    kl_mode: Literal["exact", "published"] = "exact"
    """"published" is Flow-GRPO's KL, smaller by the step size; its weights (.04, .01) are for it."""
    timestep_fraction: Annotated[float, Field(gt=0.0, le=1.0)] = 1.0
    """Share of the stochastic steps that are trained, first ones first (the last, low-noise ones are spiky)."""
    region: Literal["all", "mask"] = "all"
    """"mask" takes log-probabilities and KL over the repainted latents only."""
    skip_zero_std_groups: bool = True
    """Leave out groups whose rewards are all alike: with a group baseline they carry no signal."""
    warmup_shifted_times: bool = True
    """Draw the warm-up's times through the same shift as sampling."""


class PpoConfig(GrpoConfig):
    """PPO: GRPO's loss on advantages of the whole batch; works with group_size 1."""

    name: Literal["ppo"] = "ppo"  # type: ignore[assignment]
    baseline: Literal["group", "batch"] = "batch"
    """What an image is compared with; "batch" is PPO."""
    scale: Literal["group", "batch", "none"] = "batch"
    """Whose standard deviation divides the advantage."""


Algorithm = Annotated[SftConfig | GrpoConfig | PpoConfig, Field(discriminator="name")]


# --- rewards ---


class RewardEntry(Section):
    """One reward of the table; its key is the scorer's name unless `scorer` says otherwise."""

    scorer: str
    """What scores; several entries may share one with other options."""
    url: Text | Annotated[list[Text], Field(min_length=1)] | None = None
    """Null scores in this process; "auto" starts a server on loopback for the run; else one or more server addresses,
    or the endpoints file that `retouch reward serve` wrote."""
    weight: float = 1.0
    """Of this reward in the combined score."""
    paste_back: bool = True
    """Score the source with only the mask repainted, as a user would use it, not the raw generation."""

    @field_validator("url", mode="wrap")
    @classmethod
    def _is_an_address(cls, value: object, handler: ValidatorFunctionWrapHandler) -> object:
        try:
            return handler(value)
        except ValidationError:  # two lines, one for each kind of url
            raise ValueError(
                f"given {value!r}; set null (score in this process), auto, http://host:port, a list of these, or the "
                "endpoints file that `retouch reward serve` wrote"
            ) from None

    @model_validator(mode="after")
    def _options_are_served_with(self) -> RewardEntry:
        if self.url in (None, "auto"):
            return self
        # by value, not by what was written: a dumped run writes every default
        own = sorted(type(self).model_fields.keys() - RewardEntry.model_fields.keys())
        changed = [name for name in own if getattr(self, name) != type(self).model_fields[name].default]
        if changed:
            raise ValueError(
                f"{changed[0]} is set beside url {self.url!r}, but the options of a reward belong to the server that "
                f"scores it; drop {changed[0]} here and start the server with it"
            )
        return self


class OcrReward(RewardEntry):
    """Reads the mask crop and compares it with the text asked for (rapidocr)."""

    scorer: Literal["ocr"] = "ocr"  # pyright: ignore[reportIncompatibleVariableOverride]
    score: Literal["ned", "confidence"] = "ned"
    """Normalised edit distance, or the recogniser's confidence (which nonsense maximises too)."""
    case_sensitive: bool = True
    """Whether "Moon" and "MOON" differ."""
    crop_margin: Unit = 0.0
    """Widen the mask box by this share of its sides before reading."""
    detect: bool = True
    """Find the lines in the crop first; false reads the crop as one line: faster, for crops as large as their word."""
    threads: Annotated[int, Field(ge=0)] = 0
    """CPU threads of the recogniser; 0 takes all."""


class PreservationReward(RewardEntry):
    """1 - mean |difference| to the source outside the mask, in [0, 1]; meant for the raw generation."""

    scorer: Literal["preservation"] = "preservation"  # pyright: ignore[reportIncompatibleVariableOverride]
    paste_back: bool = False
    """True scores what is 1 by construction."""


Reward = Annotated[OcrReward | PreservationReward, Field(discriminator="scorer")]


class RewardClientConfig(Section):
    """How the run talks to reward servers."""

    timeout_s: Positive = 60.0
    """Deadline of one request, retries included."""
    outage_wait_s: NonNegative = 300.0
    """How long to wait for servers that stopped answering before the run stops, resumable (exit 3)."""
    max_failure_rate: Unit = 0.2
    """More failed rewards than this share of a rollout batch stop the run, resumable (exit 3)."""
    batch_size: PositiveInt = 16
    """Images of one request."""


# --- the rest ---


class OptimizerConfig(Section):
    """AdamW and how its batches are made."""

    lr: Positive = 1e-4
    """Peak learning rate, of RL and of SFT runs."""
    warmup_lr: Positive | None = None
    """Learning rate of the supervised warm-up of RL runs; null is `lr`."""
    betas: tuple[Decay, Decay] = (0.9, 0.999)
    """Decay of the two moments."""
    weight_decay: NonNegative = 1e-4
    """Decoupled, times the learning rate."""
    eps: Positive = 1e-8
    """Added to the root of the second moment."""
    schedule: Literal["constant", "linear", "cosine"] = "constant"
    """After the ramp: constant, or down to 0 at max_steps."""
    ramp_steps: Annotated[int, Field(ge=0)] = 0
    """Optimizer steps of linear growth at the start of each phase."""
    batch_size_per_device: PositiveInt = 1
    """Rows (images) of one forward and backward."""
    gradient_accumulation: PositiveInt = 4
    """Forwards of one optimizer step."""
    steps_per_forward: PositiveInt | None = None
    """Trained denoising steps of a row put into one forward; null is all of them, 1 takes the least memory."""
    max_grad_norm: Positive = 1.0
    """The gradient of a step is scaled down to this norm."""


class EmaConfig(Section):
    """Exponential moving average of the trained weights; decay_t = min((1 + t) / (10 + t), decay)."""

    decay: Annotated[float, Field(gt=0.0, lt=1.0)] = 0.999
    """Largest decay; early updates use less."""
    update_interval: PositiveInt = 1
    """Optimizer steps between updates."""


class TrainingConfig(Section):
    max_steps: PositiveInt = 10000
    """Optimizer steps of the whole run, warm-up included."""
    max_minutes: Positive | None = None
    """Stop, resumable and with exit code 0, at the first step boundary after so many minutes of this process."""
    checkpoint_every: Annotated[int, Field(ge=0)] = 500
    """Optimizer steps; 0 writes only at the end of warm-up and of the run."""
    keep_checkpoints: PositiveInt | None = None
    """Delete older ones beyond so many; those at the end of warm-up and of the run stay. Null keeps all."""
    eval_every: Annotated[int, Field(ge=0)] = 100
    """Optimizer steps; 0 evaluates only at the start, at the end of warm-up and at the end."""
    mixed_precision: Literal["no", "bf16", "fp16"] = "bf16"
    """Autocast of forward and backward; trained weights stay fp32."""
    gradient_checkpointing: bool = True
    """Recompute activations in the backward pass: less memory, one more forward."""


class EvaluationConfig(Section):
    """Fixed seeds, plain ODE, the same for every checkpoint of the run."""

    data: Data | None = None
    """Held-out examples; null falls back to the first training examples, and says so."""
    num_examples: PositiveInt = 64
    """The first so many of the data."""
    images_per_example: PositiveInt = 1
    """Images of each, with seeds of their own."""
    num_steps: PositiveInt | None = None
    """Null is rollout.num_steps."""
    weights: Literal["ema", "raw"] = "raw"
    """Which weights are evaluated, everywhere in the run; "ema" needs the ema section."""
    grid_examples: Annotated[int, Field(ge=0)] = 8
    """Examples shown in the image grids."""


class LoggingConfig(Section):
    dir: str = "runs"
    """Parent of the run directory, which is named after the run."""
    sinks: list[Literal["tensorboard"]] = ["tensorboard"]
    """Besides metrics.jsonl, which is always written."""
    rollout_images_every: Annotated[int, Field(ge=0)] = 0
    """Epochs between grids of sampled groups with their rewards; 0 writes none."""


class RunConfig(Section):
    """One run."""

    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$")]
    """Names the run directory; letters, digits, '.', '_' and '-'."""
    seed: Annotated[int, Field(ge=0, lt=2**31)] = 0
    """Everything random derives from it."""
    resume: str | None = None
    """"auto" continues from the newest complete checkpoint of the run directory (or starts); a path continues from
    that checkpoint; null starts, and refuses a directory that holds a run."""
    model: Model
    data: Data
    """Examples to train on; RL needs no targets."""
    warmup_data: Data | None = None
    """Examples with targets for supervised steps (warm-up, SFT); null is `data`."""
    rollout: RolloutConfig = RolloutConfig()
    algorithm: Algorithm
    rewards: dict[str, Reward] = {}
    """Name -> reward; their weighted sum is what is raised."""
    reward_client: RewardClientConfig = RewardClientConfig()
    optimizer: OptimizerConfig = OptimizerConfig()
    ema: EmaConfig | None = None
    """Null keeps no average."""
    training: TrainingConfig = TrainingConfig()
    evaluation: EvaluationConfig = EvaluationConfig()
    logging: LoggingConfig = LoggingConfig()

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
        from retouch.config.rules import check

        check(self)
        return self
