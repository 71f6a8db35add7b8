"""Variables of the environment in a run file: `${VAR}` and `${VAR:-default}`."""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Collection, Iterator, Sequence
from pathlib import Path
from typing import Any, cast

from pydantic import BaseModel

from retouch.config.errors import ConfigError
from retouch.errors import log_once

logger = logging.getLogger(__name__)

_VARIABLE = re.compile(r"\$\$(?=\{)|\$\{([A-Za-z_][A-Za-z0-9_]*)(?::-((?:\$\{[^}]*\}|[^}])*))?\}")
"""`${VAR}` or `${VAR:-default}`; the default may contain variables with plain defaults. `$${` stands for `${`."""

_FORMER_NAMES = {"JUDGE_URL": "JUDGE_ADDRESS"}
"""Environment variable -> the former name under which it is still read."""


def variables_in(node: Any, key: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], list[str]]]:
    """The keys of texts with variables of the environment, and these texts, in a part of a YAML file or in sections. A
    section is walked and not dumped: its first dump makes pydantic build the schema of the whole run again."""
    if isinstance(node, dict | BaseModel):
        pairs = node if isinstance(node, BaseModel) else cast("dict[str, Any]", node).items()
        for name, part in pairs:
            yield from variables_in(part, (*key, str(name)))
    elif isinstance(node, list | tuple):
        for number, part in enumerate(cast("Sequence[Any]", node)):
            yield from variables_in(part, (*key, str(number)))
    elif isinstance(node, Path):
        yield from variables_in(str(node), key)
    elif isinstance(node, str) and any(match[1] for match in _VARIABLE.finditer(node)):
        yield key, [node]


def with_variables(node: Any, key: str = "", unread: Collection[str] = ()) -> Any:
    """A part of a YAML file with `${VAR}` and `${VAR:-default}` filled in from the environment.

    Args:
        key: where it stands in the file, for messages.
        unread: as of `load_run`.

    Raises:
        ConfigError: a variable that is not set and has no default.
    """
    if isinstance(node, dict):
        items = cast("dict[str, Any]", node).items()
        return {name: with_variables(value, f"{key}.{name}" if key else str(name), unread) for name, value in items}
    if isinstance(node, list):
        return [with_variables(value, key, unread) for value in cast("list[Any]", node)]
    if not isinstance(node, str):
        return node

    def value_of(match: re.Match[str]) -> str:
        name: str | None = match[1]
        if name is None:
            return "$"
        # An empty variable takes the default, as in a shell. A default may hold variables of its own, which count only
        # where it is taken.
        default: str | None = match[2]
        found = _environment(name)
        if default is not None and not found:
            return _VARIABLE.sub(value_of, default)
        if found is None and any(key.startswith(f"{section}.") for section in unread):
            return match[0]
        if found is None:
            raise ConfigError(f"{key}: ${{{name}}} is not set in the environment; export {name}=... or pass {key}=...")
        return found

    return _VARIABLE.sub(value_of, node)


def _environment(name: str) -> str | None:
    """The value of an environment variable; if it is unset, that of its former name."""
    former = _FORMER_NAMES.get(name)
    if former is None or os.environ.get(name) or not os.environ.get(former):
        return os.environ.get(name)
    log_once(
        logger,
        "%s: the variable is now called %s and read under both names; export %s instead",
        former,
        name,
        name,
    )
    return os.environ[former]
