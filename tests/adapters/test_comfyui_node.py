"""A style adapter in ComfyUI-IPAdapter-Flux: what its node computes, derived again here from its definition.

    weight · softmax(q' norm(k)ᵀ / √d) norm(v)    k, v = tokens Wᵀ of each head, norm(x) = x / √(mean x² + 1e-5)

The file is read as the node reads it: a pickle of two dicts, nothing else.
"""

from __future__ import annotations

import json
import logging
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from torch import Tensor

import retouch.adapters
from retouch.adapters.about import About
from retouch.adapters.comfyui import node_weight, same_in_node
from retouch.adapters.export import export
from retouch.adapters.formats import AdapterFile, AdapterFileError, folded, read_adapter, write_safetensors
from retouch.adapters.ip_adapter import new_adapter
from retouch.adapters.train_ip_adapter import train_ip_adapter
from retouch.config import ConfigError
from retouch.families.base import TrainIpAdapter
from retouch.families.flux.host import FluxIpProcessor
from retouch.families.flux_fill.spec import FluxFillModel

from .test_ip_adapter import WIDTH, network, vectors, velocity

NODE_TOKENS = 128
BLOCKS = 6
SCALES = [0.4, 0.8, 1.2, 0.5, 0.7, 0.9]


def written(folder: Path, scale: list[float], *, value_norm: bool) -> AdapterFile:
    """The file of an adapter with random weights; its values are far from length 1."""
    shape = new_adapter(network(), "mlp", WIDTH, NODE_TOKENS).shape
    draw = torch.Generator().manual_seed(1)
    tensors = {key: 0.3 * torch.randn(size, generator=draw) for key, size in shape.tensors().items()}
    tensors["image_proj.norm.weight"] += 1
    about = {"family": "flux_fill", "scale": scale, "value_norm": value_norm}
    write_safetensors(folder / "ip-adapter.safetensors", tensors, about)
    return read_adapter(folder)


def ours(file: AdapterFile, folder: Path) -> Tensor:
    made = network()
    retouch.adapters.load(folder).attach(made)
    return velocity(made, vectors())


def normed(x: Tensor) -> Tensor:
    return x / (x.square().mean(-1, keepdim=True) + 1e-5).sqrt()


def node(monkeypatch: pytest.MonkeyPatch, path: Path, weight: float) -> Tensor:
    """The network with the node's attention in every block, from its file."""
    file = torch.load(path, weights_only=True)
    assert list(file) == ["image_proj", "ip_adapter"]
    w = file["image_proj"]
    hidden = torch.nn.functional.gelu(vectors() @ w["proj.0.weight"].T + w["proj.0.bias"])
    flat = hidden @ w["proj.2.weight"].T + w["proj.2.bias"]
    tokens = torch.nn.functional.layer_norm(flat.view(2, NODE_TOKENS, 64), (64,), w["norm.weight"], w["norm.bias"])
    blocks = iter(range(BLOCKS))  # the blocks of a forward come in the order of the file

    def attend(self: Any, query: Tensor, reference: Any) -> Tensor:
        number, (heads, d) = next(blocks), query.shape[2:]
        k, v = (tokens @ file["ip_adapter"][f"{number}.to_{x}_ip.weight"].T for x in "kv")
        k, v = (normed(t.unflatten(-1, (heads, d))).transpose(1, 2) for t in (k, v))
        scores = query.transpose(1, 2) @ k.transpose(-1, -2) / d**0.5
        return weight * (scores.softmax(-1) @ v).transpose(1, 2).flatten(2)

    made = network()
    new_adapter(made, "mlp", WIDTH, NODE_TOKENS)
    with monkeypatch.context() as patched:
        patched.setattr(FluxIpProcessor, "attend", attend)
        return velocity(made, vectors())


def exported(folder: Path) -> Path:
    return export(FluxFillModel(train=TrainIpAdapter()), folder, "comfyui", folder / "out", About("run-step-000004"))


def distance(found: Tensor, expected: Tensor) -> float:
    """Of what the adapter adds to the stock model, relative."""
    effect = expected - velocity(network())
    return float((found - expected).norm() / effect.norm())


@torch.no_grad()
@pytest.mark.parametrize("scale", [1.0, 0.35])
def test_with_the_value_norm_the_node_computes_the_same(
    scale: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """At the weight that the export prints, which is the scale of training."""
    file = written(tmp_path, [scale] * BLOCKS, value_norm=True)
    with caplog.at_level(logging.INFO):
        path = exported(tmp_path)
    assert f"set weight={scale:g} in the node" in caplog.text and not [
        r for r in caplog.records if r.levelname != "INFO"
    ]
    assert same_in_node(file) and node_weight(file) == pytest.approx(scale)
    expected = ours(file, tmp_path)
    torch.testing.assert_close(node(monkeypatch, path, scale), expected, atol=1e-5, rtol=1e-5)
    assert float((expected - velocity(network())).abs().max()) > 1e-2


@torch.no_grad()
def test_without_it_the_node_differs_whatever_the_scale_in_the_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The export says so, and its weight is closer than 1, but no weight makes the images equal."""
    file = written(tmp_path, SCALES, value_norm=False)
    path = exported(tmp_path)
    (record,) = [r for r in caplog.records if r.levelname == "WARNING"]
    assert "normalizes the values" in record.message and "model.train.value_norm=true" in record.message
    assert f"set weight={node_weight(file):.2g} in the node" in record.message and not same_in_node(file)
    expected = ours(file, tmp_path)
    at = {w: distance(node(monkeypatch, path, w), expected) for w in (1.0, node_weight(file))}
    assert node_weight(file) > 1.5
    assert 0.1 < at[node_weight(file)] < 0.7 * at[1.0], at
    # the same file without the scale in its values: the node removes it
    other = tmp_path / "unscaled"
    other.mkdir()
    written(other, [1.0] * BLOCKS, value_norm=False)
    torch.testing.assert_close(
        node(monkeypatch, exported(other), 1.0), node(monkeypatch, path, 1.0), atol=1e-4, rtol=1e-4
    )


@torch.no_grad()
def test_a_factor_for_each_block_has_no_place_in_the_node(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    file = written(tmp_path, SCALES, value_norm=True)
    exported(tmp_path)
    assert "has one weight for all" in caplog.text
    assert node_weight(file) == pytest.approx(sum(SCALES) / BLOCKS)
    assert folded(file) is file  # in the values a factor would have no effect


# --- the option ---


@torch.no_grad()
def test_the_option_is_in_the_equation_and_in_the_file(tmp_path: Path) -> None:
    """Read back as trained; a .bin does not say, and is attached as asked for."""
    file = written(tmp_path, [1.0] * BLOCKS, value_norm=True)
    with safe_open(tmp_path / "ip-adapter.safetensors", "pt") as opened:
        assert json.loads(opened.metadata()["retouch_adapter"])["value_norm"] is True
    expected, path = ours(file, tmp_path), exported(tmp_path)
    for value_norm, same in ((True, True), (None, False)):
        made = network()
        retouch.adapters.load(path).attach(made, value_norm=value_norm)
        assert torch.equal(velocity(made, vectors()), expected) == same
    write_safetensors(tmp_path / "ip-adapter.safetensors", file.tensors, {**file.metadata, "value_norm": 1})
    with pytest.raises(AdapterFileError, match="its value_norm is 1; expected true or false"):
        read_adapter(tmp_path)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_fresh_adapter_is_the_stock_model_and_has_a_gradient(dtype: torch.dtype) -> None:
    """The norm of 0 is 0; its gradient there is finite, that without the norm times 1 / √eps."""
    gradients: list[Tensor] = []
    target = torch.randn(velocity(network()).shape, generator=torch.Generator().manual_seed(2))
    for value_norm in (False, True):
        made = network()
        made.requires_grad_(False)
        adapter = new_adapter(made, "mlp", WIDTH, 5)
        adapter.set_value_norm(value_norm)
        with torch.autocast("cpu", dtype=dtype, enabled=dtype != torch.float32):
            found = velocity(made, vectors())
            assert torch.equal(found, velocity(made))
        torch.nn.functional.mse_loss(found.float(), target).backward()
        grad = adapter.parameters()["ip_adapter.1.to_v_ip.weight"].grad
        assert grad is not None and bool(grad.isfinite().all()) and bool(grad.any())
        gradients.append(grad)
    tolerance = 1e-3 if dtype == torch.float32 else 0.05
    ratio = gradients[1].norm() / gradients[0].norm()
    assert float(ratio) == pytest.approx(1e-5**-0.5, rel=tolerance)


def trained_with(**options: Any) -> Any:
    spec = replace(FluxFillModel.spec, reference_width=WIDTH)
    train = TrainIpAdapter(tokens=NODE_TOKENS, **options)
    return train_ip_adapter(network(), train, spec, 0)


def test_training_goes_on_as_the_initial_adapter_was_trained(tmp_path: Path) -> None:
    written(tmp_path, [0.5] * BLOCKS, value_norm=True)
    trainee = trained_with(initial_adapter=str(tmp_path))
    assert trainee.about["value_norm"] is True and trainee.adapter.value_norm is True
    with pytest.raises(
        ConfigError, match=r"model\.train\.value_norm: given False, but .* was trained with True; leave"
    ):
        trained_with(initial_adapter=str(tmp_path), value_norm=False)
    path = exported(tmp_path)  # a .bin does not record it
    assert not trained_with(initial_adapter=str(path)).adapter.value_norm
    assert trained_with(initial_adapter=str(path), value_norm=True).adapter.value_norm


def test_a_checkpoint_of_the_other_kind_is_refused(tmp_path: Path) -> None:
    written(tmp_path, [1.0] * BLOCKS, value_norm=True)
    with pytest.raises(ValueError, match=r"trained with value_norm=True, .* set model\.train\.value_norm=true"):
        trained_with().load(tmp_path)


def test_factors_of_lora_are_merged_below_the_norm(tmp_path: Path) -> None:
    """The file with merged values computes what the network with factors does."""
    trainee = trained_with(weights="kv_lora", rank=3, value_norm=True)
    made = trainee.adapter.host.network
    draw = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for parameter in made.parameters():
            if parameter.requires_grad:
                parameter.copy_(torch.randn(parameter.shape, generator=draw))
        state = {name: p for name, p in made.named_parameters() if p.requires_grad}
        trainee.save(state, tmp_path)
        file = read_adapter(tmp_path)
        assert file.value_norm is True
        torch.testing.assert_close(ours(file, tmp_path), velocity(made, vectors()), atol=1e-4, rtol=1e-4)
