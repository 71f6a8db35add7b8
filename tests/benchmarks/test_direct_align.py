"""The experiment with Direct-Align: its arithmetic, its committed runs, and the page, which says that it failed."""

from __future__ import annotations

import json
import sys
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


def test_no_arm_reached_reward_gradients_in_half_of_their_forwards() -> None:
    """Those of the run file in the tree, seed 0; nor was drift as low."""
    [full] = [row for row in result("reward_gradient") if row["run"] == "reward_gradient-0"]
    page = " ".join((REPOSITORY / "docs/measured.md").read_text(encoding="utf-8").split())
    assert {row["arm"] for row in ROWS} == set(direct_align.ARMS) and {row["seed"] for row in ROWS} == {0}
    last = [row["held_out"]["last"] for row in ROWS]
    for row, found in zip(ROWS, last, strict=True):
        assert row["inputs"] == inputs.inputs(direct_align.FILE) and row["forwards"] == 10752 / 2
        assert found["ocr.ned"] < full["held_out"]["last"]["ocr.ned"] - 0.03
        assert found["outside_l1"] > full["held_out"]["last"]["outside_l1"]
    ned, drift = (sorted(found[name] for found in last) for name in ("ocr.ned", "outside_l1"))
    assert f"NED {ned[0]:.3f} to {ned[-1]:.3f}".replace("0.", ".") in page
    assert f"drift {drift[0]:.4f} to {drift[-1]:.4f}".replace("0.", ".") in page
