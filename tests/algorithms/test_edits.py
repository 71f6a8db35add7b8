"""Editing from a manifest without masks: pictures before, instructions, and pictures after for supervised steps."""

from __future__ import annotations

import json
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml
from PIL import Image

from retouch.config import ConfigError, RunConfig, derive, load_run
from retouch.data.dataset import (
    DataError,
    Dataset,
    ItemFiles,
)
from retouch.data.rules import require_targets
from retouch.families import FAMILIES
from retouch.families.qwen_image_edit.model import QwenImageEdit
from retouch.families.tiny import tiny_pipeline
from retouch.rewards.protocol import RewardItem
from retouch.types import Outcome
from tests.command_line import retouch
from tests.selection import cells
from tests.tiny_models import attentive

from .runs import Config, Use, base_weights, brightness, of_kind, train, weights

CONFIGS = Path(__file__).parents[2] / "configs"
SIZE = (32, 64)
WITH_ADAPTER = [name for name, section in FAMILIES.available().items() if section.spec.adapter is not None]
EDITS = ["Make it red.", "Make it much brighter, please.", "Paint it blue.", "Swap left and right."]


@pytest.fixture(scope="module")
def manifest(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Four edits: source, instruction and target, twice as large as the runs draw; no masks."""
    folder = tmp_path_factory.mktemp("edits")
    draw = np.random.default_rng(0)
    entries: list[dict[str, Any]] = []
    for i, edit in enumerate(EDITS):
        for role in ("source", "target"):
            pixels = draw.integers(0, 256, (2 * SIZE[0], 2 * SIZE[1], 3), np.uint8)
            Image.fromarray(pixels).save(folder / f"{role}{i}.png")
        entries.append({"id": i, "image_path": f"source{i}.png", "prompt": edit, "target_path": f"target{i}.png"})
    (folder / "edits.json").write_text(json.dumps(entries), encoding="utf-8")
    return folder / "edits.json"


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    """Sections `model` on networks that look at what they are shown, by task."""
    torch.manual_seed(5)
    found: dict[str, dict[str, Any]] = {}
    for task in ("draw", "edit", "edit_plus"):
        path = tmp_path_factory.mktemp(task)
        pipeline = tiny_pipeline("qwen_image") if task == "draw" else QwenImageEdit.tiny(task)
        attentive(pipeline).save_pretrained(path)
        own: dict[str, Any] = {"family": "qwen_image"}
        if task != "draw":
            own = {"family": "qwen_image_edit", "variant": task, "vision_pixels": 2048}
        found[task] = {
            "path": str(path),
            "dtype": "fp32",
            "max_sequence_length": 96,
            "train": {"kind": "lora", "rank": 4, "alpha": 8},
        } | own
    return found


def edit_run(
    config: Config, model: dict[str, Any], data: Path, algorithm: dict[str, Any], **overrides: Any
) -> RunConfig:
    section = {"format": "manifest", "path": str(data), "resolution": list(SIZE)}
    return config(
        model=model,
        data=section,
        warmup_data=None,
        evaluation={"data": section, "num_examples": 2, "grid_examples": 1, "allow_overlap": True},
        algorithm=algorithm,
        rollout__window={"size": 1, "range": [0, 0.5]} if algorithm["name"] == "grpo" else None,
        rollout__noise_level=None,
        optimizer={"lr": 1e-3, "batch_size_per_device": 4, "gradient_accumulation": 1},
        training__max_steps=2,
        **overrides,
    )


def words_alone(manifest: Path) -> Path:
    """The same prompts and targets with nothing to edit."""
    entries = json.loads(manifest.read_text(encoding="utf-8"))
    entries = [{name: value for name, value in entry.items() if name != "image_path"} for entry in entries]
    path = manifest.with_name("words.json")
    path.write_text(json.dumps(entries), encoding="utf-8")
    return path


@pytest.mark.parametrize(("task", "name"), cells(product(("draw", "edit", "edit_plus"), ("grpo", "nft", "sft")), 1))
def test_two_steps_on_edits_without_masks(
    task: str, name: str, config: Config, scripted: Use, folders: dict[str, dict[str, Any]], manifest: Path
) -> None:
    """The reward sees the source, if there is one, and no mask; the first step is on policy: rollout and training
    predict the same."""
    algorithm = {"name": name, **({"kl_weight": 0.1} if name == "nft" else {})}
    seen: list[RewardItem] = []

    def bright(item: RewardItem) -> Outcome:
        seen.append(item)
        return brightness(item)

    scripted(bright)
    data = words_alone(manifest) if task == "draw" else manifest
    base = base_weights(edit_run(config, folders[task], data, algorithm, name="base"))
    run, records = train(edit_run(config, folders[task], data, algorithm, name="edits"))
    steps = of_kind(records, "train")
    assert len(steps) == 2 and all(step["grad_norm"] > 0 for step in steps)
    assert any(not torch.equal(t, base[n]) for n, t in weights(run).items())
    if name == "grpo":
        assert steps[0]["max_abs_log_ratio"] <= 1e-5
    if name == "nft":
        assert steps[0]["old_velocity_distance"] == 0
    assert seen and all((item.source is None) == (task == "draw") and item.mask is None for item in seen)
    assert all(item.prompt in EDITS for item in seen)
    assert derive(run.config).vision_tokens == (0 if task == "draw" else 2)


@pytest.mark.full
def test_the_command_line_edits_without_a_mask(
    config: Config, folders: dict[str, dict[str, Any]], manifest: Path, tmp_path: Path
) -> None:
    """check, train, sample a manifest and one picture, eval, export: of a run that rewards small files."""
    run = edit_run(config, folders["edit"], manifest, {"name": "grpo"}, rewards={"jpeg_size": {}}, name="edits")
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(run.model_dump(mode="json")), encoding="utf-8")
    checked = retouch("check", tmp_path / "run.yaml", "--json")
    assert checked.code == 0 and '"vision_tokens": 2' in checked.out
    assert retouch("train", tmp_path / "run.yaml").code == 0
    made = Path(run.logging.dir) / "edits"
    drawn = retouch("sample", "--run", made, "--data", manifest, "--steps", 2, "--out", tmp_path / "all")
    assert drawn.code == 0, drawn.err
    assert [Image.open(path).size for path in sorted((tmp_path / "all").glob("*.png"))] == [SIZE[::-1]] * len(EDITS)
    source = manifest.parent / "source0.png"
    one = ("--run", made, "--image", source, "--steps", 2)
    assert retouch("sample", *one, "--prompt", EDITS[0], "--out", tmp_path / "one").code == 0
    again = retouch("sample", *one, "--prompt", EDITS[2], "--out", tmp_path / "other")
    assert again.code == 0
    pictures = [np.asarray(Image.open(tmp_path / name / "source0.png")) for name in ("one", "other")]
    assert np.array_equal(pictures[0], np.asarray(Image.open(tmp_path / "all" / "source0.png")))
    assert not np.array_equal(*pictures)
    refused = retouch("sample", *one, "--out", tmp_path / "none")
    assert refused.code == 2 and refused.err == "error: --image needs --text (or --prompt)\n"
    compared = json.loads(retouch("eval", "--run", made, "--data", manifest, "--json").out)
    assert compared["images"] == 2 and "jpeg_size" in compared["means"]["base"]
    checkpoint = sorted((made / "checkpoints").glob("step-*"))[-1]
    assert retouch("export", checkpoint, "--to", "diffusers-lora", "--out", tmp_path / "lora").code == 0
    pipeline: Any = QwenImageEdit.tiny("edit")
    pipeline.load_lora_weights(str(tmp_path / "lora"))
    assert any("lora" in name for name, _ in pipeline.transformer.named_parameters())


@pytest.mark.parametrize(
    ("override", "line"),
    [
        (
            {"model__max_sequence_length": 400, "data__resolution": 512, "data__reference_strip": 256},
            (
                "model.max_sequence_length: given 400, but a source of 768 x 512 (data.resolution, with "
                "reference_strip) takes 497 tokens with the chat around it, which leaves none for a prompt; set "
                "model.max_sequence_length to 753 or more, or a smaller model.vision_pixels"
            ),
        ),
        (
            {"model__free_text_encoders": True},
            (
                "model.free_text_encoders: given true, but the text encoder of qwen_image_edit reads the source image "
                "with the prompt and is needed during the whole run; set model.offload_text_encoders=true instead"
            ),
        ),
        (
            {"model__train": {"kind": "ip_adapter"}},
            (
                "model.train.kind: given 'ip_adapter', but qwen_image_edit has no style adapter; set "
                f"model.train.kind=lora, or model.family to one of {', '.join(WITH_ADAPTER)}"
            ),
        ),
    ],
)
def test_what_an_edit_run_cannot_be(override: dict[str, Any], line: str, config: Config, manifest: Path) -> None:
    model = {"family": "qwen_image_edit", "path": "somebody/edits"}
    with pytest.raises(ConfigError) as caught:
        edit_run(config, model, manifest, {"name": "grpo"}, **override)
    assert str(caught.value).endswith(line)


def test_an_edit_needs_its_picture(config: Config, folders: dict[str, dict[str, Any]], manifest: Path) -> None:
    with pytest.raises(DataError, match="image_path missing, which the run needs"):
        train(edit_run(config, folders["edit"], words_alone(manifest), {"name": "grpo"}))


def test_an_edit_does_not_learn_to_copy_its_source() -> None:
    """A list of images, masks and prompts serves inpainting; an editing model sees all of the image."""
    overrides = ["data.path=a", "evaluation.data.path=b"]
    item = ItemFiles(0, "Make it red.", Path("a.png"), Path("m.png"), target="source")
    edits, inpaints = (load_run(CONFIGS / f"{f}_sft.yaml", overrides) for f in ("qwen_image_edit", "flux_fill"))
    with pytest.raises(ConfigError, match="has no target image"):
        require_targets(edits, Dataset(edits.data, [item]))
    require_targets(inpaints, Dataset(inpaints.data, [item]))
