"""Training algorithms: a room for each."""

from __future__ import annotations

from retouch.registry import Registry

ALGORITHMS: Registry[type] = Registry(
    "algorithm",
    "retouch.algorithms",
    {
        "sft": "retouch.algorithms.sft.config:SftConfig",
        "grpo": "retouch.algorithms.grpo.config:GrpoConfig",
        "ppo": "retouch.algorithms.grpo.config:PpoConfig",
        "dpo": "retouch.algorithms.dpo.config:DpoConfig",
        "kto": "retouch.algorithms.kto.config:KtoConfig",
        "nft": "retouch.algorithms.nft.config:NftConfig",
        "reward_gradient": "retouch.algorithms.reward_gradient.config:RewardGradientConfig",
        "vlm_grpo": "retouch.algorithms.vlm_grpo.config:VlmGrpoConfig",
    },
    key="name",
)
"""`algorithm.name` -> its section of the run file."""
