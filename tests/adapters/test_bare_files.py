"""A style adapter as a bare file, as other programs hand it on: `sample --config RUN.yaml --weights FILE`."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from torch import Tensor

from retouch.adapters.formats import read_adapter
from retouch.config import parse_run
from retouch.errors import CheckpointError
from retouch.tiny.signs import draw_words, write_signs
from retouch.use.loaded import Loaded
from retouch.use.trained import Trained
from tests.command_line import retouch
from tests.tiny_models import UNUSED, tiny_calligrapher

TRAIN: dict[str, Any] = {"kind": "ip_adapter", "image_encoder": "tiny"}


def run_with(**train: Any) -> dict[str, Any]:
    return {
        "name": "adapted",
        "model": {"family": "flux_fill", "path": "tiny", "dtype": "fp32", "train": TRAIN | train},
        "data": {"format": "self_bench", "path": "${DATA_PATH}", "resolution": [32, 64]},
        "algorithm": {"name": "grpo"},
        "rewards": {"ocr": {}},
        "training": {"mixed_precision": "no"},
        "rollout": {"num_steps": 2},
    }


def run_file(folder: Path, **train: Any) -> Path:
    path = folder / "run.yaml"
    path.write_text(yaml.dump(run_with(**train)), encoding="utf-8")
    return path


def nested(path: Path) -> dict[str, dict[str, Tensor]]:
    """Calligrapher's file without its second head and its unused tensors: an adapter with one head."""
    parts: dict[str, dict[str, Tensor]] = torch.load(path, weights_only=True)
    del parts["image_proj_qformer"]
    return {part: {k: t for k, t in parts[part].items() if k not in UNUSED.get(part, {})} for part in parts}


@pytest.fixture
def files(tmp_path: Path) -> dict[str, Path]:
    """Layout -> file, all with the same weights in the parts that they share."""
    released = tiny_calligrapher(tmp_path / "calligrapher.bin")
    legacy = nested(released)
    torch.save(legacy, tmp_path / "legacy.bin")
    standard = {{"image_proj_mlp": "image_proj", "attn_adapter": "ip_adapter"}[name]: t for name, t in legacy.items()}
    torch.save(standard, tmp_path / "mine.bin")
    return {"released": released, "legacy": tmp_path / "legacy.bin", "standard": tmp_path / "mine.bin"}


def loaded(config: Path, weights: Path) -> dict[str, Tensor]:
    trained = Trained.find(None, config, weights, None, ["data"])
    model = Loaded(trained.config)
    model.load(trained.newest)
    names = model.trainee.adapter.names  # type: ignore[attr-defined]
    state = model.policy.state()
    return {key: state[name] for key, name in names.items()}


@pytest.mark.parametrize("layout", ["standard", "legacy", "released"])
def test_a_bare_file_is_loaded_whole(layout: str, files: dict[str, Path], tmp_path: Path) -> None:
    found = loaded(run_file(tmp_path, query_former=layout == "released"), files[layout])
    written = read_adapter(files[layout]).tensors
    assert found.keys() == written.keys()
    assert all(torch.equal(found[key], written[key]) for key in written)


@pytest.mark.parametrize("layout", ["standard", "legacy"])
def test_a_folder_with_only_this_file_is_its_folder(layout: str, files: dict[str, Path], tmp_path: Path) -> None:
    (tmp_path / "handed").mkdir()
    shutil.copy(files[layout], tmp_path / "handed/ip-adapter.bin")
    found = loaded(run_file(tmp_path), tmp_path / "handed")
    assert all(torch.equal(found[key], tensor) for key, tensor in read_adapter(files[layout]).tensors.items())


def test_the_command_samples_with_it(files: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """And another file gives another image."""
    monkeypatch.delenv("DATA_PATH", raising=False)  # sampling reads none of the run's data
    signs = tmp_path / "signs"
    signs.mkdir()
    write_signs(signs, draw_words(1, "train", 1), (32, 64), 1)
    item = ("--image", signs / "test0_source.png", "--mask", signs / "test0_mask.png", "--text", "KIGE")
    images: list[bytes] = []
    for weights in ((), ("--weights", files["legacy"])):
        out = tmp_path / f"out{len(weights)}"
        outcome = retouch(
            *("sample", "--config", run_file(tmp_path), *weights, *item),
            *("--reference", signs / "test0_ref.png", "--out", out),
        )
        assert outcome.code == 0, outcome.err
        images.append(Path(outcome.out.split()[0]).read_bytes())
    assert images[0] != images[1]


def test_what_does_not_fit_is_one_message(files: dict[str, Path], tmp_path: Path) -> None:
    lora = run_with()
    lora["model"]["train"] = {"kind": "lora"}
    (tmp_path / "lora.yaml").write_text(yaml.dump(lora), encoding="utf-8")
    scaled = tmp_path / "scaled"
    scaled.mkdir()
    for config, weights, raw, problem in (
        (run_file(tmp_path), files["released"], None, r"set model\.train\.query_former=true"),
        (tmp_path / "lora.yaml", files["legacy"], None, r"only a run with model\.train\.kind=ip_adapter takes"),
        (run_file(tmp_path), files["legacy"], False, "has no raw or EMA weights to choose"),
        (run_file(scaled, scale=0.5), files["legacy"], None, r"trained at scale 1, but model\.train has 0\.5"),
        (run_file(tmp_path), tmp_path / "none.bin", None, "no such checkpoint or weights folder"),
    ):
        with pytest.raises(CheckpointError, match=problem):
            trained = Trained.find(None, config, weights, raw, ["data"])
            Loaded(trained.config).load(trained.newest)


def test_a_run_file_of_the_test_is_valid(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DATA_PATH", "signs")
    assert parse_run(run_with()).model.train.kind == "ip_adapter"
