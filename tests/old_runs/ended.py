"""The end of a run, as far as a run that is resumed must repeat it."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from retouch.observe.run_dir import read_metrics

WEIGHTS = ("weights", "ema", "snapshots")


@dataclass(frozen=True)
class Ended:
    """What a run ended with.

    Attributes:
        tensors: weights, EMA weights and snapshots of the last checkpoint, by folder, file and name; state of the
            optimizer.
        counters: of its `state.json`.
        records: metrics.jsonl, timings aside.
    """

    tensors: dict[str, Tensor]
    counters: dict[str, Any]
    records: list[dict[str, Any]]

    @classmethod
    def of(cls, run: Path) -> Ended:
        """Read from a run directory."""
        checkpoint = newest(run)
        state = json.loads((checkpoint / "state.json").read_text(encoding="utf-8"))
        counters = dict(numbers(state["progress"], "progress")) | dict(numbers(state["rewards"], "rewards"))
        counters |= dict(numbers(_optimizer(checkpoint), "optimizer"))
        records = [{k: v for k, v in r.items() if k != "time"} for r in read_metrics(run / "metrics.jsonl")]
        return cls(tensors_of(checkpoint), counters, records)

    @classmethod
    def read(cls, folder: Path) -> Ended:
        """Read what `write` wrote."""
        about = json.loads((folder / "counters.json").read_text(encoding="utf-8"))
        return cls(load_file(folder / "tensors.safetensors"), about, read_metrics(folder / "metrics.jsonl"))

    def write(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        save_file(self.tensors, folder / "tensors.safetensors")
        (folder / "counters.json").write_text(json.dumps(self.counters, indent=2) + "\n", encoding="utf-8")
        lines = "".join(json.dumps(record) + "\n" for record in self.records)
        (folder / "metrics.jsonl").write_text(lines, encoding="utf-8")

    def without_stops(self) -> Ended:
        """Of a run that nothing stopped."""
        return replace(self, records=[r for r in self.records if r.get("event") != "stopped"])


def newest(run: Path) -> Path:
    """The last checkpoint of a run directory."""
    return max((run / "checkpoints").glob("step-*"))


def tensors_of(checkpoint: Path) -> dict[str, Tensor]:
    """Weights, snapshots and optimizer state of a checkpoint, by place and name."""
    found: dict[str, Tensor] = {}
    for part in WEIGHTS:
        for file in sorted((checkpoint / part).rglob("*.safetensors")):
            place = file.relative_to(checkpoint).as_posix()
            found |= {f"{place}: {name}": tensor for name, tensor in load_file(file).items()}
    found |= {f"optimizer.pt: {place}": value for place, value in leaves(_optimizer(checkpoint)) if _is_tensor(value)}
    return {name: tensor.clone().contiguous() for name, tensor in found.items()}


def _optimizer(checkpoint: Path) -> dict[str, Any]:
    return torch.load(checkpoint / "optimizer.pt", weights_only=True)


def numbers(value: Any, name: str) -> Iterator[tuple[str, Any]]:
    """Numbers in nested mappings and lists, by their place; those of the optimizer's parameters are none."""
    return ((place, one) for place, one in leaves(value, name) if not _is_tensor(one) and ".params." not in place)


def leaves(value: Any, place: str = "") -> Iterator[tuple[str, Any]]:
    """What nested mappings and lists hold, by its place."""
    if isinstance(value, dict | list | tuple):
        for key, inside in value.items() if isinstance(value, dict) else enumerate(value):
            yield from leaves(inside, f"{place}.{key}".lstrip("."))
    else:
        yield place, value


def _is_tensor(value: object) -> bool:
    return isinstance(value, Tensor)


def differences(expected: Ended, found: Ended, began: Mapping[str, Tensor] | None = None) -> list[str]:
    """Tensors, counters and records that are not the expected ones; what later versions add is none of them.

    Args:
        began: tensors of the checkpoint that both were resumed from. Rounding is then no difference: of a tensor up to
            a thousandth of the most that the steps since have changed it by (kernels of other instruction sets: 2e-5),
            of a metric up to a hundredth of it (3e-4: pixels are whole numbers).
    """
    close = began is not None
    wrong = [
        name
        for name, tensor in expected.tensors.items()
        if not _is_same(tensor, found.tensors.get(name), None if began is None else began[name])
    ]
    wrong += [f"counters: {place}" for place in _other(expected.counters, found.counters, close=False)]
    if len(found.records) != len(expected.records):
        wrong.append(f"metrics.jsonl has {len(found.records)} records instead of {len(expected.records)}")
    for number, (ours, theirs) in enumerate(zip(expected.records, found.records)):
        wrong += [f"metrics.jsonl, line {number + 1}: {place}" for place in _other(ours, theirs, close=close)]
    return wrong


def _is_same(expected: Tensor, found: Tensor | None, began: Tensor | None) -> bool:
    if found is None or (found.shape, found.dtype) != (expected.shape, expected.dtype):
        return False
    if began is None or not expected.is_floating_point():
        return torch.equal(found, expected)
    allowed = float((expected - began).abs().max()) / 1000
    return bool((found - expected).abs().max() <= allowed)


def _other(expected: Mapping[str, Any], found: Mapping[str, Any], *, close: bool) -> list[str]:
    """Keys with another value, and the values."""
    return [
        f"{key} is {found.get(key)} instead of {value}"
        for key, value in expected.items()
        if found.get(key) != (pytest.approx(value, rel=1e-2, abs=1e-5) if close and isinstance(value, float) else value)
    ]
