"""Warnings of a run file that is valid and still unlikely to do what its author expects."""

from __future__ import annotations

from collections.abc import Iterator

from retouch.config.run import RunConfig
from retouch.rewards.sections import MmmgReward


def warnings_of(run: RunConfig) -> list[str]:
    """One line each: the key, what was given, what follows, what to set."""
    return [*run.algorithm.warnings(run), *_named_mmmg(run)]


def _named_mmmg(run: RunConfig) -> Iterator[str]:
    entry = run.rewards.get("mmmg")
    if isinstance(entry, MmmgReward) and entry.url in (None, "auto") and not entry.is_published:
        yield (
            "rewards.mmmg: this score follows MMMG's idea and not its protocol, and must not be reported as MMMG; name "
            "it mmmg_style: {scorer: mmmg, ...}, or set wording=published with prompts, ged=networkx and readability"
        )
