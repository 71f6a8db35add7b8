"""What a run asks of its data and its rollouts, read off the run file."""

from __future__ import annotations

from typing import TYPE_CHECKING

from retouch.data.base import DataSection
from retouch.families.facts import FACTS, TINY_SIZE_MULTIPLE, shown_size, vision_tokens

if TYPE_CHECKING:
    from retouch.config.run import RunConfig
    from retouch.families.sections import QwenImageEditModel

DATA_SECTIONS = ("data", "warmup_data", "evaluation.data")
"""Keys of the sections that name examples."""


def size_multiple(run: RunConfig) -> int:
    """Image sides and strips are multiples of it."""
    return TINY_SIZE_MULTIPLE if run.model.path == "tiny" else FACTS[run.model.family].size_multiple


def needed_pictures(run: RunConfig, *, training: bool, scored: bool = True) -> frozenset[str]:
    """Pictures that every example of the run must have; `training`: those of `data`; `scored`: by the rewards, too."""
    needs = FACTS[run.model.family].needs
    if scored and any(entry.scorer == "complex_edit" for entry in run.rewards.values()):
        needs |= {"source"}
    if takes_references(run, scored=scored):
        needs |= {"reference"}
    return needs | {"win", "lose"} if training and run.algorithm.takes_given_pairs else needs


def takes_references(run: RunConfig, *, scored: bool) -> bool:
    """Whether anything looks at a reference: a style adapter, a strip above the picture or, where images are scored, a
    style reward."""
    judged = scored and any(entry.scorer == "style" for entry in run.rewards.values())
    return run.model.train.kind == "ip_adapter" or reference_strip(run) is not None or judged


def reference_strip(run: RunConfig) -> int | None:
    """Height in pixels of the strip of in-context references; the same in all sections."""
    return run.data.image_options.reference_strip


def data_sections(run: RunConfig) -> dict[str, DataSection]:
    """The sections of a run that name examples, by key."""
    named = dict(zip(DATA_SECTIONS, (run.data, run.warmup_data, run.evaluation.data), strict=True))
    return {name: section for name, section in named.items() if section is not None}


def seen_tokens(model: QwenImageEditModel, size: tuple[int, int]) -> int:
    """Tokens that a source of (height, width) takes in the text encoder."""
    return vision_tokens(shown_size(size, model.variant, model.vision_pixels))
