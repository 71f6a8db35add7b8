"""Examples from files: formats, the group sampler, synthetic data. No torch."""

from retouch.data.dataset import DataError, Dataset, ItemError, ItemFiles, load_dataset
from retouch.data.sampler import (
    Slot,
    batch_examples,
    curriculum_examples,
    curriculum_order,
    curriculum_pool,
    derive_seed,
    epoch_examples,
    other_examples,
    rank_slots,
)

__all__ = [
    "DataError",
    "Dataset",
    "ItemError",
    "ItemFiles",
    "Slot",
    "batch_examples",
    "curriculum_examples",
    "curriculum_order",
    "curriculum_pool",
    "derive_seed",
    "epoch_examples",
    "load_dataset",
    "other_examples",
    "rank_slots",
]
