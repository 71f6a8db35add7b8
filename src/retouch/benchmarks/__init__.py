"""Published benchmarks: one file each, with how its data are read, how outputs are scored, and the official summary."""

from __future__ import annotations

from typing import TYPE_CHECKING

from retouch.registry import Registry

if TYPE_CHECKING:
    from retouch.benchmarks.base import Benchmark

BENCHMARKS: Registry[type[Benchmark]] = Registry(
    "benchmark",
    "retouch.benchmarks",
    {
        "calligrapher_cross": "retouch.benchmarks.calligrapher:CalligrapherCross",
        "calligrapher_self": "retouch.benchmarks.calligrapher:CalligrapherSelf",
    },
)
"""Name after `retouch eval --benchmark` -> its class."""
