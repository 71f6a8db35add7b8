"""Qwen-Image-2.1 in a run file, and its facts."""

from __future__ import annotations

from collections.abc import Set
from typing import TYPE_CHECKING, Annotated, ClassVar, Literal

from pydantic import Field

from retouch.config.needs import data_sections
from retouch.families.base import FamilySpec, ModelSection, patches

if TYPE_CHECKING:
    from retouch.config.run import RunConfig

SLOT = 32
"""Pixels per side of an image token of the text encoder, which stands for 2 x 2 tokens of the network."""


class QwenImage21Model(ModelSection):
    """Qwen-Image-2.1 (`QwenImage21Transformer2DModel`, flow model): text to image, edits of one or several source
    images, and inpainting by blending latents where examples have a source and a mask."""

    spec: ClassVar[FamilySpec] = FamilySpec(
        family="qwen_image_21",
        prediction="flow",
        latent_channels=64,
        downsampling=16,
        size_multiple=32,
        guidance_scale=1.0,
        needs=frozenset(),
        lora_targets=(
            *(f"attn.{name}" for name in ("to_q", "to_k", "to_v", "to_out.0")),
            *(f"img_mlp.{name}" for name in ("proj", "out", "gate_layer")),
        ),
        network_name="transformer",
        model="retouch.families.qwen_image_21.model:QwenImage21",
        pipeline="QwenImage21Pipeline",
        networks={
            "transformer": "QwenImage21Transformer2DModel",
            "vae": "AutoencoderKLQwenImage21",
            "text_encoder": "Qwen3VLForConditionalGeneration",
        },
        has_processor=True,
        tokenizer_in_processor=True,
        released={
            "transformer": {  # 7.12 B parameters
                "patch_size": 1,
                "in_channels": 64,
                "out_channels": 64,
                "num_layers": 32,
                "attention_head_dim": 128,
                "num_attention_heads": 32,
                "context_in_dim": 4096,
                "mlp_ratio": 3,
                "axes_dims_rope": (16, 56, 56),
            },
            "vae": {},
            "text_encoder": {  # Qwen3-VL-8B, 8.77 B parameters
                "text_config": {
                    "vocab_size": 151936,
                    "hidden_size": 4096,
                    "intermediate_size": 12288,
                    "num_hidden_layers": 36,
                    "num_attention_heads": 32,
                    "num_key_value_heads": 8,
                    "head_dim": 128,
                    "rope_parameters": {
                        "rope_type": "default",
                        "rope_theta": 5e6,
                        "mrope_section": [24, 20, 20],
                        "mrope_interleaved": True,
                    },
                },
                "vision_config": {"out_hidden_size": 4096},
            },
        },
        hub_ids=("Qwen/Qwen-Image-2.1",),
        doubles_for_guidance=True,
        edits_without_mask=True,
        empty_prompt=" ",
    )

    family: Literal["qwen_image_21"] = "qwen_image_21"  # pyright: ignore[reportIncompatibleVariableOverride]
    path: str = spec.hub_ids[0]
    """A hub id or a folder in the diffusers layout."""
    max_sequence_length: Annotated[int, Field(ge=16, le=4096)] = 512
    """Tokens that a prompt with its chat is padded to, without those of source images. A longer prompt is cut, with a
    warning."""

    @property
    def takes_more_images(self) -> bool:
        return True

    def vision_tokens(self, size: tuple[int, int]) -> int:
        return patches(size, SLOT)

    def images_read(self, has_images: Set[str]) -> int:
        return int("source" in has_images)

    def check(self, run: RunConfig, key: str = "model") -> None:
        super().check(run, key)
        self._check_prompts(run, key)
        self._check_sharding(run, key)

    def _check_prompts(self, run: RunConfig, key: str) -> None:
        """Text states are stored by the prompt alone, which is not all that they depend on where there are sources."""
        with_images = [name for name, section in data_sections(run).items() if "source" in section.has_images]
        for name, given in (("embeddings", self.embeddings), ("free_text_encoders", self.free_text_encoders)):
            if given and with_images:
                raise ValueError(
                    f"{key}.{name}: given {given!r}, but {with_images[0]}.format can name source images, which the "
                    f"text encoder of {self.family} reads with the prompt; leave {name} out, or set "
                    f"{with_images[0]}.format=prompts"
                )

    def _check_sharding(self, run: RunConfig, key: str) -> None:
        """Sharded processes must run equally many forwards; a batch takes one for each length of its prompts."""
        sizes = {
            "rollout.batch_size_per_device": run.rollout.batch_size_per_device,
            "optimizer.batch_size_per_device": run.optimizer.batch_size_per_device,
        }
        larger = next((name for name, size in sizes.items() if size > 1), None)
        if run.training.sharding in ("fsdp2", "zero3") and larger is not None:
            raise ValueError(
                f"training.sharding: given {run.training.sharding!r}, but {self.family} runs a batch as one forward "
                f"for each length of its prompts, and sharded processes need equally many; set {larger}=1, or "
                "training.sharding=zero2"
            )
