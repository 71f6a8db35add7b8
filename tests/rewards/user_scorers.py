"""Scorers as a user would name them: `fn: tests.rewards.user_scorers:brightness`. Run in processes of their own."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from retouch.rewards.protocol import RewardItem
from retouch.types import Failure, Outcome, Score


def brightness(items: Sequence[RewardItem]) -> list[float]:
    """Of each picture by itself: its batch changes nothing. Sleeps first as long as the items say, or computes so many
    digits in one call, which holds the interpreter's lock; first of all it writes the file `begun`."""
    for begun in [item.metadata["begun"] for item in items if "begun" in item.metadata]:
        Path(begun).touch()
    time.sleep(sum(float(item.metadata.get("sleep", 0)) for item in items))
    sys.set_int_max_str_digits(0)
    str(10 ** max(int(item.metadata.get("digits", 0)) for item in items))
    return [float(item.image.mean() / 255) for item in items]


def slow_brightness(items: Sequence[RewardItem]) -> list[float]:
    """With the latency of a call in the environment variable REWARD_LATENCY_S."""
    time.sleep(float(os.environ.get("REWARD_LATENCY_S", "0")))
    return brightness(items)


class Loaded:
    """Has something to load; fails what is dark; returns a number of numpy."""

    def load(self, device: str) -> None:
        self.device = device

    def score(self, items: Sequence[RewardItem]) -> list[Outcome | np.float32]:
        assert self.device
        return [Failure("bad_item", "too dark") if not i.image.any() else np.float32(0.25) for i in items]


class DiesLoading:
    def load(self, device: str) -> None:
        os._exit(9)

    def score(self, items: Sequence[RewardItem]) -> list[Outcome]:
        return [Score(0.0)] * len(items)


class FailsWhile:
    """Dies while it loads, or raises, as long as the file in the environment variable FAILS_WHILE says so."""

    def load(self, device: str) -> None:
        told = Path(os.environ["FAILS_WHILE"])
        if told.exists():
            if told.read_text() == "dies":
                os._exit(9)
            raise RuntimeError("no memory on the device")

    def score(self, items: Sequence[RewardItem]) -> list[Outcome]:
        return [Score(0.5)] * len(items)


def forks(items: Sequence[RewardItem]) -> list[Score]:
    """Forks a helper that outlives the call, and returns its process id."""
    pid = os.fork()
    if pid == 0:
        time.sleep(600)
        os._exit(0)
    return [Score(0.5, {"pid": pid})] * len(items)


_spoiled = False


def spoilt(items: Sequence[RewardItem]) -> list[float]:
    """Raises in every batch after one with an item that spoils the process, as an error on a GPU does."""
    global _spoiled
    _spoiled = _spoiled or any(item.metadata.get("spoils") for item in items)
    if _spoiled:
        raise RuntimeError("device-side assert triggered")
    return [0.5] * len(items)


def prints(items: Sequence[RewardItem]) -> list[float]:
    """Prints a megabyte for each item, and why it ends at the last one."""
    for item in items:
        sys.stderr.write(("x" * 1023 + "\n") * 1024)
        if item.metadata.get("last"):
            sys.stderr.write("the reason of the end\n")
            sys.stderr.flush()
            os._exit(9)
    return [0.5] * len(items)


REGIONS: Any = 0


def regions(picture: Any) -> Any:
    """What a segmenter would count in an RGB array."""
    assert picture.ndim == 3
    return float(REGIONS)


def short(completions: list[str], **columns: Any) -> list[float | None]:
    """A reward function of TRL: short texts, and no value for an empty one. It checks the columns that it gets."""
    assert {"prompts", "images", "source_images", "level"} <= columns.keys() and "completion" not in columns
    assert all(len(column) == len(completions) for column in columns.values())
    return [1 / len(text.split()) if text else None for text in completions]


def of_prompts(completions: list[str], prompts: list[str]) -> list[float]:
    """A reward function of TRL without **kwargs."""
    return [float(text in prompt) for text, prompt in zip(completions, prompts, strict=True)]
