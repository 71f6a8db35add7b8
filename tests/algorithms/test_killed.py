"""Family x algorithm: a process that is killed in its second step continues from its checkpoint bitwise."""

from __future__ import annotations

import signal
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from safetensors.torch import load_file

from retouch.adapters.lora import FILE
from retouch.families import FAMILIES
from tests.algorithms.test_cells import data_of, guidance_of, path_of
from tests.algorithms.test_resume import run_child
from tests.conftest import small_run
from tests.selection import rows
from tests.tiny_models import WITH_BASE

ALGORITHMS: dict[str, dict[str, Any]] = {
    "sft": {},
    "grpo": {"kl_weight": 0.1},
    "dpo": {"reference_refresh_every": 1, "beta": 100.0},
    "kto": {"beta": 100.0},
    "nft": {"old_policy": "ramp_half", "kl_weight": 0.1},
    "reward_gradient": {"trained_step": "random"},
}


TRAIN = {"lora": {"kind": "lora", "rank": 4}, "full": {"kind": "full"}}
FILES = {"lora": FILE, "full": "diffusion_pytorch_model.safetensors"}

CELLS = [
    *product(FAMILIES, ALGORITHMS, ["lora"]),
    *product([family for family in FAMILIES if family not in WITH_BASE], ["grpo"], ["full"]),
]

DPO = ("flux_kontext", "dpo", "lora")
KTO = ("sd_inpaint", "kto", "lora")
CHOSEN = [DPO, KTO]
"""Each on another family: what a family has of its own is in no checkpoint. Of the other algorithms, test_old_runs.py
resumes runs of another process, and test_cells.py those of this one."""


def run_file(folder: Path, signs: Path, family: str, algorithm: str, kind: str) -> Path:
    """Two steps, a checkpoint after each."""
    overrides: dict[str, Any] = {}
    if algorithm == "sft":
        overrides = {"data__path": str(signs / "targets"), "data__target": "auto"}
    elif algorithm == "grpo":
        overrides = {"rollout__window": {"size": 1, "range": [0, 0.5]}}
    else:
        overrides = {"rollout__window": None, **data_of(algorithm, signs)}
    data = small_run(
        signs,
        folder / "runs",
        model={"family": family, "path": path_of(family), "dtype": "fp32", "train": TRAIN[kind]},
        algorithm={"name": algorithm, **ALGORITHMS[algorithm]},
        rollout__guidance_scale=guidance_of(family)
        if algorithm == "reward_gradient"
        else FAMILIES[family].spec.guidance_scale,
        rollout__num_steps=2,
        rollout__noise_level=None,
        optimizer__batch_size_per_device=2,
        training__max_steps=2,
        training__checkpoint_every=1,
        evaluation__num_examples=1,
        evaluation__num_steps=1,
        ema={"decay": 0.9, "update_interval": 1},
        resume="auto",
        **overrides,
    )
    path = folder / "run.yaml"
    path.write_text(yaml.safe_dump(data), encoding="utf-8")
    return path


@pytest.mark.parametrize(("family", "algorithm", "kind"), rows(CELLS, CHOSEN, fast=[KTO]))
def test_a_killed_run_continues_bitwise(family: str, algorithm: str, kind: str, signs: Path, tmp_path: Path) -> None:
    path = run_file(tmp_path, signs, family, algorithm, kind)
    whole = run_child("nowhere", 0, [str(path), "name=whole"])
    assert whole.returncode == 0, whole.stderr
    folders = [tmp_path / "runs" / name / "checkpoints" for name in ("whole", "again")]
    killed = run_child("after_a_checkpoint", 0, [str(path), "name=again"], CHECKPOINTS=str(folders[1]))
    assert killed.returncode == -signal.SIGKILL, killed.stderr
    assert (folders[1] / "step-000001/complete.json").is_file() and not (folders[1] / "step-000002").exists()
    again = run_child("nowhere", 0, [str(path), "name=again"])
    assert again.returncode == 0, again.stderr
    for part in ("weights", "ema"):
        mine, theirs = (load_file(folder / "step-000002" / part / FILES[kind]) for folder in folders)
        assert mine.keys() == theirs.keys() and any(
            t.any() for name, t in mine.items() if kind == "full" or "lora_B" in name
        )
        assert all(torch.equal(mine[name], theirs[name]) for name in mine), part
    states = [torch.load(f / "step-000002/optimizer.pt", weights_only=True)["optimizer"]["state"] for f in folders]
    assert all(torch.equal(a[k], b[k]) for a, b in zip(*(s.values() for s in states), strict=True) for k in a)
