"""The dump of an optimizer step whose gradient contains NaN or Inf: a checkpoint of the state before the step, with the
identity and the numbers of the step in its `state.json`.

    RUN/dumps/step-000040/      as a checkpoint; the step that failed is the 41st

`retouch replay` takes the step again (see `replay`).
"""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import torch
from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError
from torch import Tensor

from retouch.data.identity import item_key
from retouch.engine.saved import damaged, sound_state
from retouch.errors import CheckpointError
from retouch.observe.run_dir import environment

if TYPE_CHECKING:
    from retouch.training.build import Run
    from retouch.training.step import Step

logger = logging.getLogger(__name__)


def _as_written(text: str) -> str:
    try:
        if len(text) <= 40 and float.fromhex(text).hex() == text:
            return text
    except (ValueError, OverflowError):
        pass
    raise ValueError("no number as float.hex writes it")


Hexadecimal = Annotated[str, AfterValidator(_as_written)]
"""A number with all its bits, as `float.hex` writes it."""

Digest = Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]
Count = Annotated[int, Field(ge=0, lt=2**63)]
Name = Annotated[str, Field(max_length=200)]

MOST = 2**20
"""Examples or micro-batches of one process in a dump."""


class _Part(BaseModel):
    model_config = ConfigDict(strict=True, extra="forbid", frozen=True)


class Share(_Part):
    """Examples and losses of one process.

    Attributes:
        examples: id of the example of each row.
        keys: hash of each example's content, see `item_key`.
        seeds: seed of each row's noise or image.
        losses: of each micro-batch, in order; its rows are consecutive.
    """

    examples: Annotated[list[int], Field(max_length=MOST)]
    keys: Annotated[list[Count], Field(max_length=MOST)]
    seeds: Annotated[list[Count], Field(max_length=MOST)]
    losses: Annotated[list[Hexadecimal], Field(max_length=MOST)]


class Dump(_Part):
    """One optimizer step, to compare with a repetition of it.

    Attributes:
        problem: message of the error.
        rows_per_forward: rows of a micro-batch.
        loss_scale: of fp16, before the step; None without.
        grad_norm: gradient norm before clipping.
        shares: of every process, in rank order.
        weights: SHA-256 of the trained weights (`weights`) and of each snapshot, by name.
        environment: versions, threads and devices.
    """

    version: Literal[1] = 1
    problem: Annotated[str, Field(max_length=10_000)]
    rows_per_forward: Annotated[int, Field(ge=1, lt=2**31)]
    loss_scale: Hexadecimal | None
    lr: Hexadecimal
    grad_norm: Hexadecimal
    shares: Annotated[list[Share], Field(min_length=1, max_length=2**14)]
    weights: Annotated[dict[Name, Digest], Field(max_length=16)]
    environment: Annotated[dict[Name, Name], Field(max_length=64)]


@dataclass(frozen=True)
class Numbers:
    """Losses and settings of an optimizer step on this process.

    Attributes:
        losses: scalar of each micro-batch.
    """

    step: Step
    losses: Sequence[Tensor]
    lr: float
    loss_scale: float | None


class StepTaken(Exception):
    """Ends the recipe of a replay after its only step.

    Attributes:
        numbers: of the step.
    """

    def __init__(self, numbers: Numbers) -> None:
        super().__init__("the step was repeated")
        self.numbers = numbers


def describe(run: Run, numbers: Numbers, rows_per_forward: int, problem: str) -> Dump:
    """The dump of the step that was taken last. A collective."""
    step = numbers.step
    items = [step.data.items[position] for position in step.positions]
    share = Share(
        examples=[item.id for item in items],
        keys=[item_key(item) for item in items],
        seeds=step.seeds,
        losses=[float(loss).hex() for loss in numbers.losses],
    )
    scale = numbers.loss_scale
    return Dump(
        problem=problem,
        rows_per_forward=rows_per_forward,
        loss_scale=None if scale is None else float(scale).hex(),
        lr=float(numbers.lr).hex(),
        grad_norm=float(run.engine.grad_norm).hex(),
        shares=run.engine.gather_list([share]),
        weights=weights_digests(run),
        environment=flat_environment(),
    )


def weights_digests(run: Run) -> dict[str, str]:
    """SHA-256 of names, types and bytes of the trained weights and of each snapshot. A collective."""
    return {name or "weights": _digest(run.policy.whole(name)) for name in (None, *sorted(run.policy.snapshots))}


def _digest(tensors: Mapping[str, Tensor]) -> str:
    found = hashlib.sha256()
    for name, tensor in sorted(tensors.items()):
        found.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}\n".encode())
        found.update(tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().tobytes())
    return found.hexdigest()


def flat_environment() -> dict[str, str]:
    """Versions, threads and devices that the bits of a step may depend on."""
    found: dict[str, Any] = environment()
    packages = {name: version for name, version in found["packages"].items() if name != "retouch"}
    devices = ", ".join(sorted(set(found["gpus"]))) or "cpu"
    own = {"retouch": found["packages"].get("retouch", ""), "python": found["python"], "platform": found["platform"]}
    flat = {**own, **packages, "devices": devices, "threads": str(found["threads"])}
    return {name: value[:200] for name, value in flat.items()}


def read_dump(folder: Path) -> tuple[dict[str, Any], Dump]:
    """The `state.json` of a dump, and what it records of the step.

    Raises:
        CheckpointError: missing, damaged, or a checkpoint without a dump.
    """
    if not folder.is_dir():
        raise CheckpointError(f"{folder}: no such dump; expected a folder such as runs/NAME/dumps/step-000040")
    state = sound_state(folder)
    if "dump" not in state:
        raise CheckpointError(f"{folder}: a checkpoint, but no dump of a step; expected RUN/dumps/step-...")
    try:
        found = Dump.model_validate(state["dump"])
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, ("dump", *first["loc"])))
        raise damaged(folder, f"state.json: {where}: {first['msg']}") from None
    return state, found
