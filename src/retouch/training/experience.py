"""The way of an image to its gradient: from the choice of an epoch's examples to the rows that are trained on.

Read from top to bottom. `collect` is all of it for GRPO, PPO and NFT; DPO and reward gradients take the samples and
their rewards from `rewarded_samples`.

    choose      `curriculum_examples`, and `further_examples` for groups without a signal
    sample      `sample_groups`, `roll_out`: K images of each example
    submit      in `roll_out`: rewards are computed while the next batch is sampled
    settle      `await_rewards`, then `settle` in `sample_and_score`: until all are in, on all processes
    gather      `gathered`: the rewards of all processes, unless too many failed (`refuse_failures`)
    advantages  `advantages_of`
    balance     `dealing.evenly_dealt`: as many rows on every process

Containers: `Scores` (outcomes of a batch by reward, pending or not), `RewardRows` (tensors of all processes), and
`Experience` (what was recorded of this process's samples; in the end, the rows that it trains on). A row counts in the
loss or does not (`counts_in_loss`, 1 or 0): padding and samples without a usable reward do not. A weight is something
else: that of a reward in their sum, or of a denoising step in the loss.

Legend: n samples of this process, N of all processes in rank order, S trained steps (0 if only clean images are trained
on).
"""

from __future__ import annotations

from collections.abc import Sequence
from concurrent import futures
from contextlib import nullcontext
from dataclasses import dataclass, field, fields
from typing import Any, Literal

import torch
from PIL.Image import Image
from torch import Tensor

from retouch.algorithms.base import AdvantageConfig, RlConfig
from retouch.core.advantages import RewardRows, comparable_rows
from retouch.data.sampler import Slot, curriculum_examples, curriculum_pool, derive_seed, other_examples, rank_slots
from retouch.engine import Engine
from retouch.errors import ConfigError, code_place
from retouch.observe.grids import grid
from retouch.rewards.protocol import RewardItem
from retouch.rewards.sharing import Gather
from retouch.rewards.table import RewardTable, Scores, statistics_of_all
from retouch.rollout.sampler import broken_rows, objective_region, sample, to_uint8
from retouch.training.dealing import evenly_dealt
from retouch.training.pixel_gradients import scaled_reward_gradients
from retouch.training.scoring import (
    RewardOutage,
    Tally,
    item_of,
    judge_details,
    judge_statistics,
    raise_together,
    refuse_failures,
    settle,
    tally_of,
    values_of,
)
from retouch.training.session import Session
from retouch.types import Trajectory

LOOK_S = 1.0
"""Seconds between two looks at requests to stop, while rewards are computed."""


@dataclass
class Experience:
    """Rows to train on, on the CPU. GRPO, PPO and NFT train on these.

    Attributes:
        position: [n] of each row's example in the dataset.
        seed: [n] int64 of the row's image.
        first_step: [n] index of the first trained step.
        latents: [n, S + 1, C, H, W] fp32: the states around the trained steps; the clean latents if S is 0.
        log_probs: [n, S] as recorded while sampling.
        advantages: [n].
        counts_in_loss: [n]: 1, or 0 for padding and rows without a usable reward.
        means: [n, S, C, H, W] as recorded while sampling; [0] if not requested.
        reference_means: [n, S, C, H, W] of the reference policy; [0] without a KL.
        gradient: [n, C, H, W] of `scaled_reward_gradients`; [0] without a reward of `gradient_weight`.
        optimizer_step: [n] step of the epoch, from 0, that trains on the row; [0] if each process shuffles its own rows
            and deals them to the steps evenly.
    """

    position: Tensor
    seed: Tensor
    first_step: Tensor
    latents: Tensor
    log_probs: Tensor
    advantages: Tensor
    counts_in_loss: Tensor
    means: Tensor
    reference_means: Tensor
    gradient: Tensor = field(default_factory=lambda: torch.zeros(0, dtype=torch.float32))
    optimizer_step: Tensor = field(default_factory=lambda: torch.zeros(0, dtype=torch.float32))

    @property
    def trained_steps(self) -> int:
        """S."""
        return self.log_probs.shape[1]

    def spanned(self, name: Literal["log_probs", "means", "reference_means"], rows: Tensor, span: range) -> Tensor:
        """[B · W, ...] of a tensor [n, S, ...]: rows over a span of trained steps, row-major."""
        return getattr(self, name)[rows][:, span.start : span.stop].flatten(0, 1)

    def transitions(self, rows: Tensor, span: range, device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
        """(x, x_next [B · W, C, H, W], step [B · W]) of rows over a span of trained steps, row-major, on a device. A
        state between two steps is copied there once."""
        states = self.latents[rows, span.start : span.stop + 1].to(device)
        step = self.first_step[rows][:, None] + torch.arange(span.start, span.stop, dtype=torch.int64)
        return states[:, :-1].flatten(0, 1), states[:, 1:].flatten(0, 1), step.flatten().to(device)

    def first_inputs(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        """(Index among B rows of the first one with each different input of the first trained step [U], and for each
        row which of these inputs is its own [B]). Rows of one example that begin in one state, bit for bit, have one
        input."""
        numbers: dict[tuple[int, int, bytes], int] = {}
        chosen = self.position[rows].tolist(), self.first_step[rows].tolist(), self.latents[rows, 0].numpy()
        own = [numbers.setdefault((p, s, x.tobytes()), len(numbers)) for p, s, x in zip(*chosen, strict=True)]
        first = [own.index(number) for number in range(len(numbers))]
        return torch.tensor(first, dtype=torch.int64), torch.tensor(own, dtype=torch.int64)


Samples = tuple[list[Slot], Experience, list[Scores]]
"""The samples of this process: slots [n], what was recorded of them, and their scores by batch. Only slots that are not
padding are scored."""


def collect(session: Session, algorithm: AdvantageConfig, policy: str | None = None) -> Experience:
    """Sample an epoch, score it, turn rewards into advantages, balance the rows.

    Args:
        policy: snapshot that samples; None is the current policy.

    Raises:
        RewardOutage, FailureRateExceeded: nothing of the epoch was trained on.
        Stopped: asked to stop between batches, or while rewards are computed.
    """
    experience, scores, rewards = rewarded_samples(session, algorithm, policy)
    advantages, counts = advantages_of(algorithm, rewards, session.run.engine.gather_list)
    experience.advantages, experience.counts_in_loss = advantages[rewards.own], counts[rewards.own]
    if any(entry.gradient_weight for entry in session.config.rewards.values()):
        rows = (experience.position, experience.latents[:, -1], experience.counts_in_loss)
        experience.gradient = scaled_reward_gradients(
            session, algorithm, items_by_row(rewards.padding[rewards.own], scores), *rows
        )
    return evenly_dealt(session.run.engine, experience, counts, session.shared_steps)


def rewarded_samples(
    session: Session, algorithm: RlConfig, policy: str | None
) -> tuple[Experience, list[Scores], RewardRows]:
    """An epoch's samples of this process, their scores by batch, and the rewards of all processes.

    Groups without a signal are followed by new ones, for up to `resample_rounds` rounds (DAPO, arXiv 2503.14476).

    Args:
        policy: snapshot that samples; None is the current policy.

    Raises:
        RewardOutage, FailureRateExceeded: on every process.
        Stopped: asked to stop between batches, or while rewards are computed.
    """
    session.recorder.probe_rewards()
    run, data = session.run, session.run.data
    curriculum = run.config.seed, session.progress.epoch, run.derived.epochs, data.config.stages
    chosen = curriculum_examples(data.difficulties, run.derived.global_groups_per_epoch, *curriculum, data.shapes)
    slots, parts, scores, rounds = list[Slot](), list[Experience](), list[Scores](), 0
    further = chosen
    while True:
        new_slots, experience, new_scores = sample_and_score(session, algorithm, further, policy)
        slots, parts, scores = slots + new_slots, [*parts, experience], scores + new_scores
        tally = tally_of(run.rewards, scores)  # of all rounds so far
        refuse_failures(run.engine.gather_list([tally]), run.config.reward_client)
        rewards = gathered(run.engine, run.rewards, slots, scores)
        if rounds == algorithm.resample_rounds:
            break
        if not (further := further_examples(session, algorithm, rewards, chosen, rounds)):
            break
        chosen, rounds = chosen + further, rounds + 1
    log_rollouts(session, algorithm, scores, rewards, tally)
    return joined(parts), scores, rewards


# --- choose ---


def further_examples(
    session: Session, algorithm: RlConfig, rewards: RewardRows, chosen: Sequence[int], round_number: int
) -> list[int]:
    """As many other examples, of the same shape, as there are groups without a signal (zero reward variance, or fewer
    than two rewards that did not fail), or those that are left; the same on every process."""
    run, epoch = session.run, session.progress.epoch
    signal = comparable_rows(rewards.example_index, rewards.usable) & ~rewards.zero_variance_rows(algorithm.combine)
    missing = run.derived.global_groups_per_epoch - len(rewards.example_index[signal].unique())
    if missing <= 0:
        return []
    pool = curriculum_pool(run.data.difficulties, epoch, run.derived.epochs, run.data.config.stages)
    fitting = [i for i in pool if run.data.shapes[i] == run.data.shapes[chosen[0]]]
    taken = set(range(len(run.data))).difference(fitting).union(chosen)  # of a curriculum, also what is too hard yet
    return other_examples(len(run.data), taken, missing, run.config.seed, epoch, round_number)


# --- sample, submit, settle ---


def sample_and_score(session: Session, algorithm: RlConfig, examples: Sequence[int], policy: str | None) -> Samples:
    """Samples of the examples, all of whose scores are in.

    Raises:
        RewardOutage: on every process. One waits for its own server in `settle`, and the others for it in
            `raise_together`.
        Stopped: asked to stop between batches, or while rewards are computed.
    """
    run, scores, outage = session.run, list[Scores](), None
    slots, experience, pending = sample_groups(session, algorithm, examples, policy)
    await_rewards(session, [future for batch in pending for future in batch.weighted_futures])
    with run.clock.part("reward_wait"):
        try:
            scores = settle(run.rewards, pending, run.config.reward_client, stop_heard=lambda: session.stops.heard)
        except RewardOutage as error:
            outage = error
    raise_together(outage, run.engine.any)
    return slots, experience, scores


def await_rewards(session: Session, pending: Sequence[futures.Future[Any]]) -> None:
    """Until the rewards of all processes are in, looking for requests to stop: a judge may take minutes.

    Raises:
        Stopped: asked to stop.
    """
    while True:
        with session.run.clock.part("reward_wait"):
            late = session.run.engine.any(bool(futures.wait(pending, LOOK_S).not_done))
        if not late:
            return
        session.check_stop()


def sample_groups(session: Session, algorithm: RlConfig, examples: Sequence[int], policy: str | None) -> Samples:
    """K samples of each example, this process's share of them, submitted for scoring.

    Args:
        examples: positions in the dataset, a whole number of rollout batches or less.

    Raises:
        Stopped: asked to stop between batches.
    """
    run, rollout = session.run, session.run.config.rollout
    groups, engine = rollout.global_groups_per_batch, run.engine
    share = rollout.group_size, engine.rank, engine.world_size, run.rewards.compares_groups
    batches = [rank_slots(list(examples[i : i + groups]), *share) for i in range(0, len(examples), groups)]
    slots = [slot for batch in batches for slot in batch]
    # all encoding before any scoring, which may run on the same CPU
    run.encoded.encode(sorted({slot.example for slot in slots}))
    recorded: list[Experience] = []
    pending: list[Scores] = []
    for number, batch in enumerate(batches, session.progress.epoch * rollout.batches_per_epoch):
        for start in range(0, len(batch), rollout.batch_size_per_device):
            session.check_stop()
            with run.policy.use(policy) if policy else nullcontext():
                forward = batch[start : start + rollout.batch_size_per_device]
                experience, scores = roll_out(session, algorithm, forward, number)
            recorded.append(experience)
            pending.append(scores)
    return slots, joined(recorded), pending


def roll_out(session: Session, algorithm: RlConfig, slots: Sequence[Slot], number: int) -> tuple[Experience, Scores]:
    """Sample slots of rollout batch `number` and submit their images -> (what was recorded, the pending scores)."""
    run, config, device = session.run, session.run.config, session.run.engine.device
    epoch = session.progress.epoch
    examples = run.encoded.examples([s.example for s in slots])
    condition = run.encoded.conditions([s.example for s in slots], device)
    plan = run.plans.plan(run.schedule(condition.size), number)
    seeds = [derive_seed(config.seed, "rollout", e.id, epoch, s.index) for e, s in zip(examples, slots, strict=True)]
    shared = [derive_seed(config.seed, "noise", e.id, epoch) for e in examples] if config.rollout.shared_noise else None
    region = objective_region(algorithm, condition, run.model.spec.downsampling)
    options: dict[str, Any] = {"keep_means": run.plans.records_means}
    options["share_first_step"] = config.rollout.shares_first_step
    with run.clock.part("rollout"):
        trajectory = sample(
            run.model, run.network, plan, condition, seeds, shared, region, run.plans.log_prob_mode, **options
        )
    with run.clock.part("vae"):
        decoded = run.model.decode(trajectory.final)
        images = to_uint8(decoded, examples[0].strip)
        broken = broken_rows(decoded, trajectory.log_probs.to(decoded.device))
    run.costs.images += len(slots)
    scored = len(slots) - sum(slot.padding for slot in slots)  # padding is last
    items = [item_of(example, images[i].numpy(), i) for i, example in enumerate(examples[:scored])]
    scores = run.rewards.submit(items, broken=[row for row in broken if row < scored])
    return recorded_rows(slots, seeds, trajectory, broken), scores


def recorded_rows(
    slots: Sequence[Slot], seeds: Sequence[int], trajectory: Trajectory, broken: Sequence[int]
) -> Experience:
    """The records of some samples until their epoch is trained on: on the CPU, where everything reads them, without
    advantages yet; none counts in the loss. Rows with NaN and Inf are zeros: NaN times 0 is NaN in a backward."""
    tensors = {name: t.cpu() for name, t in vars(trajectory).items() if isinstance(t, Tensor) and name != "times"}
    if broken:
        tensors = {name: t.clone() for name, t in tensors.items()}
        for tensor in tensors.values():
            tensor[list(broken)] = 0.0
    zeros, nothing = torch.zeros(len(slots), dtype=torch.float32), torch.zeros(0, dtype=torch.float32)
    return Experience(
        position=torch.tensor([slot.example for slot in slots], dtype=torch.int64),
        seed=torch.tensor(seeds, dtype=torch.int64),
        first_step=torch.full((len(slots),), trajectory.first_step, dtype=torch.int64),
        latents=tensors["latents"],
        log_probs=tensors["log_probs"],
        advantages=zeros,
        counts_in_loss=zeros.clone(),
        means=tensors.get("means", nothing),
        reference_means=nothing,
    )


def joined(parts: Sequence[Experience]) -> Experience:
    """The rows of all parts, in order."""
    if len(parts) == 1:
        return parts[0]
    return Experience(*(torch.cat([getattr(part, f.name) for part in parts]) for f in fields(Experience)))


# --- gather ---


def gathered(engine: Engine, table: RewardTable, slots: Sequence[Slot], scores: Sequence[Scores]) -> RewardRows:
    """Rewards of the samples of all processes, of which each has as many; the same on every process.

    Args:
        scores: of the slots that are not padding.
    """
    index, example_index = (
        torch.tensor(column, dtype=torch.int64) for column in ([s.index for s in slots], [s.example for s in slots])
    )
    # Padding was not scored, but takes part in the gather, for which every process needs as many rows. It gets values
    # of 0 that are not valid.
    padding = torch.tensor([s.padding for s in slots], dtype=torch.bool)
    scored = (~padding).nonzero().flatten()
    values, valid = (
        t.new_zeros(len(slots), t.shape[1]).index_copy(0, scored, t) for t in values_of(table.trained, scores)
    )
    values, valid, example_index, index, padding = (
        engine.gather(t).cpu() for t in (values, valid, example_index, index, padding)
    )
    entries = [table.entries[name] for name in table.trained]
    weights = torch.tensor([table.weights[name] for name in table.trained], dtype=torch.float64)
    std = torch.tensor([entry.min_group_std for entry in entries], dtype=torch.float64)
    transforms = [entry.transform for entry in entries]
    own = slice(engine.rank * len(slots), (engine.rank + 1) * len(slots))
    return RewardRows(table.trained, values, valid, weights, example_index, index, padding, std, transforms, own)


def items_by_row(padding: Tensor, scores: Sequence[Scores]) -> list[RewardItem | None]:
    """The scorers' input for each row of this process; None for padding."""
    items = iter([item for batch in scores for item in batch.items])
    return [None if is_padding else next(items) for is_padding in padding.tolist()]


# --- advantages ---


def advantages_of(algorithm: AdvantageConfig, rewards: RewardRows, gather: Gather = list) -> tuple[Tensor, Tensor]:
    """(Advantages [N], `counts_in_loss` [N]).

    Args:
        gather: from all processes, which agree on the result of a function of the user.
    """
    counts = comparable_rows(rewards.example_index, rewards.usable, algorithm.baseline)
    if algorithm.skip_zero_std_groups and algorithm.baseline == "group":
        counts = counts & ~rewards.zero_variance_rows(algorithm.combine)
    if algorithm.advantages is not None:
        return agreed_advantages(algorithm, rewards, counts, gather).float(), counts.float()
    how = (algorithm.combine, algorithm.baseline, algorithm.scale, algorithm.advantage_clip)
    return rewards.advantages(*how).float(), counts.float()


def agreed_advantages(algorithm: AdvantageConfig, rewards: RewardRows, counts: Tensor, gather: Gather) -> Tensor:
    """`custom_advantages` of the first process, on all: a function of the user may fail on one machine, or draw random
    numbers. A collective.

    Raises:
        ConfigError: it failed there.
    """
    values, problem = list[float](), ""
    try:
        values = custom_advantages(algorithm, rewards, counts).tolist()
    except ConfigError as error:
        problem = str(error)
    values, problem = gather([(values, problem)])[0]
    if problem:
        raise ConfigError(problem)
    return torch.tensor(values, dtype=torch.float64)


def custom_advantages(algorithm: AdvantageConfig, rewards: RewardRows, counts: Tensor) -> Tensor:
    """Advantages [N] of the function that `algorithm.advantages` names, clipped; 0 for rows that do not count.

    Args:
        counts: [N] bool: rows that are trained on.

    Raises:
        ConfigError: it failed, or did not return a number for each row that counts.
    """
    function, given = algorithm.advantage_function(), f"algorithm.advantages: given {algorithm.advantages!r}, which"
    assert function is not None
    try:
        values: object = function(rewards, algorithm)
    except Exception as error:
        place = code_place(error)
        raise ConfigError(f"{given} raised {type(error).__name__}: {error}{place}; correct the function") from error
    expected = f"expected a tensor [{len(counts)}] of a number for each sample of `rewards`"
    if not isinstance(values, Tensor) or values.shape != counts.shape:
        what = f"a tensor {list(values.shape)}" if isinstance(values, Tensor) else type(values).__name__
        raise ConfigError(f"{given} returned {what}; {expected}")
    values = torch.where(counts, values.detach().cpu().double(), 0.0)
    if not bool(values.isfinite().all()):
        raise ConfigError(f"{given} returned NaN or Inf; {expected}")
    return values.clamp(-algorithm.advantage_clip, algorithm.advantage_clip)


# --- what is logged ---


def log_rollouts(
    session: Session, algorithm: RlConfig, scores: Sequence[Scores], rewards: RewardRows, tally: Tally
) -> None:
    """Count and log an epoch, all of whose rewards are in, and every `rollout_images_every` epochs an image of the
    groups. Inside an epoch they belong to the step before, or a run that is resumed after it would lose them."""
    run, progress = session.run, session.progress
    run.rewards.count(tally.asked, tally.lost)
    judged = run.engine.sum(judge_details(rewards.names, scores)).cpu()
    statistics = rewards.statistics(algorithm.combine) | judge_statistics(rewards.names, judged)
    epoch, step = progress.epoch, progress.step + (progress.step_in_epoch == 0)
    # differ from run to run
    timings = statistics_of_all(run.engine.gather_list([run.rewards.statistics()]))
    run.dir.log("rollout", step, {"epoch": epoch, **statistics}, timings or None)
    every = run.config.logging.rollout_images_every
    if every and epoch % every == 0:
        run.dir.save_image(step, "rollouts", rollout_grid(scores))


def rollout_grid(scores: Sequence[Scores], groups: int = 6) -> Image:
    """The first groups of an epoch that this process has samples of, one a row, each image with its combined score."""
    rows: dict[int | None, list[tuple[Any, str]]] = {}
    for batch in scores:
        for item, score in zip(batch.items, batch.combined(), strict=True):
            rows.setdefault(item.group, []).append((item.image, "failed" if score is None else f"{score:.2f}"))
    return grid([*rows.values()][:groups])
