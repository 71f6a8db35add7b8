"""Rewards: scorers, the server that runs them, the client that asks, and how a run combines them."""

from __future__ import annotations

from retouch.registry import Registry

REWARDS: Registry[type] = Registry(
    "reward",
    "retouch.rewards",
    {
        "aesthetic": "retouch.rewards.sections:AestheticReward",
        "clip": "retouch.rewards.sections:ClipReward",
        "completion_quality": "retouch.rewards.sections:CompletionQualityReward",
        "complex_edit": "retouch.rewards.sections:ComplexEditReward",
        "fn": "retouch.rewards.sections:FnReward",
        "hpsv2": "retouch.rewards.sections:HpsV2Reward",
        "imagereward": "retouch.rewards.sections:ImageRewardReward",
        "jpeg_size": "retouch.rewards.sections:JpegSizeReward",
        "mask_composite": "retouch.rewards.sections:MaskCompositeReward",
        "mmmg": "retouch.rewards.sections:MmmgReward",
        "ocr": "retouch.rewards.sections:OcrReward",
        "openai_judge": "retouch.rewards.sections:OpenAIJudgeReward",
        "pickscore": "retouch.rewards.sections:PickScoreReward",
        "preservation": "retouch.rewards.sections:PreservationReward",
        "seam": "retouch.rewards.sections:SeamReward",
        "style": "retouch.rewards.sections:StyleReward",
        "think_format": "retouch.rewards.sections:ThinkFormatReward",
        "vlm": "retouch.rewards.sections:VlmReward",
    },
)
"""`scorer` of an entry under `rewards` -> its section of the run file."""
