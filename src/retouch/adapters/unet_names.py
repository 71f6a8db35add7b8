"""Names of a U-Net's layers in the original networks of Stable Diffusion and SDXL, which number the parts of all levels
in one row; LoRA files of kohya (sd-scripts) for SDXL have them.

    down_blocks.1.attentions.0.proj_in    input_blocks.4.1.proj_in     with 2 layers a level
    mid_block.resnets.1.conv1             middle_block.2.in_layers.2
    up_blocks.0.upsamplers.0.conv         output_blocks.2.2.conv
"""

from __future__ import annotations

import re
from collections.abc import Collection

_OUTER = {
    "conv_in": "input_blocks.0.0",
    "time_embedding.linear_1": "time_embed.0",
    "time_embedding.linear_2": "time_embed.2",
    "add_embedding.linear_1": "label_emb.0.0",
    "add_embedding.linear_2": "label_emb.0.2",
    "conv_norm_out": "out.0",
    "conv_out": "out.2",
}

_OF_RESNETS = {
    "norm1": "in_layers.0",
    "conv1": "in_layers.2",
    "time_emb_proj": "emb_layers.1",
    "norm2": "out_layers.0",
    "conv2": "out_layers.3",
    "conv_shortcut": "skip_connection",
}

_BLOCK = re.compile(r"(down_blocks\.|up_blocks\.|mid_block)(\d*)\.(\w+)\.(\d+)\.(.+)")


def original_names(modules: Collection[str]) -> dict[str, str]:
    """Original name -> name in diffusers, of a U-Net's layers by their names in diffusers; {} of another network."""
    layers = sum(re.fullmatch(r"down_blocks\.0\.resnets\.\d+", module) is not None for module in modules)
    found = {_original(module, layers, modules): module for module in modules} if layers else {}
    return {name: module for name, module in found.items() if name}


def _original(module: str, layers: int, modules: Collection[str]) -> str:
    """ "" for a container of layers.

    Args:
        layers: per level.
    """
    if module in _OUTER:
        return _OUTER[module]
    if (match := _BLOCK.fullmatch(module)) is None:
        return ""
    side, level, kind, number, inside = match.groups()
    first, index = int(level or 0) * (layers + 1), int(number)
    if kind == "downsamplers":
        return f"input_blocks.{first + layers + 1}.0.op"
    if kind == "upsamplers":  # the last part of its block, behind the attention where there is one
        attends = f"{side}{level}.attentions.{layers}" in modules
        return f"output_blocks.{first + layers}.{2 if attends else 1}.conv"
    place = {
        "down_blocks.": f"input_blocks.{1 + first + index}.{0 if kind == 'resnets' else 1}",
        "up_blocks.": f"output_blocks.{first + index}.{0 if kind == 'resnets' else 1}",
        "mid_block": f"middle_block.{2 * index if kind == 'resnets' else 1}",
    }[side]
    return f"{place}.{_OF_RESNETS.get(inside, inside) if kind == 'resnets' else inside}"
