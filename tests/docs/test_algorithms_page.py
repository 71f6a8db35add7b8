"""The tables of docs/algorithms.md are what the benchmarks wrote."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

REPOSITORY = Path(__file__).parents[2]
PAGE = (REPOSITORY / "docs/algorithms.md").read_text(encoding="utf-8")

sys.path.insert(0, str(REPOSITORY / "benchmarks"))

import nft  # noqa: E402
import region  # noqa: E402
import text_to_image  # noqa: E402

import algorithms  # noqa: E402
from retouch.config import derive, load_run  # noqa: E402


def test_forwards_of_the_tiny_runs() -> None:
    runs = [load_run(algorithms.config_file("flux_fill", name, "full")) for name in algorithms.ALGORITHMS]
    forwards = " | ".join(f"{derive(run).forwards_per_image:.1f}".removesuffix(".0") for run in runs)
    assert f"| network forwards per image, tiny FLUX runs | {forwards} |" in PAGE


@pytest.mark.parametrize("benchmark", [algorithms, nft, region, text_to_image], ids=lambda module: module.__name__)
def test_a_table_is_that_of_the_committed_results(benchmark: Any) -> None:
    file = f"benchmarks/results/{benchmark.__name__}.json"
    rows = json.loads((REPOSITORY / file).read_text(encoding="utf-8"))["rows"]
    assert f"<!-- table: {file} -->\n\n{benchmark.table(rows)}\n" in PAGE
