"""Section `judge`: what the rewards that ask a judge have in common, and one budget for them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from retouch.config import ConfigError, RunConfig
from retouch.config.load import dump_run, parse_run
from retouch.config.trust import named
from retouch.config.yaml12 import parse
from retouch.observe.conflicts import RunRecord, reward_conflicts
from retouch.rewards.judge import JudgeConfig
from retouch.rewards.scorers import make_scorer
from retouch.rewards.scorers.judge_budget import share_budgets
from retouch.rewards.scorers.openai_judge import OpenAIJudgeReward
from retouch.rewards.table import RewardTable
from retouch.types import Failure, Score
from tests.config.conftest import BASE
from tests.rewards.openai_server import KEY, OpenAIServer
from tests.rewards.test_judge import grey

JUDGE: dict[str, Any] = {"model": "judge", "address": "http://127.0.0.1:9/v1", "budget_requests": 7, "timeout_s": 9}
TWO: dict[str, Any] = {"openai_judge": None, "looks": {"scorer": "viescore", "task": "text_to_image"}}


def run(judge: dict[str, Any] | None = None, rewards: dict[str, Any] = TWO, *overrides: str) -> RunConfig:
    return parse_run({**BASE, "rewards": rewards, **({} if judge is None else {"judge": judge})}, overrides)


def test_entries_have_the_keys_that_they_do_not_write() -> None:
    found: dict[str, Any] = dict(
        run(JUDGE, {**TWO, "slow": {"scorer": "openai_judge", "timeout_s": 99}, "seam": {}}).rewards
    )
    assert [(e.model, e.budget_requests, e.timeout_s) for name, e in found.items() if name != "seam"] == [
        ("judge", 7, 9.0), ("judge", 7, 9.0), ("judge", 7, 99.0)
    ]  # fmt: skip
    assert all(found[name].shares_budget for name in ("openai_judge", "looks", "slow"))


@pytest.mark.parametrize("own", [{"model": "other"}, {"budget_requests": 3}, {"price_in": 1.0}])
def test_an_entry_with_another_model_price_or_limit_has_a_budget_of_its_own(own: dict[str, Any]) -> None:
    prices = {"price_in": 2.0, "price_out": 4.0}
    entry: Any = run({**JUDGE, **prices}, {"openai_judge": own}).rewards["openai_judge"]
    assert not entry.shares_budget and entry.budget_requests == own.get("budget_requests", 7)
    assert entry.price_out == (0.0 if "model" in own else 4.0)  # prices go with the model


def test_a_stored_run_reads_the_same_and_a_change_of_the_section_acts_on_it() -> None:
    first = run(JUDGE)
    stored = parse(dump_run(first))
    assert parse_run(stored) == first and "model" not in stored["rewards"]["looks"]
    changed: Any = parse_run(stored, ["judge.budget_requests=20", "rewards.looks.timeout_s=3"]).rewards
    assert [(e.budget_requests, e.timeout_s) for e in changed.values()] == [(20, 9.0), (20, 3.0)]


@pytest.mark.parametrize("key", ["address", "question"])
def test_a_file_cannot_say_that_a_key_is_the_sections(key: str) -> None:
    """It would need no consent, be stored nowhere, and be in no key of the cache."""
    entry = {"model": "m", "address": "https://judge.example/v1", "question": "? {prompt}", "from_judge": [key]}
    with pytest.raises(ConfigError, match=r"rewards\.openai_judge\..*from_judge"):
        run(None, {"openai_judge": entry})
    beside: Any = run({"timeout_s": 9}, {"openai_judge": entry}).rewards["openai_judge"]
    assert key not in beside.from_judge and beside.timeout_s == 9


def test_a_record_with_a_judge_of_a_plug_in_alone_is_read() -> None:
    rewards = {"mine": {"scorer": "of_a_plug_in", "url": None}}
    assert RunRecord("a", Path(), {"judge": {"model": "m"}, "rewards": rewards}, {}).rewards == rewards


def test_entries_in_different_places_share_the_budget(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[Any] = []

    def connected(scorers: dict[str, Any], *_: str) -> None:
        made.extend(scorers.values())

    monkeypatch.setattr("retouch.rewards.table.LocalRewards", connected)
    config = run(JUDGE, {"openai_judge": None, "cropped": {"scorer": "openai_judge", "crop": "mask_box"}})
    RewardTable(config.rewards, config.reward_client).start()
    assert len(made) == 2 and made[0].budget is made[1].budget


def test_without_the_section_an_entry_is_stored_as_before() -> None:
    stored = parse(dump_run(run(None, {"openai_judge": {"model": "m", "budget_tokens": 5}})))
    assert stored["judge"] is None and "from_judge" not in stored["rewards"]["openai_judge"]
    assert stored["rewards"]["openai_judge"]["budget_tokens"] == 5


def test_a_revision_and_a_consent_do_not_depend_on_where_the_keys_stand(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", KEY)
    away = {**JUDGE, "address": "http://judge.example/v1"}
    one, other = run(None, {"openai_judge": away}), run(away, {"openai_judge": {}})
    revisions = {made.rewards["openai_judge"].make().spec.revision for made in (one, other)}
    assert len(revisions) == 1
    assert list(named(one)) == [("rewards", "openai_judge", "address")] and list(named(other)) == [("judge", "address")]


def test_a_section_that_nobody_takes_is_an_error() -> None:
    for rewards in ({"seam": {}}, {"openai_judge": {"url": "http://127.0.0.1:8"}}):
        with pytest.raises(ConfigError, match="judge: given, but no reward of the run asks a judge"):
            run(JUDGE, rewards)


def test_sections_of_objects_are_read_as_those_of_files() -> None:
    made = RunConfig.model_validate({**BASE, "judge": JudgeConfig(**JUDGE), "rewards": {"openai_judge": {}}})
    assert made == run(JUDGE, {"openai_judge": {}})
    entry = OpenAIJudgeReward(model="m")
    assert RunConfig.model_validate({**BASE, "judge": JUDGE, "rewards": {"a": entry}}).rewards["a"] == entry


def test_a_comparison_of_runs_sees_another_judge(tmp_path: Path) -> None:
    records = [
        RunRecord(name, tmp_path, parse(dump_run(run({**JUDGE, "model": name}))), {}) for name in ("first", "second")
    ]
    assert [line.split("(")[1] for line in reward_conflicts(records)] == ["model); its scores are not compared"] * 2
    assert reward_conflicts(records[:1] * 2) == []


def test_the_limits_of_the_section_are_one_budget(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Of a run and of its resumption, and of the scorers of a process; an entry with a limit of its own has its own."""
    monkeypatch.setenv("OPENAI_API_KEY", KEY)
    with OpenAIServer() as server:
        judge = {"model": "judge", "address": server.url, "budget_requests": 6}
        entries = {"a": {"scorer": "openai_judge"}, "b": {"scorer": "openai_judge", "mode": "rubric"}}
        own = {"c": {"scorer": "openai_judge", "budget_requests": 2}}
        for is_paid in (True, False):
            scorers = {name: entry.make() for name, entry in run(judge, {**entries, **own}).rewards.items()}
            share_budgets(scorers, tmp_path)
            outcomes = [one for name in ("a", "b", "a") for one in scorers[name].score([grey(10), grey(20)])]
            assert [isinstance(one, Score) for one in outcomes] == [is_paid] * 6
            assert isinstance(scorers["c"].score([grey(30)])[0], Score)
        assert {one.name for one in tmp_path.iterdir()} == {"judge%.d", "c.d"}


def test_the_server_of_a_run_counts_in_the_same_folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """It makes its scorers of the options of their entries."""
    monkeypatch.setenv("OPENAI_API_KEY", KEY)
    with OpenAIServer() as server:
        config = run({**JUDGE, "address": server.url}, {"openai_judge": {"url": "auto"}})
        made: Any = make_scorer("openai_judge", config.rewards["openai_judge"].scorer_options())
        share_budgets({"openai_judge": made}, tmp_path)
        assert made.options.shares_budget and made.budget.ledger.folder == tmp_path / "judge%.d"


def test_a_table_counts_for_all_of_its_judges(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", KEY)
    with OpenAIServer() as server:
        judge = {"model": "judge", "address": server.url, "budget_requests": 3}
        config = run(judge, {"a": {"scorer": "openai_judge"}, "b": {"scorer": "openai_judge"}})
        table = RewardTable(config.rewards, config.reward_client, tmp_path)
        table.start()
        try:
            assert table.wait_ready(60) == []  # one question each
            found = table.submit([grey(10), grey(20)]).result().outcomes
        finally:
            table.close()
        outcomes = [outcome for column in found.values() for outcome in column]
        assert sum(isinstance(one, Score) for one in outcomes) == 1
        assert {one.code for one in outcomes if isinstance(one, Failure)} == {"budget_spent"}
