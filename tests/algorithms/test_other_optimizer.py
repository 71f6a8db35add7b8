"""`optimizer.factory`: a class of torch's interface in place of AdamW."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from decimal import Decimal
from typing import Any

import pytest
import torch
from torch import nn

from retouch.config import ConfigError
from retouch.config.run import OptimizerConfig
from retouch.engine import CheckpointError
from retouch.engine.sharding import sharded_optimizer, whole_optimizer
from retouch.engine.speed import make_optimizer, with_own_options
from retouch.registry import load_named
from retouch.training import build

from .runs import Config, Use, brightness, same_weights, train, weights

pytestmark = pytest.mark.usefixtures("bare", "shallow")

HERE = "tests.algorithms.test_other_optimizer"
CPU = torch.device("cpu")
RATES: list[float] = []


class Adaptive(torch.optim.Optimizer):
    """Estimates its step size, which it keeps in its group beside a count, as Prodigy does; no other state is in AdamW
    under the same name."""

    def __init__(self, parameters: Any, lr: float = 1.0, d0: float = 1e-3, growth: float = 1.1) -> None:
        super().__init__(parameters, {"lr": lr, "d": d0, "k": 0, "growth": growth})

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        del closure
        for group in self.param_groups:
            RATES.append(group["lr"])
            for parameter in group["params"]:
                if parameter.grad is not None:
                    total = self.state[parameter].setdefault("sum", torch.zeros_like(parameter))
                    total += parameter.grad
                    parameter -= group["lr"] * group["d"] * total / (total.norm() + 1e-8)
            group["k"] += 1
            group["d"] *= group["growth"]


class Shared(Adaptive):
    """Keeps what belongs to no parameter in its state, as torch's interface allows."""

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        super().step(closure)
        self.state["calls"] = self.state.get("calls", 0) + 1  # type: ignore[assignment]


class Pickled(Adaptive):
    """Keeps an object that torch does not load without running its code."""

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        super().step(closure)
        self.state[self.param_groups[0]["params"][0]]["owner"] = Decimal(1)


class Broken(Adaptive):
    def __init__(self, parameters: Any, lr: float) -> None:
        raise ImportError("no module named triton")


class NeedsClosure(Adaptive):
    def step(self, closure: Callable[[], float]) -> None:  # type: ignore[override]
        del closure


class Switched(Adaptive):
    def eval(self) -> None: ...


def no_optimizer(parameters: Any, lr: float) -> object:
    return parameters, lr


@pytest.mark.parametrize(
    ("factory", "options"),
    [
        (f"{HERE}:Adaptive", {"d0": 1e-2, "growth": 1.2}),
        pytest.param("torch.optim:SGD", {"momentum": 0.9, "nesterov": True}, marks=pytest.mark.full),
    ],
)
def test_a_run_resumes_bitwise(config: Config, scripted: Use, factory: str, options: dict[str, Any]) -> None:
    """And its rate follows the schedule; an option that the run file has no more is at its default."""
    scripted(brightness)
    own = {"optimizer__factory": factory, "optimizer__options": options, "optimizer__schedule": "linear"}
    own |= {"training__max_steps": 4, "training__checkpoint_every": 2, "optimizer__lr": 0.5}
    RATES.clear()
    whole, _ = train(config(name="whole", **own))
    kind = load_named("optimizer.factory", factory, "class")
    assert type(whole.engine.optimizer.optimizer) is kind
    rates = [0.5, 0.375, 0.25, 0.125] if "Adaptive" in factory else []
    assert rates == RATES
    middle = whole.dir.path / "checkpoints/step-000002"
    resumed, _ = train(config(name="resumed", resume=str(middle), **own))
    assert same_weights(weights(whole), weights(resumed))
    assert [*rates, *rates[2:]] == RATES
    with pytest.raises(CheckpointError, match=r"was written under optimizer\.factory="):
        train(config(name="other", resume=str(middle), training__max_steps=4))
    without = own | {"optimizer__options": {}, "training__max_steps": 3}
    left_out, _ = train(config(name="left_out", resume=str(middle), **without))
    default = inspect.signature(kind).parameters[last := [*options][-1]].default
    assert [group[last] for group in left_out.engine.optimizer.param_groups] == [default]


def test_a_state_that_could_not_be_read_again_stops_at_the_first_checkpoint(config: Config, scripted: Use) -> None:
    scripted(brightness)
    own = {"training__max_steps": 2, "training__checkpoint_every": 1, "optimizer__lr": 0.5}
    with pytest.raises(ConfigError, match=f"^optimizer.factory: given '{HERE}:Pickled', from whose state no run could"):
        train(config(name="pickled", optimizer__factory=f"{HERE}:Pickled", **own))


def test_entries_of_a_state_that_are_no_dicts_stay() -> None:
    optimizer = make_optimizer(OptimizerConfig(factory=f"{HERE}:Shared"), trained := matrices(), CPU)
    for parameter in trained:
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    saved = sharded_optimizer(whole_optimizer(optimizer.state_dict(), keep=True), trained)
    assert saved["state"]["calls"] == 1 and {*saved["state"]} == {0, 1, "calls"}


def matrices() -> list[nn.Parameter]:
    return [nn.Parameter(torch.ones(4, 2)), nn.Parameter(torch.ones(2, 4))]


def test_the_options_of_the_run_file_replace_those_of_a_checkpoint() -> None:
    """And nothing else does: what a class estimates stands in its group as well."""
    first = OptimizerConfig(factory=f"{HERE}:Adaptive", options={"d0": 1e-2, "growth": 2.0})
    trained = matrices()
    optimizer = make_optimizer(first, trained, CPU)
    for parameter in trained:
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    saved = optimizer.state_dict()
    later = first.model_copy(update={"options": {"d0": 1.0, "growth": 3.0}})
    merged = with_own_options(saved, make_optimizer(later, matrices(), CPU), later)
    [group] = merged["param_groups"]
    assert (group["d"], group["growth"], group["k"]) == (2e-2, 3.0, 1)
    assert merged["state"] is saved["state"]
    left_out = first.model_copy(update={"options": {}})
    for before, growth in (({"growth"}, 1.1), (set[str](), 2.0)):  # the default of the class, where it was an option
        merged = with_own_options(saved, make_optimizer(left_out, matrices(), CPU), left_out, before)
        assert merged["param_groups"][0]["growth"] == growth


def test_an_unknown_class_is_refused_before_the_model_is_loaded(
    config: Config, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(build, "load_model", lambda *_, **__: pytest.fail("loaded"))
    with pytest.raises(ConfigError, match=r"optimizer\.factory: .*has no class Absent"):
        build.build(config(optimizer__factory=f"{HERE}:Absent"))


def test_muon_of_torch_trains_matrices() -> None:
    config = OptimizerConfig(factory="torch.optim:Muon", lr=0.02, options={"weight_decay": 0.0})
    assert isinstance(make_optimizer(config, matrices(), CPU), torch.optim.Muon)
    with pytest.raises(ConfigError, match=r"^optimizer\.factory: given 'torch\.optim:Muon', which raised ValueError: "):
        make_optimizer(config, [nn.Parameter(torch.ones(2))], CPU)


@pytest.mark.parametrize(
    ("factory", "options", "told"),
    [
        (f"{HERE}:no_optimizer", {}, "made tuple; expected a subclass of torch.optim.Optimizer"),
        (f"{HERE}:NeedsClosure", {}, "needs a closure, or a switch between training and evaluation"),
        (f"{HERE}:Switched", {}, "needs a closure, or a switch between training and evaluation"),
        (f"{HERE}:Adaptive", {"beta": 1}, "unexpected keyword argument 'beta'; set optimizer.options to fit it"),
        (f"{HERE}:Broken", {}, "raised ImportError: no module named triton; set optimizer.options to fit it"),
        (f"{HERE}:Absent", {}, "has no class Absent"),
    ],
)
def test_what_is_no_optimizer_of_a_run_is_named(factory: str, options: dict[str, Any], told: str) -> None:
    with pytest.raises(ConfigError, match=f"^optimizer.factory: given '{factory}'.*{told}"):
        make_optimizer(OptimizerConfig(factory=factory, options=options), matrices(), CPU)


@pytest.mark.parametrize(
    ("own", "told"),
    [
        ({"factory": "Adaptive"}, r"factory: given 'Adaptive'; expected a class; set it to 'module:Class'"),
        ({"factory": "a:B", "betas": [0.5, 0.9]}, "betas: given, which AdamW reads, but optimizer.factory is 'a:B'"),
        ({"factory": "a:B", "state": "8bit"}, "state: given '8bit', which AdamW reads"),
        ({"factory": "a:B", "options": {"lr": 1}}, r"options: given lr, which is optimizer\.lr"),
        ({"options": {"momentum": 0.9}}, "options: given, but optimizer.factory is not set"),
    ],
)
def test_check_names_options_that_do_not_fit(config: Config, own: dict[str, Any], told: str) -> None:
    with pytest.raises(ConfigError, match=told):
        config(**{f"optimizer__{name}": value for name, value in own.items()})


@pytest.mark.parametrize("sharding", ["fsdp2", "zero2", "zero3"])
def test_its_state_is_not_sharded(config: Config, sharding: str) -> None:
    with pytest.raises(
        ConfigError, match=f"factory: given 'a:B' beside training.sharding={sharding}, which shards the"
    ):
        config(optimizer__factory="a:B", training__sharding=sharding)
