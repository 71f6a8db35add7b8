from typing import Any

import pytest

from retouch.families.sd_inpaint.model import SdInpaint
from retouch.families.tiny import tiny_pipeline
from tests.families.conftest import model, pipeline, with_point_posterior  # noqa: F401


@pytest.fixture(scope="session")
def sd_model() -> Any:
    """A tiny Stable Diffusion inpainting model with random weights."""
    return SdInpaint.from_pipeline(with_point_posterior(tiny_pipeline("sd_inpaint", seed=3)))
