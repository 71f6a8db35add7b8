"""What a run asks of its data and its rollouts, read off the run file."""

from __future__ import annotations

from retouch.algorithms.sections import (
    DpoConfig,
    GrpoConfig,
    RlConfig,
    SftConfig,
    VlmGrpoConfig,
)
from retouch.config.run import RunConfig
from retouch.data.formats import Data
from retouch.families.facts import (
    FACTS,
    RULES_OF,
    TINY_SIZE_MULTIPLE,
    shown_size,
    vision_tokens,
)
from retouch.families.sections import QwenImageEditModel

DATA_SECTIONS = ("data", "warmup_data", "evaluation.data")
"""Keys of the sections that name examples."""


def size_multiple(run: RunConfig) -> int:
    """Image sides and strips are multiples of it."""
    return TINY_SIZE_MULTIPLE if run.model.path == "tiny" else FACTS[run.model.family].size_multiple


def trains_on_rewards(run: RunConfig) -> bool:
    """Whether it samples images and has them scored."""
    return not isinstance(run.algorithm, SftConfig) and not takes_given_pairs(run.algorithm)


def trained_kind(run: RunConfig) -> str:
    """full, lora or ip_adapter: how much of the trained network is trained; of vlm_grpo that is the text encoder."""
    if isinstance(run.algorithm, VlmGrpoConfig):
        return "lora" if run.algorithm.uses_adapter else "full"
    return run.model.train.kind


def supervised_steps(run: RunConfig) -> int:
    """Optimizer steps that need targets."""
    if isinstance(run.algorithm, RlConfig):
        return run.algorithm.warmup_steps
    return run.training.max_steps if isinstance(run.algorithm, SftConfig) else 0


def step_rule(run: RunConfig) -> str | None:
    """The stochastic rule of the rollouts, defaults filled in; None where they follow the ODE."""
    if not isinstance(run.algorithm, GrpoConfig):
        return None
    return run.rollout.step_rule or RULES_OF[FACTS[run.model.family].prediction][0]


def needed_pictures(run: RunConfig, *, training: bool, scored: bool = True) -> frozenset[str]:
    """Pictures that every example of the run must have; `training`: those of `data`; `scored`: by the rewards, too."""
    needs = FACTS[run.model.family].needs
    if scored and any(entry.scorer == "complex_edit" for entry in run.rewards.values()):
        needs |= {"source"}
    if takes_references(run, scored=scored):
        needs |= {"reference"}
    return needs | {"win", "lose"} if training and takes_given_pairs(run.algorithm) else needs


def takes_references(run: RunConfig, *, scored: bool) -> bool:
    """Whether anything looks at a reference: a style adapter, a strip above the picture or, where images are scored, a
    style reward."""
    judged = scored and any(entry.scorer == "style" for entry in run.rewards.values())
    return run.model.train.kind == "ip_adapter" or reference_strip(run) is not None or judged


def reference_strip(run: RunConfig) -> int | None:
    """Height in pixels of the strip of in-context references; the same in all sections."""
    return run.data.image_options.reference_strip


def data_sections(run: RunConfig) -> dict[str, Data]:
    """The sections of a run that name examples, by key."""
    named = dict(zip(DATA_SECTIONS, (run.data, run.warmup_data, run.evaluation.data), strict=True))
    return {name: section for name, section in named.items() if section is not None}


def takes_given_pairs(algorithm: object) -> bool:
    return isinstance(algorithm, DpoConfig) and algorithm.pairs == "offline"


def seen_tokens(model: QwenImageEditModel, size: tuple[int, int]) -> int:
    """Tokens that a source of (height, width) takes in the text encoder."""
    return vision_tokens(shown_size(size, model.variant, model.vision_pixels))
