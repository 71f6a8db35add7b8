"""The notebook of the Python interface runs from its first cell to its last, as a user runs it."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest

from tests import forked

NOTEBOOK = Path(__file__).parents[2] / "examples/python_api.py"


@pytest.mark.full
def test_the_notebook_runs(tmp_path: Path) -> None:
    done = forked.run([sys.executable, str(NOTEBOOK), "1"], cwd=tmp_path, timeout=300)
    assert done.returncode == 0, done.stderr
    assert "Run('runs/python', grpo, step 1)" in done.stdout
    assert len(re.findall(r"(?:base|after RL) +OCR similarity \d\.\d{3}", done.stdout)) == 2
    folder = tmp_path / "runs/python"
    written = ("open-0.png", "open-1.png", "report.html", "exported/python-step-000001.safetensors")
    assert all((folder / name).is_file() for name in written)
