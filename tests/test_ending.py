"""The last lines of a run: its gain, its report, and what to type next."""

from __future__ import annotations

import json
import logging
import shlex
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from retouch.config import load_run
from retouch.observe.statistics import paired_difference
from retouch.use.ending import Ending, Gain, ending, gains_at_end
from tests.command_line import retouch

Finished = Callable[[str], Path]


def row(example: int, index: int = 0, **values: Any) -> dict[str, Any]:
    return {"example": example, "index": index, **values}


def test_a_gain_by_hand() -> None:
    """Two images of each example are averaged first; a failed reward leaves its image out."""
    before = [row(1, ocr=0.0), row(1, 1, ocr=0.5), row(2, ocr=0.25), row(3, ocr=None), row(4, ocr=1.0)]
    after = [row(1, ocr=0.5), row(1, 1, ocr=0.5), row(2, ocr=0.75), row(3, ocr=0.75)]
    found = gains_at_end(before, after, ["ocr", "seam"])
    assert list(found) == ["ocr"]
    expected = paired_difference([0.5, 0.5, 0.75], [0.0, 0.5, 0.25], [1, 1, 2])
    assert (found["ocr"].mean, found["ocr"].low, found["ocr"].high) == expected
    assert found["ocr"].mean == 0.375  # .25 and .5
    assert (found["ocr"].before, found["ocr"].after) == (0.25, 0.625)  # whose difference it is
    one = gains_at_end(before[:2], after[:2], ["ocr"])["ocr"]
    assert (one.low, one.high) == (None, None) and "one example" in str(one)
    assert str(Gain(0.523, 0.817, 0.294, 0.24, 0.325)) == (
        "+0.294 (95 % interval [+0.240, +0.325]), from 0.523 to 0.817"
    )


def test_one_image_is_one_image() -> None:
    gain = Gain(0.5, 0.75, 0.25, None, None)
    end = Ending("runs/a", (0, 4), True, 1, {"ocr": gain}, None, ())
    assert end.lines() == [f"gain: ocr {gain}; 1 held-out image, step 0 to 4"]


def test_the_end_of_a_run(finished: Finished) -> None:
    """Of a run that was trained: the report is there, and the next commands work."""
    run = finished("lora")
    end = ending(load_run(run / "config.yaml", trust=True), run)
    assert end.steps[1] == 4 and end.report == str(run / "report.html")
    *told, report, look, export = end.lines()
    assert told and all(line.startswith("gain: ") for line in told)
    assert told[-1].endswith(f"{end.images} held-out images, step {end.steps[0]} to 4")
    assert report == f"report: {run}/report.html"
    assert look == f"next: retouch eval --run {run} --out {run}/comparison"
    assert export == f"next: retouch export {run} --to diffusers-lora"
    for line in (look, export):
        words = shlex.split(line.removeprefix("next: retouch "))
        assert retouch(*words, "--help").code == 0
    json.dumps(end.as_dict())


def test_the_gain_is_of_the_measures_of_the_verdict(finished: Finished, tmp_path: Path) -> None:
    """Without rewards, too: drift alone was the gain of SFT, and a rise of it, which is worse, looked like one."""
    config = load_run(finished("lora") / "config.yaml", trust=True).model_copy(update={"rewards": {}})
    records = [{"kind": "eval", "step": s, "moment": m, "images": 2} for s, m in ((0, "start"), (4, "end"))]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    for step, correlation, drift in ((0, 0.25, 0.0), (4, 0.75, 0.125)):
        folder = tmp_path / f"evaluations/step-{step:06d}"
        folder.mkdir(parents=True)
        values = {"outside_l1": drift, "glyph_correlation": correlation, "other": 1.0}
        (folder / "rows.jsonl").write_text("".join(json.dumps(row(i, **values)) + "\n" for i in range(2)))
    end = ending(config, tmp_path)
    first, second, *_ = end.lines()
    assert first == ("gain: glyph_correlation +0.500 (95 % interval [+0.500, +0.500]), from 0.250 to 0.750")
    assert second == (
        "gain: outside_l1 +0.125 (95 % interval [+0.125, +0.125]), from 0.000 to 0.125 (less is better); 2 training "
        "images, step 0 to 4"
    )


def test_a_run_without_evaluations_has_no_gain(finished: Finished, tmp_path: Path) -> None:
    end = ending(load_run(finished("lora") / "config.yaml", trust=True), tmp_path)
    assert (end.steps, end.gains, end.report) == ((), {}, None)
    assert [line.partition(":")[0] for line in end.lines()] == ["next", "next"]


@pytest.mark.parametrize("quiet", [False, True])
def test_what_train_prints(monkeypatch: pytest.MonkeyPatch, finished: Finished, quiet: bool) -> None:
    """The result on standard output is one line, or JSON, whatever stands on standard error."""
    run = finished("lora")
    file = run / "config.yaml"

    def trained(config: Any) -> Path:
        logging.getLogger("retouch.test").info("a line of the log")
        logging.getLogger("retouch.test").warning("a warning")
        return run

    monkeypatch.setattr("retouch.algorithms.train.train", trained)
    more = ["--quiet"] if quiet else []
    outcome = retouch("train", file, *more)
    assert (outcome.code, outcome.out) == (0, f"done: {run}\n")
    assert ("a line of the log" in outcome.err, "next: retouch export" in outcome.err) == (not quiet, not quiet)
    assert "a warning" in outcome.err
    told = json.loads(retouch("train", file, "--json", "--quiet").out)
    assert told["run"] == str(run) and told["report"] == f"{run}/report.html"
    assert all(gain["low"] <= gain["mean"] <= gain["high"] for gain in told["gains"].values())
