"""What the pages call the algorithms."""

from __future__ import annotations

ALGORITHMS = {
    "sft": "SFT",
    "grpo": "GRPO",
    "ppo": "PPO",
    "dpo": "DPO",
    "kto": "KTO",
    "nft": "DiffusionNFT",
    "reward_gradient": "reward gradients",
    "vlm_grpo": "VLM-GRPO",
}
"""Algorithm -> its title, in the order of columns."""
