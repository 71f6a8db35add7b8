"""Questions of published judges, word for word: a judge that was trained on one answers another one differently.

NOTICE names the source and the licence of each file.
"""

from __future__ import annotations

from functools import cache
from importlib import resources

PROMPT = "{prompt}"
"""Stands for the prompt of the item, or for the instruction of an edit."""


@cache
def rubric(name: str) -> str:
    """The text of a question, with `PROMPT` in place of the item's prompt."""
    return resources.files(__name__).joinpath(f"{name}.txt").read_text(encoding="utf-8")
