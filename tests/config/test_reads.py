"""What the fields declare about who reads them is what the rules reject, and nothing that a run prints follows from an
option that nothing reads in it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, get_args

import pytest
import yaml

from retouch.algorithms import ALGORITHMS
from retouch.config import ConfigError, RunConfig, numbers, parse_run
from retouch.config.check import warnings_of
from retouch.config.cost import cost
from retouch.config.derived import rows_per_forward
from retouch.config.load import overlaid
from retouch.config.reads import EARLIER_DEFAULTS, ReadBy, Reading, reads_of, unread
from retouch.core.rules import STEP_RULES

from .changed import declared, others, with_value
from .conftest import BASE

SD = "model={family: sd_inpaint, path: tiny}"
PAIRS = "data={format: manifest, path: pairs.json, resolution: 64}"
EDIT = {"model": {"family": "qwen_image_edit", "path": "tiny"}, "data": {"format": "manifest", "path": "p"}}
MMMG = ("model={family: qwen_image, path: tiny}", "data={format: mmmg, path: x, resolution: 64}")

RUNS: dict[str, tuple[str, ...]] = {
    "grpo": (),
    "window": (
        "rollout={window: {size: 2, position: sliding}, num_steps: 8}",
        "algorithm={name: ppo, kl_weight: 0.04, region: mask, region_dilation: 1, sft_steps: 2}",
        "logging.sinks=[trackio]", "ema={}", "training.sharding=fsdp2", "reward_client.probe_every=1",
        "rewards={ocr: {gated_by: seam, crop: mask_box}, seam: {}, size: {scorer: jpeg_size, role: gold}}",
        "data={format: self_bench, path: x, resolution: 64, reference_strip: 16}",
    ),
    "masked clip": (
        "algorithm={name: grpo, kl_mask_threshold: 1e-5}",
        "rollout={step_rule: dance_sde, window: {size: 2}}",
    ),
    "epsilon": (SD, "algorithm={name: sft}", "rewards={}"),
    "guidance": (SD, "algorithm={name: dpo, sft_steps: 2}", "rewards={ocr: {}, size: {scorer: jpeg_size, role: gold}}"),
    "base": (
        "model={family: flux_fill, path: tiny, true_guidance_scale: 2}",
        "algorithm={name: dpo, kl_reference: base}",
    ),
    "pairs": (PAIRS, "algorithm={name: dpo, pairs: offline}", "rewards={}"),
    "labels": (PAIRS, "algorithm={name: kto}", "rewards={}"),
    "nft": ("algorithm={name: nft}", "rewards={seam: {}}"),
    "gradients": ("algorithm={name: reward_gradient}", "rewards={seam: {}}"),
    "all steps": ("algorithm={name: reward_gradient, trained_step: all}", "rewards={seam: {}}"),
    "sft": ("algorithm={name: sft}", "rewards={}"),
    "style": ("model.train={kind: ip_adapter, weights: kv_lora}", "algorithm.sft_steps=2"),
    "keys": ("model.train={kind: ip_adapter, weights: kv}",),
    "another optimizer": ("optimizer={factory: 'a:B'}",),
    "linear": (SD, "model.train={kind: ip_adapter}"),
    "prompts": (*MMMG, "algorithm={name: sft}", "rewards={}"),
    "stages": MMMG,
    "text encoder": ("algorithm={name: vlm_grpo, trl: {use_peft: true}}", "rewards={preservation: {}}"),
}  # fmt: skip


def run_of(name: str) -> RunConfig:
    return parse_run({**BASE, **EDIT} if name == "text encoder" else BASE, RUNS[name])


def message_of(run: RunConfig, key: str) -> str | None:
    """The message about an option that is given and that nothing reads; None where something does."""
    section: Any = run
    for part in key.split(".")[:-1]:
        section = section[part] if isinstance(section, dict) else getattr(section, part)
    found = unread(run, section, key.rpartition(".")[0])
    return next((option.message for option in found if option.message.startswith(f"{key}: ")), None)


def written(name: str, key: str, value: Any) -> tuple[str, ...]:
    shown = value.model_dump(mode="json") if hasattr(value, "model_dump") else value
    return (*RUNS[name], f"{key}={yaml.safe_dump(shown, default_flow_style=True).split(chr(10))[0]}")


_NONE = object()


def test_every_declaration_is_held_where_it_is_read_and_where_it_is_not() -> None:
    """A declaration that no run meets, or that every run does, says nothing."""
    read, refused = dict[tuple[type, str], str](), dict[tuple[type, str], str]()
    for name in RUNS:
        run = run_of(name)
        for key, section, option in declared(run):
            owner = next(
                part for part in reversed(type(section).__mro__) if option in getattr(part, "model_fields", ())
            )
            for value in others(section, option):
                told = message_of(with_value(run, key, value), key)
                if value == EARLIER_DEFAULTS.get(key, _NONE):
                    continue  # stored run files have it wherever nothing reads it
                if told is None:
                    read.setdefault((owner, option), name)
                elif (owner, option) not in refused:
                    refused[owner, option] = name
                    _is_reported(name, key, value, told)
    assert read.keys() == refused.keys(), read.keys() ^ refused.keys()
    assert len(read) > 60


def _is_reported(name: str, key: str, value: Any, told: str) -> None:
    base = {**BASE, **EDIT} if name == "text encoder" else BASE
    try:
        run = parse_run(base, written(name, key, value), source="a.yaml")
    except ConfigError as error:
        lines = [line.removeprefix("a.yaml: ") for line in str(error).splitlines()]
        assert any(line.startswith(f"{key}: given") for line in lines), (name, key, lines, told)
    else:
        assert told in warnings_of(run), (name, key, told)


def with_all_that_nothing_reads(run: RunConfig) -> tuple[RunConfig, list[str]]:
    """The run with every option changed that nothing reads in it, and their keys."""
    keys = list[str]()
    for key, section, option in list(declared(run)):
        for value in others(section, option)[:1]:
            changed = with_value(run, key, value)
            if all(message_of(changed, other) for other in (*keys, key)):
                run, keys = changed, [*keys, key]
    return run, keys


@pytest.mark.parametrize("name", RUNS)
def test_no_number_of_a_run_follows_from_options_that_nothing_reads(name: str) -> None:
    run = run_of(name)
    changed, keys = with_all_that_nothing_reads(run)
    assert len(keys) > 5 and changed != run
    assert numbers(changed, 2) == numbers(run, 2), keys
    assert cost(changed, 2) == cost(run, 2)
    if name != "text encoder":
        for device in ("cpu", "cuda"):
            assert rows_per_forward(changed, device) == rows_per_forward(run, device)


def test_options_of_step_rules_name_the_rules_that_they_scale() -> None:
    from retouch.config.rollout import RolloutConfig

    for option in ("noise_level", "eta"):
        where = reads_of(RolloutConfig)[option][1].where  # type: ignore[union-attr]
        names = [name for name, rule in STEP_RULES.available().items() if rule.strength == option]
        assert where == f"by step rules {' and '.join(names)}"


def test_an_algorithm_that_comes_later_reads_what_it_says(problems: Callable[..., list[str]]) -> None:
    """Its section alone declares it: no list of keys names an algorithm."""
    kind: Any = ALGORITHMS["nft"]

    class Later(kind):
        READS = kind.READS | {"step_rule"}

    run = run_of("nft").model_copy(update={"algorithm": Later()})
    given = with_value(run, "rollout.shared_noise", True)
    assert message_of(given, "rollout.shared_noise") is None
    [line] = problems("algorithm={name: nft}", "rollout.shared_noise=true")
    assert line.startswith("small.yaml: rollout.shared_noise: given true, but nft")


def test_an_algorithm_of_others_reads_no_preset_and_no_gradient_unless_it_says_so() -> None:
    from retouch.algorithms.base import AlgorithmSection

    class Own(AlgorithmSection):
        name: str = "own"

    run: Any = None
    assert [what for what in get_args(Reading) if not Own().reads(run, what)] == ["presets", "gradients"]


def test_an_override_drops_what_the_new_algorithm_refuses_and_no_other_key() -> None:
    below = {**BASE, "rollout": {"shared_noise": True, "group_size": 4}, "optimizer": {"steps_per_forward": 1}}
    below["rewards"] = {"seam": {}}
    run: Any = overlaid(below, {"algorithm.name": "reward_gradient"})
    assert run["rollout"] == {"group_size": 4} and run["optimizer"] == {}
    run = overlaid(below, {"algorithm.name": "sft"})  # which warns of them
    assert run["rollout"] == below["rollout"]


@pytest.mark.parametrize("given", ["null", "4"])
def test_null_micro_batches_are_the_default(given: str, run_with: Callable[..., RunConfig]) -> None:
    """It was accepted and read as 4 in some places and shown as null in others."""
    assert run_with(f"optimizer.gradient_accumulation={given}") == run_with()
    both = run_with("optimizer={global_batch_size: 8, gradient_accumulation: null}")
    assert both.optimizer.gradient_accumulation is None


def test_a_condition_beside_others_does_not_take_an_option_out_of_its_section() -> None:
    """`betas` and `state` had a condition on `factory` and were accepted beside vlm_grpo, which reads no optimizer."""
    run = run_of("nft")
    for section in (run.optimizer, run.rollout):
        kind = type(section)
        for name in kind.model_fields.keys() - kind.READ_BY_ALL:
            assert any(isinstance(mark, ReadBy) for mark in reads_of(kind)[name]), name


def test_declarations_are_of_annotations_that_say_where() -> None:
    for name in RUNS:
        for _, section, option in declared(run_of(name)):
            for mark in reads_of(type(section))[option]:
                assert isinstance(mark, ReadBy) or mark.where
