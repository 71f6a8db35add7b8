"""Stable Diffusion XL inpainting against diffusers' own pipeline on the same weights. What it shares with Stable
Diffusion inpainting is tested there."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from diffusers import AutoencoderKL, EulerDiscreteScheduler, StableDiffusionXLInpaintPipeline, UNet2DConditionModel

from retouch.families.base import TrainFull, TrainLora
from retouch.families.loading import ModelFilesError, load_model
from retouch.families.meta import released_networks
from retouch.families.sdxl_inpaint.model import SdxlInpaint
from retouch.families.sdxl_inpaint.spec import SdxlInpaintModel
from retouch.families.tiny import tiny_pipeline
from retouch.rollout.plan import ode_plan
from retouch.rollout.sampler import noise_for, sample
from retouch.types import Example
from tests.families.conftest import random_example, with_point_posterior
from tests.families.facts import Facts

FACTS = Facts(
    parameters=2.57e9,
    lora_modules=70 * 8,  # self- and cross-attention of 70 blocks
    guidance_scale=7.5,
    hub_id="diffusers/stable-diffusion-xl-1.0-inpainting-0.1",
    outside_blocks=0.69,  # convolutions
)

SIZES = [(32, 64), (48, 24)]

GUIDANCE = [1.0, 7.5]


@pytest.fixture(scope="module")
def pipeline() -> Any:
    """With an awkward constant."""
    made = with_point_posterior(tiny_pipeline("sdxl_inpaint", seed=3))
    made.vae.register_to_config(scaling_factor=0.7)
    return made


@pytest.fixture(scope="module")
def model(pipeline: Any) -> SdxlInpaint:
    return SdxlInpaint.from_pipeline(pipeline)


def two(height: int, width: int) -> list[Example]:
    """Prompts of different lengths."""
    made = [random_example(i, height, width) for i in range(2)]
    return [made[0], replace(made[1], prompt="Blue.")]


@pytest.mark.parametrize("guidance", GUIDANCE)
@pytest.mark.parametrize(("height", "width"), SIZES)
def test_predict_and_image_are_the_pipelines(
    pipeline: Any, model: SdxlInpaint, height: int, width: int, guidance: float
) -> None:
    """Every input of the U-Net, caught inside the pipeline, its output after guidance, and the image."""
    examples, seeds = two(height, width), [11, 12]
    noise, _ = noise_for((4, height // 4, width // 4), seeds)
    calls: list[tuple[Any, ...]] = []

    def record(module: Any, args: Any, kwargs: dict[str, Any], output: Any) -> None:
        x, t = args if args else (kwargs["sample"], kwargs["timestep"])
        added = kwargs["added_cond_kwargs"]
        calls.append((x, kwargs["encoder_hidden_states"], added["text_embeds"], added["time_ids"], output[0], t))

    hook = pipeline.unet.register_forward_hook(record, with_kwargs=True)
    expected = pipeline(
        prompt=[e.prompt for e in examples],
        image=torch.stack([torch.from_numpy(np.array(e.source)).permute(2, 0, 1) / 255.0 for e in examples]),
        mask_image=torch.stack([torch.from_numpy(np.array(e.mask))[None] / 255.0 for e in examples]),
        height=height,
        width=width,
        strength=1.0,
        num_inference_steps=3,
        guidance_scale=guidance,
        latents=noise,
        output_type="np",
        generator=torch.Generator().manual_seed(0),
    ).images
    theirs = calls.copy()
    calls.clear()
    assert len(theirs) == 3
    condition, schedule = model.encode(examples, guidance), model.schedule(3, (height, width))
    for i, (channels, *inputs, output, timestep) in enumerate(theirs):
        found = model.predict(pipeline.unet, channels[:2, :4], schedule.times[i].expand(2), condition)
        for mine, given in zip(calls[-1][:5], (channels, *inputs, output), strict=True):
            torch.testing.assert_close(mine, given, atol=1e-4, rtol=1e-4)
        assert torch.equal(calls[-1][5], timestep.expand(len(channels)))
        if guidance > 1:
            without, with_text = output.chunk(2)
            output = without + guidance * (with_text - without)
        torch.testing.assert_close(found, output, atol=1e-4, rtol=1e-4)
    hook.remove()
    final = sample(model, pipeline.unet, ode_plan(schedule), condition, seeds).final
    image = ((model.decode(final) + 1) / 2).permute(0, 2, 3, 1)
    torch.testing.assert_close(image, torch.from_numpy(expected), atol=1e-4, rtol=0)


def test_text_is_the_pipelines(pipeline: Any, model: SdxlInpaint) -> None:
    """Without a negative prompt states and vector are 0, not those of an empty prompt."""
    examples = two(32, 64)
    expected = pipeline.encode_prompt([e.prompt for e in examples], do_classifier_free_guidance=True)
    tensors = model.encode(examples, 7.5).tensors
    for name, theirs in zip(("text", "negative_text", "pooled", "negative_pooled"), expected, strict=True):
        torch.testing.assert_close(tensors[name], theirs, atol=1e-5, rtol=1e-5)
    assert not tensors["negative_text"].any() and not tensors["negative_pooled"].any()
    dropped = model.encode([replace(examples[0], prompt="")], 1.0).tensors
    assert not dropped["text"].any() and not dropped["pooled"].any()


def test_errors_say_what_to_do(pipeline: Any, model: SdxlInpaint) -> None:
    example = random_example(0, 32, 64)
    with pytest.raises(ValueError, match="multiples of 4"):
        model.encode([random_example(0, 34, 64)], 1.0)
    with pytest.raises(ValueError, match="no source image; sdxl_inpaint repaints one"):
        model.encode([Example(0, "", None, example.mask)], 1.0)
    scheduler = EulerDiscreteScheduler(prediction_type="v_prediction", timestep_spacing="leading")
    with pytest.raises(ModelFilesError, match=r"'v_prediction'; sdxl_inpaint needs a model .*'epsilon'"):
        SdxlInpaint(pipeline.unet, pipeline.vae, model.text, scheduler)
    with pytest.raises(ModelFilesError, match=r"needs 9.*cannot inpaint; use diffusers/stable-diffusion-xl-1.0-inp"):
        unet: Any = UNet2DConditionModel.from_config({**pipeline.unet.config, "in_channels": 4})
        SdxlInpaint(unet, pipeline.vae, model.text, pipeline.scheduler)
    config = {name: value for name, value in pipeline.vae.config.items() if not name.startswith("_")}
    config |= {"latents_mean": [0.5] * 4, "latents_std": [2.0] * 4}
    with pytest.raises(ModelFilesError, match=r"has latents_mean and latents_std, which sdxl_inpaint does not apply"):
        SdxlInpaint(pipeline.unet, AutoencoderKL.from_config(config), model.text, pipeline.scheduler)


def test_a_saved_folder_loads_to_the_same_model(pipeline: Any, model: SdxlInpaint, tmp_path: Path) -> None:
    """With the scheduler that the released model comes with."""
    euler = EulerDiscreteScheduler(
        beta_start=0.00085,
        beta_end=0.012,
        beta_schedule="scaled_linear",
        timestep_spacing="leading",
        steps_offset=1,
    )
    StableDiffusionXLInpaintPipeline(**{**pipeline.components, "scheduler": euler}).save_pretrained(tmp_path)
    loaded = load_model(SdxlInpaintModel(path=str(tmp_path), dtype="fp32", train=TrainFull()))
    example, x, t = random_example(1, 32, 64), torch.randn(1, 4, 8, 16), torch.tensor([701.0])
    expected = model.predict(model.network, x, t, model.encode([example], 1.0))  # guidance multiplies rounding
    torch.testing.assert_close(loaded.predict(loaded.network, x, t, loaded.encode([example], 1.0)), expected)
    assert loaded.spec == model.spec
    times = loaded.schedule(4, (32, 64)).times
    assert torch.equal(times, model.schedule(4, (32, 64)).times)
    torch.testing.assert_close(
        loaded.schedule(4, (32, 64)).level(times[:-1]), model.schedule(4, (32, 64)).level(times[:-1])
    )
    for dtype, vae in (("bf16", torch.bfloat16), ("fp16", torch.float32)):  # the autoencoder overflows in fp16
        low: Any = load_model(SdxlInpaintModel(path=str(tmp_path), dtype=dtype, train=TrainLora()))  # type: ignore[arg-type]
        assert low.vae.dtype == vae
        noise = low.predict(low.network, x, t, low.encode([example], 1.0))
        assert noise.dtype == torch.float32
        assert float((noise - expected).detach().abs().max()) < 0.1 * float(expected.detach().abs().max())


def test_the_released_network() -> None:
    network = released_networks(SdxlInpaintModel.spec)["unet"]
    assert sum(p.numel() for p in network.parameters()) == pytest.approx(2.57e9, rel=1e-2)
    targets = tuple(f".{target}" for target in SdxlInpaintModel.spec.lora_targets)
    adapted = [n for n, _ in network.named_modules() if n.endswith(targets)]
    layers = 2 * 2 + 2 * 10 + 10 + 3 * 10 + 3 * 2  # down, middle, up
    assert len(adapted) == layers * 2 * 4
