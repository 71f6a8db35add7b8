"""A line of a diagnosis."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

GIB = 2**30

BYTES = {"fp32": 4, "bf16": 2, "fp16": 2}
"""Bytes of a number by its precision."""


@dataclass(frozen=True)
class Line:
    """A check and its result.

    Attributes:
        status: "fix": the run cannot work; "warning": it may not; "ok".
        says: the result; for "warning" and "fix" also the remedy.
    """

    status: Literal["ok", "warning", "fix"]
    what: str
    says: str


def size(count: float) -> str:
    """Bytes as text: "3.2 GiB", "12 MiB"."""
    return f"{count / GIB:.1f} GiB" if count >= GIB else f"{count / 2**20:.0f} MiB"
