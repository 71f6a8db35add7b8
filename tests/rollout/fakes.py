"""A family of three numbers for flow and for epsilon schedules, and what its network was asked."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Literal

import torch
from torch import Tensor, nn

from retouch.core.rules import STEP_RULES
from retouch.core.schedule import AlphaBarSchedule, FlowSchedule, Schedule
from retouch.families.base import FamilySpec
from retouch.rollout.plan import StepPlan
from retouch.types import Condition, Example

SIZE = (8, 12)
CHANNELS = 2
ALPHA_BARS = torch.linspace(0.999, 0.02, 100, dtype=torch.float64)


class ThreeNumbers(nn.Module):
    """mix x + pull c + bend tanh(x t): row by row, and different at every time."""

    def __init__(self) -> None:
        """`rows` collects the rows of each forward."""
        super().__init__()
        self.numbers = nn.Parameter(torch.tensor([0.4, 0.7, -0.3]))
        self.rows: list[int] = []

    def forward(self, x: Tensor, t: Tensor, c: Tensor) -> Tensor:
        self.rows.append(len(x))
        mix, pull, bend = self.numbers
        c, t = c.view(-1, 1, 1, 1), t.view(-1, 1, 1, 1)
        return mix * x + pull * c + bend * torch.tanh(x * t)


class FakeModel:
    """Just enough of a family for rollouts and replay."""

    def __init__(self, prediction: Literal["flow", "epsilon"]) -> None:
        self.spec = FamilySpec("fake", prediction, CHANNELS, 2, 2, 1.0, frozenset(), (), "network")
        self.network = ThreeNumbers()

    def schedule(self, num_steps: int, size: tuple[int, int]) -> Schedule:
        del size
        if self.spec.prediction == "flow":
            return FlowSchedule.make(num_steps, 2.0)
        return AlphaBarSchedule.make(ALPHA_BARS, num_steps)

    def predict(self, network: nn.Module, x: Tensor, t: Tensor, condition: Condition) -> Tensor:
        return network(x, t / (1 if self.spec.prediction == "flow" else len(ALPHA_BARS)), condition.tensors["c"])

    def encode(self, examples: Sequence[Example], guidance_scale: float) -> Condition:
        del guidance_scale
        return condition_of([example.id for example in examples])

    def encoding(self) -> AbstractContextManager[None]:
        return nullcontext()

    def encode_images(self, images: Tensor) -> Tensor:
        return nn.functional.avg_pool2d(images[:, :CHANNELS], 2)


def condition_of(values: Sequence[float]) -> Condition:
    return Condition({"c": torch.tensor(values, dtype=torch.float32)}, None, SIZE)


def plan_of(
    model: FakeModel, rule: str, num_steps: int = 6, first: int = 0, stochastic: int = 3, trained: int | None = None
) -> StepPlan:
    trained = stochastic if trained is None else trained
    return StepPlan(model.schedule(num_steps, SIZE), STEP_RULES[rule], 0.7, first, stochastic, trained)
