"""The counts of released networks that come with the package are those of the networks."""

from __future__ import annotations

import pytest
from tools import released_sizes as tool

from retouch.families import FAMILIES
from retouch.families.sizes import Sizes, released_sizes
from tests.selection import default

ALL = sorted(FAMILIES.available())


@pytest.mark.parametrize("family", default(ALL, {"flux_fill", "sd_inpaint"}.__contains__))
def test_the_file_has_the_sizes_of_the_networks(family: str) -> None:
    """Run `python tools/released_sizes.py` where it has not."""
    spec = FAMILIES[family].spec
    assert tool.counted(spec) == tool.as_stored(*released_sizes(spec))


@pytest.mark.parametrize("family", ALL)
def test_every_network_is_counted(family: str) -> None:
    spec = FAMILIES[family].spec
    network, others, more = released_sizes(spec)
    assert ("adapter" in more) == (spec.adapter is not None) and more["decode"].keys() == {"2", "4"}
    assert {spec.network_name, *others} == spec.networks.keys() == spec.released.keys()
    assert network.matrices <= network.shapes.keys() and network.weights > 8e8


def test_names_that_differ_in_the_number_of_a_block_are_one_line() -> None:
    """By hand: blocks 0, 1 and 3 alike, 2 of another shape; of a U-Net the inner number."""
    shapes: dict[str, tuple[int, ...]] = {
        "x.weight": (7,),
        "blocks.0.a.0.weight": (2, 3),
        "blocks.1.a.0.weight": (2, 3),
        "blocks.2.a.0.weight": (4, 3),
        "blocks.3.a.0.weight": (2, 3),
        "blocks.0.a.0.bias": (2,),
        "blocks.1.a.0.bias": (2,),
        "blocks.2.a.0.bias": (4,),
        "blocks.3.a.0.bias": (2,),
        "down.1.transformer_blocks.0.b": (5,),
        "down.1.transformer_blocks.1.b": (5,),
    }
    sizes = Sizes(shapes, 11, frozenset({"blocks.2.a.0.weight"}), 17)
    stored = tool.as_stored(sizes, {"vae": 13}, {"decode": {}})
    assert stored == {
        "weights": [
            ["x.weight", [], [7], False],
            ["blocks.*.a.0.weight+bias", [[0, 1], [3, 3]], [2, 3], False],
            ["blocks.*.a.0.weight+bias", [[2, 2]], [4, 3], True],
            ["down.1.transformer_blocks.*.b", [[0, 1]], [5], False],
        ],
        "buffers": 11,
        "tables": 17,
        "others": {"vae": 13},
        "decode": {},
    }
    assert sizes.weights == 7 + 18 + 12 + 10 + 10
    assert sizes.quantized_bytes("int8", 2) == 12 + 4 * 4 + 2 * 45
