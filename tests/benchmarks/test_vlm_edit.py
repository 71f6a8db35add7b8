"""What GRPO taught the tiny text encoder, as committed, and again in `make test-slow`."""

from __future__ import annotations

import json
import subprocess
import sys
from collections import Counter
from itertools import pairwise, product
from pathlib import Path
from random import Random
from typing import Any

import pytest
from PIL import Image

from retouch.data.sampler import derive_seed
from retouch.observe.statistics import student
from retouch.tiny.edits import COLOURS, draw_edit, write_edits

REPOSITORY = Path(__file__).parents[2]
Row = dict[str, Any]
RESULTS = REPOSITORY / "benchmarks/results"
ROWS, FREE = (
    list[Row](json.loads((RESULTS / f"{name}.json").read_text(encoding="utf-8"))["rows"])
    for name in ("vlm_edit", "vlm_edit_without_kl")
)
PAGE = (REPOSITORY / "docs/vlm-grpo.md").read_text(encoding="utf-8")
PROSE = " ".join(PAGE.split())

sys.path.insert(0, str(REPOSITORY / "benchmarks"))

import inputs  # noqa: E402
import vlm_edit  # noqa: E402
import vlm_words  # noqa: E402

each_row = pytest.mark.parametrize("row", ROWS, ids=lambda row: row["run"])


def percent(share: float) -> str:
    return f"{100 * share:.1f} %"


def check(row: Row) -> None:
    """It learned, in ten minutes of a CPU, and what it draws is what it says."""
    assert row["gain"][0] >= 0.2
    assert row["gain"][1] > 0.1
    assert row["cpu_seconds"] <= 600
    moved = row["words_decide"]["after"]["moved"]
    assert moved["tasks"] >= 60
    assert moved["as_said"] >= 0.8 and moved["as_asked"] <= 0.05


def fall(row: Row) -> float:
    """The largest from one evaluation to the next."""
    return max(0.0, *(before - after for before, after in pairwise(row["held_out"].values())))


def test_an_adapter_and_all_weights() -> None:
    runs = {(row["kind"], row["seed"]) for row in ROWS}
    assert runs == {*product(("adapter", "full"), (0, 1, 2, 3)), ("adapter", 4)}


@each_row
def test_it_is_of_the_run_file_and_base_that_lie_here(row: Row) -> None:
    assert row["inputs"] == inputs.inputs(vlm_edit.CONFIGS[row["kind"]])


@each_row
def test_every_run_learned_what_to_say(row: Row) -> None:
    check(row)
    assert "All nine runs learned" in PROSE and len(ROWS) == 9


def test_tasks_share_instructions() -> None:
    """With equal gains of the tasks of an instruction, the variance of their mean is that of a mean weighted by its
    tasks; no run needs them to be independent."""
    random = Random(derive_seed("edits", "held_out", 2))
    tasks = Counter(draw_edit(random, "held_out").instruction for _ in range(ROWS[0]["tasks"]))
    wider = (sum(n**2 for n in tasks.values()) / tasks.total()) ** 0.5
    wider *= student(len(tasks) - 1) / student(tasks.total() - 1)
    assert f"share {len(tasks)} instructions" in PROSE and f"would be {wider:.2f} times as wide" in PROSE
    assert all(row["gain"][0] - wider * (row["gain"][0] - row["gain"][1]) > 0 for row in ROWS)


def test_what_the_kl_is_for(tmp_path: Path) -> None:
    """The same runs without it, of which one did not learn and others forgot how to spell."""
    file = tmp_path / "free.yaml"
    file.write_text(f"extends: {vlm_edit.CONFIGS['adapter']}\nalgorithm: {{trl: {{beta: null}}}}\n", encoding="utf-8")
    kept = [row for row in ROWS if row["kind"] == "adapter"]
    assert [row["seed"] for row in kept] == [row["seed"] for row in FREE] == [0, 1, 2, 3, 4]
    assert all(row["inputs"] == inputs.inputs(file) for row in FREE)
    gains = [row["gain"][0] for row in FREE]
    assert f"gained {min(gains):+.3f} to {max(gains):+.3f}" in PROSE
    assert [row["seed"] for row in FREE if row["gain"][1] <= 0] == [2]
    lost, with_kl = ([row["at_the_end"]["no_colour"] for row in rows] for rows in (FREE, kept))
    assert f"{min(lost)} to {max(lost)} of their 96 answers" in PROSE
    assert f"with it {min(with_kl)} to {max(with_kl)}" in PROSE
    assert "paint it grass: grw" in FREE[1]["at_the_end"]["differ"] and '"grw"' in PROSE


@each_row
def test_what_judge_and_words_differ_in(row: Row) -> None:
    """Right words drawn wrong, and the right colour after what is no colour's name; twice after a wrong one."""
    end = row["at_the_end"]
    assert end["wrong_word_drawn_right"] == 2 * (row["run"] == "adapter-4")
    apart = ("right_word_drawn_wrong", "no_colour_drawn_right", "wrong_word_drawn_right")
    assert row["tasks"] - end["agree"] == sum(end[name] for name in apart)


def test_the_base_listens_to_words_alone() -> None:
    """Every word is drawn, and with none the picture stays."""
    for row in ROWS:
        before = row["words_decide"]["before"]
        assert before["blank"] == {"as_asked": 0.0, "as_it_was": 1.0}
        assert (before["moved"]["as_said"], before["moved"]["as_asked"]) == (1.0, 0.0)


def test_how_far_words_decide_and_states_drift() -> None:
    """Words win by far; what is drawn as asked with nothing said is less than what was gained."""
    after = [row["words_decide"]["after"] for row in ROWS]
    moved, blank = [found["moved"] for found in after], [found["blank"] for found in after]
    assert (
        f"at least {percent(min(m['as_said'] for m in moved))} of the swapped completions determine the colour" in PROSE
    )
    assert all(b["as_asked"] <= 0.25 and b["as_asked"] < row["gain"][0] for b, row in zip(blank, ROWS, strict=True))
    assert all(b["as_it_was"] < 1 for b in blank)
    of_changed = {row["run"]: b["as_asked"] / (1 - b["as_it_was"]) for row, b in zip(ROWS, blank, strict=True)}
    low, high = min(of_changed.values()), max(of_changed.values())
    assert f"Among the images that change, {100 * low:.0f} to {100 * high:.0f} % get the target colour" in PROSE
    assert {run for run, share in of_changed.items() if share > 0.4} == {"full-0", "full-1"}


def test_judge_and_words_agree_as_often_as_the_page_says() -> None:
    agree = [row["at_the_end"]["agree"] for row in ROWS]
    assert f"Judge and text agree on {min(agree)} to {max(agree)} of 96 images" in PROSE


def test_what_the_page_quotes_of_those_that_differ() -> None:
    differ = {row["run"]: row["at_the_end"]["differ"] for row in ROWS}
    assert next(iter(differ["full-1"])) == "paint it grass: green"  # the most frequent
    counts = [pair for found in differ.values() for pair in found.items()]
    no_colour = sum(count for task, count in counts if task.rpartition(": ")[2] not in COLOURS)
    assert 2 * sum(count for task, count in counts if task.endswith("cherry: d")) > no_colour
    assert '"d" for a cherry' in PROSE


def test_falls_and_gradients_are_told() -> None:
    falls = {row["run"]: fall(row) for row in ROWS}
    assert max(falls, key=lambda run: falls[run]) == "full-1"
    assert f"by {falls['full-1']:.3f} (all weights, seed 1, at the end)" in PROSE
    least = min(row["grad_norm"]["clipped"] for row in ROWS)
    assert f"at least {100 * least:.0f} % of the steps of each run are clipped" in PROSE


def test_the_picture_is_of_the_row_that_the_page_names() -> None:
    """Eight tasks of source, before and after; three and seven of them right."""
    assert next(row for row in ROWS if row["run"] == "full-0")["first_eight_drawn_right"] == [3, 7]
    assert "before training three shapes have the target colour, afterwards seven" in PROSE
    with Image.open(REPOSITORY / "docs/images/vlm-grpo.png") as picture:
        assert picture.size == (312, 963)
    assert "](images/vlm-grpo.png)" in PAGE


def test_completions_go_to_rows_that_said_another_colour() -> None:
    read = ["red", "red", "blue", "d", "green", "blue", "red", "yellow", ""]
    pairs = vlm_words.moved(read)
    assert set(pairs) == set(pairs.values()) == {0, 1, 2, 4, 5, 6, 7}  # one each, and none that is no colour's name
    assert all(read[to] != read[by] for to, by in pairs.items())
    assert vlm_words.moved(["red", "red", "red", "blue"]) == {0: 3, 3: 2}  # nobody else is left for two


@pytest.mark.full
def test_a_run_of_one_step_is_trained_and_summarised(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The whole script: the answers that it draws again are those of the run's evaluations."""
    file = tmp_path / "short.yaml"
    short = "algorithm: {trl: {per_device_train_batch_size: 8}}\ntraining: {max_steps: 1, checkpoint_every: 1}\n"
    file.write_text(f"extends: {vlm_edit.CONFIGS['adapter']}\n{short}evaluation: {{num_examples: 8}}\n")
    monkeypatch.setitem(vlm_edit.CONFIGS, "adapter", file)
    for half, count in (("train", 8), ("held_out", 8)):
        write_edits(tmp_path / "data" / half, count, half, 1)
    row = vlm_edit.measure(tmp_path / "adapter-0", "adapter", 0)
    assert row["tasks"] == 8 and list(row["held_out"]) == ["0", "1"]
    assert row["words_decide"]["before"]["moved"]["tasks"] > 0
    assert vlm_edit.picture(tmp_path / "adapter-0").width > 0


@pytest.mark.slow
def test_a_seed_learns_again(tmp_path: Path) -> None:
    """The first one."""
    out = tmp_path / "result.json"
    command = [sys.executable, str(REPOSITORY / "benchmarks/vlm_edit.py"), "--kinds", "adapter", "--seeds", "0"]
    subprocess.run([*command, "--work", str(tmp_path / "work"), "--out", str(out)], check=True)
    [row] = json.loads(out.read_text(encoding="utf-8"))["rows"]
    check(row)
