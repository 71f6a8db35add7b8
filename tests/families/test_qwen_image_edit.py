"""Qwen-Image-Edit and Edit-Plus against diffusers' own pipelines on the same weights, text states, noise and sizes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from diffusers import QwenImageEditPlusPipeline, QwenImageTransformer2DModel
from diffusers.pipelines.qwenimage import pipeline_qwenimage_edit, pipeline_qwenimage_edit_plus
from PIL import Image

from retouch.algorithms.vlm_grpo.run import VlmRun
from retouch.algorithms.vlm_grpo.scoring import sources_of
from retouch.families.base import TrainFull, TrainLora
from retouch.families.diffusion import pack
from retouch.families.loading import ModelFilesError, load_model
from retouch.families.qwen.spec import NEGATIVE
from retouch.families.qwen.text import (
    ChatStates,
    chat,
    prefix_length,
    template,
)
from retouch.families.qwen.tiny import byte_qwen_tokenizer, tiny_qwen_processor
from retouch.families.qwen_image_edit.model import QwenImageEdit
from retouch.families.qwen_image_edit.spec import EditVariant, QwenImageEditModel
from retouch.rollout.plan import ode_plan
from retouch.rollout.sampler import (
    noise_for,
    sample,
)
from retouch.types import Condition, Example
from tests.families.conftest import random_example
from tests.families.facts import Facts
from tests.tiny_models import attentive

FACTS = Facts(
    parameters=20.4e9,
    lora_modules=60 * 12,  # as in Qwen-Image
    guidance_scale=4.0,
    hub_id="Qwen/Qwen-Image-Edit",
    other_hub_ids={"qwen_image_edit_2511": "Qwen/Qwen-Image-Edit-2511"},
    text_length=96,
)

LENGTH = 96
VARIANTS: tuple[EditVariant, ...] = ("edit", "edit_plus")
KINDS = (*VARIANTS, "2511")
"""The variants, and edit_plus as 2511 is: it modulates the tokens of source images at time 0."""

SIZES = [(32, 64), (48, 24)]


def picture(number: int, height: int, width: int) -> Image.Image:
    return Image.fromarray(np.random.default_rng(number).integers(0, 256, (height, width, 3), np.uint8))


def edit_at(number: int, size: tuple[int, int]) -> Example:
    """Instructions of different lengths."""
    return Example(number, "Make it red." + " And blue." * number, picture(number, *size))


def unpadded(states: torch.Tensor, mask: torch.Tensor) -> list[torch.Tensor]:
    """[B, S, D] with a mask [B, S], whichever side is padded -> states [L, D] of each row."""
    return [row[keep > 0] for row, keep in zip(states, mask, strict=True)]


@pytest.fixture(scope="module")
def pipelines() -> dict[str, Any]:
    made: dict[str, Any] = {}
    for variant in VARIANTS:
        torch.manual_seed(3)
        made[variant] = attentive(QwenImageEdit.tiny(variant))
    network = made["edit_plus"].transformer
    config: dict[str, Any] = {name: value for name, value in network.config.items() if not name.startswith("_")}
    newer: Any = QwenImageTransformer2DModel(**config | {"zero_cond_t": True})
    newer.load_state_dict(network.state_dict())
    parts = {**made["edit_plus"].components, "transformer": newer.eval()}
    made["2511"] = QwenImageEditPlusPipeline(**parts)
    return made


@pytest.fixture(scope="module")
def models(pipelines: dict[str, Any]) -> dict[str, QwenImageEdit]:
    # 28 x 56 pixels are two tokens: a small picture for the text encoder of edit_plus, whose own would be 384 x 384
    return {v: QwenImageEdit.from_pipeline(p, LENGTH, None if v == "edit" else 2048) for v, p in pipelines.items()}


@pytest.fixture
def own_sizes(monkeypatch: pytest.MonkeyPatch) -> None:
    """The pipelines scale every picture to a megapixel; here they leave it as it is."""
    areas: dict[float, tuple[int, int]] = {}

    def kept(_: int, ratio: float) -> tuple[int, int]:
        return areas[ratio]

    for height, width in [*SIZES, (32, 32)]:
        areas[width / height] = (width, height)
    monkeypatch.setattr(pipeline_qwenimage_edit, "calculate_dimensions", lambda area, ratio: (*kept(area, ratio), None))
    monkeypatch.setattr(pipeline_qwenimage_edit_plus, "calculate_dimensions", kept)


def states_of(condition: Condition, name: str) -> dict[str, torch.Tensor]:
    """What the pipelines take for the condition's text, whose padding they would cut."""
    [states] = unpadded(condition.tensors[name], condition.tensors[f"{name}_mask"])
    kind = "negative_prompt" if name.startswith("negative") else "prompt"
    return {f"{kind}_embeds": states[None], f"{kind}_embeds_mask": torch.ones(1, len(states), dtype=torch.long)}


def drawn_by(pipeline: Any, sources: Sequence[Image.Image], condition: Condition, guidance: float, seed: int) -> Any:
    height, width = condition.size
    noise, _ = noise_for((4, height // 4, width // 4), [seed])
    states = states_of(condition, "text") | (states_of(condition, "negative_text") if guidance > 1 else {})
    return pipeline(
        image=list(sources) if len(sources) > 1 else sources[0],
        **states,
        true_cfg_scale=guidance,
        height=height,
        width=width,
        num_inference_steps=3,
        latents=pack(noise),
        output_type="np",
    ).images


# --- against the pipelines ---


@pytest.mark.parametrize("guidance", [1.0, 4.0])
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("variant", KINDS)
def test_an_edited_picture_is_the_pipelines(
    pipelines: Any, models: Any, own_sizes: None, variant: str, size: tuple[int, int], guidance: float
) -> None:
    """Three steps of guided flow on the pipeline's network; and every row of a batch is what it is alone."""
    pipeline, model = pipelines[variant], models[variant]
    examples, seeds = [edit_at(i, size) for i in range(2)], [11, 12]
    condition = model.encode(examples, guidance)
    final = sample(model, model.network, ode_plan(model.schedule(3, size)), condition, seeds).final
    found = ((model.decode(final) + 1) / 2).permute(0, 2, 3, 1)
    for i, example in enumerate(examples):
        assert example.source is not None
        expected = drawn_by(pipeline, [example.source], condition.select([i]), guidance, seeds[i])
        torch.testing.assert_close(found[i : i + 1], torch.from_numpy(expected), atol=1e-4, rtol=0)


@pytest.mark.parametrize("variant", ["edit_plus", "2511"])
def test_an_example_with_two_source_images_is_the_pipelines(
    pipelines: Any, models: Any, own_sizes: None, variant: str
) -> None:
    """The first is the one that is edited; a batch of such examples is what they are alone."""
    pipeline, model = pipelines[variant], models[variant]
    examples = [replace(edit_at(i, (32, 64)), more_images=(picture(5 + i, 32, 64),)) for i in range(2)]
    condition = model.encode(examples, 4.0)
    assert [name for name in condition.tensors if name.startswith("picture")] == ["picture_0", "picture_1"]
    final = sample(model, model.network, ode_plan(model.schedule(3, (32, 64))), condition, [5, 6]).final
    found = ((model.decode(final) + 1) / 2).permute(0, 2, 3, 1)
    for i, example in enumerate(examples):
        assert example.source is not None
        sources = [example.source, *example.more_images]
        expected = torch.from_numpy(drawn_by(pipeline, sources, condition.select([i]), 4.0, 5 + i))
        torch.testing.assert_close(found[i : i + 1], expected, atol=1e-4, rtol=0)
    text = text_pairs(condition)[0]
    [numbered] = unpadded(text[0][:1], text[1][:1])
    [alone] = unpadded(*text_pairs(model.encode([replace(examples[0], more_images=())], 1.0))[0])
    tokens = len(byte_qwen_tokenizer()("Picture 2: <|vision_start|><|image_pad|><|image_pad|><|vision_end|>").input_ids)
    assert len(numbered) == len(alone) + tokens  # the text encoder reads both


@torch.no_grad()
def test_sources_at_time_0_are_what_2511_changes(models: Any) -> None:
    x, t, example = torch.randn(1, 4, 8, 16), torch.tensor([0.7]), edit_at(0, (32, 64))
    condition = models["edit_plus"].encode([example], 1.0)
    older, newer = (models[v].predict(models[v].network, x, t, condition) for v in ("edit_plus", "2511"))
    assert float((newer - older).abs().max()) > 1e-3


def test_two_pictures_of_different_sizes_are_edit_plus(pipelines: Any, models: Any, own_sizes: None) -> None:
    """Both follow the noisy tokens, in order, each with a place of its own."""
    pipeline, model = pipelines["edit_plus"], models["edit_plus"]
    sources = [picture(1, 32, 32), picture(2, 32, 64)]
    encoded = model.encode([edit_at(0, (32, 64))], 4.0)
    text, negative = ([*unpadded(*pair)] for pair in text_pairs(encoded))
    latents = [model.encode_picture(source) for source in sources]
    images = {}
    for name, order in (("given", latents), ("swapped", latents[::-1])):
        condition = model.condition_on(text, (32, 64), 4.0, negative, [order])
        final = sample(model, model.network, ode_plan(model.schedule(3, (32, 64))), condition, [5]).final
        images[name] = ((model.decode(final) + 1) / 2).permute(0, 2, 3, 1)
    expected = torch.from_numpy(drawn_by(pipeline, sources, encoded, 4.0, 5))
    torch.testing.assert_close(images["given"], expected, atol=1e-4, rtol=0)
    assert float((images["swapped"] - expected).abs().max()) > 2e-3  # 0.007; of the given order, at most 1e-4


def text_pairs(condition: Condition) -> list[tuple[torch.Tensor, torch.Tensor]]:
    c = condition.tensors
    return [(c[name], c[f"{name}_mask"]) for name in ("text", "negative_text") if name in c]


# --- text with pictures ---


@pytest.mark.parametrize("variant", VARIANTS)
def test_the_states_are_the_pipelines_once_it_says_where_the_picture_is(
    pipelines: Any, models: Any, variant: EditVariant, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The pipeline's own encoding, with the prefix of this tokenizer and `mm_token_type_ids` put back."""
    pipeline, model, example = pipelines[variant], models[variant], edit_at(1, (48, 24))
    assert example.source is not None
    shown = [model.shown(example.source)]
    monkeypatch.setattr(pipeline, "prompt_template_encode_start_idx", prefix_length(pipeline.tokenizer, variant))
    [ours] = unpadded(*text_pairs(model.encode([example], 4.0))[0])
    forgotten, _ = pipeline._get_qwen_prompt_embeds(example.prompt, shown)
    made = pipeline.processor(text=[chat(variant, example.prompt, 1)], images=shown, return_tensors="pt")
    encoder, stock = pipeline.text_encoder.model, pipeline.text_encoder.model.forward
    where = made["mm_token_type_ids"]
    monkeypatch.setattr(encoder, "forward", lambda *a, **k: stock(*a, **{**k, "mm_token_type_ids": where}))
    expected, _ = pipeline._get_qwen_prompt_embeds(example.prompt, shown)
    torch.testing.assert_close(ours[None], expected, atol=1e-5, rtol=1e-5)
    assert float((ours[None] - forgotten).abs().max()) > 1e-3  # what diffusers 0.42 makes with transformers 5


@pytest.mark.parametrize("variant", VARIANTS)
def test_what_stays_begins_with_the_picture_and_keeps_the_end_of_the_chat(models: Any, variant: EditVariant) -> None:
    """Token by token: the system part is cut off once, and padding is zeros behind."""
    tokenizer, example = byte_qwen_tokenizer(), edit_at(0, (32, 64))
    c = models[variant].encode([example], 4.0).tensors
    number = "Picture 1: " if variant == "edit_plus" else ""
    seen = "<|vision_start|><|image_pad|><|image_pad|><|vision_end|>"  # 28 x 56 of 32 x 64 pixels
    expected = f"{number}{seen}{example.prompt}<|im_end|>\n<|im_start|>assistant\n"
    ids = tokenizer(f"{template(variant).partition('{}')[0]}{expected}").input_ids
    drop, kept = prefix_length(tokenizer, variant), int(c["text_mask"].sum())
    assert tokenizer.decode(ids[drop:]) == expected and len(ids) - drop == kept
    assert not c["text"][0, kept:].any() and bool(c["text"][0, :kept].any(-1).all())
    assert int(c["negative_text_mask"].sum()) == kept - len(example.prompt) + len(NEGATIVE)


def test_a_picture_changes_the_states_and_so_does_the_prompt(models: Any) -> None:
    example = edit_at(0, (32, 64))
    texts = [
        models["edit"].encode([changed], 1.0).tensors["text"]
        for changed in (example, replace(example, source=picture(9, 32, 64)), replace(example, prompt="Make it big."))
    ]
    assert all(float((text - texts[0]).abs().max()) > 1e-3 for text in texts[1:])


def test_chats_are_what_the_chat_template_makes() -> None:
    """So the ids that a trainer generates from are those that condition, if its messages are the system text and the
    pictures with the prompt."""
    processor = tiny_qwen_processor()
    for task, pictures in (("draw", 0), ("edit", 1), ("edit_plus", 1), ("edit_plus", 2)):
        system = template(task).partition("<|im_end|>")[0].removeprefix("<|im_start|>system\n")
        content = [*[{"type": "image"}] * pictures, {"type": "text", "text": "Do it."}]
        messages = [{"role": "system", "content": system}, {"role": "user", "content": content}]
        options = {"add_vision_id": True} if task == "edit_plus" else {}
        rendered = processor.apply_chat_template(messages, add_generation_prompt=True, **options)
        assert rendered == chat(task, "Do it.", pictures)


class Counted(list[str]):
    """A tokenizer of the released size in which the system part takes a given number of tokens."""

    def __init__(self, count: int) -> None:
        self.count = count

    def __len__(self) -> int:
        return 151_665

    def __call__(self, text: str) -> Any:
        assert text.endswith("<|im_start|>user\n")
        return SimpleNamespace(input_ids=[0] * self.count)


@pytest.mark.parametrize(("task", "count"), [("draw", 34), ("edit", 64), ("edit_plus", 64)])
def test_with_the_released_tokenizer_the_prefix_is_the_known_one(task: Any, count: int) -> None:
    assert prefix_length(Counted(count), task) == count
    with pytest.raises(ModelFilesError, match=f"{count + 1} tokens before the prompt instead of {count}"):
        prefix_length(Counted(count + 1), task)


def test_a_long_prompt_is_cut_and_the_picture_never(pipelines: Any, caplog: pytest.LogCaptureFixture) -> None:
    pipeline, source = pipelines["edit"], picture(1, 32, 64)
    end = len(byte_qwen_tokenizer()("<|im_end|>\n<|im_start|>assistant\n").input_ids)
    room = 4 + 5 + end  # the picture with its marks, and five letters
    parts = (pipeline.text_encoder, pipeline.tokenizer, pipeline.processor, "edit")
    short = ChatStates(*parts, room)
    expected = ChatStates(*parts, 900)("Paint", [source])
    assert torch.equal(short("Painting", [source]), expected)
    assert short.counts(["Painting"], [2]) == [room + 3]
    assert not caplog.records  # `retouch.families.prompts` warns, once for all prompts
    assert len(ChatStates(*parts, 900)("x" * 800, [source])) == 800 + 4 + end  # not at 512
    with pytest.raises(ValueError, match=rf"take {4 + end} tokens, but model.max_sequence_length is {3 + end}"):
        ChatStates(*parts, 3 + end)("Paint", [source])


def test_encoding_is_without_dropout_and_gradients_and_leaves_training_as_it_was(pipelines: Any) -> None:
    encoder = QwenImageEdit.tiny().text_encoder
    encoder.model.language_model.layers[0].mlp.down_proj = torch.nn.Sequential(
        encoder.model.language_model.layers[0].mlp.down_proj, torch.nn.Dropout(0.5)
    )
    states = ChatStates(encoder, pipelines["edit"].tokenizer, pipelines["edit"].processor, "edit", LENGTH)
    expected = states("Paint", [picture(1, 32, 64)])
    encoder.train()
    encoder.model.visual.eval()
    found = states("Paint", [picture(1, 32, 64)])
    assert torch.equal(found, expected) and not found.requires_grad
    assert encoder.training and not encoder.model.visual.training


def test_edit_plus_shows_its_encoder_a_small_picture() -> None:
    """196 tokens of a square, whatever its size; edit shows what there is."""
    edit, plus = QwenImageEditModel(), QwenImageEditModel(variant="edit_plus", path="Qwen/Qwen-Image-Edit-2509")
    assert plus.shown_size((1024, 1024)) == (384, 384)
    assert plus.vision_tokens((1024, 1024)) == 196
    assert edit.shown_size((1024, 1024)) == (1024, 1024)
    for size in [(1024, 1024), (640, 1536), (1328, 800), (720, 1280)]:
        width, height = pipeline_qwenimage_edit_plus.calculate_dimensions(384 * 384, size[1] / size[0])
        assert plus.shown_size(size) == (height, width)
    processor = tiny_qwen_processor()
    for size in [(32, 64), (100, 60), (48, 24)]:
        grid = processor.image_processor([picture(0, *size)], return_tensors="pt")["image_grid_thw"]
        assert edit.vision_tokens(size) == int(grid.prod()) // 4


# --- the contract of a family ---


@pytest.mark.parametrize("variant", KINDS)
def test_rows_do_not_see_each_other(models: Any, variant: str) -> None:
    model, examples = models[variant], [edit_at(i, (32, 64)) for i in range(3)]
    x, t = torch.randn(3, 4, 8, 16), torch.tensor([0.9, 0.5, 0.1])
    together = model.predict(model.network, x, t, model.encode(examples, 4.0))
    for i in range(3):
        alone = model.predict(model.network, x[i : i + 1], t[i : i + 1], model.encode(examples[i : i + 1], 4.0))
        torch.testing.assert_close(together[i : i + 1], alone, atol=1e-5, rtol=1e-5)


def test_padding_changes_nothing(pipelines: Any, models: Any) -> None:
    x, t, example = torch.randn(1, 4, 8, 16), torch.tensor([0.6]), edit_at(0, (32, 64))
    longer, model = QwenImageEdit.from_pipeline(pipelines["edit"], LENGTH + 40), models["edit"]
    expected = model.predict(model.network, x, t, model.encode([example], 4.0))
    torch.testing.assert_close(longer.predict(longer.network, x, t, longer.encode([example], 4.0)), expected)


def test_a_mask_is_kept_for_losses_and_shown_to_nobody(models: Any) -> None:
    model, example = models["edit"], random_example(1, 32, 64)
    x, t = torch.randn(1, 4, 8, 16), torch.tensor([0.6])
    masked, plain = model.encode([example], 4.0), model.encode([replace(example, mask=None)], 4.0)
    assert plain.mask is None and masked.mask is not None and float(masked.mask.sum()) == (32 - 8) * (64 - 13)
    assert torch.equal(model.predict(model.network, x, t, masked), model.predict(model.network, x, t, plain))


def test_errors_say_what_to_do(models: Any) -> None:
    model = models["edit"]
    with pytest.raises(ValueError, match="images are 36 x 64; qwen_image_edit needs multiples of 8"):
        model.encode([edit_at(0, (36, 64))], 4.0)
    with pytest.raises(ValueError, match="example 1 has no source image; qwen_image_edit changes one"):
        model.encode([Example(1, "Make it red.", size=(32, 64))], 4.0)
    both = replace(edit_at(0, (32, 64)), more_images=(picture(1, 32, 64),))
    with pytest.raises(
        ValueError, match=r"example 0 has 2 source images, but variant=edit reads one; set model\.variant"
    ):
        model.encode([both], 4.0)
    with pytest.raises(ValueError, match=r"examples have \[1, 2\] source images; a batch needs as many in each"):
        models["edit_plus"].encode([edit_at(1, (32, 64)), both], 4.0)
    assert model.prompts is None  # which encode a prompt without its image
    text, latents = torch.randn(5, 32), model.encode_picture(picture(1, 32, 64))
    with pytest.raises(ValueError, match="qwen_image_edit needs images to edit; given 0 a row"):
        model.condition_on([text], (32, 64))
    with pytest.raises(ValueError, match=r"guidance_scale is 4.0 with 0 negative text states"):
        model.condition_on([text], (32, 64), 4.0, pictures=[[latents]])
    with pytest.raises(ValueError, match=r"guidance_scale is 1.0 with 1 negative text states"):
        model.condition_on([text], (32, 64), 1.0, [text], [[latents]])
    with pytest.raises(ValueError, match="2 rows of text states, but 1 negative ones"):
        model.condition_on([text] * 2, (32, 64), 4.0, [text], [[latents]] * 2)
    with pytest.raises(ValueError, match="2 rows of text states, but images to edit of 1"):
        model.condition_on([text] * 2, (32, 64), pictures=[[latents]])


# --- loading ---


@pytest.mark.usefixtures("_torchvision_installed")
@pytest.mark.parametrize("kind", ["edit", "2511"])
def test_a_saved_folder_loads_to_the_same_model(pipelines: Any, models: Any, kind: str, tmp_path: Path) -> None:
    pipelines[kind].save_pretrained(tmp_path)
    variant: EditVariant = "edit" if kind == "edit" else "edit_plus"
    options: dict[str, Any] = {
        "path": str(tmp_path),
        "variant": variant,
        "max_sequence_length": LENGTH,
        "vision_pixels": models[kind].config.vision_pixels,
    }
    model, loaded = models[kind], load_model(QwenImageEditModel(**options, dtype="fp32", train=TrainFull()))
    x, t, example = torch.randn(1, 4, 8, 16), torch.tensor([0.7]), edit_at(1, (32, 64))
    expected = model.predict(model.network, x, t, model.encode([example], 4.0))
    torch.testing.assert_close(loaded.predict(loaded.network, x, t, loaded.encode([example], 4.0)), expected)
    assert loaded.spec == model.spec
    low = load_model(QwenImageEditModel(**options, dtype="bf16", train=TrainLora()))
    assert {p.dtype for p in low.network.parameters()} == {torch.bfloat16}
    assert low.predict(low.network, x, t, low.encode([example], 4.0)).dtype == torch.float32
    other = "edit" if variant == "edit_plus" else "edit_plus"
    with pytest.raises(ModelFilesError, match="set another path, or the family of it"):
        load_model(QwenImageEditModel(**options | {"variant": other}))
    without = QwenImageEdit.from_config(QwenImageEditModel(**options, dtype="fp32"), with_text=False)
    with pytest.raises(RuntimeError, match="opened without its text encoder"):
        without.encode([example], 4.0)


def test_a_hub_id_is_that_of_the_variant() -> None:
    other = r"is 'edit'; set model\.variant=edit_plus, or model\.path=Qwen/Qwen-Image-Edit \["
    with pytest.raises(ValueError, match=other):
        QwenImageEditModel(path="Qwen/Qwen-Image-Edit-2509")
    for year_month in ("2509", "2511"):
        path = f"Qwen/Qwen-Image-Edit-{year_month}"
        assert QwenImageEditModel(variant="edit_plus", path=path).path == path


# --- GRPO of the text encoder ---


def test_the_policy_reads_all_source_images(models: Any) -> None:
    """At the size of the text encoder; the first is the one whose latents come first."""
    example = replace(edit_at(0, (32, 64)), more_images=(picture(5, 32, 64),))
    run: Any = SimpleNamespace(diffusion_model=models["edit_plus"])
    assert [image.size for image in VlmRun.shown(run, example)] == [(64, 32)] * 2
    assert sources_of(example) == (example.source, *example.more_images)
    assert sources_of(replace(example, source=None)) == ()
