"""Runs of earlier commits are resumed, bitwise, by the package as it is now.

`tests/old_runs/COMMIT` has run directories that COMMIT left, stopped inside an epoch, with the data and the networks
that they need, and the end that COMMIT itself brought them to (`tests/old_runs/make.py`).

Bits are compared where the machine computes as the one that made them. Whether it does is no guess from its name: where
a run ends with other bits, torch, diffusers and transformers compute with the networks of the set, without the package,
and the digest of their results is compared with the recorded one (`tests/old_runs/arithmetic.py`). If it is equal, the
difference is ours, and the test fails. If not (another instruction set, or other versions), the run must end within
rounding: each tensor within a thousandth of what the steps since the checkpoint have changed it by, each metric within
a hundredth of it, counters and the order of records exactly; and a warning says that bits were not compared. torch
takes the kernels of another processor with ATEN_CPU_CAPABILITY=default, or ONEDNN_MAX_CPU_ISA=SSE41.
"""

from __future__ import annotations

import json
import shutil
import tomllib
import warnings
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from safetensors.torch import load_file, save_file

from retouch.registry import ANNEXES
from tests.command_line import retouch
from tests.old_runs import COMMITS, HERE
from tests.old_runs.arithmetic import digest
from tests.old_runs.ended import Ended, differences, newest, tensors_of
from tests.old_runs.start import processes, train
from tests.selection import rows

RUNS = [(commit, file.stem) for commit in COMMITS for file in sorted((HERE / commit / "run_files").glob("*.yaml"))]
FIRST = "1c9919ed"
"""Has every kind of run."""


def copied(commit: str, name: str, to: Path) -> Path:
    """A copy of a set with one of its runs, which is the working directory of the run."""
    folder = to / commit
    for part in ("bases", "data", "run_files", f"runs/{name}"):
        shutil.copytree(HERE / commit / part, folder / part)
    return folder


def section_of(commit: str, name: str) -> dict[str, Any]:
    return yaml.safe_load((HERE / commit / "run_files" / f"{name}.yaml").read_text(encoding="utf-8"))


def resume(folder: Path, name: str, monkeypatch: pytest.MonkeyPatch, *overrides: str) -> tuple[int, str]:
    """Train on -> exit code and errors; one process is this one."""
    if processes(name) > 1:
        done = train(folder, name)
        return done.returncode, done.stderr
    monkeypatch.chdir(folder)
    outcome = retouch("train", f"run_files/{name}.yaml", *overrides)
    return outcome.code, outcome.err


@pytest.mark.parametrize(
    ("commit", "name"), rows(RUNS, [run for run in RUNS if run[1] not in ("sft-2", "nft-2", "vlm_grpo-2")])
)
def test_an_old_run_is_resumed_bitwise(commit: str, name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if name.startswith("vlm_grpo"):
        pytest.importorskip("trl")
    folder = copied(commit, name, tmp_path)
    run = folder / "runs" / name
    began = tensors_of(newest(run))
    code, errors = resume(folder, name, monkeypatch)
    assert code == 0, errors
    expected, found = Ended.read(HERE / commit / "ended" / name), Ended.of(run)
    wrong = differences(expected, found)
    if wrong and computes_differently(commit, name):
        warnings.warn(f"{commit}, {name}: this machine rounds differently; compared within rounding", stacklevel=1)
        wrong = differences(expected, found, began)
    assert not wrong, wrong


def computes_differently(commit: str, name: str) -> bool:
    """Whether torch, diffusers and transformers alone compute other bits with the networks of a run."""
    folder = HERE / commit
    recorded: dict[str, str] = json.loads((folder / "about.json").read_text(encoding="utf-8"))["arithmetic"]
    model = section_of(commit, name)["model"]
    bases = {model["family"]} | ({"image_encoder"} if "image_encoder" in model.get("train", {}) else set())
    return any(digest(folder / "bases" / base) != recorded[base] for base in sorted(bases))


def test_every_kind_of_old_run_is_there() -> None:
    """Of each algorithm on one and on two processes, and among them every kind of weights, snapshot and prediction."""
    sections = {name: section_of(FIRST, name) for commit, name in RUNS if commit == FIRST}
    assert {(s["algorithm"]["name"], processes(name)) for name, s in sections.items()} == {
        (algorithm, ranks) for algorithm in ("grpo", "nft", "sft", "vlm_grpo") for ranks in (1, 2)
    }
    assert {s["model"].get("train", {}).get("kind") for s in sections.values()} >= {"lora", "full", "ip_adapter"}
    assert {s["model"]["family"] for s in sections.values()} == {"flux_fill", "sd_inpaint", "qwen_image_edit"}
    assert sum("ema" in s for s in sections.values()) >= 2
    assert all(s["algorithm"]["kl_weight"] > 0 for name, s in sections.items() if name.startswith("grpo"))


@pytest.mark.parametrize(("commit", "name"), RUNS)
def test_an_old_run_was_stopped_inside_an_epoch(commit: str, name: str) -> None:
    """Rows are left to train on, of every process; a supervised run is inside a pass over its four examples, one of
    vlm_grpo inside the one epoch of its trainer. Each has steps to go that change weights."""
    source = HERE / commit
    checkpoint, section = newest(source / "runs" / name), section_of(commit, name)
    progress = json.loads((checkpoint / "state.json").read_text(encoding="utf-8"))["progress"]
    assert 0 < progress["step"] < section["training"]["max_steps"]
    if section["algorithm"]["name"] in ("grpo", "nft"):
        rows = load_file(checkpoint / "rollouts.safetensors")
        assert progress["position"] > 0 and {key[0] for key in rows} == {str(r) for r in range(processes(name))}
    if section["algorithm"]["name"] == "sft":
        assert progress["step"] * 2 % 4
    ended, began = Ended.read(source / "ended" / name), tensors_of(checkpoint)
    trained = [key for key in began if key.startswith("weights")]
    assert trained and ended.tensors.keys() == began.keys()
    assert all(float((ended.tensors[key] - began[key]).abs().max()) > 1e-5 for key in trained)


def test_no_old_run_names_the_machine_that_made_it() -> None:
    for file in files():
        content = file.read_bytes()
        assert not any(root in content for root in (b"/tmp", b"/home/", b"/root", b"/work")), file


def test_old_runs_are_small_and_outside_the_wheel() -> None:
    assert sum(file.stat().st_size for file in files()) < 3_000_000 * len(COMMITS)
    built = tomllib.loads((HERE.parents[1] / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["hatch"]["build"]
    wheel = built["targets"]["wheel"]
    assert wheel.keys() == {"packages", "force-include"} and wheel["packages"] == [
        "src/retouch",
        *(f"src/{annex}" for annex in ANNEXES),
    ]
    assert not any(tree.startswith("tests") for tree in wheel["force-include"])


def files() -> list[Path]:
    return [file for commit in COMMITS for file in (HERE / commit).rglob("*") if file.is_file()]


REFUSED = {
    "an option of its rollouts": "rollout.num_steps=3",
    "an image of its epoch": "data.path=data/prompts",
    "its network": "model.path=bases/flux_fill",
}
"""What changes -> the option that the message names."""


@pytest.mark.parametrize("changed", REFUSED)
def test_an_old_checkpoint_inside_an_epoch_is_refused_with_another(
    changed: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What it was sampled with is known by content, recorded by the commit that sampled."""
    folder = copied(FIRST, "grpo-1", tmp_path)
    overrides = ["rollout.num_steps=4"] if changed == "an option of its rollouts" else []
    if changed == "an image of its epoch":
        for file in (folder / "data/prompts").glob("*_mask.png"):
            file.write_bytes(file.read_bytes() + b"\0")
    if changed == "its network":
        file = folder / "bases/flux_fill/transformer/diffusion_pytorch_model.safetensors"
        tensors = load_file(file)
        tensors["x_embedder.weight"][0, 0] += 1
        save_file(tensors, file, {"format": "pt"})
    code, errors = resume(folder, "grpo-1", monkeypatch, *overrides)
    assert code == 2 and REFUSED[changed] in " ".join(errors.split()), errors


# --- the comparison itself ---


def test_the_digest_of_the_arithmetic_depends_on_kernels_alone() -> None:
    base = HERE / FIRST / "bases" / "image_encoder"
    first = digest(base)
    torch.rand(3)
    assert digest(base) == first
    with torch.backends.mkldnn.flags(enabled=False):
        assert digest(base) != first


@pytest.fixture(scope="module")
def ended() -> Ended:
    return Ended.read(HERE / FIRST / "ended" / "grpo-1")


def test_one_bit_of_a_tensor_is_a_difference(ended: Ended) -> None:
    assert not differences(ended, ended)
    for name, tensor in ended.tensors.items():
        other = tensor.clone().flatten()
        other[-1] = torch.nextafter(other[-1], torch.tensor(9.0))
        assert differences(ended, replace(ended, tensors={**ended.tensors, name: other.view_as(tensor)})) == [name]
        missing = {key: value for key, value in ended.tensors.items() if key != name}
        assert differences(ended, replace(ended, tensors=missing)) == [name]
    assert not differences(ended, replace(ended, tensors={**ended.tensors, "weights/of a later version": tensor}))


def test_a_counter_or_a_metric_is_a_difference(ended: Ended) -> None:
    for name in ended.counters:
        assert len(differences(ended, replace(ended, counters={**ended.counters, name: "other"}))) == 1
    for number, record in enumerate(ended.records):
        for name in record:
            records = [*ended.records[:number], {**record, name: -1.5}, *ended.records[number + 1 :]]
            assert len(differences(ended, replace(ended, records=records))) == 1
    assert differences(ended, replace(ended, records=ended.records[:-1]))
    added = [{**record, "metric of a later version": 1.0} for record in ended.records]
    assert not differences(ended, replace(ended, records=added))


def test_within_rounding_is_within_a_thousandth_of_the_change(ended: Ended) -> None:
    began = tensors_of(newest(HERE / FIRST / "runs" / "grpo-1"))
    for share, same in ((0.0009, True), (-0.0011, False)):
        moved = {name: began[name] + (1 - share) * (tensor - began[name]) for name, tensor in ended.tensors.items()}
        found = differences(ended, replace(ended, tensors=moved), began)
        changed = [name for name, tensor in ended.tensors.items() if not torch.equal(tensor, began[name])]
        assert found == ([] if same else changed) and len(changed) > 100
    other = {**ended.counters, "progress.updates": -1}
    assert differences(ended, replace(ended, counters=other), began)
