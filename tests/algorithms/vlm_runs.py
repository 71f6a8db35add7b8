"""Small runs of vlm_grpo on random weights."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cache
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

import pytest
import yaml
from safetensors.torch import load_file
from torch import Tensor

from retouch.families.tiny import tiny_pipeline
from retouch.observe.run_dir import read_metrics
from retouch.tiny.edits import write_edits
from tests.command_line import Outcome, retouch

RunFile = Callable[..., Path]
"""(trl options, dotted overrides with `__` for dots) -> a run file."""


@cache
def random_model(family: str = "qwen_image_edit") -> str:
    """A folder with random weights of a family."""
    folder = Path(mkdtemp(prefix=f"retouch-random-{family}-"))
    tiny_pipeline(family, seed=4).save_pretrained(folder)
    return str(folder)


@cache
def tasks() -> Path:
    """Twelve editing tasks."""
    folder = Path(mkdtemp(prefix="retouch-edits-"))
    write_edits(folder, 12, "train", 3)
    return folder / "manifest.json"


def run_section(out: Path, trl: Mapping[str, Any] | None = None, **sections: Any) -> dict[str, Any]:
    """A run of two steps on eight completions each, in two groups."""
    options = {
        "per_device_train_batch_size": 8,
        "gradient_accumulation_steps": 1,
        "num_generations": 4,
        "max_completion_length": 5,
        "learning_rate": 1e-2,
        "loss_type": "dr_grpo",
        "scale_rewards": "none",
        "use_peft": True,
        "lora_r": 4,
        "lora_alpha": 8,
        "lora_dropout": 0.0,
        **(trl or {}),
    }
    run: dict[str, Any] = {
        "name": "a",
        "seed": 5,
        "model": {"family": "qwen_image_edit", "path": random_model(), "dtype": "fp32", "max_sequence_length": 256},
        "data": {"format": "manifest", "path": str(tasks()), "resolution": 32},
        "rollout": {"num_steps": 1, "guidance_scale": 1.0, "batch_size_per_device": 8},
        "algorithm": {"name": "vlm_grpo", "trl": options},
        "rewards": {
            "letters": {"scorer": "fn", "fn": "tests.algorithms.completion_rewards:letters", "paste_back": False}
        },
        "training": {
            "max_steps": 2,
            "checkpoint_every": 0,
            "eval_every": 0,
            "mixed_precision": "no",
            "gradient_checkpointing": False,
        },
        "evaluation": {"num_examples": 1, "grid_examples": 1},
        "logging": {"dir": str(out), "sinks": []},
    }
    for key, value in sections.items():
        part, _, name = key.partition("__")
        if name:
            run[part] = {**run.get(part, {}), name: value}
        else:
            run[part] = value
    return run


@pytest.fixture
def vlm_file(tmp_path: Path) -> RunFile:
    """Write a run file."""

    def write(trl: Mapping[str, Any] | None = None, **sections: Any) -> Path:
        path = tmp_path / "run.yaml"
        path.write_text(yaml.safe_dump(run_section(tmp_path, trl, **sections)), encoding="utf-8")
        return path

    return write


def train(file: Path, *overrides: str) -> Outcome:
    return retouch("train", file, *overrides)


def records(folder: Path, kind: str = "train") -> list[dict[str, Any]]:
    """Lines of a run's metrics, timings aside."""
    found = [record for record in read_metrics(folder / "metrics.jsonl") if record["kind"] == kind]
    return [{name: value for name, value in record.items() if name != "time"} for record in found]


def weights(folder: Path, step: int) -> dict[str, Tensor]:
    """Of a checkpoint."""
    files = (folder / f"checkpoints/step-{step:06d}/weights").glob("*.safetensors")
    return {name: tensor for file in files for name, tensor in load_file(file).items()}
