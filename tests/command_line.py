"""The command line inside the test process: exit code, standard output and standard error."""

from __future__ import annotations

import contextlib
import io
import sys
from dataclasses import dataclass
from unittest import mock

from retouch.cli import main


@dataclass(frozen=True)
class Outcome:
    code: int
    out: str
    err: str


def retouch(*arguments: object) -> Outcome:
    """What `retouch ...` does, without a new process."""
    out, err = io.StringIO(), io.StringIO()
    command = ["retouch", *map(str, arguments)]
    with mock.patch.object(sys, "argv", command), contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            main()
            code = 0
        except SystemExit as end:
            code = int(end.code or 0)
    return Outcome(code, out.getvalue(), err.getvalue())
