"""Every metric is reduced as declared, whatever the split into micro-batches and ranks."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from retouch.observe import Metrics
from retouch.observe.metrics import REDUCTIONS


class OneRank:
    """An engine of one process.

    Attributes:
        exchanges: number of collectives so far.
    """

    device = torch.device("cpu")
    exchanges = 0

    def sum(self, value: Tensor) -> Tensor:
        self.exchanges += 1
        return value

    def gather(self, value: Tensor) -> Tensor:
        self.exchanges += 1
        return value


class TwoAlike(OneRank):
    """Two ranks that hold the same."""

    def sum(self, value: Tensor) -> Tensor:
        return 2 * value

    def gather(self, value: Tensor) -> Tensor:
        return torch.cat([value, value])


def reduced(engine: Any, *parts: tuple[dict[str, float], float]) -> dict[str, float]:
    metrics = Metrics()
    for values, weight in parts:
        metrics.add({name: torch.tensor(value) for name, value in values.items()}, weight)
    return metrics.reduce(engine)


def test_means_are_weighted_by_rows() -> None:
    """3 rows of .2 and 1 row of .6 are 4 rows of .3, not .4."""
    assert reduced(OneRank(), ({"error": 0.2}, 3), ({"error": 0.6}, 1)) == {"error": pytest.approx(0.3)}


def test_losses_are_summed_and_extremes_are_kept() -> None:
    parts = ({"loss": 0.25, "max_abs_log_ratio": 0.1}, 1), ({"loss": 0.5, "max_abs_log_ratio": 0.05}, 9)
    assert reduced(OneRank(), *parts) == {"loss": 0.75, "max_abs_log_ratio": pytest.approx(0.1)}


def test_ranks_add_to_a_sum_and_leave_a_mean() -> None:
    found = reduced(TwoAlike(), ({"loss": 0.5, "kl": 0.5, "max_abs_log_ratio": 0.5}, 2))
    assert found == {"loss": 1.0, "kl": 0.5, "max_abs_log_ratio": 0.5}


def test_all_metrics_are_exchanged_at_once() -> None:
    engine, values = OneRank(), dict.fromkeys(REDUCTIONS, 0.5)
    assert reduced(engine, (values, 2), (values, 1)) == {**values, "loss": 1.0}
    assert engine.exchanges == 2  # a sum and the maxima


def test_ranks_may_add_in_another_order() -> None:
    sent: list[list[float]] = []

    class Kept(OneRank):
        def sum(self, value: Tensor) -> Tensor:
            sent.append(value.tolist())
            return value

    values = {"kl": 0.25, "loss": 0.5, "error": 1.0}
    one, other = (reduced(Kept(), ({name: values[name] for name in names}, 1)) for names in (values, reversed(values)))
    assert one == other == values
    assert sent[0] == sent[1]


def test_rows_without_weight_do_not_count() -> None:
    assert reduced(OneRank(), ({"ratio": 1.0}, 2), ({"ratio": 99.0}, 0)) == {"ratio": 1.0}
    assert reduced(OneRank(), ({"ratio": 99.0}, 0)) == {"ratio": 0.0}  # never NaN


def test_a_step_starts_empty() -> None:
    metrics = Metrics()
    metrics.add({"error": torch.tensor(1.0)}, 1)
    metrics.reduce(OneRank())  # type: ignore[arg-type]
    assert metrics.reduce(OneRank()) == {}  # type: ignore[arg-type]


def test_a_metric_without_a_declared_reduction_is_refused() -> None:
    with pytest.raises(KeyError, match="'accuracy' has no declared reduction"):
        Metrics().add({"accuracy": torch.tensor(1.0)}, 1)
    assert set(REDUCTIONS.values()) == {"mean", "sum", "max"}


def test_a_reduction_that_a_module_declares_is_used(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(REDUCTIONS, "good_share", "sum")
    metrics = Metrics()
    for share in (0.25, 0.5):
        metrics.add({"good_share": torch.tensor(share)}, 1)
    assert metrics.reduce(OneRank()) == {"good_share": 0.75}  # type: ignore[arg-type]


def test_metrics_hold_no_graph() -> None:
    value = torch.tensor(2.0, requires_grad=True)
    metrics = Metrics()
    metrics.add({"error": value * 3}, torch.tensor(1.0))
    assert metrics.reduce(OneRank()) == {"error": 6.0}  # type: ignore[arg-type]
