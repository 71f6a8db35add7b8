"""Examples as the tensors that every inpainting family starts from."""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from retouch.families.embeddings import (
    StoredVectors,
    open_cache,
)
from retouch.families.facts import ADAPTERS
from retouch.families.loading import DTYPES
from retouch.image_encoder import ImageEncoder
from retouch.imaging import MASK_THRESHOLD, stack_above
from retouch.types import Example, ModelSpec

if TYPE_CHECKING:
    from retouch.families.sections import Model


KEPT = 512
"""Pictures whose latents are kept; 256 KiB each for FLUX at 512 x 512."""


def inpainting_inputs(examples: Sequence[Example], spec: ModelSpec, device: torch.device) -> tuple[Tensor, Tensor]:
    """Sources [B, 3, H, W] in [-1, 1] and masks [B, 1, H, W] in {0, 1}, 1 = repaint, of examples of one size; with the
    strip of an in-context reference above them, where examples have one.

    Raises:
        ValueError: an example without source or mask, or a size that the family cannot take.
    """
    images = torch.stack([_image_tensor(e.source, e, spec.family) for e in examples]).to(device)
    masks = torch.stack([_mask_tensor(e.mask, e, spec.family) for e in examples]).to(device)
    height, width = images.shape[2:]
    if height % spec.size_multiple or width % spec.size_multiple:
        raise ValueError(f"images are {height} x {width}; {spec.family} needs multiples of {spec.size_multiple}")
    return images, masks


def optional_masks(examples: Sequence[Example], spec: ModelSpec, device: torch.device) -> Tensor | None:
    """Masks [B, 1, H, W] in {0, 1} of a family that needs none; None where no example has one.

    Raises:
        ValueError: some examples with a mask and some without.
    """
    if all(e.mask is None for e in examples):
        return None
    return torch.stack([_mask_tensor(e.mask, e, spec.family) for e in examples]).to(device)


def reference_encoder(config: Model) -> ImageEncoder | None:
    """The encoder of references that `model.train` names; None where it trains no style adapter."""
    train = config.train
    if train.kind != "ip_adapter":
        return None
    stored = open_cache(config)
    if stored is not None:
        return StoredVectors(stored, stored.vector_width())
    return ImageEncoder.load(train.image_encoder or ADAPTERS[config.family].image_encoder, DTYPES[config.dtype])


def reference_inputs(
    examples: Sequence[Example], encoder: ImageEncoder | None, device: torch.device
) -> dict[str, Tensor]:
    """Vectors of the references [B, D] as `reference`, and [B] `reference_keep`: 0 where there is none. Nothing without
    an encoder."""
    if encoder is None:
        return {}
    there = [e.reference for e in examples if e.reference is not None]
    vectors = iter(encoder(there) if there else [])
    rows = [torch.zeros(encoder.width) if e.reference is None else next(vectors) for e in examples]
    keep = [float(e.reference is not None) for e in examples]
    return {"reference": torch.stack(rows).to(device), "reference_keep": torch.tensor(keep, device=device)}


class KeptLatents:
    """Latents of pictures that a condition holds, each encoded once, alone, and kept on the CPU: they depend neither on
    the prompt nor on the guidance scale, under which a condition is made anew."""

    def __init__(self, encode: Callable[[Tensor], Tensor]) -> None:
        """`encode`: [B, 3, H, W] in [-1, 1] -> latents [B, C, h, w]."""
        self._encode = encode
        self._kept: OrderedDict[str, Tensor] = OrderedDict()

    def __call__(self, images: Tensor) -> Tensor:
        """[B, 3, H, W] -> [B, C, h, w] on the device of the images."""
        rows: list[Tensor] = []
        for image in images:
            pixels = image.cpu().contiguous()
            key = hashlib.sha256(str(tuple(pixels.shape)).encode() + pixels.numpy().tobytes()).hexdigest()
            if key not in self._kept:
                self._kept[key] = self._encode(image[None])[0].cpu()
            self._kept.move_to_end(key)
            rows.append(self._kept[key])
            if len(self._kept) > KEPT:
                self._kept.popitem(last=False)
        return torch.stack(rows).to(images.device)


def _image_tensor(image: Any, example: Example, family: str) -> Tensor:
    if image is None:
        raise ValueError(f"example {example.id} has no source image; {family} repaints one")
    pixels = np.asarray(stack_above(example.strip, image.convert("RGB")), np.float32)
    return torch.from_numpy(pixels).permute(2, 0, 1) / 127.5 - 1


def _mask_tensor(mask: Any, example: Example, family: str) -> Tensor:
    if mask is None:
        raise ValueError(f"example {example.id} has no mask; {family} repaints inside one")
    return torch.from_numpy((np.asarray(stack_above(example.strip, mask)) >= MASK_THRESHOLD).astype(np.float32))[None]
