"""The same evaluation for every family: fixed seeds, plain ODE, scores on what a user would see."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import PIL.Image
from PIL.Image import Image
from torch import nn

from retouch.data.sampler import derive_seed
from retouch.data.sections import LEVELS
from retouch.glyphs import glyph_correlation
from retouch.imaging import MASK_THRESHOLD, paste_back
from retouch.observe import Stopwatch
from retouch.observe.grids import grid
from retouch.observe.guards import PREFIX, nearest_distances, picture_statistics, region_of
from retouch.rewards.table import RewardTable
from retouch.rollout.plan import ode_plan
from retouch.rollout.sampler import (
    broken_rows,
    sample,
    to_uint8,
)
from retouch.rollout.scorer import (
    PendingBatch,
    items_of,
    settle,
    without_strip,
)
from retouch.types import DiffusionModel, Example, Outcome, Score

FACETS = ("level", "discipline", "complexity", "image_type")
"""Fields of an example's metadata that say what kind it is: an evaluation is also told by each of them."""


@dataclass(frozen=True)
class Evaluation:
    """One row an image, in the order of examples and seeds.

    Attributes:
        rows: per image: example, seed index, text, and every measure by name (None where a reward failed).
        images: the pasted-back pictures, [H, W, 3] uint8.
    """

    rows: list[dict[str, Any]]
    images: list[np.ndarray[Any, Any]] = field(repr=False)

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
            for value in sorted(values, key=_place):
                rows = [row for row in self.rows if row.get(facet) == value]
                told.setdefault(facet, {})[str(value)] = Evaluation(rows, []).means()
        return told


Work = list[tuple[Example, int]]
"""(example, which of its pictures) of every picture of an evaluation."""


@dataclass(frozen=True)
class Scored:
    """Pictures of some work.

    Attributes:
        images: [H, W, 3] uint8, as the network drew them.
        outcomes: of each reward, gold ones too.
    """

    images: list[np.ndarray[Any, Any]] = field(repr=False)
    outcomes: dict[str, list[Outcome]]

    def __add__(self, other: Scored) -> Scored:
        outcomes = {name: column + other.outcomes[name] for name, column in self.outcomes.items()}
        return Scored(self.images + other.images, outcomes)


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
    padding: int = 0,
) -> Scored:
    """The part of an evaluation that processes share out.

    Args:
        padding: how many of the last pictures are drawn only to take as many forwards as other processes do.

    Raises:
        RewardOutage: rewards stayed away.
    """
    plan_of: dict[tuple[int, int], Any] = {}
    raw: list[np.ndarray[Any, Any]] = []
    pending: list[PendingBatch] = []
    real = len(work) - padding
    for start in range(0, len(work), batch_size):
        chunk = work[start : start + batch_size]
        batch = [example for example, _ in chunk]
        with clock.part("text"):
            condition = model.encode(batch, guidance_scale)
        size = condition.size
        plan = plan_of.setdefault(size, ode_plan(model.schedule(num_steps, size)))
        seeds = [derive_seed("eval", example.id, k) for example, k in chunk]
        with clock.part("rollout"):
            final = sample(model, network, plan, condition, seeds).final
        kept = max(0, min(len(chunk), real - start))
        if not kept:
            continue
        with clock.part("vae"):
            decoded = model.decode(final[:kept])
            images = without_strip(to_uint8(decoded), batch)
        raw += list(images.numpy())
        items = items_of(batch[:kept], images, [e.id for e in batch[:kept]])
        if rewards.entries:
            pending.append(PendingBatch(items, rewards.submit(items, training=False), broken_rows(decoded)))
    with clock.part("reward_wait"):
        scores = settle(rewards, pending, rewards.client, training=False)
    return Scored(raw, {name: [o for s in scores for o in s.outcomes[name]] for name in rewards.entries})


def measured(work: Work, scored: Scored) -> Evaluation:
    """The measures: each reward, gold ones too, its numeric details (`ocr.ned`, `ocr.exact`), `outside_l1` (drift of
    the raw generation outside the mask, in [0, 1]), `glyph_correlation` where the example has a text, and statistics of
    what was generated (`picture.*`, see `observe.guards`)."""
    rows = [_row(example, k, image) for (example, k), image in zip(work, scored.images, strict=True)]
    for name, column in scored.outcomes.items():
        for row, outcome in zip(rows, column, strict=True):
            row.update(measures(name, outcome))
    images = [_pasted(example, image) for (example, _), image in zip(work, scored.images, strict=True)]
    generated = [
        region_of(image, None if example.mask is None else np.asarray(example.mask))
        for (example, _), image in zip(work, images, strict=True)
    ]
    for row, picture in zip(rows, generated, strict=True):
        row.update(picture_statistics(picture))
    if len(generated) > 1:
        for row, distance in zip(rows, nearest_distances(generated), strict=True):
            row[f"{PREFIX}nearest"] = distance
    return Evaluation(rows, images)


def evaluation_grid(examples: Sequence[Example], columns: dict[str, Evaluation], count: int) -> Image:
    """Rows of examples: the masked input, then one picture an evaluation, with what was read in it."""
    rows: list[list[tuple[Any, str]]] = []
    first = next(iter(columns.values()))
    starts = [i for i, row in enumerate(first.rows) if row["index"] == 0][:count]
    by_id = {example.id: example for example in examples}
    for i in starts:
        example = by_id[first.rows[i]["example"]]
        cells: list[tuple[Any, str]] = [(masked_input(example), str(example.metadata.get("text", example.prompt)))]
        for evaluation in columns.values():
            if i < len(evaluation.images):
                cells.append((evaluation.images[i], _reading(evaluation.rows[i])))
        rows.append(cells)
    shown = "text to write" if any("text" in by_id[first.rows[i]["example"]].metadata for i in starts) else "prompt"
    return grid(rows, [f"input: {shown}", *columns])


def save_evaluation(evaluation: Evaluation, folder: Path, pictures: int) -> None:
    """Write rows.jsonl with every row, and the first `pictures` images as PNG."""
    folder.mkdir(parents=True, exist_ok=True)
    lines = "".join(json.dumps(row) + "\n" for row in evaluation.rows)
    (folder / "rows.jsonl").write_text(lines, encoding="utf-8")
    for i, image in enumerate(evaluation.images[:pictures]):
        PIL.Image.fromarray(image).save(folder / f"{i:05d}.png")


def load_evaluation(folder: Path) -> Evaluation:
    """What `save_evaluation` wrote; images only as far as they were kept."""
    rows = [json.loads(line) for line in (folder / "rows.jsonl").read_text(encoding="utf-8").splitlines()]
    return Evaluation(rows, [np.asarray(PIL.Image.open(path).convert("RGB")) for path in sorted(folder.glob("*.png"))])


def masked_input(example: Example) -> np.ndarray[Any, Any]:
    """What the model sees of the picture: the source with the mask greyed out."""
    if example.source is None:
        return np.full((64, 64, 3), 255, np.uint8)
    pixels = np.asarray(example.source).copy()
    if example.mask is not None:
        pixels[np.asarray(example.mask) >= MASK_THRESHOLD] = 127
    return pixels


def _reading(row: dict[str, Any]) -> str:
    return str(row["read"] or "(nothing)") if "read" in row else ""


def _row(example: Example, index: int, image: np.ndarray[Any, Any]) -> dict[str, Any]:
    row: dict[str, Any] = {"example": example.id, "index": index, "text": example.metadata.get("text")}
    row |= {name: kind for name in FACETS if isinstance(kind := example.metadata.get(name), str | int | float)}
    if example.source is not None and example.mask is not None:
        outside = np.asarray(example.mask) < MASK_THRESHOLD
        drift = np.abs(image.astype(np.float32) - np.asarray(example.source, np.float32))[outside]
        row["outside_l1"] = float(drift.mean() / 255)
        text = example.metadata.get("text")
        if isinstance(text, str):
            row["glyph_correlation"] = glyph_correlation(_pasted(example, image), np.asarray(example.mask), text)
    return row


def _place(value: Any) -> tuple[int, str]:
    """Levels of education from the lowest, numbers by size, names by letter."""
    if value in LEVELS:
        return LEVELS.index(value), ""
    return (value, "") if isinstance(value, int) else (0, str(value))


def measures(name: str, outcome: Any) -> dict[str, Any]:
    """Columns of an evaluation for one outcome: its value and numeric details; None for a failed reward."""
    if not isinstance(outcome, Score):
        return {name: None}
    detail = {f"{name}.{k}": v for k, v in outcome.detail.items() if isinstance(v, int | float)}
    read = {"read": outcome.detail["text"]} if "text" in outcome.detail else {}
    return {name: outcome.value, **detail, **read}


def _pasted(example: Example, image: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    if example.source is None or example.mask is None:
        return image
    return paste_back(np.asarray(example.source), image, np.asarray(example.mask))
