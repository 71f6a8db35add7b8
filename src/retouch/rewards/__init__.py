"""Rewards: scorers, the server that runs them, the client that calls it, and how a run combines them."""

from __future__ import annotations

from typing import TYPE_CHECKING

from retouch.registry import Registry

if TYPE_CHECKING:
    from retouch.rewards.base import RewardEntry

REWARDS: Registry[type[RewardEntry]] = Registry(
    "reward",
    "retouch.rewards",
    {
        "aesthetic": "retouch.rewards.scorers.imscore:AestheticReward",
        "aesthetic_v1": "retouch.rewards.scorers.aesthetic_v1:AestheticV1Reward",
        "clip": "retouch.rewards.scorers.clip:ClipReward",
        "completion_quality": "retouch.rewards.scorers.completion:CompletionQualityReward",
        "complex_edit": "retouch.rewards.scorers.complex_edit:ComplexEditReward",
        "editreward": "retouch.rewards.scorers.preference_head:EditRewardReward",
        "editscore": "retouch.rewards.scorers.editscore:EditScoreReward",
        "flow_grpo_ocr": "retouch.rewards.scorers.flow_grpo_ocr:FlowGrpoOcrReward",
        "fn": "retouch.rewards.scorers.fn:FnReward",
        "hpsv2": "retouch.rewards.scorers.hps:HpsV2Reward",
        "hpsv3": "retouch.rewards.scorers.preference_head:HpsV3Reward",
        "image_similarity": "retouch.rewards.scorers.image_similarity:ImageSimilarityReward",
        "imagereward": "retouch.rewards.scorers.imscore:ImageRewardReward",
        "jpeg_size": "retouch.rewards.scorers.jpeg_size:JpegSizeReward",
        "kept_area": "retouch.rewards.scorers.kept_area:KeptAreaReward",
        "lpips": "retouch.rewards.scorers.lpips:LpipsReward",
        "mask_composite": "retouch.rewards.scorers.mask_composite:MaskCompositeReward",
        "mmmg": "retouch.rewards.scorers.mmmg:MmmgReward",
        "ocr": "retouch.rewards.scorers.ocr:OcrReward",
        "ocr_lines": "retouch.rewards.scorers.ocr_lines:OcrLinesReward",
        "openai_judge": "retouch.rewards.scorers.openai_judge:OpenAIJudgeReward",
        "pairwise": "retouch.rewards.scorers.pairwise:PairwiseReward",
        "pickscore": "retouch.rewards.scorers.clip:PickScoreReward",
        "preservation": "retouch.rewards.scorers.preservation:PreservationReward",
        "seam": "retouch.rewards.scorers.seam:SeamReward",
        "style": "retouch.rewards.scorers.style:StyleReward",
        "taste": "retouch.rewards.scorers.taste:TasteReward",
        "textpecker": "retouch.rewards.scorers.textpecker:TextPeckerReward",
        "think_format": "retouch.rewards.scorers.completion:ThinkFormatReward",
        "unified_reward": "retouch.rewards.scorers.unified_reward:UnifiedRewardReward",
        "vlm": "retouch.rewards.scorers.vlm:VlmReward",
    },
    key="scorer",
)
"""`scorer` of an entry under `rewards` -> its class: options, needs, and the scorer that it makes."""
