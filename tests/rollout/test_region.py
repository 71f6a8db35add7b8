"""Which latent cells a loss counts, and for how much."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from retouch.algorithms.dpo.config import DpoConfig
from retouch.algorithms.grpo.config import GrpoConfig
from retouch.algorithms.nft.config import NftConfig
from retouch.algorithms.sft.config import SftConfig
from retouch.rollout.sampler import latent_region, objective_region
from retouch.types import Condition


def pixel_mask(*masked: tuple[int, int], size: tuple[int, int] = (20, 24)) -> Tensor:
    """1 at the given (row, column)."""
    mask = torch.zeros(1, 1, *size)
    for row, column in masked:
        mask[0, 0, row, column] = 1
    return mask


def grid(region: Tensor) -> list[list[float]]:
    return region[0, 0].tolist()


def test_without_dilation_a_cell_with_any_masked_pixel_counts() -> None:
    assert grid(latent_region(pixel_mask((0, 0), (7, 11)), 4)) == [
        [1, 0, 0, 0, 0, 0],
        [0, 0, 1, 0, 0, 0],
        [0, 0, 0, 0, 0, 0],
        [0, 0, 0, 0, 0, 0],
        [0, 0, 0, 0, 0, 0],
    ]


def test_a_dilation_of_one_adds_the_eight_neighbours() -> None:
    assert grid(latent_region(pixel_mask((9, 9)), 4, dilation=1)) == [
        [0, 0, 0, 0, 0, 0],
        [0, 1, 1, 1, 0, 0],
        [0, 1, 1, 1, 0, 0],
        [0, 1, 1, 1, 0, 0],
        [0, 0, 0, 0, 0, 0],
    ]


def test_what_the_dilation_adds_has_the_weight_of_the_seam() -> None:
    """Overlaps count once, the picture's edge cuts off, and cells of the mask keep 1."""
    region = latent_region(pixel_mask((1, 1), (9, 9)), 4, dilation=1, seam_weight=0.25)
    assert grid(region) == [
        [1.00, 0.25, 0, 0, 0, 0],
        [0.25, 0.25, 0.25, 0.25, 0, 0],
        [0, 0.25, 1.00, 0.25, 0, 0],
        [0, 0.25, 0.25, 0.25, 0, 0],
        [0, 0, 0, 0, 0, 0],
    ]
    heavy = grid(latent_region(pixel_mask((0, 0)), 4, 2, 3.0))
    assert heavy == [[1, 3, 3, 0, 0, 0], [3, 3, 3, 0, 0, 0], [3, 3, 3, 0, 0, 0], [0] * 6, [0] * 6]


def test_rows_have_regions_of_their_own() -> None:
    masks = torch.cat([pixel_mask((0, 0)), pixel_mask((19, 23))])
    region = latent_region(masks, 4, 1, 0.5)
    assert region.shape == (2, 1, 5, 6)
    assert region[:, 0, 0, 0].tolist() == [1, 0] and region[:, 0, 4, 5].tolist() == [0, 1]
    assert region[:, 0, 3, 4].tolist() == [0, 0.5]


# --- as the run file wants it ---


def condition(mask: Tensor | None) -> Condition:
    return Condition({"c": torch.zeros(1)}, mask, (20, 24))


@pytest.mark.parametrize("algorithm", [SftConfig, GrpoConfig, DpoConfig, NftConfig])
def test_everywhere_is_no_region_at_all(algorithm: Any) -> None:
    assert objective_region(algorithm(), condition(pixel_mask((9, 9))), 4) is None
    assert objective_region(algorithm(region="all"), condition(pixel_mask((9, 9))), 4) is None


@pytest.mark.parametrize("algorithm", [SftConfig, GrpoConfig, DpoConfig, NftConfig])
def test_the_mask_with_its_dilation_and_seam(algorithm: Any) -> None:
    mask = pixel_mask((9, 9))
    plain = objective_region(algorithm(region="mask"), condition(mask), 4)
    assert plain is not None and torch.equal(plain, latent_region(mask, 4))
    wide = objective_region(algorithm(region="mask", region_dilation=2, seam_weight=0.5), condition(mask), 4)
    assert wide is not None and torch.equal(wide, latent_region(mask, 4, 2, 0.5))
    assert (float(wide.sum()), float(wide.max())) == (1 + 0.5 * 24, 1)


def test_a_picture_without_a_mask_counts_everywhere() -> None:
    assert objective_region(GrpoConfig(region="mask"), condition(None), 4) is None
