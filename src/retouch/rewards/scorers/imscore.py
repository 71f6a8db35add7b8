"""ImageReward and the LAION aesthetic predictor through imscore 0.0.11, which has one call for both.

imscore's ImageReward fails with transformers 5: serve these scorers from an environment of their own (`retouch reward
env`). Images are scored in batches of one shape, as fp32 pixels in [0, 1]; imscore resizes them, and ImageReward
truncates prompts to 35 tokens.
"""

from __future__ import annotations

import importlib
import logging
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, ClassVar, Literal

import numpy as np

from retouch.config.base import Count
from retouch.errors import ConfigError, first_line
from retouch.files.hub import require_hub
from retouch.process.machine import installed_version
from retouch.rewards.base import PackageScorer, RewardEntry, in_batches
from retouch.rewards.protocol import RewardItem
from retouch.rewards.scorers.weights import model_path, version_of
from retouch.types import Failure, Outcome, Score

if TYPE_CHECKING:
    from torch import Tensor

logger = logging.getLogger(__name__)


class ImscoreReward(RewardEntry):
    """Options that the models of imscore share."""

    differentiable = True
    model: ClassVar[str]
    """module:class in imscore."""
    beside: ClassVar[str]
    """Files that the model's constructor downloads from the hub in addition to `path`."""

    path: str
    """Hub id or folder in imscore's layout."""
    images_per_forward: Count = 16
    """Images per forward; changes memory and speed, not results."""

    def make(self) -> ImscoreScorer:
        return ImscoreScorer(self)


class ImageRewardReward(ImscoreReward):
    """ImageReward (arXiv 2304.05977), about -2 to 2; needs an environment with imscore."""

    model = "imscore.imreward.model:ImageReward"
    beside = "the tokenizer of bert-base-uncased"
    value_range = (-10.0, 10.0)

    scorer: Literal["imagereward"] = "imagereward"
    path: str = "RE-N-Y/ImageReward"
    """Hub id or folder in imscore's layout."""


class AestheticReward(ImscoreReward):
    """The LAION aesthetic predictor v2, about 1 to 10; ignores the prompt; needs an environment with imscore."""

    model = "imscore.aesthetic.model:LAIONAestheticScorer"
    beside = "openai/clip-vit-large-patch14"
    value_range = (0.0, 12.0)

    scorer: Literal["aesthetic"] = "aesthetic"
    path: str = "RE-N-Y/laion-aesthetic"
    """Hub id or folder in imscore's layout."""


class ImscoreScorer(PackageScorer[ImscoreReward]):
    """A model of imscore: `from_pretrained(path, strict=...)` and `score(pixels [B, 3, H, W], prompts)` -> [B] or
    [B, 1]."""

    def __init__(self, options: ImscoreReward) -> None:
        super().__init__(options, f"{options.scorer} {options.path} imscore {installed_version('imscore')}")
        self._model: Any = None

    def load(self, device: str) -> None:
        """Load the model.

        Raises:
            ConfigError: imscore is not installed here, or there is no such model.
        """
        module, _, kind = self.options.model.partition(":")
        name = self.options.scorer
        try:
            import torch

            made = getattr(importlib.import_module(module), kind)
        except ImportError as error:
            raise ConfigError(
                f"the {name} reward needs imscore ({error}), which needs transformers<5; serve it from an environment "
                f"of its own, which `retouch reward env {name}` makes; then set rewards.{name}.url"
            ) from None
        require_hub("path", self.options.path)
        self._model = self._loaded(made).eval().requires_grad_(False).to(device)
        self._torch, self._device = torch, device
        self.set_revision(f"{version_of(self.options.path)} {self.spec.revision}")

    def _loaded(self, kind: Any) -> Any:
        """The model with every weight from its file.

        Raises:
            ConfigError: no such model, or a file with missing weights.
        """
        path = self.options.path
        try:
            return kind.from_pretrained(model_path(path), strict=True)
        # open_clip raises RuntimeError for files it cannot fetch, transformers 4 ImportError; imscore's ImageReward
        # raises AttributeError with transformers 5
        except (OSError, ValueError, RuntimeError, ImportError, AttributeError) as error:
            text = str(error)
            if "Unexpected key" in text and "Missing key" not in text and "size mismatch" not in text:
                logger.warning(
                    "%s: tensors of %s that the model does not have are ignored: %s", self.options.scorer, path, text
                )
                return kind.from_pretrained(model_path(path))
            missing = "; weights are missing from its file" * ("Missing key" in text)
            raise ConfigError(
                f"path: given {path!r}, which cannot be loaded ({first_line(error)}{missing}); it needs that "
                f"model and {self.options.beside} from the hub or its cache, and transformers>=4.53,<5"
            ) from None

    def score(self, items: Sequence[RewardItem]) -> list[Outcome]:
        outcomes: dict[int, Outcome] = {}
        shapes: dict[tuple[int, ...], list[int]] = {}
        for i, item in enumerate(items):
            shapes.setdefault(item.image.shape, []).append(i)
        for members in shapes.values():
            for chunk in in_batches(members, self.options.images_per_forward):
                outcomes.update(zip(chunk, self._batch([items[i] for i in chunk]), strict=True))
        return [outcomes[i] for i in range(len(items))]

    def values(self, images: Tensor, items: Sequence[RewardItem]) -> list[Tensor | Failure]:
        """The scores of images [B, 3, H, W] in [0, 1], scalars with gradient; `item.image` is not read."""
        found: list[Tensor | Failure] = []
        size = self.options.images_per_forward
        for start in range(0, len(items), size):
            found += self._scores(images[start : start + size], items[start : start + size]).unbind()
        return found

    def _batch(self, items: Sequence[RewardItem]) -> list[Outcome]:
        torch = self._torch
        pixels = torch.from_numpy(np.stack([item.image for item in items])).permute(0, 3, 1, 2).float() / 255
        with torch.inference_mode():
            return [Score(value) for value in self._scores(pixels, items).tolist()]

    def _scores(self, images: Tensor, items: Sequence[RewardItem]) -> Tensor:
        """[B] scores of images [B, 3, H, W] in [0, 1]."""
        scores = self._model.score(images.to(self._device), [item.prompt for item in items])
        return scores.float().reshape(len(items))
