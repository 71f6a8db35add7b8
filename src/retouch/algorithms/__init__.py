"""Training algorithms: a room for each."""

from __future__ import annotations

from retouch.registry import Registry

ALGORITHMS: Registry[type] = Registry(
    "algorithm",
    "retouch.algorithms",
    {
        "sft": "retouch.algorithms.sections:SftConfig",
        "grpo": "retouch.algorithms.sections:GrpoConfig",
        "ppo": "retouch.algorithms.sections:PpoConfig",
        "dpo": "retouch.algorithms.sections:DpoConfig",
        "nft": "retouch.algorithms.sections:NftConfig",
        "vlm_grpo": "retouch.algorithms.vlm_grpo.config:VlmGrpoConfig",
    },
)
"""`algorithm.name` -> its section of the run file."""
