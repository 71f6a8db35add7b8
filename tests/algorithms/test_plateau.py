"""What a run does when its evaluations no longer rise: it stops, decides the same after a resume, and can go on."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from retouch.config import RunConfig
from retouch.config import training as sections
from retouch.observe import plateau
from retouch.rewards.protocol import RewardItem
from retouch.types import Failure, Outcome, Score, Stopped

from .runs import Config, Use, brightness, of_kind, same_weights, train, weights

pytestmark = pytest.mark.usefixtures("shallow")

RISEN = (0.0, 1.0)
STOP = {"training__stop_on_plateau": True, "training__eval_every": 1, "training__max_steps": 4, "resume": "auto"}


def evaluated_as(values: Sequence[float | None], per_evaluation: int = 2) -> Callable[[RewardItem], Outcome]:
    """A reward whose evaluations have these values, and then the last one for ever."""
    scored: list[int] = []

    def rule(item: RewardItem) -> Outcome:
        if (item.group or 0) < 200:
            return brightness(item)
        scored.append(item.group or 0)
        value = values[min((len(scored) - 1) // per_evaluation, len(values) - 1)]
        return Failure("bad_item", "no") if value is None else Score(value)

    return rule


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two examples and three evaluations are enough."""
    monkeypatch.setattr(sections, "PLATEAU_EXAMPLES", 2)
    for name, value in (("PLATEAU_EXAMPLES", 2), ("EACH", 1), ("FIRST", 2)):
        monkeypatch.setattr(plateau, name, value)


def stopped(run: RunConfig) -> str:
    with pytest.raises(Stopped) as reason:
        train(run)
    assert reason.value.code == 0
    return str(reason.value)


def test_a_run_stops_at_its_plateau_and_goes_on_without_the_option(config: Config, scripted: Use) -> None:
    """With the weights of a run that never stopped; resumed with the option, it stops at its next evaluation."""
    scripted(evaluated_as(RISEN))
    whole, _ = train(config(name="whole", **{**STOP, "training__stop_on_plateau": False}))
    scripted(evaluated_as(RISEN))
    run = config(name="stops", **STOP)
    file = Path(run.logging.dir) / "stops/config.yaml"
    assert stopped(run) == (
        "training.stop_on_plateau: preservation no longer rises (+0 in the last third of the evaluations, of +1 in "
        f"all) at step 2; continue with retouch train {file} resume=auto training.stop_on_plateau=false"
    )
    assert "at step 3;" in stopped(run)
    rest, records = train(config(name="stops", **{**STOP, "training__stop_on_plateau": False}))
    assert same_weights(weights(whole), weights(rest))
    events = [(r["step"], r["event"]) for r in of_kind(records, "event")]
    assert events == [(2, "stopped"), (3, "stopped"), (4, "finished")]


def test_a_resumed_run_decides_as_one_that_was_never_interrupted(config: Config, scripted: Use) -> None:
    """All it needs lies in its evaluations."""
    scripted(evaluated_as(RISEN))
    train(config(**{**STOP, "training__max_steps": 1, "training__stop_on_plateau": False}))
    # the end of a shorter run was evaluated, too
    assert "no longer rises" in (message := stopped(config(**STOP))) and "at step 2;" in message


def test_a_named_reward_is_read_in_place_of_the_sum(config: Config, scripted: Use) -> None:
    scripted(evaluated_as((0.0, 0.3, 0.6, 0.9, 1.2)))
    rewards = {"preservation": {"weight": 1.0}, "size": {"scorer": "jpeg_size", "role": "gold"}}
    train(config(name="rises", rewards=rewards, **STOP))
    run = config(name="flat", rewards=rewards, **{**STOP, "training__stop_on_plateau": "size"})
    train(run)  # what never rose is no plateau


def test_a_run_that_only_fails_does_not_stop(config: Config, scripted: Use) -> None:
    scripted(evaluated_as((0.0, 1.0, None)))
    train(config(**STOP))


def test_the_plateau_is_that_of_rl(config: Config, scripted: Use) -> None:
    """Evaluations of the warm-up count for nothing: what it raised is no gain of RL."""
    scripted(evaluated_as((0.0, 0.5, 1.0)))
    train(config(algorithm__sft_steps=2, **{**STOP, "training__max_steps": 5}))


def test_a_run_without_a_verdict_says_so_once(config: Config, scripted: Use, caplog: pytest.LogCaptureFixture) -> None:
    """No example has a score in the first evaluation, with which all others are compared."""
    told = "does not know whether preservation still rises: it takes 2 examples"
    scripted(evaluated_as((0.0, 1.0), per_evaluation=4))
    train(config(name="tells", **{**STOP, "training__max_steps": 2}))
    assert told not in caplog.text
    scripted(evaluated_as((None, 0.0, 1.0)))
    train(config(name="fails", **STOP))
    assert caplog.text.count(told) == 1
