"""Fused LoRA layers are peft's: values and gradients, in every precision, off, merged, and on a quantized layer."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from peft import LoraConfig
from peft.tuners.lora import Linear
from torch import Tensor, nn

from retouch.adapters.fused_lora import FusedLinear, fuse_lora
from retouch.adapters.lora import ADAPTER
from retouch.families.quantized import QuantizedLinear

WIDTHS = (24, 40)


def factor(layer: Linear, name: str) -> Any:
    """The module of a factor, "A" or "B"."""
    return getattr(layer, f"lora_{name}")[ADAPTER]


def layers(dtype: torch.dtype = torch.float64, base: Any = None, **options: Any) -> tuple[Linear, Linear]:
    """(peft's layer, the fused one) with the same weights, B not 0; the base is frozen."""
    torch.manual_seed(0)
    frozen = base or nn.Linear(*WIDTHS, dtype=dtype)
    made = []
    for _ in range(2):
        torch.manual_seed(1)
        layer = Linear(copy.deepcopy(frozen), ADAPTER, LoraConfig(r=4, lora_alpha=6, **options), r=4, lora_alpha=6)
        nn.init.normal_(factor(layer, "B").weight)
        layer.base_layer.requires_grad_(False)
        made.append(layer)
    fuse_lora(made[1])
    assert type(made[1]) is FusedLinear and made[0].state_dict().keys() == made[1].state_dict().keys()
    return made[0], made[1]


def results(layer: Linear, dtype: torch.dtype, *shape: int, lowered: bool = False) -> list[Tensor]:
    """Output, and the gradients of the input and of both factors."""
    torch.manual_seed(2)
    x = torch.randn(*shape, WIDTHS[0], dtype=torch.float64).to(dtype).requires_grad_()
    with torch.autocast("cpu", torch.bfloat16, enabled=lowered, cache_enabled=False):
        output = layer(x)
    torch.manual_seed(3)
    output.backward(torch.randn(output.shape, dtype=torch.float64).to(output.dtype))
    gradients = [x.grad, layer.lora_A[ADAPTER].weight.grad, layer.lora_B[ADAPTER].weight.grad]
    assert all(g is not None for g in gradients)
    return [output.detach(), *gradients]  # type: ignore[list-item]


def test_one_product_adds_the_update(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not peft's forward: that is taken where the layer is off or merged."""
    _, fused = layers()
    products: list[Tensor] = []
    real = torch.addmm

    def addmm(*args: Any, **kwargs: Any) -> Tensor:
        products.append(real(*args, **kwargs))
        return products[-1]

    monkeypatch.setattr(torch, "addmm", addmm)
    x = torch.randn(5, WIDTHS[0], dtype=torch.float64)
    assert torch.equal(fused(x), products[0]) and len(products) == 1
    fused.enable_adapters(False)
    fused(x)
    fused.enable_adapters(True)
    fused.merge()
    fused(x)
    assert len(products) == 1


@pytest.mark.parametrize("shape", [(5,), (3, 7), (2, 3, 4)])
@pytest.mark.parametrize(("dtype", "off"), [(torch.float64, 1e-13), (torch.float32, 5e-5)])
def test_values_and_gradients_are_those_of_peft(dtype: torch.dtype, off: float, shape: tuple[int, ...]) -> None:
    pair = layers(dtype)
    for mine in pair:
        mine.to(dtype)
    for theirs, mine in zip(*(results(layer, dtype, *shape) for layer in pair), strict=True):
        assert mine.dtype == theirs.dtype and mine.shape == theirs.shape
        torch.testing.assert_close(mine, theirs, atol=off, rtol=off)


def test_under_autocast_the_output_is_rounded_once_less() -> None:
    """fp32 factors on a bf16 layer under autocast: nearer to the sum in fp64 than peft's, whose product, scaled product
    and sum are rounded one after the other."""
    pair = layers(torch.bfloat16)
    for layer in pair:
        layer.lora_A.float()
        layer.lora_B.float()
    theirs, mine = (results(layer, torch.float32, 64, lowered=True) for layer in pair)
    assert [t.dtype for t in mine] == [t.dtype for t in theirs] == [torch.bfloat16] + [torch.float32] * 3
    pair[0].zero_grad()
    exact = results(pair[0].double(), torch.float64, 64)
    errors = [
        [float((t.double() - e).norm() / e.norm()) for t, e in zip(r, exact, strict=True)] for r in (theirs, mine)
    ]
    assert errors[1][0] <= errors[0][0]
    assert errors[1] == pytest.approx([0.0] * 4, abs=8e-3)


def test_fp32_factors_on_a_bf16_layer_need_no_autocast() -> None:
    """Values and gradients bit for bit those under autocast, which casts the same factors."""
    found: list[list[Tensor]] = []
    for lowered in (False, True):
        _, layer = layers(torch.bfloat16)
        layer.lora_A.float()
        layer.lora_B.float()
        found.append(results(layer, torch.bfloat16, 9, lowered=lowered))
    assert [t.dtype for t in found[0]] == [torch.bfloat16] * 2 + [torch.float32] * 2
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


def test_a_layer_stored_in_8_bits() -> None:
    frozen = QuantizedLinear(nn.Linear(*WIDTHS), "int8")
    for theirs, mine in zip(*(results(layer, torch.float32, 9) for layer in layers(base=frozen)), strict=True):
        torch.testing.assert_close(mine, theirs, atol=1e-5, rtol=1e-5)


def test_off_and_merged_it_is_peft() -> None:
    pair = layers()
    x = torch.randn(3, WIDTHS[0], dtype=torch.float64)
    for layer in pair:
        layer.enable_adapters(False)
    assert torch.equal(pair[0](x), pair[1](x)) and torch.equal(pair[1](x), pair[1].base_layer(x))
    for layer in pair:
        layer.enable_adapters(True)
        layer.merge()
    assert torch.equal(pair[0](x), pair[1](x))
    assert not torch.allclose(pair[1](x), layers()[0].base_layer(x))


@pytest.mark.parametrize("options", [{"use_dora": True}, {"lora_bias": True}, {"lora_dropout": 0.5}])
def test_other_options_of_peft_are_left_to_it(options: dict[str, Any]) -> None:
    """Not fused: the same numbers as peft's layer draws, dropout included."""
    theirs, mine = (results(layer, torch.float64, 5) for layer in layers(**options))
    assert all(torch.equal(a, b) for a, b in zip(theirs, mine, strict=True))


def test_factors_that_zero_3_has_not_gathered_are_left_to_their_modules() -> None:
    """A hook of the module gathers the weight: its shard is empty before."""
    _, layer = layers()
    x = torch.randn(3, WIDTHS[0], dtype=torch.float64)
    factors = {name: factor(layer, name) for name in ("A", "B")}
    whole = {name: module.weight.data for name, module in factors.items()}
    expected = layer(x)
    for name, module in factors.items():
        module.weight.data = torch.empty(0, dtype=torch.float64)

        def gather(module: Any, _: Any, name: str = name) -> None:
            module.weight.data = whole[name]

        module.register_forward_pre_hook(gather)
    torch.testing.assert_close(layer(x), expected, atol=1e-13, rtol=0)
