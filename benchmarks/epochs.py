"""The recipes' own epochs, one at a time: what benchmarks measure."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from retouch.algorithms.grpo import recipe as grpo
from retouch.algorithms.nft import recipe as nft
from retouch.training.experience import collect
from retouch.training.session import Session


def epochs(session: Session) -> Callable[[], None]:
    """One epoch of GRPO or DiffusionNFT after another: rollout batches and their optimizer steps, as the recipe takes
    them. Snapshots that the algorithm compares with must be there."""
    algorithm: Any = session.config.algorithm
    recipe, policy = (nft, "old") if algorithm.name == "nft" else (grpo, None)

    def epoch() -> None:
        recipe.train_epoch(session, algorithm, collect(session, algorithm, policy))

    return epoch


class Table:
    """A table of rewards; subclasses submit in another way."""

    def __init__(self, table: Any) -> None:
        self.table = table

    def __getattr__(self, name: str) -> Any:
        return getattr(self.table, name)
