"""What the demo promises: RL gains what supervision does not, half an hour does not collapse, the base is rebuilt."""

from __future__ import annotations

import json
import resource
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from retouch.files.model_files import tiny_path

REPOSITORY = Path(__file__).parents[2]
RESULTS = ("demo_gain.json", "demo_gain_30_minutes.json")
Row = dict[str, Any]


def check_gain(row: Row) -> None:
    """RL raised what OCR reads by at least .08, surely, and what ink says moved the same way."""
    assert row["images"] >= 192
    assert row["gain"]["ocr.ned"][0] >= 0.08 and row["gain"]["ocr.ned"][1] > 0
    assert row["gain"]["glyph_correlation"][1] > 0


def check_long(row: Row) -> None:
    """Half an hour of the same run: twice the gain, and the end is about as good as the best."""
    assert row["gain"]["ocr.ned"][0] >= 0.15
    assert row["gain"]["glyph_correlation"][1] > 0
    assert row["held_out"]["last"]["ocr.ned"] >= row["highest"] - 0.03


def committed(name: str) -> Row:
    return json.loads((REPOSITORY / "benchmarks/results" / name).read_text(encoding="utf-8"))


@pytest.mark.parametrize("name", RESULTS)
def test_the_committed_results_are_of_this_run_file_and_base(name: str) -> None:
    sys.path.insert(0, str(REPOSITORY / "benchmarks"))
    import demo_gain

    assert committed(name)["inputs"] == demo_gain.inputs(demo_gain.CONFIG)


def test_three_seeds_gained_more_than_their_controls() -> None:
    rows = {row["run"]: row for row in committed("demo_gain.json")["rows"]}
    for seed in range(3):
        check_gain(rows[f"grpo-{seed}"])
        assert rows[f"grpo-{seed}"]["held_out"]["last"]["ocr.ned"] > rows[f"sft-{seed}"]["held_out"]["last"]["ocr.ned"]


def test_the_page_has_these_intervals() -> None:
    page = (REPOSITORY / "docs/demo.md").read_text(encoding="utf-8")
    rows = {row["run"]: row for name in RESULTS for row in committed(name)["rows"]}
    shown = [rows["grpo-0"]["gain"][measure] for measure in ("ocr.ned", "glyph_correlation")]
    for mean, low, high in (*shown, *(rows[run]["gain"]["ocr.ned"] for run in ("grpo-1", "grpo-2", "long-0"))):
        assert f"{mean:+.3f} [{low:+.3f}, {high:+.3f}]".replace("0.", ".") in page
    exact = rows["grpo-0"]["gain"]["ocr.exact"]
    assert f"[{exact[1]:+.3f}, {exact[2]:+.3f}]".replace("0.", ".") in page


def test_half_an_hour_did_not_collapse() -> None:
    [row] = committed("demo_gain_30_minutes.json")["rows"]
    check_long(row)
    assert row["train_seconds"] > 1500


def measured(tmp_path: Path, *options: str) -> Row:
    out = tmp_path / "result.json"
    command = [sys.executable, str(REPOSITORY / "benchmarks/demo_gain.py"), *options, "--out", str(out)]
    subprocess.run([*command, "--work", str(tmp_path / "work")], check=True)
    return json.loads(out.read_text(encoding="utf-8"))


@pytest.mark.slow
def test_a_seed_gains_again(tmp_path: Path) -> None:
    rows = {row["run"]: row for row in measured(tmp_path, "--seeds", "3")["rows"]}
    check_gain(rows["grpo-3"])
    assert rows["grpo-3"]["held_out"]["last"]["ocr.ned"] > rows["sft-3"]["held_out"]["last"]["ocr.ned"]


@pytest.mark.slow
def test_half_an_hour_again(tmp_path: Path) -> None:
    check_long(measured(tmp_path, "--seeds", "0", "--minutes", "30")["rows"][0])


@pytest.mark.slow
def test_the_tiny_base_can_be_built_again(tmp_path: Path) -> None:
    """From nothing, in less than ten minutes of a processor, as good as the committed one within .05."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    subprocess.run(
        [sys.executable, "-m", "retouch", "tiny", "build", "flux_fill", "--out", str(tmp_path / "base")], check=True
    )
    ours, again = (json.loads((d / "base.json").read_text()) for d in (tiny_path("flux_fill"), tmp_path / "base"))
    assert abs(again["held_out"]["ocr.ned"] - ours["held_out"]["ocr.ned"]) <= 0.05
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    took = after.ru_utime - before.ru_utime + after.ru_stime - before.ru_stime
    assert took < 600 and again["megabytes"] <= 8
