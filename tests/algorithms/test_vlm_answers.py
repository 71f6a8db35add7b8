"""Answers of a trained text encoder in evaluations and in use: how they are drawn, scored and counted."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from transformers import (
    AutoConfig,
    AutoImageProcessor,
    AutoTokenizer,
    GenerationConfig,
    Qwen2_5_VLForConditionalGeneration,
)

pytest.importorskip("trl")

from retouch.algorithms.vlm_grpo import scoring as vlm_scoring
from retouch.algorithms.vlm_grpo.recipe import VlmTrainer
from retouch.algorithms.vlm_grpo.responses import generate_completions, model_inputs
from retouch.algorithms.vlm_grpo.run import name_for_vllm
from retouch.algorithms.vlm_grpo.scoring import CompletionScorer
from retouch.config import ConfigError
from retouch.families.loading import load_component
from retouch.families.qwen.text import ImageTextProcessor
from retouch.observe import plateau
from retouch.observe.run_dir import read_rows
from retouch.training.scoring import RewardOutage
from retouch.types import Failure
from tests.command_line import retouch
from tests.selection import default

from . import completion_rewards, vlm_runs
from .test_vlm_grpo import answered, parts_of
from .vlm_runs import RunFile, records, train, vlm_file

__all__ = ["parts_of", "vlm_file"]


def reward(name: str, module: str = __name__, **options: Any) -> dict[str, Any]:
    return {"scorer": "fn", "fn": f"{module}:{name}", "paste_back": False, **options}


def fail_the_second(items: list[Any]) -> list[Any]:
    """`letters`, but no score of example 1."""
    broken = Failure("bad_item", "cannot be scored", retryable=False)
    return [broken if item.group == 1 else v for item, v in zip(items, completion_rewards.letters(items), strict=True)]


def test_a_failed_reward_is_reported_and_ends_no_comparison(parts_of: Any) -> None:
    parts, _ = parts_of(rewards={"letters": reward("fail_the_second")})
    scored, failed = answered(parts, [parts.data[0], parts.data[1]], 0, "eval", 0, score=True)
    assert scored.reward is not None and failed.reward is None


def rising(items: list[Any]) -> list[float]:
    CALLS.append("rising")
    return [float(CALLS.count("rising"))] * len(items)


def falling(items: list[Any]) -> list[float]:
    CALLS.append("falling")
    return [-float(CALLS.count("falling"))] * len(items)


CALLS: list[str] = []


@pytest.mark.parametrize("then", default(["stop", "warn"], lambda then: then == "stop"))
def test_gold_that_falls_is_an_alarm(vlm_file: RunFile, tmp_path: Path, then: str) -> None:
    """A reward whose name sounds like a duration rises. With fewer than eight examples, all of them fall by chance more
    often than the level of the second comparison permits."""
    CALLS.clear()
    file = vlm_file(
        rewards={"runtime": reward("rising"), "gold": reward("falling", role="gold")},
        training__eval_every=1,
        evaluation={"num_examples": {"stop": 6, "warn": 8}[then], "on_gold_fall": then},
    )
    outcome = train(file)
    steps = [1] if then == "stop" else [1, 2]
    assert outcome.code == (3 if then == "stop" else 0), outcome.err
    alarms = [record for record in records(tmp_path / "a", "event") if record["event"] == "alarm"]
    assert [alarm["step"] for alarm in alarms] == steps
    fell = "gold, which is not trained on, fell by"
    assert all("rose by" in alarm["alarm"] and fell in alarm["alarm"] for alarm in alarms)
    assert [record["step"] for record in records(tmp_path / "a")] == steps
    assert [path.name for path in (tmp_path / "a/checkpoints").iterdir()] == [f"step-{steps[-1]:06d}"]
    assert all(record["reward/runtime"] > 0 and "step_time" not in record for record in records(tmp_path / "a"))


def risen(items: list[Any]) -> list[float]:
    CALLS.append("risen")
    return [float(CALLS.count("risen") > 1)] * len(items)


def test_a_run_stops_at_its_plateau(vlm_file: RunFile, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    CALLS.clear()
    for name, value in (("EACH", 1), ("FIRST", 2), ("PLATEAU_EXAMPLES", 2)):
        monkeypatch.setattr(plateau, name, value)
    gold = {"letters": reward("rising"), "gold": reward("risen", role="gold")}
    more = {"training__eval_every": 1, "training__stop_on_plateau": "gold", "training__max_steps": 4}
    outcome = train(vlm_file(rewards=gold, evaluation={"num_examples": 2}, **more))
    assert outcome.code == 0
    assert "training.stop_on_plateau: gold no longer rises (+0 " in outcome.err + outcome.out
    assert [record["step"] for record in records(tmp_path / "a")] == [1, 2]
    assert [path.name for path in (tmp_path / "a/checkpoints").iterdir()] == ["step-000002"]


def test_evaluation_examples_that_are_trained_on_are_refused_unless_asked_for(parts_of: Any) -> None:
    same = {"format": "manifest", "path": str(vlm_runs.tasks()), "resolution": 32}
    with pytest.raises(
        ConfigError, match=r"are trained on: .* same image with the same prompt .*set evaluation.allow_overlap=true"
    ):
        parts_of(evaluation={"data": same})
    parts, _ = parts_of(evaluation={"data": same, "allow_overlap": True})
    assert not parts.eval_is_held_out


def test_gold_rewards_are_of_evaluations_alone(parts_of: Any) -> None:
    module = completion_rewards.__name__
    both = {"letters": reward("letters", module), "gold": reward("letters", module, role="gold")}
    parts, _ = parts_of(rewards=both)
    [scored] = answered(parts, [parts.data[0]], 0, "eval", 0, score=True)
    assert scored.outcomes["gold"] == scored.outcomes["letters"]
    # gold adds nothing to the sum
    assert scored.combined == [scored.outcomes["letters"][0].value]  # type: ignore[union-attr]


def test_evaluations_have_steps_of_their_own(parts_of: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    taken: list[int] = []
    real = vlm_scoring.generate_images

    def watch(painter: Any, drawings: Any, steps: int, *rest: Any) -> Any:
        taken.append(steps)
        return real(painter, drawings, steps, *rest)

    monkeypatch.setattr(vlm_scoring, "generate_images", watch)
    for given, expected in ((2, 2), (None, 1)):
        parts, _ = parts_of(name=f"steps-{given}", evaluation__num_steps=given)
        answered(parts, [parts.data[0]], 0, "eval", 0, score=True)
        assert taken.pop() == expected
        answered(parts, [parts.data[0]], 0, "sample", 0, score=False)
        assert taken.pop() == 1


@pytest.mark.parametrize(
    "trl",
    [
        {},
        {
            "temperature": 0.7,
            "top_p": 0.9,
            "top_k": 5,
            "min_p": 0.1,
            "repetition_penalty": 1.1,
            "generation_kwargs": {"no_repeat_ngram_size": 2},
        },
    ],
)
def test_answers_are_drawn_as_the_trainer_draws_completions(parts_of: Any, trl: dict[str, Any]) -> None:
    parts, arguments = parts_of(trl)
    parts.policy.generation_config.eos_token_id = [5, parts.tokenizer.eos_token_id]
    trainer = VlmTrainer(parts, arguments)
    assert parts.generation_options == trainer.generation_kwargs
    assert CompletionScorer(parts).ends == {*trainer.eos_token_ids, parts.tokenizer.pad_token_id}


@pytest.mark.parametrize("family", ["qwen_image_edit", "qwen_image"])
def test_vllm_is_given_a_name_that_can_be_loaded(parts_of: Any, tmp_path: Path, family: str) -> None:
    base = Path(shutil.copytree(vlm_runs.random_model(family), tmp_path / "base"))
    (base / "text_encoder/tokenizer_config.json").write_text("{}")  # a folder that somebody made
    model = {"family": family, "path": str(base), "dtype": "fp32", "max_sequence_length": 256}
    data = tmp_path / "words.json"
    data.write_text('[{"prompt": "a red square"}]', encoding="utf-8")
    given = {} if family == "qwen_image_edit" else {"data__path": str(data)}
    parts, _ = parts_of(model=model, **given)
    name_for_vllm(parts)
    assert (base / "text_encoder/tokenizer_config.json").read_text() == "{}"
    adapted: Any = get_peft_model(parts.policy, LoraConfig(target_modules=["q_proj"]))
    name = adapted.name_or_path  # what TRL passes on
    assert name == parts.policy.config._name_or_path == str(parts.dir.path / "vllm")
    assert AutoConfig.from_pretrained(name).architectures == ["Qwen2_5_VLForConditionalGeneration"]
    again = Qwen2_5_VLForConditionalGeneration.from_pretrained(name).state_dict()
    before = load_component(Qwen2_5_VLForConditionalGeneration, model["path"], "text_encoder", torch.float32)
    assert all(torch.equal(tensor, again[name]) for name, tensor in before.state_dict().items())
    tokenizer = AutoTokenizer.from_pretrained(name)
    assert tokenizer("red").input_ids == parts.tokenizer("red").input_ids
    assert tokenizer.chat_template == parts.tokenizer.chat_template
    processor = ImageTextProcessor.from_pretrained(name)  # vLLM makes one of images for qwen_image as well
    images = processor.image_processor
    if family == "qwen_image_edit":
        assert images.to_dict() == parts.processor.image_processor.to_dict()
    vision = parts.policy.config.vision_config
    assert (images.patch_size, images.temporal_patch_size, images.merge_size) == (
        vision.patch_size,
        vision.temporal_patch_size,
        vision.spatial_merge_size,
    )
    assert AutoImageProcessor.from_pretrained(name).to_dict() == images.to_dict()
    told = json.loads((parts.dir.path / "vllm/processor_config.json").read_text(encoding="utf-8"))
    assert told["processor_class"] == "Qwen2_5_VLProcessor"  # to load it as such needs torchvision


def test_a_run_with_vllm_names_the_policy_first(vlm_file: RunFile, monkeypatch: pytest.MonkeyPatch) -> None:
    named: list[str] = []

    def stop(trainer: Any, parts: Any, arguments: Any) -> None:
        named.append(parts.policy.name_or_path)
        raise RewardOutage("far enough")

    monkeypatch.setattr(VlmTrainer, "__init__", stop)
    train(vlm_file({"use_vllm": True, "vllm_mode": "colocate"}))
    assert [Path(name).name for name in named] == ["vllm"]


def test_answers_do_not_follow_the_sampling_that_the_model_recommends(parts_of: Any) -> None:
    parts, _ = parts_of()
    examples = [parts.data[0], parts.data[1]]
    free = [one.text for one in answered(parts, examples, 0, "eval", 0, score=False)]
    parts.policy.generation_config.update(temperature=0.01, top_p=0.01, top_k=1, repetition_penalty=5.0)
    assert [one.text for one in answered(parts, examples, 0, "eval", 0, score=False)] == free


PAD = 257
SAID_BEFORE = {"repetition_penalty": 3.0, "top_k": 50, "generation_kwargs": {"no_repeat_ngram_size": 2}}
GREEDY = {"max_new_tokens": 1, "do_sample": False, "pad_token_id": PAD}
BEAMS = {"generation_kwargs": {"num_beams": 2}}


@pytest.mark.parametrize(
    "trl", default([{}, SAID_BEFORE, BEAMS], lambda trl: trl is SAID_BEFORE), ids=["sampling", "penalty", "beams"]
)
def test_answers_do_not_depend_on_what_they_are_batched_with(
    parts_of: Any, trl: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Instructions of unequal length, so that rows are padded; each batch in another order as well."""
    found: list[dict[int, tuple[str, Any]]] = []
    batches: list[int] = []

    def counted(generate: Any) -> Any:
        def count(**inputs: Any) -> Any:
            batches.append(len(inputs["input_ids"]))
            return generate(**inputs)

        return count

    for size in (1, 2, 5):
        parts, _ = parts_of(
            {"max_completion_length": 12, **trl}, name=f"by-{size}", rollout__batch_size_per_device=size
        )
        examples = [parts.data[i] for i in range(5)]
        assert (
            len({len(row) for row in generate_completions(parts.policy, parts, examples, GREEDY, [0] * 5).prompt_ids})
            > 1
        )
        batches.clear()
        monkeypatch.setattr(parts.policy, "generate", counted(parts.policy.generate))
        completions = answered(parts, examples[size % 3 :] + examples[: size % 3], 0, "eval", 1, score=False)
        assert batches == ([1] * 5 if trl == BEAMS else {1: [1] * 5, 2: [2, 2, 1], 5: [5]}[size])
        found.append({one.example.id: (one.text, one.images[0].int()) for one in completions})
    alone = found[0]
    assert len({text for text, _ in alone.values()}) == 5
    for batched in found[1:]:
        for number, (text, picture) in alone.items():
            assert batched[number][0] == text
            assert (batched[number][1] - picture).abs().max() <= 1


def test_a_row_is_drawn_as_transformers_would_alone(parts_of: Any) -> None:
    """From the same seed, and of the seeds none is like another."""
    parts, _ = parts_of({"temperature": 0.9, "top_k": 20})
    examples, options = [parts.data[0], parts.data[3]], parts.generation_options
    found = generate_completions(parts.policy, parts, examples, options, [7, 8])
    for i, seed in enumerate((7, 8)):
        prompt = found.rows(i, i + 1)
        inputs = model_inputs(replace(prompt, completion_ids=[[]]), PAD)
        torch.manual_seed(seed)
        whole = parts.policy.generate(**inputs, generation_config=GenerationConfig(**options, disable_compile=True))
        ids = whole[0, len(prompt.prompt_ids[0]) :].tolist()
        assert list(found.completion_ids[i]) == ids[: len(found.completion_ids[i])]
    assert (
        generate_completions(parts.policy, parts, examples, options, [7, 9]).completion_ids[1]
        != found.completion_ids[1]
    )
    before = torch.get_rng_state()
    generate_completions(parts.policy, parts, examples, options, [7, 8])
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.full
def test_a_run_evaluates_as_retouch_eval_does(vlm_file: RunFile, tmp_path: Path) -> None:
    """Word by word, in other batches: the base and the trained weights."""
    tasks = str(vlm_runs.tasks())
    file = vlm_file(
        evaluation={"num_examples": 5, "images_per_example": 2, "grid_examples": 0},
        rollout={"num_steps": 1, "guidance_scale": 1.0, "batch_size_per_device": 2},
        training__max_steps=1,
    )
    assert train(file).code == 0
    config = tmp_path / "a/config.yaml"
    text = config.read_text(encoding="utf-8")
    assert "batch_size_per_device: 2" in text
    config.write_text(text.replace("batch_size_per_device: 2", "batch_size_per_device: 3"), encoding="utf-8")
    done = retouch("eval", "--run", tmp_path / "a", "--trust", "--data", tasks, "--out", tmp_path / "out")
    assert done.code == 0, done.err
    for step, name in ((0, "base"), (1, "after-RL")):
        during = read_rows(tmp_path / f"a/evaluations/step-{step:06d}/rows.jsonl")
        after = read_rows(tmp_path / f"out/{name}.jsonl")
        assert during == after and len({row["read"] for row in after}) == 10
