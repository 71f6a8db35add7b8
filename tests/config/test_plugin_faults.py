"""Faults of plug-ins, and the messages about them. Each is rejected where it is registered, listed or scored."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, ClassVar, Literal

import numpy as np
import pytest
import torch

from retouch import errors, registry
from retouch.config import ConfigError
from retouch.core.rules import STEP_RULES
from retouch.data.base import DataError, DataSection, ItemFiles
from retouch.data.discover import discover
from retouch.data.formats import FORMATS
from retouch.data.split import split
from retouch.doctor.machine import extra_lines
from retouch.errors import OWN, _is_custom, code_place
from retouch.families.base import FamilySpec
from retouch.families.sd_inpaint.spec import SdInpaintModel
from retouch.registry import Registry, load_named
from retouch.rewards import REWARDS
from retouch.rewards.base import PackageScorer, RewardEntry
from retouch.rewards.foreign import MOST_CHARACTERS
from retouch.rewards.gradient import pixel_rewards
from retouch.rewards.protocol import CheckedScorer, RewardItem
from retouch.rewards.table import LocalRewards
from retouch.training.step import Step
from retouch.types import Failure, Outcome, Score

SOURCES = Path(errors.__file__).parents[1]


class FaultyReward(RewardEntry):
    """A reward of these tests."""

    scorer: Literal["faulty"] = "faulty"

    def make(self) -> Faulty:
        return Faulty(self)


class Faulty(PackageScorer[FaultyReward]):
    """A scorer without `score`."""


class NoMakeReward(RewardEntry):
    """An entry without `make`."""

    scorer: Literal["faulty"] = "faulty"


class NoFieldReward(RewardEntry):
    """An entry without the literal of its name."""

    def make(self) -> Any:
        return None


@pytest.mark.parametrize(
    ("component", "message"),
    [
        (NoMakeReward, "reward 'faulty': NoMakeReward has no make; define each as a method of NoMakeReward"),
        (
            NoFieldReward,
            (
                "reward 'faulty': NoFieldReward has no field scorer of type Literal; expected a class of an options "
                "section; set scorer: Literal['faulty'] = 'faulty' in it"
            ),
        ),
        (Faulty, "reward 'faulty': Faulty has no field scorer of type Literal"),
        (FaultyReward(), "reward 'faulty': given FaultyReward("),
        ("my_rewards:FaultyReward", "reward 'faulty': given 'my_rewards:FaultyReward'; expected a class; register"),
    ],
)
def test_a_component_that_is_no_complete_class_is_rejected_where_it_is_registered(component: Any, message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        REWARDS.register("faulty", component)
    assert "faulty" not in REWARDS


def test_a_function_is_no_step_rule() -> None:
    function: Any = test_a_function_is_no_step_rule
    with pytest.raises(ValueError, match=r"step rule 'mine': given <function .*; expected a StepRule; register one"):
        STEP_RULES.register("mine", function)


def test_an_entry_point_of_an_incomplete_class_is_left_out_with_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    registry: Registry[Any] = Registry("reward", "retouch.none", {}, key="scorer")
    registry._places["faulty"] = f"{__name__}:NoMakeReward"  # as an installed package names it
    assert registry.available() == {}
    assert "NoMakeReward has no make" in caplog.text


def items(count: int) -> list[RewardItem]:
    return [RewardItem(id=i, prompt="a", image=np.zeros((8, 8, 3), np.uint8)) for i in range(count)]


class Answers(Faulty):
    """Returns what it is given."""

    def __init__(self, answer: Any) -> None:
        super().__init__(FaultyReward())
        self.answer = answer

    def score(self, items: Sequence[RewardItem]) -> list[Outcome]:
        return self.answer(items)


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        (lambda items: None, "faulty returned None for 2 items; score must return one outcome for each item"),
        (lambda items: [Score(0.5)], "faulty returned 1 outcomes for 2 items; score must return one outcome for each"),
        (lambda items: [1 / 0], r"faulty raised ZeroDivisionError: division by zero, at test_plugin_faults.py:\d+$"),
        (
            lambda items: [Score(item.image / 255) for item in items],
            r"faulty returned Score\(value=.{0,200}; it must return a Score with a float, or a Failure",
        ),
    ],
)
def test_the_failure_of_a_faulty_scorer_names_the_fault(answer: Any, message: str) -> None:
    outcomes = CheckedScorer(Answers(answer)).score(items(2))
    assert all(isinstance(outcome, Failure) and re.search(message, outcome.message) for outcome in outcomes), outcomes


def test_a_scorer_without_score_names_the_method() -> None:
    [outcome] = CheckedScorer(Faulty(FaultyReward())).score(items(1))
    assert isinstance(outcome, Failure)
    assert "Faulty has no method score; define score(items)" in outcome.message


@pytest.mark.parametrize("span", [(0.0, float("inf")), (float("-inf"), 1.0), (0.0, float("nan")), (1.0, 0.0)])
def test_a_range_without_bounds_is_rejected(span: tuple[float, float], monkeypatch: pytest.MonkeyPatch) -> None:
    """A server could not write it as JSON."""
    monkeypatch.setattr(FaultyReward, "value_range", span)
    with pytest.raises(ConfigError, match=r"^reward 'faulty': given value_range=\(.*\); expected two bounds"):
        FaultyReward().make()


def test_an_entry_whose_make_returns_no_scorer_is_named() -> None:
    scorer: Any = None
    rewards = LocalRewards({"mine": scorer})
    try:
        with pytest.raises(ConfigError, match=r"rewards\.mine: make of its entry returned None, .*; return the scorer"):
            rewards.wait_ready(10)
    finally:
        rewards.close()


def test_a_differentiable_entry_whose_scorer_has_no_values_is_named() -> None:
    class Table:
        def local(self, name: str) -> Any:
            return Faulty(FaultyReward()), None, "cpu"

    table: Any = Table()
    with pytest.raises(ConfigError, match=r"rewards\.mine: .*Faulty has no method values; define values"):
        pixel_rewards(table, {"mine": 1.0})


class FaultyData(DataSection):
    """A format of these tests."""

    format: Literal["faulty"] = "faulty"
    found: ClassVar[Any] = None

    def list_items(self) -> Any:
        return self.found


@pytest.mark.parametrize(
    ("found", "message"),
    [
        (None, "FaultyData.list_items returned None; expected a list of ItemFiles and ItemError"),
        ([{"prompt": "a"}], "FaultyData.list_items returned {'prompt': 'a'}; expected ItemFiles or ItemError"),
        ([ItemFiles(id="a", prompt="a")], "returned an item with id 'a'; expected int; set id to one"),  # type: ignore[arg-type]
        ([ItemFiles(id=1, prompt=None)], "returned an item with prompt None; expected str"),  # type: ignore[arg-type]
        (
            [ItemFiles(id=1, prompt="a", target="image")],  # type: ignore[arg-type]
            "returned an item with target 'image'; set target to one of auto, source, none, file",
        ),
    ],
)
def test_items_that_no_dataset_can_use_are_rejected(found: Any, message: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(FaultyData, "found", found)
    with pytest.raises(DataError, match=re.escape(message)):
        FaultyData(path="x").items()


@pytest.mark.parametrize(
    ("listing", "message"),
    [
        (".", "no such file; FaultyData.listing must return the file that lists the items, or None"),
        (
            "list.txt",
            "given 3 lines for 1 items of format faulty; expected a line for each item, and at most one more",
        ),
    ],
)
def test_a_listing_that_cannot_be_divided_is_named(
    listing: str, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "list.txt").write_text("a\nb\nc\n", encoding="utf-8")
    section = FaultyData(path=str(tmp_path))
    monkeypatch.setattr(FaultyData, "found", [ItemFiles(id=1, prompt="a")])
    monkeypatch.setattr(FaultyData, "listing", lambda _: tmp_path / listing)
    monkeypatch.setattr("retouch.data.split.data_at", lambda *_: section)
    with pytest.raises(DataError, match=re.escape(message)):
        split(tmp_path, 0.5, "text", 0)


PLUGIN = """
from typing import Literal

from retouch.data.base import DataSection, ItemFiles
from retouch.data.formats import FORMATS


class ListedData(DataSection):
    format: Literal["listed_here"] = "listed_here"

    @classmethod
    def recognises(cls, path):
        return path.suffix == ".listed"

    def list_items(self):
        return [ItemFiles(id=0, prompt="a")]


FORMATS.register("listed_here", ListedData)
"""


@pytest.fixture
def plugin_of_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    (tmp_path / "listed_plugin.py").write_text(PLUGIN, encoding="utf-8")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setenv("RETOUCH_PLUGINS", "listed_plugin")
    yield tmp_path
    FORMATS._loaded.pop("listed_here", None)


def test_a_format_of_retouch_plugins_is_recognised_without_a_run_file(plugin_of_environment: Path) -> None:
    path = plugin_of_environment / "data.listed"
    path.write_text("", encoding="utf-8")
    assert discover(path).format == "listed_here"


def test_a_module_of_retouch_plugins_that_is_missing_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RETOUCH_PLUGINS", "nowhere_at_all")
    with pytest.raises(ConfigError, match="RETOUCH_PLUGINS: given 'nowhere_at_all', which cannot be imported"):
        discover(tmp_path)


MISSING = "which cannot be imported (ModuleNotFoundError: No module named"


@pytest.mark.parametrize(
    ("place", "says"),
    [
        ("", "; set"),
        ("retouch.errors", "; set"),
        (":train", "; set"),
        (".mine:train", "; set"),
        (None, "; set"),
        ("nowhere_at_all:train", f", {MISSING} 'nowhere_at_all'); set"),
        ("retouch.nowhere:train", f", {MISSING} 'retouch.nowhere'); set"),
        ("retouch.nowhere.recipe:train", f", {MISSING} 'retouch.nowhere'); set"),
        ("retouch.errors:nope", ", but retouch.errors has no function nope; set"),
        ("retouch.errors:MOST_CHARACTERS", ", but retouch.errors has no function MOST_CHARACTERS; set"),
    ],
)
def test_an_attribute_that_names_no_function_is_named(place: Any, says: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load_named("Mine.recipe", place, "function")
    assert str(caught.value) == f"Mine.recipe: given {place!r}{says} it to 'module:function'"


@pytest.mark.parametrize(
    ("source", "says"),
    [
        ("def train(:", r"SyntaxError: .*"),
        ("a = 1\nb = c", r"NameError: name 'c' is not defined, at my_recipe\.py:2"),
        ("raise SystemExit(0)", "ImportError: my_recipe ends the program when it is imported, with code 0"),
        ("import nowhere_at_all", r"ModuleNotFoundError: No module named 'nowhere_at_all', at my_recipe\.py:1"),
    ],
)
def test_a_module_that_fails_when_it_is_imported_is_to_be_corrected(
    source: str, says: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "my_recipe.py").write_text(source, encoding="utf-8")
    monkeypatch.syspath_prepend(str(tmp_path))
    message = rf"Mine\.recipe: given 'my_recipe:train', which cannot be imported \({says}\); correct the module$"
    with pytest.raises(ConfigError, match=message):
        load_named("Mine.recipe", "my_recipe:train", "function")


def test_an_incomplete_entry_point_is_rejected_where_it_is_used() -> None:
    registry: Registry[Any] = Registry("reward", "retouch.none", {}, key="scorer")
    registry._places["faulty"] = f"{__name__}:NoMakeReward"
    with pytest.raises(ConfigError, match="NoMakeReward has no make; define each as a method of NoMakeReward"):
        registry["faulty"]


def test_a_spec_of_another_family_than_the_section_is_rejected() -> None:
    with pytest.raises(
        ValueError, match=r"Mine\.spec\.family: given 'sd_inpaint', but the field family is 'mine'; set"
    ):

        class Mine(SdInpaintModel):  # pyright: ignore[reportUnusedClass]
            family: Literal["mine"] = "mine"  # type: ignore[assignment]


def test_a_spec_with_an_unknown_prediction_is_rejected() -> None:
    with pytest.raises(ValueError, match=r"FamilySpec\.prediction: given 'noise'; set one of 'flow', 'epsilon'"):
        FamilySpec("a", "noise", 4, 8, 8, 1.0, frozenset(), (), "unet")  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "raised",
    [
        lambda: 1 / 0,
        lambda: json.loads("{"),  # in the standard library
        lambda: torch.nn.Linear(2, 2)(torch.zeros(1, 3)),  # in an installed package
        lambda: load_named("a", "b", "c"),  # in this one
    ],
)
def test_the_place_of_an_error_is_the_last_custom_line(raised: Callable[[], object]) -> None:
    with pytest.raises(Exception) as caught:
        raised()
    assert code_place(caught.value) == f", at test_plugin_faults.py:{raised.__code__.co_firstlineno}"


def test_the_place_of_an_error_follows_a_message_that_is_cut() -> None:
    def score(items: Sequence[RewardItem]) -> list[Outcome]:
        raise ValueError("x" * 2000)

    [outcome] = CheckedScorer(Answers(score)).score(items(1))
    assert isinstance(outcome, Failure)
    line = score.__code__.co_firstlineno + 1
    assert outcome.message.endswith(f"xxx ..., at test_plugin_faults.py:{line}")
    assert len(outcome.message) == MOST_CHARACTERS


@pytest.mark.parametrize("package", OWN)
def test_a_module_of_retouch_that_lacks_a_package_of_an_extra_is_not_to_be_corrected(
    package: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The command line names the extra of a missing package. One of the distribution itself is of no extra."""
    lacks = "diffusers.models"

    def absent(name: str) -> Any:
        raise ModuleNotFoundError(f"No module named {lacks!r}", name=lacks)

    monkeypatch.setattr(registry, "import_from_here", absent)
    with pytest.raises(ModuleNotFoundError, match=r"^No module named 'diffusers\.models'$"):
        load_named("model", f"{package}.mine:Mine", "class")
    lacks = f"{package}.absent"
    with pytest.raises(ConfigError, match=rf"No module named '{package}\.absent'"):
        load_named("model", f"{package}.mine:Mine", "class")


def test_the_packages_of_the_distribution_are_those_that_it_registers() -> None:
    """The place of an error is in none of them."""
    assert ("retouch", *registry.ANNEXES) == OWN
    assert not any(_is_custom(f"{SOURCES / package}{os.sep}a.py") for package in OWN)
    assert _is_custom(f"{SOURCES}{os.sep}retouch_mine{os.sep}a.py")


def test_an_extra_that_retouch_does_not_have_is_to_fix() -> None:
    [line] = [line for line in extra_lines({"train", "nosuch"}, {}) if line.what == "extra nosuch"]
    assert line.status == "fix"
    assert line.says.startswith("retouch has no such extra; set extras of the reward to train, serve")


@pytest.mark.parametrize(
    ("loss", "given"),
    [
        (torch.zeros(2, requires_grad=True), r"shape \(2,\)"),
        (torch.zeros(()), "a scalar without gradient"),
    ],
)
def test_a_loss_without_gradient_or_of_several_numbers_is_named(loss: torch.Tensor, given: str) -> None:
    step = object.__new__(Step)  # the check reads the loss alone
    with pytest.raises(ValueError, match=f"backward: given a loss of {given}; expected a scalar with a gradient"):
        step.backward(loss, {}, 1)
