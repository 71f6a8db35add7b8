"""Reference pictures as vectors: padded, normalised as the encoder's own processor does, each on its own, once."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from transformers import CLIPVisionConfig, CLIPVisionModelWithProjection, T5Config, T5EncoderModel
from transformers.models.siglip.image_processing_pil_siglip import SiglipImageProcessorPil

from retouch.config import ConfigError
from retouch.families.tiny import tiny_image_encoder
from retouch.image_encoder import TINY, ImageEncoder, pad_to_square
from retouch.rewards.scorers.style import StyleReward


def picture(width: int, height: int, seed: int = 0) -> Image.Image:
    return Image.fromarray(np.random.default_rng(seed).integers(0, 256, (height, width, 3), np.uint8))


@pytest.fixture(scope="module")
def encoder() -> ImageEncoder:
    return ImageEncoder.load("tiny")


def test_a_picture_is_padded_in_the_middle_and_keeps_its_pixels() -> None:
    wide = pad_to_square(picture(9, 4))
    assert wide.size == (9, 9)
    assert np.array_equal(np.asarray(wide)[2:6], np.asarray(picture(9, 4)))
    assert not np.asarray(wide)[:2].any() and not np.asarray(wide)[6:].any()
    tall = pad_to_square(picture(3, 8))
    assert np.array_equal(np.asarray(tall)[:, 2:5], np.asarray(picture(3, 8)))


@pytest.mark.parametrize("size", [(64, 64), (100, 100), (30, 30)])
def test_pixels_are_those_of_the_models_own_processor(encoder: ImageEncoder, size: tuple[int, int]) -> None:
    processor: Any = SiglipImageProcessorPil.from_pretrained(TINY)
    expected = processor(images=[picture(*size)], return_tensors="pt").pixel_values[0]
    torch.testing.assert_close(encoder.pixels(picture(*size)), expected, atol=1e-5, rtol=0)


def test_vectors_are_the_models_and_depend_on_their_picture_alone(encoder: ImageEncoder) -> None:
    pictures = [picture(30, 12, seed) for seed in range(3)]
    vectors = encoder(pictures)
    assert vectors.shape == (3, encoder.width) and vectors.dtype == torch.float32
    with torch.no_grad():
        expected = encoder.model(pixel_values=encoder.pixels(pictures[1])[None]).pooler_output[0]
    assert torch.equal(vectors[1], expected)
    fresh = ImageEncoder.load("tiny")
    assert torch.equal(fresh(pictures[::-1]), vectors.flip(0))


def test_a_picture_is_encoded_once(monkeypatch: pytest.MonkeyPatch) -> None:
    encoder = ImageEncoder(tiny_image_encoder(), "pooler_output")
    counted: list[int] = []
    encoder.model.register_forward_hook(lambda *_: counted.append(1))
    first = encoder([picture(8, 8), picture(8, 8), picture(8, 9)])
    assert torch.equal(encoder([picture(8, 9)])[0], first[2])
    assert len(counted) == 2


def test_clip_gives_its_projected_vector(tmp_path: Path) -> None:
    options = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    clip: Any = CLIPVisionModelWithProjection(
        CLIPVisionConfig(**options, image_size=32, patch_size=16, projection_dim=12)
    )
    clip.save_pretrained(tmp_path)
    (tmp_path / "preprocessor_config.json").write_text('{"image_mean": [0.4, 0.5, 0.6], "image_std": [0.2, 0.3, 0.4]}')
    encoder = ImageEncoder.load(str(tmp_path))
    assert encoder.width == 12
    grey = encoder.pixels(Image.new("RGB", (5, 5), (51, 51, 51)))[:, 0, 0]
    torch.testing.assert_close(grey, torch.tensor([(0.2 - 0.4) / 0.2, (0.2 - 0.5) / 0.3, (0.2 - 0.6) / 0.4]))
    with torch.no_grad():
        expected = clip(pixel_values=encoder.pixels(picture(9, 5))[None]).image_embeds[0]
    torch.testing.assert_close(encoder([picture(9, 5)])[0], expected)


def test_encoders_that_cannot_be_used(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"model\.train\.image_encoder: given '.*nowhere', which cannot be loaded"):
        ImageEncoder.load(str(tmp_path / "nowhere"))
    with pytest.raises(ConfigError, match=r"^image_encoder: given '.*nowhere', which cannot be loaded"):
        StyleReward(image_encoder=str(tmp_path / "nowhere"), gate=0).make().load("cpu")
    T5EncoderModel(T5Config(vocab_size=8, d_model=8, d_kv=4, d_ff=8, num_layers=1, num_heads=2)).save_pretrained(
        tmp_path
    )
    with pytest.raises(ConfigError, match="a t5 model; give a SigLIP or a CLIP"):
        ImageEncoder.load(str(tmp_path))
