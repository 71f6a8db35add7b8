"""The examples of an epoch, their order and their rank: pure functions of the run's seed.

Without state, a resumed run, another number of processes or another batch size has the same epochs, and the same
supervised steps if a step has as many samples. An epoch takes G different examples, K rollouts each: G · K *slots* in a
fixed order. Ranks take consecutive slices of them; the last slots are padded, with weight 0, if they do not divide.
A reward that compares samples of a group needs slices of whole groups.
"""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from random import Random
from typing import TypeVar

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
    """A 63-bit seed from named parts; every random draw of a run has its own."""
    digest = hashlib.blake2b("/".join(map(str, parts)).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") >> 1


def own_share(items: Sequence[T], rank: int, world_size: int) -> tuple[list[T], int]:
    """A rank's consecutive slice, and the padding that gives every rank as many forwards."""
    each = -(-len(items) // world_size)
    own = list(items[rank * each : (rank + 1) * each])
    return own, each - len(own)


@lru_cache(maxsize=4)  # consecutive steps of a pass share its order
def shuffled(size: int, seed: int, number: int) -> tuple[int, ...]:
    """Positions 0 .. size - 1 in the order of pass `number`."""
    order = list(range(size))
    Random(derive_seed(seed, "pass", number)).shuffle(order)
    return tuple(order)


def batch_examples(size: int, rows: int, seed: int, step: int) -> list[int]:
    """The examples of supervised step `step`: consecutive pieces of an endless stream, shuffled anew in each pass."""
    positions = range(step * rows, (step + 1) * rows)
    passes = {number: shuffled(size, seed, number) for number in {p // size for p in positions}}
    return [passes[p // size][p % size] for p in positions]


def epoch_examples(size: int, groups: int, seed: int, epoch: int) -> list[int]:
    """The G different examples of an epoch.

    A pass over the data is size // G epochs of one shuffled order; the few examples left over sit that pass out.

    Raises:
        DataError: fewer examples than groups; an example twice in an epoch would be one group of 2 K.
    """
    if groups > size:
        raise DataError(
            f"an epoch takes {groups} groups, but the data set has {size} examples; lower "
            f"rollout.global_groups_per_batch x rollout.batches_per_epoch to at most {size}, or add data"
        )
    number, part = divmod(epoch, size // groups)
    return list(shuffled(size, seed, number)[part * groups : (part + 1) * groups])


def easiest(difficulties: Sequence[float], stage: int, stages: int) -> list[int]:
    """Positions of the easiest stage/stages of the examples, at least one; ties in order of position."""
    count = -(-len(difficulties) * stage // stages)
    return sorted(sorted(range(len(difficulties)), key=lambda i: (difficulties[i], i))[:count])


def curriculum_pool(difficulties: Sequence[float], epoch: int, epochs: int, stages: int) -> list[int]:
    """Positions that an epoch of a run of `epochs` may draw from; stages have equal length."""
    return easiest(difficulties, _stage(epoch, epochs, stages), stages)


def curriculum_examples(
    difficulties: Sequence[float], groups: int, seed: int, epoch: int, epochs: int, stages: int
) -> list[int]:
    """The G different examples of an epoch under a curriculum; `epoch_examples` if it has one stage.

    Raises:
        DataError: fewer examples than groups in the stage.
    """
    if stages == 1:
        return epoch_examples(len(difficulties), groups, seed, epoch)
    stage = _stage(epoch, epochs, stages)
    pool = curriculum_pool(difficulties, epoch, epochs, stages)
    begun = _begin(stage, epochs, stages)
    return [pool[i] for i in epoch_examples(len(pool), groups, derive_seed(seed, "stage", stage), epoch - begun)]


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
