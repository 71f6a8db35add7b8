"""Base of the families' models: parts, loading, latents, tokens and schedules.

A family is a subclass of `FamilyModel` that encodes examples and predicts; `retouch.types.DiffusionModel` is its
interface to the rest of the package.

Legend: B samples, C latent channels, h w latent sides.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Any, ClassVar, Self

import diffusers
import torch
from torch import Tensor, nn

from retouch.core.schedule import FlowSchedule, Schedule, flux_shift
from retouch.families.attention import set_attention
from retouch.families.base import ModelSection
from retouch.families.embeddings import EmbeddingCache, open_cache
from retouch.families.image_encoder import ImageEncoder
from retouch.families.inputs import reference_encoder
from retouch.families.loading import (
    DTYPES,
    ModelFilesError,
    component_path,
    load_component,
    pipeline_index,
    stored_dtype,
    transformer_path,
)
from retouch.families.quantized import quantize_blocks
from retouch.families.text import CACHE_SIZE, Networks, PromptEncoder, PromptReader, TextEncoders
from retouch.families.vae import Autoencoder
from retouch.files.model_files import schedule_problem
from retouch.types import Condition, Example

if TYPE_CHECKING:
    from retouch.families.base import FamilySpec


class FamilyModel(ABC):
    """The networks of a family, in use.

    Args:
        network: of diffusers; what is trained.
        vae: of diffusers.
        text: None where conditions are built from given text states only.
        scheduler: of diffusers; only its config is read.
        config: section of the run file; None takes its defaults.
        image_encoder: of references, for a style adapter in the network.
        latents: latents on disk that are looked up before an image is encoded.

    Attributes:
        spec: facts of the family, with the sizes of these networks.

    Raises:
        ModelFilesError: networks that do not fit the family or each other.
    """

    section: ClassVar[type[ModelSection]]
    """The section of the run file."""
    autoencoder_class: ClassVar[type[Autoencoder]] = Autoencoder
    scheduler_class: ClassVar[str] = "FlowMatchEulerDiscreteScheduler"
    patch: ClassVar[int] = 2
    """Latent cells per side of a token of the network."""
    kept_texts: ClassVar[int] = CACHE_SIZE
    """Prompts whose tensors are kept."""
    on_host: ClassVar[frozenset[str]] = frozenset()
    """Names of a condition's tensors that stay on the host (see `Condition`): they hold the lengths of prompts."""

    def __init__(
        self,
        network: Any,
        vae: Any,
        text: TextEncoders | None,
        scheduler: Any,
        device: torch.device | str = "cpu",
        config: Any = None,
        image_encoder: ImageEncoder | None = None,
        latents: EmbeddingCache | None = None,
    ) -> None:
        self.config: Any = config or self.section.model_validate({})
        self.network: nn.Module = network
        set_attention(network, self.config.attention)
        self.dtype: torch.dtype = network.dtype
        self.text = text
        self.scheduler = scheduler
        self.image_encoder = image_encoder
        if self.config.spec.prediction == "flow" and (problem := schedule_problem(scheduler.config)):
            raise ModelFilesError(f"model.path: {problem}")
        vae = vae.eval().requires_grad_(False)
        self.autoencoder = self.autoencoder_class(
            vae, device, self.config.vae_batch, offload=self.config.offload_vae, stored=latents
        )
        self.spec: FamilySpec = replace(
            self.config.spec,
            guidance_scale=self.config.guidance_scale,
            latent_channels=self.autoencoder.channels,
            downsampling=self.autoencoder.downsampling,
            size_multiple=self.patch * self.autoencoder.downsampling,
            reference_width=None if image_encoder is None else image_encoder.width,
        )
        takes = self.input_channels()
        if network.config.in_channels != takes:
            why = "a text-to-image model cannot inpaint; " if "mask" in self.spec.needs else ""
            remedy = f"use {self.spec.hub_ids[0]}" if self.spec.hub_ids else f"set a model of {self.spec.family}"
            key = "model.path" if self.config.transformer is None else "model.transformer"
            raise ModelFilesError(
                f"{key}: the network takes {network.config.in_channels} channels, but {self.spec.family} with "
                f"this autoencoder needs {takes}; {why}{remedy}"
            )
        self.to(device)

    @classmethod
    def from_config(
        cls,
        config: Any,
        device: torch.device | str = "cpu",
        *,
        embedded: bool = False,
        with_text: bool = True,
        filling: EmbeddingCache | None = None,
        mapped: bool = False,
    ) -> Self:
        """Load a hub id or a local folder in the diffusers layout ("tiny": the base of the package).

        Args:
            embedded: whether every example names a file with the states of `spec.embedded_encoder`, which is then not
                loaded.
            with_text: False loads no text encoder: only conditions from given text states can be made.
            filling: cache that latents of encoded images are added to.
            mapped: leave the weights of the network mapped from their files: of a network that is trained whole they
                keep the dtype of the files, and whoever places them gives them `dtype`.

        Raises:
            ModelFilesError: a component is missing or of another class.
            ConfigError: no such image encoder, or a `quantize` whose library is not installed.
        """
        spec, path = config.spec, component_path(config.path, config.family)
        if (index := pipeline_index(path)) is not None:
            cls.require_index(config, index)
        frozen = DTYPES[config.dtype]
        dtype = torch.float32 if config.train.kind == "full" else frozen
        network = cls.mapped_network(config, path, dtype) if mapped else cls.load_network(config, path, dtype)
        quantize_blocks(network, config.quantize, device)
        stored = open_cache(config)
        text = None
        if stored is not None:
            text = TextEncoders({}, device, stored=stored)
        elif with_text:
            text = cls.load_text(config, path, frozen, device, embedded=embedded)
        model = cls(
            network,
            load_component(getattr(diffusers, spec.networks["vae"]), path, "vae", frozen),
            text,
            load_component(getattr(diffusers, cls.scheduler_class), path, "scheduler", None),
            device,
            config,
            reference_encoder(config),
            filling or stored,
        )
        if config.train.kind == "full":
            model.dtype = dtype  # whichever the weights have until they are placed
        return model

    @classmethod
    def require_index(cls, config: Any, index: Mapping[str, Any]) -> None:
        """Refuse a model whose model_index.json names the pipeline of another family (networks of one class can be of
        several) or, for a flow model, another scheduler: that has other settings of the noise levels, without which
        diffusers would make this one with a shift of 1.

        Raises:
            ModelFilesError: it is.
        """
        found = index.get("_class_name", config.pipeline)
        if found != config.pipeline:
            raise ModelFilesError(
                f"model.path: {config.path} is a {found}; model.family needs a {config.pipeline}; set another path, or "
                "the family of it"
            )
        scheduler = (index.get("scheduler") or [cls.scheduler_class])[-1]
        if config.spec.prediction == "flow" and scheduler != cls.scheduler_class:
            raise ModelFilesError(
                f"model.path: {config.path} has a {scheduler}; {config.family} reads the noise levels of a "
                f"{cls.scheduler_class}; set another path, or give a copy with that class in model_index.json and the "
                "shift in scheduler/scheduler_config.json"
            )

    @classmethod
    def load_text(
        cls, config: Any, path: str, dtype: torch.dtype, device: torch.device | str, *, embedded: bool
    ) -> TextEncoders:
        """The text encoders of a model folder."""

        def network(kind: Any, name: str) -> Any:
            return load_component(kind, path, name, dtype)

        encoders = cls.text_encoders(config, path, network, embedded=embedded)
        return TextEncoders(encoders, device, config.offload_text_encoders, cls.kept_texts)

    @classmethod
    def text_encoders(cls, config: Any, path: str, network: Networks, *, embedded: bool) -> Mapping[str, PromptEncoder]:
        """The text encoders of a model folder by the names of their tensors, with their tokenizers; each has the
        `reader` of its tokens.

        Args:
            network: loads the network of an encoder. One that returns None makes encoders that only count tokens.
            embedded: as of `from_config`.
        """
        raise NotImplementedError

    @classmethod
    def prompt_readers(cls, config: Any, path: str, *, embedded: bool = False) -> Mapping[str, PromptReader]:
        """How each text encoder counts the tokens of a prompt, by its name; only files of tokenizers are read."""
        encoders = cls.text_encoders(config, path, lambda kind, name: None, embedded=embedded)
        return {encoder.reader.name: encoder.reader for encoder in encoders.values()}

    @classmethod
    def kept(cls, name: str, network: Any) -> Any:
        """The part of a loaded component that stays in memory; the component may be changed in place."""
        return network

    @classmethod
    def load_network(cls, config: Any, path: str, dtype: torch.dtype) -> nn.Module:
        """The network that is trained: of a model folder, or of `model.transformer`."""
        name = config.spec.network_name
        kind = getattr(diffusers, config.spec.networks[name])
        if config.transformer is None:
            return load_component(kind, path, name, dtype)
        other, subfolder = transformer_path(config.transformer)
        return load_component(kind, other, subfolder, dtype, key="model.transformer")

    @classmethod
    def mapped_network(cls, config: Any, path: str, dtype: torch.dtype) -> nn.Module:
        """`load_network`, but in the dtype of its files where all weights will have `dtype`, fp32, without a rounding:
        reading a weight as fp32 makes it fp32 in the memory of every process, twice as large as its file.

        A LoRA that is merged while loading is merged in fp32, and so are positions that the network computes.
        """
        name = config.spec.network_name
        where = (path, name) if config.transformer is None else transformer_path(config.transformer)
        stored = stored_dtype(*where, config.weights_variant)
        if config.train.kind != "full" or stored in (None, dtype) or getattr(config, "distillation_lora", None):
            return cls.load_network(config, path, dtype)
        network = cls.load_network(config, path, stored)
        saved = network.state_dict().keys()
        if any(buffer.is_floating_point() and n not in saved for n, buffer in network.named_buffers()):
            return cls.load_network(config, path, dtype)
        return network

    def input_channels(self) -> int:
        """Input channels of a network that fits the autoencoder: those of the latents, unless a family adds others."""
        return self.spec.latent_channels

    @property
    def vae(self) -> Any:
        """The network of the autoencoder."""
        return self.autoencoder.vae

    @property
    def prompts(self) -> TextEncoders | None:
        """The encoders of prompts; None without text encoders."""
        return self.text

    def texts(self) -> TextEncoders:
        """The text encoders.

        Raises:
            RuntimeError: opened without them.
        """
        if self.text is None:
            raise RuntimeError(f"{self.spec.family} was opened without its text encoder; open it with one to encode")
        return self.text

    @contextmanager
    def encoding(self) -> Iterator[None]:
        with ExitStack() as stack:
            for part in (self.text, self.autoencoder, self.image_encoder):
                if part is not None:
                    stack.enter_context(part.placement.kept_on_device())
            yield

    def text_tensors(self, prompts: Sequence[Any]) -> dict[str, Tensor]:
        """Condition tensors [B, ...] of prompts."""
        return self.arranged(self.texts().encode(prompts, self.on_host))

    def guided_texts(
        self,
        examples: Sequence[Example],
        guidance_scale: float,
        read_as: Callable[[str, int], Any] = lambda prompt, _: prompt,
    ) -> dict[str, Tensor]:
        """Condition tensors of the prompts of examples, the scale as `guidance` [B] and, where that takes a second
        forward, those of the empty prompt as `negative_...`: `predict` then doubles the batch of the network.

        Args:
            read_as: prompt, place of its example -> what the text encoders read.

        Raises:
            ValueError: guidance of a model that was distilled to sample without.
        """
        self.require_guidance(guidance_scale)

        def read(prompts: Sequence[str]) -> dict[str, Tensor]:
            return self.text_tensors([read_as(prompt, place) for place, prompt in enumerate(prompts)])

        tensors = read([example.prompt for example in examples])
        tensors["guidance"] = torch.full((len(examples),), guidance_scale, dtype=torch.float32, device=self.device)
        if self.config.forwards_of_guidance(guidance_scale) > 1:
            empty = read([self.spec.empty_prompt] * len(examples))
            tensors |= {f"negative_{name}": t for name, t in empty.items()}
        return tensors

    def arranged(self, made: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Tensors [B, ...] of the text encoders -> those of a condition."""
        return dict(made)

    def to(self, device: Any) -> None:
        self.device = torch.device(device)
        for part in (self.autoencoder, self.text, self.image_encoder):
            if part is not None:
                part.to(self.device)

    def schedule(self, num_steps: int, size: tuple[int, int]) -> Schedule:
        """Flow times with the shift of the scheduler's config."""
        return FlowSchedule.make(num_steps, self.flow_shift(size), self.scheduler.config.get("shift_terminal"))

    def flow_shift(self, size: tuple[int, int]) -> float:
        """The shift of the scheduler's config, which may depend on the number of tokens of (height, width)."""
        config = self.scheduler.config
        if not config.get("use_dynamic_shifting", False):
            return config.get("shift", 1.0)
        tokens = self.image_tokens(size)
        first, last = config.get("base_image_seq_len", 256), config.get("max_image_seq_len", 4096)
        shift = flux_shift(tokens, first, last, config.get("base_shift", 0.5), config.get("max_shift", 1.15))
        return self.dynamic_shift(shift)

    def dynamic_shift(self, shift: float) -> float:
        """The shift that the scheduler makes of a pipeline's mu: e^mu, or mu itself.

        Args:
            shift: e^mu.
        """
        return math.log(shift) if self.scheduler.config.get("time_shift_type") == "linear" else shift

    def image_tokens(self, size: tuple[int, int]) -> int:
        """Tokens that the network makes of an image of (height, width)."""
        return (size[0] // self.spec.size_multiple) * (size[1] // self.spec.size_multiple)

    def require_size(self, size: tuple[int, int]) -> None:
        """Raise ValueError where the network cannot take images of (height, width)."""
        multiple = self.spec.size_multiple
        if any(side % multiple for side in size):
            raise ValueError(f"images are {size[0]} x {size[1]}; {self.spec.family} needs multiples of {multiple}")

    def require_guidance(self, guidance_scale: float) -> None:
        """Raise ValueError where the model was distilled to sample without guidance."""
        if self.config.distilled_steps is not None and guidance_scale > 1:
            raise ValueError(
                f"guidance_scale is {guidance_scale:g}, but this {self.spec.family} was distilled to sample without "
                "guidance; set 1, or a base model"
            )

    @abstractmethod
    def encode(self, examples: Sequence[Example], guidance_scale: float) -> Condition: ...

    def encode_images(self, images: Tensor) -> Tensor:
        return self.autoencoder.encode(images)

    @abstractmethod
    def predict(self, network: nn.Module, x: Tensor, t: Tensor, condition: Condition) -> Tensor: ...

    def decode(self, latents: Tensor) -> Tensor:
        return self.autoencoder.decode(latents)

    def latent_gradient(
        self, latents: Tensor, pixel_gradient: Callable[[Tensor], Tensor], *, checkpointing: bool = False
    ) -> Tensor:
        return self.autoencoder.latent_gradient(latents, pixel_gradient, checkpointing=checkpointing)


def pack(x: Tensor) -> Tensor:
    """[B, C, h, w] -> [B, h/2 · w/2, 4 C]: 2 x 2 patches become tokens, channels outermost."""
    b, c, h, w = x.shape
    return x.view(b, c, h // 2, 2, w // 2, 2).permute(0, 2, 4, 1, 3, 5).reshape(b, (h // 2) * (w // 2), c * 4)


def unpack(tokens: Tensor, h: int, w: int) -> Tensor:
    """The inverse of `pack`: [B, h/2 · w/2, 4 C] -> [B, C, h, w]."""
    b, _, d = tokens.shape
    return tokens.view(b, h // 2, w // 2, d // 4, 2, 2).permute(0, 3, 1, 4, 2, 5).reshape(b, d // 4, h, w)
