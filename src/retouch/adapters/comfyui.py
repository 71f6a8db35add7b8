"""ComfyUI's formats: names of LoRA weights, and the arithmetic of its node for style adapters.

    Stable Diffusion     lora_unet_down_blocks_0_..._attn1_to_q.lora_down.weight, .lora_up.weight, .alpha
    FLUX, Qwen-Image     transformer.transformer_blocks.0.attn.to_q.lora_A.weight, .lora_B.weight, .alpha

Both hold diffusers' module names, which ComfyUI translates to those of its own networks: q, k and v of FLUX to slices
of one weight. Its U-Net is the only network that it does not accept the dotted names for.

ComfyUI-IPAdapter-Flux adds `weight · attention(q', norm(k), norm(v))` in every block, with one `weight` for all; in
retouch, FLUX adds `scale · attention(q', norm(k), v)` unless `value_norm` is set (`retouch.adapters.hosts`).
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
from torch import Tensor

from retouch.adapters.formats import AdapterFile
from retouch.adapters.lora import file_tensors

TOKENS = 128
"""Number of tokens that ComfyUI-IPAdapter-Flux builds its modules for, independent of the file."""


def comfyui_tensors(state: Mapping[str, Tensor], rank: int, prefix: str) -> dict[str, Tensor]:
    """Tensors of the file.

    Args:
        state: of `folded_lora`. Since the scale is in the weights, alpha is the rank, and a program that does not read
            alpha applies the same update.
        prefix: name of the network in its pipeline, "unet" or "transformer".
    """
    found: dict[str, Tensor] = {}
    for key, tensor in file_tensors(state, prefix).items():
        module, _, factor = key.removesuffix(".weight").rpartition(".")
        if prefix == "unet":
            module = "lora_" + module.replace(".", "_")
            factor = {"lora_A": "lora_down", "lora_B": "lora_up"}[factor]
        found[f"{module}.{factor}.weight"] = tensor
        found[f"{module}.alpha"] = torch.tensor(float(rank), dtype=torch.float32)
    return found


def same_in_node(file: AdapterFile) -> bool:
    """Whether the node computes what the adapter was trained with: normalized values, and one factor for all blocks."""
    return bool(file.value_norm) and len(set(file.scale)) == 1


def node_weight(file: AdapterFile) -> float:
    """`weight` to set in the node.

    If `same_in_node`, this is the scale. If not, it is the mean over blocks of the root mean square of the scaled
    values, which is the length that the norm takes away; it holds for tokens whose normalized entries are independent
    with variance 1, so it is an estimate.
    """
    return sum(s * _value_rms(file, n) for s, n in zip(file.scale, file.shape.numbers(), strict=True)) / len(file.scale)


def _value_rms(file: AdapterFile, number: int) -> float:
    if file.value_norm:
        return 1.0
    gain, bias = (file.tensors[f"image_proj.norm.{name}"].float() for name in ("weight", "bias"))
    values = file.tensors[f"ip_adapter.{number}.to_v_ip.weight"].float()
    return math.sqrt(float((values * gain).square().sum() + (values @ bias).square().sum()) / len(values))
