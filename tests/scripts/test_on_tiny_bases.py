"""Launchers as a user starts them, on tiny bases: variables in the environment, the script, what it leaves behind."""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from retouch.adapters.formats import read_adapter
from retouch.config import load_run
from retouch.engine.saved import complete_checkpoints
from retouch.files.model_files import tiny_path
from retouch.observe.run_dir import read_metrics
from tests.configs.conftest import CONFIGS, shrink, signs
from tests.tiny_models import UNUSED, tiny_calligrapher

from .test_launchers import REPOSITORY, dry_run, variables

__all__ = ["signs", "variables"]  # fixtures of other files

pytestmark = pytest.mark.skipif(shutil.which("bash") is None, reason="needs bash")

NEW, RELEASED = "configs/flux_fill_ip_{}.yaml", "configs/flux_fill_calligrapher_{}.yaml"

AVERAGED = "ema.update_interval=1"
"""The published interval is eight steps, and runs here have one or two: their EMA weights would be the initial ones."""


def run_script(name: str, *overrides: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """A launcher with the programs of this environment, on the CPU. `accelerate` imports torch once for all of its
    processes."""
    programs = Path(sys.executable).parent
    path = f"{programs}:{os.environ['PATH']}"
    with tempfile.TemporaryDirectory() as folder:
        accelerate = Path(folder, "accelerate")
        forked = f"PYTHONPATH={shlex.quote(str(REPOSITORY))} exec {programs}/python -m tests.forked"
        accelerate.write_text(f'#!/bin/sh\n[ "$1" = launch ] && shift\n{forked} accelerate.commands.launch "$@"\n')
        accelerate.chmod(0o755)
        return started(name, f"{folder}:{path}", *overrides, **environment)


def started(name: str, path: str, *overrides: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [str(REPOSITORY / f"scripts/{name}.sh"), *overrides],
        cwd="/",
        env={**os.environ, "PATH": path, "ACCELERATE_USE_CPU": "true", "OMP_NUM_THREADS": "1", **environment},
        capture_output=True,
        text=True,
        timeout=580,
    )


@pytest.mark.parametrize("algorithm", ["grpo", "nft"])
def test_the_run_file_of_an_adapter_follows_from_the_variables(algorithm: str, tmp_path: Path) -> None:
    def chosen(script: str, **variables: str) -> list[str]:
        words = shlex.split(dry_run(f"{script}_{algorithm}", **variables))
        return words[words.index("train") + 1 : words.index("resume=auto")]

    new, released = [NEW.format(algorithm)], [RELEASED.format(algorithm)]
    assert chosen("train") == [f"configs/flux_fill_{algorithm}.yaml"]
    assert chosen("train_ip") == chosen("train", SIGLIP_PATH="s") == new
    assert chosen("train_ip", CALLIGRAPHER_PATH="c") == chosen("train", CALLIGRAPHER_PATH="c") == released
    assert chosen("train", SIGLIP_PATH="s", CALLIGRAPHER_PATH="c", DATA_PATH=str(tmp_path)) == released
    listed = ["data.format=manifest", "data.path=${DATA_JSON_PATH}", "data.reference=mask_box"]
    assert chosen("train", CALLIGRAPHER_PATH="c", DATA_JSON_PATH="l.json") == [*released, *listed]
    assert chosen("train_ip", DATA_PATH="l.jsonl") == [*new, "data.format=manifest", "data.reference=mask_box"]


@pytest.mark.parametrize(
    ("script", "data"),
    [
        pytest.param("train_grpo", "self_bench", marks=pytest.mark.full),
        pytest.param("train_ip_nft", "manifest", marks=pytest.mark.slow),
    ],
)
def test_training_goes_on_from_the_released_adapter(
    script: str, data: str, signs: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    released = tiny_calligrapher(tmp_path / "calligrapher.bin")
    variables = {"CALLIGRAPHER_PATH": str(released), "SIGLIP_PATH": "tiny", "MODEL_PATH": "tiny"}
    variables["DATA_PATH" if data == "self_bench" else "DATA_JSON_PATH"] = str(signs[data])
    for name, value in {"DATA_PATH": "unread", **variables}.items():
        monkeypatch.setenv(name, value)
    path = CONFIGS / f"flux_fill_calligrapher_{script.rpartition('_')[2]}.yaml"
    # the variables give the paths
    given = ("model.path", "model.train", "data.path", "rewards.style.image")
    options = [o for o in shrink(path, signs, tmp_path) if not o.startswith(given)]
    options += [AVERAGED]
    if data == "manifest":
        monkeypatch.delenv("DATA_PATH")
    done = run_script(script, *options)
    assert done.returncode == 0, done.stderr
    warned = " ".join(done.stderr.split())
    assert f"no parameter for ({sum(map(len, UNUSED.values()))}), which are not used" in warned
    assert "0.norm_added_k.weight" in warned
    run = tmp_path / path.stem
    assert [r["phase"] for r in read_metrics(run / "metrics.jsonl") if r["kind"] == "train"] == ["rl"]
    config = load_run(run / "config.yaml")
    assert config.data.format == data
    assert config.data.reference_strip_fit == "full_width"  # type: ignore[union-attr]
    newest, start = complete_checkpoints(run / "checkpoints")[-1], read_adapter(released)
    for folder in ("weights", "ema"):
        for file in ("ip-adapter.bin", "ip-adapter.safetensors"):
            trained = read_adapter(newest / folder / file)
            assert (trained.shape, trained.unused) == (start.shape, ())
            moved = [key for key, t in trained.tensors.items() if not torch.equal(t, start.tensors[key])]
            assert {key.partition(".")[0] for key in moved} == {"image_proj", "image_proj_qformer", "ip_adapter"}
            for key, tensor in trained.tensors.items():
                torch.testing.assert_close(tensor, start.tensors[key], atol=1e-4, rtol=0)  # one step of lr 1e-5


@pytest.mark.parametrize(
    "algorithm",
    [
        pytest.param("sft", marks=pytest.mark.full),
        pytest.param("grpo", marks=pytest.mark.slow),
        pytest.param("dpo", marks=pytest.mark.slow),
    ],
)
def test_all_weights_with_averages_on_four_processes(
    algorithm: str, signs: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DATA_PATH", str(signs["self_bench"]))
    if algorithm == "sft":
        monkeypatch.setenv("DATA_JSON_PATH", str(signs["manifest"]))
    path = CONFIGS / f"flux_fill_{algorithm}_full.yaml"
    options = [*shrink(path, signs, tmp_path), "optimizer.batch_size_per_device=1", AVERAGED]
    options += ["rewards={preservation: {}}"] if algorithm == "sft" else []  # to load OCR four times takes long
    done = run_script(f"finetune/finetune_flux_fill_{algorithm}_4gpus", *options)
    assert done.returncode == 0, done.stderr
    run = tmp_path / path.stem
    config = load_run(run / "config.yaml")
    assert (config.training.sharding, config.evaluation.weights) == ("fsdp2", "ema")
    steps = [record for record in read_metrics(run / "metrics.jsonl") if record["kind"] == "train"]
    assert [step["phase"] for step in steps] == (["sft"] if algorithm == "sft" else ["warmup", "rl"])
    start: dict[str, Any] = load_file(tiny_path("flux_fill") / "transformer/diffusion_pytorch_model.safetensors")
    first = complete_checkpoints(run / "checkpoints")[0]
    weights, averages = (load_file(next((first / folder).glob("*.safetensors"))) for folder in ("weights", "ema"))
    assert weights.keys() == averages.keys() == start.keys()
    for name, weight in weights.items():  # after one step the decay is 2/11: (1 + t) / (10 + t)
        expected = start[name] + (weight - start[name]) * 9 / 11
        torch.testing.assert_close(averages[name], expected, atol=1e-6, rtol=0)
    assert any(not torch.equal(weight, start[name]) for name, weight in weights.items())
