"""Write src/retouch/families/released_sizes.json: shapes of the trained network of every family at its released size,
weights of the networks beside it, FLOPs of a forward, and bytes of a decode with gradient.

python tools/released_sizes.py

Counted on the meta device from the configs in `FamilySpec.released`: no download, no weights. `retouch check --memory`
reads the file, because the imports alone take ten seconds.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from fractions import Fraction
from itertools import groupby
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from retouch.adapters.hosts import host_of
from retouch.doctor.line import BYTES
from retouch.doctor.memory import traced_decode, weights_in
from retouch.doctor.networks import released_encoder, released_parts
from retouch.families import FAMILIES
from retouch.families.base import FamilySpec
from retouch.families.quantized import sizes_of
from retouch.families.sizes import BIAS, FILE, Sizes, flop_monomials, monomials
from retouch.observe.flops import CountedNetwork

PLACE = Path(__file__).resolve().parents[1] / "src/retouch/families" / FILE

SIDES = ((32, 32), (32, 64), (64, 64), (32, 96))
"""Latent cells of the decodes that are traced; the last is a test of the terms of the others."""


def decode_terms(measured: Sequence[int]) -> list[int]:
    """The whole factors of `monomials` whose sum `measured` is, at SIDES.

    Raises:
        ValueError: it is no such sum.
    """
    small, wide, large, other = measured
    plane, left = divmod(large - 2 * wide + small, 32 * 32)
    side, more = divmod(wide - small - 32 * 32 * plane, 32)
    terms = [small - 64 * side - 32 * 32 * plane, side, plane]
    if left or more or other != sum(a * b for a, b in zip(terms, monomials(*SIDES[3]), strict=True)):
        raise ValueError(f"the bytes of a decode are no sum of its monomials: {measured}")
    return terms


def counted(spec: FamilySpec) -> dict[str, Any]:
    """What the file has of a family."""
    parts = released_parts(spec)
    network = parts.pop(spec.network_name)
    others = {name: weights_in(made) for name, made in parts.items()}
    more = {"decode": decode(spec, parts["vae"]), **flops(spec, network), **adapter(spec, network)}
    return as_stored(sizes_of(network), others, more)


def as_stored(network: Sizes, others: Mapping[str, int], more: Mapping[str, Any]) -> dict[str, Any]:
    """The entry of a family in the file; `weights` has [name with * for the number of its block, [[first, last] of
    these numbers], shape, whether `model.quantize` stores it in fewer bits] for all weights that differ in that
    number; a name that ends in `BIAS` is that of a weight and its bias."""
    alike: dict[tuple[str, tuple[int, ...], bool], list[int]] = defaultdict(list)
    for name, shape in network.shapes.items():
        parts = name.split(".")
        numbers = [i for i, part in enumerate(parts) if part.isdecimal()]
        inner = [i for i in numbers if parts[i - 1] == "transformer_blocks"]  # ten in a block of a U-Net
        at = next(iter(inner or numbers), None)
        folded = name if at is None else ".".join([*parts[:at], "*", *parts[at + 1 :]])
        alike[folded, shape, name in network.matrices] += [] if at is None else [int(parts[at])]
    rows = [[name, _runs(numbers), list(shape), whole] for (name, shape, whole), numbers in alike.items()]
    return {
        "weights": with_biases(rows),
        "buffers": network.buffers,
        "tables": network.tables,
        "others": dict(others),
        **more,
    }


def with_biases(rows: Sequence[list[Any]]) -> list[list[Any]]:
    """The rows, with one for a weight and its bias where both are in the same blocks."""
    biases = [row for row in rows if row[0].endswith(".bias")]
    found, paired = list[list[Any]](), list[list[Any]]()
    for name, runs, shape, whole in rows:
        bias = [f"{name.removesuffix('weight')}bias", runs, shape[:1], False]
        has_one = name.endswith(".weight") and bias in biases
        paired += [bias] if has_one else []
        found.append([name + BIAS if has_one else name, runs, shape, whole])
    return [row for row in found if row not in paired]


def _runs(numbers: Iterable[int]) -> list[list[int]]:
    """[first, last] of each run of consecutive numbers."""
    runs = (list(run) for _, run in groupby(enumerate(sorted(numbers)), lambda pair: pair[1] - pair[0]))
    return [[run[0][1], run[-1][1]] for run in runs]


def decode(spec: FamilySpec, vae: Any) -> dict[str, list[list[int]]]:
    """Bytes of a number -> `decode_terms` without and with checkpointing."""
    found = dict[str, list[list[int]]]()
    for dtype in ("bf16", "fp32"):
        sizes = [(height * spec.downsampling, width * spec.downsampling) for height, width in SIDES]
        both = zip(*(traced_decode(spec, vae, size, dtype) for size in sizes), strict=True)
        found[str(BYTES[dtype])] = [decode_terms(measured) for measured in both]
    return found


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
    given: dict[str, Any] = {
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


PADDED = {"ZImageTransformer2DModel": 32}
"""Class of a network -> number that it pads image and text to a multiple of."""


def flops(spec: FamilySpec, network: Any) -> dict[str, Any]:
    """The factors of `flop_monomials` in the FLOPs of a forward, and what the tokens are padded to.

    Raises:
        ValueError: the FLOPs are no such sum.
    """
    name, counter = spec.networks[spec.network_name], CountedNetwork(network)
    a, b = 1024, 32  # a U-Net halves its latents three times, and Z-Image pads nothing

    def counted(image: int, text: int) -> Fraction:
        return Fraction(counter.flops((), CALLS[name](network.config, image * a, text * b)))

    one, wide, long = counted(1, 1), counted(2, 1), counted(1, 2)
    both = (counted(2, 2) - wide - long + one) / (a * b)
    images, texts = (counted(3, 1) - 2 * wide + one) / (2 * a * a), (counted(1, 3) - 2 * long + one) / (2 * b * b)
    image, text = (wide - one) / a - 3 * a * images - b * both, (long - one) / b - 3 * b * texts - a * both
    rest = one - a * image - b * text - a * a * images - a * b * both - b * b * texts
    terms = (rest, image, text, images, both, texts)
    found = [int(term) if term.denominator == 1 else float(term) for term in terms]  # a U-Net has quarters
    if sum(x * y for x, y in zip(found, flop_monomials(3 * a, 3 * b), strict=True)) != counted(3, 3):
        raise ValueError(f"{name}: the FLOPs of a forward are no sum of its monomials: {terms}")
    return {"flops": found, "padded": PADDED.get(name, 1)}


def adapter(spec: FamilySpec, network: Any) -> dict[str, Any]:
    """What a style adapter takes from the network, and the weights of the default image encoder."""
    if spec.adapter is None:
        return {}
    host = host_of(network)
    inner = [[width, len(list(run))] for width, run in groupby(host.inner())]
    encoder, _ = released_encoder(spec.adapter)
    return {"adapter": {"token_width": host.token_width(), "inner": inner, "image_encoder": weights_in(encoder)}}


def text(families: dict[str, dict[str, Any]]) -> str:
    """The file, a line for each group of weights."""
    made: list[str] = []
    for family, found in families.items():
        rows = ",\n".join(f"   {json.dumps(row)}" for row in found["weights"])
        rest = json.dumps({name: value for name, value in found.items() if name != "weights"})
        made.append(f' "{family}": {{\n  "weights": [\n{rows}\n  ],\n  {rest[1:]}')
    return "{\n" + ",\n".join(made) + "\n}\n"


def main() -> None:
    PLACE.write_text(text({name: counted(section.spec) for name, section in FAMILIES.available().items()}))
    print(PLACE)


if __name__ == "__main__":
    main()
