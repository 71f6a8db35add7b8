"""Common options of the Qwen-Image families in a run file, and facts of their networks."""

from __future__ import annotations

from typing import Any

from retouch.families.base import DistillationLora, ModelSection


class QwenSection(ModelSection):
    """A model on Qwen-Image's networks."""

    distillation_lora: DistillationLora | None = None
    """LoRA of a few-step model that is merged into the network; null merges none."""
    exact_text_lengths: bool = False
    """Cut the text of a forward to its longest prompt instead of to a multiple of 32 tokens, without a mask where all
    its prompts are as long, and give the negative prompt a forward of its own length. Predictions are equal up to
    rounding, which then depends on the prompts that a sample is batched with; with `training.compile` every length is
    compiled."""

    @property
    def merged_lora(self) -> DistillationLora | None:
        return self.distillation_lora


NEGATIVE = " "
"""Negative prompt in the examples of the pipelines."""

FACTS: dict[str, Any] = {
    "prediction": "flow",
    "latent_channels": 16,
    "downsampling": 8,
    "size_multiple": 16,
    "guidance_scale": 4.0,
    "lora_targets": (
        *(f"attn.{name}" for name in ("to_q", "to_k", "to_v", "to_out.0")),
        *(f"attn.{name}" for name in ("add_q_proj", "add_k_proj", "add_v_proj", "to_add_out")),
        *(f"{name}.net.{layer}" for name in ("img_mlp", "txt_mlp") for layer in ("0.proj", "2")),
    ),
    "network_name": "transformer",
    "networks": {
        "transformer": "QwenImageTransformer2DModel",
        "vae": "AutoencoderKLQwenImage",
        "text_encoder": "Qwen2_5_VLForConditionalGeneration",
    },
    "released": {
        "transformer": {  # 20.4 B parameters
            "patch_size": 2,
            "in_channels": 64,
            "out_channels": 16,
            "num_layers": 60,
            "attention_head_dim": 128,
            "num_attention_heads": 24,
            "joint_attention_dim": 3584,
            "axes_dims_rope": (16, 56, 56),
        },
        "vae": {},
        "text_encoder": {  # Qwen2.5-VL-7B, 8.3 B parameters
            "text_config": {
                "vocab_size": 152064,
                "hidden_size": 3584,
                "intermediate_size": 18944,
                "num_hidden_layers": 28,
                "num_attention_heads": 28,
                "num_key_value_heads": 4,
                "rope_parameters": {"rope_type": "default", "rope_theta": 1e6, "mrope_section": [16, 24, 24]},
            },
            "vision_config": {
                "depth": 32,
                "hidden_size": 1280,
                "intermediate_size": 3420,
                "num_heads": 16,
                "out_hidden_size": 3584,
                "fullatt_block_indexes": [7, 15, 23, 31],
            },
        },
    },
    "doubles_for_guidance": True,
    "drops_text_stream": True,
    "empty_prompt": NEGATIVE,
}
"""Arguments of `FamilySpec` that the families have in common."""
