"""One optimizer step: accumulation, clipping, divergence, precision; and checkpoints on disk."""

from __future__ import annotations

import importlib.util
import json
import re
from pathlib import Path

import accelerate
import pytest
import torch
import torch.distributed as dist
from accelerate import Accelerator
from accelerate.utils import parse_flag_from_env
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from retouch.config import ConfigError
from retouch.config.run import (
    OptimizerConfig,
    TrainingConfig,
)
from retouch.engine import CheckpointError, Checkpoints, Diverged, Engine, Policy, saved
from retouch.engine.engine import OVERFLOWS, PLUGINS
from retouch.engine.saved import complete_checkpoints
from retouch.process.process_wide import OVERRULED
from retouch.rewards.client.config import RewardClientConfig


class Plain(nn.Linear):
    def enable_gradient_checkpointing(self) -> None:
        pass


class Dropped(Plain):
    def __init__(self, *sizes: int) -> None:
        super().__init__(sizes[0], sizes[1])
        self.unused = nn.Parameter(torch.ones(1))


def engine_for(net: nn.Module, lr: float = 0.1, max_grad_norm: float = 1e9, precision: str = "no") -> Engine:
    made = Engine(
        TrainingConfig(mixed_precision=precision),  # type: ignore[arg-type]
        OptimizerConfig(lr=lr, max_grad_norm=max_grad_norm, weight_decay=0.0),
        seed=0,
    )
    made.prepare(net, gradient_checkpointing=False)
    made.new_optimizer()
    return made


def linear() -> Plain:
    net = Plain(2, 1, bias=False)
    net.weight.data = torch.tensor([[1.0, -2.0]])
    return net


def test_ddp_does_not_wait_for_weights_without_a_gradient() -> None:
    """Of a text stream whose end is dropped. A second forward is an error where DDP still waits for the first backward;
    it does not look for such weights where there are none."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        for dropped in (True, False):
            net = Dropped(2, 1)
            engine = Engine(TrainingConfig(mixed_precision="no"), OptimizerConfig(), seed=0)
            engine.prepare(net, gradient_checkpointing=False, some_without_gradient=dropped)
            handler = engine.accelerator.ddp_handler
            assert handler is not None and handler.find_unused_parameters == dropped
            wrapped = DistributedDataParallel(net, **handler.to_kwargs())
            for _ in range(2 if dropped else 1):
                wrapped(torch.ones(1, 2)).sum().backward()
    finally:
        dist.destroy_process_group()


def test_micro_batches_add_up_to_the_whole_batch() -> None:
    x, y = torch.randn(6, 2, generator=torch.Generator().manual_seed(0)), torch.zeros(6)
    weights: list[Tensor] = []
    for pieces in (1, 3):
        net = linear()
        engine = engine_for(net)
        for i, (bx, by) in enumerate(zip(x.chunk(pieces), y.chunk(pieces), strict=True)):
            with engine.micro_step(last=i == pieces - 1):
                engine.backward((engine.network(bx).flatten() - by).square().sum() / 6)
        engine.step(lr=0.1)
        weights.append(net.weight.detach().clone())
    torch.testing.assert_close(weights[0], weights[1], atol=1e-7, rtol=0)
    assert not torch.equal(weights[0], linear().weight)


def test_learning_rate_is_the_one_given() -> None:
    """AdamW's first step moves each weight by lr against the gradient's sign."""
    net = linear()
    engine = engine_for(net, lr=123.0)
    engine.backward(engine.network(torch.ones(1, 2)).sum())
    stats = engine.step(lr=0.25)
    torch.testing.assert_close(net.weight.detach(), torch.tensor([[0.75, -2.25]]), atol=1e-5, rtol=0)
    assert stats["grad_norm"] == pytest.approx(2**0.5) and stats["overflow"] == 0.0


GIVEN = {
    "ACCELERATE_DYNAMO_BACKEND": "EAGER",
    "ACCELERATE_GRADIENT_ACCUMULATION_STEPS": "4",
    "ACCELERATE_INIT_INCLUDE_BUFFERS": "true",
    "ACCELERATE_MIXED_PRECISION": "bf16",
    "ACCELERATE_USE_PARALLELISM_CONFIG": "true",
}

HARMLESS = {
    "refused by `Engine`, which names the remedy, or TRL's own": {
        "USE_DEEPSPEED", "USE_FSDP", "USE_MEGATRON_LM", "CONFIG_DS_FIELDS", "GRADIENT_CLIPPING",
    },
    "read beside one of the others alone": {"ALLOW_CP_STANDALONE", "DOWNCAST_BF16"},
    "choices of a device or of its memory": {
        "BYPASS_DEVICE_MAP", "CPU_AFFINITY", "IN_TPU_POD", "TORCH_DEVICE", "USE_CPU", "USE_SAGEMAKER",
    },
    "messages": {"DEBUG_MODE", "DEBUG_RDV_FILE", "ENABLE_RICH", "LOG_LEVEL"},
    "of the launcher": {"NUM_PROCESSES", "SAGEMAKER_DISTRIBUTED_TYPE"},
}  # fmt: skip
"""Why a run may find them in the environment -> variables of accelerate, after its prefix."""

BESIDE = ("DEEPSPEED_", "DYNAMO_", "FP8_")
"""Beginnings of those that are read beside USE_DEEPSPEED, DYNAMO_BACKEND and MIXED_PRECISION=fp8 alone."""


def test_settings_of_the_environment_change_nothing_and_are_told(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """accelerate reads them where none is given, as its launcher or a shell has set them for another program."""
    assert GIVEN.keys() == OVERRULED.keys()
    for name, value in GIVEN.items():
        monkeypatch.setenv(name, value)
    engine = engine_for(linear())
    assert [record.getMessage().partition("=")[0] for record in caplog.records] == list(GIVEN)
    assert type(engine.network) is Plain and engine.accelerator.mixed_precision == "no"
    assert engine.accelerator.parallelism_config is None
    assert not parse_flag_from_env("ACCELERATE_INIT_INCLUDE_BUFFERS")
    engine.backward(engine.network(torch.ones(1, 2)).sum())
    assert engine.step(lr=0.25)["grad_norm"] == pytest.approx(2**0.5)
    for name in GIVEN:  # as its launcher sets them for every run
        monkeypatch.setenv(name, "no" if "ACCUMULATION" not in name else "1")
    caplog.clear()
    engine_for(linear())
    assert not caplog.records


def test_every_variable_of_accelerate_is_overruled_or_harmless() -> None:
    """A new one that its source has is to be looked at."""
    folder = Path(accelerate.__file__).parent
    named = {
        name
        for file in folder.rglob("*.py")
        if not {"commands", "test_utils"} & set(file.relative_to(folder).parts)
        for name in re.findall(r"\bACCELERATE_([A-Z0-9_]*[A-Z0-9])\b", file.read_text(encoding="utf-8"))
    }
    known = {name.removeprefix("ACCELERATE_") for name in OVERRULED}.union(*HARMLESS.values())
    assert {name for name in named if not name.startswith(BESIDE)} - known == set()


def test_fp16_that_never_finds_a_scale_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """A step that updates begins the count anew."""
    engine = engine_for(linear())
    skips = [True] * (OVERFLOWS - 1) + [False] + [True] * OVERFLOWS
    outcomes = iter(skips)
    monkeypatch.setattr(engine._parallel, "step", lambda lr: (1.0, next(outcomes)))
    taken = [engine.step(lr=0.1)["overflow"] for _ in skips[:-1]]
    assert taken == [float(skipped) for skipped in skips[:-1]]
    with pytest.raises(Diverged, match="the gradient is NaN or Inf in 20 consecutive fp16 steps"):
        engine.step(lr=0.1)


def test_a_step_that_is_not_finite_changes_nothing() -> None:
    net = linear()
    engine = engine_for(net)
    engine.backward(engine.network(torch.tensor([[float("inf"), 1.0]])).sum())
    with pytest.raises(Diverged, match="gradient norm is"):
        engine.step(lr=0.1)
    assert torch.equal(net.weight, linear().weight)
    engine.backward(engine.network(torch.ones(1, 2)).sum())  # nothing of the bad gradient is left
    assert engine.step(lr=0.1)["grad_norm"] == pytest.approx(2**0.5)


def test_gradients_of_a_step_are_gone_in_the_next() -> None:
    net = linear()
    engine = engine_for(net)
    for _ in range(2):
        engine.backward(engine.network(torch.ones(1, 2)).sum())
        assert engine.step(lr=0.1)["grad_norm"] == pytest.approx(2**0.5)


def test_the_network_stays_in_eval_mode() -> None:
    net = linear()
    net.train()
    engine_for(net)
    assert not net.training


def test_fp16_without_a_gpu_is_refused_in_one_sentence() -> None:
    if torch.cuda.is_available():
        pytest.skip("there is a GPU")
    with pytest.raises(ConfigError, match=r"training\.mixed_precision: given 'fp16'"):
        engine_for(linear(), precision="fp16")


def test_sharding_on_one_process_is_none() -> None:
    """The run file of many GPUs runs on one."""
    net = linear()
    made = Engine(TrainingConfig(mixed_precision="no", sharding="fsdp2"), OptimizerConfig(), seed=0)
    assert made.prepare(net, gradient_checkpointing=False) is net
    assert type(net) is Plain and type(net.weight) is nn.Parameter


def test_the_plugins_of_accelerate_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """They would wrap the network a second time, and save it their way."""
    for plugin in PLUGINS:
        monkeypatch.setattr(Accelerator, "distributed_type", plugin)
        with pytest.raises(ConfigError, match=rf"distributed_type is {plugin.value}; set MULTI_GPU.*sharding=fsdp2"):
            Engine(TrainingConfig(mixed_precision="no"), OptimizerConfig(), seed=0)


def test_an_engine_that_is_not_installed_is_refused_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """By the environment that accelerate's launcher made; accelerate itself raises an ImportError."""
    if importlib.util.find_spec("megatron") is not None:
        pytest.skip("Megatron is installed")
    monkeypatch.setenv("ACCELERATE_USE_MEGATRON_LM", "true")
    with pytest.raises(ConfigError, match=r"configuration: Megatron is not installed.*; set MULTI_GPU.*sharding=fsdp2"):
        engine_for(linear())


def test_bf16_autocasts_the_forward_and_keeps_fp32_weights() -> None:
    net = linear()
    engine = engine_for(net, precision="bf16")
    x = torch.tensor([[1.0009765625, 0.0]])  # not a bf16 number
    assert float(engine.network(x).detach()) == 1.0
    assert net.weight.dtype == torch.float32
    engine_for(linear(), precision="no")


def test_autocast_keeps_no_lowered_copies_of_full_weights() -> None:
    """They would stay until the end of the forward, of every weight that is trained."""
    kept: list[bool] = []

    class Net(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            kept.append(torch.is_autocast_cache_enabled())
            return super().forward(x)

    engine = engine_for(Net(2, 2), precision="bf16")
    engine.network(torch.ones(1, 2))
    assert kept == [False]


# --- checkpoints ---


def checkpoints(root: Path, keep: int | None = None) -> Checkpoints:
    def save(state: object, folder: Path) -> None:
        folder.mkdir(parents=True)
        torch.save(dict(state), folder / "w.pt")  # type: ignore[call-overload]

    def load(folder: Path) -> dict[str, Tensor]:
        return torch.load(folder / "w.pt", weights_only=True)

    return Checkpoints(root, save, load, keep)


def test_a_checkpoint_restores_weights_optimizer_snapshots_and_state(tmp_path: Path) -> None:
    net = linear()
    engine, policy, store = engine_for(net), Policy(net), checkpoints(tmp_path)
    policy.snapshot("ema")
    policy.snapshot("reference")
    for _ in range(3):
        engine.backward(engine.network(torch.randn(2, 2)).square().sum())
        engine.step(lr=0.1)
    folder = store.save(3, engine, policy, {"step": 3}, {"latents": torch.arange(3.0)})
    drawn = torch.rand(2)
    expected = one_more_step(engine, policy)
    other = linear()
    fresh_engine, fresh_policy = engine_for(other), Policy(other)
    state, rollouts = store.load(folder, fresh_engine, fresh_policy)
    assert state == {"step": 3} and rollouts is not None and rollouts["latents"].tolist() == [0.0, 1.0, 2.0]
    assert torch.equal(torch.rand(2), drawn)
    assert set(fresh_policy.snapshots) == {"ema", "reference"}
    assert torch.equal(one_more_step(fresh_engine, fresh_policy), expected)


def one_more_step(engine: Engine, policy: Policy) -> Tensor:
    engine.backward(engine.network(torch.ones(1, 2)).square().sum())
    engine.step(lr=0.1)
    return next(iter(policy.parameters.values())).detach().clone()


def test_an_incomplete_checkpoint_does_not_count(tmp_path: Path) -> None:
    net = linear()
    engine, policy, store = engine_for(net), Policy(net), checkpoints(tmp_path)
    first = store.save(2, engine, policy, {})
    second = store.save(4, engine, policy, {})
    assert complete_checkpoints(tmp_path) == [first, second]
    (second / "complete.json").unlink()
    assert complete_checkpoints(tmp_path) == [first]
    with pytest.raises(CheckpointError, match=r"no complete\.json"):
        store.load(second, engine, policy)


def test_a_write_that_died_leaves_nothing_behind(tmp_path: Path) -> None:
    net = linear()
    engine, policy, store = engine_for(net), Policy(net), checkpoints(tmp_path)
    (tmp_path / ".writing-step-000002").mkdir(parents=True)
    (tmp_path / ".writing-step-000002" / "half").write_text("x")
    assert complete_checkpoints(tmp_path) == []
    store.save(3, engine, policy, {})
    assert [p.name for p in sorted(tmp_path.iterdir())] == ["step-000003"]
    listed = json.loads((tmp_path / "step-000003" / "complete.json").read_text())
    assert listed["step"] == 3 and "optimizer.pt" in listed["files"]


@pytest.mark.parametrize("flush", [1, 2])
def test_a_write_that_fails_leaves_the_checkpoint_before_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, flush: int
) -> None:
    """A full disk is seen when files are pushed to it: none that may be missing a file counts as complete."""
    net = linear()
    engine, policy, store = engine_for(net), Policy(net), checkpoints(tmp_path)
    first = store.save(2, engine, policy, {})
    calls: list[Path] = []

    def full(folder: Path) -> None:
        calls.append(folder)
        if len(calls) == flush:
            raise OSError("no space left on device")

    monkeypatch.setattr(saved, "flush", full)
    with pytest.raises(OSError, match="no space left"):
        store.save(4, engine, policy, {})
    assert complete_checkpoints(tmp_path) == [first]


def test_pruning_keeps_the_newest_and_the_pinned(tmp_path: Path) -> None:
    net = linear()
    engine, policy, store = engine_for(net), Policy(net), checkpoints(tmp_path, keep=2)
    for step in (1, 2, 3, 4, 5):
        store.save(step, engine, policy, {}, pinned=step == 1)
    assert [p.name for p in complete_checkpoints(tmp_path)] == ["step-000001", "step-000004", "step-000005"]


def test_weights_of_another_model_are_refused(tmp_path: Path) -> None:
    net = linear()
    engine, policy, store = engine_for(net), Policy(net), checkpoints(tmp_path)
    folder = store.save(1, engine, policy, {})
    other = Plain(3, 1, bias=False)
    with pytest.raises(CheckpointError, match=r"of another shape: weight.*model\.train"):
        store.load(folder, engine_for(other), Policy(other))
    assert float(other.weight.detach().abs().sum()) > 0


def test_processes_wait_two_hours_or_twice_as_long_as_for_rewards() -> None:
    """In the collectives of the engine."""
    assert RewardClientConfig().collective_s == 7200
    patient = RewardClientConfig(timeout_s=60, outage_wait_s=7200).collective_s
    assert patient == 2 * 7260
    made = Engine(TrainingConfig(mixed_precision="no"), OptimizerConfig(), 0, patient)
    assert made.accelerator.init_handler.timeout.total_seconds() == patient  # type: ignore[union-attr]
