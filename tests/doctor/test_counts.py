"""What the doctor counts and expects of files is what the run has and loads."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file

from retouch.adapters.trainee import make_trainable
from retouch.config import RunConfig, load_run, parse_run
from retouch.config.model_sections import Model
from retouch.doctor.memory import checkpoint_bytes, count_weights, device_bytes, kept_checkpoints
from retouch.doctor.model import PIPELINES, Found, find_model
from retouch.engine.checkpoint import complete_checkpoints
from retouch.models import FAMILIES, load_model
from retouch.models.loading import ModelFilesError, tiny_path
from tests.tiny_models import tiny_model

PARTS = [
    (family, part)
    for family, (_, networks) in PIPELINES.items()
    for part in [*networks, *(n.replace("text_encoder", "tokenizer") for n in networks if "text" in n), "scheduler"]
]


def run_of(family: str, train: dict[str, Any], **model: Any) -> RunConfig:
    return parse_run(
        {
            "name": "t",
            "model": {"family": family, "path": tiny_model(family), "dtype": "fp32", "train": train, **model},
            "data": {"format": "self_bench", "path": "x", "resolution": [32, 64]},
            "algorithm": {"name": "grpo"},
            "rewards": {"preservation": {}},
        }
    )


def test_every_family_has_its_parts() -> None:
    assert PIPELINES.keys() == FAMILIES.keys()


@pytest.mark.parametrize(("family", "part"), PARTS)
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
    counted = count_weights(run, find_model(run.model))
    assert counted is not None and counted.whole and counted.host == 0


def test_shards_and_their_index(tmp_path: Path) -> None:
    """diffusers writes large networks in several files."""
    folder = Path(shutil.copytree(tiny_path("flux_fill"), tmp_path / "model"))
    model = run_of("flux_fill", {"kind": "full"}, path=str(folder)).model
    whole = find_model(model).weights["transformer"]
    load_model(model).network.save_pretrained(folder / "transformer", max_shard_size="1MB")  # type: ignore[operator]
    (folder / "transformer/diffusion_pytorch_model.safetensors").unlink(missing_ok=True)
    found = find_model(model)
    shards = sorted((folder / "transformer").glob("*.safetensors"))
    assert len(shards) > 1
    assert (found.problems, found.weights["transformer"]) == ([], whole)
    tensors = load_file(shards[0])
    name = sorted(tensors)[0]
    save_file({key: tensor for key, tensor in tensors.items() if key != name}, shards[0])
    assert find_model(model).problems == [f"transformer/: {name} is in none of the files that its index names"]
    shards[0].unlink()
    assert find_model(model).problems == [f"no transformer/{shards[0].name}"]


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize(
    "train", [{"kind": "full"}, {"kind": "lora", "rank": 3}, {"kind": "lora", "targets": ["to_q"]}], ids=str
)
def test_weights_are_counted_as_the_run_has_them(family: str, train: dict[str, Any]) -> None:
    run = run_of(family, train, offload_text_encoders=False)
    model: Any = load_model(run.model)
    parts = {model.vae, *(encoder.model for encoder in model.text.encoders.values())}  # one may serve twice
    before = sum(p.numel() for p in model.network.parameters())
    make_trainable(model.network, run.model.train, model.spec)
    counted = count_weights(run, find_model(run.model))
    assert counted is not None
    assert counted.trained == sum(p.numel() for p in model.network.parameters() if p.requires_grad)
    assert counted.frozen == (0 if train["kind"] == "full" else before)
    assert counted.others == sum(p.numel() for part in parts for p in part.parameters())
    assert (counted.host, counted.whole) == (0, True)
    offloaded = count_weights(run_of(family, train), find_model(run.model))
    assert offloaded is not None
    assert offloaded.others == sum(p.numel() for p in model.vae.parameters())
    assert offloaded.others + offloaded.host == counted.others


@pytest.mark.parametrize("family", ["flux_fill", "sd_inpaint"])
def test_a_style_adapter_is_not_counted_as_its_network(family: str) -> None:
    run = run_of(family, {"kind": "ip_adapter", "image_encoder": "tiny", "tokens": 4})
    assert count_weights(run, find_model(run.model)) is None


def test_the_released_network_is_counted_without_its_files() -> None:
    run = run_of("sd_inpaint", {"kind": "lora", "rank": 32}, dtype="bf16")
    counted = count_weights(run, Found(missing="elsewhere"))
    assert counted is not None
    assert (counted.trained, counted.frozen, counted.whole) == (6_377_472, 859_535_364, False)
    # fp32 weights, gradients and two moments of the adapters; bf16 network
    assert device_bytes(run, counted) == 16 * 6_377_472 + 2 * 859_535_364
    assert device_bytes(run, counted, world_size=2) == 20 * 6_377_472 + 2 * 859_535_364  # and the exchange of gradients
    sharded = run.model_copy(update={"training": run.training.model_copy(update={"sharding": "fsdp2"})})
    assert device_bytes(sharded, counted, world_size=2) == 8 * 6_377_472 + 859_535_364
    whole = sharded.training.model_copy(update={"shard_gradients": False})
    sharded = sharded.model_copy(update={"training": whole})
    assert device_bytes(sharded, counted, world_size=2) == 12 * 6_377_472 + 859_535_364
    assert count_weights(run, Found(problems=["no folder"])) is None


@pytest.mark.parametrize("kind", ["full", "lora"])
def test_a_checkpoint_is_as_large_as_counted(kind: str, finished: Callable[[str], Path]) -> None:
    run = load_run(finished(kind) / "config.yaml")
    counted = count_weights(run, find_model(run.model))
    assert counted is not None
    newest = complete_checkpoints(finished(kind) / "checkpoints")[-1]
    written = sum(file.stat().st_size for file in newest.rglob("*") if file.is_file())
    # headers and the state of each parameter: tenths of the small adapter, hundredths of the network
    assert checkpoint_bytes(run, counted) == pytest.approx(written, rel=0.25 if kind == "lora" else 0.05)


@pytest.mark.parametrize(("every", "keep", "kept"), [(0, None, 2), (1, None, 6), (1, 2, 4), (3, 2, 3)])
def test_checkpoints_that_stay(every: int, keep: int | None, kept: int) -> None:
    run = run_of("flux_fill", {"kind": "full"})
    training = run.training.model_copy(update={"max_steps": 4, "checkpoint_every": every, "keep_checkpoints": keep})
    assert kept_checkpoints(run.model_copy(update={"training": training})) == kept
