"""The recipes' own epochs, one at a time: what benchmarks measure."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from retouch.algorithms.grpo import recipe as grpo
from retouch.algorithms.nft import recipe as nft
from retouch.rollout.encoded import EncodedData
from retouch.training.experience import (
    collect,
    train_epoch,
)
from retouch.training.session import Session


def epochs(session: Session) -> Callable[[], None]:
    """One epoch of GRPO or DiffusionNFT after another: rollout batches and their optimizer steps, as the recipe takes
    them. Snapshots that the algorithm compares with must be there."""
    run, config = session.run, session.config.algorithm
    data = EncodedData(run.model, run.data, run.guidance_scale, run.clock)
    is_nft = config.name == "nft"

    def epoch() -> None:
        experience = collect(session, data, config, "old" if is_nft else None)  # type: ignore[arg-type]
        if not is_nft and config.kl_weight:  # type: ignore[union-attr]
            experience.reference_means = grpo.reference_means(run, data, experience, session.rows_per_forward)
        train = nft.train_step if is_nft else grpo.train_step
        step = partial(train, session, data, config, experience)  # type: ignore[arg-type]
        after = partial(nft.move_old_policy, session, config) if is_nft else lambda: None  # type: ignore[arg-type]
        train_epoch(session, len(experience.weight), experience.tensors, step, after=after)

    return epoch
