"""FLUX.1-Fill against diffusers' own pipeline on the same weights, and the contract of a family."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar, Literal

import numpy as np
import pytest
import torch
from diffusers import FluxFillPipeline

from retouch.families.base import FamilySpec, OtherTransformer, TrainFull, TrainLora
from retouch.families.diffusion import pack, unpack
from retouch.families.embeddings import base_files
from retouch.families.flux_fill.model import FluxFill
from retouch.families.flux_fill.spec import FluxFillModel
from retouch.families.loading import (
    ModelFilesError,
    component_path,
    load_model,
)
from retouch.families.tiny import TEXT_TOKENS, byte_clip_tokenizer, bytes_to_characters, tiny_pipeline
from retouch.rollout.plan import ode_plan
from retouch.rollout.sampler import (
    sample,
    to_uint8,
)
from tests.families.conftest import random_example
from tests.families.facts import Facts

FACTS = Facts(
    parameters=11.9e9,
    # attention and feed-forward of both streams in 19 double blocks; q, k and v in 38 single ones
    lora_modules=19 * 12 + 38 * 3,
    guidance_scale=30.0,
    hub_id="black-forest-labs/FLUX.1-Fill-dev",
    text_length=24,
)

SIZES = [(32, 32), (32, 64), (48, 24)]


@pytest.mark.parametrize(("height", "width"), SIZES)
def test_predict_equals_the_pipelines_call(pipeline: Any, model: FluxFill, height: int, width: int) -> None:
    """Every input of the transformer, caught inside the pipeline, and its output."""
    examples = [random_example(i, height, width) for i in range(2)]
    condition = model.encode(examples, guidance_scale=7.0)
    schedule = model.schedule(3, (height, width))
    noise = torch.randn(2, 8, height // 4, width // 4, generator=torch.Generator().manual_seed(0))
    calls: list[tuple[dict[str, torch.Tensor], torch.Tensor]] = []

    def record(module: Any, args: Any, kwargs: dict[str, Any], output: Any) -> None:
        calls.append((kwargs, output[0]))

    hook = pipeline.transformer.register_forward_hook(record, with_kwargs=True)
    run_pipeline(pipeline, examples, noise, 3, 7.0)
    mine: list[tuple[dict[str, torch.Tensor], torch.Tensor]] = calls.copy()
    calls.clear()
    x = noise
    for i in range(3):
        theirs = mine[i]
        x = unpack(theirs[0]["hidden_states"][..., :32], height // 4, width // 4)
        velocity = model.predict(pipeline.transformer, x, schedule.times[i].expand(2), condition)
        kwargs, _ = calls[-1]
        for name in ("hidden_states", "timestep", "guidance", "pooled_projections", "encoder_hidden_states", "img_ids"):
            torch.testing.assert_close(kwargs[name], theirs[0][name], atol=1e-5, rtol=1e-5, msg=f"step {i}: {name}")
        torch.testing.assert_close(pack(velocity), theirs[1], atol=1e-4, rtol=1e-4)
    hook.remove()


@pytest.mark.parametrize(("height", "width"), SIZES)
def test_ode_image_equals_the_pipelines_image(pipeline: Any, model: FluxFill, height: int, width: int) -> None:
    examples = [random_example(i, height, width) for i in range(2)]
    seeds = [11, 12]
    noise = torch.stack(
        [torch.randn(8, height // 4, width // 4, generator=torch.Generator().manual_seed(s)) for s in seeds]
    )
    expected = run_pipeline(pipeline, examples, noise, 4, 30.0)
    condition = model.encode(examples, model.spec.guidance_scale)
    plan = ode_plan(model.schedule(4, (height, width)))
    final = sample(model, pipeline.transformer, plan, condition, seeds).final
    found = (model.decode(final) + 1) / 2
    torch.testing.assert_close(found.permute(0, 2, 3, 1), torch.from_numpy(expected), atol=1e-4, rtol=0)


def run_pipeline(pipeline: Any, examples: list[Any], noise: torch.Tensor, steps: int, guidance: float) -> Any:
    height, width = noise.shape[2] * 4, noise.shape[3] * 4
    return pipeline(
        prompt=[e.prompt for e in examples],
        image=torch.stack([torch.from_numpy(np.asarray(e.source)).permute(2, 0, 1) / 255.0 for e in examples]),
        mask_image=torch.stack([torch.from_numpy(np.asarray(e.mask))[None] / 255.0 for e in examples]),
        height=height,
        width=width,
        num_inference_steps=steps,
        guidance_scale=guidance,
        latents=pack(noise),
        max_sequence_length=TEXT_TOKENS,
        output_type="np",
        generator=torch.Generator().manual_seed(0),
    ).images


def test_mask_pixels_are_unshuffled_not_downsampled(model: FluxFill) -> None:
    example = random_example(0, 32, 64)
    condition = model.encode([example], 30.0)
    cells = condition.tensors["mask_cells"][0]
    mask = np.asarray(example.mask) >= 128
    for channel in range(16):
        rows, columns = divmod(channel, 4)
        assert np.array_equal(cells[channel].numpy() > 0, mask[rows::4, columns::4])


def test_pack_is_a_bijection_with_channels_outermost() -> None:
    x = torch.arange(2 * 3 * 4 * 6, dtype=torch.float32).view(2, 3, 4, 6)
    tokens = pack(x)
    assert tokens.shape == (2, 6, 12)
    assert tokens[0, 0].tolist() == [float(x[0, c, r, k]) for c in range(3) for r in range(2) for k in range(2)]
    assert torch.equal(unpack(tokens, 4, 6), x)


def test_latents_are_shifted_then_scaled(model: FluxFill) -> None:
    images = torch.rand(1, 3, 32, 32) * 2 - 1
    raw = model.vae.encode(images).latent_dist.mode()
    torch.testing.assert_close(model.encode_images(images), (raw - 0.3) * 0.7)
    torch.testing.assert_close(
        model.decode((raw - 0.3) * 0.7), model.vae.decode(raw).sample.clamp(-1, 1), atol=1e-5, rtol=1e-5
    )


def test_rows_do_not_see_each_other(model: FluxFill) -> None:
    examples = [random_example(i, 32, 64) for i in range(3)]
    x = torch.randn(3, 8, 8, 16)
    t = torch.tensor([0.9, 0.5, 0.1])
    together = model.predict(model.network, x, t, model.encode(examples, 30.0))
    for i in range(3):
        alone = model.predict(model.network, x[i : i + 1], t[i : i + 1], model.encode(examples[i : i + 1], 30.0))
        torch.testing.assert_close(together[i : i + 1], alone, atol=1e-5, rtol=1e-5)


def test_condition_depends_on_its_example_alone(model: FluxFill, pipeline: Any) -> None:
    examples = [random_example(i, 32, 64) for i in range(3)]
    whole = model.encode(examples, 30.0)
    fresh = FluxFill.from_pipeline(pipeline)
    backwards = fresh.encode(examples[::-1], 30.0).select([2, 1, 0])
    assert torch.equal(whole.tensors["text"], backwards.tensors["text"])
    assert torch.equal(whole.tensors["pooled"], backwards.tensors["pooled"])


def test_guidance_reaches_the_network(model: FluxFill) -> None:
    example = random_example(0, 32, 64)
    x, t = torch.randn(1, 8, 8, 16), torch.tensor([0.5])
    low, high = (model.predict(model.network, x, t, model.encode([example], g)) for g in (1.0, 30.0))
    assert float((low - high).abs().max()) > 1e-4


def test_errors_say_what_to_do(model: FluxFill, pipeline: Any) -> None:
    with pytest.raises(ValueError, match="multiples of 8"):
        model.encode([random_example(0, 36, 64)], 30.0)
    with pytest.raises(ValueError, match="text-to-image model cannot inpaint"):
        wrong = tiny_pipeline("flux_fill", 0)
        wrong.transformer.register_to_config(in_channels=32)
        FluxFill.from_pipeline(wrong)


# --- loading ---


def test_a_saved_folder_loads_to_the_same_model(tiny_folder: Path, model: FluxFill) -> None:
    config = FluxFillModel(path=str(tiny_folder), dtype="fp32", max_sequence_length=TEXT_TOKENS, train=TrainFull())
    loaded = load_model(config)
    example = random_example(1, 32, 64)
    x, t = torch.randn(1, 8, 8, 16), torch.tensor([0.7])
    condition = loaded.encode([example], 30.0)
    torch.testing.assert_close(
        loaded.predict(loaded.network, x, t, condition),
        model.predict(model.network, x, t, model.encode([example], 30.0)),
    )
    assert loaded.spec == model.spec


def test_frozen_weights_take_the_dtype_and_trained_ones_stay_fp32(tiny_folder: Path) -> None:
    lora = load_model(FluxFillModel(path=str(tiny_folder), dtype="bf16", train=TrainLora()))
    full = load_model(FluxFillModel(path=str(tiny_folder), dtype="bf16", train=TrainFull()))
    assert {p.dtype for p in lora.network.parameters()} == {torch.bfloat16}
    assert {p.dtype for p in full.network.parameters()} == {torch.float32}
    condition = lora.encode([random_example(0, 32, 64)], 30.0)
    assert lora.predict(lora.network, torch.randn(1, 8, 8, 16), torch.tensor([0.5]), condition).dtype == torch.float32


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("/nowhere/model", "no such folder"),
        ("./nowhere", "no such folder"),
    ],
)
def test_missing_models(path: str, message: str) -> None:
    with pytest.raises(ModelFilesError, match=message):
        component_path(path, "flux_fill")


def test_a_folder_that_is_no_model(tmp_path: Path, tiny_folder: Path) -> None:
    with pytest.raises(ModelFilesError, match=r"no model_index\.json"):
        component_path(str(tmp_path), "flux_fill")
    (tmp_path / "model_index.json").write_text("{}")
    with pytest.raises(ModelFilesError, match="cannot load transformer/"):
        FluxFill.from_config(FluxFillModel(path=str(tmp_path)))


def test_released_prompts_are_released_from_memory(tiny_folder: Path) -> None:
    model = load_model(FluxFillModel(path=str(tiny_folder), dtype="fp32", max_sequence_length=TEXT_TOKENS))
    first, second = random_example(0, 32, 64), random_example(1, 32, 64)
    before = model.encode([first], 30.0).tensors["text"]
    assert model.prompts is not None
    model.prompts.cache_and_release([first.prompt])
    assert torch.equal(model.encode([first], 30.0).tensors["text"], before)
    with pytest.raises(RuntimeError, match="free_text_encoders"):
        model.encode([second], 30.0)


# --- the tiny base ---


def test_byte_tokenizers_lose_nothing() -> None:
    tokenizer = byte_clip_tokenizer()
    assert len(set(bytes_to_characters())) == 256
    text = "the café's 'x1'."
    decoded: Any = tokenizer.decode(tokenizer(text).input_ids, skip_special_tokens=True)
    assert decoded.replace(" ", "") == text.replace(" ", "")
    assert len(tokenizer("abcd").input_ids) == 6  # start, four bytes, end


def test_committed_base_loads_in_plain_diffusers() -> None:
    folder = component_path("tiny", "flux_fill")
    pipe = FluxFillPipeline.from_pretrained(folder)
    assert pipe.vae_scale_factor == 4
    size = sum(f.stat().st_size for f in Path(folder).rglob("*.safetensors"))
    assert size <= 8e6


def test_decoded_pictures_are_bytes(model: FluxFill) -> None:
    pictures = to_uint8(model.decode(torch.randn(2, 8, 8, 16)))
    assert pictures.shape == (2, 32, 64, 3) and pictures.dtype == torch.uint8


def test_a_family_without_a_released_model_refuses_a_network_in_its_own_words() -> None:
    class Own(FluxFillModel):
        spec: ClassVar[FamilySpec] = replace(FluxFillModel.spec, family="own", hub_ids=())
        family: Literal["own"] = "own"  # pyright: ignore[reportIncompatibleVariableOverride]

    pipeline = tiny_pipeline("flux_fill")
    pipeline.transformer.register_to_config(in_channels=32)
    with pytest.raises(ModelFilesError, match=r"takes 32 channels, but own with .* set a model of own"):
        FluxFill(pipeline.transformer, pipeline.vae, None, pipeline.scheduler, config=Own())


# --- true guidance, and another transformer beside the base ---


def test_true_guidance_is_two_separate_predictions(pipeline: Any, model: FluxFill) -> None:
    """The masked image, the mask and the embedded guidance are the same in both."""
    config = FluxFillModel(true_guidance_scale=4, negative_prompt="nsfw")
    guided, examples = FluxFill.from_pipeline(pipeline, config), [random_example(i, 32, 64) for i in range(2)]
    x, t = torch.randn(2, 8, 8, 16), torch.tensor([0.9, 0.4])
    condition = guided.encode(examples, 1.0)
    found = guided.predict(guided.network, x, t, condition)
    negative = [replace(e, prompt="nsfw") for e in examples]
    without, with_prompt = (model.predict(model.network, x, t, model.encode(e, 1.0)) for e in (negative, examples))
    torch.testing.assert_close(found, without + 4 * (with_prompt - without), atol=1e-5, rtol=1e-5)
    assert torch.equal(guided.predict(guided.network, x, t, condition.without_negative()), with_prompt)


def saved_transformer(folder: Path) -> Any:
    """Other weights than those of the base, on disk without the other parts of a pipeline."""
    other = tiny_pipeline("flux_fill", seed=8).transformer
    other.save_pretrained(folder)
    return other


@pytest.mark.parametrize("subfolder", [None, "one-transformer"])
def test_a_transformer_beside_the_base_replaces_the_one_of_the_base(
    tiny_folder: Path, tmp_path: Path, subfolder: str | None
) -> None:
    other = saved_transformer(tmp_path / (subfolder or ""))
    named = OtherTransformer(path=str(tmp_path), subfolder=subfolder)
    config = FluxFillModel(path=str(tiny_folder), transformer=named, dtype="fp32", max_sequence_length=TEXT_TOKENS)
    found = load_model(config)
    assert all(torch.equal(t, other.state_dict()[name]) for name, t in found.network.state_dict().items())
    base = load_model(config.model_copy(update={"transformer": None}))
    assert base_files(config)["network_files"] != base_files(base.config)["network_files"]  # type: ignore[attr-defined]
    assert base_files(config)["vae_files"] == base_files(base.config)["vae_files"]  # type: ignore[attr-defined]


def test_errors_of_another_transformer_name_its_key(tiny_folder: Path, tmp_path: Path) -> None:
    config = FluxFillModel(path=str(tiny_folder), dtype="fp32")

    def loaded(path: Path | str, subfolder: str | None = None) -> Any:
        other = OtherTransformer(path=str(path), subfolder=subfolder)
        return load_model(config.model_copy(update={"transformer": other}))

    with pytest.raises(ModelFilesError, match=r"model.transformer.path: /nowhere: no such folder"):
        loaded("/nowhere")
    with pytest.raises(ModelFilesError, match=r"model.transformer: .* has no config.json; .* model.transformer.subf"):
        loaded(tiny_folder)
    with pytest.raises(ModelFilesError, match=r"model.transformer: cannot load vae/ of .* weights are missing"):
        loaded(tiny_folder, "vae")
    tiny_pipeline("flux_dev").transformer.save_pretrained(tmp_path)
    with pytest.raises(ModelFilesError, match=r"model.transformer: the network takes 32 channels"):
        loaded(tmp_path)
