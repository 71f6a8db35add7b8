"""The trained part of a network in a run file, without torch: all weights, a low-rank adapter, or a style adapter."""

from __future__ import annotations

from collections.abc import Set
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal

from pydantic import (
    BeforeValidator,
    Field,
    ValidationError,
    ValidationInfo,
    ValidatorFunctionWrapHandler,
    field_validator,
)

from retouch.config.base import Count, NonNegative, Positive, Section, Text, Unit
from retouch.config.reads import ReadIf, ReadIn
from retouch.families import FAMILIES

if TYPE_CHECKING:
    from retouch.config.run import RunConfig


def _twice_the_rank(validated: dict[str, Any]) -> float:
    """Default of `alpha`, which scales updates by 2 at every rank."""
    return 2 * validated["rank"]


def _null_is_the_default(value: object, info: ValidationInfo) -> object:
    return _twice_the_rank(info.data) if value is None and "rank" in info.data else value


Alpha = Annotated[Positive, BeforeValidator(_null_is_the_default)]
"""Alpha of low-rank adapters. Run directories record the number; a resumed run keeps its own strength."""


class TrainFull(Section):
    """Train every weight of the network, in fp32 (autocast by `training.mixed_precision`)."""

    kind: Literal["full"] = "full"


class TrainLora(Section):
    """Train low-rank adapters (arXiv 2106.09685) on the frozen network, in fp32."""

    FREE_IN_EPOCH: ClassVar[Set[str]] = {"initial_adapter"}

    kind: Literal["lora"] = "lora"
    rank: Count = 32
    """Rank of the two factors of each adapted weight."""
    alpha: Alpha = Field(default_factory=_twice_the_rank)
    """Updates are scaled by alpha / rank; null is 2 · rank."""
    targets: Annotated[list[Text], Field(min_length=1)] | None = None
    """Module-name suffixes to adapt; null takes the defaults of the family."""
    init: Literal["uniform", "gaussian"] = "uniform"
    """Distribution of the factors A of a new LoRA, whose factors B are 0: "uniform" is that of the paper's code (within
    1 / √inputs of a layer), "gaussian" has the standard deviation 1 / rank, as in Flow-GRPO and diffusers' scripts. On
    layers of more than rank² / 3 inputs that is the larger one, and a step of B changes the weight by more."""
    initial_adapter: Text | None = None
    """LoRA to start from: a file of diffusers, PEFT or kohya, or a checkpoint or run directory of an earlier run (its
    EMA weights where it has them). `rank` and `alpha` must be those of the file; modules that the file does not adapt
    start as a no-op. Null starts with a new LoRA, which changes nothing at first."""


KV_LORA = ReadIf(
    "with `weights: kv_lora`",
    lambda own: own.weights == "kv_lora",
    "which weights=kv_lora reads, but weights is {own.weights!r}; leave {name} out, or set weights=kv_lora",
)


class TrainIpAdapter(Section):
    """Train a style adapter (IP-Adapter, arXiv 2308.06721) on the frozen network: a reference image becomes tokens that
    every block attends to. Every example needs a reference."""

    FREE_IN_EPOCH: ClassVar[Set[str]] = {"image_encoder", "scale", "value_norm", "reference_dropout", "initial_adapter"}

    kind: Literal["ip_adapter"] = "ip_adapter"
    image_encoder: Text | None = None
    """Hub id or folder of the SigLIP or CLIP that embeds references; "tiny" is the one that comes with the package.
    Null is google/siglip-so400m-patch14-384, for sd_inpaint laion/CLIP-ViT-H-14-laion2B-s32B-b79K."""
    tokens: Count | None = None
    """Tokens of a reference; null is 128, as ComfyUI requires; for sd_inpaint 4, as diffusers requires."""
    query_former: Annotated[
        bool,
        ReadIn(
            "by families whose projection has several layers",
            lambda own, run: run.model.spec.adapter.head != "linear",
            "but the projection of {run.model.family} is one layer; leave {name} out",
        ),
    ] = False
    """Add the second head of the released Calligrapher to the projection."""
    weights: Literal["all", "no_last_layer", "kv", "kv_lora"] = "all"
    """Weights of the adapter that are trained: all; all but the last layer of each head of the projection, which is
    nearly half of them; keys and values alone; low-rank adapters on keys and values."""
    rank: Annotated[Count, KV_LORA] = 32
    """Rank of the factors of kv_lora."""
    alpha: Annotated[Alpha, KV_LORA] = Field(default_factory=_twice_the_rank)
    """Updates of kv_lora are scaled by alpha / rank; null is 2 · rank."""
    scale: NonNegative | Annotated[list[NonNegative], Field(min_length=1)] | None = None
    """Factor of the attention to the reference: one for all blocks, or one per block; null takes that of
    `initial_adapter`, else 1. Files keep it."""
    value_norm: Annotated[
        bool | None,
        ReadIn(
            "by families whose attention can normalize values",
            lambda own, run: not own.value_norm or run.model.spec.adapter.normalizes_values,
            "but {run.model.family} uses the attention of diffusers, which does not normalize values; leave value_norm "
            "out",
        ),
    ] = None
    """Normalize the values of each head (RMS norm without weights), as ComfyUI-IPAdapter-Flux does: its node then
    generates the same images, and the strength of a block is `scale` alone from the first step on. Null takes that of
    `initial_adapter`, else false. Files record it."""
    reference_dropout: Annotated[
        Unit,
        ReadIn(
            "in supervised steps",
            lambda own, run: run.algorithm.supervised_steps(run),
            "but the run has no supervised steps; leave it out, or set algorithm.sft_steps",
        ),
    ] = 0.0
    """Share of the samples of supervised steps that are trained without their reference. Such a sample attends to no
    reference token and trains nothing on a frozen network; for sd_inpaint its vector is 0, as in the
    unconditional half of guidance."""
    initial_adapter: Text | None = None
    """Adapter to start from: a file of any supported layout, or a checkpoint or run directory of an earlier run (its
    EMA weights where it has them); null starts with a new adapter, which changes nothing at first."""

    @field_validator("scale", mode="wrap")
    @classmethod
    def _is_one_or_many(cls, value: object, handler: ValidatorFunctionWrapHandler) -> object:
        try:
            return handler(value)
        except ValidationError:  # one message instead of one per alternative
            raise ValueError(
                f"given {value!r}; write a factor of 0 or more, like 1.0, or a list with one for each block"
            ) from None

    def check(self, run: RunConfig, key: str = "model.train") -> None:
        """Raise ValueError if the family, or the engine of the run, does not support these options."""
        spec = run.model.spec
        if spec.adapter is None:
            able = [name for name, section in FAMILIES.available().items() if section.spec.adapter is not None]
            raise ValueError(
                f"{key}.kind: given 'ip_adapter', but {spec.family} has no style adapter; set {key}.kind=lora, or "
                f"model.family to one of {', '.join(able)}"
            )
        if spec.adapter.head == "linear" and self.weights == "no_last_layer":
            raise ValueError(
                f"{key}.weights: given 'no_last_layer', but the projection of {spec.family} is one layer; leave "
                "weights out"
            )
        if run.training.sharding not in ("none", "zero2"):
            raise ValueError(
                f"training.sharding: given {run.training.sharding!r}, but the files of a style adapter need its frozen "
                "weights whole; set sharding=zero2, or none"
            )


Train = Annotated[TrainFull | TrainLora | TrainIpAdapter, Field(discriminator="kind")]
