"""Reference images as vectors: a frozen SigLIP (or CLIP) in front of the style adapters.

A reference is padded to a square, which keeps the shape of letters, and embedded once and alone; the vector is the
frozen part of its condition. The trained part (the projection into tokens) runs inside the network's forward.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor
from transformers import AutoConfig, CLIPVisionModelWithProjection, SiglipVisionModel
from transformers.image_utils import OPENAI_CLIP_MEAN, OPENAI_CLIP_STD
from transformers.utils.hub import cached_file

from retouch.config.errors import ConfigError
from retouch.errors import why_unreadable
from retouch.families.offload import OffloadedNetworks
from retouch.files import plain_json
from retouch.files.disk import expanded
from retouch.files.hub import read_variant, require_hub, variant_hint
from retouch.files.model_files import tiny_path
from retouch.lru import LruCache

TINY = tiny_path("image_encoder")
"""The encoder that comes with the package."""

KINDS: dict[str, tuple[Any, str]] = {
    "siglip": (SiglipVisionModel, "pooler_output"),
    "siglip_vision_model": (SiglipVisionModel, "pooler_output"),
    "clip": (CLIPVisionModelWithProjection, "image_embeds"),
    "clip_vision_model": (CLIPVisionModelWithProjection, "image_embeds"),
}
"""`model_type` of a config.json -> class, and which of its outputs is the vector."""

Normalization = tuple[list[float], list[float]]
"""Mean and standard deviation of the channels."""

HALF: Normalization = ([0.5] * 3, [0.5] * 3)
_NORMALIZATION: dict[str, Normalization] = {
    "pooler_output": HALF,
    "image_embeds": (OPENAI_CLIP_MEAN, OPENAI_CLIP_STD),
}
"""Output that is the vector -> what the models with this output were trained with. Folders without a config of an image
processor, like the encoders of released IP-Adapters, have it too."""

OLDER = "preprocessor_config.json"
"""The file that image processors were written to before transformers 5."""

_NAMES = ("image_mean", "image_std")
"""Mean and standard deviation in such a file."""

CACHE_SIZE = 4096
"""Vectors kept; 4.5 KiB each for SigLIP so400m."""


class ImageEncoder:
    """Images -> vectors, each computed once.

    Attributes:
        width: D of a vector.
        placement: where the network is.
        channels: mean and standard deviation of the normalization, [3, 1, 1] each.

    Args:
        resident: whether the network stays on its device. False moves it there for each call that encodes: the
            references of a run are encoded once, and its memory is needed for training. True suits a scorer, which
            encodes every sample: a SigLIP so400m is 1.7 GB to move.
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
        self.placement = OffloadedNetworks([self.model], not resident)
        self.output = output
        self.size = int(model.config.image_size)
        self.width = int(model.config.projection_dim if output == "image_embeds" else model.config.hidden_size)
        self.device = torch.device("cpu")
        self.channels = tuple(torch.tensor(list(v), dtype=torch.float32).view(3, 1, 1) for v in (mean, std))
        self._cache: LruCache[str, Tensor] = LruCache(CACHE_SIZE)

    @classmethod
    def load(
        cls,
        path: str,
        dtype: torch.dtype = torch.float32,
        where: str = "model.train.image_encoder",
        *,
        variant: str | None = None,
        resident: bool = False,
    ) -> ImageEncoder:
        """A hub id or folder of a SigLIP or CLIP; "tiny" is the one of the package.

        Args:
            where: the option that named it, for messages.
            variant: of its weight files: `weights_variant` of the section of `where`.
            resident: see the class.

        Raises:
            ConfigError: missing files or weights, or a model of another kind.
        """
        path, key = str(TINY) if path == "tiny" else path, f"{where.rpartition('train.')[0]}weights_variant"
        require_hub(where, path)
        where = f"{where}: given {path!r}"
        path = str(expanded(path)) if path.startswith("~") else path  # libraries do not expand it
        try:
            whole = AutoConfig.from_pretrained(path)
            if whole.model_type not in KINDS:
                raise ConfigError(f"{where}, a {whole.model_type} model; give a SigLIP or a CLIP, by hub id or folder")
            network, output = KINDS[whole.model_type]
            config = vision_config(whole)
            read = partial(network.from_pretrained, path, config=config, dtype=dtype, output_loading_info=True)
            model, info = read_variant(read, path, None, variant)
            mean, std = normalization(path, output)
        except Exception as error:
            if (problem := why_unreadable(error)) is None:
                raise
            raise ConfigError(f"{where}, which cannot be loaded: {problem}{variant_hint(path, None, key)}") from None
        if info["missing_keys"]:  # transformers initializes them at random without an error
            raise ConfigError(f"{where}: {len(info['missing_keys'])} weights are missing; copy it anew")
        return cls(model, output, mean, std, resident=resident)

    def to(self, device: torch.device | str) -> None:
        """Set the device to compute on; a resident network moves there now."""
        self.device = torch.device(device)
        self.placement.to(self.device)

    def __call__(self, images: Sequence[Image.Image]) -> Tensor:
        """[B, D] fp32 on the CPU."""
        keys = [picture_key(image) for image in images]
        by_key = dict(zip(keys, images, strict=True))
        return torch.stack(self._cache.get_all(keys, lambda missing: self._embed([by_key[key] for key in missing])))

    def pixels(self, image: Image.Image) -> Tensor:
        """[3, size, size] normalised, of the image padded to a square."""
        square = pad_to_square(image.convert("RGB")).resize((self.size, self.size), Image.Resampling.BICUBIC)
        values = torch.from_numpy(np.asarray(square, np.float32)).permute(2, 0, 1) / 255
        mean, std = self.channels
        return (values - mean) / std

    @torch.no_grad()
    def _embed(self, images: Sequence[Image.Image]) -> list[Tensor]:
        with self.placement.on_device():
            # one by one: a vector must not depend on what it was batched with
            pixels = [self.pixels(image)[None].to(self.device, self.model.dtype) for image in images]
            return [getattr(self.model(pixel_values=p), self.output)[0].float().cpu() for p in pixels]


def pad_to_square(image: Image.Image) -> Image.Image:
    """The image in the middle of a black square (Calligrapher's padding), neither cropped nor stretched."""
    side = max(image.size)
    square = Image.new("RGB", (side, side))
    square.paste(image, ((side - image.width) // 2, (side - image.height) // 2))
    return square


def vision_config(config: Any) -> Any:
    """The config of the image encoder in that of a whole SigLIP or CLIP, or itself. The width of a CLIP's vectors is in
    the config of the whole; the nested one may have none, which is read as 512."""
    nested = getattr(config, "vision_config", config)
    if nested is not config and getattr(config, "projection_dim", None) is not None:
        nested.projection_dim = config.projection_dim
    return nested


def normalization(path: str, output: str) -> Normalization:
    """The normalization of a model's image processor: in `processor_config.json`, where transformers 5 writes it, or in
    `preprocessor_config.json`; without either, that of its kind.

    Raises:
        ValueError: a file that is no JSON object.
    """
    options = _options(path, "processor_config.json").get("image_processor") or _options(path, OLDER)
    mean, std = (options.get(name, default) for name, default in zip(_NAMES, _NORMALIZATION[output], strict=True))
    return mean, std


def changed_normalization(folder: Path) -> Normalization | None:
    """`normalization` of a folder where versions before it was read so had another one; None where it is the same, or
    the folder is of no image encoder."""
    try:
        _, output = KINDS[plain_json.loads((folder / "config.json").read_text(encoding="utf-8"))["model_type"]]
        options, now = _options(str(folder), OLDER), normalization(str(folder), output)
    except (OSError, ValueError, KeyError, TypeError):
        return None
    then = tuple(options.get(name, default) for name, default in zip(_NAMES, HALF, strict=True))
    return None if now == then else now


def _options(path: str, name: str) -> dict[str, Any]:
    """The options in a file of a model; {} without it."""
    file = cached_file(path, name, _raise_exceptions_for_missing_entries=False)
    found: Any = {} if file is None else plain_json.loads(Path(file).read_text(encoding="utf-8"))
    if not isinstance(found, dict):
        raise ValueError(f"{name} holds no JSON object")
    return found  # pyright: ignore[reportUnknownVariableType]


def picture_key(image: Image.Image) -> str:
    """Hash of the pixels of an image, in RGB: equal indices of two palettes are different colours."""
    image = image.convert("RGB")
    return hashlib.sha256(f"{image.mode} {image.size}".encode() + image.tobytes()).hexdigest()
