"""`retouch compare`: one file that needs nothing else, and pairs only what can be paired."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from retouch.config import ConfigError
from retouch.families import FAMILIES
from retouch.observe.comparison import (
    run_names,
    write_comparison,
)
from retouch.observe.settings import differing, sampling_differences, scoring_differences
from tests.command_line import retouch

from .test_report import SCRIPTS, Page, rewrite


@pytest.fixture
def runs(finished: Callable[[str], Path], tmp_path: Path) -> tuple[Path, Path]:
    """Copies of two finished runs, without checkpoints: `a` trained everything, `b` a LoRA."""
    ignored = shutil.ignore_patterns("checkpoints")
    first, second = (
        shutil.copytree(finished(kind), tmp_path / name, ignore=ignored)
        for kind, name in (("full", "a"), ("lora", "b"))
    )
    return first, second


def compared(tmp_path: Path, *runs: Path) -> tuple[Page, list[str], list[str]]:
    """The page, its verdicts and its problems."""
    found = write_comparison(run_names(runs), tmp_path / "compare.html")
    return Page(found.path.read_text(encoding="utf-8")), found.verdicts, found.problems


def scored(run: Path, values: list[float], text: str = "A", first: int = 0) -> None:
    """Replace the last evaluation of a run by `ocr.ned` values, an example each, with ids from `first` on."""
    rows = [{"example": i, "index": 0, "text": text, "ocr.ned": value} for i, value in enumerate(values, first)]
    (run / "evaluations/step-000004/rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    last = {"kind": "eval", "step": 4, "moment": "end", "examples": "held_out", "images": len(rows)}
    last["ocr.ned"] = sum(values) / len(values)
    rewrite(run, lambda records: [*(r for r in records if (r["kind"], r["step"]) != ("eval", 4)), last])


def changed(run: Path, old: str, new: str) -> None:
    file = run / "config.yaml"
    assert old in file.read_text()
    file.write_text(file.read_text().replace(old, new))


def test_it_needs_no_network_and_shows_all_parts(runs: tuple[Path, Path], tmp_path: Path) -> None:
    page, verdicts, problems = compared(tmp_path, *runs)
    assert problems == [] and len(verdicts) == 1 and verdicts[0].startswith("b against a: ")
    assert page.images and all(value.startswith("data:image/png;base64,") for value in page.images)
    assert page.tags.count("script") == SCRIPTS and page.fetched == []
    for words in (
        "a · b",
        "flux_fill (lora), grpo, 4 optimizer steps",
        "a (step 4, 2 images)",
        "b − a [95 %]",
        "Run files: keys that differ",
        "model.train.kind full lora",
    ):
        assert words in page, words
    assert [line["name"] for line in page.data["lines"]] == ["a", "b"]
    assert len(page.curve("rollout/reward/preservation")["lines"]) == 2
    shown = page.data["gallery"]
    assert [variant["label"] for variant in shown["variants"]] == ["a", "b"] and len(shown["items"]) == 1
    assert all(None not in cells for cells in shown["cells"])


@pytest.mark.parametrize(
    ("values", "verdict"),
    [
        # s = .0755929; .2 ± 2.364624 s / sqrt(8)
        ([0.7, 0.8, 0.6, 0.7] * 2, "b against a: better; ocr.ned 0.500 → 0.700 (+0.200 [+0.137, +0.263])"),
        ([0.3, 0.2, 0.4, 0.3] * 2, "b against a: worse; ocr.ned 0.500 → 0.300 (-0.200 [-0.263, -0.137])"),
        ([0.4996] * 8, "b against a: no clear change; ocr.ned 0.500 → 0.500 (-0.000 [-0.000, -0.000])"),
        ([0.5] * 8, "b against a: no clear change; ocr.ned 0.500 → 0.500 (+0.000 [+0.000, +0.000])"),
    ],
)
def test_a_verdict_by_hand(runs: tuple[Path, Path], tmp_path: Path, values: list[float], verdict: str) -> None:
    scored(runs[0], [0.5] * len(values))
    scored(runs[1], values)
    _, verdicts, _ = compared(tmp_path, *runs)
    assert verdicts == [verdict]


def test_runs_on_other_examples_are_shown_and_not_paired(runs: tuple[Path, Path], tmp_path: Path) -> None:
    """A third run that can be paired is."""
    third = shutil.copytree(runs[0], tmp_path / "c")
    changed(runs[1], "/held_out", "/elsewhere")
    page, verdicts, problems = compared(tmp_path, *runs, third)
    [problem] = problems
    assert problem.startswith("evaluation.data: a and b evaluate on different examples (path ")
    assert f"run `retouch eval --run {runs[0]} --run {runs[1]} --data DATA`" in problem
    assert problem in page and "b (step 4, 2 images)" in page
    assert "c − a [95 %]" in page and "b − a" not in page
    assert [verdict.partition(":")[0] for verdict in verdicts] == ["c against a"]


@pytest.mark.parametrize(
    ("old", "new", "shown"),
    [
        ("num_steps: 3", "num_steps: 5", "num_steps 3 and 5"),
        ("guidance_scale: null", "guidance_scale: 2.5", "rollout.guidance_scale 30.0 and 2.5"),
        ("\n  weights: null\n  on_gold", "\n  weights: raw\n  on_gold", "evaluation.weights ema and raw"),
    ],
)
def test_runs_sampled_with_other_settings_are_not_paired(
    runs: tuple[Path, Path], tmp_path: Path, old: str, new: str, shown: str
) -> None:
    """Four against sixteen solver steps of the same weights were "better"."""
    changed(runs[1], old, new)
    page, verdicts, [problem] = compared(tmp_path, *runs)
    assert problem.startswith(f"evaluation: a and b were sampled with different settings ({shown}): ")
    assert problem.endswith("to sample both with those of a")
    assert verdicts == [] and "b − a" not in page and problem in page


def test_settings_that_mean_the_same_are_the_same(runs: tuple[Path, Path], tmp_path: Path) -> None:
    """The default of the family, written out."""
    changed(runs[1], "guidance_scale: null", "guidance_scale: 30.0")
    _, verdicts, problems = compared(tmp_path, *runs)
    assert problems == [] and len(verdicts) == 1


def test_the_own_guidance_of_a_distilled_model_is_1() -> None:
    """And not that of its family, which would name a difference that there is not, and hide one that there is."""

    def run(variant: str, scale: float | None) -> dict[str, Any]:
        model = {"family": "z_image", "path": "folder", "variant": variant}
        return {"model": model, "rollout": {"guidance_scale": scale}, "evaluation": {}, "data": {}}

    assert sampling_differences(run("turbo", None), run("turbo", 1.0)) == {}
    own = FAMILIES["z_image"].spec.guidance_scale
    assert sampling_differences(run("base", None), run("base", own)) == {}
    assert sampling_differences(run("base", None), run("turbo", None)) == {"rollout.guidance_scale": (own, 1.0)}
    unknown = {**run("turbo", None), "model": {"family": "of a plug-in"}}
    assert sampling_differences(unknown, unknown) == {}


@pytest.mark.parametrize(("other", "told"), [({"text": "B"}, "other texts"), ({"first": 2}, "no example in common")])
def test_data_that_changed_under_one_name_are_noticed(
    runs: tuple[Path, Path], tmp_path: Path, other: dict[str, Any], told: str
) -> None:
    scored(runs[0], [0.5] * 2)
    scored(runs[1], [0.6] * 2, **other)
    _, verdicts, problems = compared(tmp_path, *runs)
    assert verdicts == [] and f"but {told}: the data have changed between the runs" in problems[0]


def test_a_reward_that_is_defined_differently_is_not_compared(runs: tuple[Path, Path], tmp_path: Path) -> None:
    changed(runs[1], "paste_back: false", "paste_back: true")
    page, [verdict], [problem] = compared(tmp_path, *runs)
    assert problem == ("rewards.preservation: a and b define it differently (paste_back); its scores are not compared")
    assert "preservation" not in verdict and "outside_l1" in verdict and problem in page


def test_a_run_of_an_older_version_has_the_defaults_of_keys_it_lacks(runs: tuple[Path, Path], tmp_path: Path) -> None:
    changed(runs[1], "    box_min_side: 224\n", "")
    changed(runs[1], "    invert_mask: false\n", "")
    page, [verdict], problems = compared(tmp_path, *runs)
    assert problems == [] and "preservation" in verdict and "box_min_side" not in page


def test_how_training_uses_a_reward_is_no_difference() -> None:
    one: dict[str, Any] = {"scorer": "ocr", "weight": 1.0, "url": None, "options": {"size": 1}}
    assert scoring_differences(one, {**one, "weight": 2.0, "url": "auto"}) == []
    assert scoring_differences(one, {**one, "options": {"size": 2}}) == ["options.size"]
    assert differing({"a": {"b": 1}, "c": 2}, {"a": {"b": 1}, "d": 3}) == ["c", "d"]


def test_runs_that_have_not_come_far(runs: tuple[Path, Path], tmp_path: Path) -> None:
    rewrite(runs[0], lambda records: [r for r in records if r["kind"] != "eval"])
    page, verdicts, problems = compared(tmp_path, *runs)
    assert (verdicts, problems) == ([], ["a has no evaluation yet"]) and page.curve("rollout/combined_score")
    assert "No samples of a: it has no evaluation yet." in page
    assert "No samples of b: a, with which they would be paired, has none." in page
    for run in runs:
        shutil.rmtree(run / "evaluations")
        (run / "metrics.jsonl").unlink()
    page, verdicts, problems = compared(tmp_path, *runs)
    assert problems == ["a has no evaluation yet", "b has no evaluation yet"] and "0 optimizer steps" in page


def test_names(tmp_path: Path) -> None:
    paths = [tmp_path / "x/run", tmp_path / "y/run", tmp_path / "y/other"]
    for path in paths:
        path.mkdir(parents=True)
        (path / "config.yaml").touch()
    assert run_names(paths[1:]) == {"run": paths[1], "other": paths[2]}
    assert list(run_names(paths[:2])) == [str(paths[0]), str(paths[1])]
    for given, says in (
        (paths[:1], "RUN: given 1; a comparison needs two"),
        ([paths[0], paths[0]], "RUN: given a run directory twice"),
        ([paths[0], tmp_path], f"{tmp_path} is not a run directory"),
    ):
        with pytest.raises(ConfigError, match=says):
            run_names(given)


def test_runs_that_differ_in_their_seed_alone_are_one_line(runs: tuple[Path, Path], tmp_path: Path) -> None:
    """Named by the values that the other lines do not have; without images, a sentence says why."""
    places = {name: shutil.copytree(runs[0], tmp_path / name) for name in ("s0", "s1", "fast0", "fast1")}
    for name, run in places.items():
        for old, new in (
            ("\nseed: 5\n", f"\nseed: {name[-1]}\n"),
            ("  lr: 0.001\n", "  lr: 0.01\n" if "f" in name else ""),
        ):
            if new:
                changed(run, old, new)
    for file in places["fast1"].glob("evaluations/*/*.png"):
        file.unlink()
    rewrite(places["s1"], lambda old: [{**r, "combined_score": 1.0} if r["kind"] == "rollout" else r for r in old])
    page, verdicts, _ = compared(tmp_path, *places.values())
    assert [(line["letter"], line["name"], line["about"]) for line in page.data["lines"]] == [
        ("A", "optimizer.lr 0.001 (2 seeds)", "s0, s1"),
        ("B", "optimizer.lr 0.01 (2 seeds)", "fast0, fast1"),
    ]
    line = page.curve("rollout/combined_score")["lines"][0]
    assert line["high"] == [1.0] and line["y"] == pytest.approx([(line["low"][0] + 1) / 2], abs=1e-5)
    assert len(verdicts) == 3 and "Evaluation over seeds" in page
    assert "No samples of fast1: its last evaluation kept no images" in page


def test_a_seed_that_has_not_come_as_far_is_in_no_mean(runs: tuple[Path, Path], tmp_path: Path) -> None:
    """Its last evaluation is of an earlier step: the mean would be of different amounts of training."""
    names = ("s0", "s1", "s2")
    for name in names:
        changed(shutil.copytree(runs[0], tmp_path / name), "\nseed: 5\n", f"\nseed: {name[-1]}\n")
        scored(tmp_path / name, [0.25 * (1 + int(name[-1]))] * 2)
    rewrite(tmp_path / "s2", lambda records: [r for r in records if r["step"] < 4])
    page, _, _ = compared(tmp_path, *(tmp_path / name for name in names))
    assert "of their last evaluations, of step 4. Left out, whose last evaluation is of an earlier step: s2." in page
    assert "ocr.ned 0.3750 [0.2500, 0.5000]" in page
    assert page.curve("train/loss")["note"].startswith("A mean over seeds is of 3 of 3, and of steps 1 to 3, which")


def test_the_command(runs: tuple[Path, Path], tmp_path: Path) -> None:
    out = tmp_path / "new/page.html"
    outcome = retouch("compare", *runs, "--out", out)
    assert outcome.code == 0 and outcome.err == ""
    verdict, path = outcome.out.splitlines()
    assert verdict.startswith("b against a: ") and path == str(out) and out.is_file()
    changed(runs[1], "/held_out", "/elsewhere")
    outcome = retouch("compare", *runs, "--out", out)
    assert outcome.code == 0 and outcome.err.startswith("warning: evaluation.data: a and b evaluate on different")
