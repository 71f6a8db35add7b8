"""A checkpoint that does not fit the run file is refused in one sentence, with exit code 2 and nothing overwritten."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from safetensors.torch import load_file

from retouch.engine import CheckpointError
from retouch.recipes.dpo import Pairs
from retouch.recipes.experience import Experience, restored
from retouch.recipes.resume import may_go_on
from tests.command_line import Outcome, retouch
from tests.conftest import small_run

Resume = Callable[..., Outcome]


@pytest.fixture(scope="module")
def written(signs: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The run file of a GRPO run: a warm-up of two steps, and the first of the two steps of an epoch."""
    root = tmp_path_factory.mktemp("written")
    run = small_run(
        signs, root / "runs", algorithm__warmup_steps=2, training__max_steps=3, training__checkpoint_every=1
    )
    (root / "run.yaml").write_text(yaml.safe_dump(run), encoding="utf-8")
    outcome = retouch("train", root / "run.yaml")
    assert outcome.code == 0, outcome.err
    steps = {p.name: (p / "rollouts.safetensors").exists() for p in (root / "runs" / "t" / "checkpoints").iterdir()}
    assert steps == {"step-000001": False, "step-000002": False, "step-000003": True}
    return root / "run.yaml"


@pytest.fixture
def resume(written: Path, tmp_path: Path) -> Resume:
    """Go on from a step of a copy of the run."""
    shutil.copytree(written.parent / "runs", tmp_path / "runs")

    def go_on(step: int, *overrides: str) -> Outcome:
        checkpoint = tmp_path / "runs" / "t" / "checkpoints" / f"step-{step:06d}"
        return retouch("train", written, f"logging.dir={tmp_path / 'runs'}", f"resume={checkpoint}", *overrides)

    return go_on


ODE = ("rollout.window=null", "rollout.noise_level=null")
INSIDE = "or resume from a checkpoint without rollouts.safetensors"
ELSE = "or start a new run under another name=..."


@pytest.mark.parametrize(
    ("step", "overrides", "problem"),
    [
        (1, ("algorithm={name: dpo}", *ODE), "was written under algorithm.name=grpo, the run file says dpo; set it "),
        (3, ("algorithm={name: dpo}", *ODE), "was written under algorithm.name=grpo, the run file says dpo; set it "),
        (3, ("algorithm={name: nft}", *ODE), "was written under algorithm.name=grpo, the run file says nft; set it "),
        (2, ("algorithm.kl_weight=0.1",), "was written with algorithm.kl_weight=0, which keeps no reference, "),
        (
            3,
            ("rollout.num_steps=4",),
            "lies inside an epoch of rollout.num_steps=3, the run file says 4; set it back, ",
        ),
        (3, ("algorithm.guard=true",), "lies inside an epoch of algorithm.guard=False, the run file says True; "),
        (3, ("algorithm.region=mask",), "lies inside an epoch of algorithm.region=all, the run file says mask; "),
        (3, ("optimizer.gradient_accumulation=2",), "lies inside an epoch of optimizer steps on 2 rows per device, "),
    ],
)
def test_another_structure_is_refused(
    step: int, overrides: tuple[str, ...], problem: str, resume: Resume, tmp_path: Path
) -> None:
    before = (tmp_path / "runs" / "t" / "metrics.jsonl").read_bytes()
    outcome = resume(step, *overrides)
    assert outcome.code == 2
    (line,) = [line for line in outcome.err.splitlines() if line.startswith("error: ")]
    assert f"step-{step:06d}: {problem}" in line
    assert line.endswith(INSIDE if "inside" in problem else ELSE)
    assert (tmp_path / "runs" / "t" / "metrics.jsonl").read_bytes() == before


@pytest.mark.parametrize(
    ("step", "overrides"),
    [
        (1, ("algorithm.kl_weight=0.1",)),  # the warm-up has no reference yet; its end is one
        (2, ("rollout.num_steps=4", "optimizer.gradient_accumulation=2")),  # the next epoch is sampled anew
        (3, ("training.max_steps=4", "optimizer.lr=1e-5", "rollout.batch_size_per_device=2")),
    ],
)
def test_what_may_change_may(step: int, overrides: tuple[str, ...], resume: Resume, tmp_path: Path) -> None:
    outcome = resume(step, *overrides)
    assert outcome.code == 0, outcome.err
    if "algorithm.kl_weight=0.1" in overrides:
        end = tmp_path / "runs" / "t" / "checkpoints"
        reference = load_file(end / "step-000003" / "snapshots" / "reference.safetensors")
        weights = load_file(end / "step-000002" / "weights" / "diffusion_pytorch_model.safetensors")
        assert all(torch.equal(t, weights[name]) for name, t in reference.items())


def test_a_snapshot_that_is_gone_is_not_replaced_by_the_policy_of_today(resume: Resume, tmp_path: Path) -> None:
    assert resume(1, "algorithm.kl_weight=0.1").code == 0
    shutil.rmtree(tmp_path / "runs" / "t" / "checkpoints" / "step-000003" / "snapshots")
    outcome = resume(3, "algorithm.kl_weight=0.1", "training.max_steps=4")
    assert outcome.code == 2
    assert "step-000003: has no snapshot 'reference', with which grpo goes on; give another checkpoint" in outcome.err


def test_moments_of_another_kind_are_refused(written: Path) -> None:
    """Their states have other names, and other numbers under them."""
    run = yaml.safe_load((written.parent / "runs" / "t" / "config.yaml").read_text(encoding="utf-8"))
    before = yaml.safe_dump(run)
    run["optimizer"]["moments"] = "int8"
    with pytest.raises(CheckpointError, match=r"was written under optimizer.moments=fp32, the run file says int8"):
        may_go_on(written, before, yaml.safe_dump(run), after_warmup=True, inside_epoch=False)


@pytest.mark.parametrize("kind", [Experience, Pairs])
def test_rollouts_of_another_algorithm_are_no_type_error(kind: Any) -> None:
    with pytest.raises(
        CheckpointError, match=r"holds frames, weight, but this algorithm goes on with .*position.*seed"
    ):
        restored(kind, {"frames": torch.zeros(1), "weight": torch.zeros(1)})


def test_an_average_that_the_run_file_no_longer_has_is_dropped(signs: Path, tmp_path: Path) -> None:
    """It would be written to every checkpoint from then on, and `retouch sample` would take it for the average."""
    run = small_run(signs, tmp_path / "runs", ema={"decay": 0.9}, training__max_steps=2, training__checkpoint_every=1)
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(run), encoding="utf-8")
    assert retouch("train", tmp_path / "run.yaml").code == 0
    checkpoints = tmp_path / "runs/t/checkpoints"
    assert (checkpoints / "step-000002/ema").is_dir()
    outcome = retouch("train", tmp_path / "run.yaml", f"resume={checkpoints / 'step-000001'}", "ema=null")
    assert outcome.code == 0, outcome.err
    assert not (checkpoints / "step-000002/ema").exists()
    assert (checkpoints / "step-000002/weights").is_dir()
    again = retouch("train", tmp_path / "run.yaml", f"resume={checkpoints / 'step-000002'}", "training.max_steps=3")
    assert (again.code, "has no averaged weights, but the run file has an ema section" in again.err) == (2, True)
