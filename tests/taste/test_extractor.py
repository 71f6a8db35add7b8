"""Features by encoders of every kind that the page names, with random weights."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
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
from retouch.taste.extractor import STATISTICS, Extractor

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
    vector = 16 if kind == "clip" else 32
    assert features.shape == (2 * vector + STATISTICS,)
    assert torch.equal(features[:vector], features[vector : 2 * vector])
    features.sum().backward()
    assert image.grad is not None and image.grad.abs().sum() > 0
    assert Extractor(str(tmp_path)).revision == encoder.revision
    weights = load_file(tmp_path / "model.safetensors")
    lacking = {name: value for name, value in weights.items() if "norm" not in name}
    save_file(lacking, tmp_path / "model.safetensors", {"format": "pt"})
    with pytest.raises(ConfigError, match="weights are missing"):
        Extractor(str(tmp_path))


def test_statistics_are_of_colour_contrast_and_share_of_ink() -> None:
    """A mask of two colours: the skewness is that of a coin that falls so, whatever the contrast."""
    image, mask = torch.full((3, 10, 10), 0.9), np.zeros((10, 10), np.uint8)
    mask[:5] = 255
    for ink, contrast in ((0.1, 0.4), (0.1, 0.8), (0.3, 0.4)):
        image[:] = 0.9
        image[:, :5].view(3, -1)[:, : round(50 * ink)] -= contrast
        image[0, :5] += 0.1
        mean, red, green, deviation, *_, skewness = Extractor("tiny")(image, mask)[-7:].tolist()
        assert (mean, red, green) == pytest.approx((0.9 + 0.1 / 3 - ink * contrast, 0.1, -0.05), abs=1e-4)
        assert deviation == pytest.approx(contrast * (ink * (1 - ink)) ** 0.5, abs=1e-3)
        assert skewness == pytest.approx((2 * ink - 1) / (ink * (1 - ink)) ** 0.5, abs=1e-3)
    flat = torch.ones(3, 8, 8, requires_grad=True)
    Extractor("tiny")(flat, None).sum().backward()
    assert flat.grad is not None and flat.grad.isfinite().all()
