"""What the demo prints of its run, on evaluations that are made up: no training."""

from __future__ import annotations

import json
import os
import signal
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from examples.demo import print_result

from retouch.training.evaluation import (
    Evaluation,
    save_evaluation,
)
from tests import forked

REPOSITORY = Path(__file__).parents[2]

NED = {"start": (0.0, 0.25), "warmup": (0.25, 0.75), "step": (0.5, 0.5), "end": (0.75, 1.0)}
"""Moment -> what OCR reads in two images: the means are .125, .5, .5 and .875."""


def write_run(folder: Path) -> None:
    """Metrics and evaluations of a run as `retouch train` leaves them."""
    records: list[dict[str, Any]] = [{"kind": "train", "step": 1}]
    for step, (moment, values) in enumerate(NED.items()):
        rows = [
            {"example": i, "index": 0, "ocr.ned": ned, "ocr.exact": ned == 1, "glyph_correlation": ned / 2}
            for i, ned in enumerate(values)
        ]
        images = [np.zeros((4, 4, 3), np.uint8)] * 2
        save_evaluation(Evaluation(rows, images), folder / "evaluations" / f"step-{step:06d}", 0)
        records.append({"kind": "eval", "step": step, "moment": moment})
    (folder / "metrics.jsonl").write_text("".join(json.dumps(r) + "\n" for r in records), encoding="utf-8")


def test_the_result_is_means_and_the_paired_gain_of_rl(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """By hand: gains of .5 and .25 over the warmed-up weights, not over the base or the evaluation in between;
    12.706205 x .125 on either side, .125 being the standard error of two differences that are .25 apart."""
    write_run(tmp_path)
    print_result(tmp_path)
    assert capsys.readouterr().out.splitlines()[1:] == [
        "2 held-out images of words that nothing was trained on, plain ODE, fixed seeds:",
        "held-out NED base 0.125 warmed up 0.500 after RL 0.875 · gain of RL +0.375 [-1.213, +1.963]",
        "held-out exact words base 0.000 warmed up 0.000 after RL 0.500 · gain of RL +0.500 [-5.853, +6.853]",
        "held-out glyph correlation base 0.062 warmed up 0.250 after RL 0.438 · gain of RL +0.188 [-0.607, +0.982]",
    ]


DEMO = """
import sys
from examples import demo
demo.make_data = lambda out: None
sys.executable = sys.argv[1]
demo.main()
"""


TRAINING = """#!/bin/bash
for name in TERM USR1 INT; do trap "echo $name; exit 3" $name; done
echo $$ ready
kill -$RECEIVED $PPID
while true; do sleep 0.05; done
"""


OTHERS = [pytest.param(number, marks=pytest.mark.full) for number in (signal.SIGUSR1, signal.SIGINT)]


@pytest.mark.parametrize("number", [signal.SIGTERM, *OTHERS])
def test_a_signal_to_the_demo_stops_its_training(number: signal.Signals, tmp_path: Path) -> None:
    """`retouch train` writes a checkpoint and ends its reward server; here a program stands in for it, which sends the
    demo the signal."""
    training = tmp_path / "python"
    training.write_text(TRAINING, encoding="utf-8")
    training.chmod(0o755)
    places = os.pathsep.join([str(REPOSITORY), os.environ.get("PYTHONPATH", "")])
    demo = forked.run(
        [sys.executable, "-c", DEMO, str(training)],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": places, "RECEIVED": str(int(number))},
        timeout=60,
    )
    command, ready, told = demo.stdout.splitlines()
    assert "retouch train" in command and told == number.name.removeprefix("SIG"), demo.stderr
    assert demo.returncode == 3
    assert not Path(f"/proc/{ready.split()[0]}").exists()
