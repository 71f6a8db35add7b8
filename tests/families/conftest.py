"""A tiny FLUX.1-Fill with random weights and awkward constants, and examples to repaint."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from retouch.families.flux_fill.model import FluxFill
from retouch.families.tiny import TEXT_TOKENS, tiny_pipeline
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
    made = with_point_posterior(tiny_pipeline("flux_fill", seed=3))
    made.vae.register_to_config(shift_factor=0.3, scaling_factor=0.7)
    return made


def with_point_posterior(pipeline: Any) -> Any:
    """Every sample of the autoencoder's posterior is its mode, so that the pipeline's masked image is ours."""
    channels = pipeline.vae.config.latent_channels
    with torch.no_grad():
        pipeline.vae.encoder.conv_out.weight[channels:] = 0
        pipeline.vae.encoder.conv_out.bias[channels:] = -30
    pipeline.set_progress_bar_config(disable=True)
    return pipeline


@pytest.fixture(scope="session")
def model(pipeline: Any) -> Any:
    return FluxFill.from_pipeline(pipeline)


@pytest.fixture(scope="session")
def tiny_folder(pipeline: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The pipeline on disk, in the hub's layout."""
    folder = tmp_path_factory.mktemp("tiny")
    pipeline.save_pretrained(folder)
    return folder


__all__ = ["TEXT_TOKENS"]
