"""The meaning of the numbers of a run: the section of a page that shows one, a sentence, and the better direction."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

SECTIONS = {
    "reward": "Reward",
    "measures": "Gold and held-out measures",
    "loss": "Loss",
    "ratio": "Ratio",
    "kl": "KL",
    "gradient": "Gradient",
    "rest": "Other curves",
}
"""By key, in the order of the page."""

WHOLE = ("combined_score", "combined", "reward")
"""Weighted sums of the rewards, which come before them."""

HEADLINE = ("ocr.ned", "ocr.exact", "glyph_correlation")
DRIFT = "outside_l1"
"""Measures of a verdict, if the run has them; the first one is judged. Less drift is better, more of the others."""


def judged(rewards: Iterable[str]) -> list[str]:
    """Measures of a verdict and of a printed gain, the first one of which that a run has decides."""
    return list(dict.fromkeys((*HEADLINE, *rewards, DRIFT)))


@dataclass(frozen=True)
class Meaning:
    """Attributes:
    better: "higher", "lower", or "" where neither is.
    log: whether the axis is logarithmic from the beginning.
    least: the axis spans at least this much: a smaller change looks flat.
    """

    sentence: str
    better: str = ""
    log: bool = False
    least: float = 0.0


_KNOWN: dict[str, dict[str, Meaning]] = {
    "reward": {
        "combined_score": Meaning(
            "Weighted sum of the rewards, mean over the samples of an epoch.", "higher", least=0.02
        ),
        "reward": Meaning("Weighted sum of the rewards, mean over the completions of a step.", "higher", least=0.02),
    },
    "measures": {
        "combined": Meaning("Weighted sum of the rewards in the evaluation.", "higher", least=0.02),
        "glyph_correlation": Meaning(
            "Correlation of the ink with the target text in a plain font.", "higher", least=0.02
        ),
        "outside_l1": Meaning("Mean change of the pixels outside the mask, from 0 to 1.", "lower", least=0.005),
    },
    "loss": {
        "loss": Meaning("Objective that the optimizer lowers; in RL its level has no meaning.", least=1e-5),
        "error": Meaning("Squared error of the prediction, mean over the rows.", "lower", least=1e-4),
        "positive_error": Meaning("Squared error of the positive branch.", least=1e-4),
        "negative_error": Meaning("Squared error of the negative branch.", least=1e-4),
        "win_error_change": Meaning(
            "Change of the error on preferred samples against the reference.", "lower", least=1e-5
        ),
        "lose_error_change": Meaning(
            "Change of the error on rejected samples against the reference.", "higher", least=1e-5
        ),
        "preference_accuracy": Meaning(
            "Share of the pairs that the policy orders as the rewards do.", "higher", least=0.02
        ),
        "label_accuracy": Meaning("Share of the labels that the policy agrees with.", "higher", least=0.02),
        "label_margin": Meaning("Distance of the policy from the boundary between the labels.", "higher", least=1e-4),
        "logit": Meaning("Argument of the logistic loss of DPO, mean over the pairs.", least=1e-4),
    },
    "ratio": {
        "ratio": Meaning(
            "Probability ratio of the policy to the one that sampled: 1 before the first update.", least=0.002
        ),
        "max_abs_log_ratio": Meaning(
            "Largest |log ratio| of a row, of all processes: near 0 before the first update of an epoch "
            "(`ON_POLICY_TOLERANCE`).",
            log=True,
            least=1e-4,
        ),
        "clip_fraction": Meaning(
            "Share of the ratios that the clip range cuts off, or the KL mask: 0 before the first update of an epoch.",
            least=0.02,
        ),
    },
    "kl": {
        "kl": Meaning("Divergence of the policy from its reference: mean over the rows that count.", least=1e-6),
        "approx_kl": Meaning("Estimated divergence from the policy that sampled, within an epoch.", least=1e-6),
        "old_velocity_distance": Meaning("Distance of the policy's velocity from the one that sampled.", least=1e-6),
        "entropy": Meaning("Entropy of the completions: 0 means that they are all the same.", least=0.01),
    },
    "gradient": {
        "grad_norm": Meaning("Norm of the gradient of all trained weights before it is clipped.", log=True),
        "gradient_rms": Meaning("Root mean square of the reward's gradient by pixels.", log=True),
    },
    "rest": {
        "overflow": Meaning("Steps that were skipped because a gradient was not finite in fp16.", "lower", least=1.0),
        "skipped": Meaning("Updates that were left out.", "lower", least=1.0),
        "lr": Meaning("Learning rate."),
        "rows": Meaning("Samples that counted in the loss of the step.", least=1.0),
        "positive_share": Meaning("Share of the rows with a positive weight.", least=0.02),
        "combined_std": Meaning("Standard deviation of the weighted sum over the samples of an epoch.", least=0.005),
        "zero_std_groups": Meaning(
            "Share of the groups with two rewards or more whose rewards are equal, or differ by at most "
            "`min_group_std`: they give no direction.",
            "lower",
            least=0.02,
        ),
        "failed": Meaning("Samples without a reward.", "lower", least=1.0),
    },
}
"""By section and name, whatever kind of record has it."""

_PARTS = {
    "ned": "1 - normalized edit distance between the text that {of} read and the text to write.",
    "exact": "Share of the images in which {of} read exactly the text to write.",
    "hacking_index": "Gain of {of} less the mean gain of readers that nothing was trained on: near 0 is sound.",
    "outside_l1": "Mean change of the pixels outside the mask, from 0 to 1.",
}

_LOWER = ("hacking_index", "outside_l1")


def meaning_of(kind: str, name: str, rewards: Mapping[str, Any]) -> tuple[str, Meaning]:
    """The section of a number of a record, and what it means.

    Args:
        rewards: sections of the run file by name.
    """
    # Known names come first. The others are made of names that a user chose ("reward.detail"): what they mean follows
    # from the record they stand in and from the run file. "rest" shows what nobody foresaw.
    for section, known in _KNOWN.items():
        if name in known:
            return section, known[name]
    whole, _, detail = name.partition(".")
    if kind != "eval" and name.startswith("reward/"):
        return "reward", Meaning(f"Reward {name[7:]}, mean over the samples.", "higher", least=0.02)
    if kind == "eval" and detail.startswith("transfer_of_"):
        share = f"Share of the gain of {detail[12:]} that {whole} confirms: 1 is all of it."
        return "measures", Meaning(share, "higher", least=0.02)
    if kind != "eval" or (whole not in rewards and name not in HEADLINE and detail not in _PARTS):
        return "rest", Meaning(f"As logged under {kind}.")
    if detail:
        sentence = _PARTS.get(detail, "A part of the reward {of}.").format(of=whole)
        better = ("lower" if detail in _LOWER else "higher") if detail in _PARTS else ""
        return "measures" if detail in _PARTS else "rest", Meaning(sentence, better, least=0.02)
    gold = rewards[whole].get("role") == "gold"
    what = "Gold reward, which nothing is trained on" if gold else "Reward"
    return "measures", Meaning(f"{what}: {whole} in the evaluation, mean over its images.", "higher", least=0.02)
