"""The closed forms of `retouch.families.flops` are what is counted on the released networks, on the meta device."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from torch import Tensor

from retouch.config import parse_run
from retouch.doctor.memory import lora_weights, weights_in
from retouch.families import FAMILIES, flops
from retouch.families.base import FamilySpec
from retouch.families.loading import family_class
from retouch.observe.flops import CountedNetwork
from tests.families.facts import facts_of
from tests.selection import rows
from tests.tiny_models import released_network

FAMILY = pytest.mark.parametrize("family", list(FAMILIES))


def empty(*shape: int) -> Tensor:
    return torch.empty(*shape, device="meta")


def transformer(c: Any, image: int, text: int) -> dict[str, Any]:
    """Arguments of FLUX.1, Qwen-Image and their kin, of one sample."""
    return {
        "hidden_states": empty(1, image, c["in_channels"]),
        "encoder_hidden_states": empty(1, text, c["joint_attention_dim"]),
        "timestep": empty(1),
    }


def flux(c: Any, image: int, text: int) -> dict[str, Any]:
    places = {"txt_ids": empty(text, 3), "img_ids": empty(image, 3)}
    pooled = empty(1, c["pooled_projection_dim"])
    return {**transformer(c, image, text), **places, "guidance": empty(1), "pooled_projections": pooled}


def flux2(c: Any, image: int, text: int) -> dict[str, Any]:
    places = {"txt_ids": empty(text, 4), "img_ids": empty(image, 4)}
    return {**transformer(c, image, text), **places, "guidance": empty(1) if c["guidance_embeds"] else None}


def shape_of(image: int) -> tuple[int, int, int]:
    return (1, 16, image // 16)


def qwen_image(c: Any, image: int, text: int) -> dict[str, Any]:
    return {**transformer(c, image, text), "img_shapes": [[shape_of(image)]], "encoder_hidden_states_mask": None}


def qwen_image_21(c: Any, image: int, text: int) -> dict[str, Any]:
    return {
        "hidden_states": empty(1, image, c["in_channels"]),
        "encoder_hidden_states": empty(1, text, c["context_in_dim"]),
        "timestep": empty(1),
        "img_shapes": [[shape_of(image)]],
        "img_mask": torch.tensor([False] * text + [True] * (image // 4))[None],
    }


def sd3(c: Any, image: int, text: int) -> dict[str, Any]:
    return {
        "hidden_states": empty(1, c["in_channels"], 2 * 16, 2 * image // 16),
        "encoder_hidden_states": empty(1, text, c["joint_attention_dim"]),
        "timestep": empty(1),
        "pooled_projections": empty(1, c["pooled_projection_dim"]),
    }


def z_image(c: Any, image: int, text: int) -> dict[str, Any]:
    latents = [empty(c["in_channels"], 1, 2 * 16, 2 * image // 16)]
    return {"x": latents, "t": empty(1), "cap_feats": [empty(text, c["cap_feat_dim"])]}


def unet(c: Any, image: int, text: int) -> dict[str, Any]:
    given = {
        "sample": empty(1, c["in_channels"], 16, image // 16),
        "timestep": empty(1),
        "encoder_hidden_states": empty(1, text, c["cross_attention_dim"]),
    }
    if c["addition_embed_type"]:
        given["added_cond_kwargs"] = {"text_embeds": empty(1, 1280), "time_ids": empty(1, 6)}
    return given


CALLS: dict[str, Callable[[Any, int, int], dict[str, Any]]] = {
    "FluxTransformer2DModel": flux,
    "Flux2Transformer2DModel": flux2,
    "QwenImageTransformer2DModel": qwen_image,
    "QwenImage21Transformer2DModel": qwen_image_21,
    "SD3Transformer2DModel": sd3,
    "ZImageTransformer2DModel": z_image,
    "UNet2DConditionModel": unet,
}


def kind(spec: FamilySpec) -> str:
    return spec.networks[spec.network_name]


network_of = cache(released_network)


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
    form = flops.flops(kind(spec), spec.released[spec.network_name], image, text)
    assert form == pytest.approx(counted, rel=1e-9)


@FAMILY
def test_weights_are_those_of_the_network(family: str) -> None:
    """Those of its matrices, and of the LoRA on it exactly."""
    spec, network = FAMILIES[family].spec, network_of(family)
    config = spec.released[spec.network_name]
    assert flops.weights(kind(spec), config) == pytest.approx(weights_in(network), rel=0.002)
    model = {"family": family, "path": spec.hub_ids[0], "train": {"kind": "lora", "rank": 5}}
    data = {"format": "manifest", "path": "somewhere"}
    run = parse_run({"name": "a", "model": model, "data": data, "algorithm": {"name": "sft"}})
    shapes = {name: tuple(weight.shape) for name, weight in network.named_parameters()}
    assert flops.lora_weights(kind(spec), config, spec.lora_targets, 5) == lora_weights(run, shapes)


@FAMILY
def test_the_released_network_has_the_published_size_and_fits_its_autoencoder(family: str) -> None:
    network, model = network_of(family), cast("Any", SimpleNamespace(spec=FAMILIES[family].spec))  # all that it reads
    assert sum(p.numel() for p in network.parameters()) == pytest.approx(facts_of(family).parameters, rel=0.01)
    assert network.config.in_channels == family_class(family).input_channels(model)


def test_every_network_has_a_form() -> None:
    assert {kind(section.spec) for section in FAMILIES.available().values()} == set(flops.FORMS) == set(CALLS)
