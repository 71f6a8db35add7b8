"""Z-Image against diffusers' own pipelines on the same weights: text to image, and inpainting by blending."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from diffusers import FlowMatchEulerDiscreteScheduler, ZImageInpaintPipeline
from pydantic import ValidationError
from torch import Tensor
from transformers import Qwen3ForCausalLM

from retouch.adapters.lora import add_lora, save_lora
from retouch.doctor.model import find_model
from retouch.families.base import TrainFull, TrainLora
from retouch.families.loading import ModelFilesError, load_model
from retouch.families.meta import component_on_meta, other_class, released_networks
from retouch.families.tiny import tiny_pipeline
from retouch.families.z_image.model import ZImage
from retouch.families.z_image.spec import ZImageModel
from retouch.rollout.sampler import noise_for
from tests.families.conftest import (
    image_of_latents,
    ode_image,
    ode_latents,
    random_example,
    require_source_outside_mask,
    text_example,
)
from tests.families.facts import Facts

FACTS = Facts(
    parameters=6.15e9,
    lora_modules=34 * 7,  # attention and feed-forward of 30 layers and 4 refiners
    guidance_scale=5.0,
    hub_id="Tongyi-MAI/Z-Image",
    text_length=64,
)

LENGTH = 160
SIZES = [(32, 64), (48, 24)]


@pytest.fixture(scope="module")
def pipeline() -> Any:
    made = tiny_pipeline("z_image", seed=3)
    made.vae.register_to_config(shift_factor=0.1159, scaling_factor=0.3611)
    made.set_progress_bar_config(disable=True)
    return made


@pytest.fixture(scope="module")
def model(pipeline: Any) -> ZImage:
    return ZImage.from_pipeline(pipeline, LENGTH)


# --- against the pipelines ---


@pytest.mark.parametrize(("guidance", "limit"), [(1.0, None), (5.0, None), (5.0, 1.0)])
@pytest.mark.parametrize(("height", "width"), SIZES)
def test_predict_and_image_are_the_pipelines(
    pipeline: Any, height: int, width: int, guidance: float, limit: float | None
) -> None:
    """Every call of the transformer and the image, for two prompts of different lengths. The pipeline's scale is one
    less than ours."""
    model = ZImage.from_pipeline(pipeline, LENGTH, ZImageModel(cfg_normalization=limit))
    examples, seeds = [text_example(i, (height, width), 5) for i in range(2)], [11, 12]
    noise, _ = noise_for((8, height // 4, width // 4), seeds)
    calls: list[tuple[Tensor, Tensor, Tensor]] = []
    hook = pipeline.transformer.register_forward_hook(
        lambda _, a, out: calls.append((torch.stack(a[0])[:, :, 0], a[1], torch.stack(out[0])[:, :, 0]))
    )
    expected = pipeline(
        prompt=[e.prompt for e in examples],
        guidance_scale=guidance - 1,
        cfg_normalization=limit or False,
        height=height,
        width=width,
        num_inference_steps=3,
        latents=noise,
        output_type="np",
    ).images
    hook.remove()
    condition, schedule = model.encode(examples, guidance), model.schedule(3, (height, width))
    assert len(calls) == 3
    for i, (x, time, output) in enumerate(calls):
        torch.testing.assert_close(1 - time[:2], schedule.times[i].expand(2), atol=1e-6, rtol=1e-6)
        if guidance == 1 or limit is None:
            with_text, without = output[:2], output[-2:]
            expected_velocity = -(without + guidance * (with_text - without))
            velocity = model.predict(pipeline.transformer, x[:2], schedule.times[i].expand(2), condition)
            torch.testing.assert_close(velocity, expected_velocity, atol=1e-5, rtol=1e-5)
    found = ode_image(model, condition, 3, seeds)
    torch.testing.assert_close(found, torch.from_numpy(expected), atol=1e-5, rtol=0)


@torch.no_grad()
def test_a_guided_prediction_is_not_longer_than_the_limit(pipeline: Any) -> None:
    free, limited = (ZImage.from_pipeline(pipeline, LENGTH, ZImageModel(cfg_normalization=k)) for k in (None, 0.5))
    x, t, example = torch.randn(1, 8, 8, 16), torch.tensor([0.7]), text_example(1, (32, 64), 5)
    guided, unguided = (free.predict(free.network, x, t, free.encode([example], w)) for w in (5.0, 1.0))
    shorter = limited.predict(limited.network, x, t, limited.encode([example], 5.0))
    assert float(guided.norm()) > 0.5 * float(unguided.norm())
    assert float(shorter.norm()) == pytest.approx(0.5 * float(unguided.norm()), rel=1e-5)
    torch.testing.assert_close(shorter / shorter.norm(), guided / guided.norm(), atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize("guidance", [1.0, 5.0])
@pytest.mark.parametrize(("height", "width"), SIZES)
def test_a_repainted_image_is_the_inpainting_pipelines(
    pipeline: Any, model: ZImage, height: int, width: int, guidance: float, point_posterior: None
) -> None:
    inpaint: Any = ZImageInpaintPipeline(**pipeline.components)
    inpaint.set_progress_bar_config(disable=True)
    example = random_example(1, height, width)
    expected = inpaint(
        prompt=example.prompt,
        guidance_scale=guidance - 1,
        image=example.source,
        mask_image=example.mask,
        strength=1.0,
        height=height,
        width=width,
        num_inference_steps=4,
        generator=torch.Generator().manual_seed(11),
        output_type="np",
    ).images
    condition = model.encode([example], guidance)
    final = ode_latents(model, condition, 4, [11])
    found = image_of_latents(model, final)
    torch.testing.assert_close(found, torch.from_numpy(expected), atol=1e-4, rtol=0)
    require_source_outside_mask(condition, final)


@pytest.mark.parametrize("shift", [6.0, 3.0])
def test_the_schedule_is_the_schedulers(pipeline: Any, model: ZImage, shift: float) -> None:
    """6 is the shift of the released base, 3 that of Turbo, at every size."""
    scheduler: Any = FlowMatchEulerDiscreteScheduler(num_train_timesteps=1000, shift=shift)
    shifted = ZImage(pipeline.transformer, pipeline.vae, model.text, scheduler)
    for num_steps in (2, 8, 28, 50):
        scheduler.set_timesteps(sigmas=torch.linspace(1, 1 / num_steps, num_steps).tolist(), mu=1.7)
        found = shifted.schedule(num_steps, (512, 256)).times
        torch.testing.assert_close(found, scheduler.sigmas, atol=1e-6, rtol=1e-6)


def test_the_text_is_the_pipelines(pipeline: Any, model: ZImage) -> None:
    """Without its padding, whose number changes nothing; the end of a longer chat is cut off."""
    examples = [text_example(i, (32, 64), 5) for i in range(3)]
    for length in (LENGTH, 40):
        expected, _ = pipeline.encode_prompt([e.prompt for e in examples], max_sequence_length=length)
        found = ZImage.from_pipeline(pipeline, length).encode(examples, 1.0).tensors
        assert found["text"].shape == (3, length, 32)
        assert found["text_length"].tolist() == [len(states) for states in expected]
        for row, states in zip(found["text"], expected, strict=True):
            torch.testing.assert_close(row[: len(states)], states, atol=1e-5, rtol=1e-5)
            assert not row[len(states) :].any()


# --- the contract of a family ---


def test_rows_do_not_see_each_other(model: ZImage) -> None:
    examples = [replace(random_example(i, 32, 64), prompt=text_example(i, (0, 0), 5).prompt) for i in range(3)]
    x, t = torch.randn(3, 8, 8, 16), torch.tensor([0.9, 0.5, 0.1])
    together = model.predict(model.network, x, t, model.encode(examples, 5.0))
    for i in range(3):
        alone = model.predict(model.network, x[i : i + 1], t[i : i + 1], model.encode(examples[i : i + 1], 5.0))
        torch.testing.assert_close(together[i : i + 1], alone, atol=1e-5, rtol=1e-5)


def test_latents_are_shifted_and_scaled(model: ZImage) -> None:
    images = torch.rand(1, 3, 32, 32) * 2 - 1
    expected = (model.vae.encode(images).latent_dist.mode() - 0.1159) * 0.3611
    torch.testing.assert_close(model.encode_images(images), expected)


def test_errors_say_what_to_do(pipeline: Any, model: ZImage) -> None:
    with pytest.raises(ValueError, match="multiples of 8"):
        model.encode([text_example(0, (36, 64), 5)], 5.0)
    with pytest.raises(ValueError, match="no source image; z_image repaints one"):
        model.encode([random_example(0, 32, 64), text_example(1, (32, 64), 5)], 5.0)
    turbo = ZImage.from_pipeline(pipeline, LENGTH, ZImageModel(variant="turbo", path="Tongyi-MAI/Z-Image-Turbo"))
    assert (turbo.spec.guidance_scale, model.spec.guidance_scale) == (1.0, 5.0)
    with pytest.raises(ValueError, match=r"guidance_scale is 5, but this z_image was distilled .* set 1, or a base"):
        turbo.encode([text_example(0, (32, 64), 5)], 5.0)
    with pytest.raises(ModelFilesError, match=r"takes 20 channels.*needs 8; use Tongyi-MAI/Z-Image"):
        wrong = tiny_pipeline("z_image")
        wrong.transformer.register_to_config(in_channels=20)
        ZImage.from_pipeline(wrong)


def test_a_released_path_is_of_its_variant() -> None:
    with pytest.raises(ValidationError, match=r"variant is 'base'; set model.variant=turbo, or model.path=Tongyi-MAI"):
        ZImageModel(path="Tongyi-MAI/Z-Image-Turbo")
    with pytest.raises(ValidationError, match=r"variant is 'turbo'; set model.variant=base, or"):
        ZImageModel(variant="turbo")


def test_the_pipeline_reads_a_trained_lora(model: ZImage, tmp_path: Path) -> None:
    stock = tiny_pipeline("z_image", seed=3)
    stock.set_progress_bar_config(disable=True)
    trained = tiny_pipeline("z_image", seed=3).transformer
    add_lora(trained, 2, 4.0, model.spec.lora_targets)
    with torch.no_grad():
        for name, weight in trained.named_parameters():
            if ".lora_B" in name:
                weight.normal_(std=0.3)
    save_lora({n: p for n, p in trained.named_parameters() if p.requires_grad}, tmp_path, 4.0, 2)
    stock.load_lora_weights(tmp_path)
    x, t, condition = torch.randn(1, 8, 8, 16), torch.tensor([0.7]), model.encode([text_example(0, (32, 64), 5)], 1.0)
    with torch.no_grad():
        base, found, expected = (model.predict(n, x, t, condition) for n in (model.network, stock.transformer, trained))
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)
    assert float((base - expected).abs().max()) > 0.01


# --- loading ---


@torch.no_grad()
def test_a_saved_folder_loads_to_the_same_model(pipeline: Any, model: ZImage, tmp_path: Path) -> None:
    pipeline.save_pretrained(tmp_path)
    options: dict[str, Any] = {"path": str(tmp_path), "max_sequence_length": LENGTH}
    again = load_model(ZImageModel(**options, dtype="fp32", train=TrainFull()))
    x, t, example = torch.randn(1, 8, 8, 16), torch.tensor([0.7]), random_example(1, 32, 64)
    expected = model.predict(model.network, x, t, model.encode([example], 5.0))
    torch.testing.assert_close(again.predict(again.network, x, t, again.encode([example], 5.0)), expected)
    assert again.spec == model.spec
    assert again.prompts is not None
    again.prompts.cache_and_release([again.spec.empty_prompt, example.prompt])
    torch.testing.assert_close(again.predict(again.network, x, t, again.encode([example], 5.0)), expected)
    low = load_model(ZImageModel(**options, dtype="bf16", train=TrainLora()))
    assert {p.dtype for p in low.network.parameters()} == {torch.bfloat16}
    rounded = low.predict(low.network, x, t, low.encode([example], 5.0))
    assert rounded.dtype == torch.float32 and float((rounded - expected).norm() / expected.norm()) < 0.1


def test_a_text_encoder_that_was_saved_with_its_head(pipeline: Any, tmp_path: Path) -> None:
    """As the released one may be: model_index.json names `Qwen3Model`, config.json the class that was trained."""
    pipeline.save_pretrained(tmp_path)
    full = Qwen3ForCausalLM(pipeline.text_encoder.config)
    full.model.load_state_dict(pipeline.text_encoder.state_dict())
    shutil.rmtree(tmp_path / "text_encoder")
    full.save_pretrained(tmp_path / "text_encoder")
    text = load_model(ZImageModel(path=str(tmp_path), dtype="fp32", max_sequence_length=LENGTH)).prompts
    assert text is not None
    found = text.encode(["The text is 'W'."])["text"]
    expected = ZImage.from_pipeline(pipeline, LENGTH).texts().encode(["The text is 'W'."])["text"]
    torch.testing.assert_close(found, expected)
    assert type(component_on_meta(tmp_path / "text_encoder", "Qwen3Model")).__name__ == "Qwen3Model"
    assert find_model(ZImageModel(path=str(tmp_path))).problems == []
    with pytest.raises(ModelFilesError, match="it is of a Qwen3ForCausalLM"):
        component_on_meta(tmp_path / "text_encoder", "T5EncoderModel")
    assert other_class({"architectures": ["CLIPTextModel"]}, "CLIPTextModelWithProjection") == "CLIPTextModel"


def test_the_released_networks(pipeline: Any) -> None:
    counts = {
        name: sum(p.numel() for p in network.parameters())
        for name, network in released_networks(ZImageModel.spec).items()
    }
    assert counts == {
        "transformer": pytest.approx(6.15e9, rel=0.002),
        "vae": pytest.approx(0.084e9, rel=0.01),
        "text_encoder": pytest.approx(4.02e9, rel=0.002),
    }
    names = [n for n, _ in released_networks(ZImageModel.spec)["transformer"].named_modules()]
    targets = tuple(f".{target}" for target in ZImageModel.spec.lora_targets)
    assert len([n for n in names if n.endswith(targets)]) == 34 * 7  # 30 layers and 4 refiners
    tiny_names = [n for n, _ in pipeline.transformer.named_modules()]
    assert all(any(n.endswith(target) for n in tiny_names) for target in targets)
