"""The experiment with several teachers: its targets and rewards, its committed runs, and the pages, which have what it
gave."""

from __future__ import annotations

import json
import sys
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from tests.docs.pages import REPOSITORY

sys.path.insert(0, str(REPOSITORY / "benchmarks"))

import inputs
import teachers

from retouch.rewards.protocol import RewardItem

ROWS: list[dict[str, Any]] = json.loads((REPOSITORY / "benchmarks/results/teachers.json").read_text(encoding="utf-8"))[
    "rows"
]


def test_a_row_has_the_target_of_the_teacher_of_its_task(monkeypatch: pytest.MonkeyPatch) -> None:
    """The teachers predict 2 and 5 at every state; rows 1, 0 and 3 are of the tasks remove, write and remove."""
    used = list[float]()

    @contextmanager
    def use(name: str) -> Any:
        used.append(snapshots[name])
        yield

    snapshots: dict[str, float] = {}
    policy = SimpleNamespace(snapshots=snapshots, load=lambda weights, name: snapshots.update({name: weights}), use=use)
    tasks = ["write", "remove", "write", "remove"]
    encoded = SimpleNamespace(examples=lambda places: [SimpleNamespace(metadata={"task": tasks[i]}) for i in places])
    monkeypatch.setattr(teachers.recipe, "rows_condition", lambda *_: None)
    monkeypatch.setattr(teachers.recipe, "predict", lambda run, rows, mine, _: rows.latents[mine] * 0 + used[-1])
    rows = SimpleNamespace(latents=torch.randn(4, 1, 2, 2), position=torch.arange(4))
    weights: Any = {"write": 2.0, "remove": 5.0}
    target = teachers.prediction_of_teachers(
        weights, SimpleNamespace(policy=policy, encoded=encoded), rows, torch.tensor([1, 0, 3])
    )
    torch.testing.assert_close(target[:, 0, 0, 0], torch.tensor([5.0, 2.0, 5.0]))


def test_emptiness_is_the_likeness_to_the_source_in_the_mask_alone() -> None:
    """One of two masked pixels differs by 51 of 255 in every channel."""
    source, mask = np.zeros((1, 3, 3), np.uint8), np.array([[255, 255, 0]], np.uint8)
    image = np.array([[[51] * 3, [0] * 3, [255] * 3]], np.uint8)
    item = RewardItem(id=0, image=image, prompt="", source=source, mask=mask)
    [outcome] = teachers.EmptinessReward().make().score([item])
    assert getattr(outcome, "value") == pytest.approx(0.9)  # noqa: B009


def test_the_kept_share_is_of_the_gain_of_the_teacher() -> None:
    def row(arm: str, write: float, remove: float) -> dict[str, Any]:
        gained = {"base": {"write": 0.5, "remove": 0.8}, "last": {"write": write, "remove": remove}}
        return {"family": "flux_fill", "seed": 0, "arm": arm, **gained}

    rows = [row("write", 0.9, 0.8), row("remove", 0.1, 1.0), row("student", 0.8, 0.9)]
    assert teachers.kept(rows, rows[2]) == pytest.approx({"write": 0.75, "remove": 0.5})


def test_the_student_missed_the_criterion_and_the_pages_have_the_numbers() -> None:
    page, table = (
        " ".join((REPOSITORY / f"docs/{name}.md").read_text(encoding="utf-8").split())
        for name in ("measured", "algorithms")
    )
    *taught, slow, fast = ROWS
    assert [row["arm"] for row in ROWS] == ["write", "remove", teachers.STUDENT, teachers.STUDENT]
    for row in ROWS:
        assert row["inputs"] == inputs.inputs(teachers.config_file(row["family"], "reward_gradient", "lora"))
    assert fast["forwards"] == slow["forwards"] == sum(row["forwards"] for row in taught) == 30720
    shares = [f"{value:.2f}".removeprefix("0") for row in (fast, slow) for value in teachers.kept(ROWS, row).values()]
    assert float(shares[0]) < 0.95
    assert f"keeps {shares[0]} of the first one's gain" in page and f"and {shares[1]} of the second one's" in page
    assert f"teachers {shares[2]} and {shares[3]}." in page
    gain = [f"{taught[0][point]['write']:.3f}".removeprefix("0") for point in ("base", "last")]
    assert "({} to {})".format(*gain) in page
    assert f"{shares[0]} and {shares[1]} on the first seed; no other was run | 30,720" in table
