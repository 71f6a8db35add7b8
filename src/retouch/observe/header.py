"""Two sentences at the top of a run's log; `retouch check` prints every number."""

from __future__ import annotations

from pathlib import Path

from retouch.algorithms.vlm_grpo.config import VlmDerived
from retouch.config import Derived, RunConfig


def header(config: RunConfig, derived: Derived | VlmDerived, parameters: int, resumed_from: Path | None) -> str:
    """One sentence on what is trained, and one on its steps.

    Args:
        parameters: number of trained parameters.
        resumed_from: checkpoint that the run continues from.
    """
    begin = f"resumed from {resumed_from}" if resumed_from else "new run"
    what = "the text encoder" if isinstance(derived, VlmDerived) else config.model.train.kind
    processes = _count(derived.world_size, "process", "processes")
    return (
        f"{config.name}: {begin}, {config.algorithm.name} trains {parameters:,} parameters ({what}) of "
        f"{config.model.family} on {processes}. {_steps(config, derived)}"
    )


def _steps(config: RunConfig, derived: Derived | VlmDerived) -> str:
    steps = _count(config.training.max_steps, "optimizer step")
    if isinstance(derived, VlmDerived):
        prompts, completions = derived.global_prompts_per_generation, derived.global_completions_per_generation
        used = _count(derived.optimizer_steps_per_generation, "optimizer step")
        return f"It takes {steps}; {completions} completions of {_count(prompts, 'prompt')} are trained on for {used}."
    if not derived.global_images_per_epoch:
        rows = "pair" if config.algorithm.takes_given_pairs else "image"
        return f"It takes {steps} of {_count(derived.global_rows_per_step, rows)} each."
    supervised = config.algorithm.supervised_steps(config)
    warmup = f", the first {supervised} supervised" if supervised else ""
    images, examples = derived.global_images_per_epoch, _count(derived.global_groups_per_epoch, "example")
    used = _count(derived.optimizer_steps_per_epoch, "optimizer step")
    return f"It takes {steps}{warmup}; an RL epoch samples {images} images of {examples} and trains on them for {used}."


def _count(number: int, one: str, several: str | None = None) -> str:
    return f"{number:,} {one if number == 1 else several or one + 's'}"
