"""Similarity of two images by an image encoder: DINO, DINOv2 or CLIP (CLIP-I), without torchvision.

DreamBooth (arXiv 2208.12242) and MagicBrush (arXiv 2306.10012) report the cosine of DINO ViT-S/16 and CLIP ViT-B/32.
For a masked edit, compare crops (`crop: mask_box`): most of a whole image is the source.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Literal

from retouch.config.base import Count, Text
from retouch.errors import installed
from retouch.rewards.base import PackageScorer, RewardEntry, in_batches
from retouch.rewards.protocol import Pixels, RewardItem
from retouch.rewards.scorers.weights import image_processor, loading, processed, version_of
from retouch.types import Outcome, Score

if TYPE_CHECKING:
    from torch import Tensor


class ImageSimilarityReward(RewardEntry):
    """Cosine between image embeddings of the sample and of its source or reference, in [-1, 1]."""

    value_range = (-1.0, 1.0)
    licence = "of the encoder"

    scorer: Literal["image_similarity"] = "image_similarity"
    path: Text = "facebook/dino-vits16"
    """Hub id or folder of the encoder: a ViT of DINO, DINOv2 (facebook/dinov2-base), or CLIP
    (openai/clip-vit-base-patch32)."""
    against: Literal["source", "reference"] = "source"
    """Image that the sample is compared with."""
    images_per_forward: Count = 16
    """Samples per forward; changes memory and speed, not results."""

    def required_images(self) -> frozenset[str]:
        return frozenset({self.against})

    def make(self) -> ImageSimilarityScorer:
        return ImageSimilarityScorer(self)


class ImageSimilarityScorer(PackageScorer[ImageSimilarityReward]):
    """The embedding is CLIP's projection, or the class token after the last norm of a ViT."""

    def __init__(self, options: ImageSimilarityReward) -> None:
        super().__init__(options, f"{options.path} {options.against}")
        self._encoder: Encoder | None = None

    def load(self, device: str) -> None:
        self._encoder = Encoder(self.options.path, device)
        self.set_revision(f"{self._encoder.revision} {self.options.against}")

    def score(self, items: Sequence[RewardItem]) -> list[Outcome]:
        outcomes: list[Outcome] = []
        for batch in in_batches(items, self.options.images_per_forward):
            assert self._encoder is not None
            samples = self._encoder([item.image for item in batch])
            others = self._encoder([getattr(item, self.options.against) for item in batch])
            cosines = (samples * others).sum(-1) / (samples.norm(dim=-1) * others.norm(dim=-1))
            outcomes += [Score(value) for value in cosines.float().tolist()]
        return outcomes


class Encoder:
    """An image encoder of transformers in fp32, and its preprocessing: images -> [B, D].

    Raises:
        ConfigError: transformers is missing, or there is no such encoder.
    """

    def __init__(self, path: str, device: str) -> None:
        with installed("an image encoder"):
            import torch
            from transformers import AutoConfig, AutoModel
        with loading("path", path) as place:
            config: Any = AutoConfig.from_pretrained(place)
            self._is_clip = config.model_type == "clip"
            # by default in the precision of its file
            model: Any = AutoModel.from_pretrained(place, dtype=torch.float32)
            self._pixels: Any = image_processor(place)
        self._model: Any = model.eval().to(device)
        self._torch, self._device = torch, device
        self.revision = f"{path} fp32 {version_of(path, config)}"

    def __call__(self, images: Sequence[Pixels]) -> Tensor:
        with self._torch.inference_mode():
            inputs = processed(self._pixels, images).to(self._device)
            if self._is_clip:
                return self._model.visual_projection(self._model.vision_model(**inputs).pooler_output).float()
            return self._model(**inputs).last_hidden_state[:, 0].float()
