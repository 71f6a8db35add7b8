"""The published runs of vlm_grpo: the numbers of the brief, one name, and a step of the tiny ones."""

from __future__ import annotations

from pathlib import Path

import pytest

from retouch.config import load_run, numbers
from retouch.config.algorithm_sections import VlmGrpoConfig
from retouch.data.edits import write_edits
from tests.command_line import retouch

from .conftest import CONFIGS, VLM_RUNS, name_of

TINY = [path for path in VLM_RUNS if path.parent.name == "tiny"]
RELEASED = [path for path in VLM_RUNS if path not in TINY]


def algorithm_of(path: Path) -> VlmGrpoConfig:
    algorithm = load_run(path).algorithm
    assert isinstance(algorithm, VlmGrpoConfig)
    return algorithm


def test_there_are_runs_of_both_kinds() -> None:
    kinds = {path.stem: algorithm_of(path).uses_adapter for path in VLM_RUNS}
    assert kinds == {
        "qwen_image_edit_vlm_grpo_8gpu": True,
        "qwen_image_edit_vlm_grpo_full_8gpu": False,
        "qwen_image_vlm_grpo_8gpu": True,
        "qwen_image_edit_vlm_grpo": True,
        "qwen_image_edit_vlm_grpo_full": False,
    }


@pytest.mark.parametrize("path", VLM_RUNS, ids=name_of)
def test_it_is_named_after_its_file(path: Path) -> None:
    assert load_run(path).name == ("tiny_" if path in TINY else "") + path.stem


@pytest.mark.parametrize("path", RELEASED, ids=name_of)
def test_the_numbers_of_the_brief(path: Path) -> None:
    run, trl = load_run(path), algorithm_of(path).trl
    derived = numbers(run, 8).as_dict()
    assert derived["global_completions_per_step"] == 16
    assert derived["optimizer_steps_per_generation"] == 1
    assert trl["num_generations"] == 8
    assert trl["learning_rate"] == 1e-5
    assert (trl["loss_type"], trl["scale_rewards"]) == ("dr_grpo", "none")
    assert run.training.mixed_precision == "bf16"
    assert not algorithm_of(path).train_vision_tower


@pytest.mark.slow
@pytest.mark.parametrize("path", TINY, ids=name_of)
def test_one_step(path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DATA_PATH", str(tmp_path))
    for half in ("train", "held_out"):
        write_edits(tmp_path / half, 8, half, 1)  # type: ignore[arg-type]
    small = ["training.max_steps=1", "evaluation.num_examples=4", "algorithm.trl.per_device_train_batch_size=8"]
    outcome = retouch("train", path, *small, f"logging.dir={tmp_path}")
    assert outcome.code == 0, outcome.err


def test_every_file_is_here() -> None:
    assert {path.parent for path in VLM_RUNS} == {CONFIGS, CONFIGS / "tiny"}
