"""The machine, or container, that a process runs on. Processes of one machine share its disks and loopback."""

from __future__ import annotations

import socket
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path

_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


@dataclass(frozen=True)
class Machine:
    """Both fields identify it: cloned machines share a name, and the containers of a machine its boot id.

    Attributes:
        name: host name.
        boot: boot id of the kernel; "" if there is none.
    """

    name: str
    boot: str

    def among(self, machines: Collection[Machine]) -> str:
        """Suffix of the names of its files that distinguishes it from the other machines; "" if it is the only one."""
        if len(machines) == 1:
            return ""
        alone = sum(one.name == self.name for one in machines) == 1
        return f"-{self.name}" if alone or not self.boot else f"-{self.name}-{self.boot[:8]}"


def this_machine() -> Machine:
    """The machine of this process."""
    try:
        boot = _BOOT_ID.read_text(encoding="ascii").strip()
    except OSError:
        boot = ""
    return Machine(socket.gethostname(), boot)
