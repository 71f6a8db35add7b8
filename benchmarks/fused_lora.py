"""CPU time of a FLUX forward and backward with fused LoRA layers (adapters/fused_lora.py), over that with peft's.

    python benchmarks/fused_lora.py --out benchmarks/results/fused_lora.json

Random weights at the published LoRA targets, rank 32, B not 0; gradients of the factors alone. Repetitions alternate
between the two in one process: `ratio` is the median of the ratios of neighbours of process CPU time, fused / peft. The
differences are those of the velocity and of all gradients, relative to the largest value. `lora_share` is the share of
peft's time that the LoRA takes, from repetitions with the adapters off. The CPU computes in fp32; a GPU under autocast
saves the same passes over the output of each layer.

`bf16` has the fused layers with fp32 factors on a base in bf16: `ratio` is without autocast (training.mixed_precision
"no") over under it.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path
from statistics import median
from typing import Any

import torch
from diffusers import FluxTransformer2DModel
from loop_overhead import machine
from peft.tuners.lora import Linear
from torch import Tensor, nn

from retouch.adapters.fused_lora import FusedLinear
from retouch.adapters.lora import add_lora
from retouch.families import FAMILIES

HEADS, HEAD, DOUBLE, SINGLE, RANK = 6, 64, 2, 4, 32
TEXT, WIDTH = 64, 256
ARMS: dict[str, type[nn.Module]] = {"peft": Linear, "fused": FusedLinear}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="JSON to write")
    parser.add_argument("--tokens", type=int, default=256, help="of the image")
    parser.add_argument("--rows", type=int, default=2)
    parser.add_argument("--repetitions", type=int, default=11)
    given = parser.parse_args()
    torch.set_num_threads(1)
    found = measure(given.tokens, given.rows, given.repetitions)
    found["bf16"] = without_autocast(given.tokens, given.rows, given.repetitions)
    text = json.dumps(found, indent=2) + "\n"
    print(text, end="")
    if given.out:
        given.out.write_text(text, encoding="utf-8")


def measure(tokens: int, rows: int, repetitions: int) -> dict[str, Any]:
    made, inputs = network(), tensors(tokens, rows)
    times: dict[str, list[float]] = {name: [] for name in (*ARMS, "off")}
    found: dict[str, list[Tensor]] = {}
    for number in range(repetitions + 1):
        for name in times:
            switch(made, name)
            took, values = seconds(made, inputs)
            if number:  # the first warms up
                times[name].append(took)
            found[name] = values
    ratios = sorted(fused / plain for plain, fused in zip(times["peft"], times["fused"], strict=True))
    pairs = zip(found["peft"], found["fused"], strict=True)
    return {
        "machine": machine(),
        "width": HEADS * HEAD, "blocks": DOUBLE + SINGLE, "rank": RANK,
        "image_tokens": tokens, "text_tokens": TEXT, "rows": rows, "repetitions": repetitions,
        "cpu_s": {name: round(median(values), 4) for name, values in times.items()},
        "ratio": round(median(ratios), 4),
        "ratio_range": [round(ratios[0], 4), round(ratios[-1], 4)],
        "lora_share": round(1 - median(times["off"]) / median(times["peft"]), 4),
        "largest_relative_difference": max(float((a - b).abs().max() / a.abs().max()) for a, b in pairs),
    }  # fmt: skip


def without_autocast(tokens: int, rows: int, repetitions: int) -> dict[str, Any]:
    """CPU time on a bf16 base, with autocast and without."""
    made, inputs = network().bfloat16(), tensors(tokens, rows)
    for name, parameter in made.named_parameters():
        if "lora_" in name:
            parameter.data = parameter.data.float()
    inputs = {name: t if name.endswith("_ids") else t.bfloat16() for name, t in inputs.items()}
    times: dict[bool, list[float]] = {True: [], False: []}
    for number in range(repetitions + 1):
        for autocast, own in times.items():
            with torch.autocast("cpu", torch.bfloat16, enabled=autocast, cache_enabled=False):
                took, _ = seconds(made, inputs)
            if number:  # the first warms up
                own.append(took)
    ratios = sorted(plain / lowered for lowered, plain in zip(times[True], times[False], strict=True))
    return {
        "cpu_s": {"autocast": round(median(times[True]), 4), "no autocast": round(median(times[False]), 4)},
        "ratio": round(median(ratios), 4),
        "ratio_range": [round(ratios[0], 4), round(ratios[-1], 4)],
    }


def network() -> Any:
    torch.manual_seed(0)
    made = FluxTransformer2DModel(
        in_channels=64, num_layers=DOUBLE, num_single_layers=SINGLE, attention_head_dim=HEAD, num_attention_heads=HEADS,
        joint_attention_dim=WIDTH, pooled_projection_dim=WIDTH, guidance_embeds=True, axes_dims_rope=(16, 24, 24),
    ).eval()  # fmt: skip
    add_lora(made, RANK, 3 * RANK // 2, FAMILIES["flux_fill"].spec.lora_targets)
    for name, parameter in made.named_parameters():
        if "lora_B" in name:
            nn.init.normal_(parameter, std=0.02)
    return made


def tensors(tokens: int, rows: int) -> dict[str, Tensor]:
    return {
        "hidden_states": torch.randn(rows, tokens, 64),
        "encoder_hidden_states": torch.randn(rows, TEXT, WIDTH),
        "pooled_projections": torch.randn(rows, WIDTH),
        "timestep": torch.full((rows,), 0.5),
        "guidance": torch.full((rows,), 3.5),
        "img_ids": torch.zeros(tokens, 3),
        "txt_ids": torch.zeros(TEXT, 3),
    }


def switch(made: Any, name: str) -> None:
    """Layers of an arm; "off" leaves the LoRA out."""
    for module in made.modules():
        if isinstance(module, Linear):
            module.__class__ = ARMS.get(name, Linear)  # pyright: ignore[reportAttributeAccessIssue]
            module._disable_adapters = name == "off"


def seconds(made: Any, inputs: dict[str, Tensor]) -> tuple[float, list[Tensor]]:
    """CPU time of a forward and backward; the velocity and the gradients of the factors."""
    made.zero_grad()
    start = time.process_time()
    # gradients reach every layer, as behind the first LoRA of a network
    velocity = made(**{**inputs, "hidden_states": inputs["hidden_states"].requires_grad_()}, return_dict=False)[0]
    velocity.float().square().mean().backward()
    took = time.process_time() - start
    gradients = [p.grad.clone() for p in made.parameters() if p.grad is not None]
    return took, [velocity.detach(), *gradients]


if __name__ == "__main__":
    main()
