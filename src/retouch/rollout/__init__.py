"""Sampling, scoring, and the two computations that sampling and training share. Nothing here steps an optimizer."""

from retouch.rollout.draw import Drawing, draw, drawing_on, freeze
from retouch.rollout.encoded import EncodedData, drop_references
from retouch.rollout.plan import StepPlan, make_plan, ode_plan
from retouch.rollout.sampler import broken_rows, latent_noise, noise_for, require_drawn, sample, to_uint8
from retouch.rollout.scorer import (
    FailureRateExceeded,
    PendingBatch,
    RewardOutage,
    Tally,
    items_of,
    refuse_failures,
    settle,
    tally_of,
    without_strip,
)
from retouch.rollout.transition import denoising_error, latent_region, objective_region, transition

__all__ = [
    "Drawing",
    "EncodedData",
    "FailureRateExceeded",
    "PendingBatch",
    "RewardOutage",
    "StepPlan",
    "Tally",
    "broken_rows",
    "denoising_error",
    "draw",
    "drawing_on",
    "drop_references",
    "freeze",
    "items_of",
    "latent_noise",
    "latent_region",
    "make_plan",
    "noise_for",
    "objective_region",
    "ode_plan",
    "refuse_failures",
    "require_drawn",
    "sample",
    "settle",
    "tally_of",
    "to_uint8",
    "transition",
    "without_strip",
]
