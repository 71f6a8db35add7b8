"""Requests and replies as bytes. Never pickle; images are sent lossless.

Multipart: part "manifest" is the JSON of a `ScoreRequest` whose image fields name further parts; a part is an encoded
image (PNG, WebP, JPEG) or raw pixels with the content type `image/x-raw; height=H; width=W; channels=C`.
JSON: the same with base64 images in place of names.
"""

from __future__ import annotations

import base64
import hashlib
import io
import re
import struct
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import cache
from typing import Literal

import numpy as np
from PIL import Image
from pydantic import ValidationError

from retouch.files import plain_json
from retouch.imaging.masks import mask_levels
from retouch.imaging.reading import as_shown, to_rgb
from retouch.rewards.messages import PROTOCOL_VERSION, ScoreReply, ScoreRequest, WireItem
from retouch.rewards.protocol import Pixels, RewardItem, item_fields, item_from_fields, raw_bytes, raw_pixels

MAX_PIXELS = 64 * 1024 * 1024
"""Maximum of one image: 8192 x 8192."""

_LARGE = 4 * 1024 * 1024  # pixels
_MAX_METADATA = 8 * 1024 * 1024  # bytes of a file: Pillow keeps several copies

FORMATS = ("PNG", "WEBP", "JPEG")
"""Formats of encoded images. Not everything that Pillow can open: EPS, for example, starts a program."""

Mode = Literal["RGB", "L"]
Part = tuple[str, bytes, str]
"""(file name, body, content type), as httpx takes it."""


class BrokenMessage(ValueError):
    """A message that breaks the protocol."""


class NoRoom(Exception):
    """The server holds its maximum of decoded pixels; retry later."""


class Room:
    """Decoded pixels that a server may hold, of all requests together. Thread-safe."""

    def __init__(self, pixels: int) -> None:
        self.pixels = pixels
        self.taken = 0
        self._lock = threading.Lock()
        self._decoding = threading.Lock()

    def decoding(self, pixels: int) -> AbstractContextManager[object]:
        """Held while an image is decoded, which takes several times its size: large ones take turns."""
        return self._decoding if pixels > _LARGE else nullcontext()

    def take(self, pixels: int) -> None:
        """Reserve room for an image before it is decoded.

        Raises:
            NoRoom: there is none.
        """
        with self._lock:
            if self.taken + pixels > self.pixels:
                raise NoRoom(f"the server holds {self.taken} decoded pixels of at most {self.pixels}; retry later")
            self.taken += pixels

    def give_back(self, pixels: int) -> None:
        with self._lock:
            self.taken -= pixels


class Share:
    """Room of one request: at most `most` pixels, released together."""

    def __init__(self, room: Room, most: int) -> None:
        self._room = room
        self._most = most
        self._held = 0

    def take(self, height: int, width: int) -> None:
        """Reserve room for an image.

        Raises:
            BrokenMessage: it alone, or with the others of the request, has too many pixels.
            NoRoom: other requests hold the room.
        """
        pixels = height * width
        if pixels > MAX_PIXELS:
            raise BrokenMessage(f"an image of {width} x {height} is over the limit of {MAX_PIXELS} pixels")
        if self._held + pixels > self._most:
            raise BrokenMessage(f"the images of the request are over the limit of {self._most} pixels together")
        self._room.take(pixels)
        self._held += pixels

    def decoding(self, pixels: int) -> AbstractContextManager[object]:
        """See `Room.decoding`."""
        return self._room.decoding(pixels)

    def give_back(self, pixels: int | None = None) -> None:
        """Release the room of an image that was not decoded, or (None) all of it."""
        pixels = self._held if pixels is None else pixels
        self._room.give_back(pixels)
        self._held -= pixels


def encode_request(
    items: Sequence[RewardItem], rewards: Sequence[str], request_id: str, deadline_ms: int
) -> dict[str, Part]:
    """Multipart parts of a request. Equal images (the source of a group) are sent once."""
    parts: dict[str, Part] = {}

    def put(pixels: Pixels) -> str:
        name = hashlib.blake2b(repr(pixels.shape).encode() + pixels.tobytes(), digest_size=12).hexdigest()
        if name not in parts:
            body, content_type = encode_pixels(pixels)
            parts[name] = (name, body, content_type)
        return name

    request = ScoreRequest(
        protocol=PROTOCOL_VERSION,
        request_id=request_id,
        deadline_ms=deadline_ms,
        rewards=list(rewards),
        items=[WireItem(**item_fields(item, put)) for item in items],
    )
    manifest = request.model_dump_json(exclude_none=True).encode()
    return {"manifest": ("manifest", manifest, "application/json"), **parts}


def encode_pixels(pixels: Pixels) -> tuple[bytes, str]:
    """Raw bytes of an image and their content type."""
    height, width, *rest = pixels.shape
    channels = rest[0] if rest else 1
    return bytes(raw_bytes(pixels)), f"image/x-raw; height={height}; width={width}; channels={channels}"


def parse_multipart(body: bytes, content_type: str, most: int) -> dict[str, tuple[bytes, str]]:
    """Parts of a multipart/form-data body (RFC 7578) by name -> (content, content type).

    Args:
        most: maximum number of parts.

    Raises:
        BrokenMessage: no boundary, no parts, two of one name, more than `most`, or cut off.
    """
    boundary = re.search(r'boundary="?([^";,]{1,70})"?', content_type)
    if boundary is None:
        raise BrokenMessage("a multipart request needs a boundary in its content type")
    mark = b"\r\n--" + boundary[1].encode()
    pieces = (b"\r\n" + body).split(mark, most + 1)[1:]
    if not pieces or not pieces[-1].startswith(b"--"):
        raise BrokenMessage(f"the multipart body has no parts, more than {most}, or is cut off")
    parts: dict[str, tuple[bytes, str]] = {}
    for piece in pieces[:-1]:
        head, gap, content = piece.partition(b"\r\n\r\n")
        headers = head.decode("utf-8", "replace")
        name = re.search(
            r'^content-disposition:[^\r\n]*?[;\s]name="([^"\r\n]*)"', headers, re.IGNORECASE | re.MULTILINE
        )
        if not gap or name is None:
            raise BrokenMessage("a part of the multipart body has no name")
        if name[1] in parts:
            raise BrokenMessage(f"two parts are named {name[1]!r}")
        kind = re.search(r"^content-type:[ \t]*([^\r\n]*)", headers, re.IGNORECASE | re.MULTILINE)
        parts[name[1]] = (content, kind[1] if kind else "")
    return parts


def decode_items(
    request: ScoreRequest, parts: Mapping[str, tuple[bytes, str]] | None, share: Share
) -> list[RewardItem | str]:
    """Items with their images, or in place of an item its problem: a bad image fails alone.

    Args:
        parts: name -> (bytes, content type) of a multipart request; None for JSON, whose images are base64.
        share: room for pixels; images beyond it are not decoded.

    Raises:
        NoRoom: other requests hold the room.
    """
    failed: dict[tuple[str, Mode], BrokenMessage] = {}

    @cache  # the source of a group is one part: it is decoded once
    def decoded(name: str, mode: Mode) -> Pixels:
        if parts is not None and name not in parts:
            raise BrokenMessage(f"names the part {name!r}, which the request does not have")
        body, content_type = (_from_base64(name), "") if parts is None else parts[name]
        return decode_pixels(body, content_type, mode, share)

    def image(name: str, mode: Mode) -> Pixels:
        """`decoded`, which tries a broken part only once too."""
        if (name, mode) in failed:
            raise failed[name, mode]
        try:
            return decoded(name, mode)
        except BrokenMessage as error:
            failed[name, mode] = error
            raise

    return [_decode_item(item, image) for item in request.items]


def _from_base64(text: str) -> bytes:
    try:
        return base64.b64decode("".join(text.split()), validate=True)  # the command `base64` breaks lines
    except ValueError:  # binascii.Error, or a plain ValueError if the text is not ASCII
        raise BrokenMessage("not valid base64") from None


def _decode_item(item: WireItem, decode: Callable[[str, Mode], Pixels]) -> RewardItem | str:
    def image_at(name: str, field: str) -> Pixels:
        try:
            return decode(name, "L" if field == "mask" else "RGB")
        except BrokenMessage as error:
            raise BrokenMessage(f"{field}: {error}") from None

    try:
        return item_from_fields(vars(item), image_at)
    except BrokenMessage as error:
        return str(error)


def decode_pixels(body: bytes, content_type: str, mode: Mode, share: Share) -> Pixels:
    """Pixels of a part: [H, W, 3] for "RGB", the levels of a mask [H, W] for "L". A file is read as everywhere in the
    package: upright, 8 bits per channel, a mask from the channel it was painted in.

    Args:
        share: room of the request, reserved before anything is decoded.

    Raises:
        BrokenMessage: not an image, too large, or raw bytes of another length than their header gives.
        NoRoom: the server holds its maximum of pixels.
        MemoryError: the machine has not enough memory.
    """
    if content_type.startswith("image/x-raw"):
        return _decode_raw(body, content_type, mode, share)
    if (size := _metadata_bytes(body)) > _MAX_METADATA:
        raise BrokenMessage(f"{size} bytes of metadata, over the limit of {_MAX_METADATA}; send pixels only")
    try:
        with Image.open(io.BytesIO(body), formats=FORMATS) as image:
            share.take(height := image.height, width := image.width)
            try:
                with share.decoding(height * width):
                    shown = as_shown(image)
                    return np.asarray(to_rgb(shown)) if mode == "RGB" else mask_levels(shown)[0]
            except BaseException:
                share.give_back(height * width)
                raise
    except (BrokenMessage, NoRoom, MemoryError):
        raise
    except Exception as error:  # Pillow's decoders raise many types for a broken file, which must fail alone
        raise BrokenMessage(f"cannot be decoded ({type(error).__name__}); send PNG, WebP or JPEG") from None


def _decode_raw(body: bytes, content_type: str, mode: Mode, share: Share) -> Pixels:
    fields = dict(field.strip().split("=", 1) for field in content_type.split(";")[1:] if "=" in field)
    try:
        height, width, channels = (int(fields[name]) for name in ("height", "width", "channels"))
    except (KeyError, ValueError):
        raise BrokenMessage(f"content type {content_type!r} has no height, width or channels") from None
    # The size is judged first, then compared with the body, and only then is room taken: whoever sends the numbers may
    # be lying.
    if min(height, width) < 1 or height * width > MAX_PIXELS or channels != (3 if mode == "RGB" else 1):
        raise BrokenMessage(f"raw image of {height} x {width} x {channels} where {mode} is expected")
    if len(body) != height * width * channels:
        raise BrokenMessage(f"raw image of {height} x {width} x {channels} has {len(body)} bytes")
    share.take(height, width)
    return raw_pixels(body, (height, width, 3) if channels == 3 else (height, width))


def parse_reply(body: bytes) -> ScoreReply:
    """A reply, validated strictly.

    Raises:
        BrokenMessage: not JSON, a number that no float holds, half of a surrogate pair, a key that is there twice with
            different values, or not the schema.
    """
    try:
        return ScoreReply.model_validate(plain_json.loads(body, finite=True, unique=True))
    except (ValueError, RecursionError) as error:  # pydantic's ValidationError is one
        problem = " ".join(problem_of(error).split())[:200]
        raise BrokenMessage(f"the reply is not of the protocol: {problem}") from None


def problem_of(error: Exception) -> str:
    """The problem of a message, without pydantic's links and inputs."""
    if not isinstance(error, ValidationError):
        return str(error)
    found = error.errors(include_url=False, include_input=False, include_context=False)
    return "; ".join(f"{'.'.join(map(str, one['loc']))}: {one['msg']}" for one in found)


_OF_PIXELS = {b"IHDR", b"PLTE", b"IDAT", b"fdAT", b"VP8 ", b"VP8L", b"VP8X", b"ALPH", b"ANIM", b"ANMF"}


def _metadata_bytes(body: bytes) -> int:
    """Bytes of text, profiles, EXIF and unknown chunks of a PNG, WebP or JPEG file, which are not its pixels; 0 for any
    other."""
    if body.startswith(b"\x89PNG"):
        return sum(size for kind, size in _chunks(body, 8, ">I4s", 4) if kind not in _OF_PIXELS)
    if body[:4] == b"RIFF" and body[8:12] == b"WEBP":
        return sum(size for kind, size in _chunks(body, 12, "<4sI", 0) if kind not in _OF_PIXELS)
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
