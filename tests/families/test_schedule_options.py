"""Options of a flow scheduler's config: sampled with, or refused by name."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from diffusers import FlowMatchEulerDiscreteScheduler

from retouch.families import FAMILIES
from retouch.families.diffusion import FamilyModel
from retouch.families.loading import ModelFilesError, family_class
from retouch.families.tiny import tiny_pipeline
from retouch.files.model_files import UNSUPPORTED

FLOW = [family for family in FAMILIES if FAMILIES[family].spec.prediction == "flow"]
SIZE, STEPS = (64, 64), 5
TAKEN: list[dict[str, Any]] = [
    {"time_shift_type": "linear"},
    {"shift_terminal": 0.1},
    {"time_shift_type": "linear", "shift_terminal": 0.1},
    {"use_dynamic_shifting": False, "shift": 2.5},
]


def with_options(family: str, **options: Any) -> FamilyModel:
    pipeline = tiny_pipeline(family, seed=3)
    pipeline.scheduler = FlowMatchEulerDiscreteScheduler.from_config(pipeline.scheduler.config, **options)
    return family_class(family).from_pipeline(pipeline)


@pytest.mark.parametrize("family", FLOW)
def test_the_options_of_the_scheduler_are_those_of_the_schedule(family: str) -> None:
    """mu is the same in both kinds of shift. The end is stretched to in every family."""
    common = {"use_dynamic_shifting": True, "base_shift": 0.6, "max_shift": 1.3, "shift_terminal": None}
    plain: Any = with_options(family, **common).schedule(STEPS, SIZE)
    last = 1 / 1000 if family == "sd3" else 1 / STEPS  # its pipeline leaves the steps to the scheduler
    raw = np.linspace(1, last, STEPS)
    for options in TAKEN:
        if family == "sd3" and "shift" in options:
            continue  # its constant shift is applied twice: tests/families/test_sd3.py
        model = with_options(family, **common | options)
        scheduler: Any = FlowMatchEulerDiscreteScheduler.from_config(model.scheduler.config)
        scheduler.set_timesteps(sigmas=raw, mu=math.log(plain.shift))
        torch.testing.assert_close(model.schedule(STEPS, SIZE).times, scheduler.sigmas, atol=1e-5, rtol=0)


@pytest.mark.parametrize("family", FLOW)
@pytest.mark.parametrize("name", UNSUPPORTED)
def test_an_option_that_is_not_sampled_with_is_refused(family: str, name: str) -> None:
    pytest.importorskip("scipy")  # diffusers' own condition of beta sigmas
    with pytest.raises(ModelFilesError, match=rf"^model\.path: scheduler/scheduler_config\.json has {name}, which is"):
        with_options(family, **{name: True})


def test_every_option_of_the_scheduler_is_known() -> None:
    """A new one of diffusers is looked at before it is ignored."""
    sampled_with = {
        "num_train_timesteps", "shift", "use_dynamic_shifting", "base_shift", "max_shift", "base_image_seq_len",
        "max_image_seq_len", "shift_terminal", "time_shift_type",
    }  # fmt: skip
    found = {name for name in FlowMatchEulerDiscreteScheduler().config if not name.startswith("_")}
    assert found == sampled_with | set(UNSUPPORTED)
