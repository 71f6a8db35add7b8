"""Small runs on the committed tiny base: seconds each, no OCR unless a test is about it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from retouch.config import RunConfig, parse_run
from retouch.data.synth import draw_words, write_signs

SIZE = (32, 64)


@pytest.fixture(scope="session")
def signs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folders `targets`, `prompts` (no targets) and `held_out`."""
    root = tmp_path_factory.mktemp("signs")
    write_signs(root / "targets", draw_words(8, "train", 1), SIZE, 1)
    write_signs(root / "prompts", draw_words(8, "train", 2), SIZE, 2, with_targets=False, first_id=100)
    write_signs(root / "held_out", draw_words(4, "held_out", 3), SIZE, 3, first_id=200)
    return root


@pytest.fixture
def run_file(signs: Path, tmp_path: Path) -> Callable[..., dict[str, Any]]:
    """A GRPO run of the smallest kind as a mapping; keyword arguments are dotted overrides with `__` for dots."""

    def make(**overrides: Any) -> dict[str, Any]:
        data: dict[str, Any] = {
            "name": "t",
            "seed": 5,
            "model": {
                "family": "flux_fill",
                "path": "tiny",
                "dtype": "fp32",
                "max_sequence_length": 24,
                "train": {"kind": "full"},
            },
            "data": {"format": "self_bench", "path": str(signs / "prompts"), "resolution": [32, 64], "target": "none"},
            "warmup_data": {"format": "self_bench", "path": str(signs / "targets"), "resolution": [32, 64]},
            "rollout": {
                "group_size": 2,
                "global_groups_per_batch": 2,
                "batch_size_per_device": 4,
                "num_steps": 3,
                "noise_level": 0.7,
                "window": {"size": 2, "range": [0, 1]},
            },
            "algorithm": {"name": "grpo", "clip_range": 1e-3},
            "rewards": {"preservation": {}},
            "optimizer": {"lr": 1e-4, "batch_size_per_device": 2, "gradient_accumulation": 1},
            "training": {
                "max_steps": 4,
                "checkpoint_every": 0,
                "eval_every": 0,
                "mixed_precision": "no",
                "gradient_checkpointing": False,
            },
            "evaluation": {
                "data": {"format": "self_bench", "path": str(signs / "held_out"), "resolution": [32, 64]},
                "num_examples": 2,
                "grid_examples": 1,
            },
            "logging": {"dir": str(tmp_path / "runs"), "sinks": []},
        }
        for dotted, value in overrides.items():
            node = data
            *path, last = dotted.split("__")
            for part in path:
                node = node.setdefault(part, {})
            node[last] = value
        return data

    return make


@pytest.fixture
def config(run_file: Callable[..., dict[str, Any]]) -> Callable[..., RunConfig]:
    return lambda **overrides: parse_run(run_file(**overrides))
