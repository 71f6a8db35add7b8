"""Scores that rounding does not change. Kernels of a CPU add in another order where weights lie at another address, as
in DeepSpeed's buffers; one pixel may then be another whole number, and an advantage divides by the small std of a
group."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from retouch.types import Score


def coarse(score: Callable[..., list[Any]]) -> Callable[..., list[Any]]:
    """A scorer's `score`, to four digits."""

    def rounded(self: Any, items: Any) -> list[Any]:
        return [Score(round(one.value, 4)) for one in score(self, items)]

    return rounded
