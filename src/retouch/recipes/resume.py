"""Whether a run may go on from a checkpoint, by its run file and the one of today."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import yaml

from retouch.engine import CheckpointError

logger = logging.getLogger(__name__)

SAMPLED_WITH = ("pairs", "inner_epochs", "region", "region_dilation", "seam_weight", "log_prob_mode", "guard")
"""Options of an algorithm that rollouts still to be trained on depend on, as they do on `rollout`: with others the
recorded log-probabilities would be of another policy, or the steps of the epoch other ones."""


def may_go_on(folder: Path, saved: str, current: str, *, after_warmup: bool, inside_epoch: bool) -> None:
    """Refuse a checkpoint of another algorithm or family, and one whose rollouts do not fit the run file.

    Args:
        saved, current: run files.
        after_warmup: whether the checkpoint was written in the RL phase.
        inside_epoch: whether the checkpoint holds rollouts to train on.

    Raises:
        CheckpointError: with the first option that must be set back.
    """
    before, now = yaml.safe_load(saved), yaml.safe_load(current)
    before["optimizer"].setdefault("moments", "fp32")  # as they were before there was a choice
    for section, name in (("model", "family"), ("algorithm", "name"), ("optimizer", "moments")):
        _same(folder, "was written under", section, name, before, now, "or start a new run under another name=...")
    if after_warmup and now["algorithm"].get("kl_weight", 0) and before["algorithm"].get("kl_weight", 1) == 0:
        raise CheckpointError(
            f"{folder}: was written with algorithm.kl_weight=0, which keeps no reference, but the run file has a KL; "
            "set algorithm.kl_weight=0, or start a new run under another name=..."
        )
    if not inside_epoch:
        return
    remedy = "or resume from a checkpoint without rollouts.safetensors"
    keys = [("rollout", name) for name in now["rollout"] if name not in ("batch_size_per_device", "preset")]
    for section, name in [*keys, *(("algorithm", name) for name in SAMPLED_WITH)]:
        _same(folder, "lies inside an epoch of", section, name, before, now, remedy)
    rows = [
        one["optimizer"]["batch_size_per_device"] * one["optimizer"]["gradient_accumulation"] for one in (before, now)
    ]
    if rows[0] != rows[1]:
        raise CheckpointError(
            f"{folder}: lies inside an epoch of optimizer steps on {rows[0]} rows per device, the run file makes them "
            f"{rows[1]}; set optimizer.batch_size_per_device x gradient_accumulation back, {remedy}"
        )


def _same(
    folder: Path, what: str, section: str, name: str, before: dict[str, Any], now: dict[str, Any], remedy: str
) -> None:
    given, kept = now[section].get(name), before[section].get(name, now[section].get(name))
    if given != kept:
        raise CheckpointError(
            f"{folder}: {what} {section}.{name}={kept}, the run file says {given}; set it back, {remedy}"
        )


def warn_of_changes(saved: str, current: str) -> None:
    """Warn of every line of the run file that changed since the checkpoint."""
    before, now = saved.splitlines(), current.splitlines()
    for line in now:
        if line not in before and not line.startswith("resume:"):
            logger.warning("changed since the checkpoint: %s", line.strip())
