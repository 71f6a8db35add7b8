"""Peak memory of a DiffusionNFT step: the noised copies of one micro-batch at a time, against those of the whole step.

Before, the copies of every micro-batch of a step, each with its condition, were kept from the forwards of the snapshots
to the policy's last backward. Now each forward makes its own again. Both run in one process, in turns. `peak` is the
maximum of the bytes of tensors that an epoch of one optimizer step creates, beside weights and snapshots; `cpu` is the
process CPU time of the epoch (median, and the median of the ratios of neighbours).

The network has the released width of text (4,096) and a text of 128 tokens beside 64 image tokens, in 6 blocks of width
128: relative to a released FLUX.1-Fill its conditions are large and its activations are small, so that the share of
memory that is saved does not carry over; the bytes of conditions for each sample do.

    python benchmarks/nft_memory.py --out benchmarks/results/nft_memory.json
"""

from __future__ import annotations

import argparse
import gc
import json
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from statistics import median
from typing import Any

import torch
from diffusers import FluxTransformer2DModel
from epochs import epochs
from loop_overhead import NoRewards, machine
from scouts import patched

from retouch.algorithms.nft import recipe
from retouch.config import parse_run
from retouch.families.flux_fill.model import FluxFill
from retouch.observe.live_bytes import LiveBytes
from retouch.tiny.signs import draw_words, write_signs
from retouch.training.build import build
from retouch.training.session import Session

SIDE, IMAGES, ROWS, TOKENS, WIDTH = 64, 32, 4, 128, 4096
ARMS = ("kept", "made again")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pairs", type=int, default=5)
    parser.add_argument("--out", type=Path, help="JSON to write")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as work:
        row = measure(arguments.pairs, Path(work))
    text = json.dumps({"machine": machine(), **row}, indent=2) + "\n"
    print(text, end="")
    if arguments.out:
        arguments.out.write_text(text, encoding="utf-8")


def measure(pairs: int, work: Path) -> dict[str, Any]:
    """Epochs of both arms in turns."""
    run = build(run_file(work))
    seconds: dict[str, list[float]] = {arm: [] for arm in ARMS}
    peaks: dict[str, int] = {}
    try:
        run.rewards = NoRewards(run.rewards)  # type: ignore[assignment]
        run.model.decode = lambda latents: torch.zeros(len(latents), 3, SIDE, SIDE)  # type: ignore[method-assign]
        with Session(run) as session:
            for name in ("old", "reference"):
                run.policy.snapshot(name)
            epoch = epochs(session)
            epoch()  # encodings, moments
            for arm in ARMS:
                with arms(arm):
                    gc.collect()
                    with LiveBytes() as live:
                        epoch()
                    peaks[arm] = live.peak
            for _ in range(pairs):
                for arm in ARMS:
                    with arms(arm):
                        start = time.process_time()
                        epoch()
                        seconds[arm].append(time.process_time() - start)
    finally:
        run.close()
    ratios = sorted(b / a for a, b in zip(*seconds.values(), strict=True))
    return {
        "images": IMAGES,
        "rows_per_forward": ROWS,
        "text": [TOKENS, WIDTH],
        "peak_mib": {arm: round(peak / 2**20, 2) for arm, peak in peaks.items()},
        "peak_ratio": round(peaks["made again"] / peaks["kept"], 4),
        "condition_mib_per_copy": round(TOKENS * WIDTH * 4 / 2**20, 3),
        "cpu_s": {arm: round(median(values), 3) for arm, values in seconds.items()},
        "cpu_ratio": round(median(ratios), 4),
        "cpu_ratio_range": [round(ratios[0], 4), round(ratios[-1], 4)],
    }


@contextmanager
def arms(arm: str) -> Iterator[None]:
    """Make the copies of a micro-batch once a step and keep them, or leave the recipe as it is."""
    if arm == "made again":
        yield
        return
    kept: dict[tuple[int, ...], Any] = {}
    plain = recipe.noised_rows

    def once(run: Any, algorithm: Any, experience: Any, rows: Any, piece: range, position: int) -> Any:
        key = (*rows.tolist(), piece.start, piece.stop)
        if key not in kept:
            kept[key] = plain(run, algorithm, experience, rows, piece, position)
        return kept[key]

    with patched(recipe, "noised_rows", once):
        yield


def run_file(work: Path) -> Any:
    """A run on a random base; each epoch is one batch of rollouts and one optimizer step."""
    pipe = FluxFill.tiny()
    config = {**pipe.transformer.config, "joint_attention_dim": WIDTH}
    pipe.register_modules(transformer=FluxTransformer2DModel.from_config(config))
    encoder = pipe.text_encoder_2.config
    encoder.d_model = WIDTH
    pipe.register_modules(text_encoder_2=type(pipe.text_encoder_2)(encoder))
    pipe.save_pretrained(work / "model")
    write_signs(work / "signs", draw_words(8, "train", 1), (SIDE, SIDE), 1)
    return parse_run(
        {
            "name": "nft",
            "model": {
                "path": str(work / "model"), "dtype": "fp32", "max_sequence_length": TOKENS,
                "train": {"kind": "lora", "rank": 16, "alpha": 16},
            },
            "data": {"format": "self_bench", "path": str(work / "signs"), "resolution": [SIDE, SIDE]},
            "rollout": {
                "group_size": IMAGES // 4, "global_groups_per_batch": 4, "batch_size_per_device": ROWS, "num_steps": 2,
            },
            "algorithm": {"name": "nft", "timesteps_per_image": 2, "kl_weight": 0.1, "old_policy": "frozen"},
            "rewards": {"preservation": {}},
            "optimizer": {
                "batch_size_per_device": ROWS, "gradient_accumulation": IMAGES // ROWS, "steps_per_forward": None,
            },
            "training": {
                "max_steps": 1000, "checkpoint_every": 0, "eval_every": 0, "mixed_precision": "no",
                "gradient_checkpointing": False,
            },
            "evaluation": {"num_examples": 1, "grid_examples": 0},
            "logging": {"dir": str(work / "runs"), "sinks": []},
        }
    )  # fmt: skip


if __name__ == "__main__":
    main()
