"""The experiment with a KL on suspicious samples: its ranks, its committed runs, and the page with their numbers."""

from __future__ import annotations

import json
import math
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.docs.pages import REPOSITORY

sys.path.insert(0, str(REPOSITORY / "benchmarks"))

import inputs
import kl_gate

from retouch.rewards.protocol import RewardItem
from retouch.training.evaluation import Evaluation, save_evaluation

ROWS: list[dict[str, Any]] = json.loads((REPOSITORY / "benchmarks/results/kl_gate.json").read_text(encoding="utf-8"))[
    "rows"
]


def test_the_gate_takes_the_rows_whose_reward_outranks_the_auxiliary_one() -> None:
    """By hand, of four usable rows: ranks of the rewards 3.5, .5, 2, 2 (a tie), of the auxiliary .5, 3.5, 1.5, 2.5."""
    rewards, auxiliary = torch.tensor([1.0, 0.0, 0.5, 0.5, 9.0]), torch.tensor([0.1, 0.9, 0.2, 0.3, 0.0])
    usable = torch.tensor([True, True, True, True, False])
    torch.testing.assert_close(kl_gate.ranks(rewards, usable)[:4], torch.tensor([3.5, 0.5, 2.0, 2.0]))
    torch.testing.assert_close(kl_gate.gates(rewards, auxiliary, usable, 0.5), torch.tensor([1.0, 0, 1.0, 0, 0]))


def test_a_run_is_compared_with_the_line_through_the_uniform_ones_at_its_drift() -> None:
    def row(drift: float, ned: float) -> dict[str, Any]:
        return {"family": "sd_inpaint", "held_out": {"last": {"ocr.ned": ned, "outside_l1": drift}}}

    uniform = [row(0.02, 0.5), row(0.03, 0.6), row(0.05, 0.7)]
    assert kl_gate.above(uniform, row(0.04, 0.7)) == pytest.approx(0.05)  # .65 there
    assert math.isnan(kl_gate.above(uniform, row(0.06, 0.9)))


def test_the_density_of_a_background_is_by_those_of_the_first_epoch() -> None:
    """As torch's normal distribution, up to its constant; letters on three of eight pixels do not count."""
    draw = np.random.default_rng(0)
    colours = draw.integers(100, 256, (12, 3))
    images = np.repeat(colours[:, None, None], 8, 2).astype(np.uint8)  # [12, 1, 8, 3]
    images[:, :, 2:5] = 0
    items = [RewardItem(id=i, image=image, prompt="") for i, image in enumerate(images)]
    density, base = kl_gate.BackgroundDensity(), torch.from_numpy(colours[:8]).double()
    density(items[:8], 0)
    normal = torch.distributions.MultivariateNormal(base.mean(0), base.T.cov())
    want = 2 * (normal.log_prob(torch.from_numpy(colours[8:]).double()) - normal.log_prob(base.mean(0)))
    torch.testing.assert_close(density(items[8:], 1), want)


def test_drift_is_that_of_the_backgrounds_of_the_same_image(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two images: one differs by 51 in one channel of three, one in its letters alone."""
    monkeypatch.setattr(kl_gate, "HELD_OUT", 2)
    for step, colours in ((0, ((200, 200, 100), (10, 20, 30))), (7, ((200, 200, 151), (10, 20, 30)))):
        images = [np.full((2, 4, 3), colour, np.uint8) for colour in colours]
        images[1][0, :3] = step
        save_evaluation(Evaluation([{}, {}], images), tmp_path / f"evaluations/step-{step:06d}", 2)
    assert kl_gate.background_drift(tmp_path, 7) == pytest.approx(51 / 255 / 3 / 2)


def test_the_page_has_the_distances_to_the_uniform_runs() -> None:
    measured, table = (
        " ".join((REPOSITORY / f"docs/{name}.md").read_text(encoding="utf-8").split())
        for name in ("measured", "algorithms")
    )
    for row in ROWS:
        changed = kl_gate.overrides_of(row["family"], row["arm"], row["weight"])
        assert row["inputs"]["run"] == inputs.run_digest(kl_gate.TRADES[row["family"]].file, changed)
        if row["family"] == "sd_inpaint":  # its base is in the package
            assert row["inputs"] == inputs.inputs(kl_gate.TRADES[row["family"]].file, overrides=changed)
    found = dict[str, list[str]]()
    for family, weights in (("sd_inpaint", [0.2, 0.3, 0.5]), ("sd3", [0.02, 0.05, 0.1, 0.2])):
        uniform, gate = kl_gate.rows_of(ROWS, family, 0)
        assert [row["weight"] for row in gate] == weights and len(uniform) == 4
        over = [kl_gate.above(uniform, row) for row in gate]
        assert min(over) < 0  # missed
        *first, last = (f"{value:+.3f}".replace("0.", ".") for value in over)
        assert f"{', '.join(first)} and {last}" in measured
        found[family] = [f"{value:+.3f}".replace("0.", ".") for value in (min(over), max(over))]
    assert ", and ".join(f"{low} to {high}" for low, high in found.values()) in table
    assert all(row["forwards_per_image"] * 64 * row["steps"] == 18432 for row in ROWS if row["family"] == "sd3")
