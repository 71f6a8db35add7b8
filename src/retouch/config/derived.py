"""Numbers that follow from a run file: computed once, named, shown by `retouch check` and logged before step 0."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass

from retouch.config.errors import ConfigError
from retouch.config.schema import RunConfig


@dataclass(frozen=True)
class Derived:
    """What a run amounts to on `world_size` processes.

    Attributes:
        images_per_epoch_per_device, padded_images_per_epoch: every rollout batch is padded by itself until it divides.
        global_rows_per_step: images that one optimizer step sees at most; an epoch is dealt evenly into its steps.
        forwards_per_image: forward-equivalents of the network that one trained image costs: sampling steps, 1 for each
            trained step of the reference, then 3 for each trained step of each inner epoch (a backward counts as 2; 1
            more with gradient checkpointing).
    """

    world_size: int
    warmup_steps: int
    global_images_per_rollout_batch: int
    global_groups_per_epoch: int
    global_images_per_epoch: int
    images_per_epoch_per_device: int
    padded_images_per_epoch: int
    global_rows_per_step: int
    optimizer_steps_per_epoch: int
    epochs: int
    stochastic_steps: int
    trained_steps: int
    forwards_per_image: float

    def as_dict(self) -> dict[str, int | float]:
        return asdict(self)


def stochastic_steps(run: RunConfig) -> int:
    """Steps of a rollout that draw noise and have a density: the window, or all (but the last one of cps)."""
    if run.algorithm.name == "sft":
        return 0
    if run.rollout.window:
        return run.rollout.window.size
    return run.rollout.num_steps - (1 if run.rollout.step_rule == "cps" else 0)  # cps ends with std 0


def trained_steps(run: RunConfig) -> int:
    """Steps of a rollout that enter the loss."""
    if run.algorithm.name == "sft":
        return 0
    share = stochastic_steps(run) * run.algorithm.timestep_fraction
    return max(1, math.ceil(share - 1e-9))  # 25 x 0.28 is 7.000000000000001


def derive(run: RunConfig, world_size: int = 1) -> Derived:
    """Compute the numbers of a run.

    Raises:
        ConfigError: a run that could never take an optimizer step on this many processes.
    """
    if world_size < 1:
        raise ConfigError(f"--world-size: given {world_size}; it is the number of processes, at least 1")
    optimizer, training = run.optimizer, run.training
    rows_per_step = optimizer.batch_size_per_device * optimizer.gradient_accumulation * world_size
    backward = 3 + (1 if training.gradient_checkpointing else 0)
    if run.algorithm.name == "sft":
        return Derived(
            world_size=world_size,
            warmup_steps=training.max_steps,
            global_images_per_rollout_batch=0,
            global_groups_per_epoch=0,
            global_images_per_epoch=0,
            images_per_epoch_per_device=0,
            padded_images_per_epoch=0,
            global_rows_per_step=rows_per_step,
            optimizer_steps_per_epoch=0,
            epochs=0,
            stochastic_steps=0,
            trained_steps=0,
            forwards_per_image=float(backward),
        )
    rollout, algorithm = run.rollout, run.algorithm
    groups = rollout.global_groups_per_batch * rollout.batches_per_epoch
    images_per_batch = rollout.global_groups_per_batch * rollout.group_size
    images = images_per_batch * rollout.batches_per_epoch
    per_device = math.ceil(images_per_batch / world_size) * rollout.batches_per_epoch
    steps_per_inner_epoch = math.ceil(per_device / (optimizer.batch_size_per_device * optimizer.gradient_accumulation))
    per_epoch = steps_per_inner_epoch * algorithm.inner_epochs
    trained = trained_steps(run)
    reference = trained if algorithm.kl_weight else 0
    return Derived(
        world_size=world_size,
        warmup_steps=algorithm.warmup_steps,
        global_images_per_rollout_batch=images_per_batch,
        global_groups_per_epoch=groups,
        global_images_per_epoch=images,
        images_per_epoch_per_device=per_device,
        padded_images_per_epoch=per_device * world_size - images,
        global_rows_per_step=rows_per_step,
        optimizer_steps_per_epoch=per_epoch,
        epochs=math.ceil((training.max_steps - algorithm.warmup_steps) / per_epoch),
        stochastic_steps=stochastic_steps(run),
        trained_steps=trained,
        forwards_per_image=rollout.num_steps + reference + algorithm.inner_epochs * trained * backward,
    )
