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
        "srun": 'shift; SLURM_NODEID=0 "$@"; SLURM_NODEID=1 exec "$@"',
        "retouch": f'echo "retouch $*" >> {said}; stat -c %a "${{7%/*}}" > {said}-mode; echo x > "$7"; exec sleep 60',
        "accelerate": f'echo "accelerate $*" >> {said}; . {tmp_path}/training',
    }
    (tmp_path / "bin").mkdir()
    for name, body in programs.items():
        executable(tmp_path / "bin" / name, body)
    slurm = {
        "SLURM_JOB_ID": str(os.getpid()),
        "SLURM_JOB_NODELIST": "n[1-2]",
        "SLURM_NNODES": "2",
        "SLURM_GPUS_ON_NODE": "4",
    }
    (tmp_path / "tmp").mkdir()
    environment = {
        **os.environ,
        **slurm,
        "TMPDIR": str(tmp_path / "tmp"),
        "PATH": f"{tmp_path}/bin:{os.environ['PATH']}",
    }
    return {"args": ["bash", str(SCRIPT)], "cwd": tmp_path, "env": environment}


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
    places = [Path(server[7]) for server in servers]  # in folders that no other user can name or write to
    assert places[0] != places[1] and job["env"]["SLURM_JOB_ID"] not in str(places)
    assert {place.parents[1] for place in places} == {job["cwd"] / "tmp"} and not [*(job["cwd"] / "tmp").iterdir()]
    assert (job["cwd"] / "said-mode").read_text() == "700\n"


@pytest.mark.parametrize(
    ("codes", "ends", "queued"),
    [
        (("3333", "3333"), 1, True),
        (("3333", "3331"), 1, False),
        (("3333", "33330"), 1, False),
        (("3333", ""), 1, False),
        (("333", "3333"), 1, False),
        (("0000", "0000"), 0, False),
        (("", ""), 1, False),
    ],
    ids=str,
)
def test_it_is_queued_again_after_a_resumable_stop_alone(
    job: dict[str, Any], codes: tuple[str, str], ends: int, queued: bool
) -> None:
    """accelerate ends with 1 for every code but 0; a process without a code was killed, or came not as far as its run
    file. Each of two nodes has four."""
    for node, of in enumerate(codes):
        (job["cwd"] / f"codes-{node}").write_text("".join(f"{code}\n" for code in of))
    body = f'cat codes-$SLURM_NODEID >> "$RETOUCH_EXIT_CODES"; exit {ends}'
    (job["cwd"] / "training").write_text(body)
    job["env"]["REWARD"] = ""
    done = subprocess.run(**job, capture_output=True, text=True, timeout=60)
    assert done.returncode == (0 if queued else ends), done.stderr
    assert (["scontrol", "requeue", job["env"]["SLURM_JOB_ID"]] in lines(job)) == queued
    assert not [*job["cwd"].glob(".exit-codes*")] and not any(words[0] == "retouch" for words in lines(job))


def test_the_signal_before_the_time_limit_reaches_the_run(job: dict[str, Any]) -> None:
    """And the job waits for it to end."""
    body = 'trap "yes 3 | head -n 8 >> $RETOUCH_EXIT_CODES; exit 1" TERM\n'
    body += "touch ready; for i in $(seq 600); do sleep 0.1; done"
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
