"""Check every item once before a run: in threads, shared among processes, and not again while its files are unchanged.

All processes need the list of usable items before the first step, because it determines the order of examples, and a
broken file should be reported then and not hours later. Good items are recorded in the user's cache: one file for each
data section, with a fingerprint of each item.
"""

from __future__ import annotations

import hashlib
import logging
import os
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import fields
from functools import cache
from pathlib import Path
from typing import TypeVar

import PIL
from PIL import Image

import retouch
from retouch.data.base import DataSection, ItemDoubt, ItemError, ItemFiles
from retouch.data.identity import files_of
from retouch.files.disk import cache_folder, expanded
from retouch.imaging.reading import PackedImage
from retouch.process.machine import this_machine
from retouch.process.replacing import beside
from retouch.types import Processes

logger = logging.getLogger(__name__)

T = TypeVar("T")
R = TypeVar("R")

MOST_THREADS = 16
"""Each holds the images of an item; decoding and scaling release the GIL."""

PROGRESS_S = 15.0
"""Seconds between log lines with the progress."""

_SLICE = 8
"""Items that a thread takes at a time."""

_BYTES = 16
"""Length of a fingerprint."""

_UNCHECKED = {"prompt", "difficulty", "metadata", "name", "original"}
"""Fields of an item that decide nothing as a whole; `fingerprint` names the parts that do."""


class Alone:
    """One process."""

    rank = 0
    world_size = 1

    def gather_list(self, values: Sequence[T], /) -> list[T]:
        return list(values)


def find_problems(
    items: Sequence[ItemFiles],
    check: Callable[[ItemFiles], ItemError | ItemDoubt | None],
    purpose: str,
    processes: Processes,
    memory: Path | None,
) -> list[ItemError | ItemDoubt | None]:
    """The result of `check` for every item, the same on all processes. The processes of one machine share the items
    that are not remembered, because disks may differ between machines; an item broken on one of them is broken.

    Args:
        check: a function of the item alone, as long as its fingerprint stays.
        purpose: name of the section in the log.
        memory: file with the fingerprints of items that were good, which is updated; None: nothing is remembered.
    """
    first = processes.rank == 0
    known = frozenset(processes.gather_list(recall(memory) if first and memory else []))

    def verdict(position: int) -> tuple[int, ItemError | ItemDoubt | None, bytes]:
        seen = fingerprint(items[position])  # before the files are read, which may change meanwhile
        if _doubted(seen) in known:
            doubt = "its mask was doubtful when it was read"
            return position, ItemDoubt(items[position].where, doubt, remembered=True), seen
        return position, None if seen in known else check(items[position]), seen

    machines = processes.gather_list([this_machine()])
    here = [rank for rank, machine in enumerate(machines) if machine == machines[processes.rank]]
    own = range(here.index(processes.rank), len(items), len(here))
    verdicts = progress(in_threads(verdict, own), len(own), purpose if first else None)
    found = processes.gather_list(list(verdicts))
    problems: list[ItemError | ItemDoubt | None] = [None] * len(items)
    for position, problem, _ in found:
        if not isinstance(problems[position], ItemError):
            problems[position] = problem or problems[position]
    usable = [
        (seen, problems[position]) for position, _, seen in found if not isinstance(problems[position], ItemError)
    ]
    good = {seen if doubt is None else _doubted(seen) for seen, doubt in usable}
    if first and memory and good != known:
        remember(memory, good)
    return problems


def _doubted(seen: bytes) -> bytes:
    """The fingerprint under which an item with a doubtful mask is remembered."""
    return hashlib.blake2b(seen, digest_size=_BYTES).digest()


def in_threads(work: Callable[[T], R], given: Sequence[T]) -> Iterator[R]:
    """`work` of every value, in order; the first error is raised."""
    Image.init()  # not safe to run in several threads at once
    slices = [given[start : start + _SLICE] for start in range(0, len(given), _SLICE)]
    with ThreadPoolExecutor(min(MOST_THREADS, (os.cpu_count() or 1) + 4)) as pool:
        for done in pool.map(lambda some: [work(one) for one in some], slices):
            yield from done


def progress(results: Iterable[T], count: int, purpose: str | None) -> Iterator[T]:
    """The results as they come, with a log line every `PROGRESS_S` seconds.

    Args:
        purpose: name of the results in the log; None: no lines.
    """
    logged = time.monotonic()
    for number, result in enumerate(results, 1):
        if purpose and time.monotonic() - logged >= PROGRESS_S:
            logged = time.monotonic()
            logger.info("%s: checked %d of the %d items of this process", purpose, number, count)
        yield result


def memory_of(config: DataSection, needs: Collection[str]) -> Path | None:
    """The file that remembers a section's good items, for a run that needs these images; None without a home directory.

    Another version of Pillow, or of the code that checks, has another file.
    """
    cache = cache_folder()
    if cache is None:
        return None
    place = expanded(config.path).absolute()
    parts = (str(place), config.model_dump_json(exclude={"path", "max_bad_items"}), sorted(needs), _checks())
    return cache / "checked" / hashlib.blake2b(repr(parts).encode(), digest_size=_BYTES).hexdigest()


@cache
def _checks() -> tuple[str, str]:
    """Versions of what checks an item: Pillow and this package."""
    package = Path(retouch.__file__).parent
    source = hashlib.blake2b(digest_size=_BYTES)
    rules = (package / "data" / name for name in ("base.py", "buckets.py", "item.py", "lists.py"))
    for file in (*sorted((package / "imaging").glob("*.py")), *rules):
        source.update(file.read_bytes())
    return PIL.__version__, source.hexdigest()


def fingerprint(item: ItemFiles) -> bytes:
    """Digest of everything that decides whether the item can be used: its fields, the lines that must lie inside its
    image, and size and modification time of its files. A prompt counts as empty or not; further metadata and the
    difficulty are for rewards and curricula."""
    files = files_of(item)
    own = [field.name for field in fields(item) if field.name not in {*_UNCHECKED, *files, "more_paths"}]
    parts: list[object] = [(name, getattr(item, name)) for name in own]
    parts += [bool(item.prompt.strip()), item.metadata.get("lines")]
    for name, file in files.items():
        place = file.digest if isinstance(file, PackedImage) else (str(file.absolute()), *_state(file))
        parts.append((name, place))
    return hashlib.blake2b(repr(parts).encode(), digest_size=_BYTES).digest()


def _state(path: Path) -> tuple[int, int]:
    try:
        state = path.stat()
    except OSError:
        return -1, -1
    return state.st_size, state.st_mtime_ns


def recall(memory: Path) -> list[bytes]:
    """The fingerprints of a file; none if there is no such file, and a damaged one matches no item."""
    try:
        content = memory.read_bytes()
    except OSError:
        return []
    return [content[start : start + _BYTES] for start in range(0, len(content), _BYTES)]


def remember(memory: Path, good: Iterable[bytes]) -> None:
    """Write the file by one rename; if the cache cannot be written, the next start checks all items again."""
    try:
        memory.parent.mkdir(parents=True, exist_ok=True)
        with beside(memory) as written:
            written.write_bytes(b"".join(sorted(good)))
            written.replace(memory)
    except OSError as error:
        logger.debug("checked items are not remembered: %s", error)
