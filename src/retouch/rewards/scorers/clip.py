"""CLIP and models fine-tuned from it: how well an image fits its prompt.

Every image is encoded independently: the batch changes no score beyond rounding. torch and transformers are imported
when a scorer loads.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from pydantic import PositiveInt

from retouch.errors import ConfigError
from retouch.hub import require_hub
from retouch.rewards.base import PackageScorer, RewardEntry
from retouch.rewards.protocol import Pixels, RewardItem
from retouch.types import Outcome, Score

if TYPE_CHECKING:
    from torch import Tensor


class ClipReward(RewardEntry):
    """Cosine between the CLIP embeddings of image and prompt (CLIPScore without its factor 2.5), in [-1, 1]."""

    value_range = (-1.0, 1.0)
    licence = "MIT"
    scaled: ClassVar[bool] = False
    """Whether the cosine is multiplied by the model's own scale."""

    scorer: Literal["clip"] = "clip"
    path: str = "openai/clip-vit-large-patch14"
    """Hub id or folder of a `CLIPModel`."""
    processor: str = ""
    """Hub id or folder of its processor, if it is elsewhere."""
    images_per_forward: PositiveInt = 32
    """Images per forward; changes memory and speed, not results."""

    def make(self) -> ClipScorer:
        return ClipScorer(self)


class PickScoreReward(ClipReward):
    """PickScore v1 (arXiv 2305.01569), CLIP-H fine-tuned on preferences: its cosine times its own scale, about 15 to
    25."""

    value_range = (-100.0, 100.0)
    scaled = True

    scorer: Literal["pickscore"] = "pickscore"
    path: str = "yuvalkirstain/PickScore_v1"
    """Hub id or folder of a `CLIPModel`."""
    processor: str = "laion/CLIP-ViT-H-14-laion2B-s32B-b79K"
    """Hub id or folder of its processor, if it is elsewhere."""


class ClipTowers:
    """A CLIP model and its processor, loaded."""

    def __init__(self, path: str, processor: str, device: str, option: str = "path") -> None:
        """
        Args:
            option: the option that `path` is given by.

        Raises:
            ConfigError: transformers is missing, or there is no such model.
        """
        try:
            import torch
            from transformers import AutoImageProcessor, AutoTokenizer, CLIPModel
        except ImportError as error:
            raise ConfigError(f'this reward needs {error.name}: pip install "retouch[train]"') from None
        self.torch = torch
        self.device = device
        for name, given in {option: path, "processor": processor}.items():
            require_hub(name, given)
        try:
            self.model: Any = CLIPModel.from_pretrained(path).eval().to(device)  # pyright: ignore[reportArgumentType]
            self.pixels: Any = AutoImageProcessor.from_pretrained(processor or path)
            self.tokens: Any = AutoTokenizer.from_pretrained(processor or path)
        except (OSError, ValueError) as error:
            raise ConfigError(f"{option}: given {path!r}: {str(error).splitlines()[0]}") from None
        self.revision = f"{path} {getattr(self.model.config, '_commit_hash', None) or 'local'}"

    def of_images(self, images: Sequence[Pixels]) -> Tensor:
        """[B, D] unit vectors."""
        with self.torch.inference_mode():
            inputs = self.pixels(images=list(images), return_tensors="pt").to(self.device)
            return _unit(self.model.visual_projection(self.model.vision_model(**inputs).pooler_output))

    def of_texts(self, texts: Sequence[str]) -> Tensor:
        """[B, D] unit vectors. Every text is padded to the model's length: it does not depend on the others."""
        with self.torch.inference_mode():
            length = self.model.config.text_config.max_position_embeddings
            inputs = self.tokens(
                list(texts), padding="max_length", truncation=True, max_length=length, return_tensors="pt"
            ).to(self.device)
            return _unit(self.model.text_projection(self.model.text_model(**inputs).pooler_output))


def _unit(rows: Tensor) -> Tensor:
    return rows / rows.norm(dim=-1, keepdim=True)


class ClipScorer(PackageScorer[ClipReward]):
    """Cosine between image and prompt, times the model's scale if its entry is `scaled`."""

    def __init__(self, options: ClipReward) -> None:
        super().__init__(options, f"{options.scorer} {options.path}")
        self._towers: ClipTowers | None = None

    def load(self, device: str) -> None:
        o = self.options
        self._towers = ClipTowers(o.path, o.processor, device)
        self.set_revision(f"{o.scorer} {self._towers.revision}" + (f" as {o.processor}" if o.processor else ""))

    def score(self, items: Sequence[RewardItem]) -> list[Outcome]:
        outcomes: list[Outcome] = []
        for start in range(0, len(items), self.options.images_per_forward):
            outcomes += [Score(value) for value in self._batch(items[start : start + self.options.images_per_forward])]
        return outcomes

    def _batch(self, items: Sequence[RewardItem]) -> list[float]:
        towers = self._towers
        assert towers is not None
        cosines = (towers.of_images([i.image for i in items]) * towers.of_texts([i.prompt for i in items])).sum(-1)
        return (cosines * towers.model.logit_scale.exp() if self.options.scaled else cosines).float().tolist()
