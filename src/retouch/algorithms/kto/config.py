"""Options of KTO."""

from __future__ import annotations

from collections.abc import Iterable, Sequence, Set
from typing import TYPE_CHECKING, ClassVar, Literal

from retouch.algorithms.base import RlConfig
from retouch.config.base import Count, Positive
from retouch.config.reads import Reading
from retouch.data.base import ItemFiles
from retouch.errors import DataError

if TYPE_CHECKING:
    from retouch.config.run import RunConfig

LABELS = {"good": True, "true": True, "1": True, "bad": False, "false": False, "0": False}
"""Values of `label` in a manifest, in lower case -> whether the image is a good one."""


class KtoConfig(RlConfig):
    """Kahneman-Tversky optimization (Diffusion-KTO, arXiv 2404.04465) on labelled images: no pairs, no rewards."""

    READS: ClassVar[Set[Reading]] = {"diffusion", "warm_up", "parts"}
    recipe: ClassVar[str] = "retouch.algorithms.kto.recipe:train"

    name: Literal["kto"] = "kto"
    beta: Positive = 1000.0
    """Scale of the implicit reward, for errors that are means over dims; 1000 as published."""
    good_weight: Positive = 1.0
    """Weight of the loss of images with label good."""
    bad_weight: Positive = 1.0
    """Weight of the loss of images with label bad. If one label is rare, raise its weight until the products of weight
    and count differ by less than a factor of about 1.3."""
    timesteps_per_image: Count = 1
    """Noised copies of an image in one step, their times spread over the schedule."""

    @property
    def trains_on_rewards(self) -> bool:
        return False

    @property
    def given_images(self) -> frozenset[str]:
        return frozenset({"target"})

    @property
    def snapshots(self) -> frozenset[str]:
        return frozenset({"reference"})

    def parts_of_row(self, run: RunConfig) -> tuple[int, int]:
        return self.timesteps_per_image, 1

    def forwards_per_image(self, run: RunConfig, optimizer_steps: int, guided: int, backward: int) -> float:
        """Reference, baseline and training forward of each noised copy."""
        return float(self.timesteps_per_image * (2 + backward))

    def warnings(self, run: RunConfig) -> Iterable[str]:
        if run.optimizer.rows_per_step(1) == 1:
            key = run.optimizer.step_size_key
            yield (
                f"{key}: given 1, with one image in an optimizer step of each process; kto "
                "compares the gain of an image with the mean gain of its step, which on one process is its own: an "
                f"image with a gain trains as hard as one without; set {key}=8 or more"
            )

    def check(self, run: RunConfig, key: str = "") -> None:
        self.require_given_images(run, "trains on target_path and label of a manifest")
        if self.sft_steps and run.warmup_data is None:
            raise ValueError(
                f"algorithm.sft_steps: given {self.sft_steps}, but without warmup_data the warm-up would train on "
                "images with label bad too; set warmup_data, or sft_steps=0"
            )
        super().check(run, key)

    def check_items(self, items: Sequence[ItemFiles]) -> None:
        found = {label_of(item) for item in items}
        if len(found) == 1:
            only, other = ("good", "bad") if True in found else ("bad", "good")
            raise DataError(
                f"data: every example has label {only}, but kto compares good with bad images; add examples with "
                f"label {other}, or set algorithm.name=sft for good images alone"
            )


def label_of(item: ItemFiles) -> bool:
    """Whether the image of an example is a good one.

    Raises:
        DataError: no label, or an unknown one.
    """
    given = item.metadata.get("label")
    label = LABELS.get(str(given).strip().lower())
    if label is None:
        raise DataError(f"data: {item.where} has label {given!r}; expected good or bad (or true, false, 1, 0)")
    return label
