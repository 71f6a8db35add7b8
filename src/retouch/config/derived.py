"""Numbers that follow from a run file: computed once, named, shown by `retouch check` and logged before step 0."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Protocol

from retouch.algorithms.base import Objective, RlConfig
from retouch.config.errors import ConfigError

if TYPE_CHECKING:
    from retouch.config.run import RunConfig


CPU_ROWS, ACCELERATOR_ROWS = 8, 24
"""Rows of the network in a training forward at most, by `optimizer.steps_per_forward: auto`. On a CPU 24 and 144 rows
took 1.01 and 1.11 of the time of other trainers, 8 and 16 rows .90 and .92. On an accelerator three steps in one
forward were 1.03 to 1.14 times as fast as three forwards up to 24 rows, and half as fast at 48 (UniRL, PR 144, H20)."""


class Numbers(Protocol):
    """Named numbers of a run."""

    def as_dict(self) -> dict[str, int | float]: ...


@dataclass(frozen=True)
class Derived:
    """Sizes and costs of a run on `world_size` processes, computed from its options.

    Attributes:
        images_per_epoch_per_device, padded_images_per_epoch: each rollout batch is padded until it divides.
        global_rows_per_step: images (DPO: pairs; reward gradients: trained steps of images) in one optimizer step at
            most; an epoch is split evenly into its steps.
        forwards_per_image: forward-equivalents of the network that one image costs, sampled and trained: solver steps,
            1 for each noised copy or trained step under each snapshot (old, reference) and for each log-probability
            that is computed again, then 3 for each of them in each inner epoch (a backward counts as 2; 1 more with
            gradient checkpointing). NFT's old policy counts as in the epochs after the first: none in the first step of
            an epoch with old_policy=copy. Classifier-free guidance doubles what goes through the solver: sampling, and
            the trained steps of GRPO and PPO.
        decoder_backwards_per_image: decodes with a backward that one image costs beside these; each costs about two
            decodes, or three with gradient checkpointing.
        state_bytes_per_weight: device memory that training keeps for every trained weight at most, in fp32: the
            weight, its gradient, two moments of AdamW (fewer bytes with another optimizer.state), and one copy in each
            snapshot; training.sharding divides this over the devices. It excludes frozen weights, activations,
            autocast's copies and, on several processes without sharding, the buckets of the gradient exchange (4 more).
        vision_tokens: tokens of the text encoder that a source of `data` takes; 0 where it reads no images.
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
    decoder_backwards_per_image: int
    state_bytes_per_weight: int
    vision_tokens: int

    def as_dict(self) -> dict[str, int | float]:
        return asdict(self)


def stochastic_steps(run: RunConfig) -> int:
    """Steps of a rollout that draw noise and have a density: the window, or all (but the last one of some rules)."""
    rule = run.algorithm.step_rule(run)
    if rule is None:
        return 0
    return run.rollout.window.size if run.rollout.window else run.rollout.num_steps - rule.ends_without_noise


def window_starts(run: RunConfig) -> range:
    """First steps that the window may have, in order."""
    rollout, rule = run.rollout, run.algorithm.step_rule(run)
    assert rollout.window is not None
    assert rule is not None
    low, high = (round(share * rollout.num_steps) for share in rollout.window.range)
    high = min(high, rollout.num_steps - rule.ends_without_noise)
    return range(low, high - rollout.window.size + 1)


def sliding_places(run: RunConfig) -> list[int]:
    """First steps of a sliding window in turn; the last window ends at the end of its range, for every stride."""
    assert run.rollout.window is not None
    starts = window_starts(run)
    return sorted({*starts[:: run.rollout.window.stride], starts[-1]})


def forward_precision(run: RunConfig) -> str:
    """Precision that the network computes in: autocast's, or that of its weights, which are fp32 where all train."""
    if run.training.mixed_precision != "no":
        return run.training.mixed_precision
    return "fp32" if run.algorithm.trained_kind(run) == "full" else run.model.dtype


def snapshots(run: RunConfig) -> frozenset[str]:
    """Snapshots of the trained weights that the run keeps."""
    return run.algorithm.snapshots | frozenset({"ema"} if run.ema else ())


def numbers(run: RunConfig, world_size: int = 1) -> Numbers:
    """The numbers that `retouch check` prints.

    Raises:
        ConfigError: a run that could never take an optimizer step on this many processes.
    """
    return run.algorithm.derive(run, world_size)


def derive(run: RunConfig, world_size: int = 1) -> Derived:
    """Compute the numbers of a run that trains the diffusion model.

    Raises:
        ConfigError: no process, groups that a reward compares but that the processes would split, or steps without one.
    """
    if world_size < 1:
        raise ConfigError(f"--world-size: given {world_size}; expected the number of processes, at least 1")
    optimizer, training, algorithm, rollout = run.optimizer, run.training, run.algorithm, run.rollout
    assert isinstance(algorithm, Objective)
    supervised = algorithm.supervised_steps(run)
    groups = batch = per_device = per_epoch = epochs = 0
    if isinstance(algorithm, RlConfig) and algorithm.trains_on_rewards:
        groups = rollout.global_groups_per_batch * rollout.batches_per_epoch
        batch = rollout.global_groups_per_batch * rollout.group_size
        per_device = math.ceil(batch / world_size) * rollout.batches_per_epoch
        per_epoch = algorithm.steps_per_pass(run, world_size) * algorithm.inner_epochs
        epochs = math.ceil((training.max_steps - supervised) / per_epoch)
        _require_whole_groups(run, world_size)
    if supervised or not groups:
        require_even_share(run, 1, world_size, "the examples of a step")
    images = batch * rollout.batches_per_epoch
    return Derived(
        world_size=world_size,
        warmup_steps=supervised,
        global_images_per_rollout_batch=batch,
        global_groups_per_epoch=groups,
        global_images_per_epoch=images,
        images_per_epoch_per_device=per_device,
        padded_images_per_epoch=per_device * world_size - images,
        global_rows_per_step=optimizer.rows_per_step(world_size),
        optimizer_steps_per_epoch=per_epoch,
        epochs=epochs,
        stochastic_steps=stochastic_steps(run),
        trained_steps=algorithm.trained_steps(run),
        forwards_per_image=forwards_per_image(run, per_epoch),
        decoder_backwards_per_image=algorithm.decoder_backwards(run),
        state_bytes_per_weight=4 * (2 + len(snapshots(run))) + moment_bytes(run),
        vision_tokens=max(map(run.model.vision_tokens, run.data.page_sizes)) if "source" in run.data.has_images else 0,
    )


def _require_whole_groups(run: RunConfig, world_size: int) -> None:
    name = next((name for name, entry in run.rewards.items() if entry.compares_group() and entry.role == "train"), None)
    groups = run.rollout.global_groups_per_batch
    if name is not None and groups % world_size:
        raise ConfigError(
            f"rollout.global_groups_per_batch: given {groups} on {world_size} processes, but rewards.{name} compares "
            f"whole groups; set rollout.global_groups_per_batch to a multiple of {world_size}"
        )


def require_even_share(run: RunConfig, per_device: int, world_size: int, what: str) -> None:
    """Refuse a number of processes that cannot take steps of `optimizer.global_batch_size`.

    Args:
        per_device: rows of which a process takes a multiple.
        what: they share, for the message.

    Raises:
        ConfigError: with the numbers nearest to it that can.
    """
    rows, unit = run.optimizer.global_batch_size, per_device * world_size
    if rows is None or rows % unit == 0:
        return
    # Rounding the step to what the processes can share would make another run of it, which only its curve would show.
    fits = [count for count in range(1, rows // per_device + 1) if rows % (count * per_device) == 0]
    nearest = [
        max((n for n in fits if n < world_size), default=None),
        min((n for n in fits if n > world_size), default=None),
    ]
    processes = " or ".join(str(n) for n in nearest if n) or "none"
    sizes = " or ".join(str(size) for size in (rows // unit * unit, -(-rows // unit) * unit) if size)
    each = f" in forwards of {per_device}" if per_device > 1 else ""
    raise ConfigError(
        f"optimizer.global_batch_size: given {rows} on {world_size} processes, which share {what} evenly{each}; "
        f"expected a multiple of {unit}; set it to {sizes}, or start {processes} processes"
    )


def moment_bytes(run: RunConfig) -> int:
    """Bytes of AdamW's two moments of a trained weight; another optimizer counts as AdamW in fp32."""
    return 8 if run.optimizer.state == "fp32" or run.optimizer.factory is not None else 2


def saved_bytes(run: RunConfig) -> int | None:
    """Bytes of a checkpoint: weights, moments and snapshots in fp32, of the released sizes; None where they are not
    known, and of a style adapter and a text encoder."""
    from retouch.families.sizes import released_sizes

    spec, train, kept = run.model.spec, run.model.train, snapshots(run)
    released = released_sizes(spec) if run.model.has_released_sizes else None
    if released is None or train.kind == "ip_adapter" or run.algorithm.trains_text_encoder:
        return None
    network, trained = released.network, released.network.weights
    if train.kind == "lora":
        trained = network.lora_weights(train.targets or spec.lora_targets, train.rank)
    return (4 * (1 + len(kept)) + moment_bytes(run)) * trained


def kept_checkpoints(run: RunConfig) -> int:
    """Checkpoints at the end of the run: the regular ones, and those of the end of the warm-up and of the run."""
    training = run.training
    regular = training.max_steps // training.checkpoint_every if training.checkpoint_every else 0
    return min(regular, training.keep_checkpoints or regular) + 2


def forwards_per_image(run: RunConfig, optimizer_steps: int) -> float:
    """Forward-equivalents of one image; see `Derived`.

    Args:
        optimizer_steps: of an epoch; with a single one no log-probability is computed again.
    """
    assert isinstance(run.algorithm, Objective)
    guided = run.model.forwards_of_guidance(run.guidance_scale)
    backward = 3 + (1 if run.training.gradient_checkpointing else 0)
    return run.algorithm.forwards_per_image(run, optimizer_steps, guided, backward)


def parts_per_forward(run: RunConfig, device: str) -> int:
    """Trained steps or noised copies of a row in one training forward, by `optimizer.steps_per_forward`.

    Args:
        device: "cpu", or the type of an accelerator.
    """
    optimizer = run.optimizer
    parts, width = run.algorithm.parts_of_row(run)
    if optimizer.steps_per_forward != "auto":
        return min(parts, optimizer.steps_per_forward or parts)
    most = CPU_ROWS if device == "cpu" else ACCELERATOR_ROWS
    if run.algorithm.trains_on_rewards:
        most = min(most, run.rollout.batch_size_per_device * run.model.forwards_of_guidance(run.guidance_scale))
    size = max(1, most // (optimizer.batch_size_per_device * width))
    return math.ceil(parts / math.ceil(parts / size))  # as many forwards; only the last may be smaller


def rows_per_forward(run: RunConfig, device: str) -> int:
    """Rows of the network in one training forward at most, the halves of guidance counted; `device` as in
    `parts_per_forward`."""
    _, width = run.algorithm.parts_of_row(run)
    return run.optimizer.batch_size_per_device * parts_per_forward(run, device) * width


def sampling_forwards(run: RunConfig) -> float:
    """Forwards that sampling one image takes; steps before the window, and with `shared_first_step` its first one, are
    taken once a group where noise is shared."""
    rollout = run.rollout
    if not (rollout.shared_noise and stochastic_steps(run)):
        return float(rollout.num_steps)
    starts: Sequence[int] = window_starts(run) if rollout.window else [0]
    if rollout.window and rollout.window.position == "sliding":
        starts = sliding_places(run)
    fixed = rollout.window and rollout.window.position == "fixed"
    first = starts[0] if fixed else sum(starts) / len(starts)
    together = min(rollout.group_size, rollout.batch_size_per_device)
    return rollout.num_steps - (first + rollout.shared_first_step) * (1 - 1 / together)


def shared_training_steps(run: RunConfig, optimizer_steps: int) -> float:
    """Trained steps of an image that take no row of the network of their own in a training forward, of at most one: the
    expected share of images whose first step another one of their group and optimizer step takes (see
    `ForwardSize.parts`), where whole groups are on a process and their images fall into steps independently.

    Args:
        optimizer_steps: of one pass over an epoch.
    """
    steps, size = max(1, optimizer_steps), run.rollout.group_size
    inputs = steps / size * (1 - (1 - 1 / steps) ** size)
    return 1 - inputs if run.rollout.shares_first_step and 2 * inputs <= 1 else 0.0
