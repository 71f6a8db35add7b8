"""A run whose reward server dies waits, stops resumable with its weights untouched, and goes on when it is back."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from safetensors.torch import load_file
from torch import Tensor

from retouch.observe.run_dir import read_metrics
from tests import forked
from tests.rewards.fakes import free_port, get, until

pytestmark = pytest.mark.usefixtures("shallow")

STEPS = 4  # two epochs of two optimizer steps

CHILD = """
import os, signal, sys
import torch
torch.set_num_threads(1)
import retouch.training.experience as module
sample, seen, server = module.sample, 0, int(os.environ["SERVER"])

def fatal(*args, **kwargs):
    global seen
    seen += 1
    if seen == 2 and server:  # the rollout of the second epoch
        os.kill(server, signal.SIGKILL)
    return sample(*args, **kwargs)

module.sample = fatal
from retouch.cli import main
main()
"""


@contextmanager
def reward_server(port: int) -> Iterator[subprocess.Popen[bytes]]:
    """`retouch reward serve preservation` on a port; killed at the end unless it was before."""
    command = [sys.executable, "-m", "retouch", "reward", "serve", "preservation", "--port", str(port)]
    folder = tempfile.TemporaryDirectory()
    process = subprocess.Popen(command, cwd=folder.name, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)

    def ready() -> bool:
        assert process.poll() is None
        try:
            return b" 200 " in get(f"http://127.0.0.1:{port}", "/readyz")
        except OSError:
            return False

    try:
        until(ready, 60)
        yield process
    finally:
        process.kill()
        process.wait()
        folder.cleanup()


def train(run: Path, name: str, *overrides: str, kills: int = 0) -> subprocess.CompletedProcess[str]:
    """Train in a process of its own, which kills the process `kills` while it samples its second epoch."""
    return forked.run(
        [sys.executable, "-c", CHILD, "train", str(run), f"name={name}", *overrides],
        env={**os.environ, "OMP_NUM_THREADS": "1", "SERVER": str(kills), "COLUMNS": "1000"},
        timeout=300,
    )


@pytest.fixture
def run(run_file: Callable[..., dict[str, Any]], tmp_path: Path) -> Callable[[int], Path]:
    """The run file of a run whose rewards come from a port. Requests and outages are short."""

    def write(port: int) -> Path:
        data = run_file(
            rewards={"preservation": {"url": f"http://127.0.0.1:{port}"}},
            reward_client={"timeout_s": 20.0, "outage_wait_s": 0.5},
            ema={"decay": 0.9},
            evaluation__num_examples=1,
            evaluation__grid_examples=0,
            training__max_steps=STEPS,
            resume="auto",
        )
        path = tmp_path / "run.yaml"
        path.write_text(yaml.safe_dump(data))
        return path

    return write


def test_an_outage_stops_the_run_and_a_restart_finishes_it_bit_for_bit(
    run: Callable[[int], Path], tmp_path: Path
) -> None:
    """The reference keeps a checkpoint of step 2, where the epoch that fails begins; the run that is interrupted would
    keep none but the last."""
    port = free_port()
    file, runs = run(port), tmp_path / "runs"
    with reward_server(port) as server:
        whole = train(file, "whole", "training.checkpoint_every=2")
        assert whole.returncode == 0, whole.stderr
        stopped = train(file, "cut", "reward_client.timeout_s=1", kills=server.pid)
        assert server.wait(10) == -signal.SIGKILL
    assert stopped.returncode == 3, stopped.stderr
    last = stopped.stderr.splitlines()[-1]
    assert last.startswith("stopped: rewards stayed unavailable for ")
    assert f"http://127.0.0.1:{port}" in last and last.endswith(
        f"nothing was trained on that batch; continue with retouch train {runs}/cut/config.yaml resume=auto"
    )
    assert "waiting up to" in stopped.stderr
    assert [p.name for p in (runs / "cut" / "checkpoints").iterdir()] == ["step-000002"]
    same_weights(runs, "step-000002")
    assert read_metrics(runs / "cut" / "metrics.jsonl")[-1]["event"] == "stopped"
    with reward_server(port):
        again = train(file, "cut")
    assert again.returncode == 0, again.stderr
    same_weights(runs, "step-000004")
    before, after = (
        weights(runs / "whole" / "checkpoints" / step / "weights") for step in ("step-000002", "step-000004")
    )
    assert any(not torch.equal(before[n], after[n]) for n in before)  # the second epoch does train


def same_weights(runs: Path, checkpoint: str) -> None:
    """Weights and their average are those of the uninterrupted run."""
    for part in ("weights", "ema"):
        whole, cut = (weights(runs / name / "checkpoints" / checkpoint / part) for name in ("whole", "cut"))
        assert whole.keys() == cut.keys()
        assert all(torch.equal(whole[n], cut[n]) for n in whole), f"{checkpoint}/{part}"


def weights(folder: Path) -> Mapping[str, Tensor]:
    return load_file(folder / "diffusion_pytorch_model.safetensors")
