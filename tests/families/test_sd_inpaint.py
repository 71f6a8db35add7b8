"""Stable Diffusion inpainting against diffusers' own pipeline and scheduler on the same weights."""

from __future__ import annotations

from itertools import product
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch
from diffusers import (
    AutoencoderKL,
    DDIMScheduler,
    EulerDiscreteScheduler,
    PNDMScheduler,
    StableDiffusionInpaintPipeline,
    UNet2DConditionModel,
)
from PIL import Image

from retouch.core import steps
from retouch.families.base import TrainFull, TrainLora
from retouch.families.loading import ModelFilesError, load_model
from retouch.families.meta import released_networks
from retouch.families.sd_inpaint.model import (
    SdInpaint,
)
from retouch.families.sd_inpaint.spec import SdInpaintModel
from retouch.families.tiny import tiny_pipeline
from retouch.families.unet import tiny as unet_tiny
from retouch.rollout.plan import ode_plan
from retouch.rollout.sampler import sample
from retouch.types import Condition, Example
from tests.families.conftest import random_example, with_point_posterior
from tests.families.facts import Facts
from tests.selection import cells

FACTS = Facts(
    parameters=0.8595e9,
    lora_modules=16 * 8,  # self- and cross-attention of 16 blocks
    guidance_scale=7.5,
    hub_id="stable-diffusion-v1-5/stable-diffusion-inpainting",
    outside_blocks=0.69,  # convolutions
)

SIZES = [(32, 32), (32, 64), (48, 24), (36, 20)]
"""The last has a latent grid of odd sides, which the U-Net's levels cannot halve."""

GUIDANCE = [1.0, 7.5]


@pytest.fixture(scope="module")
def pipeline() -> Any:
    """`StableDiffusionInpaintPipeline` with awkward constants."""
    made = with_point_posterior(tiny_pipeline("sd_inpaint", seed=3))
    made.vae.register_to_config(scaling_factor=0.7)
    return made


@pytest.fixture(scope="module")
def model(pipeline: Any) -> SdInpaint:
    return SdInpaint.from_pipeline(pipeline)


@pytest.fixture(scope="module")
def tiny_folder(pipeline: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The pipeline on disk, in the hub's layout."""
    folder = tmp_path_factory.mktemp("tiny")
    pipeline.save_pretrained(folder)
    return folder


# --- against the pipeline ---


@pytest.mark.parametrize("guidance", GUIDANCE)
@pytest.mark.parametrize(("height", "width"), SIZES)
def test_predict_equals_the_pipelines_call(
    pipeline: Any, model: SdInpaint, height: int, width: int, guidance: float
) -> None:
    """Every input of the U-Net, caught inside the pipeline, and its output after guidance."""
    examples = [random_example(i, height, width) for i in range(2)]
    condition = model.encode(examples, guidance)
    schedule = model.schedule(3, (height, width))
    noise = torch.randn(2, 4, height // 4, width // 4, generator=torch.Generator().manual_seed(0))
    calls: list[tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]] = []

    def record(module: Any, args: Any, kwargs: dict[str, Any], output: Any) -> None:
        x, t = args if args else (kwargs["sample"], kwargs["timestep"])
        calls.append((x, t, kwargs["encoder_hidden_states"], output[0]))

    hook = pipeline.unet.register_forward_hook(record, with_kwargs=True)
    run_pipeline(pipeline, examples, noise, 3, guidance)
    theirs = calls.copy()
    calls.clear()
    assert len(theirs) == 3
    for i, (channels, timestep, text, output) in enumerate(theirs):
        found = model.predict(pipeline.unet, channels[:2, :4], schedule.times[i].expand(2), condition)
        mine = calls[-1]
        torch.testing.assert_close(mine[0], channels, atol=1e-5, rtol=1e-5, msg=f"step {i}: channels")
        torch.testing.assert_close(mine[2], text, atol=1e-5, rtol=1e-5, msg=f"step {i}: text")
        torch.testing.assert_close(mine[3], output, atol=1e-4, rtol=1e-4)
        assert mine[1].dtype == torch.int64
        assert torch.equal(mine[1], timestep.expand(len(channels)))
        if guidance > 1:
            without, with_text = output.chunk(2)
            output = without + guidance * (with_text - without)
        torch.testing.assert_close(found, output, atol=1e-4, rtol=1e-4)
    hook.remove()


@pytest.mark.parametrize("guidance", GUIDANCE)
@pytest.mark.parametrize(("height", "width"), SIZES)
def test_ode_image_equals_the_pipelines_image(
    pipeline: Any, model: SdInpaint, height: int, width: int, guidance: float
) -> None:
    examples = [random_example(i, height, width) for i in range(2)]
    seeds = [11, 12]
    noise = torch.stack(
        [torch.randn(4, height // 4, width // 4, generator=torch.Generator().manual_seed(s)) for s in seeds]
    )
    expected = run_pipeline(pipeline, examples, noise, 4, guidance)
    condition = model.encode(examples, guidance)
    plan = ode_plan(model.schedule(4, (height, width)))
    final = sample(model, pipeline.unet, plan, condition, seeds).final
    found = (model.decode(final) + 1) / 2
    torch.testing.assert_close(found.permute(0, 2, 3, 1), torch.from_numpy(expected), atol=1e-4, rtol=0)


def run_pipeline(pipeline: Any, examples: list[Any], noise: torch.Tensor, steps: int, guidance: float) -> Any:
    height, width = noise.shape[2] * 4, noise.shape[3] * 4
    with patch.object(pipeline, "check_inputs"):  # it wants multiples of 8 of every autoencoder
        return pipeline(
            prompt=[e.prompt for e in examples],
            image=torch.stack([torch.from_numpy(np.asarray(e.source)).permute(2, 0, 1) / 255.0 for e in examples]),
            mask_image=torch.stack([torch.from_numpy(np.asarray(e.mask))[None] / 255.0 for e in examples]),
            height=height,
            width=width,
            num_inference_steps=steps,
            guidance_scale=guidance,
            latents=noise,
            output_type="np",
            generator=torch.Generator().manual_seed(0),
        ).images


def test_the_mask_is_taken_at_the_corner_of_each_cell(model: SdInpaint) -> None:
    example = random_example(0, 32, 64)
    cells = model.encode([example], 1.0).tensors["mask_cells"]
    assert cells.shape == (1, 1, 8, 16)
    assert np.array_equal(cells[0, 0].numpy(), (np.asarray(example.mask)[::4, ::4] >= 128).astype(np.float32))


def test_what_is_masked_cannot_be_seen(model: SdInpaint) -> None:
    example = random_example(0, 32, 64)
    pixels = np.asarray(example.source).copy()
    pixels[np.asarray(example.mask) >= 128] = 77
    other = Example(0, example.prompt, Image.fromarray(pixels), example.mask)
    first, second = (model.encode([e], 1.0).tensors for e in (example, other))
    assert torch.equal(first["masked_latents"], second["masked_latents"])


def test_latents_are_scaled_and_never_shifted(model: SdInpaint) -> None:
    """As the pipeline does it, whatever the autoencoder's config says."""
    images = torch.rand(1, 3, 32, 32) * 2 - 1
    raw = model.vae.encode(images).latent_dist.mode()
    torch.testing.assert_close(model.encode_images(images), raw * 0.7)
    torch.testing.assert_close(model.decode(raw * 0.7), model.vae.decode(raw).sample.clamp(-1, 1), atol=1e-5, rtol=1e-5)


# --- guidance ---


class Network(torch.nn.Module):
    """Stands for a U-Net: its noise is the mean of the text, and it remembers what it was given."""

    def forward(
        self, sample: Any, timestep: Any, encoder_hidden_states: Any, added_cond_kwargs: Any, return_dict: bool
    ) -> Any:
        assert added_cond_kwargs is None  # no style adapter
        self.given = (sample, timestep, encoder_hidden_states)
        return (encoder_hidden_states.mean((1, 2)).view(-1, 1, 1, 1).expand(len(sample), 4, *sample.shape[2:]),)


def test_rows_without_text_come_first_and_each_row_has_its_scale(model: SdInpaint) -> None:
    condition = model.encode([random_example(i, 32, 64) for i in range(2)], 3.0)
    condition.tensors["guidance"][1] = 5.0
    condition.tensors["text"].copy_(torch.tensor([2.0, 3.0]).view(2, 1, 1).expand_as(condition.tensors["text"]))
    tensors = {**condition.tensors, "negative_text": torch.ones_like(condition.tensors["text"])}
    network = Network()
    x, t = torch.randn(2, 4, 8, 16), torch.tensor([501.0, 1.0])
    noise = model.predict(network, x, t, Condition(tensors, condition.mask, condition.size))
    channels, timestep, text = network.given
    assert torch.equal(channels[:2], channels[2:]) and torch.equal(channels[:2, :4], x)
    assert timestep.tolist() == [501, 1, 501, 1]
    assert [float(row[0, 0]) for row in text] == [1.0, 1.0, 2.0, 3.0]
    assert noise[:, 0, 0, 0].tolist() == pytest.approx([1 + 3 * (2 - 1), 1 + 5 * (3 - 1)])


@pytest.mark.parametrize("guidance", [0.0, 1.0])
def test_without_guidance_there_is_one_forward_of_the_rows(model: SdInpaint, guidance: float) -> None:
    condition = model.encode([random_example(i, 32, 64) for i in range(2)], guidance)
    assert "negative_text" not in condition.tensors
    network = Network()
    model.predict(network, torch.randn(2, 4, 8, 16), torch.tensor([501.0, 1.0]), condition)
    assert len(network.given[0]) == 2


def test_the_negative_text_is_that_of_the_empty_prompt(model: SdInpaint) -> None:
    examples = [random_example(i, 32, 64) for i in range(2)]
    negative = model.encode(examples, 7.5).tensors["negative_text"]
    assert torch.equal(negative, model.text.encode(["", ""])["text"])
    assert torch.equal(negative, model.encode(examples, 2.0).select([1, 0]).tensors["negative_text"])


def test_condition_depends_on_its_example_alone(model: SdInpaint, pipeline: Any) -> None:
    examples = [random_example(i, 32, 64) for i in range(3)]
    whole = model.encode(examples, 7.5)
    backwards = SdInpaint.from_pipeline(pipeline).encode(examples[::-1], 7.5).select([2, 1, 0])
    assert torch.equal(whole.tensors["text"], backwards.tensors["text"])


def test_errors_say_what_to_do(model: SdInpaint) -> None:
    example = random_example(0, 32, 64)
    with pytest.raises(ValueError, match="multiples of 4"):
        model.encode([random_example(0, 34, 64)], 1.0)
    with pytest.raises(ValueError, match="no source image; sd_inpaint repaints one"):
        model.encode([Example(0, "", None, example.mask)], 1.0)
    with pytest.raises(ValueError, match="no mask; sd_inpaint repaints inside one"):
        model.encode([Example(0, "", example.source)], 1.0)


# --- the noise schedule ---

SD = {"beta_start": 0.00085, "beta_end": 0.012, "beta_schedule": "scaled_linear"}

SCHEDULERS = [
    PNDMScheduler(**SD, skip_prk_steps=True, steps_offset=1),
    DDIMScheduler(**SD, clip_sample=False, set_alpha_to_one=False, steps_offset=1),
    DDIMScheduler(beta_start=0.001, beta_end=0.02, clip_sample=False, steps_offset=1, num_train_timesteps=400),
    EulerDiscreteScheduler(**SD, timestep_spacing="leading", steps_offset=1),
]


@pytest.mark.parametrize("scheduler", SCHEDULERS, ids=lambda s: type(s).__name__)
@pytest.mark.parametrize("num_steps", [1, 4, 7, 50])
def test_schedule_is_that_of_the_ddim_scheduler(pipeline: Any, scheduler: Any, num_steps: int) -> None:
    schedule = with_scheduler(pipeline, scheduler).schedule(num_steps, (32, 64))
    ddim: Any = DDIMScheduler.from_config(scheduler.config)
    ddim.set_timesteps(num_steps)
    assert schedule.prediction == "epsilon"
    assert schedule.times.tolist() == [*ddim.timesteps.tolist(), -1]
    expected = torch.stack([*ddim.alphas_cumprod[ddim.timesteps], torch.as_tensor(ddim.final_alpha_cumprod)])
    torch.testing.assert_close(schedule.level(schedule.times), expected, atol=0, rtol=0)


def test_the_offset_is_the_pipelines(pipeline: Any) -> None:
    """It takes 1 where an old config says 0."""
    scheduler = DDIMScheduler(**SD, clip_sample=False, set_alpha_to_one=False, steps_offset=0)
    ours = with_scheduler(pipeline, scheduler).schedule(4, (32, 64))
    theirs = StableDiffusionInpaintPipeline(
        **{**pipeline.components, "scheduler": scheduler}, requires_safety_checker=False
    ).scheduler
    theirs.set_timesteps(4)
    assert ours.times[:-1].tolist() == theirs.timesteps.tolist()


@pytest.mark.parametrize("eta", [0.0, 0.5, 1.0])
@pytest.mark.parametrize("scheduler", SCHEDULERS[1:3], ids=["to alpha_0", "to 1"])
def test_ddim_steps_are_those_of_the_scheduler(pipeline: Any, scheduler: Any, eta: float) -> None:
    """A whole trajectory, with the same noise in every step."""
    draw = torch.Generator().manual_seed(0)
    num_steps = 5
    schedule = with_scheduler(pipeline, scheduler).schedule(num_steps, (32, 64))
    scheduler.set_timesteps(num_steps)
    x = torch.randn(2, 4, 8, 16, generator=draw, dtype=torch.float64)
    levels = torch.cat([schedule.alpha_bars, torch.tensor([schedule.final_alpha_bar])])[schedule.times.long()]
    for i, timestep in enumerate(scheduler.timesteps):
        epsilon, fresh = (torch.randn(x.shape, generator=draw, dtype=torch.float64) for _ in range(2))
        noise = {"variance_noise": fresh} if eta else {}
        expected = scheduler.step(epsilon, timestep, x, eta=eta, **noise).prev_sample
        mean, std = steps.ddim(x, epsilon, levels[i], levels[i + 1], eta)
        torch.testing.assert_close(mean + std * fresh, expected, atol=1e-5, rtol=1e-5)
        x = expected


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"prediction_type": "v_prediction"}, "prediction_type 'v_prediction'.*'epsilon'"),
        ({"timestep_spacing": "trailing"}, "timestep_spacing 'trailing'.*'leading'"),
        ({"rescale_betas_zero_snr": True}, "rescale_betas_zero_snr True.*False"),
    ],
)
def test_other_schedulers_are_refused(pipeline: Any, change: dict[str, Any], message: str) -> None:
    with pytest.raises(ModelFilesError, match=message):
        with_scheduler(pipeline, DDIMScheduler(**SD, **change))


def test_the_network_of_a_consistency_model_is_refused(pipeline: Any) -> None:
    """Its pipeline gives it the guidance scale, without which it predicts something else and raises nothing."""
    unet = unet_tiny.unet((8, 8), 2, 8, time_cond_proj_dim=8)
    with pytest.raises(ModelFilesError, match="has time_cond_proj_dim"):
        SdInpaint(unet, pipeline.vae, None, pipeline.scheduler)


def with_scheduler(pipeline: Any, scheduler: Any) -> SdInpaint:
    text = SdInpaint.from_pipeline(pipeline).text
    return SdInpaint(pipeline.unet, pipeline.vae, text, scheduler)


# --- loading ---


def test_a_saved_folder_loads_to_the_same_model(tiny_folder: Path, model: SdInpaint) -> None:
    loaded = load_model(SdInpaintModel(path=str(tiny_folder), dtype="fp32", train=TrainFull()))
    example = random_example(1, 32, 64)
    x, t = torch.randn(1, 4, 8, 16), torch.tensor([701.0])
    torch.testing.assert_close(
        loaded.predict(loaded.network, x, t, loaded.encode([example], 7.5)),
        model.predict(model.network, x, t, model.encode([example], 7.5)),
    )
    assert loaded.spec == model.spec
    assert loaded.spec.downsampling == loaded.spec.size_multiple == 4
    expected = model.schedule(8, (32, 64))
    assert torch.equal(loaded.schedule(8, (32, 64)).level(expected.times), expected.level(expected.times))


@pytest.mark.parametrize(("guidance", "dtype"), cells(product(GUIDANCE, ["bf16", "fp16"]), 1))
def test_frozen_weights_take_the_dtype_and_trained_ones_stay_fp32(
    tiny_folder: Path, dtype: Any, guidance: float
) -> None:
    lora = load_model(SdInpaintModel(path=str(tiny_folder), dtype=dtype, train=TrainLora()))
    full = load_model(SdInpaintModel(path=str(tiny_folder), dtype=dtype, train=TrainFull()))
    assert {p.dtype for p in lora.network.parameters()} == {{"bf16": torch.bfloat16, "fp16": torch.float16}[dtype]}
    assert {p.dtype for p in full.network.parameters()} == {torch.float32}
    x, t = torch.randn(1, 4, 8, 16), torch.tensor([501.0])
    low, high = (m.predict(m.network, x, t, m.encode([random_example(0, 32, 64)], guidance)) for m in (lora, full))
    assert low.dtype == high.dtype == torch.float32
    assert float((low - high).abs().max()) < 0.1 * float(high.abs().max())


def test_a_pndm_folder_loads(tiny_folder: Path, pipeline: Any, tmp_path: Path) -> None:
    """Released models come with that scheduler."""
    parts = {**pipeline.components, "scheduler": SCHEDULERS[0]}
    StableDiffusionInpaintPipeline(**parts, requires_safety_checker=False).save_pretrained(tmp_path)
    loaded = load_model(SdInpaintModel(path=str(tmp_path)))
    expected = load_model(SdInpaintModel(path=str(tiny_folder))).schedule(8, (32, 64))
    found = loaded.schedule(8, (32, 64))
    assert torch.equal(found.times, expected.times)
    assert torch.equal(found.level(found.times), expected.level(expected.times))


def test_another_family_is_refused(tmp_path: Path) -> None:
    (tmp_path / "model_index.json").write_text('{"_class_name": "FluxFillPipeline"}', encoding="utf-8")
    with pytest.raises(ModelFilesError, match=r"is a FluxFillPipeline.*needs a StableDiffusionInpaintPipeline"):
        load_model(SdInpaintModel(path=str(tmp_path)))


def test_text_to_image_weights_are_refused(pipeline: Any, tmp_path: Path) -> None:
    config = {**pipeline.unet.config, "in_channels": 4}
    parts = {**pipeline.components, "unet": UNet2DConditionModel.from_config(config)}
    StableDiffusionInpaintPipeline(**parts, requires_safety_checker=False).save_pretrained(tmp_path)
    with pytest.raises(
        ModelFilesError,
        match=r"takes 4 channels.*needs 9.*cannot inpaint; use stable-diffusion-v1-5/stable-diffusion-inpainting",
    ):
        load_model(SdInpaintModel(path=str(tmp_path)))


def test_a_folder_without_weights_is_refused(tmp_path: Path) -> None:
    (tmp_path / "model_index.json").write_text("{}", encoding="utf-8")
    with pytest.raises(ModelFilesError, match="cannot load unet/"):
        load_model(SdInpaintModel(path=str(tmp_path)))


def test_released_prompts_keep_the_empty_one(tiny_folder: Path) -> None:
    model = load_model(SdInpaintModel(path=str(tiny_folder), dtype="fp32"))
    first, second = random_example(0, 32, 64), random_example(1, 32, 64)
    before = load_model(SdInpaintModel(path=str(tiny_folder), dtype="fp32")).encode([first], 7.5).tensors
    assert model.prompts is not None
    model.prompts.cache_and_release(["", first.prompt])
    after = model.encode([first], 7.5).tensors
    assert torch.equal(after["text"], before["text"])
    assert torch.equal(after["negative_text"], before["negative_text"])
    with pytest.raises(RuntimeError, match="free_text_encoders"):
        model.encode([second], 7.5)


# --- sizes ---


def test_the_released_network() -> None:
    with torch.device("meta"):
        network = released_networks(SdInpaintModel.spec)["unet"]
    assert sum(p.numel() for p in network.parameters()) == pytest.approx(859.5e6, rel=1e-4)
    targets = tuple(f".{target}" for target in SdInpaintModel.spec.lora_targets)
    adapted = [n for n, _ in network.named_modules() if n.endswith(targets)]
    assert len(adapted) == 16 * 2 * 4  # transformer blocks, self- and cross-attention, projections


def test_the_released_sizes() -> None:
    """8 pixels a cell, 4 channels, 9 into the U-Net: from the configs of the released components."""
    with torch.device("meta"):
        network = released_networks(SdInpaintModel.spec)["unet"]
        vae = AutoencoderKL(
            down_block_types=("DownEncoderBlock2D",) * 4,  # type: ignore[arg-type]
            up_block_types=("UpDecoderBlock2D",) * 4,  # type: ignore[arg-type]
            block_out_channels=(128, 256, 512, 512),  # type: ignore[arg-type]
        )
    text = SdInpaint.from_pipeline(tiny_pipeline("sd_inpaint")).text
    model = SdInpaint(network, vae, text, SCHEDULERS[0], "meta")
    assert (model.spec.downsampling, model.spec.size_multiple, model.spec.latent_channels) == (8, 8, 4)
    assert model.spec.guidance_scale == 7.5
