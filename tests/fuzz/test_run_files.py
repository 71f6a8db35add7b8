"""Run files and overrides: a run, or a ConfigError."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from retouch.config import RunConfig, load_run, numbers, parse_run
from retouch.config.check import warnings_of
from retouch.config.presets import preset_lines
from retouch.errors import RetouchError
from tests.fuzz.inputs import attempt, changed, fuzzed, kept, scalars, texts

CONFIGS = Path(__file__).parents[2] / "configs"
FILES = (
    sorted(CONFIGS.glob("*_grpo.yaml"))[:6]
    + sorted(CONFIGS.glob("*_vlm_grpo*.yaml"))[:1]
    + [CONFIGS / "flux_fill_nft.yaml"]
)
TEXTS = [file.read_text(encoding="utf-8") for file in FILES]
RUNS = [yaml.safe_load(text) for text in TEXTS]
KEYS = [
    "model.family",
    "rollout.num_steps",
    "algorithm.name",
    "rewards",
    "rewards.ocr",
    "data.path",
    "data.resolution",
    "seed",
    "rollout.window.size",
    "model.train.rank",
    "a",
    "model",
    "",
    ".",
    "training",
]


def checked(run: RunConfig) -> None:
    """What `retouch check` computes."""
    numbers(run, 1).as_dict()
    list(preset_lines(run))
    warnings_of(run)


@fuzzed
@given(texts(TEXTS))
def test_texts(tmp_path_factory: pytest.TempPathFactory, text: str) -> None:
    file = tmp_path_factory.getbasetemp() / "run.yaml"
    file.write_bytes(text.encode("utf-8", "surrogatepass"))
    attempt("run files, text", lambda: checked(load_run(file)), RetouchError)


@fuzzed
@given(changed(RUNS))
def test_structures(run: Any) -> None:
    attempt("run files, structure", lambda: checked(parse_run(run)) if isinstance(run, dict) else None, RetouchError)


@fuzzed
@given(st.lists(st.tuples(st.sampled_from(KEYS), st.one_of(scalars.map(str), texts(["[1, 2]", "{a: 1}"]))), max_size=3))
def test_overrides(overrides: list[tuple[str, str]]) -> None:
    attempt(
        "overrides", lambda: checked(parse_run(RUNS[0], [f"{key}={value}" for key, value in overrides])), RetouchError
    )


@pytest.mark.parametrize("file", kept("run_files"), ids=lambda file: file.name)
def test_corpus(file: Path) -> None:
    attempt("run files, corpus", lambda: checked(load_run(file)), RetouchError)
