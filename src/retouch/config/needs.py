"""Requirements of a run on its data and rollouts, derived from the run file."""

from __future__ import annotations

from typing import TYPE_CHECKING

from retouch.config.errors import ConfigError
from retouch.data.base import DataSection

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


def require_usable_embeddings(config: RunConfig) -> None:
    """Raises: ConfigError: a run that may not set `model.embeddings`."""
    with_sources = any("source" in section.has_images for section in data_sections(config).values())
    if config.model.vision_tokens(config.data.size) and with_sources:
        raise ConfigError(
            f"model.family: {config.model.family} has a text encoder that reads the image with the prompt; "
            "it cannot encode a prompt alone; train without model.embeddings"
        )
    if config.algorithm.trains_text_encoder:
        raise ConfigError("algorithm.name: vlm_grpo trains the text encoder; its embeddings cannot be kept")
