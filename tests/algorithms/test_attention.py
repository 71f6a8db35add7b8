"""Training with another kernel of attention is on policy to the bit."""

from __future__ import annotations

from typing import Any

import pytest

from retouch.families.attention import NAMES
from tests.families.conftest import attention_of

from .runs import Config, brightness, of_kind, train

pytestmark = pytest.mark.usefixtures("shallow")


@pytest.mark.parametrize("kernel", ["math", "torch_flash"])
def test_training_with_another_kernel_is_on_policy(kernel: str, config: Config, scripted: Any) -> None:
    """The first ratio is exactly 1: rollout and training use one kernel."""
    scripted(brightness)
    sizes = {"rollout__batch_size_per_device": 2, "optimizer__batch_size_per_device": 2, "rollout__window": {"size": 1}}
    run, records = train(config(model__attention=kernel, training__max_steps=2, **sizes))
    assert attention_of(run.model.network) == {NAMES[kernel]}  # type: ignore[index]
    first = of_kind(records, "train")[0]
    assert first["max_abs_log_ratio"] == 0.0 and first["grad_norm"] > 0
