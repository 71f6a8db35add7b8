"""Text encoders behind a cache.

A prompt is encoded once. The encoders are on the CPU between uses (`offload`), or are dropped after every prompt of the
run is cached: a T5-XXL beside the network would take 9.5 GB for nothing.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable, Mapping, Sequence, Set
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, Protocol

import torch
from torch import Tensor
from transformers import AutoTokenizer

from retouch.config.errors import ConfigError
from retouch.errors import fitting
from retouch.families.embeddings import EmbeddingCache
from retouch.families.loading import load_component
from retouch.families.offload import OffloadedNetworks
from retouch.lru import LruCache

CACHE_SIZE = 2048
"""Prompts kept by default; 4 MiB each at the sizes of FLUX in bf16."""

_LITTLE = 1 << 30
"""Bytes of prompts that are kept whatever the encoders take."""

_WITHOUT = (
    "model.offload_text_encoders=true, or run `retouch data precompute RUN.yaml --out FOLDER` on a larger device "
    "and set model.embeddings=FOLDER"
)
"""Remedies where memory ends."""

Output = Literal["last_hidden_state", "pooler_output", "text_embeds"] | tuple[int, ...]
"""Output of a text encoder: by its name, or the states of these entries of `hidden_states`, concatenated on width."""

Networks = Callable[[Any, str], Any]
"""(class, subfolder) -> a network of a model; None where prompts are only counted."""


class PromptReader(ABC):
    """A text encoder as far as tokens are concerned: its tokenizer and its limit, with or without its network.

    Attributes:
        name: subfolder of the text encoder.
        length: tokens that it reads at most; a longer prompt is cut at its end.
        fixed: whether the model sets the length, and not the run file.
    """

    name: str = "text_encoder"
    length: int
    fixed: bool = False

    @property
    def reader(self) -> PromptReader:
        """Itself, as an encoder (`PromptEncoder`)."""
        return self

    @abstractmethod
    def counts(self, prompts: Sequence[str], images: Sequence[int] = (), *, closed: bool = True) -> list[int]:
        """Tokens of whole prompts, of which `length` are read, as the encoder counts them: with the chat around each.

        Args:
            prompts: at least one.
            images: tokens of each image that the encoder reads with a prompt.
            closed: False counts up to the end of the prompt, if what follows it is the first to be cut.
        """

    def count(self, prompt: str, images: Sequence[int] = (), *, closed: bool = True) -> int:
        """`counts` of one prompt."""
        return self.counts([prompt], images, closed=closed)[0]

    def unknown(self, characters: Sequence[str]) -> list[str]:
        """Those that the tokenizer replaces by its unknown token: the encoder cannot distinguish them. None by default:
        the tokens of the language models here are of bytes."""
        return []


class PromptEncoder(Protocol):
    """Prompts -> a tensor [B, ...].

    Attributes:
        model: the network, an `nn.Module`.
        reader: its tokenizer and its limit.
    """

    @property
    def model(self) -> Any: ...

    @property
    def reader(self) -> PromptReader: ...

    def __call__(self, prompts: Sequence[Any], /) -> Tensor: ...


@dataclass(frozen=True)
class Encoding:
    """A `PromptEncoder` of one more tensor of what a text encoder reads, such as its lengths.

    Attributes:
        reader: the text encoder, with its `model`.
        make: prompts -> the tensor [B, ...].
    """

    reader: Any
    make: Callable[[Sequence[Any]], Tensor]

    @property
    def model(self) -> Any:
        return self.reader.model

    def __call__(self, prompts: Sequence[Any]) -> Tensor:
        return self.make(prompts)


@dataclass(frozen=True)
class TextEncoder(PromptReader):
    """An encoder, its tokenizer, and the output that is used.

    Attributes:
        length: tokens a prompt is padded or cut to.
        output: a vector for each token [S, D] (n entries of `hidden_states`: [S, n D]), or one for the prompt [D].
        name, fixed: see `PromptReader`.
    """

    model: Any  # CLIPTextModel, T5EncoderModel
    tokenizer: Any
    length: int
    output: Output = "last_hidden_state"
    name: str = "text_encoder"
    fixed: bool = False

    @classmethod
    def load(
        cls,
        network: Networks,
        kind: Any,
        path: str,
        number: str,
        length: int | None = None,
        output: Output = "last_hidden_state",
    ) -> TextEncoder:
        """`text_encoder{number}/` of a model with its `tokenizer{number}/`; no `length` takes that of the tokenizer."""
        name = f"text_encoder{number}"
        model, tokenizer = network(kind, name), load_component(AutoTokenizer, path, f"tokenizer{number}", None)
        return cls(model, tokenizer, length or tokenizer.model_max_length, output, name, fixed=length is None)

    def counts(self, prompts: Sequence[str], images: Sequence[int] = (), *, closed: bool = True) -> list[int]:
        """See `PromptReader`; the marks around a prompt are never cut."""
        return token_counts(self.tokenizer, prompts)

    def unknown(self, characters: Sequence[str]) -> list[str]:
        """See `PromptReader`: T5 has no tokens for Chinese, Japanese, Korean or Arabic, and few beyond western Europe;
        CLIP's are of bytes, and its unknown token is the mark of the end."""
        unknown = self.tokenizer.unk_token_id
        if not characters or unknown is None or unknown == self.tokenizer.eos_token_id:
            return []
        rows = self.tokenizer(list(characters), return_attention_mask=False).input_ids
        return [character for character, ids in zip(characters, rows, strict=True) if unknown in ids]

    def tokens(self, prompts: Sequence[str]) -> Tensor:
        """[B, S] int64."""
        batch = self.tokenizer(
            list(prompts), padding="max_length", max_length=self.length, truncation=True, return_tensors="pt"
        )
        return batch.input_ids

    def __call__(self, prompts: Sequence[str]) -> Tensor:
        """[B, S, D] or [B, D], with gradient where the model has it."""
        tokens = self.tokens(prompts).to(self.model.device)
        if isinstance(self.output, tuple):
            states = self.model(tokens, output_hidden_states=True).hidden_states
            return torch.cat([states[i] for i in self.output], dim=-1)
        return getattr(self.model(tokens), self.output)


class TextEncoders:
    """prompts -> one tensor [B, ...] of each encoder, by its name in the condition.

    A prompt is a string, or any hashable value that the encoders of a family take; equal ones are encoded once.

    Args:
        offload: whether the encoders are on the CPU between uses.
        capacity: prompts whose tensors are kept.
        stored: tensors on disk that replace the encoders.

    Attributes:
        placement: where the encoders are.
    """

    def __init__(
        self,
        encoders: Mapping[str, PromptEncoder],
        device: torch.device | str = "cpu",
        offload: bool = True,
        capacity: int = CACHE_SIZE,
        stored: EmbeddingCache | None = None,
    ) -> None:
        self.encoders = dict(encoders)
        self.stored = stored
        self.placement = OffloadedNetworks([encoder.model for encoder in self.encoders.values()], offload)
        for encoder in self.encoders.values():
            encoder.model.eval().requires_grad_(False)
        self._cache: LruCache[Hashable, dict[str, Tensor]] = LruCache(capacity)
        self.to(device)

    def to(self, device: torch.device | str) -> None:
        self.device = torch.device(device)
        self.placement.to(self.device)

    def encode(self, prompts: Sequence[Hashable], on_host: Set[str] = frozenset()) -> dict[str, Tensor]:
        """Look up or encode.

        Args:
            on_host: names of tensors that are wanted on the CPU.

        Raises:
            RuntimeError: a prompt that is not cached after `cache_and_release`.
        """
        rows = self.rows(prompts)
        stacked = {name: torch.stack([row[name] for row in rows]) for name in rows[0]}
        return {name: t if name in on_host else t.to(self.device) for name, t in stacked.items()}

    def rows(self, prompts: Sequence[Hashable]) -> list[dict[str, Tensor]]:
        """Tensors of each prompt by name, on the CPU and without a batch dimension.

        Raises:
            RuntimeError: as `encode`.
        """
        with self.placement.kept_on_device():  # those that wait on the CPU are moved once, and only if one is missing
            return self._cache.get_all(prompts, partial(map, self._encode))

    def cache_and_release(self, prompts: Sequence[str]) -> None:
        """Encode these prompts now and keep them, then drop the encoders: only cached prompts can be encoded from now
        on.

        Raises:
            ConfigError: the prompts take more memory than the encoders, before most of them are encoded.
        """
        if self.stored is not None:  # there are none
            return
        different = list(dict.fromkeys(prompts))
        self._cache.capacity = max(self._cache.capacity, len(different) + len(self._cache))
        with self.placement.kept_on_device():
            self._require_gain(different)
            self.rows(different)
        self.encoders.clear()
        self.placement.networks.clear()

    def _require_gain(self, prompts: Sequence[str]) -> None:
        freed = self._weights()
        taken = sum(t.nbytes for row in self.rows(prompts[:1]) for t in row.values()) * len(prompts)
        if taken > max(freed, _LITTLE):
            raise ConfigError(
                f"model.free_text_encoders: given true, but {len(prompts)} prompts take {taken / 1e9:.1f} GB in each "
                f"process, and the text encoders {freed / 1e9:.1f} GB; set model.free_text_encoders=false, or run "
                "`retouch data precompute RUN.yaml --out FOLDER` and set model.embeddings=FOLDER"
            )

    def _weights(self) -> int:
        """Bytes of the encoders."""
        return sum(p.nbytes for encoder in self.encoders.values() for p in encoder.model.parameters())

    @torch.no_grad()
    def _encode(self, prompt: Any) -> dict[str, Tensor]:
        """Tensors of a prompt alone: an embedding must not depend on what it was batched with."""
        if self.stored is not None:
            if (found := self.stored.text(prompt)) is None:
                raise ConfigError(
                    f"model.embeddings: {self.stored.folder} has no prompt {prompt!r}; run `retouch data precompute` "
                    "again, or set model.embeddings=null"
                )
            return found
        if not self.encoders:
            raise RuntimeError(
                f"the text encoders were released and {prompt!r} is not cached; set model.free_text_encoders=false"
            )
        with fitting("in the text encoders", _WITHOUT), self.placement.on_device():
            return {name: encoder([prompt])[0].cpu() for name, encoder in self.encoders.items()}


def layer_states(model: Any, inputs: Mapping[str, Tensor], layers: Sequence[int]) -> Tensor:
    """States [B, S, n D] of some entries of `hidden_states` of a language model, concatenated on width; 0 is the
    embedding.

    Args:
        inputs: `input_ids` and `attention_mask` [B, S].
    """
    on_device = {name: ids.to(model.device) for name, ids in inputs.items()}
    made = model(**on_device, output_hidden_states=True, use_cache=False).hidden_states
    return torch.cat([made[layer] for layer in layers], dim=-1)


def token_counts(tokenizer: Any, texts: Sequence[str]) -> list[int]:
    """Tokens of each text, in one call of the tokenizer: most of the time of a short text is that of its call."""
    batch = tokenizer(list(texts), verbose=False, return_attention_mask=False)
    return [len(ids) for ids in batch.input_ids]


def counted_chats(chat: Callable[[str], str], prompts: Sequence[str], *, closed: bool) -> list[str]:
    """The chat of each prompt, or with `closed` False its part up to the end of the prompt."""
    if closed:
        return [chat(prompt) for prompt in prompts]
    mark = "\x00"  # in no prompt that is read from a file
    before = chat(mark).partition(mark)[0]
    return [before + prompt for prompt in prompts]


def drop_layers(model: Any, last: int) -> None:
    """Drop the layers of a language model that entries of `hidden_states` up to `last` do not need. One layer more is
    kept, because transformers normalizes the entry of the last one."""
    del model.layers[last + 1 :]
    model.config.num_hidden_layers = len(model.layers)
