"""Combinations of reward entries that cannot work, refused before anything is loaded."""

from __future__ import annotations

from collections.abc import Mapping

from retouch.config.errors import nearest
from retouch.config.run import RunConfig
from retouch.rewards.sections import RewardEntry

_OF_THE_GATE = {"gate_threshold": None, "gate_floor": 0.0}
_OF_THE_CROP = {"box_margin": 0.0, "box_min_side": 224}
_OF_TRAINING = {"transform": "none", "noise": 0.0}


def check_entries(run: RunConfig) -> None:
    """Raise ValueError with *what you gave, what is allowed, what to set*."""
    for name, entry in run.rewards.items():
        where = f"rewards.{name}"
        if entry.gated_by is None:
            _unread(where, entry, _OF_THE_GATE, "gated_by is not set: there is no gate")
        else:
            _gate(run, name, entry, entry.gated_by)
        if entry.crop == "none":
            _unread(where, entry, _OF_THE_CROP, "crop is 'none': there is no box; set crop=mask_box, or")
        if entry.role == "gold":
            _unread(where, entry, _OF_TRAINING, "role is 'gold', which is never trained on")
            if entry.weight not in (0.0, 1.0):
                raise ValueError(
                    f"{where}.weight: given {entry.weight:g}, but role is 'gold', which is never trained on; leave "
                    "weight out, or set role=train"
                )
        if entry.transform == "win_rate" and run.rollout.group_size == 1:
            raise ValueError(
                f"{where}.transform: given 'win_rate', but rollout.group_size is 1: there is nobody to beat; set "
                "group_size to 2 or more, or transform=none"
            )


def _unread(where: str, entry: RewardEntry, defaults: Mapping[str, object], why: str) -> None:
    for key, default in defaults.items():
        if (given := getattr(entry, key)) != default:
            raise ValueError(
                f"{where}.{key}: given {given!r}, but {why}{'' if why.endswith('or') else ';'} leave it out"
            )


def _gate(run: RunConfig, name: str, entry: RewardEntry, gate: str) -> None:
    where = f"rewards.{name}.gated_by: given {gate!r}"
    others = [other for other in run.rewards if other != name]
    if gate not in others:
        hint = nearest(gate, others) if others else "there is no other"
        raise ValueError(f"{where}, which is no other reward of the run; {hint}")
    if run.rewards[gate].gated_by is not None:
        raise ValueError(f"{where}, which is gated itself; gate both by {run.rewards[gate].gated_by!r}")
    if run.rewards[gate].role == "gold" and entry.role == "train":
        raise ValueError(f"{where}, whose role is 'gold': it is not scored in training; set its role=train, weight=0")
