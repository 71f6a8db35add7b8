"""Time to encode new prompts with the text encoders placed once for all of them, over placing them for each prompt.

    python benchmarks/text_encoders.py --out benchmarks/results/text_encoders.json
    python benchmarks/text_encoders.py --device cuda --released --out cuda.json

Encoders of FLUX with random weights that are on the CPU between uses (`model.offload_text_encoders`). Repetitions
alternate between the two; the ratio is that of the medians of process CPU time, on a GPU of seconds. A CPU copies
nothing when it places them: there the ratio is that of the bookkeeping, and `bytes_moved` says what a GPU copies.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
from random_models import clip, t5
from transformers import CLIPTextConfig, CLIPTextModel, T5Config, T5EncoderModel

from retouch.families.text import TextEncoder, TextEncoders
from retouch.families.tiny import byte_clip_tokenizer

PROMPTS = 12
"""New prompts of an epoch of FLUX.1-Fill's published run file."""
SMALL = {"d_model": 256, "d_kv": 32, "d_ff": 512, "num_layers": 4, "num_heads": 8, "vocab_size": 1024}


def encoders(released: bool, dtype: torch.dtype) -> dict[str, TextEncoder]:
    """CLIP-L and T5 1.1 XXL, or encoders of the same classes with fewer layers."""
    torch.manual_seed(0)
    if released:
        first, second, lengths = clip(), t5(), (77, 512)
    else:
        first = CLIPTextModel(CLIPTextConfig(hidden_size=256, intermediate_size=512, num_hidden_layers=4))
        second, lengths = T5EncoderModel(T5Config(**SMALL)), (77, 128)  # type: ignore[arg-type]
    tokenizer = byte_clip_tokenizer()
    return {
        "pooled": TextEncoder(first.to(dtype), tokenizer, lengths[0], "pooler_output"),
        "text": TextEncoder(second.to(dtype), tokenizer, lengths[1]),
    }


def measure(released: bool, device: str, repetitions: int, prompts: int = PROMPTS) -> dict[str, Any]:
    made = encoders(released, torch.bfloat16 if device == "cuda" else torch.float32)
    size = sum(p.numel() * p.element_size() for e in made.values() for p in e.model.parameters())
    clock: Callable[[], float] = time.perf_counter if device == "cuda" else time.process_time
    times: dict[str, list[float]] = {"for each prompt": [], "once": []}
    moves, found = dict.fromkeys(times, 0), dict[str, torch.Tensor]()
    for repetition in range(repetitions + 1):
        for name in times:
            texts = TextEncoders(made, device)
            start = clock()
            with texts.placement.kept_on_device() if name == "once" else nullcontext():
                rows = [texts.rows([f"a sign that says {repetition} {i}"])[0] for i in range(prompts)]
            times[name].append(clock() - start)
            moves[name], found[name] = texts.placement.moves, torch.stack([row["text"] for row in rows])
    if not torch.equal(*found.values()):
        raise AssertionError("the embeddings differ")
    medians = {name: statistics.median(taken[1:]) for name, taken in times.items()}  # the first warms up
    return {
        "device": torch.cuda.get_device_name() if device == "cuda" else "cpu",
        "sizes": "released" if released else "small",
        "prompts": prompts,
        "moves": moves,
        "bytes_moved": {name: count * size for name, count in moves.items()},
        "repetitions": repetitions,
        "seconds": {name: round(value, 4) for name, value in medians.items()},
        "ratio": round(medians["for each prompt"] / medians["once"], 3),
        "torch": torch.__version__,
        "threads": torch.get_num_threads(),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--released", action="store_true", help="CLIP-L and T5-XXL instead of small encoders")
    parser.add_argument("--repetitions", type=int, default=31)
    given = parser.parse_args()
    text = json.dumps(measure(given.released, given.device, given.repetitions), indent=2) + "\n"
    print(text, end="")
    if given.out:
        given.out.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
