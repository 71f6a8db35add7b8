"""DiffusionNFT: online RL on the forward process (arXiv 2509.16117).

    1. K images of each of G examples by the ODE, with the old policy; no log-probabilities are needed.
    2. Rewards; advantages as in GRPO; r = A / 2c + 1/2 is how good an image is.
    3. The images' own latents, noised anew, train two implicit policies around the old one: the positive one towards
       the image by r, the negative one by 1 - r (`nft_loss`), plus kl_weight mean |prediction - the reference's|².
    4. After an epoch the old policy follows the trained one (`old_policy`).

Before the first update of an epoch whose old policy is the trained one (every epoch with `old_policy: copy`), the old
prediction is the policy's own, without gradient: the same loss and gradient without the forward of the old policy.

Rewards with a `gradient_weight` add -s <v, g> on the same copies, where g = -d reward / d x0 at the sampled image
(`scaled_reward_gradients`): the gradient of minus the reward by the data x_t - s v that the velocity implies, with g
held constant.

For an epsilon model the loss is that of the velocity that its prediction implies (`Schedule.as_flow`). An error of the
noise is (a + b) / a times as large in that velocity, 15 times at SD1.5's noisiest timestep; rows are weighted by
a / (a + b). The gradient by the network's prediction is then that of a flow model at the same sigma: s A times a unit
error. The KL is taken on the network's prediction, for both kinds.

Departures: times are sampled as in supervised training, spread over the schedule for the copies of an image; means may
be over the masked region; groups with zero reward variance are left out and `scale` is that of the group (published:
all groups, the batch; `rollout.preset: reference` sets both); a rollout without a valid reward does not count
(advantage 0 alone is not inert here). Under classifier-free guidance images are guided and velocities are not.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import NamedTuple

from torch import Tensor

from retouch.algorithms.nft.config import NftConfig
from retouch.core.objectives.nft import nft_loss, old_policy_decay
from retouch.core.objectives.reward_gradient import linear_loss
from retouch.core.reduce import region_of_kept, row_mean, weighted_mean, within
from retouch.rollout.sampler import objective_region
from retouch.training.build import Run
from retouch.training.experience import Experience, collect
from retouch.training.noised import NoisedRows, noised_copies, row_generators
from retouch.training.session import Session
from retouch.training.step import Step
from retouch.training.supervised import warm_up


def train(run: Run) -> None:
    """Warm up, then train to max_steps."""
    algorithm = run.config.algorithm
    assert isinstance(algorithm, NftConfig)
    with Session(run) as session:
        warm_up(session, algorithm)
        for experience in session.epochs(Experience, collect, algorithm, "old"):
            train_epoch(session, algorithm, experience)
        session.finish()


def train_epoch(session: Session, algorithm: NftConfig, experience: Experience) -> None:
    """The optimizer steps on the rollouts of the old policy, then the old policy follows."""
    run = session.run
    for step in session.steps(experience):
        with step:
            prepared = prepare(session, algorithm, experience, step)
            for micro in step.forwards(prepared):
                step.backward(*implicit_policies_loss(run, algorithm, experience, micro, step.normalizer))
        if step.ends_epoch:
            taken = session.progress.step + 1 - algorithm.sft_steps
            decay = old_policy_decay(taken, algorithm.old_policy)
            run.policy.blend("old", decay)
            session.progress.on_policy = decay == 0  # of the next epoch


class Micro(NamedTuple):
    """Rows of one forward with what the snapshots predict for them.

    Attributes:
        rows: [B] indices into the experience.
        piece: W of the noised copies of each row.
        noised: makes B x W noised copies, row-major, the same at each call. They are not kept between forwards: the
            conditions of a step would fill a GPU.
        old: [B · W, C, h, w] as the network predicts; None while the policy is the old one (see `prepare`).
        reference: the same of the reference; None without a KL.
    """

    rows: Tensor
    piece: range
    noised: Callable[[], NoisedRows]
    old: Tensor | None
    reference: Tensor | None


def prepare(session: Session, algorithm: NftConfig, experience: Experience, step: Step) -> list[Micro]:
    """Compute the predictions of the snapshots for every forward of a step (rows, and a piece of their noised copies),
    before the policy's first forward: weights must not be swapped between a forward and its backward."""
    run, step_in_epoch = session.run, session.progress.step_in_epoch
    run.encoded_for_denoising.encode(step.positions)
    forwards = session.size.parts(step.rows, algorithm.timesteps_per_image)
    noised = [partial(noised_rows, run, algorithm, experience, *forward, step_in_epoch) for forward in forwards]
    old: list[Tensor | None] = [None] * len(noised)
    reference: list[Tensor | None] = [None] * len(noised)
    with run.clock.part("train_forward"):
        if not step.before_first_update:
            with run.policy.use("old"):
                old = [predict(run, make()) for make in noised]
        if algorithm.kl_weight:
            with run.policy.use("reference"):
                reference = [predict(run, make()) for make in noised]
    together = zip(forwards, noised, old, reference, strict=True)
    return [Micro(rows, piece, make, before, start) for (rows, piece), make, before, start in together]


def noised_rows(
    run: Run, algorithm: NftConfig, experience: Experience, rows: Tensor, piece: range, step_in_epoch: int
) -> NoisedRows:
    """W noised copies of each of B rows, those of a piece.

    Args:
        step_in_epoch: a part of their seeds.
    """
    condition = run.encoded_for_denoising.conditions(experience.position[rows].tolist(), run.engine.device)
    generators = row_generators(experience.seed[rows], "nft", step_in_epoch)
    return noised_copies(run, experience.latents[rows, 0], condition, generators, algorithm.timesteps_per_image, piece)


def implicit_policies_loss(
    run: Run, algorithm: NftConfig, experience: Experience, micro: Micro, total: Tensor
) -> tuple[Tensor, Mapping[str, Tensor], Tensor]:
    """The loss of one forward of B x W rows -> (loss, metrics, rows that count, by the share of their copies that the
    piece is)."""
    device, copies, noised = run.engine.device, algorithm.timesteps_per_image, micro.noised()
    weight, width = experience.counts_in_loss[micro.rows].to(device), len(micro.piece)
    wide_weight = weight.repeat_interleave(width)
    row_weight = wide_weight / noised.schedule.velocity_gain(noised.time)
    region = objective_region(algorithm, noised.condition, run.model.spec.downsampling)
    prediction = predict(run, noised)
    x_t, velocity, sigma = noised.schedule.as_flow(noised.x, prediction, noised.time)
    old = prediction.detach() if micro.old is None else micro.old
    loss, values = nft_loss(
        velocity,
        noised.schedule.as_flow(noised.x, old, noised.time)[1],
        x_t,
        noised.x0,
        sigma,
        experience.advantages[micro.rows].to(device).repeat_interleave(width),
        algorithm.mix,
        algorithm.advantage_clip,
        algorithm.mode,
        region,
        row_weight,
        total * copies,
    )
    if len(experience.gradient):
        pull = experience.gradient[micro.rows].to(device).repeat_interleave(width, 0)
        loss = loss + linear_loss(velocity, pull, -sigma, region, row_weight, total * copies)[0]
    if micro.reference is not None:
        counted = region_of_kept(region, wide_weight)
        kl = row_mean(within(prediction - micro.reference, counted) ** 2, counted)
        loss = loss + algorithm.kl_weight * weighted_mean(kl, wide_weight, total * copies)
        values["kl"] = weighted_mean(kl.detach(), wide_weight)
    return loss, values, weight.sum() * (width / copies)


def predict(run: Run, rows: NoisedRows) -> Tensor:
    """[B · W, C, h, w] of the weights in use."""
    return run.model.predict(run.network, rows.x, rows.time, rows.condition)
