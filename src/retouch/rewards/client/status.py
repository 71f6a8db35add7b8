"""Whether a reward server is ready, asked once and without retries."""

from __future__ import annotations

from typing import Literal, NamedTuple

import httpx

from retouch import plain_json
from retouch.rewards.addresses import is_local, reward_token
from retouch.rewards.foreign import no_cookies, one_line

_MOST_REPLY = 1 << 20  # bytes


class Status(NamedTuple):
    """A server's own word about its scorers. `problem`: why they failed to load, as one line."""

    status: Literal["ready", "loading", "failed", "unknown"]
    problem: str = ""


def readiness(url: str, timeout_s: float) -> Status:
    """The status of /readyz; "unknown" for a reply that is not of the protocol.

    Raises:
        httpx.RequestError: no reply in time.
    """
    token = reward_token()
    headers = {"Accept-Encoding": "identity", **({"Authorization": f"Bearer {token}"} if token else {})}
    options = {"headers": headers, "cookies": no_cookies(), "timeout": timeout_s, "trust_env": not is_local(url)}
    with httpx.Client(**options) as client, client.stream("GET", f"{url}/readyz") as reply:  # type: ignore[arg-type]
        body = bytearray()
        for part in reply.iter_raw():
            body += part
            if len(body) > _MOST_REPLY:
                return Status("unknown")
    try:
        told = plain_json.loads(bytes(body))
    except ValueError:
        return Status("unknown")
    if not isinstance(told, dict) or told.get("status") not in ("ready", "loading", "failed"):
        return Status("unknown")
    return Status(told["status"], one_line(str(told.get("problem") or ""), token))
