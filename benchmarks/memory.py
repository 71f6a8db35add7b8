"""What `retouch check --memory` counts against what a run holds, in one optimizer step of GRPO.

Held is measured where it is most: gradients are there, and the optimizer's moments from the step before. On a GPU the
allocator tells; on a CPU it is every tensor that is alive, each storage once, so that what the run keeps and nobody
counted would show. Networks have the released or the toy sizes and random weights; pictures are small, because
activations, which the count leaves out, are not what is compared.

    python benchmarks/memory.py --out benchmarks/results/memory.json
    python benchmarks/memory.py --cases sd_inpaint-lora-released
"""

from __future__ import annotations

import argparse
import gc
import json
import tempfile
from pathlib import Path
from typing import Any

import torch
from epochs import epochs
from gpu import TRAINED
from held import held_bytes, watched
from loop_overhead import NoRewards, machine
from random_models import random_weights, write_encoder, write_model

from retouch.config import RunConfig, parse_run
from retouch.doctor.memory import report_memory
from retouch.tiny.signs import (
    draw_words,
    write_signs,
)
from retouch.training.build import build
from retouch.training.session import Session

CASES = (
    *(f"{family}-{trained}-tiny" for family in ("flux_fill", "sd_inpaint") for trained in TRAINED),
    "qwen_image-lora-tiny",
    "sd_inpaint-lora-released",
    "sd_inpaint-ip_adapter-released",
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", nargs="+", default=list(CASES), help="FAMILY-TRAINED-tiny or -released")
    parser.add_argument("--out", type=Path, help="JSON to write")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    rows: list[dict[str, Any]] = []
    for case in arguments.cases:
        with tempfile.TemporaryDirectory() as work:
            rows.append(measure(case, Path(work)))
        print(json.dumps(rows[-1]), flush=True)
    if arguments.out:
        result = {"machine": machine(), "rows": rows}
        arguments.out.write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")


def measure(case: str, work: Path) -> dict[str, Any]:
    """Two steps of a run -> what was counted and what was held before the second update, in bytes."""
    family, trained, size = case.split("-")
    config = run_file(family, trained, work, tiny=size == "tiny")
    counted = report_memory(config)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    gc.collect()
    before = held_bytes(device)
    with random_weights(device):
        run = build(config)
    try:
        run.rewards = NoRewards(run.rewards)  # type: ignore[assignment]
        held = watched(run, device)
        with Session(run) as session:
            if config.algorithm.kl_weight:  # type: ignore[union-attr]
                run.policy.snapshot("reference")
            epoch = epochs(session)
            epoch()
            epoch()
    finally:
        run.close()
    expected = counted["device_bytes"] + (counted["host_bytes"] if device.type == "cpu" else 0)
    return {
        "case": case,
        "device": device.type,
        "counted_bytes": expected,
        "held_bytes": held[-1] - before,
        "ratio": round((held[-1] - before) / expected, 4),
    }


def run_file(family: str, trained: str, work: Path, *, tiny: bool) -> RunConfig:
    """Two images of 64 pixels' side, a window of one step, with a KL: its reference is a copy of what is trained."""
    side = 64
    write_model(work / "model", family, tiny=tiny)
    write_encoder(work / "encoder", tiny=tiny)
    write_signs(work / "signs", draw_words(2, "train", 1), (side, side), 1, styled=True)
    style = {"image_encoder": str(work / "encoder")} if trained == "ip_adapter" else {}
    return parse_run(
        {
            "name": "memory",
            "model": {
                "family": family,
                "path": str(work / "model"),
                "dtype": "fp32" if tiny else "bf16",
                "train": TRAINED[trained] | style,
                **({"max_sequence_length": 24} if family != "sd_inpaint" else {}),
            },
            "data": {"format": "self_bench", "path": str(work / "signs"), "resolution": [side, side]},
            "rollout": {
                "group_size": 2,
                "global_groups_per_batch": 1,
                "batch_size_per_device": 2,
                "num_steps": 2,
                "guidance_scale": 1.0,
                "window": {"size": 1, "range": [0.0, 0.5]},
            },
            "algorithm": {"name": "grpo", "kl_weight": 0.01},
            "rewards": {"preservation": {}},
            "optimizer": {"batch_size_per_device": 1, "gradient_accumulation": 2},
            "ema": {},
            "training": {
                "max_steps": 1000,
                "checkpoint_every": 0,
                "eval_every": 0,
                "mixed_precision": "no" if tiny else "bf16",
            },
            "evaluation": {"num_examples": 1, "num_steps": 1, "grid_examples": 0},
            "logging": {"dir": str(work / "runs"), "sinks": []},
        }
    )


if __name__ == "__main__":
    main()
