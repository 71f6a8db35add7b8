"""The published run files, and tiny data for whatever data sections they have."""

from __future__ import annotations

import json
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from retouch.config.load import read_yaml
from retouch.rewards.scorers import judge_client as judge
from retouch.tiny.signs import (
    draw_words,
    write_signs,
)
from tests.families.facts import text_length
from tests.rewards.openai_server import KEY, OpenAIServer, pictures
from tests.tiny_models import WITH_BASE, tiny_calligrapher, tiny_clip, tiny_model, tiny_vlm

CONFIGS = Path(__file__).parents[2] / "configs"
ENGINES = sorted((CONFIGS / "accelerate").glob("*.yaml"))
VLM_RUNS = sorted(CONFIGS.rglob("*_vlm_grpo*.yaml"))
"""Those that train a text encoder; tests/configs/test_vlm.py has them."""
EVALUATIONS = sorted((CONFIGS / "reproduce" / "evaluation").glob("*.yaml"))
"""Benchmark files, of tests/configs/test_evaluations.py."""
RUNS = sorted(set(CONFIGS.rglob("*.yaml")) - set(ENGINES) - set(VLM_RUNS) - set(EVALUATIONS))
SIZE = (32, 64)


def name_of(path: Path) -> str:
    """A path below configs/, which names the test."""
    return str(path.relative_to(CONFIGS))


@pytest.fixture(autouse=True)
def variables(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the published files take from the environment."""
    monkeypatch.setenv("MODEL_PATH", "somebody/model")
    monkeypatch.setenv("DATA_PATH", "a/folder")
    monkeypatch.setenv("DATA_JSON_PATH", "a/manifest.json")
    monkeypatch.setenv("EVAL_DATA_PATH", "a/folder")
    monkeypatch.setenv("IMAGE_ROOT", "a/folder")
    monkeypatch.setenv("CALLIGRAPHER_PATH", "a/calligrapher.bin")
    monkeypatch.setenv("ADAPTER_PATH", "an/adapter")
    monkeypatch.delenv("SIGLIP_PATH", raising=False)
    for name in ("OPENAI_API_KEY", "OPENAI_BASE_URL", "JUDGE_URL", "JUDGE_ADDRESS", "JUDGE_MODEL"):
        monkeypatch.delenv(name, raising=False)


class Picky(OpenAIServer):
    """A judge to whom every other image is worth something else."""

    def fill(self, asked: dict[str, Any]) -> dict[str, Any]:
        found, drawn = super().fill(asked), zlib.crc32(pictures(asked)[-1].tobytes())
        for number, (name, value) in enumerate(found.items()):
            if isinstance(value, int):
                found[name] = (drawn >> number) % 11
            elif value in ("yes", "no"):
                found[name] = ("yes", "no")[drawn >> number & 1]
        return found

    def published(self, asked: dict[str, Any]) -> str | None:
        text, drawn = super().published(asked), zlib.crc32(pictures(asked)[-1].tobytes())
        return json.dumps({"reasoning": "", "score": [drawn % 26, drawn // 26 % 26]}) if text else None

    def first_is_better(self, asked: dict[str, Any]) -> float:
        first, second = (zlib.crc32(picture.tobytes()) for picture in pictures(asked)[-2:])
        return 0.5 + 0.4 * ((first > second) - (first < second))


@pytest.fixture
def picky(monkeypatch: pytest.MonkeyPatch) -> Iterator[OpenAIServer]:
    """A judge where the variables of judges say."""
    monkeypatch.setenv("OPENAI_API_KEY", KEY)
    judge._BUCKETS.clear()  # pyright: ignore[reportPrivateUsage]
    with Picky() as server:
        for name in ("OPENAI_BASE_URL", "JUDGE_URL"):
            monkeypatch.setenv(name, server.url)
        yield server


@pytest.fixture(scope="session")
def signs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Eight signs in each data format: format -> what `path` takes. "described" is a manifest as users of JSON have it:
    images, masks and descriptions, without a text to read and without targets; "labelled" has good and bad images."""
    folder = tmp_path_factory.mktemp("signs")
    words = draw_words(8, "train", 1)
    write_signs(folder, words, SIZE, 1)
    entries = [
        {
            "image_path": f"test{number}_source.png",
            "mask_path": f"test{number}_mask.png",
            "target_path": f"test{number}_source.png",
            "reference_path": f"test{number}_ref.png",
            "prompt": f"The text is '{text}'.",
            "text": text,
        }
        for number, _, text in (line.partition("-") for line in (folder / "self_bench.txt").read_text().split())
    ]
    (folder / "manifest.json").write_text(json.dumps(entries), encoding="utf-8")
    described = [
        {"image": entry["image_path"], "mask": entry["mask_path"], "prompt": f"a sign, number {number}"}
        for number, entry in enumerate(entries)
    ]
    (folder / "described.json").write_text(json.dumps(described), encoding="utf-8")
    labelled = [{**entry, "label": ("good", "bad")[number % 2]} for number, entry in enumerate(entries)]
    (folder / "labelled.json").write_text(json.dumps(labelled), encoding="utf-8")
    (folder / "prompts.txt").write_text("\n".join(entry["prompt"] for entry in entries), encoding="utf-8")
    return {
        "self_bench": folder,
        "manifest": folder / "manifest.json",
        "described": folder / "described.json",
        "labelled": folder / "labelled.json",
        "prompts": folder / "prompts.txt",
    }


def shrink(path: Path, signs: dict[str, Path], out: Path) -> list[str]:
    """Overrides that take a published run to the tiny base: paths, sizes, counts of steps and images, urls, precision.

    Everything else stays as published.
    """
    published = read_yaml(path)
    algorithm, rollout = published["algorithm"], published["rollout"]
    overrides = [f"model.path={tiny_model(published['model']['family'])}", "model.dtype=fp32", f"logging.dir={out}"]
    if length := text_length(published["model"]["family"]):
        overrides += [f"model.max_sequence_length={length}"]
    if "transformer" in published["model"]:
        overrides += ["model.transformer=null"]  # tests/test_other_transformer.py has one
    if "variant" in published["model"] and tiny_model(published["model"]["family"]) == "tiny":
        overrides += ["model.variant=edit"]  # of the tiny base
    if published["model"]["train"]["kind"] == "ip_adapter":
        overrides += ["model.train.image_encoder=tiny"]
    if "initial_adapter" in published["model"]["train"]:
        released = tiny_calligrapher(out / "calligrapher.bin") if "calligrapher" in path.stem else "null"
        overrides += [f"model.train.initial_adapter={released}"]
    sections = {
        "data": published["data"],
        "warmup_data": published.get("warmup_data"),
        "evaluation.data": published.get("evaluation", {}).get("data"),
    }
    for key, section in sections.items():
        if section:
            kind = "described" if "_manifest_" in path.stem else section["format"]
            kind = "labelled" if (key, algorithm["name"]) == ("data", "kto") else kind
            overrides += [f"{key}.path={signs[kind]}", f"{key}.resolution={list(SIZE)}"]
            overrides += [f"{key}.image_root=null"] if "image_root" in section else []
    if "reference_strip" in published["data"]:
        overrides += ["data.reference_strip=16"]
    overrides += [f"rewards.{name}.url=null" for name in published["rewards"]]
    # finding the lines takes most of a second a picture; tests/rewards has it
    named = published["rewards"].keys() & {"ocr", "style"}
    overrides += [f"rewards.{name}.detect=false" for name in sorted(named)]
    if "clip" in published["rewards"]:
        overrides += [f"rewards.clip.path={tiny_clip()}"]
    if "pickscore" in published["rewards"]:
        overrides += [f"rewards.pickscore.{key}={tiny_clip()}" for key in ("path", "processor")]
    if "vlm" in published["rewards"]:
        overrides += [f"rewards.vlm.path={tiny_vlm()}", "rewards.vlm.dtype=fp32", "rewards.vlm.min_mass=0"]
    overrides += [f"rewards.{name}.image_encoder=tiny" for name in sorted(named - {"ocr"})]
    scorers = {entry.get("scorer", name): name for name, entry in published["rewards"].items() if entry}
    judged = scorers.keys() & {"complex_edit", "editscore", "pairwise"}  # by `picky`, to whom any two images differ
    rounds = [name for name, entry in published["rewards"].items() if "rounds" in (entry or {})]
    overrides += [f"rewards.{name}.rounds=null" for name in rounds]  # the groups are smaller here
    writes = published["model"]["family"] in WITH_BASE and rollout.get("guidance_scale") != 1
    if not writes and algorithm["name"] not in ("sft", "reward_gradient") and not judged:
        # random weights write nothing, nor does the tiny base without guidance: all readings tie, and no step is taken
        has_references = published["data"]["format"] != "prompts" and "_manifest_" not in path.stem
        score = "style: {image_encoder: tiny, gate: 0, detect: false}" if has_references else "jpeg_size: {}"
        overrides += [f"rewards={{{score}}}", "evaluation.on_gold_fall=warn"]
    if any((entry or {}).get("transform") == "rank" for entry in published["rewards"].values()):
        overrides += ["rewards={jpeg_size: {transform: rank}}"]  # two rewards of two samples often tie
    overrides += ["optimizer.batch_size_per_device=2", "optimizer.gradient_accumulation=2"]
    overrides += ["evaluation.num_examples=1", "evaluation.grid_examples=1", "evaluation.num_steps=1"]
    overrides += ["rollout.batch_size_per_device=4"]
    if sections["evaluation.data"]:
        overrides += ["evaluation.allow_overlap=true"]  # all sections read the same few signs here
    if algorithm["name"] == "sft":
        return [*overrides, "rollout.num_steps=4", "training.max_steps=1", "training.mixed_precision=no"]
    if algorithm["name"] == "kto":
        return [*overrides, "rollout.num_steps=4", "training.max_steps=1", "training.mixed_precision=no"]
    if rollout.get("window"):
        overrides += [f"rollout.window.size={min(2, rollout['window']['size'])}"]
    warmup = min(1, algorithm.get("sft_steps", 0))
    group = min(2, rollout["group_size"])
    return [
        *overrides,
        "rollout.num_steps=4",
        f"rollout.group_size={group}",
        f"rollout.global_groups_per_batch={4 // group}",
        "rollout.batches_per_epoch=1",
        f"algorithm.sft_steps={warmup}",
        f"training.max_steps={warmup + 1}",
        "training.mixed_precision=no",
    ]
