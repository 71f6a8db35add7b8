"""The scorers that come with the package, by name. Each file imports its own library only when it loads."""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from retouch.config.errors import ConfigError, nearest

if TYPE_CHECKING:
    from retouch.rewards.protocol import Scorer

SCORERS = {
    "ocr": "retouch.rewards.scorers.ocr:OcrScorer",
    "preservation": "retouch.rewards.scorers.preservation:PreservationScorer",
}
"""Scorer name -> module:class."""


def make_scorer(name: str, options: Mapping[str, Any] | None = None) -> Scorer:
    """A scorer with its options, not loaded yet.

    Raises:
        ConfigError: no scorer of that name, or an option it does not have.
    """
    if name not in SCORERS:
        raise ConfigError(f"reward {name!r}: no such scorer; {nearest(name, SCORERS)}")
    module, _, attribute = SCORERS[name].partition(":")
    try:
        return getattr(importlib.import_module(module), attribute)(**(options or {}))
    except TypeError as error:
        raise ConfigError(f"reward {name!r}: {error}") from None
