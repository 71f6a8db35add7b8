"""Style adapters (IP-Adapter, arXiv 2308.06721): every block of a frozen network attends to a reference image.

    import retouch.adapters
    adapter = retouch.adapters.load("ip-adapter.safetensors").attach(pipe)
    pipe(..., **adapter.condition([reference]))
    adapter.detach()

Nothing of diffusers is forked: attention processors take the reference's tokens, and the projection that makes them is
stored where stock networks expect one.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from PIL.Image import Image
from torch import Tensor, nn

from retouch.adapters.formats import AdapterFile, describe_unused, read_adapter, require_same_keys
from retouch.adapters.hosts import Host, host_of
from retouch.adapters.shape import AdapterShape, Head
from retouch.config.errors import ConfigError
from retouch.families.image_encoder import ImageEncoder

logger = logging.getLogger(__name__)


class IpAdapter:
    """An adapter inside a network.

    Attributes:
        names: key of the file -> parameter name in the network.
        scale: weight of the reference in each block.
        value_norm: whether the values are normalized, as the keys are.
    """

    def __init__(self, network: Any, shape: AdapterShape, where: str) -> None:
        """Put new modules into a network; its outputs do not change yet.

        Args:
            where: names the adapter in messages.

        Raises:
            ConfigError: another number or other sizes of blocks; the network is left as it was.
        """
        self.host: Host = host_of(network)
        self.shape = shape
        _fits(self.host, shape, where, type(network).__name__)
        self.host.place(shape)
        self.names = self.host.names(shape)
        self.scale = [1.0] * len(shape.inner)
        self.value_norm = False

    def tensors(self) -> dict[str, Tensor]:
        """Every weight by the key of the file; under LoRA, the frozen base weight."""
        parameters = dict(self.host.network.named_parameters())
        below = {key: name.removesuffix("weight") + "base_layer.weight" for key, name in self.names.items()}
        return {
            key: parameters[name if name in parameters else below[key]].detach() for key, name in self.names.items()
        }

    @torch.no_grad()
    def load(self, tensors: Mapping[str, Tensor]) -> None:
        """Fill in all weights by the keys of the file.

        Raises:
            AdapterFileError: keys or shapes that do not match exactly; nothing is filled in then.
        """
        require_same_keys(tensors, self.shape.tensors(), Path("adapter"))
        for key, own in self.tensors().items():
            own.copy_(tensors[key])

    def parameters(self) -> dict[str, nn.Parameter]:
        """Every weight by the key of the file, to be trained or frozen."""
        parameters = dict(self.host.network.named_parameters())
        return {key: parameters[name] for key, name in self.names.items()}

    def set_scale(self, scale: float | Sequence[float]) -> None:
        """Set the weight of the reference, in all blocks or in each; 0 is the stock model.

        Raises:
            ConfigError: not as many factors as blocks.
        """
        blocks = len(self.shape.inner)
        scales = [float(s) for s in scale] if isinstance(scale, Sequence) else [float(scale)] * blocks
        if len(scales) != blocks:
            raise ConfigError(f"scale: given {len(scales)} factors; the network has {blocks} blocks: give one for each")
        self.scale = scales
        self.host.set_strength(self.scale, value_norm=self.value_norm)

    def set_value_norm(self, on: bool) -> None:
        """Whether the values are normalized, as the keys are.

        Raises:
            ConfigError: `on`, in a network whose attention cannot.
        """
        if on and not self.host.facts.normalizes_values:
            raise ConfigError(
                f"value_norm: given true; the attention of a {type(self.host.network).__name__} is diffusers' own, "
                "which has no norm of the values"
            )
        self.value_norm = on
        self.host.set_strength(self.scale, value_norm=self.value_norm)

    def detach(self) -> None:
        """Leave the network as it was before."""
        self.host.remove()


def new_adapter(network: Any, head: Head, width: int, tokens: int, seed: int = 0) -> IpAdapter:
    """A new adapter in a network, initialized from a seed. Its values start at 0: the outputs do not change yet."""
    host = host_of(network)
    shape = AdapterShape(head, width, tokens, host.token_width(), host.inner())
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return IpAdapter(network, shape, "model.train")


class StyleAdapter:
    """An adapter file in use, from `retouch.adapters.load`.

    Attributes:
        file: the weights, checked.
    """

    def __init__(self, file: AdapterFile, path: Path) -> None:
        self.file = file
        self.path = path
        self._inside: IpAdapter | None = None
        self._encoder: ImageEncoder | None = None

    def attach(
        self, pipe: Any, scale: float | Sequence[float] | None = None, value_norm: bool | None = None
    ) -> StyleAdapter:
        """Put it into a diffusers pipeline (or its network), in the network's precision.

        Args:
            scale: weight of the reference, in all blocks or in each; None: as in training.
            value_norm: whether the values are normalized; None: as in training, which a .bin does not record.

        Raises:
            ConfigError: a network of other sizes, or one that has an adapter, or not a factor for each of its blocks,
                or a norm that its blocks do not have; the network is left as it was.
        """
        network = getattr(pipe, "transformer", None) or getattr(pipe, "unet", None) or pipe
        inside = IpAdapter(network, self.file.shape, str(self.path))
        for parameter in inside.parameters().values():
            parameter.data = parameter.data.to(network.dtype)
            parameter.requires_grad_(False)
        inside.load(self.file.tensors)
        try:
            inside.set_scale(self.file.scale if scale is None else scale)
            inside.set_value_norm(bool(self.file.value_norm if value_norm is None else value_norm))
        except ConfigError:
            inside.detach()
            raise
        self._inside = inside
        return self

    def detach(self) -> None:
        """Leave the pipeline as it was before."""
        self._attached().detach()
        self._inside = None

    def set_scale(self, scale: float | Sequence[float]) -> None:
        """Set the weight of the reference, in all blocks or in each."""
        self._attached().set_scale(scale)

    def condition(
        self, references: Sequence[Image], encoder: ImageEncoder | str | None = None, *, guided: bool = True
    ) -> dict[str, Any]:
        """Arguments of the pipeline's call for one reference each image (or one for all).

        Args:
            encoder: embeds the references; None loads the one that the file names.
            guided: whether the call uses classifier-free guidance; needed for Stable Diffusion only.

        Raises:
            ConfigError: a file that names no encoder, or one of another width.
        """
        if isinstance(encoder, str):
            encoder = ImageEncoder.load(encoder, where="encoder")
        elif encoder is None:
            encoder = self._encoder = self._encoder or self._named_encoder()
        if encoder.width != self.file.shape.width:
            raise ConfigError(
                f"{self.path}: takes vectors of width {self.file.shape.width}, the encoder makes {encoder.width}"
            )
        network = self._attached().host.network
        vectors = encoder(references).to(network.device, network.dtype)
        return self._attached().host.call_options(vectors, guided=guided)

    def _named_encoder(self) -> ImageEncoder:
        """The encoder that the file names."""
        named = self.file.metadata.get("image_encoder")
        if named is None:
            raise ConfigError(f"{self.path} names no image encoder; give condition(..., encoder=...)")
        return ImageEncoder.load(named, where="encoder")

    def _attached(self) -> IpAdapter:
        if self._inside is None:
            raise ConfigError(f"{self.path} is not attached; call attach(pipe) first")
        return self._inside


def load(path: str | Path) -> StyleAdapter:
    """Read an adapter file of any supported layout and check every key; warn about unused tensors.

    Raises:
        AdapterFileError: not a whole adapter, or a pickle that holds more than tensors.
    """
    file = read_adapter(Path(path))
    if file.unused:
        logger.warning("%s: %s", path, describe_unused(file.unused))
    return StyleAdapter(file, Path(path))


def _fits(host: Host, shape: AdapterShape, where: str, name: str) -> None:
    inner, width = host.inner(), host.token_width()
    if shape.head not in host.heads:
        raise ConfigError(f"{where}: a {shape.head} adapter; a {name} takes {' or '.join(host.heads)}")
    if len(shape.inner) != len(inner):
        raise ConfigError(f"{where}: an adapter for {len(shape.inner)} blocks; the {name} has {len(inner)}")
    if shape.inner != inner or shape.token_width != width:
        raise ConfigError(
            f"{where}: an adapter of token width {shape.token_width} for blocks of width {shape.inner[0]}; the {name} "
            f"has {width} and {inner[0]}"
        )
