"""The two text encoders of FLUX behind a cache: CLIP gives one vector, T5 a sequence.

A prompt is encoded once. The encoders sit on the CPU between uses (`offload`), or are dropped after every prompt of
the run is cached (`release`): a T5-XXL beside the network would cost 9.5 GB for nothing.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import AutoTokenizer, CLIPTextModel, T5EncoderModel

from retouch.models.loading import load_component

CACHE_SIZE = 2048
"""Prompts kept when nothing asked for more; 4 MiB each at the released sizes in bf16."""


class FluxTextEncoders:
    """prompts -> (text [B, S, D], pooled [B, P]) on the device, as `FluxFillPipeline.encode_prompt`."""

    def __init__(
        self,
        clip: CLIPTextModel,
        clip_tokenizer: Any,
        t5: T5EncoderModel,
        t5_tokenizer: Any,
        max_sequence_length: int,
        device: torch.device | str = "cpu",
        offload: bool = True,
    ) -> None:
        self.clip: CLIPTextModel | None = clip.eval().requires_grad_(False)
        self.t5: T5EncoderModel | None = t5.eval().requires_grad_(False)
        self.clip_tokenizer = clip_tokenizer
        self.t5_tokenizer = t5_tokenizer
        self.max_sequence_length = max_sequence_length
        self.offload = offload
        self._cache: OrderedDict[str, tuple[Tensor, Tensor]] = OrderedDict()
        self._capacity = CACHE_SIZE
        self.to(device)

    @classmethod
    def load(
        cls, path: str, dtype: torch.dtype, max_sequence_length: int, device: torch.device | str, offload: bool
    ) -> FluxTextEncoders:
        return cls(
            load_component(CLIPTextModel, path, "text_encoder", dtype),
            load_component(AutoTokenizer, path, "tokenizer", None),
            load_component(T5EncoderModel, path, "text_encoder_2", dtype),
            load_component(AutoTokenizer, path, "tokenizer_2", None),
            max_sequence_length,
            device,
            offload,
        )

    def to(self, device: torch.device | str) -> None:
        self.device = torch.device(device)
        if not self.offload:
            self._place(self.device)

    def encode(self, prompts: Sequence[str]) -> tuple[Tensor, Tensor]:
        """Look up or encode.

        Raises:
            RuntimeError: a prompt that is not cached after `release`.
        """
        self._fill(prompts)
        rows = [self._cache[prompt] for prompt in prompts]
        for prompt in prompts:
            self._cache.move_to_end(prompt)
        while len(self._cache) > self._capacity:
            self._cache.popitem(last=False)
        return torch.stack([r[0] for r in rows]).to(self.device), torch.stack([r[1] for r in rows]).to(self.device)

    def cache(self, prompts: Sequence[str]) -> None:
        """Encode now and keep."""
        self._capacity = max(self._capacity, len(set(prompts) | set(self._cache)))
        self._fill(prompts)

    def release(self) -> None:
        """Drop the encoders; only cached prompts can be encoded from now on."""
        self.clip = self.t5 = None

    @torch.no_grad()
    def _fill(self, prompts: Sequence[str]) -> None:
        missing = [p for p in dict.fromkeys(prompts) if p not in self._cache]
        if not missing:
            return
        if self.clip is None or self.t5 is None:
            raise RuntimeError(
                f"the text encoders were released and {missing[0]!r} is not cached; set model.free_text_encoders=false"
            )
        self._place(self.device)
        for prompt in missing:  # one by one: an embedding must not depend on what it was batched with
            clip_ids = self._tokens(self.clip_tokenizer, prompt, self.clip_tokenizer.model_max_length)
            t5_ids = self._tokens(self.t5_tokenizer, prompt, self.max_sequence_length)
            text = self.t5(t5_ids).last_hidden_state
            self._cache[prompt] = (text[0].cpu(), self.clip(clip_ids).pooler_output[0].cpu())
        if self.offload:
            self._place(torch.device("cpu"))

    def _tokens(self, tokenizer: Any, prompt: str, length: int) -> Tensor:
        batch = tokenizer([prompt], padding="max_length", max_length=length, truncation=True, return_tensors="pt")
        return batch.input_ids.to(self.device)

    def _place(self, device: torch.device) -> None:
        for encoder in (self.clip, self.t5):
            if encoder is not None:
                encoder.to(device)  # type: ignore[arg-type]
