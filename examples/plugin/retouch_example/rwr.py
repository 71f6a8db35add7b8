"""An algorithm: reward-weighted regression on diffusion models (arXiv 2302.12192).

    1. K images of each of G examples, sampled with the policy by the ODE.
    2. Rewards, and advantages A against the images of the same example.
    3. The denoising loss on the images' own latents, weighted by exp(A / temperature).

The options import no torch: `retouch check` reads them. What trains is imported when it runs.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated, ClassVar, Literal

from pydantic import Field

from retouch.algorithms.base import AdvantageConfig

if TYPE_CHECKING:
    from torch import Tensor

    from retouch.config import RunConfig
    from retouch.training.build import Run
    from retouch.training.experience import Experience
    from retouch.training.session import Session
    from retouch.training.step import Step


class RwrConfig(AdvantageConfig):
    """Reward-weighted regression."""

    recipe: ClassVar[str] = "retouch_example.rwr:train"

    name: Literal["rwr"] = "rwr"
    temperature: Annotated[float, Field(gt=0)] = 1.0
    """Of the weights exp(A / temperature): a lower one trains on the best images only."""

    def forwards_per_image(self, run: RunConfig, optimizer_steps: int, guided: int, backward: int) -> float:
        return float(guided * run.rollout.num_steps + self.inner_epochs * backward)


def train(run: Run) -> None:
    """Warm up, then train to max_steps."""
    from retouch.training.experience import Experience, collect
    from retouch.training.session import Session
    from retouch.training.supervised import warm_up

    algorithm = run.config.algorithm
    assert isinstance(algorithm, RwrConfig)
    with Session(run) as session:
        warm_up(session, algorithm)
        for experience in session.epochs(Experience, collect, algorithm):
            for step in session.steps(experience):
                with step:
                    for rows in step.forwards():
                        step.backward(*weighted_loss(session, algorithm, experience, step, rows))
        session.finish()


def weighted_loss(
    session: Session, algorithm: RwrConfig, experience: Experience, step: Step, rows: Tensor
) -> tuple[Tensor, Mapping[str, Tensor], Tensor]:
    """The loss of one forward of B rows -> (loss, metrics, rows that count)."""
    from retouch.core.objectives.sft import denoising_loss
    from retouch.rollout.sampler import objective_region
    from retouch.training.noised import denoising_error, noised_copies, row_generators

    run, device = session.run, session.run.engine.device
    condition = run.encoded_for_denoising.conditions(experience.position[rows].tolist(), device)
    generators = row_generators(experience.seed[rows], "rwr", session.progress.step_in_epoch)
    noised = noised_copies(run, experience.latents[rows, 0], condition, generators, 1)
    region = objective_region(algorithm, noised.condition, run.model.spec.downsampling)
    errors = denoising_error(
        run.model, run.network, noised.schedule, noised.x0, noised.noise, noised.time, noised.condition, region
    )
    weight = experience.counts_in_loss[rows].to(device)
    emphasis = (experience.advantages[rows].to(device) / algorithm.temperature).exp()
    loss, values = denoising_loss(errors, weight * emphasis, step.normalizer)
    return loss, values, weight.sum()
