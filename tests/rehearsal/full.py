"""What is on the second device between the steps of small runs, and what happens where its memory ends.

`python -m tests.rehearsal.full FOLDER kept FAMILY,KIND,OFFLOAD[,QUANTIZE] ...` prints a JSON object of `kept` of each;
`python -m tests.rehearsal.full FOLDER halved` prints `halved`, and `... parts` prints `parts`.
"""

from __future__ import annotations

import gc
import json
import logging
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import torch

from retouch.config import RunConfig
from retouch.core.rules import STEP_RULES
from retouch.doctor.memory import report_memory
from retouch.engine import Engine
from retouch.errors import OutOfMemory
from retouch.families.loading import load_model
from retouch.rewards.scorers import preservation
from retouch.rollout.plan import StepPlan
from retouch.rollout.sampler import sample
from retouch.training.step import Step
from tests.algorithms.runs import Scripted, brightness, train, weights
from tests.families.test_contract import SEEDS, SIZE, examples_of
from tests.rehearsal.device import NAME, capacity, memory, recorded
from tests.rehearsal.use import cell_in, runs_on, signs_in


def kept(config: RunConfig) -> dict[str, Any]:
    """A run -> what `check --memory` counts without gradients and for them, and the bytes on the device before the last
    step, and before its update of the weights. Before the first step of a phase there are no moments."""
    between, before_update = list[int](), list[int]()
    enter, step, before = Step.__enter__, Engine.step, in_use()

    def watched(self: Step) -> Step:
        between.append(memory.used - before)
        return enter(self)

    def stepped(self: Engine, lr: float) -> dict[str, float]:
        before_update.append(memory.used - before)
        return step(self, lr)

    with mock.patch.object(Step, "__enter__", watched), mock.patch.object(Engine, "step", stepped):
        train(config)
    report = report_memory(config)
    gradients = next(part["bytes"] for part in report["parts"] if part["what"] == "gradients")
    counted = report["device_bytes"]
    parts = {part["what"]: part["bytes"] for part in report["parts"]}
    return {"counted": counted - gradients, "gradients": gradients, "parts": parts} | {
        "between": between[-1],
        "before_update": before_update[-1],
    }


def in_use() -> int:
    """Bytes on the device without those of earlier runs: networks and their hooks refer to each other."""
    gc.collect()
    return memory.used


def halved(folder: Path, signs: Path) -> dict[str, Any]:
    """Runs of four rows in a forward on a device that is full with them, and of two -> rows in the end, whether the
    weights are those of a run of two rows from the start, and the messages."""
    told: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: told.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("retouch.training.step").addHandler(handler)
    found: dict[str, Any] = {}
    for algorithm in ("sft", "grpo", "nft"):
        peaks: dict[int, int] = {}
        ends: dict[int, Any] = {}
        for rows in (4, 2):
            config = of_rows(folder, signs, algorithm, rows, f"{algorithm}-{rows}")
            ends[rows], peaks[rows] = with_peak(config)
        told.clear()
        with capacity(in_use() + (peaks[2] + peaks[4]) // 2):
            ended, _ = with_peak(of_rows(folder, signs, algorithm, 4, f"{algorithm}-full"))
        equal = all(torch.equal(ended[name], ends[2][name]) for name in ended)
        found[algorithm] = {"peaks": peaks, "equal": equal, "told": list(told)}
    return found


def of_rows(folder: Path, signs: Path, algorithm: str, rows: int, name: str) -> RunConfig:
    optimizer: dict[str, Any] = {"lr": 1e-3, "batch_size_per_device": rows, "gradient_accumulation": 4 // rows}
    if algorithm == "nft":  # fewer rows leave room for more noised copies of each
        optimizer["steps_per_forward"] = 1
    names = ("flux_fill", algorithm, "lora")
    return cell_in(folder, signs, names, name=name, optimizer=optimizer, evaluation__num_examples=1)


def with_peak(config: RunConfig) -> tuple[dict[str, torch.Tensor], int]:
    """A run -> its weights on the CPU, and the most bytes that it had in use at once."""
    before = memory.peak = in_use()
    run, _ = train(config)
    ended = {name: tensor.cpu() for name, tensor in weights(run).items()}
    return ended, memory.peak - before


def parts(device: torch.device, folder: Path, signs: Path) -> dict[str, Any]:
    """The uses of a model on a full device -> the message, bytes that are left there, and bytes that the same use
    copies to the host with more memory."""
    config = cell_in(folder, signs, ("flux_fill", "grpo", "lora"), model__offload_vae=True, name="parts")
    model: Any = load_model(config.model, device)
    model.network.to(device)
    examples = examples_of(masked=True)
    condition = model.encode(examples, 1.0)
    schedule = model.schedule(3, SIZE)
    plan = StepPlan(schedule, STEP_RULES["flow_sde"], 0.7, 0, 2, 2)
    latents = sample(model, model.network, plan, condition, SEEDS).final
    pixels = torch.zeros(2, 3, *SIZE, device=device)
    uses: dict[str, Callable[[], Any]] = {
        "text": lambda: model.texts().rows(["a prompt that is not known"])[0],
        "encode": lambda: model.encode_images(pixels),
        "decode": lambda: model.decode(latents),
        "sample": lambda: sample(model, model.network, plan, condition, SEEDS),
        "sample_one": lambda: sample(model, model.network, plan, condition.select(slice(1)), SEEDS[:1]),
    }
    return {name: when_full(use) for name, use in uses.items()}


def when_full(use: Callable[[], Any]) -> dict[str, Any]:
    before, message = memory.used, ""
    with capacity(before + 4096):
        try:
            use()
        except OutOfMemory as error:
            message = str(error)
    left = memory.used - before
    with recorded() as record:
        use()
    return {"message": message, "left": left, "to_host": record.to_host}


def main(folder: Path, what: str, cells: list[str]) -> None:
    torch.set_num_threads(1)
    rewarded = mock.patch.object(preservation, "PreservationScorer", lambda _: Scripted(brightness))
    with rewarded, runs_on(NAME) as device:
        signs = signs_in(folder / "signs")
        if what == "parts":
            found: dict[str, Any] = parts(device, folder, signs)
        elif what == "halved":
            found = halved(folder, signs)
        else:
            found = {}
            for text in cells:
                family, kind, offload, *quantize = text.split(",")
                given = {"model__offload_text_encoders": offload == "on", "model__offload_vae": offload == "on"}
                given |= {"model__quantize": quantize[0]} if quantize else {}
                found[text] = kept(cell_in(folder, signs, (family, "grpo", kind), name=text.replace(",", "-"), **given))
    sys.stdout.write(f"{json.dumps(found)}\n")


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2], sys.argv[3:])
