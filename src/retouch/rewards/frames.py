"""Messages between a server's HTTP front and its model worker: a JSON head and raw pixels after it. Never pickle.

A frame is the lengths of its two parts (8 bytes each, big-endian), then the parts. Scores stay what they are: JSON of
Python writes the shortest decimal that reads back as the same float.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from retouch.rewards.protocol import PICTURES, Pixels, RewardItem
from retouch.types import Failure, Outcome, Score

LENGTHS = struct.Struct(">QQ")


def pack(head: Mapping[str, Any], pixels: bytes = b"") -> bytes:
    """A whole frame."""
    text = json.dumps(head).encode()
    return LENGTHS.pack(len(text), len(pixels)) + text + pixels


def pack_items(items: Sequence[RewardItem]) -> tuple[list[dict[str, Any]], bytes]:
    """Items as JSON values that name their pictures by (offset, shape), and the bytes of these; a picture that several
    items share (the source of a group) stands there once."""
    places: dict[int, list[Any]] = {}
    chunks: list[bytes] = []
    offset = 0
    rows: list[dict[str, Any]] = []
    for item in items:
        row: dict[str, Any] = {
            "id": item.id, "prompt": item.prompt, "group": item.group, "metadata": dict(item.metadata)
        }  # fmt: skip
        for field in PICTURES:
            pixels: Pixels | None = getattr(item, field)
            if pixels is None:
                continue
            if id(pixels) not in places:
                places[id(pixels)] = [offset, *pixels.shape]
                chunks.append(np.ascontiguousarray(pixels).tobytes())
                offset += len(chunks[-1])
            row[field] = places[id(pixels)]
        rows.append(row)
    return rows, b"".join(chunks)


def unpack_items(rows: Sequence[Mapping[str, Any]], pixels: bytes) -> list[RewardItem]:
    """What `pack_items` packed."""
    buffer = np.frombuffer(pixels, np.uint8)

    def picture(place: Sequence[int] | None) -> Pixels | None:
        if place is None:
            return None
        offset, *shape = place
        return buffer[offset : offset + int(np.prod(shape))].reshape(shape)

    items: list[RewardItem] = []
    for row in rows:
        image = picture(row["image"])
        assert image is not None
        mask, source, reference = (picture(row.get(field)) for field in PICTURES[1:])
        items.append(
            RewardItem(row["id"], row["prompt"], image, mask, source, reference, row["group"], row["metadata"])
        )
    return items


def pack_outcome(outcome: Outcome) -> list[Any]:
    if isinstance(outcome, Score):
        return [outcome.value, dict(outcome.detail)]
    return [outcome.code, outcome.message, outcome.retryable]


def unpack_outcome(row: Sequence[Any]) -> Outcome:
    return Score(row[0], row[1]) if len(row) == 2 else Failure(*row)
