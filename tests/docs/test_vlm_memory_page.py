"""docs/vlm-grpo.md: the memory of the published runs is what is counted."""

from __future__ import annotations

import re

import pytest

pytest.importorskip("trl")


from retouch.config import load_run
from retouch.doctor.launch import read_launch
from retouch.doctor.memory import report_memory
from retouch.doctor.vlm_memory import HEAD_TILE

from .pages import REPOSITORY

ZERO = REPOSITORY / "configs/accelerate"
PAGE = (REPOSITORY / "docs/vlm-grpo.md").read_text(encoding="utf-8")
ROWS = re.findall(r"^\| `(qwen\w+)` \| `(zero\w+)` \| ([\d.| ]+) \|$", PAGE, re.MULTILINE)


@pytest.mark.slow
@pytest.mark.parametrize(("run", "engine", "numbers"), ROWS, ids=[" ".join(row[:2]) for row in ROWS])
def test_the_page_says_what_is_counted(run: str, engine: str, numbers: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DATA_PATH", "somewhere")
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)  # which was read when it was imported
    config = load_run(REPOSITORY / f"configs/{run}.yaml")
    report = report_memory(config, 8, read_launch(ZERO / f"{engine}.yaml"))
    found = [
        report["device_bytes"],
        *(p["bytes"] for p in report["phases"]),
        report["peak_bytes"],
        report["host_bytes"],
    ]
    [frozen] = [part for part in report["parts"] if part["what"] == "transformer, frozen"]
    assert frozen["bytes"] > report["device_bytes"] / 2  # "most of the stored memory"
    assert [f"{count / 1e9:.1f}" for count in found] == numbers.split(" | ")


def test_the_table_of_the_page_is_read_whole() -> None:
    assert len(ROWS) == 4
    tile, vocabulary = HEAD_TILE
    prose = " ".join(PAGE.split())
    assert f"tiles of {tile:,} tokens and {vocabulary:,} vocabulary entries" in prose and "within 10 %" in prose
