"""GenEval's verdict against recorded results of the published code. No torch."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from retouch_bench.scorers.geneval_verdict import (
    COUNTING_THRESHOLD,
    THRESHOLD,
    Detection,
    counted,
    read_clauses,
    relations,
    soft_value,
    verdict,
)

RECORDED = json.loads((Path(__file__).parents[1] / "benchmarks_data/geneval.json").read_text(encoding="utf-8"))


def detections(given: list[dict[str, Any]]) -> list[Detection]:
    return [Detection(one["class"], one["score"], tuple(one["box"]), one.get("color")) for one in given]


def judged(metadata: dict[str, Any], found: list[Detection]) -> tuple[list[str], float]:
    include, exclude = read_clauses(metadata)
    objects = counted(found, COUNTING_THRESHOLD if metadata["tag"] == "counting" else THRESHOLD)
    return verdict(objects, include, exclude), soft_value(objects, include)


def test_verdicts_and_soft_values_equal_the_published_code() -> None:
    for case in RECORDED["cases"]:
        problems, soft = judged(case["metadata"], detections(case["detections"]))
        assert (not problems) == case["correct"], (case, problems)
        assert soft == pytest.approx(case["soft"], abs=1e-12), case
    assert {case["correct"] for case in RECORDED["cases"]} == {True, False}
    assert {case["metadata"]["tag"] for case in RECORDED["cases"]} >= {"counting", "position", "color_attr"}


def test_relations_equal_the_published_code() -> None:
    for case in RECORDED["relations"]:
        assert sorted(relations(tuple(case["a"]), tuple(case["b"]))) == case["relations"]


def test_only_the_best_sixteen_above_the_threshold_count() -> None:
    found = [Detection("cup", 0.3 + i / 100, (0, 0, 1, 1)) for i in range(20)]
    (group,) = counted(found, 0.3).values()
    assert [one.score for one in group] == sorted((one.score for one in found[4:]), reverse=True)
    assert counted(found[:1], 0.3) == {}


def test_problems_are_named() -> None:
    metadata = {
        "tag": "position",
        "include": [
            {"class": "dog", "count": 2, "color": "red"},
            {"class": "cat", "count": 1, "position": ["left of", 0]},
        ],
        "exclude": [{"class": "bird", "count": 1}],
    }
    one = [Detection(name, 0.9, (0, 0, 9, 9), "red") for name in ("dog", "cat", "bird")]
    problems, _ = judged(metadata, one)
    assert problems == [
        "dog: 1 of 2 found", "cat: there is nothing to be left of", "bird: 1 found, at most 0 allowed"
    ]  # fmt: skip
    two = [Detection("dog", 0.9, (20, 0, 29, 9), "red"), Detection("dog", 0.8, (20, 9, 29, 18), "blue")]
    assert judged(metadata, [*two, one[1]])[0][:1] == ["dog: 1 of 2 are red"]
    del metadata["include"][0]["color"]
    assert judged(metadata, [*two, Detection("cat", 0.9, (60, 0, 69, 9))])[0] == ["cat: right of instead of left of"]


@pytest.mark.parametrize(
    ("metadata", "problem"),
    [
        ({}, "tag must be one of"),
        ({"tag": "colors", "include": []}, "include must name at least one object"),
        ({"tag": "colors", "include": [{"class": "sofa", "count": 1}]}, "clause 0 needs a class of COCO and a count"),
        ({"tag": "colors", "include": [{"class": "cup", "count": 0}]}, "clause 0 needs a class of COCO and a count"),
        ({"tag": "colors", "include": [{"class": "cup", "count": 1, "color": "cyan"}]}, "clause 0: color must be one"),
        (
            {"tag": "position", "include": [{"class": "cup", "count": 1, "position": ["above", 0]}]},
            "the number of an earlier clause",
        ),
    ],
)
def test_clauses_that_are_not_of_the_benchmark(metadata: dict[str, Any], problem: str) -> None:
    with pytest.raises(ValueError, match=problem):
        read_clauses(metadata)
