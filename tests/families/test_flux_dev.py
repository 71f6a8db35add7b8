"""FLUX.1-dev against diffusers' own pipelines on the same weights: text to image, inpainting, true guidance."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from diffusers import FluxInpaintPipeline
from diffusers.models.autoencoders.vae import DiagonalGaussianDistribution
from torch import Tensor

from retouch.families import FAMILIES
from retouch.families.base import TrainFull, TrainLora
from retouch.families.diffusion import pack, unpack
from retouch.families.flux_dev.model import FluxDev
from retouch.families.flux_dev.spec import FluxDevModel
from retouch.families.image_encoder import ImageEncoder
from retouch.families.loading import ModelFilesError, load_model
from retouch.families.meta import released_networks
from retouch.families.tiny import TEXT_TOKENS, tiny_pipeline
from retouch.rollout.plan import ode_plan
from retouch.rollout.sampler import noise_for, sample
from retouch.types import Condition, Example
from tests.families.conftest import attached, random_example
from tests.families.facts import Facts

FACTS = Facts(
    parameters=11.9e9,
    lora_modules=19 * 12 + 38 * 3,  # as in FLUX.1-Fill
    guidance_scale=3.5,
    hub_id="black-forest-labs/FLUX.1-dev",
    text_length=24,
)

SIZES = [(32, 64), (48, 24)]
NEGATIVE = "blurry"


@pytest.fixture(scope="module")
def pipeline() -> Any:
    made = tiny_pipeline("flux_dev", seed=3)
    made.set_progress_bar_config(disable=True)
    made.vae.register_to_config(shift_factor=0.3, scaling_factor=0.7)
    return made


@pytest.fixture(scope="module")
def models(pipeline: Any) -> dict[float, FluxDev]:
    """True guidance -> model."""
    guided = FluxDevModel(true_guidance_scale=4, negative_prompt=NEGATIVE)
    return {1.0: FluxDev.from_pipeline(pipeline), 4.0: FluxDev.from_pipeline(pipeline, guided)}


def drawn_at(number: int, size: tuple[int, int]) -> Example:
    """Prompts of different lengths."""
    return Example(number, "W" + " Blue." * number, size=size)


def final_image(model: FluxDev, condition: Condition, steps: int, seeds: list[int]) -> Tensor:
    plan = ode_plan(model.schedule(steps, condition.size))
    final = sample(model, model.network, plan, condition, seeds).final
    return ((model.decode(final) + 1) / 2).permute(0, 2, 3, 1)


# --- against the pipelines ---


@pytest.mark.parametrize("true_guidance", [1.0, 4.0])
@pytest.mark.parametrize(("height", "width"), SIZES)
def test_predict_and_image_are_the_pipelines(
    pipeline: Any, models: dict[float, FluxDev], height: int, width: int, true_guidance: float
) -> None:
    """Every call of the transformer, and the image; the pipeline calls it once for each half of the guidance."""
    model, examples, seeds = models[true_guidance], [drawn_at(i, (height, width)) for i in range(2)], [11, 12]
    noise, _ = noise_for((8, height // 4, width // 4), seeds)
    calls: list[tuple[dict[str, Tensor], Tensor]] = []
    hook = pipeline.transformer.register_forward_hook(lambda _, a, k, out: calls.append((k, out[0])), with_kwargs=True)
    guided = true_guidance > 1
    expected = pipeline(
        prompt=[e.prompt for e in examples],
        negative_prompt=[NEGATIVE] * 2 if guided else None,
        true_cfg_scale=true_guidance,
        guidance_scale=3.5,
        height=height,
        width=width,
        num_inference_steps=3,
        latents=pack(noise),
        max_sequence_length=TEXT_TOKENS,
        output_type="np",
    ).images
    hook.remove()
    condition, schedule = model.encode(examples, 3.5), model.schedule(3, (height, width))
    per_step = 2 if guided else 1
    assert len(calls) == 3 * per_step
    for i in range(3):
        inputs, output = calls[i * per_step]
        torch.testing.assert_close(inputs["timestep"], schedule.times[i].expand(2), atol=1e-6, rtol=1e-6)
        torch.testing.assert_close(inputs["encoder_hidden_states"], condition.tensors["text"])
        torch.testing.assert_close(inputs["pooled_projections"], condition.tensors["pooled"])
        if guided:
            negative, without = calls[i * per_step + 1]
            torch.testing.assert_close(negative["encoder_hidden_states"], condition.tensors["negative_text"])
            assert torch.equal(negative["guidance"], inputs["guidance"])
            output = without + true_guidance * (output - without)
        x = unpack(inputs["hidden_states"], height // 4, width // 4)
        velocity = model.predict(pipeline.transformer, x, schedule.times[i].expand(2), condition)
        torch.testing.assert_close(pack(velocity), output, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(final_image(model, condition, 3, seeds), torch.from_numpy(expected), atol=1e-5, rtol=0)


@pytest.mark.parametrize("true_guidance", [1.0, 4.0])
def test_a_repainted_image_is_the_inpainting_pipelines(
    pipeline: Any, models: dict[float, FluxDev], true_guidance: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(DiagonalGaussianDistribution, "sample", lambda self, generator=None: self.mode())
    inpaint: Any = FluxInpaintPipeline(**pipeline.components)
    inpaint.set_progress_bar_config(disable=True)
    example, (height, width), model = random_example(1, 48, 24), (48, 24), models[true_guidance]
    expected = inpaint(
        prompt=example.prompt,
        negative_prompt=NEGATIVE if true_guidance > 1 else None,
        true_cfg_scale=true_guidance,
        guidance_scale=7.0,
        image=example.source,
        mask_image=example.mask,
        strength=1.0,
        height=height,
        width=width,
        num_inference_steps=4,
        max_sequence_length=TEXT_TOKENS,
        generator=torch.Generator().manual_seed(11),
        output_type="np",
    ).images
    condition = model.encode([example], 7.0)
    torch.testing.assert_close(final_image(model, condition, 4, [11]), torch.from_numpy(expected), atol=1e-5, rtol=0)


@pytest.mark.parametrize("num_steps", [1, 4, 28])
def test_the_schedule_is_the_released_schedulers(pipeline: Any, num_steps: int) -> None:
    """Of FLUX.1-dev at 1024 x 1024 and 512 x 512, by the number of its tokens."""
    scheduler = type(pipeline.scheduler)(
        use_dynamic_shifting=True, base_shift=0.5, max_shift=1.15, base_image_seq_len=256, max_image_seq_len=4096
    )
    model = FluxDev(pipeline.transformer, pipeline.vae, None, scheduler)
    for side in (512, 256):  # cells of 8 pixels here, not 16
        tokens = (side // 8) ** 2
        mu = 0.5 + (1.15 - 0.5) / (4096 - 256) * (tokens - 256)
        scheduler.set_timesteps(sigmas=np.linspace(1, 1 / num_steps, num_steps), mu=mu)
        found = model.schedule(num_steps, (side, side)).times
        torch.testing.assert_close(found, scheduler.sigmas, atol=1e-6, rtol=1e-6)


# --- true guidance ---


def test_true_guidance_is_two_separate_predictions(models: dict[float, FluxDev]) -> None:
    """Also where some samples are repainted, with the same embedded guidance in both halves."""
    plain, guided = models[1.0], models[4.0]
    examples = [random_example(i, 32, 64) for i in range(2)]
    x, t = torch.randn(2, 8, 8, 16), torch.tensor([0.9, 0.4])
    found = guided.predict(guided.network, x, t, guided.encode(examples, 1.0))
    negative = [replace(e, prompt=NEGATIVE) for e in examples]
    without, with_prompt = (plain.predict(plain.network, x, t, plain.encode(e, 1.0)) for e in (negative, examples))
    torch.testing.assert_close(found, without + 4 * (with_prompt - without), atol=1e-5, rtol=1e-5)
    conditional = guided.encode(examples, 1.0).without_negative()
    assert torch.equal(guided.predict(guided.network, x, t, conditional), with_prompt)


def test_the_negative_half_attends_to_no_reference(models: dict[float, FluxDev]) -> None:
    model, seen = models[4.0], list[Any]()
    example = replace(drawn_at(1, (32, 64)), reference=random_example(0, 32, 32).source)
    model.image_encoder = ImageEncoder.load("tiny")
    try:
        condition = model.encode([example] * 2, 3.5)
    finally:
        model.image_encoder = None

    def network(**inputs: Any) -> tuple[Tensor]:
        seen.append(inputs["joint_attention_kwargs"]["ip_adapter_image_embeds"])
        return (inputs["hidden_states"],)

    model.predict(network, torch.randn(2, 8, 8, 16), torch.tensor([0.9, 0.4]), condition)  # type: ignore[arg-type]
    vectors, keep = seen[0]
    assert vectors.shape[0] == 4 and torch.equal(vectors[:2], vectors[2:])
    assert keep.tolist() == [0.0, 0.0, 1.0, 1.0]


def test_an_image_with_a_reference_is_that_of_a_stock_pipeline(
    pipeline: Any, models: dict[float, FluxDev], tmp_path: Path
) -> None:
    """By the name that a pipeline gives each half."""
    model, reference, noise = models[4.0], random_example(0, 32, 32).source, noise_for((8, 8, 16), [11])[0]
    example = replace(drawn_at(1, (32, 64)), reference=reference)
    call = {"prompt": example.prompt, "negative_prompt": NEGATIVE, "true_cfg_scale": 4.0, "height": 32, "width": 64}
    call |= {"num_inference_steps": 2, "latents": pack(noise), "output_type": "np", "max_sequence_length": TEXT_TOKENS}
    assert reference is not None
    with attached(pipeline, model, reference, tmp_path / "ip-adapter.safetensors") as options:
        expected = torch.from_numpy(pipeline(**call, **options).images)
        found = final_image(model, model.encode([example], 3.5), 2, [11])
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=0)


# --- the contract of a family ---


@pytest.mark.parametrize("true_guidance", [1.0, 4.0])
def test_rows_do_not_see_each_other(models: dict[float, FluxDev], true_guidance: float) -> None:
    model, examples = models[true_guidance], [drawn_at(i, (32, 64)) for i in range(3)]
    x, t = torch.randn(3, 8, 8, 16), torch.tensor([0.9, 0.5, 0.1])
    together = model.predict(model.network, x, t, model.encode(examples, 3.5))
    for i in range(3):
        alone = model.predict(model.network, x[i : i + 1], t[i : i + 1], model.encode(examples[i : i + 1], 3.5))
        torch.testing.assert_close(together[i : i + 1], alone, atol=1e-5, rtol=1e-5)


def test_errors_say_what_to_do(models: dict[float, FluxDev]) -> None:
    model = models[1.0]
    with pytest.raises(ValueError, match="multiples of 8"):
        model.encode([drawn_at(0, (36, 64))], 3.5)
    with pytest.raises(ValueError, match="examples without a source need one size"):
        model.encode([drawn_at(0, (32, 64)), drawn_at(1, (32, 32))], 3.5)
    with pytest.raises(ModelFilesError, match=r"takes 96 channels.*needs 32; use black-forest-labs/FLUX.1-dev"):
        wrong = tiny_pipeline("flux_dev")
        wrong.transformer.register_to_config(in_channels=96)
        FluxDev.from_pipeline(wrong)
    with pytest.raises(ModelFilesError, match="no guidance embedding"):
        schnell = tiny_pipeline("flux_dev")
        schnell.transformer.register_to_config(guidance_embeds=False)
        FluxDev.from_pipeline(schnell)


# --- loading ---


def test_a_saved_folder_loads_to_the_same_model(pipeline: Any, models: dict[float, FluxDev], tmp_path: Path) -> None:
    pipeline.save_pretrained(tmp_path)
    options: dict[str, Any] = {
        "path": str(tmp_path),
        "max_sequence_length": TEXT_TOKENS,
        "true_guidance_scale": 4,
        "negative_prompt": NEGATIVE,
    }
    loaded, model = load_model(FluxDevModel(**options, dtype="fp32", train=TrainFull())), models[4.0]
    x, t, example = torch.randn(1, 8, 8, 16), torch.tensor([0.7]), drawn_at(1, (32, 64))
    expected = model.predict(model.network, x, t, model.encode([example], 3.5))
    torch.testing.assert_close(loaded.predict(loaded.network, x, t, loaded.encode([example], 3.5)), expected)
    assert loaded.spec == model.spec
    assert loaded.prompts is not None
    loaded.prompts.cache_and_release([*model.config.fixed_prompts, example.prompt])
    torch.testing.assert_close(loaded.predict(loaded.network, x, t, loaded.encode([example], 3.5)), expected)
    low = load_model(FluxDevModel(**options, dtype="bf16", train=TrainLora()))
    assert {p.dtype for p in low.network.parameters()} == {torch.bfloat16}
    assert low.predict(low.network, x, t, low.encode([example], 3.5)).dtype == torch.float32


@pytest.mark.parametrize("family", ["flux_fill", "flux_dev", "flux_kontext"])
def test_the_released_network(family: str) -> None:
    spec = FAMILIES[family].spec
    with torch.device("meta"):
        network = released_networks(spec)["transformer"]
    assert sum(p.numel() for p in network.parameters()) == pytest.approx(11.9e9, rel=0.01)
    names = [f".{name}" for name, _ in network.named_modules()]
    counts = {target: sum(name.endswith(f".{target}") for name in names) for target in spec.lora_targets}
    single = {"attn.to_q", "attn.to_k", "attn.to_v"}  # of the 38 single blocks, too
    assert counts == {target: 57 if target in single else 19 for target in spec.lora_targets}
