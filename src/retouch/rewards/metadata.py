"""Bytes of an encoded image that are not its pixels. Pillow copies them several times before it reports the size."""

from __future__ import annotations

import struct
from collections.abc import Iterator

_PIXELS = {b"IHDR", b"PLTE", b"IDAT", b"fdAT", b"VP8 ", b"VP8L", b"VP8X", b"ALPH", b"ANIM", b"ANMF"}


def metadata_bytes(body: bytes) -> int:
    """Bytes of text, profiles, EXIF and unknown chunks of a PNG, WebP or JPEG file; 0 for any other."""
    if body.startswith(b"\x89PNG"):
        return sum(size for kind, size in _chunks(body, 8, ">I4s", 4) if kind not in _PIXELS)
    if body[:4] == b"RIFF" and body[8:12] == b"WEBP":
        return sum(size for kind, size in _chunks(body, 12, "<4sI", 0) if kind not in _PIXELS)
    return sum(_segments(body)) if body.startswith(b"\xff\xd8") else 0


def _chunks(body: bytes, start: int, head: str, tail: int) -> Iterator[tuple[bytes, int]]:
    """(kind, bytes that are there) of each chunk; `tail`: bytes of its checksum. RIFF pads to even sizes."""
    while start + 8 <= len(body):
        first, second = struct.unpack_from(head, body, start)
        kind, size = (first, second) if isinstance(first, bytes) else (second, first)
        yield kind, min(size, len(body) - start - 8)
        start += 8 + size + (tail or size % 2)


def _segments(body: bytes) -> Iterator[int]:
    """Bytes of each APPn and COM segment before the scan of a JPEG file."""
    at = 2
    while at + 4 <= len(body) and body[at] == 0xFF and (kind := body[at + 1]) != 0xDA:
        size = int.from_bytes(body[at + 2 : at + 4])
        if 0xE0 <= kind <= 0xEF or kind == 0xFE:
            yield size
        at += 2 + size
