"""The experiment with guidance in the weights: its target, its committed runs, and the pages with their numbers."""

from __future__ import annotations

import json
import sys
from contextlib import contextmanager, nullcontext
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.docs.pages import REPOSITORY

sys.path.insert(0, str(REPOSITORY / "benchmarks"))

import guidance
import inputs

ROWS: list[dict[str, Any]] = json.loads((REPOSITORY / "benchmarks/results/guidance.json").read_text(encoding="utf-8"))[
    "rows"
]


def test_the_target_is_of_the_base_under_guidance_and_the_prediction_of_the_student_without(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The base predicts 5 under guidance, the student 2 without; anything else is 100."""
    weights, loss = ["student"], list[float]()

    @contextmanager
    def use(name: str) -> Any:
        weights.append(name)
        yield
        weights.pop()

    class Step(nullcontext[None]):
        rows, normalizer = torch.arange(4), torch.tensor(4.0)

        def forwards(self, parts: Any) -> Any:
            return parts

        def backward(self, value: Any, values: Any, count: Any) -> None:
            loss.append(float(value))

    guided = SimpleNamespace(conditions=lambda positions, device: 3.0)
    run = SimpleNamespace(
        policy=SimpleNamespace(use=use),
        engine=SimpleNamespace(device="cpu"),
        encoded=SimpleNamespace(guided=lambda scale: guided if scale == 3 else None),
    )
    # SimpleNamespace has no hash, which the cache needs
    monkeypatch.setattr(guidance, "guided_data", lambda encoded, scale: encoded.guided(scale))
    predictions = {("reference", 3.0): 5.0, ("student", 1.0): 2.0}
    monkeypatch.setattr(guidance.recipe, "rows_condition", lambda *_: 1.0)
    monkeypatch.setattr(
        guidance.recipe,
        "predict",
        lambda run, rows, chosen, scale: torch.full((len(chosen), 1, 2, 2), predictions.get((weights[-1], scale), 100)),
    )
    rows = SimpleNamespace(counts_in_loss=torch.ones(4), position=torch.arange(4))
    session = SimpleNamespace(run=run, size=SimpleNamespace(chunks=lambda rows: rows.split(2)))
    guidance.distil(partial(guidance.reference_prediction, 3), session, None, rows, Step())
    assert sum(loss) == pytest.approx(9)  # (2 - 5)²


def test_the_student_missed_the_criterion_and_the_pages_have_the_numbers() -> None:
    page, table = (
        " ".join((REPOSITORY / f"docs/{name}.md").read_text(encoding="utf-8").split())
        for name in ("measured", "algorithms")
    )
    by_name = {row["run"]: row for row in ROWS}
    for row in ROWS:
        file = guidance.config_file(row["family"], "nft", "full") if "nft" in row["arm"] else None
        assert row["inputs"]["run"] == inputs.run_digest(file or guidance.file_of(row["family"]))
        if row["family"] == "sd_inpaint":  # its base is in the package
            assert row["inputs"] == inputs.inputs(file or guidance.file_of(row["family"]))

    def ned(name: str) -> str:
        return f"{by_name[name]['last']['ocr.ned']:.3f}".removeprefix("0")

    for family in guidance.FAMILIES:
        assert f"{ned(f'{family}-4-1')} to {ned(f'{family}-4-3')}" in page
    small, large = guidance.IMAGES
    students = [by_name[f"sd_inpaint-student-3-{small}-{seed}"] for seed in range(3)]
    longer = by_name[f"sd_inpaint-student-3-{large}-0"]
    assert all(row["forwards"] == 23040 and row["over_guided"][0] < -0.02 for row in students)  # missed
    first, second, third, of_longer = (f"{-row['over_guided'][0]:.3f}"[1:] for row in (*students, longer))
    assert f"{first}, {second} and {third} below | 23,040" in table
    assert f"{first}, {second} and {third} below after 23,040 forwards on three seeds" in page
    assert f"and {of_longer} after {longer['forwards']:,} on one" in page
    guided, unguided = (by_name[f"sd_inpaint-nft-{arm}-3-0"] for arm in guidance.NFT_STEPS)
    assert guided["forwards"] == 2 * unguided["forwards"] == 23040
    assert f"reaches {ned(unguided['run'])} in 11,520 forwards, that of the guided base {ned(guided['run'])} in" in page
