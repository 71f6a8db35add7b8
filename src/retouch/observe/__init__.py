"""What a run tells: metrics, time, pictures, a report."""

from retouch.observe.metrics import Metrics
from retouch.observe.run_dir import RunDir
from retouch.observe.timing import Stopwatch

__all__ = ["Metrics", "RunDir", "Stopwatch"]
