"""Warnings about a run file that is valid but probably not intended."""

from __future__ import annotations

from collections.abc import Iterator

from retouch.algorithms.base import RlConfig
from retouch.config.derived import stochastic_steps
from retouch.config.run import RunConfig


def warnings_of(run: RunConfig) -> list[str]:
    """One line for each warning: the key, the value given, its effect, and the option to set."""
    rewards = (line for name, entry in run.rewards.items() for line in entry.advice(name))
    return [*run.algorithm.warnings(run), *_distilled(run), *rewards]


def _distilled(run: RunConfig) -> Iterator[str]:
    """A few-step model is no flow model: what each objective assumes about it, and does to it."""
    if run.model.distilled_steps is None or run.algorithm.trains_text_encoder:
        return
    path = run.model.path
    if stochastic_steps(run):
        yield (
            f"algorithm.name: given {run.algorithm.name!r} for {path}, a distilled model, whose stochastic steps leave "
            "the distribution that it was distilled for; set algorithm.name=nft or dpo, or train the base model and "
            "use its LoRA with the distilled one"
        )
    if run.algorithm.supervised_steps(run):
        key = "algorithm.sft_steps" if isinstance(run.algorithm, RlConfig) else "algorithm.name"
        yield (
            f"{key}: supervised flow matching on {path}, a distilled model, undoes its distillation: images of few "
            "steps become blurred; train the base model"
        )
    if run.algorithm.trains_on_rewards and "reference" not in run.algorithm.snapshots:
        yield (
            f"algorithm.kl_weight: given 0 for {path}, a distilled model; runs of some thousand steps without KL are "
            "reported to lose detail; set algorithm.kl_weight above 0"
        )
