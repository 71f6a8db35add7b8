"""docs/algorithms.md and docs/measured.md: their numbers are what the benchmarks wrote."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parents[2]
PAGE = (REPOSITORY / "docs/algorithms.md").read_text(encoding="utf-8")
MEASURED = (REPOSITORY / "docs/measured.md").read_text(encoding="utf-8")
PROSE = " ".join(MEASURED.split())

sys.path.insert(0, str(REPOSITORY / "benchmarks"))

import reward_gradient  # noqa: E402
from inputs import inputs  # noqa: E402

import algorithms  # noqa: E402
from retouch.config import derive, load_run  # noqa: E402


def test_forwards_of_the_tiny_runs() -> None:
    names = ("sft", "grpo", "ppo", "dpo", "kto", "nft", "reward_gradient")
    runs = [load_run(algorithms.config_file("flux_fill", name, "full")) for name in names]
    forwards = " | ".join(f"{derive(run).forwards_per_image:.1f}".removesuffix(".0") for run in runs)
    assert f"| network forwards per image, tiny FLUX runs | {forwards} |" in PAGE


def test_forwards_of_one_trained_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """As in the command of the page; the preset alone leaves the window of two steps that the file has."""
    monkeypatch.setenv("DATA_PATH", "data")
    [command] = re.findall(r"\$ retouch check (\S+) (rollout.preset=fast) (rollout.window.size=1)\n", PAGE)
    file, *overrides = command
    one, two = (load_run(REPOSITORY / file, given) for given in (overrides, overrides[:1]))
    assert (one.rollout.window and one.rollout.window.size, one.rollout.shared_noise) == (1, True)
    forwards = [f"{derive(run).forwards_per_image:.2f}" for run in (one, two)]
    assert "An image of this run takes {} forwards, with two trained steps {}.".format(*forwards) in PAGE


def test_the_runs_of_reward_gradients_are_of_the_run_file_in_the_tree() -> None:
    for row in json.loads((REPOSITORY / "benchmarks/results/reward_gradient.json").read_text(encoding="utf-8"))["rows"]:
        assert row["inputs"] == inputs(reward_gradient.FILE if "nft" in row else reward_gradient.SUPERVISED)


def test_a_reward_gradient_passes_nft_in_a_sixth_of_its_forwards() -> None:
    """In the committed runs, each seed: NED with the lower end of its interval above 0; two: glyph correlation."""
    rows = json.loads((REPOSITORY / "benchmarks/results/reward_gradient.json").read_text(encoding="utf-8"))["rows"]
    found = [row["nft"] for row in rows if "nft" in row]
    assert len(found) == 3
    assert all(one["share_of_forwards"] <= 1 / 6 for one in found)
    assert all(one["over"]["ocr.ned"][1] > 0 for one in found)
    glyphs = [one["over"]["glyph_correlation"] for one in found]
    assert [low > 0 for _, low, _ in glyphs] == [True, True, False]
    first, second, third = (f"{mean:.3f}"[1:] for mean, _, _ in glyphs)
    assert f"higher on two seeds, by {first} and {second}; on the third the interval of +{third} has 0." in PROSE
    assert all(row["held_out"]["last"]["outside_l1"] <= row["held_out"]["base"]["outside_l1"] for row in rows)
