"""The two protocols end to end: a run file, the data, a judge on loopback, `retouch eval` and rollouts."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml

from retouch.rewards.scorers import judge_client as judge
from retouch.training.evaluation import Evaluation
from retouch.use.comparison import comparison_table
from tests.command_line import retouch
from tests.data.protocols import mmmg_rows, write_complex_edit, write_mmmg
from tests.rewards.openai_server import KEY, OpenAIServer, pictures, text_of
from tests.tiny_models import tiny_model


@pytest.fixture(autouse=True)
def _key(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("OPENAI_API_KEY", KEY)
    judge._BUCKETS.clear()
    yield


def run_file(folder: Path, server: OpenAIServer, reward: str, data: dict[str, Any], **options: Any) -> Path:
    """A run of a tiny model, which edits where the data have pictures, with one reward."""
    family = "qwen_image_edit" if data["format"] == "complex_edit" else "qwen_image"
    run = {
        "name": "protocol",
        "model": {"family": family, "path": tiny_model(family), "dtype": "fp32", "max_sequence_length": 128},
        "data": {"resolution": 32, "part": "train", "held_out_share": 0.5, **data},
        "rollout": {"group_size": 2, "global_groups_per_batch": 2, "num_steps": 2, "guidance_scale": 1.0},
        "algorithm": {"name": "grpo"},
        "rewards": {reward: {"model": "judge", "address": server.url, **options}},
        "optimizer": {"batch_size_per_device": 4, "gradient_accumulation": 1},
        "training": {
            "max_steps": 4, "checkpoint_every": 0, "eval_every": 0, "mixed_precision": "no",
            "gradient_checkpointing": False,
        },
        "evaluation": {
            "data": {"resolution": 32, **data, "part": "held_out", "held_out_share": 0.5, "curriculum": 1},
            "num_examples": 6,
            "grid_examples": 0,
        },
        "logging": {"dir": str(folder / "runs"), "sinks": []},
    }  # fmt: skip
    path = folder / "run.yaml"
    path.write_text(yaml.safe_dump(run), encoding="utf-8")
    return path


def rows_of(out: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (out / "base.jsonl").read_text().splitlines()]


def test_complex_edit_is_evaluated_by_part_and_complexity(tmp_path: Path) -> None:
    """The three parts of the reward, each by complexity; the judge sees the source as the run resized it."""
    data = {"format": "complex_edit", "path": str(write_complex_edit(tmp_path / "edits")), "complexity": "1,8"}
    with OpenAIServer() as server:
        path = run_file(tmp_path, server, "complex_edit", data, samples=1)
        outcome = retouch("eval", "--config", path, "--out", tmp_path / "out", "--json")
        assert outcome.code == 0, outcome.err
        compared = [asked for asked in server.asked[2:] if len(pictures(asked)) == 2]
    result, rows = json.loads(outcome.out), rows_of(tmp_path / "out")
    assert {p.shape for asked in compared for p in pictures(asked)} == {(32, 32, 3)} and len(compared) == 6
    means = result["means"]["base"]
    parts = [
        f"complex_edit.{name}" for name in ("instruction_following", "identity_preservation", "perceptual_quality")
    ]
    for name in ("complex_edit", *parts):
        assert means[name] == pytest.approx(np.mean([row[name] for row in rows]))
    following, kept, quality = (means[name] for name in parts)
    assert means["complex_edit"] == pytest.approx(0.6 * (following + kept) / 2 + 0.4 * quality)
    by_complexity = result["facets"]["base"]["complexity"]
    assert list(by_complexity) == ["1", "8"]
    for complexity, told in by_complexity.items():
        expected = np.mean([row["complex_edit"] for row in rows if row["complexity"] == int(complexity)])
        assert told["complex_edit"] == pytest.approx(expected)


def test_mmmg_is_evaluated_by_level_and_discipline(tmp_path: Path) -> None:
    """Every picture of which the judge is not asked in vain counts in its level; a refused one in none."""
    data = {"format": "mmmg", "path": str(write_mmmg(tmp_path / "mmmg", count=30))}
    with OpenAIServer() as server:
        path = run_file(tmp_path, server, "mmmg", data)
        outcome = retouch("eval", "--config", path, "--out", tmp_path / "out")
        assert outcome.code == 0, outcome.err
        rows = rows_of(tmp_path / "out")
        refused = rows[0]["example"]
        prompt = next(text_of(asked) for asked in server.asked[1:])
        thing = re.findall(r"thing \d+ ", prompt)[0]
        server.refuses = lambda asked: thing in text_of(asked)
        again = retouch("eval", "--config", path, "--json")
    assert again.code == 0, again.err
    levels = json.loads(again.out)["facets"]["base"]["level"]
    assert {row["level"] for row in rows} == set(levels)
    failed = [told["failed"] for told in levels.values() if "failed" in told]
    assert failed == [1.0] and refused in {row["example"] for row in rows}
    lines = outcome.out.splitlines()
    for row in rows:
        of_level = [r["mmmg"] for r in rows if r["level"] == row["level"]]
        assert f"{'level ' + row['level']:28}{np.mean(of_level):12.4f}" in lines
    assert any(line.startswith("discipline ") for line in lines)


def test_a_curriculum_samples_the_easy_prompts_first(tmp_path: Path) -> None:
    """Of the run's four epochs, the first two ask about the easier half alone."""
    data = {"format": "mmmg", "path": str(write_mmmg(tmp_path / "mmmg", count=30)), "curriculum": 2}
    with OpenAIServer() as server:
        outcome = retouch("train", run_file(tmp_path, server, "mmmg", data))
        assert outcome.code == 0, outcome.err
        asked = [int(found[0]) for one in server.asked if (found := re.findall(r"thing (\d+) a", text_of(one)))]
    training = asked[6:-6]  # without those of the evaluations at the start and the end
    assert len(training) == 4 * 4
    order = {row["Education"]: i for i, row in enumerate(mmmg_rows(6))}
    level = {i: order[row["Education"]] for i, row in enumerate(mmmg_rows(30))}
    first, second = training[:8], training[8:]
    assert max(level[i] for i in first) <= 3 < 5 == max(level.values())
    assert len({*first}) == 4 and len({*second}) == 4  # two groups an epoch, no prompt twice in a stage


def test_facets_by_hand() -> None:
    rows = [
        {"example": 1, "index": 0, "text": None, "level": "PhD", "complexity": 10, "mmmg": 0.5},
        {"example": 2, "index": 0, "text": None, "level": "preschool", "complexity": 9, "mmmg": 1.0},
        {"example": 3, "index": 0, "text": None, "level": "PhD", "complexity": 9, "mmmg": None},
    ]
    told = Evaluation(rows, []).by_facet()
    assert told == {
        "level": {"preschool": {"mmmg": 1.0}, "PhD": {"mmmg": 0.5, "failed": 1.0}},
        "complexity": {"9": {"mmmg": 1.0, "failed": 1.0}, "10": {"mmmg": 0.5}},
    }
    assert list(told["level"]) == ["preschool", "PhD"] and list(told["complexity"]) == ["9", "10"]
    assert Evaluation(rows, []).means() == {"mmmg": 0.75, "failed": 1.0}
    result = {
        "examples": 3, "images": 3, "means": {"base": {"mmmg": 0.75}}, "gains": {}, "rewards": ["mmmg"],
        "facets": {"base": {"level": told["level"]}},
    }  # fmt: skip
    assert comparison_table(result).splitlines()[2:4] == [
        f"{'level preschool':28}{1:12.4f}",
        f"{'level PhD':28}{0.5:12.4f}",
    ]
    wide = "a run with a long name"
    lines = comparison_table(
        {**result, **{key: {wide: result[key]["base"]} for key in ("means", "facets")}}
    ).splitlines()
    assert {len(line) for line in lines[:4]} == {28 + len(wide) + 2}


def test_another_folder_is_read_as_the_run_reads_its_own(tmp_path: Path) -> None:
    write_mmmg(tmp_path / "other", count=3)
    with OpenAIServer() as server:
        path = run_file(tmp_path, server, "mmmg", {"format": "mmmg", "path": str(write_mmmg(tmp_path / "mmmg"))})
        outcome = retouch("eval", "--config", path, "--data", tmp_path / "other", "--json")
    assert outcome.code == 0, outcome.err
    assert json.loads(outcome.out)["examples"] == 3  # all of it, not the held-out part
