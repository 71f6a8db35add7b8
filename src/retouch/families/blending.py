"""Inpainting with a network that takes no mask: blending, written as a velocity.

The inpainting pipelines of diffusers replace the state outside the mask, after every step, by the noised source. At
strength 1 and with the noise of the start that is exactly the step of the velocity (x - x0) / sigma: the state stays on
the straight line from the noise to the source. So the blend is a part of `predict`, and solvers need not know of it.

Legend: B samples, C latent channels, h w latent sides.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from retouch.families.inputs import inpainting_inputs, optional_masks, source_pixels
from retouch.types import Example

if TYPE_CHECKING:
    from retouch.families.diffusion import FamilyModel


def blending_inputs(
    model: FamilyModel, examples: Sequence[Example]
) -> tuple[dict[str, Tensor], Tensor | None, tuple[int, int]]:
    """Condition tensors, mask [B, 1, H, W] and (height, width) of examples of one size: `source_latents` [B, C, h, w]
    and `mask_cells` [B, 1, h, w] in {0, 1} where they have a source and a mask; without a source nothing.

    Raises:
        ValueError: some examples with a source and some without, neither a source nor one size, or a size that the
            network cannot take.
    """
    if any(e.source is not None for e in examples):
        images, mask = inpainting_inputs(examples, model.spec, model.device)
        model.require_size((images.shape[2], images.shape[3]))
        cells = mask_cells(mask, model.spec.downsampling)
        tensors = {"source_latents": model.autoencoder.encode_once(images), "mask_cells": cells}
        return tensors, mask, (images.shape[2], images.shape[3])
    sizes = {e.size for e in examples}
    size = examples[0].size
    if size is None or len(sizes) > 1:
        raise ValueError(f"examples without a source need one size; given {sorted(map(str, sizes))}")
    model.require_size(size)
    return {}, None, size


def edited_inputs(
    model: FamilyModel, examples: Sequence[Example], cells: Callable[[Tensor, int], Tensor] | None = None
) -> tuple[dict[str, Tensor], Tensor | None, tuple[int, int]]:
    """As `blending_inputs`, of examples that all have a source: without masks there are no `mask_cells`.

    Args:
        cells: makes these of a mask and the downsampling; None is `mask_cells`.

    Raises:
        ValueError: an example without a source, some with a mask and some without, or a size that the network cannot
            take.
    """
    pixels = source_pixels(examples, model.spec, model.device)
    size = (pixels.shape[2], pixels.shape[3])
    model.require_size(size)
    tensors = {"source_latents": model.autoencoder.encode_once(pixels)}
    mask = optional_masks(examples, model.spec, model.device)
    if mask is not None:
        tensors["mask_cells"] = (cells or mask_cells)(mask, model.spec.downsampling)
    return tensors, mask, size


def mask_cells(mask: Tensor, factor: int) -> Tensor:
    """A mask [B, 1, H, W] at the cells of the latents [B, 1, h, w], by the nearest pixel."""
    return nn.functional.interpolate(mask, size=(mask.shape[2] // factor, mask.shape[3] // factor))


def blended(velocity: Tensor, x: Tensor, t: Tensor, tensors: Mapping[str, Tensor]) -> Tensor:
    """The velocity [B, C, h, w] inside the mask, and outside it the one that leads from `x` at sigma `t` [B] to the
    source; unchanged where `tensors` of a condition have no mask."""
    if "mask_cells" not in tensors:
        return velocity
    to_source = (x - tensors["source_latents"]) / t.view(-1, 1, 1, 1)
    return torch.where(tensors["mask_cells"] > 0, velocity, to_source)
