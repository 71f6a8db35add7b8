"""`model.exact_text_lengths`: masked attention over padding equals no padding, in the families that mask the padding of
their text."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor

from retouch.families.guidance import each_half
from retouch.families.qwen.base import QwenModel
from retouch.families.qwen_image.model import QwenImage
from retouch.families.qwen_image_edit.model import QwenImageEdit
from retouch.types import Condition
from tests.tiny_models import attentive

SIZE = (32, 64)


def make(family: str) -> QwenModel:
    torch.manual_seed(1)
    kind = {"qwen_image": QwenImage, "qwen_image_edit": QwenImageEdit}[family]
    return kind.from_pipeline(attentive(kind.tiny()))


@pytest.fixture(scope="module")
def models() -> dict[str, QwenModel]:
    return {family: make(family) for family in ("qwen_image", "qwen_image_edit")}


def condition_of(model: QwenModel, lengths: tuple[int, ...], guidance: float) -> Condition:
    """Prompts of these lengths; the negative one has 4 tokens."""
    random = torch.Generator().manual_seed(sum(lengths))
    width = model.network.config.joint_attention_dim
    text = [torch.randn(length, width, generator=random) for length in lengths]
    negative = [torch.randn(4, width, generator=random)] * len(lengths) if guidance > 1 else []
    picture = torch.randn(1, model.spec.latent_channels, 8, 16, generator=random)
    pictures = [[picture]] * len(lengths) if "source" in model.spec.needs else []
    return model.condition_on(text, SIZE, guidance, negative, pictures)


@contextmanager
def exact(model: QwenModel) -> Iterator[list[tuple[int, int, bool]]]:
    """Inside, the model cuts its text exactly; gives (rows, tokens, whether masked) of each forward."""
    seen: list[tuple[int, int, bool]] = []

    def watch(_: Any, args: Any, given: Any, output: Any) -> None:
        rows, tokens = given["encoder_hidden_states"].shape[:2]
        seen.append((rows, tokens, given["encoder_hidden_states_mask"] is not None))

    before = model.config
    hook = model.network.register_forward_hook(watch, with_kwargs=True)
    model.config = before.model_copy(update={"exact_text_lengths": True})
    try:
        yield seen
    finally:
        model.config = before
        hook.remove()


def inputs(model: QwenModel, rows: int) -> tuple[Tensor, Tensor]:
    random = torch.Generator().manual_seed(rows)
    channels = model.input_channels() // 4
    return torch.randn(rows, channels, 8, 16, generator=random), torch.rand(rows, generator=random)


@pytest.mark.parametrize("family", ["qwen_image", "qwen_image_edit"])
@pytest.mark.parametrize(
    ("lengths", "guidance", "forwards"),
    [
        ((41, 41), 1.0, [(2, 41, False)]),
        ((41, 7), 1.0, [(2, 41, True)]),
        ((41, 41), 4.0, [(2, 4, False), (2, 41, False)]),
        ((7, 41, 41), 4.0, [(3, 4, False), (3, 41, True)]),
    ],
)
def test_predictions_are_those_of_padded_text(
    models: dict[str, QwenModel],
    family: str,
    lengths: tuple[int, ...],
    guidance: float,
    forwards: list[tuple[int, int, bool]],
) -> None:
    """No mask where nothing is padded; the negative prompt has a forward of its own length."""
    model, (x, t) = models[family], inputs(models[family], len(lengths))
    condition = condition_of(model, lengths, guidance)
    padded = model.predict(model.network, x, t, condition)
    with exact(model) as seen:
        cut = model.predict(model.network, x, t, condition)
    assert seen == forwards
    torch.testing.assert_close(cut, padded, atol=1e-5, rtol=1e-5)


def test_sampling_and_training_predict_the_same_bits(models: dict[str, QwenModel]) -> None:
    """The first ratio is 1: a forward with gradient is the one without, of the same rows."""
    model, (x, t) = models["qwen_image"], inputs(models["qwen_image"], 2)
    condition = condition_of(model, (41, 7), 4.0)
    with exact(model):
        with torch.no_grad():
            sampled = model.predict(model.network, x, t, condition)
        trained = model.predict(model.network, x, t, condition)
    assert trained.requires_grad and torch.equal(sampled, trained)


def test_halves_of_a_condition() -> None:
    """By hand; the half with the negative prompt attends to no reference."""
    tensors = {
        "text": torch.tensor([[1.0]]),
        "negative_text": torch.tensor([[2.0]]),
        "reference": torch.tensor([[3.0]]),
        "reference_keep": torch.tensor([1.0]),
    }
    without, with_text = each_half(tensors)
    assert {name: float(t) for name, t in without.items()} == {"text": 2.0, "reference": 3.0, "reference_keep": 0.0}
    assert {name: float(t) for name, t in with_text.items()} == {"text": 1.0, "reference": 3.0, "reference_keep": 1.0}
    assert each_half(with_text) == [with_text]
