"""Metrics, timings, images, logs and reports of a run."""

from retouch.observe.metrics import Metrics
from retouch.observe.run_dir import RunDir
from retouch.observe.timing import Stopwatch

__all__ = ["Metrics", "RunDir", "Stopwatch"]
