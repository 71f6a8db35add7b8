"""Stochastic step rules by name. Imports no torch: a run file is checked against these, sampling calls them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Literal

from retouch.registry import Registry, load_named

if TYPE_CHECKING:
    from torch import Tensor


_VALUES = {"prediction": ("flow", "epsilon"), "strength": ("noise_level", "eta")}
"""Field of a rule -> its values. A dataclass does not check them, and a plug-in may have no type checker."""


@dataclass(frozen=True)
class StepRule:
    """One stochastic solver step and its properties.

    Attributes:
        prediction: what the model must predict.
        strength: key of `rollout` that scales the noise.
        default: published value of `strength`.
        step: "module:function" (x, prediction, level, level_next, strength) -> (mean, std), see `retouch.core.steps`.
        is_share: `strength` is a share in (0, 1].
        ends_without_noise: the last step has a std of 0, hence no density, and is never trained.
        takes_second_level: the function takes the second level of the schedule as its last argument (sigma_max).
    """

    prediction: Literal["flow", "epsilon"]
    strength: Literal["noise_level", "eta"]
    default: float
    step: str
    is_share: bool = False
    ends_without_noise: bool = False
    takes_second_level: bool = False

    def __post_init__(self) -> None:
        for name, meanings in _VALUES.items():
            value = getattr(self, name)
            if value not in meanings:
                raise ValueError(f"StepRule.{name}: given {value!r}; set one of {', '.join(map(repr, meanings))}")

    @cached_property
    def mean_std(self) -> Callable[..., tuple[Tensor, Tensor]]:
        """The function that `step` names, imported on first use.

        Raises:
            ConfigError: no such module or function.
        """
        return load_named("StepRule.step", self.step, "function")


FLOW_SDE = StepRule("flow", "noise_level", 0.9, "retouch.core.steps:flow_sde", takes_second_level=True)
"""Its default is Flow-GRPO's for FLUX (arXiv 2505.05470)."""

DANCE_SDE = StepRule("flow", "eta", 0.3, "retouch.core.steps:dance_sde")
"""DanceGRPO (arXiv 2505.07818)."""

CPS = StepRule("flow", "noise_level", 0.8, "retouch.core.steps:cps", is_share=True, ends_without_noise=True)
"""Coefficients-preserving sampling (arXiv 2509.05952)."""

DDIM = StepRule("epsilon", "eta", 1.0, "retouch.core.steps:ddim", is_share=True, ends_without_noise=True)
"""DDPO (arXiv 2305.13301). The last step has no noise where the final alpha_bar is 1; SD1.5 ends just below 1, and the
little noise that eta would add there is left out."""

STEP_RULES: Registry[StepRule] = Registry(
    "step rule",
    "retouch.step_rules",
    {
        "flow_sde": f"{__name__}:FLOW_SDE",
        "dance_sde": f"{__name__}:DANCE_SDE",
        "cps": f"{__name__}:CPS",
        "ddim": f"{__name__}:DDIM",
    },
    of=StepRule,
)
"""`rollout.step_rule` -> rule. The first one for a prediction is the default of its models."""


def rules_of(prediction: str) -> list[str]:
    """Names of the rules for models of a prediction, the default one first."""
    return [name for name, rule in STEP_RULES.available().items() if rule.prediction == prediction]
