"""Data at a commit of a data set on the Hugging Face hub, or of a repository on GitHub, in place of a path.

    hf://datasets/OWNER/NAME@COMMIT/FILE      a file
    hf://datasets/OWNER/NAME@COMMIT/FOLDER    a folder, or without FOLDER the whole data set
    github://OWNER/NAME@COMMIT/FILE           a file

A commit is 40 hexadecimal digits: a branch or a tag can move, and a resumed run would read other data. Files are
downloaded once, those of the hub into the cache of huggingface_hub. httpx and huggingface_hub (extra `train`) are
imported when something is downloaded. No torch.
"""

from __future__ import annotations

import importlib
import logging
import os
import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path, PurePosixPath
from typing import Any, Literal, TypeVar
from urllib.parse import quote

from retouch.errors import DataError
from retouch.files.disk import cache_folder, expanded, on_disk
from retouch.files.hub import hub_problem
from retouch.process.replacing import beside

logger = logging.getLogger(__name__)

T = TypeVar("T")

GITHUB = "https://raw.githubusercontent.com"
"""Server of the files of a commit, unless RETOUCH_GITHUB_RAW names a mirror."""

LARGEST = 256 * 2**20
"""Bytes of a file from GitHub, which takes no larger ones than 100 MB without LFS."""

TIMEOUT_S = 30.0

# `pathlib` makes one slash of two
_SCHEME = re.compile(r"(hf|github):/")
_SHAPE = re.compile(
    r"(hf:/{1,2}datasets|github:/?)/(?P<repository>[\w-][\w.-]*/[\w-][\w.-]*)"
    r"@(?P<commit>[0-9a-f]{40})(/(?P<place>.*))?"
)
_LFS = b"version https://git-lfs"


@dataclass(frozen=True)
class Pinned:
    """A file or folder at a commit.

    Attributes:
        repository: OWNER/NAME.
        place: path in the repository; "" is all of it.
    """

    host: Literal["hf", "github"]
    repository: str
    commit: str
    place: str

    def __str__(self) -> str:
        scheme = "hf://datasets" if self.host == "hf" else "github:/"
        return f"{scheme}/{self.repository}@{self.commit}" + (f"/{self.place}" if self.place else "")

    @property
    def is_folder(self) -> bool:
        """Whether the place has no file name with a suffix."""
        return self.place.endswith("/") or not PurePosixPath(self.place).suffix


def names_a_commit(path: str) -> bool:
    """Whether a path is meant as data at a commit, complete or not."""
    return _SCHEME.match(path) is not None


def pinned(path: str) -> Pinned | None:
    """The data at a commit that a path names; None for a path on this machine and for an id of the hub.

    Raises:
        ValueError: a path of this kind that is incomplete.
    """
    scheme = _SCHEME.match(path)
    if scheme is None:
        return None
    found = _SHAPE.fullmatch(path)
    host: Literal["hf", "github"] = "hf" if scheme[1] == "hf" else "github"
    place = (found and found["place"]) or ""
    if found is None or ".." in PurePosixPath(place).parts or place.startswith("/"):
        expected = "hf://datasets/OWNER/NAME@COMMIT/FILE" if host == "hf" else "github://OWNER/NAME@COMMIT/FILE"
        raise ValueError(
            f"given {path!r}; expected {expected} with a commit of 40 hexadecimal digits, because branches and tags "
            "can move; write the commit of the history of the repository, or the path of a downloaded file"
        )
    data = Pinned(host, found["repository"], found["commit"], place)
    if host == "github" and data.is_folder:
        raise ValueError(
            f"given {path!r}, which names no file; write a file of the commit, or clone the repository and give the "
            "path of its folder"
        )
    return data


def local_path(path: str, key: str = "data.path") -> Path:
    """Where data is on this machine: a path with `~` expanded, or the download of data at a commit.

    Args:
        key: the key of the run file that names it, for messages.

    Raises:
        DataError: there is no such file at the commit, or it cannot be downloaded.
    """
    try:
        data = pinned(path)
    except ValueError as error:
        raise DataError(f"{key}: {error}") from None
    return on_disk(expanded(path)) if data is None else resolved(data, key)


def cached_path(path: str) -> Path | None:
    """Where data is on this machine, as `local_path`; None: it is not, or was not downloaded completely. Nothing is
    downloaded."""
    data = pinned(path)
    if data is None:
        place = on_disk(expanded(path))
    elif data.host == "github":
        place = _github_file(data)
    else:
        place = _cached_of_the_hub(data)
    return place if place is not None and place.exists() else None


@cache
def resolved(data: Pinned, key: str) -> Path:
    """Where data at a commit is on this machine, downloaded if it was not. Each process asks once."""
    return _from_hub(data, key) if data.host == "hf" else _from_github(data, key)


def _from_hub(data: Pinned, key: str) -> Path:
    """A file or a folder in the cache of huggingface_hub; without a hub, what was downloaded before."""
    library = import_library("huggingface_hub", str(data), "train", key)
    if data.is_folder:
        return _folder_of_the_hub(library, data, key)
    of = _of_the_commit(data)
    cached = library.try_to_load_from_cache(data.repository, data.place, **of)
    if isinstance(cached, str):
        return Path(cached)
    problem = hub_problem()
    if problem is not None:
        raise DataError(
            f"{key}: given {str(data)!r}, which was not downloaded, and the hub cannot be reached ({problem}); set "
            f"{key} to a local file, or give this machine access to the hub"
        )
    read = partial(library.hf_hub_download, data.repository, data.place, **of)
    return Path(of_the_hub(read, f"{data} cannot be loaded", key))


def _folder_of_the_hub(library: Any, data: Pinned, key: str) -> Path:
    read = partial(_snapshot, library, data, offline=hub_problem() is not None)
    folder = of_the_hub(read, f"{data} cannot be loaded", key)
    if not folder.is_dir():
        raise DataError(f"{key}: given {str(data)!r}; the commit has no such folder; write one of its folders or files")
    if not _is_listed(library, data):
        logger.warning(
            "%s: %s: the cache holds some of its files, perhaps not all, because only single files of this commit were "
            "downloaded; load it once where the hub can be reached",
            key,
            data,
        )
    return folder


def _is_listed(library: Any, data: Pinned) -> bool:
    """Whether huggingface_hub has the list of the files of a commit, without which it returns a folder of the cache
    with whatever is there; versions before 2 keep no such lists."""
    listed = getattr(library, "get_cached_repo_tree", None)
    try:
        return listed is None or bool(listed(data.repository, **_of_the_commit(data)))
    except Exception:  # CachedRepoTreeNotFoundError, which not every version has
        return False


def _cached_of_the_hub(data: Pinned) -> Path | None:
    """The place in the cache of huggingface_hub; None: not there, or without the library."""
    try:
        library = importlib.import_module("huggingface_hub")
        if data.is_folder:
            return _snapshot(library, data, offline=True) if _is_listed(library, data) else None
        cached = library.try_to_load_from_cache(data.repository, data.place, **_of_the_commit(data))
    except (ImportError, OSError, ValueError):  # of huggingface_hub: not there, or not all of it
        return None
    return Path(cached) if isinstance(cached, str) else None


def _snapshot(library: Any, data: Pinned, *, offline: bool) -> Path:
    """A folder at a commit, which there need not be."""
    place = data.place.strip("/")
    patterns = [f"{place}/*"] if place else None
    of = _of_the_commit(data)
    root = library.snapshot_download(data.repository, local_files_only=offline, allow_patterns=patterns, **of)
    return Path(root) / place


def _of_the_commit(data: Pinned) -> dict[str, Any]:
    """Arguments of huggingface_hub."""
    return {"repo_type": "dataset", "revision": data.commit}


def _github_file(data: Pinned) -> Path | None:
    """The place of a file in the cache of this package, downloaded or not; None without a home directory."""
    cached = cache_folder()
    return cached and cached / "data" / "github" / data.repository / data.commit / data.place


def _from_github(data: Pinned, key: str) -> Path:
    """A file in the cache of this package."""
    file = _github_file(data)
    if file is None:
        raise DataError(f"{key}: given {str(data)!r}, but there is no home directory to keep it in; set XDG_CACHE_HOME")
    if not file.is_file():
        content = _downloaded(data, key)
        file.parent.mkdir(parents=True, exist_ok=True)
        with beside(file) as written:
            written.write_bytes(content)
            written.replace(file)
    return file


def _downloaded(data: Pinned, key: str) -> bytes:
    """The bytes of a file on GitHub."""
    import httpx

    server = os.environ.get("RETOUCH_GITHUB_RAW", GITHUB).rstrip("/")
    url = f"{server}/{data.repository}/{data.commit}/{quote(data.place)}"
    content = bytearray()
    try:
        with httpx.stream("GET", url, timeout=TIMEOUT_S, follow_redirects=True) as reply:
            reply.raise_for_status()
            for part in reply.iter_bytes():
                content += part
                if len(content) > LARGEST:
                    raise DataError(f"{key}: {data}: more than {LARGEST >> 20} MiB; download it, and give its path")
    except (httpx.HTTPError, httpx.InvalidURL, OSError) as error:
        first = next(iter(str(error).splitlines()), type(error).__name__)
        raise DataError(
            f"{key}: given {str(data)!r}, which cannot be downloaded: {first}; set {key} to a file of the commit, or "
            "to a downloaded one"
        ) from None
    if content.startswith(_LFS):
        raise DataError(f"{key}: {data} is a pointer to a file in Git LFS; clone the repository, and give the path")
    return bytes(content)


def of_the_hub(read: Callable[[], T], problem: str, key: str = "data.path") -> T:
    """The result of `read`, which loads from the hub.

    Raises:
        DataError: the problem, and its reason.
    """
    try:
        return read()
    except Exception as error:  # of many libraries: no network, no such data set, a gate
        lines = [line.strip() for line in str(error).splitlines() if line.strip()] or [type(error).__name__]
        reason = " ".join(lines[: 2 if "Client Error" in lines[0] else 1])  # huggingface_hub: the status, then why
        raise DataError(f"{key}: {problem} from the hub: {reason}") from None


def import_library(name: str, what: str, extra: str = "vlm", key: str = "data.path") -> Any:
    """A library that only some data needs.

    Raises:
        DataError: it is not installed.
    """
    try:
        return importlib.import_module(name)
    except ImportError:
        raise DataError(f'{key}: {what} needs {name.partition(".")[0]}; pip install "retouch[{extra}]"') from None
