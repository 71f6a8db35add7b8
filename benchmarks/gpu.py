"""What a GPU does with the real sizes: GRPO on the published configs with random weights, in at most 10 minutes.

Every cell is the package's own run (`training.build`, an epoch of the recipe, its accounting) with one optimizer
step an epoch: the first is left out (allocations, compilation) and told apart, the others are reported by their
medians. There is nothing to download. Text encoders are made, asked, and dropped before training, as
`model.free_text_encoders` does; rewards are there at once.
What is held before an update, when no activation is, and the peak stand beside what
`retouch check --memory` counts; a cell whose count does not fit the device is not tried, and one that does not fit all
the same says so. Cells come in the order of what they are worth; those for which no time was left say so, too, and
another call with the same file measures them (a new file for new settings).

    python benchmarks/gpu.py --out benchmarks/results/gpu.json
    python benchmarks/gpu.py --out benchmarks/results/gpu.json --table
    python benchmarks/gpu.py --dry-run      # every path at toy sizes on the CPU

Levers, each into a file of its own: --peft-lora takes peft's LoRA layers instead of the fused ones, --attention another
kernel of the FLUX cells, --no-autocast computes the LoRA cells in the bf16 of their base; --rows sets the images of a
training forward, --prompt-tokens the length of every prompt (Qwen-Image has no text mask at 32, which is the default,
and at other multiples of 32), --no-mask leaves that mask out at any length: padding is then attended to, which changes
numbers, not the time. Every cell is measured with and without compilation; --profile adds the kernels that took the
longest to its row.
"""

from __future__ import annotations

import argparse
import gc
import json
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any, get_args

import torch
from epochs import epochs
from held import held_bytes, watched
from loop_overhead import NoRewards, machine
from peft.tuners.lora import Linear
from random_models import random_weights, write_encoder, write_model
from torch import nn
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

from retouch.adapters.fused_lora import FusedLinear
from retouch.config import RunConfig, derive, parse_run
from retouch.doctor.memory import report_memory
from retouch.engine import OutOfMemory
from retouch.engine.speed import compile_blocks
from retouch.families.base import Attention
from retouch.families.qwen import base as qwen
from retouch.observe.run_dir import read_metrics
from retouch.tiny.signs import (
    draw_words,
    write_signs,
)
from retouch.training.build import build
from retouch.training.session import Session

MINUTES = 10.0
"""For all cells together."""

SECONDS = 15.0
"""After so many no further step of a cell is measured."""

SHORTEST = 32
"""Tokens of Qwen-Image's prompt about a sign, whose letters are tokens here: it fills one bucket, and has no mask."""

KERNELS = 15
"""Of a profiled epoch, those that took the longest."""

TRAINED: dict[str, dict[str, Any]] = {
    "lora": {"kind": "lora", "rank": 32, "alpha": 64},
    "ip_adapter": {"kind": "ip_adapter"},
    "full": {"kind": "full"},
}
PARTS = ("rollout", "text", "vae", "train_forward", "train_backward", "optimizer", "other")
"""Parts of a step that are reported."""

SPEEDS = ("fast", "reference")

COLUMNS = (
    "trained", "preset", "images/s", "TFLOP/s", "of the peak", "forwards an image", "GiB counted", "GiB held",
    "GiB at most", "max abs log ratio",
)  # fmt: skip


@dataclass(frozen=True)
class Case:
    """What is trained, and on how many images a step."""

    family: str
    trained: str
    groups: int
    group_size: int
    rows: int  # images of a forward with its backward
    checkpointing: bool = False
    moments: str = "fp32"

    @property
    def name(self) -> str:
        return f"{self.family}-{self.trained}" + ("_int8" if self.moments == "8bit" else "")


CASES = (
    Case("flux_fill", "lora", groups=1, group_size=4, rows=2),
    Case("sd_inpaint", "lora", groups=2, group_size=8, rows=8),
    Case("qwen_image", "lora", groups=1, group_size=4, rows=1),
    Case("flux_fill", "ip_adapter", groups=1, group_size=4, rows=2),
    Case("sd_inpaint", "full", groups=2, group_size=8, rows=8),
    Case("flux_fill", "full", groups=1, group_size=4, rows=2, checkpointing=True),
    Case("flux_fill", "full", groups=1, group_size=4, rows=2, checkpointing=True, moments="8bit"),
)
"""Rows so that a forward keeps a GPU busy for longer than launching its kernels takes, and one of 80 GB holds it."""


@dataclass(frozen=True)
class Cell:
    """One measurement."""

    case: Case
    speed: str
    compiled: bool

    @property
    def name(self) -> str:
        return "-".join((self.case.name, self.speed, "compiled" if self.compiled else "plain"))


def cells() -> list[Cell]:
    """Every case at both speeds as it is, then compiled; the fast ones first, which compile the same blocks."""
    plain = [Cell(case, speed, False) for case in CASES for speed in SPEEDS]
    return plain + [Cell(case, speed, True) for speed in SPEEDS for case in CASES]


@dataclass(frozen=True)
class Sizes:
    """How large everything is, and on what."""

    device: torch.device
    tiny: bool
    side: int
    steps: int  # measured ones
    attention: str | None = None  # of FLUX without a style adapter
    peft_lora: bool = False
    no_autocast: bool = False  # of LoRA
    rows: int | None = None  # images of a forward with its backward; None: those of the case
    prompt_tokens: int | None = None
    no_mask: bool = False  # of Qwen-Image's text
    profile: bool = False

    def levers(self) -> dict[str, Any]:
        """What a file of results has one value of."""
        names = ("attention", "peft_lora", "no_autocast", "rows", "prompt_tokens", "no_mask")
        return {name: getattr(self, name) for name in names}


def main(arguments: Sequence[str] | None = None) -> dict[str, Any]:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dry-run", action="store_true", help="toy sizes on the CPU")
    parser.add_argument("--side", type=int, default=512, help="of the images")
    parser.add_argument("--steps", type=int, default=3, help="measured optimizer steps of a cell")
    parser.add_argument("--minutes", type=float, default=MINUTES, help="for all cells together")
    parser.add_argument("--attention", choices=get_args(Attention), help="kernel of the FLUX cells")
    parser.add_argument("--peft-lora", action="store_true", help="peft's LoRA layers instead of the fused ones")
    parser.add_argument("--no-autocast", action="store_true", help="LoRA cells without autocast over their bf16 base")
    parser.add_argument("--rows", type=positive, help="images of a training forward")
    parser.add_argument("--prompt-tokens", type=positive, help=f"length of every prompt, {SHORTEST} tokens or more")
    parser.add_argument("--no-mask", action="store_true", help="Qwen-Image without its text mask")
    parser.add_argument("--profile", action="store_true", help=f"add the {KERNELS} longest kernels of an epoch")
    parser.add_argument("--only", nargs="+", default=[""], help="cells that begin so, like flux_fill-lora-fast")
    parser.add_argument("--out", type=Path, help="JSON to write")
    parser.add_argument("--table", action="store_true", help="print what --out holds, run nothing")
    given = parser.parse_args(arguments)
    if given.table:
        result: dict[str, Any] = json.loads(given.out.read_text(encoding="utf-8"))
        print(table(result["rows"]))
        return result
    if not given.dry_run and not torch.cuda.is_available():
        parser.error("there is no GPU here; --dry-run takes toy sizes and the CPU")
    if given.prompt_tokens is not None and given.prompt_tokens < SHORTEST:
        parser.error(f"--prompt-tokens: given {given.prompt_tokens}; expected {SHORTEST} or more")
    device = torch.device("cpu" if given.dry_run else "cuda")
    toy = given.dry_run
    sizes = Sizes(
        device,
        toy,
        32 if toy else given.side,
        1 if toy else given.steps,
        **{name: getattr(given, name) for name in (*Sizes(device, toy, 0, 0).levers(), "profile")},
    )
    wanted = [cell for cell in cells() if cell.name.startswith(tuple(given.only))]
    until = time.monotonic() + 60 * given.minutes
    result = {
        "machine": machine() | gpu(device),
        "dry_run": given.dry_run,
        "side": sizes.side,
        "levers": sizes.levers(),
        "rows": [],
    }
    rows = measured_before(given.out, result) if given.out else {}
    with tempfile.TemporaryDirectory() as work:
        for cell in wanted:
            if "step_s" not in rows.get(cell.name, {}):
                rows[cell.name] = row(cell, sizes, Path(work), until)
            print(json.dumps(rows[cell.name]), flush=True)
            result["rows"] = list(rows.values())
            if given.out:  # what is measured stays, whatever happens to the next cell
                given.out.write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")
    return result


def measured_before(file: Path, result: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """Cell -> its row in a file of the same machine: what a call had no time for, the next one measures."""
    if not file.exists():
        return {}
    before = json.loads(file.read_text(encoding="utf-8"))
    unused = Sizes(torch.device("cpu"), tiny=True, side=0, steps=0).levers()
    before["levers"] = {**unused, **before.get("levers", {})}
    if any(before[key] != result[key] for key in ("machine", "dry_run", "side", "levers")):
        return {}
    names = {(cell.case.name, cell.speed, cell.compiled): cell.name for cell in cells()}
    rows = ((names.get((row["case"], row["speed"], row["compiled"])), row) for row in before["rows"])
    return {name: row for name, row in rows if name is not None}


def table(rows: Sequence[dict[str, Any]]) -> str:
    """Markdown of what was measured."""
    lines = [f"| {' | '.join(COLUMNS)} |", "|---" * len(COLUMNS) + "|"]
    for row in rows:
        if "step_s" in row:
            cells = (
                row["case"].replace("-", ", "),
                row["speed"] + (", compiled" if row["compiled"] else ""),
                f"{row['images_per_s']:.2f}",
                f"{row['tflops']:.0f}",
                f"{100 * row['mfu']:.0f} %",
                f"{row['counted_forwards_per_image']:g}",
                f"{row['counted_gib']:.1f}",
                f"{row['held_gib']:.1f}",
                f"{row['peak_memory_gib']:.1f}",
                f"{row['max_abs_log_ratio']:.1e}" if row["max_abs_log_ratio"] else "0",
            )
            lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def row(cell: Cell, sizes: Sizes, work: Path, until: float) -> dict[str, Any]:
    """What a cell measured, or why it did not."""
    about = {"case": cell.case.name, "speed": cell.speed, "compiled": cell.compiled}
    if time.monotonic() > until:
        return {**about, "skipped": "no time left"}
    if images_of(cell.case, sizes) % rows_of(cell.case, sizes):
        images, rows = images_of(cell.case, sizes), rows_of(cell.case, sizes)
        return {**about, "skipped": f"{images} images make no forwards of {rows}"}
    config = run_file(cell, sizes, work)
    counted = report_memory(config)
    has = torch.cuda.get_device_properties(sizes.device).total_memory if sizes.device.type == "cuda" else None
    about["counted_gib"] = round(counted["device_bytes"] / 2**30, 3)
    if has is not None and counted["device_bytes"] > has:
        return {**about, "skipped": f"counted {counted['device_bytes'] / 2**30:.0f} GiB of {has / 2**30:.0f}"}
    try:
        return {**about, **measure(cell, config, sizes, until)}
    except (torch.OutOfMemoryError, OutOfMemory):
        return {**about, "skipped": "out of memory"}
    except Exception as error:  # the other cells are still worth their time
        failed = f"{type(error).__name__}: {(str(error).splitlines() or [''])[0]}"
        return {**about, "failed": failed, "traceback": traceback.format_exc()}
    finally:
        torch.compiler.reset()
        gc.collect()
        if sizes.device.type == "cuda":
            torch.cuda.empty_cache()


def positive(text: str) -> int:
    """A whole number of 1 or more."""
    if (number := int(text)) < 1:
        raise argparse.ArgumentTypeError(f"given {text}; expected 1 or more")
    return number


def images_of(case: Case, sizes: Sizes) -> int:
    """Of a step."""
    return 2 if sizes.tiny else case.groups * case.group_size


def rows_of(case: Case, sizes: Sizes) -> int:
    """Images of a training forward."""
    return sizes.rows or (1 if sizes.tiny else case.rows)


@contextmanager
def text_mask(kept: bool) -> Iterator[None]:
    """Inside, the networks of Qwen-Image get their text mask, or none."""
    cut = qwen.without_common_padding
    if not kept:
        qwen.without_common_padding = lambda *given: (cut(*given)[0], None)
    try:
        yield
    finally:
        qwen.without_common_padding = cut


def measure(cell: Cell, config: RunConfig, sizes: Sizes, until: float) -> dict[str, Any]:
    """An epoch to warm up, then the measured ones."""
    with text_mask(not sizes.no_mask):
        return _measure(cell, config, sizes, until)


def _measure(cell: Cell, config: RunConfig, sizes: Sizes, until: float) -> dict[str, Any]:
    gc.collect()
    before = held_bytes(sizes.device)
    with random_weights(sizes.device):
        run = build(config)
    try:
        run.rewards = NoRewards(run.rewards)  # type: ignore[assignment]
        if sizes.tiny:
            run.costs.peak = 1e12  # so that FLOPs are counted, too
        if sizes.peft_lora:
            unfuse_lora(run.model.network)
        if cell.compiled:
            compile_blocks(run.model.network, "eager" if sizes.tiny else "inductor")  # toy sizes: the tracer alone
        held = watched(run, sizes.device)
        with Session(run) as session:
            if config.algorithm.kl_weight:  # type: ignore[union-attr]
                run.policy.snapshot("reference")
            epoch = epochs(session)
            first = seconds(epoch)
            enough = min(until, time.monotonic() + SECONDS)
            for _ in range(sizes.steps):
                epoch()
                if time.monotonic() > enough:
                    break
            kernels = {"kernels": longest_kernels(epoch, sizes.device)} if sizes.profile else {}
        steps = [line for line in read_metrics(run.dir.path / "metrics.jsonl") if line["kind"] == "train"][1:]
    finally:
        run.close()
    return {
        "settings": settings_of(config),
        "images": config.rollout.group_size * config.rollout.global_groups_per_batch,
        "forwards_per_image": derive(config).forwards_per_image,
        "first_step_s": round(first, 3),
        "held_gib": round((held[-1] - before) / 2**30, 3),
        "max_abs_log_ratio": max(line["max_abs_log_ratio"] for line in steps),
        **reported([line["time"] for line in (steps[:-1] if sizes.profile else steps)]),
        **kernels,
    }


def longest_kernels(block: Callable[[], object], device: torch.device) -> list[dict[str, Any]]:
    """Name, calls, milliseconds and share of the kernels of a block that took the longest; operations, on a CPU."""
    on_gpu = device.type == "cuda"
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if on_gpu else [])]
    with profile(activities=activities, acc_events=True) as profiled:
        seconds(block)
    events = [e for e in profiled.key_averages() if (e.device_type == DeviceType.CUDA) == on_gpu]
    spent = {e.key: (e.self_device_time_total if on_gpu else e.self_cpu_time_total) / 1000 for e in events}
    calls, whole = {e.key: e.count for e in events}, sum(spent.values())
    longest = sorted(spent, key=spent.__getitem__, reverse=True)[:KERNELS]
    return [
        {"name": name[:160], "calls": calls[name], "ms": round(spent[name], 3), "share": round(spent[name] / whole, 4)}
        for name in longest
    ]


def unfuse_lora(network: nn.Module) -> None:
    """LoRA layers of peft, in place."""
    for module in network.modules():
        if isinstance(module, FusedLinear):
            module.__class__ = Linear  # pyright: ignore[reportAttributeAccessIssue]


def reported(steps: Sequence[dict[str, float]]) -> dict[str, Any]:
    """Medians over steps: seconds with their range, images a second, TFLOP/s, share of the peak, memory, forwards."""
    times = sorted(step["step"] for step in steps)

    def middle(name: str, digits: int) -> float | None:
        values = [step[name] for step in steps if name in step]
        return round(median(values), digits) if values else None

    forwards = sum(value for name, value in steps[0].items() if name.startswith("nfe_")) / steps[0]["images"]
    return {
        "steps": len(steps),
        "step_s": round(median(times), 3),
        "step_s_range": [round(times[0], 3), round(times[-1], 3)],
        "images_per_s": middle("images_per_s", 3),
        "tflops": middle("tflops", 4),
        "mfu": middle("mfu", 4),
        "peak_memory_gib": middle("peak_memory_gib", 3),
        "counted_forwards_per_image": round(forwards, 2),
        "parts_s": {name: middle(name, 3) for name in PARTS},
    }


def seconds(block: Callable[[], object]) -> float:
    start = time.perf_counter()
    block()
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter() - start


def settings_of(config: RunConfig) -> dict[str, Any]:
    """What of a run decides its speed."""
    rollout, algorithm, optimizer = (part.model_dump() for part in (config.rollout, config.algorithm, config.optimizer))
    return {
        **{name: rollout[name] for name in ("num_steps", "guidance_scale", "shared_noise")},
        "window": config.rollout.window.size if config.rollout.window else None,
        **{name: algorithm[name] for name in ("kl_weight", "timestep_fraction")},
        "gradient_checkpointing": config.training.gradient_checkpointing,
        **{name: optimizer[name] for name in ("batch_size_per_device", "steps_per_forward")},
        "moments": optimizer["state"],
    }


def run_file(cell: Cell, sizes: Sizes, work: Path) -> RunConfig:
    """The run of a cell; model folder and data are made once a family."""
    case, side = cell.case, sizes.side
    model, data, encoder = work / case.family, work / "signs", work / "encoder"
    if not model.exists():
        write_model(model, case.family, tiny=sizes.tiny)
    if not data.exists():
        write_signs(data, draw_words(8, "train", 1), (side, side), 1, styled=True)
        write_encoder(encoder, tiny=sizes.tiny)
    train = TRAINED[case.trained] | ({"image_encoder": str(encoder)} if case.trained == "ip_adapter" else {})
    groups, group_size = (1, 2) if sizes.tiny else (case.groups, case.group_size)
    images, rows = images_of(case, sizes), rows_of(case, sizes)
    template, length = text_of(case, sizes)
    return parse_run(
        {
            "name": cell.name,
            "model": {
                "family": case.family,
                "path": str(model),
                "dtype": "fp32" if sizes.tiny else "bf16",
                "free_text_encoders": True,
                "train": train,
                **({"attention": sizes.attention} if takes_attention(case, sizes) else {}),
                **({"max_sequence_length": length} if length and case.family != "sd_inpaint" else {}),
            },
            "data": {
                "format": "self_bench",
                "path": str(data),
                "resolution": [side, side],
                "prompt_template": template,
            },
            "rollout": {
                "group_size": group_size,
                "global_groups_per_batch": groups,
                "batch_size_per_device": images,
                "preset": cell.speed,
            },
            "algorithm": {"name": "grpo"},
            "rewards": {"preservation": {}},
            "optimizer": {
                "lr": 1e-6,
                "batch_size_per_device": rows,
                "gradient_accumulation": images // rows,
                "steps_per_forward": 1 if cell.speed == "reference" else None,  # as published: one step after another
                "state": "fp32" if sizes.tiny else case.moments,
                "on_out_of_memory": "stop",
            },
            "training": {
                "max_steps": 1000,
                "checkpoint_every": 0,
                "eval_every": 0,
                "mixed_precision": "no" if sizes.tiny or (sizes.no_autocast and case.trained == "lora") else "bf16",
                "gradient_checkpointing": case.checkpointing,
            },
            "evaluation": {"num_examples": 1, "num_steps": 1, "grid_examples": 0},
            "logging": {"dir": str(work / "runs"), "sinks": []},
        }
    )


def text_of(case: Case, sizes: Sizes) -> tuple[str, int | None]:
    """Template of the prompts and `max_sequence_length` for the wanted number of tokens. A prompt of Qwen-Image has
    exactly so many, the end of its chat included; other networks get every prompt padded to that length."""
    template, tokens = "The text is '{text}'.", sizes.prompt_tokens
    if tokens is None or case.family != "qwen_image":
        return template, tokens or (64 if sizes.tiny else None)
    return template + "." * (tokens - SHORTEST), -(-tokens // qwen.BUCKET) * qwen.BUCKET


def takes_attention(case: Case, sizes: Sizes) -> bool:
    """Whether the kernel of --attention is that of a case."""
    return sizes.attention is not None and case.family == "flux_fill" and case.trained != "ip_adapter"


def gpu(device: torch.device) -> dict[str, Any]:
    """The device, where it is one."""
    if device.type != "cuda":
        return {}
    about = torch.cuda.get_device_properties(device)
    return {"gpu": about.name, "gpu_memory_gib": round(about.total_memory / 2**30, 1), "cuda": torch.version.cuda}


if __name__ == "__main__":
    main()
