"""A run, typed. One YAML file is one `RunConfig`; every key has a default or is required.

Rules of this file: no torch; `extra="forbid"`; every option is read somewhere (tests/config/test_leaves.py); two
quantities never share a name; the name of every batch size has `_per_device` or `global_`.
"""

from __future__ import annotations

from collections.abc import Mapping, Set
from typing import Annotated, ClassVar, cast

from pydantic import Field, field_validator, model_validator

from retouch.algorithms import ALGORITHMS
from retouch.algorithms.base import AlgorithmSection
from retouch.config.base import Name, Names, Section, Text
from retouch.config.optimizer import OptimizerConfig
from retouch.config.presets import fill_in
from retouch.config.reads import ReadBy
from retouch.config.rollout import RolloutConfig
from retouch.config.training import EmaConfig, EvaluationConfig, LoggingConfig, TrainingConfig
from retouch.data.formats import Data
from retouch.families import DEFAULT_FAMILY
from retouch.families.base import Model
from retouch.registry import PLUGINS, Chosen
from retouch.rewards.base import Reward
from retouch.rewards.client.config import RewardClientConfig
from retouch.rewards.judge import JudgeConfig, with_judge


def with_family(model: object) -> object:
    """A section `model`; without `family` it is one of the default family."""
    return {"family": DEFAULT_FAMILY, **model} if isinstance(model, dict) else model  # pyright: ignore[reportUnknownVariableType]


class RunConfig(Section):
    """One run."""

    FREE_IN_EPOCH: ClassVar[Set[str]] = {
        "name", "plugins", "resume", "warmup_data", "judge", "reward_client", "ema", "evaluation", "logging",
    }  # fmt: skip

    name: Name
    """Name of the run directory; letters, digits, '.', '_' and '-'."""
    seed: Annotated[int, Field(ge=0, lt=2**31)] = 0
    """Seed of every random number of the run."""
    plugins: Annotated[list[Text], Names("code", variables=(PLUGINS,))] = Field(default=[])
    """Modules that register components of other packages (docs/extending.md), imported before the run file is
    validated; those that are not installed are searched for in the working directory. Packages with entry points need
    none."""
    resume: str | None = None
    """"auto" continues from the newest complete checkpoint of the run directory; without one it begins again, from the
    checkpoint of another run that the run was begun from, if there is one. A path continues from that checkpoint; null
    starts, and rejects a directory that holds a run."""
    model: Model
    data: Data
    """Examples to train on; RL needs no targets."""
    warmup_data: Annotated[Data | None, ReadBy("diffusion")] = None
    """Examples with targets for supervised steps (warm-up, SFT); null is `data`."""
    rollout: RolloutConfig = RolloutConfig()
    algorithm: Annotated[AlgorithmSection, Chosen(ALGORITHMS, "name")]
    rewards: dict[str, Reward] = Field(default={})
    """Name -> reward; the objective is their weighted sum."""
    judge: JudgeConfig | None = None
    """Options of all rewards that ask a judge, and one budget for them; null: each entry has its own."""
    reward_client: RewardClientConfig = RewardClientConfig()
    optimizer: OptimizerConfig = OptimizerConfig()
    ema: Annotated[EmaConfig | None, ReadBy("diffusion")] = None
    """EMA of the trained weights; null keeps none."""
    training: TrainingConfig = TrainingConfig()
    evaluation: EvaluationConfig = EvaluationConfig()
    logging: LoggingConfig = LoggingConfig()

    @property
    def guidance_scale(self) -> float:
        """The scale of guidance of its samples: that of rollouts, else of the model, which may be distilled."""
        given = self.rollout.guidance_scale
        return self.model.guidance_scale if given is None else given

    @model_validator(mode="before")
    @classmethod
    def _algorithm_completes(cls, value: object) -> object:
        """A preset and the section `judge` fill in keys; an algorithm reads some of its own options as keys of other
        sections."""
        return with_judge(fill_in(cast("Mapping[str, object]", value))) if isinstance(value, Mapping) else value

    _family_has_a_default = field_validator("model", mode="before")(with_family)

    @field_validator("rewards", mode="before")
    @classmethod
    def _name_is_scorer(cls, value: object) -> object:
        """`rewards: {ocr: {weight: 1}}` means `scorer: ocr`."""
        if not isinstance(value, dict):
            return value
        table: dict[str, object] = {}
        for name, entry in value.items():  # pyright: ignore[reportUnknownVariableType]
            entry = {} if entry is None else entry  # pyright: ignore[reportUnknownVariableType]
            table[str(name)] = {"scorer": name, **entry} if isinstance(entry, dict) else entry  # pyright: ignore[reportUnknownArgumentType]
        return table

    @model_validator(mode="after")
    def _combination(self) -> RunConfig:
        from retouch.config.check import check

        check(self)
        return self
