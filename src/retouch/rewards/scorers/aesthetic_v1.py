"""LAION's first aesthetic predictor (github.com/LAION-AI/aesthetic-predictor): one linear layer on CLIP ViT-L/14.

Published tables of BrushBench and TextEdit use it. Its values do not compare with those of `aesthetic`, which has five
linear layers.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

from retouch.config.base import Count
from retouch.errors import ConfigError
from retouch.rewards.base import PackageScorer, RewardEntry, in_batches
from retouch.rewards.protocol import RewardItem
from retouch.rewards.scorers.clip import ClipTowers
from retouch.rewards.scorers.weights import file_digest, named_file, read_weights, tensor_of
from retouch.types import Outcome, Score


class AestheticV1Reward(RewardEntry):
    """LAION's aesthetic predictor v1, about 1 to 10: a linear layer on the CLIP ViT-L/14 embedding of the image."""

    value_range = (-100.0, 100.0)
    licence = "MIT"

    scorer: Literal["aesthetic_v1"] = "aesthetic_v1"
    head: str
    """File of the layer, `sa_0_4_vit_l_14_linear.pth` of LAION-AI/aesthetic-predictor; required."""
    path: str = "openai/clip-vit-large-patch14"
    """Hub id or folder of the `CLIPModel`."""
    images_per_forward: Count = 32
    """Images per forward; changes memory and speed, not results."""

    def make(self) -> AestheticV1Scorer:
        return AestheticV1Scorer(self)


class AestheticV1Scorer(PackageScorer[AestheticV1Reward]):
    """w · e + b of the unit embedding e of the image."""

    def __init__(self, options: AestheticV1Reward) -> None:
        super().__init__(options, f"aesthetic_v1 {options.path}")
        self._towers: ClipTowers | None = None
        self._weight: Any = None
        self._bias: Any = None

    def load(self, device: str) -> None:
        """Load CLIP and the layer.

        Raises:
            ConfigError: a missing file, or one of another layer.
        """
        file = named_file("head", self.options.head)
        tensors = read_weights(file, "head", mmap=False)
        weight, bias = (tensor_of(tensors, "head", name) for name in ("weight", "bias"))
        self._towers = ClipTowers(self.options.path, "", device)
        width = self._towers.model.config.projection_dim
        if weight.shape != (1, width) or bias.shape != (1,):
            raise ConfigError(f"head: {file} has a weight {tuple(weight.shape)}; expected (1, {width})")
        self._weight, self._bias = weight.to(device), bias.to(device)
        self.set_revision(f"aesthetic_v1 {self._towers.revision} head {file_digest(file)}")

    def score(self, items: Sequence[RewardItem]) -> list[Outcome]:
        outcomes: list[Outcome] = []
        for batch in in_batches(items, self.options.images_per_forward):
            assert self._towers is not None
            embedded = self._towers.of_images([item.image for item in batch]).float()
            outcomes += [Score(value) for value in (embedded @ self._weight.T + self._bias)[:, 0].tolist()]
        return outcomes
