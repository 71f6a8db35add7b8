"""A run, typed. One YAML file is one `RunConfig`; every key has a default or says that it is required.

Rules of this file: no torch; `extra="forbid"`; every option is read somewhere (tests/config/test_leaves.py); two
quantities never share a name; every batch size says `_per_device` or `global_`.
"""

from __future__ import annotations

from typing import Annotated, Literal, get_args

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    PositiveInt,
    ValidationError,
    ValidationInfo,
    ValidatorFunctionWrapHandler,
    field_validator,
    model_validator,
)

from retouch.config.families import DEFAULT_FAMILY

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


class TrainIpAdapter(Section):
    """Train a style adapter (IP-Adapter, arXiv 2308.06721) on the frozen network: a reference picture becomes tokens
    that every block attends to. Every example needs a reference."""

    kind: Literal["ip_adapter"] = "ip_adapter"
    image_encoder: Text | None = None
    """Hub id or folder of the SigLIP or CLIP that embeds references; "tiny" is the one that comes with the package.
    Null is google/siglip-so400m-patch14-384, for sd_inpaint laion/CLIP-ViT-H-14-laion2B-s32B-b79K."""
    tokens: PositiveInt | None = None
    """Tokens that a reference becomes; null is 128, which ComfyUI reads; 4 for sd_inpaint, which diffusers reads."""
    query_former: bool = False
    """Add the second head of the released Calligrapher to the projection."""
    weights: Literal["all", "no_last_layer", "kv", "kv_lora"] = "all"
    """What of the adapter is trained: everything; all but the last layer of each head of the projection, which is
    nearly half of everything; keys and values alone; low-rank adapters on these."""
    rank: PositiveInt = 32
    """Columns of the factors of kv_lora."""
    alpha: Positive = 64
    """Updates of kv_lora are scaled by alpha / rank."""
    scale: NonNegative | Annotated[list[NonNegative], Field(min_length=1)] = 1.0
    """How much the reference counts: in all blocks, or a factor for each."""
    reference_dropout: Unit = 0.0
    """Share of the rows of supervised steps without their reference. Such a row attends to no token, so that on a
    frozen network it trains nothing; for sd_inpaint its vector is 0, as in the unconditional half of guidance."""
    initial_adapter: Text | None = None
    """File to start from, of any layout (or a folder of a checkpoint); null starts with a new adapter, which changes
    nothing at first."""

    @field_validator("scale", mode="wrap")
    @classmethod
    def _is_one_or_many(cls, value: object, handler: ValidatorFunctionWrapHandler) -> object:
        try:
            return handler(value)
        except ValidationError:  # two lines, one for each kind
            raise ValueError(
                f"given {value!r}; write a factor of 0 or more, like 1.0, or a list with one for each block"
            ) from None


Train = Annotated[TrainFull | TrainLora | TrainIpAdapter, Field(discriminator="kind")]


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


class SdInpaintModel(Section):
    """Stable Diffusion 1.5 inpainting (`UNet2DConditionModel` with 9 input channels, epsilon prediction)."""

    family: Literal["sd_inpaint"] = "sd_inpaint"
    path: str = "stable-diffusion-v1-5/stable-diffusion-inpainting"
    """A hub id or a folder in the diffusers layout; "tiny" is the base that comes with the package."""
    dtype: Literal["fp32", "bf16", "fp16"] = "bf16"
    """Of frozen weights (network under LoRA, VAE, text encoder). Trained weights are fp32."""
    offload_text_encoders: bool = True
    """Keep the text encoder on the CPU and move it to the device only while it encodes."""
    free_text_encoders: bool = False
    """Encode every prompt of the run at the start, then drop the text encoder from memory altogether."""
    train: Train = TrainLora()
    """What of the network is trained, and how it is saved."""


class QwenImageModel(Section):
    """Qwen-Image (`QwenImageTransformer2DModel`, flow model): text to image, and inpainting by blending latents where
    examples have a source and a mask."""

    family: Literal["qwen_image"] = "qwen_image"
    path: str = "Qwen/Qwen-Image"
    """A hub id or a folder in the diffusers layout."""
    dtype: Literal["fp32", "bf16", "fp16"] = "bf16"
    """Of frozen weights (network under LoRA, VAE, text encoder). Trained weights are fp32."""
    max_sequence_length: Annotated[int, Field(ge=1, le=1024)] = 512
    """Tokens a prompt is padded or cut to, the end of its chat template included."""
    offload_text_encoders: bool = True
    """Keep the text encoder on the CPU and move it to the device only while it encodes."""
    free_text_encoders: bool = False
    """Encode every prompt of the run at the start, then drop the text encoder from memory altogether."""
    train: Train = TrainLora()
    """What of the network is trained, and how it is saved."""


Model = Annotated[FluxFillModel | SdInpaintModel | QwenImageModel, Field(discriminator="family")]


# --- data ---


Fit = Literal["crop", "stretch"]
FITS = get_args(Fit)


class DataSection(Section):
    path: str
    """A folder, or a manifest file; required."""
    resolution: PositiveInt | tuple[PositiveInt, PositiveInt] = 512
    """Side of a square in pixels, or [height, width]; multiples of what the family needs (16 for FLUX)."""
    fit: Fit = "crop"
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
    """A JSON list or JSONL file of `{"image_path", "mask_path"?, "prompt", "target_path"?, "reference_path"?,
    "win_path"? and "lose_path"?, ...}`."""

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
    position: Literal["random", "fixed", "sliding"] = "random"
    """"random" draws a new place for each rollout batch from the run's seed; "fixed" starts at the range's start;
    "sliding" moves on through the range as training goes (MixGRPO), and starts over at its end."""
    stride: PositiveInt = 1
    """Steps that a sliding window moves at a time."""
    batches_per_position: PositiveInt = 25
    """Rollout batches that a sliding window stays at a place."""


class RolloutConfig(Section):
    """How images are sampled for the rewards: by a stochastic rule for GRPO and PPO, by the ODE for DPO and NFT."""

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
    """Null takes the model's own (30 for FLUX.1-Fill, 7.5 for SD1.5, whose forwards it doubles above 1)."""
    step_rule: Literal["flow_sde", "dance_sde", "cps", "ddim"] | None = None
    """Stochastic step of GRPO and PPO; null is flow_sde, or ddim for an epsilon model. The papers are named in
    retouch.core.steps."""
    noise_level: Positive | None = None
    """Of flow_sde and cps; null is 0.9 and 0.8. Published: SD3 0.7, FLUX 0.9, Qwen-Image 1.2, cps 0.8."""
    eta: Positive | None = None
    """Of dance_sde and ddim; null is as published, 0.3 and 1.0."""
    window: Window | None = None
    """Null makes every step stochastic; see also algorithm.timestep_fraction."""
    shared_noise: bool = False
    """All images of a group start from one noise (their SDE noise still differs). The ODE steps before a window are
    then the same for all, and computed once a group."""


# --- algorithm ---


class Objective(Section):
    """Where in the picture a loss is taken, and supervised rows without their caption."""

    region: Literal["all", "mask"] = "all"
    """"mask" takes errors, log-probabilities and KL over the repainted latents only."""
    region_dilation: Annotated[int, Field(ge=0)] = 0
    """Latent cells by which the region of "mask" reaches beyond the mask."""
    seam_weight: Positive = 1.0
    """Weight of the cells that region_dilation adds, beside 1 within the mask."""
    caption_dropout: Unit = 0.0
    """Share of supervised rows (SFT, the warm-up) trained on the empty prompt, and without a style adapter's reference,
    which classifier-free guidance steers away from (arXiv 2207.12598: 0.1); for families that have that guidance."""


class SftConfig(Objective):
    """Supervised fine-tuning on examples with a target."""

    name: Literal["sft"] = "sft"
    shifted_times: bool = True
    """Draw training times through the same shift as sampling."""


class RlConfig(Objective):
    """What every algorithm that trains on rewards has."""

    warmup_steps: Annotated[int, Field(ge=0)] = 0
    """Optimizer steps of SFT before the first rollout; they count towards training.max_steps."""
    warmup_shifted_times: bool = True
    """Draw the warm-up's times through the same shift as sampling."""
    inner_epochs: PositiveInt = 1
    """Passes over the rollouts of an epoch."""
    combine: Literal["normalize_then_sum", "sum_then_normalize"] = "normalize_then_sum"
    """Several rewards: advantages of each, weighted, so that the widest does not win; or of their weighted sum."""
    resample_rounds: Annotated[int, Field(ge=0)] = 0
    """Rounds of new groups for those whose rewards are all alike (DAPO's dynamic sampling, arXiv 2503.14476)."""


class AdvantageConfig(RlConfig):
    """From rewards to advantages."""

    advantage_clip: Positive = 5.0
    """Advantages are clipped to plus and minus this."""
    baseline: Literal["group", "batch"] = "group"
    """What an image is compared with: its group (per-prompt statistics) or the whole batch (PPO)."""
    scale: Literal["group", "batch", "none"] = "group"
    """Whose standard deviation divides the advantage; "batch" is Flow-GRPO's global std."""
    skip_zero_std_groups: Annotated[bool | None, Field(validate_default=True)] = None
    """Leave out groups whose rewards are all alike: with a group baseline they carry no signal. Null is true with a
    group baseline and false with that of the batch, where every image counts."""

    @field_validator("skip_zero_std_groups")
    @classmethod
    def _follows_the_baseline(cls, value: bool | None, info: ValidationInfo) -> bool | None:
        return info.data.get("baseline") == "group" if value is None else value


class GrpoConfig(AdvantageConfig):
    """Group relative policy optimisation over denoising steps (Flow-GRPO, arXiv 2505.05470)."""

    name: Literal["grpo"] = "grpo"
    clip_range: Positive = 1e-4
    """c of the ratio clip. Log-probabilities are means over dims, so that 0.2 would never clip."""
    kl_weight: NonNegative = 0.0
    """Of the KL to the policy at the start of RL; 0 keeps no reference."""
    kl_mode: Literal["exact", "published"] = "exact"
    """"published" is Flow-GRPO's KL, smaller by the step size; its weights (.04, .01) are for it."""
    log_prob_mode: Literal["exact", "published"] = "exact"
    """"published" is the log-probability of the CPS code, -mean (x' - mean)² without the std; its clip ranges are for
    it."""
    guard: bool = False
    """GRPO-Guard (arXiv 2510.22319): ratios centred and scaled by the step's std, gradients balanced over the steps.
    Published clip range: 2e-6."""
    timestep_fraction: Annotated[float, Field(gt=0.0, le=1.0)] = 1.0
    """Share of the stochastic steps that are trained, first ones first (the last, low-noise ones are spiky)."""


class PpoConfig(GrpoConfig):
    """PPO: GRPO's loss on advantages of the whole batch; works with group_size 1."""

    name: Literal["ppo"] = "ppo"  # type: ignore[assignment]
    baseline: Literal["group", "batch"] = "batch"
    """What an image is compared with; "batch" is PPO."""
    scale: Literal["group", "batch", "none"] = "batch"
    """Whose standard deviation divides the advantage."""


class DpoConfig(RlConfig):
    """Direct preference optimisation (Diffusion-DPO, arXiv 2311.12908), online or on given pairs."""

    name: Literal["dpo"] = "dpo"
    pairs: Literal["online", "offline"] = "online"
    """"online": the best and the worst rollout of each group; "offline": win_path and lose_path of the manifest."""
    beta: Positive = 2000.0
    """Of the implicit reward, for errors that are means over dims. Published: 2000-5000 (Diffusion-DPO), 100
    (flow_grpo)."""
    rollout_policy: Literal["current", "reference"] = "current"
    """Whose images are compared."""
    reference_refresh_every: Annotated[int, Field(ge=0)] | None = None
    """Optimizer steps after which the reference becomes the policy again; 0 keeps that of the start of RL. Null is 50
    online and 0 offline, as published."""
    timesteps_per_pair: PositiveInt = 1
    """Noised copies of a pair in one step, their times spread over the schedule."""

    @property
    def refresh_every(self) -> int:
        """`reference_refresh_every`, its default filled in."""
        if self.reference_refresh_every is None:
            return 50 if self.pairs == "online" else 0
        return self.reference_refresh_every


class NftConfig(AdvantageConfig):
    """DiffusionNFT (arXiv 2509.16117): positive and negative flow matching on the old policy's images."""

    name: Literal["nft"] = "nft"
    mix: Annotated[float, Field(gt=0.0, le=1.0)] = 0.5
    """Share of the policy in the implicit positive policy; the paper's beta. Published: .1 (OCR), 1 (GenEval)."""
    mode: Literal["normal", "positive_only", "negative_only", "one_only", "binary"] = "normal"
    """Which advantages train: all, those above 0, those below 0, those above 0 as 1 (else 0), or their signs."""
    old_policy: Literal["copy", "frozen", "ramp_half", "ramp_full"] = "ramp_half"
    """How the policy that samples follows the trained one after an epoch: at once, never, or with a decay that grows
    with the optimizer steps, to .5 or to .999. 0, 1 and 2 stand for frozen, ramp_half and ramp_full."""
    kl_weight: NonNegative = 0.01
    """Of the mean squared distance to what the policy at the start of RL predicts; 0 keeps no reference."""
    timesteps_per_image: PositiveInt = 2
    """Noised copies of an image in one step, their times spread over the schedule."""

    @field_validator("old_policy", mode="before")
    @classmethod
    def _aliases(cls, value: object) -> object:
        """Decay types of the Calligrapher guide; its 0 is frozen, where 0 of the paper's code is copy."""
        return {0: "frozen", 1: "ramp_half", 2: "ramp_full"}.get(value, value) if type(value) is int else value


Algorithm = Annotated[SftConfig | GrpoConfig | PpoConfig | DpoConfig | NftConfig, Field(discriminator="name")]


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


class FnReward(RewardEntry):
    """A function or class of your own, as "module:name"."""

    scorer: Literal["fn"] = "fn"  # pyright: ignore[reportIncompatibleVariableOverride]
    fn: str = ""
    """Required where it is scored here or by `auto`: "module:name", found from the working directory, too. A function
    of a list of items that returns a number for each, or a class with `score` and, if it likes, `load`."""
    needs: list[str] | None = None
    """Pictures (mask, source, reference) that an item must have; others fail, typed."""

    @model_validator(mode="after")
    def _names_something(self) -> FnReward:
        if self.url in (None, "auto") and ":" not in self.fn:
            raise ValueError(f"fn: given {self.fn!r}; write module:function, like my_rewards:score")
        unknown = [name for name in self.needs or () if name not in ("mask", "source", "reference")]
        if unknown:
            raise ValueError(f"needs: given {unknown[0]!r}; an item may have mask, source, reference")
        return self


class OpenAIJudgeReward(RewardEntry):
    """A vision-language model behind an OpenAI-compatible endpoint (OpenAI, vLLM, SGLang), in [0, 1]. Its key is taken
    from OPENAI_API_KEY of the environment."""

    scorer: Literal["openai_judge"] = "openai_judge"  # pyright: ignore[reportIncompatibleVariableOverride]
    model: str = ""
    """As the endpoint names it; required where it is scored here or by `auto`."""
    address: str = "https://api.openai.com/v1"
    """Of the endpoint, with /v1."""
    question: str = "How well does this picture show what was asked for? It was asked for: {prompt}"
    """{prompt} stands for the item's prompt."""
    mode: Literal["logprobs", "rubric"] = "logprobs"
    """The expectation over the probabilities of the digits 0 to 5; or JSON with a score and a reason."""
    min_mass: Unit = 0.5
    """Probability that the digits must have together; below it the answer was something else, a failure."""
    concurrency: PositiveInt = 8
    """Questions under way at once."""
    requests_per_minute: Positive | None = None
    """Of the endpoint, shared by all judges of the process; null does not limit them."""
    tokens_per_minute: Positive | None = None
    """The same for tokens."""
    budget_requests: PositiveInt | None = None
    """Limit of each process that scores; what is asked beyond it is a failure, and too many of these stop the run."""
    budget_tokens: PositiveInt | None = None
    """The same for tokens."""
    budget_dollars: Positive | None = None
    """The same for money, by the prices."""
    price_in: NonNegative = 0.0
    """Dollars for a million tokens of questions."""
    price_out: NonNegative = 0.0
    """Dollars for a million tokens of answers."""
    timeout_s: Positive = 60.0
    """Of one question, retries included."""

    @model_validator(mode="after")
    def _names_a_model(self) -> OpenAIJudgeReward:
        if self.url in (None, "auto") and not self.model:
            raise ValueError("model: not set; name the model as the endpoint does")
        if "{prompt}" not in self.question:
            raise ValueError(f"question: given {self.question!r}; it must contain {{prompt}}")
        if self.budget_dollars is not None and not self.price_in + self.price_out:
            raise ValueError("budget_dollars: given without prices; set price_in and price_out")
        return self


class ClipReward(RewardEntry):
    """Cosine between picture and prompt, in [-1, 1]."""

    scorer: Literal["clip"] = "clip"  # pyright: ignore[reportIncompatibleVariableOverride]
    path: str = "openai/clip-vit-large-patch14"
    """A hub id or folder of a `CLIPModel`."""
    processor: str = ""
    """Where its processor lies, if elsewhere."""
    images_per_forward: PositiveInt = 32
    """As it says; changes memory and speed, not results."""


class PickScoreReward(RewardEntry):
    """PickScore v1 (arXiv 2305.01569), about 15 to 25."""

    scorer: Literal["pickscore"] = "pickscore"  # pyright: ignore[reportIncompatibleVariableOverride]
    path: str = "yuvalkirstain/PickScore_v1"
    """A hub id or folder of a `CLIPModel`."""
    processor: str = "laion/CLIP-ViT-H-14-laion2B-s32B-b79K"
    """Where its processor lies, if elsewhere."""
    images_per_forward: PositiveInt = 32
    """As it says; changes memory and speed, not results."""


class SeamReward(RewardEntry):
    """-|gradients just inside the mask's edge - just outside|, in [-1, 0]; meant for the raw generation."""

    scorer: Literal["seam"] = "seam"  # pyright: ignore[reportIncompatibleVariableOverride]
    paste_back: bool = False
    """True judges the hard edge that pasting makes."""


class JpegSizeReward(RewardEntry):
    """-(bits a pixel as JPEG) / 24 (DDPO, arXiv 2305.13301): its optimum is known, for trying things."""

    scorer: Literal["jpeg_size"] = "jpeg_size"  # pyright: ignore[reportIncompatibleVariableOverride]
    quality: Annotated[int, Field(ge=1, le=95)] = 95
    """Of the JPEG."""
    incompressible: bool = False
    """Raise the size instead of lowering it."""


class StyleReward(RewardEntry):
    """Similarity of the hole to the reference by an image encoder, as far as the text can be read."""

    scorer: Literal["style"] = "style"  # pyright: ignore[reportIncompatibleVariableOverride]
    image_encoder: Text = "google/siglip-so400m-patch14-384"
    """Hub id or folder of a SigLIP or CLIP; "tiny" is the one that comes with the package."""
    gate: Unit = 0.5
    """Reading (as of the ocr reward) from which the similarity counts in full, below it in proportion; 0 reads
    nothing."""
    detect: bool = True
    """Of the reading: find the lines in the crop first; false reads the crop as one line."""
    threads: Annotated[int, Field(ge=0)] = 0
    """CPU threads of the recogniser; 0 takes all."""


Reward = Annotated[
    ClipReward
    | FnReward
    | JpegSizeReward
    | OcrReward
    | OpenAIJudgeReward
    | PickScoreReward
    | PreservationReward
    | SeamReward
    | StyleReward,
    Field(discriminator="scorer"),
]


class RewardClientConfig(Section):
    """How the run talks to reward servers."""

    timeout_s: Positive = 60.0
    """Deadline of one request, retries included."""
    outage_wait_s: NonNegative = 300.0
    """How long to wait for servers that stopped answering before the run stops, resumable (exit 3)."""
    max_failure_rate: Unit = 0.2
    """More failed rewards than this share of a rollout batch stop the run, resumable (exit 3)."""
    max_run_failure_rate: Unit = 1.0
    """The same over all rewards of this process so far, once there were 200: what fails a little all the time."""
    batch_size: PositiveInt = 16
    """Images of one request."""
    balance: Literal["least_outstanding", "round_robin"] = "least_outstanding"
    """Which of several servers is asked: the one expected to answer first, by its requests under way and its latency;
    or each in turn."""
    requests_per_server: PositiveInt = 4
    """Under way at once; more wait here, for whichever server is free first."""
    hedge_after_s: Positive | None = None
    """Ask a second server, too, when the first has not answered after so long; null never does."""
    cache: bool = False
    """Keep scores of servers in RUN/rewards.sqlite, so that a resumed run asks no judge twice."""


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

    @field_validator("model", mode="before")
    @classmethod
    def _family_has_a_default(cls, value: object) -> object:
        """A section without `family` is one of the default family."""
        return {"family": DEFAULT_FAMILY, **value} if isinstance(value, dict) else value  # pyright: ignore[reportUnknownVariableType]

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
