"""What hundreds of tests read again and again is read once: every use gets a copy of its own."""

from __future__ import annotations

import copy
import functools
import pickle
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from retouch.model_files import tiny_path

BASES = tiny_path("flux_fill").parent


def parses(parse: Callable[[str], Any]) -> Callable[[str], Any]:
    """The same, where a text was parsed before."""
    once = functools.lru_cache(512)(lambda text: pickle.dumps(parse(text)))
    return lambda text: pickle.loads(once(text))


def components(read: Callable[..., Any]) -> Callable[..., Any]:
    """`read_component`, which reads the files of a tiny model once as long as they are the same: half of the time of
    building a small run went into it."""
    once = functools.lru_cache(64)(
        lambda kind, how, path, subfolder, keywords, stamp: read(kind, path, subfolder, **dict(keywords))
    )

    def remembered(kind: Any, path: str, subfolder: str | None, **keywords: Any) -> Any:
        if not _is_tiny(Path(path)):
            return read(kind, path, subfolder, **keywords)
        how = getattr(kind.from_pretrained, "__func__", kind.from_pretrained)  # a test may replace it
        given = tuple(sorted(keywords.items()))
        return copy.deepcopy(once(kind, how, path, subfolder, given, _stamp(Path(path, subfolder or ""))))

    return remembered


def _is_tiny(folder: Path) -> bool:
    """A base of the package, or random weights that `tests.tiny_models` or `tests.algorithms.vlm_runs` wrote."""
    return folder.parent == BASES or (
        folder.parent == Path(tempfile.gettempdir()) and folder.name.startswith("retouch-")
    )


def _stamp(folder: Path) -> tuple[tuple[str, int, int], ...]:
    """Names, times and sizes of the files."""
    found = [(path.name, path.stat()) for path in sorted(folder.glob("*"))]
    return tuple((name, stat.st_mtime_ns, stat.st_size) for name, stat in found)
