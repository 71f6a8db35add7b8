"""The endpoints file: addresses of reward servers, written by `retouch reward serve`, read by clients.

    {"endpoints": [{"url": "http://127.0.0.1:8000", "rewards": ["ocr"], "device": "cpu", "pid": 71, "log": "..."}]}

"pid" is the process to signal; only url and rewards are read.
"""

from __future__ import annotations

import json
import socket
from collections.abc import Mapping, Sequence
from pathlib import Path
from tempfile import NamedTemporaryFile
from typing import Any, cast
from urllib.parse import urlsplit

from retouch.errors import ConfigError
from retouch.files import plain_json
from retouch.files.disk import locked
from retouch.rewards.addresses import base_url

_CONNECT_S = 1.0


def write_endpoints(path: Path, endpoints: Sequence[Mapping[str, Any]]) -> None:
    """Write servers to the file. Others in it that still listen stay: several commands can share it. The file is
    replaced by one rename: a reader never finds half of it.

    Raises:
        OSError: it cannot be written.
        ValueError: the existing file is not an endpoints file.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    ours = {entry["url"] for entry in endpoints}
    with locked(path):
        others = [one for one in read_endpoints(path) if one["url"] not in ours and _listens(one["url"])]
        _replace(path, [*others, *endpoints])


def remove_endpoints(path: Path, endpoints: Sequence[Mapping[str, Any]]) -> None:
    """Remove the servers of a process that ends: a run that starts now would wait for them.

    Args:
        endpoints: as that process wrote them. An address is not enough, because a later process may have its port, nor
            is a pid: machines and containers that share the file have the same ones.

    Raises:
        OSError: it cannot be written.
        ValueError: the file is not an endpoints file.
    """
    ours = [(one["url"], one.get("pid")) for one in endpoints]
    with locked(path):
        entries = read_endpoints(path)
        if len(left := [one for one in entries if (one["url"], one.get("pid")) not in ours]) < len(entries):
            _replace(path, left)


def _replace(path: Path, entries: Sequence[Mapping[str, Any]]) -> None:
    with NamedTemporaryFile("w", encoding="utf-8", dir=path.parent, delete=False) as stream:  # follows no link
        json.dump({"endpoints": entries}, stream, indent=2)
    Path(stream.name).chmod(0o644)
    Path(stream.name).replace(path)


def read_endpoints(path: Path) -> list[dict[str, Any]]:
    """The entries of a file; none without a file.

    Raises:
        OSError: it cannot be read.
        ValueError: it is not an endpoints file.
    """
    if not path.exists():
        return []
    if not path.is_file():  # a device or a pipe may never end
        raise ValueError(f"{path} is not a file")
    try:
        entries = cast("dict[str, Any]", plain_json.loads(path.read_text(encoding="utf-8")))["endpoints"]
        return [{**one, "url": str(one["url"]), "rewards": [str(name) for name in one["rewards"]]} for one in entries]
    except (ValueError, KeyError, TypeError):
        raise ValueError(f"{path} is not an endpoints file of `retouch reward serve`") from None


def resolve_urls(url: str | Sequence[str], reward: str, key: str | None = None) -> list[str]:
    """Addresses of a reward entry: as given, or those of an endpoints file that serve the reward.

    Args:
        key: where `url` was given, which begins a message; None: in the run file.

    Raises:
        ConfigError: neither an address nor a readable endpoints file, or no endpoint with the reward.
    """
    key = key or f"rewards.{reward}.url"
    if not isinstance(url, str):
        if not url:
            raise ConfigError(f"{key}: an empty list; give http://host:port, or leave url out")
        return [address for one in url for address in resolve_urls(one, reward, key)]
    try:
        if "://" in url:
            return [base_url(url)]
        Path(url).stat()  # read_endpoints treats a missing file as empty
        served = read_endpoints(Path(url))
        found = [base_url(one["url"]) for one in served if reward in one["rewards"]]
    except OSError as error:
        raise ConfigError(
            f"{key}: given {url!r}: {(error.strerror or str(error)).lower()}; give http://host:port, the endpoints "
            f"file that `retouch reward serve` wrote{', or auto' * key.startswith('rewards.')}"
        ) from None
    except ValueError as error:
        raise ConfigError(f"{key}: {error}") from None
    if not found:
        others = ", ".join(sorted({name for one in served for name in one["rewards"]}))
        but = f", but {others}" if others else ""
        raise ConfigError(
            f"{key}: no server in {url} has {reward}{but}; start one with `retouch reward serve {reward}` (a name of "
            f'your own needs --options \'{{"{reward}": {{"scorer": ...}}}}\'), or call the entry of the run as the '
            "server calls it"
        )
    return found


def _listens(url: str) -> bool:
    """Whether the port accepts connections: it is bound as long as the command runs."""
    parts = urlsplit(url)
    try:
        port = parts.port or (443 if parts.scheme == "https" else 80)
        socket.create_connection((parts.hostname or "", port), _CONNECT_S).close()
    except (OSError, ValueError):
        return False
    return True
