"""What to do where a reward server does not answer, as every command says it."""

from __future__ import annotations

from collections.abc import Sequence


def start_servers(rewards: Sequence[str]) -> str:
    urls = ", ".join(f"rewards.{name}.url" for name in rewards)
    return f"start the server with `retouch reward serve {','.join(rewards)}`, or set {urls}"
