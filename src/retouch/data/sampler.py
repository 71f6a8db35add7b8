"""The examples of an epoch, their order and their rank: pure functions of the run's seed.

Without state, a resumed run, another number of processes or another batch size has the same epochs, and the same
supervised steps if a step has as many samples; the stages of a curriculum follow `Derived.epochs`. An epoch takes G
different examples, K rollouts each: G · K *slots* in a fixed order. Ranks take consecutive slices of them; the last
slots are padded, with weight 0, if they do not divide.
A reward that compares samples of a group needs slices of whole groups.

Where examples have several shapes, an epoch and a supervised step have one each, on all ranks: in the order of a pass,
the examples of each shape gather until there are as many as it takes, and these are the next epoch or step. With one
shape they are consecutive pieces of the pass.
"""

from __future__ import annotations

import hashlib
from bisect import bisect_right
from collections import Counter
from collections.abc import Callable, Collection, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from random import Random
from typing import TypeVar

from retouch.data.buckets import Shapes
from retouch.data.dataset import DataError

T = TypeVar("T")


@dataclass(frozen=True)
class Slot:
    """One rollout: the position of its example in the data set, and its index within the group.

    `padding` marks a slot that only keeps ranks in step, with weight 0 everywhere.
    """

    example: int
    index: int
    padding: bool = False


def derive_seed(*parts: int | str) -> int:
    """A 63-bit seed from named parts; every random draw of a run has its own, which docs/architecture.md lists."""
    digest = hashlib.blake2b("/".join(map(str, parts)).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") >> 1


def own_share(items: Sequence[T], rank: int, world_size: int) -> tuple[list[T], int]:
    """A rank's consecutive slice, and the padding that gives every rank as many forwards."""
    each = -(-len(items) // world_size)
    own = list(items[rank * each : (rank + 1) * each])
    return own, each - len(own)


@lru_cache(maxsize=16)  # consecutive steps share the order of a pass; a step of a rare shape takes several passes
def shuffled(size: int, seed: int, number: int) -> tuple[int, ...]:
    """Positions 0 .. size - 1 in the order of pass `number`."""
    order = list(range(size))
    Random(derive_seed(seed, "pass", number)).shuffle(order)
    return tuple(order)


def batch_examples(size: int, rows: int, seed: int, step: int, shapes: Sequence[Hashable] | Shapes = ()) -> list[int]:
    """The examples of supervised step `step`: consecutive pieces of an endless stream, shuffled anew in each pass. Each
    shape has a stream of its own, and the step is the one whose piece is complete next in all of them together.

    Args:
        shapes: of every example; none: all have one.
    """
    known = shapes if isinstance(shapes, Shapes) else Shapes(shapes)
    if len(known.counts) < 2:
        return _piece(range(step * rows, (step + 1) * rows), size, lambda number: shuffled(size, seed, number))
    shape, piece = _next_piece(known, rows, seed, step)
    places = range(piece * rows, (piece + 1) * rows)
    return _piece(places, known.counts[shape], lambda number: _by_shape(known, seed, number)[shape])


def _piece(places: range, size: int, order: Callable[[int], Sequence[int]]) -> list[int]:
    """Consecutive places of the endless stream of passes over `size` examples."""
    passes = {number: order(number) for number in {p // size for p in places}}
    return [passes[p // size][p % size] for p in places]


@lru_cache(maxsize=16)  # as of `shuffled`
def _by_shape(shapes: Shapes, seed: int, number: int) -> Mapping[Hashable, Sequence[int]]:
    """The examples of each shape in the order of pass `number`."""
    found: dict[Hashable, list[int]] = {shape: [] for shape in shapes.counts}
    for example in shuffled(len(shapes.of), seed, number):
        found[shapes.of[example]].append(example)
    return found


def _next_piece(shapes: Shapes, rows: int, seed: int, step: int) -> tuple[Hashable, int]:
    """The shape of a supervised step, and the number of the step's piece in the stream of that shape."""

    def taken(passes: int) -> int:
        """Steps whose last example is in the first so many passes."""
        return sum(passes * count // rows for count in shapes.counts.values())

    # each shape holds back less than a step
    number = bisect_right(range((step + len(shapes.counts)) * rows // len(shapes.of) + 2), step, key=taken) - 1
    return _pieces(shapes, rows, seed, number)[step - taken(number)]


@lru_cache(maxsize=16)
def _pieces(shapes: Shapes, rows: int, seed: int, number: int) -> Sequence[tuple[Hashable, int]]:
    """The steps that pass `number` completes, as `_next_piece` returns one."""
    of, counts = shapes.of, shapes.counts
    waiting = {shape: number * count % rows for shape, count in counts.items()}
    begun = {shape: number * count // rows for shape, count in counts.items()}
    found: list[tuple[Hashable, int]] = []
    for example in _complete(shuffled(len(of), seed, number), rows, of, waiting):
        found.append((of[example], begun[of[example]]))
        begun[of[example]] += 1
    return found


def _complete(
    order: Sequence[int], rows: int, shapes: Sequence[Hashable], waiting: Mapping[Hashable, int]
) -> Iterator[int]:
    """The examples of a pass with which a piece of `rows` examples of one shape is complete.

    Args:
        waiting: examples of each shape that earlier passes left.
    """
    waiting = Counter(waiting)
    for example in order:
        waiting[shapes[example]] += 1
        if waiting[shapes[example]] == rows:
            waiting[shapes[example]] = 0
            yield example


def epoch_examples(size: int, groups: int, seed: int, epoch: int, shapes: Sequence[Hashable] = ()) -> list[int]:
    """The G different examples of an epoch, all of one shape.

    A pass over the data is size // G epochs of one shuffled order; the few examples left over sit that pass out: up to
    G - 1 of each shape.

    Args:
        shapes: of every example; none: all have one.

    Raises:
        DataError: fewer examples of every shape than groups; an example twice in an epoch would be one group of 2 K.
    """
    shapes = shapes or [None] * size
    counts = Counter(shapes)
    pieces = sum(count // groups for count in counts.values())
    if not pieces:
        most, of_one = max(counts.values()), " of one shape" if len(counts) > 1 else ""
        raise DataError(
            f"an epoch takes {groups} groups, but the data set has {most} examples{of_one}; lower "
            f"rollout.global_groups_per_batch x rollout.batches_per_epoch to at most {most}, or add data"
        )
    number, part = divmod(epoch, pieces)
    order = shuffled(size, seed, number)
    if len(counts) == 1:
        return list(order[part * groups : (part + 1) * groups])
    complete = list(_complete(order, groups, shapes, {}))[: part + 1]
    shape = shapes[complete[-1]]
    end = sum(shapes[i] == shape for i in complete) * groups
    return [i for i in order if shapes[i] == shape][end - groups : end]


def easiest(difficulties: Sequence[float], stage: int, stages: int) -> list[int]:
    """Positions of the easiest stage/stages of the examples, at least one; ties in order of position."""
    count = -(-len(difficulties) * stage // stages)
    return sorted(sorted(range(len(difficulties)), key=lambda i: (difficulties[i], i))[:count])


def curriculum_pool(difficulties: Sequence[float], epoch: int, epochs: int, stages: int) -> list[int]:
    """Positions that an epoch of a run of `epochs` may draw from; stages have equal length."""
    return easiest(difficulties, _stage(epoch, epochs, stages), stages)


def curriculum_examples(
    difficulties: Sequence[float],
    groups: int,
    seed: int,
    epoch: int,
    epochs: int,
    stages: int,
    shapes: Sequence[Hashable] = (),
) -> list[int]:
    """The G different examples of an epoch under a curriculum; `epoch_examples` if it has one stage.

    Raises:
        DataError: fewer examples than groups in the stage.
    """
    if stages == 1:
        return epoch_examples(len(difficulties), groups, seed, epoch, shapes)
    stage = _stage(epoch, epochs, stages)
    pool = curriculum_pool(difficulties, epoch, epochs, stages)
    begun, own = _begin(stage, epochs, stages), [shapes[i] for i in pool] if shapes else ()
    return [pool[i] for i in epoch_examples(len(pool), groups, derive_seed(seed, "stage", stage), epoch - begun, own)]


def curriculum_order(difficulties: Sequence[float], count: int, seed: int, stages: int) -> list[int]:
    """Positions of `count` examples: in each stage, passes over its examples, shuffled anew each time. A resumed run
    takes the rest of the list."""
    order: list[int] = []
    for stage in range(1, stages + 1):
        rows = _begin(stage + 1, count, stages) - _begin(stage, count, stages)
        pool = easiest(difficulties, stage, stages)
        order += [pool[i] for i in batch_examples(len(pool), rows, derive_seed(seed, "stage", stage), 0)]
    return order


def _stage(part: int, parts: int, stages: int) -> int:
    """The stage, from 1, of part `part` of a run; the last stage after its end."""
    return next((s for s in range(1, stages) if part < _begin(s + 1, parts, stages)), stages)


def _begin(stage: int, parts: int, stages: int) -> int:
    """The first part of a stage."""
    return -(-(stage - 1) * parts // stages)


def other_examples(size: int, taken: Collection[int], count: int, seed: int, epoch: int, again: int) -> list[int]:
    """Up to `count` examples of an epoch other than those `taken`, for round `again` of resampling."""
    known = set(taken)
    free = [i for i in range(size) if i not in known]
    return Random(derive_seed(seed, "resample", epoch, again)).sample(free, min(count, len(free)))


def rank_slots(
    examples: list[int], group_size: int, rank: int, world_size: int, whole_groups: bool = False
) -> list[Slot]:
    """This rank's consecutive slice of the G · K slots, padded to the same number on all ranks.

    Args:
        whole_groups: no group lies on two ranks.
    """
    unit = group_size if whole_groups else 1
    slots = [Slot(example, index) for example in examples for index in range(group_size)]
    own, padding = own_share([slots[i : i + unit] for i in range(0, len(slots), unit)], rank, world_size)
    return [slot for part in own for slot in part] + [replace(slots[-1], padding=True)] * (padding * unit)
