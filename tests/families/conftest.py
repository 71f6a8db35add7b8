"""Shared by the tests of families: a tiny FLUX.1-Fill with random weights and awkward constants, examples, and images
of the ODE to compare with those of diffusers' pipelines."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from diffusers.models.autoencoders.vae import DiagonalGaussianDistribution
from PIL import Image
from torch import Tensor, nn
from transformers import AutoImageProcessor

from retouch import adapters
from retouch.adapters.formats import write_safetensors
from retouch.adapters.ip_adapter import new_adapter
from retouch.families.flux_fill.model import FluxFill
from retouch.families.image_encoder import ImageEncoder
from retouch.families.tiny import TEXT_TOKENS, tiny_pipeline
from retouch.rollout.plan import ode_plan
from retouch.rollout.sampler import sample
from retouch.types import Condition, Example


def attention_of(network: nn.Module) -> set[str | None]:
    """Names in diffusers of the kernels that the attention layers of a network use; None is torch's choice."""
    processors: list[Any] = [getattr(module, "processor", None) for module in network.modules()]
    return {p._attention_backend for p in processors if hasattr(p, "_attention_backend")}


@pytest.fixture
def _torchvision_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    """transformers then prefers a backend that makes other pixels."""
    load = AutoImageProcessor.from_pretrained

    def preferring(*where: Any, backend: str | None = None, **options: Any) -> Any:
        processor = load(*where, backend="pil", **options)
        if backend is None:
            processor.resample = Image.Resampling.NEAREST
            processor.image_mean = [0.0, 0.0, 0.0]
        return processor

    monkeypatch.setattr(AutoImageProcessor, "from_pretrained", preferring)


def random_example(number: int, height: int, width: int) -> Example:
    draw = np.random.default_rng(number)
    mask = np.zeros((height, width), np.uint8)
    # an odd box: nearest-downsampling the mask would not do
    mask[5 : height - 3, 7 : width - 6] = 255
    source = Image.fromarray(draw.integers(0, 256, (height, width, 3), np.uint8))
    return Example(number, f"The text is 'W{number}'.", source, Image.fromarray(mask), metadata={"text": f"W{number}"})


def text_example(number: int, size: tuple[int, int], repeat: int = 1) -> Example:
    """Prompts of different lengths: the `number`-th has `repeat * number` more parts."""
    return Example(number, "The text is 'W'." + " Blue." * (repeat * number), size=size)


def ode_latents(model: Any, condition: Condition, steps: int, seeds: list[int]) -> Tensor:
    """Latents that the plain ODE ends with."""
    plan = ode_plan(model.schedule(steps, condition.size))
    return sample(model, model.network, plan, condition, seeds).final


def image_of_latents(model: Any, latents: Tensor) -> Tensor:
    """[B, H, W, 3] in [0, 1], as the pipelines return images."""
    return ((model.decode(latents) + 1) / 2).permute(0, 2, 3, 1)


def ode_image(model: Any, condition: Condition, steps: int, seeds: list[int]) -> Tensor:
    """Images of the plain ODE as the pipelines return them."""
    return image_of_latents(model, ode_latents(model, condition, steps, seeds))


def require_source_outside_mask(condition: Condition, latents: Tensor) -> None:
    """Latents of unmasked cells, of which there are some, are those of the source."""
    outside = condition.tensors["mask_cells"] == 0
    kept = torch.where(outside, latents - condition.tensors["source_latents"], 0.0)
    assert float(kept.abs().max()) <= 1e-5 and bool(outside.any())


@contextmanager
def recorded_calls(network: Any) -> Iterator[list[tuple[Tensor, Tensor, Tensor]]]:
    """`hidden_states`, `timestep` and output of each call of a transformer in the block."""
    calls: list[tuple[Tensor, Tensor, Tensor]] = []
    hook = network.register_forward_hook(
        lambda _, a, k, out: calls.append((k["hidden_states"], k["timestep"], out[0])), with_kwargs=True
    )
    yield calls
    hook.remove()


@pytest.fixture
def point_posterior(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every sample of an autoencoder's posterior is its mode, and takes no number from the generator."""
    monkeypatch.setattr(DiagonalGaussianDistribution, "sample", lambda self, generator=None: self.mode())


@pytest.fixture(scope="session")
def pipeline() -> Any:
    made = with_point_posterior(tiny_pipeline("flux_fill", seed=3))
    made.vae.register_to_config(shift_factor=0.3, scaling_factor=0.7)
    return made


def with_point_posterior(pipeline: Any) -> Any:
    """Every sample of the autoencoder's posterior is its mode, so that the pipeline's masked image is ours."""
    channels = pipeline.vae.config.latent_channels
    with torch.no_grad():
        pipeline.vae.encoder.conv_out.weight[channels:] = 0
        pipeline.vae.encoder.conv_out.bias[channels:] = -30
    pipeline.set_progress_bar_config(disable=True)
    return pipeline


@pytest.fixture(scope="session")
def model(pipeline: Any) -> Any:
    return FluxFill.from_pipeline(pipeline)


@pytest.fixture(scope="session")
def tiny_folder(pipeline: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The pipeline on disk, in the hub's layout."""
    folder = tmp_path_factory.mktemp("tiny")
    pipeline.save_pretrained(folder)
    return folder


__all__ = ["TEXT_TOKENS"]


@contextmanager
def attached(pipeline: Any, model: Any, reference: Image.Image, file: Path) -> Iterator[dict[str, Any]]:
    """A random style adapter in a stock pipeline and in the family's model of it -> arguments of the pipeline's
    call."""
    encoder = model.image_encoder = ImageEncoder.load("tiny")
    tensors = new_adapter(tiny_pipeline(model.spec.family).transformer, "mlp", encoder.width, 4).tensors()
    write_safetensors(file, {n: torch.randn_like(t) / 4 for n, t in tensors.items()}, {"image_encoder": "tiny"})
    adapter = adapters.load(file).attach(pipeline)
    try:
        yield adapter.condition([reference])
    finally:
        model.image_encoder = None
        adapter.detach()
