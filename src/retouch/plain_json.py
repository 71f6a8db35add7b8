"""JSON from outside: whatever is wrong with it is a ValueError."""

from __future__ import annotations

import json
from typing import Any


def loads(text: str | bytes) -> Any:
    """The value of a JSON text.

    Raises:
        ValueError: not JSON, nested deeper than Python reads, an integer of too many digits, or not UTF-8.
    """
    try:
        return json.loads(text)
    except RecursionError:
        raise ValueError("nested too deep") from None
