"""Training on a quantized base: on-policy to the bit, resumable, and with a style adapter."""

from __future__ import annotations

from typing import Any

import pytest

from tests.families.test_quantized import NF4

from .runs import Config, brightness, of_kind, same_weights, train, weights

pytestmark = pytest.mark.usefixtures("shallow")


@pytest.mark.parametrize(
    "scheme",
    ["int8", pytest.param("fp8", marks=pytest.mark.full), pytest.param("nf4", marks=[*NF4.marks, pytest.mark.full])],
)
def test_training_is_on_policy_and_resumes_bitwise(scheme: Any, config: Config, scripted: Any) -> None:
    """The first ratio is 1, exactly: rollout and training use one forward. int8 in fp32, the others as large runs are
    trained."""
    scripted(brightness)
    low = {"model__dtype": "bf16", "training__mixed_precision": "bf16", "training__gradient_checkpointing": True}
    options: dict[str, Any] = {
        **({} if scheme == "int8" else low),
        "model__train": {"kind": "lora", "rank": 3}, "model__quantize": scheme, "optimizer__lr": 3e-3,
        "rollout__batch_size_per_device": 1, "optimizer__batch_size_per_device": 1, "rollout__window": {"size": 1},
        "optimizer__gradient_accumulation": 2, "training__max_steps": 2, "training__checkpoint_every": 1,
    }  # fmt: skip
    whole, records = train(config(**options))
    first = of_kind(records, "train")[0]
    assert first["max_abs_log_ratio"] == 0.0 and first["grad_norm"] > 0
    resume = str(whole.dir.path / "checkpoints/step-000001")
    again, _ = train(config(resume=resume, **options))
    assert same_weights(weights(whole), weights(again))
