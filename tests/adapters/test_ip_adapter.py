"""The style adapter inside stock FLUX: off is the stock model, on is what its equation says, and it learns."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from diffusers import FluxTransformer2DModel
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention

from retouch.adapters.ip_adapter import IpAdapter, new_adapter
from retouch.adapters.shape import AdapterShape
from retouch.config import ConfigError
from retouch.families import FAMILIES
from retouch.families.meta import released_networks
from retouch.files.model_files import tiny_path

WIDTH, TOKENS = 24, 5


def network() -> Any:
    made: Any = FluxTransformer2DModel.from_pretrained(tiny_path("flux_fill") / "transformer")
    return made.float().eval()


def inputs(rows: int = 2) -> dict[str, Tensor]:
    draw = torch.Generator().manual_seed(0)
    return {
        "hidden_states": torch.randn(rows, 8, 128, generator=draw),
        "timestep": torch.linspace(0.3, 0.8, rows),
        "guidance": torch.full((rows,), 30.0),
        "pooled_projections": torch.randn(rows, 64, generator=draw),
        "encoder_hidden_states": torch.randn(rows, 4, 64, generator=draw),
        "txt_ids": torch.zeros(4, 3),
        "img_ids": torch.arange(24.0).view(8, 3),
    }


def vectors(rows: int = 2) -> Tensor:
    return torch.randn(rows, WIDTH, generator=torch.Generator().manual_seed(9))


def velocity(transformer: Any, reference: Any = None) -> Tensor:
    options = {} if reference is None else {"joint_attention_kwargs": {"ip_adapter_image_embeds": reference}}
    return transformer(**inputs(), **options, return_dict=False)[0]


def drawn(adapter: IpAdapter, seed: int = 1) -> IpAdapter:
    """The adapter with random weights, so that it does something."""
    draw = torch.Generator().manual_seed(seed)
    adapter.load({key: 0.5 * torch.randn(t.shape, generator=draw) for key, t in adapter.tensors().items()})
    return adapter


# --- off ---


@pytest.mark.parametrize("checkpointing", [False, True])
def test_off_is_the_stock_model_bit_for_bit(checkpointing: bool) -> None:
    """Both block kinds: no reference, scale 0, rows not kept, and a fresh adapter."""
    stock = network()
    before = velocity(stock).detach()
    adapted = network()
    if checkpointing:
        adapted.enable_gradient_checkpointing()
    adapter = new_adapter(adapted, "mlp", WIDTH, TOKENS)
    fresh = velocity(adapted, vectors())
    assert torch.equal(fresh, before)
    drawn(adapter)
    assert torch.equal(velocity(adapted), before)
    assert torch.equal(velocity(adapted, (vectors(), torch.zeros(2))), before)
    assert float((velocity(adapted, vectors()) - before).abs().max()) > 1e-2
    adapter.set_scale(0.0)
    assert torch.equal(velocity(adapted, vectors()), before)


def test_a_dropped_row_is_stock_and_the_other_is_not() -> None:
    adapted = network()
    before = velocity(adapted)
    drawn(new_adapter(adapted, "mlp", WIDTH, TOKENS))
    both, one = velocity(adapted, vectors()), velocity(adapted, (vectors(), torch.tensor([0.0, 1.0])))
    assert torch.equal(one[0], before[0])
    assert torch.equal(one[1], both[1])
    assert float((both[0] - before[0]).abs().max()) > 1e-2


def test_gradient_checkpointing_changes_nothing() -> None:
    plain, checkpointed = network(), network()
    checkpointed.enable_gradient_checkpointing()
    gradients: list[dict[str, Tensor]] = []
    for made in (plain, checkpointed):
        made.requires_grad_(False)
        adapter = drawn(new_adapter(made, "mlp", WIDTH, TOKENS))
        velocity(made, vectors()).square().mean().backward()
        gradients.append({k: p.grad for k, p in adapter.parameters().items() if p.grad is not None})
    assert gradients[0].keys() == gradients[1].keys() == adapter.names.keys()
    for key, gradient in gradients[0].items():
        torch.testing.assert_close(gradients[1][key], gradient)


def test_detached_is_as_before() -> None:
    made = network()
    processors, names = dict(made.attn_processors), set(made.state_dict())
    before = velocity(made)
    adapter = drawn(new_adapter(made, "mlp+query_former", WIDTH, TOKENS))
    assert set(made.state_dict()) == names | set(adapter.names.values())
    with pytest.raises(ConfigError, match="has an adapter already; detach that first"):
        new_adapter(made, "mlp", WIDTH, TOKENS)
    adapter.detach()
    assert set(made.state_dict()) == names
    assert all(made.attn_processors[name] is p for name, p in processors.items())
    assert not hasattr(made, "encoder_hid_proj")
    assert torch.equal(velocity(made), before)
    new_adapter(made, "mlp", WIDTH, TOKENS)


def test_scales_of_blocks() -> None:
    """A factor for each block: one block on is the adapter whose other values are 0."""
    made = network()
    adapter = drawn(new_adapter(made, "mlp", WIDTH, TOKENS))
    adapter.set_scale([0, 0, 0, 0.7, 0, 0])
    found = velocity(made, vectors())
    values = {k: 0.7 * t if ".3.to_v" in k else t * ("to_v" not in k) for k, t in adapter.tensors().items()}
    adapter.load(values)
    adapter.set_scale(1.0)
    torch.testing.assert_close(found, velocity(made, vectors()), atol=1e-5, rtol=1e-5)
    with pytest.raises(ConfigError, match=r"scale: given 2 factors; the network has 6 blocks"):
        adapter.set_scale([1, 1])


# --- on ---


def dense(attn: Any, processor: Any, query: Tensor, tokens: Tensor) -> Tensor:
    """The second attention head by head, with explicit softmax, in float64."""
    rows, positions, heads, d = query.shape
    out = torch.zeros(rows, positions, heads, d, dtype=torch.float64)
    for row in range(rows):
        for head in range(heads):
            part = slice(head * d, (head + 1) * d)
            key = tokens[row].double() @ processor.to_k_ip.weight[part].double().T
            key = key / (key.square().mean(-1, keepdim=True) + 1e-5).sqrt()
            value = tokens[row].double() @ processor.to_v_ip.weight[part].double().T
            if processor.value_norm:
                value = value / (value.square().mean(-1, keepdim=True) + 1e-5).sqrt()
            scores = query[row, :, head].double() @ key.T / d**0.5
            out[row, :, head] = scores.softmax(-1) @ value
    return processor.scale * out.flatten(2)


def rotate(x: Tensor, rotary: tuple[Tensor, Tensor]) -> Tensor:
    """FLUX's rotary embedding of [B, S, H, d]: pairs of neighbours turn."""
    cos, sin = (t[None, :, None] for t in rotary)
    turned = torch.stack([-x[..., 1::2], x[..., ::2]], -1).flatten(-2)
    return x * cos + turned * sin


@pytest.mark.parametrize("double", [True, False])
@torch.no_grad()
def test_a_block_agrees_with_a_dense_recomputation(double: bool) -> None:
    """The whole attention of one block again from its definition, with the inputs that the network gives it. Keys are
    so small that the eps of their norm counts."""
    made = network()
    adapter = drawn(new_adapter(made, "mlp", WIDTH, TOKENS))
    adapter.set_scale([0.3, 0.6, 0.9, 1.2, 1.5, 1.8])
    attn = made.get_submodule("transformer_blocks.1.attn" if double else "single_transformer_blocks.2.attn")
    attn.processor.to_k_ip.weight.mul_(1e-3)
    seen: list[tuple[dict[str, Any], Any]] = []
    attn.register_forward_hook(lambda _, a, k, out: seen.append((k, out)), with_kwargs=True)
    velocity(made, vectors())
    [(given, found)] = seen
    x = given["hidden_states"]
    tokens = made.encoder_hid_proj(vectors())[0]
    assert tokens.shape == (2, TOKENS, 64)
    q, k, v = (p(x).unflatten(-1, (4, 32)) for p in (attn.to_q, attn.to_k, attn.to_v))
    q, k = attn.norm_q(q), attn.norm_k(k)
    styled = dense(attn, attn.processor, q, tokens)
    text = given.get("encoder_hidden_states")
    if double:
        tq, tk, tv = (p(text).unflatten(-1, (4, 32)) for p in (attn.add_q_proj, attn.add_k_proj, attn.add_v_proj))
        q, k, v = (torch.cat(pair, 1) for pair in ((attn.norm_added_q(tq), q), (attn.norm_added_k(tk), k), (tv, v)))
    q, k = (rotate(t, given["image_rotary_emb"]) for t in (q, k))
    out = scaled_dot_product_attention(q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2))
    out = out.transpose(1, 2).flatten(2)
    if not double:
        torch.testing.assert_close(found, (out + styled).float(), atol=1e-5, rtol=1e-5)
        return
    image = attn.to_out[0]((out[:, 4:] + styled).float())
    torch.testing.assert_close(found[0], image, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(found[1], attn.to_add_out(out[:, :4]), atol=1e-5, rtol=1e-5)


@torch.no_grad()
def test_tokens_are_the_sum_of_both_heads() -> None:
    made = network()
    drawn(new_adapter(made, "mlp+query_former", WIDTH, TOKENS))
    projection = made.encoder_hid_proj
    tokens, keep = projection((vectors(), torch.ones(2)))
    torch.testing.assert_close(tokens, projection.mlp(vectors()) + projection.qformer(vectors()))
    former = projection.qformer
    sources = former.id_proj(vectors()).view(2, 32, 64)
    w, b = former.cross_attn.in_proj_weight, former.cross_attn.in_proj_bias
    q = (former.query_embeds @ w[:64].T + b[:64]).expand(2, -1, -1)
    k, v = sources @ w[64:128].T + b[64:128], sources @ w[128:].T + b[128:]
    q, k, v = (t.unflatten(-1, (8, 8)).transpose(1, 2) for t in (q, k, v))
    mixed = ((q @ k.transpose(-1, -2) / 8**0.5).softmax(-1) @ v).transpose(1, 2).flatten(2)
    attended = former.cross_attn.out_proj(mixed) + former.query_embeds
    torch.testing.assert_close(former(vectors()), former.norm(former.cross_attn_norm(attended)), atol=1e-5, rtol=1e-5)
    assert keep is not None


# --- learning ---


@pytest.mark.parametrize("head", ["mlp", "mlp+query_former"])
def test_everything_gets_a_gradient_after_one_step_from_the_no_op(head: Any) -> None:
    """At the start values alone do; one step later keys and the projection too, its first layer included."""
    made = network()
    made.requires_grad_(False)
    adapter = new_adapter(made, head, WIDTH, TOKENS)
    target = torch.randn(velocity(made).shape, generator=torch.Generator().manual_seed(2))
    parameters = adapter.parameters()
    optimizer = torch.optim.SGD(parameters.values(), lr=0.1)
    moved: list[set[str]] = []
    for _ in range(2):
        optimizer.zero_grad()
        nn.functional.mse_loss(velocity(made, vectors()), target).backward()
        moved.append({k for k, p in parameters.items() if p.grad is not None and bool(p.grad.abs().max() > 0)})
        optimizer.step()
    assert moved[0] == {k for k in parameters if ".to_v_ip." in k}
    # keys of all tokens moved by one amount change no attention, which is what the key of the queries' bias does
    assert moved[1] >= parameters.keys() - {"image_proj_qformer.cross_attn.in_proj_bias"}


# --- sizes ---


@pytest.mark.parametrize(
    ("head", "tokens", "expected"),
    [
        ("mlp", 128, {"image_proj": 1.21e9, "ip_adapter": 1.43e9}),
        ("mlp+query_former", 128, {"image_proj": 1.21e9, "ip_adapter": 1.43e9, "image_proj_qformer": 0.37e9}),
        ("mlp", 16, {"image_proj": 0.154e9, "ip_adapter": 1.43e9}),
    ],
)
def test_full_size(head: Any, tokens: int, expected: dict[str, float]) -> None:
    """On the meta device, the modules and what the file format says of them: 2.65 B, with query-former 3.02 B."""
    with torch.device("meta"):
        made: Any = released_networks(FAMILIES["flux_fill"].spec)["transformer"]
        base = sum(p.numel() for p in made.parameters())
        adapter = new_adapter(made, head, 1152, tokens)
    counts = adapter.shape.parameters()
    assert counts == pytest.approx(expected, rel=0.01)
    assert sum(p.numel() for p in made.parameters()) - base == sum(counts.values())
    total = {("mlp", 128): 2.65e9, ("mlp+query_former", 128): 3.02e9, ("mlp", 16): 1.59e9}[head, tokens]
    assert sum(counts.values()) == pytest.approx(total, rel=0.005)
    assert len(adapter.shape.inner) == 57


def test_an_adapter_for_other_blocks_is_refused_and_nothing_is_touched() -> None:
    made = network()
    processors = dict(made.attn_processors)
    for shape, message in [
        (
            AdapterShape("mlp", WIDTH, TOKENS, 64, (128,) * 5),
            "an adapter for 5 blocks; the FluxTransformer2DModel has 6",
        ),
        (AdapterShape("mlp", WIDTH, TOKENS, 32, (128,) * 6), "an adapter of token width 32"),
        (AdapterShape("mlp", WIDTH, TOKENS, 64, (96,) * 6), "for blocks of width 96"),
        (AdapterShape("linear", WIDTH, TOKENS, 64, (128,) * 6), "a linear adapter"),
    ]:
        with pytest.raises(ConfigError, match=message):
            IpAdapter(made, shape, "a.bin")
    assert made.attn_processors == processors
    with pytest.raises(ConfigError, match="cannot be put into a Linear"):
        new_adapter(nn.Linear(1, 1), "mlp", WIDTH, TOKENS)
