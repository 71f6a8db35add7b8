"""Features by encoders of every kind that the page names, with random weights."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import (
    CLIPVisionConfig,
    CLIPVisionModelWithProjection,
    Dinov2Config,
    Dinov2Model,
    SiglipVisionConfig,
    SiglipVisionModel,
)

from retouch.errors import ConfigError
from retouch.taste.extractor import Extractor

SMALL: dict[str, Any] = {
    "hidden_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "patch_size": 14,
    "image_size": 28,
}
NETWORKS = {
    "clip": lambda: CLIPVisionModelWithProjection(CLIPVisionConfig(**SMALL, intermediate_size=32, projection_dim=16)),
    "siglip": lambda: SiglipVisionModel(SiglipVisionConfig(**SMALL, intermediate_size=32)),
    "dinov2": lambda: Dinov2Model(Dinov2Config(**SMALL)),
}


@pytest.mark.parametrize("kind", NETWORKS)
def test_an_encoder_gives_features_with_a_gradient_and_one_without_all_weights_is_refused(
    kind: str, tmp_path: Path
) -> None:
    NETWORKS[kind]().save_pretrained(tmp_path)
    encoder = Extractor(str(tmp_path))
    image = torch.rand(3, 20, 30, requires_grad=True)
    features = encoder(image, None)
    vector = (16 if kind == "clip" else 32) + 32 + 32  # and mean and deviation of the patches
    assert features.shape == (2 * vector,) and torch.equal(features[:vector], features[vector:])
    features.sum().backward()
    assert image.grad is not None and image.grad.abs().sum() > 0
    assert Extractor(str(tmp_path)).revision == encoder.revision
    weights = load_file(tmp_path / "model.safetensors")
    lacking = {name: value for name, value in weights.items() if "norm" not in name}
    save_file(lacking, tmp_path / "model.safetensors", {"format": "pt"})
    with pytest.raises(ConfigError, match="weights are missing"):
        Extractor(str(tmp_path))
