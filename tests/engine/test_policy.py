"""Snapshots: named copies of the trained weights that come and go without a trace."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from retouch.engine import OutOfMemory, Policy


def network() -> nn.Sequential:
    torch.manual_seed(0)
    made = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2))
    made[0].bias.requires_grad_(False)
    return made


def test_only_trained_weights_are_copied() -> None:
    policy = Policy(network())
    assert sorted(policy.parameters) == ["0.weight", "1.bias", "1.weight"]
    assert policy.size == 12 + 8 + 2
    with pytest.raises(ValueError, match="no parameter of the network requires a gradient"):
        Policy(network().requires_grad_(False))


@pytest.mark.parametrize("exchange", [False, True])
def test_use_swaps_and_restores_bit_for_bit(exchange: bool) -> None:
    net = network()
    policy = Policy(net, exchange)
    x = torch.randn(5, 3)
    policy.snapshot("reference")
    before = net(x)
    with torch.no_grad():
        for p in policy.parameters.values():
            p.add_(1.0)
    moved = {n: p.detach().clone() for n, p in policy.parameters.items()}
    with policy.use("reference"):
        assert not torch.is_grad_enabled()
        assert torch.equal(net(x), before)
    assert all(torch.equal(policy.parameters[n], moved[n]) for n in moved)
    assert all(p.requires_grad for p in policy.parameters.values())
    with policy.use("reference"):  # the snapshot itself is unharmed
        assert torch.equal(net(x), before)


@pytest.mark.parametrize("exchange", [False, True])
def test_use_restores_after_an_error(exchange: bool) -> None:
    policy = Policy(network(), exchange)
    policy.snapshot("old")
    with torch.no_grad():
        policy.parameters["1.bias"].add_(1.0)
    kept = policy.parameters["1.bias"].detach().clone()
    with pytest.raises(RuntimeError, match="inside"), policy.use("old"):
        raise RuntimeError("inside")
    assert torch.equal(policy.parameters["1.bias"], kept)
    assert torch.is_grad_enabled()


def test_weights_that_trade_memory_with_a_snapshot_stay_the_same_tensors() -> None:
    """An optimizer and a wrapper hold them; nothing is allocated, and every pointer comes back."""
    policy = Policy(network(), exchange=True)
    policy.snapshot("old")
    weights = list(policy.parameters.values())
    own, copies = ([t.data_ptr() for t in ts] for ts in (weights, policy.state("old").values()))
    with policy.use("old"):
        assert [p.data_ptr() for p in policy.parameters.values()] == copies
        assert all(p is q for p, q in zip(policy.parameters.values(), weights, strict=True))
    assert [p.data_ptr() for p in weights] == own
    assert [t.data_ptr() for t in policy.state("old").values()] == copies


@pytest.mark.parametrize("exchange", [False, True])
def test_a_swap_between_a_forward_and_its_backward_is_refused(exchange: bool) -> None:
    net = network()
    policy = Policy(net, exchange)
    policy.snapshot("old")
    loss = net(torch.randn(2, 3)).sum()
    with policy.use("old"):
        pass
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


@pytest.mark.parametrize("exchange", [False, True])
def test_a_snapshot_in_use_before_a_forward_leaves_its_gradients_alone(exchange: bool) -> None:
    net = network()
    policy = Policy(net, exchange)
    policy.snapshot("reference")
    with policy.use("reference"):
        net(torch.randn(2, 3))
    net(torch.randn(2, 3)).sum().backward()
    assert all(p.grad is not None for p in policy.parameters.values())


def test_ema_by_hand() -> None:
    policy = Policy(network())
    policy.snapshot("ema")
    start = policy.state("ema")["1.bias"].clone()
    with torch.no_grad():
        policy.parameters["1.bias"].add_(2.0)
    policy.blend("ema", 0.75)
    torch.testing.assert_close(policy.state("ema")["1.bias"], start + 0.5)
    policy.blend("ema", 0.75)
    torch.testing.assert_close(policy.state("ema")["1.bias"], start + 0.875)


def test_loading_is_exact_or_refused() -> None:
    policy = Policy(network())
    good = {n: torch.full_like(p, 2.0) for n, p in policy.parameters.items()}
    policy.load(good)
    assert float(policy.parameters["1.bias"].detach().sum()) == 4.0
    policy.load(good, "old")
    assert torch.equal(policy.state("old")["1.bias"], torch.full((2,), 2.0))
    for wrong, message in (
        ({k: v for k, v in good.items() if k != "1.bias"}, "missing: 1.bias"),
        ({**good, "extra": torch.zeros(1)}, "unexpected: extra"),
        ({**good, "1.bias": torch.zeros(3)}, "of another shape: 1.bias"),
    ):
        with pytest.raises(ValueError, match=message):
            policy.load(wrong)
    with pytest.raises(KeyError, match="no snapshot 'ema'"), policy.use("ema"):
        pass


def test_memory_that_ends_in_a_swap_is_no_forward_to_take_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """Some weights are a snapshot's by then: to go on with half the rows would train the mixture."""
    policy = Policy(nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)))
    policy.snapshot("reference")
    calls: list[int] = []
    clone = torch.Tensor.clone

    def failing(tensor: torch.Tensor) -> torch.Tensor:
        calls.append(1)
        if len(calls) == 3:
            raise torch.OutOfMemoryError("no room")
        return clone(tensor)

    monkeypatch.setattr(torch.Tensor, "clone", failing)
    refused = pytest.raises(OutOfMemory, match="while swapping the weights with the snapshot 'reference'; resume from")
    with refused, policy.use("reference"):
        pass
