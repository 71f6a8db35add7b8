"""Stable Diffusion 3.5 against diffusers' own pipelines on the same weights: text to image, and inpainting by
blending."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from diffusers import (
    FlowMatchEulerDiscreteScheduler,
    SD3Transformer2DModel,
    StableDiffusion3InpaintPipeline,
    StableDiffusion3Pipeline,
)
from torch import Tensor

from retouch.adapters.lora import add_lora
from retouch.doctor import networks
from retouch.doctor.model import FoundModel, find_model, loaded
from retouch.engine.speed import compile_blocks
from retouch.families import FAMILIES
from retouch.families.base import TrainFull, TrainLora
from retouch.families.loading import ModelFilesError, is_there, load_model
from retouch.families.meta import released_networks
from retouch.families.sd3.model import Sd3
from retouch.families.sd3.spec import Sd3Model
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
    parameters=2.24e9,
    lora_modules=24 * 8 - 1,  # attention of both streams in 24 blocks, of which the last returns no text
    guidance_scale=4.5,
    hub_id="stabilityai/stable-diffusion-3.5-medium",
    text_length=24,
)

LENGTH = 40
SIZES = [(32, 64), (48, 24)]


@pytest.fixture(scope="module")
def pipeline() -> Any:
    """With the constants of the released autoencoder."""
    made = tiny_pipeline("sd3", seed=3)
    made.vae.register_to_config(shift_factor=0.0609, scaling_factor=1.5305)
    made.set_progress_bar_config(disable=True)
    return made


@pytest.fixture(scope="module")
def model(pipeline: Any) -> Sd3:
    return Sd3.from_pipeline(pipeline, LENGTH)


# --- against the pipelines ---


@pytest.mark.parametrize("guidance", [1.0, 4.5])
@pytest.mark.parametrize(("height", "width"), SIZES)
def test_predict_and_image_are_the_pipelines(
    pipeline: Any, model: Sd3, height: int, width: int, guidance: float
) -> None:
    """Every call of the transformer, and the image; two prompts of different lengths."""
    examples, seeds = [text_example(i, (height, width)) for i in range(2)], [11, 12]
    noise, _ = noise_for((16, height // 4, width // 4), seeds)
    with recorded_calls(pipeline.transformer) as calls:
        expected = pipeline(
            prompt=[e.prompt for e in examples],
            guidance_scale=guidance,
            max_sequence_length=LENGTH,
            height=height,
            width=width,
            num_inference_steps=3,
            latents=noise,
            output_type="np",
        ).images
    condition, schedule = model.encode(examples, guidance), model.schedule(3, (height, width))
    assert len(calls) == 3
    for i, (x, timestep, output) in enumerate(calls):
        torch.testing.assert_close(timestep, 1000 * schedule.times[i].expand(len(x)), atol=1e-3, rtol=1e-6)
        if guidance > 1:
            without, with_text = output.chunk(2)
            output = without + guidance * (with_text - without)
        velocity = model.predict(pipeline.transformer, x[:2], schedule.times[i].expand(2), condition)
        torch.testing.assert_close(velocity, output, atol=1e-5, rtol=1e-5)
    found = ode_image(model, condition, 3, seeds)
    torch.testing.assert_close(found, torch.from_numpy(expected), atol=1e-5, rtol=0)


@pytest.mark.parametrize("guidance", [1.0, 4.5])
@pytest.mark.parametrize(("height", "width"), SIZES)
def test_repainted_latents_are_the_inpainting_pipelines(
    pipeline: Any, model: Sd3, height: int, width: int, guidance: float, point_posterior: None
) -> None:
    """Latents: diffusers 0.42 decodes them without adding the autoencoder's shift (its issue 13611)."""
    inpaint: Any = StableDiffusion3InpaintPipeline(**pipeline.components)
    inpaint.set_progress_bar_config(disable=True)
    example = random_example(1, height, width)
    expected = inpaint(
        prompt=example.prompt,
        guidance_scale=guidance,
        max_sequence_length=LENGTH,
        image=example.source,
        mask_image=example.mask,
        strength=1.0,
        height=height,
        width=width,
        num_inference_steps=4,
        generator=torch.Generator().manual_seed(11),
        output_type="latent",
    ).images
    condition = model.encode([example], guidance)
    final = ode_latents(model, condition, 4, [11])
    torch.testing.assert_close(final, expected, atol=1e-5, rtol=1e-5)
    require_source_outside_mask(condition, final)


@pytest.mark.parametrize("with_t5", [True, False])
def test_text_is_the_pipelines(pipeline: Any, with_t5: bool) -> None:
    """[S, D] of both CLIPs before T5, or before zeros where the model has no T5."""
    parts = pipeline.components if with_t5 else {**pipeline.components, "text_encoder_3": None, "tokenizer_3": None}
    stock: Any = StableDiffusion3Pipeline(**parts)
    examples = [text_example(i, (32, 64)) for i in range(3)]
    expected = stock.encode_prompt(
        [e.prompt for e in examples],
        prompt_2=None,
        prompt_3=None,
        do_classifier_free_guidance=True,
        max_sequence_length=LENGTH,
    )
    found = Sd3.from_pipeline(stock, LENGTH).encode(examples, 4.5).tensors
    assert found["text"].shape == (3, 24 + LENGTH, 64) and bool(found["text"][:, 24:].any()) == with_t5
    for name, theirs in zip(("text", "negative_text", "pooled", "negative_pooled"), expected, strict=True):
        torch.testing.assert_close(found[name], theirs, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("options", [{"shift": 3.0}, {"use_dynamic_shifting": True, "base_shift": 0.7}])
@pytest.mark.parametrize("num_steps", [1, 2, 10, 28])
def test_the_schedule_is_the_schedulers(model: Sd3, options: dict[str, Any], num_steps: int) -> None:
    """Which the pipeline gives no sigmas: it ends near 0, not at 1/T."""
    scheduler: Any = FlowMatchEulerDiscreteScheduler(**options)
    mu = {"mu": 0.7} if "use_dynamic_shifting" in options else {}
    scheduler.set_timesteps(num_steps, **mu)
    ours = Sd3(model.network, model.vae, model.text, scheduler)
    found = ours.schedule(num_steps, (128, 128)).times  # 256 tokens, where mu is the base
    torch.testing.assert_close(found, scheduler.sigmas, atol=1e-6, rtol=1e-5)


def test_the_released_sigmas_of_ten_steps(model: Sd3) -> None:
    times = model.schedule(10, (1024, 1024)).times.tolist()
    assert times[:3] == pytest.approx([1.0, 0.96013, 0.91335], abs=1e-5)
    assert times[-3:] == pytest.approx([0.27805, 0.00893, 0.0], abs=1e-5)


# --- the contract of a family ---


def test_rows_do_not_see_each_other(model: Sd3) -> None:
    examples = [random_example(i, 32, 64) for i in range(3)]
    examples = [replace(e, prompt=e.prompt + " Blue." * e.id) for e in examples]
    x, t = torch.randn(3, 16, 8, 16), torch.tensor([0.9, 0.5, 0.1])
    together = model.predict(model.network, x, t, model.encode(examples, 4.5))
    for i in range(3):
        alone = model.predict(model.network, x[i : i + 1], t[i : i + 1], model.encode(examples[i : i + 1], 4.5))
        torch.testing.assert_close(together[i : i + 1], alone, atol=1e-5, rtol=1e-5)


def test_without_guidance_there_is_no_negative_text(model: Sd3) -> None:
    assert not [name for name in model.encode([text_example(0, (32, 64))], 1.0).tensors if name.startswith("negative")]


def test_errors_say_what_to_do(model: Sd3) -> None:
    with pytest.raises(ValueError, match="multiples of 8"):
        model.encode([text_example(0, (36, 64))], 4.5)
    with pytest.raises(ValueError, match="images are 32 x 200; this sd3 takes sides of up to 192"):
        model.encode([text_example(0, (32, 200))], 4.5)
    with pytest.raises(ValueError, match="images are 32 x 200; this sd3 takes sides of up to 192"):
        model.encode([random_example(0, 32, 200)], 4.5)
    with pytest.raises(ValueError, match="examples without a source need one size"):
        model.encode([text_example(0, (32, 64)), text_example(1, (32, 32))], 4.5)
    turbo = Sd3(model.network, model.vae, model.text, model.scheduler, config=Sd3Model(variant="large_turbo", path="a"))
    with pytest.raises(ValueError, match="guidance_scale is 2, but this sd3 was distilled to sample without guidance"):
        turbo.encode([text_example(0, (32, 64))], 2.0)
    with pytest.raises(ModelFilesError, match=r"takes 33 channels.*needs 16; use stabilityai/stable-diffusion-3.5-m"):
        wrong = tiny_pipeline("sd3")
        wrong.transformer.register_to_config(in_channels=33)
        Sd3.from_pipeline(wrong)


def test_the_last_text_queries_have_a_gradient_of_0(pipeline: Any, model: Sd3) -> None:
    """Also under LoRA. They have one, so that DDP waits for none that never comes."""
    spec = Sd3Model.spec
    assert spec.drops_text_stream == "partly"
    network: Any = SD3Transformer2DModel.from_config(pipeline.transformer.config)
    x, t, condition = torch.randn(1, 16, 8, 16), torch.tensor([0.7]), model.encode([text_example(0, (32, 64))], 4.5)
    last = "transformer_blocks.3.attn."

    def without_effect() -> set[str]:
        model.predict(network, x, t, condition).square().mean().backward()
        trained = {name: weight.grad for name, weight in network.named_parameters() if weight.requires_grad}
        return {name for name, gradient in trained.items() if not gradient.any()}

    unused = {f"{last}{name}" for name in ("add_q_proj.weight", "add_q_proj.bias", "norm_added_q.weight")}
    assert without_effect() == unused
    add_lora(network, 4, 8, list(spec.lora_targets))
    for name, weight in network.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(weight)
    assert without_effect() == {f"{last}add_q_proj.lora_{side}.default.weight" for side in "AB"}


def test_lora_leaves_the_second_attention_out_unless_it_is_named(pipeline: Any) -> None:
    for targets, expected in ((Sd3Model.spec.lora_targets, 0), (("to_q", "to_k"), 2)):
        network: Any = SD3Transformer2DModel.from_config(pipeline.transformer.config)
        add_lora(network, 4, 8, list(targets))
        names = [name for name, _ in network.named_parameters() if ".attn2." in name and "lora_A" in name]
        assert len(names) == expected


def test_gradients_in_fp16_are_nearer_than_in_bf16() -> None:
    """Of policy gradients' size, which fp16 needs the loss scaler for."""
    gradients: dict[torch.dtype, Tensor] = {}
    for dtype in (torch.float32, torch.float16, torch.bfloat16):
        low = tiny_pipeline("sd3", seed=3)
        low.transformer.to(dtype)
        ours = Sd3.from_pipeline(low, LENGTH)
        torch.manual_seed(0)
        add_lora(ours.network, 4, 8, list(Sd3Model.spec.lora_targets))
        for name, weight in ours.network.named_parameters():
            if "lora_B" in name:
                torch.nn.init.normal_(weight, std=0.1)
        trained = [weight for weight in ours.network.parameters() if weight.requires_grad]
        scaler = torch.amp.GradScaler("cpu", enabled=dtype == torch.float16)  # type: ignore[attr-defined]
        x = torch.randn(2, 16, 8, 16, generator=torch.Generator().manual_seed(1))
        condition = ours.encode([text_example(i, (32, 64)) for i in range(2)], 4.5)
        with torch.autocast("cpu", dtype, enabled=dtype != torch.float32):
            velocity = ours.predict(ours.network, x, torch.tensor([0.9, 0.3]), condition)
        scaler.scale(1e-4 * velocity.square().mean()).backward()
        scaler.unscale_(torch.optim.SGD(trained))
        gradients[dtype] = torch.cat([weight.grad.flatten() for weight in trained if weight.grad is not None])
    exact = gradients.pop(torch.float32)
    error = {dtype: float((found - exact).norm() / exact.norm()) for dtype, found in gradients.items()}
    assert 3 * error[torch.float16] < error[torch.bfloat16] < 0.05


def test_blocks_are_compiled() -> None:
    """diffusers names no repeated blocks of this network."""
    ours = Sd3.from_pipeline(tiny_pipeline("sd3", seed=3))
    assert not SD3Transformer2DModel._repeated_blocks  # of the class: only the network in use names them
    compile_blocks(ours.network, "eager")
    compiled = [n for n, module in ours.network.named_modules() if module._compiled_call_impl is not None]
    assert compiled == [f"transformer_blocks.{i}" for i in range(4)]


@pytest.mark.slow
def test_compiled_blocks_predict_the_same() -> None:
    """All three kinds of blocks: with a second attention, without, and the last one."""
    ours = Sd3.from_pipeline(tiny_pipeline("sd3", seed=3))
    x, t, condition = torch.randn(1, 16, 8, 16), torch.tensor([0.7]), ours.encode([text_example(0, (32, 64))], 4.5)
    expected = ours.predict(ours.network, x, t, condition)
    torch._dynamo.reset()
    compile_blocks(ours.network, "eager")
    torch.testing.assert_close(ours.predict(ours.network, x, t, condition), expected)
    torch._dynamo.reset()


# --- loading ---


def test_a_saved_folder_loads_to_the_same_model(pipeline: Any, model: Sd3, tmp_path: Path) -> None:
    pipeline.save_pretrained(tmp_path)
    options: dict[str, Any] = {"path": str(tmp_path), "max_sequence_length": LENGTH}
    loaded_here = load_model(Sd3Model(**options, dtype="fp32", train=TrainFull()))
    x, t, example = torch.randn(1, 16, 8, 16), torch.tensor([0.7]), random_example(1, 32, 64)
    expected = model.predict(model.network, x, t, model.encode([example], 4.5))
    found = loaded_here.predict(loaded_here.network, x, t, loaded_here.encode([example], 4.5))
    torch.testing.assert_close(found, expected)
    assert loaded_here.spec == model.spec
    assert loaded_here.prompts is not None
    loaded_here.prompts.cache_and_release([loaded_here.spec.empty_prompt, example.prompt])
    torch.testing.assert_close(
        loaded_here.predict(loaded_here.network, x, t, loaded_here.encode([example], 4.5)), expected
    )
    for dtype, kind in (("bf16", torch.bfloat16), ("fp16", torch.float16)):
        low: Any = load_model(Sd3Model(**options, dtype=dtype, train=TrainLora()))  # type: ignore[arg-type]
        assert {p.dtype for p in low.network.parameters()} == {kind}
        velocity = low.predict(low.network, x, t, low.encode([example], 4.5))
        assert velocity.dtype == torch.float32
        assert float((velocity - expected).detach().abs().max()) < 0.1 * float(expected.detach().abs().max())


def test_a_folder_without_t5_loads_with_zeros_in_its_place(
    pipeline: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    parts = {**pipeline.components, "text_encoder_3": None, "tokenizer_3": None}
    StableDiffusion3Pipeline(**parts).save_pretrained(tmp_path)
    section = Sd3Model(path=str(tmp_path), dtype="fp32", max_sequence_length=LENGTH)
    assert not is_there(str(tmp_path), "text_encoder_3") and is_there(str(tmp_path), "text_encoder_2")
    text = load_model(section).encode([text_example(0, (32, 64))], 1.0).tensors["text"]
    assert text.shape[1] == 24 + LENGTH and not text[:, 24:].any()
    found = find_model(section)
    assert found.problems == [] and "text_encoder_3" not in loaded(section, embedded=False, folder=found.folder)
    asked: list[str] = []
    monkeypatch.setattr(networks, "_fetched", lambda hub_id, file, known: asked.append(file) or tmp_path)
    of_the_hub = networks.build_networks(Sd3Model(path="somebody/sd3"), FoundModel(missing="not here"), download=True)
    assert of_the_hub.whole and "text_encoder_3" not in of_the_hub.parts and "text_encoder_3/config.json" not in asked
    (tmp_path / "model_index.json").write_text("{", encoding="utf-8")
    with pytest.raises(ModelFilesError, match=r"model_index.json is damaged .*copy the model anew"):
        load_model(section)


def test_a_folder_that_lost_its_t5_is_refused(pipeline: Any, tmp_path: Path) -> None:
    """model_index.json names one: zeros would be another model."""
    pipeline.save_pretrained(tmp_path)
    (tmp_path / "text_encoder_3").rename(tmp_path / "elsewhere")
    assert json.loads((tmp_path / "model_index.json").read_text())["text_encoder_3"][0] is not None
    section = Sd3Model(path=str(tmp_path), dtype="fp32")
    with pytest.raises(ModelFilesError, match="cannot load text_encoder_3/"):
        load_model(section)
    assert any("text_encoder_3" in problem for problem in find_model(section).problems)


# --- sizes ---


def test_the_released_networks() -> None:
    released = released_networks(FAMILIES["sd3"].spec)
    weights = {name: sum(p.numel() for p in network.parameters()) / 1e9 for name, network in released.items()}
    expected = {"transformer": 2.24, "vae": 0.084, "text_encoder": 0.124, "text_encoder_2": 0.695}
    assert weights == pytest.approx({**expected, "text_encoder_3": 4.76}, rel=0.01)
    assert sum(b.numel() for b in released["transformer"].buffers()) == 384**2 * 1536
    targets = tuple(f".{target}" for target in Sd3Model.spec.lora_targets)
    adapted = [m for n, m in released["transformer"].named_modules() if n.endswith(targets)]
    assert len(adapted) == 24 * 8 - 1  # the last block returns no text
    assert sum(32 * (m.in_features + m.out_features) for m in adapted) == pytest.approx(18.8e6, rel=0.01)
    for target in targets:
        assert any(n.endswith(target) for n, _ in released["transformer"].named_modules())


def test_the_large_model_is_of_this_family(pipeline: Any, model: Sd3) -> None:
    """8.06 B parameters; the family reads its sizes from its config."""
    medium = dict(Sd3Model.spec.released["transformer"])
    sizes = {"num_layers": 38, "num_attention_heads": 38, "caption_projection_dim": 2432, "pos_embed_max_size": 192}
    with torch.device("meta"):
        large: Any = SD3Transformer2DModel(**{**medium, **sizes, "dual_attention_layers": ()})
    assert sum(p.numel() for p in large.parameters()) == pytest.approx(8.06e9, rel=0.01)
    ours = Sd3(large, pipeline.vae, model.text, pipeline.scheduler)
    with pytest.raises(ValueError, match="sides of up to 1536"):  # 192 x 8 pixels with this autoencoder
        ours.require_size((32, 1600))
