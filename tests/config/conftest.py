"""A small valid run, and what is wrong with it after an override."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from retouch.config import ConfigError, RunConfig, parse_run

REPOSITORY = Path(__file__).parents[2]
TINY = REPOSITORY / "configs" / "tiny" / "flux_fill_grpo.yaml"

BASE: dict[str, Any] = {
    "name": "small",
    "model": {"family": "flux_fill", "path": "tiny"},
    "data": {"format": "self_bench", "path": "somewhere", "resolution": 64},
    "algorithm": {"name": "grpo"},
    "rewards": {"ocr": {}},
}


@pytest.fixture
def run_with() -> Callable[..., RunConfig]:
    """The small run after `key=value` overrides."""
    return lambda *overrides: parse_run(BASE, overrides)


@pytest.fixture
def problems() -> Callable[..., list[str]]:
    """The lines of the error after `key=value` overrides."""

    def lines(*overrides: str) -> list[str]:
        with pytest.raises(ConfigError) as caught:
            parse_run(BASE, overrides, source="small.yaml")
        return str(caught.value).splitlines()

    return lines
