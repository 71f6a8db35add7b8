"""Packages of the distribution beside `retouch` come through the door of third parties."""

from __future__ import annotations

import ast
import logging
import tomllib
from importlib.metadata import EntryPoint, EntryPoints
from pathlib import Path
from typing import Any

import pytest

from retouch import registry

REPOSITORY = Path(__file__).parents[1]
PROJECT = tomllib.loads((REPOSITORY / "pyproject.toml").read_text(encoding="utf-8"))["project"]


def test_the_annex_imports_nothing_private() -> None:
    for path in sorted((REPOSITORY / "src/retouch_bench").rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("retouch."):
                assert not [alias.name for alias in node.names if alias.name.startswith("_")], path
                assert not [part for part in (node.module or "").split(".") if part.startswith("_")], path


@pytest.mark.parametrize("annex", registry.ANNEXES)
def test_every_component_of_an_annex_is_registered(annex: str) -> None:
    places = [place for group in PROJECT["entry-points"].values() for place in group.values()]
    for place in places:
        registry.load_attribute(place)
    files = {path.stem for path in (REPOSITORY / "src" / annex / "benchmarks").glob("[a-z]*.py")}
    assert files == {place.partition(":")[0].rpartition(".")[2] for place in places if ".benchmarks." in place}


def test_a_package_of_others_replaces_no_component_of_an_annex(monkeypatch: pytest.MonkeyPatch) -> None:
    points = [
        EntryPoint("geneval", place, "retouch.rewards")
        for place in ("others:Mine", "retouch_bench.scorers.geneval:GenEvalReward", "others:Last")
    ]
    monkeypatch.setattr(registry, "_entry_points", lambda: EntryPoints(points))
    rewards: registry.Registry[Any] = registry.Registry("reward", "retouch.rewards", {}, key="scorer")
    assert rewards["geneval"].__module__ == "retouch_bench.scorers.geneval" and rewards.is_builtin("geneval")


@pytest.mark.parametrize("stale", [True, False])
def test_an_installation_without_the_entry_points_names_the_remedy(
    stale: bool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    points = [EntryPoint("gedit", "retouch_bench.benchmarks.gedit:GEdit", "retouch.benchmarks")]
    found = EntryPoints(() if stale else points)
    monkeypatch.setattr(registry, "entry_points", lambda: found)
    registry._entry_points.cache_clear()
    try:
        with caplog.at_level(logging.WARNING):
            registry._entry_points()
    finally:
        registry._entry_points.cache_clear()
    assert ["pip install -e ." in record.getMessage() for record in caplog.records] == [True] * stale
