"""`model`: the families, and what of each is trained."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import (
    BeforeValidator,
    Field,
    PositiveInt,
    ValidationError,
    ValidationInfo,
    ValidatorFunctionWrapHandler,
    field_validator,
    model_validator,
)

from retouch.config.base import (
    NonNegative,
    Positive,
    Section,
    Text,
    Unit,
)
from retouch.families import FAMILIES
from retouch.families.facts import EditVariant
from retouch.registry import Chosen


def _twice_the_rank(validated: dict[str, Any]) -> float:
    """Default of `alpha`, which scales updates by 2 at every rank."""
    return 2 * validated["rank"]


def _null_is_the_default(value: object, info: ValidationInfo) -> object:
    return _twice_the_rank(info.data) if value is None and "rank" in info.data else value


Alpha = Annotated[Positive, BeforeValidator(_null_is_the_default)]
"""Of low-rank adapters. Run files of run directories hold its number, so that a run goes on at its own strength."""


class TrainFull(Section):
    """Train every weight of the network, in fp32 (autocast by `training.mixed_precision`)."""

    kind: Literal["full"] = "full"


class TrainLora(Section):
    """Train low-rank adapters (arXiv 2106.09685) on the frozen network, in fp32."""

    kind: Literal["lora"] = "lora"
    rank: PositiveInt = 32
    """Columns of the two factors that each adapted weight gets."""
    alpha: Alpha = Field(default_factory=_twice_the_rank)
    """Updates are scaled by alpha / rank; null is 2 · rank."""
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
    alpha: Alpha = Field(default_factory=_twice_the_rank)
    """Updates of kv_lora are scaled by alpha / rank; null is 2 · rank."""
    scale: NonNegative | Annotated[list[NonNegative], Field(min_length=1)] | None = None
    """How much the reference counts: in all blocks, or a factor for each; null takes that of `initial_adapter`, else 1.
    Files keep it."""
    value_norm: bool | None = None
    """Normalize the values of each head (RMS norm without weights), as ComfyUI-IPAdapter-Flux does: its node then
    generates the same images. The strength of a block is `scale` alone from the first step on. Null takes that of
    `initial_adapter`, else false. Files record it."""
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


class ModelSection(Section):
    """What every family has; its own class says what its keys mean for it."""

    family: str
    """Registered name of the family."""
    path: str
    """A hub id or a folder in the diffusers layout; "tiny" is the base that comes with the package."""
    dtype: Literal["fp32", "bf16", "fp16"] = "bf16"
    """Precision of frozen weights. Trained weights are fp32."""
    offload_text_encoders: bool = True
    """Keep the text encoders on the CPU and move them to the device only while they encode."""
    vae_batch: Literal["all", "one", "tiles"] = "all"
    """Images that the autoencoder takes at a time."""
    offload_vae: bool = False
    """Keep the autoencoder on the CPU and move it to the device only while it encodes or decodes."""
    free_text_encoders: bool = False
    """Encode every prompt of the run at the start, then drop the text encoders from memory."""
    embeddings: Text | None = None
    """Folder that `retouch data precompute` filled; null encodes while training."""
    train: Train = TrainLora()
    """What of the network is trained, and how it is saved."""


class FluxFillModel(ModelSection):
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
    vae_batch: Literal["all", "one", "tiles"] = "all"
    """Pictures that the autoencoder takes at a time: "one" needs less memory and is slower; "tiles" cuts each into
    overlapping tiles besides, which changes what is near their edges a little."""
    offload_vae: bool = False
    """Keep the autoencoder on the CPU and move it to the device only while it encodes or decodes."""
    free_text_encoders: bool = False
    """Encode every prompt of the run at the start, then drop the text encoders from memory altogether."""
    embeddings: Text | None = None
    """Folder that `retouch data precompute` filled: text and references are looked up there, and their encoders are
    not loaded. Null encodes while training."""
    train: Train = TrainLora()
    """What of the network is trained, and how it is saved."""


class SdInpaintModel(ModelSection):
    """Stable Diffusion 1.5 inpainting (`UNet2DConditionModel` with 9 input channels, epsilon prediction)."""

    family: Literal["sd_inpaint"] = "sd_inpaint"
    path: str = "stable-diffusion-v1-5/stable-diffusion-inpainting"
    """A hub id or a folder in the diffusers layout; "tiny" is the base that comes with the package."""
    dtype: Literal["fp32", "bf16", "fp16"] = "bf16"
    """Of frozen weights (network under LoRA, VAE, text encoder). Trained weights are fp32."""
    offload_text_encoders: bool = True
    """Keep the text encoder on the CPU and move it to the device only while it encodes."""
    vae_batch: Literal["all", "one", "tiles"] = "all"
    """Pictures that the autoencoder takes at a time: "one" needs less memory and is slower; "tiles" cuts each into
    overlapping tiles besides, which changes what is near their edges a little."""
    offload_vae: bool = False
    """Keep the autoencoder on the CPU and move it to the device only while it encodes or decodes."""
    free_text_encoders: bool = False
    """Encode every prompt of the run at the start, then drop the text encoder from memory altogether."""
    embeddings: Text | None = None
    """Folder that `retouch data precompute` filled: text and references are looked up there, and their encoders are
    not loaded. Null encodes while training."""
    train: Train = TrainLora()
    """What of the network is trained, and how it is saved."""


class DistillationLora(Section):
    """LoRA of a few-step model (Qwen-Image-Lightning), merged into the network when it is loaded: 4 or 8 steps without
    guidance then take the place of 50 with it."""

    path: Text
    """Hub id, folder or file, in any key layout that diffusers converts."""
    weight_name: Text | None = None
    """File within the hub repository or the folder; null where there is only one."""
    scale: Positive = 1.0
    """Strength of the LoRA."""
    shift: Positive | None = None
    """Timestep shift that the LoRA was distilled with (Lightning: 3); null keeps the scheduler's."""


class QwenImageModel(ModelSection):
    """Qwen-Image (`QwenImageTransformer2DModel`, flow model): text to image, and inpainting by blending latents where
    examples have a source and a mask."""

    family: Literal["qwen_image"] = "qwen_image"
    path: str = "Qwen/Qwen-Image"
    """A hub id or a folder in the diffusers layout."""
    distillation_lora: DistillationLora | None = None
    """LoRA of a few-step model that is merged into the network; null merges none."""
    dtype: Literal["fp32", "bf16", "fp16"] = "bf16"
    """Of frozen weights (network under LoRA, VAE, text encoder). Trained weights are fp32."""
    max_sequence_length: Annotated[int, Field(ge=1, le=1024)] = 512
    """Tokens a prompt is padded or cut to, the end of its chat template included."""
    offload_text_encoders: bool = True
    """Keep the text encoder on the CPU and move it to the device only while it encodes."""
    vae_batch: Literal["all", "one", "tiles"] = "all"
    """Pictures that the autoencoder takes at a time: "one" needs less memory and is slower; "tiles" cuts each into
    overlapping tiles besides, which changes what is near their edges a little."""
    offload_vae: bool = False
    """Keep the autoencoder on the CPU and move it to the device only while it encodes or decodes."""
    free_text_encoders: bool = False
    """Encode every prompt of the run at the start, then drop the text encoder from memory altogether."""
    embeddings: Text | None = None
    """Folder that `retouch data precompute` filled: text and references are looked up there, and their encoders are
    not loaded. Null encodes while training."""
    train: Train = TrainLora()
    """What of the network is trained, and how it is saved."""


RELEASED_EDIT: dict[EditVariant, str] = {
    "edit": "Qwen/Qwen-Image-Edit",
    "edit_plus": "Qwen/Qwen-Image-Edit-2509",
}
"""Hub ids of the variants of Qwen-Image-Edit."""


class QwenImageEditModel(ModelSection):
    """Qwen-Image-Edit and Edit-Plus (`QwenImageTransformer2DModel`, flow model): change a picture as the prompt says;
    no mask."""

    family: Literal["qwen_image_edit"] = "qwen_image_edit"
    variant: EditVariant = "edit"
    """"edit" is Qwen-Image-Edit; "edit_plus" is Edit-Plus (2509), which sees a picture of 384 x 384 with the prompt."""
    path: str = "Qwen/Qwen-Image-Edit"
    """A hub id or a folder in the diffusers layout; for edit_plus Qwen/Qwen-Image-Edit-2509."""
    distillation_lora: DistillationLora | None = None
    """LoRA of a few-step model that is merged into the network; null merges none."""
    dtype: Literal["fp32", "bf16", "fp16"] = "bf16"
    """Of frozen weights (network under LoRA, VAE, text encoder). Trained weights are fp32."""
    max_sequence_length: Annotated[int, Field(ge=1, le=2048)] = 1024
    """Tokens that the picture, the prompt and the end of the chat template are padded to. A prompt that does not fit
    is cut, with a warning; the picture never is."""
    vision_pixels: Annotated[int, Field(ge=1024)] | None = None
    """Area in pixels that the text encoder sees of the source, 784 a token; null is the source's own for edit, 147456
    (384 x 384) for edit_plus."""
    offload_text_encoders: bool = True
    """Keep the text encoder on the CPU and move it to the device only while it encodes."""
    vae_batch: Literal["all", "one", "tiles"] = "all"
    """Pictures that the autoencoder takes at a time: "one" needs less memory and is slower; "tiles" cuts each into
    overlapping tiles besides, which changes what is near their edges a little."""
    offload_vae: bool = False
    """Keep the autoencoder on the CPU and move it to the device only while it encodes or decodes."""
    free_text_encoders: bool = False
    """Must stay false: what the text encoder reads depends on the picture."""
    embeddings: Text | None = None
    """Must stay null, for the same reason."""
    train: Train = TrainLora()
    """What of the network is trained, and how it is saved."""

    @model_validator(mode="after")
    def _path_is_of_the_variant(self) -> QwenImageEditModel:
        for variant, released in RELEASED_EDIT.items():
            if self.path == released and variant != self.variant:
                wanted = RELEASED_EDIT[self.variant]
                raise ValueError(f"path: given {self.path!r}, but model.variant is {self.variant!r}; set {wanted}")
        return self


Model = Annotated[ModelSection, Chosen(FAMILIES, "family")]
