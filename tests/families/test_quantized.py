"""Frozen networks in 8 or 4 bits: how far a matrix is from its own, what memory it takes, and training on top of it."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from retouch.adapters.initial_lora import initial_lora
from retouch.adapters.lora import add_lora
from retouch.adapters.trainee import LoraWeights
from retouch.config import ConfigError
from retouch.doctor.memory import count_weights, memory_parts
from retouch.doctor.networks import Networks
from retouch.engine import Policy
from retouch.families import FAMILIES
from retouch.families.base import TrainLora
from retouch.families.loading import load_model
from retouch.families.meta import on_meta, released_networks
from retouch.families.quantized import (
    QuantizedLinear,
    block_matrices,
    quantize_blocks,
)
from retouch.families.sizes import stored_bytes
from retouch.families.tiny import tiny_pipeline
from tests.adapters.test_lora import drawn, network, velocity
from tests.algorithms.runs import Config
from tests.families.facts import facts_of

NF4 = pytest.param(
    "nf4", marks=pytest.mark.skipif(not importlib.util.find_spec("bitsandbytes"), reason="needs bitsandbytes")
)
SCHEMES = ["int8", "fp8", NF4]
SPEC = FAMILIES["flux_fill"].spec


def layer(rows: int = 24, columns: int = 96) -> nn.Linear:
    torch.manual_seed(0)
    return nn.Linear(columns, rows)


@pytest.mark.parametrize(
    ("scheme", "bound"),
    [("int8", 0.5 / 127), ("fp8", 2**-4), pytest.param("nf4", 0.152, marks=NF4.marks)],
)
def test_a_restored_weight_is_within_half_a_step_of_its_own(scheme: Any, bound: float) -> None:
    """int8: of the row's largest; fp8: of the weight itself (3 bits of mantissa); nf4: of the largest of 64, the widest
    gap between two levels being .304."""
    whole = layer()
    stored = QuantizedLinear(whole, scheme)
    whole.weight.requires_grad_(False)
    error = (stored.matrix(torch.float32) - whole.weight).abs()
    if scheme == "int8":
        largest = whole.weight.abs().amax(1, keepdim=True)
    elif scheme == "fp8":
        largest = whole.weight.abs().clamp(min=float(whole.weight.abs().max()) * 2**-6)
    else:
        largest = whole.weight.view(-1, 64).abs().amax(1, keepdim=True).expand(-1, 64).reshape_as(whole.weight)
    assert bool((error <= bound * largest + 1e-7).all())
    assert float(error.max()) > 0


@pytest.mark.parametrize("scheme", SCHEMES)
def test_forward_and_backward_are_those_of_the_restored_matrix(scheme: Any) -> None:
    whole, x = layer(), torch.randn(5, 3, 96, requires_grad=True)
    stored = QuantizedLinear(whole, scheme)
    same = x.detach().clone().requires_grad_()
    expected = nn.functional.linear(same, stored.matrix(torch.float32), whole.bias)
    found = stored(x)
    assert torch.equal(found, expected)
    found.square().sum().backward()
    expected.square().sum().backward()
    torch.testing.assert_close(x.grad, same.grad)
    assert not any(p.requires_grad for p in stored.parameters())
    with torch.no_grad():
        assert torch.equal(stored(x), found), "without a gradient it must round alike"
    with torch.autocast("cpu", torch.bfloat16):
        low = stored(x)
    assert low.dtype == torch.bfloat16
    torch.testing.assert_close(low.float(), expected, atol=3e-2, rtol=3e-2)


@pytest.mark.parametrize("scheme", SCHEMES)
def test_memory_is_what_check_counts(scheme: Any, config: Config) -> None:
    made = network(torch.bfloat16)
    run = config(model__train={"kind": "lora", "rank": 2}, model__quantize=scheme, model__dtype="bf16", ema=None)
    counted = count_weights(run, Networks({SPEC.network_name: network()}))
    assert counted is not None
    frozen = next(part for part in memory_parts(run, counted) if part.what == "network, frozen")
    assert frozen.weights == sum(p.numel() for p in made.parameters())
    quantize_blocks(made, scheme)
    assert frozen.bytes == sum(p.nbytes for p in made.parameters())
    odd = QuantizedLinear(nn.Linear(5, 3, bias=False), scheme)
    assert stored_bytes((3, 5), scheme) == sum(p.nbytes for p in odd.parameters())


@pytest.mark.parametrize("family", list(FAMILIES.available()))
def test_the_matrices_of_the_blocks_are_nearly_all_of_a_transformer(family: str) -> None:
    spec = FAMILIES[family].spec
    known = released_networks(spec).get(spec.network_name)
    if known is None:
        pytest.skip("its released sizes are not known")
    inside = sum(known.get_submodule(name).weight.numel() for name in block_matrices(known))
    share = inside / sum(p.numel() for p in known.parameters())
    assert share > 1 - facts_of(family).outside_blocks


@pytest.mark.parametrize("scheme", SCHEMES)
def test_lora_on_it_starts_as_the_quantized_base_and_takes_a_file(scheme: Any, tmp_path: Path) -> None:
    made, bare = network(), network()
    quantize_blocks(made, scheme)
    quantize_blocks(bare, scheme)
    whole = velocity(network())
    base = velocity(bare)
    error = float((base - whole).square().mean().sqrt() / whole.square().mean().sqrt())
    assert 0 < error < (0.3 if scheme == "nf4" else 0.05)
    add_lora(made, 3, 6.0, SPEC.lora_targets)
    assert torch.equal(velocity(made), base)
    assert {p.dtype for p in made.parameters() if p.requires_grad} == {torch.float32}
    policy = Policy(made)
    state = drawn(policy)
    LoraWeights(3, 6.0, SPEC.network_name).save(state, tmp_path)
    found = initial_lora(bare, TrainLora(rank=3, alpha=6.0, initial_adapter=str(tmp_path)), SPEC)
    assert found.keys() == state.keys() and all(torch.equal(t, state[n]) for n, t in found.items())


@pytest.mark.parametrize("family", ["sd_inpaint", "qwen_image"])
def test_networks_of_other_families(family: str, config: Config) -> None:
    pipeline = tiny_pipeline(family, seed=3)
    made: Any = getattr(pipeline, FAMILIES[family].spec.network_name)
    names = block_matrices(made)
    quantize_blocks(made, "int8")
    assert names and all(isinstance(made.get_submodule(name), QuantizedLinear) for name in names)
    add_lora(made, 2, 2.0, FAMILIES[family].spec.lora_targets)


@pytest.mark.parametrize("scheme", [NF4])
def test_nf4_takes_the_nearest_of_its_levels(scheme: Any) -> None:
    """The levels of QLoRA's appendix E; rows of 96 are no whole blocks of 64."""
    levels = torch.tensor(
        [-1.0, -0.6961928, -0.52507305, -0.39491749, -0.28444138, -0.18477343, -0.09105004, 0.0,
         0.0795803, 0.1609302, 0.2461123, 0.33791524, 0.44070983, 0.562617, 0.72295684, 1.0]
    )  # fmt: skip
    whole = layer()
    blocks = whole.weight.detach().view(-1, 64)
    largest = blocks.abs().amax(1, keepdim=True)
    nearest = levels[((blocks / largest)[..., None] - levels).abs().argmin(-1)] * largest
    found = QuantizedLinear(whole, scheme).matrix(torch.float32)
    torch.testing.assert_close(found, nearest.view(24, 96), atol=1e-6, rtol=1e-6)


def test_without_bitsandbytes(monkeypatch: pytest.MonkeyPatch, config: Config) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    run = config(model__train={"kind": "lora"}, model__quantize="nf4")
    with pytest.raises(ConfigError, match=r"model\.quantize: given 'nf4', which needs bitsandbytes: pip install \"ret"):
        load_model(run.model)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"model__train": {"kind": "full"}}, r"model\.train\.kind=full trains .* set model\.train\.kind=lora"),
        ({"training__sharding": "fsdp2"}, r"training\.sharding is set, .* set training\.sharding=none"),
        ({"training__compile": True}, r"training\.compile is set, .* set training\.compile=false"),
    ],
)  # fmt: skip
def test_combinations_that_check_rejects(options: dict[str, Any], message: str, config: Config) -> None:
    with pytest.raises(ConfigError, match=rf"model\.quantize: given 'int8', but {message}"):
        config(**{"model__train": {"kind": "lora"}, "model__quantize": "int8", **options})


def test_block_matrices_of_a_network_on_the_meta_device() -> None:
    made = on_meta(lambda: type(network()).from_config(network().config))  # type: ignore[attr-defined]
    assert block_matrices(made) == block_matrices(network())
