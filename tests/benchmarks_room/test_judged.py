"""Benchmarks of judges and detectors: summaries against the published scripts, and whole runs on outputs of another
program."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from retouch.benchmarks.base import Benchmark, ImageRow
from retouch.benchmarks.load import load_benchmark
from retouch.benchmarks.outputs import outputs_of
from retouch.config import ConfigError
from retouch.data.base import ItemFiles
from retouch.rewards.protocol import RewardItem
from retouch.rewards.scorers import judge_client as judge
from retouch.types import Failure, Outcome, Score
from retouch.use.benchmark import run_benchmark
from retouch.use.benchmark_scores import scorers_of
from tests.data.test_judged_formats import write_gedit, write_imgedit
from tests.rewards.openai_server import KEY, OpenAIServer, pictures, text_of
from tests.rewards.test_geneval import example, served
from tests.rewards.test_geneval_verdict import RECORDED as GENEVAL
from tests.rewards.test_imgedit import says as of_imgedit
from tests.rewards.test_imgedit import write_questions

DATA = Path(__file__).parents[1] / "benchmarks_data"
_ = example  # a fixture

FAILED = Failure("scorer_error", "no answer")


def recorded(name: str) -> dict[str, Any]:
    return json.loads((DATA / name).read_text(encoding="utf-8"))


def benchmark(name: str, path: Path | str = "somewhere", **options: Any) -> Benchmark:
    from retouch.benchmarks import BENCHMARKS

    return BENCHMARKS[name].model_validate({"name": name, "path": str(path), **options})


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[OpenAIServer]:
    judge._BUCKETS.clear()
    with OpenAIServer() as running:
        for name, value in {"OPENAI_API_KEY": KEY, "JUDGE_URL": running.url, "JUDGE_MODEL": "judge"}.items():
            monkeypatch.setenv(name, value)
        yield running


# --- summaries ---


def row(key: object, reward: str, metadata: Mapping[str, Any], outcome: Outcome, index: int = 0) -> ImageRow:
    return ImageRow(str(key), index, metadata, {reward: outcome})


def test_gedit_equals_the_published_statistics() -> None:
    given = recorded("gedit.json")
    names = ("semantic_consistency", "perceptual_quality")
    rows: list[ImageRow] = []
    for one in given["rows"]:
        sc, pq = (one[name] for name in names)
        detail = {names[0]: sc, names[1]: pq, "overall": (sc * pq) ** 0.5}
        rows.append(row(one["key"], "viescore", one, Score(detail["overall"] / 10, detail)))
    found = benchmark("gedit", rewards={"viescore": {"model": "m"}}).summary(rows)
    for language, expected in given["expected"].items():
        for measure in ("SC", "PQ", "O"):
            means = dict(expected[measure])
            assert found[f"{language}_{measure}"] == pytest.approx(means.pop("average"), abs=1e-9)
            assert {task: found[f"{language}_{measure}.{task}"] for task in means} == pytest.approx(means, abs=1e-9)
            intersection = expected["intersection"][measure]["average"]
            assert found[f"{language}_intersection_{measure}"] == pytest.approx(intersection, abs=1e-9)
    failed = [row("x", "viescore", given["rows"][0], FAILED)]
    assert benchmark("gedit", rewards={"viescore": {"model": "m"}}).summary([*rows, *failed]) == found
    assert benchmark("gedit", rewards={"viescore": {"model": "m"}}).summary(failed) == {}


def test_imgedit_equals_the_published_scripts(tmp_path: Path) -> None:
    given = recorded("imgedit.json")
    rows = [
        row(key, "imgedit", given["items"][key], Score(mean / 5, {"mean": mean}))
        for key, mean in given["means"].items()
    ]
    entry = {"model": "m", "prompts": str(write_questions(tmp_path / "q.json"))}
    found = benchmark("imgedit", rewards={"imgedit": entry}).summary(
        [*rows, row(1, "imgedit", {"edit_type": "add"}, FAILED)]
    )
    types = given["types"]
    assert {kind: found[kind] for kind in types} == types
    assert found["overall"] == pytest.approx(sum(types.values()) / 9)
    assert found["micro"] == pytest.approx(sum(given["means"].values()) / len(given["means"]))
    assert found["overall"] != pytest.approx(found["micro"], abs=1e-3)


def test_geneval_equals_the_published_summary() -> None:
    rows = [
        row(case["metadata"]["prompt"], "geneval", case["metadata"], Score(0.0, {"correct": float(case["correct"])}), i)
        for i, case in enumerate(GENEVAL["cases"][: GENEVAL["summary_of_first"]])
    ]
    found = benchmark("geneval").summary([*rows, row("x", "geneval", {"tag": "colors"}, FAILED)])
    expected = GENEVAL["summary"]
    assert found == pytest.approx(
        {**{name: expected[name] for name in ("overall", "images", "prompts")}, **expected["tags"]}, abs=1e-9
    )


# --- whole runs on outputs of another program ---


def write_outputs(given: Benchmark, folder: Path, level: int = 120) -> Path:
    """An image under every official name, of another size than the sources."""
    for output in outputs_of(given, [item for item in given.data().items() if isinstance(item, ItemFiles)]):
        (folder / output.file).parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(np.full((16, 16, 3), level, np.uint8)).save(folder / output.file)
    return folder


def test_the_judges_of_a_benchmark_count_over_its_starts_and_shards(server: OpenAIServer, tmp_path: Path) -> None:
    """In `--out`: a benchmark that is started again went beyond its budget."""
    server.says = lambda asked: '{"score": [9, 4]}'
    given = benchmark("gedit", rewards={"viescore": {"model": "judge", "address": server.url, "budget_requests": 4}})
    grey = np.full((32, 32, 3), 51, np.uint8)
    with scorers_of(given, tmp_path / "out") as scorers:  # two first questions
        assert not scorers.tables[0].submit([RewardItem(0, "grey", grey, source=grey)]).result().failures()
    with pytest.raises(ConfigError, match="budget of 4 requests is spent"), scorers_of(given, tmp_path / "out"):
        pass
    with scorers_of(given, tmp_path / "another"):
        assert len(server.asked) == 6


@pytest.mark.full
def test_gedit_runs_on_the_published_layout(server: OpenAIServer, tmp_path: Path) -> None:
    server.says = lambda asked: '{"score": [9, 4]}' if "naturalness" in text_of(asked) else '{"score": [5, 9]}'
    given = load_benchmark("gedit", write_gedit(tmp_path / "data"))
    images = write_outputs(given, tmp_path / "model")
    assert (images / "fullset/subject-add/cn/61.png").is_file()
    (images / "fullset/subject-add/en/60.png").unlink()
    result = run_benchmark(given, {}, [images], tmp_path / "out")
    assert result is not None
    measures = result["measures"]["model"]
    assert [measures[name] for name in ("en_SC", "en_PQ", "cn_O")] == [5, 4, pytest.approx(20**0.5)]
    assert "en_O.subject-add" not in measures and measures["cn_O.subject-add"] == pytest.approx(20**0.5)
    revision = result["rewards"]["viescore"]["revision"]
    assert result["published"]["reasons"] == [
        f"{result['data']['items']} of 1212 items",
        f"viescore is scored by {revision!r}, the published numbers by gpt-4.1",
        "model: 1 missing image",
    ]
    assert {p.shape[:2] for asked in server.asked[2:] for p in pictures(asked)} == {(20, 30)}  # the source's size
    assert {asked["temperature"] for asked in server.asked} == {1}


def test_imgedit_runs_on_the_published_layout(server: OpenAIServer, tmp_path: Path) -> None:
    server.says = of_imgedit
    folder = write_imgedit(tmp_path / "Basic")
    write_questions(folder / "prompts.json")
    given = load_benchmark("imgedit", folder)
    images = write_outputs(given, tmp_path / "model")
    assert (images / "1007.png").is_file()
    result = run_benchmark(given, {}, [images], tmp_path / "out")
    assert result is not None
    measures = result["measures"]["model"]
    assert (measures["overall"], measures["micro"], measures["compose"]) == (
        pytest.approx(2.33), pytest.approx(2.33), 2.33
    )  # fmt: skip
    reasons = result["published"]["reasons"]
    assert reasons[0] == f"{result['data']['items']} of 737 items" and "published numbers by gpt-4.1" in reasons[1]
    assert not result["published"]["compares"] and len(reasons) == 2


@pytest.mark.full
def test_geneval_runs_on_the_published_layout(example: Any, tmp_path: Path) -> None:
    (tmp_path / "evaluation_metadata.jsonl").write_bytes((DATA / "geneval_metadata.jsonl").read_bytes())

    def detect(image: Image.Image, threshold: float, most: int, colors: dict[str, int]) -> list[dict[str, Any]]:
        return [{"class": name, "score": 0.95, "box": [0, 0, 4, 4], "color": "pink"} for name in ("bench", "car")]

    with served(example, detect) as url:
        given = benchmark("geneval", tmp_path, rewards={"geneval": {"detector_url": url}})
        images = write_outputs(given, tmp_path / "model")
        assert (images / "00011/samples/0003.png").is_file()
        result = run_benchmark(given, {}, [images], tmp_path / "out")
    assert result is not None
    measures = result["measures"]["model"]
    assert (measures["overall"], measures["single_object"], measures["colors"]) == (
        pytest.approx(1 / 6), 0.5, 0.5
    )  # fmt: skip
    assert (measures["images"], measures["prompts"]) == (pytest.approx(2 / 12), pytest.approx(2 / 12))
    assert result["published"]["reasons"] == [
        "12 of 553 items",
        "geneval is scored by 'strict made up', the published numbers by mask2former_swin-s-p4-w7-224_lsj_8x2_50e_coco",
    ]


def test_mmmg_and_complex_edit_equal_the_published_scripts() -> None:
    given = recorded("mmmg.json")
    rows = [row(one["key"], "mmmg", one, Score(one["score"], {"fidelity": 1 - one["ged"]})) for one in given["cases"]]
    found = benchmark("mmmg", rewards={"mmmg": {"model": "m"}}).summary(rows)
    official = {**given["levels"], **given["disciplines"]}
    assert {name: found[name] / 100 for name in official} == pytest.approx(
        {name: told["score"] for name, told in official.items()}, abs=1e-9
    )
    given = recorded("complex_edit.json")
    rows = []
    for one in given["items"]:
        detail = {name: value / 10 for name, value in one["expected"].items() if name != "overall"}
        rows.append(row(one["key"], "complex_edit", {"complexity": 3}, Score(0.0, detail)))
    found = benchmark("complex_edit", rewards={"complex_edit": {"model": "m"}}).summary(rows)
    assert {name: found[name] for name in given["totals"]} == pytest.approx(given["totals"], abs=1e-9)


def test_complex_edit_compares_in_the_published_wording_only() -> None:
    entry = {"model": "m", "wording": "published", "prompts": "eval"}
    assert benchmark("complex_edit", rewards={"complex_edit": entry}).departures() == []
    own = benchmark("complex_edit", rewards={"complex_edit": {"model": "m"}}).departures()
    assert own == ["the judge is asked this package's questions, not the published ones"]
