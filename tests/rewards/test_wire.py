"""Bytes: pictures survive bit for bit, equal ones travel once, and what is broken fails alone or is refused."""

from __future__ import annotations

import base64
import io
import json
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image
from pydantic import ValidationError

from retouch.rewards import wire
from retouch.rewards.messages import ScoreRequest
from retouch.rewards.probe import item_of
from retouch.rewards.protocol import Pixels, RewardItem
from retouch.rewards.wire import BrokenMessage, Part, Room, Share, encode_pixels, encode_request, parse_reply
from tests.rewards.fakes import half_mask, item, picture

ROOM = Share(Room(1 << 40), 1 << 40)
decode_pixels = partial(wire.decode_pixels, share=ROOM)
decode_items = partial(wire.decode_items, share=ROOM)

REQUEST: dict[str, Any] = {
    "protocol": 1,
    "request_id": "r",
    "deadline_ms": 1000,
    "rewards": ["ocr"],
    "items": [{"id": 1, "prompt": "p", "image": "a"}],
}


def encoded(pixels: np.ndarray[Any, Any], kind: str, **options: Any) -> bytes:
    buffer = io.BytesIO()
    Image.fromarray(pixels).save(buffer, kind, **options)
    return buffer.getvalue()


def request_of(**changes: Any) -> ScoreRequest:
    return ScoreRequest.model_validate_json(json.dumps(REQUEST | changes))


def as_webp(parts: dict[str, Part]) -> dict[str, Part]:
    """A request whose images are encoded: our client sends none, and other clients may."""

    def again(name: str, raw: bytes, kind: str) -> Part:
        pixels = decode_pixels(raw, kind, "L" if "channels=1" in kind else "RGB")
        return name, encoded(pixels, "WEBP", lossless=True, method=0), "image/webp"

    return {name: part if name == "manifest" else again(*part) for name, part in parts.items()}


def sent(items: list[RewardItem], webp: bool = False) -> tuple[ScoreRequest, dict[str, tuple[bytes, str]]]:
    """What a server finds of a request: the manifest and the other parts."""
    parts = encode_request(items, ["ocr"], "id", 1000)
    parts = as_webp(parts) if webp else parts
    manifest = ScoreRequest.model_validate_json(parts["manifest"][1])
    return manifest, {name: (body, kind) for name, (_, body, kind) in parts.items() if name != "manifest"}


# --- pictures ---


@pytest.mark.parametrize("kind", ["raw", "webp"])
@pytest.mark.parametrize("shape", [(1, 1, 3), (7, 5, 3), (64, 33, 3), (7, 5), (1, 9)])
def test_lossless_encodings_are_read_without_loss(kind: Any, shape: tuple[int, ...]) -> None:
    pixels = np.random.default_rng(0).integers(0, 256, shape, np.uint8)
    if len(shape) == 2 and kind == "webp":
        pixels = np.where(pixels < 128, np.uint8(0), np.uint8(255))  # what masks are
    webp = encoded(pixels, "WEBP", lossless=True, method=0), "image/webp"
    decoded = decode_pixels(*(webp if kind == "webp" else encode_pixels(pixels)), "L" if len(shape) == 2 else "RGB")
    assert decoded.dtype == np.uint8
    np.testing.assert_array_equal(decoded, pixels)


def test_grey_levels_survive_raw_and_png() -> None:
    grey = np.arange(256, dtype=np.uint8).reshape(16, 16)
    np.testing.assert_array_equal(decode_pixels(*encode_pixels(grey), "L"), grey)
    np.testing.assert_array_equal(decode_pixels(encoded(grey, "PNG"), "image/png", "L"), grey)


def test_a_view_is_sent_as_it_looks() -> None:
    mirrored = picture(0)[:, ::-1]
    np.testing.assert_array_equal(decode_pixels(*encode_pixels(mirrored), "RGB"), mirrored)


def test_png_decodes_to_the_same_pixels_whatever_its_content_type_says() -> None:
    pixels = picture(3)
    for content_type in ("image/png", "application/octet-stream", ""):
        np.testing.assert_array_equal(decode_pixels(encoded(pixels, "PNG"), content_type, "RGB"), pixels)


def test_transparency_is_laid_on_white() -> None:
    clear = np.zeros((2, 2, 4), np.uint8)  # black ink, fully transparent
    assert (decode_pixels(encoded(clear, "PNG"), "", "RGB") == 255).all()


def test_a_grey_picture_becomes_rgb_and_a_coloured_mask_grey() -> None:
    assert decode_pixels(encoded(half_mask(), "PNG"), "", "RGB").shape == (6, 5, 3)
    coloured = np.stack([half_mask()] * 3, axis=2)
    np.testing.assert_array_equal(decode_pixels(encoded(coloured, "PNG"), "", "L"), half_mask())


def rotated() -> bytes:
    """A photo of 80 x 40 that is to be shown as 40 x 80."""
    exif = Image.Exif()
    exif[0x0112] = 6
    return encoded(picture(0, 40, 80), "JPEG", exif=exif)


def painted(mode: str) -> bytes:
    """A mask of one brush stroke: 2 of 6 x 5 pixels in alpha, in red on grey, as red paint on a photo, or with soft
    edges."""
    stroke = np.zeros((6, 5), np.uint8)
    stroke[2, 1:3] = 255
    if mode == "soft":
        return encoded(np.where(stroke, 128, 127).astype(np.uint8), "PNG")
    if mode == "one bit":
        return encoded(stroke > 0, "PNG")
    if mode == "paint":
        return encoded(np.where(stroke[..., None], (255, 0, 0), (250, 240, 245)).astype(np.uint8), "PNG")
    if mode == "red":
        return encoded(np.stack([stroke, stroke // 2 + 100, stroke], axis=2), "PNG")
    white = np.full((6, 5, 3), 255, np.uint8)
    return encoded(np.concatenate([white, stroke[..., None]], axis=2), "PNG")


def sixteen_bits() -> bytes:
    return encoded(np.linspace(0, 65535, 30).astype(np.uint16).reshape(6, 5), "PNG")


@pytest.mark.parametrize(
    "body",
    [
        rotated(),
        sixteen_bits(),
        encoded(picture(0), "WEBP"),
        *map(painted, ("alpha", "red", "paint", "soft", "one bit")),
    ],
    ids=["rotated", "16 bits", "webp", "alpha", "red", "paint", "soft", "one bit"],
)
def test_the_wire_and_the_command_line_read_one_file_alike(body: bytes, tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(body)
    here = item_of(tmp_path / "a", "p", tmp_path / "a")
    assert here.mask is not None
    np.testing.assert_array_equal(decode_pixels(body, "", "RGB"), here.image)
    np.testing.assert_array_equal(decode_pixels(body, "", "L") >= 128, here.mask == 255)


def test_a_file_is_read_as_it_is_shown() -> None:
    """By hand, beside the agreement."""
    assert decode_pixels(rotated(), "", "RGB").shape == (80, 40, 3) and decode_pixels(rotated(), "", "L").shape == (
        80,
        40,
    )
    assert decode_pixels(sixteen_bits(), "", "L").ravel().tolist() == [int(v) >> 8 for v in np.linspace(0, 65535, 30)]
    for mode in ("alpha", "paint", "soft", "one bit"):
        assert np.argwhere(decode_pixels(painted(mode), "", "L") >= 128).tolist() == [[2, 1], [2, 2]]


@pytest.mark.parametrize(
    ("body", "content_type", "words"),
    [
        (b"x" * 11, "image/x-raw; height=2; width=2; channels=3", "11 bytes"),
        (b"x" * 13, "image/x-raw; height=2; width=2; channels=3", "13 bytes"),
        (b"", "image/x-raw; height=0; width=2; channels=3", "0 x 2 x 3"),
        (b"xxxx", "image/x-raw; height=-2; width=-2; channels=1", "-2 x -2"),
        (b"x" * 4, "image/x-raw; height=2; width=2; channels=1", "RGB is expected"),
        (b"x" * 16, "image/x-raw; height=2; width=2; channels=4", "RGB is expected"),
        (b"x" * 12, "image/x-raw; height=2; width=2", "has no"),
        (b"x" * 12, "image/x-raw; height=two; width=2; channels=3", "has no"),
        (b"x" * 12, "image/x-raw", "has no"),
        (b"x", "image/x-raw; height=9000; width=9000; channels=3", "9000 x 9000"),
        (b"not a picture", "image/png", "PNG, WebP or JPEG"),
        (b"", "", "PNG, WebP or JPEG"),
        (encoded(picture(0, 40, 40), "PNG")[:-60], "image/png", "PNG, WebP or JPEG"),
        (encoded(picture(0), "GIF"), "image/gif", "PNG, WebP or JPEG"),
        (b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 5 5\n", "image/x-eps", "PNG, WebP or JPEG"),
    ],
)
def test_broken_pictures_say_what_is_wrong(body: bytes, content_type: str, words: str) -> None:
    with pytest.raises(BrokenMessage, match=words):
        decode_pixels(body, content_type, "RGB")


def test_an_encoded_picture_over_the_limit_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(wire, "MAX_PIXELS", 29)
    with pytest.raises(BrokenMessage, match="5 x 6 is over the limit of 29 pixels"):
        decode_pixels(encoded(picture(0), "PNG"), "", "RGB")
    with pytest.raises(BrokenMessage, match="6 x 5"):
        decode_pixels(*encode_pixels(picture(0)), "RGB")
    monkeypatch.setattr(wire, "MAX_PIXELS", 30)
    assert decode_pixels(encoded(picture(0), "PNG"), "", "RGB").shape == (6, 5, 3)


def test_a_decompression_bomb_is_not_decoded() -> None:
    """100 000 x 100 000 in 70 bytes: only its header is looked at."""
    ihdr = b"IHDR" + (100_000).to_bytes(4, "big") * 2 + b"\x08\x02\x00\x00\x00"
    chunk = (13).to_bytes(4, "big") + ihdr + __import__("zlib").crc32(ihdr).to_bytes(4, "big")
    with pytest.raises(BrokenMessage):
        decode_pixels(b"\x89PNG\r\n\x1a\n" + chunk + b"\x00\x00\x00\x00IDAT", "image/png", "RGB")


# --- requests ---


@pytest.mark.parametrize("webp", [False, True])
def test_a_request_comes_back_as_the_items_it_was_made_of(webp: bool) -> None:
    whole = item(
        4, mask=half_mask(), source=picture(8), reference=picture(9, 3, 8), group=2, metadata={"text": "Ö", "n": [1]}
    )
    bare = item(5)
    decoded = decode_items(*sent([whole, bare], webp))
    for given, got in zip([whole, bare], decoded, strict=True):
        assert isinstance(got, RewardItem)
        assert (got.id, got.prompt, got.group, got.metadata) == (given.id, given.prompt, given.group, given.metadata)
        for field in ("image", "mask", "source", "reference"):
            np.testing.assert_array_equal(getattr(got, field), getattr(given, field))


def test_equal_pictures_travel_once() -> None:
    source, mask = picture(100), half_mask()
    group = [item(i, source=source.copy(), mask=mask.copy()) for i in range(4)]
    _, parts = sent(group)
    assert len(parts) == 4 + 1 + 1
    assert sum(len(body) for body, _ in parts.values()) == 5 * source.nbytes + mask.nbytes


def test_equal_bytes_of_another_shape_are_another_picture() -> None:
    wide = picture(0, 2, 8)
    decoded = decode_items(*sent([item(0, image=wide), item(1, image=wide.reshape(8, 2, 3))]))
    assert [one.image.shape for one in decoded if isinstance(one, RewardItem)] == [(2, 8, 3), (8, 2, 3)]


def test_a_shared_picture_is_decoded_once(monkeypatch: pytest.MonkeyPatch) -> None:
    decoded: list[str] = []
    real = wire.decode_pixels

    def counted(body: bytes, content_type: str, mode: Any, share: Share) -> Pixels:
        decoded.append(content_type)
        return real(body, content_type, mode, share)

    monkeypatch.setattr(wire, "decode_pixels", counted)
    assert len(decode_items(*sent([item(i, source=picture(100)) for i in range(4)]))) == 4
    assert len(decoded) == 4 + 1


def test_one_broken_picture_fails_alone() -> None:
    request, parts = sent([item(i, mask=half_mask()) for i in range(3)])
    victim = request.items[1].image
    parts[victim] = (parts[victim][0][:-1], parts[victim][1])
    first, second, third = decode_items(request, parts)
    assert isinstance(first, RewardItem) and isinstance(third, RewardItem)
    assert second == "image: raw image of 6 x 5 x 3 has 89 bytes"


def test_a_broken_picture_that_items_share_takes_no_room_and_is_decoded_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its group would otherwise use up what the request may hold."""
    whole = encoded(picture(7, 40, 40), "PNG")
    request, parts = sent([item(i, source=picture(7, 40, 40)) for i in range(4)])
    parts[request.items[0].source or ""] = (whole[: len(whole) // 2], "image/png")
    real, tried = wire.decode_pixels, list[str]()

    def counted(body: bytes, content_type: str, mode: Any, share: Share) -> Pixels:
        tried.append(content_type)
        return real(body, content_type, mode, share)

    monkeypatch.setattr(wire, "decode_pixels", counted)
    room = Room(2000)
    found = wire.decode_items(request, parts, Share(room, 2000))
    assert all(isinstance(one, str) and one.startswith("source: cannot be decoded") for one in found)
    assert tried.count("image/png") == 1 and room.taken == sum(
        i.image.shape[0] * i.image.shape[1] for i in [item(j) for j in range(4)]
    )


def test_a_part_that_is_not_there_fails_alone() -> None:
    request, parts = sent([item(0), item(1, source=picture(7))])
    del parts[request.items[1].source or ""]
    first, second = decode_items(request, parts)
    assert isinstance(first, RewardItem)
    assert isinstance(second, str) and second.startswith("source: names the part")


@pytest.mark.parametrize("text", ["%%%", "abc", "é", "data:image/png;base64,AAAA"])
def test_what_is_no_base64_fails_alone(text: str) -> None:
    good = base64.b64encode(encoded(picture(0), "PNG")).decode()
    request = request_of(items=[{"id": i, "prompt": "", "image": image} for i, image in enumerate([good, text])])
    first, second = decode_items(request, None)
    assert isinstance(first, RewardItem)
    assert second == "image: not valid base64"


@pytest.mark.parametrize("broken", ["\n", "\r\n", " \t\n"])
def test_base64_may_be_broken_into_lines(broken: str) -> None:
    """Every 76 letters, as `base64` and MIME do; anything else that is not of its alphabet is still refused."""
    body = encoded(picture(0, 40, 40), "PNG")
    text = base64.encodebytes(body).decode().replace("\n", broken)
    (decoded,) = decode_items(request_of(items=[{"id": 1, "prompt": "", "image": text}]), None)
    assert isinstance(decoded, RewardItem)
    np.testing.assert_array_equal(decoded.image, picture(0, 40, 40))


@pytest.mark.parametrize("field", ["mask", "source", "reference", "group", "metadata"])
def test_what_may_be_left_out_may_be_null(field: str) -> None:
    image = base64.b64encode(encoded(picture(0), "PNG")).decode()
    wire_item: dict[str, Any] = {"id": 1, "prompt": "", "image": image}
    (without,) = decode_items(request_of(items=[wire_item]), None)
    (null,) = decode_items(request_of(items=[wire_item | {field: None}]), None)
    assert isinstance(null, RewardItem) and isinstance(without, RewardItem)
    assert getattr(null, field) == getattr(without, field) == ({} if field == "metadata" else None)


@pytest.mark.parametrize(
    "changes",
    [
        {"protocol": 2}, {"protocol": "1"}, {"protocol": True}, {"protocol": None},
        {"deadline_ms": 0}, {"deadline_ms": -5}, {"deadline_ms": 10**400}, {"deadline_ms": "5"},
        {"rewards": []}, {"rewards": ["ocr", "ocr"]}, {"rewards": "ocr"},
        {"items": []}, {"request_id": ""}, {"surprise": 1},
        {"items": [{"id": 1, "prompt": "p"}]},
        {"items": [{"id": 1, "prompt": "p", "image": "a", "colour": "red"}]},
        {"items": [{"id": 1.0, "prompt": "p", "image": "a"}]},
        {"items": [{"id": True, "prompt": "p", "image": "a"}]},
        {"items": [{"id": None, "prompt": "p", "image": "a"}]},
        {"items": [{"id": "", "prompt": "p", "image": "a"}]},
        {"items": [{"id": 1, "prompt": 5, "image": "a"}]},
        {"items": [{"id": 1, "prompt": "p", "image": "a", "group": "3"}]},
        {"items": [{"id": 1, "prompt": "p", "image": "a", "metadata": []}]},
        {"items": [{"id": 1, "prompt": "p", "image": "a"}] * 2},
    ],
    ids=str,
)  # fmt: skip
def test_what_is_not_of_the_protocol_is_refused(changes: dict[str, Any]) -> None:
    with pytest.raises(ValidationError):
        request_of(**changes)


def test_a_wrong_version_is_told_which_one_is_spoken() -> None:
    with pytest.raises(ValidationError, match="given 2; this server speaks protocol 1"):
        request_of(protocol=2)


def test_an_id_and_its_string_are_two_ids() -> None:
    request = request_of(items=[{"id": i, "prompt": "", "image": "a"} for i in (1, "1", 2**70)])
    assert [one.id for one in request.items] == [1, "1", 2**70]


# --- replies ---


def reply(value: str = "0.5", detail: str = "{}", **changes: Any) -> bytes:
    item_text = f'{{"id": 0, "scores": {{"ocr": {{"value": {value}, "detail": {detail}}}}}}}'
    rest = {"scorers": {"ocr": {"revision": "1"}}} | changes
    return f'{{"items": [{item_text}], {json.dumps(rest)[1:-1]}}}'.encode()


def test_a_sound_reply() -> None:
    parsed = parse_reply(reply("0.1", '{"a": [1, 2.5e-3]}'))
    assert parsed.items[0].scores["ocr"].value == 0.1
    assert parsed.items[0].scores["ocr"].detail == {"a": [1, 2.5e-3]}
    assert parse_reply(reply("1")).items[0].scores["ocr"].value == 1.0


@pytest.mark.parametrize(
    "value", ["NaN", "Infinity", "-Infinity", "1e999", "null", "true", '"0.7"', "[0.7]", "1" + "0" * 400]
)
def test_what_is_no_finite_number_is_refused(value: str) -> None:
    with pytest.raises(BrokenMessage):
        parse_reply(reply(value))


@pytest.mark.parametrize("number", ["NaN", "Infinity", "-Infinity", "-1e999"])
def test_no_detail_holds_nan_or_infinity(number: str) -> None:
    with pytest.raises(BrokenMessage, match=rf"contains NaN, Inf or a number beyond the floats \({number}\)"):
        parse_reply(reply(detail=f'{{"deep": [{number}]}}'))


@pytest.mark.parametrize(
    "body",
    [
        b"", b"null", b"[]", b"0.5", b"<html>", b"\xff\xfe", b'{"items": []}', b"[" * 100_000,
        reply(surprise=1), reply(scorers=None), reply()[:-1],
    ],
    ids=range(11),
)  # fmt: skip
def test_what_is_no_reply_is_refused(body: bytes) -> None:
    with pytest.raises(BrokenMessage):
        parse_reply(body)
