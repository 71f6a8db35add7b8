"""Frozen features of images: an image encoder's vectors of the whole image and of the box of its mask, and statistics
of the pixels of both.

Fit and scorer compute them by the same steps from pixels in [0, 1], in torch and with a gradient; for the encoder they
are padded to a square with black, resized with antialiasing and normalised. Each image is encoded alone: no vector
depends on a batch.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional

from retouch.errors import ConfigError
from retouch.families.image_encoder import TINY, ImageEncoder
from retouch.imaging.masks import MASK_THRESHOLD, Box, mask_box, widen
from retouch.rewards.scorers.weights import loading

MARGIN = 0.1
"""Margin of the box of a mask, as a share of its sides."""

STATISTICS = 14
"""Number of the statistics: 7 of all pixels, 7 of those in the mask."""

_CHANNELS = ((1 / 3, 1 / 3, 1 / 3), (1.0, 0.0, -1.0), (-0.5, 1.0, -0.5))
"""Lightness, red against blue, and green against both, from red, green and blue."""


@dataclass(frozen=True)
class _Encoder:
    """A frozen network; `output` names the one of its outputs that is the vector, `size` the side of its images."""

    network: Any
    output: str
    size: int
    mean: Tensor
    std: Tensor


class Extractor:
    """[D] features of an image: the encoder's vectors of the whole and of the box of its mask, then `STATISTICS` of all
    pixels and of those in the mask: mean and standard deviation of three channels, and skewness of the lightness.
    Without a mask both are the whole.

    The statistics are of colour, contrast and the share of ink, which the vector of an encoder that was trained on
    meanings has lost.

    Attributes:
        name: as it was given.
        revision: what identifies its weights.

    Args:
        name: hub id or folder of a SigLIP, CLIP or DINOv2; "tiny" is the one of the package.

    Raises:
        ConfigError: missing files or weights, or a model of another kind.
    """

    def __init__(self, name: str, device: str = "cpu", option: str = "extractor") -> None:
        self.name, self.device = name, torch.device(device)
        self._encoder = _encoder(name, option, self.device)
        digest = hashlib.sha256()
        for key, value in sorted(self._encoder.network.state_dict().items()):
            digest.update(key.encode() + value.detach().float().cpu().numpy().tobytes())
        self.revision = f"{name} {digest.hexdigest()[:12]}"

    def __call__(self, image: Tensor, mask: NDArray[np.uint8] | None) -> Tensor:
        """[D] fp32, with the gradient of an image [3, H, W] in [0, 1]; mask [H, W], 255 = repainted."""
        left, top, right, bottom = box_of(mask, (image.shape[2], image.shape[1]))
        image = image.to(self.device, torch.float32)
        inside = _is_mask(mask, (image.shape[2], image.shape[1]))
        chosen = image.flatten(1) if inside is None else image[:, torch.from_numpy(inside).to(self.device)]
        vectors = self._vector(image), self._vector(image[:, top:bottom, left:right])
        return torch.cat([*vectors, _statistics(image.flatten(1)), _statistics(chosen)])

    def _vector(self, image: Tensor) -> Tensor:
        height, width = image.shape[1:]
        side = max(height, width)
        left, top = (side - width) // 2, (side - height) // 2
        square = functional.pad(image, (left, side - width - left, top, side - height - top))[None]
        e, size = self._encoder, (self._encoder.size, self._encoder.size)
        seen = functional.interpolate(square, size, mode="bicubic", align_corners=False, antialias=True)
        output = e.network(pixel_values=(seen - e.mean.to(seen)) / e.std.to(seen))
        return getattr(output, e.output)[0].float()


def _statistics(pixels: Tensor) -> Tensor:
    """[7] of pixels [3, N]; the skewness of two colours depends on their shares alone."""
    channels = torch.tensor(_CHANNELS, dtype=torch.float32, device=pixels.device) @ pixels
    mean = channels.mean(1)
    apart = channels - mean[:, None]
    deviation = (apart.square().mean(1) + 1e-6).sqrt()  # with a gradient on one colour, too
    return torch.cat([mean, deviation, (apart[:1] / deviation[0]).pow(3).mean(1)])


def _is_mask(mask: NDArray[np.uint8] | None, size: tuple[int, int]) -> NDArray[np.bool_] | None:
    """[H, W] whether pixels of an image of (width, height) are masked; None without a mask of its size."""
    inside = None if mask is None or mask.shape != size[::-1] else mask >= MASK_THRESHOLD
    return inside if inside is not None and inside.any() else None


def box_of(mask: NDArray[np.uint8] | None, size: tuple[int, int]) -> Box:
    """The widened box of a mask in an image of (width, height); all of it without a mask of its size."""
    if mask is None or _is_mask(mask, size) is None:
        return 0, 0, *size
    return widen(mask_box(mask), MARGIN, *size)


def _encoder(name: str, option: str, device: torch.device) -> _Encoder:
    from transformers import AutoConfig, AutoModel

    place = str(TINY) if name == "tiny" else name
    with loading(option, place) as path:
        is_dino = AutoConfig.from_pretrained(path).model_type.startswith("dino")
    if not is_dino:
        encoder = ImageEncoder.load(path, where=option, resident=True)
        return _Encoder(encoder.model.to(device), encoder.output, encoder.size, *encoder.channels)
    from transformers.image_utils import IMAGENET_DEFAULT_MEAN, IMAGENET_DEFAULT_STD

    with loading(option, place) as path:
        read: Any = AutoModel.from_pretrained(path, dtype=torch.float32, output_loading_info=True)
    network, info = read
    if info["missing_keys"]:  # transformers initializes them at random without an error
        raise ConfigError(f"{option}: given {name!r}: {len(info['missing_keys'])} weights are missing; copy it anew")
    network = network.eval().requires_grad_(False).to(device)
    channels = torch.tensor([IMAGENET_DEFAULT_MEAN, IMAGENET_DEFAULT_STD], dtype=torch.float32)[..., None, None]
    return _Encoder(network, "pooler_output", 224, *channels)
