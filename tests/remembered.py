"""What hundreds of tests read again and again is read once: every use gets a copy of its own."""

from __future__ import annotations

import copy
import functools
import io
import pickle
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from retouch.files.model_files import tiny_path

BASES = tiny_path("flux_fill").parent


def parses(parse: Callable[[str], Any]) -> Callable[[str], Any]:
    """The same, where a text was parsed before."""
    once = functools.lru_cache(512)(lambda text: pickle.dumps(parse(text)))
    return lambda text: pickle.loads(once(text))


def components(read: Callable[..., Any]) -> Callable[..., Any]:
    """`read_component`, which reads the files of a tiny model once as long as they are the same: half of the time of
    building a small run went into it."""
    once = functools.lru_cache(64)(
        lambda kind, how, path, subfolder, keywords, stamp: _Kept(read(kind, path, subfolder, **dict(keywords)))
    )

    def remembered(kind: Any, path: str, subfolder: str | None, **keywords: Any) -> Any:
        if not _is_tiny(Path(path)):
            return read(kind, path, subfolder, **keywords)
        how = getattr(kind.from_pretrained, "__func__", kind.from_pretrained)  # a test may replace it
        given = tuple(sorted(keywords.items()))
        return once(kind, how, path, subfolder, given, _stamp(Path(path, subfolder or ""))).copy()

    return remembered


def networks_on_meta(build: Callable[[Path, str], Any]) -> Callable[[Path, str], Any]:
    """`component_on_meta`, which builds a network of a config once: those of released sizes have a thousand layers."""
    once = functools.lru_cache(64)(lambda config, kind, folder: _Kept(build(folder, kind)))

    def remembered(folder: Path, kind: str) -> Any:
        file = folder / "config.json"
        return once(file.read_bytes(), kind, folder).copy() if file.is_file() else build(folder, kind)

    return remembered


class _Kept:
    """Copies of an object as `copy.deepcopy` makes them, in a quarter of its time: all but the tensors is pickled once.
    What cannot be pickled is copied as it is."""

    def __init__(self, kept: Any) -> None:
        self._kept = kept
        self._tensors: list[torch.Tensor] = []
        file = io.BytesIO()
        try:
            _Pickler(file, self._tensors).dump(kept)
        except (pickle.PicklingError, AttributeError, TypeError):
            self._pickled = None
        else:
            self._pickled = file.getvalue()

    def copy(self) -> Any:
        if self._pickled is None:
            return copy.deepcopy(self._kept)
        reader, copies = pickle.Unpickler(io.BytesIO(self._pickled)), dict[int, Any]()
        reader.persistent_load = lambda number: copy.deepcopy(self._tensors[number], copies)
        return reader.load()


class _Pickler(pickle.Pickler):
    """Keeps tensors apart, and names them by their numbers."""

    def __init__(self, file: io.BytesIO, tensors: list[torch.Tensor]) -> None:
        super().__init__(file, pickle.HIGHEST_PROTOCOL)
        self._tensors = tensors

    def persistent_id(self, obj: Any) -> int | None:
        if not isinstance(obj, torch.Tensor):
            return None
        self._tensors.append(obj)
        return len(self._tensors) - 1


def _is_tiny(folder: Path) -> bool:
    """A base of the package, or random weights that `tests.tiny_models` or `tests.algorithms.vlm_runs` wrote."""
    return folder.parent == BASES or (
        folder.parent == Path(tempfile.gettempdir()) and folder.name.startswith("retouch-")
    )


def _stamp(folder: Path) -> tuple[tuple[str, int, int], ...]:
    """Names, times and sizes of the files."""
    found = [(path.name, path.stat()) for path in sorted(folder.glob("*"))]
    return tuple((name, stat.st_mtime_ns, stat.st_size) for name, stat in found)
