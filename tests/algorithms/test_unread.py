"""An option that nothing reads in a run, by its declaration, changes nothing that the run trains."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from retouch.rewards.protocol import RewardItem
from retouch.types import Outcome, Score
from tests.config.changed import with_value
from tests.config.test_reads import with_all_that_nothing_reads

from .runs import Config, Use, labelled, same_weights, train, weights

pytestmark = pytest.mark.usefixtures("shallow", "bare")

ODE = {"num_steps": 4, "group_size": 4, "global_groups_per_batch": 2}

RUNS: dict[str, dict[str, Any]] = {
    "grpo": {"algorithm": {"name": "grpo"}, "rollout": ODE},
    "ppo with a window": {"algorithm": {"name": "ppo", "kl_mask_threshold": 1e-5}},
    "dpo": {"algorithm": {"name": "dpo"}, "rollout": ODE},
    "nft": {"algorithm": {"name": "nft"}, "rollout": ODE},
    "reward_gradient": {"algorithm": {"name": "reward_gradient"}, "rollout": ODE, "rewards": {"seam": {}}},
    "kto": {"algorithm": {"name": "kto"}, "rollout": ODE, "rewards": {}},
    "sft": {"algorithm": {"name": "sft"}, "rewards": {}, "warmup_data": None},
}


@pytest.mark.parametrize("name", RUNS)
def test_all_options_that_nothing_reads_leave_the_trained_weights_as_they_are(
    name: str, config: Config, scripted: Use, signs: Path, tmp_path: Path
) -> None:
    def by_id(item: RewardItem) -> Outcome:
        return Score(float(item.image[:4].mean()) / 255)

    scripted(by_id)
    more: dict[str, Any] = {**RUNS[name], "training__max_steps": 1}
    if name == "kto":
        more["data"] = {"format": "manifest", "path": str(labelled(signs, tmp_path)), "resolution": [32, 64]}
    if name == "sft":
        more["data"] = {"format": "self_bench", "path": str(signs / "targets"), "resolution": [32, 64]}
    run = config(name="a", **more)
    changed, keys = with_all_that_nothing_reads(run)
    changed = changed.model_copy(update={"model": run.model})  # its keys are validated again where prompts are read
    # the one option that would be read: all images of a group would be the same
    changed = with_value(changed, "rollout.shared_noise", run.rollout.shared_noise)
    # refused where a run begins (tests/config/test_reward_rules.py)
    changed = with_value(changed, "reward_client.probe_every", run.reward_client.probe_every)
    assert len(keys) > 5
    (one, _), (other, _) = train(run), train(with_value(changed, "name", "b"))
    assert same_weights(weights(one), weights(other)), keys
