"""The command line. Every command imports what it needs when it runs: `check` must not wait for torch.

Exit codes: 0 done, 1 the run failed, 2 wrong usage or config, 3 stopped on purpose and resumable.
"""

from __future__ import annotations

import contextlib
import errno
import json
import logging
import os
import re
import signal
import sys
import time
import warnings
from pathlib import Path
from typing import Annotated, Any

import typer
from typer.core import TyperCommand, TyperGroup

from retouch import __version__
from retouch.cli import data, flags, pages, rewards, runs, use
from retouch.errors import RetouchError, Stopped, first_line, is_device_full, is_own
from retouch.files.disk import OBSTRUCTED, file_problem
from retouch.process.console import outlast_readers, results_problem
from retouch.process.machine import keep_products_fp32, let_threads_sleep
from retouch.process.plain_text import printable
from retouch.process.signals import interrupt_on_signals, interrupted
from retouch.training.stopping import CONTINUE

app = typer.Typer(no_args_is_help=True, pretty_exceptions_enable=False)
_UNNAMED = (runs.app, use.app, pages.app)
"""Their commands follow `retouch` without a word between."""

for part in _UNNAMED:
    app.add_typer(part)
app.add_typer(rewards.app, name="reward")
app.add_typer(data.app, name="data")
app.add_typer(data.tiny, name="tiny")


class Help:
    """Help without a type behind a flag or a list, and with lines that break where the terminal ends."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.help: str | None = re.sub(r"(?<!\n)\n(?!\n)", " ", self.help or "")

    def get_params(self, ctx: Any) -> list[Any]:
        params = list[Any](super().get_params(ctx))  # type: ignore[misc]
        for param in params:
            if getattr(param, "is_flag", False) or param.nargs == -1:
                param.display_type_rich = lambda ctx: ""  # typer writes <bool> and <list[str]>
        return params


class Command(Help, TyperCommand): ...


class CommandGroup(Help, TyperGroup): ...


for part in (app, *_UNNAMED, rewards.app, data.app, data.tiny):
    part.info.cls = CommandGroup
    for registered in part.registered_commands:
        registered.cls = Command


def _show_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"retouch {__version__}")
        raise typer.Exit


@app.callback()
def options(
    version: Annotated[
        bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    """RL post-training for image inpainting, editing and generation models."""


def main() -> None:
    """Run a command, and append its exit code to the file that RETOUCH_EXIT_CODES names: launchers of several processes
    turn every code but 0 into 1, and a supervisor needs the real one to decide whether to restart."""
    file = os.environ.pop("RETOUCH_EXIT_CODES", None)  # not for the reward server that a run starts
    code: int | str | None = 1
    try:
        _main()
        code = 0
    except SystemExit as end:
        code = end.code or 0
        raise
    finally:
        if file:
            with Path(file).open("a", encoding="utf-8") as stream:
                stream.write(f"{code}\n")


def _main() -> None:
    """Turn errors that a user can act on into one message and an exit code."""
    outlast_readers()
    let_threads_sleep()
    keep_products_fp32()
    _silence_libraries()
    interrupted.clear()
    try:
        interrupt_on_signals()
        if sys.argv[1:2] in (["train"], ["check"]) and (message := flags.answer(sys.argv[1], sys.argv[2:])):
            _fail(f"error: {message}", 2)
        # or typer would print usage errors itself, in a box of several lines
        code = _called(sys.argv[1:2])(prog_name="retouch", standalone_mode=False)
    except (KeyboardInterrupt, typer.Abort):
        code = _INTERRUPTED
    except Exception as error:
        if type(error).__name__ == "NoArgsIsHelpError":
            error.show()  # type: ignore[attr-defined]
            sys.exit(2)
        if interrupted and not isinstance(error, Stopped):
            code = _INTERRUPTED
        elif outcome := _outcome(error):
            code, message = outcome
            _fail(f"{'stopped' if code in (0, 3) else 'error'}: {message}", code)
        else:
            raise
    if code == _INTERRUPTED:
        _fail(f"stopped: interrupted{f'; {CONTINUE}' if _trains() else ''}", 3)
    if not code and not _trains() and (problem := results_problem()):  # the result of a run is its directory
        _fail(f"error: {problem}", 1)
    sys.exit(code if isinstance(code, int) else 0)


def _called(name: list[str]) -> typer.Typer:
    """The command line with only the command that is called: typer reads the signatures of all of a command line first,
    which takes as long as reading a run file. All of it for help and for a name that is none."""
    commands = [command for part in _UNNAMED for command in part.registered_commands]
    chosen = [one for one in commands if one.callback and [one.name or one.callback.__name__] == name]
    if not chosen:
        return app
    only = typer.Typer(no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False)
    only.callback()(options)
    only.registered_commands = chosen
    return only


def _trains() -> bool:
    return sys.argv[1:2] == ["train"]


def _silence_libraries() -> None:
    """Hide warnings that a user can do nothing about."""
    logging.getLogger("bitsandbytes").setLevel(logging.ERROR)  # on some CPUs, of a kernel that is not used here
    # image processors of Pillow are the ones that are wanted
    logging.getLogger("transformers.utils.import_utils").addFilter(_is_not_of_torchvision)  # one object is added once
    for message in _OF_LIBRARIES:
        warnings.filterwarnings("ignore", message=message)


def _is_not_of_torchvision(record: logging.LogRecord) -> bool:
    return "requires torchvision" not in str(record.msg)


_OF_LIBRARIES = (
    # TRL's own use of transformers
    "`(is_)?gradient_checkpointing(_enable|_disable)?` is deprecated",
    "Could not find a config file in",  # PEFT, of a language model inside a diffusion pipeline
)

_INTERRUPTED = 130
"""Exit code of typer after Ctrl-C (newer versions; older ones raise Abort)."""

_FIRST_S = 5.0
"""Time in seconds that other processes leave to the first one to print a message that all of them have."""


def _fail(message: str, code: int) -> None:
    """Print a message and exit. On several processes the first one prints: its launcher ends the others meanwhile,
    except where an error is theirs alone. torchrun repeats the message as the root cause, from a file."""
    rank = os.environ.get("RANK", "0")
    if rank != "0":
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, signal.SIG_DFL)
        time.sleep(_FIRST_S)
        message = f"process {rank}: {message}"
    if file := os.environ.get("TORCHELASTIC_ERROR_FILE"):
        content = {"message": {"message": message, "extraInfo": {"timestamp": int(time.time())}}}
        with contextlib.suppress(OSError):
            Path(file).write_text(json.dumps(content), encoding="utf-8")
    typer.echo(printable(message), err=True)
    sys.exit(code)


def _outcome(error: Exception) -> tuple[int, str] | None:
    """Exit code and message of an error; None for one that needs a traceback."""
    if isinstance(error, RetouchError):
        return error.exit_code, str(error)
    if isinstance(error, ModuleNotFoundError) and error.name and not is_own(error.name):
        from retouch.doctor.machine import EXTRAS

        module = error.name.partition(".")[0]
        extra = next((extra for extra, modules in EXTRAS.items() if module in modules), "train")
        return 2, f'{module} is not installed: pip install "retouch[{extra}]"'
    if hasattr(error, "format_message"):  # usage errors of click, which typer may bring its own copy of
        message = error.format_message().strip().rstrip(".")  # type: ignore[attr-defined]
        return 2, f"{message}; see --help"
    if isinstance(error, RuntimeError) and str(error).startswith("Symlink loop"):  # pathlib's, before Python 3.13
        return 2, f"{error}; give another path"
    if isinstance(error, OSError) and error.errno in (errno.ENAMETOOLONG, errno.ELOOP):
        return 2, f"{str(error.filename)[:80]}: {(error.strerror or '').lower()}; give another path"
    if isinstance(error, OSError) and (problem := file_problem(error)):
        return 2 if error.errno in OBSTRUCTED else 1, problem
    if problem := _lost_process(error):
        return 1, problem
    if is_device_full(error):
        return (
            1,
            f"out of memory on the device ({first_line(error)}); `retouch check --memory RUN.yaml` counts the need",
        )
    if limit := _limit_reached(error):
        return 1, f"{limit}; see `ulimit -a`, or use a machine with more"
    return None


def _lost_process(error: Exception) -> str | None:
    """One line on a collective operation that failed because another process ended; None for another error. gloo raises
    plain RuntimeErrors, NCCL and torch's store those of `torch.distributed`."""
    kinds = {f"{kind.__module__}.{kind.__name__}" for kind in type(error).__mro__}
    if isinstance(error, RuntimeError) and ("torch.distributed.DistError" in kinds or "gloo/" in str(error)):
        return (
            f"processes cannot communicate: {first_line(error)}; another process ended or cannot be reached, see its "
            f"messages; {CONTINUE}"
        )
    return None


_LIMITS = {
    "can't start new thread": "no more threads are allowed",
    "can't allocate memory": "out of memory",
    "Cannot allocate memory": "out of memory",
    "could not create a primitive": "out of memory",  # oneDNN
    "failed to map segment": "a library could not be loaded into memory",
    "Too many open files": "too many open files",
}
"""Part of an error's text -> the limit of the machine or of the shell."""


def _limit_reached(error: Exception) -> str | None:
    """The limit that an error of Python, torch or the system reports; None for another error."""
    if isinstance(error, MemoryError):
        return "out of memory"
    text = str(error) if isinstance(error, OSError | RuntimeError | ImportError) else ""
    return next((limit for part, limit in _LIMITS.items() if part in text), None)
