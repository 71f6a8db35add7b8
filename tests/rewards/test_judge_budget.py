"""The budget of a judge over all processes and starts of a run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from retouch.config import ConfigError
from retouch.rewards.base import Reward
from retouch.rewards.client.config import RewardClientConfig
from retouch.rewards.protocol import RewardItem
from retouch.rewards.scorers import judge_budget
from retouch.rewards.scorers.judge_budget import SPENDING_VARIABLE, Budget, BudgetSpent, share_budgets
from retouch.rewards.scorers.openai_judge import OpenAIJudgeReward
from retouch.rewards.table import RewardTable
from retouch.types import Failure
from tests.rewards.openai_server import KEY, OpenAIServer
from tests.rewards.test_judge import grey

USAGE = {"prompt_tokens": 400_000, "completion_tokens": 100_000}
"""Two dollars by the prices below."""


@pytest.fixture(autouse=True)
def at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every question looks into the folder."""
    monkeypatch.setattr(judge_budget, "_SHARED_EVERY_S", 0.0)


def budget(folder: Path | None = None, **limits: Any) -> Budget:
    made = Budget(price_in=2.5, price_out=10.0, **limits)
    if folder is not None:
        made.share(folder)
    return made


def spend(one: Budget) -> None:
    """A batch of one question."""
    one.begin()
    one.used(USAGE)
    one.exchange()


def test_processes_of_a_run_share_a_budget(tmp_path: Path) -> None:
    one, other = (budget(tmp_path, dollars=4.0) for _ in range(2))
    spend(one)
    spend(other)
    for each in (one, other):
        with pytest.raises(BudgetSpent, match=r"budget of 4 dollars is spent; .* resume with a larger budget_dollars"):
            each.begin()
    assert (one.cost, one.total()) == (2.0, (2, 800_000, 200_000))


@pytest.mark.parametrize(("limit", "value"), [("requests", 1), ("tokens", 500_000), ("dollars", 2.0)])
def test_a_resumed_run_goes_on_counting(tmp_path: Path, limit: str, value: float) -> None:
    """Also what a process counted that was killed: it wrote its count with the batch before."""
    spend(budget(tmp_path, **{limit: value}))
    again = budget(tmp_path, **{limit: value})
    with pytest.raises(BudgetSpent):
        again.begin()
    assert budget(tmp_path, **{limit: 2 * value}).begin() is None  # resumed with a larger one
    assert budget(**{limit: value}).begin() is None  # alone


def test_a_process_looks_at_the_others_once_a_second(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(judge_budget, "_SHARED_EVERY_S", 60.0)
    one, other = (budget(tmp_path, requests=2) for _ in range(2))
    for each in (one, other):
        each.begin()  # the first look
    one.begin()
    one.exchange()  # after a batch, whenever it was
    other.begin()
    assert (one.total()[0], other.total()[0]) == (2, 2)
    other.exchange()
    assert other.total()[0] == 4
    with pytest.raises(BudgetSpent):
        other.begin()


def test_a_file_that_holds_no_count_is_ignored(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    for name, text in (("a", "{"), ("b", '{"requests": -1, "tokens_in": 0, "tokens_out": 0}'), ("c", "[]")):
        (tmp_path / f"{name}.json").write_text(text, encoding="utf-8")
    assert budget(tmp_path, requests=1).total() == (0, 0, 0)
    assert caplog.text.count("not a count of requests") == 3


def test_a_folder_that_cannot_be_written_is_reported_and_counts_this_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Once, and not with every batch; what was spent meanwhile is counted as soon as there is room again."""
    one, write = budget(tmp_path, requests=3), judge_budget.write_whole
    monkeypatch.setattr(judge_budget, "write_whole", lambda path, text: Path("/dev/full").write_text(text, "utf-8"))
    spend(one)
    spend(one)
    assert caplog.text.count("cannot be counted there (No space left on device)") == 1
    assert budget(tmp_path).total() == (0, 0, 0)
    monkeypatch.setattr(judge_budget, "write_whole", write)
    spend(one)
    assert budget(tmp_path).total() == (3, 1_200_000, 300_000)
    with pytest.raises(BudgetSpent):
        one.begin()


@pytest.mark.parametrize("place", ["/proc/judge-spending", "file/judge-spending"])
def test_a_folder_that_cannot_be_made_counts_this_process(
    place: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """For any user, root included."""
    (tmp_path / "file").touch()
    one = budget(tmp_path / place, requests=1)
    spend(one)
    assert caplog.text.lower().count("cannot be counted there (no") == 1  # such file or directory; not a directory
    with pytest.raises(BudgetSpent):
        one.begin()


def entry(server: OpenAIServer, **options: Any) -> Reward:
    return OpenAIJudgeReward(model="judge", address=server.url, concurrency=1, **options)


def scored(folder: Path, name: str, one: Reward, items: list[RewardItem]) -> list[str]:
    """Codes of the failures of a start of a run on these items."""
    table = RewardTable({name: one}, RewardClientConfig(), folder)
    table.start()
    try:
        assert table.wait_ready(30.0) == []
        outcomes = table.submit(items).result().outcomes[name]
    finally:
        table.close()
    return [outcome.code for outcome in outcomes if isinstance(outcome, Failure)]


@pytest.mark.parametrize("name", ["judge", "../judge", "x" * 300])
def test_a_run_counts_in_its_directory(tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", KEY)
    with OpenAIServer() as server:
        limited = entry(server, budget_requests=4)
        assert scored(tmp_path / "run", name, limited, [grey(51)] * 2) == []  # and a first question
        with_one_left = scored(tmp_path / "run", name, limited, [grey(51)])  # its first question
        assert (with_one_left, len(server.asked)) == (["budget_spent"], 4)
        with pytest.raises(ConfigError, match="budget of 4 requests is spent"):
            scored(tmp_path / "run", name, limited, [grey(51)])
        assert scored(tmp_path / "other", name, limited, [grey(51)]) == []
    assert [path.name for path in tmp_path.iterdir()] in (["run", "other"], ["other", "run"])
    assert len(list((tmp_path / "run/judge-spending").rglob("*.json"))) == 2  # one start asked nothing


def test_a_server_of_the_run_counts_in_the_folder_that_it_is_given(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Judge:
        budget = Budget(requests=1)

    judge = Judge()
    monkeypatch.setenv(SPENDING_VARIABLE, str(tmp_path))
    share_budgets({"mine": judge, "another": object()}, None)
    assert judge.budget.ledger is not None
    judge.budget.begin()
    judge.budget.exchange()
    assert [path.name for path in tmp_path.iterdir()] == ["mine.d"]
    monkeypatch.delenv(SPENDING_VARIABLE)
    other = Judge()
    other.budget = Budget(requests=1)
    share_budgets({"mine": other}, None)
    assert other.budget.ledger is None


# --- prices ---


@pytest.mark.parametrize(
    ("options", "prices"),
    [
        ({"model": "auto"}, (2.5, 10.0)),
        ({"model": "gpt-4o-2024-11-20"}, (2.5, 10.0)),
        ({"model": "auto", "price_in": 1.0}, (1.0, 0.0)),
        ({"model": "another"}, (0.0, 0.0)),
        ({"model": "auto", "address": "http://127.0.0.1:8001/v1"}, (0.0, 0.0)),
    ],
)
def test_the_default_model_at_openai_has_its_list_prices(options: dict[str, Any], prices: tuple[float, float]) -> None:
    made = OpenAIJudgeReward(**options)
    assert (made.price_in, made.price_out) == prices
    assert OpenAIJudgeReward(**made.model_dump()) == made


def test_a_paid_judge_without_a_limit_is_a_warning() -> None:
    [line] = OpenAIJudgeReward(model="auto").advice("judge")
    assert line.startswith("rewards.judge.address: given https://api.openai.com/v1, a paid judge without a limit")
    assert OpenAIJudgeReward(model="auto", budget_dollars=5).advice("judge") == []
    assert OpenAIJudgeReward(model="m", address="http://127.0.0.1:8001/v1").advice("judge") == []
    assert OpenAIJudgeReward(url="http://127.0.0.1:8000").advice("judge") == []


def test_a_budget_of_dollars_of_ones_own_judge_never_ends() -> None:
    """Its file then serves a paid judge and a judge on this machine."""
    own = OpenAIJudgeReward(model="auto", address="http://127.0.0.1:8001/v1", budget_dollars=5)
    assert own.make().budget.dollars == 5 and own.price_in == 0 and own.advice("judge") == []
    [line] = OpenAIJudgeReward(model="m", address="http://proxy.example/v1", budget_dollars=5).advice("judge")
    assert line.startswith("rewards.judge.budget_dollars: given 5 without the prices of http://proxy.example/v1")
