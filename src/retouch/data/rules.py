"""Rules of a run that need its examples: whether they fit the model, the algorithm and each other. Each
raises a ConfigError that names the section. Training and `retouch doctor` call them. `retouch check` reads no examples,
except the texts of a short list (`retouch.data.texts`)."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from retouch.algorithms.base import RlConfig
from retouch.data.base import ItemFiles
from retouch.data.buckets import by_shape
from retouch.data.dataset import Dataset
from retouch.data.identity import trained_on
from retouch.data.sampler import easiest
from retouch.errors import ConfigError, DataError, logging_long

if TYPE_CHECKING:
    from retouch.config import Derived, RunConfig

logger = logging.getLogger(__name__)

MOST_SITTING_OUT = 0.1
"""Share of the examples of a shape that may sit out every pass without a warning."""


def require_targets(config: RunConfig, data: Dataset) -> None:
    """Refuse examples without a target, where the run has supervised steps."""
    if config.algorithm.supervised_steps(config) == 0:
        return
    without = _without_target(config, data)
    if without:
        section = "warmup_data" if config.warmup_data else "data"
        remedy = "set algorithm.sft_steps=0, or " if isinstance(config.algorithm, RlConfig) else ""
        raise ConfigError(
            f"{section}: {without[0]} (and {len(without) - 1} more) has no target image, which supervised "
            f"steps need; {remedy}name data with targets under warmup_data"
        )


def require_one_batch(config: RunConfig, name: str, data: Dataset) -> None:
    """Refuse examples that no batch could hold together: some with a source or a mask, and some without.

    Args:
        name: of the section, for messages.
    """
    for picture in ("source", "mask"):
        without = [item.where for item in data.items if getattr(item, f"{picture}_path") is None]
        if 0 < len(without) < len(data):
            raise ConfigError(
                f"{name}: {len(without)} of {len(data)} examples (the first: {without[0]}) have no {picture}, the "
                f"others have one; both kinds do not fit into one batch: give all a {picture}, or make two files of "
                "them"
            )
    require_more_images(config, name, data.items)
    first = data.items[0]
    if first.source_path is not None and first.mask_path is None and not config.model.spec.edits:
        raise ConfigError(
            f"{name}: the examples have a source and no mask, but {config.model.family} repaints inside one; give them "
            "a mask_path, leave their source images out, or set model.family=qwen_image_edit"
        )


def _without_target(config: RunConfig, data: Dataset) -> Sequence[str]:
    """A family that edits reads the whole source image: with the source as its target it would learn to copy."""
    useless = {"none", "source"} if config.model.spec.edits else {"none"}
    return [item.where for item in data.items if item.target in useless]


def require_held_out(config: RunConfig, held_out: Dataset | None, *training: Dataset) -> bool:
    """Whether evaluations have data of their own with no example that is trained on, that is, with the same image, or,
    where the text encoder is trained, with the same image and prompt.

    Raises:
        ConfigError: some are trained on, without `evaluation.allow_overlap`.
    """
    if held_out is None:
        return False
    edits = config.algorithm.trains_text_encoder
    with logging_long(logger, "comparing the images of evaluation.data with those that are trained on"):
        seen = trained_on(held_out, *training, with_prompt=edits)
    if seen and not config.evaluation.allow_overlap:
        same = "the same image with the same prompt" if edits else "the same image"
        raise ConfigError(
            f"evaluation.data: {len(seen)} of {len(held_out)} examples (the first: {seen[0].where}) are trained on: "
            f"data or warmup_data holds {same} (or, without images, the same prompt); split the data with "
            "`retouch data split`, or set evaluation.allow_overlap=true"
        )
    return not seen


def require_groups(config: RunConfig, derived: Derived, data: Dataset) -> str | None:
    """Refuse fewer examples than an epoch takes different ones -> a warning of those that no epoch takes, and of shapes
    that are trained on less often, or None."""
    if derived.global_groups_per_epoch > len(data):
        were = "was" if data.skipped == 1 else "were"
        skipped = f" ({data.skipped} of {len(data) + data.skipped} {were} skipped: see above)" if data.skipped else ""
        raise ConfigError(
            f"rollout: an epoch takes {derived.global_groups_per_epoch} different examples (global_groups_per_batch x "
            f"batches_per_epoch), but data has {len(data)}{skipped}; set rollout.global_groups_per_batch={len(data)} "
            "rollout.batches_per_epoch=1, or add data"
        )
    left_out = require_groups_of_one_shape(derived.global_groups_per_epoch, data)
    stages = data.config.stages
    easy = easiest(data.difficulties, 1, stages)
    first = max(Counter(data.shapes[position] for position in easy).values())
    if derived.global_groups_per_epoch > first:
        raise ConfigError(
            f"data.curriculum: given {stages}, whose first stage has {first} examples of one size, but an epoch "
            f"takes {derived.global_groups_per_epoch} different ones; set fewer stages, or lower "
            "rollout.global_groups_per_batch x batches_per_epoch"
        )
    return "; ".join(filter(None, (left_out, _sitting_out(derived.global_groups_per_epoch, data)))) or None


def _sitting_out(groups: int, data: Dataset) -> str | None:
    """A warning of shapes of which a large share sits out every pass, while others are trained on whole, or None; of
    runs without epochs, whose `groups` are 0, there is none."""
    counts = Counter(data.shapes) if groups else {}
    left = {s: (n % groups, n) for s, n in counts.items() if n >= groups and n % groups > MOST_SITTING_OUT * n}
    if not left or len(counts) < 2:
        return None
    told = ", ".join(f"{height} x {width}: {out} of {n}" for (height, width), (out, n) in sorted(left.items()))
    return (
        f"data.resolution: some shapes are trained on less often, because an epoch takes {groups} examples of one, and "
        f"what is left of a shape sits out the pass ({told}); lower rollout.global_groups_per_batch x "
        "batches_per_epoch, or set a larger data.resolution.multiple"
    )


def shape_warnings(config: RunConfig, derived: Derived, data: Dataset, warmup: Dataset) -> list[str]:
    """Warnings of shapes that are too rare for the steps on given images: none where all examples have one."""
    steps = {"data": data} if config.algorithm.given_images else {}
    if config.algorithm.supervised_steps(config):
        steps["warmup_data" if config.warmup_data else "data"] = warmup
    found: list[str] = []
    for name, given in steps.items():
        positions = by_shape(given.shapes)
        shapes = sorted((given.shapes[of[0]], len(of)) for of in positions if len(of) < derived.global_rows_per_step)
        if shapes and len(positions) > 1:
            told = ", ".join(f"{height} x {width}: {count}" for (height, width), count in shapes)
            found.append(
                f"{name}.resolution: a step takes {derived.global_rows_per_step} examples of one shape, and repeats "
                f"those of shapes with fewer ({told}); set a larger {name}.resolution.multiple, which makes fewer "
                "shapes, or a smaller step"
            )
    return found + list(_lacking(config, data))


def _lacking(config: RunConfig, data: Dataset) -> Iterator[str]:
    """The reason of an algorithm to refuse the examples of one shape alone: steps of the shape have no others."""
    positions = by_shape(data.shapes)
    for of in positions if len(positions) > 1 else ():
        try:
            config.algorithm.check_items([data.items[position] for position in of])
        except DataError as error:
            height, width = data.shapes[of[0]]
            yield f"data.resolution: of the shape {height} x {width}, whose steps have no others, {error}"


def require_groups_of_one_shape(groups: int, data: Dataset) -> str | None:
    """Refuse shapes with fewer examples than an epoch takes, which would never be trained on -> a warning of up to
    `max_bad_items` of them, or None.

    Args:
        groups: of an epoch, all of one shape.
    """
    counts = Counter(data.shapes)
    small = {shape: count for shape, count in sorted(counts.items()) if count < groups}
    lost, least = sum(small.values()), min(counts.values())
    if not small or len(counts) == 1:
        return None
    told = ", ".join(f"{height} x {width}: {count}" for (height, width), count in small.items())
    problem = (
        f"data.resolution: {lost} of {len(data)} examples are never trained on, because an epoch takes {groups} of one "
        f"shape (rollout.global_groups_per_batch x batches_per_epoch) and theirs have fewer ({told})"
    )
    if lost > data.config.max_bad_items or lost == len(data):
        without = "" if lost == len(data) else f", or data.max_bad_items={lost} to train without them"
        raise ConfigError(
            f"{problem}; set rollout.global_groups_per_batch={least} rollout.batches_per_epoch=1, or a larger "
            f"data.resolution.multiple, which makes fewer shapes{without}"
        )
    return problem


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
