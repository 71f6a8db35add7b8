"""The scorers of imscore 0.0.11: its recorded signatures everywhere, and its real classes where it is installed.

    python -m venv imscore-env
    imscore-env/bin/pip install ".[serve,imscore]" pytest hypothesis
    imscore-env/bin/python -m pytest tests/rewards/test_imscore.py

The classes keep their code; their networks are a layer deep and randomly initialised, because the hub is not asked.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import importlib.util
import inspect
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from retouch.config import ConfigError
from retouch.rewards import REWARDS
from retouch.rewards.protocol import RewardItem
from retouch.rewards.scorers import make_scorer
from retouch.rewards.scorers.imscore import ImscoreReward
from tests.rewards.fakes import item, picture, score_checked, values

needs_imscore = pytest.mark.skipif(importlib.util.find_spec("imscore") is None, reason="needs the extra imscore")


@dataclass(frozen=True)
class Recorded:
    """What release 0.0.11 has: parameters of `score`, and the shape of its value for a batch of B."""

    module: str
    kind: str
    score: tuple[str, ...]
    columns: tuple[int, ...]


RELEASE = "0.0.11"
FROM_PRETRAINED = (
    "pretrained_model_name_or_path", "force_download", "resume_download", "proxies", "token", "cache_dir",
    "local_files_only", "revision", "model_kwargs",
)  # fmt: skip
"""Of huggingface_hub's mixin; `strict` is one of the model_kwargs, which reach `_from_pretrained`."""

RECORDED = {
    "imagereward": Recorded("imscore.imreward.model", "ImageReward", ("self", "opixels", "prompts"), (1,)),
    "aesthetic": Recorded("imscore.aesthetic.model", "LAIONAestheticScorer", ("self", "pixels", "prompts"), ()),
}


# --- everywhere: the adapter against the recorded signatures ---


@pytest.fixture
def recorded(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """The name of a scorer, whose class takes just what was recorded and gives values of that shape."""
    name: str = request.param
    found = RECORDED[name]

    class Stand(nn.Module):
        @classmethod
        def from_pretrained(cls, pretrained_model_name_or_path: str, **model_kwargs: Any) -> Stand:
            assert model_kwargs == {"strict": True}
            return cls()

        def score(self, *given: Any, **named: Any) -> torch.Tensor:
            assert len(given) + len(named) + 1 == len(found.score) and {*named} <= {*found.score}
            pixels, prompts = given
            assert isinstance(prompts, list)
            value = pixels.mean((1, 2, 3)) / 2 + torch.tensor([len(prompt) / 10 for prompt in prompts])
            return value.reshape(len(prompts), *found.columns)

    made = ModuleType(found.module)
    setattr(made, found.kind, Stand)
    monkeypatch.setitem(sys.modules, found.module, made)
    return name


@pytest.mark.parametrize("recorded", RECORDED, indirect=True)
@pytest.mark.parametrize("count", [1, 3])
def test_the_adapter_keeps_to_the_recorded_signatures(recorded: str, count: int) -> None:
    scorer = make_scorer(recorded, {"path": "somewhere"})
    scorer.load("cpu")
    batch = [item(i, image=picture(i), prompt="p" * i) for i in range(count)]
    expected = [one.image.mean() / 510 + i / 10 for i, one in enumerate(batch)]
    assert values(score_checked(scorer, batch)) == pytest.approx(expected, abs=1e-5)


def test_every_scorer_of_imscore_is_recorded() -> None:
    assert {name for name, entry in REWARDS.items() if issubclass(entry, ImscoreReward)} == {*RECORDED}


# --- where imscore is installed: its real classes ---

_LETTERS = "abcdefghijklmnopqrstuvwxyz"
_VOCABULARY = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "'", ".", *_LETTERS, *(f"##{one}" for one in _LETTERS)]


@pytest.fixture
def shallow(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """imscore's classes with networks of one layer instead of those that their constructors download."""
    transformers = importlib.import_module("transformers")
    reward, aesthetic = (importlib.import_module(found.module) for found in RECORDED.values())
    (tmp_path / "vocab.txt").write_text("\n".join(_VOCABULARY))

    class Tokenizer:
        @staticmethod
        def from_pretrained(name: str) -> Any:
            assert name == "bert-base-uncased"
            return transformers.BertTokenizer(str(tmp_path / "vocab.txt"))

    tower, config = reward.VisionTransformer, reward.BertConfig

    class Config:
        @staticmethod
        def from_dict(given: dict[str, Any]) -> Any:
            return config.from_dict({**given, "num_hidden_layers": 1})

    monkeypatch.setattr(reward, "BertTokenizer", Tokenizer)
    monkeypatch.setattr(reward, "BertConfig", Config)
    monkeypatch.setattr(reward, "VisionTransformer", lambda **options: tower(**{**options, "depth": 1}))

    class Vision:
        @staticmethod
        def from_pretrained(name: str) -> Any:
            assert name == "openai/clip-vit-large-patch14"
            shape = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
            config = transformers.CLIPVisionConfig(**shape, image_size=224, patch_size=14, projection_dim=768)
            return transformers.CLIPVisionModelWithProjection(config)

    monkeypatch.setattr(aesthetic, "CLIPVisionModelWithProjection", Vision)
    return tmp_path


def published(name: str, folder: Path) -> Path:
    """A file of weights as imscore publishes them."""
    torch.manual_seed(0)
    made = getattr(importlib.import_module(RECORDED[name].module), RECORDED[name].kind)()
    made.save_pretrained(folder / name)
    return folder / name


def batch_of(sizes: Sequence[tuple[int, int]]) -> list[RewardItem]:
    noise = np.random.default_rng(0)
    images = [noise.integers(0, 256, (*size, 3), np.uint8) for size in sizes]
    long = "a red sign on a grey wall " * 40  # more tokens than any of the models takes
    return [item(i, image=image, prompt=long if i == 1 else f"sign {'x' * i}") for i, image in enumerate(images)]


@needs_imscore
@pytest.mark.parametrize("name", RECORDED)
def test_the_signatures_are_those_of_the_release(name: str) -> None:
    assert importlib.metadata.version("imscore") == RELEASE
    kind: Any = getattr(importlib.import_module(RECORDED[name].module), RECORDED[name].kind)
    assert tuple(inspect.signature(kind.score).parameters) == RECORDED[name].score
    assert list(inspect.signature(kind.__init__).parameters) == ["self"]
    assert {*inspect.signature(kind.from_pretrained).parameters} <= {*FROM_PRETRAINED}
    assert inspect.signature(kind._from_pretrained).parameters["strict"].default is False


@needs_imscore
@pytest.mark.parametrize("name", RECORDED)
def test_the_real_class_scores_a_batch(name: str, shallow: Path) -> None:
    """Several shapes, a long prompt, batches of two: the value of an item is the one it has alone, and that of the
    class itself; for ImageReward it depends on the prompt."""
    folder = published(name, shallow)
    scorer = make_scorer(name, {"path": str(folder), "images_per_forward": 2})
    scorer.load("cpu")
    assert scorer.spec.revision.endswith(f"imscore {RELEASE}")
    batch = batch_of([(64, 64), (64, 64), (48, 96), (300, 20), (64, 64)])
    together = values(score_checked(scorer, batch))
    assert all(isinstance(value, float) for value in together)
    alone = [values(score_checked(scorer, [one]))[0] for one in batch]
    assert together == pytest.approx(alone, abs=1e-5)
    kind: Any = getattr(importlib.import_module(RECORDED[name].module), RECORDED[name].kind)
    model = kind.from_pretrained(str(folder), strict=True).eval()
    pixels = torch.from_numpy(batch[2].image).permute(2, 0, 1)[None].float() / 255
    with torch.no_grad():
        value = model.score(pixels, [batch[2].prompt])
    assert value.shape == (1, *RECORDED[name].columns) and float(value) == pytest.approx(together[2], abs=1e-5)
    other = values(score_checked(scorer, [item(0, image=batch[0].image, prompt="something else")]))[0]
    assert (other == pytest.approx(together[0], abs=1e-6)) is (name == "aesthetic")


@needs_imscore
@pytest.mark.parametrize("name", RECORDED)
def test_a_file_that_lacks_weights_is_refused(name: str, shallow: Path, caplog: pytest.LogCaptureFixture) -> None:
    """imscore itself would leave them random. Tensors that the model does not have are named and ignored."""
    safetensors = importlib.import_module("safetensors.torch")
    file = published(name, shallow) / "model.safetensors"
    whole = safetensors.load_file(file)
    lost, *_ = sorted(whole)
    safetensors.save_file({key: tensor for key, tensor in whole.items() if key != lost}, file)
    with pytest.raises(ConfigError, match="weights are missing from its file"):
        make_scorer(name, {"path": str(file.parent)}).load("cpu")
    safetensors.save_file({**whole, "unused": torch.zeros(1)}, file)
    make_scorer(name, {"path": str(file.parent)}).load("cpu")
    assert '"unused"' in caplog.text
