"""Packages of the distribution beside `retouch` come through the door of third parties."""

from __future__ import annotations

import ast
import json
import logging
import tomllib
from importlib.metadata import EntryPoint, EntryPoints
from pathlib import Path
from typing import Any

import pytest

from retouch import registry
from retouch.tiny import BUILDERS
from tests.command_line import retouch

REPOSITORY = Path(__file__).parents[1]
PROJECT = tomllib.loads((REPOSITORY / "pyproject.toml").read_text(encoding="utf-8"))["project"]


@pytest.mark.parametrize("annex", registry.ANNEXES)
def test_an_annex_imports_nothing_private(annex: str) -> None:
    for path in sorted((REPOSITORY / "src" / annex).rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("retouch."):
                assert not [alias.name for alias in node.names if alias.name.startswith("_")], path
                assert not [part for part in (node.module or "").split(".") if part.startswith("_")], path


@pytest.mark.parametrize("annex", registry.ANNEXES)
def test_every_component_of_an_annex_is_registered(annex: str) -> None:
    points = {group: named.values() for group, named in PROJECT["entry-points"].items()}
    places = [place for named in points.values() for place in named if place.startswith(f"{annex}.")]
    assert set(places) & {*points[registry.ANNEXES[annex]]}, "the group by which a stale installation is known"
    for place in places:
        registry.load_attribute(place)
    files = {path.stem for path in (REPOSITORY / "src" / annex / "benchmarks").glob("[a-z]*.py")}
    assert files == {place.partition(":")[0].rpartition(".")[2] for place in places if ".benchmarks." in place}
    rewards = {place for path in (REPOSITORY / "src" / annex / "scorers").glob("[a-z]*.py") for place in entries(path)}
    assert {f"{annex}.scorers.{place}" for place in rewards} == {place for place in places if ".scorers." in place}


def entries(path: Path) -> list[str]:
    """ "module:class" of the classes of a file that a run file can name as its scorer."""
    classes = [node for node in ast.parse(path.read_text(encoding="utf-8")).body if isinstance(node, ast.ClassDef)]
    return [
        f"{path.stem}:{node.name}"
        for node in classes
        if any(isinstance(part, ast.AnnAssign) and ast.unparse(part.target) == "scorer" for part in node.body)
    ]


def test_a_package_of_others_replaces_no_component_of_an_annex(monkeypatch: pytest.MonkeyPatch) -> None:
    points = [
        ("geneval", place) for place in ("others:Mine", "retouch_bench.scorers.geneval:GenEvalReward", "others:Last")
    ]
    monkeypatch.setattr(registry, "_entry_points", lambda: {"retouch.rewards": points})
    rewards: registry.Registry[Any] = registry.Registry("reward", "retouch.rewards", {}, key="scorer")
    assert rewards["geneval"].__module__ == "retouch_bench.scorers.geneval" and rewards.is_builtin("geneval")


@pytest.mark.parametrize("stale", [None, *registry.ANNEXES])
def test_an_installation_without_the_entry_points_names_the_remedy(
    stale: str | None, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    points = [EntryPoint("x", f"{annex}.x:X", registry.ANNEXES[annex]) for annex in registry.ANNEXES if annex != stale]
    monkeypatch.setattr(registry, "entry_points", lambda: EntryPoints(points))
    registry._entry_points.cache_clear()
    try:
        with caplog.at_level(logging.WARNING):
            registry._entry_points()
    finally:
        registry._entry_points.cache_clear()
    told = [record.getMessage() for record in caplog.records]
    assert [text.partition(" ")[0] for text in told] == ([stale] if stale else [])
    assert all("pip install -e ." in text for text in told)


def test_what_tiny_build_trains_is_a_function_of_a_folder_and_a_seed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(BUILDERS._loaded, "mine", lambda out, seed: {"out": str(out), "seed": seed})
    done = retouch("tiny", "build", "mine", "--out", tmp_path / "out", "--seed", 7)
    assert (done.code, json.loads(done.out)) == (0, {"out": str(tmp_path / "out"), "seed": 7})
