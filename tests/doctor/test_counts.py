"""What the doctor counts and expects of files is what the run has and loads."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file

from retouch.adapters.trainee import make_trainable
from retouch.config import ConfigError, RunConfig, derive, load_run, parse_run
from retouch.config.derived import kept_checkpoints
from retouch.config.run import EmaConfig
from retouch.data.formats.manifest import ManifestData
from retouch.doctor.data import needs_no_t5
from retouch.doctor.diagnosis import diagnose
from retouch.doctor.memory import (
    BYTES,
    Counted,
    checkpoint_bytes,
    count_released,
    count_weights,
    device_bytes,
    host_bytes,
    memory_parts,
    report_memory,
    traced_decode,
)
from retouch.doctor.model import FoundModel, find_model
from retouch.doctor.networks import build_networks
from retouch.engine.saved import complete_checkpoints
from retouch.families import FAMILIES
from retouch.families.base import FamilySpec, Model
from retouch.families.image_encoder import TINY
from retouch.families.loading import ModelFilesError, load_model
from retouch.families.meta import released_networks
from retouch.files.model_files import tiny_path
from retouch.registry import load_attribute
from tests.selection import cells, covering, rows
from tests.tiny_models import tiny_model

PARTS = [
    (family, part)
    for family, section in FAMILIES.items()
    for part in [
        *section.spec.networks,
        *(
            n.replace("text_encoder", "tokenizer")
            for n in section.spec.networks
            if "text" in n and not section.spec.tokenizer_in_processor
        ),
        "scheduler",
        *(["processor"] if section.spec.has_processor else []),
    ]
]


def run_of(family: str, train: dict[str, Any], path: str | None = None, **model: Any) -> RunConfig:
    return parse_run(
        {
            "name": "t",
            "model": {"family": family, "dtype": "fp32", "train": train, "path": path or tiny_model(family), **model},
            "data": {"format": "self_bench", "path": "x", "resolution": [32, 64]},
            "algorithm": {"name": "grpo"},
            "rewards": {"preservation": {}},
        }
    )


@pytest.mark.parametrize(("family", "part"), cells(PARTS, strength=1))
def test_what_must_be_there_is_what_is_loaded(family: str, part: str, tmp_path: Path) -> None:
    base = tiny_path(family)
    folder = Path(shutil.copytree(base if base.is_dir() else tiny_model(family), tmp_path / "model"))
    model: Model = run_of(family, {"kind": "lora"}, path=str(folder)).model
    assert find_model(model).problems == []
    shutil.rmtree(folder / part)
    [problem] = find_model(model).problems
    assert part in problem
    with pytest.raises(ModelFilesError, match=part):
        load_model(model)


def test_text_encoders_are_not_missed_where_their_embeddings_are(tmp_path: Path) -> None:
    folder = Path(shutil.copytree(tiny_path("flux_fill"), tmp_path / "model"))
    for part in ("text_encoder", "text_encoder_2", "tokenizer", "tokenizer_2"):
        shutil.rmtree(folder / part)
    train = {"kind": "lora"}
    assert len(find_model(run_of("flux_fill", train, path=str(folder)).model).problems) == 4
    run = run_of("flux_fill", train, path=str(folder), embeddings="somewhere")
    assert find_model(run.model).problems == []
    counted = counted_of(run)
    assert counted.whole and set(counted.others) == {"vae"} and host_bytes(run, counted) == 0


def test_t5_is_not_missed_where_examples_bring_its_states(tmp_path: Path) -> None:
    folder = Path(shutil.copytree(tiny_path("flux_fill"), tmp_path / "model"))
    without = Path(shutil.copytree(folder, tmp_path / "without"))
    for part in ("text_encoder_2", "tokenizer_2"):
        shutil.rmtree(without / part)
    entry = {"image": "a.png", "mask": "m.png", "prompt": "a sign"}
    data = {"format": "manifest", "path": str(tmp_path / "list.json"), "resolution": 64}
    run = parse_run({**run_of("flux_fill", {"kind": "lora"}, path=str(folder)).model_dump(mode="json"), "data": data})
    for own, spared in (({}, False), ({"t5_embedding_path": "t5.pt"}, True)):
        (tmp_path / "list.json").write_text(json.dumps([{**entry, **own}]), encoding="utf-8")
        assert needs_no_t5(run) is spared
        assert ("text_encoder_2" in {part["what"] for part in report_memory(run)["parts"]}) is not spared
        lines = diagnose(parse_run({**run.model_dump(mode="json"), "model": {"path": str(without), "dtype": "fp32"}}))
        assert {line.status for line in lines if line.what == "model"} == {"ok" if spared else "fix"}
    (tmp_path / "list.json").write_text("[", encoding="utf-8")
    assert not needs_no_t5(run)  # doctor reports the list in a line of its own


def test_examples_that_only_the_hub_can_list_are_not_embedded(monkeypatch: pytest.MonkeyPatch) -> None:
    def unreachable(section: object) -> None:
        raise ConfigError("data.path: given 'owner/data'; no such folder, and the hub cannot be reached")

    monkeypatch.setattr(ManifestData, "items", unreachable)
    assert not needs_no_t5(run_of("flux_fill", {"kind": "lora"}))


def test_shards_and_their_index(tmp_path: Path) -> None:
    """diffusers writes large networks in several files."""
    folder = Path(shutil.copytree(tiny_path("flux_fill"), tmp_path / "model"))
    model = run_of("flux_fill", {"kind": "full"}, path=str(folder)).model
    load_model(model).network.save_pretrained(folder / "transformer", max_shard_size="1MB")  # type: ignore[operator]
    (folder / "transformer/diffusion_pytorch_model.safetensors").unlink(missing_ok=True)
    found = find_model(model)
    shards = sorted((folder / "transformer").glob("*.safetensors"))
    assert len(shards) > 1
    assert found.problems == []
    tensors = load_file(shards[0])
    name = sorted(tensors)[0]
    save_file({key: tensor for key, tensor in tensors.items() if key != name}, shards[0])
    assert find_model(model).problems == [f"transformer/: {name} is in none of the files that its index names"]
    shards[0].unlink()
    assert find_model(model).problems == [f"no transformer/{shards[0].name}"]


TRAINED: list[dict[str, Any]] = [
    {"kind": "full"},
    {"kind": "lora", "rank": 3},
    {"kind": "lora", "targets": ["to_q"]},
    *({"kind": "ip_adapter", "image_encoder": "tiny", "weights": w, "tokens": 5} for w in ("all", "kv")),
    {"kind": "ip_adapter", "image_encoder": "tiny", "weights": "kv_lora", "rank": 3},
    {"kind": "ip_adapter", "image_encoder": "tiny", "weights": "no_last_layer", "query_former": True},
]


TRAINED_BY_FAMILY = [
    (i, family)
    for i, train in enumerate(TRAINED)
    for family in FAMILIES
    if train["kind"] != "ip_adapter" or FAMILIES[family].spec.adapter
]


def counted_of(run: RunConfig, found: FoundModel | None = None) -> Counted:
    counted = count_weights(run, build_networks(run.model, found or find_model(run.model)))
    assert counted is not None
    return counted


@pytest.mark.parametrize(
    ("train", "family"),
    [
        pytest.param(TRAINED[i], f, marks=() if (i, f) in covering(TRAINED_BY_FAMILY, strength=1) else pytest.mark.full)
        for i, f in TRAINED_BY_FAMILY
    ],
    ids=str,
)
def test_weights_are_counted_as_the_run_has_them(family: str, train: dict[str, Any]) -> None:
    if family == "sd_inpaint" and "no_last_layer" in train.values():
        pytest.skip("its projection is one layer")
    run = run_of(family, train, offload_text_encoders=False)
    model: Any = load_model(run.model)
    parts = {model.vae, *(encoder.model for encoder in model.text.encoders.values())}  # one may serve twice
    if train["kind"] == "ip_adapter":
        parts.add(model.image_encoder.model)
    before = sum(p.numel() for p in model.network.parameters())
    make_trainable(model.network, run.model.train, model.spec)
    counted = counted_of(run)
    every = sum(p.numel() for p in model.network.parameters())
    assert counted.trained == sum(p.numel() for p in model.network.parameters() if p.requires_grad)
    assert counted.frozen == (0 if train["kind"] == "full" else before)
    assert counted.trained + counted.frozen + counted.adapter == every
    buffers = sum(b.numel() for b in model.network.buffers())
    assert sum(counted.others.values()) == sum(p.numel() for part in parts for p in part.parameters()) + buffers
    assert counted.whole
    assert counted.waiting == ({"image_encoder"} if train["kind"] == "ip_adapter" else set())
    offloaded = counted_of(run_of(family, train))
    assert offloaded.others == counted.others
    waiting = {name for name in counted.others if name.startswith("text_")}
    assert offloaded.waiting == counted.waiting | waiting


FLUX, SIGLIP = 11_902_391_360, 1152
TOKEN = 4096 * (2 * SIGLIP + 1)  # the last layer of a head makes 4096 numbers of 2304 and a bias
FIRST = 2 * SIGLIP * (SIGLIP + 1) + 2 * 4096  # the first layer, and the norm
KV = 57 * 2 * 3072 * 4096
FORMER_LAST = 32 * TOKEN
FORMER = 128 * 4096 + 2 * SIGLIP * (SIGLIP + 1) + 4 * 4096 * (4096 + 1) + 4 * 4096  # beside its last layer


@pytest.mark.parametrize(
    ("train", "trained", "frozen"),
    [
        ({"weights": "all"}, FIRST + 128 * TOKEN + KV, 0),
        ({"weights": "all", "query_former": True}, FIRST + 128 * TOKEN + KV + FORMER + FORMER_LAST, 0),
        ({"weights": "all", "tokens": 16}, FIRST + 16 * TOKEN + KV, 0),
        ({"weights": "no_last_layer"}, FIRST + KV, 128 * TOKEN),
        ({"weights": "no_last_layer", "query_former": True}, FIRST + KV + FORMER, 128 * TOKEN + FORMER_LAST),
        ({"weights": "kv"}, KV, FIRST + 128 * TOKEN),
        ({"weights": "kv", "tokens": 16}, KV, FIRST + 16 * TOKEN),
        ({"weights": "kv_lora", "rank": 32}, 57 * 2 * 32 * (3072 + 4096), FIRST + 128 * TOKEN + KV),
    ],
    ids=str,
)
def test_the_style_adapter_of_the_released_network_by_hand(train: dict[str, Any], trained: int, frozen: int) -> None:
    """Of the four kinds, from the sizes of the layers: 2.65 B, 3.02 B, 1.44 B, 1.51 B, 1.43 B and 26 M are trained."""
    default = {"kind": "ip_adapter", **train}
    run = run_of("flux_fill", default, dtype="bf16", path="black-forest-labs/FLUX.1-Fill-dev")
    data = run.data.model_copy(update={"resolution": 512})
    run = run.model_copy(update={"data": data, "ema": None})
    counted = count_released(run)
    assert counted is not None and (counted.trained, counted.adapter, counted.frozen) == (trained, frozen, FLUX)
    assert counted.whole and counted.others.keys() == {"vae", "text_encoder", "text_encoder_2", "image_encoder"}
    assert counted.others["image_encoder"] == 428_225_600
    counted = replace(counted, others={})
    # fp32 weights, gradients and two moments; frozen ones in bf16
    assert device_bytes(run, counted) == 16 * trained + 2 * (frozen + FLUX)
    averaged = run.model_copy(update={"ema": EmaConfig()})
    assert device_bytes(averaged, counted) == 20 * trained + 2 * (frozen + FLUX)
    held = parse_run({**run.model_dump(mode="json"), "algorithm": {"name": "nft", "kl_weight": 0.1}})
    assert device_bytes(held, counted) == 24 * trained + 2 * (frozen + FLUX)  # the old policy, and the reference
    assert device_bytes(run, counted, world_size=2) == 20 * trained + 2 * (frozen + FLUX)


def test_the_parts_are_the_whole() -> None:
    run = run_of("flux_fill", {"kind": "ip_adapter", "image_encoder": "tiny", "weights": "kv"})
    run = run.model_copy(update={"ema": EmaConfig()})
    counted = counted_of(run)
    parts = memory_parts(run, counted, 2)
    assert [part.what for part in parts] == [
        *("style adapter, trained", "gradients", "optimizer", "ema", "exchange of gradients"),
        *("style adapter, frozen", "network, frozen", "vae", "text_encoder", "text_encoder_2", "image_encoder"),
    ]
    assert sum(p.bytes for p in parts) == device_bytes(run, counted, 2) + host_bytes(run, counted)
    state = sum(p.bytes for p in parts if p.weights == counted.trained)
    assert state == (derive(run).state_bytes_per_weight + 4) * counted.trained
    assert [p.what for p in parts if p.waits] == ["text_encoder", "text_encoder_2", "image_encoder"]
    small = run.model_copy(
        update={
            "optimizer": run.optimizer.model_copy(update={"state": "8bit"}),
            "model": run.model.model_copy(update={"offload_vae": True}),
        }
    )
    mine = {p.what: p for p in memory_parts(small, counted_of(small), 2)}
    assert mine["optimizer"].bytes == 2 * counted.trained
    assert [p.what for p in mine.values() if p.waits] == ["vae", "text_encoder", "text_encoder_2", "image_encoder"]


def test_scales_for_another_number_of_blocks_are_seen() -> None:
    run = run_of("flux_fill", {"kind": "ip_adapter", "image_encoder": "tiny", "scale": [1.0, 0.5]})
    with pytest.raises(ConfigError, match=r"given 2 factors; the network has 6 blocks: give one for each"):
        counted_of(run)


def test_the_released_network_is_counted_without_its_files() -> None:
    run = run_of("sd_inpaint", {"kind": "lora", "rank": 32}, dtype="bf16")
    counted = counted_of(run, FoundModel(missing="elsewhere"))
    assert (counted.trained, counted.frozen, counted.whole) == (6_377_472, 859_535_364, True)
    assert counted.others == {"vae": 83_653_863, "text_encoder": 123_060_480}
    counted = replace(counted, others={})
    # fp32 weights, gradients and two moments of the adapters; bf16 network
    assert device_bytes(run, counted) == 16 * 6_377_472 + 2 * 859_535_364
    assert device_bytes(run, counted, world_size=2) == 20 * 6_377_472 + 2 * 859_535_364  # and the exchange of gradients
    sharded = run.model_copy(update={"training": run.training.model_copy(update={"sharding": "fsdp2"})})
    assert device_bytes(sharded, counted, world_size=2) == 8 * 6_377_472 + 859_535_364
    for sharding, a_weight, frozen in (("fsdp2", 12, 1), ("zero2", 16, 2)):
        training = sharded.training.model_copy(update={"sharding": sharding, "shard_gradients": False})
        whole = sharded.model_copy(update={"training": training})
        assert device_bytes(whole, counted, world_size=2) == a_weight * 6_377_472 + frozen * 859_535_364
    zero2 = sharded.model_copy(update={"training": sharded.training.model_copy(update={"sharding": "zero2"})})
    # weights, half of gradients, moments and DeepSpeed's copy of the weights
    assert device_bytes(zero2, counted, world_size=2) == 12 * 6_377_472 + 2 * 859_535_364
    assert count_weights(run, build_networks(run.model, FoundModel(problems=["no folder"]))) is None
    adapter = run_of("sd_inpaint", {"kind": "ip_adapter", "image_encoder": "some/encoder"})
    assert count_weights(adapter, build_networks(adapter.model, FoundModel(missing="elsewhere"))) is None


@pytest.mark.parametrize(
    ("family", "train", "options"),
    [
        ("flux_fill", {"kind": "lora", "targets": ["attn.to_q", "single_transformer_blocks.7.proj_mlp"]}, {}),
        ("sd3", {"kind": "full"}, {"offload_text_encoders": False}),
        ("sd_inpaint", {"kind": "lora"}, {"quantize": "nf4", "offload_vae": True}),
        ("sd_inpaint", {"kind": "ip_adapter", "weights": "kv_lora", "rank": 3}, {"dtype": "bf16"}),
        *(
            pytest.param(family, {"kind": "ip_adapter", "query_former": True, "tokens": 16}, {}, marks=pytest.mark.full)
            for family in ("flux_fill", "flux_dev", "flux_kontext", "qwen_image")
        ),
    ],
)
def test_stored_counts_are_those_of_the_networks(family: str, train: dict[str, Any], options: dict[str, Any]) -> None:
    run = run_of(family, train, FAMILIES[family].spec.hub_ids[0], **options)
    counted = count_released(run)
    assert counted is not None and counted == counted_of(run, FoundModel(missing="elsewhere")) and counted.whole


DECODED = [(family, dtype, recomputed) for family in FAMILIES for dtype in BYTES for recomputed in (False, True)]
OTHER_KINDS = {("flux2_klein", "fp16", True), ("qwen_image", "bf16", False), ("qwen_image_21", "fp32", True)}


@pytest.mark.parametrize(("family", "dtype", "recomputed"), rows(DECODED, OTHER_KINDS))
def test_a_stored_decode_is_that_of_the_network(family: str, dtype: str, recomputed: bool) -> None:
    """With gradient, at a size that was not traced."""
    spec = FAMILIES[family].spec
    vae = load_attribute(spec.model).kept("vae", released_networks(replace(spec, released=decoder_of(spec)))["vae"])
    traced = traced_decode(spec, vae, (512, 768), dtype)[recomputed]
    assert decoded(family, dtype=dtype, recomputed=recomputed).decoder == traced > 0


def decoder_of(spec: FamilySpec) -> dict[str, Any]:
    return {"vae": spec.released["vae"]}


def decoded(family: str, dtype: str = "bf16", recomputed: bool = False, **data: Any) -> Counted:
    """The stored counts of a run of reward gradients on images of 512 x 768."""
    run = run_of(family, {"kind": "lora"}, FAMILIES[family].spec.hub_ids[0], dtype=dtype).model_dump(mode="json")
    run |= {"algorithm": {"name": "reward_gradient"}, "rewards": {"seam": {}}}
    run["data"] |= {"resolution": [512, 768], **data}
    run["rollout"] |= {"guidance_scale": 1.0}
    run["training"] |= {"gradient_checkpointing": recomputed}
    counted = count_released(parse_run(run))
    assert counted is not None
    return counted


def test_a_strip_above_the_image_is_decoded_with_it() -> None:
    whole = decoded("flux_fill", resolution=[512 + 64, 768]).decoder
    assert decoded("flux_fill", reference_strip=64).decoder == whole > decoded("flux_fill").decoder


def test_a_decode_in_tiles_is_not_counted_by_the_whole() -> None:
    run = run_of("flux_fill", {"kind": "lora"}, FAMILIES["flux_fill"].spec.hub_ids[0], vae_batch="tiles")
    assert count_released(run) is not None
    run = run.model_dump(mode="json") | {"algorithm": {"name": "reward_gradient"}, "rewards": {"seam": {}}}
    assert count_released(parse_run(run)) is None


def test_another_image_encoder_is_not_taken_for_the_released_one() -> None:
    train = {"kind": "ip_adapter", "image_encoder": "some/encoder"}
    assert count_released(run_of("flux_fill", train, FAMILIES["flux_fill"].spec.hub_ids[0])) is None


@pytest.mark.parametrize("family", FAMILIES.available())
def test_stored_counts_are_of_the_released_sizes_alone(family: str) -> None:
    run = run_of(family, {"kind": "lora"}, FAMILIES[family].spec.hub_ids[0])
    assert count_released(run) is not None
    for path in ("tiny", "some/model", "."):
        other = run.model.model_copy(update={"path": path})
        assert count_released(run.model_copy(update={"model": other})) is None


def test_check_memory_downloads_configs_and_nothing_else(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Of a hub id, stood in for by the tiny base; it counts what the folder itself does."""
    asked: list[str] = []

    def fetch(hub_id: str, file: str) -> str:
        asked.append(f"{hub_id}/{file}")
        base = {"some/model": tiny_path("flux_fill"), "some/encoder": TINY}[hub_id]
        (tmp_path / hub_id / file).parent.mkdir(parents=True, exist_ok=True)
        return str(shutil.copy(base / file, tmp_path / hub_id / file))

    monkeypatch.setattr("huggingface_hub.hf_hub_download", fetch)
    here = run_of("flux_fill", {"kind": "ip_adapter", "image_encoder": "tiny"}, path="tiny")
    train: dict[str, Any] = {"kind": "ip_adapter", "image_encoder": "some/encoder"}
    there = run_of("flux_fill", train).model_dump(mode="json")
    there["model"]["path"], there["data"]["resolution"] = "some/model", 512
    report = report_memory(parse_run(there))
    assert asked == [
        *(f"some/model/{part}/config.json" for part in FAMILIES["flux_fill"].spec.networks),
        "some/encoder/config.json",
    ]
    assert report["complete"] and report == report_memory(here)


def test_a_hub_id_whose_configs_cannot_be_had(monkeypatch: pytest.MonkeyPatch) -> None:
    def fetch(hub_id: str, file: str) -> str:
        raise OSError("401 Client Error: it is gated.\nmore")

    monkeypatch.setattr("huggingface_hub.hf_hub_download", fetch)
    run = run_of("flux_fill", {"kind": "lora"}).model_dump(mode="json")
    run["data"]["resolution"], run["model"]["path"] = 512, "some/model"
    with pytest.raises(
        ConfigError, match=r"some/model: its transformer/config.json cannot be had: 401 Client Error: it"
    ):
        report_memory(parse_run(run))
    run["model"]["path"] = "black-forest-labs/FLUX.1-Fill-dev"  # its sizes come with the package
    report = report_memory(parse_run(run))
    assert report["complete"]
    assert {"what": "network, frozen", "weights": FLUX, "bytes": 4 * FLUX, "waits": False} in report["parts"]


@pytest.mark.parametrize("weights", ["all", "no_last_layer", "kv", "kv_lora"])
def test_files_of_an_adapter_are_as_large_as_counted(weights: str, tmp_path: Path) -> None:
    train = {"kind": "ip_adapter", "image_encoder": "tiny", "weights": weights}
    run = run_of("flux_fill", train, dtype="bf16")
    model = load_model(run.model)
    trainee = make_trainable(model.network, run.model.train, model.spec)
    trainee.save({n: p for n, p in model.network.named_parameters() if p.requires_grad}, tmp_path)
    written = sum(file.stat().st_size for file in tmp_path.iterdir())
    counted = counted_of(run)
    optimizer = 8 * counted.trained
    assert checkpoint_bytes(run, counted) - optimizer == pytest.approx(written, rel=0.02)
    averaged = run.model_copy(update={"ema": EmaConfig()})
    assert checkpoint_bytes(averaged, counted) - optimizer == pytest.approx(2 * written, rel=0.02)


@pytest.mark.parametrize("kind", ["full", "lora"])
def test_a_checkpoint_is_as_large_as_counted(kind: str, finished: Callable[[str], Path]) -> None:
    run = load_run(finished(kind) / "config.yaml")
    counted = counted_of(run)
    newest = complete_checkpoints(finished(kind) / "checkpoints")[-1]
    written = sum(file.stat().st_size for file in newest.rglob("*") if file.is_file())
    # headers and the state of each parameter: tenths of the small adapter, hundredths of the network
    assert checkpoint_bytes(run, counted) == pytest.approx(written, rel=0.25 if kind == "lora" else 0.05)


@pytest.mark.parametrize(("every", "keep", "kept"), [(0, None, 2), (1, None, 6), (1, 2, 4), (3, 2, 3)])
def test_checkpoints_that_stay(every: int, keep: int | None, kept: int) -> None:
    run = run_of("flux_fill", {"kind": "full"})
    training = run.training.model_copy(update={"max_steps": 4, "checkpoint_every": every, "keep_checkpoints": keep})
    assert kept_checkpoints(run.model_copy(update={"training": training})) == kept
