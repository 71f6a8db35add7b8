"""Warnings of a run file that is valid and still unlikely to do what its author expects."""

from __future__ import annotations

from retouch.config.run import RunConfig


def warnings_of(run: RunConfig) -> list[str]:
    """One line each: the key, what was given, what follows, what to set."""
    rewards = (line for name, entry in run.rewards.items() for line in entry.advice(name))
    return [*run.algorithm.warnings(run), *rewards]
