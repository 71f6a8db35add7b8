"""Combinations that cannot work, refused before anything is loaded."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from retouch.config.schema import RunConfig

SIZE_MULTIPLE = {"flux_fill": 16}
"""Pixels that image sides must be multiples of, by family, at the released sizes of the networks."""

TINY_SIZE_MULTIPLE = 8
"""The same for the tiny bases, whose autoencoder shrinks 4 x."""


def check(run: RunConfig) -> None:
    """Raise ValueError with *what you gave, what is allowed, what to set*."""
    _model(run)
    _rewards(run)
    _groups(run)
    _steps(run)
    _sizes(run)
    _weights(run)


def _model(run: RunConfig) -> None:
    if not run.model.path:
        raise ValueError("model.path: empty; set a hub id or a folder in the diffusers layout")


def _rewards(run: RunConfig) -> None:
    if run.algorithm.name == "sft":
        return
    if not run.rewards:
        raise ValueError(
            f"rewards: none given, but algorithm.name is {run.algorithm.name!r}, which trains on rewards; "
            "set for example rewards: {ocr: {weight: 1.0}}"
        )
    if not any(entry.weight for entry in run.rewards.values()):
        raise ValueError("rewards: every weight is 0, so that there is nothing to raise; set one weight above 0")


def _groups(run: RunConfig) -> None:
    if run.algorithm.name == "sft" or run.rollout.group_size > 1:
        return
    for key, value in (("baseline", run.algorithm.baseline), ("scale", run.algorithm.scale)):
        if value == "group":
            raise ValueError(
                f"rollout.group_size: given {run.rollout.group_size}, but algorithm.{key}=group compares the images of "
                f"one example with each other; set group_size to 2 or more (4-16 is usual), or algorithm.{key}=batch"
            )


def _steps(run: RunConfig) -> None:
    if run.algorithm.name == "sft":
        return
    if run.algorithm.warmup_steps > run.training.max_steps:
        raise ValueError(
            f"algorithm.warmup_steps: given {run.algorithm.warmup_steps}, more than training.max_steps "
            f"{run.training.max_steps}; max_steps counts the warm-up too"
        )
    if run.rollout.window and run.algorithm.timestep_fraction < 1:
        raise ValueError(
            f"algorithm.timestep_fraction: given {run.algorithm.timestep_fraction} beside rollout.window; the window "
            "already says which steps are trained; leave timestep_fraction at 1.0"
        )


def _sizes(run: RunConfig) -> None:
    multiple = TINY_SIZE_MULTIPLE if run.model.path == "tiny" else SIZE_MULTIPLE[run.model.family]
    sections = {"data": run.data, "warmup_data": run.warmup_data, "evaluation.data": run.evaluation.data}
    for name, data in sections.items():
        if data and any(side % multiple for side in data.size):
            nearest = [max(multiple, round(side / multiple) * multiple) for side in data.size]
            raise ValueError(
                f"{name}.resolution: given {data.resolution}; {run.model.family} needs multiples of {multiple}; "
                f"set {nearest if nearest[0] != nearest[1] else nearest[0]}"
            )


def _weights(run: RunConfig) -> None:
    if run.evaluation.weights == "ema" and run.ema is None:
        raise ValueError(
            "evaluation.weights: given 'ema', but there is no ema section; set ema.decay=0.999, or "
            "evaluation.weights=raw"
        )
