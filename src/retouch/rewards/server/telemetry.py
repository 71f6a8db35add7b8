"""What a server counts, in the text format of Prometheus. No dependency: a counter is a number in a dictionary."""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence

from retouch.rewards.server.worker import Work
from retouch.types import Failure, Outcome

SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)
SIZES = (1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 64.0, 128.0)

Labels = tuple[tuple[str, str], ...]


class Histogram:
    """Observations in buckets whose upper bounds are given."""

    def __init__(self, bounds: Sequence[float]) -> None:
        self.bounds = bounds
        self.counts = [0] * (len(bounds) + 1)
        self.total = 0.0

    def observe(self, value: float) -> None:
        self.counts[bisect_left(self.bounds, value)] += 1
        self.total += value

    def lines(self, name: str, labels: Labels = ()) -> list[str]:
        running, lines = 0, list[str]()
        for bound, count in zip((*self.bounds, "+Inf"), self.counts, strict=True):
            running += count
            edge = bound if isinstance(bound, str) else f"{bound:g}"
            lines.append(f"{name}_bucket{_labels((*labels, ('le', edge)))} {running}")
        return [*lines, f"{name}_sum{_labels(labels)} {self.total:.6f}", f"{name}_count{_labels(labels)} {running}"]


class Telemetry:
    """Counts of one server since it started."""

    def __init__(self) -> None:
        self._requests: Counter[int] = Counter()
        self._outcomes: Counter[tuple[str, str]] = Counter()
        self._calls: Counter[str] = Counter()
        self._request_s = Histogram(SECONDS)
        self._batch_items = Histogram(SIZES)
        self._model_s: defaultdict[str, Histogram] = defaultdict(lambda: Histogram(SECONDS))

    def request(self, status: int, seconds: float) -> None:
        self._requests[status] += 1
        self._request_s.observe(seconds)

    def batch(self, items: int, work: Work) -> None:
        self._batch_items.observe(items)
        self._calls.update(work.calls)
        for name, seconds in work.seconds.items():
            self._model_s[name].observe(seconds)

    def outcomes(self, reward: str, column: Sequence[Outcome]) -> None:
        for outcome in column:
            self._outcomes[reward, outcome.code if isinstance(outcome, Failure) else "score"] += 1

    def text(self, gauges: Mapping[str, float]) -> str:
        """The exposition; `gauges` are numbers as they are now."""
        lines: list[str] = []

        def family(name: str, kind: str, rows: Sequence[str]) -> None:
            lines.append(f"# TYPE retouch_{name} {kind}")
            lines.extend(rows)

        family("requests_total", "counter", [
            f'retouch_requests_total{{status="{status}"}} {n}' for status, n in sorted(self._requests.items())
        ])  # fmt: skip
        family("outcomes_total", "counter", [
            f"retouch_outcomes_total{_labels((('reward', reward), ('outcome', code)))} {n}"
            for (reward, code), n in sorted(self._outcomes.items())
        ])  # fmt: skip
        family("model_calls_total", "counter", [
            f"retouch_model_calls_total{_labels((('reward', reward),))} {n}"
            for reward, n in sorted(self._calls.items())
        ])  # fmt: skip
        family("request_seconds", "histogram", self._request_s.lines("retouch_request_seconds"))
        family("batch_items", "histogram", self._batch_items.lines("retouch_batch_items"))
        family("model_seconds", "histogram", [
            line for reward, histogram in sorted(self._model_s.items())
            for line in histogram.lines("retouch_model_seconds", (("reward", reward),))
        ])  # fmt: skip
        for name, value in gauges.items():
            family(name, "gauge", [f"retouch_{name} {value:g}"])
        return "\n".join(lines) + "\n"


def _labels(labels: Labels) -> str:
    """{name="value",...} with the three characters escaped that must be."""
    escaped = ((name, value.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")) for name, value in labels)
    return "{" + ",".join(f'{name}="{value}"' for name, value in escaped) + "}" if labels else ""
