"""Counts of a server in the text format of Prometheus."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, disable_created_metrics, generate_latest

from retouch.rewards.server.frames import BatchCost
from retouch.types import Failure, Outcome

SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)
SIZES = (1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 64.0, 128.0)

disable_created_metrics()  # they would add a time stamp to every series


class Telemetry:
    """Counts of one server since it started, in a registry of its own."""

    def __init__(self) -> None:
        self._registry = registry = CollectorRegistry()
        self._requests = Counter("retouch_requests", "Requests.", ["status"], registry=registry)
        self._outcomes = Counter("retouch_outcomes", "Outcomes.", ["reward", "outcome"], registry=registry)
        self._calls = Counter("retouch_model_calls", "Calls of a scorer.", ["reward"], registry=registry)
        self._request_s = Histogram("retouch_request_seconds", "Time of a request.", buckets=SECONDS, registry=registry)
        self._batch_items = Histogram("retouch_batch_items", "Items of a batch.", buckets=SIZES, registry=registry)
        self._model_s = Histogram(
            "retouch_model_seconds", "Time of a batch.", ["reward"], buckets=SECONDS, registry=registry
        )
        self._gauges: dict[str, Gauge] = {}

    def request(self, status: int, seconds: float) -> None:
        self._requests.labels(status).inc()
        self._request_s.observe(seconds)

    def batch(self, items: int, work: BatchCost) -> None:
        self._batch_items.observe(items)
        for name, calls in work.calls.items():
            self._calls.labels(name).inc(calls)
        for name, seconds in work.seconds.items():
            self._model_s.labels(name).observe(seconds)

    def outcomes(self, reward: str, column: Sequence[Outcome]) -> None:
        for outcome in column:
            self._outcomes.labels(reward, outcome.code if isinstance(outcome, Failure) else "score").inc()

    def text(self, gauges: Mapping[str, float]) -> bytes:
        """The exposition; `gauges` are the current values of gauges by name."""
        for name, value in gauges.items():
            if name not in self._gauges:
                self._gauges[name] = Gauge(f"retouch_{name}", name.replace("_", " "), registry=self._registry)
            self._gauges[name].set(value)
        return generate_latest(self._registry)
