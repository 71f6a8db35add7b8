"""The cache of text encoders: what is kept, and for how long."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from retouch.families.text import TextEncoders


class Lengths:
    """Encodes a prompt as its length, and remembers what it was asked."""

    def __init__(self) -> None:
        self.model = nn.Linear(1, 1)
        self.asked: list[str] = []

    def __call__(self, prompts: Sequence[str]) -> Tensor:
        self.asked += prompts
        return torch.tensor([[float(len(prompt))] for prompt in prompts])


def test_one_prompt_after_the_other_is_not_kept_for_ever() -> None:
    """Whichever way they are asked for, the ones used longest ago are dropped."""
    made: Any = Lengths()
    text = TextEncoders({"text": made}, capacity=2)
    for prompt in ("a", "bb", "a", "ccc"):
        assert text.rows([prompt])[0]["text"].tolist() == [len(prompt)]
    assert made.asked == ["a", "bb", "ccc"]
    text.rows(["bb"])
    assert made.asked == ["a", "bb", "ccc", "bb"]


def test_encoders_that_are_released_leave_no_weights_behind() -> None:
    made: Any = Lengths()
    text = TextEncoders({"text": made})
    network = weakref.ref(made.model)
    text.cache_and_release(["a"])
    del made
    assert network() is None and text.rows(["a"])[0]["text"].tolist() == [1]


def test_what_was_cached_on_purpose_stays() -> None:
    made: Any = Lengths()
    text = TextEncoders({"text": made}, capacity=1)
    text.cache_and_release(["a", "bb", "ccc"])
    assert [text.rows([prompt])[0]["text"].item() for prompt in ("ccc", "a", "bb")] == [3.0, 1.0, 2.0]


class Moved(nn.Linear):
    """Remembers where it was moved."""

    def __init__(self) -> None:
        super().__init__(1, 1)
        self.moves: list[str] = []

    def to(self, *args: Any, **kwargs: Any) -> Any:
        self.moves.append(str(args[0]))
        return self


def test_encoders_are_moved_once_for_many_prompts() -> None:
    made: Any = Lengths()
    made.model = moved = Moved()
    text = TextEncoders({"text": made}, device="meta")
    with text.placement.kept_on_device():
        assert moved.moves == []  # nothing to encode yet
        with text.placement.kept_on_device():
            text.rows(["a"])
        text.rows(["bb"])
        assert moved.moves == ["meta"]  # the second finds it there
    assert moved.moves == ["meta", "cpu"]
    with text.placement.kept_on_device():
        text.rows(["a"])  # kept
    text.rows(["ccc"])
    assert moved.moves[2:] == ["meta", "cpu"]


def test_encoders_that_are_not_offloaded_stay() -> None:
    made: Any = Lengths()
    made.model = moved = Moved()
    text = TextEncoders({"text": made}, device="meta", offload=False)
    with text.placement.kept_on_device():
        text.rows(["a"])
    assert "cpu" not in moved.moves
