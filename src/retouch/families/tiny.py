"""Parts of the families at toy sizes: the same diffusers and transformers classes, a few million parameters, byte-level
tokenizers, random weights from a seed. Each family combines them in its `tiny`; `retouch.tiny` trains them into
models that inpaint text and edit images.
"""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import Any

import torch
from diffusers import AutoencoderKL
from torch import nn
from transformers import (
    CLIPTextConfig,
    CLIPTextModel,
    CLIPTextModelWithProjection,
    CLIPTokenizer,
    SiglipVisionConfig,
    SiglipVisionModel,
    T5Config,
    T5EncoderModel,
)

from retouch.families.loading import family_class

TEXT_TOKENS = 24
"""Tokens (bytes) of a prompt: "The text is 'WORD'." takes 21 of T5's, 18 of CLIP's, which have no spaces."""

TEXT_WIDTH = 64

CHANNELS = 8
"""Latent channels of the toy FLUX."""

SHIFT = 4.0
"""Flow shift of the tiny flow models. A word is decided at high noise; with the shift that FLUX's formula gives for 32
tokens (1.6) learning takes several times longer."""

_MU = float(torch.tensor(SHIFT, dtype=torch.float32).log())
SHIFTED: dict[str, Any] = {"use_dynamic_shifting": True, "base_shift": _MU, "max_shift": _MU}
"""Options of a flow scheduler with `SHIFT` at every number of tokens."""


def tiny_pipeline(family: str, seed: int = 0, *args: Any) -> Any:
    """A diffusers pipeline of the family with random weights.

    Args:
        args: of the family's `tiny`.
    """
    kind = family_class(family)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return kind.tiny(*args)


def autoencoder(latent_channels: int = CHANNELS, shift_factor: float | None = 0.0) -> AutoencoderKL:
    """An autoencoder that downsamples by 4; 0.24 M parameters."""
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
    start_orthogonal(vae)
    return vae


@torch.no_grad()
def start_orthogonal(vae: nn.Module) -> None:
    """Initialize the convolutions of an autoencoder orthogonal, the second of each block small: at this size it learns
    three times faster than from the default initialization, which loses colour in its normalizations. A single frame
    uses only the last of the three time steps of a convolution over time; the others become 0."""
    for name, module in vae.named_modules():
        if not isinstance(module, nn.Conv2d | nn.Conv3d):
            continue
        used = module.weight if isinstance(module, nn.Conv2d) else torch.empty_like(module.weight[:, :, -1])
        nn.init.orthogonal_(used).mul_(0.1 if name.endswith("conv2") else 1.0)
        if isinstance(module, nn.Conv3d):
            module.weight.zero_()[:, :, -1] = used
        if module.bias is not None:
            nn.init.zeros_(module.bias)


def t5() -> T5EncoderModel:
    """A two-layer T5 encoder over bytes."""
    return T5EncoderModel(
        T5Config(
            vocab_size=259,
            d_model=TEXT_WIDTH,
            d_kv=16,
            d_ff=128,
            num_layers=2,
            num_heads=4,
            feed_forward_proj="gated-gelu",
            dropout_rate=0.0,
        )
    ).eval()


def clip() -> CLIPTextModel:
    """A one-layer CLIP text encoder over bytes."""
    return CLIPTextModel(_clip_config(TEXT_WIDTH, intermediate_size=128, num_hidden_layers=1)).eval()


def deep_clip(width: int) -> CLIPTextModel:
    """A two-layer CLIP text encoder over bytes, whose last layer but one is not its embedding."""
    return CLIPTextModel(_clip_config(width)).eval()


def projected_clip(width: int, projection: int) -> CLIPTextModelWithProjection:
    """`deep_clip` with a projected vector of the prompt."""
    return CLIPTextModelWithProjection(_clip_config(width, projection_dim=projection)).eval()


def _clip_config(width: int, **options: int) -> CLIPTextConfig:
    tokenizer: Any = byte_clip_tokenizer()
    sizes: dict[str, Any] = {"intermediate_size": 2 * width, "num_hidden_layers": 2, "num_attention_heads": 4} | options
    return CLIPTextConfig(
        vocab_size=len(tokenizer),
        hidden_size=width,
        max_position_embeddings=TEXT_TOKENS,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        **sizes,
    )


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


def byte_clip_tokenizer(pad: str = "<|endoftext|>") -> CLIPTokenizer:
    """A CLIP tokenizer without merges: every byte is a token.

    Args:
        pad: token of the padding; "!" in the second tokenizer of SDXL and SD3.
    """
    letters = [chr(c) for c in bytes_to_characters()]
    words = [*letters, *(letter + "</w>" for letter in letters), "<|startoftext|>", "<|endoftext|>"]
    with tempfile.TemporaryDirectory() as folder:
        vocabulary, merges = Path(folder) / "vocab.json", Path(folder) / "merges.txt"
        vocabulary.write_text(json.dumps({word: i for i, word in enumerate(words)}), encoding="utf-8")
        merges.write_text("#version: 0.2\n", encoding="utf-8")
        return CLIPTokenizer(str(vocabulary), str(merges), model_max_length=TEXT_TOKENS, pad_token=pad)


def bytes_to_characters() -> list[int]:
    """Code point that stands for each byte in GPT-2's and CLIP's vocabularies: printable ones for themselves, the
    others from 256 on."""
    printable = {*range(33, 127), *range(161, 173), *range(174, 256)}
    other = iter(range(256, 512))
    return [byte if byte in printable else next(other) for byte in range(256)]
