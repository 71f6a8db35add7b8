"""LoRA on a bf16 base without autocast (training.mixed_precision "no"): bf16 throughout, and on-policy to the bit."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from retouch.training.step import forward_precision

from .runs import Config, brightness, of_kind, train, weights
from .test_cells import path_of


@pytest.mark.parametrize("family", ["flux_fill", pytest.param("sd_inpaint", marks=pytest.mark.full)])
def test_training_is_on_policy_and_resumes_bitwise(family: str, config: Config, scripted: Any) -> None:
    scripted(brightness)
    given = config(
        model={"family": family, "path": path_of(family), "dtype": "bf16", "train": {"kind": "lora", "rank": 3}},
        optimizer={"lr": 3e-3, "batch_size_per_device": 1, "gradient_accumulation": 2},
        rollout__batch_size_per_device=1,
        rollout__window={"size": 1},
        rollout__noise_level=None,
        training__gradient_checkpointing=True,
        training__max_steps=2,
        training__checkpoint_every=1,
    )
    assert given.training.mixed_precision == "no" and forward_precision(given) == "bf16"
    whole, records = train(given)
    first = of_kind(records, "train")[0]
    assert first["max_abs_log_ratio"] == 0.0 and first["grad_norm"] > 0
    assert {t.dtype for t in weights(whole).values()} == {torch.float32}
    again, _ = train(given.model_copy(update={"resume": str(whole.dir.path / "checkpoints/step-000001")}))
    assert all(torch.equal(t, weights(again)[n]) for n, t in weights(whole).items())
