from typing import Any

import pytest

from retouch.models.sd_inpaint import SdInpaint
from retouch.models.tiny import tiny_pipeline
from tests.models.conftest import model, pipeline, with_point_posterior  # noqa: F401


@pytest.fixture(scope="session")
def sd_model() -> Any:
    """A tiny Stable Diffusion inpainting model with random weights."""
    return SdInpaint.from_pipeline(with_point_posterior(tiny_pipeline("sd_inpaint", seed=3)))
