"""Autoencoders that take less memory make the same pictures."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from retouch.config import parse_run
from retouch.models import load_model
from retouch.models.vae import save_memory
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


class Moved:
    """Where something with the methods of an autoencoder was, at each of its uses."""

    def __init__(self) -> None:
        self.place = "cpu"
        self.seen: list[str] = []

    def to(self, device: Any) -> None:
        self.place = str(device)

    def encode(self, x: int) -> int:
        self.seen.append(self.place)
        return x + 1

    def decode(self, x: int) -> int:
        self.seen.append(self.place)
        if x < 0:
            raise ValueError("no latents")
        return x + 2


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
    save_memory(vae, config, torch.device("cuda"))
    assert vae.place == "cpu"
    assert (vae.encode(1), vae.decode(1), vae.seen, vae.place) == (2, 3, ["cuda", "cuda"], "cpu")
    with pytest.raises(ValueError):
        vae.decode(-1)
    assert vae.place == "cpu"
    for a, b in zip(through(load("flux_fill"), 32), through(load("flux_fill", offload_vae=True), 32), strict=True):
        assert torch.equal(a, b)
