"""FLUX.2 [dev] against diffusers' own pipeline on the same weights: text to image, and edits. What it shares with
FLUX.2 klein is tested there."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from retouch.doctor.model import find_model
from retouch.doctor.networks import build_networks
from retouch.families.flux2_dev.model import Flux2Dev
from retouch.families.flux2_dev.spec import Flux2DevModel
from retouch.families.loading import ModelFilesError, load_model
from retouch.families.meta import released_networks
from retouch.families.tiny import tiny_pipeline
from retouch.rollout.sampler import noise_for
from tests.families.conftest import (
    ode_image,
    ode_latents,
    random_example,
    recorded_calls,
    require_source_outside_mask,
    text_example,
)
from tests.families.facts import Facts

FACTS = Facts(
    parameters=32.2e9,
    # attention and feed-forward of both streams in 8 double blocks, input and output of 48 single ones
    lora_modules=8 * 12 + 48 * 2,
    guidance_scale=4.0,
    hub_id="black-forest-labs/FLUX.2-dev",
    outside_blocks=0.03,  # shared modulation
    text_length=64,
)

LENGTH = 64
SIZE = (64, 80)
TEXT: dict[str, Any] = {"max_sequence_length": LENGTH, "text_encoder_out_layers": (1, 2, 3)}


@pytest.fixture(scope="module")
def pipeline() -> Any:
    made = tiny_pipeline("flux2_dev", seed=3)
    made.set_progress_bar_config(disable=True)
    return made


@pytest.fixture(scope="module")
def model(pipeline: Any) -> Flux2Dev:
    return Flux2Dev.from_pipeline(pipeline, LENGTH)


def image_of(number: int) -> Image.Image:
    return Image.fromarray(np.random.default_rng(number).integers(0, 256, (*SIZE, 3), np.uint8))


@pytest.mark.parametrize("guidance", [1.0, 4.0])
def test_predict_and_image_are_the_pipelines(pipeline: Any, model: Flux2Dev, guidance: float) -> None:
    """Every call of the transformer and the image, for two prompts of different lengths; one call a step."""
    examples, seeds = [text_example(i, SIZE) for i in range(2)], [11, 12]
    noise, _ = noise_for((32, 8, 10), seeds)
    with recorded_calls(pipeline.transformer) as calls:
        expected = pipeline(
            prompt=[e.prompt for e in examples],
            guidance_scale=guidance,
            height=SIZE[0],
            width=SIZE[1],
            num_inference_steps=3,
            latents=noise,
            output_type="np",
            **TEXT,
        ).images
    condition, schedule = model.encode(examples, guidance), model.schedule(3, SIZE)
    assert len(calls) == 3
    for i, (tokens, timestep, output) in enumerate(calls):
        torch.testing.assert_close(timestep, schedule.times[i].expand(2), atol=1e-6, rtol=1e-6)
        x = tokens.transpose(1, 2).unflatten(2, (8, 10))
        velocity = model.predict(pipeline.transformer, x, schedule.times[i].expand(2), condition)
        torch.testing.assert_close(velocity.flatten(2).transpose(1, 2), output, atol=1e-5, rtol=1e-5)
    found = ode_image(model, condition, 3, seeds)
    torch.testing.assert_close(found, torch.from_numpy(expected), atol=1e-5, rtol=0)
    other = ode_image(model, model.encode(examples, guidance + 1), 3, seeds)
    assert float((other - found).abs().max()) > 1e-4


@pytest.mark.parametrize("references", [1, 2])
def test_an_edit_is_the_pipelines(pipeline: Any, references: int) -> None:
    """The source is the first reference; the reference of the example the second one."""
    given = [image_of(i) for i in range(references)]
    example = replace(text_example(2, SIZE), source=given[0], reference=given[-1])
    expected = pipeline(
        prompt=example.prompt,
        image=given,
        num_inference_steps=3,
        generator=torch.Generator().manual_seed(11),
        output_type="np",
        **TEXT,
    ).images
    model = Flux2Dev.from_pipeline(pipeline, LENGTH, reference_images=references == 2)
    found = ode_image(model, model.encode([example], model.spec.guidance_scale), 3, [11])
    torch.testing.assert_close(found, torch.from_numpy(expected), atol=1e-5, rtol=0)


def test_a_mask_keeps_the_source_outside(model: Flux2Dev) -> None:
    """There is no pipeline for it; inside, the velocity is that of an edit."""
    masked = random_example(1, *SIZE)
    condition = model.encode([masked], 4.0)
    require_source_outside_mask(condition, ode_latents(model, condition, 3, [11]))
    x, t = noise_for((32, 8, 10), [11])[0], torch.tensor([0.7])
    edit = model.encode([replace(masked, mask=None)], 4.0)
    found, free = (model.predict(model.network, x, t, c) for c in (condition, edit))
    inside = condition.tensors["mask_cells"].expand_as(x) > 0
    assert torch.equal(found[inside], free[inside]) and bool(inside.any())


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("length", [LENGTH, 16])
def test_the_text_is_the_pipelines(side: str, length: int) -> None:
    """States of its padding included, on either side; the end of a longer chat is cut off, and marks of images are
    left out."""
    pipeline = tiny_pipeline("flux2_dev", seed=3)
    pipeline.tokenizer.tokenizer.padding_side = side
    prompts = ["The text is 'W'.", "", "[IMG]A much longer text."]
    expected, _ = pipeline.encode_prompt(prompts, max_sequence_length=length, text_encoder_out_layers=(1, 2, 3))
    found = Flux2Dev.from_pipeline(pipeline, length).text_tensors(prompts)["text"]
    torch.testing.assert_close(found, expected, atol=1e-6, rtol=1e-5)
    assert not torch.equal(found[0], found[2])


def test_a_template_without_a_first_token_gets_one(pipeline: Any) -> None:
    """As the processor does it."""
    other = tiny_pipeline("flux2_dev", seed=3)
    other.tokenizer.chat_template = other.tokenizer.chat_template.replace("{{- bos_token -}}", "")
    expected, _ = other.encode_prompt(["A"], **TEXT)
    torch.testing.assert_close(Flux2Dev.from_pipeline(other, LENGTH).text_tensors(["A"])["text"], expected)


def test_a_network_without_embedded_guidance_is_of_another_family() -> None:
    wrong = tiny_pipeline("flux2_dev")
    wrong.transformer.register_to_config(guidance_embeds=False)
    with pytest.raises(ModelFilesError, match=r"has no guidance embedding, but flux2_dev needs one; set model\.family"):
        Flux2Dev.from_pipeline(wrong)


@torch.no_grad()
def test_the_layout_of_the_hub(tmp_path: Path) -> None:
    """tokenizer/ is saved by a `PixtralProcessor`, whose images need torchvision. Of the text encoder, the language
    model stays in memory, with one layer more than is read."""
    deeper = tiny_pipeline("flux2_dev", seed=4)
    config = deeper.text_encoder.config
    config.text_config.num_hidden_layers = 8
    deeper.register_modules(text_encoder=type(deeper.text_encoder)(config).eval())
    deeper.save_pretrained(tmp_path)
    processor = {
        "processor_class": "PixtralProcessor",
        "patch_size": 14,
        "spatial_merge_size": 2,
        "image_token": "[IMG]",
    }
    images = {"processor_class": "PixtralProcessor", "image_processor_type": "PixtralImageProcessorFast"}
    for name, content in (("processor_config", processor), ("preprocessor_config", images)):
        (tmp_path / f"tokenizer/{name}.json").write_text(json.dumps(content))
    section = Flux2DevModel(path=str(tmp_path), max_sequence_length=LENGTH, dtype="fp32")
    loaded, model = load_model(section), Flux2Dev.from_pipeline(deeper, LENGTH)
    x, t, example = torch.randn(1, 32, 8, 10), torch.tensor([0.7]), random_example(1, *SIZE)
    expected = model.predict(model.network, x, t, model.encode([example], 4.0))
    torch.testing.assert_close(loaded.predict(loaded.network, x, t, loaded.encode([example], 4.0)), expected)
    assert loaded.prompts is not None
    encoder = loaded.prompts.encoders["text"].model
    assert type(encoder).__name__ == "MistralModel" and len(encoder.layers) == 7
    found = find_model(section)
    counted = build_networks(section, found).parts["text_encoder"]
    assert found.problems == []
    assert sum(p.numel() for p in counted.parameters()) == sum(p.numel() for p in encoder.parameters())


def test_the_released_networks() -> None:
    """Layers 10, 20 and 30 condition the network, whose text has three times the encoder's width."""
    networks = released_networks(Flux2DevModel.spec)
    counts = {name: sum(p.numel() for p in network.parameters()) for name, network in networks.items()}
    assert counts == {
        "transformer": pytest.approx(32.2e9, rel=0.002),
        "vae": pytest.approx(0.084e9, rel=0.01),
        "text_encoder": pytest.approx(24.0e9, rel=0.002),
    }
    language = Flux2Dev.language_model(networks["text_encoder"])
    layers = Flux2Dev.states(language, None, 512).layers  # type: ignore[arg-type]
    assert layers == (10, 20, 30)
    assert networks["transformer"].config.joint_attention_dim == len(layers) * language.config.hidden_size
    kept = Flux2Dev.kept("text_encoder", networks["text_encoder"])
    assert len(kept.layers) == 31 and sum(p.numel() for p in kept.parameters()) == pytest.approx(17.9e9, rel=0.002)
