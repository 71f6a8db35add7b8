"""The experiment with credit for each line of a text: its loss and its advantages in closed form."""

from __future__ import annotations

import json
import sys
from typing import Any

import torch

from retouch.core.objectives.nft import nft_loss
from retouch.types import Failure, Score
from tests.docs.pages import REPOSITORY

sys.path.insert(0, str(REPOSITORY / "benchmarks"))

import inputs
import line_credit


def result(name: str) -> dict[int, dict[str, Any]]:
    path = REPOSITORY / f"benchmarks/results/{name}.json"
    return {row["seed"]: row for row in json.loads(path.read_text(encoding="utf-8"))["rows"]}


def scores(*rows: tuple[float, float]) -> list[Score]:
    return [Score(sum(row) / 2, {"lines": [{"ned": value} for value in row]}) for row in rows]


def test_equal_advantages_have_the_loss_and_the_gradient_of_nft() -> None:
    """Away from the old policy, with two copies of each of two samples of 3 x 2 cells."""
    velocity, old, x_t, x0 = torch.randn(4, 4, 5, 3, 2, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    advantages, sigma = torch.tensor([1.7, -0.4], dtype=torch.float64), torch.tensor([0.2, 0.9, 0.5, 0.7])
    weight, total = torch.tensor([1.0, 2.0, 0.5, 1.0]), torch.tensor(4.0)
    found: list[torch.Tensor] = []
    for maps in (False, True):
        v = velocity.clone().requires_grad_()
        shared = (0.3, 5.0, "normal", None, weight, total)
        if maps:
            wide = advantages.view(2, 1, 1, 1).expand(2, 1, 3, 2).repeat_interleave(2)
            loss, _ = line_credit.loss_of_cells(2, v, old, x_t, x0, sigma, wide, *shared)
        else:
            loss, _ = nft_loss(v, old, x_t, x0, sigma, advantages.repeat_interleave(2), *shared)
        loss.backward()
        assert v.grad is not None
        found += [loss.detach(), v.grad]
    torch.testing.assert_close(found[2:], found[:2], rtol=1e-12, atol=1e-12)


def test_the_gradient_of_a_cell_is_the_advantage_of_its_cell() -> None:
    """At the old policy: A times that of flow matching, for each copy of each sample."""
    v, x_t, x0 = torch.randn(3, 4, 2, 1, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    maps, sigma = torch.tensor([[1.0, -2.0, 0.0], [0.5, 3.0, -1.0]], dtype=torch.float64), torch.full((4,), 0.5)
    given, v = (v, v.clone().requires_grad_())
    shared = (0.1, 5.0, "normal", None, torch.ones(4), torch.tensor(4.0))
    line_credit.loss_of_cells(2, v, given, x_t, x0, sigma, maps.view(2, 1, 1, 3).repeat_interleave(2), *shared)[
        0
    ].backward()
    error = x_t - 0.5 * given - x0
    scale = error.abs().mean((1, 2, 3), keepdim=True)
    expected = maps.repeat_interleave(2, 0).view(4, 1, 1, 3) * 2 * -0.5 * error / scale / (4 * 6)
    torch.testing.assert_close(v.grad, expected)


def test_a_bad_line_does_not_lower_the_advantage_of_the_good_one() -> None:
    """Two samples of one example; the advantage of a better first line is 1, whatever the second lines are."""
    group, usable = torch.zeros(2, dtype=torch.int64), torch.ones(2, dtype=torch.bool)
    for second in ((0.0, 0.0), (0.0, 1.0), (0.4, 0.1)):
        found = line_credit.line_advantages(
            scores((0.9, second[0]), (0.1, second[1])), group, usable, "group", "group", clip=5.0
        )
        torch.testing.assert_close(found[:, 0], torch.tensor([1.0, -1.0]), rtol=1e-3, atol=0)
        assert found[0, 1].sign() == (second[0] > second[1]) - (second[0] < second[1])


def test_a_failed_sample_leaves_the_comparison() -> None:
    group, usable = torch.zeros(3, dtype=torch.int64), torch.tensor([True, False, True])
    outcomes = [scores((1.0, 0.0))[0], Failure("bad_item", ""), scores((0.0, 0.5))[0]]
    found = line_credit.line_advantages(outcomes, group, usable, "group", "group", clip=5.0)
    torch.testing.assert_close(found, torch.tensor([[1.0, -1.0], [0.0, 0.0], [-1.0, 1.0]]), rtol=1e-3, atol=0)


def test_a_cell_belongs_to_the_nearest_line() -> None:
    """Rows of 16 pixels: one line in the first, one in the last; the second and third belong to the nearer one."""
    found = line_credit.nearest_line([(2, 1, 30, 14), (2, 50, 30, 62)], (4, 2), 16)
    assert found.tolist() == [[0, 0], [0, 0], [1, 1], [1, 1]]


def test_what_two_seeds_gained_over_the_file() -> None:
    """From the warm-up of the file's own rows, on every measure that they have; the page says that two were run."""
    rows, file = result("line_credit"), result("two_texts")
    page = " ".join((REPOSITORY / "docs/measured.md").read_text(encoding="utf-8").split())
    table = (REPOSITORY / "docs/algorithms.md").read_text(encoding="utf-8")
    assert sorted(rows) == [0, 2]
    for seed, row in rows.items():
        assert row["inputs"] == inputs.inputs(line_credit.CONFIG)
        assert row["inputs"]["run"] == file[seed]["inputs"]["run"]
        warm, last = (row["means"][point] for point in ("warmed up", "last"))
        before, after = (file[seed]["means"][point] for point in ("warmed up", "last"))
        assert {title: warm[title] for title in before} == before
        gain = shown(last["line NED"] - after["line NED"])
        ned, *others = (f"{shown(last[title])} ({shown(after[title])})" for title in after)
        drift = f"{shown(warm['drift'], 4)} to {shown(last['drift'], 4)}"
        assert f"| {seed} | {ned}, +{gain} | {' | '.join(others)} | {drift} |" in page
        assert f"seed {seed} +{gain}" in table
    assert rows[0]["means"]["last"]["line NED"] - file[0]["means"]["last"]["line NED"] < 0.03
    assert f"| {rows[0]['forwards']:,} | not built" in table


def shown(value: float, digits: int = 3) -> str:
    return f"{value:.{digits}f}".removeprefix("0")
