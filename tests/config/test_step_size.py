"""Rows of an optimizer step: on all processes together (`global_batch_size`), or on each (`gradient_accumulation`)."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import yaml

from retouch.config import ConfigError, RunConfig, derive, dump_run, load_run, parse_run, yaml12
from retouch.config.derived import numbers
from retouch.config.load import overlaid

from .conftest import BASE

RunWith = Callable[..., RunConfig]
SHAPE = "rollout={group_size: 8, global_groups_per_batch: 8, batches_per_epoch: 2}"  # 128 images


def sizes(run: RunConfig) -> tuple[int | None, int | None]:
    return run.optimizer.global_batch_size, run.optimizer.gradient_accumulation


@pytest.mark.parametrize(("size", "steps"), [(64, 2), (43, 3), (42, 4), (128, 1), (500, 1), (1, 128)])
def test_the_steps_of_an_epoch_follow_from_the_size_alone(size: int, steps: int, run_with: RunWith) -> None:
    run = run_with(SHAPE, f"optimizer.global_batch_size={size}", "optimizer.batch_size_per_device=3")
    for world_size in (1, 2, 3, 8, 60, 200):
        derived = derive(run, world_size)
        assert (derived.global_rows_per_step, derived.optimizer_steps_per_epoch) == (size, steps)
        assert derived.epochs == -(-10_000 // steps)


def test_inner_epochs_take_the_steps_again(run_with: RunWith) -> None:
    run = run_with(SHAPE, "optimizer.global_batch_size=64", "algorithm.inner_epochs=3")
    assert [derive(run, n).optimizer_steps_per_epoch for n in (1, 8)] == [6, 6]


def test_pairs_are_the_rows_of_dpo(run_with: RunWith) -> None:
    run = run_with(SHAPE, "algorithm={name: dpo}", "optimizer.global_batch_size=8")
    assert [derive(run, n).optimizer_steps_per_epoch for n in (1, 3, 8)] == [2, 2, 2]


@pytest.mark.parametrize(
    ("size", "processes", "told"),
    [
        (64, 3, "expected a multiple of 3; set it to 63 or 66, or start 2 or 4 processes"),
        (64, 100, "expected a multiple of 100; set it to 100, or start 64 processes"),
        (30, 4, "expected a multiple of 4; set it to 28 or 32, or start 3 or 5 processes"),
        (7, 2, "expected a multiple of 2; set it to 6 or 8, or start 1 or 7 processes"),
    ],
)
def test_supervised_steps_need_a_number_of_processes_that_shares_them(
    size: int, processes: int, told: str, run_with: RunWith
) -> None:
    """A step on rollouts has padding of weight 0; one on given examples has none."""
    given = f"optimizer.global_batch_size={size}"
    warm = "algorithm.sft_steps=10"
    for run in (run_with(given, warm), run_with(given, "algorithm={name: sft}")):
        with pytest.raises(ConfigError) as caught:
            derive(run, processes)
        shared = f"given {size} on {processes} processes, which share the examples of a step evenly; "
        assert str(caught.value) == f"optimizer.global_batch_size: {shared}{told}"
    assert derive(run_with(given), processes).global_rows_per_step == size
    assert derive(run_with("algorithm={name: sft}"), processes).global_rows_per_step == 4 * processes


def test_both_at_once_are_refused(problems: Callable[..., list[str]]) -> None:
    (line,) = problems("optimizer.gradient_accumulation=8", "optimizer.global_batch_size=64")
    assert line == (
        "small.yaml: optimizer.gradient_accumulation: given 8 beside optimizer.global_batch_size 64, which already "
        "sets the rows of a step; leave one of them out"
    )


def test_a_layer_above_replaces_the_other_one(tmp_path: Path) -> None:
    """Overrides of earlier versions over a published file of today, and the other way round."""
    (tmp_path / "base.yaml").write_text(yaml.safe_dump({**BASE, "optimizer": {"global_batch_size": 64}}))
    (tmp_path / "run.yaml").write_text("extends: base.yaml\noptimizer: {gradient_accumulation: 2}\n")
    base, run = tmp_path / "base.yaml", tmp_path / "run.yaml"
    assert sizes(load_run(base)) == (64, None) and sizes(load_run(run)) == (None, 2)
    assert sizes(load_run(base, ["optimizer.gradient_accumulation=3"])) == (None, 3)
    assert sizes(load_run(base, ["optimizer={gradient_accumulation: 3}"])) == (None, 3)
    assert sizes(load_run(base, {"optimizer": {"gradient_accumulation": 3}})) == (None, 3)
    assert sizes(load_run(run, ["optimizer.global_batch_size=5"])) == (5, None)
    assert sizes(load_run(base, ["optimizer.gradient_accumulation=null"])) == (64, None)
    assert sizes(load_run(base, ["optimizer.lr=1"])) == (64, None)
    with pytest.raises(ConfigError, match="leave one of them out"):
        load_run(base, {"optimizer.gradient_accumulation": 3, "optimizer.global_batch_size": 5})
    assert overlaid({"optimizer": {"global_batch_size": 64}}, {"optimizer.lr": 1})["optimizer"]["global_batch_size"]


def test_a_dumped_run_is_read_back(run_with: RunWith) -> None:
    for given, expected in (("optimizer.global_batch_size=64", (64, None)), ("optimizer.lr=1", (None, 4))):
        run = run_with(given)
        again = parse_run(yaml12.parse(dump_run(run)))
        assert again == run and sizes(again) == expected


VLM = {
    "name": "vlm",
    "model": {"family": "qwen_image", "path": "tiny"},
    "data": {"format": "prompts", "path": "somewhere", "resolution": 64},
    "algorithm": {"name": "vlm_grpo", "trl": {"per_device_train_batch_size": 2, "num_generations": 8}},
    "rewards": {"ocr": {}},
    "optimizer": {"global_batch_size": 16},
}


def test_completions_of_a_text_encoder() -> None:
    run = parse_run(VLM)
    found = [numbers(run, count).as_dict() for count in (1, 2, 4, 8)]
    assert [one["global_completions_per_step"] for one in found] == [16] * 4
    assert [one["global_completions_per_generation"] for one in found] == [16] * 4
    with pytest.raises(ConfigError) as caught:
        numbers(run, 3)
    assert str(caught.value) == (
        "optimizer.global_batch_size: given 16 on 3 processes, which share the completions of a step evenly in "
        "forwards of 2; expected a multiple of 6; set it to 12 or 18, or start 2 or 4 processes"
    )
    for name in ("gradient_accumulation_steps", "steps_per_generation"):
        with pytest.raises(ConfigError, match=rf"algorithm.trl.{name}: given 2, which counts on each process, beside"):
            parse_run({**VLM, "algorithm": {**VLM["algorithm"], "trl": {name: 2}}})  # type: ignore[dict-item]
    typed = parse_run(VLM, ["algorithm.trl.gradient_accumulation_steps=3"])
    assert [numbers(typed, count).as_dict()["global_completions_per_step"] for count in (4, 8)] == [24, 48]
    with pytest.raises(
        ConfigError, match=r"optimizer.gradient_accumulation: given 8, but only training of a diffusion"
    ):
        parse_run(VLM, ["optimizer.gradient_accumulation=8"])
