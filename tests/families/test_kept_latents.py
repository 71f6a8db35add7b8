"""Pictures of a condition are encoded once, whatever the prompt and the guidance scale."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from retouch.families import FAMILIES, vae
from retouch.families.loading import family_class as class_of
from retouch.families.tiny import tiny_pipeline
from retouch.lru import LruCache

from .conftest import random_example


@pytest.mark.parametrize("family", [f for f in FAMILIES if f != "qwen_image_edit"])  # whose text needs the picture, too
def test_a_picture_is_encoded_once_under_every_guidance_and_prompt(
    family: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = class_of(family).from_pipeline(tiny_pipeline(family, seed=1))
    encoded: list[Tensor] = []
    real = made.vae.encode

    def watch(pixels: Tensor, *rest: Any, **options: Any) -> Any:
        encoded.append(pixels)
        return real(pixels, *rest, **options)

    monkeypatch.setattr(made.vae, "encode", watch)
    first, second = random_example(1, 32, 64), random_example(2, 32, 64)
    blends = "mask" not in made.spec.needs  # its whole source, whatever the mask
    name = "source_latents" if blends else "masked_latents"
    if made.config.family == "qwen_image_21":
        name = "picture_0"  # of RGBA
    seen = [made.encode([first], scale).tensors[name] for scale in (4.0, 1.0)]
    seen.append(made.encode([replace(first, prompt="")], 1.0).tensors[name])
    assert len(encoded) == 1
    assert all(torch.equal(latents, seen[0]) for latents in seen)
    [direct] = made.encode_images(encoded[0].squeeze(2)[:, :3] if encoded[0].ndim == 5 else encoded[0])
    assert torch.equal(seen[0][0], direct)
    both = made.encode([second, first], 4.0).tensors[name]  # alone, whatever it stands beside
    assert len(encoded) == 3  # of which one was `direct`
    assert torch.equal(both[1], direct) and not torch.equal(both[0], direct)
    other = replace(first, mask=second.mask, source=second.source)
    made.encode([other], 1.0)
    assert len(encoded) == 3
    made.encode([replace(first, source=second.source, mask=first.mask.transpose(0))], 1.0)  # type: ignore[union-attr]
    assert len(encoded) == (3 if blends else 4)


class Doubling(vae.Autoencoder):
    """Latents that are twice the image."""

    def __init__(self) -> None:
        super().__init__(nn.Identity())

    def encode(self, images: Tensor) -> Tensor:
        return images * 2


def test_the_ones_used_longest_ago_are_dropped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(vae, "KEPT", 2)
    calls: list[float] = []
    model: Any = Doubling()
    kept = model.encode_once
    encode = model.encode
    monkeypatch.setattr(model, "encode", lambda images: calls.append(float(images.mean())) or encode(images))
    a, b, c = (torch.full((1, 3, 2, 2), value) for value in (0.25, 0.5, 0.75))
    for images in (a, b, a, c, a, b):
        assert torch.equal(kept(images), images * 2)
    assert calls == [0.25, 0.5, 0.75, 0.5]
    assert torch.equal(kept(torch.cat([b, a])), torch.cat([b, a]) * 2)


def test_an_error_leaves_no_more_than_the_capacity() -> None:
    def read(position: int) -> int:
        if position == 5:
            raise OSError("no such file")
        return position

    cache = LruCache[int, int](2)
    with pytest.raises(OSError, match="no such file"):
        cache.get_all(range(6), lambda keys: map(read, keys))
    assert len(cache) == 2 and 3 in cache and 4 in cache
