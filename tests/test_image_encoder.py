"""Reference pictures as vectors: padded, normalised as the encoder's own processor does, each on its own, once."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from transformers import (
    CLIPConfig,
    CLIPModel,
    CLIPVisionConfig,
    CLIPVisionModelWithProjection,
    T5Config,
    T5EncoderModel,
)
from transformers.image_utils import OPENAI_CLIP_MEAN, OPENAI_CLIP_STD
from transformers.models.clip.image_processing_pil_clip import CLIPImageProcessorPil
from transformers.models.siglip.image_processing_pil_siglip import SiglipImageProcessorPil

from retouch.config import ConfigError
from retouch.doctor.networks import meta_encoder
from retouch.families import FAMILIES
from retouch.families.embeddings import identity
from retouch.families.image_encoder import TINY, ImageEncoder, changed_normalization, pad_to_square
from retouch.families.tiny import tiny_image_encoder
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


def test_images_of_one_pattern_in_two_palettes_are_two(encoder: ImageEncoder) -> None:
    """`condition` of an adapter takes images as they are opened; a PNG of few colours has indices for pixels."""
    red, blue = (Image.new("P", (8, 8)) for _ in range(2))
    red.putpalette([255, 0, 0]), blue.putpalette([0, 0, 255])
    assert red.tobytes() == blue.tobytes()
    assert torch.equal(encoder([red, blue]), encoder([red.convert("RGB"), blue.convert("RGB")]))
    assert not torch.equal(*encoder([red, blue]))


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


def clip_folder(folder: Path, width: int = 12, **options: Any) -> Path:
    """A whole CLIP as it is released: the width of its vectors in the config of the whole."""
    tower = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    text = {**tower, "vocab_size": 8, "max_position_embeddings": 4, "eos_token_id": 7, "bos_token_id": 6}
    vision = {**tower, "image_size": 32, "patch_size": 16, **options}
    config = CLIPConfig(text_config=text, vision_config=vision, projection_dim=width)
    torch.manual_seed(0)
    CLIPModel(config).save_pretrained(folder)
    return folder


def without_config(folder: Path) -> None:
    """Like the encoders of released IP-Adapters."""


def of_transformers_5(folder: Path) -> None:
    """The options of the image processor are nested."""
    CLIPImageProcessorPil().save_pretrained(folder)
    options = json.loads((folder / "preprocessor_config.json").read_text("utf-8"))
    (folder / "preprocessor_config.json").unlink()
    nested = {"image_processor": options, "processor_class": "CLIPProcessor"}
    (folder / "processor_config.json").write_text(json.dumps(nested), encoding="utf-8")


def of_transformers_4(folder: Path) -> None:
    CLIPImageProcessorPil().save_pretrained(folder)


@pytest.mark.parametrize("config", [without_config, of_transformers_5, of_transformers_4])
@pytest.mark.parametrize("kind", ["clip", "clip_vision_model"])
def test_a_clip_is_normalized_as_it_was_trained(tmp_path: Path, config: Callable[[Path], None], kind: str) -> None:
    """Whatever its folder says it in; its vectors are those of transformers' own processor and model."""
    folder = clip_folder(tmp_path / "clip")
    if kind == "clip_vision_model":
        nested: Any = CLIPVisionConfig.from_pretrained(folder)
        nested.projection_dim = 12
        CLIPVisionModelWithProjection.from_pretrained(folder, config=nested).save_pretrained(tmp_path / "vision")
        folder = tmp_path / "vision"
    config(folder)
    encoder = ImageEncoder.load(str(folder))
    square = picture(32, 32)
    pixels = CLIPImageProcessorPil(size={"shortest_edge": 32}, crop_size=32)(square, return_tensors="pt").pixel_values
    torch.testing.assert_close(encoder.pixels(square)[None], pixels, atol=1e-5, rtol=0)
    with torch.no_grad():
        expected = encoder.model(pixel_values=pixels).image_embeds
    torch.testing.assert_close(encoder([square]), expected, atol=1e-5, rtol=1e-5)


def test_a_siglip_without_a_config_of_its_processor_keeps_its_own(tmp_path: Path) -> None:
    tiny_image_encoder().save_pretrained(tmp_path)
    assert float(ImageEncoder.load(str(tmp_path)).pixels(Image.new("RGB", (4, 4), "white")).max()) == 1.0


@pytest.mark.parametrize("nested", [None, 512])
def test_the_width_of_a_clip_is_that_of_the_whole(tmp_path: Path, nested: int | None) -> None:
    """Released ones have no width in the nested config, which then says 512."""
    folder = clip_folder(tmp_path)
    config = json.loads((folder / "config.json").read_text("utf-8"))
    config["vision_config"].pop("projection_dim")
    config["vision_config"] |= {} if nested is None else {"projection_dim": nested}
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    encoder = ImageEncoder.load(str(folder))
    assert encoder.width == 12 and encoder([picture(8, 8)]).shape == (1, 12)
    assert meta_encoder(folder)[1] == 12
    with torch.no_grad():
        whole: Any = CLIPModel.from_pretrained(folder)
        expected = whole.get_image_features(pixel_values=encoder.pixels(picture(8, 8))[None])
    expected = getattr(expected, "pooler_output", expected)
    torch.testing.assert_close(encoder([picture(8, 8)]), expected, atol=1e-5, rtol=1e-5)


def test_vectors_of_the_older_normalization_have_another_key(tmp_path: Path) -> None:
    """Of a cache: with the .5 of SigLIP instead of CLIP's. Those that did not change keep theirs."""
    folder = clip_folder(tmp_path / "clip")
    train = {"kind": "ip_adapter", "image_encoder": str(folder)}
    model = FAMILIES["sd_inpaint"].model_validate({"path": "tiny", "train": train})
    made = identity(model)["image_encoder_normalization"]
    assert made == [list(OPENAI_CLIP_MEAN), list(OPENAI_CLIP_STD)]
    of_transformers_4(folder)
    assert "image_encoder_normalization" not in identity(model)
    (tmp_path / "siglip").mkdir()
    tiny_image_encoder().save_pretrained(tmp_path / "siglip")
    assert changed_normalization(tmp_path / "siglip") is None and changed_normalization(TINY) is None


def test_an_encoder_in_the_home_directory_is_loaded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    tiny_image_encoder().save_pretrained(tmp_path / "siglip")
    assert ImageEncoder.load("~/siglip").width == ImageEncoder.load(str(tmp_path / "siglip")).width
    with pytest.raises(ConfigError, match=r"model\.train\.image_encoder: given '~/nowhere', which cannot be loaded"):
        ImageEncoder.load("~/nowhere")


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
