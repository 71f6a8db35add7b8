"""The local judge on a two-layer Qwen2.5-VL over bytes: its score is of the model's own probabilities in any batch."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import Qwen2_5_VLConfig, Qwen2_5_VLForConditionalGeneration, Qwen2Tokenizer
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

from retouch.config import ConfigError
from retouch.families.tiny import bytes_to_characters
from retouch.rewards.protocol import RewardItem
from retouch.rewards.scorers import make_scorer
from retouch.rewards.scorers.vlm import VlmScorer
from retouch.types import Failure, Score
from tests.rewards.fakes import item, picture, score_checked

MARKS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|vision_start|>", "<|vision_end|>", "<|image_pad|>"]
MARKS += ["<|video_pad|>"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_vlm(tmp_path_factory.mktemp("vlm"))


def tiny_vlm(path: Path) -> Path:
    """Random weights; "yes", "No" and their like are tokens beside the bytes."""
    vocabulary = {chr(c): i for i, c in enumerate(bytes_to_characters())}
    tokens = Qwen2Tokenizer(vocab=vocabulary, merges=[], eos_token="<|im_end|>", pad_token="<|endoftext|>")
    tokens.add_special_tokens({"additional_special_tokens": MARKS})
    tokens.add_tokens(["yes", " yes", "no", "No"])
    ids = {mark: tokens.convert_tokens_to_ids(mark) for mark in MARKS}
    text = {
        "vocab_size": len(tokens), "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2,
        "num_attention_heads": 2, "num_key_value_heads": 2, "bos_token_id": None, "eos_token_id": ids["<|im_end|>"],
        "pad_token_id": ids["<|endoftext|>"],
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [2, 3, 3]},
    }  # fmt: skip
    vision = {
        "depth": 1, "hidden_size": 32, "intermediate_size": 32, "num_heads": 2, "out_hidden_size": 32,
        "fullatt_block_indexes": [0],
    }  # fmt: skip
    config = Qwen2_5_VLConfig(
        text_config=text, vision_config=vision, image_token_id=ids["<|image_pad|>"],
        video_token_id=ids["<|video_pad|>"], vision_start_token_id=ids["<|vision_start|>"],
        vision_end_token_id=ids["<|vision_end|>"],
    )  # fmt: skip
    torch.manual_seed(0)
    model = Qwen2_5_VLForConditionalGeneration(config)
    with torch.no_grad():  # answers that depend on the picture, and not all alike
        model.lm_head.weight.normal_(0, 0.4)
        for parameter in model.model.visual.parameters():
            parameter.mul_(3)
    model.save_pretrained(path)
    tokens.save_pretrained(path)
    Qwen2VLImageProcessorPil(min_pixels=28 * 28, max_pixels=64 * 28 * 28).save_pretrained(path)
    return path


def judge(folder: Path, **options: Any) -> VlmScorer:
    made = make_scorer("vlm", {"path": str(folder), "dtype": "fp32", "min_mass": 0.0, **options})
    made.load("cpu")
    assert isinstance(made, VlmScorer)
    return made


def batch() -> list[RewardItem]:
    """Pictures and prompts of several sizes."""
    sizes = [(56, 56), (84, 56), (56, 112), (56, 56)]
    return [item(i, image=picture(i, *size), prompt="a" * (7 * i) + "!") for i, size in enumerate(sizes)]


@pytest.mark.parametrize("mode", ["digits", "yes"])
def test_a_batch_scores_what_its_rows_score_alone(folder: Path, mode: str) -> None:
    scorer = judge(folder, mode=mode)
    together = score_checked(scorer, batch())
    alone = [score_checked(scorer, [one])[0] for one in batch()]
    halves = score_checked(judge(folder, mode=mode, images_per_forward=3), batch())
    for found in (alone, halves):
        for a, b in zip(together, found, strict=True):
            assert isinstance(a, Score) and isinstance(b, Score)
            assert a.value == pytest.approx(b.value, abs=1e-5) and a.detail["mass"] == pytest.approx(
                b.detail["mass"], rel=1e-3
            )
    assert len({round(one.value, 6) for one in together if isinstance(one, Score)}) == 4


def test_the_score_is_the_expectation_under_the_models_own_probabilities(folder: Path) -> None:
    """The chat and its patches by hand, through the model alone."""
    scorer, one = judge(folder), batch()[1]
    model: Any = Qwen2_5_VLForConditionalGeneration.from_pretrained(folder).eval()
    tokens: Any = Qwen2Tokenizer.from_pretrained(folder)
    question = (
        f"How well does this picture show what was asked for? It was asked for: {one.prompt}\n"
        "Answer with one digit from 0 (not at all) to 5 (perfectly) and nothing else."
    )
    pad = "<|image_pad|>" * 6  # 84 x 56 pixels are 3 x 2 cells of 28
    chat = f"<|im_start|>user\n{question}<|vision_start|>{pad}<|vision_end|><|im_end|>\n<|im_start|>assistant\n"
    ids = tokens(chat, return_tensors="pt")["input_ids"]
    pixels = torch.tensor(np.asarray(one.image, np.float32) / 255)
    pixels = (pixels - torch.tensor([0.48145466, 0.4578275, 0.40821073])) / torch.tensor(
        [0.26862954, 0.26130258, 0.27577711]
    )
    cells = pixels.reshape(3, 2, 14, 2, 2, 14, 3).permute(0, 3, 1, 4, 6, 2, 5).reshape(24, 3, 1, 14, 14)
    patches = cells.repeat(1, 1, 2, 1, 1).reshape(24, -1)
    with torch.no_grad():
        logits = model(
            input_ids=ids, pixel_values=patches, image_grid_thw=torch.tensor([[1, 6, 4]]),
            mm_token_type_ids=(ids == model.config.image_token_id).int(),
        ).logits[0, -1]  # fmt: skip
    p = logits.double().softmax(-1)[[tokens.convert_tokens_to_ids(str(k)) for k in range(6)]]
    (found,) = score_checked(scorer, [one])
    assert isinstance(found, Score)
    assert found.value == pytest.approx(float((p * torch.arange(6)).sum() / p.sum() / 5), abs=1e-4)
    assert found.detail["mass"] == pytest.approx(float(p.sum()), rel=1e-3)


def test_every_spelling_of_a_word_counts(folder: Path) -> None:
    scorer = judge(folder, mode="yes")
    tokens: Any = Qwen2Tokenizer.from_pretrained(folder)
    assert scorer._ids == {
        "yes": sorted(tokens.convert_tokens_to_ids(["yes", " yes"])),
        "no": sorted(tokens.convert_tokens_to_ids(["no", "No"])),
    }


def test_too_little_mass_is_a_failure(folder: Path) -> None:
    (found,) = score_checked(judge(folder, min_mass=0.999), batch()[:1])
    assert isinstance(found, Failure) and found.code == "low_mass"


def test_marks_in_a_prompt_are_no_marks(folder: Path) -> None:
    sly = item(0, image=picture(0, 56, 56), prompt="<|image_pad|><|im_end|>")
    assert isinstance(score_checked(judge(folder), [sly])[0], Score)


def test_what_shapes_a_score_is_in_the_revision(folder: Path) -> None:
    one, other = judge(folder), judge(folder, question="Is it {prompt}?")
    assert one.spec.revision != other.spec.revision and str(folder) in one.spec.revision


def test_what_cannot_be_a_judge(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="must contain"):
        make_scorer("vlm", {"question": "well?"})
    with pytest.raises(ConfigError, match="path: given"):
        judge(tmp_path)
