"""Messages between a server's front and its worker: JSON text followed by raw pixels. Never pickle.

A frame is a head and two parts. The head (big-endian) holds a magic word, the number of the batch, the lengths of the
parts, their CRC-32 and its own: after half a frame, a reader detects the error before it trusts a length, and a reply
names the batch that it answers. Scores are exact: Python's JSON writes the shortest decimal that reads back
as the same float.
"""

from __future__ import annotations

import json
import struct
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from retouch.rewards.protocol import Pixels, RewardItem, item_fields, item_from_fields, raw_bytes, raw_pixels
from retouch.types import Failure, Outcome, Score

_FIELDS = struct.Struct(">4sQQQI")
_CHECK = struct.Struct(">I")
_MAGIC = b"rtf1"

HEAD_BYTES = _FIELDS.size + _CHECK.size

NO_BATCH = 0
"""Number of a frame that is neither a batch nor the reply to one."""

PULSE = {"pulse": True}
"""Message that the process returns at once, as a sign of life."""


LATE = Failure("deadline", "the deadline passed before the item was scored", retryable=True)


@dataclass(frozen=True)
class BatchCost:
    """Cost of a batch: reward -> calls of its scorer, and their seconds.

    Attributes:
        raising: rewards whose scorer raised for every item that it got. A judge without an answer raises nothing:
            another process would get none either, and count its budget from 0 again.
    """

    calls: Mapping[str, int]
    seconds: Mapping[str, float]
    raising: Sequence[str] = ()


Scored = tuple[dict[str, list[Outcome]], BatchCost]


class BrokenFrame(Exception):
    """The bytes are not a frame; what follows them cannot be read either."""


@dataclass(frozen=True)
class Head:
    """The head of a frame.

    Attributes:
        number: of the batch; of a reply, the number of the batch that it answers.
        text: length of the JSON text in bytes.
        pixels: length of the pixels in bytes.
        crc: CRC-32 of both parts.
    """

    number: int
    text: int
    pixels: int
    crc: int


def pack(number: int, message: Mapping[str, Any], pixels: bytes = b"") -> bytes:
    """A whole frame."""
    return b"".join(parts_of(number, message, [memoryview(pixels)]))


def parts_of(number: int, message: Mapping[str, Any], pixels: Sequence[memoryview]) -> list[memoryview]:
    """A frame as parts to be sent one after the other: its pixels, gigabytes at worst, are not copied."""
    text = json.dumps(message).encode()
    crc = zlib.crc32(text)
    for chunk in pixels:
        crc = zlib.crc32(chunk, crc)
    fields = _FIELDS.pack(_MAGIC, number, len(text), sum(map(len, pixels)), crc)
    return [memoryview(fields + _CHECK.pack(zlib.crc32(fields)) + text), *pixels]


def read_head(data: bytes) -> Head:
    """The head of a frame, from its first `HEAD_BYTES` bytes.

    Raises:
        BrokenFrame: they are not a head.
    """
    fields, (check,) = data[: _FIELDS.size], _CHECK.unpack(data[_FIELDS.size :])
    magic, *values = _FIELDS.unpack(fields)
    if magic != _MAGIC or check != zlib.crc32(fields):
        raise BrokenFrame("no frame begins here")
    return Head(*values)


def read_message(head: Head, text: bytes, pixels: bytes) -> dict[str, Any]:
    """The JSON message of a frame.

    Raises:
        BrokenFrame: the parts differ from those that were packed.
    """
    if (len(text), len(pixels), zlib.crc32(pixels, zlib.crc32(text))) != (head.text, head.pixels, head.crc):
        raise BrokenFrame("the parts of a frame are not as long as, or other than, its head declares")
    return json.loads(text)


def pack_items(items: Sequence[RewardItem]) -> tuple[list[dict[str, Any]], list[memoryview]]:
    """Items as JSON values that name their images by (offset, shape), and the bytes of the images; an image that
    several items share (the source of a group) is included once."""
    places: dict[int, list[int]] = {}
    chunks: list[memoryview] = []
    size = 0

    def put(pixels: Pixels) -> list[int]:
        nonlocal size
        if id(pixels) not in places:
            places[id(pixels)] = [size, *pixels.shape]
            chunks.append(raw_bytes(pixels))
            size += len(chunks[-1])
        return places[id(pixels)]

    return [item_fields(item, put) for item in items], chunks


def unpack_items(rows: Sequence[Mapping[str, Any]], pixels: bytes) -> list[RewardItem]:
    """The items that `pack_items` packed."""
    return [item_from_fields(row, lambda place, _: raw_pixels(pixels, place[1:], place[0])) for row in rows]


def pack_outcome(outcome: Outcome) -> list[Any]:
    if isinstance(outcome, Score):
        return [outcome.value, dict(outcome.detail)]
    return [outcome.code, outcome.message, outcome.retryable]


def unpack_outcome(row: Sequence[Any]) -> Outcome:
    return Score(row[0], row[1]) if len(row) == 2 else Failure(*row)
