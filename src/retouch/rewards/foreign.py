"""Text and HTTP replies of other programs: printable, and within bounds."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from retouch.errors import ConfigError, first_line
from retouch.files import plain_json

if TYPE_CHECKING:
    from http.cookiejar import CookieJar

    import httpx

MOST_CHARACTERS = 1000
"""Maximum length of another program's text in a message."""

MOST_BYTES = 4 << 20
"""Maximum length of a reply of a judge or a detector."""

CUT = " ..."
"""End of a text that was cut."""

_READ = 65536  # characters of which the secret is removed before the text is cut, or a part of it would remain


def no_cookies() -> CookieJar:
    """A jar that stays empty: a server could set more with every reply, and each request would send them all."""
    from http.cookiejar import CookieJar, DefaultCookiePolicy  # loading a run file needs none

    return CookieJar(DefaultCookiePolicy(allowed_domains=[]))


@contextmanager
def reading_environment() -> Iterator[None]:
    """Inside, a client of httpx is made, which takes proxies and certificates from the environment.

    Raises:
        ConfigError: it cannot use them.
    """
    import httpx

    try:
        yield
    except (ImportError, OSError, ValueError, httpx.InvalidURL) as error:
        raise ConfigError(
            f"environment: httpx cannot use its proxies or certificates ({type(error).__name__}: {first_line(error)}); "
            "correct or unset HTTP_PROXY, HTTPS_PROXY, ALL_PROXY, NO_PROXY (or in lower case), SSL_CERT_FILE and "
            "SSL_CERT_DIR"
        ) from None


class BrokenReply(Exception):
    """A reply that is compressed or too long."""


@dataclass(frozen=True)
class Reply:
    """A whole reply."""

    status: int
    headers: Mapping[str, str]
    body: bytes

    def json(self) -> Any:
        """Raises:
        ValueError: not JSON.
        """
        return plain_json.loads(self.body)

    def start(self, most: int = 200) -> str:
        """The first bytes as text, for a message."""
        return self.body[:most].decode("utf-8", "replace")


def one_line(text: str, secret: str | None = None, most: int = MOST_CHARACTERS) -> str:
    """Foreign text for a terminal and a log: one line of at most `most` characters, in which spaces replace control
    characters and halves of surrogate pairs, without the secret, which a server may echo."""
    plain = "".join(c if c.isprintable() else " " for c in text[:_READ])
    plain = plain.replace(secret, "***") if secret else plain
    return plain if len(plain) <= most else plain[: max(0, most - len(CUT))] + CUT


CONNECT_S = 5.0
"""Maximum seconds until a server accepts a connection: an address that drops packets is noticed early."""


_batch_ends = math.inf


@contextmanager
def questions_end(deadline: float) -> Iterator[None]:
    """Inside, no question of this process to another program goes on after `deadline`: a worker scores one batch at a
    time, and is ended if that is late."""
    global _batch_ends
    _batch_ends = deadline
    try:
        yield
    finally:
        _batch_ends = math.inf


def deadline_of(timeout_s: float) -> float:
    """Deadline of a question that begins now, on the clock of `time.monotonic`: at most that of `questions_end`."""
    return min(time.monotonic() + timeout_s, _batch_ends)


def fetch(client: httpx.Client, method: str, url: str, deadline: float, body: Mapping[str, Any] | None = None) -> Reply:
    """One reply of at most `MOST_BYTES`.

    Args:
        deadline: on the clock of `time.monotonic`, for the whole reply: a server that sends one byte of its body per
            second does not hold the caller. A connection is accepted within `CONNECT_S`.

    Raises:
        BrokenReply: compressed (a few bytes could become gigabytes), or longer.
        TimeoutError: no whole reply before the deadline.
        httpx.RequestError: no whole reply.
    """
    left = max(0.1, deadline - time.monotonic())
    until = time.monotonic() + left
    headers = {"Accept-Encoding": "identity"}
    with client.stream(method, url, json=body, timeout=_timeout(left), headers=headers) as response:
        coding = response.headers.get("content-encoding", "identity")
        if coding.strip().lower() != "identity" and response.status_code != 200:
            return Reply(response.status_code, response.headers, b"")  # the status of a proxy's page suffices
        if coding.strip().lower() != "identity":
            raise BrokenReply(f"the reply is compressed ({coding[:20]}), which was not requested")
        received = bytearray()
        for chunk in response.iter_bytes():  # as they came: nothing is decompressed
            received += chunk
            if len(received) > MOST_BYTES:
                raise BrokenReply(f"the reply is over {MOST_BYTES} bytes")
            if time.monotonic() > until:
                raise TimeoutError(f"no whole reply within {left:.1f} s")
        return Reply(response.status_code, response.headers, bytes(received))


def _timeout(seconds: float) -> httpx.Timeout:
    import httpx

    return httpx.Timeout(seconds, connect=min(seconds, CONNECT_S))
