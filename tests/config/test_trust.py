"""Every option that names code or a host says so in its annotation (`Names`): a run directory may not choose it."""

from __future__ import annotations

import re
import typing
from collections.abc import Callable, Iterator
from typing import Annotated, Any, Literal

import pytest
from pydantic import BaseModel, Field
from tools.config_reference import descriptions

from retouch.benchmarks import BENCHMARKS
from retouch.config import ConfigError, RunConfig, parse_run
from retouch.config.base import Names, Section
from retouch.config.trust import foreign, named
from retouch.rewards import REWARDS
from retouch.rewards.scorers.seam import SeamReward

from .leaves import Leaf, leaves

LOOKS = re.compile(
    r"(^|_)(addresse?s?|urls?|uri|hosts?|endpoints?|servers?|ports?|fn|functions?|modules?|plugins?|class|callback|hook|"
    r"script|command|code|factory|entry_point)($|_)"
)
"""Names of options that name code or hosts."""

SAYS = re.compile(r"module:|\bmodules?\b|\baddress(es)?\b|\bserver\b|\bURL\b|https?://|\bimport", re.IGNORECASE)
"""What the descriptions of such options say."""

NEITHER = {
    "RewardEntry.device": "devices of this machine",
    "JudgeConfig.model": "the name of a model at the address of the judge",
    "TrainLora.targets": "names of layers",
    "TrainLora.initial_adapter": "a file of weights",
}
"""Option that looks like one and is none -> why."""


def texts_in(annotation: Any) -> bool:
    """Whether values of an annotation hold free text."""
    if typing.get_origin(annotation) is Literal:
        return False
    return annotation in (str, Any) or any(map(texts_in, typing.get_args(annotation)))


def owner(leaf: Leaf) -> str:
    """Class that declares the option, and its name."""
    kind = next(kind for kind in leaf.section.__mro__ if leaf.name in vars(kind).get("__annotations__", {}))
    return f"{kind.__name__}.{leaf.name}"


def undeclared(options: Iterator[Leaf]) -> set[str]:
    """Options that hold text, look like code or a host by name or description, and declare nothing."""
    return {
        owner(leaf)
        for leaf in options
        if texts_in(leaf.info.annotation)
        and not any(isinstance(mark, Names) for mark in leaf.info.metadata)
        and (LOOKS.search(leaf.name) or SAYS.search(descriptions(leaf.section).get(leaf.name, "")))
    }


def all_options() -> Iterator[Leaf]:
    yield from leaves(RunConfig)
    for benchmark in BENCHMARKS.values():
        yield from leaves(benchmark)


def test_every_option_that_names_code_or_a_host_declares_it() -> None:
    assert undeclared(all_options()) - NEITHER.keys() == set()


def test_no_exemption_is_left_over() -> None:
    assert NEITHER.keys() <= undeclared(all_options())


class Theirs(SeamReward):
    """An entry of another package."""

    mirrors: Annotated[dict[str, list[str]], Names("host", own=("here",), variables=("THEIR_HOST",))] = Field(
        default={}
    )
    """Addresses by name."""
    callback: str = ""
    """A function."""


def test_an_option_that_declares_nothing_is_found() -> None:
    assert undeclared(leaves(Theirs)) - NEITHER.keys() == {"Theirs.callback"}


def test_other_packages_declare_theirs(monkeypatch: pytest.MonkeyPatch) -> None:
    """In sections, lists and mappings; by address, not by how it is written."""

    class Outer(Section):
        inner: list[BaseModel]

    monkeypatch.setenv("THEIR_HOST", "https://a.example,b.example")
    hosts = ["here", "b.example", "HTTP://LOCALHOST:8000", "c.example", "http://[::1]/", "127.0.0.1"]
    entry = Theirs(mirrors={"x": hosts, "y": ["https://a.example"], "z": ["http://127.0.0.1.example"]})
    found = named(Outer(inner=[SeamReward(), entry]))
    assert found == {("inner", "1", "mirrors"): ["c.example", "127.0.0.1", "http://127.0.0.1.example"]}


@pytest.mark.parametrize(
    "address",
    [
        "http://127.0.0.1:80@evil.example", "http://localhost\\@evil.example", "http://localhost#@evil.example",
        "http://localhost?@evil.example", "http://2130706433", "http://0.0.0.0:8000", "http://127.0.0.2", "//localhost",
        "http://loc\talhost", "http://[::ffff:127.0.0.1]", "http://localhost.", "ftp://localhost", "http://",
    ],
)  # fmt: skip
def test_an_address_that_only_looks_like_this_machine_is_elsewhere(address: str) -> None:
    assert foreign(address, Names("host")) == [address]


def test_options_beside_the_address_of_a_server_are_the_servers(run_file: Callable[..., dict[str, Any]]) -> None:
    """The default address of a judge that a server asks is not asked by this process."""
    served = {"scorer": "openai_judge", "url": "http://127.0.0.1:9"}
    assert parse_run(run_file(rewards={"judge": served}), trust=False).rewards["judge"].url == served["url"]
    with pytest.raises(ConfigError, match=r"rewards\.judge\.address: 'https://api\.openai\.com/v1'; expected"):
        parse_run(run_file(rewards={"judge": {**served, "url": None, "model": "x"}}), trust=False)


def test_every_reward_has_the_options_of_its_base() -> None:
    """A subclass that declares `url` or `address` again would lose the annotation."""
    for entry in REWARDS.values():
        marked = {name for name, info in entry.model_fields.items() if any(isinstance(m, Names) for m in info.metadata)}
        assert marked >= {"url"} and ("address" not in entry.model_fields or "address" in marked), entry


def test_a_message_names_at_most_twenty(run_file: Callable[..., dict[str, Any]]) -> None:
    with pytest.raises(ConfigError) as refused:
        parse_run(run_file(plugins=[f"module_{number}" for number in range(25)]), trust=False)
    assert "plugins: 'module_19'; and 5 more; expected" in str(refused.value)
