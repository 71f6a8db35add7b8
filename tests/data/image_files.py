"""Image files that Pillow does not write: colour profiles, PNG and TIFF of 16 bits a channel; and a reader of PNG that
shares no code with Pillow."""

from __future__ import annotations

import struct
import zlib
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

# --- colour profiles: ICC.1:2001-04, matrix and curve ---

Matrix = tuple[tuple[float, float, float], tuple[float, float, float], tuple[float, float, float]]

ADOBE_RGB: Matrix = ((0.60974, 0.31111, 0.01947), (0.20528, 0.62567, 0.06087), (0.14919, 0.06322, 0.74457))
"""XYZ under D50 of red, green and blue."""
DISPLAY_P3: Matrix = ((0.51512, 0.24120, -0.00105), (0.29198, 0.69225, 0.04189), (0.15710, 0.06657, 0.78407))
PROPHOTO: Matrix = ((0.79767, 0.28804, 0.0), (0.13519, 0.71188, 0.0), (0.03134, 0.00009, 0.82491))
SRGB: Matrix = ((0.43607, 0.22249, 0.01392), (0.38515, 0.71687, 0.09708), (0.14307, 0.06061, 0.71410))
WHITE = (0.9642, 1.0, 0.8249)


def rgb_profile(colours: Matrix, gamma: float) -> bytes:
    """The profile of a monitor with these colours and a power curve."""
    tags = {name: _xyz(colour) for name, colour in zip((b"rXYZ", b"gXYZ", b"bXYZ"), colours, strict=True)}
    return _profile(b"RGB ", tags | {name: _curve(gamma) for name in (b"rTRC", b"gTRC", b"bTRC")})


def grey_profile(gamma: float) -> bytes:
    return _profile(b"GRAY", {b"kTRC": _curve(gamma)})


def scanner_profile() -> bytes:
    """A table from RGB to Lab, and none back: white is white, everything else grey of half the lightness."""
    grid = [(255, 128, 128) if corner == 7 else (128, 128, 128) for corner in range(8)]
    ramp = bytes(range(256)) * 3
    table = b"mft1" + bytes(4) + bytes([3, 3, 2, 0]) + struct.pack(">9i", *(65536 * (i % 4 == 0) for i in range(9)))
    return _profile(
        b"RGB ", {b"A2B0": table + ramp + bytes(np.array(grid, np.uint8).tobytes()) + ramp}, b"scnr", b"Lab "
    )


def _profile(space: bytes, tags: dict[bytes, bytes], kind: bytes = b"mntr", connection: bytes = b"XYZ ") -> bytes:
    text = b"made for a test\0"
    tags = {
        b"desc": b"desc" + bytes(4) + struct.pack(">I", len(text)) + text + bytes(78),
        b"cprt": b"text" + bytes(4) + text,
        b"wtpt": _xyz(WHITE),
        **tags,
    }
    table, content, at = b"", b"", 128 + 4 + 12 * len(tags)
    for name, data in tags.items():
        padded = data + bytes(-len(data) % 4)
        table += name + struct.pack(">II", at + len(content), len(data))
        content += padded
    body = struct.pack(">I", len(tags)) + table + content
    header = struct.pack(">I4sI4s4s4s", 128 + len(body), b"test", 0x02100000, kind, space, connection)
    header += struct.pack(">6H", 2026, 1, 1, 0, 0, 0) + b"acsp" + bytes(28) + _s15(WHITE)
    return header.ljust(128, b"\0") + body


def _s15(numbers: tuple[float, ...]) -> bytes:
    return b"".join(struct.pack(">i", round(number * 65536)) for number in numbers)


def _xyz(colour: tuple[float, ...]) -> bytes:
    return b"XYZ " + bytes(4) + _s15(colour)


def _curve(gamma: float) -> bytes:
    return b"curv" + bytes(4) + struct.pack(">IH", 1, round(gamma * 256))


def srgb_of(levels: NDArray[np.floating], colours: Matrix, gamma: float) -> NDArray[np.float64]:
    """[..., 3]: levels of 0 to 1 in a profile, in sRGB: the formulas of the two, in float64."""
    linear = np.power(levels, gamma) @ np.array(colours) @ np.linalg.inv(np.array(SRGB))
    linear = linear.clip(0, 1)
    return np.where(linear <= 0.0031308, 12.92 * linear, 1.055 * linear ** (1 / 2.4) - 0.055)


# --- PNG ---

_CHANNELS = {0: 1, 2: 3, 3: 1, 4: 2, 6: 4}
_COLOUR_TYPE = {1: 0, 2: 4, 3: 2, 4: 6}


def write_png_of(path: Path, values: NDArray[np.integer], bits: int, *chunks: tuple[bytes, bytes]) -> None:
    """A PNG of [H, W, C] values with `bits` a channel, unfiltered; `chunks` stand before the pixels."""
    height, width, channels = values.shape
    if bits == 16:
        lines = values.astype(">u2").tobytes()
    elif bits == 8:
        lines = values.astype(np.uint8).tobytes()
    else:
        places = np.arange(8 // bits)[::-1] * bits
        lines = (values.reshape(height, -1, 8 // bits) << places).sum(-1).astype(np.uint8).tobytes()
    each = len(lines) // height
    data = b"".join(b"\0" + lines[i * each : (i + 1) * each] for i in range(height))
    header = struct.pack(">IIBBBBB", width, height, bits, _COLOUR_TYPE[channels], 0, 0, 0)
    parts = [(b"IHDR", header), *chunks, (b"IDAT", zlib.compress(data)), (b"IEND", b"")]
    path.write_bytes(b"\x89PNG\r\n\x1a\n" + b"".join(map(_chunk, parts)))


def _chunk(part: tuple[bytes, bytes]) -> bytes:
    kind, content = part
    return struct.pack(">I", len(content)) + kind + content + struct.pack(">I", zlib.crc32(kind + content))


def png_chunks(path: Path) -> list[tuple[bytes, bytes]]:
    """Chunks in their order; their checksums are right."""
    data, at, found = path.read_bytes(), 8, list[tuple[bytes, bytes]]()
    while at < len(data):
        (length,) = struct.unpack_from(">I", data, at)
        kind, content = data[at + 4 : at + 8], data[at + 8 : at + 8 + length]
        assert struct.unpack_from(">I", data, at + 8 + length)[0] == zlib.crc32(kind + content)
        found.append((kind, content))
        at += 12 + length
    return found


def png_values(path: Path) -> NDArray[np.integer]:
    """[H, W, C]: the values of a PNG of 8 or 16 bits without a palette."""
    chunks = png_chunks(path)
    width, height, bits, colour, *_ = struct.unpack(">IIBBBBB", chunks[0][1])
    assert bits in (8, 16) and colour != 3
    step = _CHANNELS[colour] * bits // 8
    data = zlib.decompress(b"".join(content for kind, content in chunks if kind == b"IDAT"))
    above = bytearray(width * step)
    lines = bytearray()
    for row in range(height):
        start = row * (width * step + 1)
        line, kind = bytearray(data[start + 1 : start + 1 + width * step]), data[start]
        for i in range(len(line)):
            left, up = line[i - step] if i >= step else 0, above[i]
            corner = above[i - step] if i >= step else 0
            line[i] = (line[i] + _predicted(kind, left, up, corner)) & 255
        lines += line
        above = line
    values = np.frombuffer(bytes(lines), np.uint8 if bits == 8 else ">u2")
    return values.reshape(height, width, -1).astype(np.uint8 if bits == 8 else np.uint16)


def _predicted(kind: int, left: int, up: int, corner: int) -> int:
    if kind == 4:
        guess = left + up - corner
        return min((left, up, corner), key=lambda value: abs(guess - value))
    return (0, left, up, (left + up) // 2)[kind]


# --- TIFF ---


def write_tiff_of(path: Path, values: NDArray[np.uint16], order: str, *tags: tuple[int, int, int, int]) -> None:
    """An uncompressed TIFF of [H, W, C] values with 16 bits a channel.

    Args:
        order: "<" (II) or ">" (MM).
        tags: further ones, or others in place of those that the values have: tag, type, count, value.
    """
    height, width, channels = values.shape
    pixels = values.astype(f"{order}u2").tobytes()
    entries = [
        *((256, 4, 1, width), (257, 4, 1, height), (258, 3, channels, 8), (259, 3, 1, 1)),
        *((262, 3, 1, 2 if channels > 2 else 1), (273, 4, 1, 16), (277, 3, 1, channels), (278, 4, 1, height)),
        (279, 4, 1, len(pixels)),
    ]
    head = (b"II" if order == "<" else b"MM") + struct.pack(f"{order}HI", 42, 16 + len(pixels))
    bits = struct.pack(f"{order}4H", 16, 16, 16, 16)
    if channels == 1:
        entries[2] = (258, 3, 1, 16)
    entries = sorted({entry[0]: entry for entry in (*entries, *tags)}.values())
    directory = struct.pack(f"{order}H", len(entries))
    for tag, kind, count, value in entries:
        short = kind == 3 and count == 1
        place = struct.pack(f"{order}HH", value, 0) if short else struct.pack(f"{order}I", value)
        directory += struct.pack(f"{order}HHI", tag, kind, count) + place
    path.write_bytes(head + bits + pixels + directory + bytes(4))
