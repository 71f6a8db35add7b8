"""`retouch check`: exit codes and output."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from retouch.config import parse_run
from tests.command_line import retouch

from .conftest import BASE, TINY


@pytest.fixture
def data(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Folders that are there; `check` does not look into them."""
    for name in ("prompts", "warmup", "held_out"):
        (tmp_path / name).mkdir()
    monkeypatch.setenv("DATA_PATH", str(tmp_path))
    return tmp_path


@pytest.mark.usefixtures("data")
def test_a_good_run() -> None:
    outcome = retouch("check", TINY, "--verbose")
    assert (outcome.code, outcome.err) == (0, "")
    first, *rest = outcome.out.splitlines()
    assert first == f"{TINY}: ok (tiny_flux_fill_grpo: flux_fill, full, grpo)"
    assert "  global images per epoch          96" in rest
    assert "  forwards per image               11.5625" in rest


@pytest.mark.usefixtures("data")
def test_local_paths_that_do_not_exist_are_warned_of() -> None:
    """`train` refuses them in the same words. A hub is not asked, and another machine may have the files."""
    missing = {
        "data.path=/no/data": "data.path: /no/data: no such folder",
        "model.path=./nowhere": "model.path: ./nowhere: no such folder; give",
        "model.transformer={path: ./nowhere}": "model.transformer.path: ./nowhere: no such folder; give",
        "model.train={kind: lora, initial_adapter: no.safetensors}": "model.train.initial_adapter: given 'no.safet",
    }
    outcome = retouch("check", TINY, *missing)
    lines = [line for line in outcome.err.splitlines() if "no such" in line]
    assert outcome.code == 0 and len(lines) == len(missing)
    assert all(line.startswith(f"warning: {told}") for line, told in zip(lines, missing.values(), strict=True))


def test_numbers_that_a_run_has_none_of_are_not_printed() -> None:
    """FLUX reads no image with its prompt, and supervised runs sample none."""
    for overrides in ((), ("algorithm={name: sft}",)):
        outcome = retouch("check", TINY, "--verbose", *overrides)
        printed = outcome.out.splitlines()[1:]
        assert outcome.code == 0 and printed
        assert not [line for line in printed if line.endswith(" 0") or "vision" in line]
    edit = retouch("check", TINY.with_name("qwen_image_edit_vlm_grpo.yaml"), "--verbose")
    assert "  generations" in edit.out


@pytest.fixture
def without_paths(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("DATA_PATH", "MODEL_PATH", "SIGLIP_PATH"):
        monkeypatch.delenv(name, raising=False)


@pytest.mark.usefixtures("without_paths")
def test_what_a_person_decides_by() -> None:
    """Without a variable for the data, which are not read. The memory is that of `--memory`."""
    file = TINY.parents[1] / "flux_fill_grpo.yaml"
    outcome = retouch("check", file, "--world-size", 8)
    names = [line.strip().split("  ")[0] for line in outcome.out.splitlines()[1:]]
    assert names == [
        *("steps", "memory", "images", "forwards", "supervised", "GPU hours", "an epoch", "ocr", "disk"),
    ]
    assert "  steps          2,000, the first 500 supervised; 750 epochs of 2" in outcome.out
    counted = retouch("check", file, "--world-size", 8, "--memory").out
    [held] = [line.split()[3:5] for line in counted.splitlines() if line.startswith("    on the device")]
    assert f"  memory         {' '.join(held)} a process, and" in outcome.out
    [warning] = outcome.err.splitlines()
    assert warning == ("warning: data.path: ${DATA_PATH} is not set in the environment; `retouch train` requires it")
    assert json.loads(retouch("check", file, "--json").out)["warnings"][0] == warning.removeprefix("warning: ")
    refused = retouch("train", file)
    assert (refused.code, refused.err.partition(";")[0]) == (
        2,
        "error: data.path: ${DATA_PATH} is not set in the environment",
    )


@pytest.mark.parametrize("path", ["", "held_out"])
def test_a_folder_without_a_list_is_named(path: str, data: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """And an empty variable, which is the working directory: training refused both after a check without a word."""
    monkeypatch.chdir(data)
    monkeypatch.setenv("LIST", path)
    overrides = ("data={format: manifest, path: '${LIST}', resolution: [32, 64]}", "evaluation.data=null")
    outcome = retouch("check", TINY, *overrides)
    warning = f"warning: data.path: {path or '.'} is a folder without metadata.jsonl or metadata.csv; give the manifest"
    assert outcome.code == 0 and warning in outcome.err


def test_json_holds_the_run_and_its_numbers(tmp_path: Path) -> None:
    path = tmp_path / "run.yaml"
    path.write_text(yaml.safe_dump(BASE), encoding="utf-8")
    outcome = retouch("check", path, "rollout.group_size=4", "--json", "--world-size", 3)
    assert outcome.code == 0
    printed = json.loads(outcome.out)
    assert printed["derived"]["world_size"] == 3
    assert printed["derived"]["global_images_per_epoch"] == 32
    assert printed["derived"]["images_per_epoch_per_device"] == 11
    assert printed["derived"]["padded_images_per_epoch"] == 1
    assert parse_run(printed["config"]) == parse_run(BASE, ["rollout.group_size=4"])


ADAPTER = "model.train={kind: ip_adapter, image_encoder: tiny, weights: kv}"


@pytest.mark.usefixtures("data")
def test_memory_is_counted_on_request() -> None:
    before = retouch("check", TINY, ADAPTER).out
    outcome = retouch("check", TINY, ADAPTER, "--memory", "--world-size", 2)
    assert (outcome.code, outcome.err) == (0, "")
    assert "memory" not in before
    table = [
        line.split("  ")
        for line in outcome.out.splitlines()[outcome.out.splitlines().index(before.splitlines()[-1]) + 1 :]
    ]
    names = [next(part for part in line if part).strip() for line in table]
    assert names == [
        *("memory of a process, counted", "style adapter, trained", "gradients", "optimizer", "snapshot reference"),
        *("exchange of gradients", "style adapter, frozen", "network, frozen", "vae"),
        *("text encoder", "text encoder 2", "image encoder", "on the device"),
    ]
    report = json.loads(retouch("check", TINY, ADAPTER, "--memory", "--json").out)["memory"]
    trained = 6 * 2 * 128 * 64  # keys and values of six blocks
    assert report["parts"][0] == {
        "what": "style adapter, trained",
        "weights": trained,
        "bytes": 4 * trained,
        "waits": False,
    }
    assert report["device_bytes"] == sum(part["bytes"] for part in report["parts"] if not part["waits"])


def test_memory_of_a_model_that_is_not_there() -> None:
    outcome = retouch("check", TINY, "--memory", "model.path=./nowhere")
    assert (outcome.code, outcome.out) == (2, "")
    assert outcome.err.startswith("error: model.path: ./nowhere: no such folder; give")


@pytest.mark.parametrize(
    ("arguments", "lines"),
    [
        (["rollout.group_sise=4"], ["{run}: rollout.group_sise: unknown key; did you mean 'group_size'?"]),
        (
            ["seed=-1", "optimizer.lr=0"],
            [
                "{run}: seed: given -1; input should be greater than or equal to 0",
                "{run}: optimizer.lr: given 0; input should be greater than 0",
            ],
        ),
        (["nonsense"], ["override 'nonsense': write it as key=value with a dotted key, like rollout.group_size=4"]),
        (["--world-size", "0"], ["--world-size: given 0; expected the number of processes, at least 1"]),
    ],
)
def test_a_bad_run_is_one_line_a_problem_and_exit_2(arguments: list[str], lines: list[str]) -> None:
    outcome = retouch("check", TINY, *arguments)
    assert (outcome.code, outcome.out) == (2, "")
    assert outcome.err == "error: " + "\n".join(line.format(run=TINY) for line in lines) + "\n"


def test_no_file() -> None:
    outcome = retouch("check", "nowhere.yaml")
    assert (outcome.code, outcome.err) == (
        2,
        "error: nowhere.yaml: no such run file; `retouch init --example list` lists the published ones\n",
    )


@pytest.mark.parametrize("arguments", [["check"], ["check", str(TINY), "--word-size", "2"], ["chekc"]])
def test_wrong_usage_is_exit_2(arguments: list[str]) -> None:
    outcome = retouch(*arguments)
    assert outcome.code == 2
    (line,) = outcome.err.splitlines()
    assert line.startswith("error: ") and line.endswith("; see --help")


def test_a_process_of_its_own_shows_no_traceback() -> None:
    command = [sys.executable, "-m", "retouch", "check", str(TINY), "model.train={kind: lora, rnk: 4}"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 2
    assert done.stdout == ""
    assert done.stderr == f"error: {TINY}: model.train.rnk: unknown key; did you mean 'rank'?\n"
