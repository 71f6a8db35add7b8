"""Parts of the Qwen families at toy sizes; see `retouch.families.tiny`."""

from __future__ import annotations

from typing import Any

from diffusers import AutoencoderKLQwenImage, FlowMatchEulerDiscreteScheduler, QwenImageTransformer2DModel
from transformers import Qwen2_5_VLConfig, Qwen2_5_VLForConditionalGeneration, Qwen2Tokenizer, Qwen2VLImageProcessorPil

from retouch.families.qwen.text import CHAT_TEMPLATE, ImageTextProcessor
from retouch.families.tiny import SHIFTED, bytes_to_characters


def parts(width: int = 32) -> dict[str, Any]:
    """Networks and scheduler of a pipeline, on text states of a width; the autoencoder downsamples by 4."""
    vae: Any = AutoencoderKLQwenImage(
        base_dim=8,
        z_dim=4,
        dim_mult=[1, 2, 2],
        num_res_blocks=1,
        temperal_downsample=[False, True],
        latents_mean=[0.1, -0.2, 0.0, 0.3],
        latents_std=[0.8, 1.1, 1.0, 0.9],
    )
    transformer: Any = QwenImageTransformer2DModel(
        patch_size=2,
        in_channels=16,
        out_channels=4,
        num_layers=2,
        attention_head_dim=16,
        num_attention_heads=4,
        joint_attention_dim=width,
        axes_dims_rope=(4, 6, 6),
    )
    scheduler = FlowMatchEulerDiscreteScheduler(**SHIFTED, shift_terminal=0.02)
    return {"scheduler": scheduler, "vae": vae, "text_encoder": tiny_qwen_vl(width), "transformer": transformer}


def tiny_qwen_vl(width: int = 32) -> Qwen2_5_VLForConditionalGeneration:
    """A two-layer Qwen2.5-VL over bytes and image patches, with heads of 16."""
    tokenizer = byte_qwen_tokenizer()
    text = {
        "vocab_size": len(tokenizer),
        "hidden_size": width,
        "intermediate_size": 2 * width,
        "num_hidden_layers": 2,
        "num_attention_heads": width // 16,
        "num_key_value_heads": width // 16,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [2, 3, 3]},
        "bos_token_id": None,
        "eos_token_id": tokenizer.eos_token_id,
        "pad_token_id": tokenizer.pad_token_id,
    }
    vision = {
        "depth": 1,
        "hidden_size": 32,
        "intermediate_size": 32,
        "num_heads": 2,
        "out_hidden_size": width,
        "fullatt_block_indexes": [0],
    }
    config = Qwen2_5_VLConfig(text_config=text, vision_config=vision, **special_tokens(tokenizer))
    return Qwen2_5_VLForConditionalGeneration(config).eval()


def special_tokens(tokenizer: Any) -> dict[str, Any]:
    """Options of a vision-language model: the ids of the tokens that mark images."""
    marks = {
        "image_token_id": "<|image_pad|>",
        "video_token_id": "<|video_pad|>",
        "vision_start_token_id": "<|vision_start|>",
        "vision_end_token_id": "<|vision_end|>",
    }
    return {name: tokenizer.convert_tokens_to_ids(mark) for name, mark in marks.items()}


def byte_qwen_tokenizer() -> Qwen2Tokenizer:
    """A Qwen tokenizer without merges: every byte is a token, and the chat's marks are one each."""
    letters = {chr(c): i for i, c in enumerate(bytes_to_characters())}
    marks = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    marks += ["<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>"]
    tokenizer = Qwen2Tokenizer(vocab=letters, merges=[], eos_token="<|im_end|>", pad_token="<|endoftext|>")
    tokenizer.add_special_tokens({"additional_special_tokens": marks})
    return tokenizer


def tiny_qwen_processor() -> ImageTextProcessor:
    """A processor with the byte tokenizer, images of up to 64 patches, and a chat template that renders text and images
    as the released one does."""
    images = Qwen2VLImageProcessorPil(min_pixels=28 * 28, max_pixels=64 * 28 * 28)
    return ImageTextProcessor(images, byte_qwen_tokenizer(), chat_template=CHAT_TEMPLATE)
