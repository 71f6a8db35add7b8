"""Bases of a few thousand weights each, for runs that are kept in the repository: the classes of the tiny bases at the
smallest sizes that their configurations take, with random weights."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from diffusers import (
    AutoencoderKL,
    AutoencoderKLQwenImage,
    FlowMatchEulerDiscreteScheduler,
    FluxFillPipeline,
    FluxTransformer2DModel,
    QwenImageEditPipeline,
    QwenImageTransformer2DModel,
    StableDiffusionInpaintPipeline,
)
from transformers import (
    ByT5Tokenizer,
    CLIPTextConfig,
    CLIPTextModel,
    Qwen2_5_VLConfig,
    Qwen2_5_VLForConditionalGeneration,
    SiglipVisionConfig,
    SiglipVisionModel,
    T5Config,
    T5EncoderModel,
)

from retouch.families import tiny
from retouch.families.qwen.tiny import byte_qwen_tokenizer, special_tokens, tiny_qwen_processor
from retouch.families.unet import tiny as unet_tiny

WIDTH = 16


def flux_fill() -> Any:
    network = FluxTransformer2DModel(
        in_channels=4 * (2 * 4 + 4**2),
        out_channels=4 * 4,
        num_layers=1,
        num_single_layers=1,
        attention_head_dim=16,
        num_attention_heads=1,
        joint_attention_dim=WIDTH,
        pooled_projection_dim=WIDTH,
        guidance_embeds=True,
        axes_dims_rope=(4, 6, 6),
    )
    return FluxFillPipeline(
        scheduler=FlowMatchEulerDiscreteScheduler(**tiny.SHIFTED),
        vae=_autoencoder(shift_factor=0.0),
        text_encoder=_clip(),
        tokenizer=tiny.byte_clip_tokenizer(),
        text_encoder_2=_t5(),
        tokenizer_2=ByT5Tokenizer(extra_ids=0, model_max_length=tiny.TEXT_TOKENS),
        transformer=network,
    )


def sd_inpaint() -> Any:
    absent: Any = None
    return StableDiffusionInpaintPipeline(
        vae=_autoencoder(shift_factor=None),
        text_encoder=_clip(),
        tokenizer=tiny.byte_clip_tokenizer(),
        unet=unet_tiny.unet((8, 16), 2, WIDTH),
        scheduler=unet_tiny.scheduler(),
        safety_checker=absent,
        feature_extractor=absent,
        requires_safety_checker=False,
    )


def qwen_image_edit() -> Any:
    vae: Any = AutoencoderKLQwenImage(
        base_dim=4,
        z_dim=4,
        dim_mult=[1, 1, 1],
        num_res_blocks=1,
        temperal_downsample=[False, True],
        latents_mean=[0.1, -0.2, 0.0, 0.3],
        latents_std=[0.8, 1.1, 1.0, 0.9],
    )
    network: Any = QwenImageTransformer2DModel(
        patch_size=2,
        in_channels=16,
        out_channels=4,
        num_layers=1,
        attention_head_dim=16,
        num_attention_heads=1,
        joint_attention_dim=WIDTH,
        axes_dims_rope=(4, 6, 6),
    )
    scheduler = FlowMatchEulerDiscreteScheduler(**tiny.SHIFTED, shift_terminal=0.02)
    return QwenImageEditPipeline(
        scheduler=scheduler,
        vae=vae,
        text_encoder=_qwen_vl(),
        tokenizer=byte_qwen_tokenizer(),
        processor=tiny_qwen_processor(),
        transformer=network,
    )


def image_encoder() -> Any:
    return SiglipVisionModel(
        SiglipVisionConfig(
            hidden_size=WIDTH,
            intermediate_size=WIDTH,
            num_hidden_layers=1,
            num_attention_heads=1,
            image_size=16,
            patch_size=8,
        )
    )


def write_bases(folder: Path) -> None:
    for make in (flux_fill, sd_inpaint, qwen_image_edit, image_encoder):
        torch.manual_seed(0)
        base = make()
        base.to(torch.float16).save_pretrained(folder / make.__name__)


def _autoencoder(shift_factor: float | None) -> AutoencoderKL:
    down: Any = ("DownEncoderBlock2D",) * 3
    up: Any = ("UpDecoderBlock2D",) * 3
    vae = AutoencoderKL(
        down_block_types=down,
        up_block_types=up,
        block_out_channels=(4, 4, 4),  # type: ignore[arg-type]
        layers_per_block=1,
        latent_channels=4,
        norm_num_groups=2,
        mid_block_add_attention=False,
        use_quant_conv=False,
        use_post_quant_conv=False,
        scaling_factor=1.0,
        shift_factor=shift_factor,
    )
    tiny.start_orthogonal(vae)
    return vae


def _clip() -> CLIPTextModel:
    tokenizer: Any = tiny.byte_clip_tokenizer()
    return CLIPTextModel(
        CLIPTextConfig(
            vocab_size=len(tokenizer),
            hidden_size=WIDTH,
            intermediate_size=WIDTH,
            num_hidden_layers=1,
            num_attention_heads=1,
            max_position_embeddings=tiny.TEXT_TOKENS,
            bos_token_id=tokenizer.bos_token_id,
            eos_token_id=tokenizer.eos_token_id,
            pad_token_id=tokenizer.pad_token_id,
        )
    )


def _t5() -> T5EncoderModel:
    return T5EncoderModel(
        T5Config(
            vocab_size=259,
            d_model=WIDTH,
            d_kv=8,
            d_ff=WIDTH,
            num_layers=1,
            num_heads=1,
            feed_forward_proj="gated-gelu",
            dropout_rate=0.0,
        )
    )


def _qwen_vl() -> Qwen2_5_VLForConditionalGeneration:
    tokenizer = byte_qwen_tokenizer()
    text = {
        "vocab_size": len(tokenizer),
        "hidden_size": WIDTH,
        "intermediate_size": WIDTH,
        "num_hidden_layers": 1,
        "num_attention_heads": 1,
        "num_key_value_heads": 1,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [2, 3, 3]},
        "bos_token_id": None,
        "eos_token_id": tokenizer.eos_token_id,
        "pad_token_id": tokenizer.pad_token_id,
    }
    vision = {
        "depth": 1,
        "hidden_size": WIDTH,
        "intermediate_size": WIDTH,
        "num_heads": 1,
        "out_hidden_size": WIDTH,
        "fullatt_block_indexes": [0],
    }
    return Qwen2_5_VLForConditionalGeneration(
        Qwen2_5_VLConfig(text_config=text, vision_config=vision, **special_tokens(tokenizer))
    )
