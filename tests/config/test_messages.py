"""What people read: one line a problem, with the key as it stands in the file and the nearest valid one."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from retouch.algorithms import ALGORITHMS
from retouch.algorithms.grpo.config import GrpoConfig
from retouch.config import ConfigError, RunConfig, parse_run
from retouch.config.base import Section
from retouch.config.errors import CUSTOM, nearest
from retouch.core.rules import STEP_RULES
from retouch.data.formats import FORMATS
from retouch.errors import log_once
from retouch.families import FAMILIES
from retouch.rewards import REWARDS
from retouch.rewards.client.config import RewardClientConfig

Problems = Callable[..., list[str]]
TOP_LEVEL = ", ".join(sorted(RunConfig.model_fields))


@pytest.mark.parametrize(
    ("override", "line"),
    [
        ("optimzer={}", "optimzer: unknown key; did you mean 'optimizer'?"),
        ("zzz=1", f"zzz: unknown key; known: {TOP_LEVEL}"),
        ("rollout.group_sise=4", "rollout.group_sise: unknown key; did you mean 'group_size'?"),
        ("rollout.window={sise: 2}", "rollout.window.sise: unknown key; did you mean 'size'?"),
        ("model.train={kind: lora, rnk: 4}", "model.train.rnk: unknown key; did you mean 'rank'?"),
        ("model.train={kind: full, rank: 4}", "model.train.rank: unknown key; known: kind"),
        ("data.promt_template=x", "data.promt_template: unknown key; did you mean 'prompt_template'?"),
        (
            "evaluation.data={format: manifest, path: x, imageroot: y}",
            "evaluation.data.imageroot: unknown key; did you mean 'image_root'?",
        ),
        ("algorithm.cliprange=1e-3", "algorithm.cliprange: unknown key; did you mean 'clip_range'?"),
        (
            "algorithm={name: nft, timestep_per_image: 2}",
            "algorithm.timestep_per_image: unknown key; did you mean 'timesteps_per_image'?",
        ),
        (
            "model={family: sd_inpaint, max_sequence_length: 77}",
            (
                "model.max_sequence_length: unknown key; known: attention, dtype, embeddings, family, "
                "free_text_encoders, offload_text_encoders, offload_vae, path, quantize, train, transformer, "
                "vae_batch, weights_variant"
            ),
        ),
        ("rewards.ocr.wieght=2", "rewards.ocr.wieght: unknown key; did you mean 'weight'?"),
        (
            "rewards.read={scorer: ocr, crop_margn: 0.1}",
            "rewards.read.crop_margn: unknown key; did you mean 'crop_margin'?",
        ),
        (
            "rewards.preservation={detect: true}",
            (
                "rewards.preservation.detect: unknown key; known: box_margin, box_min_side, crop, device, gate_floor, "
                "gate_threshold, gated_by, gradient_weight, min_group_std, paste_back, role, scorer, transform, url, "
                "weight"
            ),
        ),
    ],
)
def test_unknown_keys_name_the_nearest(override: str, line: str, problems: Problems) -> None:
    assert problems(override) == [f"small.yaml: {line}"]


@pytest.mark.parametrize(
    ("override", "line"),
    [
        ("algorithm.name=grop", "algorithm.name: given 'grop'; did you mean 'grpo'?"),
        ("model.train.kind=ip", "model.train.kind: given 'ip'; known: full, ip_adapter, lora"),
        ("data.format=manifst", "data.format: given 'manifst'; did you mean 'manifest'?"),
        (
            "evaluation.data={format: foo, path: x}",
            f"evaluation.data.format: given 'foo'; known: {', '.join(sorted(FORMATS))}{CUSTOM}",
        ),
        ("rewards.orc={}", "rewards.orc.scorer: given 'orc'; did you mean 'ocr'?"),
        ("rewards.fn={fn: score}", "rewards.fn.fn: given 'score'; write module:function, like my_rewards:score"),
        (
            "rewards.fn={fn: 'a:b', needs: [depth]}",
            "rewards.fn.needs: given 'depth'; an item may have mask, source, reference",
        ),
        ("rewards.legible={}", f"rewards.legible.scorer: given 'legible'; known: {', '.join(sorted(REWARDS))}{CUSTOM}"),
        ("model.family=flux_fil", "model.family: given 'flux_fil'; did you mean 'flux_fill'?"),
        ("model.family=sdxl", f"model.family: given 'sdxl'; known: {', '.join(sorted(FAMILIES))}{CUSTOM}"),
        (
            "algorithm.name=reinforce",
            f"algorithm.name: given 'reinforce'; known: {', '.join(sorted(ALGORITHMS))}{CUSTOM}",
        ),
        ("rollout.step_rule=foo", f"rollout.step_rule: given 'foo'; known: {', '.join(sorted(STEP_RULES))}{CUSTOM}"),
    ],
)
def test_unknown_tags_list_what_there_is(override: str, line: str, problems: Problems) -> None:
    assert problems(override) == [f"small.yaml: {line}"]


@pytest.mark.parametrize(
    ("override", "line"),
    [
        ("algorithm={clip_range: 1}", "algorithm: the kind is missing; set algorithm.name"),
        ("model.train={rank: 4}", "model.train: the kind is missing; set model.train.kind"),
        ("data={path: x}", "data: the kind is missing; set data.format"),
        ("data={format: self_bench}", "data.path: required and not set"),
        ("warmup_data={format: manifest}", "warmup_data.path: required and not set"),
        ("model=lora", "model: given 'lora'; expected a section; write its keys as {key: value}"),
        ("model.train=lora", "model.train: given 'lora'; expected a section; write its keys as {key: value}"),
        ("algorithm=", "algorithm: given None; expected a section; write its keys as {key: value}"),
        ("rewards=[ocr]", "rewards: given ['ocr']; expected a section; write its keys as {key: value}"),
        ("rewards.ocr=1", "rewards.ocr: given 1; expected a section; write its keys as {key: value}"),
        ("ema=0.99", "ema: given 0.99; expected a section; write its keys as {key: value}"),
    ],
)
def test_missing_keys_and_values_where_a_section_stands(override: str, line: str, problems: Problems) -> None:
    assert problems(override) == [f"small.yaml: {line}"]


def test_every_required_key_is_named_at_once() -> None:
    with pytest.raises(ConfigError) as caught:
        parse_run({}, source="empty.yaml")
    keys = ("name", "model", "data", "algorithm")
    assert str(caught.value).splitlines() == [f"empty.yaml: {key}: required and not set" for key in keys]


def test_every_problem_has_a_line_of_its_own(problems: Problems) -> None:
    lines = problems("seed=-1", "optimizer={lr: 0, epz: 1}", "rewards.ocr.url=[]")
    assert [line.split(": ")[1] for line in lines] == ["seed", "rewards.ocr.url", "optimizer.lr", "optimizer.epz"]


def test_a_reward_needs_no_options(run_with: Callable[..., RunConfig]) -> None:
    assert run_with("rewards={ocr: {}}").rewards["ocr"].scorer == "ocr"


@pytest.mark.parametrize(
    ("word", "known", "message"),
    [
        ("rnk", ("alpha", "rank"), "did you mean 'rank'?"),
        ("banana", ("rank", "alpha"), "known: alpha, rank"),
    ],
)
def test_nearest(word: str, known: tuple[str, ...], message: str) -> None:
    assert nearest(word, known) == message


@pytest.mark.parametrize(
    ("section", "key", "today", "other"),
    [
        (GrpoConfig, "late_rewards", "wait", "next_step"),
        (GrpoConfig, "sft_shifted_times", True, False),
        (GrpoConfig, "warmup_shifted_times", True, False),
        (RewardClientConfig, "hedge_after_s", None, 2.25),
        (REWARDS["pairwise"], "show_source", True, False),
        (REWARDS["complex_edit"], "alignment_weight", 0.6, 0.5),
        (REWARDS["complex_edit"], "quality_weight", 0.4, 0.5),
    ],
)
def test_a_key_that_is_gone_is_read_and_told_where_it_had_another_value(
    section: type[Section], key: str, today: object, other: object, caplog: pytest.LogCaptureFixture
) -> None:
    """Run directories of earlier versions have it."""
    log_once.cache_clear()
    model = {"model": "judge"} if "address" in section.model_fields else {}
    assert section.model_validate({**model, key: today}) == section.model_validate(model) and not caplog.records
    assert section.model_validate({**model, key: other}) == section.model_validate(model)
    assert caplog.messages == [f"{key}: given {other!r}, which earlier versions had; every run has {today!r}"]
