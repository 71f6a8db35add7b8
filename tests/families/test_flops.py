"""The FLOPs and sizes of `released_sizes.json` are what is counted on the released networks, on the meta device."""

from __future__ import annotations

from functools import cache
from types import SimpleNamespace
from typing import Any, cast

import pytest
from tools.released_sizes import CALLS

from retouch.doctor.memory import weights_in
from retouch.families import FAMILIES
from retouch.families.base import FamilySpec
from retouch.families.loading import family_class
from retouch.families.sizes import Released, released_sizes
from retouch.observe.flops import CountedNetwork
from tests.families.facts import facts_of
from tests.selection import rows
from tests.tiny_models import released_network

FAMILY = pytest.mark.parametrize("family", list(FAMILIES))


def kind(spec: FamilySpec) -> str:
    return spec.networks[spec.network_name]


network_of = cache(released_network)


def stored(family: str) -> Released:
    found = released_sizes(FAMILIES[family].spec)
    assert found is not None
    return found


@cache
def counter_of(family: str) -> CountedNetwork:
    return CountedNetwork(network_of(family))


SIZES = [(1024, 96), (2304, 77)]
DEAR = ("sdxl_inpaint",)
"""Families that take seconds: Stable Diffusion has the form of SDXL."""


@pytest.mark.parametrize(
    ("image", "text", "family"),
    rows(
        [(*size, name) for size in SIZES for name in FAMILIES],
        [(*SIZES[number % 2], name) for number, name in enumerate(FAMILIES) if name not in DEAR],
    ),
)
def test_flops_are_those_counted(image: int, text: int, family: str) -> None:
    spec = FAMILIES[family].spec
    counted = counter_of(family).flops((), CALLS[kind(spec)](network_of(family).config, image, text))
    assert stored(family).flops(image, text) == counted


@FAMILY
def test_shapes_are_those_of_the_network(family: str) -> None:
    """`tests/doctor/test_counts.py` compares the LoRA on shapes with that of a network."""
    shapes = {name: tuple(weight.shape) for name, weight in network_of(family).named_parameters()}
    assert stored(family).network.shapes == shapes and stored(family).network.weights == weights_in(network_of(family))


@FAMILY
def test_the_released_network_has_the_published_size_and_fits_its_autoencoder(family: str) -> None:
    network, model = network_of(family), cast("Any", SimpleNamespace(spec=FAMILIES[family].spec))  # all that it reads
    assert sum(p.numel() for p in network.parameters()) == pytest.approx(facts_of(family).parameters, rel=0.01)
    assert network.config.in_channels == family_class(family).input_channels(model)


def test_every_network_can_be_counted() -> None:
    assert {kind(section.spec) for section in FAMILIES.available().values()} == set(CALLS)
