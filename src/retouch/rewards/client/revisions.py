"""Which revision of each reward the servers have: scores of two revisions do not compare. No sockets."""

from __future__ import annotations

import logging
import time
from collections.abc import Collection, Mapping, Sequence
from typing import Any, cast

logger = logging.getLogger(__name__)


class Revisions:
    """What servers told of their scorers, with every answer and at /info.

    Attributes:
        changes: how often a server told another revision than it had before, or than others have.
    """

    def __init__(self, rewards: Sequence[str]) -> None:
        self.changes = 0
        self._of: dict[str, dict[str, str]] = {name: {} for name in rewards}  # server -> revision
        self._heard: dict[str, dict[str, float]] = {name: {} for name in rewards}  # revision -> when last

    @property
    def known(self) -> bool:
        """Whether some server told of every reward."""
        return all(self._of.values())

    def note(self, url: str, name: str, revision: str) -> None:
        """A server has this revision of a reward. One that changes in the middle of a run, or that servers have in two,
        is said once."""
        self._heard[name][revision] = time.monotonic()
        known = self._of[name]
        before, others = known.get(url), {found for other, found in known.items() if other != url}
        if before == revision:
            return
        known[url] = revision
        if before is not None:
            told = f"now {revision!r} and was {before!r}"
        elif others - {revision}:
            told = f"{revision!r} and of other servers {', '.join(map(repr, sorted(others - {revision})))}"
        else:
            return
        self.changes += 1
        logger.warning("%s: %s is %s: its scores may not compare", url, name, told)

    def learn(self, infos: Mapping[str, Mapping[str, Any]]) -> None:
        """From replies of /info by server."""
        for url, info in infos.items():
            scorers = info.get("scorers")
            for name in self._of:
                told = scorers.get(name) if isinstance(scorers, dict) else None  # pyright: ignore[reportUnknownVariableType, reportUnknownMemberType]
                if isinstance(told, dict) and isinstance(told.get("revision"), str):  # pyright: ignore[reportUnknownMemberType]
                    self.note(url, name, cast("str", told["revision"]))

    def one_each(self, gone: Collection[str]) -> dict[str, str] | None:
        """The revision of each reward; None where servers differ or told none, so that it is not known which of them a
        score would be of.

        Args:
            gone: servers that do not count, unless all of them are gone: one that comes back tells.
        """
        found: dict[str, str] = {}
        for name, of in self._of.items():
            told = {revision for url, revision in of.items() if url not in gone} or set(of.values())
            if len(told) != 1:
                return None
            found[name] = told.pop()
        return found

    def others_since(self, moment: float, revisions: Mapping[str, str]) -> bool:
        """Whether any server told another revision than these since a moment of `time.monotonic`."""
        return any(
            at >= moment and revision != revisions[name]
            for name, heard in self._heard.items()
            for revision, at in heard.items()
        )
