"""Images and examples as tensors."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from PIL import ImageOps
from PIL.Image import Resampling
from torch import Tensor

from retouch.families.embeddings import StoredVectors, open_cache
from retouch.families.image_encoder import ImageEncoder
from retouch.families.loading import DTYPES
from retouch.imaging.fitting import stack_above
from retouch.imaging.masks import MASK_THRESHOLD
from retouch.types import Example

if TYPE_CHECKING:
    from PIL.Image import Image

    from retouch.families.base import FamilySpec, Model


def image_pixels(image: Image, device: torch.device | str = "cpu") -> Tensor:
    """An RGB image -> [3, H, W] fp32 in [-1, 1]."""
    return torch.from_numpy(np.asarray(image, np.float32)).to(device).permute(2, 0, 1) / 127.5 - 1


def inpainting_inputs(examples: Sequence[Example], spec: FamilySpec, device: torch.device) -> tuple[Tensor, Tensor]:
    """Sources [B, 3, H, W] in [-1, 1] and masks [B, 1, H, W] in {0, 1}, 1 = repaint, of examples of one size; with the
    strip of an in-context reference above them, if examples have one.

    Raises:
        ValueError: an example without source or mask, or a size that the family cannot take.
    """
    images = source_pixels(examples, spec, device)
    masks = torch.stack([_mask(e, spec.family) for e in examples]).to(device)
    height, width = images.shape[2:]
    if height % spec.size_multiple or width % spec.size_multiple:
        raise ValueError(f"images are {height} x {width}; {spec.family} needs multiples of {spec.size_multiple}")
    return images, masks


def source_pixels(examples: Sequence[Example], spec: FamilySpec, device: torch.device) -> Tensor:
    """Sources [B, 3, H, W] in [-1, 1] of examples of one size, below the strip of an in-context reference, if any.

    Raises:
        ValueError: an example without a source.
    """
    rows: list[Tensor] = []
    for example in examples:
        if example.source is None:
            verb = "changes" if spec.edits else "repaints"
            raise ValueError(f"example {example.id} has no source image; {spec.family} {verb} one")
        rows.append(image_pixels(stack_above(example.strip, example.source.convert("RGB"))))
    return torch.stack(rows).to(device)


def optional_masks(examples: Sequence[Example], spec: FamilySpec, device: torch.device) -> Tensor | None:
    """Masks [B, 1, H, W] in {0, 1} of a family that needs none; None if no example has one.

    Raises:
        ValueError: some examples with a mask and some without.
    """
    if all(e.mask is None for e in examples):
        return None
    return torch.stack([_mask(e, spec.family) for e in examples]).to(device)


def reference_encoder(config: Model) -> ImageEncoder | None:
    """The encoder of references that `model.train` names; None without a style adapter."""
    name = config.reference_encoder
    if name is None:
        return None
    stored = open_cache(config)
    if stored is not None:
        return StoredVectors(stored, stored.vector_width())
    return ImageEncoder.load(name, DTYPES[config.dtype], variant=config.weights_variant)


def reference_inputs(
    examples: Sequence[Example], encoder: ImageEncoder | None, device: torch.device
) -> dict[str, Tensor]:
    """Vectors of the references [B, D] as `reference`, and [B] `reference_keep`: 0 for a missing reference. Empty
    without an encoder."""
    if encoder is None:
        return {}
    there = [e.reference for e in examples if e.reference is not None]
    vectors = iter(encoder(there) if there else [])
    rows = [torch.zeros(encoder.width, dtype=torch.float32) if e.reference is None else next(vectors) for e in examples]
    keep = [float(e.reference is not None) for e in examples]
    return {
        "reference": torch.stack(rows).to(device),
        "reference_keep": torch.tensor(keep, dtype=torch.float32, device=device),
    }


def _mask(example: Example, family: str) -> Tensor:
    if example.mask is None:
        raise ValueError(f"example {example.id} has no mask; {family} repaints inside one")
    mask: Any = stack_above(example.strip, example.mask)
    return torch.from_numpy((np.asarray(mask) >= MASK_THRESHOLD).astype(np.float32))[None]


def reference_pixels(example: Example, size: tuple[int, int]) -> Tensor:
    """The reference of an example [3, H, W], scaled and cropped to (height, width)."""
    if example.reference is None:
        raise ValueError(
            f"example {example.id} has no reference image, but model.reference_images is true; give it one, or set "
            "model.reference_images=false"
        )
    height, width = size
    return image_pixels(ImageOps.fit(example.reference.convert("RGB"), (width, height), Resampling.LANCZOS))
