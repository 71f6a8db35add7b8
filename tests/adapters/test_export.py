"""Trained weights leave retouch: plain diffusers draws the same image, in a fresh process without retouch."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from retouch.adapters.pipeline import _full_network, fuse
from retouch.config import load_run
from retouch.data.dataset import load_dataset
from retouch.families.diffusion import pack
from retouch.rollout.plan import ode_plan
from retouch.rollout.sampler import (
    noise_for,
    sample,
)
from retouch.use.loaded import Loaded
from retouch.use.trained import weights_folder
from tests.command_line import retouch

STEPS, SEED = 3, 11

PLAIN_DIFFUSERS = """
import json, sys
import numpy as np, torch
from diffusers import FluxFillPipeline
from diffusers.models.autoencoders.vae import DiagonalGaussianDistribution
from PIL import Image
from safetensors.torch import load_file
torch.set_num_threads(1)
# retouch encodes the masked image by the mode of the posterior, the pipeline draws from it
DiagonalGaussianDistribution.sample = lambda self, generator=None: self.mode()
job = json.load(open(sys.argv[1]))
for name, (folder, lora) in job["models"].items():
    pipe = FluxFillPipeline.from_pretrained(folder, dtype=torch.float32)
    pipe.set_progress_bar_config(disable=True)
    if lora:
        pipe.load_lora_weights(lora)
    image = pipe(
        prompt=job["prompt"], image=Image.open(job["source"]).convert("RGB"), mask_image=Image.open(job["mask"]),
        height=32, width=64, num_inference_steps=job["steps"], guidance_scale=30.0, max_sequence_length=24,
        latents=load_file(job["noise"])["noise"], output_type="np",
    ).images
    np.save(f"{job['out']}/{name}.npy", image)
assert "retouch" not in sys.modules
"""

EXPORTS = {
    "full": ("full", "diffusers", False),
    "full-raw": ("full", "diffusers", True),
    "lora": ("lora", "diffusers", False),
    "lora-file": ("lora", "diffusers-lora", False),
    "lora-file-raw": ("lora", "diffusers-lora", True),
}
"""Name -> kind of run, format, raw or averaged weights."""


def checkpoint(run: Path) -> Path:
    return run / "checkpoints" / "step-000004"


@dataclass(frozen=True)
class Drawn:
    """The same picture by retouch and by plain diffusers, [1, H, W, 3] in [0, 1], for each export."""

    ours: dict[str, np.ndarray]
    theirs: dict[str, np.ndarray]
    base: np.ndarray


@pytest.fixture(scope="module")
def drawn(finished: Callable[[str], Path], signs: Path, tmp_path_factory: pytest.TempPathFactory) -> Drawn:
    """One fresh process draws all exports."""
    root = tmp_path_factory.mktemp("exports")
    ours: dict[str, np.ndarray] = {}
    models: dict[str, tuple[str, str | None]] = {}
    loaded = {kind: Loaded(load_run(finished(kind) / "config.yaml"), keep_base=True) for kind in ("full", "lora")}
    for name, (kind, to, raw) in EXPORTS.items():
        weights = checkpoint(finished(kind))
        outcome = retouch("export", weights, "--to", to, "--out", root / name, *(["--raw"] if raw else []))
        assert outcome.code == 0, outcome.err
        base = loaded[kind].config.model.path
        models[name] = (str(root / name), None) if to == "diffusers" else (base, str(root / name))
        ours[name] = drawn_here(loaded[kind], weights_folder(weights, raw=raw))
    model = loaded["full"].model
    noise, _ = noise_for((model.spec.latent_channels, 8, 16), [SEED])
    save_file({"noise": pack(noise)}, root / "noise.safetensors")
    job = {
        "models": models,
        "prompt": load_dataset(loaded["full"].config.evaluation.data)[0].prompt,  # type: ignore[arg-type]
        "source": str(signs / "held_out" / "test200_source.png"),
        "mask": str(signs / "held_out" / "test200_mask.png"),
        "steps": STEPS,
        "noise": str(root / "noise.safetensors"),
        "out": str(root),
    }
    (root / "job.json").write_text(json.dumps(job), encoding="utf-8")
    subprocess.run(
        [sys.executable, "-c", PLAIN_DIFFUSERS, str(root / "job.json")],
        check=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        timeout=600,
    )
    return Drawn(ours, {name: np.load(root / f"{name}.npy") for name in EXPORTS}, drawn_here(loaded["full"], None))


def drawn_here(loaded: Loaded, weights: Path | None) -> np.ndarray:
    """What `retouch sample` draws before it is rounded to bytes."""
    loaded.load(weights)
    example = load_dataset(loaded.config.evaluation.data)[0]  # type: ignore[arg-type]
    condition = loaded.model.encode([example], loaded.guidance_scale)
    plan = ode_plan(loaded.model.schedule(STEPS, condition.size))
    final = sample(loaded.model, loaded.network, plan, condition, [SEED]).final
    return (((loaded.model.decode(final) + 1) / 2).permute(0, 2, 3, 1)).numpy()


@pytest.mark.full
@pytest.mark.parametrize("name", EXPORTS)
def test_plain_diffusers_draws_the_same_image(drawn: Drawn, name: str) -> None:
    assert np.abs(drawn.theirs[name] - drawn.ours[name]).max() <= 1e-4
    assert np.abs(drawn.ours[name] - drawn.base).max() > 1e-2  # and training changed it


@pytest.mark.full
def test_raw_and_averaged_weights_are_different_exports(drawn: Drawn) -> None:
    for averaged, raw in (("full", "full-raw"), ("lora-file", "lora-file-raw")):
        assert np.abs(drawn.theirs[averaged] - drawn.theirs[raw]).max() > 1e-3


@pytest.mark.parametrize("raw", [False, True])
def test_one_file_holds_the_trained_tensors(finished: Callable[[str], Path], tmp_path: Path, raw: bool) -> None:
    folder = checkpoint(finished("full"))
    outcome = retouch("export", folder, "--to", "safetensors", "--out", tmp_path / "out", *(["--raw"] if raw else []))
    file = tmp_path / "out" / f"full-step-000004{'-raw' if raw else ''}.safetensors"
    assert outcome.out.strip() == str(file)
    expected = load_file(folder / ("weights" if raw else "ema") / "diffusion_pytorch_model.safetensors")
    found = load_file(file)
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], t) for name, t in expected.items())


def test_weights_that_miss_a_tensor_are_not_exported(finished: Callable[[str], Path], tmp_path: Path) -> None:
    """diffusers would draw it at random and go on."""
    folder = shutil.copytree(checkpoint(finished("full")), tmp_path / "step-000004")
    file = folder / "ema" / "diffusion_pytorch_model.safetensors"
    tensors = load_file(file)
    del tensors["proj_out.bias"]
    save_file(tensors, file, metadata={"format": "pt"})
    complete = json.loads((folder / "complete.json").read_text("utf-8"))
    complete["files"] = list(complete["files"])  # as older versions, without sizes
    (folder / "complete.json").write_text(json.dumps(complete), encoding="utf-8")
    outcome = retouch("export", folder, "--to", "diffusers", "--out", tmp_path / "out")
    assert outcome.code == 2
    assert outcome.err.splitlines()[-1].startswith(f"error: {folder}: cannot be exported: ")
    assert "1 weights are missing" in outcome.err


def test_a_lora_whose_sum_overflows_is_not_fused() -> None:
    half, brain = (
        torch.nn.Sequential(torch.nn.Linear(2, 2, bias=False, dtype=dtype)) for dtype in (torch.float16, torch.bfloat16)
    )
    shapes = {"A": (1, 2), "B": (2, 1)}
    factors = {f"0.lora_{name}.default.weight": torch.full(shape, 300.0) for name, shape in shapes.items()}
    with pytest.raises(ValueError, match=r"0\.weight overflows in torch\.float16 .*; use --to diffusers-lora"):
        fuse(half, factors)
    assert fuse(brain, factors) > 0.99


def test_weights_that_overflow_are_not_exported(finished: Callable[[str], Path], tmp_path: Path) -> None:
    """As Inf they would break every sample of another program, without an error."""
    folder = shutil.copytree(checkpoint(finished("full")) / "weights", tmp_path / "weights")
    file = folder / "diffusion_pytorch_model.safetensors"
    tensors = load_file(file)
    tensors["proj_out.bias"][0] = 1e5
    save_file(tensors, file, metadata={"format": "pt"})
    model = load_run(finished("full") / "config.yaml").model
    assert torch.equal(_full_network(model, folder).proj_out.bias, tensors["proj_out.bias"])
    with pytest.raises(ValueError, match=r"proj_out\.bias overflows in model\.dtype fp16; use --to safetensors"):
        _full_network(model.model_copy(update={"dtype": "fp16"}), folder)
