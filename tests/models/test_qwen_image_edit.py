"""Qwen-Image-Edit and Edit-Plus against diffusers' own pipelines on the same weights, text states, noise and sizes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from diffusers.pipelines.qwenimage import pipeline_qwenimage_edit, pipeline_qwenimage_edit_plus
from PIL import Image

from retouch.config.families import EditVariant
from retouch.models.flux_fill import pack
from retouch.models.qwen import unpadded
from retouch.models.qwen_image_edit import QwenImageEdit
from retouch.models.tiny import tiny_qwen_image_edit
from retouch.rollout import noise_for, ode_plan, sample
from retouch.types import Condition, Example

LENGTH = 96
VARIANTS: tuple[EditVariant, ...] = ("edit", "edit_plus")
SIZES = [(32, 64), (48, 24)]


def picture(number: int, height: int, width: int) -> Image.Image:
    return Image.fromarray(np.random.default_rng(number).integers(0, 256, (height, width, 3), np.uint8))


def edit_at(number: int, size: tuple[int, int]) -> Example:
    """Instructions of different lengths."""
    return Example(number, "Make it red." + " And blue." * number, picture(number, *size))


@pytest.fixture(scope="module")
def pipelines() -> dict[str, Any]:
    made: dict[str, Any] = {}
    for variant in VARIANTS:
        torch.manual_seed(3)
        pipeline = made[variant] = tiny_qwen_image_edit(variant)
        pipeline.set_progress_bar_config(disable=True)
    return made


@pytest.fixture(scope="module")
def models(pipelines: dict[str, Any]) -> dict[str, QwenImageEdit]:
    # 28 x 56 pixels are two tokens: a small picture for the text encoder of edit_plus, whose own would be 384 x 384
    return {v: QwenImageEdit.from_pipeline(p, LENGTH, 2048 if v == "edit_plus" else None) for v, p in pipelines.items()}


@pytest.fixture
def own_sizes(monkeypatch: pytest.MonkeyPatch) -> None:
    """The pipelines scale every picture to a megapixel; here they leave it as it is."""
    areas: dict[float, tuple[int, int]] = {}

    def kept(_: int, ratio: float) -> tuple[int, int]:
        return areas[ratio]

    for height, width in [*SIZES, (32, 32)]:
        areas[width / height] = (width, height)
    monkeypatch.setattr(pipeline_qwenimage_edit, "calculate_dimensions", lambda area, ratio: (*kept(area, ratio), None))
    monkeypatch.setattr(pipeline_qwenimage_edit_plus, "calculate_dimensions", kept)


def states_of(condition: Condition, name: str) -> dict[str, torch.Tensor]:
    """What the pipelines take for the condition's text, whose padding they would cut."""
    [states] = unpadded(condition.tensors[name], condition.tensors[f"{name}_mask"])
    kind = "negative_prompt" if name.startswith("negative") else "prompt"
    return {f"{kind}_embeds": states[None], f"{kind}_embeds_mask": torch.ones(1, len(states), dtype=torch.long)}


def drawn_by(pipeline: Any, sources: Sequence[Image.Image], condition: Condition, guidance: float, seed: int) -> Any:
    height, width = condition.size
    noise, _ = noise_for((4, height // 4, width // 4), [seed])
    states = states_of(condition, "text") | (states_of(condition, "negative_text") if guidance > 1 else {})
    return pipeline(
        image=list(sources) if len(sources) > 1 else sources[0],
        **states,
        true_cfg_scale=guidance,
        height=height,
        width=width,
        num_inference_steps=3,
        latents=pack(noise),
        output_type="np",
    ).images


# --- against the pipelines ---


@pytest.mark.parametrize("guidance", [1.0, 4.0])
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("variant", VARIANTS)
def test_an_edited_picture_is_the_pipelines(
    pipelines: Any, models: Any, own_sizes: None, variant: EditVariant, size: tuple[int, int], guidance: float
) -> None:
    """Three steps of guided flow on the pipeline's network; and every row of a batch is what it is alone."""
    pipeline, model = pipelines[variant], models[variant]
    examples, seeds = [edit_at(i, size) for i in range(2)], [11, 12]
    condition = model.encode(examples, guidance)
    final = sample(model, model.network, ode_plan(model.schedule(3, size)), condition, seeds).final
    found = ((model.decode(final) + 1) / 2).permute(0, 2, 3, 1)
    for i, example in enumerate(examples):
        assert example.source is not None
        expected = drawn_by(pipeline, [example.source], condition.select([i]), guidance, seeds[i])
        torch.testing.assert_close(found[i : i + 1], torch.from_numpy(expected), atol=1e-4, rtol=0)


def test_two_pictures_of_different_sizes_are_edit_plus(pipelines: Any, models: Any, own_sizes: None) -> None:
    """Both follow the noisy tokens, in order, each with a place of its own."""
    pipeline, model = pipelines["edit_plus"], models["edit_plus"]
    sources = [picture(1, 32, 32), picture(2, 32, 64)]
    encoded = model.encode([edit_at(0, (32, 64))], 4.0)
    text, negative = ([*unpadded(*pair)] for pair in text_pairs(encoded))
    latents = [model.encode_picture(source) for source in sources]
    images = {}
    for name, order in (("given", latents), ("swapped", latents[::-1])):
        condition = model.condition_on(text, (32, 64), 4.0, negative, [order])
        final = sample(model, model.network, ode_plan(model.schedule(3, (32, 64))), condition, [5]).final
        images[name] = ((model.decode(final) + 1) / 2).permute(0, 2, 3, 1)
    expected = torch.from_numpy(drawn_by(pipeline, sources, encoded, 4.0, 5))
    torch.testing.assert_close(images["given"], expected, atol=1e-4, rtol=0)
    assert float((images["swapped"] - expected).abs().max()) > 1e-3


def text_pairs(condition: Condition) -> list[tuple[torch.Tensor, torch.Tensor]]:
    c = condition.tensors
    return [(c[name], c[f"{name}_mask"]) for name in ("text", "negative_text")]
