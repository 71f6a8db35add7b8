"""Metrics never end a run: what observes it, when a device, a driver or a network is not as expected.

A GPU is simulated, because its clocks and counters are asked for nowhere else; then each of them fails in turn.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import retouch.observe
from retouch.config import RunConfig
from retouch.observe import cost
from retouch.observe.environment import environment
from retouch.observe.measuring import Measurement
from retouch.observe.timing import PARTS, stopwatch
from retouch.training import build
from tests.algorithms.runs import Use, brightness, of_kind, train
from tests.selection import default

pytestmark = pytest.mark.usefixtures("shallow")

Config = Callable[..., RunConfig]

NAME = "NVIDIA H100 80GB HBM3"


class Event:
    """In place of `torch.cuda.Event`: the n-th that is recorded is n milliseconds after the first."""

    count = 0

    def __init__(self, enable_timing: bool) -> None:
        assert enable_timing

    def record(self) -> None:
        Event.count += 1
        self.at = Event.count

    def synchronize(self) -> None: ...

    def elapsed_time(self, end: Event) -> float:
        return float(end.at - self.at)


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Everything that observes a run takes the CPU for an H100."""
    answers: dict[str, Any] = {
        "is_available": lambda: True,
        "is_initialized": lambda: True,
        "device_count": lambda: 1,
        "get_device_name": lambda device: NAME,
        "Event": Event,
        "max_memory_allocated": lambda: 3 * 2**30,
        "reset_peak_memory_stats": lambda: None,
        "get_rng_state_all": list,
    }
    for name, answer in answers.items():
        monkeypatch.setattr(torch.cuda, name, answer)
    monkeypatch.setenv("ACCELERATE_USE_CPU", "true")
    monkeypatch.setattr(build, "stopwatch", lambda device_type: stopwatch("cuda"))
    monkeypatch.setattr(cost, "peak_flops", lambda network: cost.peak_of(torch.cuda.get_device_name(0)))


def fail(*_: Any, **__: Any) -> Any:
    raise RuntimeError("CUDA driver error: unknown error\nwith a trace")


ASKED = sorted(
    {
        name
        for file in Path(retouch.observe.__path__[0]).rglob("*.py")
        for name in re.findall(r"torch\.cuda\.(\w+)", file.read_text(encoding="utf-8"))
    }
    - {"is_available", "is_initialized"}  # these answer on every machine
)
"""Functions of torch.cuda that observers call."""

LACKING = {
    "Event": set[str](),  # the CPU's clock goes on
    "get_device_name": {"tflops", "mfu"},
    "max_memory_allocated": {"peak_memory_gib"},
    "reset_peak_memory_stats": {"peak_memory_gib"},
    "device_count": set[str](),
}
"""A function -> metrics that are absent without it."""

OF_A_GPU = {"tflops", "mfu", "peak_memory_gib"}


def warnings_in(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.message for record in caplog.records if record.name == "retouch.observe.measuring"]


@pytest.mark.usefixtures("gpu")
def test_a_run_on_a_gpu_tells_what_it_costs(config: Config, scripted: Use, caplog: pytest.LogCaptureFixture) -> None:
    scripted(brightness)
    _, records = train(config(training__max_steps=2))
    assert environment()["gpus"] == [NAME] and not warnings_in(caplog)
    for step in of_kind(records, "train"):
        seconds = step["time"]
        assert seconds["peak_memory_gib"] == 3.0 and seconds["mfu"] > 0 and seconds["tflops"] > 0
        assert seconds["step"] == pytest.approx(sum(seconds[name] for name in PARTS))
        assert 1000 * seconds["step"] == pytest.approx(round(1000 * seconds["step"]))  # of events


@pytest.mark.parametrize("name", default(ASKED, {"Event", "max_memory_allocated"}.__contains__))
@pytest.mark.usefixtures("gpu")
def test_a_run_goes_on_without_what_a_gpu_does_not_tell(
    name: str, config: Config, scripted: Use, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """With one warning for each measurement that fails, and every other metric; the report is written."""
    scripted(brightness)
    monkeypatch.setattr(torch.cuda, name, fail)
    run, records = train(config(training__max_steps=2))
    steps = of_kind(records, "train")
    assert [step["step"] for step in steps] == [1, 2]
    for step in steps:
        assert step["time"].keys() & OF_A_GPU == OF_A_GPU - LACKING[name]
        assert step["time"]["step"] > 0 and step["time"]["nfe_train_forward"] > 0
    told = warnings_in(caplog)
    assert 1 <= len(told) == len(set(told)) and all("driver error: unknown error)" in line for line in told)
    assert (run.dir.path / "report.html").is_file()


@pytest.mark.parametrize("method", ["record", "synchronize", "elapsed_time"])
@pytest.mark.usefixtures("gpu")
def test_the_clock_of_the_cpu_goes_on_where_events_fail(method: str, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = stopwatch("cuda")
    with clock.part("rollout"):
        monkeypatch.setattr(Event, method, fail)
    spent = clock.split()
    assert spent["step"] == pytest.approx(spent["rollout"] + spent["other"]) and 0 < spent["step"] < 60


@pytest.mark.parametrize(
    ("function", "lacking"),
    [("forward_flops", {"tflops", "mfu"}), ("rows_in", {"tflops", "mfu", "nfe_train_forward"})],
)
@pytest.mark.usefixtures("gpu")
def test_a_network_that_cannot_be_counted_is_trained(
    function: str,
    lacking: set[str],
    config: Config,
    scripted: Use,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Like one of a plug-in, whose arguments have other names."""
    scripted(brightness)
    monkeypatch.setattr(cost, function, fail)
    _, records = train(config(training__max_steps=2))
    first, last = (step["time"] for step in of_kind(records, "train"))
    usual = OF_A_GPU | {"nfe_train_forward"}
    assert first.keys() & usual == last.keys() & usual == usual - lacking
    [told] = warnings_in(caplog)
    assert "tflops and mfu: not measured" in told


def test_a_process_that_does_not_use_the_gpu_has_no_peak(monkeypatch: pytest.MonkeyPatch) -> None:
    """Training on the CPU of a machine that has GPUs: asking for their memory would take some of it."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: False)
    assert cost.peak_memory() == {}


def test_gpus_that_this_torch_cannot_use_are_not_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of an older driver are counted, and asking for their names raises."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    assert environment()["gpus"] == []


def test_the_processes_of_a_job_are_not_those_of_a_launcher(monkeypatch: pytest.MonkeyPatch) -> None:
    """Some job systems set WORLD_SIZE to the number of machines, and nothing joins the processes."""
    monkeypatch.delenv("LOCAL_RANK", raising=False)
    for size in ("2", ""):
        monkeypatch.setenv("WORLD_SIZE", size)
        assert environment()["processes"] == 1
    monkeypatch.setenv("LOCAL_RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert environment()["processes"] == 2


def test_a_measurement_is_off_after_its_first_exception(caplog: pytest.LogCaptureFixture) -> None:
    taken: list[int] = []

    def measure(number: int) -> int:
        taken.append(number)
        return 10 // number

    half = Measurement("half")
    assert [half.take(measure, number) for number in (2, 0, 5)] == [5, None, None]
    assert taken == [2, 0] and not half.works
    assert [r.message for r in caplog.records] == [
        "half: not measured from here on (ZeroDivisionError: integer division or modulo by zero)"
    ]
