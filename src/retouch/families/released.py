"""Configs of the text encoders and autoencoders that several released models have in common."""

from __future__ import annotations

from typing import Any

_CLIP = {"vocab_size": 49408, "max_position_embeddings": 77}

CLIP_L: dict[str, Any] = {  # openai/clip-vit-large-patch14, 0.123 B parameters
    **_CLIP,
    "hidden_size": 768,
    "intermediate_size": 3072,
    "num_hidden_layers": 12,
    "num_attention_heads": 12,
    "projection_dim": 768,
    "hidden_act": "quick_gelu",
}

CLIP_BIGG: dict[str, Any] = {  # 0.69 B
    **_CLIP,
    "hidden_size": 1280,
    "intermediate_size": 5120,
    "num_hidden_layers": 32,
    "num_attention_heads": 20,
    "projection_dim": 1280,
    "hidden_act": "gelu",
}

T5_XXL: dict[str, Any] = {  # the encoder of T5 1.1, 4.76 B
    "vocab_size": 32128,
    "d_model": 4096,
    "d_kv": 64,
    "d_ff": 10240,
    "num_layers": 24,
    "num_heads": 64,
    "feed_forward_proj": "gated-gelu",
}


SIGLIP_SO400M: dict[str, Any] = {  # the vision tower of google/siglip-so400m-patch14-384, 0.43 B
    "model_type": "siglip_vision_model",
    "hidden_size": 1152,
    "intermediate_size": 4304,
    "num_hidden_layers": 27,
    "num_attention_heads": 16,
    "image_size": 384,
    "patch_size": 14,
}

CLIP_H: dict[str, Any] = {  # that of laion/CLIP-ViT-H-14-laion2B-s32B-b79K, 0.63 B
    "model_type": "clip_vision_model",
    "hidden_size": 1280,
    "intermediate_size": 5120,
    "num_hidden_layers": 32,
    "num_attention_heads": 16,
    "image_size": 224,
    "patch_size": 14,
    "projection_dim": 1024,
}


def autoencoder(latent_channels: int, *, quant_conv: bool = False, **options: Any) -> dict[str, Any]:
    """The `AutoencoderKL` of Stable Diffusion and FLUX.1 but for its latents: 0.084 B parameters."""
    return {
        "down_block_types": ("DownEncoderBlock2D",) * 4,
        "up_block_types": ("UpDecoderBlock2D",) * 4,
        "block_out_channels": (128, 256, 512, 512),
        "layers_per_block": 2,
        "latent_channels": latent_channels,
        "use_quant_conv": quant_conv,
        "use_post_quant_conv": quant_conv,
        **options,
    }
