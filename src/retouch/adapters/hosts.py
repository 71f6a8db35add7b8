"""Networks that an adapter can be placed into: where its modules go, and the parameter names of its weights.

A family with a style adapter has a host of its own (`AdapterFacts.host`). `encoder_hid_proj` is where diffusers looks
for the projection of a reference inside the network's own forward, and where a data-parallel wrapper requires every
trained weight to be used.

Transformers get an attention processor with a second attention, from image tokens to the tokens of the reference
(IP-Adapter, arXiv 2308.06721):

    output = attention(q, k, v) + scale · attention(q', norm(to_k_ip tokens), to_v_ip tokens)

With `value_norm` the values are normalized as the keys are, which is the attention of ComfyUI-IPAdapter-Flux. q' is the
query after its norm and before the rotary embedding: image queries in a double block; all of them in a single block,
which has no separate text (as in InstantX's and Calligrapher's code, whose weights this must run). The sum is taken
before `to_out`. Without tokens the stock processor runs: an idle adapter is bitwise identical to the stock model.

Legend: B samples, S positions, T tokens, W their width, H heads, d width of a head.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

from diffusers.models.attention_dispatch import dispatch_attention_fn
from torch import Tensor, nn

from retouch.adapters.projections import TokenProjection
from retouch.adapters.shape import AdapterShape, Head
from retouch.config.errors import ConfigError
from retouch.families import FAMILIES
from retouch.families.facts import AdapterFacts
from retouch.registry import load_attribute

EPS = 1e-5
"""Epsilon of the norm of keys (and values), which has no weights."""

Reference = tuple[Tensor, Tensor | None]
"""Tokens [B, T, W], and which samples attend to them [B] (None: all)."""


class Host(ABC):
    """A network that an adapter can be placed into."""

    def __init__(self, network: Any, facts: AdapterFacts) -> None:
        self.network = network
        self.facts = facts

    @property
    def heads(self) -> tuple[Head, ...]:
        """Projections that its adapters have."""
        return ("mlp", "mlp+query_former") if self.facts.head == "mlp" else ("linear",)

    def blocks(self) -> list[str]:
        """Names of the attention modules with a second attention, in the order of the files."""
        return [name.removesuffix(".processor") for name in self.network.attn_processors]

    def attentions(self) -> list[Any]:
        """The modules of `blocks`."""
        return [self.network.get_submodule(block) for block in self.blocks()]

    def inner(self) -> tuple[int, ...]:
        """For each block, the width of its keys and values."""
        return tuple(attention.to_k.out_features for attention in self.attentions())

    @abstractmethod
    def token_width(self) -> int:
        """Width of the tokens: that of the text."""

    @abstractmethod
    def place(self, shape: AdapterShape) -> None:
        """Add new modules of a matching shape on the network's device; the outputs do not change yet."""

    @abstractmethod
    def remove(self) -> None:
        """Restore the processors and attributes from before."""

    @abstractmethod
    def set_strength(self, scales: Sequence[float], *, value_norm: bool) -> None:
        """One factor for each block, and whether all blocks normalize the values of the adapter."""

    @abstractmethod
    def name(self, part: str, block: str, rest: str) -> str:
        """Parameter name in the network of a key of the file.

        Args:
            part: first part of the key.
            block: of `blocks`, for a key of "ip_adapter"; else "".
            rest: remainder of the key.
        """

    def names(self, shape: AdapterShape) -> dict[str, str]:
        """Key of the file -> parameter name in the network."""
        blocks = dict(zip(map(str, shape.numbers()), self.blocks(), strict=True))
        found: dict[str, str] = {}
        for key in shape.tensors():
            part, _, rest = key.partition(".")
            number, _, inside = rest.partition(".")
            found[key] = self.name(part, blocks[number], inside) if part == "ip_adapter" else self.name(part, "", rest)
        return found

    @abstractmethod
    def call_options(self, vectors: Tensor, *, guided: bool) -> dict[str, Any]:
        """Arguments of the pipeline's call for vectors [B, D] of references; `guided`: with two forwards a step."""


class BlockHost(Host):
    """A transformer whose attentions all get an `IpProcessor`."""

    processor: type[IpProcessor]
    attention_kwargs = "joint_attention_kwargs"
    """Argument of the pipeline's call that reaches the processors."""

    def token_width(self) -> int:
        return self.network.config.joint_attention_dim

    def place(self, shape: AdapterShape) -> None:
        former = shape.head == "mlp+query_former"
        projection = TokenProjection(shape.width, shape.tokens, shape.token_width, query_former=former)
        self.network.encoder_hid_proj = projection.to(self.network.device)
        self.network.cache_context = partial(_half_of_guidance, self.network)
        for attention, inner in zip(self.attentions(), shape.inner, strict=True):
            made = self.processor(attention.processor, shape.token_width, inner)
            attention.set_processor(made.to(self.network.device))

    def remove(self) -> None:
        del self.network.encoder_hid_proj, self.network.cache_context
        for attention in self.attentions():
            attention.set_processor(attention.processor.stock)

    def set_strength(self, scales: Sequence[float], *, value_norm: bool) -> None:
        for attention, scale in zip(self.attentions(), scales, strict=True):
            attention.processor.scale, attention.processor.value_norm = scale, value_norm

    def name(self, part: str, block: str, rest: str) -> str:
        if block:
            return f"{block}.processor.{rest}"
        return f"encoder_hid_proj.{'mlp' if part == 'image_proj' else 'qformer'}.{rest}"

    def call_options(self, vectors: Tensor, *, guided: bool) -> dict[str, Any]:
        return {self.attention_kwargs: {"ip_adapter_image_embeds": vectors}}


@contextmanager
def _half_of_guidance(network: Any, name: str, **options: Any) -> Iterator[None]:
    """The `cache_context` of diffusers, in which a pipeline with guidance calls a network once for each prompt: that of
    the negative prompt attends to no reference, as in training (`retouch.families.guidance`)."""
    network.encoder_hid_proj.idle = name == "uncond"
    try:
        with type(network).cache_context(network, name, **options):
            yield
    finally:
        network.encoder_hid_proj.idle = False


class IpProcessor(nn.Module):
    """The second attention of a block: two projections, a scale, and the stock processor that it replaced.

    Starts as a no-op: values are 0, keys are not (if both were 0, neither would have a gradient). This also holds with
    `value_norm`: the norm of 0 is 0, and its gradient there is 1 / sqrt(EPS) times that without the norm.
    """

    _attention_backend = None  # diffusers sets these two on every processor
    _parallel_config = None

    def __init__(self, stock: Any, token_width: int, inner: int) -> None:
        super().__init__()
        self.to_k_ip = nn.Linear(token_width, inner, bias=False)
        self.to_v_ip = nn.Linear(token_width, inner, bias=False)
        nn.init.zeros_(self.to_v_ip.weight)
        self.scale = 1.0
        self.value_norm = False
        self._stock = (stock,)  # a tuple hides it from nn.Module, which would register a submodule

    @property
    def stock(self) -> Any:
        stock = self._stock[0]
        stock._attention_backend, stock._parallel_config = self._attention_backend, self._parallel_config
        return stock

    def attend(self, query: Tensor, reference: Reference) -> Tensor:
        """Scaled output of the second attention for queries [B, S, H, d] -> [B, S, H · d]; 0 for samples not kept."""
        tokens, keep = reference
        tokens = tokens.to(self.to_k_ip.weight.dtype).expand(len(query), -1, -1)  # one reference may serve all samples
        key, value = (
            project(tokens).to(query.dtype).unflatten(-1, query.shape[2:]) for project in (self.to_k_ip, self.to_v_ip)
        )
        key = nn.functional.rms_norm(key, key.shape[-1:], eps=EPS)
        if self.value_norm:
            value = nn.functional.rms_norm(value, value.shape[-1:], eps=EPS)
        out = self.scale * self.attention(query, key, value).flatten(2, 3).to(query.dtype)
        return out if keep is None else out.masked_fill(keep.to(out.device)[:, None, None] == 0, 0.0)

    def attention(self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None = None) -> Tensor:
        return dispatch_attention_fn(
            query, key, value, attn_mask=mask, backend=self._attention_backend, parallel_config=self._parallel_config
        )


def host_of(network: Any) -> Host:
    """The host of a network.

    Raises:
        ConfigError: a network without a host, or one that has an adapter already.
    """
    specs = [section.spec for section in FAMILIES.available().values()]
    name, hosts = type(network).__name__, {s.adapter.network: s.adapter for s in specs if s.adapter is not None}
    if name not in hosts:
        raise ConfigError(f"a style adapter cannot be put into a {name}; it can into: {', '.join(hosts)}")
    if isinstance(getattr(network, "encoder_hid_proj", None), nn.Module):
        raise ConfigError(f"the {name} has an adapter already; detach that first")
    return load_attribute(hosts[name].host)(network, hosts[name])
