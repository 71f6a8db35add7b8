"""What a process asks of its machine."""

from __future__ import annotations

import ast
import importlib
import inspect
import logging
import os
import subprocess
import sys
import tomllib
from pathlib import Path
from types import FunctionType, SimpleNamespace

import pytest

from retouch import api
from retouch.errors import RetouchError
from retouch.process import machine
from retouch.process.machine import SLEEPING, WAIT_POLICY, let_threads_sleep, threads_sleep
from tests.command_line import retouch
from tests.config.test_imports import LIGHT

REPOSITORY = Path(__file__).parents[1]


def test_freed_memory_is_returned_to_the_system(monkeypatch: pytest.MonkeyPatch) -> None:
    """Again and again; a system without glibc has no such call."""
    trimmed: list[int] = []
    slept: list[float] = []

    def sleep(seconds: float) -> None:
        slept.append(seconds)
        if len(slept) == 3:
            raise InterruptedError

    monkeypatch.setattr(machine.time, "sleep", sleep)
    monkeypatch.setattr(machine.ctypes, "CDLL", lambda name: SimpleNamespace(malloc_trim=trimmed.append))
    with pytest.raises(InterruptedError):
        machine._return_again()
    assert trimmed == [0, 0] and slept == [machine.TRIM_S] * 3
    monkeypatch.setattr(machine.ctypes, "CDLL", lambda name: SimpleNamespace())
    machine.return_memory()


V1 = "4:cpu,cpuacct:/docker/a\n3:memory:/docker/a\n0::/\n"


@pytest.mark.parametrize(
    ("groups", "files", "limit"),
    [
        ("0::/\n", {"memory.max": "max"}, None),
        ("0::/\n", {"memory.max": "4096\n"}, 4096),
        ("0::/job/step\n", {"job/memory.max": "8192", "job/step/memory.max": "max"}, 8192),
        ("0::/job/step\n", {"job/memory.max": "8192", "job/step/memory.max": "16384"}, 8192),
        ("0::/outside\n", {"memory.max": "4096"}, 4096),
        (V1, {"memory/docker/a/memory.limit_in_bytes": "4096", "memory.max": "max"}, 4096),
        (V1, {"memory/memory.limit_in_bytes": "4096"}, 4096),
        (V1, {"cpu/docker/a/memory.limit_in_bytes": "1"}, None),
        (None, {}, None),
    ],
)
def test_the_memory_of_a_container_is_the_least_of_its_groups(
    groups: str | None, files: dict[str, str], limit: int | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of both versions of control groups; a container sees its own group at the root, or at the path outside of it."""
    for name, content in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(content, "ascii")
    if groups is not None:
        (tmp_path / "cgroup").write_text(groups, "utf-8")
    monkeypatch.setattr(machine, "_CGROUPS", tmp_path / "cgroup")
    monkeypatch.setattr(machine, "_CGROUP_FILES", tmp_path)
    assert machine.container_limit() == limit


ENTRY = """
import os, sys
import retouch.cli as cli
assert "torch" not in sys.modules  # its OpenMP reads the variable when it is loaded
cli._called = lambda name: lambda **_: print(os.environ["OMP_WAIT_POLICY"], os.environ.get("GOMP_SPINCOUNT"))
cli.main()
"""


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({}, "PASSIVE 15000"),
        ({WAIT_POLICY: "ACTIVE"}, "ACTIVE None"),
        ({WAIT_POLICY: "PASSIVE"}, "PASSIVE None"),
        ({"GOMP_SPINCOUNT": "7"}, "PASSIVE 7"),
    ],
)
def test_threads_sleep_while_they_wait_unless_the_user_says_otherwise(given: dict[str, str], expected: str) -> None:
    environment = {name: value for name, value in os.environ.items() if name not in SLEEPING} | given
    done = subprocess.run([sys.executable, "-c", ENTRY], env=environment, capture_output=True, text=True, check=False)
    assert (done.stdout, done.stderr, done.returncode) == (f"{expected}\n", "", 0)


def test_a_command_rounds_no_product_of_fp32(monkeypatch: pytest.MonkeyPatch) -> None:
    """In NVIDIA's images those of scores without a run were TF32: only a run and a server chose the precision."""
    monkeypatch.setenv("TORCH_ALLOW_TF32_CUBLAS_OVERRIDE", "1")
    assert retouch("eval", "--help").code == 0
    assert "TORCH_ALLOW_TF32_CUBLAS_OVERRIDE" not in os.environ


def test_after_torch_the_policy_cannot_be_set(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(WAIT_POLICY, raising=False)
    monkeypatch.setitem(sys.modules, "torch", SimpleNamespace())
    assert not let_threads_sleep() and WAIT_POLICY not in os.environ
    monkeypatch.setenv(WAIT_POLICY, "passive")
    assert let_threads_sleep() and threads_sleep()
    monkeypatch.setenv(WAIT_POLICY, "active")
    assert let_threads_sleep() and not threads_sleep()


def sets_the_policy(function: FunctionType, depth: int = 2) -> bool:
    """Whether a function calls `let_threads_sleep`, itself or in one that it calls."""
    nodes = ast.walk(ast.parse(inspect.getsource(function)))
    called = [node.func.id for node in nodes if isinstance(node, ast.Call) and isinstance(node.func, ast.Name)]
    others = [one for name in called if isinstance(one := function.__globals__.get(name), FunctionType)]
    return let_threads_sleep in others or (depth > 0 and any(sets_the_policy(one, depth - 1) for one in others))


def test_every_entry_point_sets_the_policy_before_torch_is_imported() -> None:
    """Console scripts, `python -m` and examples; `test_importing_them_imports_no_torch` imports them. GenEval's
    detector, which has nothing of this package, has a test of its own."""
    scripts = tomllib.loads((REPOSITORY / "pyproject.toml").read_text(encoding="utf-8"))["project"]["scripts"].values()
    modules = {script.partition(":")[0] for script in scripts}
    for folder in ("src", "examples"):
        for file in (REPOSITORY / folder).rglob("*.py"):
            if 'if __name__ == "__main__":' in file.read_text(encoding="utf-8"):
                place = file.relative_to(REPOSITORY).with_suffix("")
                modules.add(".".join(place.parts[place.parts[0] == "src" :]))
    assert len(modules) == 6 and modules - {"retouch.__main__"} <= {*LIGHT}
    for name in modules - {"examples.geneval_detector"}:
        assert sets_the_policy(importlib.import_module(name).main), name


@pytest.mark.parametrize("function", ["train", "load"])
def test_a_program_that_imported_torch_first_is_told_once(
    function: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    caplog.set_level(logging.INFO, "retouch")
    monkeypatch.delenv(WAIT_POLICY, raising=False)
    monkeypatch.setitem(sys.modules, "torch", sys.modules.get("torch", SimpleNamespace()))
    api._let_threads_sleep.cache_clear()
    for _ in range(2):
        with pytest.raises(RetouchError):
            getattr(api, function)(tmp_path / "none")
    assert [record.message[:40] for record in caplog.records] == ["torch was imported before retouch, and it"[:40]]
    api._let_threads_sleep.cache_clear()


SHARED = """
import os, sys, time
import retouch.cli as cli
def work(**_):
    import torch
    torch.set_num_threads(2)
    a, b = torch.ones(1 << 17), torch.ones(1 << 17)
    a + b  # its threads exist from here on
    for thread in os.listdir("/proc/self/task"):
        os.sched_setaffinity(int(thread), {min(os.sched_getaffinity(0))})
    started = time.process_time()
    for _ in range(100):
        a + b
    print(time.process_time() - started)
cli._called = lambda name: work
cli.main()
"""
"""Two threads that share one core, as on a machine that other programs keep busy."""


@pytest.mark.full
def test_two_threads_on_one_core_do_not_spin() -> None:
    seconds = {}
    for policy in ("PASSIVE", "ACTIVE"):
        environment = {n: v for n, v in os.environ.items() if n not in (*SLEEPING, "OMP_NUM_THREADS")}
        environment |= {WAIT_POLICY: policy} if policy == "ACTIVE" else {}
        command = [sys.executable, "-c", SHARED]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
        seconds[policy] = float(done.stdout)
    assert seconds["PASSIVE"] < seconds["ACTIVE"] / 4, seconds
