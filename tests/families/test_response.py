"""States of what a policy saw and said: the ids as they are, every field of the processor, one pass, padding dropped
once."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from peft import LoraConfig, get_peft_model
from PIL import Image
from torch import Tensor

from retouch.algorithms.vlm_grpo.responses import (
    Responses,
    ResponseTooLong,
    chat_messages,
    encode_response,
    model_inputs,
    prepare_processor,
    tokenize,
)
from retouch.families.qwen.text import (
    PREFIX,
    Task,
    chat,
    prefix_length,
    system_text,
)
from retouch.families.qwen.tiny import byte_qwen_tokenizer, tiny_qwen_processor, tiny_qwen_vl

PROMPTS = ["make it blue", "a", "turn the small shape into a lemon, please"]
ANSWERS = ["blue", "a much, much longer answer", ""]


def picture(seed: int, size: tuple[int, int] = (56, 84)) -> Image.Image:
    return Image.fromarray(np.random.default_rng(seed).integers(0, 256, (*size, 3), np.uint8))


@pytest.fixture(scope="module")
def processor() -> Any:
    made = tiny_qwen_processor()
    prepare_processor(made)
    return made


@pytest.fixture(scope="module")
def policy() -> Any:
    torch.manual_seed(1)
    return tiny_qwen_vl()


def said(processor: Any, pictures: list[list[Image.Image]] | None = None, task: Task = "edit") -> Responses:
    """Three chats with answers of different lengths, their first pictures of different sizes."""
    shown = pictures or [[picture(0)], [picture(1, (28, 28))], [picture(2, (84, 28))]]
    questions = tokenize(processor, task, [chat_messages(task, prompt) for prompt in PROMPTS], shown)
    answers = [[*processor.tokenizer(answer).input_ids, processor.tokenizer.eos_token_id] for answer in ANSWERS]
    return replace(questions, completion_ids=answers)


def encoded(policy: Any, responses: Responses, processor: Any, **options: Any) -> list[Tensor]:
    return encode(policy, responses, processor, **options)[0]


def encode(policy: Any, responses: Responses, processor: Any, **options: Any) -> tuple[list[Tensor], list[bool]]:
    drop = prefix_length(processor.tokenizer, "edit")
    return encode_response(policy, responses, pad_token_id=processor.tokenizer.pad_token_id, drop=drop, **options)


@pytest.mark.parametrize("task", PREFIX)
def test_the_chat_is_the_diffusion_models_own_token_by_token(task: Task, processor: Any) -> None:
    """What the policy is asked = what the pipeline would condition on: template, pictures and all."""
    pictures = [] if task == "draw" else [picture(0)]
    ours = tokenize(processor, task, [chat_messages(task, PROMPTS[0])], [pictures])
    text = chat(task, PROMPTS[0], len(pictures))
    stock: Any = processor(text=[text], images=pictures or None, return_tensors="pt")
    assert list(ours.prompt_ids[0]) == stock["input_ids"][0].tolist()
    drop = prefix_length(processor.tokenizer, task)
    before = processor.tokenizer.decode(ours.prompt_ids[0][:drop])
    assert before == f"<|im_start|>system\n{system_text(task)}<|im_end|>\n<|im_start|>user\n"
    assert system_text(task).startswith("Describe the")


def test_a_padded_batch_is_its_rows(policy: Any, processor: Any) -> None:
    responses = said(processor)
    together = encoded(policy, responses, processor)
    alone = [encoded(policy, responses.rows(i, i + 1), processor)[0] for i in range(3)]
    in_twos = encoded(policy, responses, processor, batch_size=2)
    assert len({len(states) for states in together}) == 3  # lengths differ, so that there was padding
    for one, two, three in zip(together, alone, in_twos, strict=True):
        assert one.shape == two.shape
        assert float((one - two).abs().max()) < 1e-5
        assert float((three - two).abs().max()) < 1e-5


def test_states_are_those_of_the_very_ids_without_the_system_part(policy: Any, processor: Any) -> None:
    responses = said(processor).rows(0, 1)
    drop = prefix_length(processor.tokenizer, "edit")
    inputs = model_inputs(responses, processor.tokenizer.pad_token_id)
    assert inputs["input_ids"][0].tolist() == [*responses.prompt_ids[0], *responses.completion_ids[0]]
    with torch.no_grad():
        whole = policy.model(**inputs).last_hidden_state[0]
    [states] = encoded(policy, responses, processor)
    assert len(states) == len(whole) - drop
    assert torch.equal(states, whole[drop:])


def test_ids_that_read_the_same_are_not_the_same(policy: Any, processor: Any) -> None:
    """The letters "<|im_end|>" are not the mark: decoding and tokenising again would make them one."""
    question = said(processor).rows(0, 1)
    mark = processor.tokenizer.eos_token_id
    letters = [processor.tokenizer.convert_tokens_to_ids(c) for c in "<|im_end|>"]
    as_mark, as_letters = (replace(question, completion_ids=[ids]) for ids in ([mark], letters))
    decoded = [processor.tokenizer.decode(list(r.completion_ids[0])) for r in (as_mark, as_letters)]
    assert decoded[0] == decoded[1]
    lengths = [len(encoded(policy, r, processor)[0]) for r in (as_mark, as_letters)]
    assert lengths[1] - lengths[0] == len("<|im_end|>") - 1


def test_pictures_go_along_with_their_positions(policy: Any, processor: Any) -> None:
    responses = said(processor)
    assert set(responses.fields) == {"pixel_values", "image_grid_thw", "mm_token_type_ids"}
    full = encoded(policy, responses, processor)
    without = {name: value for name, value in responses.fields.items() if name != "mm_token_type_ids"}
    lost = encoded(policy, replace(responses, fields=without), processor)
    assert float((full[0] - lost[0]).abs().max()) > 1e-3  # 2 x 3 tokens: rows and columns, not one after another
    other = said(processor, [[picture(7)], [picture(1, (28, 28))], [picture(2, (84, 28))]])
    seen = encoded(policy, other, processor)
    assert float((full[0] - seen[0]).abs().max()) > 1e-3
    assert torch.allclose(full[1], seen[1], atol=1e-5)  # each row has its own picture


def test_rows_take_their_own_pictures(processor: Any) -> None:
    responses = said(processor, [[picture(0)], [], [picture(2), picture(3, (28, 28))]], "edit_plus")
    last = responses.rows(2, 3)
    alone = tokenize(
        processor, "edit_plus", [chat_messages("edit_plus", PROMPTS[2])], [[picture(2), picture(3, (28, 28))]]
    )
    assert list(last.prompt_ids[0]) == list(alone.prompt_ids[0])
    for name in ("pixel_values", "image_grid_thw"):
        assert torch.equal(torch.as_tensor(last.fields[name]), torch.as_tensor(alone.fields[name]))
    assert len(responses.rows(1, 2).fields["pixel_values"]) == 0


def test_no_dropout_no_gradient_and_the_adapter_is_in(policy: Any, processor: Any) -> None:
    torch.manual_seed(2)
    adapted: Any = get_peft_model(
        tiny_qwen_vl(),
        LoraConfig(r=4, lora_dropout=0.5, target_modules=["q_proj", "v_proj"], init_lora_weights=False),
    )
    adapted.train()
    responses = said(processor)
    first, second = encoded(adapted, responses, processor), encoded(adapted, responses, processor)
    assert all(torch.equal(a, b) and not a.requires_grad for a, b in zip(first, second, strict=True))
    assert adapted.training and all(module.training for module in adapted.modules())  # as it was
    base = encoded(adapted, responses, processor, adapter=False)
    assert float((first[0] - base[0]).abs().max()) > 1e-2
    plain = encoded(adapted.unload(), responses, processor)
    assert all(torch.allclose(a, b, atol=1e-6) for a, b in zip(base, plain, strict=True))


def test_what_is_too_long_is_an_error_or_counted(policy: Any, processor: Any) -> None:
    responses = said(processor)
    full = encoded(policy, responses, processor)
    limit = sorted(len(states) for states in full)[1]
    with pytest.raises(ResponseTooLong, match=rf"max_sequence_length is {limit}; .*on_overflow=truncate"):
        encode(policy, responses, processor, limit=limit)
    states, cut = encode(policy, responses, processor, limit=limit, truncate=True)
    assert cut == [len(s) > limit for s in full] and sum(cut) == 1
    assert all(torch.equal(a, b[:limit]) for a, b in zip(states, full, strict=True))


def test_an_empty_answer_is_the_question(policy: Any, processor: Any) -> None:
    responses = said(processor)
    nothing = encoded(policy, replace(responses, completion_ids=[[]] * 3), processor)
    full = encoded(policy, responses, processor)
    for short, long in zip(nothing, full, strict=True):
        assert torch.allclose(short, long[: len(short)], atol=1e-5)  # the model only looks back
    assert len(byte_qwen_tokenizer()) == len(processor.tokenizer)
