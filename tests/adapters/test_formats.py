"""Files of style adapters: every layout read to the last key, written as other programs want them, or refused."""

from __future__ import annotations

import json
import logging
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from diffusers import FluxTransformer2DModel
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor

import retouch.adapters
from retouch.adapters.formats import AdapterFileError, read_adapter, write_bin, write_safetensors
from retouch.adapters.shape import AdapterShape
from retouch.config import ConfigError
from retouch.files.model_files import tiny_path

SHAPE = AdapterShape("mlp", 24, 5, 64, (128,) * 6)
FORMER = AdapterShape("mlp+query_former", 24, 5, 64, (128,) * 6)
TENCENT = AdapterShape("linear", 24, 4, 64, (48, 96, 48))


def drawn(shape: AdapterShape, seed: int = 0, dtype: torch.dtype = torch.float32) -> dict[str, Tensor]:
    draw = torch.Generator().manual_seed(seed)
    return {key: torch.randn(size, generator=draw).to(dtype) for key, size in shape.tensors().items()}


def nested(tensors: dict[str, Tensor], **names: str) -> dict[str, dict[str, Tensor]]:
    """As other programs pickle them; keyword arguments rename the parts."""
    found: dict[str, dict[str, Tensor]] = {}
    for key, tensor in tensors.items():
        part, _, rest = key.partition(".")
        found.setdefault(names.get(part, part), {})[rest] = tensor
    return found


LEGACY = {"image_proj": "image_proj_mlp", "ip_adapter": "attn_adapter"}


# --- names and order ---


def test_keys_are_those_of_comfyui_and_in_its_order(tmp_path: Path) -> None:
    """As ComfyUI-IPAdapter-Flux loads them, strictly, into its own modules."""
    write_bin(tmp_path / "a.bin", drawn(SHAPE))
    found = torch.load(tmp_path / "a.bin", weights_only=True)
    assert list(found) == ["image_proj", "ip_adapter"]
    layers = [f"{layer}.{part}" for layer in ("proj.0", "proj.2", "norm") for part in ("weight", "bias")]
    assert list(found["image_proj"]) == layers
    assert list(found["ip_adapter"]) == [f"{i}.to_{x}_ip.weight" for i in range(6) for x in "kv"]
    assert {k: tuple(t.shape) for k, t in found["image_proj"].items()} == {
        "proj.0.weight": (48, 24),
        "proj.0.bias": (48,),
        "proj.2.weight": (5 * 64, 48),
        "proj.2.bias": (5 * 64,),
        "norm.weight": (64,),
        "norm.bias": (64,),
    }
    assert {tuple(t.shape) for t in found["ip_adapter"].values()} == {(128, 64)}


def test_keys_of_the_released_calligrapher(tmp_path: Path) -> None:
    write_bin(tmp_path / "a.bin", drawn(FORMER))
    found = torch.load(tmp_path / "a.bin", weights_only=True)
    assert set(found) == {"image_proj_mlp", "attn_adapter", "image_proj_qformer"}
    assert {k: tuple(t.shape) for k, t in found["image_proj_qformer"].items()} == {
        "query_embeds": (5, 64),
        "id_proj.0.weight": (48, 24),
        "id_proj.0.bias": (48,),
        "id_proj.2.weight": (32 * 64, 48),
        "id_proj.2.bias": (32 * 64,),
        "cross_attn.in_proj_weight": (192, 64),
        "cross_attn.in_proj_bias": (192,),
        "cross_attn.out_proj.weight": (64, 64),
        "cross_attn.out_proj.bias": (64,),
        "cross_attn_norm.weight": (64,),
        "cross_attn_norm.bias": (64,),
        "norm.weight": (64,),
        "norm.bias": (64,),
    }


def test_keys_of_tencent_are_odd(tmp_path: Path) -> None:
    write_bin(tmp_path / "a.bin", drawn(TENCENT))
    found = torch.load(tmp_path / "a.bin", weights_only=True)
    assert list(found) == ["image_proj", "ip_adapter"]
    assert list(found["image_proj"]) == ["proj.weight", "proj.bias", "norm.weight", "norm.bias"]
    assert list(found["ip_adapter"]) == [f"{i}.to_{x}_ip.weight" for i in (1, 3, 5) for x in "kv"]
    assert found["ip_adapter"]["3.to_v_ip.weight"].shape == (96, 64)


# --- round trips ---


@pytest.mark.parametrize("shape", [SHAPE, FORMER, TENCENT], ids=lambda s: s.head)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_bin_to_safetensors_to_bin_is_bit_equal(shape: AdapterShape, dtype: torch.dtype, tmp_path: Path) -> None:
    tensors, about = drawn(shape, dtype=dtype), {"family": "flux_fill", "image_encoder": "somebody/encoder"}
    there, back = tmp_path / "there" / "a.bin", tmp_path / "back" / "a.bin"  # the name is written into the file
    for path in (there, back):
        path.parent.mkdir()
    write_bin(there, tensors)
    first = read_adapter(there)
    write_safetensors(tmp_path / "a.safetensors", first.tensors, about)
    second = read_adapter(tmp_path / "a.safetensors")
    write_bin(back, second.tensors)
    assert there.read_bytes() == back.read_bytes()
    third = read_adapter(back)
    for file in (first, second, third):
        assert file.shape == shape
        assert list(file.tensors) == list(tensors)
        assert all(file.tensors[k].dtype == dtype and torch.equal(file.tensors[k], t) for k, t in tensors.items())
    assert (first.metadata, second.metadata) == ({}, about)


def test_weights_that_share_memory_are_all_written(tmp_path: Path) -> None:
    """safetensors refuses them, and accelerate's saving drops all but one without a word."""
    tensors = drawn(SHAPE)
    block = tensors["ip_adapter.0.to_k_ip.weight"]
    tensors["ip_adapter.1.to_k_ip.weight"] = block
    tensors["ip_adapter.2.to_k_ip.weight"] = block[:]
    write_safetensors(tmp_path / "a.safetensors", tensors, {})
    write_bin(tmp_path / "a.bin", tensors)
    for name in ("a.safetensors", "a.bin"):
        found = read_adapter(tmp_path / name).tensors
        assert all(torch.equal(found[k], t) for k, t in tensors.items())


# --- what others wrote ---


def test_legacy_reads(tmp_path: Path) -> None:
    tensors = drawn(SHAPE)
    torch.save(nested(tensors, **LEGACY), tmp_path / "legacy.bin")
    found = read_adapter(tmp_path / "legacy.bin")
    assert found.shape == SHAPE
    assert all(torch.equal(found.tensors[k], t) for k, t in tensors.items())


@torch.no_grad()
def test_the_three_part_file_works_with_its_second_head(tmp_path: Path) -> None:
    """Half of the style is in the query-former: leaving it out would draw, and draw something else."""
    torch.save(nested(drawn(FORMER), **LEGACY), tmp_path / "calligrapher.bin")
    network: Any = FluxTransformer2DModel.from_pretrained(tiny_path("flux_fill") / "transformer")
    network.float()
    retouch.adapters.load(tmp_path / "calligrapher.bin").attach(network)
    vectors = torch.randn(2, 24)
    projection = network.encoder_hid_proj
    tokens = projection(vectors)[0]
    torch.testing.assert_close(tokens, projection.mlp(vectors) + projection.qformer(vectors))
    assert float((tokens - projection.mlp(vectors)).abs().max()) > 0.1


EXTRA = ["attn_adapter.0.norm_added_k.weight", "attn_adapter.5.to_q_ip.weight", "image_proj_mlp.position_ids", "step"]
"""Of a released file: a norm that has no parameters here, a matrix that nobody reads, a buffer, a number beside it."""


@pytest.mark.parametrize("end", [".bin", ".safetensors"])
def test_tensors_that_no_adapter_has_are_named_and_left_out(
    end: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    tensors = drawn(FORMER)
    parts: dict[str, Any] = nested(tensors, **LEGACY)
    for key in EXTRA[:3]:
        part, _, rest = key.partition(".")
        parts[part][rest] = torch.ones(3, dtype=torch.int64 if rest == "position_ids" else torch.float32)
    path = tmp_path / f"calligrapher{end}"
    if end == ".bin":
        torch.save({**parts, "step": torch.tensor(7)}, path)
    else:
        flat = {f"{part}.{key}": tensor for part, inside in parts.items() for key, tensor in inside.items()}
        save_file({**flat, "step": torch.tensor(7)}, path)
    with caplog.at_level(logging.WARNING):
        found = retouch.adapters.load(path).file
    assert (found.shape, list(found.tensors), sorted(found.unused)) == (FORMER, list(tensors), sorted(EXTRA))
    assert all(torch.equal(found.tensors[key], tensor) for key, tensor in tensors.items())
    [message] = caplog.messages
    assert message.startswith(
        f"{path}: the file has tensors that the adapter has no parameter for (4), which are not used"
    )
    assert sum(key in message for key in EXTRA) == 3
    caplog.clear()
    write_bin(tmp_path / "plain.bin", tensors)
    assert retouch.adapters.load(tmp_path / "plain.bin").file.unused == ()
    assert caplog.messages == []


# --- refused ---


def test_a_scale_that_does_not_fit_leaves_the_network_as_it_was(tmp_path: Path) -> None:
    torch.save(nested(drawn(FORMER), **LEGACY), tmp_path / "calligrapher.bin")
    network: Any = FluxTransformer2DModel.from_pretrained(tiny_path("flux_fill") / "transformer")
    processors, adapter = dict(network.attn_processors), retouch.adapters.load(tmp_path / "calligrapher.bin")
    with pytest.raises(ConfigError, match="given 2 factors"):
        adapter.attach(network, [1.0, 1.0])
    assert dict(network.attn_processors) == processors
    adapter.attach(network)


def _pop(key: str) -> Callable[[dict[str, Tensor]], Any]:
    return lambda tensors: tensors.pop(key)


def _set(key: str, tensor: Tensor) -> Callable[[dict[str, Tensor]], Any]:
    return lambda tensors: tensors.update({key: tensor})


BROKEN = {
    "a projection less": (_pop("image_proj.proj.2.bias"), r"not a whole adapter .*missing: image_proj\.proj\.2\.bias"),
    "a block's value less": (_pop("ip_adapter.3.to_v_ip.weight"), r"missing: ip_adapter\.3\.to_v_ip\.weight"),
    "a block's key less": (_pop("ip_adapter.3.to_k_ip.weight"), r"ip_adapter\.3\.to_k_ip\.weight is missing"),
    "the norm less": (_pop("image_proj.norm.weight"), r"image_proj\.norm\.weight is missing"),
    "a bias more": (_set("ip_adapter.3.to_v_ip.bias", torch.ones(128)), r"unknown: ip_adapter\.3\.to_v_ip\.bias"),
    "a factor more": (
        _set("ip_adapter.3.to_v_ip.lora_A.weight", torch.ones(1, 64)),
        r"unknown: ip_adapter\.3\.to_v_ip\.lora_A\.weight",
    ),
    "another head": (_set("image_proj_conv.weight", torch.ones(1)), "has the parts image_proj, image_proj_conv, ip_a"),
    "another shape": (
        _set("ip_adapter.3.to_v_ip.weight", torch.ones(128, 63)),
        r"shape: ip_adapter\.3\.to_v_ip\.weight",
    ),
    "no matrix": (_set("ip_adapter.3.to_k_ip.weight", torch.ones(128)), r"ip_adapter\.3\.to_k_ip\.weight"),
    "integers": (
        _set("image_proj.norm.bias", torch.zeros(64, dtype=torch.int64)),
        r"no weights: image_proj\.norm\.bias",
    ),
    "not a number": (
        lambda tensors: tensors["image_proj.norm.bias"].__setitem__(7, torch.nan),
        r"image_proj\.norm\.bias contains NaN or Inf$",
    ),
}


@pytest.mark.parametrize("end", [".bin", ".safetensors"])
@pytest.mark.parametrize(("change", "problem"), BROKEN.values(), ids=BROKEN)
def test_a_file_that_is_not_whole_is_refused_before_the_model_is_touched(
    end: str, change: Callable[[dict[str, Tensor]], Any], problem: str, tmp_path: Path
) -> None:
    tensors = drawn(SHAPE)
    change(tensors)
    path = tmp_path / f"broken{end}"
    if end == ".bin":
        torch.save(nested(tensors), path)
    else:
        save_file(tensors, path)
    with pytest.raises(AdapterFileError, match=problem):
        retouch.adapters.load(path)


@pytest.mark.parametrize("part", ["query_embeds", "cross_attn.out_proj.bias", "norm.weight"])
def test_half_a_query_former_is_refused(part: str, tmp_path: Path) -> None:
    tensors = drawn(FORMER)
    del tensors[f"image_proj_qformer.{part}"]
    torch.save(nested(tensors, **LEGACY), tmp_path / "a.bin")
    with pytest.raises(AdapterFileError, match=rf"missing: image_proj_qformer\.{part}"):
        read_adapter(tmp_path / "a.bin")


class Hostile:
    def __reduce__(self) -> tuple[Any, ...]:
        return (Path.touch, (Path("pwned"),))


def test_a_hostile_pickle_is_refused_and_not_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    parts: dict[str, Any] = nested(drawn(SHAPE))
    parts["image_proj"]["extra"] = Hostile()
    torch.save(parts, tmp_path / "hostile.bin")
    (tmp_path / "plain.bin").write_bytes(pickle.dumps(Hostile()))
    for name in ("hostile.bin", "plain.bin"):
        with pytest.raises(AdapterFileError, match=r"refused: it is no plain file of tensors.*safetensors"):
            read_adapter(tmp_path / name)
    assert not (tmp_path / "pwned").exists()


def test_files_that_are_not_there_or_damaged(tmp_path: Path) -> None:
    with pytest.raises(AdapterFileError, match="no such adapter file"):
        read_adapter(tmp_path / "nothing.bin")
    with pytest.raises(AdapterFileError, match=r"ip-adapter\.safetensors: no such adapter file"):
        read_adapter(tmp_path)
    for name, write in (("a.bin", write_bin), ("a.safetensors", lambda p, t: write_safetensors(p, t, {}))):
        path = tmp_path / name
        write(path, drawn(SHAPE))
        path.write_bytes(path.read_bytes()[:-100])
        with pytest.raises(AdapterFileError, match=r"damaged|refused"):
            read_adapter(path)
    torch.save([1, 2], tmp_path / "list.bin")
    with pytest.raises(AdapterFileError, match="has the parts none; an adapter has"):
        read_adapter(tmp_path / "list.bin")
    torch.save({"image_proj": torch.ones(1), "ip_adapter": {}}, tmp_path / "flat.bin")
    with pytest.raises(AdapterFileError, match="'image_proj' holds no named tensors"):
        read_adapter(tmp_path / "flat.bin")
    torch.save({"image_proj": {"a": 1}, "ip_adapter": {}}, tmp_path / "numbers.bin")
    with pytest.raises(AdapterFileError, match=r"image_proj\.a is no tensor"):
        read_adapter(tmp_path / "numbers.bin")


@pytest.mark.parametrize("section", ["image_proj_qformer", "extra"])
def test_an_empty_part_is_refused(section: str, tmp_path: Path) -> None:
    torch.save({**nested(drawn(SHAPE)), section: {}}, tmp_path / "a.bin")
    with pytest.raises(AdapterFileError, match=f"a.bin: '{section}' is empty; an adapter's parts are dicts of tensors"):
        read_adapter(tmp_path / "a.bin")


@pytest.mark.parametrize(
    ("empty", "message"),
    [("norm.weight", "no whole number of tokens of width 0"), ("proj.2.weight", "its 0 outputs are no whole number")],
)
@pytest.mark.parametrize("write", [write_bin, lambda p, t: write_safetensors(p, t, {})])
def test_a_part_without_a_size_is_refused(empty: str, message: str, write: Any, tmp_path: Path) -> None:
    path = tmp_path / ("a.bin" if write is write_bin else "a.safetensors")
    tensors = drawn(SHAPE)
    tensors[f"image_proj.{empty}"] = tensors[f"image_proj.{empty}"][:0]
    write(path, tensors)
    with pytest.raises(AdapterFileError, match=message):
        read_adapter(path)


@pytest.mark.parametrize("scale", [0.5, [1.0], ["1"] * 6, [-1.0] * 6, None])
def test_a_scale_that_is_no_factor_for_each_block_is_refused(scale: Any, tmp_path: Path) -> None:
    path = tmp_path / "a.safetensors"
    write_safetensors(path, drawn(SHAPE), {"scale": scale})
    with pytest.raises(AdapterFileError, match="and not a factor for each of 6 blocks"):
        read_adapter(path)


def test_metadata_is_plain_json(tmp_path: Path) -> None:
    write_safetensors(tmp_path / "a.safetensors", drawn(SHAPE), {"family": "flux_fill"})
    with safe_open(tmp_path / "a.safetensors", "pt") as file:
        metadata = file.metadata()
    assert json.loads(metadata["retouch_adapter"]) == {"family": "flux_fill"}
    assert load_file(tmp_path / "a.safetensors").keys() == SHAPE.tensors().keys()
