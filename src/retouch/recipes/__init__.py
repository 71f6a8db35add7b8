"""The algorithms: each file reads from top to bottom as its paper's."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from retouch.build import Run

RECIPES = {
    "sft": "retouch.recipes.sft:train",
    "grpo": "retouch.recipes.grpo:train",
    "ppo": "retouch.recipes.grpo:train",
    "dpo": "retouch.recipes.dpo:train",
    "nft": "retouch.recipes.nft:train",
}
"""`algorithm.name` -> module:function."""


def recipe(name: str) -> Callable[[Run], None]:
    """The training function of an algorithm."""
    module, _, function = RECIPES[name].partition(":")
    return getattr(importlib.import_module(module), function)
