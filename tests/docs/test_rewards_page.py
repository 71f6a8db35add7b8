"""docs/rewards.md: its request is sent as it stands there, and its lists are those of the code."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

from retouch.data.synth import draw_words, write_signs
from retouch.rewards.protocol import FAILURE_CODES
from retouch.rewards.scorers import SCORERS
from retouch.rewards.scorers.ocr import OcrScorer
from retouch.rewards.scorers.preservation import PreservationScorer
from tests.rewards.fakes import serving

from .pages import REPOSITORY, blocks

PAGE = REPOSITORY / "docs" / "rewards.md"


@pytest.mark.skipif(shutil.which("curl") is None, reason="needs curl")
def test_the_curl_request_gets_the_reply_shown(tmp_path: Path) -> None:
    write_signs(tmp_path, draw_words(1, "train", 0), (32, 64), 0)
    assert (tmp_path / "self_bench.txt").read_text().startswith("0-KIGE")  # the word of the page
    [command], [shown] = blocks(PAGE, "bash"), blocks(PAGE, "json")
    with serving({"ocr": OcrScorer(threads=1), "preservation": PreservationScorer()}) as url:
        asked = command.replace("http://127.0.0.1:8000", url)
        assert asked != command
        done = subprocess.run(["sh", "-c", asked], cwd=tmp_path, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert shape(json.loads(done.stdout)) == shape(json.loads(shown))


def shape(value: Any) -> Any:
    """Keys, and values where they do not depend on the fonts and the version of the recogniser."""
    if isinstance(value, dict):
        exact = {"value": lambda v: round(v, 2), "revision": lambda v: v.split()[2:]}  # not the recogniser's version
        return {k: exact.get(k, shape)(v) for k, v in value.items()}
    return [shape(v) for v in value] if isinstance(value, list) else type(value)


def test_every_scorer_and_failure_code_is_on_the_page() -> None:
    named = set(re.findall(r"^\| `([a-z0-9_]+)` \|", PAGE.read_text(encoding="utf-8"), re.MULTILINE))
    assert named >= {*SCORERS, *FAILURE_CODES}
