"""The cells of `gpu_first_run.py`, and the process that runs them: a task a line in, what it found a line out."""

from __future__ import annotations

import argparse
import json
import logging
import os
import subprocess
import sys
import threading
import time
import traceback
from dataclasses import dataclass, field
from functools import cache
from itertools import product
from pathlib import Path
from typing import Any

REPOSITORY = Path(__file__).parents[1]

FAMILIES = (
    "flux_fill", "flux_dev", "flux_kontext", "sd_inpaint", "sdxl_inpaint", "sd3", "qwen_image", "qwen_image_edit",
    "z_image", "flux2_klein", "flux2_dev", "qwen_image_21",
)  # fmt: skip
"""Named here because the process that starts the others imports nothing of theirs; a test compares them."""

ALGORITHMS: dict[str, dict[str, Any]] = {
    "sft": {},
    "grpo": {"kl_weight": 0.1},
    "nft": {"kl_weight": 0.1, "old_policy": "ramp_half"},
    "ppo": {"kl_weight": 0.1},
    "dpo": {},
    "reward_gradient": {"trained_step": "all", "last_steps": 2},
}

BOTH_PRECISIONS = ("sft", "grpo", "nft")
"""Algorithms that run in bf16 throughout, too."""

PADDED = ("flux_fill", "flux_dev", "flux_kontext", "sd3", "flux2_klein", "flux2_dev")
"""Families that pad every prompt: to 64 tokens here, instead of 512."""

PRECISIONS: dict[str, dict[str, Any]] = {
    "default": {},
    "bf16": {"mixed_precision": "no"},  # in the precision of the base, which is bf16
}
"""`training` of a toy run."""


@dataclass(frozen=True)
class Task:
    """A cell.

    Attributes:
        kind: function of this module that runs it.
        seconds: its limit.
        least: it is not begun with less time left.
    """

    name: str
    kind: str
    options: dict[str, Any] = field(default_factory=dict)
    seconds: float = 60.0
    least: float = 20.0


TINY = tuple(
    Task(
        f"tiny-{family}-{algorithm}-{precision}",
        "tiny",
        {"family": family, "algorithm": algorithm, "precision": precision},
        seconds=40,
    )
    for family, precision, algorithm in product(FAMILIES, PRECISIONS, ALGORITHMS)
    if precision == "default" or algorithm in BOTH_PRECISIONS
)


def released(name: str, case: str, seconds: float, least: float = 25, peak_gib: float = 0, **options: Any) -> Task:
    """A cell of `gpu.py`.

    Args:
        peak_gib: what it takes at most, as one H200 measured it, or the memory before activations and those of an image
            and trained step measured there (FLUX.1-Fill 9 GiB, Qwen-Image 14.7 GiB) for each that is in a forward.
        options: of `gpu.Sizes` and `gpu.Case`.
    """
    return Task(name, "released", {"case": case, "peak_gib": peak_gib, **options}, seconds, least)


MASKED, UNMASKED = {"prompt_tokens": 60}, {"prompt_tokens": 64}
"""Prompts of Qwen-Image, both 64 tokens in the network: with a mask, as most have one, and of a length without."""

RELEASED = (
    released("flux_fill-plain", "flux_fill-lora", 70, peak_gib=60),
    released("qwen_image-plain", "qwen_image-lora", 75, peak_gib=71, **MASKED),
    released("qwen_image-no_mask", "qwen_image-lora", 75, peak_gib=71, **UNMASKED),
    released("flux2_klein-plain", "flux2_klein-lora", 70),
    released("qwen_image-no_mask-rows_2", "qwen_image-lora", 75, peak_gib=101, rows=2, **UNMASKED),
    released("qwen_image-no_mask-recomputed-rows_1", "qwen_image-lora", 75, checkpointing=True, **UNMASKED),
    released("qwen_image-no_mask-recomputed-rows_4", "qwen_image-lora", 75, checkpointing=True, rows=4, **UNMASKED),
    released("flux_fill-plain-kernels", "flux_fill-lora", 60, 30, peak_gib=60, steps=1, profile=True),
    released("flux_fill-compiled", "flux_fill-lora", 280, 50, peak_gib=60, compiled=True),
    released("flux_fill-compiled-kernels", "flux_fill-lora", 90, 40, 60, compiled=True, steps=1, profile=True),
    released("qwen_image-compiled", "qwen_image-lora", 200, 50, peak_gib=71, compiled=True, **MASKED),
)
"""The compiled ones come last: they take minutes and may be killed for it."""

TESTS = Task("tests_cuda", "cuda_tests", seconds=240)
"""Not timed either: they run beside the cells at toy sizes."""


@dataclass(frozen=True)
class Place:
    """Where cells run: on the CPU in a dry run, and in which folder."""

    dry_run: bool
    work: Path

    @property
    def device(self) -> Any:
        import torch

        return torch.device("cpu" if self.dry_run else "cuda")


def tiny(place: Place, family: str, algorithm: str, precision: str) -> dict[str, Any]:
    """One step at toy sizes; finite numbers, and a gradient."""
    import math

    from loop_overhead import NoRewards

    from retouch.config import parse_run
    from retouch.observe.run_dir import read_metrics
    from retouch.registry import load_attribute
    from retouch.training.build import build

    config = parse_run(toy_run(place, family, algorithm, precision))
    unmeasured = Messages()
    logging.getLogger("retouch.observe.measuring").addHandler(unmeasured)
    run = build(config)
    try:
        if run.engine.device.type != place.device.type:
            raise RuntimeError(f"it runs on {run.engine.device}, not on {place.device}")
        run.rewards = NoRewards(run.rewards)  # type: ignore[assignment]
        load_attribute(config.algorithm.recipe)(run)
    finally:
        run.close()
    [step] = [r for r in read_metrics(run.dir.path / "metrics.jsonl") if r["kind"] == "train"]
    if not (math.isfinite(step["loss"]) and step["grad_norm"] > 0):
        raise RuntimeError(f"loss {step['loss']}, grad_norm {step['grad_norm']}")
    return {
        "loss": step["loss"],
        "grad_norm": step["grad_norm"],
        "max_abs_log_ratio": step.get("max_abs_log_ratio"),
        "tflops": step["time"].get("tflops"),
        "peak_memory_gib": step["time"].get("peak_memory_gib"),
        "unmeasured": unmeasured.texts,
    }


class Messages(logging.Handler):
    """Keeps what is logged."""

    def __init__(self) -> None:
        super().__init__()
        self.texts: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.texts.append(record.getMessage())


def toy_run(place: Place, family: str, algorithm: str, precision: str) -> dict[str, Any]:
    """The run file of a toy cell: two groups of two images of 32 x 64 pixels."""
    data = {"format": "self_bench", "path": str(signs(place)), "resolution": [32, 64]}
    own = {"name": algorithm, **ALGORITHMS[algorithm]}
    unguided = {"guidance_scale": 1.0} if algorithm == "reward_gradient" else {}
    length = {"max_sequence_length": 64} if family in PADDED else {}
    train = {"kind": "lora", "rank": 4}
    return {
        "name": f"{family}-{algorithm}-{precision}",
        "model": {"family": family, "path": str(toy_model(place, family)), "train": train, **length},
        "data": data | {"target": "auto"} if algorithm == "sft" else data,
        "rollout": {
            "group_size": 2,
            "global_groups_per_batch": 2,
            "batch_size_per_device": 4,
            "num_steps": 3,
            **unguided,
            **({"window": {"size": 1, "range": [0, 1]}} if algorithm in ("grpo", "ppo") else {}),
        },
        "algorithm": own,
        "rewards": {"preservation": {}},
        "optimizer": {"lr": 1e-4, "batch_size_per_device": 4, "gradient_accumulation": 1},
        "training": {"max_steps": 1, "checkpoint_every": 0, "eval_every": 0, **PRECISIONS[precision]},
        "evaluation": {"num_examples": 1, "num_steps": 1, "grid_examples": 0},
        "logging": {"dir": str(own_folder(place) / "runs"), "sinks": []},
    }


@cache
def own_folder(place: Place) -> Path:
    """Of this process: one that was killed leaves half a folder."""
    folder = place.work / f"process-{os.getpid()}"
    folder.mkdir()
    return folder


@cache
def toy_model(place: Place, family: str) -> Path:
    from retouch.families.tiny import tiny_pipeline

    folder = own_folder(place) / family
    tiny_pipeline(family).save_pretrained(folder)
    return folder


@cache
def signs(place: Place) -> Path:
    from retouch.tiny.signs import draw_words, write_signs

    folder = own_folder(place) / "signs"
    write_signs(folder, draw_words(4, "train", 1), (32, 64), 1)
    return folder


def released_sizes(place: Place, peak_gib: float, **options: Any) -> dict[str, Any]:
    """A cell of `gpu.py`, at toy sizes in a dry run."""
    import gpu
    import torch

    cell, sizes = gpu_cell(place, **options)
    if not place.dry_run:
        has = torch.cuda.get_device_properties(0).total_memory / 2**30
        if peak_gib > has:
            return {"skipped": f"takes about {peak_gib:.0f} GiB of {has:.0f}"}
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = str(place.work / "compiled")  # of the cell that profiles, too
    row = gpu.row(cell, sizes, own_folder(place), time.monotonic() + 3600)
    peak = row.get("peak_memory_gib")
    return {**row, **sizes.levers(), "of_24_gib": None if peak is None else round(peak / 24, 3)}


def gpu_cell(
    place: Place, case: str, compiled: bool = False, checkpointing: bool = False, steps: int = 3, **options: Any
) -> tuple[Any, Any]:
    """`gpu.Cell` and `gpu.Sizes` of a task."""
    from dataclasses import replace

    import gpu

    cases = {one.name: one for one in (*gpu.CASES, gpu.Case("flux2_klein", "lora", groups=1, group_size=4, rows=1))}
    cell = gpu.Cell(replace(cases[case], checkpointing=checkpointing), "fast", compiled)
    if place.dry_run and "rows" in options:
        options["rows"] = min(options["rows"], 2)
    return cell, gpu.Sizes(place.device, place.dry_run, 32 if place.dry_run else 512, steps, **options)


def cuda_tests(place: Place) -> dict[str, Any]:
    """`tests/cuda`: how many passed, and which did not. Only collected in a dry run."""
    wanted = ["-m", "", "--collect-only"] if place.dry_run else ["-m", "gpu"]
    command = [sys.executable, "-m", "pytest", "-v", "-rfE", "-p", "no:cacheprovider", *wanted, "tests/cuda"]
    lines = []
    with subprocess.Popen(command, cwd=REPOSITORY, stdout=subprocess.PIPE, text=True) as done:
        assert done.stdout is not None
        for line in done.stdout:
            lines.append(line.rstrip())
            print(lines[-1], file=sys.stderr, flush=True)  # in the log of a cell that is killed
    found = {"code": done.returncode, "summary": lines[-1] if lines else "", "log": "\n".join(lines[-200:])}
    return found if done.returncode == 0 else {**found, "failed": "tests/cuda"}


KINDS = {"tiny": tiny, "released": released_sizes, "cuda_tests": cuda_tests}


def run(task: Task, place: Place) -> dict[str, Any]:
    """What a cell found, or why it did not."""
    try:
        return KINDS[task.kind](place, **task.options)
    except Exception as error:
        return {"failed": f"{type(error).__name__}: {error}", "traceback": traceback.format_exc()}


def machine_of(place: Place) -> dict[str, Any]:
    """The processor, and the GPU or why there is none."""
    import gpu
    from loop_overhead import machine

    try:
        return machine() | gpu.gpu(place.device)
    except (RuntimeError, AssertionError) as error:
        return machine() | {"gpu": f"unusable: {error}"}


def end_with(parent: int) -> None:
    """End this process when the one that started it has ended, however that was."""
    while os.getppid() == parent:
        time.sleep(1)
    os._exit(1)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--dry-run", action="store_true")
    parser.add_argument("--work", type=Path, required=True)
    given = parser.parse_args()
    threading.Thread(target=end_with, args=(os.getppid(),), daemon=True).start()
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)  # what libraries print is no answer

    def answer(found: dict[str, Any]) -> None:
        answers.write(json.dumps(found) + "\n")
        answers.flush()

    if given.dry_run:
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
    import gpu  # noqa: F401  # imports everything

    place = Place(given.dry_run, given.work)
    answer({})
    for line in sys.stdin:
        answer({**run(Task(**json.loads(line)), place), "machine": machine_of(place)})


if __name__ == "__main__":
    main()
