"""CLIP and models fine-tuned from it: how well an image fits its prompt.

Every image is encoded independently: the batch changes no score beyond rounding. torch and transformers are imported
when a scorer loads.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from retouch.config.base import Count
from retouch.errors import ConfigError, installed
from retouch.files.hub import require_hub
from retouch.rewards.base import PackageScorer, RewardEntry, in_batches
from retouch.rewards.protocol import Pixels, RewardItem
from retouch.rewards.scorers.weights import image_processor, loading, model_path, processed, version_of
from retouch.types import Failure, Outcome, Score

if TYPE_CHECKING:
    from torch import Tensor


class ClipReward(RewardEntry):
    """Cosine between the CLIP embeddings of image and prompt (CLIPScore without its factor 2.5), in [-1, 1]."""

    value_range = (-1.0, 1.0)
    licence = "MIT"
    differentiable = True
    scaled: ClassVar[bool] = False
    """Whether the cosine is multiplied by the model's own scale."""

    scorer: Literal["clip"] = "clip"
    path: str = "openai/clip-vit-large-patch14"
    """Hub id or folder of a `CLIPModel`."""
    processor: str = ""
    """Hub id or folder of its processor, if it is elsewhere."""
    text_key: str = ""
    """Key of an item's metadata whose text is compared with the image; empty: the prompt."""
    images_per_forward: Count = 32
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
    """A CLIP model in fp32 and its processor, loaded."""

    def __init__(self, path: str, processor: str, device: str, option: str = "path") -> None:
        """
        Args:
            option: the option that `path` is given by.

        Raises:
            ConfigError: transformers is missing, or there is no such model.
        """
        with installed():
            import torch
            from transformers import AutoTokenizer, CLIPModel
        self.torch = torch
        self.device = device
        require_hub("processor", processor)
        with loading(option, path) as place:
            inputs = model_path(processor) if processor else place
            # by default in the precision of its file
            model: Any = CLIPModel.from_pretrained(place, dtype=torch.float32)
            self.pixels: Any = image_processor(inputs)
            self.tokens: Any = AutoTokenizer.from_pretrained(inputs)
        self.model: Any = model.eval().requires_grad_(False).to(device)
        prepared = f" as {processor} {version_of(processor)}" if processor else ""
        self.revision = f"{path} fp32 {version_of(path, model.config)}{prepared}"

    def of_images(self, images: Sequence[Pixels]) -> Tensor:
        """[B, D] unit vectors."""
        with self.torch.inference_mode():
            inputs = processed(self.pixels, images).to(self.device)
            return _unit(self.model.visual_projection(self.model.vision_model(**inputs).pooler_output))

    def of_pixels(self, images: Tensor) -> Tensor:
        """[B, D] unit vectors of images [B, 3, H, W] in [0, 1], with gradient.

        The processor's steps in torch: resize with antialiasing, central crop, normalise. Its own images are rounded to
        256 levels after the resize.

        Raises:
            ConfigError: a processor with other steps.
        """
        processor = self.pixels
        size, crop = processor.size, processor.crop_size if processor.do_center_crop else None
        mode = {2: "bilinear", 3: "bicubic"}.get(int(processor.resample))
        if mode is None or not processor.do_normalize:
            raise ConfigError(
                f"processor: {type(processor).__name__} resamples with filter {int(processor.resample)} and "
                f"do_normalize={processor.do_normalize}, which has no gradient here; expected filter 2 or 3 and true"
            )
        height, width = images.shape[2:]
        if processor.do_resize and (short := size.get("shortest_edge")):
            resized = [int(short * side / min(height, width)) for side in (height, width)]
        else:
            resized = [size["height"], size["width"]] if processor.do_resize else [height, width]
        seen = self.torch.nn.functional.interpolate(
            images.to(self.device, self.model.dtype), resized, mode=mode, align_corners=False, antialias=True
        )
        if crop is not None:
            seen = _centre(seen, crop["height"], crop["width"])
        mean, std = (
            seen.new_tensor(list(values))[:, None, None] for values in (processor.image_mean, processor.image_std)
        )
        inputs = (seen - mean) / std
        return _unit(self.model.visual_projection(self.model.vision_model(pixel_values=inputs).pooler_output))

    def of_texts(self, texts: Sequence[str]) -> Tensor:
        """[B, D] unit vectors. Every text is padded to the model's length: it does not depend on the others."""
        with self.torch.no_grad():  # not inference_mode: `values` multiplies them with embeddings that have gradients
            length = self.model.config.text_config.max_position_embeddings
            inputs = self.tokens(
                list(texts), padding="max_length", truncation=True, max_length=length, return_tensors="pt"
            ).to(self.device)
            return _unit(self.model.text_projection(self.model.text_model(**inputs).pooler_output))


def _centre(images: Tensor, height: int, width: int) -> Tensor:
    """The central crop of images, with black where they are smaller."""
    from torch.nn.functional import pad

    down, right = max(0, height - images.shape[2]), max(0, width - images.shape[3])
    images = pad(images, (right // 2, right - right // 2, down // 2, down - down // 2))
    top, left = (images.shape[2] - height) // 2, (images.shape[3] - width) // 2
    return images[:, :, top : top + height, left : left + width]


def _unit(rows: Tensor) -> Tensor:
    return rows / rows.norm(dim=-1, keepdim=True)


def compared_text(item: RewardItem, key: str) -> str | None:
    """The text to compare an image with: the prompt, or under `key` of the metadata; None if there is none."""
    text = item.metadata.get(key) if key else item.prompt
    return text if isinstance(text, str) and (text.strip() or not key) else None


def untold(item: RewardItem, key: str) -> Failure:
    """The failure of an item without its text."""
    return Failure("bad_item", f"metadata.{key} is {item.metadata.get(key)!r}; it must be the text to compare with")


def _key(key: str) -> str:
    """The part of the revision about `text_key`; empty for the prompt."""
    return f" with metadata.{key}" if key else ""


class ClipScorer(PackageScorer[ClipReward]):
    """Cosine between image and prompt, times the model's scale if its entry is `scaled`."""

    def __init__(self, options: ClipReward) -> None:
        super().__init__(options, f"{options.scorer} {options.path}{_key(options.text_key)}")
        self._towers: ClipTowers | None = None

    def load(self, device: str) -> None:
        o = self.options
        self._towers = ClipTowers(o.path, o.processor, device)
        self.set_revision(f"{o.scorer} {self._towers.revision}{_key(o.text_key)}")

    def score(self, items: Sequence[RewardItem]) -> list[Outcome]:
        key = self.options.text_key
        outcomes: list[Outcome] = [untold(item, key) for item in items]
        known = [i for i, item in enumerate(items) if compared_text(item, key) is not None]
        for batch in in_batches(known, self.options.images_per_forward):
            for i, value in zip(batch, self._batch([items[i] for i in batch]), strict=True):
                outcomes[i] = Score(value)
        return outcomes

    def values(self, images: Tensor, items: Sequence[RewardItem]) -> list[Tensor | Failure]:
        """The scores of images [B, 3, H, W] in [0, 1], scalars with gradient; `item.image` is not read. They differ
        from `score` by the rounding of the processor's images to 256 levels."""
        found: list[Tensor | Failure] = []
        size = self.options.images_per_forward
        assert self._towers is not None
        for start in range(0, len(items), size):
            seen = self._towers.of_pixels(images[start : start + size])
            found += self._compared(seen, items[start : start + size]).unbind()
        return [
            untold(item, self.options.text_key) if compared_text(item, self.options.text_key) is None else value
            for item, value in zip(items, found, strict=True)
        ]

    def _batch(self, items: Sequence[RewardItem]) -> list[float]:
        assert self._towers is not None
        return self._compared(self._towers.of_images([i.image for i in items]), items).float().tolist()

    def _compared(self, seen: Tensor, items: Sequence[RewardItem]) -> Tensor:
        """[B] scores of unit vectors [B, D] and the prompts of the items."""
        towers = self._towers
        assert towers is not None
        cosines = (seen * towers.of_texts([compared_text(i, self.options.text_key) or "" for i in items])).sum(-1)
        return cosines * towers.model.logit_scale.exp() if self.options.scaled else cosines
