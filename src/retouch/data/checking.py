"""Every item is read once before a run: in threads, shared out among processes, and not again while its files stay.

Which items can be used decides their order, so that all processes must know it before the first step; and a broken file
is better told of then than hours later. What was found good is remembered in the user's cache: a file for each data
section, of fingerprints of its items.
"""

from __future__ import annotations

import hashlib
import logging
import os
import platform
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

import PIL
from PIL import Image

import retouch
from retouch.data.identity import files_of
from retouch.imaging import PackedPicture
from retouch.types import Processes

if TYPE_CHECKING:
    from retouch.data.dataset import ItemError, ItemFiles
    from retouch.data.sections import DataSection

logger = logging.getLogger(__name__)

T = TypeVar("T")
R = TypeVar("R")

MOST_THREADS = 16
"""Each holds the pictures of an item; decoding and scaling them lets others run."""

PROGRESS_S = 15.0
"""Between lines that say how far it is."""

_SLICE = 8
"""Items that a thread takes at a time."""

_BYTES = 16
"""Of a fingerprint."""


class Alone:
    """One process."""

    rank = 0
    world_size = 1

    def gather_list(self, values: Sequence[T], /) -> list[T]:
        return list(values)


def find_problems(
    items: Sequence[ItemFiles],
    check: Callable[[ItemFiles], ItemError | None],
    purpose: str,
    processes: Processes,
    memory: Path | None,
) -> list[ItemError | None]:
    """What `check` says of every item, the same on all processes; those of a machine share out what is not remembered,
    for disks may differ between machines. What is broken on one of them is broken.

    Args:
        check: says the same of an item as long as its fingerprint stays.
        purpose: names the section in the log.
        memory: file of what was good before, which is brought up to date; None: nothing is remembered.
    """
    first = processes.rank == 0
    known = frozenset(processes.gather_list(recall(memory) if first and memory else []))

    def verdict(position: int) -> tuple[int, ItemError | None, bytes]:
        seen = fingerprint(items[position])  # before its files are read: one that changes meanwhile is not known
        return position, None if seen in known else check(items[position]), seen

    machines = processes.gather_list([platform.node()])
    here = [rank for rank, machine in enumerate(machines) if machine == machines[processes.rank]]
    own = range(here.index(processes.rank), len(items), len(here))
    verdicts = progress(in_threads(verdict, own), len(own), purpose if first else None)
    found = processes.gather_list(list(verdicts))
    problems: list[ItemError | None] = [None] * len(items)
    for position, problem, _ in found:
        problems[position] = problems[position] or problem
    good = {seen for position, _, seen in found if problems[position] is None}
    if first and memory and good != known:
        remember(memory, good)
    return problems


def in_threads(work: Callable[[T], R], given: Sequence[T]) -> Iterator[R]:
    """`work` of everything, in order; the first error is raised."""
    Image.init()  # threads that make Pillow look for its formats trip over each other
    slices = [given[start : start + _SLICE] for start in range(0, len(given), _SLICE)]
    with ThreadPoolExecutor(min(MOST_THREADS, (os.cpu_count() or 1) + 4)) as pool:
        for done in pool.map(lambda some: [work(one) for one in some], slices):
            yield from done


def progress(results: Iterable[T], count: int, purpose: str | None) -> Iterator[T]:
    """The results as they come, and now and then a line in the log where they take long.

    Args:
        purpose: names them in it; None: no lines.
    """
    told = time.monotonic()
    for number, result in enumerate(results, 1):
        if purpose and time.monotonic() - told >= PROGRESS_S:
            told = time.monotonic()
            logger.info("%s: checked %d of the %d items of this process", purpose, number, count)
        yield result


# --- what is remembered ---


def memory_of(config: DataSection, needs: Collection[str]) -> Path | None:
    """Where it lies what of a section was good, for a run that needs these pictures; None where there is no home.

    Another version of Pillow, and other checks, start anew.
    """
    root = os.environ.get("XDG_CACHE_HOME")
    try:
        cache_folder = Path(root) if root else Path.home() / ".cache"
    except RuntimeError:
        return None
    place = Path(config.path).expanduser().absolute()
    said = (str(place), config.model_dump_json(exclude={"path", "max_bad_items"}), sorted(needs), _checks())
    return cache_folder / "retouch" / "checked" / hashlib.blake2b(repr(said).encode(), digest_size=_BYTES).hexdigest()


@cache
def _checks() -> tuple[str, str]:
    """What an item is checked with: Pillow, and this package as it is."""
    package = Path(retouch.__file__).parent
    source = hashlib.blake2b(digest_size=_BYTES)
    for file in (package / "imaging.py", package / "data" / "dataset.py"):
        source.update(file.read_bytes())
    return PIL.__version__, source.hexdigest()


def names_files(item: ItemFiles) -> bool:
    """Whether there is anything to open."""
    return bool(files_of(item))


def fingerprint(item: ItemFiles) -> bytes:
    """Of all that decides whether the item can be used: what it says, and size and time of change of its files."""
    said: list[object] = [item.id, item.target, bool(item.prompt.strip())]
    for name, file in files_of(item).items():
        place = file.digest if isinstance(file, PackedPicture) else (str(file.absolute()), *_state(file))
        said.append((name, place))
    return hashlib.blake2b(repr(said).encode(), digest_size=_BYTES).digest()


def _state(path: Path) -> tuple[int, int]:
    try:
        state = path.stat()
    except OSError:
        return -1, -1
    return state.st_size, state.st_mtime_ns


def recall(memory: Path) -> list[bytes]:
    """Nothing where there is no such file; what a damaged one holds fits no item."""
    try:
        content = memory.read_bytes()
    except OSError:
        return []
    return [content[start : start + _BYTES] for start in range(0, len(content), _BYTES)]


def remember(memory: Path, good: Iterable[bytes]) -> None:
    """Put in place at once; a cache that cannot be written costs the next start its time, and nothing else."""
    written = memory.with_name(f"{memory.name}.{os.getpid()}")
    try:
        memory.parent.mkdir(parents=True, exist_ok=True)
        written.write_bytes(b"".join(sorted(good)))
        written.replace(memory)
    except OSError as error:
        logger.debug("what was checked is not remembered: %s", error)
