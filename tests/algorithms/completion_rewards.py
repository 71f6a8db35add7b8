"""Rewards that look at the completion alone, for runs of vlm_grpo. A server that scores with one imports no torch."""

from __future__ import annotations

from typing import Any


def letters(items: list[Any]) -> list[float]:
    """A reward that random words earn differently: the mean code of their letters."""
    return [sum(ord(c) % 97 for c in text) / (97 * max(1, len(text))) for text in completions(items)]


def alike(items: list[Any]) -> list[float]:
    return [0.5] * len(items)


def completions(items: list[Any]) -> list[str]:
    return [str(item.metadata["completion"]) for item in items]
