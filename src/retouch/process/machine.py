"""The machine, or container, that a process runs on. Processes of one machine share its disks and loopback."""

from __future__ import annotations

import ctypes
import importlib.metadata
import os
import re
import shutil
import socket
import subprocess
import sys
import threading
import time
import zlib
from collections.abc import Collection, Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path

TRIM_S = 10.0
"""Seconds between two returns of a server's freed memory."""

MOST_HANDLES = 65536

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


@cache
def _digest_of(machine: Machine) -> str:
    return f"{zlib.crc32(repr(machine).encode(errors='replace')):08x}"


def process_mark() -> str:
    """Text for the name of a file that this process alone writes: containers that share a disk have the same pids."""
    return f"{_digest_of(this_machine())}-{os.getpid()}"


_CGROUPS, _CGROUP_FILES = Path("/proc/self/cgroup"), Path("/sys/fs/cgroup")


def container_limit() -> int | None:
    """Bytes of memory that the control groups of this process may take together, as of a container or a job; None
    without a limit. The kernel ends what takes more, however much the machine has."""
    try:
        lines = _CGROUPS.read_text(encoding="utf-8").splitlines()
    except OSError:  # macOS
        return None
    limits: list[int] = []
    for line in lines:
        _, kinds, path = line.split(":", 2)
        if kinds and "memory" not in kinds.split(","):
            continue
        root, file = (_CGROUP_FILES / "memory", "memory.limit_in_bytes") if kinds else (_CGROUP_FILES, "memory.max")
        group = root / path.lstrip("/")
        # every group above limits it too; a container has its own at the root, whatever the path outside
        for folder in (group, *(parent for parent in group.parents if parent.is_relative_to(root))):
            with suppress(OSError, ValueError):  # no such file here, or "max"
                limits.append(int((folder / file).read_text(encoding="ascii")))
    return min(limits, default=None)


WAIT_POLICY = "OMP_WAIT_POLICY"
SLEEPING = {WAIT_POLICY: "PASSIVE", "GOMP_SPINCOUNT": "15000"}
"""Variables that torch reads when it is imported. In GNU's runtime a passive thread sleeps at once, and a parallel
region of a tiny network takes less time than its wake-up; with this count it first spins for part of a millisecond.
`benchmarks/busy_machine.py` has measured both."""


def let_threads_sleep() -> bool:
    """Let threads of OpenMP sleep while they wait for work, unless the environment has another `WAIT_POLICY` -> whether
    torch will read it, which it does when it is imported.

    By default they spin, in the runtimes of GNU, LLVM and Intel (which GOMP_SPINCOUNT and KMP_BLOCKTIME may still set):
    on a machine that other programs keep busy, a thread spins while the one that it waits for gets no core. Set on
    machines with a GPU as well: the device is not known before torch is imported, and scorers, several processes and
    their servers share the cores there. The number of threads, and with it every result, stays.
    """
    if "torch" in sys.modules:
        return WAIT_POLICY in os.environ
    if WAIT_POLICY not in os.environ:
        os.environ.update({name: os.environ.get(name, value) for name, value in SLEEPING.items()})
    return True


TF32_VARIABLE = "TORCH_ALLOW_TF32_CUBLAS_OVERRIDE"
"""Set in NVIDIA's images: torch, which reads it when it is imported, rounds products of fp32 to TF32."""


def keep_products_fp32() -> None:
    """Before torch is imported, remove the variable by which scores without a run (`retouch eval --benchmark --images`,
    `retouch reward score`) would differ from those of a run or a server."""
    os.environ.pop(TF32_VARIABLE, None)


def threads_sleep() -> bool:
    """Whether threads should sleep while they wait, also those of libraries without OpenMP."""
    return os.environ.get(WAIT_POLICY, "PASSIVE").strip().upper() != "ACTIVE"


def raise_handle_limit() -> int:
    """Raise the soft limit of open handles to the hard one, at most to `MOST_HANDLES` -> the limit. Shells set the soft
    one to 1,024, for programs of old that cannot use more."""
    import resource  # not on Windows

    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = MOST_HANDLES if hard == resource.RLIM_INFINITY else min(hard, MOST_HANDLES)
    if soft == resource.RLIM_INFINITY or soft >= wanted:
        return wanted
    resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
    return wanted


def return_memory() -> None:
    """Return freed memory to the system: blocks of many sizes leave gaps in the heap of glibc, which grows while the
    memory in use does not. Other C libraries have no such call."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)


def return_memory_regularly() -> None:
    """`return_memory` every `TRIM_S` seconds, in a thread of this process."""
    threading.Thread(target=_return_again, daemon=True, name="memory").start()


def _return_again() -> None:
    while True:
        time.sleep(TRIM_S)
        return_memory()


PEAKS: Mapping[str, float] = {
    "H100 PCIe": 756e12,
    "H100 NVL": 835e12,
    "H100": 989e12,
    "H200 NVL": 835e12,
    "H200": 989e12,
    "A100": 312e12,
    "B200": 2250e12,
    "L40S": 362e12,
}
"""Dense bf16 FLOP/s by a part of the GPU's name, the first that is in it, from NVIDIA's data sheets; a name without
form factor is the SXM variant."""


def peak_of(gpu: str) -> float | None:
    """Peak FLOP/s of a GPU by its name in any case; None if unknown, and of a slice of one (MIG)."""
    name = gpu.lower()
    if " mig " in name:
        return None
    # an RTX A1000 is no A100
    return next((peak for known, peak in PEAKS.items() if re.search(rf"{known.lower()}(?!\d)", name)), None)


def nvidia_smi() -> list[str]:
    """Names of the GPUs that `nvidia-smi` lists."""
    if shutil.which("nvidia-smi") is None:
        return []
    command = ["nvidia-smi", "--query-gpu=name", "--format=csv,noheader"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=30)
    except (OSError, subprocess.TimeoutExpired):
        return []
    return done.stdout.split("\n")[:-1] if done.returncode == 0 else []


def installed_version(package: str, otherwise: str = "missing") -> str:
    """Version of a package; `otherwise` where it is not installed."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return otherwise
