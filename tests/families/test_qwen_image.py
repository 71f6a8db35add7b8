"""Qwen-Image against diffusers' own pipelines on the same weights: text to image, and inpainting by blending."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from diffusers import FlowMatchEulerDiscreteScheduler, QwenImageInpaintPipeline
from PIL import Image

from retouch.families import FAMILIES
from retouch.families.base import TrainFull, TrainLora
from retouch.families.diffusion import pack, unpack
from retouch.families.loading import ModelFilesError, load_model
from retouch.families.meta import released_networks
from retouch.families.qwen.base import without_common_padding
from retouch.families.qwen.spec import NEGATIVE
from retouch.families.qwen.tiny import byte_qwen_tokenizer
from retouch.families.qwen_image.model import QwenImage
from retouch.families.qwen_image.spec import QwenImageModel
from retouch.families.tiny import tiny_pipeline
from retouch.rollout.sampler import (
    noise_for,
)
from tests.families.conftest import (
    attached,
    image_of_latents,
    ode_image,
    ode_latents,
    random_example,
    recorded_calls,
    require_source_outside_mask,
    text_example,
)
from tests.families.facts import Facts

FACTS = Facts(
    parameters=20.4e9,
    lora_modules=60 * 12,  # attention and feed-forward of both streams in 60 blocks
    guidance_scale=4.0,
    hub_id="Qwen/Qwen-Image",
    text_length=96,
)

LENGTH = 96
SIZES = [(32, 64), (48, 24)]


@pytest.fixture(scope="module")
def pipeline() -> Any:
    made = tiny_pipeline("qwen_image", seed=3)
    prefix = made.prompt_template_encode.partition("{}")[0]
    made.prompt_template_encode_start_idx = len(made.tokenizer(prefix).input_ids)  # 34 with the released tokenizer
    made.set_progress_bar_config(disable=True)
    return made


@pytest.fixture(scope="module")
def model(pipeline: Any) -> QwenImage:
    return QwenImage.from_pipeline(pipeline, LENGTH)


# --- against the pipelines ---


@pytest.mark.parametrize("guidance", [1.0, 4.0])
@pytest.mark.parametrize(("height", "width"), SIZES)
def test_predict_and_image_are_the_pipelines(
    pipeline: Any, model: QwenImage, height: int, width: int, guidance: float
) -> None:
    """Every call of the transformer, and the picture; two prompts of different lengths."""
    examples, seeds = [text_example(i, (height, width)) for i in range(2)], [11, 12]
    noise, _ = noise_for((4, height // 4, width // 4), seeds)
    with recorded_calls(pipeline.transformer) as calls:
        expected = pipeline(
            prompt=[e.prompt for e in examples],
            negative_prompt=[NEGATIVE] * 2,
            true_cfg_scale=guidance,
            height=height,
            width=width,
            num_inference_steps=3,
            latents=pack(noise),
            output_type="np",
        ).images
    condition, schedule = model.encode(examples, guidance), model.schedule(3, (height, width))
    per_step = 2 if guidance > 1 else 1
    assert len(calls) == 3 * per_step
    for i in range(3):
        tokens, timestep, output = calls[i * per_step]
        x = unpack(tokens, height // 4, width // 4)
        torch.testing.assert_close(timestep, schedule.times[i].expand(2), atol=1e-6, rtol=1e-6)
        if guidance > 1:
            without = calls[i * per_step + 1][2]
            both = without + guidance * (output - without)
            output = both * output.norm(dim=-1, keepdim=True) / both.norm(dim=-1, keepdim=True)
        velocity = model.predict(pipeline.transformer, x, schedule.times[i].expand(2), condition)
        torch.testing.assert_close(pack(velocity), output, atol=1e-4, rtol=1e-4)
    found = ode_image(model, condition, 3, seeds)
    torch.testing.assert_close(found, torch.from_numpy(expected), atol=1e-4, rtol=0)


@pytest.mark.parametrize("guidance", [1.0, 4.0])
@pytest.mark.parametrize(("height", "width"), SIZES)
def test_a_repainted_picture_is_the_inpainting_pipelines(
    pipeline: Any, model: QwenImage, height: int, width: int, guidance: float, point_posterior: None
) -> None:
    inpaint: Any = QwenImageInpaintPipeline(**pipeline.components)
    inpaint.prompt_template_encode_start_idx = pipeline.prompt_template_encode_start_idx
    inpaint.set_progress_bar_config(disable=True)
    example = random_example(1, height, width)
    expected = inpaint(
        prompt=example.prompt,
        negative_prompt=NEGATIVE,
        true_cfg_scale=guidance,
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


def test_the_schedule_ends_where_the_scheduler_does(pipeline: Any, model: QwenImage) -> None:
    """shift_terminal: the last sigma before 0 is stretched to it; and the released scheduler at 1328 x 1328."""
    for num_steps in (2, 8, 50):
        pipeline.scheduler.set_timesteps(
            sigmas=np.linspace(1, 1 / num_steps, num_steps), mu=float(torch.tensor(4.0).log())
        )
        found = model.schedule(num_steps, (32, 64)).times
        torch.testing.assert_close(found, pipeline.scheduler.sigmas, atol=1e-6, rtol=1e-6)
        assert float(found[-2]) == pytest.approx(0.02)
    released: Any = FlowMatchEulerDiscreteScheduler(
        use_dynamic_shifting=True, base_shift=0.5, max_shift=0.9, max_image_seq_len=8192, shift_terminal=0.02
    )
    tokens = (1328 // 16) ** 2
    mu = 0.5 + (0.9 - 0.5) / (8192 - 256) * (tokens - 256)
    released.set_timesteps(sigmas=np.linspace(1, 1 / 50, 50), mu=mu)
    ours = QwenImage(pipeline.transformer, pipeline.vae, model.text, released).schedule(50, (1328 // 2, 1328 // 2))
    torch.testing.assert_close(ours.times, released.sigmas, atol=1e-6, rtol=1e-6)  # cells of 8 pixels here, not 16


# --- the contract of a family ---


def test_rows_do_not_see_each_other(model: QwenImage) -> None:
    examples = [random_example(i, 32, 64) for i in range(3)]
    x, t = torch.randn(3, 4, 8, 16), torch.tensor([0.9, 0.5, 0.1])
    together = model.predict(model.network, x, t, model.encode(examples, 4.0))
    for i in range(3):
        alone = model.predict(model.network, x[i : i + 1], t[i : i + 1], model.encode(examples[i : i + 1], 4.0))
        torch.testing.assert_close(together[i : i + 1], alone, atol=1e-5, rtol=1e-5)


def test_padding_changes_nothing(pipeline: Any, model: QwenImage) -> None:
    x, t, example = torch.randn(1, 4, 8, 16), torch.tensor([0.6]), text_example(0, (32, 64))
    longer = QwenImage.from_pipeline(pipeline, LENGTH + 40)
    expected = model.predict(model.network, x, t, model.encode([example], 4.0))
    torch.testing.assert_close(longer.predict(model.network, x, t, longer.encode([example], 4.0)), expected)


@pytest.mark.parametrize("guidance", [1.0, 4.0])
def test_the_network_gets_a_bucket_of_text(model: QwenImage, monkeypatch: pytest.MonkeyPatch, guidance: float) -> None:
    """Rows are the same, bit for bit, whichever rows of their bucket they are batched with, and equal those of the
    whole padding."""
    seen: list[tuple[int, bool]] = []
    forward = model.network.forward

    def watched(*args: Any, **given: Any) -> Any:
        seen.append((given["encoder_hidden_states"].shape[1], given["encoder_hidden_states_mask"] is None))
        return forward(*args, **given)

    monkeypatch.setattr(model.network, "forward", watched)
    examples = [text_example(number, (32, 64)) for number in (4, 5, 8)]
    x, t = torch.randn(3, 4, 8, 16), torch.tensor([0.9, 0.5, 0.1])
    short = model.predict(model.network, x[:2], t[:2], model.encode(examples[:2], guidance))
    long = model.predict(model.network, x, t, model.encode(examples, guidance))
    assert seen == [(64, False), (96, False)]
    torch.testing.assert_close(long[:2], short, atol=3e-6, rtol=3e-6)
    other = model.predict(model.network, x[[0, 0]], t[[0, 0]], model.encode([examples[0]] * 2, guidance))
    assert torch.equal(other[0], short[0])


def test_text_without_padding_needs_no_mask() -> None:
    states, mask = torch.randn(2, 80, 3), torch.zeros(2, 80)
    mask[:, :64] = 1
    kept, none = without_common_padding(states, mask)
    assert none is None and torch.equal(kept, states[:, :64])
    mask[0, 40:] = 0
    assert without_common_padding(states, mask)[1] is not None
    mask[0, :70] = 1  # over the last whole bucket
    assert without_common_padding(states, mask)[0].shape == (2, 80, 3)


def test_the_system_part_is_cut_off_once_and_only_there(pipeline: Any, model: QwenImage) -> None:
    tokenizer, template = byte_qwen_tokenizer(), pipeline.prompt_template_encode
    text = model.encode([text_example(0, (32, 64))], 1.0).tensors
    kept = int(text["text_mask"].sum())
    shown = tokenizer(template.replace("{}", text_example(0, (1, 1)).prompt)).input_ids
    assert tokenizer.decode(shown[-kept:]) == "The text is 'W'.<|im_end|>\n<|im_start|>assistant\n"
    assert not text["text"][0, kept:].any() and bool(text["text"][0, :kept].any(-1).all())


def test_latents_are_centred_and_scaled_by_channel(model: QwenImage) -> None:
    images = torch.rand(1, 3, 32, 32) * 2 - 1
    raw = model.vae.encode(images[:, :, None]).latent_dist.mode()[:, :, 0]
    mean, std = (torch.tensor(v).view(1, 4, 1, 1) for v in ([0.1, -0.2, 0.0, 0.3], [0.8, 1.1, 1.0, 0.9]))
    torch.testing.assert_close(model.encode_images(images), (raw - mean) / std)
    decoded = model.vae.decode(raw[:, :, None]).sample[:, :, 0].clamp(-1, 1)
    torch.testing.assert_close(model.decode((raw - mean) / std), decoded, atol=1e-5, rtol=1e-5)


def test_errors_say_what_to_do(model: QwenImage) -> None:
    with pytest.raises(ValueError, match="multiples of 8"):
        model.encode([random_example(0, 36, 64)], 4.0)
    with pytest.raises(ValueError, match="multiples of 8"):
        model.encode([text_example(0, (36, 64))], 4.0)
    with pytest.raises(ValueError, match="examples without a source need one size"):
        model.encode([text_example(0, (32, 64)), text_example(1, (32, 32))], 4.0)
    with pytest.raises(ValueError, match="no source image; qwen_image repaints one"):
        model.encode([random_example(0, 32, 64), text_example(1, (32, 64))], 4.0)
    with pytest.raises(ModelFilesError, match=r"takes 20 channels.*needs 16; use Qwen/Qwen-Image"):
        wrong = tiny_pipeline("qwen_image")
        wrong.transformer.register_to_config(in_channels=20)
        QwenImage.from_pipeline(wrong)


def test_an_image_with_a_reference_is_that_of_a_stock_pipeline(pipeline: Any, model: QwenImage, tmp_path: Path) -> None:
    """The half with the negative prompt attends to no reference: in training by its condition, in diffusers by the name
    that a pipeline gives each half."""
    reference, example = Image.new("RGB", (9, 9), "red"), text_example(0, (32, 64))
    noise, _ = noise_for((4, 8, 16), [11])
    call = {
        "prompt": example.prompt,
        "negative_prompt": NEGATIVE,
        "true_cfg_scale": 4.0,
        "height": 32,
        "width": 64,
    }
    call |= {"num_inference_steps": 2, "latents": pack(noise), "output_type": "np"}
    with attached(pipeline, model, reference, tmp_path / "ip-adapter.safetensors") as options:
        expected = torch.from_numpy(pipeline(**call, **options).images)
        found = ode_image(model, model.encode([replace(example, reference=reference)], 4.0), 2, [11])
    torch.testing.assert_close(found, expected, atol=1e-4, rtol=0)
    without = torch.from_numpy(pipeline(**call).images)
    torch.testing.assert_close(ode_image(model, model.encode([example], 4.0), 2, [11]), without, atol=1e-4, rtol=0)
    assert float((found - without).abs().max()) > 1e-2


# --- loading ---


def test_a_saved_folder_loads_to_the_same_model(pipeline: Any, model: QwenImage, tmp_path: Path) -> None:
    pipeline.save_pretrained(tmp_path)
    options: dict[str, Any] = {"path": str(tmp_path), "max_sequence_length": LENGTH}
    loaded = load_model(QwenImageModel(**options, dtype="fp32", train=TrainFull()))
    x, t, example = torch.randn(1, 4, 8, 16), torch.tensor([0.7]), random_example(1, 32, 64)
    expected = model.predict(model.network, x, t, model.encode([example], 4.0))
    torch.testing.assert_close(loaded.predict(loaded.network, x, t, loaded.encode([example], 4.0)), expected)
    assert loaded.spec == model.spec
    assert loaded.prompts is not None
    loaded.prompts.cache_and_release([loaded.spec.empty_prompt, example.prompt])
    nothing = loaded.encode([replace(example, prompt=loaded.spec.empty_prompt)], 4.0).tensors
    assert torch.equal(nothing["text"], nothing["negative_text"])
    torch.testing.assert_close(loaded.predict(loaded.network, x, t, loaded.encode([example], 4.0)), expected)
    low = load_model(QwenImageModel(**options, dtype="bf16", train=TrainLora()))
    assert {p.dtype for p in low.network.parameters()} == {torch.bfloat16}
    assert low.predict(low.network, x, t, low.encode([example], 4.0)).dtype == torch.float32


def test_the_released_network() -> None:
    with torch.device("meta"):
        network = released_networks(FAMILIES["qwen_image"].spec)["transformer"]
    assert sum(p.numel() for p in network.parameters()) == pytest.approx(20.4e9, rel=0.01)
    targets = tuple(f".{target}" for target in QwenImageModel.spec.lora_targets)
    adapted = [n for n, _ in network.named_modules() if n.endswith(targets)]
    assert len(adapted) == 60 * 12
