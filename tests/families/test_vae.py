"""Autoencoders that take less memory, or less time, make the same pictures."""

from __future__ import annotations

from typing import Any, Self

import pytest
import torch
from diffusers import AutoencoderKL, AutoencoderKLQwenImage
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from retouch.config import parse_run
from retouch.families.loading import load_model
from retouch.families.meta import on_meta, to_run_without_data, without_data
from retouch.families.vae import (
    Autoencoder,
    FrameConv3d,
    frame_by_frame,
    gradient_bytes,
    single_frames,
)
from retouch.observe.live_bytes import LiveBytes
from retouch.rollout.sampler import broken_rows
from tests.tiny_models import tiny_model

FAMILIES = ("flux_fill", "sd_inpaint", "qwen_image", "qwen_image_edit")


def load(family: str, **options: Any) -> Any:
    section = {"family": family, "path": tiny_model(family), "dtype": "fp32", **options}
    data = {"format": "self_bench", "path": "nowhere", "resolution": 64}
    rewards: dict[str, Any] = {"preservation": {}}
    run = parse_run({"name": "t", "model": section, "data": data, "rewards": rewards, "algorithm": {"name": "grpo"}})
    return load_model(run.model)


def through(model: Any, side: int) -> tuple[Tensor, Tensor]:
    """Latents of three pictures, and pictures of three latents."""
    draw = torch.Generator().manual_seed(0)
    pixels = torch.rand(3, 3, side, side, generator=draw) * 2 - 1
    cells = side // model.spec.downsampling
    latents = torch.randn(3, model.spec.latent_channels, cells, cells, generator=draw)
    return model.encode_images(pixels), model.decode(latents)


@pytest.mark.parametrize("mode", ["one", "tiles"])
@pytest.mark.parametrize("family", FAMILIES)
def test_a_picture_at_a_time_is_the_same_picture(family: str, mode: str) -> None:
    """Pictures of this size are one tile."""
    together, apart = load(family), load(family, vae_batch=mode)
    assert not together.vae.use_slicing and apart.vae.use_slicing
    assert (apart.vae.use_tiling, together.vae.use_tiling) == (mode == "tiles", False)
    calls: list[int] = []
    apart.vae.decoder.register_forward_pre_hook(lambda _, given: calls.append(len(given[0])))
    for a, b in zip(through(together, 32), through(apart, 32), strict=True):
        torch.testing.assert_close(a, b, atol=1e-5, rtol=0)
    assert calls == [1, 1, 1]


@pytest.mark.parametrize("family", ["flux_fill", "flux2_klein", "qwen_image", "qwen_image_21"])
def test_an_image_with_inf_is_broken_and_not_white(family: str) -> None:
    """Of each class of autoencoders. diffusers clamps those of Qwen-Image itself."""
    model = load(family)
    model.vae.decoder.register_forward_hook(
        lambda *given: given[2].index_put((torch.tensor(1),), torch.tensor(torch.inf))
    )
    cells = 32 // model.spec.downsampling
    decoded = model.decode(torch.zeros(3, model.spec.latent_channels, cells, cells))
    assert broken_rows(decoded) == [1] and float(decoded[::2].abs().max()) <= 1


class Moved(nn.Module):
    """Where something with the methods of an autoencoder was, at each of its uses."""

    def __init__(self) -> None:
        super().__init__()
        self.place, self.decoder = "cpu", nn.Identity()
        self.seen: list[str] = []

    def to(self, device: Any) -> Self:  # type: ignore[override]
        self.place = str(device)
        return self

    def encode(self, x: Tensor) -> Tensor:
        self.seen.append(self.place)
        return x + 1

    def decode(self, x: Tensor) -> Tensor:
        self.seen.append(self.place)
        if x < 0:
            raise ValueError("no latents")
        return x + 2


class MovedAutoencoder(Autoencoder):
    """Without networks: what `Moved` gives is the result."""

    def _encode(self, images: Tensor) -> Tensor:
        return self.vae.encode(images)

    def _decode(self, latents: Tensor) -> Tensor:
        return self.vae.decode(latents)


def test_an_offloaded_autoencoder_is_on_the_device_while_it_is_used() -> None:
    config = parse_run(
        {
            "name": "t",
            "model": {"path": "tiny", "offload_vae": True},
            "data": {"format": "self_bench", "path": "nowhere", "resolution": 64},
            "rewards": {"preservation": {}},
            "algorithm": {"name": "grpo"},
        }
    ).model
    vae = Moved()
    vae.to("cuda")
    used: Any = MovedAutoencoder(vae, "cuda", config.vae_batch, offload=config.offload_vae)
    assert vae.place == "cpu"
    zero, one = torch.zeros(1, 1), torch.ones(1, 1)
    assert (used.encode(zero), used.decode(zero), vae.seen, vae.place) == (one, one, ["cuda", "cuda"], "cpu")
    with pytest.raises(ValueError):
        used.decode(one * -5)
    assert vae.place == "cpu"
    for a, b in zip(through(load("flux_fill"), 32), through(load("flux_fill", offload_vae=True), 32), strict=True):
        assert torch.equal(a, b)


def video_autoencoder() -> AutoencoderKLQwenImage:
    torch.manual_seed(0)
    made = AutoencoderKLQwenImage(
        base_dim=8, z_dim=4, dim_mult=[1, 2, 2], num_res_blocks=1, temperal_downsample=[False, True]
    )
    return made.eval().requires_grad_(False)


@pytest.mark.parametrize("frames", [1, 5])
def test_a_frame_without_frames_before_it_is_the_same_picture(frames: int) -> None:
    """Of a video, too, whose later frames see those before them. In fp64: rounding differs between processors."""
    pixels = torch.rand(2, 3, frames, 16, 24, generator=torch.Generator().manual_seed(1)).double() * 2 - 1
    stock, ours = video_autoencoder().double(), video_autoencoder().double()
    frame_by_frame(ours)
    expected, found = (vae.encode(pixels).latent_dist.mode() for vae in (stock, ours))
    torch.testing.assert_close(found, expected, atol=1e-12, rtol=1e-12)
    torch.testing.assert_close(ours.decode(expected).sample, stock.decode(expected).sample, atol=1e-12, rtol=1e-12)
    assert ours.state_dict().keys() == stock.state_dict().keys()


def test_frames_that_are_not_there_are_not_computed_with() -> None:
    """Kernels are 3 x 3 x 3 but for a few of 1, and two-dimensional ones behind them."""

    def work(vae: AutoencoderKLQwenImage) -> int:
        with FlopCounterMode(display=False) as counter:
            vae.decode(torch.zeros(1, 4, 1, 4, 4))
        return counter.get_total_flops()

    stock, ours = video_autoencoder(), video_autoencoder()
    frame_by_frame(ours)
    assert work(ours) < 0.45 * work(stock)


@pytest.mark.parametrize("family", ["qwen_image", "qwen_image_21"])
def test_an_image_leaves_nothing_for_a_next_frame(family: str) -> None:
    """The bits of diffusers, which copies the input of every convolution, and holds the copies until the end."""
    vae = load(family).vae
    side = vae.spatial_compression_ratio * 2
    pixels = (
        torch.rand(2, vae.encoder.conv_in.in_channels, 1, side, side, generator=torch.Generator().manual_seed(1)) * 2
        - 1
    )
    with torch.no_grad():
        with LiveBytes() as encoding:
            latents = vae.encode(pixels).latent_dist.mode()
        with LiveBytes() as decoding:
            images = vae.decode(latents).sample
        with single_frames(vae), LiveBytes() as encoding_alone:
            assert torch.equal(vae.encode(pixels).latent_dist.mode(), latents)
        with single_frames(vae), LiveBytes() as decoding_alone:
            assert torch.equal(vae.decode(latents).sample, images)
    assert encoding_alone.peak < 0.8 * encoding.peak
    assert decoding_alone.peak < 0.8 * decoding.peak
    assert torch.equal(vae.decode(latents).sample, images)  # a video still has its frames


def test_bytes_of_a_decode_of_qwen_image() -> None:
    """The numbers of docs/speed.md, of the released autoencoder."""
    vae, mode = on_meta(lambda: AutoencoderKLQwenImage()), without_data()
    to_run_without_data(vae, mode, lambda weight: torch.bfloat16)
    frame_by_frame(vae)
    with mode, torch.no_grad():
        latents = torch.empty(1, 16, 1, 128, 128, dtype=torch.bfloat16)
        with LiveBytes() as with_copies:
            vae.decode(latents)
        with single_frames(vae), LiveBytes() as without:
            vae.decode(latents)
    assert (round(without.peak / 2**30, 1), round(with_copies.peak / 2**30, 1)) == (1.3, 3.2)


@pytest.mark.parametrize("family", ["qwen_image", "qwen_image_edit"])
def test_qwen_models_take_pictures_as_pictures(family: str) -> None:
    convolutions = [m for m in load(family).vae.modules() if isinstance(m, torch.nn.Conv3d)]
    assert convolutions and all(isinstance(m, FrameConv3d) for m in convolutions)


@pytest.mark.parametrize("family", ["flux_fill", "qwen_image"])
def test_the_gradient_by_latents_of_another_device_is_on_that_of_the_autoencoder(family: str) -> None:
    """DiffusionNFT keeps the latents of an epoch on the CPU. Nothing can be copied from meta."""
    model = load(family)
    model.autoencoder.device = torch.device("meta")
    model.vae.to("meta")
    latents = torch.randn(1, model.spec.latent_channels, 4, 4)
    gradient = model.latent_gradient(latents, torch.ones_like)
    assert (gradient.device.type, gradient.shape, gradient.dtype) == ("meta", latents.shape, torch.float32)


@pytest.mark.parametrize(
    ("side", "checkpointing", "gib"), [(512, False, 2.8), (512, True, 1.2), (1024, False, 11.4), (1024, True, 5.0)]
)
def test_activations_of_a_decode_with_gradient_of_flux(side: int, checkpointing: bool, gib: float) -> None:
    """The numbers of docs/algorithms.md, of the published config."""
    up: Any = ("UpDecoderBlock2D",) * 4
    down: Any = ("DownEncoderBlock2D",) * 4
    widths: Any = (128, 256, 512, 512)
    vae = on_meta(
        lambda: AutoencoderKL(
            3, 3, down, up, widths, 2, latent_channels=16, use_quant_conv=False, use_post_quant_conv=False
        )
    )
    mode, autoencoder = without_data(), Autoencoder(vae.requires_grad_(False), "meta")
    autoencoder.device = torch.device("cpu")
    to_run_without_data(vae, mode, lambda _: torch.bfloat16)
    with mode:
        latents = torch.empty(1, 16, side // 8, side // 8)
        counted = gradient_bytes(autoencoder, latents)[checkpointing]
    assert round(counted / 2**30, 1) == gib
