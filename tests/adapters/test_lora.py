"""LoRA: a start that changes nothing, the right modules, files that are exact or refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from diffusers import FluxTransformer2DModel
from peft.import_utils import is_torchao_available
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor

from retouch.adapters.lora import FILE, add_lora, lora_shape, save_lora
from retouch.adapters.trainee import LoraWeights, make_trainable
from retouch.config import ConfigError
from retouch.engine import Policy
from retouch.families.base import TrainLora
from retouch.families.flux_fill.spec import FluxFillModel
from retouch.files.model_files import tiny_path

RANK, ALPHA = 3, 5.0


def network(dtype: torch.dtype = torch.float32) -> Any:
    return FluxTransformer2DModel.from_pretrained(tiny_path("flux_fill") / "transformer", dtype=dtype)


@torch.no_grad()
def velocity(transformer: Any) -> Tensor:
    draw = torch.Generator().manual_seed(0)
    return transformer(
        hidden_states=torch.randn(2, 8, transformer.config.in_channels, generator=draw),
        timestep=torch.tensor([0.3, 0.8]),
        guidance=torch.tensor([30.0, 30.0]),
        pooled_projections=torch.randn(2, 64, generator=draw),
        encoder_hidden_states=torch.randn(2, 4, 64, generator=draw),
        txt_ids=torch.zeros(4, 3),
        img_ids=torch.arange(24.0).view(8, 3),
        return_dict=False,
    )[0]


@pytest.fixture
def adapted() -> Any:
    made = network()
    add_lora(made, RANK, ALPHA, FluxFillModel.spec.lora_targets)
    return made


def drawn(policy: Policy, seed: int = 0) -> dict[str, Tensor]:
    """Random weights of the shapes of the policy's."""
    draw = torch.Generator().manual_seed(seed)
    return {name: torch.randn(t.shape, generator=draw) for name, t in policy.state().items()}


def test_a_fresh_adapter_is_the_base_exactly(adapted: Any) -> None:
    before = velocity(network())
    assert torch.equal(velocity(adapted), before)
    policy = Policy(adapted)
    policy.load(drawn(policy))
    assert not torch.allclose(velocity(adapted), before, atol=1e-2)


def test_the_two_starts_have_the_spread_of_their_sources() -> None:
    """Flow-GRPO (scripts/train_sd3.py) sets init_lora_weights="gaussian": a normal distribution of std 1 / rank. The
    default is uniform within 1 / sqrt(inputs) of the layer, as nn.Linear. The factors B are 0 in both."""
    rank, found = 8, dict[str, Tensor]()
    for init in ("uniform", "gaussian"):
        torch.manual_seed(0)
        made: Any = network()
        make_trainable(made, TrainLora(rank=rank, init=init), FluxFillModel.spec)
        parts = {n: p.detach() for n, p in made.named_parameters() if ".lora_" in n}
        assert all((p == 0).all() for n, p in parts.items() if ".lora_B." in n)
        # in units of what is expected of the layer
        scale = {n: rank if init == "gaussian" else p.shape[1] ** 0.5 for n, p in parts.items() if ".lora_A." in n}
        found[init] = torch.cat([(parts[n] * unit).flatten() for n, unit in scale.items()])
    flat, normal = found["uniform"], found["gaussian"]
    assert len(normal) > 4000 and float(flat.abs().max()) <= 1
    noise = len(normal) ** -0.5
    assert abs(float(flat.var()) - 1 / 3) < 3 * noise and abs(float(normal.var()) - 1) < 5 * noise
    assert abs(float((normal**4).mean()) - 3) < 40 * noise  # of a normal distribution; 9/5 of a uniform one


def test_alpha_over_rank_scales_the_update(adapted: Any) -> None:
    """One adapted weight: W + alpha / rank · B A."""
    policy = Policy(adapted)
    policy.load(drawn(policy))
    layer = adapted.transformer_blocks[0].attn.to_q
    a, b = layer.lora_A.default.weight, layer.lora_B.default.weight
    x = torch.randn(2, a.shape[1])
    expected = layer.base_layer(x) + ALPHA / RANK * (x @ a.T @ b.T)
    torch.testing.assert_close(layer(x), expected, atol=1e-4, rtol=1e-4)


def test_only_adapters_train_in_fp32_on_a_base_in_bf16() -> None:
    made = network(torch.bfloat16)
    add_lora(made, RANK, ALPHA, FluxFillModel.spec.lora_targets)
    trained = {name: p.dtype for name, p in made.named_parameters() if p.requires_grad}
    assert trained and all(".lora_" in name for name in trained)
    assert set(trained.values()) == {torch.float32}
    assert {p.dtype for p in made.parameters() if not p.requires_grad} == {torch.bfloat16}


def test_every_target_gets_one_adapter_and_nothing_else_does(adapted: Any) -> None:
    wanted = {
        n for n, _ in network().named_modules() if any(n.endswith(f".{t}") for t in FluxFillModel.spec.lora_targets)
    }
    found = {name.partition(".lora_")[0] for name in Policy(adapted).parameters}
    assert found == wanted
    assert {name.partition(".")[0] for name in found} == {"transformer_blocks", "single_transformer_blocks"}


def test_targets_of_the_run_file_replace_those_of_the_family() -> None:
    made = network()
    spec = FluxFillModel.spec
    make_trainable(made, TrainLora(rank=2, targets=["attn.to_q"]), spec)
    assert {name.partition(".lora_")[0].rpartition(".")[2] for name in Policy(made).parameters} == {"to_q"}
    with pytest.raises(
        ConfigError, match=r"model\.train\.targets: given foo, bar; no module of FluxTransformer2DModel"
    ):
        make_trainable(network(), TrainLora(targets=["foo", "bar"]), spec)


# --- files ---


@pytest.fixture
def saved(adapted: Any, tmp_path: Path) -> tuple[Policy, dict[str, Tensor], Path]:
    """A policy, random weights of its shapes, and the folder they were saved in."""
    policy = Policy(adapted)
    state = drawn(policy)
    LoraWeights(RANK, ALPHA, "transformer").save(state, tmp_path)
    return policy, state, tmp_path


def load(folder: Path, rank: int = RANK, alpha: float = ALPHA) -> dict[str, Tensor]:
    return LoraWeights(rank, alpha, "transformer").load(folder)


def test_a_package_that_does_not_fit_peft_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing here uses torchao; peft raised an ImportError where it was installed and old."""
    (tmp_path / "torchao.py").touch()
    (tmp_path / "torchao-0.10.0.dist-info").mkdir()
    (tmp_path / "torchao-0.10.0.dist-info/METADATA").write_text(
        "Metadata-Version: 2.1\nName: torchao\nVersion: 0.10.0\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    is_torchao_available.cache_clear()
    try:
        with pytest.raises(ConfigError, match=r"model.train: peft cannot add LoRA: .*torchao.* 0.10.0.*; upgrade that"):
            add_lora(network(), RANK, ALPHA, FluxFillModel.spec.lora_targets)
    finally:
        is_torchao_available.cache_clear()


def test_saving_and_loading_is_exact(saved: tuple[Policy, dict[str, Tensor], Path]) -> None:
    policy, state, folder = saved
    back = load(folder)
    assert back.keys() == state.keys()
    assert all(torch.equal(back[name], t) for name, t in state.items())
    policy.load(back)
    assert all(torch.equal(policy.state()[name], t) for name, t in state.items())


def test_the_file_is_laid_out_as_diffusers_writes_it(saved: tuple[Policy, dict[str, Tensor], Path]) -> None:
    _, _, folder = saved
    assert "transformer.transformer_blocks.0.attn.to_q.lora_A.weight" in load_file(folder / FILE)
    rank, alpha, modules = lora_shape(folder)
    assert (rank, alpha) == (RANK, ALPHA)
    assert "transformer_blocks.0.attn.to_q" in modules
    theirs = network()
    theirs.load_lora_adapter(load_file(folder / FILE), prefix="transformer")
    assert theirs.transformer_blocks[0].attn.to_q.lora_A["default_0"].weight.shape[0] == RANK


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        (lambda t: t.pop(next(iter(t))), "missing: "),
        (lambda t: t.update({"transformer.x.lora_A.weight": torch.ones(1)}), r"unexpected: x\.lora_A"),
        (lambda t: t.update({next(iter(t)): torch.ones(7, 7)}), "of another shape: "),
        (lambda t: t.update({"unet.x.lora_A.weight": torch.ones(1)}), r"unexpected key 'unet\.x\.lora_A\.weight'"),
        (lambda t: t.update({"transformer.x.weight": torch.ones(1)}), r"unexpected key 'transformer\.x\.weight'"),
    ],
    ids=["a key less", "a key more", "another shape", "another network", "no LoRA"],
)
def test_keys_and_shapes_are_checked_exactly(
    saved: tuple[Policy, dict[str, Tensor], Path], change: Any, problem: str
) -> None:
    policy, _, folder = saved
    tensors = load_file(folder / FILE)
    with safe_open(folder / FILE, "pt") as file:
        metadata = file.metadata()
    change(tensors)
    save_file(tensors, folder / FILE, metadata=metadata)
    with pytest.raises(ValueError, match=problem):
        policy.load(load(folder))


def test_equal_weights_are_equal_files(saved: tuple[Policy, dict[str, Tensor], Path], tmp_path: Path) -> None:
    """To the last byte, and the reader of safetensors takes them; it writes metadata in random order by itself."""
    _, state, folder = saved
    for i in range(12):
        save_lora(state, tmp_path / str(i), ALPHA, RANK)
    assert len({(tmp_path / str(i) / FILE).read_bytes() for i in range(12)}) == 1
    with safe_open(folder / FILE, "pt") as first, safe_open(tmp_path / "0" / FILE, "pt") as again:
        assert first.metadata() == again.metadata() and list(first.keys()) == list(again.keys())
        assert all(torch.equal(first.get_tensor(name), again.get_tensor(name)) for name in first.keys())  # noqa: SIM118


@pytest.mark.parametrize(("rank", "alpha"), [(RANK + 1, ALPHA), (RANK, 2 * ALPHA)])
def test_another_rank_or_alpha_is_refused(
    saved: tuple[Policy, dict[str, Tensor], Path], rank: int, alpha: float
) -> None:
    """Another alpha would fit into the same shapes and silently scale every update."""
    remedy = r"set model\.train\.rank=3 model\.train\.alpha=5"
    with pytest.raises(ValueError, match=rf"rank 3 and alpha 5 were trained, but model\.train has .*; {remedy}"):
        load(saved[2], rank, alpha)


def test_files_that_are_not_there_or_damaged(saved: tuple[Policy, dict[str, Tensor], Path], tmp_path: Path) -> None:
    _, _, folder = saved
    path = folder / FILE
    whole = path.read_bytes()
    path.write_bytes(whole[:-10])
    with pytest.raises(ValueError, match="damaged weights"):
        load(folder)
    save_file(load_file_of(whole, tmp_path), path)
    with pytest.raises(ValueError, match=r"no 'transformer\.r' in its metadata"):
        load(folder)
    path.unlink()
    with pytest.raises(ValueError, match=r"no pytorch_lora_weights\.safetensors in it, which model\.train\.kind=lora"):
        load(folder)


def load_file_of(content: bytes, folder: Path) -> dict[str, Tensor]:
    path = folder / "copy.safetensors"
    path.write_bytes(content)
    return load_file(path)
