"""Addresses and tokens of reward servers and judges. No sockets."""

from __future__ import annotations

import os
import re
import socket
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from urllib.parse import parse_qsl, urlsplit

from retouch.errors import ConfigError

LOOPBACK = ("127.0.0.1", "::1", "localhost")
"""Hosts that need no token and no proxy."""

TOKEN_VARIABLE = "RETOUCH_REWARD_TOKEN"
"""Environment variable with the bearer token of server and client; an argument would show in `ps`."""


def base_url(url: str) -> str:
    """The address of a server without a closing slash.

    Raises:
        ValueError: not http://host[:port] or https://..., or it contains a secret, which would be logged.
    """
    form = "write it as http://host:port"
    try:
        parts = urlsplit(url)
        host, port = parts.hostname, parts.port
    except ValueError:  # a port that is no number, a broken IPv6 address
        raise ValueError(f"{url!r} is not the address of a server; {form}") from None
    if "@" in parts.netloc or parts.query or parts.fragment:
        raise ValueError(f"the address of {host} holds a user, a password or a query; {form}")
    if parts.scheme not in ("http", "https") or not host or port == 0 or any(c.isspace() for c in url):
        raise ValueError(f"{url!r} is not the address of a server; {form}")
    return url.rstrip("/")


_SECRET = re.compile("key|token|secret|password|signature|^sig$|^code$", re.IGNORECASE)


def base_and_query(url: str) -> tuple[str, str]:
    """The address of an endpoint, and the query of each of its requests, like Azure's `api-version=...`; "" if none.

    Raises:
        ValueError: as of `base_url`, or the query has a key, which would be logged.
    """
    before, mark, query = url.partition("?")
    secret = next((name for name, _ in parse_qsl(query) if _SECRET.search(name)), None)
    if secret is not None:
        raise ValueError(f"the query of {urlsplit(before).hostname} holds {secret}; give the key in the environment")
    if mark and not (query and query.isascii() and query.isprintable() and not set(query) & set(' #?"<>')):
        raise ValueError(f"{url!r} has an empty or broken query; write it as ?name=value")
    return base_url(before), query


def is_local(url: str) -> bool:
    """Whether an address is on this machine: its traffic must not pass a proxy of the environment."""
    return urlsplit(url).hostname in LOOPBACK


def is_openai(address: str) -> bool:
    """Whether an address is OpenAI's own, in any of its regions."""
    return (urlsplit(address).hostname or "").endswith("api.openai.com")


def retry_after_s(headers: Mapping[str, str]) -> float:
    """Retry-After of a reply in seconds, which may be given in milliseconds or as a date; 0 for an invalid value."""
    for name, unit in (("retry-after-ms", 1e-3), ("retry-after", 1.0)):
        try:
            return max(0.0, float(headers[name]) * unit)
        except (KeyError, ValueError):
            continue
    try:
        now = parsedate_to_datetime(headers["date"]) if "date" in headers else datetime.now(UTC)
        return max(0.0, (parsedate_to_datetime(headers["retry-after"]) - now).total_seconds())
    except (KeyError, TypeError, ValueError, OverflowError):  # a date without its zone, or of no year that there is
        return 0.0


def usable_token(token: str) -> str:
    """The token without white space around it.

    Raises:
        ValueError: it cannot be part of an HTTP header. The message does not show it.
    """
    token = token.strip()
    if not token or not token.isascii() or not token.isprintable() or " " in token:
        raise ValueError("the token must be printable ASCII without spaces")
    return token


def reward_token() -> str | None:
    """The token of the environment; None without one.

    Raises:
        ConfigError: it cannot be sent; the message does not show it.
    """
    return secret_of(TOKEN_VARIABLE)


def secret_of(variable: str) -> str | None:
    """The token in an environment variable; None without one.

    Raises:
        ConfigError: it cannot be sent; the message does not show it.
    """
    token = os.environ.get(variable, "")
    try:
        return usable_token(token) if token.strip() else None
    except ValueError as error:
        raise ConfigError(f"{variable}: {error}; set it again (its value is not shown)") from None


def name_of(host: str) -> str:
    """Host of a listening address in a URL: this machine's name if it listens on every address."""
    if host in ("0.0.0.0", "::"):
        return socket.gethostname()
    return f"[{host}]" if ":" in host else host


def start_servers(rewards: Sequence[str]) -> str:
    """The remedy if no server of these rewards answers."""
    urls = ", ".join(f"rewards.{name}.url" for name in rewards)
    return f"start the server with `retouch reward serve {','.join(rewards)}`, or set {urls}"
