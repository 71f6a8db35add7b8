"""The parts of a step sum to the step, nested or not."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from retouch.observe import timing
from retouch.observe.run_dir import read_metrics
from retouch.observe.timing import PARTS, Stopwatch


@pytest.fixture
def pass_time(monkeypatch: pytest.MonkeyPatch) -> Callable[[float], None]:
    """Moves a clock that stands still otherwise."""
    now = [100.0]
    monkeypatch.setattr(timing.time, "perf_counter", lambda: now[0])

    def move(seconds: float) -> None:
        now[0] += seconds

    return move


def spent(clock: Stopwatch) -> dict[str, float]:
    return {name: seconds for name, seconds in clock.split().items() if seconds}


def test_an_inner_part_is_not_counted_in_the_outer_one(pass_time: Callable[[float], None]) -> None:
    clock = Stopwatch()
    pass_time(1)
    with clock.part("eval"):
        pass_time(2)
        with clock.part("vae"):
            pass_time(4)
        with clock.part("eval"):
            pass_time(8)
        pass_time(16)
    pass_time(32)
    assert spent(clock) == {"eval": 26, "vae": 4, "other": 33, "step": 63}


def test_every_split_starts_anew(pass_time: Callable[[float], None]) -> None:
    clock = Stopwatch()
    with clock.part("rollout"):
        pass_time(1)
    assert spent(clock) == {"rollout": 1, "step": 1}
    pass_time(2)
    assert spent(clock) == {"other": 2, "step": 2}
    assert set(clock.split()) == {*PARTS, "step"}


def test_a_part_that_raises_is_charged_and_left(pass_time: Callable[[float], None]) -> None:
    clock = Stopwatch()
    with pytest.raises(RuntimeError), clock.part("vae"):
        pass_time(1)
        raise RuntimeError
    pass_time(2)
    assert spent(clock) == {"vae": 1, "other": 2, "step": 3}


def test_parts_have_known_names() -> None:
    with pytest.raises(ValueError, match="no part 'vea'; there are: rollout, text, vae"), Stopwatch().part("vea"):
        pass


def test_the_steps_of_a_run_are_explained(finished: Any) -> None:
    records = [r for r in read_metrics(finished("full") / "metrics.jsonl") if r["kind"] == "train"]
    assert len(records) == 4
    for record in records:
        step = record["time"]
        assert set(step) >= {*PARTS, "step"}
        # the second step of an epoch draws nothing
        read = {"images", "images_per_s"} if record["phase"] == "warmup" or step["rollout"] else set[str]()
        assert {"images", "images_per_s"} & set(step) == read
        assert sum(step[part] for part in PARTS) == pytest.approx(step["step"], rel=0.02, abs=1e-3)


def test_marks_of_a_device_are_read_when_a_step_is_over() -> None:
    """A GPU finishes parts later than the program asks for them; only `split` may wait for it."""
    made: list[float] = []
    asked: list[tuple[float, float]] = []

    def mark() -> float:
        made.append(float(len(made)) ** 2)
        return made[-1]

    def seconds(start: float, end: float) -> float:
        asked.append((start, end))
        return end - start

    clock = Stopwatch(mark, seconds)
    with clock.part("rollout"):  # between the marks 1 and 4
        pass
    with clock.part("vae"):  # between the marks 9 and 16
        pass
    assert not asked
    assert spent(clock) == {"rollout": 3.0, "vae": 7.0, "other": (1 - 0) + (9 - 4) + (25 - 16), "step": 25.0}
    assert asked[0] == (0.0, 1.0)
