"""Which examples an epoch takes, in which order, on which rank: pure functions of the run's seed.

Nothing here has a state, so that a resumed run, another number of processes or another batch size sees the same
epochs. An epoch takes G different examples, K rollouts each: G · K *slots* in a fixed order. Ranks take consecutive
slices of them; the last slots are padded, with weight 0, where they do not divide.
"""

from __future__ import annotations

import hashlib
from collections.abc import Collection
from dataclasses import dataclass
from functools import lru_cache
from random import Random

from retouch.data.dataset import DataError


@dataclass(frozen=True)
class Slot:
    """One rollout to make: the position of its example in the data set, and its index within the group.

    `padding` marks a slot that only keeps ranks in step; its row has weight 0 everywhere.
    """

    example: int
    index: int
    padding: bool = False


def derive_seed(*parts: int | str) -> int:
    """A 63-bit seed from named parts: every random draw of a run has its own."""
    digest = hashlib.blake2b("/".join(map(str, parts)).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") >> 1


@lru_cache(maxsize=4)  # steps come one after another: those of a pass share its order
def shuffled(size: int, seed: int, number: int) -> tuple[int, ...]:
    """Positions 0 .. size - 1 in the order of pass `number`."""
    order = list(range(size))
    Random(derive_seed(seed, "pass", number)).shuffle(order)
    return tuple(order)


def batch_examples(size: int, rows: int, seed: int, step: int) -> list[int]:
    """The rows of supervised step `step`: consecutive pieces of an endless stream, shuffled anew each pass."""
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


def other_examples(size: int, taken: Collection[int], count: int, seed: int, epoch: int, again: int) -> list[int]:
    """Up to `count` examples of an epoch besides those `taken`, for round `again` of resampling."""
    known = set(taken)
    free = [i for i in range(size) if i not in known]
    return Random(derive_seed(seed, "resample", epoch, again)).sample(free, min(count, len(free)))


def rank_slots(examples: list[int], group_size: int, rank: int, world_size: int) -> list[Slot]:
    """This rank's consecutive slice of the G · K slots, padded so that all ranks have the same number."""
    slots = [Slot(example, index) for example in examples for index in range(group_size)]
    per_rank = -(-len(slots) // world_size)
    slots += [Slot(slots[-1].example, slots[-1].index, padding=True)] * (per_rank * world_size - len(slots))
    return slots[rank * per_rank : (rank + 1) * per_rank]
