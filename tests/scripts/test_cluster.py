"""examples/cluster/slurm.sbatch, with programs in place of SLURM: what a node runs, when a job is queued again."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import typer.main

from retouch.cli import app
from tests.rewards.fakes import until

from .test_launchers import executable

SCRIPT = Path(__file__).parents[2] / "examples/cluster/slurm.sbatch"

pytestmark = pytest.mark.skipif(shutil.which("bash") is None, reason="needs bash")


@pytest.fixture
def job(tmp_path: Path) -> dict[str, Any]:
    """Arguments of `subprocess` for a job on two nodes. Programs write their arguments to the file `said`."""
    said = tmp_path / "said"
    programs = {
        "scontrol": f'[ "$1" = show ] && printf "first\\nsecond\\n" || echo "scontrol $*" >> {said}',
        # both nodes, one after the other
        "srun": 'shift; SLURM_NODEID=0 "$@" && SLURM_NODEID=1 exec "$@"; exit $?',
        "retouch": f'echo "retouch $*" >> {said}; echo x > /tmp/retouch-$SLURM_JOB_ID.json; exec sleep 60',
        "accelerate": f'echo "accelerate $*" >> {said}; . {tmp_path}/training',
    }
    (tmp_path / "bin").mkdir()
    for name, body in programs.items():
        executable(tmp_path / "bin" / name, body)
    number = str(os.getpid())
    slurm = {"SLURM_JOB_ID": number, "SLURM_JOB_NODELIST": "n[1-2]", "SLURM_NNODES": "2", "SLURM_GPUS_ON_NODE": "4"}
    environment = {**os.environ, **slurm, "PATH": f"{tmp_path}/bin:{os.environ['PATH']}"}
    yield {"args": ["bash", str(SCRIPT)], "cwd": tmp_path, "env": environment}
    Path(f"/tmp/retouch-{number}.json").unlink(missing_ok=True)


def lines(job: dict[str, Any]) -> list[list[str]]:
    return [line.split() for line in (job["cwd"] / "said").read_text(encoding="utf-8").splitlines()]


def test_every_node_starts_a_server_and_its_processes(job: dict[str, Any]) -> None:
    """With commands that exist; overrides go on."""
    (job["cwd"] / "training").write_text("exit 0")
    job["args"] += ["example:flux_fill_grpo", "data.limit=8"]
    done = subprocess.run(**job, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    said = lines(job)
    servers, trainings = ([words for words in said if words[0] == name] for name in ("retouch", "accelerate"))
    assert len(said) == 4 and len(servers) == len(trainings) == 2
    command: Any = typer.main.get_command(app)
    for number, (server, training) in enumerate(zip(servers, trainings, strict=True)):
        serve, train = command.commands["reward"].commands["serve"], command.commands["train"]
        served = serve.make_context("serve", server[3:]).params
        assert (server[1:3], served["names"]) == (["reward", "serve"], "ocr")
        options = dict(pairwise(training))
        assert (options["--num_machines"], options["--num_processes"]) == ("2", "8")
        assert (options["--machine_rank"], options["--main_process_ip"]) == (str(number), "first")
        given = train.make_context("train", training[training.index("train") + 1 :]).params
        endpoints = f"rewards.ocr.url={served['endpoints']}"
        assert (str(given["run"]), given["overrides"]) == (
            "example:flux_fill_grpo",
            ["data.limit=8", endpoints, "resume=auto"],
        )


@pytest.mark.parametrize(
    ("codes", "ends", "queued"),
    [("3\\n3\\n", 1, True), ("3\\n1\\n", 1, False), ("0\\n0\\n", 0, False), ("", 1, False)],
)
def test_it_is_queued_again_after_a_resumable_stop_alone(
    job: dict[str, Any], codes: str, ends: int, queued: bool
) -> None:
    """accelerate ends with 1 for every code but 0; without a code no process came as far as its run file."""
    (job["cwd"] / "training").write_text(f'printf "{codes}" >> "$RETOUCH_EXIT_CODES"; exit {ends}')
    job["env"]["REWARD"] = ""
    done = subprocess.run(**job, capture_output=True, text=True, timeout=60)
    assert done.returncode == (0 if queued else ends), done.stderr
    assert (["scontrol", "requeue", job["env"]["SLURM_JOB_ID"]] in lines(job)) == queued
    assert not [*job["cwd"].glob(".exit-codes*")] and not any(words[0] == "retouch" for words in lines(job))


def test_the_signal_before_the_time_limit_reaches_the_run(job: dict[str, Any]) -> None:
    """And the job waits for it to end."""
    body = 'trap "echo 3 >> $RETOUCH_EXIT_CODES; exit 1" TERM; touch ready; for i in $(seq 600); do sleep 0.1; done'
    (job["cwd"] / "training").write_text(body)
    executable(job["cwd"] / "bin/srun", 'shift; export SLURM_NODEID=0; exec "$@"')
    job["env"]["REWARD"] = ""
    with subprocess.Popen(**job, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as running:
        until((job["cwd"] / "ready").exists)
        running.send_signal(signal.SIGUSR1)
        _, problems = running.communicate(timeout=60)
    assert running.returncode == 0, problems
    assert ["scontrol", "requeue", job["env"]["SLURM_JOB_ID"]] in lines(job)


def test_shellcheck_has_no_remark() -> None:
    if shutil.which("shellcheck") is None:
        pytest.skip("shellcheck is not installed")
    done = subprocess.run(["shellcheck", str(SCRIPT)], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stdout
