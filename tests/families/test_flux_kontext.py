"""FLUX.1-Kontext against diffusers' own pipelines on the same weights: editing, inside a mask or everywhere."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from diffusers import FluxKontextInpaintPipeline
from torch import Tensor

from retouch.config import RunConfig
from retouch.config.needs import needed_pictures
from retouch.families.base import TrainFull
from retouch.families.diffusion import pack
from retouch.families.flux_kontext.model import FluxKontext
from retouch.families.flux_kontext.spec import FluxKontextModel
from retouch.families.loading import load_model
from retouch.families.tiny import TEXT_TOKENS, tiny_pipeline
from retouch.rollout.plan import ode_plan
from retouch.rollout.sampler import noise_for, sample
from retouch.types import Condition, Example
from tests.families.conftest import random_example
from tests.families.facts import Facts

FACTS = Facts(
    parameters=11.9e9,
    lora_modules=19 * 12 + 38 * 3,  # as in FLUX.1-Fill
    guidance_scale=2.5,
    hub_id="black-forest-labs/FLUX.1-Kontext-dev",
    text_length=24,
)

NEGATIVE = "blurry"


@pytest.fixture(scope="module")
def pipeline() -> Any:
    made = tiny_pipeline("flux_kontext", seed=3)
    made.vae.register_to_config(shift_factor=0.3, scaling_factor=0.7)
    made.set_progress_bar_config(disable=True)
    return made


@pytest.fixture(scope="module")
def models(pipeline: Any) -> dict[float, FluxKontext]:
    """True guidance -> model."""
    guided = FluxKontextModel(true_guidance_scale=4, negative_prompt=NEGATIVE)
    return {1.0: FluxKontext.from_pipeline(pipeline), 4.0: FluxKontext.from_pipeline(pipeline, guided)}


def edit(number: int, height: int, width: int) -> Example:
    """Without a mask."""
    return replace(random_example(number, height, width), mask=None)


def final_image(model: FluxKontext, condition: Condition, steps: int, seeds: list[int]) -> Tensor:
    plan = ode_plan(model.schedule(steps, condition.size))
    final = sample(model, model.network, plan, condition, seeds).final
    return ((model.decode(final) + 1) / 2).permute(0, 2, 3, 1)


def call(pipeline: Any, height: int, width: int, true_guidance: float, **options: Any) -> Tensor:
    images = pipeline(
        negative_prompt=NEGATIVE if true_guidance > 1 else None,
        true_cfg_scale=true_guidance,
        guidance_scale=2.5,
        height=height,
        width=width,
        max_area=height * width,
        _auto_resize=False,
        num_inference_steps=3,
        max_sequence_length=TEXT_TOKENS,
        output_type="np",
        **options,
    ).images
    return torch.from_numpy(images)


@pytest.mark.parametrize("true_guidance", [1.0, 4.0])
@pytest.mark.parametrize(("height", "width"), [(32, 64), (48, 24)])
def test_an_edited_image_is_the_pipelines(
    pipeline: Any, models: dict[float, FluxKontext], height: int, width: int, true_guidance: float
) -> None:
    """And the inputs of the transformer: the source's tokens behind the noisy ones, with ids of their own."""
    model, example = models[true_guidance], edit(1, height, width)
    noise, _ = noise_for((8, height // 4, width // 4), [11])
    calls: list[dict[str, Tensor]] = []
    hook = pipeline.transformer.register_forward_hook(lambda _, a, k, out: calls.append(k), with_kwargs=True)
    try:
        expected = call(
            pipeline, height, width, true_guidance, prompt=example.prompt, image=example.source, latents=pack(noise)
        )
        theirs = calls[0]
        condition = model.encode([example], 2.5)
        model.predict(pipeline.transformer, noise, torch.ones(1), condition)
        for name in ("hidden_states", "img_ids", "encoder_hidden_states", "guidance", "timestep"):
            mine = calls[-1][name] if name == "img_ids" else calls[-1][name][-1:]  # the half with the prompt
            torch.testing.assert_close(mine, theirs[name], atol=1e-5, rtol=1e-5, msg=name)
    finally:
        hook.remove()
    torch.testing.assert_close(final_image(model, condition, 3, [11]), expected, atol=1e-5, rtol=0)


@pytest.mark.parametrize("true_guidance", [1.0, 4.0])
def test_a_repainted_image_is_the_inpainting_pipelines(
    pipeline: Any, models: dict[float, FluxKontext], true_guidance: float
) -> None:
    inpaint: Any = FluxKontextInpaintPipeline(**pipeline.components)
    inpaint.set_progress_bar_config(disable=True)
    example, model = random_example(1, 48, 24), models[true_guidance]
    expected = call(
        inpaint,
        48,
        24,
        true_guidance,
        prompt=example.prompt,
        image=example.source,
        mask_image=example.mask,
        strength=1.0,
        generator=torch.Generator().manual_seed(11),
    )
    found = final_image(model, model.encode([example], 2.5), 3, [11])
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=0)
    everywhere = final_image(model, model.encode([replace(example, mask=None)], 2.5), 3, [11])
    assert float((everywhere - found).abs().max()) > 0.01


def test_an_image_repainted_by_a_reference_is_the_pipelines(pipeline: Any) -> None:
    """Its `image_reference`: tokens in place of those of the source, which is only blended."""
    inpaint: Any = FluxKontextInpaintPipeline(**pipeline.components)
    inpaint.set_progress_bar_config(disable=True)
    model = FluxKontext.from_pipeline(pipeline, FluxKontextModel(reference_images=True))
    other = random_example(2, 48, 24).source
    example = replace(random_example(1, 48, 24), reference=other)
    options: dict[str, Any] = {"prompt": example.prompt, "image": example.source, "mask_image": example.mask}
    generator = torch.Generator().manual_seed(11)
    expected = call(inpaint, 48, 24, 1.0, image_reference=other, strength=1.0, generator=generator, **options)
    found = final_image(model, model.encode([example], 2.5), 3, [11])
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=0)
    by_itself = final_image(model, model.encode([replace(example, reference=example.source)], 2.5), 3, [11])
    assert float((by_itself - found).abs().max()) > 1e-3
    with pytest.raises(ValueError, match=r"example 1 has no mask, but model\.reference_images repaints one; give it"):
        model.encode([replace(example, mask=None)], 2.5)
    with pytest.raises(ValueError, match=r"example 1 has no reference image, but model\.reference_images is true"):
        model.encode([replace(example, reference=None)], 2.5)


def test_a_run_with_reference_images_needs_masks_and_references(config: Callable[..., RunConfig]) -> None:
    run = config(model__family="flux_kontext", model__path="folder", model__reference_images=True)
    assert needed_pictures(run, training=True) == {"source", "mask", "reference"}
    assert FluxKontextModel().needs == {"source"}


@pytest.mark.parametrize("true_guidance", [1.0, 4.0])
def test_rows_do_not_see_each_other(models: dict[float, FluxKontext], true_guidance: float) -> None:
    model, examples = models[true_guidance], [replace(edit(i, 32, 64), prompt="W" + " on" * i) for i in range(3)]
    x, t = torch.randn(3, 8, 8, 16), torch.tensor([0.9, 0.5, 0.1])
    together = model.predict(model.network, x, t, model.encode(examples, 2.5))
    for i in range(3):
        alone = model.predict(model.network, x[i : i + 1], t[i : i + 1], model.encode(examples[i : i + 1], 2.5))
        torch.testing.assert_close(together[i : i + 1], alone, atol=1e-5, rtol=1e-5)


def test_errors_say_what_to_do(models: dict[float, FluxKontext]) -> None:
    model = models[1.0]
    with pytest.raises(ValueError, match="multiples of 8"):
        model.encode([edit(0, 36, 64)], 2.5)
    with pytest.raises(ValueError, match="example 0 has no source image; flux_kontext changes one"):
        model.encode([replace(edit(0, 32, 64), source=None)], 2.5)
    with pytest.raises(ValueError, match="example 1 has no mask"):
        model.encode([random_example(0, 32, 64), edit(1, 32, 64)], 2.5)


def test_a_saved_folder_loads_to_the_same_model(
    pipeline: Any, models: dict[float, FluxKontext], tmp_path: Path
) -> None:
    pipeline.save_pretrained(tmp_path)
    config = FluxKontextModel(path=str(tmp_path), dtype="fp32", max_sequence_length=TEXT_TOKENS, train=TrainFull())
    loaded, model = load_model(config), models[1.0]
    x, t, example = torch.randn(1, 8, 8, 16), torch.tensor([0.7]), random_example(1, 32, 64)
    expected = model.predict(model.network, x, t, model.encode([example], 2.5))
    torch.testing.assert_close(loaded.predict(loaded.network, x, t, loaded.encode([example], 2.5)), expected)
    assert loaded.spec == model.spec
