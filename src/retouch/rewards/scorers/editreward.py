"""EditReward (arXiv 2509.26346): a Qwen2.5-VL or MiMo-VL with two heads, trained on preferences about edits."""

from __future__ import annotations

from typing import Literal

from retouch.config.base import Text
from retouch.rewards.scorers.preference_head import HeadReward


class EditRewardReward(HeadReward):
    """EditReward (arXiv 2509.26346) of an edit: the mean of two scores, how the instruction is followed and the visual
    quality; about -5 to 5. Needs a source image."""

    files = ("model.safetensors", "model.pth")
    rubrics = ("editreward_following", "editreward_quality")
    images = frozenset({"source"})

    scorer: Literal["editreward"] = "editreward"
    path: Text
    """Hub id or folder with model.safetensors or model.pth, or such a file: a checkpoint of the hub's collection
    TIGER-Lab/editreward on MiMo-VL or Qwen2.5-VL. Those on Qwen3-VL are not supported."""
    base: Text = "XiaomiMiMo/MiMo-VL-7B-SFT-2508"
    """Hub id or folder of the VLM that was fine-tuned: its config, tokenizer and image processor, not its weights."""

    def example_images(self) -> frozenset[str]:
        return self.required_images()
