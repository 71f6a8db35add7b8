"""Runs on the roles that data may have: in-context references, prompts without pictures, held-out examples."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml
from PIL import Image
from pydantic import TypeAdapter

from retouch.config import ConfigError, dump_run
from retouch.data.dataset import (
    Dataset,
    ItemFiles,
    load_dataset,
)
from retouch.data.rules import require_one_batch
from retouch.families.base import Model
from retouch.families.loading import load_model
from retouch.observe import Stopwatch
from retouch.rewards.protocol import RewardItem
from retouch.rollout.encoded import EncodedData
from retouch.rollout.sampler import to_uint8
from retouch.training.build import build
from retouch.types import Example, Outcome
from tests.command_line import retouch
from tests.tiny_models import tiny_model

from .runs import Config, Use, brightness, of_kind, train

pytestmark = pytest.mark.usefixtures("shallow")

STRIP = 16


def with_strip(signs: Path, name: str, **options: Any) -> dict[str, Any]:
    place = {"format": "self_bench", "path": str(signs / name), "resolution": [32, 64]}
    return {**place, "reference": "mask_box", "reference_strip": STRIP, **options}


def test_what_the_model_sees_is_the_picture_below_its_reference(config: Config, signs: Path) -> None:
    run = config(data=with_strip(signs, "targets"), warmup_data=None, evaluation__data=None)
    data: Any = load_dataset(run.data, "data", {"source", "mask", "reference"})
    example = data[0]
    strip = np.asarray(example.strip)
    page = Image.fromarray(np.concatenate([strip, np.asarray(example.source)]))
    hole = Image.fromarray(np.concatenate([np.zeros((STRIP, 64), np.uint8), np.asarray(example.mask)]))
    model = load_model(run.model)
    seen = model.encode([example], 30.0)
    assert seen.size == (32 + STRIP, 64)
    whole = model.encode([Example(0, example.prompt, page, hole)], 30.0)
    assert all(torch.equal(tensor, whole.tensors[name]) for name, tensor in seen.tensors.items())
    assert seen.mask is not None and not seen.mask[:, :, :STRIP].any()
    assert seen.mask[:, :, STRIP:].sum() == int(np.asarray(example.mask).astype(bool).sum())
    target = EncodedData(model, data, 30.0, Stopwatch()).images([0], "target", torch.device("cpu"))
    pixels = torch.from_numpy(np.asarray(page, np.float32)).permute(2, 0, 1)[None] / 127.5 - 1
    assert torch.equal(target, model.encode_images(pixels))
    images = (torch.arange(48) / 127.5 - 1)[None, None, :, None].expand(1, 3, 48, 64)
    assert to_uint8(images, example.strip)[0, :, 0, 0].tolist() == list(range(STRIP, 48))


def test_scores_and_evaluations_see_the_picture_alone(config: Config, scripted: Use, signs: Path) -> None:
    seen: list[tuple[Any, ...]] = []

    def rule(item: RewardItem) -> Outcome:
        assert item.source is not None and item.mask is not None
        seen.append((item.image.shape, item.source.shape, item.mask.shape))
        return brightness(item)

    scripted(rule)
    run, records = train(
        config(
            data=with_strip(signs, "targets"),
            warmup_data=with_strip(signs, "targets"),
            evaluation__data=with_strip(signs, "held_out"),
            algorithm__sft_steps=1,
            training__max_steps=2,
        )
    )
    assert set(seen) == {((32, 64, 3), (32, 64, 3), (32, 64))}
    assert all(0 <= record["outside_l1"] < 0.5 for record in of_kind(records, "eval"))
    picture = Image.open(next((run.dir.path / "evaluations").rglob("*.png")))
    assert picture.size == (64, 32)
    out = run.dir.path / "drawn"
    assert retouch("sample", "--run", run.dir.path, "--data", signs / "held_out", "--out", out).code == 0
    assert {Image.open(path).size for path in out.iterdir()} == {(64, 32)}


def test_text_to_image_trains_and_evaluates_on_prompts(config: Config, scripted: Use, tmp_path: Path) -> None:
    shapes: list[Any] = []

    def rule(item: RewardItem) -> Outcome:
        shapes.append((item.image.shape, item.source, item.mask, item.metadata.get("text")))
        return brightness(item)

    scripted(rule)
    (tmp_path / "train.jsonl").write_text(
        "".join(f'{{"prompt": "a sign that says {word}", "text": "{word}"}}\n' for word in ("MOON", "SUN", "STAR"))
    )
    (tmp_path / "test.txt").write_text("a cat\na dog\n", encoding="utf-8")
    sections = {
        name: {"format": "prompts", "path": str(tmp_path / file), "resolution": [32, 64]}
        for name, file in (("data", "train.jsonl"), ("evaluation", "test.txt"))
    }
    model = {"family": "qwen_image", "path": tiny_model("qwen_image"), "dtype": "fp32", "train": {"kind": "lora"}}
    own: dict[str, Any] = {"model": model, "warmup_data": None, "rollout__guidance_scale": 1.0}
    run, records = train(
        config(data=sections["data"], evaluation__data=sections["evaluation"], training__max_steps=2, **own)
    )
    assert run.eval_is_held_out
    assert {shape[:3] for shape in shapes} == {((32, 64, 3), None, None)}
    texts = {shape[3] for shape in shapes}
    assert None in texts and len(texts & {"MOON", "SUN", "STAR"}) >= 2  # of an epoch, and of the evaluation
    assert [record["images"] for record in of_kind(records, "eval")] == [2, 2]
    moved = [float(t.abs().max()) for n, t in run.policy.state().items() if "lora_B" in n]
    assert max(moved) > 0


def test_evaluating_on_what_is_trained_on_is_refused(
    config: Config, scripted: Use, signs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    scripted(brightness)
    section = {"format": "self_bench", "path": str(signs / "targets"), "resolution": [32, 64]}
    path = tmp_path / "run.yaml"
    path.write_text(dump_run(config(evaluation__data=section)), encoding="utf-8")
    outcome = retouch("train", path)  # warmup_data holds them
    last = outcome.err.splitlines()[-1]  # after "loading torch"
    assert outcome.code == 2
    assert last.startswith(
        "error: evaluation.data: 8 of 8 examples (the first: item 0) are trained on: data or warmup_data holds the "
        "same image"
    )
    [line] = [x for x in yaml.safe_load(retouch("doctor", path, "--json").out) if x["status"] == "fix"]
    assert line["what"] == "evaluation.data" and last == f"error: {line['says']}"
    made = build(config(evaluation__data=section, evaluation__allow_overlap=True))
    made.close()
    assert not made.eval_is_held_out


DRAWN, REPAINTED, EDITED = {}, {"source_path": Path("s"), "mask_path": Path("m")}, {"source_path": Path("s")}


@pytest.mark.parametrize(
    ("family", "given", "message"),
    [
        ("qwen_image", [DRAWN, REPAINTED, DRAWN], r"data: 2 of 3 examples \(the first: item 0\) have no source"),
        ("qwen_image_edit", [REPAINTED, EDITED], r"data: 1 of 2 examples \(the first: item 1\) have no mask"),
        ("qwen_image", [EDITED, EDITED], "a source and no mask, but qwen_image repaints inside one"),
    ],
)
def test_what_does_not_fit_into_one_batch_is_refused(
    family: str, given: list[dict[str, Path]], message: str, config: Config
) -> None:
    """A batch is stacked: what only some of its rows have would be dropped, or be taken for that of other rows."""
    run = config()
    run = run.model_copy(update={"model": TypeAdapter(Model).validate_python({"family": family, "path": "tiny"})})
    items = [ItemFiles(i, "p", **pictures) for i, pictures in enumerate(given)]
    with pytest.raises(ConfigError, match=message):
        require_one_batch(run, "data", Dataset(run.data, items))
    for alike in ([DRAWN] * 2 if family == "qwen_image" else [EDITED] * 2, [REPAINTED] * 2):
        require_one_batch(
            run, "data", Dataset(run.data, [ItemFiles(i, "p", **pictures) for i, pictures in enumerate(alike)])
        )


@pytest.mark.parametrize(
    ("options", "counts", "message"),
    [
        (
            {"variant": "edit_plus"},
            [1, 1, 2],
            "data: example 0 has 1 more_images and example 2 has 2, which do not fit",
        ),
        ({}, [1, 1], "data: example 0 has more_images, but qwen_image_edit reads one source image; leave more_images"),
    ],
)
def test_further_source_images_that_the_model_cannot_read_are_refused(
    options: dict[str, str], counts: list[int], message: str, config: Config
) -> None:
    given = {"family": "qwen_image_edit", "path": "somewhere", **options}
    run = config().model_copy(update={"model": TypeAdapter(Model).validate_python(given)})
    items = [ItemFiles(i, "p", Path("s"), more_paths=(Path("m"),) * n) for i, n in enumerate(counts)]
    with pytest.raises(ConfigError, match=message):
        require_one_batch(run, "data", Dataset(run.data, items))
    plus = config().model_copy(update={"model": TypeAdapter(Model).validate_python({**given, "variant": "edit_plus"})})
    require_one_batch(plus, "data", Dataset(run.data, items[:2]))
