"""CPU time of a Qwen-Image forward and backward with the text cut to a bucket or to its exact length
(`model.exact_text_lengths`), over that with the whole padding.

    python benchmarks/text_buckets.py --out benchmarks/results/text_buckets.json

One condition, encoded to `max_sequence_length`, read without the cut, with it, and with the exact one, which needs no
mask. Repetitions alternate between the three; a ratio is that of the medians of process CPU time. The network has the
released blocks at a smaller width and depth, and 1,024 image tokens (512 x 512 pixels).
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from diffusers import QwenImageTransformer2DModel

from retouch.families.qwen import base
from retouch.families.qwen.base import QwenModel, padded
from retouch.types import Condition

IMAGE_TOKENS, LENGTH, PROMPT = 1024, 512, 60
WIDTH = {"attention_head_dim": 64, "num_attention_heads": 6, "joint_attention_dim": 256, "axes_dims_rope": (16, 24, 24)}


def network(layers: int) -> Any:
    torch.manual_seed(0)
    return QwenImageTransformer2DModel(patch_size=2, in_channels=64, out_channels=16, num_layers=layers, **WIDTH)


def condition(rows: int) -> Condition:
    """Prompts of 60 tokens in 512."""
    text, mask = padded([torch.randn(PROMPT, WIDTH["joint_attention_dim"]) for _ in range(rows)], LENGTH)
    return Condition({"text": text, "text_mask": mask, "guidance": torch.ones(rows)}, None, (512, 512))


def seconds(model: Any, made: Any, given: Condition, x: torch.Tensor, t: torch.Tensor) -> tuple[float, torch.Tensor]:
    """CPU time of a forward and backward, and the velocity."""
    made.zero_grad()
    start = time.process_time()
    velocity = QwenModel._velocity(model, made, x, t, given)
    velocity.square().mean().backward()
    return time.process_time() - start, velocity.detach()


def measure(layers: int, rows: int, repetitions: int, image_tokens: int = IMAGE_TOKENS) -> dict[str, Any]:
    made, given = network(layers), condition(rows)
    side = 2 * int(image_tokens**0.5)
    x, t = torch.randn(rows, 16, side, side), torch.full((rows,), 0.5)
    model = mock.Mock(dtype=torch.float32)
    times: dict[str, list[float]] = {"whole padding": [], "bucket": [], "exact": []}
    found: dict[str, torch.Tensor] = {}
    for _ in range(repetitions + 1):
        for name in times:
            whole = mock.patch.object(base, "without_common_padding", lambda text, mask, _: (text, mask > 0))
            model.config.exact_text_lengths = name == "exact"
            with whole if name == "whole padding" else mock.patch.object(base, "BUCKET", 32):
                took, found[name] = seconds(model, made, given, x, t)
            times[name].append(took)
    medians = {name: statistics.median(taken[1:]) for name, taken in times.items()}  # the first warms up
    whole_padding = found["whole padding"]
    difference = max(float((found[name] - whole_padding).abs().max()) for name in ("bucket", "exact"))
    return {
        "image_tokens": image_tokens,
        "max_sequence_length": LENGTH,
        "prompt_tokens": PROMPT,
        "bucket_tokens": -(-PROMPT // base.BUCKET) * base.BUCKET,
        "layers": layers,
        "width": WIDTH["attention_head_dim"] * WIDTH["num_attention_heads"],
        "rows": rows,
        "repetitions": repetitions,
        "cpu_seconds": {name: round(value, 4) for name, value in medians.items()},
        "ratio": round(medians["whole padding"] / medians["bucket"], 3),
        "exact_ratio": round(medians["bucket"] / medians["exact"], 3),
        "largest_relative_difference": difference / float(whole_padding.abs().max()),
        "torch": torch.__version__,
        "threads": torch.get_num_threads(),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--rows", type=int, default=2)
    parser.add_argument("--repetitions", type=int, default=7)
    given = parser.parse_args()
    text = json.dumps(measure(given.layers, given.rows, given.repetitions), indent=2) + "\n"
    print(text, end="")
    if given.out:
        given.out.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
