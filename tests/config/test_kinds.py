"""Overrides that name another kind of a section: they replace it, as a file that `extends` another does."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any, get_args

import pytest
import yaml

from retouch.algorithms import ALGORITHMS
from retouch.config import ConfigError, RunConfig, load_run, parse_run
from retouch.config.kinds import changed_tag
from retouch.config.load import overlaid, read_yaml
from retouch.config.reads import Reading
from retouch.data.formats import FORMATS
from retouch.errors import log_once
from retouch.families import FAMILIES
from retouch.rewards import REWARDS

from .conftest import BASE, REPOSITORY

CONFIGS = REPOSITORY / "configs"
TRAINED_ON_REWARDS = ("grpo", "ppo", "dpo", "nft")
"""Algorithms that a run file of another one can be switched to by their name alone."""


@pytest.fixture(autouse=True)
def variables(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("MODEL_PATH", "DATA_PATH", "DATA_JSON_PATH"):
        monkeypatch.setenv(name, f"/given/{name}")


def extended(tmp_path: Path, file: Path, text: str) -> RunConfig:
    path = tmp_path / "above.yaml"
    path.write_text(f"extends: {file}\n{text}", encoding="utf-8")
    return load_run(path)


def test_ppo_over_a_file_of_grpo_is_ppo(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A group baseline that stays would make it GRPO under another name."""
    file = CONFIGS / "flux_fill_grpo.yaml"
    run = load_run(file, ["algorithm.name=ppo"])
    assert (run.algorithm.baseline, run.algorithm.scale) == ("batch", "batch")  # type: ignore[union-attr]
    assert run == extended(tmp_path, file, "algorithm: {name: ppo, sft_steps: 500}")
    [line] = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
    assert line == (
        "algorithm.name: given 'ppo' over 'grpo', which replaces the section: dropped algorithm.clip_range, "
        "algorithm.old_log_probs, algorithm.advantage_clip, algorithm.baseline, algorithm.scale, algorithm.kl_weight, "
        "algorithm.kl_mode; kept algorithm.sft_steps; to use a dropped key, set it in the same command"
    )


@pytest.mark.parametrize("now", ["sft", *TRAINED_ON_REWARDS])
@pytest.mark.parametrize("then", TRAINED_ON_REWARDS)
@pytest.mark.parametrize("family", ["flux_fill", "sd_inpaint"])
def test_the_name_alone_switches_the_algorithm(family: str, then: str, now: str) -> None:
    """Also where the new one refuses a key of another section, such as a window of stochastic steps."""
    file = CONFIGS / f"{family}_{then}.yaml"
    groups = ["rollout.group_size=8"] if then == "ppo" and now != "ppo" else []  # its file has groups of one
    run = load_run(file, [f"algorithm.name={now}", *groups])
    if now == then:
        assert run == load_run(file)
        return
    own = read_yaml(file)["algorithm"]
    fields = ALGORITHMS[now].model_fields
    kept = {key: own[key] for key in ("sft_steps", "region", "caption_dropout") if key in own}
    expected = ALGORITHMS[now].model_validate({"name": now, **{k: v for k, v in kept.items() if k in fields}})
    assert run.algorithm == expected


@pytest.mark.parametrize("order", [1, -1])
def test_keys_of_the_same_command_stay_in_any_order(order: int) -> None:
    typed = ["algorithm.name=nft", "algorithm.advantage_clip=3", "algorithm.kl_weight=0.5"][::order]
    below = {**BASE, "algorithm": {"name": "grpo", "advantage_clip": 2, "baseline": "batch", "region": "mask"}}
    algorithm: Any = parse_run(below, typed).algorithm
    assert (algorithm.name, algorithm.advantage_clip, algorithm.kl_weight) == ("nft", 3, 0.5)
    assert (algorithm.baseline, algorithm.region) == ("group", "mask")
    window = {**below, "rollout": {"window": {"size": 2, "range": [0, 1]}, "noise_level": 0.5}}
    assert parse_run(window, typed).rollout.window is None
    with pytest.raises(ConfigError, match=r"rollout\.window: given, but nft samples by the ODE"):
        parse_run(window, [*typed, "rollout.window.size=1"])  # the window of the command is not dropped


@pytest.mark.parametrize(
    ("below", "override", "kept", "gone"),
    [
        (
            {"model": {"family": "flux_fill", "path": "tiny", "train": {"kind": "lora", "rank": 4}}},
            "model.train.kind=full",
            {},
            "model.train.rank",
        ),
        (
            {"data": {"format": "manifest", "path": "l.json", "resolution": 64, "image_root": "/x", "fit": "stretch"}},
            "data.format=self_bench",
            {"path": "l.json", "resolution": 64, "fit": "stretch"},
            "data.image_root",
        ),
        (
            {"rewards": {"read": {"scorer": "ocr", "weight": 0.5, "role": "gold", "score": "confidence"}, "seam": {}}},
            "rewards.read.scorer=preservation",
            {"role": "gold", "weight": 1.0},
            "rewards.read.score",
        ),
        (
            {"model": {"family": "flux_kontext", "path": "a", "dtype": "fp32", "max_sequence_length": 64}},
            "model.family=flux_fill",
            {"dtype": "fp32", "max_sequence_length": 512},
            "model.max_sequence_length",
        ),
        (
            {"evaluation": {"data": {"format": "manifest", "path": "l.json", "image_root": "/x"}}},
            "evaluation.data.format=self_bench",
            {"path": "l.json"},
            "evaluation.data.image_root",
        ),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_every_section_with_kinds_is_replaced(
    below: dict[str, Any], override: str, kept: dict[str, Any], gone: str, caplog: pytest.LogCaptureFixture
) -> None:
    """On the command line and in Python alike."""
    run = {**BASE, **below}
    more = ["model.path=tiny"] if "family" in override else []
    found = parse_run(run, [override, *more])
    changes = dict(one.split("=") for one in (override, *more))
    assert parse_run(overlaid(run, changes)) == found
    section: Any = found
    for part in override.partition("=")[0].split(".")[:-1]:
        section = section[part] if isinstance(section, dict) else getattr(section, part)
    assert {key: getattr(section, key) for key in kept} == kept
    lines = [record.getMessage() for record in caplog.records if gone in record.getMessage()]
    assert len(lines) == 2 and all(f"dropped {gone}" in line or f", {gone}" in line for line in lines)


def test_a_required_key_that_was_dropped_is_explained() -> None:
    below = {**BASE, "rewards": {"read": {"scorer": "ocr", "weight": 0.5}}}
    with pytest.raises(ConfigError) as caught:
        parse_run(below, ["rewards.read.scorer=fn"], source="small.yaml")
    problem, explained = str(caught.value).splitlines()
    assert problem.startswith("small.yaml: rewards.read.fn: given ''")
    assert explained == (
        "small.yaml: rewards.read.scorer: given 'fn' over 'ocr', which replaces the section: dropped "
        "rewards.read.weight; to use a dropped key, set it in the same command"
    )


def test_a_misspelled_kind_has_its_message_alone() -> None:
    below = {**BASE, "algorithm": {"name": "grpo", "clip_range": 1}}
    with pytest.raises(ConfigError) as caught:
        parse_run(below, ["algorithm.name=grop"], source="small.yaml")
    assert str(caught.value) == "small.yaml: algorithm.name: given 'grop'; did you mean 'grpo'?"


@pytest.mark.parametrize(("short", "family"), [("flux", "flux_fill"), ("qwen", "qwen_image")])
def test_the_guides_names_of_models_are_families(short: str, family: str, caplog: pytest.LogCaptureFixture) -> None:
    """On the command line, in a file, in Python; a note is logged once."""
    log_once.cache_clear()
    run = {**BASE, "model": {"family": family, "path": "tiny", "train": {"kind": "lora", "rank": 4}}}
    run["rollout"] = {"guidance_scale": 4.0}  # would have to be set anew for another family
    if family == "qwen_image":
        run["data"] = {"format": "prompts", "path": "p.txt", "resolution": 64}
    overridden = parse_run(run, [f"model.family={short}"])
    assert overridden == parse_run(run) == parse_run({**run, "model": {**run["model"], "family": short}})
    assert overridden.model.family == family and overridden.model.train.rank == 4  # type: ignore[union-attr]
    told = [record.getMessage() for record in caplog.records]
    assert not [line for line in told if "replaces the section" in line]
    assert told == [f"model.family: given {short!r}, which is read as {family}"]


def test_kept_and_unread_keys_are_options() -> None:
    """A name in one of the lists that is none would keep, or drop, nothing."""
    for registry in (ALGORITHMS, FAMILIES, FORMATS, REWARDS):
        for kind in registry.available().values():
            for part in kind.__mro__:
                options = getattr(part, "model_fields", {})
                assert {*vars(part).get("KEPT", ())} <= {*options}, part
                assert {*vars(part).get("READ_BY_ALL", ())} <= {*options}, part
                assert {*vars(part).get("READS", ())} <= {*get_args(Reading)}, part


@pytest.mark.parametrize(
    ("then", "now", "stays"),
    [
        ("${ALGO:-grpo}", "grpo", True),
        ("grpo", "${ALGO:-grpo}", True),
        ("${ALGO_UNSET}", "grpo", True),  # nothing is known of it
        ("${ALGO:-ppo}", "grpo", False),
        ("grpo", "${ALGO:-ppo}", False),
    ],
)
def test_a_kind_in_a_variable_is_the_one_that_it_stands_for(
    then: str, now: str, stays: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On the command line, in Python, and where a file extends another."""
    for name in ("ALGO", "ALGO_UNSET"):
        monkeypatch.delenv(name, raising=False)
    below = {**BASE, "algorithm": {"name": then, "kl_weight": 0.04, "sft_steps": 3}}
    expected = (0.04, 3) if stays else (0.0, 3)
    override = f"algorithm.name={now}"
    for run in (parse_run(below, [override]), parse_run(overlaid(below, {"algorithm.name": now}))):
        assert (run.algorithm.kl_weight, run.algorithm.sft_steps) == expected  # type: ignore[union-attr]
    (tmp_path / "below.yaml").write_text(yaml.safe_dump(below), encoding="utf-8")
    algorithm: Any = extended(tmp_path, tmp_path / "below.yaml", f"algorithm: {{name: '{now}'}}").algorithm
    assert algorithm.kl_weight == expected[0]
    monkeypatch.setenv("ALGO", "nft")
    if "{ALGO:" in then:
        assert parse_run(below, [override]).algorithm.kl_weight == 0  # type: ignore[union-attr]


def test_a_family_in_a_variable_keeps_its_guidance(monkeypatch: pytest.MonkeyPatch) -> None:
    model = {"family": "${FAMILY:-flux_fill}", "path": "tiny", "train": {"kind": "lora", "rank": 4}}
    below = {**BASE, "model": model, "rollout": {"guidance_scale": 4.0}}
    monkeypatch.delenv("FAMILY", raising=False)
    run: Any = parse_run(below, ["model.family=flux_fill"])
    assert (run.rollout.guidance_scale, run.model.train.rank) == (4, 4)
    monkeypatch.setenv("FAMILY", "flux_kontext")
    with pytest.raises(ConfigError, match=r"rollout\.guidance_scale 4\.0 was set"):
        parse_run(below, ["model.family=flux_fill"])


def test_a_section_without_a_kind_changes_none() -> None:
    assert changed_tag({}, {"format": "manifest"}, ("evaluation", "data")) is None
    assert changed_tag({}, {"scorer": "ocr"}, ("rewards", "ocr")) is None
    assert changed_tag({}, {"scorer": "ocr"}, ("rewards", "read")) == "scorer"
    assert changed_tag({}, {"family": "sd3"}, ("model",)) == "family"
    assert changed_tag({"name": "a"}, {"name": "b"}, ()) is None  # the run's own name is no kind
