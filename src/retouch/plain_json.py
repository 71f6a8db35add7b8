"""JSON from outside: whatever is wrong with it is a ValueError."""

from __future__ import annotations

import json
from typing import Any


def loads(text: str | bytes, strict: bool = True) -> Any:
    """The value of a JSON text.

    Args:
        strict: False also takes line breaks and tabs within strings, which language models write.

    Raises:
        ValueError: not JSON, nested deeper than Python reads, an integer of too many digits, or not UTF-8.
    """
    try:
        return json.loads(text, strict=strict)
    except RecursionError:
        raise ValueError("nested too deep") from None


def first_object(text: str) -> dict[str, Any]:
    """The first JSON object in an answer of a language model, whatever stands around it; its strings may hold line
    breaks.

    Raises:
        ValueError: none, or not JSON from its brace on.
    """
    start = text.find("{")
    if start < 0:
        raise ValueError(f"no JSON object: {text[:60]!r}")
    try:
        return json.JSONDecoder(strict=False).raw_decode(text, start)[0]
    except RecursionError:
        raise ValueError("not JSON: nested too deep") from None
    except ValueError as error:
        raise ValueError(f"not JSON: {error}") from None
