"""A killed run continues as if nothing had happened: weights, average, optimizer and metrics, bit for bit."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import yaml
from safetensors.torch import load_file

from retouch.engine import Engine
from retouch.observe.run_dir import read_metrics
from retouch.types import Stopped
from tests import forked
from tests.conftest import small_run
from tests.selection import rows
from tests.tiny_models import shallow_flux

from .runs import Config, of_kind, train

STEPS = 6

CHILD = """
import os, signal, sys
import torch
torch.set_num_threads(1)
where, count = sys.argv.pop(1), int(sys.argv.pop(1))
seen = 0

def fatal(function):
    def wrapped(*args, **kwargs):
        global seen
        seen += 1
        if seen == count:
            os.kill(os.getpid(), getattr(signal, os.environ.get("HOW", "SIGKILL")))
        return function(*args, **kwargs)
    return wrapped

if where == "rollout":
    import retouch.training.experience as module
    module.sample = fatal(module.sample)
elif where == "backward":
    from retouch.engine import Engine
    Engine.backward = fatal(Engine.backward)
elif where == "writing":
    import retouch.engine.saved as module
    module.flush = fatal(module.flush)
elif where == "after_a_checkpoint":
    from retouch.engine import Engine
    backward = Engine.backward
    def fatal_later(*args, **kwargs):
        from pathlib import Path
        if list(Path(os.environ["CHECKPOINTS"]).glob("*/complete.json")):
            os.kill(os.getpid(), signal.SIGKILL)
        return backward(*args, **kwargs)
    Engine.backward = fatal_later
from retouch.cli import main
main()
"""


def run_child(where: str, count: int, arguments: list[str], **environment: str) -> subprocess.CompletedProcess[str]:
    return forked.run(
        [sys.executable, "-c", CHILD, where, str(count), "train", *arguments],
        env={**os.environ, "OMP_NUM_THREADS": "1", **environment},
        timeout=300,
    )


@pytest.fixture(scope="module")
def long_run(signs: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Warm-up of 1 step, then epochs of 2 x 2 optimizer steps with a reference and averages; checkpoints at 3 and 6,
    so that the first lies inside an epoch. Every test gives its runs names of their own."""
    folder = tmp_path_factory.mktemp("resume")
    data = small_run(
        signs,
        folder / "runs",
        model__path=shallow_flux(),
        ema={"decay": 0.9, "update_interval": 1},
        algorithm__sft_steps=1,
        algorithm__inner_epochs=2,
        algorithm__kl_weight=0.1,
        optimizer__batch_size_per_device=1,
        optimizer__gradient_accumulation=2,
        training__max_steps=STEPS,
        training__checkpoint_every=3,
        training__eval_every=2,
        evaluation__num_examples=1,
        resume="auto",
    )
    path = folder / "run.yaml"
    path.write_text(yaml.safe_dump(data))
    return path


@pytest.fixture(scope="module")
def uninterrupted(long_run: Path) -> Path:
    done = run_child("nowhere", 0, [str(long_run), "name=whole"])
    assert done.returncode == 0, done.stderr
    return long_run.parent / "runs" / "whole"


KILLED = [("rollout", 2), ("backward", 10), ("writing", 5)]


@pytest.mark.parametrize(("where", "count"), rows(KILLED, KILLED[1:2]))
def test_resume_is_bitwise(long_run: Path, uninterrupted: Path, where: str, count: int) -> None:
    """Killed in the second rollout, between backwards of step 5 (an inner epoch), and while writing a checkpoint."""
    resumes_bitwise(long_run, uninterrupted, where, count)


@pytest.mark.full
def test_a_run_killed_before_its_first_checkpoint_begins_anew(long_run: Path, uninterrupted: Path) -> None:
    resumes_bitwise(long_run, uninterrupted, "rollout", 1)


def resumes_bitwise(long_run: Path, uninterrupted: Path, where: str, count: int) -> None:
    name = f"{where}{count}"
    killed = run_child(where, count, [str(long_run), f"name={name}"])
    assert killed.returncode == -signal.SIGKILL, killed.stderr
    again = run_child("nowhere", 0, [str(long_run), f"name={name}"])
    assert again.returncode == 0, again.stderr
    same_runs(uninterrupted, long_run.parent / "runs" / name)


def same_runs(a: Path, b: Path) -> None:
    for name in ("step-000003", "step-000006"):
        for part in ("weights", "ema"):
            file = f"checkpoints/{name}/{part}/diffusion_pytorch_model.safetensors"
            mine, theirs = load_file(a / file), load_file(b / file)
            assert mine.keys() == theirs.keys()
            assert all(torch.equal(mine[n], theirs[n]) for n in mine), f"{b.name}: {name}/{part}"
        optimizers = [torch.load(d / "checkpoints" / name / "optimizer.pt", weights_only=True) for d in (a, b)]
        assert structure(optimizers[0]) == structure(optimizers[1])
        for x, y in zip(*(o["optimizer"]["state"].values() for o in optimizers), strict=True):
            assert all(torch.equal(x[k], y[k]) for k in x)
        states = [json.loads((d / "checkpoints" / name / "state.json").read_text())["progress"] for d in (a, b)]
        assert states[0] == states[1]
    records = [[{k: v for k, v in r.items() if k != "time"} for r in read_metrics(d / "metrics.jsonl")] for d in (a, b)]
    assert records[0] == records[1]


def structure(value: object) -> object:
    """Nested values with the shapes of their tensors."""
    if isinstance(value, dict):
        return {key: structure(one) for key, one in value.items()}
    if isinstance(value, list | tuple):
        return [structure(one) for one in value]
    return (value.dtype, value.shape) if isinstance(value, torch.Tensor) else value


def test_sigterm_stops_cleanly_and_resumes_bitwise(long_run: Path, uninterrupted: Path) -> None:
    """Exit 3 with a checkpoint at the step boundary, here inside an epoch, whose rollouts it keeps; then the same by
    SIGUSR1, which SLURM sends before the time limit."""
    folder = long_run.parent / "runs" / "term" / "checkpoints" / "step-000004"
    for number, (step, backwards) in {"SIGTERM": (4, 7), "SIGUSR1": (5, 1)}.items():
        stopped = run_child("backward", backwards, [str(long_run), "name=term"], HOW=number)
        assert stopped.returncode == 3, stopped.stderr
        assert f"stopped: received {number} at step {step}" in stopped.stderr
        assert (folder.with_name(f"step-{step:06d}") / "complete.json").is_file()
    assert (folder / "rollouts.safetensors").is_file()
    again = run_child("nowhere", 0, [str(long_run), "name=term"])
    assert again.returncode == 0, again.stderr
    a, b = (
        load_file(d / "checkpoints/step-000006/weights/diffusion_pytorch_model.safetensors")
        for d in (uninterrupted, folder.parents[1])
    )
    assert all(torch.equal(a[n], b[n]) for n in a)


def test_a_run_that_is_only_finished_when_it_is_resumed_keeps_the_rows_of_its_end(
    config: Config, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A signal came in its last step, inside an epoch: the run can still be extended."""
    backward = Engine.backward

    def signalled(self: Engine, loss: torch.Tensor) -> None:
        os.kill(os.getpid(), signal.SIGTERM)
        backward(self, loss)

    given = {"training__max_steps": 1, "evaluation__num_steps": 1, "evaluation__num_examples": 1}
    with monkeypatch.context() as changed, pytest.raises(Stopped):
        changed.setattr(Engine, "backward", signalled)
        train(config(**given))
    run, records = train(config(**given, resume="auto"))
    assert [record["moment"] for record in of_kind(records, "eval")] == ["start", "end"]
    assert (run.dir.path / "checkpoints/step-000001/rollouts.safetensors").is_file()


@pytest.mark.full
def test_a_run_stopped_in_its_last_step_can_still_be_extended_bitwise(long_run: Path) -> None:
    """Its end lies inside an epoch: the rollouts that are left are in its checkpoint, also when a signal came in that
    step and the run was only finished when it was resumed."""
    short, extended = f"training.max_steps={STEPS - 2}", long_run.parent / "runs"
    for name, where, code in (("ended", "nowhere", 0), ("stopped", "backward", 3)):
        first = run_child(where, 7, [str(long_run), f"name={name}", short], HOW="SIGTERM")
        assert first.returncode == code, first.stderr
    killed = run_child("writing", 1, [str(long_run), "name=stopped", short])  # after its last evaluation
    assert killed.returncode == -signal.SIGKILL, killed.stderr
    finished = run_child("nowhere", 0, [str(long_run), "name=stopped", short])
    assert finished.returncode == 0, finished.stderr
    evaluations = [
        [(r["step"], r["moment"]) for r in read_metrics(extended / name / "metrics.jsonl") if r["kind"] == "eval"]
        for name in ("ended", "stopped")
    ]
    assert evaluations[0] == evaluations[1]
    assert (extended / "stopped" / "checkpoints" / "step-000004" / "rollouts.safetensors").is_file()
    for name in ("ended", "stopped"):
        whole = run_child("nowhere", 0, [str(long_run), f"name={name}"])
        assert whole.returncode == 0, whole.stderr
    file = "checkpoints/step-000006/weights/diffusion_pytorch_model.safetensors"
    ended, stopped = (load_file(extended / name / file) for name in ("ended", "stopped"))
    assert all(torch.equal(ended[n], stopped[n]) for n in ended)
