"""scripts/: what each would run, that it can be run, and the one that waits and restarts."""

from __future__ import annotations

import inspect
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import typer.main
from torch.distributed.launcher.api import LaunchConfig

from retouch.cli import app
from retouch.config import derive, load_run
from retouch.observe.run_dir import read_metrics
from retouch.process.signals import ENDING
from tests import forked
from tests.command_line import retouch
from tests.configs.conftest import shrink, signs
from tests.rewards.fakes import until

__all__ = ["signs"]

REPOSITORY = Path(__file__).parents[2]
SCRIPTS = sorted((REPOSITORY / "scripts").rglob("*.sh"))

FOUR = "accelerate launch --config_file configs/accelerate/gpu8.yaml --num_processes 4 -m "
FINETUNE = {
    f"finetune/finetune_{script}_4gpus": f"{FOUR}retouch train configs/{run}.yaml resume=auto"
    for algorithm in ("grpo", "dpo", "sft")
    for script, run in (
        (f"flux_fill_{algorithm}", f"flux_fill_{algorithm}_full"),
        (f"flux_fill_{algorithm}_lora", f"flux_fill_{algorithm}"),
        (f"sd_inpainting_{algorithm}", f"sd_inpaint_{algorithm}"),
        (f"sd_inpainting_{algorithm}_full", f"sd_inpaint_{algorithm}_full"),
    )
}
FORMER = {
    f"finetune_{name}_4gpus": f"finetune/finetune_{name.replace('_full', '')}_4gpus"
    for algorithm in ("grpo", "dpo", "sft")
    for name in (f"flux_fill_{algorithm}", f"flux_fill_{algorithm}_full", f"sd_inpainting_{algorithm}")
}
"""Paths of earlier versions -> the launchers that they start."""
ONCE_OF_A_LORA = {f"finetune_flux_fill_{algorithm}_4gpus": algorithm for algorithm in ("grpo", "dpo", "sft")}
"""Paths that trained a LoRA in earlier versions."""
EXPECTED = {
    **FINETUNE,
    **{former: FINETUNE[name] for former, name in FORMER.items()},
    "run_server": "retouch reward serve ocr --port 8000 --endpoints runs/endpoints.json",
    "train_grpo": "retouch train configs/flux_fill_grpo.yaml resume=auto",
    "train_nft": "retouch train configs/flux_fill_nft.yaml resume=auto",
    "train_ip_grpo": "retouch train configs/flux_fill_ip_grpo.yaml resume=auto",
    "train_ip_nft": "retouch train configs/flux_fill_ip_nft.yaml resume=auto",
    **{
        name: (
            f"accelerate launch --config_file configs/accelerate/{engine}.yaml -m retouch train configs/{run}.yaml "
            "resume=auto"
        )
        for name, engine, run in (
            ("run_8gpu", "zero2", "qwen_image_edit_vlm_grpo_8gpu"),
            ("run_8gpu_full_finetune", "zero3", "qwen_image_edit_vlm_grpo_full_8gpu"),
            ("run_8gpu_qwen_image", "zero2", "qwen_image_vlm_grpo_8gpu"),
        )
    },
}
TRAINING = [name for name, command in EXPECTED.items() if " train " in command]

VARIABLES = (
    "REWARDS",
    "PORT",
    "DEVICES",
    "REPLICAS",
    "ENDPOINTS",
    "RUN_FILE",
    "GPU",
    "GPUS",
    "FREE_BELOW_MIB",
    "DATA_PATH",
    "DATA_JSON_PATH",
)
"""What launchers read."""

pytestmark = pytest.mark.skipif(shutil.which("bash") is None, reason="needs bash")


@pytest.fixture(autouse=True)
def variables(monkeypatch: pytest.MonkeyPatch) -> None:
    """None of those that choose a run file."""
    for name in ("DATA_PATH", "DATA_JSON_PATH", "SIGLIP_PATH", "CALLIGRAPHER_PATH"):
        monkeypatch.delenv(name, raising=False)


def dry_run(name: str, *arguments: str, **variables: str) -> str:
    """What a launcher prints, started from another folder."""
    command = [str(REPOSITORY / f"scripts/{name}.sh"), "--dry-run", *arguments]
    kept = {k: v for k, v in os.environ.items() if k not in VARIABLES}
    done = subprocess.run(command, cwd="/", env={**kept, **variables}, capture_output=True, text=True, timeout=30)
    lora = f"scripts/finetune/{name.replace('_4gpus', '_lora_4gpus')}.sh"
    note = f"{name}.sh: trains all weights now; for a LoRA run {lora}\n" if name in ONCE_OF_A_LORA else ""
    assert (done.returncode, done.stderr) == (0, note)
    return done.stdout


def test_every_launcher_is_known_and_can_be_executed() -> None:
    names = {path: path.relative_to(REPOSITORY / "scripts").with_suffix("").as_posix() for path in SCRIPTS}
    assert {*names.values()} == {*EXPECTED, "monitor_and_run", "launch"}
    assert {names[path] for path in SCRIPTS if not os.access(path, os.X_OK)} == {"launch"}  # which is sourced


@pytest.mark.parametrize("name", EXPECTED)
def test_a_dry_run_prints_the_exact_command(name: str) -> None:
    assert dry_run(name) == EXPECTED[name] + "\n"
    assert shlex.split(dry_run(name, "a=b c", "d='e'"))[-2:] == ["a=b c", "d='e'"]  # overrides go on, word by word


@pytest.mark.parametrize("name", EXPECTED)
def test_without_dry_run_it_becomes_that_command(name: str, tmp_path: Path) -> None:
    for program in ("retouch", "accelerate"):
        executable(tmp_path / program, 'echo "$PWD" "$(basename "$0")" "$@"; exit 3')
    command = [str(REPOSITORY / f"scripts/{name}.sh"), "a=b"]
    done = subprocess.run(command, cwd="/", env=with_path(tmp_path), capture_output=True, text=True, timeout=30)
    assert (done.returncode, done.stdout) == (3, f"{REPOSITORY} {EXPECTED[name]} a=b\n")


def test_processes_have_an_hour_to_finish_their_step(tmp_path: Path) -> None:
    """torch's launcher gives them 30 s else."""
    for program in ("retouch", "accelerate"):
        executable(tmp_path / program, 'echo "$TORCH_ELASTIC_SHUTDOWN_TIMEOUT"')
    kept = {k: v for k, v in with_path(tmp_path).items() if k != "TORCH_ELASTIC_SHUTDOWN_TIMEOUT"}
    for own, expected in (({}, "3600\n"), ({"TORCH_ELASTIC_SHUTDOWN_TIMEOUT": "7"}, "7\n")):
        for name in TRAINING:
            command = [str(REPOSITORY / f"scripts/{name}.sh")]
            done = subprocess.run(command, env={**kept, **own}, capture_output=True, text=True, timeout=30)
            assert done.stdout == expected
    assert "TORCH_ELASTIC_SHUTDOWN_TIMEOUT" in inspect.getsource(LaunchConfig)


@pytest.mark.parametrize("name", TRAINING)
def test_the_run_file_is_there_and_accepted(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for variable in ("MODEL_PATH", "DATA_PATH", "DATA_JSON_PATH"):
        monkeypatch.setenv(variable, "somewhere")
    monkeypatch.chdir(REPOSITORY)
    words = shlex.split(EXPECTED[name])
    arguments = words[words.index("train") + 1 :]
    processes = "8" if "--config_file" in words else "1"  # what the engines' files say
    if "--num_processes" in words:
        processes = words[words.index("--num_processes") + 1]
    outcome = retouch("check", *arguments, "--world-size", processes)
    assert outcome.code == 0, outcome.err
    # fewer devices take the optimizer steps that the file describes for any number
    if not load_run(arguments[0]).algorithm.trains_text_encoder:
        here, eight = (derive(load_run(arguments[0], arguments[1:]), count) for count in (int(processes), 8))
        assert here.global_rows_per_step == eight.global_rows_per_step
        assert here.optimizer_steps_per_epoch == eight.optimizer_steps_per_epoch


BY_DATA = {
    **{
        f"finetune/finetune_{family}_{algorithm}{kind}_4gpus": f"{run}_{{}}{algorithm}{full}"
        for family, run, kind, full in (
            ("flux_fill", "flux_fill", "", "_full"),
            ("flux_fill", "flux_fill", "_lora", ""),
            ("sd_inpainting", "sd_inpaint", "", ""),
            ("sd_inpainting", "sd_inpaint", "_full", "_full"),
        )
        for algorithm in ("sft", "grpo", "dpo")
    },
    **{f"train_{algorithm}": f"flux_fill_{{}}{algorithm}" for algorithm in ("grpo", "nft")},
}
"""Launcher -> its run file, for lists of examples with "manifest_" in the middle."""


@pytest.mark.parametrize("name", BY_DATA)
def test_the_run_file_fits_the_data(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One function of launch.sh chooses it; check accepts what it chooses."""
    (tmp_path / "imagefolder").mkdir()
    (tmp_path / "imagefolder/metadata.csv").write_text("file_name,text\n", encoding="utf-8")
    published, listed = (f"configs/{BY_DATA[name].format(kind)}.yaml" for kind in ("", "manifest_"))
    folder = ['data={format: self_bench, path: "${DATA_PATH}", resolution: 512}', "evaluation.data=null"]
    own = folder if "_sft_" in name else []
    for variables, expected in (
        ({"DATA_JSON_PATH": "l.json"}, [listed]),
        ({"DATA_PATH": "l.jsonl"}, [listed, "data.path=${DATA_PATH}"]),
        ({"DATA_PATH": str(tmp_path / "imagefolder")}, [listed, "data.path=${DATA_PATH}"]),
        ({"DATA_PATH": "a folder"}, [published, *own]),
        ({"DATA_JSON_PATH": "l.csv", "DATA_PATH": "f"}, [published if own else listed]),
        ({"DATA_JSON_PATH": "l.csv", "DATA_PATH": "h.csv"}, [listed]),
    ):
        words = shlex.split(dry_run(name, **variables))
        chosen = words[words.index("train") + 1 : -1]
        assert chosen == expected
        with monkeypatch.context() as environment:
            environment.chdir(REPOSITORY)
            for variable in ("DATA_PATH", "DATA_JSON_PATH"):
                environment.delenv(variable, raising=False)
            for variable, value in variables.items():
                environment.setenv(variable, value)
            outcome = retouch("check", *chosen, "--world-size", "4" if "accelerate" in words else "1")
            assert outcome.code == 0, outcome.err


@pytest.mark.parametrize("name", ["list.TSV", "list.tsv", "LIST.JSON", "a.b/List.Jsonl", "l.CSV"])
def test_a_list_is_known_by_its_suffix_in_either_case(name: str) -> None:
    """As `data.path` reads it."""
    words = shlex.split(dry_run("train_grpo", DATA_PATH=name))
    assert words[3:5] == ["data.path=${DATA_PATH}", "resume=auto"]
    assert words[2] == "configs/flux_fill_manifest_grpo.yaml"


@pytest.mark.parametrize(("name", "algorithm"), ONCE_OF_A_LORA.items())
def test_a_job_that_trained_a_lora_starts_no_run_of_all_weights(name: str, algorithm: str, tmp_path: Path) -> None:
    """It is found where the LoRA's launcher put it, by its data and `logging.dir`."""
    shutil.copytree(REPOSITORY / "scripts", tmp_path / "scripts")

    def started(*arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
        command = [str(tmp_path / f"scripts/{name}.sh"), "--dry-run", *arguments]
        kept = {k: v for k, v in os.environ.items() if k not in VARIABLES}
        return subprocess.run(command, cwd="/", env={**kept, **variables}, capture_output=True, text=True, timeout=30)

    cases: tuple[tuple[str, list[str], dict[str, str]], ...] = (
        (f"runs/flux_fill_{algorithm}", [], {}),
        (f"runs/flux_fill_manifest_{algorithm}", [], {"DATA_JSON_PATH": "l.json"}),
        (f"else where/flux_fill_{algorithm}", ["logging.dir=else where"], {}),
    )
    lora, whole = (f"scripts/finetune/finetune_flux_fill_{algorithm}{kind}_4gpus.sh" for kind in ("_lora", ""))
    for run, arguments, variables in cases:
        assert started(*arguments, **variables).returncode == 0
        (tmp_path / run / "checkpoints").mkdir(parents=True)
        done = started(*arguments, **variables)
        assert (done.returncode, done.stdout) == (2, "")
        assert done.stderr == (
            f"{run}: a run of a LoRA, which this path no longer trains; to continue it, run {lora}; to train all "
            f"weights, run {whole}\n"
        )
        (tmp_path / f"{run}_full").mkdir()  # which has been started since
        done = started(*arguments, **variables)
        assert (done.returncode, f"_{algorithm}_full.yaml" in done.stdout) == (0, True)


@pytest.mark.parametrize(
    ("name", "variable"),
    [
        pytest.param("finetune/finetune_flux_fill_grpo_lora_4gpus", "DATA_PATH", marks=pytest.mark.full),
        ("finetune/finetune_sd_inpainting_sft_4gpus", "DATA_JSON_PATH"),
    ],
)
def test_a_list_of_descriptions_trains_by_its_launcher(
    name: str, variable: str, signs: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The words behind `train`, on the tiny base and one process; the other files are trained in tests/configs."""
    monkeypatch.chdir(REPOSITORY)
    monkeypatch.setenv(variable, str(signs["described"]))
    words = shlex.split(dry_run(name, **{variable: str(signs["described"])}))
    file, *overrides = words[words.index("train") + 1 :]
    small = [o for o in shrink(REPOSITORY / file, signs, tmp_path) if not o.startswith("data.path=")]
    outcome = retouch("train", file, *overrides, *small)
    assert outcome.code == 0, outcome.err
    run = Path(outcome.out.strip().rpartition("done: ")[2])
    assert {record["examples"] for record in read_metrics(run / "metrics.jsonl") if record["kind"] == "eval"} == {
        "train"
    }
    assert "evaluating on training examples" in " ".join((run / "log.txt").read_text(encoding="utf-8").split())
    report = (run / "report.html").read_text(encoding="utf-8")
    assert "eval/clip" in report and "<h2>Gallery</h2>" in report and "OCR" not in report


def test_the_server_command_exists_and_takes_its_variables() -> None:
    variables = {"REWARDS": "ocr,style", "PORT": "9", "ENDPOINTS": "e.json", "DEVICES": "0,1", "REPLICAS": "2"}
    printed = dry_run("run_server", **variables)
    expected = "retouch reward serve ocr,style --port 9 --devices 0,1 --replicas 2 --endpoints e.json"
    assert shlex.split(printed) == expected.split()
    command = typer.main.get_command(app)
    for word in ("reward", "serve"):
        command = command.commands[word]  # type: ignore[attr-defined]
    command.make_context("serve", shlex.split(printed)[3:])


@pytest.mark.parametrize(
    ("variables", "cores", "replicas"),
    [
        ({"GPUS": "1"}, 999, "5"),
        ({}, 999, "39"),
        ({"GPUS": "8"}, 3, "3"),  # a core each
        ({"GPUS": "8", "REPLICAS": "2"}, 999, "2"),
        ({"GPUS": "8", "DEVICES": "0"}, 999, None),  # of a network, whose time is not known
    ],
)
def test_the_server_starts_the_replicas_that_a_run_would_not_wait_for(
    variables: dict[str, str], cores: int, replicas: str | None, tmp_path: Path
) -> None:
    """As `retouch check` derives them."""
    own = ["data={format: prompts, path: a, resolution: 512}", "rollout.num_steps=10", "rollout.batches_per_epoch=1"]
    groups = ["rollout.group_size=24", "rollout.global_groups_per_batch=48", "model.max_sequence_length=128"]
    for size in (1, 8):
        checked = retouch("check", REPOSITORY / "configs/sd3_grpo.yaml", *own, *groups, "--json", "--world-size", size)
        (tmp_path / f"{size}.json").write_text(checked.out, encoding="utf-8")
    asked = '[ "$*" = "check a.yaml --world-size $4 --gpu h200 --json" ]'
    executable(tmp_path / "retouch", f"{asked} && cat {tmp_path}/$4.json")
    executable(tmp_path / "nproc", f"echo {cores}")
    path = f"{tmp_path}:{os.environ['PATH']}"
    words = shlex.split(dry_run("run_server", PATH=path, RUN_FILE="a.yaml", **variables))
    assert words[words.index("--replicas") + 1 :][:1] == [replicas] if replicas else "--replicas" not in words
    derived = not {"REPLICAS", "DEVICES"} & variables.keys()
    assert words[-2:] == (
        ["--options", '{"ocr": {"threads": 1}}'] if derived else ["--endpoints", "runs/endpoints.json"]
    )


def test_a_run_file_that_cannot_be_checked_starts_no_server(tmp_path: Path) -> None:
    executable(tmp_path / "retouch", "echo refused >&2; exit 2")
    command = [str(REPOSITORY / "scripts/run_server.sh")]
    environment = with_path(tmp_path, RUN_FILE="a.yaml", REPLICAS="")
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=30)
    assert (done.returncode, done.stdout, done.stderr) == (2, "", "refused\n")


# --- monitor_and_run ---


def executable(path: Path, body: str) -> None:
    path.write_text(f"#!/bin/sh\n{body}\n", encoding="utf-8")
    path.chmod(0o755)


def with_path(folder: Path, **variables: str) -> dict[str, str]:
    return {**os.environ, "PATH": f"{folder}:{os.environ['PATH']}", **variables}


@pytest.fixture
def gpus(tmp_path: Path) -> Path:
    """A folder for PATH with an `nvidia-smi` that shows the file `memory`."""
    (tmp_path / "memory").write_text("0, 3\n1, 70000\n2, 500\n3, 0\n", encoding="utf-8")
    executable(tmp_path / "nvidia-smi", f'echo "$@" >> {tmp_path}/asked; cat {tmp_path}/memory')
    return tmp_path


def monitor(gpus: Path, *command: str, **variables: str) -> subprocess.CompletedProcess[str]:
    environment = with_path(gpus, POLL_S="0.1", **variables)
    return subprocess.run(
        [str(REPOSITORY / "scripts/monitor_and_run.sh"), *command],
        cwd=gpus,
        env=environment,
        capture_output=True,
        text=True,
        timeout=60,
    )


def job(gpus: Path, body: str) -> str:
    executable(gpus / "job", f'echo "$CUDA_VISIBLE_DEVICES" >> {gpus}/runs; n=$(wc -l < {gpus}/runs); {body}')
    return str(gpus / "job")


def runs(gpus: Path) -> list[str]:
    return (gpus / "runs").read_text(encoding="utf-8").splitlines()


def test_it_starts_on_the_first_free_gpus(gpus: Path) -> None:
    for wanted, allowed, devices in (("1", "", "0"), ("2", "", "0,2"), ("1", "1,3", "3"), ("3", "0,2,3", "0,2,3")):
        done = monitor(gpus, job(gpus, "exit 0"), GPUS=wanted, CUDA_VISIBLE_DEVICES=allowed)
        assert done.returncode == 0, done.stderr
        assert runs(gpus)[-1] == devices
    asked = (gpus / "asked").read_text(encoding="utf-8").splitlines()[1]
    assert asked == "--query-gpu=index,memory.used --format=csv,noheader,nounits"


def test_spaces_between_indices_do_no_harm_and_indices_are_nvidia_smis(gpus: Path) -> None:
    assert monitor(gpus, job(gpus, "exit 0"), GPUS="2", CUDA_VISIBLE_DEVICES=" 2, 3 ").returncode == 0
    assert runs(gpus) == ["2,3"]
    done = monitor(gpus, job(gpus, 'echo "$CUDA_DEVICE_ORDER"'), CUDA_VISIBLE_DEVICES="")
    assert done.stdout == "PCI_BUS_ID\n"


@pytest.mark.parametrize(
    ("wanted", "allowed", "message"),
    [
        ("1", "GPU-8f2e", "CUDA_VISIBLE_DEVICES: given 'GPU-8f2e'; set the indices that nvidia-smi shows"),
        ("1", "0,-1", "CUDA_VISIBLE_DEVICES: given '0,-1'"),
        ("1", "0 1", "CUDA_VISIBLE_DEVICES: given '0 1'"),
        ("2", "0,", "CUDA_VISIBLE_DEVICES: given '0,'"),
        ("5", "", "GPUS: given 5, but there are 4; set fewer"),
        ("2", "3,9", "GPUS: given 2, but there are 1 among CUDA_VISIBLE_DEVICES=3,9; set fewer"),
        ("0", "", "GPUS: given '0'; set a number of devices"),
    ],
)
def test_what_would_wait_for_ever_is_refused(wanted: str, allowed: str, message: str, gpus: Path) -> None:
    done = monitor(gpus, job(gpus, "exit 0"), GPUS=wanted, CUDA_VISIBLE_DEVICES=allowed)
    assert (done.returncode, done.stderr.count("\n")) == (2, 1)
    assert done.stderr.startswith(message)
    assert not (gpus / "runs").exists()


def test_it_waits_until_enough_are_free(gpus: Path) -> None:
    executable(
        gpus / "nvidia-smi",
        f"echo x >> {gpus}/asked; [ $(wc -l < {gpus}/asked) -lt 4 ] && echo 0, 9000 || echo 0, 9",
    )
    done = monitor(gpus, job(gpus, "exit 0"), CUDA_VISIBLE_DEVICES="")
    assert done.returncode == 0
    assert done.stderr.splitlines()[:-1] == ["waiting until 1 GPUs hold less than 1000 MiB"]  # said once
    assert len((gpus / "asked").read_text(encoding="utf-8").splitlines()) == 4  # how many there are, and three looks
    assert runs(gpus) == ["0"]


def test_it_restarts_what_stopped_resumable_and_nothing_else(gpus: Path) -> None:
    done = monitor(gpus, job(gpus, "[ $n -lt 3 ] && exit 3; exit 7"))
    assert (done.returncode, len(runs(gpus))) == (7, 3)
    (gpus / "runs").unlink()
    assert monitor(gpus, job(gpus, "exit 1")).returncode == 1
    assert len(runs(gpus)) == 1
    (gpus / "runs").unlink()
    done = monitor(gpus, job(gpus, "exit 3"), MAX_RESTARTS="2")
    assert (done.returncode, len(runs(gpus))) == (3, 3)
    assert "no more restarts" in done.stderr


@pytest.mark.parametrize(
    ("codes", "restarted"), [(["3", "3"], True), (["3", "1"], False), (["3", "0"], False), ([], False)], ids=str
)
def test_behind_a_launcher_the_processes_own_codes_count(codes: list[str], restarted: bool, gpus: Path) -> None:
    """`accelerate launch` ends with 1 whatever its processes ended with."""
    noted = "; ".join(f"echo {code} >> $RETOUCH_EXIT_CODES" for code in codes) or ":"
    done = monitor(gpus, job(gpus, f"[ $n -gt 1 ] && exit 0; {noted}; exit 1"))
    assert (done.returncode, len(runs(gpus))) == ((0, 2) if restarted else (1, 1))


def test_two_processes_of_the_package_note_their_codes(tmp_path: Path) -> None:
    """Through torch's launcher, which `accelerate launch` is on several devices."""
    script = tmp_path / "rank.py"
    script.write_text(
        "import sys, retouch.cli as cli\n"
        "def stop(*a, **k): raise cli.typer.Abort()\n"
        "cli._called = lambda name: stop\n"
        "import os, torch.distributed as d\n"
        "d.init_process_group('gloo'); d.barrier()\n"
        "cli.main()\n",
        encoding="utf-8",
    )
    launcher = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc_per_node",
        "2",
        str(script),
        "train",
    ]
    environment = {**os.environ, "RETOUCH_EXIT_CODES": str(tmp_path / "codes"), "OMP_NUM_THREADS": "1"}
    done = forked.run(launcher, env=environment, timeout=120)
    assert done.returncode == 1  # the launcher's
    # the launcher may end the slower one before it has noted its own
    assert set((tmp_path / "codes").read_text(encoding="utf-8").split()) == {"3"}, done.stderr
    said = [line for line in done.stderr.splitlines() if line.startswith(("stopped: ", "process "))]
    assert said == ["stopped: interrupted; continue with resume=auto"]  # by the first process alone
    assert "traceback : stopped: interrupted" in done.stderr  # and by the launcher, as the cause of its own failure


def test_a_process_whose_neighbour_is_killed_ends_with_one_line(tmp_path: Path) -> None:
    script = tmp_path / "rank.py"
    script.write_text(
        "import os, torch, retouch.cli as cli\n"
        "import torch.distributed as d\n"
        "def reduce(**_):\n"
        "    d.init_process_group('gloo'); d.barrier()\n"
        "    if d.get_rank(): os.kill(os.getpid(), 9)\n"
        "    d.all_reduce(torch.zeros(1))\n"
        "cli._called = lambda name: reduce\n"
        "cli.main()\n",
        encoding="utf-8",
    )
    # the launcher looks after seconds, or on a busy machine it ends the other process before that notices
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2"]
    launcher += ["--monitor-interval", "3"]
    environment = {**os.environ, "RETOUCH_EXIT_CODES": str(tmp_path / "codes"), "OMP_NUM_THREADS": "1"}
    done = forked.run([*launcher, str(script), "train"], env=environment, timeout=120)
    assert (tmp_path / "codes").read_text(encoding="utf-8") == "1\n"
    (line,) = [line for line in done.stderr.splitlines() if line.startswith("error: ")]
    assert line.startswith("error: processes cannot communicate: [") and line.endswith(
        "; another process ended or cannot be reached, see its messages; continue with resume=auto"
    )
    assert "retouch/cli" not in done.stderr  # no traceback of the package


def test_the_command_line_notes_its_code_and_hands_the_variable_to_nobody(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for arguments, code in ((["--help"], 0), (["check", "nowhere.yaml"], 2)):
        monkeypatch.setenv("RETOUCH_EXIT_CODES", str(tmp_path / f"codes{code}"))
        assert retouch(*arguments).code == code
        assert (tmp_path / f"codes{code}").read_text(encoding="utf-8") == f"{code}\n"
        assert "RETOUCH_EXIT_CODES" not in os.environ


@pytest.mark.parametrize("number", ENDING)
def test_a_signal_ends_the_command_and_is_no_reason_to_restart(number: signal.Signals, gpus: Path) -> None:
    command = [str(REPOSITORY / "scripts/monitor_and_run.sh")]
    body = f"trap 'echo ended >> {gpus}/ended; exit 3' TERM; touch {gpus}/trapped; while true; do sleep 0.1; done"
    with subprocess.Popen([*command, job(gpus, body)], env=with_path(gpus, POLL_S="0.1"), cwd=gpus) as process:
        deadline = time.monotonic() + 30
        while not (gpus / "trapped").exists() and time.monotonic() < deadline:
            time.sleep(0.05)
        process.send_signal(number)
        try:
            assert process.wait(timeout=30) == 3
        finally:
            process.kill()
    assert (gpus / "ended").read_text(encoding="utf-8") == "ended\n"
    assert len(runs(gpus)) == 1


@pytest.mark.parametrize("number", [*ENDING, signal.SIGINT])
def test_signals_reach_the_processes_of_a_launcher_as_sigterm(number: signal.Signals, tmp_path: Path) -> None:
    """torch's launcher passes on SIGTERM; SIGUSR1, which SLURM may send to it as well, would end it."""
    executable(
        tmp_path / "accelerate",
        "trap 'echo TERM; sleep 0.3; exit 3' TERM; kill -USR1 $$; kill -USR2 $$\n"
        "echo ready; while true; do sleep 0.05; done",
    )
    command = [str(REPOSITORY / "scripts/finetune/finetune_sd_inpainting_sft_4gpus.sh")]
    with subprocess.Popen(command, env=with_path(tmp_path), stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None and process.stdout.readline() == "ready\n"
        process.send_signal(number)
        try:
            assert process.wait(timeout=30) == 3
        finally:
            process.kill()
        assert process.stdout.read() == "TERM\n"


HELD = """
set -T
held() { touch {here}; while [ ! -e {go} ]; do sleep 0.02; done; }
trap 'case $BASH_COMMAND in child=\\$!|code=0) [ -e {here} ] || held ;; esac' DEBUG
"""


@pytest.mark.parametrize("script", ["launcher", "monitor"])
def test_a_signal_that_comes_as_the_command_begins_reaches_it(script: str, gpus: Path) -> None:
    """The shell is held between the start of the command and the next line, as on a busy machine."""
    waits = "trap 'echo TERM; exit 3' TERM; echo ready; while true; do sleep 0.05; done"
    if script == "launcher":
        executable(gpus / "accelerate", waits)
        command = [str(REPOSITORY / "scripts/finetune/finetune_sd_inpainting_sft_4gpus.sh")]
    else:
        command = [str(REPOSITORY / "scripts/monitor_and_run.sh"), job(gpus, waits)]
    here, go, held = gpus / "here", gpus / "go", gpus / "held.sh"
    held.write_text(HELD.replace("{here}", str(here)).replace("{go}", str(go)), encoding="utf-8")
    environment = {**with_path(gpus, POLL_S="0.1"), "BASH_ENV": str(held)}
    with subprocess.Popen(command, env=environment, cwd=gpus, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None and process.stdout.readline() == "ready\n"
        until(here.exists)
        process.send_signal(signal.SIGTERM)
        go.touch()
        try:
            assert process.wait(timeout=60) == 3
        finally:
            process.kill()
        assert process.stdout.read() == "TERM\n"


def test_a_launcher_that_ends_by_itself_gives_its_code(tmp_path: Path) -> None:
    executable(tmp_path / "accelerate", "exit 7")
    command = [str(REPOSITORY / "scripts/finetune/finetune_sd_inpainting_sft_4gpus.sh")]
    assert subprocess.run(command, env=with_path(tmp_path), check=False).returncode == 7


def test_the_monitor_goes_on_when_nobody_reads_its_messages(gpus: Path) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    command = [str(REPOSITORY / "scripts/monitor_and_run.sh"), job(gpus, "[ $n -lt 3 ] && exit 3; exit 0")]
    done = subprocess.run(command, env=with_path(gpus, POLL_S="0.1"), cwd=gpus, stderr=writer, check=False)
    os.close(writer)
    assert (done.returncode, len(runs(gpus))) == (0, 3)


def test_its_dry_run_and_its_wrong_usage(gpus: Path, tmp_path: Path) -> None:
    assert dry_run("monitor_and_run", "scripts/train_grpo.sh", "a=b c", GPUS="4") == (
        "# when 4 GPUs hold less than 1000 MiB, and again after exit code 3:\nscripts/train_grpo.sh a=b\\ c\n"
    )
    assert not (gpus / "asked").exists()
    for arguments in ((), ("--dry-run",)):
        done = monitor(gpus, *arguments)
        assert (done.returncode, done.stdout) == (2, "")
        assert done.stderr == "usage: scripts/monitor_and_run.sh [--dry-run] COMMAND ...\n"


def test_comments_name_what_there_is() -> None:
    for path in SCRIPTS:
        for name in re.findall(r"\b(?:configs|scripts)/[\w./]+\w", path.read_text(encoding="utf-8")):
            assert (REPOSITORY / name).exists(), f"{path.name}: no {name}"
