"""Warnings about a run file that is valid but probably not intended."""

from __future__ import annotations

from retouch.config.run import RunConfig


def warnings_of(run: RunConfig) -> list[str]:
    """One line for each warning: the key, the value given, its effect, and the option to set."""
    rewards = (line for name, entry in run.rewards.items() for line in entry.advice(name))
    return [*run.algorithm.warnings(run), *rewards]
