"""Benchmark files, observations, and the record of a folder of images."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from retouch.benchmarks import BENCHMARKS
from retouch.benchmarks.load import load_benchmark
from retouch.benchmarks.observations import Observations, OutputIdentity
from retouch.benchmarks.outputs import Shard
from retouch.errors import ConfigError, RetouchError
from retouch.types import Failure, Score
from retouch.use.benchmark_images import claim
from tests.fuzz.inputs import attempt, blobs, changed, fuzzed, kept, scalars, texts, values

FILES: list[dict[str, Any]] = [
    {
        "name": "ocr_prompts",
        "path": "${DATA:-data}/test.txt",
        "images_per_item": 2,
        "resolution": [512, 512],
        "rewards": {"ocr": None, "mine": {"scorer": "jpeg_size", "weight": 0.5}},
        "reward_client": {"batch_size": 4},
    },
    {"name": "gedit", "path": "data", "rewards": {"viescore": {"model": "judge", "task": "edit"}}, "language": "en"},
    {"name": "cvtg", "path": "~/data", "distances": {"fid": {"measure": "fid", "path": "openai/clip"}}, "limit": 3},
    {"name": "longtext", "path": "a_zh.jsonl", "language": "auto", "seed": 3, "guidance_scale": 4.5},
    {"name": "complex_edit", "path": "data", "complexity": "1-8", "rewards": {"complex_edit": {"url": "auto"}}},
    {"name": "imgedit", "path": "data", "prompts": "prompts.json"},
    {"name": "anytext_edit", "path": "wukong_word"},
    {"name": "textedit", "path": "data", "part": "miniset"},
    {"name": "mmmg", "path": "data", "levels": "phd"},
    {"name": "brushbench", "path": "data", "blended": True},
]
TEXTS = [yaml.safe_dump(file) for file in FILES]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("benchmarks")


def _load(file: Path) -> None:
    benchmark = load_benchmark(str(file), None)
    benchmark.departures()
    benchmark.published_rows()
    benchmark.data()
    benchmark.summary([])


@pytest.mark.parametrize("given_", FILES, ids=lambda given_: given_["name"])
def test_the_seeds_are_read(folder: Path, given_: dict[str, Any]) -> None:
    file = folder / "seed.yaml"
    file.write_text(yaml.safe_dump(given_))
    _load(file)


@fuzzed
@given(texts(TEXTS))
def test_texts(folder: Path, text: str) -> None:
    file = folder / "text.yaml"
    file.write_bytes(text.encode("utf-8", "surrogatepass"))
    attempt("benchmark files, text", lambda: _load(file), RetouchError)


@fuzzed
@given(changed(FILES))
def test_structures(folder: Path, value: Any) -> None:
    file = folder / "structure.yaml"
    file.write_text(json.dumps(value))
    attempt("benchmark files, structure", lambda: _load(file), RetouchError)


@fuzzed
@given(st.one_of(st.sampled_from([*BENCHMARKS.available()]), scalars.map(str)), scalars.map(str))
def test_options(folder: Path, given_: str, path: str) -> None:
    def read() -> None:
        load_benchmark(given_, Path(path)).data()

    attempt("benchmark options", read, RetouchError)


ASKED = OutputIdentity("a.png", "1" * 32, "2" * 32)
OUTCOMES = {"ocr": Score(0.5, {"ned": 0.5}), "judge": Failure("unavailable", "later", True)}
DIGESTS = {"ocr": "3" * 24, "judge": "4" * 24}


@pytest.fixture(scope="module")
def line(folder: Path) -> Iterator[str]:
    record = Observations(folder, "seed")
    record.add([(ASKED, OUTCOMES)], DIGESTS)
    yield record.path.read_text()


def _observed(folder: Path, data: bytes) -> None:
    file = folder / "w.jsonl"
    file.write_bytes(data)
    record = Observations(folder, "w")
    for name, digest in DIGESTS.items():
        outcome = record.outcome(ASKED, name, digest)
        if isinstance(outcome, Score):
            assert abs(outcome.value) < float("inf") and outcome.detail.get("ned") is not NotImplemented
        elif outcome is not None:
            outcome.message.encode()
            assert outcome.retryable in (True, False)
    record.add([(ASKED, OUTCOMES)], DIGESTS)
    assert Observations(folder, "w").outcome(ASKED, "ocr", DIGESTS["ocr"]) == OUTCOMES["ocr"]


@fuzzed
@given(st.data())
def test_observations(folder: Path, line: str, data: st.DataObject) -> None:
    """A damaged line counts as missing, and what is added behind it is read again."""
    value = json.loads(line)
    found = data.draw(
        st.one_of(
            st.lists(changed([value]), min_size=1, max_size=3).map(
                lambda all_: "".join(f"{json.dumps(v)}\n" for v in all_)
            ),
            texts([line * 2]),
        ).map(lambda text: text.encode("utf-8", "surrogatepass"))
        | blobs([line.encode() * 2])
    )
    attempt("observations", lambda: _observed(folder, found))


ABOUT: dict[str, Any] = {
    "model": {"family": "flux_fill", "path": "a"},
    "sha256": {"a.safetensors": "1" * 64},
    "sampling": {"num_steps": 4, "guidance_scale": 1.5, "resolution": [512, 512], "seed": 0},
}


@fuzzed
@given(st.one_of(changed([ABOUT]).map(json.dumps), values.map(json.dumps), texts([json.dumps(ABOUT)])))
def test_records_of_folders(folder: Path, text: str) -> None:
    """Images are continued under a record that is theirs, and under no other."""
    (folder / "images.json").write_bytes(text.encode("utf-8", "surrogatepass"))
    attempt("records of folders", lambda: claim(folder / "images", {**ABOUT, "folder": "x"}), ConfigError)


@fuzzed
@given(texts(["1/4", "10/10"]))
def test_shards(text: str) -> None:
    attempt("shards", lambda: Shard.parse(text), ConfigError)


def test_a_written_line_is_read_again(folder: Path, line: str) -> None:
    record = Observations(folder, "seed")
    assert {name: record.outcome(ASKED, name, DIGESTS[name]) for name in OUTCOMES} == OUTCOMES
    assert json.loads(line)["file"] == asdict(ASKED)["file"]


@pytest.mark.parametrize("file", kept("benchmarks"), ids=lambda file: file.name)
def test_corpus(file: Path) -> None:
    attempt("benchmark files, corpus", lambda: _load(file), RetouchError)


@pytest.mark.parametrize("file", kept("observations"), ids=lambda file: file.name)
def test_corpus_of_observations(folder: Path, file: Path) -> None:
    attempt("observations, corpus", lambda: _observed(folder, file.read_bytes()))
