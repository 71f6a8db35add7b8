"""What a run does when a guard speaks: gold that falls, scorers that drift, evaluations that met an outage."""

from __future__ import annotations

import itertools
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from retouch.config import RunConfig, derive
from retouch.observe import guards
from retouch.rewards.protocol import RewardItem
from retouch.rewards.scorers import preservation
from retouch.rewards.table import Scores
from retouch.training.opening import log_header
from retouch.training.scoring import JUDGED, _with_groups, judge_details
from retouch.training.session import Session
from retouch.types import Failure, Outcome, Score, Stopped
from tests.selection import default

from .runs import Config, Scripted, Use, brightness, of_kind, same_weights, train, weights

pytestmark = pytest.mark.usefixtures("shallow")

ROSE = "the trained rewards rose by"
GOLD = {"proxy": {"scorer": "preservation"}, "gold": {"scorer": "preservation", "role": "gold"}}


def falling_gold(monkeypatch: pytest.MonkeyPatch) -> None:
    """The proxy rises with everything that is scored, gold falls, and is asked in evaluations alone, of which two
    examples are enough here."""
    monkeypatch.setattr(guards, "MIN_EXAMPLES", 2)
    monkeypatch.setattr(guards.GoldPairs, "_as_by_chance", lambda *_: False)
    up, down = itertools.count(), itertools.count()

    def gold(item: RewardItem) -> Outcome:
        assert item.group is not None and item.group >= 200  # the held-out examples
        return Score(-float(next(down)))

    rules = itertools.cycle([lambda item: Score(float(next(up))), gold])
    monkeypatch.setattr(preservation, "PreservationScorer", lambda _: Scripted(next(rules)))


@pytest.mark.parametrize("action", default(["warn", "stop"], lambda action: action == "stop"))
def test_gold_that_falls_while_the_rewards_rise(action: str, config: Config, monkeypatch: pytest.MonkeyPatch) -> None:
    falling_gold(monkeypatch)
    run = config(rewards=GOLD, training__eval_every=2, evaluation__on_gold_fall=action)
    if action == "stop":
        with pytest.raises(Stopped, match=f"{ROSE} .* at step 2") as stopped:
            train(run)
        assert stopped.value.code == 3
        return
    _, records = train(run)
    alarms = [r["alarm"] for r in of_kind(records, "event") if r["event"] == "alarm" and ROSE in r["alarm"]]
    assert len(alarms) == 2  # at step 2, and at the end
    assert all("reward/gold" not in r for r in of_kind(records, "rollout"))
    assert [r["gold"] for r in of_kind(records, "eval")] == [-0.5, -2.5, -4.5]


def test_data_with_fewer_examples_than_the_alarm_of_gold_needs(
    config: Config, caplog: pytest.LogCaptureFixture
) -> None:
    run = config(rewards=GOLD, training__eval_every=2, evaluation__num_examples=64)
    opened = SimpleNamespace(eval_data=range(5), eval_is_held_out=True, dir=SimpleNamespace(main=True))
    log_header(SimpleNamespace(config=run, derived=derive(run, 1), **vars(opened)), 1, None)  # type: ignore[arg-type]
    [line] = [one for one in caplog.messages if "gold rewards" in one]
    assert line == (
        "evaluation.data: given 5 examples, with which gold rewards can raise an alarm in 0 of 2 evaluations after the "
        "first; give it 8 examples or more"
    )


@pytest.mark.parametrize("action", default(["warn", "stop"], lambda action: action == "stop"))
def test_a_scorer_that_drifts(action: str, config: Config, scripted: Use) -> None:
    """Every epoch the same two pictures are scored; the third time they score otherwise."""
    probes = itertools.count()
    scripted(lambda item: Score(float(next(probes) >= 4)) if "GOLD" in item.prompt else brightness(item))
    client = {"probe_every": 1, "on_drift": action}
    run = config(reward_client=client, training__max_steps=6)
    if action == "stop":
        with pytest.raises(Stopped, match=r"of this process: its scores of the same images changed by 1 since"):
            train(run)
        return
    _, records = train(run)
    assert [r["step"] for r in of_kind(records, "event") if r["event"] == "alarm"] == [4]


def test_a_reward_that_is_the_same_everywhere(config: Config, scripted: Use) -> None:
    """It trains nothing, which is said once; steps before a resume count."""
    scripted(lambda item: Score(0.5))
    shape = {"rollout__num_steps": 2, "rollout__window": {"size": 1, "range": [0, 1]}, "resume": "auto"}
    train(config(training__max_steps=6, **shape))
    _, records = train(config(training__max_steps=11, **shape))
    [alarm] = [r for r in of_kind(records, "event") if r["event"] == "alarm"]
    assert alarm["step"] == 10
    assert alarm["alarm"].startswith("10 steps in a row had zero reward variance in every group")
    assert all(r["skipped"] == 1.0 for r in of_kind(records, "train"))


def test_the_mass_of_a_judge_is_logged(config: Config, scripted: Use) -> None:
    """The mean over the images that it scored; a failure has none."""
    masses = itertools.cycle([0.6, 0.8, None, 0.7])

    def judge(item: RewardItem) -> Outcome:
        mass = next(masses)
        return Failure("low_mass", "no") if mass is None else Score(mass, {"mass": mass})

    scripted(judge)
    client = {"max_failure_rate": 0.5}
    _, records = train(config(reward_client=client, training__max_steps=1, evaluation__num_examples=4))
    assert of_kind(records, "rollout")[0]["judge_mass/preservation"] == pytest.approx(0.7)


def test_an_evaluation_that_met_an_outage_is_made_up_for(config: Config, scripted: Use) -> None:
    """The run stops at step 2, which was to be evaluated, and goes on with that evaluation; what it counted stays."""
    held_out = itertools.count()

    def away(item: RewardItem) -> Outcome:
        gone = (item.group or 0) >= 200 and next(held_out) >= 2  # the evaluation at the start has two
        return Failure("unavailable", "gone", retryable=True) if gone else brightness(item)

    scripted(away)
    shape: dict[str, Any] = {"training__eval_every": 2, "reward_client": {"outage_wait_s": 0.1}, "resume": "auto"}
    with pytest.raises(Stopped, match="stayed unavailable"):
        train(config(**shape))
    scripted(brightness)
    run, records = train(config(**shape))
    assert [r["step"] for r in of_kind(records, "eval")] == [0, 2, 4]
    assert (run.rewards.asked, run.rewards.failed) == (8, 0)  # four images an epoch, of both processes


def test_an_outage_is_not_waited_out_after_a_signal(config: Config, scripted: Use) -> None:
    asked: list[float] = []

    def away(item: RewardItem) -> Outcome:
        if (item.group or 0) >= 200:
            return brightness(item)
        if not asked:
            os.kill(os.getpid(), signal.SIGTERM)
        asked.append(time.monotonic())
        return Failure("unavailable", "gone", retryable=True)

    scripted(away)
    begun = config(training__max_steps=1, reward_client={"outage_wait_s": 600.0}, resume="auto")
    with pytest.raises(Stopped, match="asked to stop while rewards were unavailable: unavailable x 4") as stopped:
        train(begun)
    assert stopped.value.code == 3 and time.monotonic() - asked[0] < 60
    scripted(brightness)
    _, records = train(begun)
    assert [r["step"] for r in of_kind(records, "train")] == [1]


def test_images_that_are_thrown_away_are_not_counted(config: Config, scripted: Use) -> None:
    """All are alike, so that other groups are to be sampled; the run stops before them, and the first come again."""
    scored = itertools.count()

    def alike(item: RewardItem) -> Outcome:
        if (item.group or 0) < 200 and next(scored) == 0:
            os.kill(os.getpid(), signal.SIGTERM)
        return Score(0.5)

    scripted(alike)
    whole: dict[str, Any] = {"rollout__batch_size_per_device": 4, "optimizer__batch_size_per_device": 4}
    begun = config(algorithm__resample_rounds=1, training__max_steps=1, resume="auto", **whole)
    with pytest.raises(Stopped, match="SIGTERM at step 0"):
        train(begun)
    run, records = train(begun)
    assert next(scored) == 4 + 4 + 4  # the last are those of the other groups
    assert [r["images"] for r in of_kind(records, "rollout")] == [8]
    assert (run.rewards.asked, run.rewards.failed) == (8, 0)


@pytest.mark.full
def test_a_run_that_gets_more_steps_ends_once_more(config: Config, scripted: Use) -> None:
    """Stopped by a signal in the very last step: that an earlier end was told is no reason to leave out this one."""
    whole: dict[str, Any] = {"rollout__batch_size_per_device": 4, "optimizer__batch_size_per_device": 4}
    train(config(training__max_steps=1, **whole))
    scored = itertools.count()

    def terminates(item: RewardItem) -> Outcome:
        if next(scored) == 0:
            os.kill(os.getpid(), signal.SIGTERM)
        return brightness(item)

    scripted(terminates)
    longer = config(training__max_steps=2, resume="auto", **whole)
    with pytest.raises(Stopped, match="SIGTERM at step 2"):
        train(longer)
    scripted(brightness)
    _, records = train(longer)
    assert [r["step"] for r in of_kind(records, "eval") if r["moment"] == "end"] == [1, 2]


@pytest.mark.full
def test_an_evaluation_that_met_an_outage_inside_an_epoch_costs_no_step(config: Config, scripted: Use) -> None:
    """Two steps an epoch; the reward is away in the evaluation after the first. What was sampled is trained on
    afterwards, to the same bits as without an outage."""
    held_out = itertools.count()

    def away(item: RewardItem) -> Outcome:
        gone = (item.group or 0) >= 200 and next(held_out) >= 2
        return Failure("unavailable", "gone", retryable=True) if gone else brightness(item)

    shape: dict[str, Any] = {"training__eval_every": 1, "reward_client": {"outage_wait_s": 0.1}, "optimizer__lr": 1e-3}
    scripted(away)
    with pytest.raises(Stopped, match="stayed unavailable"):
        train(config(**shape, resume="auto"))
    scripted(brightness)
    again, records = train(config(**shape, resume="auto"))
    assert (again.dir.path / "checkpoints" / "step-000001" / "rollouts.safetensors").is_file()
    whole, expected = train(config(**shape, name="whole"))
    assert same_weights(weights(again), weights(whole))
    assert [r["step"] for r in of_kind(records, "eval")] == [r["step"] for r in of_kind(expected, "eval")]


def test_a_run_leaves_a_report_however_it_ends(config: Config, scripted: Use) -> None:
    scripted(brightness)
    finished, _ = train(config(name="finished", training__max_steps=1))
    scripted(lambda item: Failure("bad_item", "no"))
    with pytest.raises(Stopped):
        train(config(name="stopped", training__max_steps=1))
    for name in ("finished", "stopped"):
        assert (finished.dir.path.with_name(name) / "report.html").is_file()


def test_a_step_is_told_under_the_epoch_of_its_rollouts(config: Config, scripted: Use) -> None:
    """Two steps an epoch."""
    scripted(brightness)
    _, records = train(config(training__max_steps=4))
    assert [r["epoch"] for r in of_kind(records, "train")] == [0, 0, 1, 1]
    assert [r["epoch"] for r in of_kind(records, "rollout")] == [0, 1]


def test_the_end_of_the_warm_up_is_evaluated_once(config: Config, scripted: Use) -> None:
    scripted(brightness)
    _, records = train(config(training__max_steps=4, training__eval_every=1, algorithm__sft_steps=2))
    assert [(r["step"], r["moment"]) for r in of_kind(records, "eval")] == [
        (0, "start"),
        (1, "step"),
        (2, "warmup"),
        (3, "step"),
        (4, "end"),
    ]


@pytest.mark.full
def test_a_run_that_stops_where_an_evaluation_is_due_has_each_once(config: Config, scripted: Use) -> None:
    """At the start, at the end of the warm-up, and in the last step."""
    scripted(brightness)
    shape: dict[str, Any] = {"training__max_steps": 4, "training__eval_every": 1, "algorithm__sft_steps": 2}
    _, expected = train(config(name="whole", **shape))
    for at in (0, 2, 4):
        records = stopped_and_resumed(at, lambda at=at: config(name=f"at{at}", resume="auto", **shape))
        told = [[(r["step"], r["moment"]) for r in of_kind(rows, "eval")] for rows in (records, expected)]
        assert told[0] == told[1]


def stopped_and_resumed(at: int, make: Callable[[], RunConfig]) -> list[dict[str, Any]]:
    """Records of a run that gets SIGTERM in a step, in step 0 once it is open, and goes on."""
    owner, name = (Session, "end_step") if at else (Session, "__enter__")
    real = getattr(owner, name)

    def asked(self: Session, *arguments: Any, **named: Any) -> Any:
        if at and self.progress.step + 1 == at:
            os.kill(os.getpid(), signal.SIGTERM)
        result = real(self, *arguments, **named)
        if not at:
            os.kill(os.getpid(), signal.SIGTERM)
            self.check_stop()
        return result

    with pytest.MonkeyPatch.context() as patched, pytest.raises(Stopped, match=f"step {at}\\b"):
        patched.setattr(owner, name, asked)
        train(make())
    return train(make())[1]


def test_a_report_that_fails_is_no_failure_of_the_run(
    config: Config, scripted: Use, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def full(path: Path, text: str) -> None:
        raise OSError("no space left on device")

    scripted(brightness)
    monkeypatch.setattr("retouch.observe.report.write_whole", full)
    train(config(training__max_steps=1))
    assert "no report of" in caplog.text


def test_details_of_judges_are_averaged_over_the_scores_that_have_them() -> None:
    """Sum and number, by reward and by detail of `JUDGED`."""
    found = [Score(0.5, {"order_dependent": 1.0, "position_bias": 0.25}), Score(0.1, {"order_dependent": 0.0})]
    columns = {"better": [*found, Failure("unavailable", "gone")], "ocr": [Score(1.0), Score(0.0), Score(0.5)]}
    judged = judge_details(["better", "ocr"], [Scores(columns, {"better": 1.0, "ocr": 1.0})])
    assert list(JUDGED) == ["mass", "order_dependent", "position_bias"]
    assert judged.tolist() == [[[0, 0], [1, 2], [0.25, 1]], [[0, 0]] * 3]


def test_a_group_that_is_compared_is_scored_again_as_a_whole() -> None:
    """After an outage the rows without this reward are submitted again, with those that they are compared with."""
    items = [RewardItem(i, "p", np.zeros((2, 2, 3), np.uint8), group=group) for i, group in enumerate((7, 7, 8, 8, 7))]
    apart, whole = (SimpleNamespace(compares_group=lambda told=told: told) for told in (False, True))
    assert _with_groups(apart, items, {1}) == {1}  # type: ignore[arg-type]
    assert _with_groups(whole, items, {1}) == {0, 1, 4}  # type: ignore[arg-type]
