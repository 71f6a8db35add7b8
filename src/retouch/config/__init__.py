"""The run file, typed. Imports no torch.

Names are loaded on first use: component files import `retouch.config.base` while the run file's union of them is built.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from retouch.config.derived import Derived, derive, numbers
    from retouch.config.errors import ConfigError
    from retouch.config.load import dump_run, load_run, parse_run
    from retouch.config.run import RunConfig

__all__ = ["ConfigError", "Derived", "RunConfig", "derive", "dump_run", "load_run", "numbers", "parse_run"]

_WHERE = {
    "ConfigError": "errors",
    "Derived": "derived",
    "RunConfig": "run",
    "derive": "derived",
    "dump_run": "load",
    "load_run": "load",
    "numbers": "derived",
    "parse_run": "load",
}


def __getattr__(name: str) -> Any:
    if name not in _WHERE:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_WHERE[name]}"), name)
