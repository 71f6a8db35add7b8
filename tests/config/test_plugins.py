"""Modules that a run file names under `plugins`."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

CODE = """
import sys
from retouch.config import load_run
first = load_run(sys.argv[1])  # builds the sections before the plug-in is known
from retouch.rewards import REWARDS
from retouch.rewards.scorers.seam import SeamReward
print(type(load_run(sys.argv[1], ["plugins=[mine]", "rewards={own: {}}"]).rewards["own"]).__name__)
try:
    REWARDS.register("ocr", SeamReward)
except ValueError as error:
    print(error)
"""

PLUGIN = """
from typing import Literal

from retouch.rewards import REWARDS
from retouch.rewards.scorers.seam import SeamReward


class OwnReward(SeamReward):
    scorer: Literal["own"] = "own"


REWARDS.register("own", OwnReward)
"""


def test_a_run_after_another_one_takes_in_its_plugins_and_a_taken_name_is_refused(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(PLUGIN, encoding="utf-8")
    config = Path(__file__).parents[2] / "configs/tiny/flux_fill_grpo.yaml"
    command = [sys.executable, "-c", CODE, str(config)]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == [
        "OwnReward",
        "reward 'ocr': the name is taken; register it under another name",
    ]
