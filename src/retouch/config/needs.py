"""Requirements of a run on its data and rollouts, derived from the run file."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from retouch.config.errors import ConfigError
from retouch.data.base import DataSection, ItemFiles

if TYPE_CHECKING:
    from retouch.config.run import RunConfig

DATA_SECTIONS = ("data", "warmup_data", "evaluation.data")
"""Keys of the sections that name examples."""


def needed_pictures(run: RunConfig, *, training: bool, scored: bool = True) -> frozenset[str]:
    """Images that every example must have; `training`: the examples of `data`; `scored`: include the rewards' needs."""
    needs = run.model.needs
    if scored:
        needs = needs.union(*(entry.example_images() for entry in run.rewards.values()))
    if takes_references(run, scored=scored):
        needs |= {"reference"}
    if run.data.image_options.reference_strip is not None:
        needs |= {"source"}  # the strip stands above it
    return needs | run.algorithm.given_images if training else needs


def takes_references(run: RunConfig, *, scored: bool) -> bool:
    """Whether anything reads a reference: a style adapter, the network itself, a strip above the image or, where images
    are scored, a style reward."""
    judged = scored and any("reference" in entry.example_images() for entry in run.rewards.values())
    by_model = run.model.train.kind == "ip_adapter" or run.model.takes_reference_images
    in_strip = run.data.image_options.reference_strip is not None  # in all sections, then
    return by_model or in_strip or judged


def data_sections(run: RunConfig) -> dict[str, DataSection]:
    """The sections of a run that name examples, by key."""
    named = dict(zip(DATA_SECTIONS, (run.data, run.warmup_data, run.evaluation.data), strict=True))
    return {name: section for name, section in named.items() if section is not None}


def require_more_images(run: RunConfig, name: str, items: Sequence[ItemFiles]) -> None:
    """Refuse further source images that the model does not read, or not as many in each item.

    Args:
        name: of the data section, for messages.

    Raises:
        ConfigError: as above.
    """
    first, *rest = ((item.id, len(item.more_paths)) for item in items)
    other = next(((item, count) for item, count in rest if count != first[1]), None)
    if other is not None:
        raise ConfigError(
            f"{name}: example {first[0]} has {first[1]} more_images and example {other[0]} has {other[1]}, which do "
            "not fit into one batch; give all examples as many, or make a file for each number"
        )
    if first[1] and not run.model.takes_more_images:
        raise ConfigError(
            f"{name}: example {first[0]} has more_images, but {run.model.family} reads one source image; leave "
            "more_images out, or set model.family=qwen_image_edit with model.variant=edit_plus"
        )
