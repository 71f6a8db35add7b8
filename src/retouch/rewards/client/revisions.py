"""The revision of each reward at each server: scores of two revisions are not comparable."""

from __future__ import annotations

import hashlib
import logging
import re
import time
from collections import OrderedDict
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from retouch.files import plain_json
from retouch.rewards.foreign import CUT, one_line

_LONGEST = 400  # characters of a revision
_DIGEST = 8  # bytes
_KEPT = 64  # newest revisions of a reward
_LOGGED = 20  # changes

logger = logging.getLogger(__name__)


def is_cut(revision: str) -> bool:
    """Whether a revision that a server reported was longer."""
    return re.search(rf"{re.escape(CUT)} [0-9a-f]{{{2 * _DIGEST}}}$", revision) is not None


_JUDGED = re.compile(r"(.*? served as )(.*?) ([0-9a-f]{12}(?= |$)(?! [0-9a-f]{12}(?: |$)).*)", re.DOTALL)
"""Revision of a judge: the model of its entry, the names that the endpoint reported, and a hash with the rest. A
fingerprint may look like the hash: it is followed by a comma or by the hash."""


def without_fingerprints(revision: str) -> str:
    """A revision of servers in which a judge's endpoint is named by its models alone: `system_fingerprint` changes with
    the machine that happened to answer. A revision that was cut is unchanged: a difference may lie behind the cut."""
    return " | ".join(sorted({_by_models(one) for one in revision.split(" | ")}))


def _by_models(revision: str) -> str:
    judged = None if is_cut(revision) else _JUDGED.fullmatch(revision)
    if judged is None:
        return revision
    asked, names, rest = judged.groups()
    models = sorted({name.partition(" ")[0] for name in names.split(", ")})
    return f"{asked}{', '.join(models)} {rest}"


class Revisions:
    """Revisions that servers report with every reply and at /info; a server may report another one every time.

    Args:
        secret: token, which a server may echo.

    Attributes:
        changes: number of reports that differ from the server's last one, or from those of other servers.
    """

    def __init__(self, rewards: Sequence[str], secret: str | None = None) -> None:
        self.changes = 0
        self._secret = secret
        self._of: dict[str, dict[str, str]] = {name: {} for name in rewards}  # server -> revision
        self._heard = {name: OrderedDict[str, float]() for name in rewards}  # revision -> when last, oldest first

    @property
    def known(self) -> bool:
        """Whether a revision of every reward is known."""
        return all(self._of.values())

    def note(self, url: str, name: str, revision: str) -> None:
        """Record the revision of a reward at a server; log a change or a difference between servers once."""
        whole, revision = revision, one_line(revision, self._secret, _LONGEST)
        if len(whole) > _LONGEST:  # it may differ from another one at its end
            revision += " " + hashlib.blake2b(whole.encode(errors="replace"), digest_size=_DIGEST).hexdigest()
        heard = self._heard[name]
        heard[revision] = time.monotonic()
        heard.move_to_end(revision)
        if len(heard) > _KEPT:
            heard.popitem(last=False)
        known = self._of[name]
        before, others = known.get(url), {found for other, found in known.items() if other != url}
        if before == revision:
            return
        known[url] = revision
        if before is not None:
            change = f"now {revision!r} and was {before!r}"
        elif others - {revision}:
            change = f"{revision!r} and of other servers {', '.join(map(repr, sorted(others - {revision})))}"
        else:
            return
        self.changes += 1
        if self.changes <= _LOGGED:
            logger.warning("%s: %s is %s: its scores may not compare", url, name, change)

    def learn(self, infos: Mapping[str, Mapping[str, Any]]) -> None:
        """Record replies of /info by server."""
        for url, info in infos.items():
            scorers = plain_json.table_of(info.get("scorers"))
            for name in self._of:
                revision = plain_json.table_of(scorers.get(name)).get("revision")
                if isinstance(revision, str):
                    self.note(url, name, revision)

    def one_each(self, gone: Collection[str]) -> dict[str, str] | None:
        """The revision of each reward; None if servers differ or none has reported, because a score could be of any.

        Args:
            gone: servers to ignore, unless all are gone: one that comes back reports again.
        """
        found: dict[str, str] = {}
        for name, of in self._of.items():
            revisions = {revision for url, revision in of.items() if url not in gone} or set(of.values())
            if len(revisions) != 1:
                return None
            found[name] = revisions.pop()
        return found

    def told(self, name: str) -> str:
        """The revision of a reward; of servers that differ, all of them."""
        return " | ".join(sorted(set(self._of[name].values())))

    def others_since(self, moment: float, revisions: Mapping[str, str]) -> bool:
        """Whether any server reported another revision since `moment`, on the clock of `time.monotonic`."""
        return any(
            at >= moment and revision != revisions[name]
            for name, heard in self._heard.items()
            for revision, at in heard.items()
        )
