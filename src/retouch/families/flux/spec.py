"""Keys of the FLUX.1 families in a run file, and facts of their networks."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated, Any

from pydantic import Field

from retouch.config.reads import ReadIf
from retouch.families.base import ModelSection
from retouch.families.facts import AdapterFacts
from retouch.families.released import CLIP_L, SIGLIP_SO400M, T5_XXL, autoencoder

if TYPE_CHECKING:
    from retouch.config.run import RunConfig


class FluxSection(ModelSection):
    """A model on the network of FLUX.1."""

    max_sequence_length: Annotated[int, Field(ge=1, le=512)] = 512
    """T5 tokens that a prompt is padded or cut to."""
    true_guidance_scale: Annotated[float, Field(ge=1)] = 1.0
    """Classifier-free guidance beside the embedded `rollout.guidance_scale`, in rollouts, their log-probabilities and
    evaluation: above 1, every prediction takes a second forward with `negative_prompt`. The released weights are
    distilled for 1; weights trained for it name their pair (OneReward: 4, with rollout.guidance_scale 1)."""
    negative_prompt: Annotated[
        str,
        ReadIf(
            "with `true_guidance_scale` above 1",
            lambda own: own.true_guidance_scale > 1,
            "but model.true_guidance_scale is 1, which uses no negative prompt; set model.true_guidance_scale above 1, "
            "or leave negative_prompt out",
        ),
    ] = ""
    """Prompt that `true_guidance_scale` above 1 steers away from."""

    @property
    def doubles_for_guidance(self) -> bool:
        return self.true_guidance_scale > 1

    def text_tokens(self, size: tuple[int, int]) -> int:
        return self.max_sequence_length

    def forwards_of_guidance(self, guidance_scale: float) -> int:
        return 2 if self.doubles_for_guidance else 1

    @property
    def fixed_prompts(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys((self.spec.empty_prompt, self.negative_prompt)))

    def check(self, run: RunConfig, key: str = "model") -> None:
        super().check(run, key)
        if self.negative_prompt and getattr(run.algorithm, "caption_dropout", 0.0):
            raise ValueError(
                f"{key}.negative_prompt: given {self.negative_prompt!r} with algorithm.caption_dropout, which trains "
                "the empty prompt; leave negative_prompt out, or set algorithm.caption_dropout=0"
            )


ADAPTER = AdapterFacts(
    network="FluxTransformer2DModel",
    host="retouch.families.flux.host:FluxHost",
    head="mlp",
    tokens=128,
    image_encoder="google/siglip-so400m-patch14-384",
    width=1152,
    encoder=SIGLIP_SO400M,
)
"""The style adapter."""

FACTS: dict[str, Any] = {
    "prediction": "flow",
    "unmasked_attention": True,
    "latent_channels": 16,
    "downsampling": 8,
    "size_multiple": 16,
    "lora_targets": (
        *(f"attn.{name}" for name in ("to_q", "to_k", "to_v", "to_out.0")),
        *(f"attn.{name}" for name in ("add_q_proj", "add_k_proj", "add_v_proj", "to_add_out")),
        *(f"{name}.net.{layer}" for name in ("ff", "ff_context") for layer in ("0.proj", "2")),
    ),
    "network_name": "transformer",
    "networks": {
        "transformer": "FluxTransformer2DModel",
        "vae": "AutoencoderKL",
        "text_encoder": "CLIPTextModel",
        "text_encoder_2": "T5EncoderModel",
    },
    "embedded_encoder": "text_encoder_2",
    "adapter": ADAPTER,
}
"""Arguments of `FamilySpec` that the families have in common."""


def released(in_channels: int) -> Mapping[str, Mapping[str, Any]]:
    """`FamilySpec.released` with a transformer of 11.9 B parameters with this many input channels."""
    transformer = {
        "patch_size": 1,
        "in_channels": in_channels,
        "out_channels": 64,
        "num_layers": 19,
        "num_single_layers": 38,
        "attention_head_dim": 128,
        "num_attention_heads": 24,
        "joint_attention_dim": 4096,
        "pooled_projection_dim": 768,
        "guidance_embeds": True,
        "axes_dims_rope": (16, 56, 56),
    }
    vae = autoencoder(16, scaling_factor=0.3611, shift_factor=0.1159)
    return {"transformer": transformer, "vae": vae, "text_encoder": CLIP_L, "text_encoder_2": T5_XXL}
