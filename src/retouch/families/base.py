"""Common section of every family in a run file, without torch: its files, their precision, and what is trained."""

from __future__ import annotations

import logging
import math
from collections.abc import Iterator, Mapping, Sequence, Set
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal, Self, get_args

from pydantic import model_validator
from pydantic_core import to_jsonable_python

from retouch.config.base import Positive, Section, Text
from retouch.config.reads import ReadBy
from retouch.errors import log_once
from retouch.families import FAMILIES
from retouch.families.facts import FamilySpec as FamilySpec
from retouch.families.trained import Train, TrainFull, TrainIpAdapter, TrainLora
from retouch.files.hub import cached, is_hub_id
from retouch.files.model_files import Damaged, json_object
from retouch.registry import Chosen

if TYPE_CHECKING:
    from retouch.config.run import RunConfig

logger = logging.getLogger(__name__)

PROMPT_TOKENS = 64
"""Length of a prompt, where the network reads as many tokens as it has and the data is not there to be counted."""

TINY_SIZE_MULTIPLE = 8
"""Size multiple of the tiny bases, whose autoencoder downsamples by 4."""

Quantization = Literal["int8", "fp8", "nf4"]
"""How the matrices of a frozen network are stored; see `retouch.families.quantized`."""


Attention = Literal["math", "torch_flash", "flash", "flash3"]
"""Kernels of attention; see `retouch.families.attention`."""


class DistillationLora(Section):
    """LoRA of a few-step model (Qwen-Image-Lightning), merged into the network when it is loaded: 4 or 8 steps without
    guidance then replace 50 with guidance."""

    path: Text
    """Hub id, folder or file, in any key layout that diffusers converts."""
    weight_name: Text | None = None
    """File in the hub repository or the folder; null where there is only one."""
    scale: Positive = 1.0
    """Strength of the LoRA."""
    shift: Positive | None = None
    """Timestep shift that the LoRA was distilled with (Lightning: 3); null keeps the scheduler's."""


class OtherTransformer(Section):
    """Weights of the trained network in a place of their own, beside a model whose other parts are used."""

    path: Text
    """Hub id or folder."""
    subfolder: Text | None = None
    """Folder in it that has the network's config.json; null is its top."""


SHORT_NAMES = {"flux": "flux_fill", "qwen": "qwen_image"}
"""Names of models in the usual fine-tuning scripts -> families. No former names: run files never had them."""


class ModelSection(Section):
    """The diffusion model: family, files, precision, and its trained part."""

    KEPT: ClassVar[Set[str]] = {"dtype"}
    FREE_IN_EPOCH: ClassVar[Set[str]] = {"path", "offload_text_encoders", "offload_vae", "free_text_encoders"}

    spec: ClassVar[FamilySpec]
    variants: ClassVar[Mapping[Any, Sequence[str]]] = {}
    """`variant` -> its hub ids; of variants with as many, the same place is the same size."""

    family: str
    """Registered name of the family."""
    path: str
    """A hub id or a folder in the diffusers layout."""
    transformer: OtherTransformer | None = None
    """Other weights for the network that is trained, of the same class: the one of `path` (transformer/, of sd_inpaint
    unet/) is then not loaded. Null loads that one."""
    dtype: Literal["fp32", "bf16", "fp16"] = "bf16"
    """Precision of frozen weights (network under LoRA, VAE, text encoders). Trained weights are fp32."""
    weights_variant: Text | None = None
    """Variant of the weight files: "fp16" reads `*.fp16.safetensors` in every part that has them, and the plain files
    in the others, as `variant` of diffusers does. Null reads the plain files."""
    quantize: Annotated[Quantization | None, ReadBy("diffusion")] = None
    """Storage of the matrices in the blocks of the frozen network, under LoRA or a style adapter: "int8" and "fp8"
    (e4m3) take 1 byte per weight, "nf4" (QLoRA, arXiv 2305.14314; bitsandbytes) 0.56; each use restores them in the
    precision of training. Rollouts, training and evaluation all use the quantized network. Null keeps `dtype`."""
    attention: Attention | None = None
    """Kernel of the network's attention, in rollouts, training and evaluation, for families without attention masks
    (FLUX): torch's "math" or "torch_flash" (FlashAttention 2), or of other packages "flash" (flash-attn) or "flash3"
    (FlashAttention 3, Hopper GPUs). Null is torch's choice for each input."""
    offload_text_encoders: bool = True
    """Keep the text encoders on the CPU and move them to the device only while they encode."""
    vae_batch: Literal["all", "one", "tiles"] = "all"
    """Images per call of the autoencoder: "one" needs less memory and is slower; "tiles" also splits each image into
    overlapping tiles, which slightly changes pixels near their edges."""
    offload_vae: bool = False
    """Keep the autoencoder on the CPU and move it to the device only while it encodes or decodes."""
    free_text_encoders: Annotated[bool, ReadBy("diffusion")] = False
    """Encode every prompt of the run at the start, before the network is placed, then drop the text encoders. Every
    process keeps the prompts in host memory: a run whose prompts take more than the encoders ends with an error."""
    embeddings: Annotated[Text | None, ReadBy("diffusion")] = None
    """Folder that `retouch data precompute` filled: text and references are looked up there, and their encoders are
    not loaded. Null encodes during training."""
    train: Annotated[Train, ReadBy("diffusion")] = TrainLora()
    """Trained part of the network: a low-rank adapter, all weights, or a style adapter."""

    @classmethod
    def renamed(cls, given: Mapping[str, Any]) -> dict[str, Any]:
        section = super().renamed(given)
        family = section.get("family")
        if isinstance(family, str) and family in SHORT_NAMES:
            log_once(logger, "model.family: given %r, which is read as %s", family, SHORT_NAMES[family])
            section["family"] = SHORT_NAMES[family]
        return section

    @classmethod
    def __pydantic_init_subclass__(cls, **kwargs: Any) -> None:
        """Require one name of the family: adapter files have that of the spec, run files that of the field.

        Raises:
            ValueError: `spec.family` is not in the literal of the field `family`.
        """
        super().__pydantic_init_subclass__(**kwargs)
        spec, names = getattr(cls, "spec", None), get_args(cls.model_fields["family"].annotation)
        if spec is not None and names and spec.family not in names:
            raise ValueError(
                f"{cls.__name__}.spec.family: given {spec.family!r}, but the field family is {names[0]!r}; set "
                f"family={names[0]!r} in the FamilySpec"
            )

    @model_validator(mode="after")
    def _path_is_of_the_variant(self) -> Self:
        for other, hub_ids in self.variants.items():
            if self.path in hub_ids and other != (variant := getattr(self, "variant", other)):
                own = self.variants[variant]
                fitting = own[hub_ids.index(self.path)] if len(own) == len(hub_ids) else own[-1]
                raise ValueError(
                    f"path: given {self.path!r}, but model.variant is {variant!r}; set model.variant={other}, or "
                    f"model.path={fitting}"
                )
        return self

    @classmethod
    def is_free_in_epoch(cls, name: str, then: object, now: object) -> bool:
        if name == "vae_batch":  # tiles change pixels
            return "tiles" not in (then, now)
        return super().is_free_in_epoch(name, then, now)

    @property
    def pipeline(self) -> str:
        """Class name of the diffusers pipeline of `path`."""
        return self.spec.pipeline

    @property
    def size_multiple(self) -> int:
        """Image sides must be multiples of it."""
        return TINY_SIZE_MULTIPLE if self.path == "tiny" else self.spec.size_multiple

    @property
    def reference_encoder(self) -> str | None:
        """Hub id or folder of the encoder of references; None without a style adapter."""
        if not isinstance(self.train, TrainIpAdapter) or self.spec.adapter is None:
            return None
        return self.train.image_encoder or self.spec.adapter.image_encoder

    @property
    def doubles_for_guidance(self) -> bool:
        """Whether this model has classifier-free guidance, which takes a second forward with a negative prompt."""
        return self.spec.doubles_for_guidance

    def forwards_of_guidance(self, guidance_scale: float) -> int:
        """Network forwards of a prediction at this `rollout.guidance_scale`: 2 with classifier-free guidance, else
        1."""
        return 2 if self.doubles_for_guidance and guidance_scale > 1 else 1

    @property
    def fixed_prompts(self) -> tuple[str, ...]:
        """Prompts that a run encodes beside those of its data: the empty one, and what guidance steers away from."""
        return (self.spec.empty_prompt,)

    @property
    def merged_lora(self) -> DistillationLora | None:
        """LoRA that is merged into the network when it is loaded."""
        return None

    @property
    def distilled_steps(self) -> int | None:
        """Sampling steps that the released weights were distilled for, without guidance; None for a base model."""
        return None

    @property
    def guidance_scale(self) -> float:
        """Guidance scale of a run file that sets none."""
        return self.spec.guidance_scale if self.distilled_steps is None else 1.0

    @property
    def needs(self) -> frozenset[str]:
        """Images that every example must have, of source and mask."""
        return self.spec.needs

    @property
    def edits_whole_images(self) -> bool:
        """Whether an example can do without a mask."""
        return self.spec.edits and "mask" not in self.needs

    @property
    def takes_reference_images(self) -> bool:
        """Whether the network reads the reference of each example as an image, without a style adapter."""
        return False

    @property
    def chat_task(self) -> Literal["draw", "edit", "edit_plus"] | None:
        """Chat of a text encoder that is a vision-language model; None for other text encoders."""
        return None

    @property
    def takes_more_images(self) -> bool:
        """Whether it reads further source images of an example, beside the one that it changes."""
        return False

    def vision_tokens(self, size: tuple[int, int]) -> int:
        """Tokens of a source image of (height, width) in the text encoder; 0 where it reads no images."""
        return 0

    @property
    def has_released_sizes(self) -> bool:
        """Whether the network has the sizes of `spec.released`, by its config in the folder or in the hub's cache. A
        hub id without one is taken for a model of these sizes (`_is_taken_for_released`); `assumed_sizes` names it."""
        if self.path == "tiny":
            return False
        if self.is_released:
            return True
        file = self._network_config
        if file is None:
            return self._is_taken_for_released
        try:
            config = json_object(file)
        except Damaged:
            return False
        sizes = to_jsonable_python(self.spec.released.get(self.spec.network_name, {}))
        return all(config.get(key) in (None, size) for key, size in sizes.items())

    @property
    def assumed_sizes(self) -> str | None:
        """Why counts by `spec.released` may be those of another model; None where its sizes are known."""
        if self.is_released or not self.has_released_sizes or self._network_config is not None:
            return None
        path, released = (self.transformer or self).path, next(iter(self.spec.hub_ids), self.family)
        told = f"whether {path} has the sizes of {released}, by which it is counted: its config is not on this machine"
        return f"{told}; `retouch check --memory` downloads it" if is_hub_id(path) else told

    @property
    def is_released(self) -> bool:
        """Whether it is a released model of the hub, with its own network; a folder comes before one of its name."""
        return self.transformer is None and self.path in self.spec.hub_ids and is_hub_id(self.path)

    @property
    def _is_taken_for_released(self) -> bool:
        """Whether a hub id whose config is not on this machine is taken for a model of the released sizes."""
        return True

    @property
    def _network_config(self) -> Path | None:
        """The config of the trained network; None of a hub id that was not downloaded."""
        other = self.transformer
        path, inside = (self.path, self.spec.network_name) if other is None else (other.path, other.subfolder or "")
        folder = Path(path).expanduser()
        return folder / inside / "config.json" if folder.is_dir() else cached(path, f"{inside}/config.json".lstrip("/"))

    def text_tokens(self, size: tuple[int, int]) -> int:
        """Text tokens of a sample in the network; where they follow the prompt, those of one of `PROMPT_TOKENS`."""
        return PROMPT_TOKENS

    def images_read(self, has_images: Set[str]) -> int:
        """Images whose tokens follow those of the sample in the network, for data that has these images."""
        return 0

    def network_tokens(self, size: tuple[int, int], has_images: Set[str]) -> tuple[int, int]:
        """Tokens of images (for a U-Net cells of the latents) and of text of one sample in the network."""
        side = self.spec.downsampling * (1 if self.spec.prediction == "epsilon" or self.spec.downsampling > 8 else 2)
        return patches(size, side) * (1 + self.images_read(has_images)), self.text_tokens(size)

    def check(self, run: RunConfig, key: str = "model") -> None:
        """Raise ValueError if this model does not support the run's options: "key: given …; expected …; set …"."""
        if not self.path:
            raise ValueError(f"{key}.path: empty; set a hub id or a folder in the diffusers layout")
        if self.quantize is not None:
            self._require_quantizable(run, f"{key}.quantize: given {self.quantize!r}, but")
        if self.attention is not None:
            self._require_attention(f"{key}.attention: given {self.attention!r}, but")
        scale = run.rollout.guidance_scale
        if self.distilled_steps is not None and scale is not None and scale > 1:
            raise ValueError(
                f"rollout.guidance_scale: given {scale:g}, but {self.path} was distilled to sample in "
                f"{self.distilled_steps} steps without guidance; set rollout.guidance_scale=1, or the base model"
            )

    def warnings(self, run: RunConfig) -> Iterator[str]:
        """Warnings about a few-step model: it is no flow model, and some objectives undo its distillation."""
        algorithm, lora = run.algorithm, self.merged_lora
        if lora is not None and run.guidance_scale > 1:
            yield (
                f"rollout.guidance_scale: given {run.guidance_scale:g} with model.distillation_lora, which is "
                "distilled for sampling without guidance: images are oversaturated and take twice the forwards; set "
                "rollout.guidance_scale=1"
            )
        if (lora is None and self.distilled_steps is None) or algorithm.trains_text_encoder:
            return
        path = self.path if lora is None else f"{self.path} with {lora.path}"
        if algorithm.step_rule(run) is not None:
            yield (
                f"algorithm.name: given {algorithm.name!r} for {path}, a distilled model, whose stochastic steps leave "
                "the distribution that it was distilled for; set algorithm.name=nft or dpo, or train the base model "
                "and use its LoRA with the distilled one"
            )
        if algorithm.supervised_steps(run):
            key = "algorithm.sft_steps" if algorithm.trains_on_rewards or algorithm.given_images else "algorithm.name"
            yield (
                f"{key}: supervised flow matching on {path}, a distilled model, undoes its distillation: images of few "
                "steps become blurred; train the base model"
            )
        if algorithm.trains_on_rewards and "reference" not in algorithm.snapshots:
            yield (
                f"algorithm.kl_weight: given 0 for {path}, a distilled model; runs of some thousand steps without KL "
                "are reported to lose detail; set algorithm.kl_weight above 0"
            )

    def _require_attention(self, given: str) -> None:
        if not self.spec.unmasked_attention:
            able = ", ".join(name for name, section in FAMILIES.available().items() if section.spec.unmasked_attention)
            raise ValueError(f"{given} {self.family} has no choice of kernels; leave attention out ({able} have it)")
        if isinstance(self.train, TrainIpAdapter):
            raise ValueError(f"{given} a style adapter brings attention of its own; leave attention out")

    def _require_quantizable(self, run: RunConfig, given: str) -> None:
        if isinstance(self.train, TrainFull):
            raise ValueError(
                f"{given} model.train.kind=full trains the weights that it stores in few bits; set "
                "model.train.kind=lora, or leave quantize out"
            )
        for option, value in (("sharding", run.training.sharding != "none"), ("compile", run.training.compile)):
            if value:
                off = "none" if option == "sharding" else "false"
                raise ValueError(
                    f"{given} training.{option} is set, which does not support quantized layers; set "
                    f"training.{option}={off}, or leave quantize out"
                )

    def check_size(self, key: str, size: tuple[int, int]) -> None:
        """Raise ValueError where the images of a data section `key` of (height, width) do not fit."""


Model = Annotated[ModelSection, Chosen(FAMILIES, "family")]


def patches(size: tuple[int, int], side: int) -> int:
    """Number of patches of `side` pixels that an image of (height, width) is rounded to, at least 1."""
    return math.prod(max(1, round(pixels / side)) for pixels in size)
