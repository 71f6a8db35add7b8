"""What waits for its turn waits in host memory: the trajectories of an epoch, and no text encoder beside a network."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from retouch.config import ConfigError
from retouch.data.sampler import Slot
from retouch.engine import Engine
from retouch.families import text
from retouch.families.text import TextEncoders
from retouch.rewards.table import Scores
from retouch.training import experience
from retouch.training.build import build
from retouch.training.experience import Experience
from retouch.types import Trajectory

from .runs import Config, Use, brightness, train

pytestmark = pytest.mark.usefixtures("bare", "shallow")


class OnDevice(Tensor):
    """A tensor of another device, as far as `cpu` is concerned."""

    def cpu(self, memory_format: Any = torch.preserve_format) -> Tensor:
        del memory_format
        return self.as_subclass(Tensor)


@pytest.mark.parametrize("name", ["grpo", "dpo", "nft", "reward_gradient"])
def test_trajectories_of_an_epoch_wait_on_the_cpu(
    name: str, config: Config, scripted: Use, monkeypatch: pytest.MonkeyPatch
) -> None:
    scripted(brightness)
    real, kept = experience.sample, list[Experience]()

    def sample(*rest: Any, **options: Any) -> Trajectory:
        made = real(*rest, **options)
        moved = {n: t.as_subclass(OnDevice) for n, t in vars(made).items() if isinstance(t, Tensor) and n != "times"}
        return replace(made, **moved)

    def watched(*rest: Any) -> tuple[Experience, Scores]:
        result = roll_out(*rest)
        kept.append(result[0])
        return result

    roll_out = experience.roll_out
    monkeypatch.setattr(experience, "sample", sample)
    monkeypatch.setattr(experience, "roll_out", watched)
    ode = {} if name == "grpo" else {"rollout__window": None, "rollout__noise_level": None}
    guidance = {"rollout__guidance_scale": 1.0} if name == "reward_gradient" else {}
    train(config(algorithm={"name": name}, training__max_steps=1, **ode, **guidance))
    assert kept
    tensors = [t for one in kept for t in vars(one).values()]
    assert not any(isinstance(t, OnDevice) for t in tensors)


def test_rows_without_numbers_are_zeros_and_the_sampled_tensors_stay() -> None:
    latents = torch.full((2, 1, 3), torch.nan)
    path = Trajectory(latents[:, 0], torch.ones(2), 0, latents, torch.ones(2, 1))
    found = experience.recorded_rows([Slot(0, 0), Slot(0, 1)], [5, 6], path, [1])
    assert found.latents[0].isnan().all() and not found.latents[1].any() and latents.isnan().all()
    assert not len(found.means) and found.log_probs.tolist() == [[1.0], [0.0]]


def test_prompts_are_encoded_before_the_network_is_placed(config: Config, monkeypatch: pytest.MonkeyPatch) -> None:
    order: list[str] = []
    real_encode, real_prepare = TextEncoders.cache_and_release, Engine.prepare

    def encode(self: TextEncoders, prompts: list[str]) -> None:
        order.append("encoded")
        real_encode(self, prompts)

    def prepare(self: Engine, network: nn.Module, **options: Any) -> nn.Module:
        order.append("placed")
        return real_prepare(self, network, **options)

    monkeypatch.setattr(TextEncoders, "cache_and_release", encode)
    monkeypatch.setattr(Engine, "prepare", prepare)
    build(config(model__free_text_encoders=True)).close()
    assert order == ["encoded", "placed"]


def test_prompts_that_take_more_than_the_encoders_are_refused(config: Config, monkeypatch: pytest.MonkeyPatch) -> None:
    """FLUX: 4 MiB a prompt, so from 2,500 prompts on. One prompt is encoded to know it."""
    encoded, real = list[str](), TextEncoders._encode

    def encode(self: TextEncoders, prompt: Any) -> Any:
        encoded.append(prompt)
        return real(self, prompt)

    monkeypatch.setattr(TextEncoders, "_encode", encode)
    monkeypatch.setattr(text, "_LITTLE", 0)
    monkeypatch.setattr(TextEncoders, "_weights", lambda self: 4096)
    with pytest.raises(
        ConfigError, match=r"^model\.free_text_encoders: given true, but \d+ prompts take .* precompute"
    ):
        build(config(model__free_text_encoders=True))
    assert len(encoded) == 1
