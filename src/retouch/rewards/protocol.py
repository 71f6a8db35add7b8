"""The scorer protocol, its items, and `CheckedScorer`. No torch."""

from __future__ import annotations

import itertools
import json
import math
import re
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from typing import Any, Protocol, cast

import numpy as np
from numpy.typing import NDArray

from retouch.errors import ConfigError, code_place, is_device_full, shown
from retouch.imaging.lines import TextLine, parse_lines
from retouch.rewards.foreign import CUT, MOST_CHARACTERS, one_line
from retouch.rewards.quotes import quoted_text, quoted_texts
from retouch.types import Failure, Outcome, Score

PICTURES = ("image", "mask", "source", "reference")
"""Fields of an item that hold pixels."""

Pixels = NDArray[np.uint8]


@dataclass(frozen=True)
class RewardItem:
    """One image to score.

    Attributes:
        image: [H, W, 3] uint8 RGB.
        mask: [H, W] uint8, 255 = repainted.
        source: [H, W, 3], the source image.
        reference: style reference of any size.
        group: id of its group.
        metadata: JSON values; `text` is the target text.
    """

    id: int | str
    prompt: str
    image: Pixels
    mask: Pixels | None = None
    source: Pixels | None = None
    reference: Pixels | None = None
    group: int | None = None
    metadata: Mapping[str, Any] = field(default_factory=dict[str, Any])


@dataclass(frozen=True)
class ScorerSpec:
    """Facts about a scorer.

    Attributes:
        range: lowest and highest value, finite; a value outside is a failure.
        needs: required fields of `RewardItem` other than image and prompt.
        revision: changes whenever the same image may get another score.

    Raises:
        ConfigError: the range is descending, or contains NaN or Inf.
    """

    name: str
    range: tuple[float, float]
    needs: frozenset[str]
    revision: str
    licence: str

    def __post_init__(self) -> None:
        low, high = self.range
        if not -math.inf < low <= high < math.inf:  # JSON has no infinity
            raise ConfigError(
                f"reward {self.name!r}: given value_range={self.range}; expected two bounds, the lowest first, "
                "without NaN or Inf; set value_range=(-1e9, 1e9) in its entry if it has no bounds"
            )


class Scorer(Protocol):
    """Scores batches of items. One instance is used from one thread at a time."""

    @property
    def spec(self) -> ScorerSpec: ...

    def load(self, device: str) -> None:
        """Load what it needs; called once, before the first `score`."""
        ...

    def score(self, items: Sequence[RewardItem]) -> list[Outcome]:
        """One outcome per item, in order. An item that it cannot score gets a `Failure`; it raises only if all fail."""
        ...


class RewardBackend(Protocol):
    """Where rewards are computed: in this process, or on servers."""

    def submit(
        self, items: Sequence[RewardItem], rewards: Sequence[str] | None = None
    ) -> Future[dict[str, list[Outcome]]]:
        """Start scoring by all rewards, or by those named -> future of reward name -> one outcome per item, in order.
        It never raises for a failed reward."""
        ...

    def wait_ready(self, timeout_s: float, every_server: bool = True) -> list[str]:
        """Block until every reward can be scored -> problems that remain when time is up.

        Args:
            every_server: whether all servers must be ready, or one is enough.
        """
        ...

    def close(self) -> None: ...


def text_to_read(item: RewardItem) -> str | Failure:
    """`metadata.text`, else the quoted part of the prompt, else a failure."""
    text = item.metadata.get("text")
    if text is not None and not isinstance(text, str):
        return Failure("bad_item", f"metadata.text must be a string; given {text!r}")
    if text and text.strip():
        return text
    found = quoted_text(item.prompt)
    if found is not None:
        return found
    return Failure("bad_item", "no text to read: set metadata.text, or put the text in quotes in the prompt")


def lines_to_read(item: RewardItem) -> tuple[TextLine, ...] | Failure:
    """`metadata.lines`, else `metadata.text` as one line, else every quoted part of the prompt; else a failure."""
    if "lines" in item.metadata:
        try:
            return parse_lines(item.metadata["lines"])
        except ValueError as error:
            return Failure("bad_item", f"metadata.lines: {error}")
    text = text_to_read(item)
    if isinstance(text, Failure):
        return text
    given = item.metadata.get("text")
    lines = [text] if isinstance(given, str) and given.strip() else quoted_texts(item.prompt)
    return tuple(TextLine(line.strip()) for line in lines)


def missing_needs(spec: ScorerSpec, item: RewardItem) -> Failure | None:
    """A failure if a field that this scorer needs is missing."""
    missing = sorted(name for name in spec.needs if getattr(item, name, None) is None)
    return Failure("bad_item", f"{spec.name} needs {', '.join(missing)}") if missing else None


def malformed(item: RewardItem) -> Failure | None:
    """A failure if a field of the item has a wrong type: the item fails alone, and in the same way in this process and
    on a server."""
    for name in PICTURES:
        pixels: object = getattr(item, name)
        if (pixels is not None or name == "image") and not _is_image(pixels, flat=name == "mask"):
            shape = "[H, W]" if name == "mask" else "[H, W, 3]"
            given = f"{pixels.dtype} {pixels.shape}" if isinstance(pixels, np.ndarray) else type(pixels).__name__
            return Failure("bad_item", f"{name} must be uint8 pixels {shape}; given {given}")
    if not isinstance(item.prompt, str):  # pyright: ignore[reportUnnecessaryIsInstance]
        return Failure("bad_item", f"prompt must be a string; given {item.prompt!r}")
    try:
        _json({"prompt": item.prompt})
        _json(item.metadata)
    except (TypeError, ValueError) as error:
        return Failure("bad_item", f"prompt and metadata must be JSON values under string keys: {error}")
    return None


def _is_image(pixels: object, flat: bool) -> bool:
    if not isinstance(pixels, np.ndarray) or pixels.dtype != np.uint8 or 0 in pixels.shape:
        return False
    return pixels.ndim == 2 if flat else pixels.ndim == 3 and pixels.shape[2] == 3


def _json(value: Mapping[str, Any]) -> str:
    """The value as JSON text.

    Raises:
        TypeError, ValueError: not JSON, NaN, infinity, half of a surrogate pair, or a key that is not a string.
    """
    if not all(isinstance(key, str) for key in value):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise TypeError("a key is not a string")
    text = json.dumps(dict(value), allow_nan=False, ensure_ascii=False)
    text.encode()  # half of a surrogate pair is valid in a Python str, but not in UTF-8
    return text


def item_fields(item: RewardItem, put: Callable[[Pixels], Any]) -> dict[str, Any]:
    """An item as JSON values: in place of each of its images, what `put` returns for it."""
    images = {name: put(pixels) for name in PICTURES if (pixels := getattr(item, name)) is not None}
    return {"id": item.id, "prompt": item.prompt, "group": item.group, "metadata": dict(item.metadata), **images}


def item_from_fields(fields: Mapping[str, Any], image_at: Callable[[Any, str], Pixels]) -> RewardItem:
    """The item of such values.

    Args:
        image_at: the image of a value, and of a field of the item.
    """
    images = {name: image_at(fields[name], name) for name in PICTURES if fields.get(name) is not None}
    return RewardItem(fields["id"], fields["prompt"], group=fields["group"], metadata=fields["metadata"], **images)


def raw_bytes(pixels: Pixels) -> memoryview:
    """The bytes of an image, row by row; not copied where they lie like this."""
    return np.ascontiguousarray(pixels).reshape(-1).data


def raw_pixels(data: bytes, shape: Sequence[int], offset: int = 0) -> Pixels:
    """The image of this shape whose bytes begin at `offset`, not copied."""
    return np.frombuffer(data, np.uint8, math.prod(shape), offset).reshape(shape)


class CheckedScorer:
    """A scorer that returns only typed outcomes, whatever the wrapped one does.

    Items with missing fields fail alone. A batch that raises is halved until the failing item is alone: one bad image
    of n costs at most 2 log2(n) further calls. A batch that ran out of memory is halved too, and later batches are no
    larger. A scorer that compares the samples of a group gets whole groups in each call.

    Attributes:
        calls: number of calls of the scorer.
        largest: items, or groups, per call since memory ran out; None before.
        returned: number of items for which the scorer returned.
    """

    def __init__(self, scorer: Scorer) -> None:
        self.scorer = scorer
        self.calls = 0
        self.returned = 0
        self.largest: int | None = None

    def score(self, items: Sequence[RewardItem]) -> list[Outcome]:
        """One outcome per item, in order."""
        outcomes: list[Outcome | None] = [malformed(item) or missing_needs(self.scorer.spec, item) for item in items]
        ready = [i for i, outcome in enumerate(outcomes) if outcome is None]
        # parts that are never split: single items, or the samples of a group, which follow each other
        parts = [[items[i]] for i in ready]
        if getattr(self.scorer, "compares_group", False):
            groups = itertools.groupby([items[i] for i in ready], lambda item: item.group)
            parts = [list(group) for _, group in groups]
        scored = self._in_batches(parts)
        for i, outcome in zip(ready, scored, strict=True):
            outcomes[i] = outcome
        return [outcome for outcome in outcomes if outcome is not None]

    def _in_batches(self, parts: list[list[RewardItem]]) -> list[Outcome]:
        outcomes: list[Outcome] = []
        while parts:
            taken = self.largest or len(parts)  # may shrink meanwhile
            outcomes += self._attempt(parts[:taken])
            parts = parts[taken:]
        return outcomes

    def _attempt(self, parts: list[list[RewardItem]]) -> list[Outcome]:
        name, items = self.scorer.spec.name, [item for part in parts for item in part]
        self.calls += 1
        try:
            answer: object = self.scorer.score(items)
            raw = list(cast("Iterable[object]", answer)) if isinstance(answer, Iterable) else None
        except Exception as error:  # a scorer is foreign code: any error is a typed failure of its items
            if len(parts) == 1:
                return [raised(name, error)] * len(items)
            half = len(parts) // 2
            if isinstance(error, MemoryError) or is_device_full(error):
                self.largest = min(half, self.largest or half)
                torch = sys.modules.get("torch")
                if torch is not None and torch.cuda.is_available():
                    torch.cuda.empty_cache()
            return self._attempt(parts[:half]) + self._attempt(parts[half:])
        self.returned += len(items)
        if raw is None or len(raw) != len(items):
            given = shown(answer) if raw is None else f"{len(raw)} outcomes"
            message = f"{name} returned {given} for {len(items)} items; score must return one outcome for each item"
            return [Failure("scorer_error", message) for _ in items]
        return [_sound(outcome, self.scorer.spec) for outcome in raw]


def raised(name: str, error: Exception) -> Failure:
    """The failure of an item whose scorer raised an error; its place follows a message that may be cut."""
    place = one_line(code_place(error), most=300)
    told = one_line(f"{name} raised {type(error).__name__}: {error}", most=MOST_CHARACTERS - len(place))
    return Failure("scorer_error", told + place)


_SLACK = 1e-6
"""Fraction of a bound by which rounding may exceed it."""


def within(value: float, low: float, high: float) -> bool:
    """Whether a value is in a declared range, up to rounding."""
    return low - _SLACK * max(1.0, abs(low)) <= value <= high + _SLACK * max(1.0, abs(high))


def _sound(outcome: object, spec: ScorerSpec) -> Outcome:
    name, (low, high) = spec.name, spec.range
    if isinstance(outcome, Failure):
        return replace(outcome, message=one_line(str(outcome.message)))
    if not isinstance(outcome, Score) or isinstance(outcome.value, bool) or not isinstance(outcome.value, int | float):  # pyright: ignore[reportUnnecessaryIsInstance]
        return Failure(
            "scorer_error",
            one_line(f"{name} returned {shown(outcome)}; it must return a Score with a float, or a Failure"),
        )
    try:
        value = float(outcome.value)
    except OverflowError:  # an int beyond the floats
        value = math.inf
    if not math.isfinite(value):
        return Failure("scorer_error", f"{name} returned {value}")
    if not within(value, low, high):
        return Failure("scorer_error", f"{name} returned {value:g}, outside its range of {low:g} to {high:g}")
    try:
        # through JSON: the caller gets the same from local and remote scorers, and a bad detail fails its item alone
        return Score(value, plain_detail(json.loads(_json(outcome.detail))))
    except (TypeError, ValueError, RecursionError) as error:
        return Failure("scorer_error", f"{name} returned a detail that is not JSON, or too long: {error}")


MOST_TEXT, MOST_KEY = 10_000, 100
"""Maximum lengths of a text and of a key of a detail."""

MOST_KEYS, MOST_VALUES = 200, 10_000
"""Maximum number of keys of a detail, and of values in it at any depth."""

MOST_LEVELS = 100
"""Maximum depth of a detail. Python's own limit depends on its version and on the caller."""

_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")


def plain_detail(detail: Mapping[str, Any], secret: str | None = None) -> dict[str, Any]:
    """The detail of a score, JSON values, for files, tables and a terminal: texts of at most `MOST_TEXT` characters, in
    which spaces replace control characters other than line breaks and tabs, without the secret.

    Raises:
        ValueError: more than `MOST_KEYS` keys, each of which is a column of an evaluation, `MOST_VALUES` values or
            `MOST_LEVELS` levels; or an integer beyond the floats.
    """
    if len(detail) > MOST_KEYS:
        raise ValueError(f"a detail of {len(detail)} keys, over the limit of {MOST_KEYS}")
    left = MOST_VALUES

    def plain(given: Any, level: int = 0) -> Any:
        nonlocal left
        left -= 1
        if level > MOST_LEVELS:
            raise ValueError("a detail that is nested too deep")
        if left < 0:
            raise ValueError(f"a detail of more than {MOST_VALUES} values")
        if isinstance(given, dict):
            pairs = cast("dict[str, Any]", given).items()
            return {_plain_text(key, secret, MOST_KEY): plain(one, level + 1) for key, one in pairs}
        if isinstance(given, list):
            return [plain(one, level + 1) for one in cast("list[Any]", given)]
        if isinstance(given, int):
            float(given)  # OverflowError: no reader of JSON could hold it
        return _plain_text(given, secret, MOST_TEXT) if isinstance(given, str) else given

    try:
        return plain(dict(detail))
    except OverflowError:
        raise ValueError("a detail with a number beyond the floats") from None


def _plain_text(text: str, secret: str | None, most: int) -> str:
    text = text.replace(secret, "***") if secret else text
    text = _CONTROL.sub(" ", text)
    return text if len(text) <= most else text[:most] + CUT
