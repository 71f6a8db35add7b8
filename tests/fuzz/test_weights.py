"""Adapters, LoRA files, embeddings, checkpoints: tensors, or an error that names the file. Nothing in them runs."""

from __future__ import annotations

import json
import pickle
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import save as to_safetensors

from retouch.adapters.formats import read_adapter
from retouch.adapters.initial_lora import lora_file, read_lora
from retouch.engine.saved import read_complete, read_state, record_files, require_sound, verify_files
from retouch.errors import RetouchError
from retouch.families import FAMILIES
from retouch.families.flux.base import given_embeddings
from tests.fuzz.inputs import attempt, blobs, changed, fuzzed, kept, texts

W, D, INNER = 4, 6, 8
ADAPTER = {
    "image_proj.proj.0.weight": torch.zeros(2 * D, D),
    "image_proj.proj.0.bias": torch.zeros(2 * D),
    "image_proj.proj.2.weight": torch.zeros(2 * W, 2 * D),
    "image_proj.proj.2.bias": torch.zeros(2 * W),
    "image_proj.norm.weight": torch.ones(W),
    "image_proj.norm.bias": torch.zeros(W),
    "ip_adapter.0.to_k_ip.weight": torch.zeros(INNER, W),
    "ip_adapter.0.to_v_ip.weight": torch.zeros(INNER, W),
}
META = {"retouch_adapter": json.dumps({"scale": [1.0], "value_norm": False, "family": "flux_fill"})}
MODULE = "transformer_blocks.0.attn.to_q"
LORA = {
    f"transformer.{MODULE}.lora_A.weight": torch.zeros(2, 8),
    f"transformer.{MODULE}.lora_B.weight": torch.zeros(8, 2),
}


def _pickled(value: Any) -> bytes:
    import io

    stream = io.BytesIO()
    torch.save(value, stream)
    return stream.getvalue()


def _sections(tensors: dict[str, torch.Tensor]) -> dict[str, dict[str, torch.Tensor]]:
    nested: dict[str, dict[str, torch.Tensor]] = {}
    for key, tensor in tensors.items():
        section, _, rest = key.partition(".")
        nested.setdefault(section, {})[rest] = tensor
    return nested


SAFETENSORS = [to_safetensors(ADAPTER, META), to_safetensors(LORA, {"lora_adapter_metadata": '{"transformer.r": 2}'})]
PICKLES = [_pickled(_sections(ADAPTER)), _pickled({"prompt_embeds": torch.zeros(1, 3, 4)}), pickle.dumps({"a": 1})]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("weights")
    for name, data in (("good.safetensors", SAFETENSORS[0]), ("good.bin", PICKLES[0])):
        (made / name).write_bytes(data)
        read_adapter(made / name)
    return made


def _read_lora(path: Path) -> None:
    with torch.device("meta"):
        modules = {MODULE: torch.nn.Linear(8, 8)}
    read_lora(lora_file(str(path)), FAMILIES["flux_fill"].spec, modules)


@fuzzed
@given(blobs(SAFETENSORS))
def test_safetensors(folder: Path, data: bytes) -> None:
    path = folder / "file.safetensors"
    path.write_bytes(data)
    attempt("adapters, safetensors", lambda: read_adapter(path), RetouchError)
    attempt("LoRA files", lambda: _read_lora(path), RetouchError)


@fuzzed
@given(blobs(PICKLES))
def test_pickles(folder: Path, data: bytes) -> None:
    path = folder / "file.bin"
    path.write_bytes(data)
    attempt("adapters, torch files", lambda: read_adapter(path), RetouchError)
    attempt("embeddings", lambda: given_embeddings(path), RetouchError)


STATE = {
    "progress": {"step": 3, "phase": "rl", "epoch": 1, "position": 0, "updates": 2},
    "config": "seed: 1",
    "rewards": {"asked": 3, "failed": 0, "golden": {"r": [0.5]}},
}


def _checkpoint(root: Path, state: str) -> Path:
    made = root / "step-000003"
    shutil.rmtree(made, ignore_errors=True)
    (made / "weights").mkdir(parents=True)
    (made / "state.json").write_bytes(state.encode("utf-8", "surrogatepass"))
    (made / "weights" / "adapter.safetensors").write_bytes(SAFETENSORS[0])
    (made / "complete.json").write_text(json.dumps({"step": 3, "pinned": False, "files": record_files(made)}))
    return made


def _opened(checkpoint: Path) -> None:
    verify_files(checkpoint)
    require_sound(read_state(checkpoint), checkpoint)


@fuzzed
@given(st.one_of(texts([json.dumps(STATE)]), changed([STATE]).map(json.dumps)))
def test_states(folder: Path, state: str) -> None:
    checkpoint = _checkpoint(folder, state)
    attempt("checkpoints, state", lambda: _opened(checkpoint), RetouchError)


@fuzzed
@given(st.data())
def test_completeness(folder: Path, data: st.DataObject) -> None:
    checkpoint = _checkpoint(folder, json.dumps(STATE))
    _opened(checkpoint)
    file = checkpoint / "complete.json"
    before = read_complete(checkpoint)
    text = data.draw(st.one_of(texts([file.read_text()]), changed([before]).map(json.dumps)))
    file.write_bytes(text.encode("utf-8", "surrogatepass"))
    attempt("checkpoints, list", lambda: _opened(checkpoint), RetouchError)


@fuzzed
@given(st.sampled_from(["state.json", "weights/adapter.safetensors"]), st.data())
def test_changed_bytes(folder: Path, name: str, data: st.DataObject) -> None:
    """No changed byte passes."""
    checkpoint = _checkpoint(folder, json.dumps(STATE))
    file = checkpoint / name
    before = file.read_bytes()
    after = data.draw(blobs([before]))
    file.write_bytes(after)

    def read() -> None:
        if after == before:
            return
        with pytest.raises(RetouchError):
            _opened(checkpoint)

    attempt("checkpoints, bytes", read)


@pytest.mark.parametrize("file", kept("weights"), ids=lambda file: file.name)
def test_corpus(folder: Path, file: Path) -> None:
    path = folder / f"kept{file.suffix}"
    path.write_bytes(file.read_bytes())
    for read in (read_adapter, _read_lora, given_embeddings):
        attempt("weights, corpus", lambda read=read: read(path), RetouchError)
