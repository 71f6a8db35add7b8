"""The style adapter of Stable Diffusion: Tencent's layout on diffusers' own processors."""

from __future__ import annotations

import gc
import weakref
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch
from diffusers import UNet2DConditionModel
from torch import Tensor

import retouch.adapters
from retouch.adapters.about import About
from retouch.adapters.export import export
from retouch.adapters.formats import AdapterFile, folded, read_adapter, write_bin, write_safetensors
from retouch.adapters.ip_adapter import new_adapter
from retouch.config import ConfigError
from retouch.families import FAMILIES
from retouch.families.base import TrainIpAdapter
from retouch.families.image_encoder import ImageEncoder
from retouch.families.meta import released_networks
from retouch.families.sd_inpaint.model import SdInpaint
from retouch.families.sd_inpaint.spec import SdInpaintModel
from retouch.families.tiny import tiny_pipeline
from retouch.files.model_files import tiny_path
from retouch.rollout.plan import ode_plan
from retouch.rollout.sampler import sample
from retouch.types import Example
from tests.families.conftest import random_example, with_point_posterior
from tests.test_image_encoder import picture

WIDTH = 64


@pytest.fixture
def pipeline() -> Any:
    return with_point_posterior(tiny_pipeline("sd_inpaint", seed=3))


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """An adapter of random weights in a file, trained at another scale in each block."""
    network: Any = UNet2DConditionModel.from_pretrained(tiny_path("sd_inpaint") / "unet")
    shape = new_adapter(network, "linear", WIDTH, 4).shape
    draw = torch.Generator().manual_seed(1)
    tensors = {key: 0.3 * torch.randn(size, generator=draw) for key, size in shape.tensors().items()}
    about = {"image_encoder": "tiny", "scale": [0.25 * (1 + block) for block in range(len(shape.inner))]}
    write_safetensors(tmp_path / "ip-adapter.safetensors", tensors, about)
    write_bin(tmp_path / "ip-adapter.bin", folded(AdapterFile(tensors, shape, about)).tensors)
    return tmp_path / "ip-adapter.safetensors"


def noise_of(unet: Any, reference: Tensor | None = None) -> Tensor:
    draw = torch.Generator().manual_seed(0)
    options = {} if reference is None else {"added_cond_kwargs": {"image_embeds": [reference[:, None]]}}
    return unet(
        sample=torch.randn(2, 9, 8, 16, generator=draw),
        timestep=torch.tensor([501, 1]),
        encoder_hidden_states=torch.randn(2, 24, 64, generator=draw),
        **options,
        return_dict=False,
    )[0]


@torch.no_grad()
def test_off_is_the_stock_model_and_detached_is_as_before(pipeline: Any, path: Path) -> None:
    unet = pipeline.unet
    processors, names, config = dict(unet.attn_processors), set(unet.state_dict()), dict(unet.config)
    before, vectors = noise_of(unet), torch.randn(2, WIDTH)
    fresh = new_adapter(unet, "linear", WIDTH, 4)
    assert torch.equal(noise_of(unet, vectors), before)
    fresh.detach()
    with pytest.raises(
        ConfigError, match="value_norm: given true; the attention of a UNet2DConditionModel is diffusers' own"
    ):
        retouch.adapters.load(path).attach(pipeline, value_norm=True)
    adapter = retouch.adapters.load(path).attach(pipeline)  # the refusal left nothing behind
    assert float((noise_of(unet, vectors) - before).abs().max()) > 1e-3
    adapter.set_scale(0.0)
    assert torch.equal(noise_of(unet, vectors), before)
    adapter.detach()
    assert all(unet.attn_processors[name] is p for name, p in processors.items())
    assert set(unet.state_dict()) == names and dict(unet.config) == config
    assert torch.equal(noise_of(unet), before)


@pytest.mark.parametrize("guidance", [1.0, 7.5])
@pytest.mark.parametrize("end", ["safetensors", "bin"])
def test_diffusers_own_loader_draws_the_same_image(
    pipeline: Any, path: Path, tmp_path: Path, guidance: float, end: str
) -> None:
    """Of the exported file, and of the checkpoint's .bin, which are at scale 1; both against `predict`, and against
    `attach`."""
    exported = export(
        SdInpaintModel(train=TrainIpAdapter()),
        path.parent,
        "diffusers-ip-adapter",
        tmp_path / "out",
        About("run-step-000004"),
    )
    file = exported if end == "safetensors" else path.with_suffix(".bin")
    encoder = ImageEncoder.load("tiny")
    reference, plain = picture(30, 12), random_example(0, 32, 64)
    example = Example(0, plain.prompt, plain.source, plain.mask, reference=reference)

    model = SdInpaint.from_pipeline(pipeline)
    model.image_encoder = encoder
    adapter = retouch.adapters.load(path).attach(pipeline)
    condition = model.encode([example], guidance)
    final = sample(model, pipeline.unet, ode_plan(model.schedule(3, (32, 64))), condition, [11]).final
    ours = ((model.decode(final) + 1) / 2).permute(0, 2, 3, 1).numpy()
    attached = drawn(pipeline, example, guidance, adapter.condition([reference], guided=guidance > 1))
    adapter.detach()
    without = drawn(pipeline, example, guidance, {})

    folder = str(file.parent)
    pipeline.load_ip_adapter(folder, subfolder="", weight_name=file.name, image_encoder_folder=None)
    vectors = encoder([reference])[:, None]
    both = torch.cat([torch.zeros_like(vectors), vectors]) if guidance > 1 else vectors
    theirs = drawn(pipeline, example, guidance, {"ip_adapter_image_embeds": [both]})
    assert np.abs(theirs - ours).max() <= 1e-4
    assert np.abs(theirs - attached).max() <= 1e-4
    assert np.abs(theirs - without).max() > 1e-2


def test_an_encoder_that_is_given_serves_its_call_alone(pipeline: Any, path: Path) -> None:
    """Later calls without one have the vectors of the encoder that the file names, and nothing keeps the other one."""
    adapter, reference = retouch.adapters.load(path).attach(pipeline), picture(30, 12)
    named = adapter.condition([reference])["ip_adapter_image_embeds"]
    other = ImageEncoder.load("tiny")
    for weight in other.model.parameters():
        torch.nn.init.normal_(weight, generator=torch.Generator().manual_seed(2))
    given = adapter.condition([reference], other)["ip_adapter_image_embeds"]
    assert not torch.equal(given[0], named[0])
    assert torch.equal(adapter.condition([reference])["ip_adapter_image_embeds"][0], named[0])
    gone = weakref.ref(other)
    del other
    gc.collect()
    assert gone() is None


def drawn(pipeline: Any, example: Example, guidance: float, options: dict[str, Any]) -> Any:
    with patch.object(pipeline, "check_inputs"):  # it wants multiples of 8 of every autoencoder
        return pipeline(
            prompt=example.prompt,
            image=example.source,
            mask_image=example.mask,
            height=32,
            width=64,
            num_inference_steps=3,
            guidance_scale=guidance,
            latents=torch.randn(4, 8, 16, generator=torch.Generator().manual_seed(11))[None],
            output_type="np",
            generator=torch.Generator().manual_seed(0),
            **options,
        ).images


@torch.no_grad()
def test_a_reference_that_is_not_there_is_the_vector_0(pipeline: Any, path: Path) -> None:
    model = SdInpaint.from_pipeline(pipeline)
    model.image_encoder = ImageEncoder.load("tiny")
    retouch.adapters.load(path).attach(pipeline)
    x, t = torch.randn(1, 4, 8, 16), torch.tensor([501.0])
    condition = model.encode([random_example(0, 32, 64)], 1.0)
    given = condition.tensors
    unet_input = torch.cat([x, given["mask_cells"], given["masked_latents"]], 1)
    expected = pipeline.unet(
        unet_input, t.long(), given["text"], added_cond_kwargs={"image_embeds": [torch.zeros(1, 1, WIDTH)]}
    ).sample
    torch.testing.assert_close(model.predict(pipeline.unet, x, t, condition), expected)


def test_precisions_may_differ(pipeline: Any) -> None:
    """Trained weights are fp32 in a network of bf16, without autocast."""
    unet = pipeline.unet.to(torch.bfloat16)
    adapter = new_adapter(unet, "linear", WIDTH, 4)
    adapter.load({key: torch.full_like(t, 0.01) for key, t in adapter.tensors().items()})
    assert {p.dtype for p in adapter.parameters().values()} == {torch.float32}
    draw = torch.Generator().manual_seed(0)
    out = unet(
        torch.randn(1, 9, 8, 16, generator=draw).bfloat16(),
        torch.tensor([501]),
        torch.randn(1, 24, 64, generator=draw).bfloat16(),
        added_cond_kwargs={"image_embeds": [torch.randn(1, 1, WIDTH)]},
    ).sample
    assert out.dtype == torch.bfloat16
    out.float().square().mean().backward()
    assert all(p.grad is not None for p in adapter.parameters().values())


def test_full_size() -> None:
    """Tencent's ip-adapter_sd15: 22.3 M weights, 16 cross-attentions numbered 1 to 31."""
    with torch.device("meta"):
        adapter = new_adapter(released_networks(FAMILIES["sd_inpaint"].spec)["unet"], "linear", 1024, 4)
    assert adapter.shape.numbers() == list(range(1, 32, 2))
    assert sum(adapter.shape.parameters().values()) == pytest.approx(22.3e6, rel=0.005)
    assert adapter.shape.tensors()["ip_adapter.1.to_k_ip.weight"] == (320, 768)


def test_another_number_of_tokens_is_not_exported_to_diffusers(tmp_path: Path) -> None:
    network: Any = UNet2DConditionModel.from_pretrained(tiny_path("sd_inpaint") / "unet")
    tensors = new_adapter(network, "linear", WIDTH, 5).tensors()
    write_safetensors(tmp_path / "ip-adapter.safetensors", tensors, {})
    assert read_adapter(tmp_path).shape.tokens == 5
    with pytest.raises(ConfigError, match="which reads 4 tokens; this adapter has 5"):
        export(
            SdInpaintModel(train=TrainIpAdapter()),
            tmp_path,
            "diffusers-ip-adapter",
            tmp_path / "out",
            About("run-step-000004"),
        )
