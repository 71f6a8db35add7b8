"""The run file of one combined score: OCR and a vision-language model of one server, a style adapter, GRPO."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest

from retouch.config import load_run
from retouch.observe.run_dir import read_metrics
from retouch.rewards.server.launch import requested
from tests.command_line import retouch

from .conftest import CONFIGS, shrink

FILE = CONFIGS / "flux_fill_ip_vlm_ocr_grpo.yaml"


def test_one_combined_score_is_trained(signs: dict[str, Path], tmp_path: Path) -> None:
    """Not the sum of the normalized rewards, in which a reward with less spread would weigh as much."""
    outcome = retouch("train", FILE, *shrink(FILE, signs, tmp_path))
    assert outcome.code == 0, outcome.err
    records = read_metrics(tmp_path / FILE.stem / "metrics.jsonl")
    [rollout] = [record for record in records if record["kind"] == "rollout"]
    expected = 0.4 * rollout["reward/ocr"] + 0.6 * rollout["reward/vlm"]
    assert rollout["combined_score"] == pytest.approx(expected, abs=1e-6) and rollout["reward/vlm"] > 0
    assert load_run(tmp_path / FILE.stem / "config.yaml").algorithm.combine == "sum_then_normalize"  # type: ignore[union-attr]


def test_its_server_is_that_of_its_header(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("ENDPOINTS", raising=False)
    [command] = re.findall(r"^#   (REWARDS=.*)$", FILE.read_text(encoding="utf-8"), re.MULTILINE)
    words = shlex.split(command)
    assert words[:3] == ["REWARDS=ocr,vlm", "DEVICES=1", "scripts/run_server.sh"]
    served = requested("ocr,vlm", words[words.index("--options") + 1])
    trained = {name: entry for name, entry in load_run(FILE).rewards.items() if entry.role == "train"}
    assert served["ocr"] == {"score": "confidence"} and served.keys() == trained.keys()
    assert {entry.url for entry in trained.values()} == {"runs/endpoints.json"}  # what the script writes
    assert {name: entry.weight for name, entry in trained.items()} == {"ocr": 0.4, "vlm": 0.6}
    assert load_run(FILE, ["rewards.vlm.weight=0.7"]).rewards["vlm"].weight == 0.7
