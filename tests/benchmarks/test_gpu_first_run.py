"""The first run on a GPU, as far as a CPU goes: every cell is started, none can stop or delay the others, and the file
is whole whenever the script ends. Most tests have a process in place of the one that trains, which does as it is told.
"""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
import tomllib
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

REPOSITORY = Path(__file__).parents[2]
sys.path.insert(0, str(REPOSITORY / "benchmarks"))

import first_run_cells as cells  # noqa: E402
import gpu  # noqa: E402
import gpu_first_run  # noqa: E402

from retouch.config import derive  # noqa: E402
from retouch.doctor.memory import report_memory  # noqa: E402
from retouch.families import FAMILIES  # noqa: E402
from tests import forked  # noqa: E402

TASKS = (cells.TESTS, *cells.TINY, *cells.RELEASED)

STUB = """
import json, os, pathlib, sys, time
print("{}", flush=True)
for line in sys.stdin:
    name = json.loads(line)["name"]
    does = json.loads(pathlib.Path(__file__).with_name("does.json").read_text())
    print("begins", name, file=sys.stderr, flush=True)
    time.sleep(does.get("sleep", 0))
    if name in does.get("hangs", []):
        time.sleep(600)
    if name in does.get("dies", []):
        os.kill(os.getpid(), 9)
    failed = {"failed": "RuntimeError: broken", "traceback": "where"} if name in does.get("raises", []) else {}
    print(json.dumps({"did": name, **failed}), flush=True)
"""


@pytest.fixture
def stub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Sets what the processes do: names of cells that hang, die or raise, and how long a cell sleeps."""
    (tmp_path / "stub.py").write_text(STUB, encoding="utf-8")
    monkeypatch.setattr(gpu_first_run, "COMMAND", [sys.executable, "-I", "-S", str(tmp_path / "stub.py")])

    def does(**what: Any) -> None:
        (tmp_path / "does.json").write_text(json.dumps(what), encoding="utf-8")

    does()
    return does


def found_in(result: dict[str, Any]) -> dict[str, dict[str, Any]]:
    return {row["cell"]: row for row in result["cells"]}


def test_every_cell_is_started_and_none_stops_the_others(
    tmp_path: Path, stub: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """One that raises, one that hangs and one whose process dies, at toy and at released sizes."""
    raises, hangs, dies = (
        ["tiny-flux_fill-sft-default", "flux_fill-compiled"],
        ["tiny-flux_fill-grpo-default", "tiny-z_image-nft-bf16", "qwen_image-plain"],
        ["tiny-flux_fill-nft-default", "flux2_klein-plain"],
    )
    stub(raises=raises, hangs=hangs, dies=dies)
    for name in ("TINY", "RELEASED"):
        short = [replace(t, seconds=0.5) if t.name in hangs else t for t in getattr(cells, name)]
        monkeypatch.setattr(gpu_first_run, name, tuple(short))
    out = tmp_path / "first.json"
    result = gpu_first_run.main(["--dry-run", "--out", str(out), "--lanes", "4"])
    assert json.loads(out.read_text(encoding="utf-8")) == result
    rows = found_in(result)
    assert rows.keys() == {task.name for task in TASKS} and len(result["cells"]) == len(TASKS)
    for name, row in rows.items():
        if name in raises:
            assert row["failed"] == "RuntimeError: broken" and row["traceback"] == "where"
        elif name in hangs:
            assert row["failed"] == "killed at its limit of 0.5 s" and row["log"].endswith(f"begins {name}")
        elif name in dies:
            assert row["failed"] == "the process ended with code -9" and row["log"].endswith(f"begins {name}")
        else:
            assert row["did"] == name and "failed" not in row
    printed = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert {line["cell"] for line in printed} == rows.keys()


def test_the_budget_is_kept(stub: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """A cell that takes longer than what is left is killed, and those after it say why they are missing."""
    hangs = "qwen_image-plain"
    released = [replace(task, least=1.0) if task.name == hangs else task for task in cells.RELEASED]
    monkeypatch.setattr(gpu_first_run, "RELEASED", tuple(released))
    stub(sleep=0.1, hangs=[hangs])
    result = gpu_first_run.main(["--dry-run", "--minutes", "0.2", "--only", "tiny-sd3-sft", "flux_fill-c", "qwen"])
    assert result["budget_s"] == 12 and result["used_s"] <= 13
    rows = found_in(result)
    assert rows["tiny-sd3-sft-bf16"]["did"] and rows["flux_fill-compiled"]["skipped"] == "less than 50 s left"
    assert rows[hangs]["failed"].startswith("killed at its limit of ") and rows[hangs]["seconds"] > 1
    assert rows["qwen_image-no_mask"]["skipped"] == "less than 25 s left"


def test_without_a_gpu_only_a_dry_run_is_taken(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(gpu_first_run, "SEES_A_GPU", "import sys; sys.exit(1)")
    with pytest.raises(SystemExit):
        gpu_first_run.main([])
    assert "--dry-run takes toy sizes and the CPU" in capsys.readouterr().err


def test_another_call_runs_what_has_no_result(tmp_path: Path, stub: Any) -> None:
    """What failed and what there was no time for, and nothing else; the results of before stay."""
    failed, skipped = "tiny-sd3-sft-default", "flux2_klein-plain"
    stub(raises=[failed])
    call = ["--dry-run", "--out", str(tmp_path / "first.json"), "--only", "tiny-sd3", skipped]
    first = found_in(gpu_first_run.main([*call, "--minutes", "0.3"]))
    assert first[failed]["failed"] and first[skipped]["skipped"] == "less than 25 s left"
    stub(raises=[name for name in first if name not in (failed, skipped)])
    second = found_in(gpu_first_run.main(call))
    assert second.keys() == first.keys() and second[failed]["did"] and second[skipped]["did"]
    assert all(second[name] == row for name, row in first.items() if name not in (failed, skipped))


def test_results_of_a_dry_run_and_of_a_gpu_do_not_mix(
    tmp_path: Path, stub: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The second call took the cells of the first one for its own, and measured nothing."""
    monkeypatch.setattr(gpu_first_run, "SEES_A_GPU", "")
    call = ["--out", str(tmp_path / "first.json"), "--only", "tiny-sd3-sft"]
    for first, second, kind in (["--dry-run"], [], "a dry run"), ([], ["--dry-run"], "a GPU"):
        (tmp_path / "first.json").unlink(missing_ok=True)
        gpu_first_run.main([*call, *first])
        before = (tmp_path / "first.json").read_text()
        with pytest.raises(SystemExit):
            gpu_first_run.main([*call, *second])
        assert f"first.json holds the results of {kind}; give another file" in capsys.readouterr().err
        assert (tmp_path / "first.json").read_text() == before


def test_a_cell_of_another_machine_names_it() -> None:
    report = gpu_first_run.Report(None, {"started": 0.0})
    for task, gpu_name in zip(cells.RELEASED, ("H200", "H200", "A100"), strict=False):
        report.add(task, {"machine": {"gpu": gpu_name}})
    result = report.result()
    assert result["machine"] == {"gpu": "H200"}
    assert [row.get("machine") for row in result["cells"]] == [None, None, {"gpu": "A100"}]


def test_toy_sizes_have_a_time_of_their_own(stub: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu_first_run, "TINY_SECONDS", 2.0)
    stub(hangs=["tiny-sd3-sft-default"])
    rows = found_in(gpu_first_run.main(["--dry-run", "--only", "tiny-sd3", "flux_fill-plain"]))
    assert rows["tiny-sd3-sft-default"]["failed"].startswith("killed at its limit of")
    assert rows["tiny-sd3-nft-bf16"]["skipped"] == "no time left for toy sizes"
    assert rows["flux_fill-plain"]["did"]


KILLED = """
import os, sys

class Printed:
    lines = 0

    def write(self, text):
        os.write(1, text.encode())
        Printed.lines += text.count("\\n")
        if Printed.lines == 3:
            os.kill(os.getpid(), 9)

    def flush(self): ...

import gpu_first_run
gpu_first_run.COMMAND = sys.argv[1:5]
sys.stdout = Printed()
gpu_first_run.main(["--dry-run", "--only", "tiny-sd3", "--out", sys.argv[5]])
"""
"""The script, killed as soon as it has printed three lines."""


def program(code: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    return forked.run([sys.executable, "-c", code, *arguments], cwd=REPOSITORY / "benchmarks")


def test_a_killed_script_leaves_a_whole_file(tmp_path: Path, stub: Any) -> None:
    out = tmp_path / "first.json"
    done = program(KILLED, *gpu_first_run.COMMAND, str(out))
    assert done.returncode == -signal.SIGKILL, done.stderr
    printed = [json.loads(line) for line in done.stdout.splitlines()]
    rows = json.loads(out.read_text(encoding="utf-8"))["cells"]
    assert len(rows) == 3 and [row["cell"] for row in rows] == [line["cell"] for line in printed]


def test_a_process_ends_with_the_script_that_started_it() -> None:
    script = (
        "import first_run_cells, os; parent = os.getpid(); pid = os.fork(); "
        "first_run_cells.end_with(parent) if pid == 0 else os.write(1, str(pid).encode()); os.kill(parent, 9)"
    )
    pid = int(program(script).stdout)
    until = time.monotonic() + 60
    while Path(f"/proc/{pid}").exists() and time.monotonic() < until:
        time.sleep(0.1)
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)


def test_the_cells_are_those_of_the_registry_and_have_names_of_their_own() -> None:
    assert tuple(FAMILIES) == cells.FAMILIES
    assert len({task.name for task in TASKS}) == len(TASKS)
    assert len(cells.TINY) == len(FAMILIES) * (len(cells.ALGORITHMS) + len(cells.BOTH_PRECISIONS))
    assert gpu_first_run.MINUTES <= 9


def test_a_cell_that_needs_more_than_the_gpu_has_is_skipped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:

    class H100:
        total_memory = 80 * 2**30

    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: H100)
    [task] = [task for task in TASKS if task.name == "qwen_image-no_mask-rows_2"]
    assert cells.run(task, cells.Place(False, tmp_path)) == {"skipped": "takes about 101 GiB of 80"}


@pytest.mark.full
def test_released_sizes_are_valid_runs_that_fit_a_gpu_of_80_gb(tmp_path: Path) -> None:
    """Before activations; FLUX.2-klein on examples with a source and a mask."""
    for task in (task for task in TASKS if task.kind == "released"):
        options = {name: value for name, value in task.options.items() if name != "peak_gib"}
        cell, sizes = cells.gpu_cell(cells.Place(False, tmp_path), **options)
        config = gpu.run_file(cell, replace(sizes, device=torch.device("cpu")), tmp_path)
        counted = report_memory(config)
        assert counted["complete"] and counted["device_bytes"] < 80 * 2**30, task.name
        assert derive(config).optimizer_steps_per_epoch == 1
        assert config.data.format == "self_bench" and config.data.size == (512, 512)


@pytest.mark.parametrize(
    "name",
    [
        pytest.param("tiny-sdxl_inpaint-sft-bf16", marks=pytest.mark.full),
        pytest.param("tiny-z_image-nft-default", marks=pytest.mark.full),
        pytest.param("flux_fill-plain-kernels", marks=pytest.mark.full),
        "qwen_image-no_mask-rows_2",
        pytest.param("flux2_klein-plain", marks=pytest.mark.full),
    ],
)
def test_a_cell_trains(name: str, tmp_path: Path) -> None:
    """In this process, by what the others run."""
    [task] = [task for task in TASKS if task.name == name]
    found = cells.run(task, cells.Place(True, tmp_path))
    cells.own_folder.cache_clear(), cells.toy_model.cache_clear(), cells.signs.cache_clear()
    assert "failed" not in found and "skipped" not in found, found
    assert json.loads(json.dumps(found)) == found
    if task.kind == "tiny":
        assert found["grad_norm"] > 0 and not found["unmeasured"]
    else:
        assert found["step_s"] > 0 and found["settings"]["batch_size_per_device"] == min(task.options.get("rows", 1), 2)
        assert ("kernels" in found) == name.endswith("kernels")


@pytest.mark.full
def test_a_dry_run_by_the_processes_themselves(tmp_path: Path) -> None:
    out = tmp_path / "first.json"
    wanted = ["tiny-sd_inpaint-sft", "sd", "tests_cuda"]
    result = gpu_first_run.main(
        ["--dry-run", "--minutes", "30", "--patience", "10", "--only", *wanted, "--out", str(out)]
    )
    assert found_in(result).keys() == {task.name for task in TASKS if task.name.startswith(tuple(wanted))}
    assert not [row for row in result["cells"] if "failed" in row or "skipped" in row]


@pytest.mark.slow
def test_a_whole_dry_run() -> None:
    result = gpu_first_run.main(["--dry-run", "--minutes", "90", "--patience", "50", "--lanes", "2"])
    assert not [row for row in result["cells"] if "failed" in row]


def test_what_is_carried_is_all_that_is_needed() -> None:
    """Every dependency of the package and its training extra is named: as carried, or as there."""
    text = gpu_first_run.__doc__ or ""
    there = text.partition("has Python 3.12 with ")[2].partition(": fetch")[0]
    carried = text.partition("# elsewhere")[2].partition("# there")[0]
    of_others = {
        "huggingface-hub",
        "numpy",
        "safetensors",
        "pyyaml",
        "filelock",
        "pillow",
        "jinja2",
    }  # that torch and these need
    project = tomllib.loads((REPOSITORY / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    needed = {
        re.split("[>=<]", line)[0] for line in project["dependencies"] + project["optional-dependencies"]["train"]
    }
    named = set(re.findall(r"[a-z][a-z0-9-]+", f"{there} {carried}"))
    assert needed <= named | of_others


WHEELS_MIB = 16
"""Allowance for the wheels of the docstring, which take about half of it."""


def test_the_tree_and_its_wheels_stay_under_64_mib() -> None:
    """Machines take no more than that from outside."""
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=REPOSITORY, capture_output=True, text=True, check=False)
    if listed.returncode != 0:
        pytest.skip("no checkout of git")
    files = [REPOSITORY / name for name in listed.stdout.split("\0") if name]
    assert sum(file.lstat().st_size for file in files if os.path.lexists(file)) < (64 - WHEELS_MIB) << 20
