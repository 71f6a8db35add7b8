"""The experiment with other row weights: its losses against closed forms, its committed runs, and the page."""

from __future__ import annotations

import json
import math
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

REPOSITORY = Path(__file__).parents[2]

sys.path.insert(0, str(REPOSITORY / "benchmarks"))

import inputs  # noqa: E402
import row_weights  # noqa: E402

from retouch.algorithms.nft import recipe  # noqa: E402
from retouch.core.objectives.dpo import dpo_loss  # noqa: E402
from retouch.training.experience import Experience  # noqa: E402

ROWS: list[dict[str, Any]] = json.loads(
    (REPOSITORY / "benchmarks/results/row_weights.json").read_text(encoding="utf-8")
)["rows"]


def errors(advantages: list[float], group: list[int], at_reference: bool = False, **changed: Tensor) -> Any:
    torch.manual_seed(0)
    fm, reference = (torch.rand(len(group), dtype=torch.float64) for _ in range(2))
    values = {
        "fm": (reference.clone() if at_reference else fm).requires_grad_(),
        "reference": reference,
        "advantages": torch.tensor(advantages, dtype=torch.float64),
        "weight": torch.ones(len(group), dtype=torch.float64),
        "group": torch.tensor(group),
    }
    return row_weights.Errors(**{**values, **changed})


def slope(rows: Any, given: Any) -> Tensor:
    [found] = torch.autograd.grad(rows(given).sum(), given.fm)
    return found


A = [1.0, -1.0, 2.0, -0.5]


@pytest.mark.parametrize(
    ("rows", "factor"),
    [(row_weights.awm, 1.0), (row_weights.dgpo(100), 0.5), (row_weights.dgpo(1), 0.5)],
    ids=["AWM uniform", "DGPO 100", "DGPO 1"],
)
def test_at_the_reference_the_gradient_is_a_factor_times_the_advantage(rows: Any, factor: float) -> None:
    given = errors(A, [3, 3, 8, 8], at_reference=True)
    torch.testing.assert_close(slope(rows, given), factor * given.advantages, atol=1e-12, rtol=0)


def test_kto_at_the_reference_has_the_sign_of_the_advantage() -> None:
    given = errors(A, [3, 3, 8, 8], at_reference=True)
    torch.testing.assert_close(slope(row_weights.kto(100), given), given.advantages.sign(), atol=1e-12, rtol=0)


def test_dgpo_of_a_pair_is_dpo() -> None:
    """K = 2 and A = 1, -1: beta / 2 times its gradient is that of DPO."""
    given = errors([1.0, -1.0], [5, 5])
    loss, _ = dpo_loss(given.fm[:1], given.fm[1:], given.reference[:1], given.reference[1:], beta=30.0)
    [dpo] = torch.autograd.grad(loss, given.fm)
    torch.testing.assert_close(slope(row_weights.dgpo(30), given) * 30 / 2, dpo, atol=1e-12, rtol=0)


def test_regression_weights_are_softmaxes_of_groups() -> None:
    rows = Experience(*(torch.zeros(4) for _ in range(9)))
    rows.position, rows.counts_in_loss = torch.tensor([7, 2, 7, 2]), torch.tensor([1.0, 1.0, 1.0, 0.0])
    rows.advantages = torch.tensor([0.0, 3.0, math.log(3), 9.0])
    found = row_weights.softmax_of_groups(rows).advantages
    torch.testing.assert_close(found, torch.tensor([0.5, 1.0, 1.5, 0.0]))


def test_the_recipe_is_put_back() -> None:
    before = recipe.implicit_policies_loss, recipe.collect, row_weights.loop.learning_rate
    with row_weights.replaced(row_weights.ARMS["RWR"]):
        assert recipe.implicit_policies_loss is not before[0] and recipe.collect is not before[1]
    assert (recipe.implicit_policies_loss, recipe.collect, row_weights.loop.learning_rate) == before


def test_the_runs_are_of_the_run_file_and_base_in_the_tree_and_take_the_forwards_of_nft() -> None:
    plain = {row["seed"]: row for row in row_weights.compared_rows(ROWS) if row["arm"] == row_weights.NFT}
    for row in ROWS:
        overrides = row_weights.overrides_of(row_weights.ARMS[row["arm"]])
        assert row["inputs"] == inputs.inputs(row_weights.FILE, overrides=overrides)
        assert row["counted"] == pytest.approx(plain[row["seed"]]["counted"], rel=0.03)


def test_none_was_better_than_nft_on_seed_0() -> None:
    """Which would have been needed on every seed for an option of the package."""
    plain = {row["seed"]: row for row in row_weights.compared_rows(ROWS) if row["arm"] == row_weights.NFT}
    assert {row["arm"] for row in ROWS} >= {"AWM uniform", "DGPO 100", "KTO 100"}
    for row in ROWS:
        assert row["held_out"]["last"]["ocr.ned"] < row_weights.ned_after(plain[row["seed"]], row["rl_steps"])


def test_the_differences_of_the_page_are_those_of_the_table() -> None:
    page = " ".join((REPOSITORY / "docs/measured.md").read_text(encoding="utf-8").split())
    lines = [line.strip("| ").split(" | ") for line in row_weights.table(ROWS).splitlines()[3:]]
    apart = {cells[0].split()[0]: cells[5].replace("0.", ".", 1) for cells in lines}
    words = "DGPO differed by {DGPO} with twice the drift, AWM by {AWM}, KTO by {KTO} and RWR by {RWR}."
    assert words.format(**apart) in page
