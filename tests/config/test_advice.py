"""Warnings about settings outside of what published runs did: each fires, and does not where it should not."""

from __future__ import annotations

from typing import Any

import pytest

from retouch.config import parse_run
from retouch.config.advice import ADVICE, advice
from retouch.config.check import warnings_of

RELEASED: dict[str, Any] = {
    "name": "released",
    "model": {"family": "sd3", "path": "somebody/model", "train": {"kind": "lora"}},
    "data": {"format": "prompts", "path": "somewhere", "resolution": 512},
    "rollout": {"group_size": 8, "global_groups_per_batch": 16, "guidance_scale": 4.5},
    "algorithm": {"name": "grpo", "old_log_probs": "recomputed"},
    "rewards": {"ocr": {}},
    "optimizer": {"lr": 3e-4, "global_batch_size": 64},
}
SD = ("model={family: sd_inpaint, path: somebody/model, train: {kind: lora}}", "rollout.guidance_scale=5")
SIGNS = "data={format: self_bench, path: somewhere, resolution: 512}"
EDIT = ("model={family: qwen_image_edit, path: somebody/model, train: {kind: lora}}", "rollout.guidance_scale=4")
JUDGED = "rewards={complex_edit: {model: m, address: 'http://127.0.0.1:1/v1'}}"
EDITS = "data={format: complex_edit, path: somewhere, resolution: 512}"
VLM = (
    *("model={family: qwen_image_edit, path: somebody/model}", EDITS, JUDGED),
    *("rollout={guidance_scale: 4}", "optimizer={global_batch_size: 16}"),
)
FLUX = ("model={family: flux_dev, path: somebody/model, train: {kind: lora}}", "rollout.guidance_scale=3.5")

FIRES: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "many_steps": (("optimizer.global_batch_size=25",), ("optimizer.global_batch_size=32",)),
    "many_steps of inner epochs": (("algorithm.inner_epochs=3",), ("algorithm.inner_epochs=2",)),
    "few_groups": (
        ("rollout.global_groups_per_batch=8", "optimizer.global_batch_size=16"),
        ("rollout.global_groups_per_batch=8", "optimizer.global_batch_size=32"),
    ),
    "few_groups in too many steps": (
        ("rollout.global_groups_per_batch=8", "optimizer.global_batch_size=16"),
        ("optimizer.global_batch_size=31",),
    ),
    "few_groups of an epoch": (
        ("rollout.global_groups_per_batch=3",),
        ("rollout.global_groups_per_batch=3", "rollout.group_size=1", "algorithm={name: ppo}"),
    ),
    "idle_clip": (
        ("algorithm.clip_range=1e-5", "optimizer.global_batch_size=128"),
        ("algorithm.clip_range=1e-5", "optimizer.global_batch_size=64"),
    ),
    "idle_clip where nothing is ever clipped": (
        ("algorithm.clip_range=1e-5", "optimizer.global_batch_size=128"),
        ("algorithm.clip_range=0.2", "optimizer.global_batch_size=128"),
    ),
    "clip_below_rounding": (("algorithm.old_log_probs=recorded",), ("algorithm.old_log_probs=recomputed",)),
    "clip_below_rounding without guidance": (
        ("algorithm.old_log_probs=recorded",),
        ("algorithm.old_log_probs=recorded", "rollout.guidance_scale=1"),
    ),
    "clip_below_rounding in fp16": (
        ("algorithm.old_log_probs=recorded",),
        ("algorithm.old_log_probs=recorded", "training.mixed_precision=fp16"),
    ),
    "clip_below_rounding in one step": (
        ("algorithm.old_log_probs=recorded",),
        ("algorithm.old_log_probs=recorded", "optimizer.global_batch_size=128"),
    ),
    "learning_rate of full weights": (
        ("model.train={kind: full}",),
        ("model.train={kind: full}", "optimizer.lr=1e-5"),
    ),
    "learning_rate of LoRA": (("optimizer.lr=4e-4",), ("optimizer.lr=1e-5",)),
    "learning_rate of LoRA, too low": (("optimizer.lr=9e-6",), ("optimizer.lr=1e-4",)),
    "learning_rate of an adapter": (
        (*SD, SIGNS, "model.train={kind: ip_adapter}", "optimizer.lr=1e-4"),
        (*SD, SIGNS, "model.train={kind: ip_adapter}", "optimizer.lr=1e-5"),
    ),
    "learning_rate of an adapter without RL": (
        (*SD, SIGNS, "model.train={kind: ip_adapter}", "algorithm={name: sft}", "optimizer.lr=2e-4"),
        (*SD, SIGNS, "model.train={kind: ip_adapter}", "algorithm={name: sft}", "optimizer.lr=1e-4"),
    ),
    "learning_rate of a VLM": (
        (*VLM, "algorithm={name: vlm_grpo, trl: {learning_rate: 1.0e-5}}"),
        (*VLM, "algorithm={name: vlm_grpo, trl: {learning_rate: 1.0e-6}}"),
    ),
    "learning_rate of a VLM's LoRA": (
        (*VLM, "algorithm={name: vlm_grpo, trl: {use_peft: true, learning_rate: 2.0e-5}}"),
        (*VLM, "algorithm={name: vlm_grpo, trl: {use_peft: true, learning_rate: 1.0e-5}}"),
    ),
    "kl_weight": (("algorithm.kl_weight=0.05",), ("algorithm.kl_weight=0.04",)),
    "kl_weight of Flow-GRPO's": (
        ("algorithm.kl_weight=9e-4", "algorithm.kl_mode=flow_grpo"),
        ("algorithm.kl_weight=0.04", "algorithm.kl_mode=flow_grpo"),
    ),
    "kl_weight of DiffusionNFT": (
        ("algorithm={name: nft, kl_weight: 0.4}",),
        ("algorithm={name: nft, kl_weight: 0.01}",),
    ),
    "kl_weight of a VLM": (
        (*VLM, "algorithm={name: vlm_grpo, trl: {use_peft: true, beta: 0.1}}"),
        (*VLM, "algorithm={name: vlm_grpo, trl: {use_peft: true, beta: 0.04}}"),
    ),
    "sampling_judge": ((*EDIT, EDITS, JUDGED), (*EDIT, EDITS, JUDGED, "rewards.complex_edit.min_group_std=0.03")),
    "sampling_judge at temperature 0": (
        (*EDIT, EDITS, JUDGED),
        (*EDIT, EDITS, JUDGED, "rewards.complex_edit.temperature=0"),
    ),
    "unfit_reward": ((*SD, SIGNS), (*SD, SIGNS, "rewards={pickscore: {}}")),
    "unfit_reward beside another": (
        (*SD, SIGNS, "rewards.pickscore={}"),
        (*SD, SIGNS, "rewards={ocr: {role: gold}, pickscore: {}}"),
    ),
}
"""Name of the warning and a case -> overrides with which it fires, and nearby ones with which it does not."""


def found(*overrides: str) -> dict[str, str]:
    return advice(parse_run(RELEASED, overrides))


def test_a_run_like_the_published_ones_has_none() -> None:
    assert found() == {}


@pytest.mark.parametrize("case", FIRES)
def test_it_fires_and_does_not(case: str) -> None:
    name, (fires, quiet) = case.split()[0], FIRES[case]
    line = found(*fires)[name]
    key, told = line.split(": ", 1)
    assert "." in key and " " not in key and (told.startswith(("given ", "an ", "reads ")))
    assert name not in found(*quiet)


def test_every_warning_has_both_cases_and_a_reason() -> None:
    assert list(dict.fromkeys(case.split()[0] for case in FIRES)) == list(ADVICE)
    assert all(says.__doc__ for says in ADVICE.values())


def test_steps_that_depend_on_the_number_of_processes() -> None:
    """With `gradient_accumulation` one process takes more steps than eight; with a global size both take as many."""
    run = parse_run({**RELEASED, "optimizer": {"lr": 3e-4, "gradient_accumulation": 8}})
    assert {*advice(run, 1)} == {"many_steps"} and advice(run, 8) == {}  # few groups have the same cause
    assert [line.split(":")[0] for line in warnings_of(run)] == ["optimizer.gradient_accumulation"]
    assert advice(run, 1)["many_steps"].endswith("raise it, or set optimizer.global_batch_size")
    many = parse_run(RELEASED, ["optimizer.global_batch_size=25"])
    assert {*advice(many, 1)} == {*advice(many, 8)} == {"many_steps"}
    assert advice(many, 1)["many_steps"].endswith("; raise it")  # the key is set


@pytest.mark.parametrize("overrides", [("data.resolution=64",), ("model.path=tiny",)])
def test_tiny_bases_have_no_published_runs(overrides: tuple[str, ...]) -> None:
    assert found("optimizer.lr=1e-2") and not found("optimizer.lr=1e-2", *overrides)
