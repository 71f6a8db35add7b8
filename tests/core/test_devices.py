"""No function of a forward asks its device for a number: a GPU would have to finish all it has been given first.

Tensors on the meta device have shapes and no numbers, so that asking for one is an error.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from retouch.core import reduce, steps
from retouch.core.objectives.dpo import dpo_loss
from retouch.core.objectives.grpo import gaussian_kl, grpo_loss, guard_log_probs
from retouch.core.objectives.nft import nft_loss
from retouch.core.objectives.sft import flow_matching_loss
from retouch.core.reduce import row_mean
from retouch.core.rules import STEP_RULES

ROWS = 3


def meta(*shape: int) -> Tensor:
    return torch.empty(shape or (ROWS,), device="meta")


X, REGION, B = meta(ROWS, 2, 4, 4), meta(ROWS, 1, 4, 4), meta()

FUNCTIONS: dict[str, Callable[[], object]] = {
    "row_mean": lambda: row_mean(X, REGION),
    "gaussian_log_prob": lambda: steps.gaussian_log_prob(X, X, B, REGION),
    "gaussian_log_prob, published": lambda: steps.gaussian_log_prob(X, X, B, REGION, "published"),
    "gaussian_kl": lambda: gaussian_kl(X, X, B, REGION, "published", B),
    "guard_log_probs": lambda: guard_log_probs(B, B, X, X, B, REGION),
    "grpo_loss": lambda: grpo_loss(B, B, B, 1e-4, B, meta(1)[0]),
    "dpo_loss": lambda: dpo_loss(B, B, B, B, 100.0, B, meta(1)[0]),
    "nft_loss": lambda: nft_loss(X, X, X, X, B, B, 0.5, region=REGION, weight=B, normalizer=meta(1)[0]),
    "flow_matching_loss": lambda: flow_matching_loss(X, X, X, REGION, B, meta(1)[0]),
    **{
        f"step {name}": lambda rule=rule: rule.mean_std(
            X, X, B, B, *((0.5, 0.9) if rule.takes_second_level else (0.5,))
        )
        for name, rule in STEP_RULES.items()
    },
}


@pytest.mark.parametrize("name", FUNCTIONS)
def test_nothing_is_asked_of_the_device(name: str) -> None:
    FUNCTIONS[name]()


def test_asking_would_be_seen() -> None:
    with pytest.raises((RuntimeError, NotImplementedError)):
        bool((REGION > 0).all())


def test_what_is_not_asked_ends_in_nan(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the CPU raises, another device gives NaN, which stops the run at the gradient's norm; here with checks off.
    A plan refuses a std of 0 beforehand."""
    ones = torch.ones(2, 1, 2, 2)
    one_empty = torch.stack([torch.zeros(1, 2, 2), torch.ones(1, 2, 2)])
    flat = torch.tensor([0.0, 0.5])
    calls = (lambda: row_mean(ones, one_empty), lambda: steps.gaussian_log_prob(ones, 2 * ones, flat))
    for call, message in zip(calls, ("empty region", "std is 0"), strict=True):
        with pytest.raises(ValueError, match=message):
            call()
    for module in (reduce, steps):
        monkeypatch.setattr(module, "may_ask", lambda t: False)
    assert [call().isnan().tolist() for call in calls] == [[True, False]] * 2
