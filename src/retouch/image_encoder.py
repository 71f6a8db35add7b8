"""Reference images as vectors: a frozen SigLIP (or CLIP) in front of the style adapters.

A reference is padded to a square, which keeps the shape of letters, and embedded once and alone; the vector is the
frozen part of its condition. The trained part (the projection into tokens) runs inside the network's forward.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor
from transformers import AutoConfig, CLIPVisionModelWithProjection, SiglipVisionModel
from transformers.utils.hub import cached_file

from retouch.config.errors import ConfigError
from retouch.errors import why_unreadable
from retouch.hub import require_hub
from retouch.lru import LruCache

TINY = Path(__file__).parent / "tiny" / "bases" / "image_encoder"
"""The encoder that comes with the package."""

KINDS: dict[str, tuple[Any, str]] = {
    "siglip": (SiglipVisionModel, "pooler_output"),
    "siglip_vision_model": (SiglipVisionModel, "pooler_output"),
    "clip": (CLIPVisionModelWithProjection, "image_embeds"),
    "clip_vision_model": (CLIPVisionModelWithProjection, "image_embeds"),
}
"""`model_type` of a config.json -> class, and which of its outputs is the vector."""

CACHE_SIZE = 4096
"""Vectors kept; 4.5 KiB each for SigLIP so400m."""


class ImageEncoder:
    """Images -> vectors, each computed once.

    Attributes:
        width: D of a vector.
        resident: whether the network stays on its device. False moves it there for each call that encodes and back to
            the CPU: the references of a run are encoded once, and its memory is needed for training. True suits a
            scorer, which encodes every sample: a SigLIP so400m is 1.7 GB to move.
    """

    def __init__(
        self,
        model: Any,
        output: str,
        mean: Sequence[float] = (0.5,) * 3,
        std: Sequence[float] = (0.5,) * 3,
        *,
        resident: bool = False,
    ) -> None:
        self.model = model.eval().requires_grad_(False)
        self.resident = resident
        self.output = output
        self.size = int(model.config.image_size)
        self.width = int(model.config.projection_dim if output == "image_embeds" else model.config.hidden_size)
        self.device = torch.device("cpu")
        self._mean, self._std = (torch.tensor(list(v)).view(3, 1, 1) for v in (mean, std))
        self._cache: LruCache[str, Tensor] = LruCache(CACHE_SIZE)

    @classmethod
    def load(
        cls,
        path: str,
        dtype: torch.dtype = torch.float32,
        where: str = "model.train.image_encoder",
        *,
        resident: bool = False,
    ) -> ImageEncoder:
        """A hub id or folder of a SigLIP or CLIP; "tiny" is the one of the package.

        Args:
            where: the option that named it, for messages.
            resident: see the class.

        Raises:
            ConfigError: missing files or weights, or a model of another kind.
        """
        path = str(TINY) if path == "tiny" else path
        require_hub(where, path)
        where = f"{where}: given {path!r}"
        try:
            kind = AutoConfig.from_pretrained(path).model_type
            if kind not in KINDS:
                raise ConfigError(f"{where}, a {kind} model; give a SigLIP or a CLIP, by hub id or folder")
            network, output = KINDS[kind]
            model, info = network.from_pretrained(path, dtype=dtype, output_loading_info=True)
            options = _preprocessor(path)
        except Exception as error:
            if (problem := why_unreadable(error)) is None:
                raise
            raise ConfigError(f"{where}, which cannot be loaded: {problem}") from None
        if info["missing_keys"]:  # transformers initializes them at random without an error
            raise ConfigError(f"{where}: {len(info['missing_keys'])} weights are missing; copy it anew")
        mean, std = (options.get(name, (0.5,) * 3) for name in ("image_mean", "image_std"))
        return cls(model, output, mean, std, resident=resident)

    def to(self, device: torch.device | str) -> None:
        """Set the device to compute on; a resident network moves there now."""
        self.device = torch.device(device)
        if self.resident:
            self.model.to(self.device)

    def __call__(self, images: Sequence[Image.Image]) -> Tensor:
        """[B, D] fp32 on the CPU."""
        keys = [picture_key(image) for image in images]
        return torch.stack(self._cache.get_all(keys, lambda missing: self._embed([images[i] for i in missing])))

    def pixels(self, image: Image.Image) -> Tensor:
        """[3, size, size] normalised, of the image padded to a square."""
        square = pad_to_square(image.convert("RGB")).resize((self.size, self.size), Image.Resampling.BICUBIC)
        values = torch.from_numpy(np.asarray(square, np.float32)).permute(2, 0, 1) / 255
        return (values - self._mean) / self._std

    @torch.no_grad()
    def _embed(self, images: Sequence[Image.Image]) -> list[Tensor]:
        if not self.resident:
            self.model.to(self.device)
        # one by one: a vector must not depend on what it was batched with
        pixels = [self.pixels(image)[None].to(self.device, self.model.dtype) for image in images]
        vectors = [getattr(self.model(pixel_values=p), self.output)[0].float().cpu() for p in pixels]
        if not self.resident:
            self.model.to("cpu")
        return vectors


def pad_to_square(image: Image.Image) -> Image.Image:
    """The image in the middle of a black square (Calligrapher's padding), neither cropped nor stretched."""
    side = max(image.size)
    square = Image.new("RGB", (side, side))
    square.paste(image, ((side - image.width) // 2, (side - image.height) // 2))
    return square


def _preprocessor(path: str) -> dict[str, Any]:
    """The options of a model's image processor; {} where it has none."""
    file = cached_file(path, "preprocessor_config.json", _raise_exceptions_for_missing_entries=False)
    return {} if file is None else json.loads(Path(file).read_text(encoding="utf-8"))


def picture_key(image: Image.Image) -> str:
    """Hash of an image's pixels."""
    return hashlib.sha256(f"{image.mode} {image.size}".encode() + image.tobytes()).hexdigest()
