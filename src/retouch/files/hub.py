"""The Hugging Face hub: whether an id is on this machine already, and whether the hub can be reached.

huggingface_hub repeats every request to a hub that cannot be reached six times, with pauses, for each file. One request
decides here instead: without a hub, the libraries are switched to their offline mode and use the downloaded files, and
an id that was never downloaded is an error. A refused connection or an unknown host name ends the request at once; a
slow hub has as long as huggingface_hub gives it, because the processes of a run must not decide differently. No torch.
"""

from __future__ import annotations

import importlib.util
import os
import re
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, TypeVar

from retouch.config.errors import ConfigError

Kind = Literal["models", "datasets"]

Loaded = TypeVar("Loaded")

ANSWER_S = 10.0
"""Seconds that the hub may take to answer, unless HF_HUB_ETAG_TIMEOUT is set: huggingface_hub's name and default."""

RETRY_S = 60.0
"""Seconds after which a hub that could not be reached is tried again."""

_OFFLINE = ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE")


def is_hub_id(path: str) -> bool:
    """Whether a path means a repository of the hub: owner/name, and no such file or folder."""
    return re.fullmatch(r"[\w-][\w.-]*/[\w.-]+", path) is not None and not Path(path).exists()


def looks_local(path: str) -> bool:
    """Whether a path can be no id of the hub: it names a place, or has not the form owner/name."""
    return path.startswith((".", "/", "~")) or path.count("/") != 1


def require_hub(key: str, path: str, kind: Kind = "models") -> None:
    """Refuse an id of the hub that is not on this machine where the hub cannot be reached; other paths pass.

    Args:
        key: the key of the run file, or the option, that named it.

    Raises:
        ConfigError: neither downloaded nor to be downloaded.
    """
    if not is_hub_id(path) or importlib.util.find_spec("huggingface_hub") is None:
        return  # the library that needs huggingface_hub reports the missing extra
    problem = hub_problem()
    if problem is not None and not _is_downloaded(path, kind):
        raise ConfigError(
            f"{key}: given {path!r}; no such folder, and the hub cannot be reached ({problem}); set {key} to a local "
            "folder, or give this machine access to the hub"
        )


def folder_offline(path: str) -> str:
    """The snapshot of a hub id in the cache where the hub cannot be reached; any other path as it is.

    diffusers 0.42 asks the hub which files there are before it reads weights of several files, in its offline mode too.
    """
    if not is_hub_id(path) or hub_problem() is None:
        return path
    return snapshot(path) or path


def snapshot(hub_id: str) -> str | None:
    """Folder of the newest commit of a hub id in the cache; None without one."""
    from huggingface_hub import snapshot_download

    try:
        return snapshot_download(hub_id, local_files_only=True)
    except (OSError, ValueError):
        return None


def cached(hub_id: str, file: str) -> Path | None:
    """A downloaded file of a hub id; None for another path, and where it is not in the cache."""
    if not is_hub_id(hub_id) or importlib.util.find_spec("huggingface_hub") is None:
        return None
    from huggingface_hub import try_to_load_from_cache

    with suppress(ValueError):  # a name that the hub does not allow
        found = try_to_load_from_cache(hub_id, file)
        return Path(found) if isinstance(found, str) else None
    return None


def refusal(error: BaseException, hub_id: str) -> str | None:
    """Why the hub does not give a repository, and the remedy; None for another error.

    diffusers reports a gated repository as an id that is not valid; the hub's own error is the cause of the cause.
    """
    kinds = set[str]()
    seen: BaseException | None = error
    while seen is not None:
        kinds |= {kind.__name__ for kind in type(seen).__mro__}
        seen = seen.__cause__ or seen.__context__
    if "GatedRepoError" in kinds:
        return (
            f"the hub gives {hub_id} only to accounts that accepted its terms; accept them on its page, and set "
            "HF_TOKEN to a token of that account"
        )
    if "RevisionNotFoundError" in kinds:
        return f"{hub_id} has no revision main on the hub; give another id, or a folder with its files"
    if "RepositoryNotFoundError" in kinds:
        return f"the hub has no {hub_id}, or it is private; check the id, and set HF_TOKEN for a private one"
    return None


def read_variant(read: Callable[..., Loaded], path: str, subfolder: str | None, variant: str | None) -> Loaded:
    """`read` with the weight files of a variant (`model.weights_variant`) where a part has them, else with the plain
    ones."""
    folder = Path(path) / (subfolder or "")
    is_here = Path(path).is_dir()
    if variant is None or (is_here and not any(folder.glob(f"*.{variant}[.-]*"))):
        return read()
    try:
        return read(variant=variant)
    except OSError:
        if is_here:
            raise
        return read()  # a part of a hub id without such files


def variant_hint(path: str, subfolder: str | None, key: str = "model.weights_variant") -> str:
    """The remedy where a local folder has the weights of a variant alone; "" elsewhere.

    Args:
        key: the option that names the variant.
    """
    names = [file.name for file in (Path(path) / (subfolder or "")).glob("*.safetensors")]
    found = [re.fullmatch(r"\w+\.(\w+)(-\d+-of-\d+)?\.safetensors", name) for name in names]
    if not names or not all(found) or found[0] is None:
        return ""
    return f"; its weights are of a variant: set {key}={found[0][1]}"


@dataclass
class _Hub:
    """The result of the last request.

    Attributes:
        answered: the hub answered in this process.
        problem: why it could not be reached; the libraries are offline since then.
        retry_at: time of the monotonic clock at which `problem` expires.
    """

    answered: bool = False
    problem: str | None = None
    retry_at: float = 0.0


_hub = _Hub()


def hub_problem() -> str | None:
    """Why the hub cannot be reached; None where it can. Without a hub, this process and those that it starts go
    offline; an answer holds for the life of the process, a failure for RETRY_S."""
    if _hub.problem is not None and time.monotonic() < _hub.retry_at:
        return _hub.problem
    if _hub.problem is None and any(os.environ.get(n, "").upper() in ("1", "ON", "YES", "TRUE") for n in _OFFLINE):
        return "HF_HUB_OFFLINE is set"
    if not _hub.answered:
        endpoint = os.environ.get("HF_ENDPOINT", "https://huggingface.co").rstrip("/")
        problem = _probe(endpoint, float(os.environ.get("HF_HUB_ETAG_TIMEOUT", ANSWER_S)))
        if (problem is None) != (_hub.problem is None):
            _set_offline(problem is not None)
        _hub.answered = problem is None
        _hub.problem = problem and f"{endpoint}: {problem}"
        _hub.retry_at = time.monotonic() + RETRY_S
    return _hub.problem


def _probe(endpoint: str, timeout_s: float) -> str | None:
    """One request -> what went wrong; None for any answer. In a thread, because no timeout bounds the name lookup."""
    import httpx

    told: list[str | None] = []

    def ask() -> None:
        try:
            httpx.head(endpoint, timeout=timeout_s)
            told.append(None)
        except (httpx.HTTPError, httpx.InvalidURL, OSError) as error:
            told.append(str(error) or type(error).__name__)

    thread = threading.Thread(target=ask, name="hub-probe", daemon=True)
    thread.start()
    thread.join(timeout_s)
    silent = f"no answer within {timeout_s:g} s; HF_HUB_ETAG_TIMEOUT sets another limit"
    return told[0] if told else silent


def _set_offline(offline: bool) -> None:
    """By the environment for libraries and processes to come, and in those that have read it already."""
    os.environ["HF_HUB_OFFLINE"] = "1" if offline else "0"
    for name in ("huggingface_hub.constants", "datasets.config"):
        if name in sys.modules:
            settings: Any = sys.modules[name]
            settings.HF_HUB_OFFLINE = offline


def _is_downloaded(hub_id: str, kind: Kind) -> bool:
    """Whether any file of it is in the cache; which ones are missing, the library that opens them reports."""
    from huggingface_hub import constants

    folder = Path(constants.HF_HUB_CACHE) / f"{kind}--{hub_id.replace('/', '--')}" / "snapshots"
    tables = Path(os.environ.get("HF_DATASETS_CACHE", Path(constants.HF_HOME) / "datasets"))
    prepared = kind == "datasets" and (tables / hub_id.replace("/", "___")).is_dir()
    return prepared or (folder.is_dir() and any(folder.iterdir()))
