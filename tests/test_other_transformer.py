"""Weights of the network beside the base (`model.transformer`): trained on, exported, counted, looked for."""

from __future__ import annotations

import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from diffusers import FluxTransformer2DModel
from safetensors.torch import load_file, save_file

from retouch.config import parse_run
from retouch.doctor.diagnosis import diagnose
from retouch.families.base import OtherTransformer
from retouch.families.flux_fill.spec import FluxFillModel
from retouch.families.loading import load_network
from retouch.files.model_files import tiny_path
from tests.command_line import retouch
from tests.docs.pages import REPOSITORY

BASE = tiny_path("flux_fill") / "transformer"


@pytest.fixture(scope="module")
def other(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny base's transformer with every weight halved, in a folder below the one that is named."""
    folder = tmp_path_factory.mktemp("other")
    network: Any = FluxTransformer2DModel.from_pretrained(BASE)
    with torch.no_grad():
        for weight in network.parameters():
            weight.mul_(0.5)
    network.save_pretrained(folder / "one-transformer")
    return folder


@pytest.fixture
def run_yaml(run_file: Callable[..., dict[str, Any]], other: Path, tmp_path: Path) -> Path:
    run = run_file(
        model__transformer={"path": str(other), "subfolder": "one-transformer"},
        model__train={"kind": "lora", "rank": 4},
        training__max_steps=1,
    )
    path = tmp_path / "run.yaml"
    path.write_text(yaml.safe_dump(run), encoding="utf-8")
    return path


def test_a_run_trains_it_and_the_exported_pipeline_has_it(run_yaml: Path, other: Path, tmp_path: Path) -> None:
    outcome = retouch("train", run_yaml)
    assert outcome.code == 0, outcome.err
    outcome = retouch("export", tmp_path / "runs/t", "--to", "diffusers", "--out", tmp_path / "out")
    assert outcome.code == 0, outcome.err
    [exported] = (load_file(file) for file in (tmp_path / "out/transformer").glob("*.safetensors"))
    [expected] = (load_file(file) for file in (other / "one-transformer").glob("*.safetensors"))
    assert exported.keys() == expected.keys()
    moved = [name for name, tensor in exported.items() if not torch.equal(tensor, expected[name])]
    assert moved  # by LoRA, fused into some weights, a step of 1e-4
    for name, tensor in exported.items():
        torch.testing.assert_close(tensor, expected[name], atol=1e-3, rtol=0)
    [base] = (load_file(file) for file in BASE.glob("*.safetensors"))
    assert any(not torch.allclose(tensor, base[name].float(), atol=1e-2) for name, tensor in exported.items())


RELEASED = re.findall(
    r"transformer: \{path: (\S+), subfolder: (\S+)\}", (REPOSITORY / "docs/models.md").read_text(encoding="utf-8")
)
"""Repositories of the hub that docs/models.md loads, and the folder with the network in each."""


def test_the_released_transformers_of_the_page_load_from_their_layout(other: Path, tmp_path: Path) -> None:
    """One network in the folder that its project publishes, beside another in the base."""
    assert [name for name, _ in RELEASED] == ["bytedance-research/OneReward", "shenyt/FluPA-fill"]
    [halved] = (load_file(file) for file in (other / "one-transformer").glob("*.safetensors"))
    for name, subfolder in RELEASED:
        shutil.copytree(other / "one-transformer", tmp_path / name / subfolder)
        section = OtherTransformer(path=str(tmp_path / name), subfolder=subfolder)
        network = load_network(FluxFillModel(path="tiny", transformer=section), torch.float32)
        assert all(torch.equal(halved[key].float(), tensor) for key, tensor in network.state_dict().items())


def test_doctor_and_the_memory_estimate_look_at_it(run_yaml: Path, other: Path) -> None:
    run = parse_run(yaml.safe_load(run_yaml.read_text(encoding="utf-8")))
    lines = {line.what: line for line in diagnose(run)}
    assert lines["model.transformer"].status == "ok"
    assert str(other / "one-transformer") in lines["model.transformer"].says
    outcome = retouch("check", run_yaml, "--memory", "--json")
    assert outcome.code == 0, outcome.err


def test_an_epoch_does_not_go_on_with_other_weights_in_its_place(run_yaml: Path, other: Path, tmp_path: Path) -> None:
    sampled = ["rollout.batches_per_epoch=2", "training.max_steps=2", "training.checkpoint_every=1"]
    outcome = retouch("train", run_yaml, *sampled)
    assert outcome.code == 0, outcome.err
    again = ["resume=" + str(tmp_path / "runs/t/checkpoints/step-000001"), *sampled]
    copy = Path(shutil.copytree(other, tmp_path / "copy"))
    outcome = retouch("train", run_yaml, *again, f"model.transformer.path={copy}")
    assert outcome.code == 2 and "lies inside an epoch of model.transformer.path=" in outcome.err
    [file] = (other / "one-transformer").glob("*.safetensors")
    tensors, kept = load_file(file), file.read_bytes()
    save_file({name: tensor + 1 for name, tensor in tensors.items()}, file, metadata={"format": "pt"})
    try:
        outcome = retouch("train", run_yaml, *again)
    finally:
        file.write_bytes(kept)
    assert outcome.code == 2 and "lies inside an epoch of another network than model.transformer=" in outcome.err


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["model.transformer.subfolder=none"], "has no config.json; give the folder of a network"),
        (["model.transformer={path: ./nowhere}"], "model.transformer.path: ./nowhere: no such folder"),
    ],
)
def test_a_folder_without_a_network_is_named_before_anything_is_loaded(
    run_yaml: Path, overrides: list[str], message: str
) -> None:
    for command in ("train", "doctor"):
        outcome = retouch(command, run_yaml, *overrides)
        assert outcome.code in (1, 2)
        assert message in outcome.err + outcome.out
