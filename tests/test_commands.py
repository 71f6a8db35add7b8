"""Rules of all commands: `--json` prints one JSON value, and the first line comes before torch is imported."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import typer.main

from retouch.cli import app
from retouch.tiny.signs import draw_words, write_signs
from tests.command_line import retouch
from tests.taste.voters import warm_votes

Finished = Callable[[str], Path]

JSON_ALWAYS = {"reward score", "reward probe", "tiny build"}
"""Commands whose result is JSON without an option."""


def leaves(command: Any, name: str = "") -> Iterator[tuple[str, Any]]:
    """Every command with its name."""
    for key, sub in getattr(command, "commands", {}).items():
        yield from leaves(sub, f"{name} {key}".strip())
    if not hasattr(command, "commands"):
        yield name, command


def reporting() -> set[str]:
    """Commands that print JSON."""
    found = {name for name, one in leaves(typer.main.get_command(app)) if any("--json" in p.opts for p in one.params)}
    return found | JSON_ALWAYS


def asked(name: str, finished: Finished, signs: Path, folder: Path) -> list[object]:
    """The options with which a command has something to report."""
    run, sign = finished("lora"), signs / "held_out/test200_source.png"
    scored = ["--image", sign, "--prompt", "the text 'SALE'", "--mask", sign.with_name("test200_mask.png")]
    options: dict[str, list[object]] = {
        "train": [run / "config.yaml"],
        "check": [run / "config.yaml", "--memory"],
        "doctor": [run / "config.yaml"],
        "eval": ["--run", run, "--images", 1],
        "compare": [run, finished("full"), "--out", folder / "compare.html"],
        "reward score": ["--reward", "preservation", *scored, "--source", sign],
        "reward probe": ["--reward", "preservation", *scored, "--source", sign, "--repeats", 2],
        "reward env": ["imscore", "--dry-run"],
        "reward fit": [*([warm_votes(folder)] if name == "reward fit" else []), "--extractor", "tiny"],
        "data validate": [signs / "held_out", "--resolution", "32x64"],
        "data split": [folder / "signs", "--share", 0.5],
        "tiny build": ["flux_fill", "--out", folder / "base"],
    }
    return options[name]


@pytest.mark.parametrize("name", sorted(reporting()))
def test_json_is_one_value_on_standard_output(
    name: str, finished: Finished, signs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    finished("lora"), finished("full")  # trained before training is left out
    monkeypatch.setattr("retouch.algorithms.train.train", lambda config: None)
    monkeypatch.setattr("retouch.rewards.environments.resolve", lambda environment: {"torch": "2.0"})
    monkeypatch.setattr("retouch.cli.data.BUILDERS", {"flux_fill": lambda out, seed: {"ned": 0.5}})
    write_signs(tmp_path / "signs", draw_words(16, "train", 1), (32, 64), 1)
    options = asked(name, finished, signs, tmp_path)
    outcome = retouch(*name.split(), *options, *([] if name in JSON_ALWAYS else ["--json"]))
    assert outcome.code == 0 or name == "doctor", outcome.err
    assert json.loads(outcome.out)


def test_json_of_an_installation_is_of_a_dry_run(tmp_path: Path) -> None:
    outcome = retouch("reward", "env", "imscore", "--path", tmp_path / "env", "--json")
    assert (outcome.code, outcome.out) == (2, "") and not (tmp_path / "env").exists()
    assert outcome.err.splitlines()[-1] == "error: --json: given without --dry-run; add it, or leave --json out"


UNTIL_TORCH = """
import builtins, json, os, sys
from retouch.cli import main

imported = builtins.__import__

def watched(name, *rest, **more):
    if name.partition(".")[0] == "torch":
        sys.stderr.flush()
        os._exit(77)
    return imported(name, *rest, **more)

for number, command in enumerate(json.loads(sys.argv[1])):
    if os.fork() == 0:
        with open(f"{number}.txt", "w") as file:
            os.dup2(file.fileno(), 2)
        sys.argv = ["retouch", *command]
        builtins.__import__ = watched
        main()
    print(os.waitstatus_to_exitcode(os.wait()[1]))
"""
"""Prints the exit code of each command, 77 when it imported torch, and keeps what it wrote on standard error."""


def test_the_first_line_comes_before_torch(finished: Finished, tmp_path: Path) -> None:
    """Its import takes seconds, in which a terminal must not stay empty."""
    run = finished("lora")
    commands = [
        ["train", run / "config.yaml", "name=other", f"logging.dir={tmp_path}"],
        ["eval", "--run", run],
        ["demo-ui", "--run", run],
        ["export", run, "--to", "safetensors", "--out", tmp_path / "exported"],
        ["data", "precompute", run / "config.yaml", "--out", tmp_path / "embeddings"],
        ["tiny", "build", "flux_fill", "--out", tmp_path / "base"],
    ]
    text = json.dumps([[str(word) for word in command] for command in commands])
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run(
        [sys.executable, "-c", UNTIL_TORCH, text], cwd=tmp_path, env=environment, capture_output=True, text=True
    )
    lines = [(tmp_path / f"{number}.txt").read_text() for number in range(len(commands))]
    assert done.stdout.split() == ["77"] * len(commands), (done, lines)
    silent = [command[0] for command, text in zip(commands, lines, strict=True) if "loading torch" not in text]
    assert silent == []
