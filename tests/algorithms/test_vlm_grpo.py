"""vlm_grpo on random weights: what is generated is what conditions, failures weigh nothing, runs stop and resume."""

from __future__ import annotations

import importlib
import json
import os
import shutil
import signal
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import transformers.trainer
from accelerate.utils import DynamoBackend
from peft import LoraConfig, get_peft_model
from torch import Tensor
from transformers import TrainerCallback

pytest.importorskip("trl")

from trl import GRPOTrainer

from retouch.algorithms.vlm_grpo import recipe as vlm_grpo
from retouch.algorithms.vlm_grpo import run as run_module
from retouch.algorithms.vlm_grpo import scoring as vlm_scoring
from retouch.algorithms.vlm_grpo.checkpoint import load_weights
from retouch.algorithms.vlm_grpo.recipe import VlmTrainer
from retouch.algorithms.vlm_grpo.responses import Responses, generate_completions
from retouch.algorithms.vlm_grpo.run import PromptOrder, Rows, VlmRun, build_run
from retouch.algorithms.vlm_grpo.scoring import CompletionScorer, ScoredCompletion, noise_seeds
from retouch.algorithms.vlm_grpo.trainer import adapter_config, trl_arguments
from retouch.config import ConfigError, load_run
from retouch.data.sampler import curriculum_order
from retouch.engine import CheckpointError
from retouch.families.qwen.text import ChatStates
from retouch.observe.run_dir import read_metrics
from retouch.rewards.table import Scores
from retouch.training.scoring import Tally
from retouch.types import Failure, Score
from tests.command_line import retouch
from tests.selection import default

from . import completion_rewards, vlm_runs
from .vlm_runs import RunFile, random_model, records, run_section, train, vlm_file, weights

__all__ = ["vlm_file"]

rollout_draw = importlib.import_module("retouch.algorithms.vlm_grpo.images")


def fail_some(items: list[Any]) -> list[float]:
    """`letters`, but three rows in ten have no number: what is no number is a typed failure."""
    values = completion_rewards.letters(items)
    return [float("nan") if i % 10 in FAILED else value for i, value in enumerate(values)]


FAILED: set[int] = {1, 4, 5}


def plain(items: list[Any]) -> list[float]:
    return completion_rewards.letters(items)


def other_where_it_fails(items: list[Any]) -> list[float]:
    """`letters`, and something else in the rows that `fail_some` has no number for."""
    return [5.0 - i if i % 10 in FAILED else value for i, value in enumerate(completion_rewards.letters(items))]


def fail_always(items: list[Any]) -> list[float]:
    return [float("nan")] * len(items)


CALLS: list[int] = []


def fail_from_the_second_batch(items: list[Any]) -> list[float]:
    CALLS.append(len(items))
    if len(CALLS) >= DIES_AT[0]:
        return [float("nan")] * len(items)
    return completion_rewards.letters(items)


DIES_AT = [10**9]


def away_in_the_fourth_batch(items: list[Any]) -> list[Any]:
    """`letters`, but the server of the fourth batch went away."""
    CALLS.append(len(items))
    gone = len(CALLS) == 4
    return [
        Failure("unavailable", "gone", retryable=True) if gone else value for value in completion_rewards.letters(items)
    ]


def reward(name: str, **options: Any) -> dict[str, Any]:
    return {"scorer": "fn", "fn": f"tests.algorithms.test_vlm_grpo:{name}", "paste_back": False, **options}


@pytest.fixture
def parts_of(tmp_path: Path, vlm_file: RunFile) -> Any:
    """Opened parts of a run; closed at the end."""
    opened: list[VlmRun] = []

    def make(trl: Any = None, **sections: Any) -> tuple[VlmRun, Any]:
        config = load_run(vlm_file(trl, **sections))
        arguments = trl_arguments(config)
        parts = build_run(config, arguments.device, 1, main=True)
        parts.dir.open(None)
        parts.rewards.start()
        parts.rewards.wait_loaded()  # loading sets the global generators back, from which completions are sampled
        opened.append(parts)
        return parts, arguments

    yield make
    for parts in opened:
        parts.close()


def answered(parts: VlmRun, *how: Any, score: bool) -> list[ScoredCompletion]:
    """By the policy as it was loaded."""
    return CompletionScorer(parts).complete(parts.policy, *how, score=score)


class Watched(VlmTrainer):
    """Keeps what was trained on, and gradients before the optimizer's step."""

    def __init__(self, *args: Any) -> None:
        self.inputs: list[dict[str, Any]] = []
        super().__init__(*args)

    def _compute_loss(self, model: Any, inputs: Any) -> Any:
        self.inputs.append(inputs)
        return super()._compute_loss(model, inputs)


def unpadded(inputs: dict[str, Any]) -> list[tuple[list[int], list[int]]]:
    """Prompt and completion ids of the rows that the loss saw."""
    return [
        (prompt[seen > 0].tolist(), said[kept > 0].tolist())
        for prompt, seen, said, kept in zip(
            inputs["prompt_ids"],
            inputs["prompt_mask"],
            inputs["completion_ids"],
            inputs["completion_mask"],
            strict=True,
        )
    ]


def gradients(trainer: VlmTrainer, inputs: dict[str, Any]) -> dict[str, Tensor]:
    trainer.model.zero_grad()
    trainer.current_gradient_accumulation_steps = 1
    VlmTrainer._compute_loss(trainer, trainer.model, inputs).backward()
    return {n: p.grad.clone() for n, p in trainer.model.named_parameters() if p.grad is not None}


def test_what_was_generated_conditions_and_trains(parts_of: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The ids that the loss sees, those that the pictures are conditioned on, and the policy at that moment."""
    parts, arguments = parts_of()
    conditioned: list[Responses] = []
    real = vlm_scoring.encode_response

    def watch(policy: Any, responses: Responses, **options: Any) -> Any:
        conditioned.append(responses)
        return real(policy, responses, **options)

    monkeypatch.setattr(vlm_scoring, "encode_response", watch)
    before = {name: tensor.clone() for name, tensor in parts.diffusion_model.network.state_dict().items()}
    vae = {name: tensor.clone() for name, tensor in parts.diffusion_model.vae.state_dict().items()}
    policy = {name: tensor.clone() for name, tensor in parts.policy.state_dict().items()}
    trainer = Watched(parts, arguments)
    trainer.owes_evaluation = False  # an evaluation encodes, too
    trainer.train()
    assert len(conditioned) == len(trainer.inputs) == 2
    for responses, inputs in zip(conditioned, trainer.inputs, strict=True):
        asked = [(list(p), list(c)) for p, c in zip(responses.prompt_ids, responses.completion_ids, strict=True)]
        assert sorted(asked) == sorted(unpadded(inputs))
        assert {"pixel_values", "image_grid_thw", "mm_token_type_ids"} <= responses.fields.keys()
        assert responses.image_counts == [1] * 8
    # nothing but the adapter learned
    assert all(torch.equal(tensor, before[n]) for n, tensor in parts.diffusion_model.network.state_dict().items())
    assert all(torch.equal(tensor, vae[n]) for n, tensor in parts.diffusion_model.vae.state_dict().items())
    model: Any = trainer.model
    learned = {n: p for n, p in model.named_parameters() if p.requires_grad}
    assert learned and all(".lora_" in name and "visual" not in name for name in learned)
    assert all(bool((p != 0).any()) for n, p in learned.items() if ".lora_B." in n)  # it starts at 0
    plain = model.unload().state_dict()
    assert all(torch.equal(plain[name], tensor) for name, tensor in policy.items())


@pytest.mark.parametrize("loss_type", default(["dr_grpo", None, "grpo"], lambda loss: loss == "grpo"))
def test_a_failed_row_moves_nothing(loss_type: str | None, parts_of: Any) -> None:
    """30 % of the rewards fail, with KL and entropy in the loss: what the failed rows said does not matter, and the
    others are compared with each other alone."""
    options = {"beta": 0.1, "entropy_coef": 0.1, "per_device_train_batch_size": 20, "num_generations": 10}
    options["loss_type"] = loss_type
    parts, arguments = parts_of(
        options, rewards={"letters": reward("fail_some")}, reward_client__max_failure_rate=0.5, training__max_steps=1
    )
    trainer = Watched(parts, arguments)
    assert trainer.loss_type == (loss_type or "dapo")  # TRL's default
    trainer.train()
    [inputs] = trainer.inputs
    failed = inputs["tool_mask"].sum(1) == 0
    assert int(failed.sum()) == 6
    assert int(inputs["num_items_in_batch"]) == int(inputs["completion_mask"][~failed].sum())  # what dapo divides by
    assert bool((inputs["advantages"][failed] == 0).all())
    assert bool((inputs["advantages"][~failed] != 0).any())
    said = parts.tokenizer.batch_decode([ids for _, ids in unpadded(inputs)], skip_special_tokens=True)
    values = torch.tensor([sum(ord(c) % 97 for c in text) / (97 * max(1, len(text))) for text in said])
    keys = [tuple(prompt) for prompt, _ in unpadded(inputs)]
    for key in set(keys):
        group = torch.tensor([k == key for k in keys]) & ~failed
        expected = values[group] - values[group].mean()
        assert torch.allclose(inputs["advantages"][group], expected, atol=1e-5)
    # the policy has moved from the reference, so that the KL has a gradient; other words in the failed rows
    other = {**inputs, "completion_ids": inputs["completion_ids"].clone()}
    other["completion_ids"][failed] = (other["completion_ids"][failed] + 3) % 200
    kept, changed = gradients(trainer, inputs), gradients(trainer, other)
    scale = max(float(g.abs().max()) for g in kept.values())
    assert scale > 0
    assert all(torch.allclose(kept[n], changed[n], atol=1e-6 * scale, rtol=1e-5) for n in kept)
    # the mask is what does it: advantage 0 alone would leave the KL and the entropy in
    unmasked = [gradients(trainer, {**one, "tool_mask": torch.ones_like(one["tool_mask"])}) for one in (inputs, other)]
    assert any(not torch.allclose(unmasked[0][n], unmasked[1][n], atol=1e-3 * scale) for n in kept)


def test_one_failed_reward_of_two_is_none() -> None:
    failure = Failure("timeout", "no answer", retryable=False)
    scores = Scores(
        {"a": [Score(1.0), Score(0.5), Score(1.0)], "b": [Score(0.0), failure, Score(1.0)]}, {"a": 1, "b": 2}
    )

    def rewards(scores: Scores, each: int) -> list[float | None]:
        example: Any = None
        completions = [ScoredCompletion(example, "", torch.zeros(each), [], False)] * (len(scores) // each)
        return [one.reward for one in vlm_scoring._with_scores(completions, scores, each)]

    assert rewards(scores, 1) == [1.0, None, 3.0]
    assert rewards(Scores(scores.outcomes, {"a": 1, "b": 0}), 1) == [1.0, 0.5, 1.0]  # weight 0 is only logged
    assert rewards(Scores({"a": [Score(1.0), Score(0.5), Score(1.0), failure]}, {"a": 2}), 2) == [1.5, None]


@pytest.mark.full
@pytest.mark.parametrize("loss_type", default(["dr_grpo", None, "grpo"], lambda loss: loss == "dr_grpo"))
def test_what_the_other_reward_says_of_a_failed_row_moves_nothing(loss_type: str | None, parts_of: Any) -> None:
    """Two rewards, of which one fails on three rows of eight: gradients to the bit, whatever the other one says."""

    def trained(name: str, first: str, second: str) -> tuple[dict[str, Any], dict[str, Tensor]]:
        both = {"first": reward(first), "second": reward(second)}
        client = {"max_failure_rate": 0.5}
        options = {"loss_type": loss_type, "beta": 0.1}
        parts, arguments = parts_of(options, name=name, rewards=both, reward_client=client, training__max_steps=1)
        trainer = Watched(parts, arguments)
        trainer.owes_evaluation = False
        trainer.train()
        [inputs] = trainer.inputs
        return inputs, gradients(trainer, inputs)

    inputs, kept = trained("kept", "fail_some", "plain")
    assert int((inputs["tool_mask"].sum(1) == 0).sum()) == len(FAILED & set(range(8)))
    assert any(bool((g != 0).any()) for g in kept.values())
    other, changed = trained("changed", "fail_some", "other_where_it_fails")
    assert torch.equal(inputs["completion_ids"], other["completion_ids"])
    assert kept.keys() == changed.keys() and all(torch.equal(kept[n], changed[n]) for n in kept)
    if loss_type != "dr_grpo":
        return
    # the other reward does say something else: where nothing fails it counts
    _, plain = trained("plain", "plain", "plain")
    _, counted = trained("counted", "plain", "other_where_it_fails")
    assert any(not torch.allclose(plain[n], counted[n], rtol=1e-3, atol=0) for n in plain)


def of_rows(inputs: list[dict[str, Any]], keep: list[Tensor]) -> dict[str, Any]:
    """Micro-batches of text as one, with the rows to keep."""
    first = inputs[0]
    batched = {n: v for n, v in first.items() if isinstance(v, Tensor) and v.ndim > 0}
    rows = {n: torch.cat([one[n][kept] for one, kept in zip(inputs, keep, strict=True)]) for n in batched}
    return {n: rows.get(n, value) for n, value in first.items()}


def summed(trainer: VlmTrainer, loss: Any, inputs: list[dict[str, Any]]) -> dict[str, Tensor]:
    """The gradient that an optimizer step over these micro-batches has, by a loss function of TRL's trainer."""
    trainer.model.zero_grad()
    trainer.current_gradient_accumulation_steps = len(inputs)
    trainer.args.steps_per_generation = len(inputs)
    for one in inputs:
        loss(trainer, trainer.model, one).backward()
    return {n: p.grad.clone() for n, p in trainer.model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize(("rows", "accumulated"), [pytest.param(1, 8, marks=pytest.mark.full), (4, 2)])
def test_failed_rows_leave_the_denominator(rows: int, accumulated: int, parts_of: Any, tmp_path: Path) -> None:
    """The gradient of a step with three failed rows of eight is that of TRL's own loss on the other five."""
    (tmp_path / "prompts.txt").write_text("a red cat\na blue dog\n", encoding="utf-8")
    parts, arguments = parts_of(
        {"beta": 0.1, "per_device_train_batch_size": rows, "gradient_accumulation_steps": accumulated},
        model={"family": "qwen_image", "path": random_model("qwen_image"), "dtype": "fp32"},
        data={"format": "prompts", "path": str(tmp_path / "prompts.txt"), "resolution": 32},
        rewards={"letters": reward("fail_some")},
        reward_client__max_failure_rate=0.5,
        training__max_steps=1,
    )
    trainer = Watched(parts, arguments)
    trainer.owes_evaluation = False
    trainer.train()
    inputs = list(trainer.inputs)
    valid = [one["tool_mask"].any(1) for one in inputs]
    assert (len(inputs), int(sum(keep.sum() for keep in valid))) == (accumulated, 5)
    own, trls = VlmTrainer._compute_loss, GRPOTrainer._compute_loss
    # means over micro-batches, of which some may have lost all of their rows
    by_micro_batch = [of_rows([one], [keep]) for one, keep in zip(inputs, valid, strict=True) if bool(keep.any())]
    for loss_type in ("grpo", "dr_grpo", "bnpo", "dapo", "sapo", "luspo"):
        trainer.loss_type = loss_type
        trainer._factors = trainer._loss_factors()
        found = summed(trainer, own, inputs)
        left = by_micro_batch if loss_type == "bnpo" else [of_rows(inputs, valid)]
        expected, counted = summed(trainer, trls, left), summed(trainer, trls, inputs)
        scale = max(float(g.abs().max()) for g in expected.values())
        assert scale > 0
        assert all(torch.allclose(found[n], expected[n], atol=1e-5 * scale) for n in expected), loss_type
        if loss_type in ("grpo", "dr_grpo"):  # TRL's own loss divides by the failed rows as well
            assert any(not torch.allclose(counted[n], expected[n], atol=0.1 * scale) for n in expected)
        # TRL's entropy bonus is a mean over the tokens of each micro-batch, whatever the loss type divides by
        both = [(own, inputs, found), (trls, by_micro_batch, summed(trainer, trls, by_micro_batch))]
        trainer._entropy_bonus_enabled, trainer.entropy_coef = True, 0.3
        trainer._factors = trainer._loss_factors()
        bonus, right = ({n: g - before[n] for n, g in summed(trainer, *of).items()} for *of, before in both)
        trainer._entropy_bonus_enabled, trainer.entropy_coef = False, 0.0
        scale = max(float(g.abs().max()) for g in right.values())
        assert scale > 0 and all(torch.allclose(bonus[n], right[n], atol=1e-3 * scale) for n in right), loss_type
        assert trainer.beta == 0.1
    trainer.loss_type = "grpo"
    own_gather = trainer.accelerator.gather
    of_another = torch.tensor([[8, 8, accumulated, accumulated]])  # process, on which nothing failed
    trainer.accelerator.gather = lambda t: torch.cat([own_gather(t), of_another])
    assert trainer._loss_factors() == (1.0, 16 / 13)


@pytest.mark.parametrize(("process", "expected"), [(0, [True, False, True, False]), (1, [False, False, True, True])])
def test_the_last_one_of_a_group_is_compared_with_nothing(
    process: int, expected: list[bool], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Groups of four on two processes. Where one is left, its advantage is 0; it has a KL and a share of the
    denominator all the same."""
    no = float("nan")
    gathered = torch.tensor([[1.0], [no], [2.0], [no], [no], [no], [3.0], [4.0]])
    monkeypatch.setattr(GRPOTrainer, "_calculate_rewards", lambda *_: gathered)
    trainer: Any = object.__new__(VlmTrainer)
    trainer.accelerator, trainer.num_generations = SimpleNamespace(process_index=process), 4
    trainer._calculate_rewards([], [""] * 4, [], [])
    assert trainer._valid.tolist() == expected
    gathered[7] = no
    trainer._calculate_rewards([], [""] * 4, [], [])
    assert trainer._valid.tolist() == (expected if process == 0 else [False] * 4)


def test_one_failed_reward_of_two_masks_the_row(parts_of: Any) -> None:
    both = {
        "letters": reward("fail_some"),
        "other": {**reward("x"), "fn": "tests.algorithms.completion_rewards:letters"},
    }
    parts, arguments = parts_of({}, rewards=both, reward_client__max_failure_rate=0.5, training__max_steps=1)
    trainer = Watched(parts, arguments)
    trainer.train()
    [inputs] = trainer.inputs
    assert int((inputs["tool_mask"].sum(1) == 0).sum()) == len(FAILED & set(range(8)))
    [record] = records(parts.dir.path)
    assert record["failed/letters"] == 3 and record["failed/other"] == 0
    assert record["reward/other"] > 0


@pytest.mark.full
def test_pictures_of_other_processes_count_in_the_rate(parts_of: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Three of eight fail here, of eight on another process none: less than a fifth of both."""
    monkeypatch.setattr(vlm_grpo, "gather_list", lambda own: [*own, Tally(8, 0, [], (0, 0))])
    parts, arguments = parts_of({}, rewards={"letters": reward("fail_some")}, training__max_steps=1)
    Watched(parts, arguments).train()
    assert records(parts.dir.path)[0]["failed/letters"] == 3
    assert (parts.rewards.asked, parts.rewards.failed) == (8, 3)


@pytest.mark.full
def test_a_dead_judge_stops_resumable_and_the_run_goes_on_bit_for_bit(vlm_file: RunFile, tmp_path: Path) -> None:
    CALLS.clear()
    options = {"rewards": {"letters": reward("fail_from_the_second_batch")}, "training__max_steps": 3}
    file = vlm_file({"lr_scheduler_type": "constant"}, **options)
    DIES_AT[0] = 10**9
    assert train(file, "name=whole").code == 0
    assert len(CALLS) == 5  # evaluations at both ends, three batches
    CALLS.clear()
    DIES_AT[0] = 3  # the second batch of completions
    stopped = train(file, "name=again")
    assert stopped.code == 3, stopped.err
    assert "over reward_client.max_failure_rate" in stopped.err and "nothing was trained on that batch" in stopped.err
    assert [path.name for path in (tmp_path / "again/checkpoints").iterdir()] == ["step-000001"]
    DIES_AT[0] = 10**9
    resumed = train(file, "name=again", "resume=auto")
    assert resumed.code == 0, resumed.err
    whole, again = weights(tmp_path / "whole", 3), weights(tmp_path / "again", 3)
    assert whole.keys() == again.keys() and len(whole) > 0
    assert all(torch.equal(whole[name], again[name]) for name in whole)
    assert records(tmp_path / "again") == records(tmp_path / "whole")
    assert any(record["grad_norm"] > 0 for record in records(tmp_path / "whole"))


@pytest.mark.full
def test_an_evaluation_that_met_an_outage_is_made_up_for(vlm_file: RunFile, tmp_path: Path) -> None:
    """Batches: the evaluation at the start, two of completions, the evaluation after the second step."""
    CALLS.clear()
    options = {"rewards": {"letters": reward("away_in_the_fourth_batch")}, "reward_client": {"outage_wait_s": 0.0}}
    file = vlm_file(training__max_steps=3, training__eval_every=2, **options)
    stopped = train(file, "name=again")
    assert stopped.code == 3 and "stayed unavailable" in stopped.err
    assert train(file, "name=again", "resume=auto").code == 0
    metrics = read_metrics(tmp_path / "again/metrics.jsonl")
    assert [(r["step"], r["moment"]) for r in metrics if r["kind"] == "eval"] == [(0, "start"), (2, "step"), (3, "end")]


def test_using_it_reports_failed_rewards_and_goes_on(parts_of: Any) -> None:
    parts, _ = parts_of(rewards={"letters": reward("fail_always"), "second": reward("plain")})
    for one in answered(parts, [parts.data[0], parts.data[1]], 0, "eval", 0, score=True):
        assert one.reward is None
        assert isinstance(one.outcomes["letters"][0], Failure) and isinstance(one.outcomes["second"][0], Score)


def test_an_evaluation_has_gold_rewards_and_its_own_number_of_denoising_steps(
    parts_of: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    parts, _ = parts_of(
        rewards={"letters": reward("plain"), "gold": reward("plain", role="gold")}, evaluation={"num_steps": 3}
    )
    assert parts.config.rollout.num_steps != 3
    steps: list[int] = []
    real = vlm_scoring.generate_images

    def watched(painter: Any, drawings: Any, count: int, *options: Any) -> Any:
        steps.append(count)
        return real(painter, drawings, count, *options)

    monkeypatch.setattr(vlm_scoring, "generate_images", watched)
    [found] = answered(parts, [parts.data[0]], 0, "eval", 0, score=True)
    assert steps == [3] and isinstance(found.outcomes["gold"][0], Score)


def test_a_group_is_drawn_from_one_noise_and_no_other_is(parts_of: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    drawn: list[list[int]] = []
    real = vlm_scoring.generate_images

    def watch(painter: Any, drawings: Any, *options: Any) -> Any:
        drawn.append([drawing.noise_seed for drawing in drawings])
        return real(painter, drawings, *options)

    monkeypatch.setattr(vlm_scoring, "generate_images", watch)
    parts, arguments = parts_of()
    trainer = VlmTrainer(parts, arguments)
    trainer.owes_evaluation = False
    trainer.train()
    assert [len(step) for step in drawn] == [8, 8]
    groups = [step[i : i + 4] for step in drawn for i in (0, 4)]
    assert all(len(set(group)) == 1 for group in groups) and len({group[0] for group in groups}) == 4
    same = [parts.data[0]] * 3
    seeds = [
        noise_seeds(*given)
        for given in (("draw", 5, same, 0), ("draw", 5, same, 1), ("draw", 6, same, 0), ("eval", 5, same, 0))
    ]
    assert all(len(set(of_one)) == 1 for of_one in seeds) and len({of_one[0] for of_one in seeds}) == 4


def test_answers_of_an_evaluation_are_without_dropout(parts_of: Any) -> None:
    parts, arguments = parts_of({"lora_dropout": 0.5})
    model: Any = VlmTrainer(parts, arguments).model
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if ".lora_B." in name:
                parameter.normal_()
    examples, options = [parts.data[0], parts.data[1]], parts.generation_options
    model.train()
    in_training = generate_completions(model, parts, examples, options, [3, 4])
    assert model.training and any(module.training for module in model.modules() if "Dropout" in type(module).__name__)
    model.eval()
    assert generate_completions(model, parts, examples, options, [3, 4]).completion_ids == in_training.completion_ids


def test_resume_between_cycles_is_bitwise_and_inside_is_refused(vlm_file: RunFile, tmp_path: Path) -> None:
    """Two optimizer steps a generation, two passes over each: a cycle of four."""
    trl = {"per_device_train_batch_size": 4, "steps_per_generation": 2, "num_iterations": 2}
    file = vlm_file(trl, training__max_steps=8, training__checkpoint_every=4)
    assert train(file, "training.checkpoint_every=2").code == 2
    assert train(file, "name=whole").code == 0
    shutil.copytree(tmp_path / "whole", tmp_path / "again")
    shutil.rmtree(tmp_path / "again/checkpoints/step-000008")
    assert train(file, "name=again", "resume=auto").code == 0
    whole, again = weights(tmp_path / "whole", 8), weights(tmp_path / "again", 8)
    assert all(torch.equal(whole[name], again[name]) for name in whole)
    assert records(tmp_path / "again") == records(tmp_path / "whole")
    assert not all(torch.equal(whole[name], weights(tmp_path / "whole", 4)[name]) for name in whole)
    # three passes make a cycle of six, and the checkpoint would lie inside one
    other = "algorithm.trl.num_iterations=3", "training.max_steps=12", "training.checkpoint_every=6"
    refused = train(file, "name=again", "resume=auto", *other)
    assert refused.code == 2 and "set them back, resume from a checkpoint at a multiple of 6" in refused.err
    other = train(file, "name=again", "resume=auto", "algorithm.trl.lora_r=2", "training.max_steps=12")
    assert other.code == 2 and "lora_r changed" in other.err


@pytest.mark.full
def test_full_fine_tuning_leaves_what_sees_alone(parts_of: Any) -> None:
    full = {"use_peft": None, "lora_r": None, "lora_alpha": None, "lora_dropout": None, "learning_rate": 1e-3}
    parts, arguments = parts_of(full)
    before = {name: tensor.clone() for name, tensor in parts.policy.state_dict().items()}
    frozen = [parts.diffusion_model.network, parts.diffusion_model.vae]
    painter = [{name: tensor.clone() for name, tensor in one.state_dict().items()} for one in frozen]
    trainer = VlmTrainer(parts, arguments)
    trainer.train()
    for one, tensors in zip(frozen, painter, strict=True):
        assert tensors and all(torch.equal(tensor, tensors[name]) for name, tensor in one.state_dict().items())
    changed = {name for name, tensor in parts.policy.state_dict().items() if not torch.equal(tensor, before[name])}
    assert changed and not any("visual" in name for name in changed)
    assert {"lm_head.weight", "model.language_model.layers.0.self_attn.q_proj.weight"} <= changed
    trainer.save(pinned=True)
    trained = {name: tensor.clone() for name, tensor in parts.policy.state_dict().items()}
    with torch.no_grad():
        for parameter in parts.policy.parameters():
            parameter.zero_()
    folder = parts.dir.checkpoints / "step-000002/weights"
    load_weights(parts.policy, folder)
    assert all(torch.equal(trained[name], tensor) for name, tensor in parts.policy.state_dict().items())
    adapted: Any = get_peft_model(parts.policy, LoraConfig(target_modules=["q_proj"]))
    with pytest.raises(CheckpointError, match=r"was algorithm\.trl changed since"):
        load_weights(adapted, folder)


def test_a_rewritten_prompt_is_encoded_as_the_pipeline_would(parts_of: Any) -> None:
    parts, _ = parts_of(algorithm={**run_section(Path())["algorithm"], "conditioning": "rewrite_text"})
    example = parts.data[0]
    said = Responses([[1, 2, 3]], [parts.tokenizer("paint it blue").input_ids], {}, [0])
    states, cut = CompletionScorer(parts).states(parts.policy, [example], ["paint it blue"], said)
    stock = ChatStates(parts.policy, parts.tokenizer, parts.processor, "edit", 256)
    assert cut == [False]
    assert torch.allclose(states[0], stock("paint it blue", [example.source]), atol=1e-5)  # type: ignore[list-item]


def test_negatives_are_the_bases_and_kept(parts_of: Any) -> None:
    parts, arguments = parts_of(rollout__guidance_scale=4.0)
    judge, examples = CompletionScorer(parts), [parts.data[0], parts.data[1], parts.data[0]]
    stock = ChatStates(parts.policy, parts.tokenizer, parts.processor, "edit", 256)
    expected = [stock(" ", [example.source]) for example in examples]  # type: ignore[list-item]
    trainer = VlmTrainer(parts, arguments)
    model: Any = trainer.model
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if ".lora_B." in name:
                parameter.normal_()
    found = judge.negatives(model, examples)
    assert all(torch.allclose(a, b, atol=1e-5) for a, b in zip(found, expected, strict=True))
    assert judge.negatives(model, examples)[0] is found[0]
    namesake = replace(examples[1], id=examples[0].id, metadata={})  # evaluation data counts from 0, too
    assert judge.negatives(model, [namesake])[0] is found[1]
    judge._negatives.capacity = 1
    assert all(torch.equal(a, b) for a, b in zip(judge.negatives(model, examples), found, strict=True))
    assert len(judge._negatives) == 1
    parts.config.algorithm.__dict__["negative_encoder"] = "policy"
    moved = judge.negatives(model, examples)
    assert not torch.allclose(moved[0], expected[0], atol=1e-2)


def test_the_vision_tower_has_an_adapter_only_when_asked(vlm_file: RunFile) -> None:
    algorithm: Any = load_run(vlm_file({"lora_target_modules": ["gate_proj"]})).algorithm
    assert adapter_config(algorithm).exclude_modules
    assert adapter_config(algorithm.model_copy(update={"train_vision_tower": True})).exclude_modules is None
    assert adapter_config(algorithm.model_copy(update={"trl": {}})) is None
    assert adapter_config(algorithm).target_modules == "gate_proj"


def test_what_trl_refuses_is_one_message(vlm_file: RunFile) -> None:
    outcome = train(vlm_file({"lr_scheduler_type": "slow"}))
    assert outcome.code == 2
    assert "algorithm.trl: slow is not a valid SchedulerType" in outcome.err


def test_fsdp_is_refused(vlm_file: RunFile, monkeypatch: pytest.MonkeyPatch) -> None:
    config = load_run(vlm_file())
    trl_arguments(config)
    monkeypatch.setenv("ACCELERATE_USE_FSDP", "true")
    with pytest.raises(ConfigError, match=r"given FSDP, .*; launch with configs/accelerate/zero3\.yaml"):
        trl_arguments(config)


def test_trl_takes_no_setting_of_the_environment(parts_of: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """transformers took the precision of the launcher where the run file has none, and accelerate compiled."""
    for name, value in (("MIXED_PRECISION", "bf16"), ("DYNAMO_BACKEND", "EAGER"), ("GRADIENT_ACCUMULATION_STEPS", "4")):
        monkeypatch.setenv(f"ACCELERATE_{name}", value)
    parts, arguments = parts_of()
    assert arguments.mixed_precision == "no"
    accelerator = VlmTrainer(parts, arguments).accelerator
    assert accelerator.state.dynamo_plugin.backend == DynamoBackend.NO
    assert (accelerator.mixed_precision, accelerator.gradient_accumulation_steps) == ("no", 1)


@pytest.mark.parametrize(
    ("before", "dropout"),
    [(None, 0.0), ({"use_peft": True}, 0.05), ({"use_peft": True, "lora_dropout": 0.0}, 0.0)],
    ids=["a new run", "of an earlier version", "of this one"],
)
def test_an_adapter_has_no_dropout_unless_it_began_with_it(
    before: dict[str, Any] | None, dropout: float, vlm_file: RunFile, monkeypatch: pytest.MonkeyPatch
) -> None:
    """TRL's default trains another policy than the one that sampled; a written number is kept."""
    stored = None if before is None else {"algorithm": {"trl": before}}
    monkeypatch.setattr(vlm_grpo, "resumed_run_file", lambda config: stored)

    def trained(**trl: Any) -> Any:
        return vlm_grpo.with_dropout(load_run(vlm_file(trl))).algorithm

    assert adapter_config(trained(lora_dropout=None)).lora_dropout == dropout
    assert adapter_config(trained(lora_dropout=0.1)).lora_dropout == 0.1
    full = {"use_peft": None, "lora_r": None, "lora_alpha": None, "lora_dropout": None}
    assert "lora_dropout" not in trained(**full).trl


def test_counts_are_of_all_processes() -> None:
    """TRL logs the mean of what the processes tell it."""
    told: list[dict[str, float]] = []
    failure, good = Failure("timeout", "no answer", retryable=False), Score(1.0)
    for outcomes, truncated in (([failure, failure, good], 1), ([good, failure, good], 4)):
        trainer: Any = SimpleNamespace(
            accelerator=SimpleNamespace(num_processes=2),
            state=SimpleNamespace(global_step=0),
            run=SimpleNamespace(config=SimpleNamespace(logging=SimpleNamespace(rollout_images_every=0))),
        )
        example: Any = None
        cut = [ScoredCompletion(example, "", torch.zeros(1), [], True)] * truncated
        told.append({})
        VlmTrainer._log_scores(trainer, cut, Scores({"a": outcomes}, {"a": 1}), told[-1].__setitem__)
    mean = {name: sum(one[name] for one in told) / 2 for name in told[0]}
    assert mean == {"reward/a": 1.0, "failed/a": 3.0, "truncated": 5.0}


def test_a_condition_that_is_too_long_is_refused(vlm_file: RunFile) -> None:
    outcome = train(vlm_file(model__max_sequence_length=20))
    assert outcome.code == 2
    assert "model.max_sequence_length is 20" in outcome.err


def test_prompts_come_in_blocks_of_groups() -> None:
    order = PromptOrder(curriculum_order([0.0] * 5, 6, 1, 1), prompts=2, group=3, repeats=2, generations=3)
    rows = list(order)
    assert len(rows) == len(order) == 36
    blocks = [rows[i : i + 6] for i in range(0, 36, 6)]
    assert blocks[0] == blocks[1] and blocks[2] == blocks[3] and blocks[4] == blocks[5]
    assert all(len(set(block)) == 2 and block[0] == block[1] == block[2] for block in blocks[:4])
    passes = [block[::3] for block in blocks[::2]]
    flat = [position for two in passes for position in two]
    assert sorted(flat[:5]) == list(range(5))
    longer = curriculum_order([0.0] * 5, 60, 1, 1)
    assert longer[:6] == flat  # a run may be made longer
    assert longer[:5] != longer[5:10]


def test_a_group_shares_its_picture_and_sees_it_at_one_size(parts_of: Any) -> None:
    parts, _ = parts_of()
    model = parts.diffusion_model  # not the size it is drawn at
    model.config = model.config.model_copy(update={"vision_pixels": 28 * 28 * 4})
    rows = Rows(parts)({"position": [2, 2, 2, 5]})
    pictures = [images[0] for images in rows["images"]]
    assert pictures[0] is pictures[1] is pictures[2] is not pictures[3]
    assert pictures[0].size == (64, 64)
    assert rows["prompt"][0][1]["content"] == parts.data[2].prompt


def test_it_chooses_the_kernels_of_the_run(parts_of: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Any] = []
    monkeypatch.setattr(run_module, "choose_kernels", lambda *given: asked.append(given))
    parts, arguments = parts_of(training__deterministic=True)
    assert asked == [(arguments.device, parts.config.training)] and parts.config.training.deterministic


def test_an_offloaded_painter_comes_for_each_batch_and_draws_the_same(
    parts_of: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def pictures(*, offloaded: bool) -> list[Tensor]:
        parts, _ = parts_of(name=f"offloaded-{offloaded}", algorithm__offload_diffusion_model=offloaded)
        examples = [parts.data[i] for i in range(2)]
        said = generate_completions(parts.policy, parts, examples, {"max_new_tokens": 4, "do_sample": False}, [0, 0])
        return [one.images for one in CompletionScorer(parts).generate(parts.policy, examples, said, [1, 2])]

    moves: list[str] = []
    place = rollout_draw._place  # pyright: ignore[reportPrivateUsage]
    monkeypatch.setattr(rollout_draw, "_place", lambda model, device: (moves.append(str(device)), place(model, device)))
    stays = pictures(offloaded=False)
    assert moves == []
    comes = pictures(offloaded=True)
    assert moves == ["cpu", "cpu"] and all(torch.equal(a, b) for a, b in zip(stays, comes, strict=True))


class Counting(TrainerCallback):
    """A callback of a user, which `docs/vlm-grpo.md` shows how to register."""

    steps = 0

    def on_step_end(self, *_: Any, **__: Any) -> None:
        Counting.steps += 1


@pytest.mark.fast
def test_a_run_leaves_what_every_run_leaves(vlm_file: RunFile, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transformers.trainer, "DEFAULT_CALLBACKS", [*transformers.trainer.DEFAULT_CALLBACKS, Counting])
    file = vlm_file(logging__sinks=["tensorboard"], logging__rollout_images_every=1, training__checkpoint_every=1)
    outcome = train(file, "training.keep_checkpoints=1", "algorithm.images_per_completion=2")
    assert outcome.code == 0, outcome.err
    assert Counting.steps == 2
    run = tmp_path / "a"
    assert {p.name for p in (run / "checkpoints").iterdir()} == {"step-000001", "step-000002"}
    assert not list(run.rglob("*.bin"))  # the trainer's arguments as a pickle
    assert (run / "report.html").is_file() and list((run / "tensorboard").iterdir())
    assert (run / "images/step-000001/rollouts.png").is_file() and (run / "images/step-000002/evaluation.png").is_file()
    [start, end] = records(run, "eval")
    assert (start["moment"], end["moment"]) == ("start", "end") and "letters" in end
    steps = records(run)
    assert [r["step"] for r in steps] == [1, 2] and all(r["lr"] > 0 and r["truncated"] == 0 for r in steps)
    assert train(file).code == 2  # holds a run already
    sampled = retouch("sample", "--run", run, "--data", vlm_runs.tasks(), "--out", tmp_path / "pictures", "--steps", 1)
    assert sampled.code == 0, sampled.err
    assert len(list((tmp_path / "pictures").glob("*.png"))) == len(list((tmp_path / "pictures").glob("*.txt"))) == 12
    compared = retouch("eval", "--run", run, "--data", vlm_runs.tasks(), "--json")
    assert compared.code == 0, compared.err
    result = json.loads(compared.out)
    assert list(result["means"]) == ["base", "after RL"] and "letters" in result["means"]["after RL"]


@pytest.mark.full
def test_a_signal_stops_between_cycles(vlm_file: RunFile, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """During the first of three optimizer steps of a cycle; the run stops after the third."""
    trl = {"per_device_train_batch_size": 4, "steps_per_generation": 3, "num_generations": 4}
    file = vlm_file(trl, training__max_steps=9)
    real, steps = VlmTrainer._compute_loss, list[int]()

    def killed(self: VlmTrainer, model: Any, inputs: Any) -> Any:
        steps.append(1)
        if len(steps) == 1:
            os.kill(os.getpid(), signal.SIGTERM)
        return real(self, model, inputs)

    monkeypatch.setattr(VlmTrainer, "_compute_loss", killed)
    stopped = train(file)
    assert stopped.code == 3, stopped.err
    assert "received SIGTERM at step 3" in stopped.err
    assert [p.name for p in (tmp_path / "a/checkpoints").iterdir()] == ["step-000003"]
    monkeypatch.setattr(VlmTrainer, "_compute_loss", real)
    assert train(file, "resume=auto").code == 0
    assert [record["step"] for record in records(tmp_path / "a")] == list(range(1, 10))


def test_pictures_that_nobody_would_look_at_are_refused(vlm_file: RunFile) -> None:
    config = load_run(vlm_file(model={"family": "qwen_image", "path": random_model()}))
    with pytest.raises(
        ConfigError, match="example 0 has a source image, but under vlm_grpo qwen_image generates from text alone"
    ):
        build_run(config, "cpu", 1, main=True)


def test_nothing_of_a_run_is_pickled_for_its_data_set(parts_of: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of billions of parameters it would take gigabytes and minutes."""
    pickled: list[Any] = []
    plain = VlmRun.__reduce_ex__
    monkeypatch.setattr(VlmRun, "__reduce_ex__", lambda run, protocol: pickled.append(run) or plain(run, protocol))
    trainer = VlmTrainer(*parts_of())
    assert trainer.train_dataset[0]["prompt"] and not pickled


def test_a_gradient_that_is_nan_ends_the_run_before_the_weights_change(vlm_file: RunFile, tmp_path: Path) -> None:
    """TRL would write it into the weights and go on to the end."""
    outcome = train(vlm_file({"learning_rate": 1e30, "num_iterations": 2}, training__max_steps=4))
    assert outcome.code == 1 and "Traceback" not in outcome.err, outcome.err
    line, last = outcome.err.splitlines()[-1], records(tmp_path / "a", "event")[-1]
    assert line.startswith("error: the gradient norm is nan at step 2; lower algorithm.trl.")
    assert line.endswith(f"; continue with retouch train {tmp_path}/a/config.yaml resume=auto")
    assert last == {"step": 1, "kind": "event", "event": "diverged", "reason": line.removeprefix("error: ")}


def test_a_policy_without_probabilities_is_an_error_with_a_remedy(vlm_file: RunFile) -> None:
    """Where the weights are too large for a forward, and completions are sampled before the next gradient."""
    outcome = train(vlm_file({"learning_rate": 1e30}, training__max_steps=4))
    assert outcome.code == 1 and "Traceback" not in outcome.err, outcome.err
    assert outcome.err.splitlines()[-1].startswith("error: the policy's token probabilities contain NaN or Inf; lower")
