"""FLUX.2 klein against diffusers' own pipelines on the same weights: text to image, edits, and inpainting."""

from __future__ import annotations

from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from diffusers import FlowMatchEulerDiscreteScheduler, Flux2KleinInpaintPipeline
from diffusers.pipelines.flux2.pipeline_flux2_klein import compute_empirical_mu
from PIL import Image
from pydantic import ValidationError

from retouch.adapters.lora import add_lora, save_lora
from retouch.doctor.model import find_model
from retouch.doctor.networks import build_networks
from retouch.families.base import TrainFull, TrainLora
from retouch.families.flux2.base import flux2_shift, rounded_mask_cells
from retouch.families.flux2_klein.model import Flux2Klein
from retouch.families.flux2_klein.spec import Flux2KleinModel
from retouch.families.loading import ModelFilesError, load_model
from retouch.families.meta import released_networks
from retouch.families.tiny import tiny_pipeline
from retouch.rollout.sampler import noise_for
from tests.families.conftest import (
    ode_image,
    random_example,
    recorded_calls,
    text_example,
)
from tests.families.facts import Facts
from tests.selection import cells

FACTS = Facts(
    parameters=3.88e9,
    # attention and feed-forward of both streams in 5 double blocks, input and output of 20 single ones
    lora_modules=5 * 12 + 20 * 2,
    guidance_scale=4.0,
    hub_id="black-forest-labs/FLUX.2-klein-base-4B",
    text_length=64,
    outside_blocks=0.06,  # shared modulation
)

LENGTH = 96
LAYERS = (1, 2, 3)
SIZES = [(64, 80), (72, 64)]
TEXT: dict[str, Any] = {"max_sequence_length": LENGTH, "text_encoder_out_layers": LAYERS}


@pytest.fixture(scope="module")
def pipeline() -> Any:
    made = tiny_pipeline("flux2_klein", seed=3)
    made.set_progress_bar_config(disable=True)
    return made


@pytest.fixture(scope="module")
def model(pipeline: Any) -> Flux2Klein:
    return Flux2Klein.from_pipeline(pipeline, LENGTH)


def image_of(number: int, size: tuple[int, int]) -> Image.Image:
    pixels = np.random.default_rng(number).integers(0, 256, (*size, 3), np.uint8)
    return Image.fromarray(pixels)


# --- against the pipelines ---


@pytest.mark.parametrize(("height", "width", "guidance"), cells([(*size, g) for size in SIZES for g in (1.0, 4.0)], 1))
def test_predict_and_image_are_the_pipelines(
    pipeline: Any, model: Flux2Klein, height: int, width: int, guidance: float
) -> None:
    """Every call of the transformer and the image, for two prompts of different lengths."""
    examples, seeds = [text_example(i, (height, width)) for i in range(2)], [11, 12]
    noise, _ = noise_for((32, height // 8, width // 8), seeds)
    with recorded_calls(pipeline.transformer) as calls:
        expected = pipeline(
            prompt=[e.prompt for e in examples],
            guidance_scale=guidance,
            height=height,
            width=width,
            num_inference_steps=3,
            latents=noise,
            output_type="np",
            **TEXT,
        ).images
    condition, schedule = model.encode(examples, guidance), model.schedule(3, (height, width))
    per_step = 2 if guidance > 1 else 1
    assert len(calls) == 3 * per_step
    for i in range(3):
        tokens, timestep, output = calls[i * per_step]
        torch.testing.assert_close(timestep, schedule.times[i].expand(2), atol=1e-6, rtol=1e-6)
        without = calls[i * per_step + per_step - 1][2]
        output = without + guidance * (output - without)
        x = tokens.transpose(1, 2).unflatten(2, (height // 8, width // 8))
        velocity = model.predict(pipeline.transformer, x, schedule.times[i].expand(2), condition)
        torch.testing.assert_close(velocity.flatten(2).transpose(1, 2), output, atol=1e-5, rtol=1e-5)
    found = ode_image(model, condition, 3, seeds)
    torch.testing.assert_close(found, torch.from_numpy(expected), atol=1e-5, rtol=0)


@pytest.mark.parametrize(("references", "guidance"), cells(product([1, 2], [1.0, 4.0]), 1))
def test_an_edit_is_the_pipelines(pipeline: Any, guidance: float, references: int) -> None:
    """The source is the first reference; the reference of the example the second one."""
    size = (64, 80)
    given = [image_of(i, size) for i in range(references)]
    example = replace(text_example(2, size), source=given[0], reference=given[-1])
    expected = pipeline(
        prompt=example.prompt,
        image=given,
        guidance_scale=guidance,
        num_inference_steps=3,
        generator=torch.Generator().manual_seed(11),
        output_type="np",
        **TEXT,
    ).images
    model = Flux2Klein.from_pipeline(pipeline, LENGTH, reference_images=references == 2)
    condition = model.encode([example], guidance)
    found = ode_image(model, condition, 3, [11])
    torch.testing.assert_close(found, torch.from_numpy(expected), atol=1e-5, rtol=0)
    assert condition.mask is None and condition.size == size
    other = model.encode([replace(example, source=image_of(9, size))], guidance)
    assert float((ode_image(model, other, 3, [11]) - found).abs().max()) > 1e-4


def test_a_reference_without_a_source_is_the_first_image(pipeline: Any) -> None:
    """It is scaled and cropped to the size of the run."""
    size = (64, 80)
    model = Flux2Klein.from_pipeline(pipeline, LENGTH, reference_images=True)
    example = replace(text_example(0, size), reference=Image.new("RGB", (300, 90), "red"))
    expected = pipeline(
        prompt=example.prompt,
        image=Image.new("RGB", (80, 64), "red"),
        guidance_scale=1.0,
        num_inference_steps=2,
        generator=torch.Generator().manual_seed(11),
        output_type="np",
        **TEXT,
    ).images
    found = ode_image(model, model.encode([example], 1.0), 2, [11])
    torch.testing.assert_close(found, torch.from_numpy(expected), atol=1e-5, rtol=0)
    with pytest.raises(ValueError, match=r"example 0 has no reference image, but model.reference_images is true"):
        model.encode([text_example(0, size)], 1.0)


@pytest.mark.parametrize(("reference", "guidance"), cells(product([False, True], [1.0, 4.0]), 1))
def test_a_repainted_image_is_the_inpainting_pipelines(pipeline: Any, guidance: float, reference: bool) -> None:
    """Of a mask along the cells of the latents; its source is an input of the network as well."""
    inpaint: Any = Flux2KleinInpaintPipeline(**pipeline.components)
    inpaint.set_progress_bar_config(disable=True)
    size = (64, 80)
    mask = np.zeros(size, np.uint8)
    mask[16:48, 8:56] = 255
    example = replace(text_example(1, size), source=image_of(1, size), mask=Image.fromarray(mask))
    example = replace(example, reference=image_of(2, size)) if reference else example
    expected = inpaint(
        prompt=example.prompt,
        image=example.source,
        image_reference=example.reference,
        mask_image=example.mask,
        guidance_scale=guidance,
        strength=1.0,
        num_inference_steps=4,
        generator=torch.Generator().manual_seed(11),
        output_type="np",
        **TEXT,
    ).images
    model = Flux2Klein.from_pipeline(pipeline, LENGTH, reference_images=reference)
    condition = model.encode([example], guidance)
    found = ode_image(model, condition, 4, [11])
    torch.testing.assert_close(found, torch.from_numpy(expected), atol=1e-4, rtol=0)
    cells = torch.from_numpy(mask[4::8, 4::8] > 0).float()
    assert torch.equal(condition.tensors["mask_cells"][0, 0], cells)


def test_a_mask_is_rounded_on_the_grid_of_the_latents(pipeline: Any) -> None:
    """The pipeline interpolates it; a cell of half a mask is repainted, one of a quarter is kept."""
    inpaint: Any = Flux2KleinInpaintPipeline(**pipeline.components)
    mask = torch.zeros(1, 1, 64, 80)
    mask[0, 0, 12:36, 4:61] = 1
    soft = inpaint.prepare_mask_latents(mask, 1, 1, 64, 80, torch.float32, "cpu")
    assert set(soft.unique().tolist()) == {0.0, 0.25, 0.5, 1.0}
    torch.testing.assert_close(rounded_mask_cells(mask, 8).flatten(2).transpose(1, 2), (soft >= 0.5).float())


def test_the_schedule_is_the_pipelines(pipeline: Any, model: Flux2Klein) -> None:
    """Its shift depends on the tokens of the image and on the number of steps."""
    scheduler: Any = FlowMatchEulerDiscreteScheduler(use_dynamic_shifting=True)
    for num_steps in (2, 4):
        pipeline(prompt="W", guidance_scale=1.0, height=64, width=80, num_inference_steps=num_steps, **TEXT)
        found = model.schedule(num_steps, (64, 80)).times
        torch.testing.assert_close(found, pipeline.scheduler.sigmas, atol=1e-6, rtol=1e-6)
    for tokens, num_steps, shift in ((1024, 4, 7.62), (1024, 28, 6.42), (4096, 10, 9.55), (8192, 4, 6.32)):
        assert flux2_shift(tokens, num_steps) == pytest.approx(shift, abs=0.005)
        assert np.log(flux2_shift(tokens, num_steps)) == pytest.approx(compute_empirical_mu(tokens, num_steps))
    scheduler.set_timesteps(sigmas=np.linspace(1, 1 / 4, 4), mu=float(np.log(flux2_shift(1024, 4))))
    found = model.schedule(4, (256, 256)).times  # cells of 8 pixels here, not 16
    torch.testing.assert_close(found, scheduler.sigmas, atol=1e-6, rtol=1e-6)
    assert found.tolist() == pytest.approx([1, 0.958, 0.884, 0.718, 0], abs=1e-3)
    fixed: Any = FlowMatchEulerDiscreteScheduler(shift=3.0)
    constant = Flux2Klein(pipeline.transformer, pipeline.vae, model.text, fixed).schedule(2, (64, 80))
    assert constant.times.tolist() == pytest.approx([1, 0.75, 0])


def test_the_text_is_the_pipelines(pipeline: Any, model: Flux2Klein) -> None:
    """States of its padding included; the end of a longer chat is cut off."""
    examples = [text_example(i, (64, 80)) for i in range(3)]
    for length in (LENGTH, 40):
        expected, _ = pipeline.encode_prompt(
            [e.prompt for e in examples], max_sequence_length=length, text_encoder_out_layers=LAYERS
        )
        found = Flux2Klein.from_pipeline(pipeline, length).encode(examples, 1.0).tensors["text"]
        torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)
    assert bool(found[0, -1].any())


# --- the contract of a family ---


def test_rows_do_not_see_each_other(model: Flux2Klein) -> None:
    examples = [replace(random_example(i, 64, 80), prompt=text_example(i, (0, 0)).prompt) for i in range(3)]
    x, t = torch.randn(3, 32, 8, 10), torch.tensor([0.9, 0.5, 0.1])
    together = model.predict(model.network, x, t, model.encode(examples, 4.0))
    for i in range(3):
        alone = model.predict(model.network, x[i : i + 1], t[i : i + 1], model.encode(examples[i : i + 1], 4.0))
        torch.testing.assert_close(together[i : i + 1], alone, atol=1e-5, rtol=1e-5)


def test_latents_are_normalized_patches(pipeline: Any, model: Flux2Klein) -> None:
    images = torch.rand(1, 3, 32, 48) * 2 - 1
    expected = pipeline._encode_vae_image(images, torch.Generator())
    found = model.encode_images(images)
    torch.testing.assert_close(found, expected, atol=1e-6, rtol=1e-5)
    assert found.shape == (1, 32, 4, 6) and (model.spec.latent_channels, model.spec.downsampling) == (32, 8)
    cells = pipeline._unpatchify_latents(pipeline._patchify_latents(torch.randn(1, 8, 8, 12)))
    mean, std = model.autoencoder.statistics()  # pyright: ignore[reportAttributeAccessIssue]
    latents = (pipeline._patchify_latents(cells) - mean) / std
    torch.testing.assert_close(model.decode(latents), model.vae.decode(cells).sample.clamp(-1, 1), atol=1e-5, rtol=0)


def test_errors_say_what_to_do(pipeline: Any, model: Flux2Klein) -> None:
    with pytest.raises(ValueError, match="multiples of 8"):
        model.encode([text_example(0, (36, 64))], 4.0)
    with pytest.raises(ValueError, match="multiples of 8"):
        model.encode([replace(text_example(0, (1, 1)), source=image_of(0, (36, 64)))], 4.0)
    with pytest.raises(ValueError, match="no source image"):
        model.encode([random_example(0, 64, 80), text_example(1, (64, 80))], 4.0)
    with pytest.raises(ValueError, match="no mask"):
        model.encode([random_example(0, 64, 80), replace(random_example(1, 64, 80), mask=None)], 4.0)
    with pytest.raises(ModelFilesError, match=r"takes 20 channels.*needs 32; use black-forest-labs/FLUX.2-klein-base"):
        wrong = tiny_pipeline("flux2_klein")
        wrong.transformer.register_to_config(in_channels=20)
        Flux2Klein.from_pipeline(wrong)


def test_the_distilled_model_takes_no_guidance(pipeline: Any, model: Flux2Klein, tmp_path: Path) -> None:
    distilled = tiny_pipeline("flux2_klein", seed=3)
    distilled.register_to_config(is_distilled=True)
    found = Flux2Klein.from_pipeline(distilled, LENGTH)
    assert (found.spec.guidance_scale, model.spec.guidance_scale) == (1.0, 4.0)
    with pytest.raises(ValueError, match="guidance_scale is 4, but this flux2_klein was distilled"):
        found.encode([text_example(0, (64, 80))], 4.0)
    distilled.save_pretrained(tmp_path)
    load_model(Flux2KleinModel(path=str(tmp_path), variant="distilled"))
    with pytest.raises(ModelFilesError, match=r"given 'base', but .* a distilled model; set model.variant=distilled"):
        load_model(Flux2KleinModel(path=str(tmp_path)))
    with pytest.raises(ValidationError, match=r"set model.variant=distilled, or model.path=.*FLUX.2-klein-base-9B"):
        Flux2KleinModel(path="black-forest-labs/FLUX.2-klein-9B")


def test_a_network_with_embedded_guidance_is_of_another_family(pipeline: Any) -> None:
    wrong = tiny_pipeline("flux2_klein")
    wrong.transformer.register_to_config(guidance_embeds=True)
    with pytest.raises(ModelFilesError, match="has a guidance embedding, but flux2_klein needs none"):
        Flux2Klein.from_pipeline(wrong)


# --- LoRA ---


def test_every_target_adapts_a_layer() -> None:
    """`attn.to_out` is a layer in single blocks and a list of layers in double blocks."""
    network = tiny_pipeline("flux2_klein").transformer
    add_lora(network, 2, 4.0, Flux2KleinModel.spec.lora_targets)
    adapted = {n.rsplit(".lora_A", 1)[0] for n, p in network.named_parameters() if ".lora_A" in n}
    assert len(adapted) == 2 * 12 + 4 * 2
    assert "single_transformer_blocks.1.attn.to_out" in adapted and "transformer_blocks.1.attn.to_out.0" in adapted
    for target in Flux2KleinModel.spec.lora_targets:
        assert any(name.endswith(f".{target}") for name in adapted)


def test_the_pipeline_reads_a_trained_lora(model: Flux2Klein, tmp_path: Path) -> None:
    stock = tiny_pipeline("flux2_klein", seed=3)
    stock.set_progress_bar_config(disable=True)
    trained = tiny_pipeline("flux2_klein", seed=3).transformer
    add_lora(trained, 2, 4.0, model.spec.lora_targets)
    with torch.no_grad():
        for name, weight in trained.named_parameters():
            if ".lora_B" in name:
                weight.normal_(std=0.3)
    save_lora({n: p for n, p in trained.named_parameters() if p.requires_grad}, tmp_path, 4.0, 2)
    stock.load_lora_weights(tmp_path)
    x, t, condition = torch.randn(1, 32, 8, 10), torch.tensor([0.7]), model.encode([text_example(0, (64, 80))], 1.0)
    with torch.no_grad():
        base, found, expected = (model.predict(n, x, t, condition) for n in (model.network, stock.transformer, trained))
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)
    assert float((base - expected).abs().max()) > 0.01


# --- loading ---


@torch.no_grad()
def test_a_saved_folder_loads_to_the_same_model(pipeline: Any, model: Flux2Klein, tmp_path: Path) -> None:
    """Without the layers of the text encoder that are not used; one more of them is kept than is read."""
    deeper = tiny_pipeline("flux2_klein", seed=4)
    encoder = type(deeper.text_encoder)
    config = deeper.text_encoder.config
    config.num_hidden_layers, config.layer_types = 8, ["full_attention"] * 8
    deeper.register_modules(text_encoder=encoder(config).eval())
    deeper.save_pretrained(tmp_path)
    model = Flux2Klein.from_pipeline(deeper, LENGTH)
    options: dict[str, Any] = {"path": str(tmp_path), "max_sequence_length": LENGTH}
    loaded = load_model(Flux2KleinModel(**options, dtype="fp32", train=TrainFull()))
    x, t, example = torch.randn(1, 32, 8, 10), torch.tensor([0.7]), random_example(1, 64, 80)
    expected = model.predict(model.network, x, t, model.encode([example], 4.0))
    torch.testing.assert_close(loaded.predict(loaded.network, x, t, loaded.encode([example], 4.0)), expected)
    assert loaded.spec == model.spec
    assert loaded.prompts is not None
    encoder = loaded.prompts.encoders["text"].model
    assert len(encoder.layers) == 7
    config = Flux2KleinModel(**options)
    counted = build_networks(config, find_model(config)).parts["text_encoder"]
    assert sum(p.numel() for p in counted.parameters()) == sum(p.numel() for p in encoder.parameters())
    loaded.prompts.cache_and_release([loaded.spec.empty_prompt, example.prompt])
    torch.testing.assert_close(loaded.predict(loaded.network, x, t, loaded.encode([example], 4.0)), expected)
    low = load_model(Flux2KleinModel(**options, dtype="bf16", train=TrainLora()))
    assert {p.dtype for p in low.network.parameters()} == {torch.bfloat16}
    rounded = low.predict(low.network, x, t, low.encode([example], 4.0))
    assert rounded.dtype == torch.float32 and float((rounded - expected).norm() / expected.norm()) < 0.1


def test_the_released_networks() -> None:
    networks = released_networks(Flux2KleinModel.spec)
    counts = {name: sum(p.numel() for p in network.parameters()) for name, network in networks.items()}
    assert counts == {
        "transformer": pytest.approx(3.88e9, rel=0.002),
        "vae": pytest.approx(0.084e9, rel=0.01),
        "text_encoder": pytest.approx(4.02e9, rel=0.002),
    }
    targets = tuple(f".{target}.weight" for target in Flux2KleinModel.spec.lora_targets)
    adapted = [n for n, _ in networks["transformer"].named_parameters() if n.endswith(targets)]
    assert len(adapted) == 5 * 12 + 20 * 2
