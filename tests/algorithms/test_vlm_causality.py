"""On the trained tiny editor: the picture follows the completion, not what the prompt's states say of the answer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from random import Random
from typing import Any

import numpy as np
import pytest
import torch

from retouch.algorithms.vlm_grpo.images import ImageRequest, freeze, generate_images
from retouch.algorithms.vlm_grpo.responses import Responses, chat_messages, encode_response, prepare_processor, tokenize
from retouch.families.loading import component_path, load_component
from retouch.families.qwen.text import (
    ImageTextProcessor,
    prefix_length,
)
from retouch.families.qwen_image_edit.model import QwenImageEdit
from retouch.families.qwen_image_edit.spec import QwenImageEditModel
from retouch.files.model_files import tiny_path
from retouch.rollout.sampler import to_uint8
from retouch.tiny.edits import (
    COLOURS,
    SIDE,
    Edit,
    colour_share,
    draw_edit,
)

pytestmark = pytest.mark.skipif(not tiny_path("qwen_image_edit").is_dir(), reason="needs the trained tiny base")

TASKS = 8


@pytest.fixture(scope="module")
def editor() -> dict[str, Any]:
    from transformers import Qwen2_5_VLForConditionalGeneration

    path = component_path("tiny", "qwen_image_edit")
    processor = load_component(ImageTextProcessor, path, "processor", None)
    prepare_processor(processor)
    painter = QwenImageEdit.from_config(QwenImageEditModel(path="tiny", dtype="fp32"), with_text=False)
    freeze(painter)
    policy = load_component(Qwen2_5_VLForConditionalGeneration, path, "text_encoder", torch.float32)
    return {"processor": processor, "painter": painter, "policy": policy}


@pytest.fixture(scope="module")
def tasks() -> list[Edit]:
    random = Random(11)
    return [draw_edit(random, "held_out") for _ in range(TASKS)]


def drawn(editor: dict[str, Any], tasks: Sequence[Edit], words: Sequence[str]) -> list[np.ndarray[Any, Any]]:
    """Pictures of tasks to which these words were answered; all from one noise."""
    processor = editor["processor"]
    end = processor.tokenizer.eos_token_id
    chats = [chat_messages("edit", task.instruction) for task in tasks]
    questions: Responses = tokenize(processor, "edit", chats, [[task.source] for task in tasks])
    answers = replace(questions, completion_ids=[[*processor.tokenizer(word).input_ids, end] for word in words])
    states, _ = encode_response(
        editor["policy"],
        answers,
        pad_token_id=processor.tokenizer.pad_token_id,
        drop=prefix_length(processor.tokenizer, "edit"),
    )
    drawings = [
        ImageRequest(text, 5, (SIDE, SIDE), None, (task.source,)) for text, task in zip(states, tasks, strict=True)
    ]
    return [to_uint8(image)[0].numpy() for image in generate_images(editor["painter"], drawings, 4)]


def shares(pictures: Sequence[Any], tasks: Sequence[Edit], colours: Sequence[str]) -> float:
    """Mean share of the shapes in these colours."""
    rows = zip(pictures, tasks, colours, strict=True)
    return float(np.mean([colour_share(picture, np.asarray(task.mask), colour) for picture, task, colour in rows]))


def test_swapping_completions_swaps_the_drawings(editor: dict[str, Any], tasks: list[Edit]) -> None:
    words = [list(COLOURS)[i % 4] for i in range(TASKS)]
    swapped = [words[i ^ 1] for i in range(TASKS)]
    first, second = drawn(editor, tasks, words), drawn(editor, tasks, swapped)
    assert shares(first, tasks, words) > 0.9
    assert shares(second, tasks, swapped) > 0.9
    assert shares(second, tasks, words) < 0.1


def test_the_instruction_alone_says_nothing_to_the_painter(editor: dict[str, Any], tasks: list[Edit]) -> None:
    """One word after every instruction: one colour, whatever was asked for."""
    for colour in COLOURS:
        assert shares(drawn(editor, tasks, [colour] * TASKS), tasks, [colour] * TASKS) > 0.9


def test_a_blank_completion_leaves_the_picture(editor: dict[str, Any], tasks: list[Edit]) -> None:
    blank = drawn(editor, tasks, [""] * TASKS)
    sources = [np.asarray(task.source) for task in tasks]
    kept = [
        next(c for c in COLOURS if colour_share(s, np.asarray(t.mask), c) == 1)
        for s, t in zip(sources, tasks, strict=True)
    ]
    assert shares(blank, tasks, kept) > 0.9
    assert shares(blank, tasks, [task.colour for task in tasks]) < 0.1
