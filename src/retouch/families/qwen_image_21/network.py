"""diffusers' network of Qwen-Image-2.1 with the layout of its sequence known on the CPU.

diffusers' own forward reads the layout back from a mask on the device, several times, and a GPU then has to compute
everything before it. Here the layout comes with the call; what follows from it is made once. The arithmetic is that of
diffusers' blocks, to the bit.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import groupby
from types import MethodType
from typing import Any

import torch
from diffusers import QwenImage21Transformer2DModel
from diffusers.models.transformers.transformer_qwenimage21 import _qwenimage21_prefix_segments
from torch import Tensor, nn

from retouch.lru import LruCache

SLOT_TOKENS = 4
"""Tokens of the latents of a slot of the prompt."""

Shapes = tuple[tuple[int, int, int], ...]
"""Frames, height and width of each image in tokens, the noisy one last."""


@dataclass(frozen=True)
class Layout:
    """The joint sequence of a sample.

    Attributes:
        runs: (whether they are of the images, start, end) of runs of tokens of the images or of states of the text, of
            which those of slots are left out.
        rotary: [S, D] rotary frequencies.
        target: [S] bool, the tokens of the noisy latents.
        segments: runs before these, as diffusers' attention takes them.
    """

    runs: list[tuple[bool, int, int]]
    rotary: Tensor
    target: Tensor
    segments: Any


def arranged(network: nn.Module) -> nn.Module:
    """Make a network of diffusers also take `img_mask` as flags of one sample, which stand for all, without caches,
    other attention masks and padding. In place: class, weights and names stay."""
    network.forward = MethodType(_forward, network)
    return network


def _forward(self: Any, hidden_states: Tensor, encoder_hidden_states: Tensor, **given: Any) -> Any:
    if isinstance(given["img_mask"], Tensor):
        return QwenImage21Transformer2DModel.forward(self, hidden_states, encoder_hidden_states, **given)
    layout = _layout(self, tuple(given["img_mask"]), tuple(given["img_shapes"][0]), hidden_states.device)
    images, text = self.img_in(hidden_states), self.txt_in(encoder_hidden_states)
    joint = torch.cat([(images if latent else text)[:, a:b] for latent, a, b in layout.runs], dim=1)
    timestep, target = given["timestep"].to(images.dtype), None
    if self.config.causal_condition:  # tokens before the noisy latents are at time 0
        timestep, target = torch.cat([timestep, timestep.new_zeros(1)]), layout.target
    embedded = self.time_text_embed(timestep, images)
    rest = (self.modulation(embedded), layout.rotary, None, target, None, None, None, layout.segments, None)
    for block in self.transformer_blocks:
        if torch.is_grad_enabled() and self.gradient_checkpointing:
            joint = self._gradient_checkpointing_func(block, joint, *rest)
        else:
            joint = block(joint, *rest)
    return (self.proj_out(self.norm_out(joint, embedded, target)),)


def _layout(network: Any, slots: tuple[bool, ...], shapes: Shapes, device: torch.device) -> Layout:
    """The layout of a call, made once: every step of a solver has it again."""
    kept: LruCache[Any, Layout] = vars(network).setdefault("_layouts", LruCache(256))
    return kept.get((slots, shapes, device), lambda _: _arrange(network, slots, shapes, device))


@torch.no_grad()
def _arrange(network: Any, slots: tuple[bool, ...], shapes: Shapes, device: torch.device) -> Layout:
    runs, latents, place = list[tuple[bool, int, int]](), 0, 0
    for flag, run in groupby(slots):
        begun, tokens = place, latents
        place += len(list(run))
        latents += SLOT_TOKENS * (place - begun) if flag else 0
        runs.append((True, tokens, latents) if flag else (False, begun, place))
    mask = torch.tensor([flag for flag in slots for _ in range(SLOT_TOKENS if flag else 1)], dtype=torch.bool)
    ids, target = network.build_token_metadata(mask, list(shapes))
    segments = _qwenimage21_prefix_segments(ids, int((~target).sum()))
    return Layout(runs, network.pos_embed(list(shapes), mask, device=device), target.to(device), segments)
