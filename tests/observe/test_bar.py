"""The bar of a run on a terminal: phase, time left, loss, reward with its trend, pace."""

from __future__ import annotations

import io
import logging
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console, Group

from retouch.algorithms.vlm_grpo.config import VlmDerived
from retouch.cli.options import start_logging
from retouch.config import RunConfig, derive, load_run, numbers
from retouch.config.cost import evaluation_forwards, forwards_of
from retouch.observe import Stopwatch, bar
from retouch.observe.bar import Pace, TrainingBar, Work
from retouch.observe.status import time_left
from retouch.registry import load_attribute
from retouch.training.build import build

Config = Callable[..., RunConfig]

CONFIGS = Path(__file__).parents[2] / "configs"


def step(number: int, seconds: float, phase: str = "rl", **values: Any) -> dict[str, Any]:
    return {"kind": "train", "step": number, "phase": phase, "time": {"step": seconds}, **values}


def terminal(width: int = 100) -> Console:
    return Console(file=io.StringIO(), force_terminal=True, width=width, color_system=None, legacy_windows=False)


@pytest.fixture
def console(monkeypatch: pytest.MonkeyPatch) -> Console:
    made = terminal()
    monkeypatch.setattr(bar, "_console", lambda: made)
    # ten refreshes a second could miss a part of a tiny epoch
    monkeypatch.setattr(bar, "_BarLines", partial(bar._BarLines, refresh_per_second=500))
    return made


def test_the_time_left_is_that_of_the_phase_and_its_evaluations() -> None:
    """By hand: warm-up to step 10, evaluations every 4 steps of 3 s each and one at the end of a phase."""
    pace = Pace({"warmup": 10, "rl": 20}, eval_every=4)
    assert pace.left("warmup", 0) is None
    pace.see({"kind": "eval", "step": 0, "time": {"step": 3.0}})
    assert pace.step is None
    pace.see(step(1, 1.0, "warmup"))
    pace.see(step(2, 2.0, "warmup"))
    assert pace.step == 1.5
    assert pace.left("warmup", 2) == 8 * 1.5 + 3 * 3.0  # after steps 4, 8 and 10
    assert pace.left("rl", 10) is None  # a step of RL takes another time
    pace.see(step(11, 10.0))
    assert pace.left("rl", 11) == 9 * 10.0 + 3 * 3.0  # after steps 12, 16 and 20
    assert Pace({"rl": 20}, eval_every=0).left("rl", 0) is None


def test_a_page_has_the_time_left_of_the_bar() -> None:
    """A second of a warm-up tells nothing of the steps of RL: it was taken for all of them."""
    config = {"training": {"max_steps": 20, "eval_every": 4}, "algorithm": {"sft_steps": 10}}
    records = [{"kind": "eval", "step": 0, "time": {"step": 3.0}}]
    assert time_left(records, config) == ""
    records += [step(number, 2.0, "warmup") for number in range(1, 9)]
    assert time_left(records, config) == "0:00:07 to RL"  # two steps and the evaluation after step 10
    records += [step(number, 2.0, "warmup") for number in (9, 10)]
    assert time_left(records, config) == ""
    records += [step(11, 10.0), {"kind": "eval", "step": 10, "time": {"step": 5.0}}]
    assert time_left(records, config) == "0:01:45 left"  # nine steps, and after steps 12, 16 and 20


class Counts:
    """Costs of a run as they are read: images, and rows of forwards by part."""

    def __init__(self) -> None:
        self.images = 0
        self.forwards = dict[str, int]()

    def rows(self, part: str) -> int:
        return self.forwards.get(part, 0)


def work_of(given: RunConfig, costs: Any, awaiting: int = 0) -> Work:
    return Work(given, derive(given), costs, lambda: awaiting, evaluated=3)


def test_the_work_of_an_epoch_by_hand(config: Config) -> None:
    """Four images of two denoising steps each, two optimizer steps; the forwards that an image costs are those of
    `retouch check`."""
    given, costs = config(algorithm__sft_steps=2), Counts()
    of_image = forwards_of(given, derive(given).as_dict())
    assert (derive(given).images_per_epoch_per_device, derive(given).optimizer_steps_per_epoch) == (4, 2)
    work = work_of(given, costs, awaiting=1)
    assert work.of_step["rl"] == 4 * of_image.all / 2
    assert work.inside("rollout", "warmup", 1) is None
    costs.forwards["rollout"] = 3
    assert work.inside("rollout", "rl", 2) == ("images sampled", 3 / of_image.sampling, 4)
    costs.images = 3  # whole batches
    assert work.inside("other", "rl", 2) == ("images sampled", 3, 4)
    assert work.inside("reward_wait", "rl", 2) == ("images scored", 2, 4)
    costs.forwards["train_forward"] = 1
    of_step = 4 * (of_image.ratios + of_image.training) / 2
    assert work.inside("train_backward", "rl", 3) == ("steps trained", 1 + 1 / of_step, 2)
    costs.forwards = {}
    assert work.inside("checkpoint", "rl", 4) is None  # the epoch is over
    costs.forwards["eval"] = round(evaluation_forwards(given))
    assert work.inside("eval", "rl", 4) == ("images evaluated", 1, 3)


def test_the_work_of_a_cycle_of_completions() -> None:
    """Of vlm_grpo: the images of all completions that are generated at once; their steps have no forwards to count."""
    given, costs = load_run(CONFIGS / "tiny/qwen_image_edit_vlm_grpo.yaml"), Counts()
    derived = numbers(given, 1)
    assert isinstance(derived, VlmDerived)
    images = derived.images_per_generation_per_device
    work = Work(given, derived, costs, lambda: 2, evaluated=3)
    assert work.inside("text", "rl", 0) is None
    costs.forwards["rollout"] = 5
    assert work.inside("rollout", "rl", 0) == ("images sampled", 5 / derived.forwards_per_image, images)
    costs.images = images
    assert work.inside("reward_wait", "rl", 0) == ("images scored", images - 2, images)
    assert work.inside("train_backward", "rl", 0) == ("steps trained", 0, derived.optimizer_steps_per_generation)
    assert work.of_step == {}  # the time of a step is not that of images


def test_an_evaluation_tells_the_time_before_the_first_step(config: Config) -> None:
    given = config(algorithm__sft_steps=2, training__max_steps=20, training__eval_every=0)
    work = work_of(given, Counts())
    pace = Pace({"warmup": 2, "rl": 20}, 0, work)
    assert pace.left("rl", 2) is None
    pace.see({"kind": "eval", "step": 0, "time": {"step": 6.0}})
    each = work.of_step["rl"] * 6.0 / work.of_evaluation
    assert pace.left("rl", 2) == pytest.approx(18 * each + 6.0) and not pace.is_measured("rl")
    pace.see(step(3, 5.0))
    assert pace.left("rl", 3) == 17 * 5.0 + 6.0 and pace.is_measured("rl")


@pytest.mark.parametrize("width", [60, 100])
def test_its_lines_fit_the_terminal(config: Config, monkeypatch: pytest.MonkeyPatch, width: int) -> None:
    monkeypatch.setattr(bar, "_console", lambda: terminal(width))
    clock, costs = Stopwatch(), Counts()
    given = config(name="a_run_with_a_long_name", training__max_steps=2000)
    shown = TrainingBar(given, clock, lambda: "rl", 34, work_of(given, costs))
    shown.see(step(35, 7.0, loss=0.25))
    costs.images = 2
    screen = terminal(width)
    with clock.part("rollout"):
        screen.print(Group(*shown._bar.get_renderables()))
    first, second, third = screen.file.getvalue().splitlines()  # type: ignore[attr-defined]
    assert all(len(line) <= width for line in (first, second, third))
    assert "35/2000" in first and "2/4" in second and third.startswith("loss 0.25")
    assert "RL · sampling" in first and "images sampled" in second and " left" in first
    assert (given.name in first) == (width == 100)


def test_quiet_shows_no_bar(config: Config, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(logging.getLogger(), "handlers", [])
    monkeypatch.setenv("FORCE_COLOR", "1")  # as on a terminal
    for quiet in (True, False):
        start_logging(quiet=quiet)
        logging.getLogger().handlers[0].console = terminal()  # type: ignore[attr-defined]
        assert TrainingBar(config(), Stopwatch(), lambda: "rl", 0).shown is not quiet
        monkeypatch.setattr(logging.getLogger(), "handlers", [])


def test_what_it_shows(config: Config, console: Console, monkeypatch: pytest.MonkeyPatch) -> None:
    now = [100.0]
    monkeypatch.setattr(bar.time, "monotonic", lambda: now[0])
    phase, clock = ["warmup"], Stopwatch()
    given = config(training__max_steps=20, algorithm__sft_steps=2)
    shown = TrainingBar(given, clock, lambda: phase[0], 0)

    def lines() -> list[str]:
        screen = terminal()
        screen.print(Group(*shown._bar.get_renderables()))
        return [" ".join(line.split()) for line in screen.file.getvalue().splitlines()]  # type: ignore[attr-defined]

    def bare(line: str) -> str:
        return " ".join(line.translate(str.maketrans("", "", "━╸╺")).split())

    with clock.part("eval"):
        assert bare(lines()[0]) == "t evaluating 0/20"
    shown.see(step(1, 2.0, "warmup", loss=0.25))
    with clock.part("train_forward"):
        assert bare(lines()[0]) == "t warm-up · training 1/20 0:00:02 to RL"
    assert lines()[1] == "loss 0.25 · 2 s a step"
    phase[0] = "rl"
    for epoch, reward in enumerate([0.1, 0.2, 0.3, 0.6]):
        shown.see({"kind": "rollout", "step": epoch + 3, "combined_score": reward})
        shown.see(step(epoch + 3, 10.0, loss=None if epoch == 3 else 0.5))
    now[0] += 25
    with clock.part("reward_wait"):
        assert bare(lines()[0]) == "t RL · rewards 6/20 0:01:55 left"  # 14 steps, 25 s ago
    assert lines()[1] == "loss is NaN or Inf · reward 0.600 · trend ▲ 0.300 · 10 s a step"


def test_a_run_on_a_terminal(config: Config, console: Console, caplog: pytest.LogCaptureFixture) -> None:
    """Through a real run, drawn at every record; log.txt keeps the lines that the bar replaces."""
    caplog.set_level(logging.INFO, "retouch")
    run = build(config(algorithm__sft_steps=2))
    try:
        load_attribute(run.config.algorithm.recipe)(run)
    finally:
        run.close()
    drawn = console.file.getvalue()  # type: ignore[attr-defined]
    assert all(word in drawn for word in ("warm-up", "RL", "loss ", "reward ", " s a step", "4/4"))
    assert all(word in drawn for word in ("images evaluated", "images sampled", "steps trained", "about 0:00:"))
    log = (run.dir.path / "log.txt").read_text(encoding="utf-8")
    assert "step 1 of 4: loss " in log
    assert log.index("to RL, at the speed of this evaluation") < log.index("step 1 of 4: loss ")
    (head,) = [line for line in log.splitlines() if "new run" in line]
    assert head.partition("t: ")[2] == (
        "new run, grpo trains 2,362,144 parameters (full) of flux_fill on 1 process. It takes 4 optimizer steps, the "
        "first 2 supervised; an RL epoch samples 4 images of 2 examples and trains on them for 2 optimizer steps."
    )
