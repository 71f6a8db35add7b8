"""The style adapter over the joint attention of Qwen-Image."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from retouch.adapters.about import About
from retouch.adapters.export import export
from retouch.adapters.formats import write_safetensors
from retouch.adapters.ip_adapter import new_adapter
from retouch.config import ConfigError
from retouch.families import FAMILIES
from retouch.families.base import TrainIpAdapter
from retouch.families.meta import released_networks
from retouch.families.tiny import tiny_pipeline
from tests.adapters.test_ip_adapter import dense, drawn

WIDTH, TOKENS = 24, 5


def network() -> Any:
    return tiny_pipeline("qwen_image", seed=1).transformer.eval()


def velocity(transformer: Any, reference: Any = None) -> Tensor:
    draw = torch.Generator().manual_seed(0)
    options = {} if reference is None else {"attention_kwargs": {"ip_adapter_image_embeds": reference}}
    return transformer(
        hidden_states=torch.randn(2, 8, 16, generator=draw),
        timestep=torch.tensor([0.3, 0.8]),
        encoder_hidden_states=torch.randn(2, 6, 32, generator=draw),
        encoder_hidden_states_mask=torch.tensor([[True] * 6, [True] * 4 + [False] * 2]),
        img_shapes=[[(1, 2, 4)]] * 2,
        **options,
        return_dict=False,
    )[0]


def vectors() -> Tensor:
    return torch.randn(2, WIDTH, generator=torch.Generator().manual_seed(9))


@pytest.mark.parametrize("checkpointing", [False, True])
def test_off_is_the_stock_model_bit_for_bit_and_detached_is_as_before(checkpointing: bool) -> None:
    made = network()
    before, names = velocity(made).detach(), set(made.state_dict())
    if checkpointing:
        made.enable_gradient_checkpointing()
    adapter = new_adapter(made, "mlp", WIDTH, TOKENS)
    assert torch.equal(velocity(made, vectors()), before)
    drawn(adapter)
    assert torch.equal(velocity(made), before)
    assert torch.equal(velocity(made, (vectors(), torch.zeros(2))), before)
    assert float((velocity(made, vectors()) - before).detach().abs().max()) > 1e-2
    velocity(made, vectors()).square().mean().backward()
    assert all(p.grad is not None and bool(p.grad.any()) for p in adapter.parameters().values())
    adapter.set_scale(0.0)
    assert torch.equal(velocity(made, vectors()), before)
    adapter.detach()
    assert set(made.state_dict()) == names
    assert torch.equal(velocity(made), before)
    assert not made._forward_pre_hooks


@pytest.mark.parametrize("value_norm", [False, True])
@torch.no_grad()
def test_a_block_agrees_with_a_dense_recomputation(value_norm: bool) -> None:
    made = network()
    adapter = drawn(new_adapter(made, "mlp", WIDTH, TOKENS))
    adapter.set_scale([0.5, 0.8])
    adapter.set_value_norm(value_norm)
    attn = made.get_submodule("transformer_blocks.1.attn")
    attn.processor.to_k_ip.weight.mul_(1e-3)  # so small that the eps of the norm counts
    seen: list[tuple[dict[str, Any], Any]] = []
    attn.register_forward_hook(lambda _, a, k, out: seen.append((k, out)), with_kwargs=True)
    velocity(made, vectors())
    [(given, found)] = seen
    x, text = given["hidden_states"], given["encoder_hidden_states"]
    q, k, v = (p(x).unflatten(-1, (4, 16)) for p in (attn.to_q, attn.to_k, attn.to_v))
    tq, tk, tv = (p(text).unflatten(-1, (4, 16)) for p in (attn.add_q_proj, attn.add_k_proj, attn.add_v_proj))
    q, k, tq, tk = attn.norm_q(q), attn.norm_k(k), attn.norm_added_q(tq), attn.norm_added_k(tk)
    styled = dense(attn, attn.processor, q, made.encoder_hid_proj(vectors())[0])
    image_turn, text_turn = given["image_rotary_emb"]
    q, k, tq, tk = turned(q, image_turn), turned(k, image_turn), turned(tq, text_turn), turned(tk, text_turn)
    q, k, v = (torch.cat(pair, 1).transpose(1, 2) for pair in ((tq, q), (tk, k), (tv, v)))
    mask = torch.cat([given["encoder_hidden_states_mask"], torch.ones(2, 8, dtype=torch.bool)], 1)[:, None, None]
    out = scaled_dot_product_attention(q, k, v, mask).transpose(1, 2).flatten(2)
    torch.testing.assert_close(found[0], attn.to_out[0]((out[:, 6:] + styled).float()), atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(found[1], attn.to_add_out(out[:, :6]), atol=1e-5, rtol=1e-5)


def turned(x: Tensor, turn: Tensor) -> Tensor:
    """Qwen's rotary embedding: neighbours are a complex number, turned by one."""
    return torch.view_as_real(torch.view_as_complex(x.float().unflatten(-1, (-1, 2))) * turn[None, :, None]).flatten(-2)


def test_comfyui_is_of_flux(tmp_path: Path) -> None:
    """Its extension builds FLUX's blocks, and would fail in the middle of loading."""
    tensors = new_adapter(network(), "mlp", WIDTH, 128).tensors()
    write_safetensors(tmp_path / "ip-adapter.safetensors", tensors, {"family": "qwen_image"})
    with pytest.raises(ConfigError, match="reads adapters of FLUX; this one is of qwen_image; use --to ip-adapter"):
        export(
            FAMILIES["qwen_image"](train=TrainIpAdapter()),
            tmp_path,
            "comfyui",
            tmp_path / "out",
            About("run-step-000004"),
        )
    assert not (tmp_path / "out").exists()


def test_full_size() -> None:
    """60 blocks, tokens as wide as the text: 1.06 B for the projection, 1.32 B for keys and values."""
    with torch.device("meta"):
        counts = new_adapter(
            released_networks(FAMILIES["qwen_image"].spec)["transformer"], "mlp", 1152, 128
        ).shape.parameters()
    assert counts == pytest.approx({"image_proj": 1.06e9, "ip_adapter": 1.32e9}, rel=0.01)
