"""Folders whose weights are of a variant alone, like `*.fp16.safetensors`: read by an option that a message names."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from retouch.adapters.about import About
from retouch.adapters.export import export
from retouch.adapters.trainee import make_trainable
from retouch.config import ConfigError
from retouch.doctor.adapter import adapter_lines
from retouch.doctor.model import find_model
from retouch.doctor.networks import build_networks
from retouch.engine import Policy
from retouch.families.image_encoder import ImageEncoder
from retouch.families.loading import ModelFilesError, load_model
from retouch.families.sd_inpaint.spec import SdInpaintModel
from retouch.families.tiny import tiny_image_encoder, tiny_pipeline
from retouch.rewards.scorers.style import StyleReward


def renamed(folder: Path) -> None:
    """As `save_pretrained(..., variant="fp16")` names the weights of a part."""
    for file in folder.glob("*.safetensors"):
        file.rename(file.with_suffix(".fp16.safetensors"))


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("plain")
    tiny_pipeline("sd_inpaint", seed=3).save_pretrained(folder)
    return folder


@pytest.fixture
def variant(plain: Path, tmp_path: Path) -> Path:
    """The U-Net of a variant in two files, the text encoder in one, the autoencoder in plain ones."""
    folder = tmp_path / "fp16"
    pipeline = tiny_pipeline("sd_inpaint", seed=3)
    pipeline.save_pretrained(folder, variant="fp16", safe_serialization=True)
    pipeline.unet.save_pretrained(folder / "unet", variant="fp16", max_shard_size="300KB")
    (folder / "unet/diffusion_pytorch_model.fp16.safetensors").unlink()
    assert len(list((folder / "unet").glob("*.fp16-*.safetensors"))) > 1
    for file in (folder / "vae").glob("*.safetensors"):
        file.rename(folder / "vae/diffusion_pytorch_model.safetensors")
    return folder


def weights(model: Any) -> dict[str, torch.Tensor]:
    parts = {"unet": model.network, "vae": model.vae, "text": model.text.encoders["text"].model}
    return {f"{part}.{name}": t for part, network in parts.items() for name, t in network.state_dict().items()}


def test_a_variant_is_read_where_a_part_has_it(plain: Path, variant: Path) -> None:
    options: dict[str, Any] = {"dtype": "fp32"}
    expected = weights(load_model(SdInpaintModel(path=str(plain), **options)))
    found = weights(load_model(SdInpaintModel(path=str(variant), weights_variant="fp16", **options)))
    assert found.keys() == expected.keys() and all(torch.equal(t, expected[name]) for name, t in found.items())
    assert not find_model(SdInpaintModel(path=str(variant), weights_variant="fp16")).problems
    load_model(SdInpaintModel(path=str(plain), weights_variant="fp16", **options))  # without any


def test_without_the_option_its_name_is_in_the_message(variant: Path) -> None:
    hint = "its weights are of a variant: set model.weights_variant=fp16"
    with pytest.raises(ModelFilesError, match=hint):
        load_model(SdInpaintModel(path=str(variant)))
    assert any(problem.endswith(hint) for problem in find_model(SdInpaintModel(path=str(variant))).problems)


def test_an_image_encoder_of_a_variant(plain: Path, tmp_path: Path) -> None:
    encoder = tiny_image_encoder()
    encoder.save_pretrained(tmp_path)
    renamed(tmp_path)
    train: dict[str, Any] = {"kind": "ip_adapter", "image_encoder": str(tmp_path)}
    model = SdInpaintModel.model_validate({"path": str(plain), "train": train, "weights_variant": "fp16"})
    found = load_model(model).image_encoder  # type: ignore[attr-defined]
    expected = encoder.to(found.model.dtype).state_dict()
    assert all(torch.equal(t, expected[name]) for name, t in found.model.state_dict().items())
    [line] = adapter_lines(model, build_networks(model, find_model(model)))
    assert line.status == "ok"
    with pytest.raises(ConfigError, match=r"model\.train\.image_encoder: given .* set model\.weights_variant=fp16"):
        ImageEncoder.load(str(tmp_path))
    [line] = adapter_lines(model.model_copy(update={"weights_variant": None}), build_networks(model, find_model(model)))
    assert line.status == "fix" and "set model.weights_variant=fp16" in line.says


def test_the_encoder_of_the_style_reward_of_a_variant(tmp_path: Path) -> None:
    encoder = tiny_image_encoder()
    encoder.save_pretrained(tmp_path)
    renamed(tmp_path)
    plain, fp16 = (StyleReward(image_encoder=str(tmp_path), gate=0, weights_variant=name) for name in (None, "fp16"))
    with pytest.raises(ConfigError, match=r"^image_encoder: given .*; its weights are of a variant: set weights_var"):
        plain.make().load("cpu")
    scorer: Any = fp16.make()
    scorer.load("cpu")
    expected = encoder.state_dict()
    assert all(torch.equal(t, expected[name]) for name, t in scorer._encoder.model.state_dict().items())
    assert plain.make().spec.revision != fp16.make().spec.revision  # other files, and scores that are cached apart


def test_a_pipeline_of_a_variant_is_exported_as_it_is(variant: Path, tmp_path: Path) -> None:
    """The trained network has plain files, the others keep theirs; diffusers loads both."""
    import diffusers

    section = SdInpaintModel(path=str(variant), weights_variant="fp16", dtype="fp32")
    model: Any = load_model(section)
    trainee = make_trainable(model.network, section.train, model.spec)
    trainee.save(Policy(model.network).whole(), tmp_path / "weights")
    export(section, tmp_path / "weights", "diffusers", tmp_path / "out", About("run"))
    pipe: Any = diffusers.DiffusionPipeline.from_pretrained(tmp_path / "out", dtype=torch.float32, variant="fp16")
    expected = load_model(section).network.state_dict()
    assert all(torch.equal(t, expected[name]) for name, t in pipe.unet.state_dict().items())
    assert json.loads((tmp_path / "out/model_index.json").read_text("utf-8"))["unet"][1] == "UNet2DConditionModel"
