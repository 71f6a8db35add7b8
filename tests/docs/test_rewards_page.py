"""docs/{rewards,scorers,reward-servers}.md: requests are sent as they stand there, and lists are those of the code."""

from __future__ import annotations

import ast
import dataclasses
import json
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import retouch
from retouch.rewards import REWARDS
from retouch.rewards.protocol import RewardItem
from retouch.rewards.scorers.ocr import OcrReward
from retouch.rewards.scorers.preservation import PreservationReward
from retouch.tiny.signs import (
    draw_sign,
    draw_words,
    write_signs,
)
from retouch_glyphs.text_recognizer import FOLDER
from tests.rewards.fakes import serving

from .pages import REPOSITORY, blocks, commands

PAGE = REPOSITORY / "docs" / "rewards.md"
SCORERS = REPOSITORY / "docs" / "scorers.md"
SERVERS = REPOSITORY / "docs" / "reward-servers.md"


@pytest.mark.skipif(shutil.which("curl") is None, reason="needs curl")
def test_the_curl_requests_get_the_replies_shown(tmp_path: Path) -> None:
    write_signs(tmp_path, draw_words(1, "train", 0), (32, 64), 0)
    assert (tmp_path / "self_bench.txt").read_text().startswith("0-KIGE")  # the word of the page
    commands, replies = blocks(SERVERS, "bash"), blocks(SERVERS, "json")
    assert len(commands) == len(replies) == 2
    with serving({"ocr": OcrReward(threads=1).make(), "preservation": PreservationReward().make()}) as url:
        for command, shown in zip(commands, replies, strict=True):
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


def test_every_scorer_is_on_its_page() -> None:
    assert set(re.findall(r"^\| `([a-z0-9_]+)` \|", SCORERS.read_text(encoding="utf-8"), re.MULTILINE)) >= set(REWARDS)


def test_every_failure_code_that_the_package_uses_is_explained_and_no_other() -> None:
    used: set[str] = set()
    for path in Path(retouch.__file__).parents[1].rglob("*.py"):  # annexes too
        text = path.read_text(encoding="utf-8")
        for node in ast.walk(ast.parse(text)) if "Failure(" in text else ():
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "Failure":
                used |= {leaf.value for leaf in ast.walk(node.args[0]) if isinstance(leaf, ast.Constant)}
    used |= {"overloaded", "unavailable", "refused"}  # chosen by HTTP status; test_client has a test of each
    table = PAGE.read_text(encoding="utf-8").partition("| code | meaning |")[2].partition("\n\n")[0]
    assert used == set(re.findall(r"^\| `(\w+)` \|", table, re.MULTILINE))


def test_what_the_page_recommends_is_a_scorer() -> None:
    table = PAGE.read_text(encoding="utf-8").partition("| to improve | take | beside it |")[2].partition("\n\n")[0]
    named = set(re.findall(r"`(\w+)`", table)) - {"question"}
    assert len(named) > 10 and named <= set(REWARDS)


def test_the_gradient_column_is_of_the_registry() -> None:
    rows = re.findall(r"^\| `(\w+)` \|.*\| (yes|no) \|$", SCORERS.read_text(encoding="utf-8"), re.MULTILINE)
    assert dict(rows) == {name: "yes" if REWARDS[name].differentiable else "no" for name in REWARDS}


def test_the_accuracy_of_the_recogniser_is_that_of_its_card() -> None:
    page, card = SCORERS.read_text(encoding="utf-8"), json.loads((FOLDER / "card.json").read_text(encoding="utf-8"))
    shown = re.findall(
        r"\| ([\d.]+)% \|$", page.partition("| lines | read right |")[2].partition("\n\n")[0], re.MULTILINE
    )
    measured = [value for value in card["letters"].values() if isinstance(value, float)]
    assert shown == [f"{value:.1%}".rstrip("%") for value in measured]
    assert f"on {card['training']['lines']:,} rendered lines in {len(card['fonts']['train'])} fonts" in " ".join(
        page.split()
    )


def test_the_fields_of_an_item_are_on_the_page() -> None:
    table = PAGE.read_text(encoding="utf-8").partition("| field | type, shape | value |")[2].partition("\n\n")[0]
    assert re.findall(r"^\| `(\w+)` \|", table, re.MULTILINE) == [f.name for f in dataclasses.fields(RewardItem)]


def test_the_custom_scorer_of_the_page_scores_by_the_command_of_the_page(tmp_path: Path) -> None:
    """As a user would type it, in a folder with the file and two images."""
    [source] = [block for block in blocks(PAGE, "python") if block.startswith("# my_rewards.py")]
    (tmp_path / "my_rewards.py").write_text(source, encoding="utf-8")
    [command] = [words for words in commands(PAGE) if "contrast" in words and words[1:3] == ["reward", "score"]]
    sign = draw_sign("KIGE", (32, 64), 0)
    sign.picture.save(tmp_path / "sample.png")
    sign.mask.save(tmp_path / "mask.png")
    program = str(Path(sys.executable).with_name("retouch"))
    done = subprocess.run([program, *command[1:]], cwd=tmp_path, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert 0 < found["value"] < 1 and 0 < found["detail"]["masked_share"] < 1
    without = [word for word in command[1:] if word not in ("--mask", "mask.png")]
    done = subprocess.run([program, *without], cwd=tmp_path, capture_output=True, text=True, timeout=60)
    assert done.returncode == 1 and json.loads(done.stdout)["error"]["message"].endswith("needs mask")
