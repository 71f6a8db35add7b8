"""A reward that counts only as far as another is reached (`style * ocr`). No torch."""

from __future__ import annotations

from dataclasses import dataclass

from retouch.types import Failure, Outcome, Score


@dataclass(frozen=True)
class Gate:
    """What gates a reward.

    Attributes:
        reward: name of the entry whose value opens the gate.
        threshold: the gate is open from this value of it on, and shut below; None opens it as far as the value, held to
            [0, 1], says.
        floor: what the gated value falls to where the gate is shut.
    """

    reward: str
    threshold: float | None = None
    floor: float = 0.0

    def opening(self, value: float) -> float:
        """How far the gate is open, in [0, 1]."""
        if self.threshold is None:
            return min(1.0, max(0.0, value))
        return 1.0 if value >= self.threshold else 0.0

    def apply(self, outcome: Outcome, by: Outcome) -> Outcome:
        """floor + opening * (value - floor), and never more than the value: a gate raises nothing.

        A failure of either is a failure: an unread text is no illegible one.
        """
        if isinstance(outcome, Failure):
            return outcome
        if isinstance(by, Failure):
            return Failure(by.code, f"its gate {self.reward} failed: {by.message}", by.retryable)
        opening = self.opening(by.value)
        held = self.floor + opening * (outcome.value - self.floor)
        return Score(min(outcome.value, held), {**outcome.detail, "ungated": outcome.value, "gate": opening})
