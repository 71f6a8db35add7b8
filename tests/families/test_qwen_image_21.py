"""Qwen-Image-2.1 against diffusers' own pipeline on the same weights, noise and sizes."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from diffusers import FlowMatchEulerDiscreteScheduler
from diffusers.pipelines.qwenimage21 import pipeline_qwenimage21
from PIL import Image

from retouch.config import ConfigError
from retouch.config.needs import require_usable_embeddings
from retouch.config.run import RunConfig
from retouch.doctor.model import find_model
from retouch.families.loading import ModelFilesError, load_model
from retouch.families.meta import released_networks
from retouch.families.qwen.text import Shown
from retouch.families.qwen_image_21.model import QwenImage21
from retouch.families.qwen_image_21.spec import QwenImage21Model
from retouch.families.qwen_image_21.text import END, SLOT, TEXT, PromptStates, chat
from retouch.families.tiny import tiny_pipeline
from retouch.rollout.plan import ode_plan
from retouch.rollout.sampler import latent_shape, noise_for, sample
from retouch.types import Condition, Example
from retouch.use.precompute import precompute
from tests.families.conftest import random_example
from tests.families.facts import Facts

FACTS = Facts(
    parameters=7.12e9,
    lora_modules=32 * 7,  # attention and feed-forward of 32 blocks
    guidance_scale=1.0,
    hub_id="Qwen/Qwen-Image-2.1",
    text_length=96,
    outside_blocks=0.02,  # shared modulation
)

LENGTH = 96
SIZES = [(32, 64), (64, 32)]


@pytest.fixture(scope="module")
def pipeline() -> Any:
    made = tiny_pipeline("qwen_image_21", seed=3)
    made.set_progress_bar_config(disable=True)
    with torch.no_grad():  # the norms of new networks are 1, the gates almost 0
        for name, parameter in made.transformer.named_parameters():
            if "norm" in name:
                parameter += 0.2 * torch.randn_like(parameter)
            elif name == "modulation.1.weight":
                parameter *= 8
        norm = made.text_encoder.model.language_model.norm.weight
        norm += torch.rand_like(norm)
    return made


@pytest.fixture(scope="module")
def model(pipeline: Any) -> QwenImage21:
    return QwenImage21.from_pipeline(pipeline, LENGTH)


@pytest.fixture
def own_sizes(monkeypatch: pytest.MonkeyPatch) -> None:
    """The pipeline scales every source to one area; here each keeps its size."""
    sizes = {width / height: (width, height, None) for height, width in SIZES}
    monkeypatch.setattr(pipeline_qwenimage21, "calculate_dimensions", lambda area, ratio: sizes[ratio])


def image(number: int, size: tuple[int, int] = (32, 64)) -> Image.Image:
    return Image.fromarray(np.random.default_rng(number).integers(0, 256, (*size, 3), np.uint8))


def example(number: int, sources: int = 0, size: tuple[int, int] = (32, 64)) -> Example:
    """With a prompt of its own length."""
    first, *others = [image(10 * number + i, size) for i in range(sources)] or [None]
    more = tuple(other for other in others if other is not None)
    return Example(number, "Make it red." + " And blue." * number, first, size=size, more_images=more)


def generated_by(pipeline: Any, of: Example, guidance: float, seed: int, **options: Any) -> torch.Tensor:
    """[1, C, h, w] latents of three steps."""
    assert of.size is not None
    height, width = of.size
    noise = noise_for((8, height // 16, width // 16), [seed])[0]
    sources = [] if of.source is None else [of.source, *of.more_images]
    tokens = pipeline(
        of.prompt,
        image=sources or None,
        negative_prompt=" " if guidance > 1 else None,
        true_cfg_scale=guidance,
        height=height,
        width=width,
        num_inference_steps=3,
        latents=noise.flatten(2).transpose(1, 2),
        output_type="latent",
        **options,
    ).images
    return tokens.transpose(1, 2).unflatten(2, noise.shape[2:])


def generated(model: QwenImage21, examples: Sequence[Example], guidance: float, seeds: Sequence[int]) -> torch.Tensor:
    condition = model.encode(examples, guidance)
    return sample(model, model.network, ode_plan(model.schedule(3, condition.size)), condition, seeds).final


# --- against the pipeline ---


@pytest.mark.parametrize(
    ("sources", "guidance", "size"),
    [(0, 1.0, SIZES[0]), (0, 4.0, SIZES[1]), (1, 1.0, SIZES[0]), (2, 1.0, SIZES[1]), (2, 4.0, SIZES[0])],
)
def test_an_image_is_the_pipelines(
    pipeline: Any, model: QwenImage21, own_sizes: None, sources: int, guidance: float, size: tuple[int, int]
) -> None:
    """From text, and from one and two sources; in a batch with a prompt of another length, as alone."""
    examples, seeds = [example(i, sources, size) for i in range(2)], [11, 12]
    found = generated(model, examples, guidance, seeds)
    for i, one in enumerate(examples):
        expected = generated_by(pipeline, one, guidance, seeds[i])
        torch.testing.assert_close(found[i : i + 1], expected, atol=1e-4, rtol=0)
        assert float(expected.std()) > 0.1


def test_the_order_of_sources_and_each_of_them_matter(model: QwenImage21) -> None:
    one = example(0, 2)
    swapped = replace(one, source=one.more_images[0], more_images=(one.source,))  # type: ignore[arg-type]
    images = [generated(model, [e], 1.0, [5]) for e in (one, swapped, replace(one, more_images=()))]
    assert all(float((other - images[0]).abs().max()) > 1e-4 for other in images[1:])


def test_a_mask_blends_as_the_inpainting_pipelines_do(pipeline: Any, model: QwenImage21, own_sizes: None) -> None:
    """diffusers has no inpainting pipeline of it; its callback replaces the state outside the mask after every step."""
    given = random_example(1, 64, 32)
    mask = Image.fromarray(np.uint8(255) * np.repeat(np.repeat(np.eye(4, 2, dtype=np.uint8), 16, 0), 16, 1))
    one = replace(given, mask=mask, size=(64, 32))
    condition = model.encode([one], 1.0)
    x0, cells = condition.tensors["picture_0"], condition.tensors["mask_cells"]
    assert cells.sum() == 2
    noise = noise_for((8, 4, 2), [7])[0]

    def tokens(x: torch.Tensor) -> torch.Tensor:
        return x.flatten(2).transpose(1, 2)

    def blend(pipe: Any, step: int, _: Any, state: dict[str, Any]) -> dict[str, Any]:
        sigma = float(pipe.scheduler.sigmas[step + 1])
        kept = tokens((1 - sigma) * x0 + sigma * noise)
        return {"latents": torch.where(tokens(cells) > 0, state["latents"], kept)}

    expected = generated_by(pipeline, one, 1.0, 7, callback_on_step_end=blend)
    found = generated(model, [one], 1.0, [7])
    torch.testing.assert_close(found, expected, atol=1e-4, rtol=0)
    torch.testing.assert_close(found * (1 - cells), x0 * (1 - cells))
    assert float((found - x0).abs().max()) > 0.1


def test_images_are_opaque_and_decoded_on_white(pipeline: Any, model: QwenImage21) -> None:
    pixels = torch.rand(2, 3, 32, 64) * 2 - 1
    opaque = torch.cat([pixels, torch.ones(2, 1, 32, 64)], 1)[:, :, None]
    latents = model.encode_images(pixels)
    expected = pipeline._encode_vae_image(opaque, generator=None)[:, :, 0]
    torch.testing.assert_close(latents, expected, atol=1e-5, rtol=1e-5)
    mean, std = (torch.tensor(values).view(1, -1, 1, 1) for values in (MEAN, STD))
    decoded = pipeline.vae.decode((latents * std + mean)[:, :, None]).sample[:, :, 0]
    rgba = (decoded / 2 + 0.5).clamp(0, 1)
    on_white = rgba[:, :3] * rgba[:, 3:] + (1 - rgba[:, 3:])
    torch.testing.assert_close((model.decode(latents) + 1) / 2, on_white, atol=1e-5, rtol=0)
    assert float((on_white - rgba[:, :3]).abs().max()) > 0.1


MEAN = [0.1 * i - 0.3 for i in range(8)]
STD = [0.8 + 0.1 * i for i in range(8)]


@pytest.mark.parametrize("steps", [4, 10, 40])
@pytest.mark.parametrize("size", [(64, 64), (512, 512), (1024, 1024), (2048, 1536)])
def test_times_are_the_released_schedulers(model: QwenImage21, steps: int, size: tuple[int, int]) -> None:
    scheduler = FlowMatchEulerDiscreteScheduler(
        use_dynamic_shifting=True,
        base_shift=0.5,
        max_shift=0.9,
        base_image_seq_len=256,
        max_image_seq_len=8192,
        shift_terminal=0.02,
    )
    released = copy.copy(model)
    released.scheduler = scheduler
    tokens = size[0] * size[1] // 256
    mu = pipeline_qwenimage21.calculate_shift(tokens, 256, 8192, 0.5, 0.9)
    scheduler.set_timesteps(sigmas=np.linspace(1, 1 / steps, steps).tolist(), mu=mu)
    torch.testing.assert_close(released.schedule(steps, size).times, scheduler.sigmas, atol=1e-6, rtol=0)


# --- text ---


@pytest.mark.parametrize("sources", [0, 1, 2])
def test_states_are_the_pipelines(pipeline: Any, model: QwenImage21, sources: int) -> None:
    one = example(1, sources)
    images = None if one.source is None else [i.convert("RGBA") for i in (one.source, *one.more_images)]
    expected, mask, slots = pipeline.encode_prompt(one.prompt, image=images)
    assert mask is None
    c = model.encode([one], 1.0).tensors
    length = expected.shape[1]
    torch.testing.assert_close(c["text"][:, :length], expected, atol=1e-5, rtol=1e-5)
    assert torch.equal(c["text_kinds"][:, :length], torch.where(slots, SLOT, TEXT).float())
    assert not c["text_kinds"][:, length:].any() and not c["text"][:, length:].any()
    assert c["text"].shape[1] == LENGTH + 2 * sources  # 32 x 64 pixels are two slots


def test_an_empty_prompt_is_a_space(model: QwenImage21) -> None:
    assert chat("") == chat(" ")
    empty, blank = (model.encode([Example(0, p, size=(32, 32))], 1.0).tensors["text"] for p in ("", " "))
    assert torch.equal(empty, blank)


def test_a_long_prompt_is_cut_and_images_never(pipeline: Any, caplog: pytest.LogCaptureFixture) -> None:
    parts = (pipeline.text_encoder, pipeline.processor)
    around = len(
        pipeline.processor.tokenizer(f"<|im_start|>user\n<image1><|vision_start|><|vision_end|>{END}").input_ids
    )
    short, long = PromptStates(*parts, around + 5), PromptStates(*parts, 200)
    [expected], count = long([Shown.of("Paint", [image(1)])]), around + 5 + 2
    [found] = short([Shown.of("Painting", [image(1)])])
    assert short.counts(["Painting"], [1]) == [short.length + 3]
    assert not caplog.records  # `retouch.families.prompts` warns, once for all prompts
    torch.testing.assert_close(found, expected[:count])
    with pytest.raises(
        ValueError, match=r"the chat around a prompt takes more than model\.max_sequence_length 15 tokens"
    ):
        PromptStates(*parts, 15)(["Paint"])


# --- batches ---


def test_one_forward_for_each_length(model: QwenImage21) -> None:
    """Samples of a group share theirs; rows come back in their order, with gradients."""
    network, calls = copy.deepcopy(model.network), list[int]()
    network.register_forward_pre_hook(
        lambda _, args, given: calls.append(len(given["hidden_states"])), with_kwargs=True
    )
    examples = [example(i, 1) for i in (2, 0, 2, 1)]
    condition = model.encode(examples, 1.0)
    x, t = torch.randn(4, 8, 2, 4), torch.tensor([0.9, 0.6, 0.3, 0.1])
    together = model.predict(network, x, t, condition)
    assert sorted(calls) == [1, 1, 2]
    for i in range(4):
        alone = model.predict(model.network, x[i : i + 1], t[i : i + 1], condition.select([i]))
        torch.testing.assert_close(together[i : i + 1], alone, atol=1e-5, rtol=1e-5)
    together.square().sum().backward()
    assert all(p.grad is not None and p.grad.any() for p in network.parameters())
    calls.clear()
    model.predict(network, x, t, condition.select([1, 1, 1, 1]))
    assert calls == [4]


def test_errors_say_what_to_do(model: QwenImage21, pipeline: Any) -> None:
    with pytest.raises(ValueError, match="images are 48 x 64; qwen_image_21 needs multiples of 32"):
        model.encode([example(0, 1, (48, 64))], 1.0)
    with pytest.raises(ValueError, match=r"examples have \[1, 2\] source images; a batch needs as many in each"):
        model.encode([example(0, 1), example(1, 2)], 1.0)
    few_steps = copy.copy(pipeline)
    few_steps._internal_dict = {**pipeline.config, "sample_sigmas": [1.0, 0.5]}
    with pytest.raises(ModelFilesError, match="sets the 2 sampling times sample_sigmas, which qwen_image_21 does not"):
        QwenImage21.from_pipeline(few_steps)


# --- run files and files ---


def run_of(model: dict[str, Any], **sections: Any) -> RunConfig:
    return RunConfig.model_validate(
        {
            "name": "q21",
            "model": {"family": "qwen_image_21", **model},
            "data": {"format": "manifest", "path": "unread", "resolution": 512},
            "algorithm": {"name": "grpo"},
            "rewards": {"ocr": {}},
            **sections,
        }
    )


def test_a_run_file_says_what_cannot_work() -> None:
    for given in ({"embeddings": "a/folder"}, {"free_text_encoders": True}):
        with pytest.raises(ValueError, match=r"data.format can name source images, .*set data.format=prompts"):
            run_of(given)
    prompts = {"format": "prompts", "path": "unread", "resolution": 512}
    assert run_of({"free_text_encoders": True}, data=prompts).model.free_text_encoders
    require_usable_embeddings(run_of({}, data=prompts))
    with pytest.raises(ConfigError, match="has a text encoder that reads the image with the prompt"):
        require_usable_embeddings(run_of({}))
    with pytest.raises(
        ValueError, match=r"as one forward for each length of its prompts.* set rollout\.batch_size_per"
    ):
        run_of({}, training={"sharding": "fsdp2"}, rollout={"batch_size_per_device": 2})
    one = {"batch_size_per_device": 1}
    assert run_of({}, training={"sharding": "fsdp2"}, rollout=one, optimizer=one).training.sharding == "fsdp2"
    with pytest.raises(ValueError, match="needs multiples of 32; set 512"):
        run_of({}, data={**prompts, "resolution": 500})


@pytest.mark.usefixtures("_torchvision_installed")
def test_a_saved_folder_is_complete_and_loads(pipeline: Any, model: QwenImage21, tmp_path: Path) -> None:
    pipeline.save_pretrained(tmp_path)
    config = QwenImage21Model(path=str(tmp_path), dtype="fp32", max_sequence_length=LENGTH)
    found = find_model(config)
    assert not found.problems and found.folder == tmp_path
    loaded: Any = load_model(config)
    x, t, one = torch.randn(1, 8, 2, 4), torch.tensor([0.7]), example(1, 1)
    expected = model.predict(model.network, x, t, model.encode([one], 2.0))
    torch.testing.assert_close(loaded.predict(loaded.network, x, t, loaded.encode([one], 2.0)), expected)
    (tmp_path / "processor/tokenizer_config.json").unlink()
    assert find_model(config).problems == ["no processor/tokenizer_config.json"]
    index = tmp_path / "model_index.json"
    index.write_text(index.read_text().replace('"sample_sigmas": null', '"sample_sigmas": [1.0, 0.5]'))
    with pytest.raises(ModelFilesError, match="a few-step variant"):
        load_model(config)


def test_stored_prompts_replace_the_text_encoder(pipeline: Any, model: QwenImage21, tmp_path: Path) -> None:
    pipeline.save_pretrained(tmp_path / "model")
    one = example(1)
    (tmp_path / "prompts.txt").write_text(one.prompt, encoding="utf-8")
    section = {"path": str(tmp_path / "model"), "dtype": "fp32", "max_sequence_length": LENGTH}
    run = run_of(section, data={"format": "prompts", "path": str(tmp_path / "prompts.txt"), "resolution": 32})
    assert precompute(run, tmp_path / "stored")["prompts"] == 2  # the empty one, too
    config = QwenImage21Model(**section, embeddings=str(tmp_path / "stored"))  # type: ignore[arg-type]
    loaded = load_model(config)
    stored, encoded = loaded.encode([one], 2.0), model.encode([one], 2.0)
    assert stored.tensors.keys() == encoded.tensors.keys()
    for name, tensor in encoded.tensors.items():
        torch.testing.assert_close(stored.tensors[name], tensor)
    with pytest.raises(ValueError, match=r"but the examples have source images.*; set model\.embeddings=null"):
        loaded.encode([example(1, 1)], 1.0)


def test_parameters_of_the_released_networks() -> None:
    made = released_networks(QwenImage21Model.spec)
    found = {name: sum(p.numel() for p in network.parameters()) for name, network in made.items()}
    assert {name: round(count / 1e9, 2) for name, count in found.items()} == {
        "transformer": 7.12,
        "vae": 0.34,
        "text_encoder": 8.77,
    }
    assert made["vae"].spatial_compression_ratio == QwenImage21Model.spec.downsampling
    assert made["vae"].config.z_dim == QwenImage21Model.spec.latent_channels


def test_a_condition_is_what_its_rows_are(model: QwenImage21) -> None:
    both: Condition = model.encode([example(0), example(1)], 1.0)
    assert both.size == (32, 64) and both.mask is None and latent_shape(model, both.size) == (8, 2, 4)
    assert torch.equal(both.select([1]).tensors["text"], model.encode([example(1)], 1.0).tensors["text"])
