"""The mean of the pixels as a reward of Flow-Factory, for `peer_race.py`; imported in its process alone."""

from __future__ import annotations

from typing import Any

import torch
from flow_factory.rewards import PointwiseRewardModel, RewardModelOutput  # type: ignore[import-not-found]


class Pixels(PointwiseRewardModel):  # type: ignore[misc]
    """The mean of the pixels of each image."""

    use_tensor_inputs = True

    def __call__(self, prompt: list[str], image: list[Any], **_: Any) -> Any:
        return RewardModelOutput(rewards=torch.tensor([float(torch.as_tensor(one).float().mean()) for one in image]))
