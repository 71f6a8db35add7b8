"""The scorers of the package: one file each, named in `retouch.rewards.REWARDS`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pydantic import ValidationError

from retouch.config.errors import nearest
from retouch.errors import ConfigError
from retouch.registry import PLUGINS, import_plugins_of_environment
from retouch.rewards import REWARDS
from retouch.rewards.protocol import Scorer


def make_scorer(name: str, options: Mapping[str, Any] | None = None) -> Scorer:
    """A scorer with its options, not loaded yet.

    Args:
        name: in the registry of rewards.
        options: as JSON values; only those of the scorer, not those that every entry of a run file has.

    Raises:
        ConfigError: no scorer of that name, or an option that it does not have or cannot take.
    """
    import_plugins_of_environment()
    if name not in REWARDS:
        close = nearest(name, REWARDS)
        elsewhere = f"; if a custom module registers it, set {PLUGINS}=MODULE" if close.startswith("known") else ""
        raise ConfigError(f"reward {name!r}: no such scorer; {close}{elsewhere}")
    entry = REWARDS[name]
    for option in options or {}:
        if option not in entry.own_options():
            known = nearest(option, entry.own_options()) if entry.own_options() else "it has none"
            raise ConfigError(f"reward {name!r}: no such option {option!r}; {known}")
    try:
        # strict: a command line's "true" is no boolean
        return entry.model_validate({**(options or {}), "scorer": name}, strict=True).make()
    except ValidationError as error:
        problem = error.errors()[0]
        message = problem["msg"].removeprefix("Value error, ")
        if problem["loc"]:
            option = problem["loc"][0]
            message = f"{option}: given {problem['input']!r}; {message[0].lower()}{message[1:]}"
        raise ConfigError(f"reward {name!r}: {message}") from None
