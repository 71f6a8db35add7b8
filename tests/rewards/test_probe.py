"""`retouch reward probe`: what it says of scorers whose faults are known."""

from __future__ import annotations

import itertools
import json
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from retouch.config import ConfigError
from retouch.rewards.client.client import percentile
from retouch.rewards.probe import agreement, pairs_in_order, probe, read_labels, spearman
from retouch.rewards.protocol import RewardItem
from retouch.types import Failure, Outcome, Score
from tests.command_line import retouch
from tests.rewards.fakes import brightness, item, items, picture


def bright(batch: Sequence[RewardItem]) -> list[Outcome]:
    return [Score(brightness(one)) for one in batch]


def test_a_sound_scorer() -> None:
    found = probe(bright, item(3), repeats=4, batch=3)
    assert found["value"] == brightness(item(3))
    assert found["repeatability"] == {"std": 0.0, "largest_difference": 0.0} and found["batch_difference"] == 0.0
    assert found["failures"] == 0 and 0 <= found["seconds"]["p50"] <= found["seconds"]["p95"]


def test_one_that_does_not_repeat_itself() -> None:
    count = itertools.count()
    found = probe(lambda batch: [Score(float(next(count) % 2)) for _ in batch], item(0), repeats=4, batch=2)
    assert found["repeatability"] == {"std": pytest.approx((1 / 3) ** 0.5), "largest_difference": 1.0}


def test_one_whose_scores_depend_on_the_batch() -> None:
    found = probe(lambda batch: [Score(one.value + len(batch)) for one in bright(batch)], item(0), 2, 5)  # type: ignore[union-attr]
    assert found["batch_difference"] == pytest.approx(4.0) and found["repeatability"]["std"] == 0.0


def test_one_that_fails() -> None:
    found = probe(lambda batch: [Failure("bad_item", "no")] * len(batch), item(0), 2, 3)
    assert (found["value"], found["failures"], found["first_failure"]) == (None, 8, "bad_item: no")
    assert found["repeatability"]["std"] is None and found["batch_difference"] is None


def test_agreement_by_hand() -> None:
    assert spearman([1, 2, 3, 4], [10, 30, 20, 40]) == pytest.approx(0.8)
    assert spearman([1, 1], [0, 1]) is None and spearman([1.0], [2.0]) is None
    assert pairs_in_order([1, 2, 2, 0], [1, 2, 3, 3]) == pytest.approx(2.5 / 5)
    assert pairs_in_order([1, 2], [5, 5]) is None
    assert percentile([3, 1, 2], 0.5) == 2 and percentile([3, 1, 2], 0.95) == 3
    labelled = [(one, brightness(one) * (-1 if one.id == 2 else 1)) for one in items(4)]
    found = agreement(bright, labelled, batch=3)
    assert found["pictures"] == 4 and found["failures"] == 0 and -1 < found["spearman"] < 1
    perfect = agreement(bright, [(one, 10 * brightness(one)) for one in items(4)], 3)
    assert (perfect["spearman"], perfect["pairs_in_order"]) == (pytest.approx(1.0), 1.0)


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ("{", "not JSON"),
        ('{"image": "a.png", "prompt": "p"}', "a line has image, prompt and label"),
        ('{"image": "a.png", "prompt": "p", "label": 1, "colour": 2}', "a line has image, prompt and label"),
        ('{"image": "a.png", "prompt": "p", "label": true}', "given True; it must be a number, not NaN or Inf"),
        ('{"image": "a.png", "prompt": "p", "label": 1' + "0" * 400 + "}", "a number beyond the floats"),
        ('{"image": 5, "prompt": "p", "label": 1}', "image: given 5; it must be a string"),
        ('{"image": "a.png", "prompt": null, "label": 1}', "prompt: given None; it must be a string"),
        ('{"image": "a.png", "prompt": "p", "label": 1, "mask": ["m"]}', "mask: given .*; it must be a string"),
    ],
)
def test_labels_that_cannot_be_read(line: str, says: str, tmp_path: Path) -> None:
    (tmp_path / "labels.jsonl").write_text(line + "\n")
    with pytest.raises(ConfigError, match=says):
        read_labels(tmp_path / "labels.jsonl")


def test_the_command(tmp_path: Path) -> None:
    for i in range(3):
        Image.fromarray(picture(i, 32, 32) // (i + 1)).save(tmp_path / f"{i}.png")
    rows = [{"image": f"{i}.png", "prompt": "p", "label": i, "text": "A"} for i in range(3)]
    (tmp_path / "labels.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    options = ["--image", tmp_path / "0.png", "--prompt", "p", "--repeats", "3", "--batch", "2"]
    done = retouch("reward", "probe", "--reward", "jpeg_size", *options, "--labels", tmp_path / "labels.jsonl")
    assert done.code == 0, done.err
    found = json.loads(done.out)
    assert found["reward"] == "jpeg_size" and -1 <= found["value"] <= 0 and found["repeatability"]["std"] == 0.0
    assert found["agreement"]["pictures"] == 3 and found["agreement"]["pairs_in_order"] == 1.0  # darker is smaller
    loud = retouch(
        "reward", "probe", "--reward", "jpeg_size", *options, "--options", '{"jpeg_size": {"incompressible": true}}'
    )
    assert json.loads(loud.out)["value"] == -found["value"]
    assert np.isclose(json.loads(loud.out)["batch_difference"], 0.0)
    absent = retouch("reward", "probe", "--reward", "jpeg_size", *options, "--device", "cuda:99")
    assert absent.code == 2 and "--device: given 'cuda:99', but this machine has" in absent.err
    lacking = retouch("reward", "probe", "--reward", "seam", *options)
    assert lacking.code == 1 and "seam needs mask" in lacking.out
    wrong = retouch("reward", "probe", "--reward", "seam", *options, "--options", "[1]")
    assert wrong.code == 2 and "--options: given [1]" in wrong.err


@pytest.mark.parametrize(
    ("options", "noted"),
    [
        ('{"jpeg_size": {"incompressible": true}}', False),
        ('{"incompressible": true}', True),  # the former form
    ],
)
def test_options_of_score_are_written_as_those_of_serve(
    options: str, noted: bool, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    Image.fromarray(picture(0, 32, 32)).save(tmp_path / "a.png")
    shown = ["--image", tmp_path / "a.png", "--prompt", "p"]
    plain = retouch("reward", "score", "--reward", "jpeg_size", *shown)
    outcome = retouch("reward", "score", "--reward", "jpeg_size", *shown, "--options", options)
    assert outcome.code == 0, outcome.err
    assert json.loads(outcome.out)["value"] == -json.loads(plain.out)["value"]
    note = 'the form is now that of `reward serve`: {"jpeg_size": {"incompressible": true}}'
    assert (note in caplog.text) is noted


def test_a_scorer_under_another_name(tmp_path: Path) -> None:
    """As `reward serve` takes it, with its name in the options."""
    Image.fromarray(picture(0, 32, 32)).save(tmp_path / "a.png")
    options = json.dumps({"light": {"scorer": "fn", "fn": "tests.rewards.user_scorers:brightness"}})
    shown = ["--reward", "light", "--image", tmp_path / "a.png", "--prompt", "p"]
    outcome = retouch("reward", "score", *shown, "--options", options)
    assert outcome.code == 0 and 0 < json.loads(outcome.out)["value"] < 1, outcome.err
    wrong = retouch("reward", "score", *shown, "--options", '{"dark": {}}')
    assert wrong.code == 2 and "--options: 'dark' is no scorer of this command; " in wrong.err
