"""Evaluation, the same for every family: fixed seeds, plain ODE, scores of the composite that a user would see."""

from __future__ import annotations

import json
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np
import PIL.Image
from PIL.Image import Image
from torch import nn

from retouch.data.buckets import batches_of_one_shape, by_shape
from retouch.data.formats import FACETS
from retouch.data.sampler import derive_seed, own_share
from retouch.files.disk import write_whole
from retouch.imaging.glyphs import glyph_correlation
from retouch.imaging.lines import parse_lines, polygon_mask, shown_text
from retouch.imaging.masks import MASK_THRESHOLD, paste_back
from retouch.imaging.png import write_png
from retouch.observe import Stopwatch
from retouch.observe.grids import grid
from retouch.observe.guards import PREFIX, image_statistics, nearest_distances, region_of
from retouch.rewards.table import RewardTable, Scores
from retouch.rollout.encoded import encoded_ahead
from retouch.rollout.plan import ode_plan
from retouch.rollout.sampler import broken_rows, sample, to_uint8
from retouch.training.scoring import item_of, settle
from retouch.types import DiffusionModel, Example, Outcome, Score


@dataclass(frozen=True)
class Evaluation:
    """One row an image, in the order of examples and seeds.

    Attributes:
        rows: per image: example, seed index, text, and every measure by name (None where a reward failed).
        images: the composites, [H, W, 3] uint8.
        raw: the images as generated; none of an evaluation that was read from files.
    """

    rows: list[dict[str, Any]]
    images: list[np.ndarray[Any, Any]] = field(repr=False)
    raw: list[np.ndarray[Any, Any]] = field(default_factory=list[Any], repr=False)

    def means(self) -> dict[str, float]:
        """Mean of every numeric measure over the images that have it, and `failed`, the images with a failed reward."""
        names = [
            n
            for n in dict.fromkeys(n for row in self.rows for n in row)
            if n not in ("example", "index", "text", "read", *FACETS)
        ]
        columns = {n: [float(row[n]) for row in self.rows if row.get(n) is not None] for n in names}
        means = {n: float(np.mean(column)) for n, column in columns.items() if column}
        failed = sum(any(value is None for n, value in row.items() if n != "text") for row in self.rows)
        return {**means, "failed": float(failed)} if failed else means

    def by_facet(self) -> dict[str, dict[str, dict[str, float]]]:
        """Facet -> its values in ascending order -> `means` of those images; without facets that no image has."""
        told: dict[str, dict[str, dict[str, float]]] = {}
        for facet in FACETS:
            values = {row[facet] for row in self.rows if facet in row}
            for value in sorted(values, key=partial(_place, FACETS[facet])):
                rows = [row for row in self.rows if row.get(facet) == value]
                told.setdefault(facet, {})[str(value)] = Evaluation(rows, []).means()
        return told


Work = list[tuple[Example, int]]
"""(example, number of its image) of every image of an evaluation."""


@dataclass(frozen=True)
class Scored:
    """Images of some work, scored.

    Attributes:
        images: [H, W, 3] uint8, as generated.
        outcomes: of each reward, gold ones too.
    """

    images: list[np.ndarray[Any, Any]] = field(repr=False)
    outcomes: dict[str, list[Outcome]]

    def __add__(self, other: Scored) -> Scored:
        outcomes = {name: column + other.outcomes[name] for name, column in self.outcomes.items()}
        return Scored(self.images + other.images, outcomes)

    def placed(self, places: Sequence[int]) -> Scored:
        """In the order of the places that its images have in another list."""
        order = sorted(range(len(places)), key=places.__getitem__)
        outcomes = {name: [column[i] for i in order] for name, column in self.outcomes.items()}
        return Scored([self.images[i] for i in order], outcomes)


def evaluate(
    model: DiffusionModel,
    network: nn.Module,
    examples: Sequence[Example],
    images_per_example: int,
    num_steps: int,
    guidance_scale: float,
    batch_size: int,
    rewards: RewardTable,
    clock: Stopwatch,
) -> Evaluation:
    """Sample every example with seeds that depend on nothing but the example, score, and measure, on one process."""
    work = work_of(examples, images_per_example)
    return measured(work, draw_and_score(model, network, work, num_steps, guidance_scale, batch_size, rewards, clock))


def work_of(examples: Sequence[Example], images_per_example: int) -> Work:
    return [(example, k) for example in examples for k in range(images_per_example)]


def draw_and_score(
    model: DiffusionModel,
    network: nn.Module,
    work: Work,
    num_steps: int,
    guidance_scale: float,
    batch_size: int,
    rewards: RewardTable,
    clock: Stopwatch,
    padding: Work | None = None,
) -> Scored:
    """Sample and score the images of some work, those of one shape in a forward.

    Args:
        padding: images that are sampled, each in a forward, only to take as many forwards as other processes do.

    Raises:
        RewardOutage: rewards stayed away.
    """
    plan_of: dict[tuple[int, int], Any] = {}
    raw: list[np.ndarray[Any, Any]] = []
    pending: list[Scores] = []
    places: list[int] = []
    batches = [(rows, [work[i] for i in rows]) for rows in batches_of_one_shape(_shapes(work), batch_size)]
    batches += [([], [one]) for one in padding or ()]
    asked = (((rows, chunk), [example for example, _ in chunk]) for rows, chunk in batches)
    for (rows, chunk), condition in encoded_ahead(model, asked, guidance_scale, clock):
        batch = [example for example, _ in chunk]
        size = condition.size
        plan = plan_of.setdefault(size, ode_plan(model.schedule(num_steps, size)))
        seeds = [derive_seed("eval", example.id, k) for example, k in chunk]
        with clock.part("rollout"):
            final = sample(model, network, plan, condition, seeds).final
        if not rows:
            continue
        places += rows
        with clock.part("vae"):
            decoded = model.decode(final)
            images = to_uint8(decoded, batch[0].strip)
        raw += list(images.numpy())
        items = [item_of(example, images[i].numpy(), i) for i, example in enumerate(batch)]
        if rewards.evaluated:
            pending.append(rewards.submit(items, broken=broken_rows(decoded), training=False))
    with clock.part("reward_wait"):
        scores = settle(rewards, pending, rewards.client, training=False)
    outcomes = {name: [o for s in scores for o in s.outcomes[name]] for name in rewards.evaluated}
    return Scored(raw, outcomes).placed(places)


def shared_work(work: Work, batch_size: int, rank: int, world_size: int) -> tuple[list[int], list[int]]:
    """Places in some work of a rank's images, and of those that it samples alone to take as many forwards as the
    others. Ranks take consecutive slices of the work in order of shape: a share of each shape would be mostly padding
    where shapes are rare."""
    shapes = _shapes(work)
    ordered = [row for rows in by_shape(shapes) for row in rows]
    shares = [own_share(ordered, other, world_size)[0] for other in range(world_size)]
    forwards = [len(batches_of_one_shape([shapes[row] for row in share], batch_size)) for share in shares]
    return shares[rank], ordered[:1] * (max(forwards) - forwards[rank])


def _shapes(work: Work) -> list[Hashable]:
    return [example.shape for example, _ in work]


def measured(work: Work, scored: Scored) -> Evaluation:
    """The measures: each reward, gold ones too, its numeric details (`ocr.ned`, `ocr.exact`), `outside_l1` (drift of
    the raw generation outside the mask, in [0, 1]), `glyph_correlation` where the example has a text, and statistics of
    what was generated (`picture.*`, see `observe.guards`)."""
    images = [_composite(example, image) for (example, _), image in zip(work, scored.images, strict=True)]
    drawn = zip(work, scored.images, images, strict=True)
    rows = [_row(example, k, image, composite) for (example, k), image, composite in drawn]
    for name, column in scored.outcomes.items():
        for row, outcome in zip(rows, column, strict=True):
            row.update(measures(name, outcome))
    generated = [
        region_of(image, None if example.mask is None else np.asarray(example.mask))
        for (example, _), image in zip(work, images, strict=True)
    ]
    for row, region in zip(rows, generated, strict=True):
        row.update(image_statistics(region))
    if len(generated) > 1:
        for row, distance in zip(rows, nearest_distances(generated), strict=True):
            row[f"{PREFIX}nearest"] = distance
    return Evaluation(rows, images, scored.images)


def evaluation_grid(examples: Sequence[Example], columns: dict[str, Evaluation], count: int) -> Image:
    """Rows of examples: the masked input, then the image of each evaluation with the text that was read in it. The
    examples are those of the last one that each with images has one of, or that it has; another without an image of
    one of them is left out."""
    # Evaluations keep images of their first examples only, and a resumed run may have kept fewer or others. Rows
    # without a cell in every column would shift the columns against each other.
    *_, last = columns.values()
    images = {name: found for name, one in columns.items() if (found := _cells(one))}
    ids = [row["example"] for row in last.rows if row["index"] == 0][:count]
    ids = [example for example in ids if all(example in found for found in images.values())] or ids
    by_id = {example.id: example for example in examples}
    chosen = [by_id[example] for example in ids]
    cells = {name: [found[e] for e in ids] for name, found in images.items() if found.keys() >= {*ids}}
    inputs = [(masked_input(example), shown_text(example.metadata) or example.prompt) for example in chosen]
    shown = "text to write" if any("text" in example.metadata for example in chosen) else "prompt"
    return grid(list(zip(inputs, *cells.values(), strict=True)), [f"input: {shown}", *cells])


def _cells(evaluation: Evaluation) -> dict[int, tuple[Any, str]]:
    """Example -> its first image with the text that was read in it, of those that have one."""
    kept = zip(evaluation.rows, evaluation.images, strict=False)  # the first images are kept
    first = {row["example"]: (image, row) for row, image in kept if row["index"] == 0}
    return {e: (image, str(row["read"] or "(nothing)") if "read" in row else "") for e, (image, row) in first.items()}


def save_evaluation(evaluation: Evaluation, folder: Path, images: int) -> None:
    """Write rows.jsonl with every row, and the first `images` images as PNG."""
    folder.mkdir(parents=True, exist_ok=True)
    lines = "".join(json.dumps(row) + "\n" for row in evaluation.rows)
    write_whole(folder / "rows.jsonl", lines)
    for i, image in enumerate(evaluation.images[:images]):
        write_png(PIL.Image.fromarray(image), folder / f"{i:05d}.png")


def load_evaluation(folder: Path) -> Evaluation:
    """Read the files of `save_evaluation`, with those images that were kept."""
    rows = [json.loads(line) for line in (folder / "rows.jsonl").read_text(encoding="utf-8").splitlines()]
    return Evaluation(
        rows,
        [np.asarray(PIL.Image.open(path, formats=("PNG",)).convert("RGB")) for path in sorted(folder.glob("*.png"))],
    )


def masked_input(example: Example) -> np.ndarray[Any, Any]:
    """The input of the model: the source with the masked region greyed out."""
    if example.source is None:
        return np.full((64, 64, 3), 255, np.uint8)
    pixels = np.asarray(example.source).copy()
    if example.mask is not None:
        pixels[np.asarray(example.mask) >= MASK_THRESHOLD] = 127
    return pixels


def _row(example: Example, index: int, image: np.ndarray[Any, Any], composite: np.ndarray[Any, Any]) -> dict[str, Any]:
    row: dict[str, Any] = {"example": example.id, "index": index, "text": shown_text(example.metadata)}
    row |= {name: kind for name in FACETS if isinstance(kind := example.metadata.get(name), str | int | float)}
    if example.source is not None and example.mask is not None:
        outside = np.asarray(example.mask) < MASK_THRESHOLD
        drift = np.abs(image.astype(np.float32) - np.asarray(example.source, np.float32))[outside]
        row["outside_l1"] = float(drift.mean() / 255)
        row |= _glyphs(example, composite)
    return row


def _glyphs(example: Example, composite: np.ndarray[Any, Any]) -> dict[str, Any]:
    """The glyph correlation of the text in the mask; of several lines the mean over their places, if they have any.
    None of a blank text, or of letters that no font has."""
    text = example.metadata.get("text")
    if "lines" not in example.metadata:
        if not isinstance(text, str) or not text.strip():  # a scorer takes what stands in quotes
            return {}
        value = glyph_correlation(composite, np.asarray(example.mask), text)
        return {} if value is None else {"glyph_correlation": value}
    height, width = composite.shape[:2]
    found = [
        glyph_correlation(composite, np.asarray(polygon_mask([line.polygon], (width, height))), line.text)
        for line in parse_lines(example.metadata["lines"])
        if line.polygon is not None
    ]
    values = [value for value in found if value is not None]
    return {"glyph_correlation": fmean(values)} if values else {}


def _place(order: Sequence[str], value: Any) -> tuple[int, str]:
    """Sorts the values of a facet: those of `order` as there, numbers by size, names by letter."""
    if value in order:
        return order.index(value), ""
    return (value, "") if isinstance(value, int) else (0, str(value))


def measures(name: str, outcome: Any) -> dict[str, Any]:
    """Columns of an evaluation for one outcome: its value and numeric details; None for a failed reward."""
    if not isinstance(outcome, Score):
        return {name: None}
    detail = {f"{name}.{k}": v for k, v in outcome.detail.items() if isinstance(v, int | float)}
    read = {"read": outcome.detail["text"]} if "text" in outcome.detail else {}
    return {name: outcome.value, **detail, **read}


def _composite(example: Example, image: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    if example.source is None or example.mask is None:
        return image
    return paste_back(np.asarray(example.source), image, np.asarray(example.mask))
