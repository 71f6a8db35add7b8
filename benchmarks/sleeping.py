"""A scorer that takes as long as it is told, and none of the processor: a reward server elsewhere, as a run sees it."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

delay_s = 0.0
"""Of a batch."""


def score(items: Sequence[Any]) -> list[float]:
    time.sleep(delay_s)
    return [i / 10 for i in range(len(items))]
