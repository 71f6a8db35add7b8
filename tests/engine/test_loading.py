"""Networks that are trained whole stay in their files until each process takes its part: with the values that reading
them at once gives, for every way that processes share weights."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.testing._internal.distributed.fake_pg import FakeStore

from retouch.engine import sharding
from retouch.engine.sharding import blocks, piece, place, shard
from retouch.engine.zero import OneByOne
from retouch.families import FAMILIES
from retouch.families.loading import family_class, stored_dtype
from retouch.families.tiny import tiny_pipeline
from tests.selection import default

CPU = torch.device("cpu")


def saved(family: str, folder: Path, dtype: torch.dtype = torch.bfloat16) -> Any:
    """A model folder whose network has weights of a dtype -> its class, and the section of a run file."""
    pipeline = tiny_pipeline(family, seed=4)
    kind = family_class(family)
    config = kind.section.model_validate({"path": str(folder), "train": {"kind": "full"}})
    network = getattr(pipeline, config.spec.network_name)
    network.to(dtype).save_pretrained(folder / config.spec.network_name, max_shard_size="60KB")
    return kind, config


@pytest.mark.parametrize("family", default(sorted(FAMILIES), lambda family: family in ("flux_dev", "sd3")))
def test_weights_are_those_of_a_network_that_is_read_as_fp32(family: str, tmp_path: Path) -> None:
    """Buffers of files and computed ones as well."""
    kind, config = saved(family, tmp_path)
    whole = kind.load_network(config, str(tmp_path), torch.float32)
    mapped = kind.mapped_network(config, str(tmp_path), torch.float32)
    assert {p.dtype for p in mapped.parameters()} <= {torch.bfloat16, torch.float32}
    place(mapped, CPU, torch.float32)
    for found, expected in (
        (mapped.named_parameters(), whole.named_parameters()),
        (mapped.named_buffers(), whole.named_buffers()),
    ):
        assert_same(dict(found), dict(expected))


def assert_same(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert found[name].dtype == tensor.dtype and torch.equal(found[name], tensor), name


def test_files_that_are_no_half_are_read_as_before(tmp_path: Path) -> None:
    """Of several dtypes, where reading all as one would round; fp32; adapters, whose frozen weights have `dtype`."""
    kind, config = saved("flux_dev", tmp_path)
    folder = tmp_path / "transformer"
    assert stored_dtype(str(tmp_path), "transformer", None) == torch.bfloat16
    frozen = kind.section.model_validate({"path": str(tmp_path), "train": {"kind": "lora"}})
    assert kind.mapped_network(frozen, str(tmp_path), torch.float32).dtype == torch.float32
    file = min(folder.glob("*.safetensors"))
    tensors = load_file(file)
    name = min(tensors)
    save_file({**tensors, name: tensors[name].float() + 2**-20}, file, {"format": "pt"})
    assert stored_dtype(str(tmp_path), "transformer", None) is None
    read = kind.mapped_network(config, str(tmp_path), torch.float32)
    assert torch.equal(read.state_dict()[name], load_file(file)[name])
    save_file(tensors, file, {"format": "pt"})
    save_file({name: tensors[name].float()}, folder / "diffusion_pytorch_model.fp16.safetensors")
    assert stored_dtype(str(tmp_path), "transformer", None) == torch.bfloat16
    for named in ("-00001-of-00002.fp16", ".fp16-00001-of-00002"):  # both are in use
        assert stored_dtype(str(tmp_path), "transformer", "fp16") == torch.float32  # its one tensor
        next(folder.glob("*.fp16*")).rename(folder / f"diffusion_pytorch_model{named}.safetensors")
    assert stored_dtype(str(tmp_path), "transformer", "fp16") == torch.float32
    file.write_bytes(b"damaged")
    assert stored_dtype(str(tmp_path), "transformer", None) is None


@pytest.fixture
def as_rank(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """Be one of several processes that never talk."""

    def start(rank: int, processes: int) -> None:
        if torch.distributed.is_initialized():
            torch.distributed.destroy_process_group()
        torch.distributed.init_process_group("fake", rank=rank, world_size=processes, store=FakeStore())

    yield start
    torch.distributed.destroy_process_group()


def test_a_process_reads_its_own_rows_alone(as_rank: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Together three processes read every byte of the files once. Sizes that three cannot divide; a buffer."""
    kind, config = saved("sd3", tmp_path)
    own, read = sharding._own_rows, list[int]()

    def counted(whole: Tensor, parameter: Any) -> Tensor:
        rows = own(whole, parameter)
        read.append(rows.numel() * rows.element_size())
        return rows

    monkeypatch.setattr(sharding, "_own_rows", counted)
    before = kind.load_network(config, str(tmp_path), torch.float32)
    whole = {name: tensor.clone() for name, tensor in before.state_dict().items()}
    parts: dict[str, list[Tensor]] = {}
    bytes_of: list[int] = []
    for rank in range(3):
        as_rank(rank, 3)
        network = kind.mapped_network(config, str(tmp_path), torch.float32)
        assert blocks(network)
        in_files = sum(p.numel() * p.element_size() for p in network.parameters())
        read.clear()
        shard(network, CPU, 3, "no", torch.float32)
        bytes_of.append(sum(read))
        for name, parameter in network.named_parameters():
            assert parameter.dtype == piece(parameter).dtype == torch.float32
            parts.setdefault(name, []).append(piece(parameter))
        assert_same(dict(network.named_buffers()), dict(before.named_buffers()))
    assert sum(bytes_of) == in_files and max(bytes_of) < 0.5 * in_files
    assert_same({name: torch.cat(rows) for name, rows in parts.items()}, {n: whole[n] for n in parts})
    assert parts.keys() == dict(before.named_parameters()).keys()


class Shared(nn.Module):
    """One weight in two modules, one that is frozen, and one of integers."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False)
        self.second.weight = self.first.weight
        self.frozen = nn.Parameter(torch.arange(6.0, dtype=torch.bfloat16), requires_grad=False)
        self.counts = nn.Parameter(torch.arange(6), requires_grad=False)


def test_shared_and_frozen_weights_stay_so(as_rank: Any) -> None:
    as_rank(1, 2)
    network = Shared()
    expected = network.first.weight.detach()[2:].clone()
    shard(network, CPU, 2, "no")
    assert network.second.weight is network.first.weight
    assert torch.equal(piece(network.first.weight), expected) and network.first.weight.requires_grad
    assert piece(network.frozen).tolist() == [3.0, 4.0, 5.0] and not network.frozen.requires_grad
    assert network.frozen.dtype == torch.bfloat16
    assert piece(network.counts).tolist() == [3, 4, 5]


def test_zero3_gets_one_weight_after_the_other() -> None:
    """DeepSpeed shards each before it takes the next."""
    network = nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 2)).bfloat16()
    asked = OneByOne(network, torch.float32).parameters()
    for count, weight in enumerate(asked, 1):
        assert weight.dtype == torch.float32
        assert [p.dtype == torch.float32 for p in network.parameters()] == [True] * count + [False] * (4 - count)
    assert count == 4
