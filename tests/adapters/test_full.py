"""Full weights: a diffusers folder, exact both ways, any number of shards, never partly loaded."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from diffusers import FluxTransformer2DModel
from safetensors.torch import load_file, save_file
from torch import Tensor

from retouch.adapters.trainee import FullWeights, make_trainable
from retouch.engine import Policy
from retouch.families.base import TrainFull
from retouch.files.model_files import tiny_path

WEIGHTS = "diffusion_pytorch_model.safetensors"


@pytest.fixture
def trainee(tmp_path: Path) -> tuple[FullWeights, Policy, dict[str, Tensor]]:
    """A tiny transformer, its policy, and random weights of its shapes, saved in `tmp_path`."""
    network: Any = FluxTransformer2DModel.from_pretrained(tiny_path("flux_fill") / "transformer")
    made = make_trainable(network.requires_grad_(False), TrainFull(), None)  # type: ignore[arg-type]
    assert isinstance(made, FullWeights)
    policy = Policy(network)
    draw = torch.Generator().manual_seed(0)
    state = {name: torch.randn(t.shape, generator=draw) for name, t in policy.state().items()}
    made.save(state, tmp_path)
    return made, policy, state


def test_every_weight_trains(trainee: tuple[FullWeights, Policy, dict[str, Tensor]]) -> None:
    made, policy, _ = trainee
    assert policy.parameters.keys() == dict(made._network.named_parameters()).keys()


def test_saving_and_loading_is_exact(trainee: tuple[FullWeights, Policy, dict[str, Tensor]], tmp_path: Path) -> None:
    made, policy, state = trainee
    back = made.load(tmp_path)
    assert back.keys() == state.keys()
    assert all(torch.equal(back[name], t) for name, t in state.items())
    policy.load(back)
    assert all(torch.equal(policy.state()[name], t) for name, t in state.items())


def test_plain_diffusers_reads_the_folder(
    trainee: tuple[FullWeights, Policy, dict[str, Tensor]], tmp_path: Path
) -> None:
    _, _, state = trainee
    theirs: Any = FluxTransformer2DModel.from_pretrained(tmp_path)
    assert all(torch.equal(theirs.state_dict()[name], t) for name, t in state.items())


def test_shards_are_read_together(trainee: tuple[FullWeights, Policy, dict[str, Tensor]], tmp_path: Path) -> None:
    made, policy, state = trainee
    names = sorted(state)
    (tmp_path / WEIGHTS).unlink()
    for i, part in enumerate((names[:9], names[9:]), 1):
        shard = tmp_path / f"diffusion_pytorch_model-0000{i}-of-00002.safetensors"
        save_file({name: state[name] for name in part}, shard)
    policy.load(made.load(tmp_path))
    assert all(torch.equal(policy.state()[name], t) for name, t in state.items())
    (tmp_path / "diffusion_pytorch_model-00002-of-00002.safetensors").unlink()
    with pytest.raises(ValueError, match="missing: "):
        policy.load(made.load(tmp_path))


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        (lambda t: t.pop("proj_out.bias"), r"missing: proj_out\.bias"),
        (lambda t: t.update(extra=torch.ones(1)), "unexpected: extra"),
        (lambda t: t.update({"proj_out.bias": torch.ones(1)}), r"of another shape: proj_out\.bias"),
    ],
)
def test_keys_and_shapes_are_checked_exactly(
    trainee: tuple[FullWeights, Policy, dict[str, Tensor]], tmp_path: Path, change: Any, problem: str
) -> None:
    made, policy, _ = trainee
    tensors = load_file(tmp_path / WEIGHTS)
    change(tensors)
    save_file(tensors, tmp_path / WEIGHTS)
    with pytest.raises(ValueError, match=problem):
        policy.load(made.load(tmp_path))


def test_files_that_are_not_there_or_damaged(
    trainee: tuple[FullWeights, Policy, dict[str, Tensor]], tmp_path: Path
) -> None:
    made, _, _ = trainee
    (tmp_path / WEIGHTS).write_bytes((tmp_path / WEIGHTS).read_bytes()[:-10])
    with pytest.raises(ValueError, match="damaged weights"):
        made.load(tmp_path)
    (tmp_path / WEIGHTS).unlink()
    with pytest.raises(ValueError, match=r"no diffusion_pytorch_model\*\.safetensors in it"):
        made.load(tmp_path)
