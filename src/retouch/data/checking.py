"""Every item is read once before a run: in threads, shared out among processes, and not again while its files stay.

Which items can be used decides their order, so that all processes must know it before the first step; and a broken file
is better told of then than hours later. What was found good is remembered in the user's cache: a file for each data
section, of fingerprints of its items.
"""

from __future__ import annotations

import hashlib
import logging
import os
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

import PIL

import retouch
from retouch.imaging import PackedPicture

if TYPE_CHECKING:
    from retouch.config.data_sections import DataSection
    from retouch.data.dataset import ItemError, ItemFiles

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

_PLACES = (
    "source_path", "mask_path", "reference_path", "target_path", "win_path", "lose_path", "embedding_path",
    "reference_mask_path",
)  # fmt: skip


class Processes(Protocol):
    """The processes of a run."""

    @property
    def rank(self) -> int: ...
    @property
    def world_size(self) -> int: ...
    def gather_list(self, values: Sequence[Any], /) -> list[Any]: ...


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
    """What `check` says of every item, the same on all processes; each checks its share of what is not remembered.

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

    own = range(processes.rank, len(items), processes.world_size)
    verdicts = progress(in_threads(verdict, own), len(own), purpose if first else None)
    found = sorted(processes.gather_list(list(verdicts)), key=lambda one: one[0])
    good = {seen for _, problem, seen in found if problem is None}
    if first and memory and good != known:
        remember(memory, good)
    return [problem for _, problem, _ in found]


def in_threads(work: Callable[[T], R], given: Sequence[T]) -> Iterator[R]:
    """`work` of everything, in order; the first error is raised."""
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
            logger.info("%s: checked %d of %d items", purpose, number, count)
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
    return any(getattr(item, place) is not None for place in _PLACES)


def fingerprint(item: ItemFiles) -> bytes:
    """Of all that decides whether the item can be used: what it says, and size and time of change of its files."""
    said: list[object] = [item.id, item.target, bool(item.prompt.strip())]
    for place in _PLACES:
        path: Path | PackedPicture | None = getattr(item, place)
        said.append(path.digest if isinstance(path, PackedPicture) else path and (str(path.absolute()), *_state(path)))
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
