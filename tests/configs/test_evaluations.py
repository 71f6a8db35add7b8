"""configs/reproduce/evaluation: the benchmark of a published run, with the settings of its run file."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from retouch.benchmarks.load import load_benchmark
from retouch.config import load_run
from retouch.data.base import ItemFiles
from retouch.use.benchmark_images import with_settings

from .conftest import CONFIGS, EVALUATIONS

WANTED = ['a sign with "OPEN"', 'a cup with "TEA"']


@pytest.mark.parametrize("path", EVALUATIONS, ids=lambda path: path.stem)
def test_a_published_run_is_evaluated_as_its_paper_does(
    path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The command in the file names the run; steps, guidance, size and number of images are those of its run file."""
    prompts = tmp_path / "test.txt"
    prompts.write_text("\n".join(WANTED), encoding="utf-8")
    monkeypatch.setenv("DATA_PATH", str(prompts))
    text = path.read_text(encoding="utf-8")
    command = re.search(r"retouch eval --benchmark (\S+) --run runs/(\w+)", text)
    assert command and CONFIGS.parent / command[1] == path
    run = load_run(CONFIGS / "reproduce" / f"{command[2]}.yaml")
    benchmark = load_benchmark(str(path), None)
    assert [item.prompt for item in benchmark.data().list_items() if isinstance(item, ItemFiles)] == WANTED
    sampled = with_settings(run, benchmark).rollout
    assert sampled.num_steps == run.evaluation.num_steps == benchmark.official.settings["steps"]
    assert sampled.guidance_scale == run.rollout.guidance_scale
    assert benchmark.size == run.data.size and benchmark.count == 1
    assert {row.model for row in benchmark.published_rows()} >= {"SD3.5-M", "SD3.5-M + Flow-GRPO"}
