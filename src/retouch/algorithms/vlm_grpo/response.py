"""From what a vision-language model said to text states: the very tokens that it saw and generated, in one pass.

Nothing is decoded and tokenised again: another tokenisation of the same words would condition the picture on something
that the policy never said. Pictures go along with all that the processor made of them, their positions included.

Legend: B rows, P prompt tokens, C completion tokens, S kept states, D width.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from retouch.errors import ResponseTooLong
from retouch.families.qwen.text import evaluating


@dataclass(frozen=True)
class Responses:
    """What a policy saw and said, row by row, without padding.

    Attributes:
        prompt_ids: P tokens of each of B rows, pads of pictures included.
        completion_ids: C tokens of each; the end-of-turn token belongs to them where there is one.
        fields: what the processor made beside the ids: by token as a list [P] for each row (`mm_token_type_ids`), by
            picture (`image_grid_thw` [pictures, 3]) or by patch of a picture (`pixel_values` [patches, ...]).
        pictures: how many each row has.
    """

    prompt_ids: Sequence[Sequence[int]]
    completion_ids: Sequence[Sequence[int]]
    fields: Mapping[str, Any] = field(default_factory=dict[str, Any])
    pictures: Sequence[int] = ()

    def __len__(self) -> int:
        return len(self.prompt_ids)

    def rows(self, start: int, stop: int) -> Responses:
        """Rows start ... stop - 1 with their pictures."""
        counts = list(self.pictures) or [0] * len(self)
        first, last = sum(counts[:start]), sum(counts[:stop])
        patches = self._patches()
        cut: dict[str, Any] = {}
        for name, value in self.fields.items():
            if isinstance(value, list):
                cut[name] = value[start:stop]
            elif len(value) == len(patches):
                cut[name] = value[first:last]
            else:
                cut[name] = value[sum(patches[:first]) : sum(patches[:last])]
        return Responses(self.prompt_ids[start:stop], self.completion_ids[start:stop], cut, counts[start:stop])

    def _patches(self) -> list[int]:
        """Patches of each picture."""
        grid = self.fields.get("image_grid_thw")
        return [] if grid is None else torch.as_tensor(grid).prod(-1).tolist()


def encode_response(
    model: Any,  # Qwen2_5_VLForConditionalGeneration, with or without a PEFT adapter in it
    responses: Responses,
    *,
    pad_token_id: int,
    drop: int,
    limit: int | None = None,
    truncate: bool = False,
    batch_size: int = 8,
    adapter: bool = True,
) -> tuple[list[Tensor], int]:
    """States of the last layer of prompt and completion, the system part cut off -> ([S, D] of each row, rows cut).

    One pass over the ids as they are, left-padded as the policy generates from them, in eval mode, without gradient.
    Padding is dropped once, by its count, and then the `drop` tokens of the system part.

    Args:
        drop: tokens of the chat before the user's (`prefix_length`).
        limit: states that a row may have; None: any number.
        truncate: cut the last ones off and count the row, instead of an error.
        adapter: False takes the model without its adapter.

    Raises:
        ResponseTooLong: more states than `limit`, and not to be cut.
    """
    inner, device = _language_model(model), next(model.parameters()).device
    states: list[Tensor] = []
    cut = 0
    with evaluating(model), _adapter(model, adapter):
        for start in range(0, len(responses), batch_size):
            part = responses.rows(start, start + batch_size)
            inputs = {name: value.to(device) for name, value in model_inputs(part, pad_token_id).items()}
            hidden: Tensor = inner(**inputs, use_cache=False).last_hidden_state
            lengths = inputs["attention_mask"].sum(1).tolist()
            for row, length in zip(hidden, lengths, strict=True):
                kept = row[len(row) - length + drop :]
                if limit is not None and len(kept) > limit:
                    if not truncate:
                        raise ResponseTooLong(
                            f"a prompt and its completion give {len(kept)} text states, model.max_sequence_length is "
                            f"{limit}; raise it, lower algorithm.trl.max_completion_length, or set "
                            "algorithm.on_overflow=truncate"
                        )
                    kept, cut = kept[:limit], cut + 1
                states.append(kept.detach().clone())
    return states, cut


def model_inputs(responses: Responses, pad_token_id: int) -> dict[str, Tensor]:
    """What the model takes of prompt and completion, padded on the left."""
    ids = [[*p, *c] for p, c in zip(responses.prompt_ids, responses.completion_ids, strict=True)]
    longest = max(len(row) for row in ids)
    inputs = {
        "input_ids": _left([(row, pad_token_id) for row in ids], longest),
        "attention_mask": _left([([1] * len(row), 0) for row in ids], longest),
    }
    for name, value in responses.fields.items():
        if isinstance(value, list):  # by token of the prompt; a completion is text, which is 0
            full = [[*row, *[0] * len(c)] for row, c in zip(value, responses.completion_ids, strict=True)]
            inputs[name] = _left([(row, 0) for row in full], longest)
        else:
            inputs[name] = torch.as_tensor(value)
    return inputs


def _left(rows: Sequence[tuple[Sequence[int], int]], length: int) -> Tensor:
    return torch.tensor([[pad] * (length - len(row)) + list(row) for row, pad in rows])


def _language_model(model: Any) -> nn.Module:
    """What gives states instead of logits."""
    base = model.get_base_model() if hasattr(model, "get_base_model") else model
    return base.model


def _adapter(model: Any, active: bool) -> Any:
    """Around a pass with the adapter, or without where there is one."""
    return nullcontext() if active or not hasattr(model, "disable_adapter") else model.disable_adapter()
