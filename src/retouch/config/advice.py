"""Settings that are valid, and outside of what published runs of released models did: a table of warnings.

Each is a function of the run and its number of processes that returns a sentence, or None. A published run file that
keeps such a setting has a line `# warned: NAME: reason`. None of this holds for the tiny bases, of images below 128
pixels, which are no released models.

Sources: Flow-GRPO (yifan123/flow_grpo at 31c71b9 and its issues), DanceGRPO (XueZeyue/DanceGRPO), DiffusionNFT
(NVlabs/DiffusionNFT at 24af555), Flow-Factory (X-GenGroup/Flow-Factory at 5f6cda1), VeRL-Omni (verl-project/verl-omni),
TRL (docs/source/lora_without_regret.md), IP-Adapter (tencent-ailab/IP-Adapter).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, NamedTuple

from retouch.algorithms.base import AdvantageConfig, RlConfig
from retouch.config.derived import forward_precision

if TYPE_CHECKING:
    from retouch.config.run import RunConfig

MOST_STEPS = 4
"""Optimizer steps of an epoch; Flow-GRPO, DiffusionNFT, Flow-Factory and VeRL-Omni take one or two."""
FEWEST_GROUPS = 4
"""Groups of an optimizer step; the smallest public run has 8 (Flow-GRPO on four GPUs: 128 images, 16 each)."""
ROUNDING = 4.5e-2
"""Largest |log ratio| of bf16 rounding alone under classifier-free guidance (docs/scaling.md, sd_inpaint)."""
_SMALLEST = 128
"""Pixels of the longer side from which a model is no tiny base."""


class Published(NamedTuple):
    """Values that public runs have, and which."""

    low: float
    high: float
    runs: str

    def holds(self, value: float) -> bool:
        """Whether a value is inside, or less than ten times below: a small one costs time, and spoils nothing."""
        return self.low / 10 <= value <= self.high

    def __str__(self) -> str:
        return f"{self.low:g}" if self.low == self.high else f"{self.low:g} to {self.high:g}"


LEARNING_RATES: Mapping[str, Published] = {
    "full": Published(5e-6, 1e-5, "DanceGRPO, Flow-Factory"),
    "lora": Published(1e-4, 3e-4, "Flow-GRPO, DiffusionNFT, VeRL-Omni"),
    "ip_adapter": Published(2e-5, 1e-4, "IP-Adapter"),
    "ip_adapter by RL": Published(1e-5, 2e-5, "Calligrapher's guide; IP-Adapter issue 218 reports artefacts of 1e-4"),
    "full VLM": Published(1e-6, 5e-6, "TRL"),
    "lora VLM": Published(1e-5, 1e-5, "TRL"),
}
"""Kind of trained weights -> peak learning rates."""

KL_WEIGHTS: Mapping[str, Published] = {
    "flow_grpo": Published(0.01, 0.04, "Flow-GRPO on SD3.5"),
    "exact": Published(0.0, 0.04, "Flow-GRPO, whose KL is the smaller one"),
    "nft": Published(1e-4, 0.2, "DiffusionNFT and Flow-Factory up to 2e-3, our tiny runs up to 0.2"),
    "vlm": Published(1e-3, 0.04, "TRL"),
}
"""KL -> weights above 0."""


def advice(run: RunConfig, world_size: int = 1) -> dict[str, str]:
    """Name -> sentence of each warning about a run."""
    if max(run.data.size) < _SMALLEST or run.model.path == "tiny":
        return {}
    found = {name: says(run, world_size) for name, says in ADVICE.items()}
    return {name: line for name, line in found.items() if line is not None}


def _sampled(run: RunConfig) -> RlConfig | None:
    """The algorithm, if it trains the diffusion model on samples of its own."""
    return run.algorithm if isinstance(run.algorithm, RlConfig) and run.algorithm.trains_on_rewards else None


def _many_steps(run: RunConfig, world_size: int) -> str | None:
    """Later steps of an epoch are off-policy; more than two are not published."""
    algorithm = _sampled(run)
    if algorithm is None or algorithm.name == "reward_gradient":  # which has a warning from the second step
        return None
    steps = algorithm.steps_per_pass(run, world_size) * algorithm.inner_epochs
    if steps <= MOST_STEPS:
        return None
    key = run.optimizer.step_size_key if algorithm.inner_epochs < steps else "algorithm.inner_epochs"
    fewer = "lower it" if key == "algorithm.inner_epochs" else "raise it"
    if key == "optimizer.gradient_accumulation":
        fewer += ", or set optimizer.global_batch_size"
    return (
        f"{key}: an epoch takes {steps} optimizer steps; published runs take 1 or 2, because later ones train on the "
        f"samples of another policy; {fewer}"
    )


def _few_groups(run: RunConfig, world_size: int) -> str | None:
    """With fewer GPUs keep images and steps: a smaller batch may stop the reward from rising (Flow-GRPO issue 172)."""
    algorithm = _sampled(run)
    if algorithm is None or run.rollout.group_size == 1:
        return None
    groups = run.rollout.global_groups_per_batch * run.rollout.batches_per_epoch
    share = groups / algorithm.steps_per_pass(run, world_size)
    if share >= FEWEST_GROUPS:
        return None
    key = "rollout.global_groups_per_batch" if groups < FEWEST_GROUPS else run.optimizer.step_size_key
    if (_many_steps(run, world_size) or "").startswith(f"{key}: "):  # a larger step mends both
        return None
    return (
        f"{key}: an optimizer step has the images of {share:g} groups; published runs have 8 and more, and with fewer "
        f"the reward may not rise; raise it until a step has {FEWEST_GROUPS} groups"
    )


def _idle_clip(run: RunConfig, world_size: int) -> str | None:
    """Before the first update on a batch of rollouts every ratio is 1."""
    algorithm = _sampled(run)
    field = None if algorithm is None else type(algorithm).model_fields.get("clip_range")
    if algorithm is None or field is None or algorithm.steps_per_pass(run, world_size) * algorithm.inner_epochs > 1:
        return None
    given = getattr(algorithm, "clip_range", None)
    if given == field.default or getattr(algorithm, "never_clips", False):
        return None
    return (
        f"algorithm.clip_range: given {given:g}, but an epoch has one optimizer step, where every ratio is 1: nothing "
        f"is clipped; lower {run.optimizer.step_size_key}, or leave clip_range out"
    )


def _clip_below_rounding(run: RunConfig, world_size: int) -> str | None:
    """In bf16 the recorded log-probabilities have another rounding than those of training, under guidance a larger one
    than any clip range: the samples of each step after the first leave it at random."""
    algorithm = _sampled(run)
    if algorithm is None or getattr(algorithm, "old_log_probs", None) != "recorded":
        return None
    guided = run.model.forwards_of_guidance(run.guidance_scale) > 1
    several = algorithm.steps_per_pass(run, world_size) * algorithm.inner_epochs > 1
    clip, masked = getattr(algorithm, "clip_range", ROUNDING), getattr(algorithm, "kl_mask_threshold", None) is not None
    if masked or not (guided and several and forward_precision(run) == "bf16" and clip < ROUNDING):
        return None
    return (
        "algorithm.old_log_probs: given 'recorded' in bf16 under guidance, where rounding alone moves the log ratio by "
        f"up to {ROUNDING:g}, above algorithm.clip_range {clip:g}: after the first step of an epoch it clips at "
        "random; set old_log_probs=recomputed, or model.dtype=fp16 training.mixed_precision=fp16"
    )


def _learning_rate(run: RunConfig, world_size: int) -> str | None:
    """Rates are of a kind of weights: the same one is ten times too hot for full weights."""
    kind, key, rate = run.algorithm.trained_kind(run), "optimizer.lr", run.optimizer.lr
    if run.algorithm.trains_text_encoder:
        kind, key = f"{kind} VLM", "algorithm.trl.learning_rate"
        rate = getattr(run.algorithm, "trl", {}).get("learning_rate")
    elif kind == "ip_adapter" and run.algorithm.trains_on_rewards:
        kind = "ip_adapter by RL"
    known = LEARNING_RATES.get(kind)  # a plug-in may train other weights
    if rate is None or known is None or known.holds(rate) or run.optimizer.factory is not None:
        return None
    return f"{key}: given {rate:g}; published for {kind}: {known} ({known.runs}); set {known.high:g}"


def _kl_weight(run: RunConfig, world_size: int) -> str | None:
    """A weight is of a definition of the KL, and of a model."""
    algorithm, kind, key = _sampled(run), "", "algorithm.kl_weight"
    weight = getattr(algorithm, "kl_weight", None)
    if run.algorithm.trains_text_encoder:
        kind, key, weight = "vlm", "algorithm.trl.beta", getattr(run.algorithm, "trl", {}).get("beta")
    elif algorithm is not None and algorithm.name in ("grpo", "ppo", "nft"):
        kind = getattr(algorithm, "kl_mode", "nft")
    if not weight or not kind or KL_WEIGHTS[kind].holds(weight):
        return None
    known = KL_WEIGHTS[kind]
    return f"{key}: given {weight:g}; published for this KL: {known} ({known.runs}); set {known.high:g} at most"


def _sampling_judge(run: RunConfig, world_size: int) -> str | None:
    """A judge that samples its answers gives one image different scores, and the advantages of equal images are then
    noise (docs/rewards.md)."""
    if not (isinstance(run.algorithm, AdvantageConfig) and run.algorithm.baseline == "group"):
        return None
    for name, entry in run.rewards.items():
        if entry.role == "train" and entry.weight and getattr(entry, "temperature", 0) and not entry.min_group_std:
            return (
                f"rewards.{name}.min_group_std: given 0, but the judge samples its answers: groups of equal images get "
                "advantages from its noise; set it to what `retouch reward probe` measures, about 0.03 of the range"
            )
    return None


def _unfit_reward(run: RunConfig, world_size: int) -> str | None:
    """RL raises what the base does sometimes: from a NED of .18 nothing is learned."""
    if _sampled(run) is None or run.model.spec.writes_words:
        return None
    for name, entry in run.rewards.items():
        if entry.role == "train" and (entry.weight or entry.gradient_weight) and entry.reads_text():
            return (
                f"rewards.{name}: reads words, but the released models of {run.model.family} write none, and RL raises "
                "only what a base already does sometimes; measure `retouch eval` first, and train on another reward or "
                "model where the NED is below 0.4"
            )
    return None


ADVICE: Mapping[str, Callable[[RunConfig, int], str | None]] = {
    "many_steps": _many_steps,
    "few_groups": _few_groups,
    "idle_clip": _idle_clip,
    "clip_below_rounding": _clip_below_rounding,
    "learning_rate": _learning_rate,
    "kl_weight": _kl_weight,
    "sampling_judge": _sampling_judge,
    "unfit_reward": _unfit_reward,
}
"""Name, as in `# warned: NAME: reason` of a run file -> the warning."""
