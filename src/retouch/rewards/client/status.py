"""Whether a reward server is ready, asked once and without retries."""

from __future__ import annotations

import time
from typing import Any, Literal, NamedTuple, cast

import httpx

from retouch.files import plain_json
from retouch.rewards.addresses import is_local, reward_token
from retouch.rewards.foreign import BrokenReply, fetch, no_cookies, one_line


class Status(NamedTuple):
    """A server's own word about its scorers. `problem`: why they failed to load, as one line."""

    status: Literal["ready", "loading", "failed", "unknown"]
    problem: str = ""


def status_of(body: bytes, token: str | None) -> Status:
    """The status in a reply of /readyz; "unknown" for one that is not of the protocol."""
    try:
        value: object = plain_json.loads(body)
    except ValueError:
        return Status("unknown")
    told = cast("dict[str, Any]", value) if isinstance(value, dict) else {}
    if told.get("status") not in ("ready", "loading", "failed"):
        return Status("unknown")
    return Status(told["status"], one_line(str(told.get("problem") or ""), token))


def readiness(url: str, timeout_s: float, *, direct: bool = False) -> Status:
    """The status of /readyz.

    Args:
        timeout_s: for the whole reply.
        direct: never through a proxy of the environment, which gets the token; so for addresses on loopback.

    Raises:
        httpx.RequestError, TimeoutError: no reply in time.
    """
    token = reward_token()
    direct = direct or is_local(url)
    with httpx.Client(
        headers={"Authorization": f"Bearer {token}"} if token else {},
        cookies=no_cookies(),
        trust_env=not direct,
        verify=not (direct and url.startswith("http://")),  # no TLS there: certificates take .1 s to load
    ) as client:
        try:
            return status_of(fetch(client, "GET", f"{url}/readyz", time.monotonic() + timeout_s).body, token)
        except BrokenReply:
            return Status("unknown")
