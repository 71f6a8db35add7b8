"""Embeddings on disk are the ones that would be made, to the last bit, and need no encoder."""

from __future__ import annotations

import errno
import hashlib
import json
import os
import re
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image
from safetensors.torch import load_file, save_file

from retouch.config import ConfigError, RunConfig, parse_run
from retouch.data.dataset import load_dataset
from retouch.data.item import read_item
from retouch.errors import RetouchError
from retouch.families.embeddings import (
    EmbeddingCache,
    StoredVectors,
    fingerprint,
    identity,
)
from retouch.families.flux.base import given_embeddings
from retouch.families.image_encoder import TINY
from retouch.families.inputs import image_pixels
from retouch.families.loading import ModelFilesError, load_model
from retouch.families.qwen_image_21.spec import QwenImage21Model
from retouch.families.sd_inpaint.spec import SdInpaintModel
from retouch.rewards.scorers.weights import version_of
from retouch.types import Example
from retouch.use.loaded import for_items
from retouch.use.page import Asked, Studio
from retouch.use.precompute import precompute
from retouch.use.trained import Trained
from tests.algorithms.runs import same_weights, train, weights
from tests.command_line import retouch
from tests.conftest import small_run
from tests.tiny_models import narrow_sd, shallow_flux, tiny_model

pytestmark = pytest.mark.usefixtures("shallow")

Config = Callable[..., RunConfig]


def copied(family: str, folder: Path) -> Path:
    """A model that a test may change."""
    smaller = {"flux_fill": shallow_flux, "sd_inpaint": narrow_sd}
    return Path(shutil.copytree(smaller[family]() if family in smaller else tiny_model(family), folder))


def without_encoders(model: Path) -> None:
    for part in model.iterdir():
        if part.name.startswith(("text_encoder", "tokenizer")):
            shutil.rmtree(part)


def run_of(signs: Path, tmp_path: Path, family: str, **overrides: Any) -> dict[str, Any]:
    length = {} if family == "sd_inpaint" else {"max_sequence_length": 24}
    model = {"family": family, "path": str(tmp_path / "model"), "dtype": "fp32", "train": {"kind": "full"}, **length}
    noise = {"rollout__noise_level": None} if family == "sd_inpaint" else {}
    return small_run(signs, tmp_path / "runs", model=model, **noise, **overrides)


@pytest.mark.parametrize("family", ["flux_fill", "sd_inpaint", "qwen_image"])
def test_what_is_looked_up_is_what_would_be_made(family: str, signs: Path, tmp_path: Path) -> None:
    """Guided, so that negative prompts count."""
    model = copied(family, tmp_path / "model")
    run = parse_run(run_of(signs, tmp_path, family))
    examples = list(load_dataset(run.data, "data", ()))[:3]
    fresh: Any = load_model(run.model)
    expected = [fresh.encode([example], 4.0) for example in examples]
    counts = precompute(run, tmp_path / "cache")
    assert counts["prompts"] >= 8 and counts["images"] >= 8
    without_encoders(model)
    stored: Any = load_model(run.model.model_copy(update={"embeddings": str(tmp_path / "cache")}))
    assert not stored.text.encoders
    stored.vae.encode = None  # nothing is encoded
    for example, made in zip(examples, expected, strict=True):
        found = stored.encode([example], 4.0)
        assert found.tensors.keys() == made.tensors.keys()
        for name, tensor in made.tensors.items():
            assert torch.equal(found.tensors[name], tensor) and found.tensors[name].dtype == tensor.dtype, name


def test_an_image_with_a_colour_profile_of_an_earlier_cache_is_told(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Keys are pixels as they are read, and those of images with a profile are others since they are read as sRGB: a
    cache of before has neither their latents nor the vectors of their references."""
    model = SdInpaintModel(path=str(copied("sd_inpaint", tmp_path / "model")), dtype="fp32")
    raw, read = (Image.new("RGB", (16, 16), colour) for colour in ((200, 90, 30), (222, 84, 6)))
    cache = EmbeddingCache(tmp_path / "cache", model, create=True)
    cache.add_images(image_pixels(raw)[None], torch.zeros(1, 4, 2, 2))
    cache.add_reference(raw, lambda images: torch.zeros(len(images), 3))
    why = "the data changed since, or has colour profiles, which earlier versions did not convert to sRGB"
    found = EmbeddingCache(tmp_path / "cache", model)
    with caplog.at_level("INFO"):
        assert found.image(image_pixels(raw)) is not None and not caplog.records
        assert found.image(image_pixels(read)) is found.image(image_pixels(read)) is None
    assert len(caplog.records) == 1 and why in caplog.text  # once
    with pytest.raises(ConfigError, match=f"no vector of a reference of 16 x 16 pixels; .*{why}"):
        StoredVectors(found, 3)([read])


def test_latents_of_tiles_are_not_those_of_whole_images(tmp_path: Path) -> None:
    """They differ near the edges of tiles; texts do not, and a cache of earlier versions keeps its latents."""
    model = SdInpaintModel(path=str(copied("sd_inpaint", tmp_path / "model")), dtype="fp32")
    one, tiles = (model.model_copy(update={"vae_batch": batch}) for batch in ("one", "tiles"))
    pixels = torch.zeros(3, 16, 16)
    cache = EmbeddingCache(tmp_path / "cache", tiles, create=True)
    cache.add_images(pixels[None], torch.ones(1, 4, 2, 2))
    cache.add_text("a sign", lambda prompt: {"text": torch.ones(1)})
    whole = EmbeddingCache(tmp_path / "cache", model, create=True)
    assert whole.image(pixels) is None and whole.has_text("a sign")
    whole.add_images(pixels[None], torch.zeros(1, 4, 2, 2))
    assert [float(EmbeddingCache(tmp_path / "cache", m).image(pixels).sum()) for m in (model, one, tiles)] == [0, 0, 16]


def test_training_without_the_encoders_is_training_with_them(signs: Path, tmp_path: Path) -> None:
    model = copied("flux_fill", tmp_path / "model")
    run = run_of(signs, tmp_path, "flux_fill", algorithm__sft_steps=1, training__max_steps=2)
    with_encoders, _ = train(parse_run({**run, "name": "with"}))
    precompute(parse_run(run), tmp_path / "cache")
    without_encoders(model)
    run["model"]["embeddings"] = str(tmp_path / "cache")
    without, _ = train(parse_run({**run, "name": "without"}))
    assert same_weights(weights(with_encoders), weights(without))


def test_sampling_takes_prompts_that_are_not_stored(
    signs: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The encoders are loaded for a new prompt, and only for one; so a run can be tried with `--run`."""
    model = copied("flux_fill", tmp_path / "model")
    run = run_of(signs, tmp_path, "flux_fill")
    precompute(parse_run(run), tmp_path / "cache")
    run["model"]["embeddings"] = str(tmp_path / "cache")
    config = parse_run(run)
    items = load_dataset(config.data, "data", ()).items
    stored = [item.prompt for item in items]
    assert for_items(config, items, config.data) is config
    changed = for_items(config, [*items, replace(items[0], id=99, prompt="a new prompt")], config.data)
    assert changed.model.embeddings is None
    told = "loading the encoders instead of model.embeddings: "
    assert f"{told}no entry for 1 prompt, 'a new prompt' among them" in caplog.text
    elsewhere = config.model.model_copy(update={"embeddings": str(tmp_path / "nowhere")})
    moved = for_items(config.model_copy(update={"model": elsewhere}), items, config.data)
    assert moved.model.embeddings is None and f"{told}{tmp_path}/nowhere holds no embeddings" in caplog.text
    (tmp_path / "run.yaml").write_text(json.dumps(run), encoding="utf-8")
    source = sorted(signs.rglob("*_source.png"))[0]
    mask = source.with_name(source.name.replace("_source", "_mask"))
    where = ("--config", tmp_path / "run.yaml", "--image", source, "--mask", mask, "--out", tmp_path / "out")
    outcome = retouch("sample", *where, "--prompt", "a new prompt")
    assert outcome.code == 0, outcome.err
    without_encoders(model)
    outcome = retouch("sample", *where, "--prompt", stored[0])
    assert outcome.code == 0, outcome.err


def test_the_page_loads_the_encoders_for_a_new_prompt_only(signs: Path, tmp_path: Path) -> None:
    """And after a failure, a stored prompt is sampled again."""
    model = copied("flux_fill", tmp_path / "model")
    run = run_of(signs, tmp_path, "flux_fill")
    precompute(parse_run(run), tmp_path / "cache")
    run["model"]["embeddings"] = str(tmp_path / "cache")
    config = parse_run(run)
    whole = copied("flux_fill", tmp_path / "whole")
    without_encoders(model)
    item = load_dataset(config.data, "data", ()).items[0]
    source, mask = Image.open(str(item.source_path)), Image.open(str(item.mask_path)).convert("L")
    paint = Image.merge("RGBA", [Image.new("L", mask.size, 255)] * 3 + [mask])
    drawing = {"background": source, "layers": [paint]}
    studio = Studio(Trained(config, {}))
    (first,) = studio.repaint(drawing, Asked(prompt=item.prompt, steps=2))
    with pytest.raises(RetouchError):  # no encoders
        studio.repaint(drawing, Asked(prompt="a new prompt", steps=2))
    (again,) = studio.repaint(drawing, Asked(prompt=item.prompt, steps=2))
    assert first.tobytes() == again.tobytes()
    for part in whole.iterdir():
        if part.is_dir():
            shutil.copytree(part, model / part.name, dirs_exist_ok=True)
    assert len(studio.repaint(drawing, Asked(prompt="a new prompt", steps=2))) == 1
    (with_encoders,) = studio.repaint(drawing, Asked(prompt=item.prompt, steps=2))
    assert first.tobytes() == with_encoders.tobytes()


def test_references_need_no_image_encoder(signs: Path, tmp_path: Path) -> None:
    copied("flux_fill", tmp_path / "model")
    encoder = shutil.copytree(TINY, tmp_path / "encoder")
    run = run_of(signs, tmp_path, "flux_fill", data__path=str(signs / "targets"), evaluation__data=None)
    run["model"]["train"] = {"kind": "ip_adapter", "image_encoder": str(encoder), "tokens": 4}
    config = parse_run(run)
    data = load_dataset(config.data, "data", ())
    kept = config.model.model_copy(update={"embeddings": str(tmp_path / "cache")})
    examples = list(data)[:2]
    expected = load_model(config.model).encode(examples, 1.0).tensors["reference"]
    assert precompute(config, tmp_path / "cache")["references"] >= 2
    config = config.model_copy(update={"model": kept})
    assert for_items(config, data.items, config.data) is config
    Image.effect_noise((64, 32), 50).convert("RGB").save(tmp_path / "noise.png")
    other = replace(data.items[0], id=99, reference_path=tmp_path / "noise.png")
    assert for_items(config, [data.items[0], other], config.data).model.embeddings is None
    cut = replace(other, reference_mask_path=other.mask_path)
    part = read_item(cut, config.data)[0].reference  # a part of the file is read, and looked for
    assert part is not None and part.size != (64, 32)
    assert for_items(config, [data.items[0], cut], config.data).model.embeddings is None
    EmbeddingCache(tmp_path / "cache", kept).add_reference(part, lambda images: torch.zeros(1, 8))
    assert for_items(config, [data.items[0], cut], config.data) is config
    shutil.rmtree(encoder)
    stored = load_model(kept)
    assert torch.equal(stored.encode(examples, 1.0).tensors["reference"], expected)
    changed = replace(examples[0], reference=examples[0].source)
    with pytest.raises(ConfigError, match="has no vector of a reference of 64 x 32 pixels"):
        stored.encode([changed], 1.0)


def test_a_stale_cache_is_refused(signs: Path, tmp_path: Path) -> None:
    """Other encoder weights, another precision, another length, new prompts; each by name."""
    model = copied("flux_fill", tmp_path / "model")
    run = run_of(signs, tmp_path, "flux_fill")
    precompute(parse_run(run), tmp_path / "cache")
    run["model"]["embeddings"] = str(tmp_path / "cache")
    for key, value in (("dtype", "bf16"), ("max_sequence_length", 30)):
        with pytest.raises(ConfigError, match=f"was made with {key} .*data precompute"):
            load_model(parse_run({**run, "model": {**run["model"], key: value}}).model)
    file = model / "text_encoder_2" / "model.safetensors"
    tensors = load_file(file)
    name = sorted(tensors)[0]
    save_file({**tensors, name: tensors[name] + 1}, file, metadata={"format": "pt"})
    with pytest.raises(ConfigError, match="was made with text_files"):
        load_model(parse_run(run).model)
    save_file(tensors, file, metadata={"format": "pt"})
    load_model(parse_run(run).model)
    run["data"]["prompt_template"] = "Write '{text}'."
    (tmp_path / "run.yaml").write_text(json.dumps(run), encoding="utf-8")
    outcome = retouch("train", tmp_path / "run.yaml")
    assert outcome.code == 2
    assert "lacks 8 prompts of the run" in outcome.err and "data changed since" in outcome.err


def test_a_cache_belongs_to_the_tokenizer_in_the_processor(tmp_path: Path) -> None:
    """Qwen-Image-2.1 has its tokenizer there. A cache of an earlier version, which did not record it, is read but not
    filled: its new entries would not depend on it."""
    model, tokenizer = QwenImage21Model(path=str(tmp_path / "model")), tmp_path / "model/processor/tokenizer.json"
    tokenizer.parent.mkdir(parents=True)
    (tmp_path / "model/model_index.json").write_text("{}", encoding="utf-8")
    tokenizer.write_text("{}", encoding="utf-8")
    cache = EmbeddingCache(tmp_path / "cache", model, create=True)
    cache.add_text("a sign", lambda prompt: {"text": torch.ones(1)})
    assert EmbeddingCache(tmp_path / "cache", model).has_text("a sign")
    file = tmp_path / "earlier/cache.json"
    file.parent.mkdir()
    made = identity(model)
    made.pop("processor_files", None)
    file.write_text(json.dumps(made), encoding="utf-8")
    tokenizer.write_text('{"model": {}}', encoding="utf-8")
    for folder, create in ((tmp_path / "cache", False), (file.parent, True)):
        with pytest.raises(ConfigError, match="was made with processor_files"):
            EmbeddingCache(folder, model, create=create)
    EmbeddingCache(file.parent, model)


def test_a_cache_belongs_to_the_variant_of_the_weights(signs: Path, tmp_path: Path) -> None:
    """Caches without a variant stay valid, and one of a style adapter serves a run without references."""
    copied("flux_fill", tmp_path / "model")
    run = run_of(signs, tmp_path, "flux_fill")
    plain = parse_run(run).model
    of_variant = plain.model_copy(update={"weights_variant": "fp16"})
    adapter = parse_run({**run, "model": {**run["model"], "train": {"kind": "ip_adapter", "image_encoder": "tiny"}}})
    assert "weights_variant" not in identity(plain)
    EmbeddingCache(tmp_path / "plain", plain, create=True)
    EmbeddingCache(tmp_path / "fp16", of_variant, create=True)
    EmbeddingCache(tmp_path / "adapter", adapter.model, create=True)
    EmbeddingCache(tmp_path / "fp16", of_variant)
    EmbeddingCache(tmp_path / "adapter", plain)
    with pytest.raises(ConfigError, match="was made with weights_variant None, but now it is 'fp16'"):
        EmbeddingCache(tmp_path / "plain", of_variant)
    with pytest.raises(ConfigError, match="was made with weights_variant 'fp16', but now it is None"):
        EmbeddingCache(tmp_path / "fp16", plain)


def test_entries_are_added_and_none_is_made_twice(signs: Path, tmp_path: Path) -> None:
    copied("flux_fill", tmp_path / "model")
    run = run_of(signs, tmp_path, "flux_fill")
    (tmp_path / "run.yaml").write_text(json.dumps(run), encoding="utf-8")
    command = ("data", "precompute", tmp_path / "run.yaml", "--out", tmp_path / "cache")
    first, again = retouch(*command), retouch(*command)
    assert first.code == again.code == 0, first.err + again.err
    assert "0 prompts, 0 references, 0 images" in again.out
    assert "0 prompts" not in first.out


@pytest.mark.parametrize(
    ("model", "algorithm", "message"),
    [
        (
            {"family": "qwen_image_edit"},
            "nft",
            "model.family: qwen_image_edit has a text encoder that reads the image with the prompt; .*",
        ),
        (
            {"family": "qwen_image"},
            "vlm_grpo",
            "algorithm.name: vlm_grpo trains the text encoder; its embeddings cannot be kept",
        ),
    ],
)
def test_a_run_that_can_use_no_embeddings_is_refused(
    model: dict[str, Any], algorithm: str, message: str, tmp_path: Path
) -> None:
    """Before anything is read: there is neither a model nor data here."""
    run = {
        "name": "run",
        "model": {**model, "path": str(tmp_path / "model"), "train": {"kind": "lora"}},
        "data": {"format": "self_bench", "path": str(tmp_path / "signs"), "resolution": 512},
        "algorithm": {"name": algorithm},
        "rewards": {"preservation": {}},
    }
    (tmp_path / "run.yaml").write_text(json.dumps(run), encoding="utf-8")
    outcome = retouch("data", "precompute", tmp_path / "run.yaml", "--out", tmp_path / "cache")
    assert (outcome.code, outcome.out) == (2, "")
    assert re.fullmatch(f"error: {message}\n", outcome.err)
    assert not (tmp_path / "cache").exists()


def test_a_folder_without_embeddings_and_a_damaged_entry(signs: Path, tmp_path: Path) -> None:
    copied("flux_fill", tmp_path / "model")
    config = parse_run(run_of(signs, tmp_path, "flux_fill"))
    with pytest.raises(ConfigError, match=r"holds no embeddings \(no cache.json\); run `retouch data precompute"):
        EmbeddingCache(tmp_path / "nowhere", config.model)
    cache = EmbeddingCache(tmp_path / "cache", config.model, create=True)
    cache.add_text("a", lambda _: {"text": torch.ones(2)})
    [file] = (tmp_path / "cache" / "text").iterdir()
    file.write_bytes(file.read_bytes()[:20])
    with pytest.raises(ConfigError, match="is damaged"):
        cache.text("a")


def test_an_entry_that_was_changed_is_not_used(signs: Path, tmp_path: Path) -> None:
    """A flipped bit, tensors of other names or types, and the entry of another prompt."""
    copied("flux_fill", tmp_path / "model")
    config = parse_run(run_of(signs, tmp_path, "flux_fill"))
    cache = EmbeddingCache(tmp_path / "cache", config.model, create=True)
    cache.add_text("a", lambda _: {"text": torch.ones(2)})
    [file] = (tmp_path / "cache" / "text").iterdir()
    cache.add_text("b", lambda _: {"text": torch.zeros(2)})
    [other] = {*(tmp_path / "cache" / "text").iterdir()} - {file}
    whole, metadata = file.read_bytes(), {"sha256": "0" * 64}
    for change in (
        lambda: file.write_bytes(whole[:-1] + bytes([whole[-1] ^ 1])),
        lambda: save_file({"vector": torch.ones(2)}, file, metadata=metadata),
        lambda: save_file({}, file, metadata=metadata),
        lambda: file.write_bytes(other.read_bytes()),
    ):
        change()
        with pytest.raises(ConfigError, match=rf"{file.name} is damaged \(its SHA-256 is not the recorded"):
            cache.text("a")
    save_file({"text": torch.ones(2)}, file)  # as older versions wrote it, without a record
    assert torch.equal((cache.text("a") or {})["text"], torch.ones(2))


def test_a_pipe_in_place_of_the_identity_is_not_waited_for(signs: Path, tmp_path: Path) -> None:
    copied("flux_fill", tmp_path / "model")
    config = parse_run(run_of(signs, tmp_path, "flux_fill"))
    (tmp_path / "cache").mkdir()
    os.mkfifo(tmp_path / "cache/cache.json")
    with pytest.raises(ConfigError, match="holds no embeddings"):
        EmbeddingCache(tmp_path / "cache", config.model)
    EmbeddingCache(tmp_path / "cache", config.model, create=True)
    EmbeddingCache(tmp_path / "cache", config.model)


def test_the_fingerprint_of_a_large_file_follows_each_of_its_tensors(tmp_path: Path) -> None:
    """A fine-tune may leave the first, the middle and the last one alone; scores and embeddings follow the files."""
    names = [f"layer.{i}.weight" for i in range(9)]
    seen = {fingerprint([tmp_path]), version_of(str(tmp_path))}
    assert seen == {None, "empty"}
    for tuned in (None, *names):
        tensors = {name: torch.full((512, 256), float(name == tuned)) for name in names}
        save_file(tensors, tmp_path / "model.safetensors")
        seen |= {fingerprint([tmp_path]), version_of(str(tmp_path))}
    assert len(seen) == 2 + 2 * 10


def test_a_tensor_between_two_samples_of_its_file_is_sampled(tmp_path: Path) -> None:
    """A bias among large matrices, of a few bytes."""
    seen = set[str | None]()
    for value in (0.0, 1.0):
        tensors = {f"{i}.weight": torch.zeros(512, 700) for i in range(4)}
        tensors |= {f"{i}.bias": torch.full((8,), value if i == 1 else 0.0) for i in range(4)}
        save_file(tensors, tmp_path / "model.safetensors")
        seen.add(fingerprint([tmp_path]))
    assert len(seen) == 2


@pytest.mark.parametrize("name", ["model.bin", "model.safetensors"])
def test_the_fingerprint_of_another_large_file_follows_each_mebibyte(name: str, tmp_path: Path) -> None:
    """Also of a file that is no safetensors file, whatever its name, and of one whose header lies."""
    file = tmp_path / name
    header = json.dumps({"a": {"dtype": "U8", "shape": [1], "data_offsets": [0, 1 << 60]}}).encode()
    content = bytearray((len(header).to_bytes(8, "little") + header).ljust(8 << 20, bytes(1)))
    file.write_bytes(content)
    seen = {fingerprint([tmp_path])}
    for start in range(1 << 19, 8 << 20, 1 << 20):
        changed = bytearray(content)
        changed[start : start + (1 << 20)] = bytes([1]) * len(changed[start : start + (1 << 20)])
        file.write_bytes(changed)
        seen.add(fingerprint([tmp_path]))
    assert len(seen) == 9


def test_a_fingerprint_of_an_earlier_version_counts(signs: Path, tmp_path: Path) -> None:
    """Checkpoints and stored embeddings have those of three places of a large file."""
    copied("flux_fill", tmp_path / "model")
    large = tmp_path / "model/text_encoder/extra.bin"
    large.write_bytes(bytes(range(256)) * (4 << 12))
    run = run_of(signs, tmp_path, "flux_fill")
    cache = EmbeddingCache(tmp_path / "cache", parse_run(run).model, create=True)
    file = tmp_path / "cache/cache.json"
    made = json.loads(file.read_text("utf-8"))
    now = made["text_files"]
    assert (len(now), len(made["vae_files"])) == (128, 64)
    file.write_text(json.dumps({**made, "text_files": now[:64]}), "utf-8")
    assert EmbeddingCache(tmp_path / "cache", parse_run(run).model).folder == cache.folder
    file.write_text(json.dumps({**made, "text_files": "0" * 64}), "utf-8")
    with pytest.raises(ConfigError, match="was made with text_files"):
        EmbeddingCache(tmp_path / "cache", parse_run(run).model)
    old = hashlib.sha256(f"text_encoder/extra.bin {4 << 20}\n".encode() + bytes(range(256)) * (3 << 12)).hexdigest()
    assert (fingerprint([large]) or "").startswith(old)


def test_a_model_file_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").symlink_to("/proc/self/mem")  # an error of reading for root as well
    with pytest.raises(ModelFilesError, match=r"model\.safetensors: .*error.*make it readable, or move it out"):
        fingerprint([tmp_path])


@pytest.mark.parametrize("call", ["scandir", "stat"])
def test_a_folder_of_a_model_that_cannot_be_read_is_named(
    call: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It was left out of the hash, or ended a benchmark with a traceback. For root every folder can be read."""
    (tmp_path / "text_encoder").mkdir()
    (tmp_path / "text_encoder/model.safetensors").write_bytes(b"")
    original = getattr(os, call)

    def denied(path: Any, **options: Any) -> Any:
        if str(path) == str(tmp_path / "text_encoder" / ("" if call == "scandir" else "model.safetensors")):
            raise PermissionError(errno.EACCES, "Permission denied", str(path))
        return original(path, **options)

    monkeypatch.setattr(os, call, denied)
    with pytest.raises(ModelFilesError, match=r"text_encoder.*: permission denied, but the files of a model"):
        fingerprint([tmp_path])


# --- embeddings that a manifest brings ---


@pytest.fixture
def flux(signs: Path, config: Config) -> tuple[Any, Example]:
    given = config()
    return load_model(given.model), next(iter(load_dataset(given.data, "data", ())))


def test_embeddings_of_a_manifest_in_every_layout(flux: tuple[Any, Example], tmp_path: Path) -> None:
    """[S, D], [1, S, D], and a dict with or without the pooled vector; what is missing is encoded."""
    model, example = flux
    made = model.text.rows([example.prompt])[0]
    text, pooled = made["text"] + 1, made["pooled"] + 2
    layouts: dict[str, Any] = {
        "flat": text,
        "batched": text[None],
        "dict": {"prompt_embeds": text[None], "text_ids": torch.zeros(24, 3)},
        "whole": {"prompt_embeds": text, "pooled_prompt_embeds": pooled[None]},
    }
    for name, content in layouts.items():
        torch.save(content, tmp_path / f"{name}.pt")
        tensors = model.encode([replace(example, embedding_path=tmp_path / f"{name}.pt")], 30.0).tensors
        assert torch.equal(tensors["text"][0], text), name
        assert torch.equal(tensors["pooled"][0], pooled if name == "whole" else made["pooled"]), name
    both = model.encode([replace(example, embedding_path=tmp_path / "flat.pt"), example], 30.0).tensors
    assert torch.equal(both["text"], torch.stack([text, made["text"]]))


def test_embeddings_that_do_not_fit_are_refused(flux: tuple[Any, Example], tmp_path: Path) -> None:
    model, example = flux
    file = tmp_path / "t5.pt"
    torch.save(model.text.rows([example.prompt])[0]["text"][:20], file)
    with pytest.raises(ModelFilesError, match=r"prompt_embeds of \(20, 64\).*set model.max_sequence_length=20"):
        model.encode([replace(example, embedding_path=file)], 30.0)
    torch.save({"prompt_embeds": torch.zeros(20, 64), "pooled_prompt_embeds": torch.zeros(64)}, file)
    model.encode([example], 30.0)
    with pytest.raises(ModelFilesError, match=r"t5.pt: prompt_embeds of \(20, 64\).*earlier texts have \(24, 64\)"):
        model.encode([replace(example, embedding_path=file)], 30.0)
    torch.save(torch.zeros(4), file)
    with pytest.raises(ModelFilesError, match="must have 2 dimensions"):
        given_embeddings(file)
    torch.save({"other": torch.zeros(4)}, file)
    with pytest.raises(ModelFilesError, match="no dict with prompt_embeds"):
        given_embeddings(file)
    file.write_text("no torch file")
    with pytest.raises(ModelFilesError, match="no torch file of tensors"):
        given_embeddings(file)


def test_a_manifest_names_its_embeddings(signs: Path, tmp_path: Path) -> None:
    source = next((signs / "prompts").glob("*_source.png"))
    entry = {
        "image_path": str(source),
        "mask_path": str(source).replace("_source", "_mask"),
        "prompt": "x",
        "t5_embedding_path": "t5.pt",
    }
    (tmp_path / "m.json").write_text(json.dumps([entry]), encoding="utf-8")
    section = {"format": "manifest", "path": str(tmp_path / "m.json"), "resolution": [32, 64]}
    data = parse_run(small_run(signs, tmp_path, data=section)).data
    with pytest.raises(ValueError, match=r"t5.pt: no such file of embeddings"):
        load_dataset(data)
    torch.save(torch.zeros(24, 64), tmp_path / "t5.pt")
    assert load_dataset(data)[0].embedding_path == tmp_path / "t5.pt"


def embedded(signs: Path, folder: Path, model: Any) -> dict[str, Any]:
    """Manifest sections of `targets` and `held_out`, every example with what T5 makes of its prompt in a file."""
    sections: dict[str, Any] = {}
    for name in ("targets", "held_out"):
        entries: list[dict[str, str]] = []
        for source in sorted((signs / name).glob("*_source.png")):
            prompt, file = f"a sign, {source.stem}", folder / f"{name}-{source.stem}.pt"
            torch.save(model.text.rows([prompt])[0]["text"], file)
            mask = str(source).replace("_source", "_mask")
            entries.append({"image": str(source), "mask": mask, "prompt": prompt, "t5_embedding_path": file.name})
        (folder / f"{name}.json").write_text(json.dumps(entries), encoding="utf-8")
        sections[name] = {"format": "manifest", "path": str(folder / f"{name}.json"), "resolution": [32, 64]}
    return sections


def without_t5(model: Path) -> None:
    for part in ("text_encoder_2", "tokenizer_2"):
        shutil.rmtree(model / part)


@pytest.mark.parametrize("freed", [pytest.param(False, marks=pytest.mark.full), True])
def test_t5_is_not_loaded_where_every_example_brings_its_states(freed: bool, signs: Path, tmp_path: Path) -> None:
    """Warm-up, rollouts and evaluation of held-out examples: the same weights, without T5 on the machine."""
    model = copied("flux_fill", tmp_path / "model")
    run = run_of(signs, tmp_path, "flux_fill", algorithm__sft_steps=1, training__max_steps=2, warmup_data=None)
    sections = embedded(signs, tmp_path, load_model(parse_run(run).model))
    run |= {"data": sections["targets"], "evaluation": {**run["evaluation"], "data": sections["held_out"]}}
    run["model"]["free_text_encoders"] = freed
    listed = json.loads((tmp_path / "targets.json").read_text(encoding="utf-8"))
    encoded = [{key: value for key, value in entry.items() if key != "t5_embedding_path"} for entry in listed]
    (tmp_path / "encoded.json").write_text(json.dumps(encoded), encoding="utf-8")
    whole = {**run, "name": "encoded", "data": {**run["data"], "path": str(tmp_path / "encoded.json")}}
    with_t5, _ = train(parse_run(whole))
    without_t5(model)
    without, records = train(parse_run(run))
    assert without.model.text.encoders.keys() == (set() if freed else {"pooled"})  # type: ignore[attr-defined]
    assert same_weights(weights(with_t5), weights(without))
    assert [record["phase"] for record in records if record["kind"] == "train"] == ["warmup", "rl"]
    with pytest.raises(ModelFilesError, match="cannot load text_encoder_2/"):
        train(parse_run({**whole, "name": "again"}))


@pytest.mark.parametrize("section", ["data", "warmup_data", "evaluation"])
def test_t5_is_loaded_for_one_prompt_without_states(section: str, signs: Path, tmp_path: Path) -> None:
    model = copied("flux_fill", tmp_path / "model")
    run = run_of(signs, tmp_path, "flux_fill")
    sections = embedded(signs, tmp_path, load_model(parse_run(run).model))
    listed = json.loads((tmp_path / "held_out.json").read_text(encoding="utf-8"))
    del listed[-1]["t5_embedding_path"]
    (tmp_path / "one.json").write_text(json.dumps(listed), encoding="utf-8")
    without_t5(model)
    lacking = {**sections["held_out"], "path": str(tmp_path / "one.json")}
    run |= {"data": sections["targets"], "warmup_data": None, "evaluation": {**run["evaluation"], "data": None}}
    changed = {"evaluation": {**run["evaluation"], "data": lacking}} if section == "evaluation" else {section: lacking}
    with pytest.raises(ModelFilesError, match="cannot load text_encoder_2/"):
        train(parse_run({**run, **changed}))


def test_t5_is_not_loaded_to_evaluate_and_sample_such_examples(signs: Path, tmp_path: Path) -> None:
    model = copied("flux_fill", tmp_path / "model")
    run = run_of(signs, tmp_path, "flux_fill")
    section = embedded(signs, tmp_path, load_model(parse_run(run).model))["held_out"]
    without_t5(model)
    (tmp_path / "run.yaml").write_text(json.dumps({**run, "data": section, "warmup_data": None}), encoding="utf-8")
    of_run = ("--config", tmp_path / "run.yaml", "--out")
    outcome = retouch("eval", *of_run, tmp_path / "evaluated", "--data", section["path"])
    assert outcome.code == 0, outcome.err
    outcome = retouch("sample", *of_run, tmp_path / "samples", "--data", section["path"])
    assert outcome.code == 0, outcome.err
    entries = json.loads(Path(section["path"]).read_text(encoding="utf-8"))
    assert len(list((tmp_path / "samples").iterdir())) == len(entries)
    image, mask = entries[0]["image"], entries[0]["mask"]
    outcome = retouch("sample", *of_run, tmp_path / "one", "--image", image, "--mask", mask, "--prompt", "new")
    assert outcome.code == 2 and "cannot load text_encoder_2/" in outcome.err


def test_states_of_another_t5_are_refused(flux: tuple[Any, Example], tmp_path: Path) -> None:
    model, example = flux
    torch.save(torch.zeros(24, 48), tmp_path / "t5.pt")
    with pytest.raises(ModelFilesError, match=r"t5.pt: prompt_embeds of \(24, 48\), .* takes a width of 64; encode"):
        model.encode([replace(example, embedding_path=tmp_path / "t5.pt")], 30.0)
