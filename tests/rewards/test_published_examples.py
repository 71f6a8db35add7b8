"""Published example scores, reproduced where the weights are there.

RETOUCH_EXAMPLES names a folder with clones of the repositories of tests/benchmarks_data/published_examples.json, whose
example images are not part of this one. The weights come from the hub's cache (or the hub).
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from retouch.errors import ConfigError
from retouch.rewards import REWARDS
from retouch.rewards.protocol import RewardItem
from retouch.rewards.scorers import make_scorer
from retouch.types import Score

RECORDED: dict[str, Any] = json.loads(
    (Path(__file__).parents[1] / "benchmarks_data/published_examples.json").read_text(encoding="utf-8")
)
FOLDER = os.environ.get("RETOUCH_EXAMPLES")


def of_form(form: str, values: list[float]) -> list[float]:
    """The scores of an example in the form in which they are published."""
    if form == "value":
        return values
    assert form == "softmax of 100 cosines"
    raised = np.exp(100 * (np.array(values) - max(values)))
    return (raised / raised.sum()).tolist()


@pytest.mark.parametrize("example", RECORDED["examples"], ids=lambda example: example["reward"])
def test_an_example_has_its_published_score(example: dict[str, Any]) -> None:
    if FOLDER is None:
        pytest.skip("RETOUCH_EXAMPLES is not set to a folder with the repositories of the published examples")
    missing = [name for name in example["images"] if not (Path(FOLDER) / name).is_file()]
    if missing:
        pytest.skip(f"{FOLDER} has no {missing[0]} of {example['source']}")
    scorer = make_scorer(example["reward"], example["options"])
    try:
        scorer.load("cpu")
    except ConfigError as error:
        pytest.skip(f"the weights of {example['reward']} cannot be loaded: {error}")
    images = [np.asarray(Image.open(Path(FOLDER) / name).convert("RGB")) for name in example["images"]]
    items = [RewardItem(0, prompt, image) for image in images for prompt in example["prompts"]]
    scores = [outcome.value for outcome in scorer.score(items) if isinstance(outcome, Score)]
    assert of_form(example["form"], scores) == pytest.approx(example["values"], abs=example["tolerance"])


def test_every_published_reward_model_has_an_example_or_a_reason() -> None:
    """A reward of published weights is reproduced, or no example score of it is published."""
    told = {example["reward"] for example in RECORDED["examples"]} | RECORDED["none_published"].keys()
    assert told >= {"editscore", "editreward", "hpsv3", "hpsv2", "unified_reward", "viescore", "imagereward"}
    assert told <= {*REWARDS}
    for example in RECORDED["examples"]:
        assert len(example["values"]) == len(example["images"]) * len(example["prompts"]) and example["source"]


def test_forms_by_hand() -> None:
    assert of_form("value", [0.5, -1.0]) == [0.5, -1.0]
    assert of_form("softmax of 100 cosines", [0.3, 0.3]) == [0.5, 0.5]
    assert of_form("softmax of 100 cosines", [0.30, 0.29]) == pytest.approx([np.e / (1 + np.e), 1 / (1 + np.e)])
