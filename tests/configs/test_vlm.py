"""The published runs of vlm_grpo: the numbers of the brief, one name, and a step of each on tiny weights."""

from __future__ import annotations

import math
import os
import shlex
import subprocess
import sys
from functools import cache
from pathlib import Path
from tempfile import mkdtemp

import pytest
import torch
from safetensors.torch import load_file, save_file

from retouch.algorithms.vlm_grpo.config import VlmGrpoConfig
from retouch.config import load_run, numbers
from retouch.errors import log_once
from retouch.families.qwen_image.model import QwenImage
from retouch.families.qwen_image_edit.model import QwenImageEdit
from retouch.families.qwen_image_edit.spec import EditVariant
from retouch.observe.run_dir import read_metrics
from retouch.rewards.scorers.judged import JudgeEntry
from retouch.tiny.edits import write_edits
from tests.command_line import retouch
from tests.data.protocols import Hub, edit_row, mmmg_configurations, write_complex_edit
from tests.rewards.openai_server import KEY, OpenAIServer
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
        "qwen_image_edit_vlm_grpo_8gpu_lightning": True,
        "qwen_image_vlm_grpo_8gpu": True,
        "qwen_image_vlm_grpo_8gpu_lightning": True,
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
    assert trl["learning_rate"] == (1e-5 if algorithm_of(path).uses_adapter else 1e-6)  # all weights take a tenth
    assert (trl["loss_type"], trl["scale_rewards"]) == ("dr_grpo", "none")
    assert run.training.mixed_precision == "bf16"
    assert not algorithm_of(path).train_vision_tower


@pytest.mark.parametrize("path", RELEASED, ids=name_of)
def test_it_samples_as_its_weights_were_made_for(path: Path) -> None:
    """Released weights 50 steps with guidance 4; with the LoRA of 8 steps, 8 without. `check` warns of less."""
    run, few = load_run(path), path.stem.endswith("_lightning")
    assert (run.rollout.num_steps, run.rollout.guidance_scale) == ((8, 1.0) if few else (50, 4.0))
    lora = run.model.distillation_lora  # type: ignore[union-attr]
    assert (lora is not None) == few
    if lora is not None:
        variant = "Edit-2509-" if "edit" in path.stem else ""
        assert (lora.path, lora.shift) == ("lightx2v/Qwen-Image-Lightning", 3.0)
        assert f"Qwen-Image-{variant}Lightning-8steps" in str(lora.weight_name)
    outcome = retouch("check", path, "--world-size", 8)
    assert (outcome.code, outcome.err) == (0, "")
    kind = "full" if "_full" in path.stem else "lora"
    assert outcome.out.startswith(f"{path}: ok ({path.stem}: {run.model.family}, {kind}, vlm_grpo)\n")
    blurred = ["model.distillation_lora=null", "rollout.num_steps=8", "rollout.guidance_scale=1"]
    outcome = retouch("check", path, *blurred, "--world-size", 8)
    assert outcome.code == 0
    assert outcome.err.startswith(
        "warning: rollout.num_steps: given 8 with guidance_scale 1 and no model.distillation_lora"
    )


def test_guidance_over_a_distillation_lora_is_warned_of() -> None:
    path = CONFIGS / "qwen_image_vlm_grpo_8gpu_lightning.yaml"
    outcome = retouch("check", path, "rollout.guidance_scale=4", "--world-size", 8)
    assert outcome.code == 0
    assert outcome.err.startswith("warning: rollout.guidance_scale: given 4 with model.distillation_lora")


HUB_DATA = {"complex_edit": "UCSC-VLAA/Complex-Edit", "mmmg": "MMMGBench/MMMG"}


@pytest.mark.parametrize("path", RELEASED, ids=name_of)
def test_it_needs_no_variable_but_a_key(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("MODEL_PATH", "DATA_PATH", "DATA_JSON_PATH"):
        monkeypatch.delenv(name)
    run = load_run(path)
    assert run.data.path == run.evaluation.data.path == HUB_DATA[run.data.format]  # type: ignore[union-attr]
    plus = "-Edit-2509" if run.model.family == "qwen_image_edit" else ""
    assert run.model.path == f"Qwen/Qwen-Image{plus}"


@pytest.mark.parametrize("path", RELEASED, ids=name_of)
def test_one_set_of_variables_names_the_judge(
    path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def judge() -> tuple[str, str]:
        [entry] = load_run(path).rewards.values()
        assert isinstance(entry, JudgeEntry) and not entry.paste_back
        return entry.model, entry.address

    monkeypatch.setenv("JUDGE_URL", "")  # empty is not set
    assert judge() == ("auto", "https://api.openai.com/v1")
    monkeypatch.setenv("OPENAI_BASE_URL", "http://proxy:1/v1")
    assert judge() == ("auto", "http://proxy:1/v1")
    log_once.cache_clear()
    monkeypatch.setenv("JUDGE_ADDRESS", "http://former:1/v1")
    assert judge() == judge() == ("auto", "http://former:1/v1")
    assert [record.getMessage() for record in caplog.records] == [
        "JUDGE_ADDRESS: the variable is now called JUDGE_URL and read under both names; export JUDGE_URL instead"
    ]
    monkeypatch.setenv("JUDGE_URL", "http://own:1/v1")
    monkeypatch.setenv("JUDGE_MODEL", "m")
    assert judge() == ("m", "http://own:1/v1")


LOCAL = [CONFIGS / f"{name}.yaml" for name in ("qwen_image_edit_grpo", "qwen_image_edit_nft", "flux_kontext_grpo")]


@pytest.mark.parametrize("path", LOCAL, ids=name_of)
def test_a_run_with_a_million_images_has_no_remote_judge_by_default(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def judge() -> tuple[str, str]:
        [entry] = load_run(path).rewards.values()
        assert isinstance(entry, JudgeEntry) and not entry.paste_back
        return entry.model, entry.address

    monkeypatch.setenv("OPENAI_API_KEY", KEY)
    monkeypatch.setenv("OPENAI_BASE_URL", "https://api.openai.com/v1")
    assert judge() == ("auto", "http://127.0.0.1:8001/v1")
    monkeypatch.setenv("JUDGE_URL", "http://own:1/v1")
    monkeypatch.setenv("JUDGE_MODEL", "m")
    assert judge() == ("m", "http://own:1/v1")


@pytest.mark.slow
@pytest.mark.parametrize("path", TINY, ids=name_of)
def test_one_step(path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DATA_PATH", str(tmp_path))
    for half in ("train", "held_out"):
        write_edits(tmp_path / half, 8, half, 1)  # type: ignore[arg-type]
    small = ["training.max_steps=1", "evaluation.num_examples=4", "algorithm.trl.per_device_train_batch_size=8"]
    outcome = retouch("train", path, *small, f"logging.dir={tmp_path}")
    assert outcome.code == 0, outcome.err


@cache
def tiny_weights(variant: EditVariant | None) -> Path:
    """Random ones that look at what they are shown; None draws from text."""
    folder = Path(mkdtemp(prefix=f"retouch-{variant}-"))
    attentive(QwenImage.tiny() if variant is None else QwenImageEdit.tiny(variant)).save_pretrained(folder)
    return folder


def small_run(path: Path, folder: Path, variant: EditVariant | None) -> list[str]:
    """Overrides that take a published run to random weights: sizes, counts, precision.

    One process accumulates one group. Everything else stays as published.
    """
    return [
        "model.dtype=fp32",
        *([] if variant is None else [f"model.variant={variant}"]),
        "data.resolution=32",
        "evaluation.data.resolution=32",
        "evaluation.data.held_out_share=0.3",
        "data.held_out_share=0.3",
        "rollout.num_steps=2",
        "algorithm.trl.gradient_accumulation_steps=8",
        "algorithm.trl.max_completion_length=6",
        "training.max_steps=1",
        "training.mixed_precision=no",
        "evaluation.num_examples=2",
        "evaluation.grid_examples=1",
        "logging.rollout_images_every=1",
        f"logging.dir={folder}",
    ]


def lightning_lora(folder: Path) -> Path:
    """A small LoRA in the key layout of Qwen-Image-Lightning."""
    weight = QwenImage.tiny().transformer.get_submodule("transformer_blocks.0.attn.to_q").weight
    factors = {
        "lora_down.weight": torch.ones(2, weight.shape[1]) / 99,
        "lora_up.weight": torch.ones(weight.shape[0], 2) / 99,
        "alpha": torch.tensor(2.0),
    }
    tensors = {f"transformer_blocks.0.attn.to_q.{name}": tensor for name, tensor in factors.items()}
    save_file(tensors, folder / "lightning.safetensors")
    return folder / "lightning.safetensors"


@pytest.mark.parametrize(
    ("name", "variant"),
    [
        pytest.param("qwen_image_edit_vlm_grpo_8gpu", "edit", marks=pytest.mark.full),
        pytest.param("qwen_image_edit_vlm_grpo_full_8gpu", "edit_plus", marks=pytest.mark.full),
        ("qwen_image_vlm_grpo_8gpu_lightning", None),
    ],
)
def test_one_step_of_a_released_run(
    name: str, variant: EditVariant | None, tmp_path: Path, picky: OpenAIServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On the hub's data, for which a stand-in answers: generated, encoded, drawn, judged, trained, evaluated, saved."""
    path = CONFIGS / f"{name}.yaml"
    rows = {(config, "test"): [row] for config, row in mmmg_configurations().items()}
    hub = Hub({(None, "test_real"): [edit_row(i) for i in range(14)], **rows})
    monkeypatch.setattr("retouch.data.tables.import_library", lambda name, what: hub)
    monkeypatch.delenv("DATA_PATH")
    monkeypatch.setenv("MODEL_PATH", str(tiny_weights(variant)))
    monkeypatch.setenv("LIGHTNING_PATH", str(lightning_lora(tmp_path)))
    overrides = small_run(path, tmp_path, variant)
    run = load_run(path, overrides)
    assert getattr(run.model, "variant", None) == variant
    outcome = retouch("train", path, *overrides)
    assert outcome.code == 0, outcome.err
    assert {path for path, _, _ in hub.asked} == {HUB_DATA[run.data.format]}
    records = read_metrics(tmp_path / name / "metrics.jsonl")
    [reward] = run.rewards
    [step] = [record for record in records if record["kind"] == "train"]
    assert step["grad_norm"] > 0 and math.isfinite(step["grad_norm"])
    assert step["lr"] == algorithm_of(path).trl["learning_rate"] and step[f"failed/{reward}"] == 0
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


@pytest.mark.full
def test_the_documented_command(tmp_path: Path, picky: OpenAIServer) -> None:
    """`scripts/run_8gpu.sh` with a key, and with an `accelerate` that starts one process in place of eight."""
    stand_in = tmp_path / "bin" / "accelerate"
    stand_in.parent.mkdir()
    body = f'while [ "$1" != -m ]; do shift; done; exec {shlex.quote(sys.executable)} "$@"'
    stand_in.write_text(f"#!/bin/sh\n{body}\n", encoding="utf-8")
    stand_in.chmod(0o755)
    name = "qwen_image_edit_vlm_grpo_8gpu"
    command = [f"{CONFIGS.parent}/scripts/run_8gpu.sh", *small_run(CONFIGS / f"{name}.yaml", tmp_path, "edit_plus")]
    environment = {
        **os.environ,
        "PATH": f"{stand_in.parent}:{os.environ['PATH']}",
        "MODEL_PATH": str(tiny_weights("edit_plus")),
        "DATA_PATH": str(write_complex_edit(tmp_path / "data")),
        "OMP_NUM_THREADS": "1",
    }
    done = subprocess.run(command, cwd="/", env=environment, capture_output=True, text=True, timeout=300)
    assert (done.returncode, done.stdout) == (0, f"done: {tmp_path / name}\n"), done.stderr
    assert len(picky.asked) == 2 + 2 * (2 + 8 + 2)  # a first pair; two questions of evaluation, a group, evaluation
    assert KEY not in done.stderr
    [step] = [r for r in read_metrics(tmp_path / name / "metrics.jsonl") if r["kind"] == "train"]
    assert step["reward/complex_edit"] > 0 and step["failed/complex_edit"] == 0 and step["grad_norm"] > 0


def test_every_file_is_here() -> None:
    assert {path.parent for path in VLM_RUNS} == {CONFIGS, CONFIGS / "tiny"}
