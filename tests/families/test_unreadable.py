"""Model folders that a library cannot read: one message, whatever it raises, and nothing in them is run."""

from __future__ import annotations

import os
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from diffusers import AutoencoderKL
from transformers import CLIPTextConfig, CLIPTextModel

from retouch.config import ConfigError
from retouch.errors import ModelFilesError, why_unreadable
from retouch.families.image_encoder import TINY, ImageEncoder
from retouch.families.loading import load_component
from retouch.rewards.scorers.weights import loading


class Program:
    """A pickle of it runs a program when it is loaded."""

    def __init__(self, ran: Path) -> None:
        self.ran = ran

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (str(self.ran),)


def small(kind: Any) -> Any:
    if kind is AutoencoderKL:
        return AutoencoderKL(block_out_channels=(4,), norm_num_groups=1)
    sizes: dict[str, Any] = {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "num_attention_heads": 1}
    return CLIPTextModel(CLIPTextConfig(vocab_size=99, bos_token_id=0, eos_token_id=1, **sizes))


WEIGHTS: dict[str, Callable[[Path, Any], object]] = {
    "a pickle of a program": lambda file, ran: torch.save({"a": Program(ran)}, file),
    "a pickle of a program, old": lambda file, ran: torch.save(
        {"a": Program(ran)}, file, _use_new_zipfile_serialization=False
    ),
    "a pickle without torch": lambda file, ran: file.write_bytes(pickle.dumps(Program(ran))),
    "a pickled module": lambda file, _: torch.save(torch.nn.Linear(1, 1), file),
    "a list": lambda file, _: torch.save([1, 2], file),
    "a number": lambda file, _: torch.save(3, file),
    "nothing": lambda file, _: file.write_bytes(b""),
    "half a file": lambda file, _: (torch.save({"a": torch.ones(999)}, file), os.truncate(file, 999)),
    "a pointer of git-lfs": lambda file, _: file.write_text("version https://git-lfs.github.com/spec/v1\n"),
}
CONFIGS = {
    "null": "null",
    "a list": "[]",
    "wrong types": '{"hidden_size": "x", "block_out_channels": 3}',
    "an unknown activation": '{"hidden_act": "boo", "act_fn": "boo"}',
    "an unknown precision": '{"dtype": "boo"}',
}


@pytest.mark.parametrize("kind", [CLIPTextModel, AutoencoderKL])
def test_weights_that_a_library_cannot_read(kind: Any, tmp_path: Path) -> None:
    folder, ran = tmp_path / "model" / "part", tmp_path / "ran"
    small(kind).save_pretrained(folder)
    (safe,) = folder.glob("*.safetensors")
    for content in (b"", b"junkjunkjunk", safe.read_bytes()[:100], (1 << 50).to_bytes(8, "little")):
        safe.write_bytes(content)
        one_message(kind, folder)
    safe.unlink()
    file = folder / ("pytorch_model.bin" if kind is CLIPTextModel else "diffusion_pytorch_model.bin")
    for name, write in WEIGHTS.items():
        write(file, ran)
        message = one_message(kind, folder)
        if kind is CLIPTextModel and name.startswith("a pickle of"):
            assert message.endswith(
                ": a file of weights is damaged, or a pickle of more than tensors, which could run any program; use a "
                "copy with safetensors files"
            )
    assert not ran.exists()


@pytest.mark.parametrize("kind", [CLIPTextModel, AutoencoderKL])
def test_configs_that_a_library_cannot_read(kind: Any, tmp_path: Path) -> None:
    folder = tmp_path / "model" / "part"
    small(kind).save_pretrained(folder)
    for config in CONFIGS.values():
        (folder / "config.json").write_text(config)
        one_message(kind, folder)


def one_message(kind: Any, folder: Path) -> str:
    with pytest.raises(ModelFilesError) as caught:
        load_component(kind, str(folder.parent), folder.name, torch.float32)
    message = str(caught.value)
    assert message.startswith(f"model.path: cannot load part/ of {folder.parent} as {kind.__name__}: ")
    assert "\n" not in message
    return message


def test_a_pickled_image_encoder_is_one_message(tmp_path: Path) -> None:
    folder, ran = tmp_path / "encoder", tmp_path / "ran"
    folder.mkdir()
    (folder / "config.json").write_bytes((TINY / "config.json").read_bytes())
    torch.save({"a": Program(ran)}, folder / "pytorch_model.bin")
    with pytest.raises(ConfigError, match="which cannot be loaded: a file of weights is damaged, or a pickle of more"):
        ImageEncoder.load(str(folder))
    assert not ran.exists()


def test_a_reward_model_that_a_library_cannot_read_is_an_error_of_its_option(tmp_path: Path) -> None:
    with (
        pytest.raises(ConfigError, match=r"path: given '.*': a file of weights is damaged, or a pickle"),
        loading("path", str(tmp_path)),
    ):
        raise pickle.UnpicklingError("Weights only load failed.")
    with pytest.raises(ConfigError, match=r"path: given '.*': KeyError: 'boo'"), loading("path", str(tmp_path)):
        raise KeyError("boo")
    for error in (ImportError("torchvision"), MemoryError(), RuntimeError("CUDA out of memory"), ConfigError("own")):
        assert why_unreadable(error) is None
        with pytest.raises(type(error)), loading("path", str(tmp_path)):
            raise error
