"""The published runs of vlm_grpo: the numbers of the brief, one name, and a step of each on tiny weights."""

from __future__ import annotations

import math
import zlib
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

import pytest
from safetensors.torch import load_file

from retouch.config import load_run, numbers
from retouch.config.algorithm_sections import VlmGrpoConfig
from retouch.config.families import EditVariant
from retouch.data.edits import write_edits
from retouch.models.tiny import tiny_qwen_image, tiny_qwen_image_edit
from retouch.observe.run_dir import read_metrics
from retouch.rewards import judge
from tests.command_line import retouch
from tests.data.protocols import write_complex_edit, write_mmmg
from tests.rewards.openai_server import KEY, OpenAIServer, pictures
from tests.tiny_models import attentive

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


class Picky(OpenAIServer):
    """A judge to whom every other picture is worth something else."""

    def fill(self, asked: dict[str, Any]) -> dict[str, Any]:
        found, drawn = super().fill(asked), zlib.crc32(pictures(asked)[-1].tobytes())
        for number, (name, value) in enumerate(found.items()):
            if isinstance(value, int):
                found[name] = (drawn >> number) % 11
            elif value in ("yes", "no"):
                found[name] = ("yes", "no")[drawn >> number & 1]
        return found


@pytest.fixture
def picky(monkeypatch: pytest.MonkeyPatch) -> Iterator[OpenAIServer]:
    monkeypatch.setenv("OPENAI_API_KEY", KEY)
    judge._BUCKETS.clear()  # pyright: ignore[reportPrivateUsage]
    with Picky() as server:
        yield server


@cache
def tiny_weights(variant: EditVariant | None) -> Path:
    """Random ones that look at what they are shown; None draws from text."""
    folder = Path(mkdtemp(prefix=f"retouch-{variant}-"))
    attentive(tiny_qwen_image() if variant is None else tiny_qwen_image_edit(variant)).save_pretrained(folder)
    return folder


def small_run(path: Path, folder: Path, address: str, variant: EditVariant | None) -> list[str]:
    """Overrides that take a published run to random weights: paths, sizes, counts, the judge's address, precision.

    One process accumulates one group. Everything else stays as published.
    """
    format = load_run(path).data.format
    {"complex_edit": write_complex_edit, "mmmg": write_mmmg}[format](folder / "data")
    return [
        f"model.path={tiny_weights(variant)}",
        "model.dtype=fp32",
        *([] if variant is None else [f"model.variant={variant}"]),
        *(
            f"{section}.{at}"
            for section in ("data", "evaluation.data")
            for at in (f"path={folder}/data", "resolution=32")
        ),
        "evaluation.data.held_out_share=0.3",
        "data.held_out_share=0.3",
        "rollout.num_steps=2",
        "algorithm.trl.gradient_accumulation_steps=8",
        "algorithm.trl.max_completion_length=6",
        f"rewards.{format}.address={address}",
        "training.max_steps=1",
        "training.mixed_precision=no",
        "evaluation.num_examples=2",
        "evaluation.grid_examples=1",
        "logging.rollout_images_every=1",
        f"logging.dir={folder}",
    ]


@pytest.mark.parametrize(
    ("name", "variant"),
    [
        ("qwen_image_edit_vlm_grpo_8gpu", "edit_plus"),
        ("qwen_image_edit_vlm_grpo_8gpu", "edit"),
        ("qwen_image_edit_vlm_grpo_full_8gpu", "edit_plus"),
        ("qwen_image_vlm_grpo_8gpu", None),
    ],
)
def test_one_step_of_a_released_run(
    name: str, variant: EditVariant | None, tmp_path: Path, picky: OpenAIServer
) -> None:
    """Generated, encoded, drawn, judged over HTTP, trained, evaluated, saved."""
    path = CONFIGS / f"{name}.yaml"
    overrides = small_run(path, tmp_path, picky.url, variant)
    run = load_run(path, overrides)
    assert getattr(run.model, "variant", None) == variant
    outcome = retouch("train", path, *overrides)
    assert outcome.code == 0, outcome.err
    records = read_metrics(tmp_path / name / "metrics.jsonl")
    [reward] = run.rewards
    [step] = [record for record in records if record["kind"] == "train"]
    assert step["grad_norm"] > 0 and math.isfinite(step["grad_norm"])
    assert step["lr"] == 1e-5 and step[f"failed/{reward}"] == 0
    assert 0 < step[f"reward/{reward}"] < 1 and step["reward_std"] > 0
    evaluations = [record for record in records if record["kind"] == "eval"]
    assert [(e["moment"], e["examples"], e["images"]) for e in evaluations] == [
        ("start", "held_out", 2),
        ("end", "held_out", 2),
    ]
    assert all(0 <= e[reward] <= 1 for e in evaluations)
    assert {p.name for p in (tmp_path / name / "evaluations").iterdir()} == {"step-000000", "step-000001"}
    assert (tmp_path / name / "images/step-000001/rollouts.png").is_file()
    files = list((tmp_path / name / "checkpoints/step-000001/weights").glob("*.safetensors"))
    tensors = {key: tensor for file in files for key, tensor in load_file(file).items()}
    assert all(bool(tensor.isfinite().all()) for tensor in tensors.values())
    assert any("lora_" in key for key in tensors) == ("full" not in name) and tensors
    assert all("visual" not in key for key in tensors) or "full" in name


def test_every_file_is_here() -> None:
    assert {path.parent for path in VLM_RUNS} == {CONFIGS, CONFIGS / "tiny"}
