"""A log without a terminal says how training goes, and not too often."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from retouch.cli.options import start_logging
from retouch.observe import log as run_log
from retouch.observe.log import StepLog, means_text


def record(step: int, seconds: float, **values: Any) -> dict[str, Any]:
    return {"step": step, "kind": "train", "time": {"step": seconds}, **values}


def test_a_line_a_minute(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    """Of the first step at once; seconds are the mean over the steps since the line before."""
    caplog.set_level(logging.INFO)
    now = [1000.0]
    monkeypatch.setattr(run_log.time, "monotonic", lambda: now[0])
    log = StepLog(90)
    for step in range(1, 7):
        log.see({"step": step, "kind": "rollout", "combined_score": step / 10})
        log.see(record(step, 10.0 * step, **({"skipped": 1.0} if step == 4 else {"loss": 0.25})))
        now[0] += 20
    log.see(record(7, 1.0, loss=0.5, reward=0.75))
    assert [r.getMessage() for r in caplog.records] == [
        "step 1 of 90: loss 0.25, mean reward 0.1, 10 s a step",
        "step 4 of 90: skipped (zero reward variance or failed rewards), mean reward 0.4, 30 s a step",
        "step 7 of 90: loss 0.5, mean reward 0.75, 37 s a step",
    ]
    now[0] += 100
    log.see(record(8, 1.0, loss=None))
    assert "step 8 of 90: loss is NaN or Inf, " in caplog.records[-1].getMessage()


def test_lines_that_a_bar_shows_stay_out_of_the_terminal(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The handler of the command line leaves them out; log.txt, and whoever else listens, has them."""
    monkeypatch.setattr(logging.getLogger(), "handlers", [caplog.handler])
    caplog.set_level(logging.INFO)
    for in_bar in (False, True):
        StepLog(4, in_bar=in_bar).see(record(1, 1.0, loss=0.5))
    start_logging()  # replaces the handlers of the root logger
    (terminal,) = logging.getLogger().handlers
    assert [bool(terminal.filter(r)) for r in caplog.records] == [True, False]


def test_a_record_in_a_file_is_one_line(capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Of any length: a terminal breaks lines, and a file that is searched for words has them whole."""
    monkeypatch.setattr(logging.getLogger(), "handlers", [])
    monkeypatch.setenv("COLUMNS", "40")
    start_logging()
    logging.getLogger("retouch.test").info("many words " * 40)
    [line] = capfd.readouterr().err.splitlines()
    assert line.partition("INFO")[2].split() == ["many", "words"] * 40


def test_a_run_without_a_terminal_says_its_steps(finished: Callable[[str], Path]) -> None:
    assert "step 1 of 4: loss " in (finished("full") / "log.txt").read_text(encoding="utf-8")


def test_an_evaluation_names_a_number_once() -> None:
    means = {"outside_l1": 0.01, "ocr": 0.5, "ocr.ned": 0.5, "ocr.exact": 0.25, "preservation.outside_l1": 0.01}
    assert means_text(means) == "outside_l1 0.010, ocr 0.500, ocr.exact 0.250"
    nothing_read = {"ocr": 0.0, "ocr.ned": 0.0, "ocr.exact": 0.0, "ocr.confidence": 0.0}
    assert means_text(nothing_read) == "ocr 0.000, ocr.exact 0.000, ocr.confidence 0.000"
    by_confidence = {"ocr": 0.7, "ocr.ned": 0.5, "ocr.confidence": 0.7}
    assert means_text(by_confidence) == "ocr 0.700, ocr.ned 0.500"
    assert means_text({"ocr": 0.5, "ocr.ned": 0.6}) == "ocr 0.500, ocr.ned 0.600"
