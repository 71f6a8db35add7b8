"""Strategies for damaged inputs, and the harness that holds a reader to its promise."""

from __future__ import annotations

import contextlib
import json
import os
import resource
import signal
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st

CORPUS = Path(__file__).parent / "corpus"
"""Inputs that once led to a traceback or a hang; a folder for each target."""

CASES = int(os.environ.get("RETOUCH_FUZZ_CASES", "0"))
"""Cases of each target; 0 takes the profile's number."""

LONGEST_S = 10
MOST_BYTES = 1 << 30
"""Bounds of one case: wall time, and growth of the process's peak memory."""

tried: Counter[str] = Counter()
"""Cases by target, for the table at the end of `make trust`."""

faults: Counter[str] = Counter()
"""Cases that broke the promise, by how: tracebacks, hangs, over_memory."""

_bounds = settings(
    deadline=None,
    suppress_health_check=(HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.function_scoped_fixture),
    derandomize=not CASES,
    database=None,
)
fuzzed = settings(_bounds, max_examples=CASES) if CASES else _bounds


class Hang(BaseException):
    """A block took longer than its bound. Not an Exception, so that no reader's own handler hides it."""


class OverMemory(AssertionError):
    """A case took more memory than MOST_BYTES."""


@contextlib.contextmanager
def bounded(longest_s: int = LONGEST_S) -> Iterator[None]:
    """Raise where a block takes too long or too much memory."""

    def expired(*_: object) -> None:
        raise Hang(f"longer than {longest_s} s")

    before, former = _peak_bytes(), signal.signal(signal.SIGALRM, expired)
    signal.alarm(longest_s)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, former)
    grown = _peak_bytes() - before
    if grown >= MOST_BYTES:
        raise OverMemory(f"{grown / 1e6:.0f} MB of memory")


def _peak_bytes() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def attempt(target: str, read: Callable[[], Any], *expected: type[Exception]) -> None:
    """Run one case: it returns, or raises one of the expected errors with a message of one screen."""
    tried[target] += 1
    try:
        with bounded():
            try:
                read()
            except expected as error:
                assert 0 < len(str(error)) < 20_000
                str(error).encode()  # it can be printed
    except BaseException as error:
        faults[
            "hangs" if isinstance(error, Hang) else "over_memory" if isinstance(error, OverMemory) else "tracebacks"
        ] += 1
        raise


NUMBERS = ["0", "-1", "1e999", "-0.0", "1" * 5000, "10e400", "0x1F", "0o17", "1_000", "1:30", ".nan", "-.inf", "1" * 31]
TOKENS = [
    "{", "}", "[", "]", ":", ",", "&a ", "*a", "!!int ", "!!python/name:os.system ", "!!binary ", "|", ">", "?", "- ",
    "\n", "\t", "\x00", "\ufeff", "\u2028", '"', "'", "\\", "#", "%", "${", "}", "${A:-${A}}", "null", "true", "~",
    "<<: ", "extends: ", "../", "/dev/zero", "/", "~root", "é", "😀", "\ud800", "%s", "NaN", "Infinity",
    "[" * 3000, "{\"a\":" * 3000, "a" * 300, *NUMBERS,
    *(piece * 3000 for piece in (" ", "\n", "- ", "*", ",", ": ", "'", '"', "`", "#", "<think>", "\\ud800")),
]  # fmt: skip

scalars = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.sampled_from([10**30, -(10**30), 2**63, 10**400, -1, 0]),
    st.floats(),
    st.text(max_size=20),
    st.sampled_from(TOKENS),
)

values = st.recursive(
    scalars,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4),
    max_leaves=8,
)
"""Any JSON-like value."""


@st.composite
def texts(draw: st.DrawFn, seeds: Sequence[str]) -> str:
    """A seed with up to six cuts, insertions, repeats and replaced stretches."""
    text = draw(st.sampled_from(list(seeds)))
    for _ in range(draw(st.integers(1, 6))):
        start = draw(st.integers(0, len(text)))
        end = min(len(text), start + draw(st.sampled_from([0, 1, 2, 8, 40, 400])))
        piece = draw(st.one_of(st.sampled_from(TOKENS), st.just(""), st.just(text[start:end] * 2), st.text(max_size=6)))
        text = text[:start] + piece + text[end:]
    return text


@st.composite
def blobs(draw: st.DrawFn, seeds: Sequence[bytes]) -> bytes:
    """A seed with up to six flipped, cut, repeated or inserted stretches of bytes."""
    data = draw(st.sampled_from(list(seeds)))
    for _ in range(draw(st.integers(1, 6))):
        start = draw(st.integers(0, len(data)))
        end = min(len(data), start + draw(st.sampled_from([0, 1, 4, 64, 4096])))
        piece = draw(
            st.one_of(
                st.binary(max_size=9),
                st.just(b""),
                st.just(data[start:end] * 2),
                st.sampled_from([b"\xff" * 8, b"\x00" * 8, b"\x7f\xff\xff\xff", b"\xff\xff\xff\x7f"]),
            )
        )
        data = data[:start] + piece + data[end:]
    return data


@st.composite
def changed(draw: st.DrawFn, seeds: Sequence[Any]) -> Any:
    """A JSON-like seed in which up to four values, wherever they stand, are replaced, removed or renamed."""
    value = json.loads(json.dumps(draw(st.sampled_from(list(seeds)))))
    for _ in range(draw(st.integers(1, 4))):
        places = list(_places(value))
        if not places:
            return draw(values)
        holder, key = draw(st.sampled_from(places))
        action = draw(st.sampled_from(["replace", "replace", "replace", "remove", "rename"]))
        if action == "replace":
            holder[key] = draw(values)
        else:
            old = holder.pop(key)
            if action == "rename" and isinstance(holder, dict):
                holder[draw(st.text(max_size=8))] = old
    return value


def _places(value: Any) -> Iterator[tuple[Any, Any]]:
    """(container, key or index) of every value below this one."""
    keys: Any = list(value) if isinstance(value, dict) else range(len(value)) if isinstance(value, list) else ()
    for key in keys:
        yield value, key
        yield from _places(value[key])


def kept(target: str) -> list[Path]:
    """The files of the corpus of a target."""
    return sorted((CORPUS / target).glob("*"))
