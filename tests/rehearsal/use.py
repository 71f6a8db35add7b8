"""Small runs on the second device and on the CPU, and what they copied and waited for.

`python -m tests.rehearsal.use FOLDER cpu|rehearsal on|off CELL ...` runs cells FAMILY,ALGORITHM,KIND one after the
other in one process, with offload or without: first on the CPU, then, in another process, on the device, which writes
what it found to FOLDER/rehearsal.json.
"""

from __future__ import annotations

import json
import shutil
import sys
import traceback
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from accelerate.state import AcceleratorState, PartialState

from retouch.config import RunConfig, parse_run
from retouch.families import loading
from retouch.families.loading import family_class
from retouch.families.offload import OffloadedNetworks
from retouch.rewards.scorers import preservation
from retouch.rollout.encoded import EncodedData
from retouch.tiny.signs import draw_words, write_signs
from retouch.training.recorder import Recorder
from retouch.training.step import Step
from retouch.types import Condition
from tests.algorithms.runs import Scripted, brightness, of_kind, train, weights
from tests.algorithms.test_cells import cell
from tests.algorithms.test_ip_adapter import ADAPTER
from tests.conftest import SIZE, small_run
from tests.rehearsal.device import NAME, Record, recorded, rehearse

STEPS = 3
"""Optimizer steps of a run: one of warm-up and two of an epoch; three of SFT."""


SHARED: dict[str, Any] = {
    "rollout__shared_noise": True,
    "rollout__group_size": 4,
    "rollout__batch_size_per_device": 8,
    "optimizer__batch_size_per_device": 2,
    "optimizer__gradient_accumulation": 2,
}
"""Two groups of four in two optimizer steps."""


@contextmanager
def runs_on(name: str) -> Iterator[torch.device]:
    """Inside, accelerate gives new engines the second device. It must be there before the first backward of a process,
    in which torch looks for devices."""
    assert name == NAME
    device = rehearse()
    AcceleratorState._reset_state(reset_partial_state=True)
    with mock.patch.object(PartialState, "default_device", device):
        try:
            yield device
        finally:
            AcceleratorState._reset_state(reset_partial_state=True)


def signs_in(folder: Path, styled: bool = False) -> Path:
    """Signs, `styled` ones with another word in the same style as their reference."""
    if not styled:
        signs_in(folder / "styled", styled=True)
    write_signs(folder / "targets", draw_words(8, "train", 1), SIZE, 1, styled=styled)
    prompts = draw_words(8, "train", 2)
    write_signs(folder / "prompts", prompts, SIZE, 2, with_targets=False, first_id=100, styled=styled)
    write_signs(folder / "held_out", draw_words(4, "held_out", 3), SIZE, 3, first_id=200, styled=styled)
    return folder


def cell_in(runs: Path, signs: Path, names: tuple[str, str, str], **overrides: Any) -> RunConfig:
    """A run of a cell of `tests/algorithms/test_cells.py` in this folder; of the kind `ip_adapter`, too, and of
    `shared`: LoRA and a first step that the images of a group share."""
    family, algorithm, kind = names
    if kind == "shared":
        kind, overrides = "lora", {**SHARED, **overrides}
    if kind == "ip_adapter":
        signs, kind = signs / "styled", "lora"
        overrides = {"model__train": ADAPTER, **overrides}

    def config(**given: Any) -> RunConfig:
        return parse_run(small_run(signs, runs, **{"evaluation__num_steps": 1, **given}))

    given = {"training__max_steps": STEPS, **overrides}

    def shorter(**own: Any) -> RunConfig:
        return config(**{**own, **given})

    return cell(shorter, family, algorithm, kind, signs=signs)


@contextmanager
def aligned() -> Iterator[None]:
    """Inside, weights are copied when they are loaded, as a device does: the kernels of a CPU add in another order
    where the memory of a file puts a matrix at an odd address."""
    read = loading.read_component

    def copied(*args: Any, **options: Any) -> Any:
        found = read(*args, **options)
        network = found[0] if isinstance(found, tuple) else torch.nn.Module()
        for tensor in [*network.parameters(), *network.buffers()]:
            tensor.data = tensor.data.clone()
        return found

    with mock.patch.object(loading, "read_component", copied):
        yield


@contextmanager
def training_only(record: Record) -> Iterator[None]:
    """Inside, evaluations and checkpoints are not recorded."""
    evaluate, save = Recorder.evaluate, Recorder.save

    def unrecorded(method: Any) -> Any:
        def call(*args: Any, **options: Any) -> Any:
            with record.paused():
                return method(*args, **options)

        return call

    with (
        mock.patch.object(Recorder, "evaluate", unrecorded(evaluate)),
        mock.patch.object(Recorder, "save", unrecorded(save)),
    ):
        yield


@dataclass
class Moved:
    """Copies to the device in optimizer steps after a warm-up, without the first encoding of an example.

    Attributes:
        forwards: predictions of the trained network and its snapshots.
        conditions: conditions that were copied.
        others: copies of anything else.
    """

    forwards: int = 0
    conditions: int = 0
    others: int = 0

    def per_forward(self) -> dict[str, float]:
        return {name: round(getattr(self, name) / self.forwards, 2) for name in ("conditions", "others")}


@contextmanager
def steps_only(family: str, algorithm: str) -> Iterator[Moved]:
    """What the optimizer steps inside copy, without those of a warm-up."""
    moved, record = Moved(), Record()

    def watched(owner: Any, name: str, count: str | None, paused: bool = True, to_device: bool = False) -> Any:
        method = getattr(owner, name)

        def call(*args: Any, **options: Any) -> Any:
            counted = not to_device or torch.device(args[1]).type == NAME
            if count is not None and record.is_open and counted:
                setattr(moved, count, getattr(moved, count) + 1)
            with record.paused() if paused else nullcontext():
                return method(*args, **options)

        return mock.patch.object(owner, name, call)

    enter, leave = Step.__enter__, Step.__exit__

    def entered(step: Step) -> Step:
        if algorithm == "sft" or not step._supervised:
            record.open()
        return enter(step)

    def left(step: Step, *error: Any) -> bool:
        try:
            return leave(step, *error)
        finally:
            if record.is_open:
                record.close()

    with (
        mock.patch.object(Step, "__enter__", entered),
        mock.patch.object(Step, "__exit__", left),
        watched(EncodedData, "_encode", None),
        watched(EncodedData, "_encode_image", None),
        watched(Condition, "to", "conditions", to_device=True),
        watched(family_class(family), "predict", "forwards", paused=False),
    ):
        yield moved
    moved.others = record.moves


@contextmanager
def placements() -> Iterator[Counter[str]]:
    """How often frozen networks that wait on the CPU were moved to the device, by what their part is."""
    moved = Counter[str]()
    on_device = OffloadedNetworks.on_device

    @contextmanager
    def watched(self: OffloadedNetworks) -> Iterator[None]:
        before = self.moves
        with on_device(self):
            names = {type(network).__name__ for network in self.networks}
            moved.update(dict.fromkeys(names, self.moves - before))
            yield

    with mock.patch.object(OffloadedNetworks, "on_device", watched):
        yield moved


def numbers(records: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Records without what depends on the machine."""
    kept = [r for r in records if r["kind"] in ("train", "rollout", "eval")]
    return [{k: v for k, v in r.items() if k not in ("time", "at", "timings") and "memory" not in k} for r in kept]


def on_the_cpu(folder: Path, signs: Path, names: tuple[str, str, str], offload: bool) -> None:
    """A cell on the CPU, in a process without the device; its weights and records are left in the folder."""
    run, told = train(cell_in(folder / "cpu", signs, names, **options(names, offload)))
    torch.save({"weights": weights(run), "records": numbers(told)}, folder / f"{'-'.join(names)}.pt")


def options(names: tuple[str, str, str], offload: bool) -> dict[str, Any]:
    return {"name": "-".join(names), "model__offload_text_encoders": offload, "model__offload_vae": offload}


def walked(folder: Path, signs: Path, names: tuple[str, str, str], offload: bool) -> dict[str, Any]:
    """One cell on the device, and again from its checkpoint inside an epoch, beside what `on_the_cpu` left.

    Returns: `faults`, in words; bytes, copies and waits of a step of training; their places; and how often frozen
        networks were moved to the device.
    """
    given, name = options(names, offload), "-".join(names)
    expected = torch.load(folder / f"{name}.pt", weights_only=True)
    with recorded() as record, placements() as placed, steps_only(*names[:2]) as moved, training_only(record):
        run, found = train(cell_in(folder / "device", signs, names, **given))
    faults = differences(expected["weights"], run, "the run")
    pairs = zip(expected["records"], numbers(found), strict=True)
    faults += [f"a record: {different(a, b)}" for a, b in pairs if a != b]
    again = folder / "again" / name
    again.parent.mkdir(exist_ok=True)
    shutil.copytree(folder / "device" / name, again)
    shutil.rmtree(again / "checkpoints" / f"step-{STEPS:06d}")
    second, _ = train(cell_in(folder / "again", signs, names, **given, resume="auto"))
    faults += differences(expected["weights"], second, "the resumed run")
    steps = len(of_kind(found, "train"))
    return {
        "faults": faults,
        "to_device": record.to_device // steps,
        "to_host": record.to_host // steps,
        "copies": round(record.moves / steps, 1),
        "moved": moved.per_forward(),
        "waits": {what: round(count / steps, 1) for what, count in record.waits.most_common()},
        "places": dict(record.places.most_common()),
        "placements": {name: count for name, count in placed.items() if count},
    }


def different(one: dict[str, Any], other: dict[str, Any]) -> dict[str, Any]:
    return {k: (one.get(k), other.get(k)) for k in {**one, **other} if one.get(k) != other.get(k)}


def differences(wanted: dict[str, torch.Tensor], run: Any, what: str) -> list[str]:
    """Weights that are not the CPU's, or that are not on the device."""
    state = run.policy.state()
    wrong = [n for n, t in wanted.items() if not torch.equal(t, state[n].cpu())]
    elsewhere = [n for n, t in state.items() if t.device.type != NAME]
    most = max((float((wanted[n] - state[n].cpu()).abs().max()) for n in wrong), default=0.0)
    faults = [f"{what}: {len(wrong)} of {len(wanted)} weights are not the CPU's, by {most:.2e}"] if wrong else []
    return faults + ([f"{what}: {elsewhere[0]} is on {state[elsewhere[0]].device}"] if elsewhere else [])


def main(folder: Path, where: str, offload: bool, cells: list[str]) -> None:
    torch.set_num_threads(1)
    found: dict[str, Any] = {}
    rewarded = mock.patch.object(preservation, "PreservationScorer", lambda _: Scripted(brightness))
    with rewarded, aligned(), runs_on(where) if where == NAME else nullcontext():
        signs = signs_in(folder / "signs") if where == "cpu" else folder / "signs"
        for text in cells:
            family, algorithm, kind = text.split(",")
            run = walked if where == NAME else on_the_cpu
            try:
                found[text] = run(folder, signs, (family, algorithm, kind), offload)
            except Exception:
                found[text] = {"faults": [traceback.format_exc(limit=-12)]}
            (folder / f"{where}.json").write_text(json.dumps(found), encoding="utf-8")


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2], sys.argv[3] == "on", sys.argv[4:])
