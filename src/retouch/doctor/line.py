"""One line of a diagnosis."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

GIB = 2**30


@dataclass(frozen=True)
class Line:
    """What was looked at, and what it means.

    Attributes:
        status: "fix" keeps a run from working; "warning" is worth knowing; "ok" is neither.
        says: for "warning" and "fix", with what to do.
    """

    status: Literal["ok", "warning", "fix"]
    what: str
    says: str


def size(count: float) -> str:
    """Bytes for people: "3.2 GiB", "12 MiB"."""
    return f"{count / GIB:.1f} GiB" if count >= GIB else f"{count / 2**20:.0f} MiB"
