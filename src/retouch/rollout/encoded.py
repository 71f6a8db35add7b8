"""Encoded examples of a dataset, each encoded once and alone.

Alone, because a condition must be a function of its example: encoded in a batch it would differ in the last bits with
the batch, and a resumed run or another number of processes would no longer give the same images.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import starmap
from typing import Literal, TypeVar, get_args

import torch
from PIL import Image
from torch import Tensor

from retouch.data.dataset import Dataset
from retouch.families.inputs import image_pixels
from retouch.imaging.fitting import stack_above
from retouch.lru import LruCache
from retouch.observe import Stopwatch
from retouch.types import Condition, DiffusionModel, Example

Role = Literal["target", "win", "lose"]

T = TypeVar("T")

CAPACITY = 512
"""Encoded examples kept in CPU memory; beyond it the ones used longest ago are dropped."""


READERS = 4
"""Threads that read examples ahead."""


@dataclass(eq=False)
class EncodedData:
    """Conditions and latents of the images of a dataset by position.

    Attributes:
        conditional: leave the negative prompt out of conditions, for losses on the conditional prediction.
    """

    model: DiffusionModel
    data: Dataset
    guidance_scale: float
    clock: Stopwatch
    conditional: bool = field(default=False, kw_only=True)

    def __post_init__(self) -> None:
        self._examples: LruCache[int, Example] = LruCache(CAPACITY)
        self._ahead: dict[int, Future[Example]] = {}
        self._conditions: LruCache[tuple[int, bool], Condition] = LruCache(CAPACITY)
        self._images: dict[str, LruCache[int, Tensor]] = {role: LruCache(CAPACITY) for role in get_args(Role)}

    def guided(self, guidance_scale: float, *, conditional: bool = False) -> EncodedData:
        """The same data under another guidance; itself where it is the same.

        What does not depend on the scale (images and their latents; prompts and masked images, which the model
        keeps) is not encoded again. A condition is: the model may make another one under another scale.
        """
        if (guidance_scale, conditional) == (self.guidance_scale, self.conditional):
            return self
        other = EncodedData(self.model, self.data, guidance_scale, self.clock, conditional=conditional)
        other._examples, other._images = self._examples, self._images
        return other

    def examples(self, positions: Sequence[int]) -> list[Example]:
        return self._examples.get_all(positions, partial(map, self._read))

    def read_ahead(self, positions: Sequence[int]) -> None:
        """Begin to read these examples in threads that end with it, and forget what else was read ahead.

        Only the first CAPACITY of them. Numbers stay what they are; a file that cannot be read is an error where its
        example is used.
        """
        positions = positions[:CAPACITY]
        wanted = [p for p in dict.fromkeys(positions) if p not in self._examples and p not in self._ahead]
        self._ahead = {p: read for p, read in self._ahead.items() if p in positions}
        if wanted:
            Image.init()  # threads that make Pillow look for its formats trip over each other
            pool = ThreadPoolExecutor(READERS)
            self._ahead |= {p: pool.submit(self.data.__getitem__, p) for p in wanted}
            pool.shutdown(wait=False)

    def conditions(
        self, positions: Sequence[int], device: torch.device, uncaptioned: Sequence[bool] | None = None
    ) -> Condition:
        """One condition with a row for each position, in order.

        Args:
            uncaptioned: rows that get the family's empty prompt instead of their own, which is what classifier-free
                guidance steers away from.
        """
        with self.clock.part("text"):
            rows = self._rows(positions, uncaptioned)
            tensors = {name: torch.cat([row.tensors[name] for row in rows]) for name in rows[0].tensors}
            masks = [row.mask for row in rows if row.mask is not None]
            return replace(rows[0], tensors=tensors, mask=torch.cat(masks) if masks else None).to(device)

    def encode(self, positions: Sequence[int], uncaptioned: Sequence[bool] | None = None) -> None:
        """Encode now what `conditions` will return in parts: text encoders that wait on the CPU are then moved to
        the device once, and not beside the gradients of a step."""
        with self.clock.part("text"):
            self._rows(positions[:CAPACITY], uncaptioned and uncaptioned[:CAPACITY])

    def images(self, positions: Sequence[int], role: Role, device: torch.device) -> Tensor:
        """Clean latents [B, C, h, w] of the target, the preferred or the rejected image of each example.

        Raises:
            ValueError: an example without it.
        """
        cache = self._images[role]
        with self.clock.part("vae"), self.model.encoding():
            return torch.cat(cache.get_all(positions, partial(map, partial(self._encode_image, role)))).to(device)

    def _rows(self, positions: Sequence[int], uncaptioned: Sequence[bool] | None) -> list[Condition]:
        keys = list(zip(positions, uncaptioned or [False] * len(positions), strict=True))
        with self.model.encoding():
            return self._conditions.get_all(keys, partial(starmap, self._encode))

    def _read(self, position: int) -> Example:
        ahead = self._ahead.pop(position, None)
        return self.data[position] if ahead is None else ahead.result()

    def _encode(self, position: int, uncaptioned: bool) -> Condition:
        [example] = self.examples([position])
        if uncaptioned:
            example = replace(example, prompt=self.model.spec.empty_prompt, embedding_path=None)
        condition = self.model.encode([example], self.guidance_scale)
        return (condition.without_negative() if self.conditional else condition).to("cpu")

    def _encode_image(self, role: Role, position: int) -> Tensor:
        [example] = self.examples([position])
        image = getattr(example, role)
        if image is None:
            raise ValueError(f"example {example.id} has no {role} image")
        pixels = image_pixels(stack_above(example.strip, image))[None]
        return self.model.encode_images(pixels).cpu()


AHEAD = 64
"""Examples that `encoded_ahead` encodes at once; their conditions are in CPU memory meanwhile."""


def encoded_ahead(
    model: DiffusionModel, batches: Iterable[tuple[T, Sequence[Example]]], guidance_scale: float, clock: Stopwatch
) -> Iterator[tuple[T, Condition]]:
    """Batches of examples, each with something of the caller -> that and the condition of the batch, in order.

    Text encoders that wait on the CPU between uses are moved to the device once for AHEAD examples, and stay there
    while their images are encoded. An error of `batches` is raised after the batches before it; one of encoding before
    those that are encoded with it.
    """
    pending: list[tuple[T, Sequence[Example]]] = []
    problem: Exception | None = None
    source = iter(batches)
    while problem is None:
        try:
            pending.append(next(source))
        except Exception as error:  # the end, too
            problem = error
        if problem is None and sum(len(examples) for _, examples in pending) < AHEAD:
            continue
        with clock.part("text"), model.encoding():
            waiting = [_waiting(model.encode(examples, guidance_scale)) for _, examples in pending]
        for (given, _), (device, condition) in zip(pending, waiting, strict=True):
            yield given, condition.to(device)
        pending = []
    if not isinstance(problem, StopIteration):
        raise problem


def _waiting(condition: Condition) -> tuple[torch.device, Condition]:
    """Where a condition is, and the condition on the CPU."""
    placed = (t for name, t in condition.tensors.items() if name.removeprefix("negative_") not in condition.on_host)
    return next(placed).device, condition.to("cpu")


def drop_references(condition: Condition, share: float, seeds: Sequence[int], uncaptioned: Sequence[bool]) -> Condition:
    """The condition, with a random share of its rows (one seed each) attending to no token of their reference.

    Args:
        uncaptioned: rows that lose theirs in any case: guidance steers away from "no text, no reference".
    """
    generators = [torch.Generator().manual_seed(seed) for seed in seeds]
    draws = torch.stack([torch.rand((), generator=g, dtype=torch.float32) for g in generators])
    keep = condition.tensors["reference_keep"]
    kept = keep * ((draws >= share) & ~torch.tensor(list(uncaptioned), dtype=torch.bool)).to(keep)
    return replace(condition, tensors={**condition.tensors, "reference_keep": kept})
