"""What GRPO taught the tiny text encoder, as committed."""

from __future__ import annotations

import json
import sys
from itertools import product
from pathlib import Path
from typing import Any

import pytest

REPOSITORY = Path(__file__).parents[2]
ROWS: list[dict[str, Any]] = json.loads((REPOSITORY / "benchmarks/results/vlm_edit.json").read_text(encoding="utf-8"))[
    "rows"
]

sys.path.insert(0, str(REPOSITORY / "benchmarks"))

import inputs  # noqa: E402
import vlm_edit  # noqa: E402


def test_the_page_has_these_numbers() -> None:
    page = (REPOSITORY / "docs/vlm-grpo.md").read_text(encoding="utf-8")
    for row in ROWS:
        judged, said = (list(row[key].values()) for key in ("held_out", "says_the_colour"))
        gain = f"{row['gain'][0]:+.3f} [{row['gain'][1]:+.3f}, {row['gain'][2]:+.3f}]"
        path = f"{judged[0]:.3f} → {judged[-1]:.3f}"
        words = f"{said[0]:.3f} → {said[-1]:.3f}"
        assert str(row["judge_and_words_agree_at_the_end"]) in page.partition("judge and words agree on")[2][:120]
        assert f"| {row['seed']} | {path} | {gain} | {words} | {row['cpu_seconds']:.0f} s |" in page


def test_an_adapter_and_all_weights() -> None:
    assert {(row["kind"], row["seed"]) for row in ROWS} == set(product(("adapter", "full"), (0, 1, 2)))


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row["run"])
def test_it_learned_in_ten_minutes_of_a_cpu(row: dict[str, Any]) -> None:
    assert row["inputs"] == inputs.inputs(vlm_edit.CONFIGS[row["kind"]])  # of the run file and base that lie here
    assert row["gain"][0] >= 0.2
    assert row["gain"][1] > 0.1
    assert row["cpu_seconds"] <= 600
