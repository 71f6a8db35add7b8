"""Digests of what a committed number depends on: a test compares them with the tree it lies in."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, cast

from retouch.config import load_run
from retouch.config.base import Section
from retouch.config.reads import EARLIER_DEFAULTS
from retouch.config.run import OptimizerConfig
from retouch.files.model_files import tiny_path

SECTIONS = ("model", "rollout", "algorithm", "rewards", "optimizer", "ema", "training")


def inputs(file: Path, base: Path | None = None, overrides: Sequence[str] = ()) -> dict[str, str]:
    """Digests of the keys of a run file that training depends on, and of the network of its base.

    Args:
        base: folder of the base; None is the tiny base of the family in the package.
        overrides: of the run file.
    """
    base = base or tiny_path(load_run(file).model.family)
    [network] = [file for name in ("transformer", "unet") for file in (base / name).glob("*.safetensors")]
    return {"run": run_digest(file, overrides), "base": digest(network.read_bytes())}


def run_digest(file: Path, overrides: Sequence[str] = ()) -> str:
    """Digest of the keys of a run file that training depends on."""
    config = load_run(file, list(overrides))
    run = {name: _first_names(getattr(config, name)) for name in SECTIONS if name in config.model_fields_set}
    for key, default in EARLIER_DEFAULTS.items():  # a file that sets it does what it did when it left it out
        section, _, option = key.partition(".")
        if run.get(section, {}).get(option, ...) == default:
            del run[section][option]
            if not run[section]:
                del run[section]
    return digest(json.dumps(run, sort_keys=True).encode())


def _first_names(value: object) -> Any:
    """The keys that a section was given, under their first names: neither a renamed key nor the order of the fields
    changes a digest."""
    if isinstance(value, Section):
        kinds = [vars(kind) for kind in type(value).__mro__]
        names = {now: first for kind in kinds for first, now in kind.get("ALIASES", {}).items()}
        values = {key: former for kind in kinds for key, former in kind.get("VALUE_ALIASES", {}).items()}
        given: dict[str, Any] = {}
        for key in value.model_fields_set:
            firsts = {now: first for first, now in values.get(key, {}).items()}
            one = _first_names(getattr(value, key))
            given[names.get(key, key)] = firsts.get(one, one) if isinstance(one, str) else one
        if isinstance(value, OptimizerConfig) and value.global_batch_size:
            # on the one process of a benchmark a step of so many rows is, bit for bit, one of so many micro-batches
            given["gradient_accumulation"] = given.pop("global_batch_size") // value.batch_size_per_device
        return given
    if isinstance(value, Mapping):
        return {str(key): _first_names(one) for key, one in cast("Mapping[object, object]", value).items()}
    if isinstance(value, list | tuple):
        return [_first_names(one) for one in cast("list[object]", value)]
    return value


def digest(data: bytes) -> str:
    """The first 16 hexadecimal digits of the SHA-256."""
    return hashlib.sha256(data).hexdigest()[:16]
