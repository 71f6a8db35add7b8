"""The page of watch and compare: its loop works as typed, and its screenshots are those of the script."""

from __future__ import annotations

import os
import shlex
import subprocess
from pathlib import Path

from PIL import Image
from tools.screenshots import SHOTS, forms_of, name_of

from retouch.config import load_run
from retouch.observe.comparison import groups_of
from retouch.observe.conflicts import RunRecord

from .pages import DOCS, REPOSITORY, blocks

STAND_IN = """#!/bin/sh
echo "$*" >> commands
for word in "$@"; do case "$word" in name=*) mkdir -p "runs/${word#name=}";; esac; done
"""
"""`retouch` that notes how it is called, and makes the directory of a run."""


def test_the_loop_makes_three_lines_of_three_seeds(tmp_path: Path) -> None:
    [loop] = blocks(DOCS / "report.md", "bash")
    (tmp_path / "retouch").write_text(STAND_IN)
    (tmp_path / "retouch").chmod(0o755)
    path = f"{tmp_path}{os.pathsep}{os.environ['PATH']}"
    subprocess.run(["bash", "-euc", loop], cwd=tmp_path, env={**os.environ, "PATH": path}, check=True)
    *trained, compared = [shlex.split(line) for line in (tmp_path / "commands").read_text().splitlines()]
    runs = [load_run(REPOSITORY / file, overrides) for _, file, *overrides in trained]
    records = [RunRecord(run.name, tmp_path, run.model_dump(mode="json"), {}) for run in runs]
    assert [len(group.runs) for group in groups_of(records)] == [3, 3, 3]
    assert compared == ["compare", *sorted(f"runs/{run.name}" for run in runs)]


def test_every_state_is_shown_in_every_form() -> None:
    """At the width of its window, and small enough for a page."""
    page = "".join((DOCS / name).read_text(encoding="utf-8") for name in ("report.md", "tutorial.md", "taste.md"))
    for name in SHOTS:
        for width, _, dark in forms_of(name):
            file = DOCS / "images" / name_of(name, width, dark)
            assert f"images/{file.name}" in page, file.name
            with Image.open(file) as image:
                assert image.width == width
            assert file.stat().st_size < 120_000, file
