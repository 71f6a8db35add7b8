"""A config value that the code does not read is a bug."""

from __future__ import annotations

import inspect
from functools import cache
from itertools import takewhile
from pathlib import Path
from typing import Any

import pytest
from tools.config_reference import descriptions

from retouch.benchmarks import BENCHMARKS
from retouch.benchmarks.base import Benchmark
from retouch.config import RunConfig
from retouch.config.reads import reads_of
from retouch.data.base import DataSection
from retouch.data.formats import FORMATS
from retouch.rewards import REWARDS
from retouch.rewards.base import RewardEntry

from .conftest import REPOSITORY
from .leaves import Leaf, attribute_reads, guarded_reads, leaves

READ_AS_A_WHOLE = {
    "VlmGrpoConfig.trl": "option by option, by TRL's own classes",
    "RolloutConfig.noise_level": "by the name that the step rule gives its strength",
    "OptimizerConfig.gradient_accumulation": "by its section, for the rows of a step (`rows_per_step`)",
    "RunConfig.plugins": "before the run file is validated",
    "RolloutConfig.eta": "by the name that the step rule gives its strength",
}
"""Option -> how it is read where no attribute access shows it."""

LEAVES = list(leaves(RunConfig))


def is_a_rule(path: Path, function: str) -> bool:
    """Functions that only refuse a run or warn of it: to be checked is not to be read."""
    rules = path.parent.name == "config" and path.name != "derived.py"
    return rules or function.lstrip("_").startswith("check")


@cache
def package_reads() -> set[str]:
    """Names of attributes that the package reads, outside of its rules."""
    reads: set[str] = set()
    for path in (REPOSITORY / "src").rglob("*.py"):
        reads |= attribute_reads(
            path.read_text(encoding="utf-8"), lambda function, path=path: is_a_rule(path, function)
        )
    return reads | attribute_reads((REPOSITORY / "src/retouch/config/derived.py").read_text(encoding="utf-8"))


def is_scorer_option(leaf: Leaf) -> bool:
    """Options of one scorer are read in its file."""
    return issubclass(leaf.section, RewardEntry) and leaf.name not in RewardEntry.model_fields


def unread(reads: set[str]) -> set[str]:
    """Owners of the options whose names none of `reads` has."""
    return {leaf.owner for leaf in LEAVES if not is_scorer_option(leaf) and leaf.name not in reads}


def test_every_option_is_read() -> None:
    assert unread(package_reads()) <= READ_AS_A_WHOLE.keys()


def test_an_option_that_nobody_reads_is_found() -> None:
    assert unread(package_reads() - {"max_grad_norm"}) - READ_AS_A_WHOLE.keys() == {"OptimizerConfig.max_grad_norm"}


def test_what_counts_as_a_read() -> None:
    source = '''
"""max_steps in a docstring"""
"max_steps"
training.eval_every = 1
config.training.max_steps
f(resume=c.lr)
def check(run):
    run.seed
'''
    assert attribute_reads(source, lambda function: function == "check") == {"training", "max_steps", "lr"}


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


@pytest.mark.parametrize("name", REWARDS)
def test_options_of_a_scorer_are_read_in_its_own_file(name: str) -> None:
    entry = REWARDS[name]
    validators = entry.__pydantic_decorators__.model_validators
    for option in entry.own_options():
        owner = next(kind for kind in entry.__mro__ if option in kind.__annotations__)
        source = Path(inspect.getfile(owner)).read_text(encoding="utf-8")
        assert option in attribute_reads(source, lambda function: function in validators), option


READ_IN_EVERY_BRANCH = {
    "threads": "by every engine of a text recogniser",
    "complexity": "of each item that belongs to the part of the data",
}
"""Option -> why it is read whatever the option is that its reads stand beside."""

SHARED = (RewardEntry, DataSection, Benchmark)
"""Sections whose options are read all over the package."""


@pytest.mark.parametrize("kinds", [REWARDS, FORMATS, BENCHMARKS], ids=["rewards", "formats", "benchmarks"])
def test_an_option_that_is_read_only_beside_others_declares_it(kinds: Any) -> None:
    """Without the declaration it would be accepted, and change nothing, wherever they have other values."""
    undeclared = set[str]()
    for kind in map(kinds.__getitem__, kinds):
        rules = kind.__pydantic_decorators__.model_validators.keys()
        for owner in takewhile(lambda part: part not in SHARED, kind.__mro__):
            own = vars(owner).get("__annotations__", {}).keys() - {*reads_of(kind), *READ_IN_EVERY_BRANCH}
            sources = "".join(Path(file).read_text(encoding="utf-8") for file in {*map(inspect.getfile, (owner, kind))})
            beside = guarded_reads(sources, frozenset(kind.model_fields), frozenset(rules))
            undeclared |= {f"{owner.__name__}.{option}" for option in own if beside.get(option)}
    assert undeclared == set()


def test_what_guards_a_read() -> None:
    source = """
class A:
    def make(self):
        if self.options.url is not None:
            return self._served()
        return self.network if self.kind == "network" else self.size and self.margin

    def _served(self):
        return self.timeout

    def check(self):
        self.timeout
"""
    found = guarded_reads(source, {"url", "timeout", "kind", "network", "size", "margin"}, {"check"})
    assert found == {
        "url": frozenset(),
        "timeout": {"url"},
        "kind": {"url"},
        "network": {"url", "kind"},
        "size": {"url", "kind"},
        "margin": {"url", "kind", "size"},
    }


def test_every_option_says_what_it_is() -> None:
    tags = ("family", "kind", "format", "name", "scorer")
    said = {
        leaf.owner: descriptions(leaf.section).get(leaf.name)
        for leaf in LEAVES
        if leaf.name not in tags or leaf.section is RunConfig
    }
    assert [owner for owner, description in said.items() if not description] == []


def test_every_batch_size_says_of_what() -> None:
    sizes = {leaf.key for leaf in LEAVES if "batch_size" in leaf.name or leaf.name.endswith("_per_batch")}
    unclear = {key for key in sizes if "per_device" not in key and "global_" not in key}
    assert unclear == {"reward_client.batch_size"}  # images of one request
