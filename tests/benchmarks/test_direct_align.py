"""The experiment with Direct-Align: its arithmetic, its committed runs, and the page, which says that it failed."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable
from typing import Any

import torch

from tests.docs.pages import REPOSITORY

sys.path.insert(0, str(REPOSITORY / "benchmarks"))

import direct_align
import inputs


def result(name: str) -> list[dict[str, Any]]:
    return json.loads((REPOSITORY / f"benchmarks/results/{name}.json").read_text(encoding="utf-8"))["rows"]


ROWS = result("direct_align")


def test_the_true_velocity_gives_the_data_image_and_the_derivative_is_that_of_the_image() -> None:
    """From sigma .8 to .6; an error d of the velocity moves the image by -(.8 - .6) / (1 - .6) d, half of it."""
    x0, noise = torch.tensor([[2.0, -1.0]]), torch.tensor([[0.5, 4.0]])
    time, after = torch.tensor(0.8), torch.tensor(0.6)
    image, slope = direct_align.aligned(0.2 * x0 + 0.8 * noise, noise - x0, noise, time, after)
    torch.testing.assert_close(image, x0)
    moved, _ = direct_align.aligned(0.2 * x0 + 0.8 * noise, noise - x0 + 1, noise, time, after)
    torch.testing.assert_close(moved - x0, torch.full((1, 2), -0.5))
    torch.testing.assert_close(slope, torch.tensor(-0.5))


def test_a_relative_reward_is_that_of_the_right_text_over_another() -> None:
    assert direct_align.relative(torch.tensor(3.0), torch.tensor(2.0), 0.5) == 2.5


def test_what_relative_rewards_changed() -> None:
    """With the reward itself NED is lower than that of reward gradients, with relative rewards higher, on each seed;
    drift is higher in all."""
    page = " ".join((REPOSITORY / "docs/measured.md").read_text(encoding="utf-8").split())
    full = {row["seed"]: row["held_out"]["last"] for row in result("reward_gradient") if "nft" in row}
    assert {(row["arm"], row["seed"]) for row in ROWS} == {
        (arm, seed) for arm, (_, _, seeds) in direct_align.ARMS.items() for seed in seeds
    }
    for row in ROWS:
        assert row["inputs"] == inputs.inputs(direct_align.FILE) and row["forwards"] == 10752 / 2
        found, other = row["held_out"]["last"], full[row["seed"]]
        assert (found["ocr.ned"] > other["ocr.ned"]) == ("relative" in row["arm"])
        assert found["outside_l1"] > other["outside_l1"]

    def listed(values: Iterable[float]) -> str:
        first, second, third = (f"{value:.3f}".removeprefix("0") for value in values)
        return f"{first}, {second} and {third}"

    relative = [row["held_out"]["last"]["ocr.ned"] for row in ROWS if "relative" in row["arm"]]
    assert f"NED is {listed(relative)} where" in page
    assert f"where reward gradients reach {listed(full[seed]['ocr.ned'] for seed in range(3))}" in page
    drift = [[row["held_out"]["last"]["outside_l1"] for row in ROWS if "relative" in row["arm"]]]
    drift.append([last["outside_l1"] for last in full.values()])
    assert "higher drift ({}, {})".format(*(f"{sum(d) / 3:.3f}".removeprefix("0") for d in drift)) in page
