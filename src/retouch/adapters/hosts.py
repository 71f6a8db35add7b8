"""Networks that an adapter can be put into: where its processors go, and what its weights are called there.

One class for each kind of network. `encoder_hid_proj` is where diffusers looks for the projection of a picture inside
the network's own forward, which is where a data-parallel wrapper wants every trained weight to be used.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

from torch import Tensor, nn

from retouch.adapters.formats import AdapterShape, Head
from retouch.adapters.processors import FluxIpProcessor, IpProcessor
from retouch.adapters.projections import ImageProjection
from retouch.config.errors import ConfigError


class Host(Protocol):
    """A network of one kind.

    Attributes:
        heads: projections that its adapters have.
    """

    network: Any
    heads: tuple[Head, ...]

    def inner(self) -> tuple[int, ...]:
        """For each block, in the order of the files, the width of its keys and values."""
        ...

    def token_width(self) -> int:
        """Width of the tokens: that of the text."""
        ...

    def place(self, shape: AdapterShape) -> None:
        """Put in new modules of a shape that fits; on the network's device, a start that changes nothing."""
        ...

    def remove(self) -> None:
        """Put back the processors and attributes of before."""
        ...

    def set_scales(self, scales: Sequence[float]) -> None:
        """One factor for each block."""
        ...

    def names(self, shape: AdapterShape) -> dict[str, str]:
        """Key of the file -> parameter name in the network."""
        ...

    def call_options(self, vectors: Tensor) -> dict[str, Any]:
        """Arguments of the pipeline's call for vectors [B, D] of references."""
        ...


class BlockHost:
    """A transformer whose attentions all get a processor of ours, in the order of `attn_processors`."""

    processor: type[IpProcessor]
    heads: tuple[Head, ...] = ("mlp", "mlp+query_former")

    def __init__(self, network: Any) -> None:
        self.network = network

    def _blocks(self) -> list[str]:
        return [name.removesuffix(".processor") for name in self.network.attn_processors]

    def _attention(self, block: str) -> Any:
        return self.network.get_submodule(block)

    def inner(self) -> tuple[int, ...]:
        return tuple(self._attention(block).to_k.out_features for block in self._blocks())

    def token_width(self) -> int:
        return self.network.config.joint_attention_dim

    def place(self, shape: AdapterShape) -> None:
        former = shape.head == "mlp+query_former"
        projection = ImageProjection(shape.width, shape.tokens, shape.token_width, query_former=former)
        self.network.encoder_hid_proj = projection.to(self.network.device)
        for block, inner in zip(self._blocks(), shape.inner, strict=True):
            attention = self._attention(block)
            made = self.processor(attention.processor, shape.token_width, inner)
            attention.set_processor(made.to(self.network.device))

    def remove(self) -> None:
        del self.network.encoder_hid_proj
        for block in self._blocks():
            attention = self._attention(block)
            attention.set_processor(attention.processor.stock)

    def set_scales(self, scales: Sequence[float]) -> None:
        for block, scale in zip(self._blocks(), scales, strict=True):
            self._attention(block).processor.scale = scale

    def names(self, shape: AdapterShape) -> dict[str, str]:
        sections = {"image_proj": "encoder_hid_proj.mlp", "image_proj_qformer": "encoder_hid_proj.qformer"}
        blocks = dict(zip(shape.numbers(), self._blocks(), strict=True))
        found: dict[str, str] = {}
        for key in shape.tensors():
            section, _, rest = key.partition(".")
            if section == "ip_adapter":
                number, _, rest = rest.partition(".")
                found[key] = f"{blocks[int(number)]}.processor.{rest}"
            else:
                found[key] = f"{sections[section]}.{rest}"
        return found

    def call_options(self, vectors: Tensor) -> dict[str, Any]:
        return {"joint_attention_kwargs": {"ip_adapter_image_embeds": vectors}}


class FluxHost(BlockHost):
    """FLUX: the double blocks, then the single ones."""

    processor = FluxIpProcessor


HOSTS: dict[str, Callable[[Any], Host]] = {"FluxTransformer2DModel": FluxHost}
"""Class of a network -> its host."""


def host_of(network: Any) -> Host:
    """The host of a network.

    Raises:
        ConfigError: a network that no adapter is made for, or that has one already.
    """
    name = type(network).__name__
    if name not in HOSTS:
        raise ConfigError(f"a style adapter cannot be put into a {name}; it can into: {', '.join(HOSTS)}")
    if isinstance(getattr(network, "encoder_hid_proj", None), nn.Module):
        raise ConfigError(f"the {name} has an adapter already; detach that first")
    return HOSTS[name](network)
