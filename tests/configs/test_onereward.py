"""The recipe of docs/models.md for OneReward's weights of FLUX.1-Fill, by its own commands, on the tiny base."""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from diffusers import FluxTransformer2DModel

from retouch.config import load_run
from retouch.families.base import OtherTransformer
from retouch.files.model_files import tiny_path
from retouch.observe.run_dir import read_metrics
from tests.command_line import retouch

from .conftest import CONFIGS, shrink

SUBFOLDER = "flux.1-fill-dev-OneReward-transformer"


def documented() -> list[list[str]]:
    """The commands, without `retouch`."""
    text = (CONFIGS.parent / "docs/models.md").read_text(encoding="utf-8")
    section = text.partition("### OneReward")[2].partition("\n## ")[0]
    return [shlex.split(line)[1:] for line in re.findall(r"^\$ (retouch .*)$", section, re.MULTILINE)]


@pytest.fixture
def weights(tmp_path: Path) -> Path:
    """A repository with the tiny base's transformer, slightly changed, in the folder that OneReward publishes."""
    network: Any = FluxTransformer2DModel.from_pretrained(tiny_path("flux_fill") / "transformer")
    with torch.no_grad():
        for weight in network.parameters():
            weight.mul_(1.05)
    network.save_pretrained(tmp_path / "OneReward" / SUBFOLDER)
    return tmp_path / "OneReward"


def test_it_samples_evaluates_and_trains(
    weights: Path, signs: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On the same examples and seeds as plain Fill; the run trains on from the released weights, under both scales."""
    monkeypatch.setenv("ONEREWARD_PATH", str(weights))
    commands = documented()
    assert [command[0] for command in commands] == ["sample", "eval", "eval", "train"]
    for name in ("flux_fill_onereward_grpo", "flux_fill_grpo"):
        published = CONFIGS / f"{name}.yaml"
        overrides = [o for o in shrink(published, signs, tmp_path / "runs") if o != "model.transformer=null"]
        run = load_run(published, [*overrides, "evaluation.num_examples=4"])
        if name == commands[0][2].removeprefix("configs/").removesuffix(".yaml"):
            assert run.model.transformer == OtherTransformer(path=str(weights), subfolder=SUBFOLDER)
            assert (run.model.forwards_of_guidance(1.0), run.rollout.guidance_scale) == (2, 1.0)
        small = run.model_dump(mode="json")
        (tmp_path / f"{name}.yaml").write_text(yaml.safe_dump(small), encoding="utf-8")
    places = {"held_out": str(signs["self_bench"]), "images": str(tmp_path / "images")}
    for command in commands:
        given = [re.sub(r"^configs/|^eval/", f"{tmp_path}/", places.get(word, word)) for word in command]
        outcome = retouch(*given)
        assert outcome.code == 0, (given, outcome.err)
    assert len(list((tmp_path / "images").glob("*.png"))) == 8
    onereward, fill = (
        [json.loads(line) for line in (tmp_path / name / "base.jsonl").read_text(encoding="utf-8").splitlines()]
        for name in ("onereward", "fill")
    )
    assert [(row["example"], row["index"]) for row in onereward] == [(row["example"], row["index"]) for row in fill]
    assert len(fill) >= 4 and onereward != fill
    done = tmp_path / "runs" / "flux_fill_onereward_grpo"
    steps = [record for record in read_metrics(done / "metrics.jsonl") if record["kind"] == "train"]
    assert steps and steps[-1]["grad_norm"] > 0
