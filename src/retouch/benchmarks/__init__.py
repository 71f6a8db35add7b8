"""Benchmarks: what they have in common, and their registry. The published ones are a package of their own."""

from __future__ import annotations

from typing import TYPE_CHECKING

from retouch.registry import Registry

if TYPE_CHECKING:
    from retouch.benchmarks.base import Benchmark

BENCHMARKS: Registry[type[Benchmark]] = Registry(
    "benchmark",
    "retouch.benchmarks",
    {},
)
"""Name after `retouch eval --benchmark` -> its class."""
