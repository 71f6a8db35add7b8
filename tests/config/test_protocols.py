"""Options of the data and the judges of Complex-Edit and MMMG that cannot go together, and those that can."""

from __future__ import annotations

from typing import Any

import pytest

from retouch.config import ConfigError, RunConfig, parse_run
from retouch.config.check import warnings_of
from retouch.config.needs import needed_pictures
from retouch.data.base import chosen
from retouch.data.formats.complex_edit import ComplexEditData, complexities
from retouch.data.formats.mmmg import DISCIPLINES, LEVELS, MmmgData

EDIT: dict[str, Any] = {"format": "complex_edit", "path": "owner/edits", "resolution": 64}
MMMG: dict[str, Any] = {"format": "mmmg", "path": "owner/mmmg", "resolution": 64}
RUN: dict[str, Any] = {
    "name": "small",
    "model": {"family": "qwen_image", "path": "tiny"},
    "algorithm": {"name": "grpo"},
}


def run(data: dict[str, Any], held_out: dict[str, Any] | None = None, **sections: Any) -> RunConfig:
    evaluation = {"evaluation": {"data": held_out}} if held_out else {}
    judge = {"rewards": {data["format"]: {"model": "judge"}}}  # the format and its protocol have one name
    return parse_run({**RUN, "data": data, **judge, **evaluation, **sections}, source="run.yaml")


@pytest.mark.parametrize(
    ("value", "found"),
    [("8", (8,)), ("1-8", tuple(range(1, 9))), ("1,3,5", (1, 3, 5)), (" 2 - 4 , 3,8", (2, 3, 4, 8))],
)
def test_complexities(value: str, found: tuple[int, ...]) -> None:
    assert complexities(value) == found


def test_a_complexity_may_be_a_number() -> None:
    assert ComplexEditData.model_validate({"path": "x", "complexity": 3}).complexity == "3"


def test_names_in_whatever_case_and_order() -> None:
    assert chosen("all", LEVELS) == LEVELS
    assert chosen("phd, Preschool", LEVELS) == ("preschool", "PhD")
    assert MmmgData(path="x", disciplines="math,biology").disciplines == "Biology,Math"
    assert len(LEVELS) == 6 and len(DISCIPLINES) == 10


@pytest.mark.parametrize(
    ("data", "held_out", "message"),
    [
        (EDIT, EDIT, "evaluation.data.part: given 'all' beside data.part 'all' of the same path"),
        ({**EDIT, "part": "train"}, EDIT, "set data.part=train and evaluation.data.part=held_out"),
        ({**EDIT, "complexity": "1"}, {**EDIT, "complexity": "8"}, "held-out examples would be trained on"),
        ({**EDIT, "image_type": "all"}, {**EDIT, "image_type": "syn"}, "held-out examples would be trained on"),
        (
            {**EDIT, "part": "train"},
            {**EDIT, "part": "held_out", "held_out_share": 0.2},
            "evaluation.data.held_out_share: given 0.2, but data.held_out_share is 0.1; set both to one share",
        ),
        ({**MMMG, "levels": "preschool,PhD"}, {**MMMG, "levels": "PhD"}, "held-out examples would be trained on"),
    ],
)
def test_what_is_held_out_is_not_trained_on(data: dict[str, Any], held_out: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        run(data, held_out)


@pytest.mark.parametrize(
    ("data", "held_out"),
    [
        ({**EDIT, "part": "train"}, {**EDIT, "part": "held_out"}),
        ({**EDIT, "image_type": "real"}, {**EDIT, "image_type": "syn"}),
        (EDIT, {**EDIT, "path": "elsewhere"}),
        ({**MMMG, "levels": "preschool"}, {**MMMG, "levels": "PhD"}),
        ({**MMMG, "disciplines": "Math"}, {**MMMG, "disciplines": "Biology,History"}),
    ],
)
def test_what_does_not_overlap_is_allowed(data: dict[str, Any], held_out: dict[str, Any]) -> None:
    assert run(data, held_out).evaluation.data is not None


@pytest.mark.parametrize(
    ("sections", "message"),
    [
        ({"held_out": {**MMMG, "path": "x", "curriculum": 2}}, "evaluation.data.curriculum: given 2"),
        ({"warmup_data": {**MMMG, "curriculum": 3}}, "warmup_data.curriculum: given 3"),
        ({"data": {**MMMG, "curriculum": 2}, "algorithm": {"name": "sft"}}, "data.curriculum: given 2"),
    ],
)
def test_a_curriculum_is_of_rollouts(sections: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=f"{message}, but only rollouts have a curriculum"):
        run(**{"data": MMMG, **sections})


def test_the_judge_of_edits_needs_sources() -> None:
    assert needed_pictures(run(EDIT), training=True) == {"source"}
    assert needed_pictures(run(EDIT), training=False, scored=False) == frozenset()
    assert needed_pictures(run(MMMG, rewards={"mmmg": {"model": "judge"}}), training=True) == frozenset()


@pytest.mark.parametrize(
    ("rewards", "message"),
    [
        ({"complex_edit": {}}, "rewards.complex_edit.model: not set"),
        (
            {"mmmg": {"model": "m", "readability": "segmenter"}},
            "readability: given 'segmenter'; write sam2, or module:function",
        ),
        (
            {"mmmg": {"model": "m", "wording": "published"}},
            "rewards.mmmg.prompts: not set with wording=published; set it to your",
        ),
        (
            {"mmmg": {"model": "m", "prompts": "q.txt"}},
            "rewards.mmmg.prompts: given 'q.txt', but wording is own; set wording=",
        ),
        ({"mmmg": {"model": "m", "budget_dollars": 1.0}}, "budget_dollars: given without prices"),
        (
            {"openai_judge": {"model": "m", "mode": "rubric", "min_mass": 0.7}},
            "min_mass: given 0.7, but mode rubric reads no probabilities",
        ),
    ],
)
def test_options_of_judges(rewards: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        run(EDIT, rewards=rewards)


def test_what_is_not_the_whole_protocol_is_not_named_mmmg() -> None:
    judge = {"scorer": "mmmg", "model": "judge", "address": "http://127.0.0.1:1/v1"}  # a paid one is a warning, too
    whole = {**judge, "wording": "published", "prompts": "q.txt", "ged": "networkx", "readability": "a:b"}

    def warned(**rewards: dict[str, Any]) -> list[str]:
        return [line for line in warnings_of(run(MMMG, rewards=rewards)) if line.startswith("rewards.")]

    [line] = warned(mmmg=judge)
    assert line.startswith(
        "rewards.mmmg: this score follows MMMG's idea and not its protocol, and must not be reported"
    )
    assert warned(mmmg_style=judge) == warned(mmmg=whole) == []
