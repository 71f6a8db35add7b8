"""Where the time of a step of vlm_grpo goes, and what it computed."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("trl")

from retouch.algorithms.vlm_grpo.config import VlmDerived
from retouch.algorithms.vlm_grpo.recipe import VlmTrainer
from retouch.algorithms.vlm_grpo.run import build_run
from retouch.algorithms.vlm_grpo.trainer import trl_arguments
from retouch.config import load_run, numbers
from retouch.observe.run_dir import read_metrics
from retouch.observe.timing import PARTS

from .vlm_runs import RunFile, train, vlm_file

__all__ = ["vlm_file"]


@pytest.mark.full
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
    assert steps[2]["checkpoint"] > 0
    for step in steps[1::2]:
        assert not {"images", "nfe_rollout"} & step.keys()
        assert step["text"] == step["rollout"] == step["vae"] == step["checkpoint"] == 0
    assert not any("nfe_eval" in step or step["eval"] for step in steps)
    evaluations = [record["time"] for record in read_metrics(tmp_path / "a/metrics.jsonl") if record["kind"] == "eval"]
    for evaluation in evaluations:  # one example: at the start, after the second step, at the end
        assert evaluation["nfe_eval"] == 2 * derived.forwards_per_image and evaluation["eval"] > 0
    assert len(evaluations) == 3


@pytest.mark.full
def test_each_computation_is_charged_to_its_part(vlm_file: RunFile) -> None:
    """Two passes of four completions; the KL asks the reference, which is the policy without its adapter."""
    trl = {"per_device_train_batch_size": 4, "gradient_accumulation_steps": 2, "beta": 0.1}
    config = load_run(vlm_file(trl, training__max_steps=1))
    arguments = trl_arguments(config)
    parts = build_run(config, arguments.device, 1, main=True)
    parts.dir.open(None)
    parts.rewards.start()
    seen: Counter[tuple[str, str]] = Counter()

    def told(what: str) -> Any:
        return lambda *_: seen.update([(what, parts.clock.current)])

    try:
        trainer = VlmTrainer(parts, arguments)
        trainer.owes_evaluation = False
        parts.policy.model.language_model.register_forward_pre_hook(told("words"))
        parts.diffusion_model.network.register_forward_pre_hook(told("picture"))
        parts.diffusion_model.vae.encoder.register_forward_pre_hook(told("autoencoder"))
        parts.diffusion_model.vae.decoder.register_forward_pre_hook(told("autoencoder"))
        model: Any = trainer.model
        learns = next(parameter for name, parameter in model.named_parameters() if ".lora_B." in name)
        learns.register_hook(told("gradient"))
        trainer.create_optimizer()
        optimizer: Any = trainer.optimizer
        optimizer.register_step_pre_hook(told("update"))
        trainer.train()
    finally:
        parts.close()
    places = {
        "words": {"text", "train_forward"},
        "picture": {"rollout"},
        "autoencoder": {"vae"},
        "gradient": {"train_backward"},
        "update": {"optimizer"},
    }
    assert {what: {part for one, part in seen if one == what} for what in places} == places
    assert seen["words", "text"] == 5 + 1  # tokens, and states for all
    assert seen["words", "train_forward"] == 2 + 2  # of the reference, and in the loss
    assert seen["gradient", "train_backward"] == 2 and seen["update", "optimizer"] == 1
