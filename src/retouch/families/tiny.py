"""The families at toy sizes: the same diffusers and transformers classes, a few million parameters, byte-level
tokenizers, weights drawn from a seed. `retouch.tiny.inpainting` trains them into models that really inpaint words.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from diffusers import (
    AutoencoderKL,
    AutoencoderKLQwenImage,
    DDIMScheduler,
    FlowMatchEulerDiscreteScheduler,
    FluxFillPipeline,
    FluxTransformer2DModel,
    QwenImageEditPipeline,
    QwenImageEditPlusPipeline,
    QwenImagePipeline,
    QwenImageTransformer2DModel,
    StableDiffusionInpaintPipeline,
    UNet2DConditionModel,
)
from torch import nn
from transformers import (
    ByT5Tokenizer,
    CLIPTextConfig,
    CLIPTextModel,
    CLIPTokenizer,
    Qwen2_5_VLConfig,
    Qwen2_5_VLForConditionalGeneration,
    Qwen2Tokenizer,
    Qwen2VLImageProcessorPil,
    SiglipVisionConfig,
    SiglipVisionModel,
    T5Config,
    T5EncoderModel,
)

from retouch.families.facts import EditVariant
from retouch.families.qwen.text import (
    CHAT_TEMPLATE,
    ImageTextProcessor,
)

TEXT_TOKENS = 24
"""Tokens (bytes) of a prompt: "The text is 'WORD'." takes 21 of T5's, 18 of CLIP's, which have no spaces."""

SHIFT = 4.0
"""Flow shift of the tiny flow models. A word is decided at high noise; with the shift that FLUX's formula gives for 32
tokens (1.6) learning takes several times longer."""

_TEXT_WIDTH = 64
_LATENT_CHANNELS = 8


def tiny_pipeline(family: str, seed: int = 0) -> Any:
    """A diffusers pipeline of the family with random weights.

    Raises:
        ValueError: a family without a toy size.
    """
    if family not in TINY:
        raise ValueError(f"no tiny model of {family!r}; there are: {', '.join(TINY)}")
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return TINY[family]()


def tiny_flux_fill() -> FluxFillPipeline:
    """FLUX.1-Fill with 2 double and 4 single blocks of width 128 on an autoencoder that shrinks 4 x: 32 tokens for
    32 x 64 pixels, 3.2 M parameters in all."""
    vae = tiny_vae()
    factor = 4  # pixels a latent cell covers
    transformer = FluxTransformer2DModel(
        in_channels=4 * (2 * _LATENT_CHANNELS + factor**2),
        out_channels=4 * _LATENT_CHANNELS,
        num_layers=2,
        num_single_layers=4,
        attention_head_dim=32,
        num_attention_heads=4,
        joint_attention_dim=_TEXT_WIDTH,
        pooled_projection_dim=_TEXT_WIDTH,
        guidance_embeds=True,
        axes_dims_rope=(8, 12, 12),
    )
    mu = float(torch.tensor(SHIFT).log())
    scheduler = FlowMatchEulerDiscreteScheduler(use_dynamic_shifting=True, base_shift=mu, max_shift=mu)
    return FluxFillPipeline(
        scheduler=scheduler,
        vae=vae,
        text_encoder=tiny_clip(),
        tokenizer=byte_clip_tokenizer(),
        text_encoder_2=tiny_t5(),
        tokenizer_2=ByT5Tokenizer(extra_ids=0, model_max_length=TEXT_TOKENS),
        transformer=transformer,
    )


def tiny_sd_inpaint() -> StableDiffusionInpaintPipeline:
    """Stable Diffusion inpainting with a U-Net of two levels, 48 wide and 96 wide with attention, on an autoencoder
    that shrinks 4 x to the 4 channels that the pipeline insists on: 8 x 16 cells for 32 x 64 pixels, 2.5 M parameters
    in all. Noise levels are those of the released model."""
    widths: Any = (48, 96)
    down: Any = ("DownBlock2D", "CrossAttnDownBlock2D")
    up: Any = ("CrossAttnUpBlock2D", "UpBlock2D")
    unet = UNet2DConditionModel(
        sample_size=16,
        in_channels=9,
        out_channels=4,
        down_block_types=down,
        up_block_types=up,
        block_out_channels=widths,
        layers_per_block=1,
        norm_num_groups=8,
        attention_head_dim=4,
        cross_attention_dim=_TEXT_WIDTH,
    )
    scheduler: Any = DDIMScheduler(
        beta_start=0.00085,
        beta_end=0.012,
        beta_schedule="scaled_linear",
        clip_sample=False,
        set_alpha_to_one=False,
        steps_offset=1,
    )
    absent: Any = None
    return StableDiffusionInpaintPipeline(
        vae=tiny_vae(latent_channels=4, shift_factor=None),  # the pipeline knows no shift
        text_encoder=tiny_clip(),
        tokenizer=byte_clip_tokenizer(),
        unet=unet,
        scheduler=scheduler,
        safety_checker=absent,
        feature_extractor=absent,
        requires_safety_checker=False,
    )


def tiny_vae(latent_channels: int = _LATENT_CHANNELS, shift_factor: float | None = 0.0) -> AutoencoderKL:
    """An autoencoder that shrinks 4 x; 0.24 M parameters.

    Convolutions start orthogonal, the second of each block small: at this size it learns three times faster than from
    the default, which loses colour in its normalisations.
    """
    widths: Any = (16, 32, 32)
    down: Any = ("DownEncoderBlock2D",) * 3
    up: Any = ("UpDecoderBlock2D",) * 3
    vae = AutoencoderKL(
        down_block_types=down,
        up_block_types=up,
        block_out_channels=widths,
        layers_per_block=1,
        latent_channels=latent_channels,
        norm_num_groups=4,
        mid_block_add_attention=False,
        use_quant_conv=False,
        use_post_quant_conv=False,
        scaling_factor=1.0,
        shift_factor=shift_factor,
    )
    for name, module in vae.named_modules():
        if isinstance(module, nn.Conv2d):
            nn.init.orthogonal_(module.weight)
            assert module.bias is not None
            nn.init.zeros_(module.bias)
            if name.endswith("conv2"):
                module.weight.data.mul_(0.1)
    return vae


def tiny_t5() -> T5EncoderModel:
    """A two-layer T5 encoder over bytes."""
    return T5EncoderModel(
        T5Config(
            vocab_size=259,
            d_model=_TEXT_WIDTH,
            d_kv=16,
            d_ff=128,
            num_layers=2,
            num_heads=4,
            feed_forward_proj="gated-gelu",
            dropout_rate=0.0,
        )
    ).eval()


def tiny_clip() -> CLIPTextModel:
    """A one-layer CLIP text encoder over bytes."""
    tokenizer: Any = byte_clip_tokenizer()
    return CLIPTextModel(
        CLIPTextConfig(
            vocab_size=len(tokenizer),
            hidden_size=_TEXT_WIDTH,
            intermediate_size=128,
            num_hidden_layers=1,
            num_attention_heads=4,
            max_position_embeddings=TEXT_TOKENS,
            bos_token_id=tokenizer.bos_token_id,
            eos_token_id=tokenizer.eos_token_id,
            pad_token_id=tokenizer.pad_token_id,
        )
    ).eval()


def tiny_image_encoder() -> SiglipVisionModel:
    """A two-layer SigLIP over 64 x 64 pixels; 0.13 M parameters."""
    return SiglipVisionModel(
        SiglipVisionConfig(
            hidden_size=64,
            intermediate_size=128,
            num_hidden_layers=2,
            num_attention_heads=4,
            image_size=64,
            patch_size=8,
        )
    ).eval()


def byte_clip_tokenizer() -> CLIPTokenizer:
    """A CLIP tokenizer without merges: every byte is a token."""
    letters = [chr(c) for c in bytes_to_characters()]
    words = [*letters, *(letter + "</w>" for letter in letters), "<|startoftext|>", "<|endoftext|>"]
    with tempfile.TemporaryDirectory() as folder:
        vocabulary, merges = Path(folder) / "vocab.json", Path(folder) / "merges.txt"
        vocabulary.write_text(json.dumps({word: i for i, word in enumerate(words)}), encoding="utf-8")
        merges.write_text("#version: 0.2\n", encoding="utf-8")
        return CLIPTokenizer(str(vocabulary), str(merges), model_max_length=TEXT_TOKENS)


def bytes_to_characters() -> list[int]:
    """Code point that stands for each byte in GPT-2's and CLIP's vocabularies: printable ones for themselves, the
    others from 256 on."""
    printable = {*range(33, 127), *range(161, 173), *range(174, 256)}
    other = iter(range(256, 512))
    return [byte if byte in printable else next(other) for byte in range(256)]


def tiny_qwen_image() -> QwenImagePipeline:
    """Qwen-Image with 2 blocks of width 64 on an autoencoder that shrinks 4 x; prompts are bytes."""
    parts = _tiny_qwen_parts()
    return QwenImagePipeline(tokenizer=byte_qwen_tokenizer(), **parts)


def tiny_qwen_image_edit(variant: EditVariant = "edit") -> QwenImageEditPipeline | QwenImageEditPlusPipeline:
    """Qwen-Image-Edit or Edit-Plus, of the same networks; 28 x 28 pixels are a token of the text encoder."""
    kind: Any = QwenImageEditPlusPipeline if variant == "edit_plus" else QwenImageEditPipeline
    processor = tiny_qwen_processor()
    return kind(tokenizer=byte_qwen_tokenizer(), processor=processor, **_tiny_qwen_parts(width=64))


def _tiny_qwen_parts(width: int = 32) -> dict[str, Any]:
    """Networks and scheduler that both have, on text states of a width."""
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
    mu = float(torch.tensor(SHIFT).log())
    scheduler: Any = FlowMatchEulerDiscreteScheduler(
        use_dynamic_shifting=True, base_shift=mu, max_shift=mu, shift_terminal=0.02
    )
    return {"scheduler": scheduler, "vae": vae, "text_encoder": tiny_qwen_vl(width), "transformer": transformer}


def tiny_qwen_vl(width: int = 32) -> Qwen2_5_VLForConditionalGeneration:
    """A two-layer Qwen2.5-VL over bytes and patches of pictures, with heads of 16."""
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
    marks = {
        "image_token_id": "<|image_pad|>",
        "video_token_id": "<|video_pad|>",
        "vision_start_token_id": "<|vision_start|>",
        "vision_end_token_id": "<|vision_end|>",
    }
    ids: dict[str, Any] = {name: tokenizer.convert_tokens_to_ids(mark) for name, mark in marks.items()}
    return Qwen2_5_VLForConditionalGeneration(Qwen2_5_VLConfig(text_config=text, vision_config=vision, **ids)).eval()


def byte_qwen_tokenizer() -> Qwen2Tokenizer:
    """A Qwen tokenizer without merges: every byte is a token, and the chat's marks are one each."""
    letters = {chr(c): i for i, c in enumerate(bytes_to_characters())}
    marks = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    marks += ["<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>"]
    tokenizer = Qwen2Tokenizer(vocab=letters, merges=[], eos_token="<|im_end|>", pad_token="<|endoftext|>")
    tokenizer.add_special_tokens({"additional_special_tokens": marks})
    return tokenizer


def tiny_qwen_processor() -> ImageTextProcessor:
    """Of the byte tokenizer and pictures of up to 64 patches, with a chat template that renders text and pictures as
    the released one does."""
    pictures = Qwen2VLImageProcessorPil(min_pixels=28 * 28, max_pixels=64 * 28 * 28)
    return ImageTextProcessor(pictures, byte_qwen_tokenizer(), chat_template=CHAT_TEMPLATE)


TINY: dict[str, Callable[[], Any]] = {
    "flux_fill": tiny_flux_fill,
    "sd_inpaint": tiny_sd_inpaint,
    "qwen_image": tiny_qwen_image,
    "qwen_image_edit": tiny_qwen_image_edit,
}
"""Family -> builder of its toy pipeline."""
