"""`rewards` and `reward_client`: one class a scorer, and how servers are asked."""

from __future__ import annotations

import re
from typing import Annotated, Literal

from pydantic import Field, PositiveInt, ValidationError, ValidatorFunctionWrapHandler, field_validator, model_validator

from retouch.config.base import (
    NonNegative,
    Positive,
    Section,
    Text,
    Unit,
)
from retouch.registry import Chosen
from retouch.rewards import REWARDS

_ARITHMETIC = "this scorer has no network and runs on the CPU; leave device out"


class RewardEntry(Section):
    """One reward of the table; its key is the scorer's name unless `scorer` says otherwise."""

    scorer: str
    """What scores; several entries may share one with other options."""
    url: Text | Annotated[list[Text], Field(min_length=1)] | None = None
    """Null scores in this process; "auto" starts a server on loopback for the run, one a machine; else one or more
    server addresses, or the endpoints file that `retouch reward serve` wrote."""
    device: Text | Annotated[list[Text], Field(min_length=1)] = "cpu"
    """Device of the scorer's network. "cuda" is the GPU that this process trains on, "auto" that GPU or, without one,
    the CPU, "cuda:2" the third GPU. With url "auto" the server has one instance for each device: "cuda" is every GPU of
    the machine that the run trains on, and a list names several, like [cuda:2, cuda:3]."""
    weight: float = 1.0
    """Of this reward in the combined score."""
    role: Literal["train", "gold"] = "train"
    """"gold" is scored in evaluations alone and never trained on: it shows whether a run
    learns, or only pleases its other rewards."""
    paste_back: bool = True
    """Score the source with only the mask repainted, as a user would use it, not the raw generation."""
    crop: Literal["none", "mask_box"] = "none"
    """"mask_box" shows the scorer only the box around the mask, of image, source and mask."""
    box_margin: Unit = 0.0
    """Widens the box of `crop` by this share of its sides."""
    box_min_side: PositiveInt = 224
    """Pixels that the sides of the box of `crop` have at least, as far as the picture has them."""
    gated_by: Text | None = None
    """Name of another reward, as far as which this one counts: its value times that of the gate, held to [0, 1]. A
    failure of the gate is one of this reward."""
    gate_threshold: float | None = None
    """Instead of the product: this reward counts in full from this value of its gate on, and not at all below."""
    gate_floor: float = 0.0
    """What the value falls to where the gate is shut; set it for rewards that are not above 0."""
    transform: Literal["none", "win_rate"] = "none"
    """"win_rate" trains on the share of the group's other images that an image beats, ties half, not on the value."""
    noise: NonNegative = 0.0
    """How far two scores of the same picture differ (`retouch reward probe` measures it): a group whose standard
    deviation is not above it has no advantage in this reward, and for win_rate values as near as this are a tie."""

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

    @field_validator("device", mode="wrap")
    @classmethod
    def _is_a_device(cls, value: object, handler: ValidatorFunctionWrapHandler) -> object:
        forms = r"cpu|auto|cuda(:\d+)?" if isinstance(value, str) else r"cpu|cuda:\d+"
        try:
            checked: str | list[str] = handler(value)
        except ValidationError:  # two lines, one for each kind of device
            checked = []
        names = [checked] if isinstance(checked, str) else checked
        if not names or len({*names}) < len(names) or not all(re.fullmatch(forms, one) for one in names):
            raise ValueError(
                f"given {value!r}; set cpu, cuda, cuda:N or auto, or with url: auto a list of different devices like "
                "[cuda:2, cuda:3]"
            )
        return checked

    @model_validator(mode="after")
    def _device_applies(self) -> RewardEntry:
        if self.device == "cpu":
            return self
        if self.url not in (None, "auto"):
            raise ValueError(
                f"device: given {self.device!r} beside url {self.url!r}, but a running server keeps the devices it was "
                f"started on; drop device here and start it with `retouch reward serve {self.scorer} --devices 0`, or "
                "set url: auto"
            )
        if (reason := self.runs_on_cpu()) is not None:
            raise ValueError(f"device: given {self.device!r}, but {reason}")
        if self.url is None and not isinstance(self.device, str):
            raise ValueError(
                f"device: given {self.device!r}, but a scorer in this process computes on one device; set url: auto "
                "for a server with an instance on each, or give one device"
            )
        return self

    def runs_on_cpu(self) -> str | None:
        """Why the scorer ignores `device`, and the remedy; None if it computes on it."""
        return None

    @model_validator(mode="after")
    def _options_are_served_with(self) -> RewardEntry:
        if self.url in (None, "auto"):
            return self
        # by value, not by what was written: a dumped run writes every default
        changed = [n for n in sorted(self.own_options()) if getattr(self, n) != type(self).model_fields[n].default]
        if changed:
            raise ValueError(
                f"{changed[0]} is set beside url {self.url!r}, but the options of a reward belong to the server that "
                f"scores it; drop {changed[0]} here and start the server with it"
            )
        return self

    @classmethod
    def own_options(cls) -> list[str]:
        """Names of the options that are the scorer's, not of every entry."""
        return [name for name in cls.model_fields if name not in RewardEntry.model_fields]


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
    engine: Literal["rapidocr", "paddleocr"] = "rapidocr"
    """What reads. PaddleOCR 3 or newer is installed by hand, and downloads its models."""

    def runs_on_cpu(self) -> str | None:
        if self.engine == "paddleocr":
            return None
        return "rapidocr reads on the CPU; leave device out, or set engine: paddleocr"


class PreservationReward(RewardEntry):
    """1 - mean |difference| to the source outside the mask, in [0, 1]; meant for the raw generation."""

    scorer: Literal["preservation"] = "preservation"  # pyright: ignore[reportIncompatibleVariableOverride]
    paste_back: bool = False
    """True scores what is 1 by construction."""

    def runs_on_cpu(self) -> str | None:
        return _ARITHMETIC


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


class JudgeEntry(RewardEntry):
    """What rewards of a judge behind an OpenAI-compatible endpoint share."""

    model: str = ""
    """As the endpoint names it; required where it is scored here or by `url: auto`. "auto" is gpt-4o-2024-11-20 at
    OpenAI, and elsewhere the only model that the endpoint lists."""
    address: str = "https://api.openai.com/v1"
    """Of the endpoint, with /v1. OpenAI's needs OPENAI_API_KEY in the environment."""
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
    timeout_s: Positive = 180.0
    """Deadline of one question in seconds, retries included: `concurrency` times what a busy judge takes for one, which
    is up to 20 s for a local one."""

    def runs_on_cpu(self) -> str | None:
        return "the judge's model runs at the endpoint of `address`; leave device out"

    @model_validator(mode="after")
    def _names_a_model(self) -> JudgeEntry:
        if self.url in (None, "auto") and not self.model:
            raise ValueError("model: not set; name the model as the endpoint does")
        if self.budget_dollars is not None and not self.price_in + self.price_out:
            raise ValueError("budget_dollars: given without prices; set price_in and price_out")
        return self


class OpenAIJudgeReward(JudgeEntry):
    """A vision-language model behind an OpenAI-compatible endpoint (OpenAI, vLLM, SGLang), in [0, 1]. Its key is taken
    from OPENAI_API_KEY of the environment."""

    scorer: Literal["openai_judge"] = "openai_judge"  # pyright: ignore[reportIncompatibleVariableOverride]
    question: str = "How well does this picture show what was asked for? It was asked for: {prompt}"
    """{prompt} stands for the item's prompt."""
    mode: Literal["logprobs", "rubric"] = "logprobs"
    """The expectation over the probabilities of the digits 0 to 5; or JSON with a score and a reason."""
    min_mass: Unit = 0.5
    """Probability that the digits must have together; below it the answer was something else, a failure."""

    @model_validator(mode="after")
    def _fits_its_mode(self) -> OpenAIJudgeReward:
        if "{prompt}" not in self.question:
            raise ValueError(f"question: given {self.question!r}; it must contain {{prompt}}")
        if self.mode == "rubric" and self.min_mass != OpenAIJudgeReward.model_fields["min_mass"].default:
            raise ValueError(
                f"min_mass: given {self.min_mass:g} with mode rubric, which reads no probabilities; leave it out"
            )
        return self


class ComplexEditReward(JudgeEntry):
    """An edit by the protocol of Complex-Edit (arXiv 2504.13143), in [0, 1]: a judge's integers from 0 to 10 for
    instruction following, identity preservation and perceptual quality. Needs a source and a judge as of
    `openai_judge`."""

    scorer: Literal["complex_edit"] = "complex_edit"  # pyright: ignore[reportIncompatibleVariableOverride]
    preset: Literal["balanced", "brief"] = "balanced"
    """What alignment is: the mean of instruction following and identity preservation, or the former alone, which
    rewards repainting everything."""
    alignment_weight: Unit = 0.6
    """Of alignment; with quality_weight, 1."""
    quality_weight: Unit = 0.4
    """Of perceptual quality."""
    samples: PositiveInt = 3
    """Answers that are averaged, two questions each; if one of them fails, the item does."""
    temperature: NonNegative = 0.7
    """Of the answers; at 0 more than one sample is the same again."""

    @model_validator(mode="after")
    def _weights_sum_to_1(self) -> ComplexEditReward:
        if abs(self.alignment_weight + self.quality_weight - 1) > 1e-6:
            raise ValueError(
                f"alignment_weight: given {self.alignment_weight:g} beside quality_weight {self.quality_weight:g}; "
                "their sum must be 1, like 0.6 and 0.4"
            )
        return self


def is_published_mmmg(wording: str, ged: str, readability: str | None) -> bool:
    """Whether wording, distance and readability are all the published ones; anything else is an MMMG-style score."""
    return wording == "published" and ged == "networkx" and readability is not None


class MmmgReward(JudgeEntry):
    """An image by the protocol of MMMG (arXiv 2506.10963), in [0, 1]: a judge's yes or no for every element and
    dependency of the item's knowledge graph; (1 - GED) R. Needs a judge as of `openai_judge`. It is MMMG's own score
    with wording=published, ged=networkx and readability together; anything else is an MMMG-style score."""

    scorer: Literal["mmmg"] = "mmmg"  # pyright: ignore[reportIncompatibleVariableOverride]
    ged: Literal["closed", "networkx"] = "closed"
    """The distance to the graph: exact (missing nodes and edges); or the published one, a heuristic that is never
    lower and needs the extra `mmmg`."""
    wording: Literal["own", "published"] = "own"
    """The question to the judge: this package's, answered by a JSON schema; or MMMG's, which `prompts` names, answered
    in lines of text."""
    prompts: Text | None = None
    """For wording=published: your copy of the published question, which the package does not contain: a text file, or
    MMMG's `mmmg_eval/utils/instruction_prompt.py`. [ELEM_DEPEND] stands for graph and annotation."""
    readability: str | None = None
    """"module:function" that counts the regions of an RGB array; R falls from 1 at 70 regions to 0 at 160. Null leaves
    R at 1."""

    @property
    def is_published(self) -> bool:
        """Whether what it scores is MMMG's own score."""
        return is_published_mmmg(self.wording, self.ged, self.readability)

    @model_validator(mode="after")
    def _names_a_function(self) -> MmmgReward:
        if self.readability is not None and not all(self.readability.partition(":")):
            raise ValueError(f"readability: given {self.readability!r}; write module:function")
        return self

    @model_validator(mode="after")
    def _has_its_prompts(self) -> MmmgReward:
        if self.wording == "published" and self.prompts is None and self.url in (None, "auto"):
            raise ValueError(
                "prompts: not set with wording=published; set it to your copy of MMMG's question "
                "(mmmg_eval/utils/instruction_prompt.py of github.com/MMMGBench/MMMG)"
            )
        if self.wording == "own" and self.prompts is not None:
            raise ValueError(
                f"prompts: given {self.prompts!r} with wording=own; set wording=published, or leave it out"
            )
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

    def runs_on_cpu(self) -> str | None:
        return _ARITHMETIC


class JpegSizeReward(RewardEntry):
    """-(bits a pixel as JPEG) / 24 (DDPO, arXiv 2305.13301): its optimum is known, for trying things."""

    scorer: Literal["jpeg_size"] = "jpeg_size"  # pyright: ignore[reportIncompatibleVariableOverride]
    quality: Annotated[int, Field(ge=1, le=95)] = 95
    """Of the JPEG."""
    incompressible: bool = False
    """Raise the size instead of lowering it."""

    def runs_on_cpu(self) -> str | None:
        return _ARITHMETIC


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


class VlmReward(RewardEntry):
    """A Qwen2.5-VL or Qwen3-VL on this machine as the judge, in [0, 1]: one forward, no text."""

    scorer: Literal["vlm"] = "vlm"  # pyright: ignore[reportIncompatibleVariableOverride]
    path: Text = "Qwen/Qwen2.5-VL-7B-Instruct"
    """Hub id or folder."""
    question: str = "How well does this picture show what was asked for? It was asked for: {prompt}"
    """{prompt} stands for the item's prompt."""
    mode: Literal["digits", "yes"] = "digits"
    """The expectation over the probabilities of the digits 0 to 5, over 5; or the probability of yes beside no."""
    min_mass: Unit = 0.5
    """Probability that the score tokens must have together; below it the answer was something else, a failure."""
    dtype: Literal["bf16", "fp16", "fp32"] = "bf16"
    """Of the weights."""
    max_pixels: PositiveInt = 1003520
    """Larger pictures are scaled down to so many."""
    images_per_forward: PositiveInt = 8
    """As it says; changes memory and speed, not results."""

    @model_validator(mode="after")
    def _asks_for_the_prompt(self) -> VlmReward:
        if "{prompt}" not in self.question:
            raise ValueError(f"question: given {self.question!r}; it must contain {{prompt}}")
        return self


class HpsV2Reward(RewardEntry):
    """Human Preference Score v2.1 (arXiv 2306.09341), about .15 to .35; from an environment with imscore."""

    scorer: Literal["hpsv2"] = "hpsv2"  # pyright: ignore[reportIncompatibleVariableOverride]
    path: str = "RE-N-Y/hpsv21"
    """A hub id or folder in imscore's layout."""
    images_per_forward: PositiveInt = 16
    """As it says; changes memory and speed, not results."""


class ImageRewardReward(RewardEntry):
    """ImageReward (arXiv 2304.05977), about -2 to 2; from an environment with imscore."""

    scorer: Literal["imagereward"] = "imagereward"  # pyright: ignore[reportIncompatibleVariableOverride]
    path: str = "RE-N-Y/ImageReward"
    """A hub id or folder in imscore's layout."""
    images_per_forward: PositiveInt = 16
    """As it says; changes memory and speed, not results."""


class AestheticReward(RewardEntry):
    """The LAION aesthetic predictor, about 1 to 10, whatever the prompt; from an environment with imscore."""

    scorer: Literal["aesthetic"] = "aesthetic"  # pyright: ignore[reportIncompatibleVariableOverride]
    path: str = "RE-N-Y/laion-aesthetic"
    """A hub id or folder in imscore's layout."""
    images_per_forward: PositiveInt = 16
    """As it says; changes memory and speed, not results."""


class MaskCompositeReward(RewardEntry):
    """Share of the mask x how its box fits the prompt + share of the rest x (1 + seam), in [0, 1]."""

    scorer: Literal["mask_composite"] = "mask_composite"  # pyright: ignore[reportIncompatibleVariableOverride]
    paste_back: bool = False
    """True judges the hard edge that pasting makes."""
    judge: Literal["clip", "hpsv2"] = "clip"
    """What the box of the mask is judged by."""
    path: str = ""
    """Of the judge's model; empty takes its default."""
    low: float = 0.15
    """Value of the judge that counts as 0."""
    high: float = 0.35
    """Value of the judge that counts as 1."""

    @model_validator(mode="after")
    def _bounds_in_order(self) -> MaskCompositeReward:
        if self.high <= self.low:
            raise ValueError(f"high: given {self.high:g}, but low is {self.low:g}; set high above it")
        return self


class ThinkFormatReward(RewardEntry):
    """1 for a completion that is a thought in its tags and an answer (algorithm vlm_grpo)."""

    scorer: Literal["think_format"] = "think_format"  # pyright: ignore[reportIncompatibleVariableOverride]

    def runs_on_cpu(self) -> str | None:
        return _ARITHMETIC


class CompletionQualityReward(RewardEntry):
    """Length and distinctness of a completion's answer, in [0, 1] (algorithm vlm_grpo)."""

    scorer: Literal["completion_quality"] = "completion_quality"  # pyright: ignore[reportIncompatibleVariableOverride]
    min_words: PositiveInt = 8
    """Shorter answers score in proportion."""
    max_words: PositiveInt = 300
    """Longer ones, too."""

    def runs_on_cpu(self) -> str | None:
        return _ARITHMETIC

    @model_validator(mode="after")
    def _bounds_are_in_order(self) -> CompletionQualityReward:
        if self.min_words > self.max_words:
            raise ValueError(f"min_words: given {self.min_words}, more than max_words {self.max_words}; lower it")
        return self


Reward = Annotated[RewardEntry, Chosen(REWARDS, "scorer")]


COLLECTIVE_S = 7200.0
"""Of it at least; NCCL's own ten minutes are less than writing a large checkpoint takes."""


class RewardClientConfig(Section):
    """How the run talks to reward servers."""

    timeout_s: Positive = 60.0
    """Deadline of one request, retries included."""
    outage_wait_s: NonNegative = 300.0
    """How long to wait for servers that stopped answering before the run stops, resumable (exit 3); at its start never
    less than a minute, for servers that are loading."""
    logged_wait_s: NonNegative = 5.0
    """How long rewards of weight 0, which are only logged, may take once the others of an epoch are in."""
    max_failure_rate: Unit = 0.2
    """Where more than this share of an epoch's images, on all processes together, lack a reward that has a weight, and
    so cannot be trained on, the run stops, resumable (exit 3)."""
    max_run_failure_rate: Unit = 1.0
    """The same over all images so far, once there were 200: what fails a little all the time."""
    batch_size: PositiveInt = 16
    """Images of one request."""
    balance: Literal["least_outstanding", "round_robin"] = "least_outstanding"
    """Which of several servers is asked: the one expected to answer first, by its requests under way and its latency;
    or each in turn."""
    requests_per_server: PositiveInt = 4
    """Under way at once; more wait here, for whichever server is free first."""
    hedge_after_s: Positive | None = None
    """Ask a second server, too, when the first has not answered after so long; null never does."""
    probe_every: Annotated[int, Field(ge=0)] = 0
    """Epochs between probes: the same two pictures are scored again, and must score what they did when the run began.
    0 never does; a judge that is paid is paid for these, too."""
    probe_tolerance: NonNegative = 1e-3
    """By how much a probe may differ (absolute up to scores of 1, relative above)."""
    on_drift: Literal["warn", "stop"] = "warn"
    """What follows where it differs by more: a line in the log, or the end of the run, resumable (exit 3)."""
    cache: bool = False
    """Keep scores of servers in RUN/rewards.sqlite, so that a resumed run asks no judge twice; with several machines,
    each in a file of its own."""

    @property
    def collective_s(self) -> float:
        """Seconds that processes wait for each other, of whom one may wait for rewards."""
        return max(COLLECTIVE_S, 2 * (self.timeout_s + self.outage_wait_s))
