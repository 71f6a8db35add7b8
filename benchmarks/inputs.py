"""Digests of what a committed number depends on: a test compares them with the tree it lies in."""

from __future__ import annotations

import hashlib
from pathlib import Path

from retouch.config import load_run
from retouch.families.loading import tiny_path

SECTIONS = ("model", "rollout", "algorithm", "rewards", "optimizer", "ema", "training")


def inputs(file: Path) -> dict[str, str]:
    """Digests of what a run file says of how it trains, and of the tiny base of its family."""
    config = load_run(file)
    run = config.model_dump_json(include=set(SECTIONS), exclude_unset=True)
    base = tiny_path(config.model.family)
    [network] = [file for name in ("transformer", "unet") for file in (base / name).glob("*.safetensors")]
    return {"run": digest(run.encode()), "base": digest(network.read_bytes())}


def digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()[:16]
