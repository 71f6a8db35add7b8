"""A config value that the code does not read is a bug."""

from __future__ import annotations

import inspect
from collections.abc import Container
from pathlib import Path

import pytest

from retouch.config import RunConfig
from retouch.rewards import REWARDS
from retouch.rewards.base import RewardEntry

from .conftest import REPOSITORY
from .leaves import Leaf, attribute_reads, leaves

# these check or parse options; only to be checked is not to be read
NOT_READERS = {
    "schema.py",
    "section.py",
    "rules.py",
    "data_rules.py",
    "needs.py",
    "advice.py",
    "errors.py",
    "load.py",
    "presets.py",
}

RECEIVERS = {
    "": {"config", "run"},
    "data": {"data", "config", "section"},
    "model": {"model", "config"},
    "distillation_lora": {"distillation_lora", "lora"},
    "optimizer": {"optimizer", "c", "config"},
    "algorithm": {"algorithm", "objective"},
    "evaluation": {"evaluation", "c"},
    "rewards": {"entry", "e"},
    "reward_client": {"reward_client", "client", "config"},
}
"""Names under which the code holds a section; a section that is not here is held under its own."""

READ_ELSEWHERE = {
    "VlmGrpoConfig.trl": "option by option, by TRL's own classes",
    "DpoConfig.reference_refresh_every": "through the property DpoConfig.refresh_every",
    "SelfBenchData.resolution": "through the property DataSection.size",
    "CrossBenchData.resolution": "through the property DataSection.size",
    "BrushBenchData.resolution": "through the property DataSection.size",
    "ManifestData.resolution": "through the property DataSection.size",
    "PromptsData.resolution": "through the property DataSection.size",
    "ComplexEditData.resolution": "through the property DataSection.size",
    "MmmgData.resolution": "through the property DataSection.size",
    "RolloutConfig.step_rule": "through needs.step_rule, which fills in the default of the family",
}
"""Option -> why no attribute access outside the schema shows it. Keep it short."""

LEAVES = list(leaves(RunConfig))


def package_reads() -> set[tuple[str, str]]:
    files = (REPOSITORY / "src" / "retouch").rglob("*.py")
    readers = [
        path
        for path in files
        if not (path.parent.name == "config" and (path.name in NOT_READERS or path.stem.endswith("_sections")))
    ]
    return {read for path in readers for read in attribute_reads(path.read_text(encoding="utf-8"))}


def receivers(leaf: Leaf) -> set[str]:
    """Names before the dot under which an option may be read."""
    section = leaf.key.removesuffix(leaf.name).strip(".*").rpartition(".")[2]
    section = "data" if section == "warmup_data" else section
    return RECEIVERS.get(section, {section})


def is_scorer_option(leaf: Leaf) -> bool:
    """Options of one scorer are read by the scorer of its file."""
    return issubclass(leaf.section, RewardEntry) and leaf.name not in RewardEntry.model_fields


def unread(reads: set[tuple[str, str]], exceptions: Container[str] = READ_ELSEWHERE) -> set[str]:
    """Keys of the options that none of `reads` reads."""
    return {
        leaf.key
        for leaf in LEAVES
        if not is_scorer_option(leaf)
        and leaf.owner not in exceptions
        and not any((receiver, leaf.name) in reads for receiver in receivers(leaf))
    }


def test_every_option_is_read() -> None:
    names = {leaf.key: sorted(receivers(leaf)) for leaf in LEAVES}
    hints = [f"{key}: no {' or '.join(names[key])} .{key.rpartition('.')[2]}" for key in unread(package_reads())]
    assert not hints, "read it, delete it, or name the variable in RECEIVERS:\n" + "\n".join(sorted(hints))


def test_an_option_that_nobody_reads_is_found() -> None:
    reads = package_reads()
    without = {read for read in reads if read[1] != "max_grad_norm"}
    assert unread(without) == {"optimizer.max_grad_norm"}
    # a namesake of another section is no excuse: rollout and optimizer both have a batch_size_per_device
    assert unread(reads - {("rollout", "batch_size_per_device")}) == {"rollout.batch_size_per_device"}


def test_what_counts_as_a_read() -> None:
    source = '''
"""max_steps in a docstring"""
"max_steps"
training.eval_every = 1
config.training.max_steps
f(resume=c.lr)
'''
    assert attribute_reads(source) == {("config", "training"), ("training", "max_steps"), ("c", "lr")}


def test_the_walk_reaches_every_kind_of_place() -> None:
    keys = {leaf.key for leaf in LEAVES}
    assert {
        "seed",
        "model.train.rank",  # union
        "data.image_root",
        "evaluation.data.image_root",  # optional union
        "rollout.window.size",  # optional section
        "rewards.*.crop_margin",  # table of unions
        "algorithm.shifted_times",
        "algorithm.old_policy",
        "ema.decay",
    } <= keys
    assert not keys & {"model", "rollout.window", "rewards", "rewards.*"}  # sections hold no value


def test_the_exceptions_are_still_needed() -> None:
    without = unread(package_reads(), exceptions=())
    assert {leaf.owner for leaf in LEAVES if leaf.key in without} == READ_ELSEWHERE.keys()


@pytest.mark.parametrize("name", REWARDS)
def test_scorer_options_are_read_in_their_own_file(name: str) -> None:
    entry = REWARDS[name]
    for option in entry.own_options():
        owner = next(kind for kind in entry.__mro__ if option in kind.__annotations__)
        source = Path(inspect.getfile(owner)).read_text(encoding="utf-8")
        assert {("o", option), ("options", option), ("self", option)} & attribute_reads(source), option


@pytest.mark.parametrize("leaf", {leaf.owner: leaf for leaf in LEAVES}.values(), ids=lambda leaf: leaf.owner)
def test_every_option_says_what_it_is(leaf: Leaf) -> None:
    is_tag = leaf.name in ("family", "kind", "format", "name", "scorer") and leaf.section is not RunConfig
    assert is_tag or leaf.info.description


def test_every_batch_size_says_of_what() -> None:
    sizes = {leaf.key for leaf in LEAVES if "batch_size" in leaf.name or leaf.name.endswith("_per_batch")}
    unclear = {key for key in sizes if "per_device" not in key and "global_" not in key}
    assert unclear == {"reward_client.batch_size"}  # images of one request
