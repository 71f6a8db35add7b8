"""Drawing from given text states: padded, batched, of a group's one noise, by a network that cannot learn."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor

from retouch.algorithms.vlm_grpo.images import ImageRequest, freeze, generate_images, placed_on
from retouch.families.qwen.base import QwenModel, padded
from retouch.families.qwen_image.model import QwenImage
from retouch.families.qwen_image.spec import QwenImageModel
from retouch.families.qwen_image_edit.model import QwenImageEdit
from retouch.families.qwen_image_edit.spec import QwenImageEditModel
from retouch.families.tiny import tiny_pipeline
from tests.tiny_models import attentive, tiny_model

SIZE = (32, 64)
LENGTHS = (9, 30, 17)

Make = Callable[[int, int], ImageRequest]


def picture(number: int, height: int = 32, width: int = 64) -> Image.Image:
    return Image.fromarray(np.random.default_rng(number).integers(0, 256, (height, width, 3), np.uint8))


def states(length: int, seed: int = 0, width: int = 32) -> Tensor:
    return torch.randn(length, width, generator=torch.Generator().manual_seed(seed))


def width_of(model: QwenModel) -> int:
    """Of the text states that its network takes."""
    return model.network.config.joint_attention_dim


@pytest.fixture(scope="module")
def models() -> dict[str, QwenModel]:
    torch.manual_seed(1)
    made: dict[str, QwenModel] = {
        "draw": QwenImage.from_pipeline(attentive(tiny_pipeline("qwen_image"))),
        "edit": QwenImageEdit.from_pipeline(attentive(QwenImageEdit.tiny("edit"))),
        "edit_plus": QwenImageEdit.from_pipeline(attentive(QwenImageEdit.tiny("edit_plus"))),
    }
    for model in made.values():
        freeze(model)
    return made


@pytest.fixture(params=["draw", "edit", "edit_plus"])
def model(request: pytest.FixtureRequest, models: dict[str, QwenModel]) -> QwenModel:
    return models[request.param]


@pytest.fixture
def make(model: QwenModel, request: pytest.FixtureRequest) -> Make:
    """(length of the states, noise seed) -> a drawing: with no source, with one, with two of different sizes."""
    task, width = request.node.callspec.params["model"], width_of(model)
    sources = {"draw": (), "edit": (picture(1),), "edit_plus": (picture(1), picture(2, 32, 32))}[task]
    return lambda length, seed: ImageRequest(states(length, length, width), seed, SIZE, states(4, width=width), sources)


@pytest.mark.parametrize("guidance", [1.0, 4.0])
def test_a_padded_batch_is_its_single_rows(model: QwenModel, make: Make, guidance: float) -> None:
    drawings = [make(length, i) for i, length in enumerate(LENGTHS)]
    if guidance == 1.0:
        drawings = [replace(drawing, negative=None) for drawing in drawings]
    together = generate_images(model, drawings, 3, guidance, images_per_request=2)
    for drawing, images in zip(drawings, together, strict=True):
        [alone] = generate_images(model, [drawing], 3, guidance, images_per_request=2, batch_size=1)
        assert images.shape == (2, 3, *SIZE)
        torch.testing.assert_close(images, alone, atol=1e-5, rtol=0)


def test_one_forward_a_step_for_a_batch(models: dict[str, QwenModel]) -> None:
    """Of the unguided and the guided rows at once, as long as the longest text, and none more for a longer padding."""
    calls: list[Any] = []
    model = models["draw"]
    hook = model.network.register_forward_hook(lambda _, a, k, out: calls.append(k), with_kwargs=True)
    try:
        generate_images(
            model, [ImageRequest(states(n), 1, SIZE, states(4)) for n in LENGTHS], 3, 4.0, images_per_request=2
        )
    finally:
        hook.remove()
    assert len(calls) == 3
    assert {(len(k["hidden_states"]), k["encoder_hidden_states"].shape[1]) for k in calls} == {(12, max(LENGTHS))}
    assert calls[0]["encoder_hidden_states_mask"].sum(1).tolist() == [4] * 6 + [n for n in LENGTHS for _ in range(2)]


def test_text_is_never_cut(models: dict[str, QwenModel]) -> None:
    """The pipeline keeps 512 states, 1,024 at most; here what comes last in 1,100 still changes the picture."""
    text = states(1100)
    changed = torch.cat([text[:1050], states(50, 7)])
    one, other = generate_images(models["draw"], [ImageRequest(t, 1, SIZE) for t in (text, changed)], 2)
    assert float((one - other).abs().max()) > 1e-3


def test_a_group_of_one_seed_starts_from_one_noise(model: QwenModel, make: Make) -> None:
    """Two rows of one seed and text are one picture, whatever stands between them; another seed is another noise, and
    so is the next picture of the row."""
    drawings = [make(9, 5), make(17, 5), make(9, 6), make(9, 5)]
    images = generate_images(model, drawings, 2, 4.0, images_per_request=2)
    torch.testing.assert_close(images[0], images[3], atol=1e-5, rtol=0)
    assert float((images[0] - images[2]).abs().max()) > 0.05
    assert float((images[0][0] - images[0][1]).abs().max()) > 0.05
    seen: list[Tensor] = []
    hook = model.network.register_forward_pre_hook(lambda _, a, k: seen.append(k["hidden_states"]), with_kwargs=True)
    try:
        generate_images(model, drawings, 1, 4.0)
    finally:
        hook.remove()
    noise = seen[0][:4, :32]
    assert torch.equal(noise[0], noise[1]) and torch.equal(noise[0], noise[3]) and not torch.equal(noise[0], noise[2])


def test_text_and_sources_and_guidance_all_count(model: QwenModel, make: Make) -> None:
    drawing, width = make(9, 5), width_of(model)
    variants = [drawing, replace(drawing, text=states(9, 99, width)), replace(drawing, negative=states(4, 98, width))]
    if drawing.sources:
        variants.append(replace(drawing, sources=(picture(9), *drawing.sources[1:])))
    images = generate_images(model, variants, 2, 4.0)
    assert all(float((other - images[0]).abs().max()) > 5e-3 for other in images[1:])


def test_drawings_of_several_sizes_keep_their_order(models: dict[str, QwenModel]) -> None:
    model = models["edit"]
    text = states(9, width=width_of(model))
    sizes = [(32, 64), (48, 24), (32, 64)]
    drawings = [ImageRequest(text, i, size, sources=(picture(i, *size),)) for i, size in enumerate(sizes)]
    images = generate_images(model, drawings, 2)
    assert [tuple(image.shape[2:]) for image in images] == sizes
    for drawing, image in zip(drawings, images, strict=True):
        torch.testing.assert_close(image, generate_images(model, [drawing], 2)[0], atol=1e-5, rtol=0)
    wider = replace(drawings[0], size=(32, 32))  # drawn at another size than the source has
    assert generate_images(model, [wider], 2)[0].shape == (1, 3, 32, 32)


def test_a_source_is_encoded_once(models: dict[str, QwenModel], monkeypatch: pytest.MonkeyPatch) -> None:
    model, source, encoded = models["edit"], picture(31), []  # no other test shows it this one
    stock = model.autoencoder.encode
    monkeypatch.setattr(model.autoencoder, "encode", lambda images: encoded.append(images) or stock(images))
    texts = [states(n, width=width_of(model)) for n in LENGTHS]
    generate_images(model, [ImageRequest(text, 1, SIZE, sources=(source,)) for text in texts], 1, batch_size=2)
    assert len(encoded) == 1


def test_what_draws_does_not_learn(models: dict[str, QwenModel]) -> None:
    """Neither by a gradient nor by drop-out, and no gradient comes back to the text."""
    model, text = models["draw"], states(9).requires_grad_()
    drawing = ImageRequest(text, 1, SIZE)
    try:
        model.network.get_parameter("proj_out.weight").requires_grad_(True)
        with pytest.raises(
            RuntimeError, match=r"must be frozen, but proj_out\.weight requires a gradient; call freeze"
        ):
            generate_images(model, [drawing], 1)
        freeze(model)
        model.network.train()
        with pytest.raises(RuntimeError, match="training mode, with dropout; call freeze"):
            generate_images(model, [drawing], 1)
    finally:
        freeze(model)
    assert not generate_images(model, [drawing], 1)[0].requires_grad


def test_only_what_fits_is_drawn(models: dict[str, QwenModel]) -> None:
    with pytest.raises(ValueError, match="qwen_image takes no images to edit; given 1 a row"):
        generate_images(models["draw"], [ImageRequest(states(9), 1, SIZE, sources=(picture(1),))], 1)
    with pytest.raises(ValueError, match="qwen_image_edit needs images to edit; given 0 a row"):
        generate_images(models["edit"], [ImageRequest(states(9), 1, SIZE)], 1)
    with pytest.raises(ValueError, match="2 rows of text states, but 1 negative ones"):
        generate_images(
            models["draw"], [ImageRequest(states(9), 1, SIZE), ImageRequest(states(9), 1, SIZE, states(4))], 1, 4.0
        )
    with pytest.raises(ValueError, match="images are 30 x 64"):
        generate_images(models["draw"], [ImageRequest(states(9), 1, (30, 64))], 1)


def test_a_loaded_folder_draws_without_its_text_encoder() -> None:
    for config, sources in (
        (QwenImageModel(path=tiny_model("qwen_image"), dtype="fp32"), ()),
        (QwenImageEditModel(path=tiny_model("qwen_image_edit"), dtype="fp32"), (picture(1),)),
    ):
        family: Any = QwenImage if isinstance(config, QwenImageModel) else QwenImageEdit
        model = family.from_config(config, with_text=False)
        freeze(model)
        with placed_on(model, "cpu"):
            [image] = generate_images(
                model, [ImageRequest(states(9, width=width_of(model)), 1, SIZE, sources=sources)], 2
            )
        assert bool(image.isfinite().all()) and model.text is None


def test_what_is_not_padding_is_as_it_was() -> None:
    rows = [states(n, n) for n in LENGTHS]
    full, mask = padded(rows, 40)
    assert mask.sum(1).tolist() == list(LENGTHS) and not full[0, LENGTHS[0] :].any()
    for row, states_of_row, kept in zip(rows, full, mask, strict=True):
        assert torch.equal(row, states_of_row[kept > 0])
