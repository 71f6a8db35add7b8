"""A VLM in this process as the judge: Qwen2.5-VL and Qwen3-VL through transformers.

One forward and no generation: the score is read from the probabilities of the next token. `digits` takes the mean of
0 .. 5 under theirs, `yes` the probability of yes against no. Every variant of such a word that the tokenizer has as one
token (another case, a leading space) counts. For large judges serve them by vLLM or SGLang, and use `openai_judge`.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated, Any, Literal

from PIL import Image
from pydantic import Field

from retouch.config.base import Count, Text, Unit, containing
from retouch.errors import ConfigError, installed
from retouch.rewards.base import PackageScorer, RewardEntry, in_batches
from retouch.rewards.protocol import RewardItem
from retouch.rewards.scorers.weights import loading, version_of
from retouch.types import Failure, Outcome, Score

if TYPE_CHECKING:
    from torch import Tensor

Mode = Literal["digits", "yes"]

_VALUES: dict[Mode, dict[str, float]] = {
    "digits": {str(k): k / 5 for k in range(6)},
    "yes": {"yes": 1.0, "no": 0.0},
}
"""Answer -> its value."""

_ANSWER: dict[Mode, str] = {
    "digits": "Answer with one digit from 0 (not at all) to 5 (perfectly) and nothing else.",
    "yes": "Answer with yes or no and nothing else.",
}
_IMAGE = "<|image_pad|>"


class VlmReward(RewardEntry):
    """Score of a Qwen2.5-VL or Qwen3-VL on this machine, in [0, 1]: one forward, no generated text."""

    licence = "of the model"

    scorer: Literal["vlm"] = "vlm"
    path: Text = "Qwen/Qwen2.5-VL-7B-Instruct"
    """Hub id or folder."""
    # its text is part of the revision, and another one gives other scores
    question: Annotated[str, containing("{prompt}", "the item's prompt")] = (
        "How well does this picture show what was asked for? It was asked for: {prompt}"
    )
    """Question to the model; {prompt} stands for the item's prompt."""
    mode: Mode = "digits"
    """The expectation over the probabilities of the digits 0 to 5, divided by 5; or the probability of yes against
    no."""
    min_mass: Unit = 0.5
    """Minimum probability of the score tokens together; below it the answer was something else, which is a failure."""
    dtype: Literal["bf16", "fp16", "fp32"] = "bf16"
    """Data type of the weights."""
    max_pixels: Annotated[int, Field(ge=1, le=1 << 26)] = 1003520
    """Larger images are scaled down to this number of pixels."""
    images_per_forward: Count = 8
    """Images per forward; changes memory and speed, and the score by rounding."""

    def make(self) -> VlmScorer:
        return VlmScorer(self)


class VlmScorer(PackageScorer[VlmReward]):
    """Reads the score from the next token of a VLM."""

    def __init__(self, options: VlmReward) -> None:
        super().__init__(options)
        self._describe("")

    def load(self, device: str) -> None:
        """Load the model, its tokenizer and its image processor.

        Raises:
            ConfigError: transformers is missing, there is no such model, or its tokenizer has no token of a score.
        """
        with installed():
            import torch
            from transformers import AutoModelForImageTextToText, AutoTokenizer
            from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil
        self._torch, self._device = torch, device
        dtype = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}[self.options.dtype]
        with loading("path", self.options.path) as place:
            model: Any = AutoModelForImageTextToText.from_pretrained(place, dtype=dtype)
            self._tokens: Any = AutoTokenizer.from_pretrained(place)
            # the one that needs no torchvision
            self._processor: Any = Qwen2VLImageProcessorPil.from_pretrained(place)
        self._model = model.eval().to(device)
        self._processor.size = {**dict(self._processor.size), "longest_edge": self.options.max_pixels}
        if self._tokens.convert_tokens_to_ids(_IMAGE) != model.config.image_token_id:
            raise ConfigError(
                f"path: given {self.options.path!r}: not a Qwen2.5-VL or Qwen3-VL; its tokenizer has no {_IMAGE}"
            )
        self._ids = {word: self._variants(word) for word in _VALUES[self.options.mode]}
        self._describe(version_of(self.options.path, model.config))

    def score(self, items: Sequence[RewardItem]) -> list[Outcome]:
        return [one for batch in in_batches(items, self.options.images_per_forward) for one in self._batch(batch)]

    def _batch(self, items: Sequence[RewardItem]) -> list[Outcome]:
        torch, values = self._torch, _VALUES[self.options.mode]
        probabilities = self._next_token(items).softmax(-1)
        ids = [torch.tensor(self._ids[word], dtype=torch.long, device=self._device) for word in values]
        columns = [probabilities[:, variants].sum(1) for variants in ids]
        words = torch.stack(columns, 1).double().cpu()
        mass = words.sum(1)
        expected = (words * torch.tensor(list(values.values()), dtype=torch.float64)).sum(1) / mass.clamp(min=1e-12)
        return [
            Score(float(value), {"mass": float(m)})
            if m > 0 and m >= self.options.min_mass
            else Failure("low_mass", f"the score tokens have {float(m):.2f} of the probability")
            for value, m in zip(expected, mass, strict=True)
        ]

    def _next_token(self, items: Sequence[RewardItem]) -> Tensor:
        """[B, V] fp32 logits of the first token of the answers."""
        torch = self._torch
        seen = self._processor(images=[Image.fromarray(item.image) for item in items], return_tensors="pt")
        cells = (seen["image_grid_thw"].prod(1) // self._processor.merge_size**2).tolist()
        rows: list[list[int]] = [
            self._tokens(self._chat(item.prompt, n), add_special_tokens=False)["input_ids"]
            for item, n in zip(items, cells, strict=True)
        ]
        length = max(map(len, rows))
        pad = self._tokens.pad_token_id or 0
        # left padding: the answer begins at the last column of every row
        ids = torch.tensor([[pad] * (length - len(row)) + row for row in rows], dtype=torch.long)
        mask = torch.tensor([[0] * (length - len(row)) + [1] * len(row) for row in rows], dtype=torch.long)
        inputs = {
            "input_ids": ids,
            "attention_mask": mask,
            "mm_token_type_ids": ((ids == self._model.config.image_token_id) & mask.bool()).int(),
            "pixel_values": seen["pixel_values"].to(self._model.dtype),
            "image_grid_thw": seen["image_grid_thw"],
        }
        with torch.inference_mode():
            placed = {name: t.to(self._device) for name, t in inputs.items()}
            return self._model(**placed, logits_to_keep=1, use_cache=False).logits[:, -1].float()

    def _chat(self, prompt: str, cells: int) -> str:
        """The question before the image, in Qwen's chat format; special tokens in a prompt become plain text."""
        plain = prompt.replace("<|", "< |")
        text = f"{self.options.question.replace('{prompt}', plain)}\n{_ANSWER[self.options.mode]}"
        image = f"<|vision_start|>{_IMAGE * cells}<|vision_end|>"
        return f"<|im_start|>user\n{text}{image}<|im_end|>\n<|im_start|>assistant\n"

    def _variants(self, word: str) -> list[int]:
        """Ids of the tokens that are this word, in any case and with a leading space."""
        spelled = dict.fromkeys(space + form for form in (word, word.capitalize(), word.upper()) for space in ("", " "))
        encoded = [self._tokens(text, add_special_tokens=False)["input_ids"] for text in spelled]
        found = sorted({ids[0] for ids in encoded if len(ids) == 1})
        if not found:
            raise ConfigError(f"path: given {self.options.path!r}: its tokenizer has no single token for {word!r}")
        return found

    def _describe(self, commit: str) -> None:
        o = self.options
        text = json.dumps([o.question, o.mode, o.min_mass, o.dtype, o.max_pixels, o.images_per_forward])
        digest = hashlib.blake2b(text.encode(), digest_size=6).hexdigest()
        self.set_revision(f"vlm {o.path} {commit} {digest}")
