"""Warnings of a run file that is valid and still unlikely to do what its author expects."""

from __future__ import annotations

from collections.abc import Iterator

from retouch.config.run import RunConfig
from retouch.families.facts import FACTS
from retouch.families.sections import (
    QwenImageEditModel,
    QwenImageModel,
)
from retouch.rewards.sections import MmmgReward

FEW_STEPS = 20
"""Fewer denoising steps than this without guidance need a network that was distilled for them."""


def warnings_of(run: RunConfig) -> list[str]:
    """One line each: the key, what was given, what follows, what to set."""
    return [*_few_steps(run), *_named_mmmg(run)]


def _few_steps(run: RunConfig) -> Iterator[str]:
    """Steps and guidance that a frozen diffusion network was not made for. Of vlm_grpo alone: elsewhere the network is
    trained, and learns to do without guidance."""
    model, rollout = run.model, run.rollout
    if not run.algorithm.trains_text_encoder or not isinstance(model, QwenImageModel | QwenImageEditModel):
        return
    scale = FACTS[model.family].guidance_scale if rollout.guidance_scale is None else rollout.guidance_scale
    if model.distillation_lora is not None and scale > 1:
        yield (
            f"rollout.guidance_scale: given {scale:g} with model.distillation_lora, whose network was distilled to do "
            "without guidance: images are oversaturated and cost twice the forwards; set rollout.guidance_scale=1"
        )
    if rollout.num_steps < FEW_STEPS and scale <= 1 and model.distillation_lora is None and model.path != "tiny":
        yield (
            f"rollout.num_steps: given {rollout.num_steps} with guidance_scale {scale:g} and no "
            "model.distillation_lora, for which the released models are not made: images are blurred; set "
            "rollout.num_steps=50 rollout.guidance_scale=4, or model.distillation_lora (nothing, if a few-step LoRA is "
            "merged into model.path already)"
        )


def _named_mmmg(run: RunConfig) -> Iterator[str]:
    entry = run.rewards.get("mmmg")
    if isinstance(entry, MmmgReward) and entry.url in (None, "auto") and not entry.is_published:
        yield (
            "rewards.mmmg: this score follows MMMG's idea and not its protocol, and must not be reported as MMMG; name "
            "it mmmg_style: {scorer: mmmg, ...}, or set wording=published with prompts, ged=networkx and readability"
        )
