"""JSON from outside: whatever is wrong with it is a ValueError."""

from __future__ import annotations

import json
import math
import re
from functools import cache
from typing import Any, cast

_HALF = re.compile(r"\\u[dD][89a-fA-F]")
"""Escapes of half a surrogate pair, which a whole pair has too."""


def loads(text: str | bytes, strict: bool = True, *, finite: bool = False, unique: bool = False) -> Any:
    """The value of a JSON text.

    Args:
        strict: False also takes line breaks and tabs within strings, which language models write.
        finite: every number must fit a float: no NaN, infinity or integer of hundreds of digits.
        unique: no object may hold a key twice with different values.

    Raises:
        ValueError: not JSON, nested deeper than Python reads, an integer of too many digits, not UTF-8, or a string
            with half of a surrogate pair, which no file and no message can hold.
    """
    if isinstance(text, bytes):
        text = text.decode(json.detect_encoding(text))
    try:
        return _whole(_decoder(strict, finite, unique).decode(text), text)
    except RecursionError:
        raise ValueError("nested too deep") from None


def table_of(value: object) -> dict[str, Any]:
    """A value that is a JSON object, or the object of a JSON text in bytes; empty for anything else."""
    if isinstance(value, bytes):
        try:
            value = loads(value)
        except ValueError:
            return {}
    return cast("dict[str, Any]", value) if isinstance(value, dict) else {}


@cache
def _decoder(strict: bool, finite: bool, unique: bool) -> json.JSONDecoder:
    """Made once: a list may have a text for each of its lines."""
    hooks: dict[str, Any] = {"object_pairs_hook": _without_doubles} if unique else {}
    hooks |= {"parse_constant": _finite, "parse_float": _finite, "parse_int": _integer} if finite else {}
    return json.JSONDecoder(strict=strict, **hooks)


def _finite(number: str) -> float:
    value = float(number)
    if not math.isfinite(value):  # NaN and Infinity are not JSON; 1e999 is
        raise ValueError(f"contains NaN, Inf or a number beyond the floats ({number[:20]})")
    return value


def _integer(number: str) -> int:
    _finite(number)
    return int(number)


def first_object(text: str) -> dict[str, Any]:
    """The first JSON object in an answer of a language model, whatever stands around it; its strings may hold line
    breaks.

    Raises:
        ValueError: none, not JSON from its brace on, or a key twice with different values.
    """
    start = text.find("{")
    if start < 0:
        raise ValueError(f"no JSON object: {text[:60]!r}")
    try:
        return _whole(_decoder(False, False, True).raw_decode(text, start)[0], text)
    except RecursionError:
        raise ValueError("not JSON: nested too deep") from None
    except ValueError as error:
        raise ValueError(f"not JSON: {error}") from None


_MOST_BRACES = 100
"""Braces of a text at which an object is looked for: each may take the time of the whole text."""


def only_object(text: str) -> dict[str, Any]:
    """The one JSON object in an answer of a language model: alone, in a code fence, or amid prose. It may be repeated;
    its strings may hold line breaks.

    Raises:
        ValueError: none, two different ones, a key twice with different values, or as of `loads`.
    """
    decoder = json.JSONDecoder(strict=False, object_pairs_hook=_without_doubles)
    found: list[dict[str, Any]] = []
    problem, at, tries, broken = "", text.find("{"), 0, -1
    while at >= 0 and tries < _MOST_BRACES:
        tries += 1
        if broken >= 0 and text.count("{", broken, at) <= text.count("}", broken, at):
            broken = -1  # the object that is none has ended
        try:
            value, end = decoder.raw_decode(text, at)
        except RecursionError:
            raise ValueError("nested too deep") from None
        except _Ambiguous:
            raise
        except ValueError as error:
            problem, end, broken = problem or str(error), at + 1, at if broken < 0 else broken
        else:
            if broken >= 0 and value not in found:  # text that the answer quotes, such as a verdict in the image
                raise _Ambiguous(f"an object within one that is not JSON: {problem}")
            found += [value] if value not in found else []
        at = text.find("{", end)
    if at >= 0:
        raise ValueError(f"over {_MOST_BRACES} braces around JSON objects")
    if len(found) != 1:
        several = f"{len(found)} different JSON objects" if found else f"no JSON object: {problem or repr(text[:60])}"
        raise ValueError(several)
    return _whole(found[0], text)


class _Ambiguous(ValueError):
    """A key that is there twice with different values, or an object that is a part of another one."""


def _without_doubles(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        for key, value in pairs:
            if value != found[key]:
                raise _Ambiguous(f"{key[:80]} is given twice, with different values")
    return found


def _whole(value: Any, text: str) -> Any:
    """The value of a text, if its strings can be written as UTF-8."""
    suspected = _HALF.search(text) or not _is_utf8(text)
    if suspected and not _is_utf8(json.dumps(value, ensure_ascii=False)):
        raise ValueError("holds half of a surrogate pair, which is no character")
    return value


def _is_utf8(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True
