"""Optimizers and compiled blocks: which is made, and what is refused."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest
import torch
from diffusers import FluxTransformer2DModel
from torch import nn

from retouch.adapters.lora import add_lora
from retouch.config import ConfigError, RunConfig
from retouch.config.run import (
    OptimizerConfig,
    TrainingConfig,
)
from retouch.engine import engine as engine_module
from retouch.engine.speed import (
    choose_kernels,
    compile_blocks,
    computed_here,
    leave_casts_to_autocast,
    make_optimizer,
)
from retouch.use import precompute as precompute_module

CPU, GPU = torch.device("cpu"), torch.device("cuda")


def weights() -> list[nn.Parameter]:
    return [nn.Parameter(torch.ones(2))]


def test_adamw_is_fused_where_torch_has_that(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[dict[str, Any]] = []
    monkeypatch.setattr(torch.optim, "AdamW", lambda parameters, **options: asked.append(options))
    config = OptimizerConfig(lr=3e-4, weight_decay=0.1, betas=(0.8, 0.9), eps=1e-6)
    for device in (CPU, GPU, torch.device("meta")):
        make_optimizer(config, weights(), device)
    same = {"lr": 3e-4, "betas": (0.8, 0.9), "weight_decay": 0.1, "eps": 1e-6}
    assert asked == [{**same, "fused": True}, {**same, "fused": True}, {**same, "fused": False}]


def test_fused_adamw_is_adamw() -> None:
    """Twenty steps of weights and gradients of many sizes, with decay."""
    config = OptimizerConfig(lr=1e-2, weight_decay=0.1)
    ends = list[torch.Tensor]()
    for fused in (True, False):
        draw = torch.Generator().manual_seed(0)
        trained = [nn.Parameter(10.0**-i * torch.randn(5, 7, generator=draw)) for i in range(6)]
        optimizer = make_optimizer(config, trained, CPU)
        if not fused:
            optimizer = torch.optim.AdamW(trained, lr=1e-2, betas=config.betas, weight_decay=0.1, eps=config.eps)
        for step in range(20):
            for parameter in trained:
                parameter.grad = 10.0 ** -(step % 4) * torch.randn(5, 7, generator=draw)
            optimizer.step()
        ends.append(torch.cat([p.detach().flatten() for p in trained]))
    torch.testing.assert_close(ends[0], ends[1], rtol=1e-5, atol=1e-7)


def test_a_checkpoint_does_not_say_how_adamw_is_computed() -> None:
    """One of another machine, or of an older version, whose AdamW was not fused."""
    trained = weights()
    old = torch.optim.AdamW(trained, lr=0.5)
    trained[0].grad = torch.ones(2)
    old.step()
    state = old.state_dict()
    assert not state["param_groups"][0]["fused"]
    new = make_optimizer(OptimizerConfig(), trained, CPU)
    new.load_state_dict(computed_here(state, new))
    assert new.param_groups[0]["fused"] and new.param_groups[0]["lr"] == 0.5
    new.step()
    assert float(new.state[trained[0]]["step"]) == 2.0


def test_weights_in_another_order_of_memory_are_not_fused_on_a_cpu() -> None:
    made = make_optimizer(OptimizerConfig(), [nn.Parameter(torch.ones(2, 3).t())], CPU)
    assert not made.param_groups[0]["fused"]


def test_moments_of_8_bits_are_those_of_bitsandbytes(monkeypatch: pytest.MonkeyPatch) -> None:
    """With the options of the run file; nothing of it is installed here."""
    library = SimpleNamespace(optim=SimpleNamespace(AdamW8bit=lambda parameters, **options: (parameters, options)))
    monkeypatch.setitem(sys.modules, "bitsandbytes", library)
    trained = weights()
    made = make_optimizer(OptimizerConfig(state="8bit", lr=2e-5), trained, GPU)
    assert made[0] is trained
    assert made[1] == {"lr": 2e-5, "betas": (0.9, 0.999), "weight_decay": 1e-4, "eps": 1e-8}


def test_moments_of_8_bits_need_a_gpu_and_the_library(monkeypatch: pytest.MonkeyPatch) -> None:
    config = OptimizerConfig(state="8bit")
    with pytest.raises(ConfigError) as caught:
        make_optimizer(config, weights(), CPU)
    assert str(caught.value) == (
        "optimizer.state: given '8bit', which needs a GPU, but the device is cpu; set optimizer.state=fp32"
    )
    monkeypatch.setitem(sys.modules, "bitsandbytes", None)
    with pytest.raises(ConfigError) as caught:
        make_optimizer(config, weights(), GPU)
    assert str(caught.value) == (
        "optimizer.state: given '8bit', which needs bitsandbytes: pip install bitsandbytes, or set optimizer.state=fp32"
    )


def test_a_network_that_names_no_blocks_is_not_compiled() -> None:
    with pytest.raises(ConfigError, match="Linear has no repeated blocks; set compile=false"):
        compile_blocks(nn.Linear(2, 2))


def test_every_variant_of_a_block_is_compiled() -> None:
    """Blocks of more widths than torch's limit, each with and without gradients: none goes on uncompiled."""

    class Net(nn.Module):
        _repeated_blocks = ("Block",)

        def __init__(self) -> None:
            super().__init__()
            self.blocks = nn.ModuleList([Block(width) for width in range(2, 14)])

        def compile_repeated_blocks(self, **options: Any) -> None:
            for block in self.blocks:
                block.compile(**options)

    class Block(nn.Module):
        def __init__(self, width: int) -> None:
            super().__init__()
            self.width = width
            self.layer = nn.Linear(width, width)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.layer(x)

    limits: Any = torch._dynamo.config
    torch._dynamo.reset()
    with limits.patch(recompile_limit=8, accumulated_recompile_limit=256, fail_on_recompile_limit_hit=True):
        net = Net()
        compile_blocks(net, "eager")
        for block in net.blocks:
            block(torch.ones(3, block.width))
            with torch.no_grad():
                block(torch.ones(2, block.width))
    torch._dynamo.reset()


@pytest.mark.parametrize("precision", ["no", "bf16"])
def test_kernels_of_a_gpu(precision: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Settings of the process, which need no GPU to be made; tests/cuda shows what they do."""
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", "")  # so that what is set below goes again
    monkeypatch.delenv("CUBLAS_WORKSPACE_CONFIG")
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", True)
    before = torch.backends.cuda.cudnn_sdp_enabled()
    try:
        training = TrainingConfig(mixed_precision=precision, deterministic=True)  # type: ignore[arg-type]
        torch.set_float32_matmul_precision("high")  # as in NVIDIA's images
        choose_kernels(CPU, training)
        assert torch.get_float32_matmul_precision() == "highest" and not torch.backends.cuda.matmul.allow_tf32
        assert not torch.are_deterministic_algorithms_enabled()
        assert torch.backends.cudnn.allow_tf32 and torch.backends.cuda.cudnn_sdp_enabled() == before
        choose_kernels(GPU, training)
        assert torch.are_deterministic_algorithms_enabled() and os.environ["CUBLAS_WORKSPACE_CONFIG"] == ":4096:8"
        assert not torch.backends.cuda.cudnn_sdp_enabled()
        assert torch.backends.cudnn.allow_tf32 == (precision == "bf16")
        choose_kernels(GPU, training.model_copy(update={"deterministic": False}))
        assert not torch.are_deterministic_algorithms_enabled()
    finally:
        torch.set_float32_matmul_precision("highest")
        torch.use_deterministic_algorithms(False)
        torch.backends.cuda.enable_cudnn_sdp(before)


def test_lora_under_autocast_takes_its_input_as_it_is() -> None:
    """Output and gradients bit for bit those of peft's own way, which raises the input to fp32 first."""
    results: list[tuple[torch.Tensor, ...]] = []
    x = torch.randn(5, 16, generator=torch.Generator().manual_seed(1)).bfloat16()
    for leave in (False, True):
        torch.manual_seed(0)
        network: Any = FluxTransformer2DModel(
            num_layers=0, num_single_layers=1, attention_head_dim=8, num_attention_heads=2, axes_dims_rope=(2, 2, 4)
        ).bfloat16()
        with patch("retouch.adapters.lora.fuse_lora"):  # peft's own layers, as on convolutions and under ZeRO-3
            add_lora(network, 4, 8, ["attn.to_q"])
        adapted = network.single_transformer_blocks[0].attn.to_q
        nn.init.normal_(adapted.lora_B["default"].weight)
        if leave:
            leave_casts_to_autocast(network)
        seen: list[torch.dtype] = []
        adapted.lora_A["default"].register_forward_pre_hook(lambda _, args, seen=seen: seen.append(args[0].dtype))
        given = x.clone().requires_grad_()
        with torch.autocast("cpu", torch.bfloat16):
            out = adapted(given)
        out.float().square().sum().backward()
        assert seen == [torch.bfloat16 if leave else torch.float32]
        factors = [adapted.lora_A["default"].weight.grad, adapted.lora_B["default"].weight.grad]
        results.append((out, given.grad, *factors))  # type: ignore[arg-type]
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


def test_what_computes_chooses_its_kernels(config: Callable[..., RunConfig], monkeypatch: pytest.MonkeyPatch) -> None:
    """Training and use through the engine; precomputation, whose numbers must be those of training."""
    asked: list[tuple[str, TrainingConfig]] = []

    def noted(device: torch.device, training: TrainingConfig) -> None:
        asked.append((device.type, training))

    monkeypatch.setattr(engine_module, "choose_kernels", noted)
    monkeypatch.setattr(precompute_module, "choose_kernels", noted)
    given = config(training__deterministic=True, training__mixed_precision="bf16")
    engine_module.Engine(given.training, given.optimizer, given.seed)
    precompute_module.precompute(given, Path(given.logging.dir) / "cache")
    assert asked == 2 * [("cpu", given.training)]
