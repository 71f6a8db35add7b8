"""Every registered benchmark, end to end: a tiny base samples the published layout, and stand-ins judge."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml
from PIL import Image

from retouch.benchmarks import BENCHMARKS
from retouch.benchmarks.load import load_benchmark
from retouch.benchmarks.outputs import outputs_of
from retouch.data.dataset import load_dataset
from retouch.rewards.scorers import judge_client
from tests.benchmarks_room.cases import CASES as OTHER_CASES
from tests.benchmarks_room.text_cases import TEXT_CASES
from tests.command_line import retouch
from tests.conftest import small_run
from tests.rewards.openai_server import KEY
from tests.tiny_models import tiny_model

CASES = OTHER_CASES | TEXT_CASES


def test_every_benchmark_has_a_case() -> None:
    assert set(CASES) == set(BENCHMARKS)


def run_file(model: str, signs: Path, folder: Path) -> Path:
    """A run of a tiny base."""
    overrides: dict[str, Any] = {}
    if model == "edit":
        overrides = {"model__family": "qwen_image_edit"}
    if model == "text":
        (folder / "prompts.txt").write_text("a\nb\nc\n", encoding="utf-8")
        data = {"format": "prompts", "path": str(folder / "prompts.txt"), "resolution": 64}
        overrides = {"model__family": "sd3", "model__path": tiny_model("sd3"), "data": data, "warmup_data": None}
        overrides |= {"evaluation__data": None, "rewards": {"jpeg_size": {}}}
    path = folder / "run.yaml"
    path.write_text(yaml.safe_dump(small_run(signs, folder / "runs", **overrides)), encoding="utf-8")
    return path


@pytest.mark.full
@pytest.mark.parametrize("name", sorted(CASES))
def test_a_benchmark_runs_from_its_layout_to_its_measures(
    name: str, signs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    case = CASES[name]
    judge_client._BUCKETS.clear()
    keys = {"name": name, "path": str(tmp_path / "data"), "num_steps": 1, **case.write(tmp_path / "data")}
    file, out = tmp_path / "benchmark.yaml", tmp_path / "out"
    file.write_text(yaml.safe_dump(keys), encoding="utf-8")
    run = run_file(case.model, signs, tmp_path)
    with case.server() as server:
        for variable, value in {"JUDGE_URL": server.url, "JUDGE_MODEL": "judge", "OPENAI_API_KEY": KEY}.items():
            monkeypatch.setenv(variable, value)
        outcome = retouch("eval", "--benchmark", file, "--config", run, "--out", out, "--json")
        assert outcome.code == 0, outcome.err
        result = json.loads(outcome.out)
        asked = len(server.asked)
        again = retouch("eval", "--benchmark", file, "--images", out / "images" / "base", "--out", tmp_path / "again")
        assert again.code == 0, again.err
        benchmark = load_benchmark(str(file), None)
    told = result["weights"]["base"]
    assert (told["missing"], told["failures"]) == (0, {})
    assert case.measures <= result["measures"]["base"].keys()
    outputs = outputs_of(benchmark, load_dataset(benchmark.data()).items)
    assert told["images"] == len(outputs) == len(list((out / "images" / "base").rglob("*.png")))
    for output in outputs:
        assert Image.open(out / "images" / "base" / output.own_file).format == "PNG"
    assert Image.open(out / "grid.png").width > 96
    if asked:
        revisions = [told["revision"] for told in result["rewards"].values()]
        assert any("served as judge-2026-01" in revision for revision in revisions)
    external = json.loads((tmp_path / "again" / "result.json").read_text(encoding="utf-8"))
    assert external["measures"]["base"] == result["measures"]["base"]
