"""A tiny FLUX.1-Fill with random weights and awkward constants, and examples to repaint."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from retouch.models.tiny import TEXT_TOKENS, tiny_pipeline
from retouch.recipes.tiny_base import family_model
from retouch.types import Example


def random_example(number: int, height: int, width: int) -> Example:
    draw = np.random.default_rng(number)
    mask = np.zeros((height, width), np.uint8)
    # an odd box: nearest-downsampling the mask would not do
    mask[5 : height - 3, 7 : width - 6] = 255
    source = Image.fromarray(draw.integers(0, 256, (height, width, 3), np.uint8))
    return Example(number, f"The text is 'W{number}'.", source, Image.fromarray(mask), metadata={"text": f"W{number}"})


@pytest.fixture(scope="session")
def pipeline() -> Any:
    """`FluxFillPipeline` whose posterior is a point, so that its sampled masked image is the mode."""
    made = tiny_pipeline("flux_fill", seed=3)
    channels = made.vae.config.latent_channels
    with torch.no_grad():
        made.vae.encoder.conv_out.weight[channels:] = 0
        made.vae.encoder.conv_out.bias[channels:] = -30
    made.vae.register_to_config(shift_factor=0.3, scaling_factor=0.7)
    made.set_progress_bar_config(disable=True)
    return made


@pytest.fixture(scope="session")
def model(pipeline: Any) -> Any:
    return family_model(pipeline)


@pytest.fixture(scope="session")
def tiny_folder(pipeline: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The pipeline on disk, in the hub's layout."""
    folder = tmp_path_factory.mktemp("tiny")
    pipeline.save_pretrained(folder)
    return folder


__all__ = ["TEXT_TOKENS"]
