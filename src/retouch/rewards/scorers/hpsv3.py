"""HPSv3 (arXiv 2508.03789): a Qwen2-VL-7B with a head that was trained on human preferences."""

from __future__ import annotations

from typing import Literal

from retouch.config.base import Text
from retouch.rewards.scorers.preference_head import HeadReward


class HpsV3Reward(HeadReward):
    """Human Preference Score v3 (arXiv 2508.03789): of an image and its prompt, about -5 to 15."""

    files = ("HPSv3.safetensors",)
    rubrics = ("hpsv3",)

    scorer: Literal["hpsv3"] = "hpsv3"
    path: Text = "MizzenAI/HPSv3"
    """Hub id or folder with HPSv3.safetensors, or such a file."""
    base: Text = "Qwen/Qwen2-VL-7B-Instruct"
    """Hub id or folder of the VLM that was fine-tuned: its config, tokenizer and image processor, not its weights."""
