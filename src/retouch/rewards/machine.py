"""Which processes loopback joins: those of one machine, or of one container of it."""

from __future__ import annotations

import socket
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path

_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


@dataclass(frozen=True)
class Machine:
    """Told apart by both: cloned machines share a name, and the containers of a machine the start of its kernel.

    Attributes:
        name: that it has in the network.
        boot: what the kernel calls its start; "" where it does not say.
    """

    name: str
    boot: str

    def among(self, machines: Collection[Machine]) -> str:
        """What its files have in their names, among those of all machines; nothing where it is the only one."""
        if len(machines) == 1:
            return ""
        alone = sum(one.name == self.name for one in machines) == 1
        return f"-{self.name}" if alone or not self.boot else f"-{self.name}-{self.boot[:8]}"


def this_machine() -> Machine:
    """The one that this process runs on."""
    try:
        boot = _BOOT_ID.read_text(encoding="ascii").strip()
    except OSError:
        boot = ""
    return Machine(socket.gethostname(), boot)
