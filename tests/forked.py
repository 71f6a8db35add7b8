"""Python programs as forks of a process in which torch and the package are imported already.

A program that imports them takes eight seconds of processor time before its first line; a fork takes a fraction of
one. Everything else is as in a new interpreter: a process of its own with its own arguments, environment, working
directory and output, which can be killed. A test whose subject is the start of a process uses `subprocess`.

`python -m tests.forked MODULE ...` is a launcher whose processes are forks of it. Where `share_server` was called, the
workers of pytest-xdist are forks, too (`WORKER`).
"""

from __future__ import annotations

import atexit
import contextlib
import importlib
import multiprocessing
import os
import runpy
import shlex
import signal
import subprocess
import sys
import tempfile
import time
import types
import weakref
from collections.abc import Mapping, Sequence
from multiprocessing import forkserver, reduction
from pathlib import Path
from typing import Any
from unittest import mock

PRELOADED = "tests.forked_imports"
"""Imports what the programs need; the server does so once."""


cpu_seconds = 0.0
"""Processor seconds of the programs that ended without being killed: the server waits for them, not this process."""

OF_THE_REPOSITORY = ("retouch", "retouch_bench", "retouch_glyphs", "tests", "tools")
LAUNCHERS = ("torch.distributed.run", "accelerate.commands.launch")


def run(
    command: Sequence[str],
    *,
    env: Mapping[str, str] | None = None,
    cwd: str | Path | None = None,
    timeout: float = 600,
    check: bool = False,
    anew: bool = False,
) -> subprocess.CompletedProcess[str]:
    """What `subprocess.run([sys.executable, ...], capture_output=True, text=True)` does.

    `command` is `sys.executable` followed by `-c CODE`, `-m MODULE` or a file, and arguments. One of `LAUNCHERS` starts
    its processes as forks, too. With `anew`, the program imports what is of this repository again, for example because
    PYTHONPATH holds plug-ins of the package, or another copy of it.

    Raises:
        subprocess.TimeoutExpired: the program and what it started are killed.
        subprocess.CalledProcessError: with `check`, it ended with another code than 0.
    """
    if command[0] != sys.executable:
        raise ValueError(f"not this interpreter: {command[0]}")
    context = multiprocessing.get_context("forkserver")
    _ensure_server()
    with tempfile.TemporaryDirectory(prefix="retouch-output-") as folder:
        files = [Path(folder, name) for name in ("out", "err", "cpu")]
        environment = dict(os.environ if env is None else env)
        options = (list(command[1:]), environment, str(cwd or Path.cwd()), [str(file) for file in files], anew)
        process = context.Process(target=_begin, args=options)
        process.start()
        process.join(timeout)
        late = process.exitcode is None
        if late:
            _kill(process.pid)
            process.join()
        out, err = (file.read_text(encoding="utf-8", errors="replace") for file in files[:2])
        if files[2].exists():
            global cpu_seconds
            cpu_seconds += float(files[2].read_text(encoding="utf-8") or 0)
        code = process.exitcode
        process.close()
    if late:
        raise subprocess.TimeoutExpired(list(command), timeout, out, err)
    done = subprocess.CompletedProcess(list(command), int(code or 0), out, err)
    if check:
        done.check_returncode()
    return done


SHARED = "RETOUCH_TEST_FORK_SERVER"
"""Variable with the address of the server that the processes of pytest share."""


def share_server() -> None:
    """Start a server for this process and those that it starts: it imports once for all of them."""
    _ensure_server()
    server: Any = forkserver._forkserver  # pyright: ignore[reportPrivateUsage,reportAttributeAccessIssue]
    if sys.version_info < (3, 14):  # later ones have a secret
        os.environ[SHARED] = server._forkserver_address


def _ensure_server() -> None:
    """The server belongs to this process, starts on first use, and ends with this process; or it is a shared one."""
    if address := os.environ.get(SHARED):
        server: Any = forkserver._forkserver  # pyright: ignore[reportPrivateUsage,reportAttributeAccessIssue]
        if server._forkserver_pid is None:  # of another process; a worker that is a fork knows its address, no more
            server._forkserver_address, server.ensure_running = address, lambda: None
            if server._forkserver_alive_fd is None:
                server._forkserver_alive_fd = os.open(os.devnull, os.O_RDONLY)
        return
    path = os.pathsep.join([str(Path(__file__).parents[1]), *filter(None, [os.environ.get("PYTHONPATH")])])
    with mock.patch.dict(os.environ, {"PYTHONPATH": path, "OMP_NUM_THREADS": "1"}):
        forkserver.set_forkserver_preload([PRELOADED])
        forkserver.ensure_running()


_START = (
    f"import sys; sys.path.insert(0, {str(Path(__file__).parents[1])!r}); from tests import forked; forked.worker()"
)
WORKER = shlex.join([sys.executable, "-c", _START])
"""What execnet starts as an interpreter: a fork of the shared server stands in for it."""


def worker() -> None:
    """Start the interpreter of a worker of pytest as a fork with the streams of this process, and end as it ends."""
    _ensure_server()
    options = (sys.argv[1:], dict(os.environ), [_Stream(number) for number in range(3)])
    process = multiprocessing.get_context("forkserver").Process(target=_begin_worker, args=options)
    process.start()
    process.join()
    sys.exit(process.exitcode)


class _Stream:
    """A stream of this process; the fork gets its number there."""

    def __init__(self, number: int) -> None:
        self._number = number

    def __reduce__(self) -> tuple[Any, ...]:
        return _received, (reduction.DupFd(self._number),)


def _received(stream: Any) -> int:
    return stream.detach()


def _begin_worker(arguments: list[str], environment: dict[str, str], streams: list[int]) -> None:
    """In the fork."""
    _keep_what_the_server_made()
    for number, stream in enumerate(streams):
        os.dup2(stream, number)
        os.close(stream)
    sys.stdin = open(0, encoding="utf-8", closefd=False)  # noqa: SIM115
    os.environ.clear()
    os.environ.update(environment)
    _become(arguments)


def _kill(pid: int | None) -> None:
    """A program is the leader of its own process group."""
    assert pid is not None
    with contextlib.suppress(ProcessLookupError):
        os.killpg(pid, 9)


def _begin(arguments: list[str], environment: dict[str, str], folder: str, files: list[str], anew: bool) -> None:
    """In the fork: take over what `run` was given, and become the program."""
    _keep_what_the_server_made()
    os.setpgid(0, 0)
    for stream, file, mode in ((0, os.devnull, "rb"), (1, files[0], "wb"), (2, files[1], "wb")):
        with Path(file).open(mode) as opened:
            os.dup2(opened.fileno(), stream)
    os.environ.clear()
    os.environ.update(environment)
    os.chdir(folder)
    sys.path[:0] = [path for path in environment.get("PYTHONPATH", "").split(os.pathsep) if path]
    if anew:
        for module in [name for name in sys.modules if name.split(".")[0] in OF_THE_REPOSITORY]:
            del sys.modules[module]
    try:
        _become(arguments)
    finally:
        Path(files[2]).write_text(str(sum(os.times()[:4])), encoding="utf-8")


def _keep_what_the_server_made() -> None:
    """A folder that an import made (wandb's is one) is removed by the server at its end, and by no fork: the others use
    it."""
    finalizers: Any = weakref.finalize._registry  # pyright: ignore[reportAttributeAccessIssue]
    for finalizer in list(finalizers):
        made = (finalizer.peek() or [None])[0]
        if isinstance(made, tempfile.TemporaryDirectory):
            finalizer.atexit = False
            atexit.unregister(made.cleanup)


def _become(arguments: list[str]) -> None:
    """Run `-c CODE`, `-m MODULE` or a file with its arguments as the main program of this process."""
    sys.stdout = open(1, "w", encoding="utf-8", closefd=False)  # noqa: SIM115
    sys.stderr = open(2, "w", encoding="utf-8", closefd=False, buffering=1)  # noqa: SIM115
    while arguments[0] in ("-u", "-B"):
        arguments = arguments[1:]
    kind, *rest = arguments
    try:
        if kind == "-c":
            code, *rest = rest
            sys.argv, sys.path[:0] = ["-c", *rest], [""]
            main: Any = types.ModuleType("__main__")
            sys.modules["__main__"] = main
            exec(compile(code, "<string>", "exec"), main.__dict__)
        elif kind == "-m":
            module, *rest = rest
            sys.argv, sys.path[:0] = [module, *rest], [str(Path.cwd())]
            sys.modules.pop(module, None)
            if module in LAUNCHERS:
                _fork_ranks()
            runpy.run_module(module, run_name="__main__", alter_sys=True)
        else:
            sys.argv, sys.path[:0] = [kind, *rest], [str(Path(kind).parent)]
            runpy.run_path(kind, run_name="__main__")
    finally:
        atexit._run_exitfuncs()
        sys.stdout.flush()
        sys.stderr.flush()


def _fork_ranks() -> None:
    """torch's launcher, otherwise as it is, forks this process where it would start another interpreter. It names the
    methods in its log by the modules of the stack, among thousands that are imported here: a second of a launch."""
    elastic = "torch.distributed.elastic"
    handler: Any = importlib.import_module(f"{elastic}.multiprocessing.subprocess_handler.subprocess_handler")
    handler.Popen = _Rank
    rendezvous: Any = importlib.import_module(f"{elastic}.rendezvous.dynamic_rendezvous")
    rendezvous.get_method_name = lambda depth=2: sys._getframe(depth).f_code.co_name


class _Rank:
    """What the launcher uses of `subprocess.Popen`."""

    def __init__(
        self, args: Sequence[str], env: Mapping[str, str], stdout: Any, stderr: Any, start_new_session: bool
    ) -> None:
        sys.stdout.flush()
        sys.stderr.flush()
        self.args = args
        self.returncode: int | None = None
        self.pid = os.fork()
        if self.pid == 0:
            code = 1
            try:
                for stream, to in ((1, stdout), (2, stderr)):
                    if to is not None:
                        os.dup2(to.fileno(), stream)
                code = self._program(list(args)[1:], env)
            except BaseException:
                sys.excepthook(*sys.exc_info())
                sys.stderr.flush()
            finally:
                os._exit(code)

    def _program(self, arguments: list[str], env: Mapping[str, str]) -> int:
        os.setsid()
        atexit._clear()
        os.environ.clear()
        os.environ.update(env)
        for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT):
            signal.signal(number, signal.SIG_DFL)
        signal.signal(signal.SIGINT, signal.default_int_handler)
        try:
            _become(arguments)
        except SystemExit as end:
            if isinstance(end.code, str):
                sys.stderr.write(f"{end.code}\n")
                sys.stderr.flush()
            return end.code if isinstance(end.code, int) else int(end.code is not None)
        return 0

    def poll(self) -> int | None:
        if self.returncode is None:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            if pid:
                self.returncode = os.waitstatus_to_exitcode(status)
        return self.returncode

    def wait(self, timeout: float) -> int:
        end = time.monotonic() + timeout
        while (code := self.poll()) is None:
            if time.monotonic() > end:
                raise subprocess.TimeoutExpired(list(self.args), timeout)
            time.sleep(0.01)
        return code


if __name__ == "__main__":
    importlib.import_module(PRELOADED)
    _become(["-m", *sys.argv[1:]])
