"""Where the time of a step of vlm_grpo goes, and what it computed."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("trl")

from retouch.config import load_run, numbers
from retouch.config.vlm import VlmDerived
from retouch.observe.run_dir import read_metrics
from retouch.observe.timing import PARTS

from .vlm_runs import RunFile, train, vlm_file

__all__ = ["vlm_file"]


def test_the_time_of_a_step_is_explained(vlm_file: RunFile, tmp_path: Path) -> None:
    """Two steps a generation; evaluation and checkpoint after the second, which belong to the third."""
    file = vlm_file(
        {"num_iterations": 2, "per_device_train_batch_size": 4, "gradient_accumulation_steps": 2},
        rollout={"num_steps": 2, "guidance_scale": 2.0, "batch_size_per_device": 8},
        algorithm__images_per_completion=2,
        training__max_steps=4,
        training__eval_every=2,
        training__checkpoint_every=2,
    )
    outcome = train(file)
    assert outcome.code == 0, outcome.err
    steps = [record["time"] for record in read_metrics(tmp_path / "a/metrics.jsonl") if record["kind"] == "train"]
    assert len(steps) == 4
    for step in steps:
        assert sum(step[part] for part in PARTS) == pytest.approx(step["step"], rel=0.02)
        assert step["train_forward"] > 0 and step["train_backward"] > 0 and step["optimizer"] > 0
    later = steps[1:]
    assert sum(step["other"] for step in later) < 0.2 * sum(step["step"] for step in later)
    derived = numbers(load_run(file))
    assert isinstance(derived, VlmDerived)
    for step in steps[::2]:
        assert step["text"] > 0 and step["rollout"] > 0 and step["vae"] > 0 and step["reward_wait"] > 0
        assert step["images"] == derived.images_per_generation_per_device == 16
        assert step["nfe_rollout"] == step["images"] * derived.forwards_per_image == 16 * 4
        assert step["images_per_s"] == pytest.approx(step["images"] / step["step"], rel=0.01)
        # one example, none of it counted as training's: at the start, and after the second step
        assert step["nfe_eval"] == 2 * derived.forwards_per_image and step["eval"] > 0
    assert steps[2]["checkpoint"] > 0
    for step in steps[1::2]:
        assert not {"images", "nfe_rollout", "nfe_eval"} & step.keys()
        assert step["text"] == step["rollout"] == step["vae"] == step["eval"] == step["checkpoint"] == 0
