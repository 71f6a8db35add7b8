"""What the server does with many requests, bad pictures, hostile bodies, and scorers that run out of memory."""

from __future__ import annotations

import base64
import io
import json
import math
import os
import pickle
import re
import socket
import struct
import threading
import time
import zlib
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
from PIL import Image

from retouch.imaging.reading import as_shown
from retouch.rewards.client.client import RewardClient
from retouch.rewards.protocol import CheckedScorer, RewardItem
from retouch.rewards.server import frames
from retouch.rewards.server.admission import Limits
from retouch.rewards.server.frames import (
    HEAD_BYTES,
    BatchCost,
    BrokenFrame,
    pack,
    pack_items,
    pack_outcome,
    read_head,
    read_message,
    unpack_items,
    unpack_outcome,
)
from retouch.rewards.server.telemetry import (
    Telemetry,
)
from retouch.rewards.server.worker import torch_device, worker_environment
from retouch.rewards.wire import BrokenMessage, Room, Share, decode_pixels, encode_request, parse_multipart
from retouch.types import Failure, Score
from tests.rewards.fakes import (
    HANG_S,
    Brightness,
    Gated,
    Poisoned,
    Scripted,
    brightness,
    half_mask,
    item,
    items,
    picture,
    serving,
    until,
    values,
)
from tests.rewards.test_server import as_json, multipart, outcomes


@pytest.fixture
def http() -> Iterator[httpx.Client]:
    with httpx.Client(timeout=30, trust_env=False) as client:
        yield client


def metrics(url: str) -> dict[str, float]:
    text = httpx.get(f"{url}/metrics", trust_env=False).text
    return {line.rpartition(" ")[0]: float(line.rpartition(" ")[2]) for line in text.splitlines() if line[0] != "#"}


# --- batches ---


def test_items_of_many_requests_are_scored_together(http: httpx.Client) -> None:
    """While the worker is busy with the first, the others gather; each gets its own score back."""
    sizes: list[int] = []
    gate = Gated(gate_score=True)
    real = gate.score

    def score(batch: Sequence[RewardItem]) -> Any:
        sizes.append(len(batch))
        return real(batch)

    gate.score = score  # type: ignore[method-assign]
    with serving({"b": gate}, limits=Limits(max_batch=8)) as url, ThreadPoolExecutor(21) as pool:
        first = pool.submit(http.post, f"{url}/score", files=multipart([item(0)]))
        assert gate.scoring.wait(60)
        rest = [pool.submit(http.post, f"{url}/score", files=multipart([item(i)])) for i in range(1, 21)]
        until(lambda: metrics(url)["retouch_items_waiting"] == 20)
        gate.open()
        found = [outcomes(one.result())[0] for one in (first, *rest)]
    assert found == [brightness(item(i)) for i in range(21)]
    assert sizes == [1, 8, 8, 4]


def test_only_items_of_one_shape_and_the_same_rewards_share_a_batch(http: httpx.Client) -> None:
    batches: list[list[Any]] = []
    gate = Gated(gate_score=True)

    def score(batch: Sequence[RewardItem]) -> Any:
        batches.append([(one.image.shape, one.mask is None) for one in batch])
        return [Score(0.5)] * len(batch)

    scorers: Any = {"gate": gate, "b": Scripted(score), "c": Brightness()}
    with serving(scorers) as url, ThreadPoolExecutor(10) as pool:
        blocked = pool.submit(http.post, f"{url}/score", files=multipart([item(0)], ["gate"]))
        assert gate.scoring.wait(60)
        kinds = [{}, {"image": picture(1, 6, 9)}, {"mask": half_mask()}]
        asked = [
            pool.submit(http.post, f"{url}/score", files=multipart([item(10 * i + j, **kind)], rewards))
            for i, kind in enumerate(kinds)
            for j, rewards in enumerate((["b"], ["b"], ["b", "c"]))
        ]
        until(lambda: metrics(url)["retouch_items_waiting"] == 9)
        gate.open()
        assert all(one.result().status_code == 200 for one in (blocked, *asked))
    assert sorted(len(batch) for batch in batches) == [1, 1, 1, 2, 2, 2]
    assert all(len(set(batch)) == 1 for batch in batches)


def test_a_large_request_is_scored_in_several_batches(http: httpx.Client) -> None:
    scorer = Brightness()
    with serving({"b": scorer}, limits=Limits(max_batch=4)) as url:
        assert outcomes(http.post(f"{url}/score", files=multipart(items(10)))) == [brightness(i) for i in items(10)]
        told = metrics(url)
    assert told['retouch_batch_items_bucket{le="4.0"}'] == 3 and told["retouch_batch_items_sum"] == 10


@pytest.mark.parametrize("poisoned", [0, 13, 31])
def test_one_poison_picture_of_32_fails_alone_at_the_price_of_a_bisection(http: httpx.Client, poisoned: int) -> None:
    """31 scored, one typed failure, at most 2 log2(32) + 1 more model calls."""
    batch = [item(i, prompt="poison" if i == poisoned else f"item {i}") for i in range(32)]
    with serving({"b": Poisoned()}) as url:
        found = outcomes(http.post(f"{url}/score", files=multipart(batch)))
        calls = metrics(url)['retouch_model_calls_total{reward="b"}']
    assert found == ["scorer_error" if i == poisoned else brightness(one) for i, one in enumerate(batch)]
    assert calls - 1 <= 2 * math.log2(32) + 1


def test_out_of_memory_halves_this_batch_and_those_after_it() -> None:
    class OutOfMemoryError(RuntimeError): ...

    sizes: list[int] = []

    def score(batch: Sequence[RewardItem]) -> Any:
        sizes.append(len(batch))
        if len(batch) > 5:
            raise OutOfMemoryError("CUDA out of memory")
        return [Score(float(one.id)) for one in batch]

    checked = CheckedScorer(Scripted(score))
    assert values(checked.score(items(16))) == [float(i) for i in range(16)]
    assert sizes == [16, 8, 4, 4, 8, 4, 4]
    sizes.clear()
    assert values(checked.score(items(12))) == [float(i) for i in range(12)]
    assert sizes == [4, 4, 4]


# --- once ---


def test_a_request_that_comes_again_is_not_scored_again(http: httpx.Client) -> None:
    """Whether the first is still under way or done; by id and content, whatever the deadline."""
    gate = Gated(gate_score=True)
    batch = items(3)
    again = lambda: multipart(batch, deadline_ms=9000)  # noqa: E731
    with serving({"b": gate}) as url, ThreadPoolExecutor(2) as pool:
        first = pool.submit(http.post, f"{url}/score", files=multipart(batch))
        assert gate.scoring.wait(60)
        second = pool.submit(http.post, f"{url}/score", files=again())
        until(lambda: metrics(url)["retouch_requests_waiting"] == 2)
        gate.open()
        replies = [first.result(), second.result(), http.post(f"{url}/score", files=again())]
        assert len({one.text for one in replies}) == 1
        assert metrics(url)["retouch_repeated_requests"] == 2
        assert [one.id for one in gate.seen] == [0, 1, 2]
        other = http.post(f"{url}/score", files=multipart(items(2)))  # the same id, other items
        assert outcomes(other) == [brightness(one) for one in items(2)]


def test_a_failure_that_may_pass_is_computed_again(http: httpx.Client) -> None:
    script = Scripted(lambda batch: [Failure("overloaded", "later", True) if len(script.seen) == 1 else Score(0.5)])
    with serving({"b": script}) as url:
        asked = [http.post(f"{url}/score", files=multipart([item(0)])) for _ in range(3)]
    assert [outcomes(one)[0] for one in asked] == ["overloaded", 0.5, 0.5] and len(script.seen) == 2


def test_a_caller_that_hangs_up_finds_its_scores_when_it_asks_again(http: httpx.Client) -> None:
    gate = Gated(gate_score=True)
    with serving({"b": gate}) as url:
        with pytest.raises(httpx.TimeoutException):
            http.post(f"{url}/score", files=multipart([item(0)]), timeout=0.2)
        gate.open()
        assert outcomes(http.post(f"{url}/score", files=multipart([item(0)]))) == [brightness(item(0))]
    assert len(gate.seen) == 1


def test_the_same_scores_at_any_concurrency() -> None:
    """32 threads of one client, requests of every size: each picture has the score that it has alone."""
    with (
        serving({"r": Brightness()}) as url,
        RewardClient([url], ["r"], batch_size=5) as client,
        ThreadPoolExecutor(32) as pool,
    ):
        found = list(pool.map(lambda n: values(client.score(items(n))["r"]), range(1, 33)))
    assert found == [[brightness(one) for one in items(n)] for n in range(1, 33)]


# --- bodies that mean harm ---


def bomb(side: int) -> bytes:
    """A PNG of a few kilobytes that decodes to side x side pixels."""

    def chunk(kind: bytes, body: bytes) -> bytes:
        return struct.pack(">I", len(body)) + kind + body + struct.pack(">I", zlib.crc32(kind + body))

    packer = zlib.compressobj(9)
    rows = b"".join(packer.compress(b"\0" * (side * 3 + 1)) for _ in range(64)) + packer.flush()
    head = struct.pack(">IIBBBBB", side, side, 8, 2, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", head) + chunk(b"IDAT", rows) + chunk(b"IEND", b"")


def one_picture(text: str) -> dict[str, Any]:
    message = as_json([item(0)])
    message["items"][0]["image"] = text
    return {"json": message}


def many_items() -> dict[str, Any]:
    head, tail = json.dumps(as_json([item(0)]) | {"items": []}).split("[]")
    rows = ",".join(f'{{"id":{i},"prompt":"","image":""}}' for i in range(1_000_000))
    return {"content": f"{head}[{rows}]{tail}".encode()}


HOSTILE: dict[str, Any] = {
    "pickle": lambda: {"content": pickle.dumps(print)},
    "pickle for a picture": lambda: one_picture(base64.b64encode(pickle.dumps({"a": 1})).decode()),
    "a million items": many_items,
    "a decompression bomb": lambda: one_picture(base64.b64encode(bomb(60_000)).decode()),
    "wrong base64": lambda: one_picture("not base64!"),
    "no picture": lambda: one_picture(base64.b64encode(b"GIF89a is not taken").decode()),
    "json in json": lambda: {"content": b'{"a":' * 100_000},
    "ten thousand parts": lambda: {"files": [(f"p{i}", ("p", b"x", "")) for i in range(10_000)]},
    "nothing but boundaries": lambda: {
        "content": b"\r\n--b" * 200_000, "headers": {"content-type": "multipart/form-data; boundary=b"}
    },
}  # fmt: skip


def resident_mb() -> float:
    return int(re.search(r"VmRSS:\s+(\d+)", Path("/proc/self/status").read_text())[1]) / 1024  # type: ignore[index]


@pytest.mark.parametrize("body", HOSTILE.values(), ids=HOSTILE)
def test_hostile_bodies_are_refused_in_bounded_memory(http: httpx.Client, body: Any) -> None:
    sent = body()
    with serving({"b": Brightness()}) as url:
        before = resident_mb()
        response = http.post(f"{url}/score", **sent)
        grown = resident_mb() - before
        if "json" in sent:  # a request of the protocol, and in it a picture that is none: its item fails
            assert outcomes(response) == ["bad_item"]
        else:
            assert 400 <= response.status_code < 500 and response.json()["error"]
        assert outcomes(http.post(f"{url}/score", files=multipart([item(1)]))) == [brightness(item(1))]
    assert grown < 300


@pytest.mark.parametrize("binary", [True, False], ids=["multipart", "json"])
def test_text_of_a_request_is_bounded(http: httpx.Client, binary: bool) -> None:
    """200 MB of metadata took 4 GB: a character takes up to four times its bytes, in each of several copies."""
    large = item(1, image=picture(1, 200, 200))  # images are no text
    wordy = RewardItem(1, "", large.image, metadata={"note": "x" * 3000})
    with serving({"b": Brightness()}, limits=Limits(text=2000)) as url:
        for given, status in ((large, 200), (wordy, 413)):
            body: dict[str, Any] = {"files": multipart([given])} if binary else {"json": as_json([given])}
            response = http.post(f"{url}/score", **body)
            assert response.status_code == status
        assert "bytes of prompts and metadata, over the limit of 2000" in response.json()["error"]


@pytest.mark.parametrize(
    "announced",
    [pytest.param(True, marks=pytest.mark.full, id="with its length"), pytest.param(False, id="in chunks")],
)
def test_ten_times_the_limit_is_refused_and_never_held(http: httpx.Client, announced: bool) -> None:

    def body() -> Iterator[bytes]:
        for _ in range(320):
            yield bytes(1 << 20)

    headers = {"content-length": str(320 << 20)} if announced else {}
    with serving({"b": Brightness()}, limits=Limits(body=32 << 20)) as url:
        before = resident_mb()
        response = http.post(f"{url}/score", content=body(), headers=headers)
        assert response.status_code == 413 and resident_mb() - before < 200
        assert outcomes(http.post(f"{url}/score", files=multipart([item(1)]))) == [brightness(item(1))]


def test_bytes_of_all_requests_together_are_bounded(http: httpx.Client) -> None:
    gate = Gated(gate_score=True)
    large = [item(0, image=picture(0, 200, 200))]  # 120 kB
    with serving({"b": gate}, limits=Limits(bodies=200_000)) as url, ThreadPoolExecutor(1) as pool:
        first = pool.submit(http.post, f"{url}/score", files=multipart(large))
        assert gate.scoring.wait(60)
        second = http.post(f"{url}/score", files=multipart([item(1, image=picture(1, 200, 200))]))
        gate.open()
        assert (first.result().status_code, second.status_code) == (200, 429)
        assert metrics(url)["retouch_request_bytes"] == 0
        assert http.post(f"{url}/score", files=multipart(large)).status_code == 200


def test_pictures_beyond_the_pixels_of_a_request_fail_before_they_are_decoded(http: httpx.Client) -> None:
    buffer = io.BytesIO()
    Image.new("RGB", (100, 100)).save(buffer, "PNG")
    message = as_json(items(3))
    message["items"][1]["image"] = base64.b64encode(buffer.getvalue()).decode()
    with serving({"b": Brightness()}, limits=Limits(pixels=5000)) as url:
        assert outcomes(http.post(f"{url}/score", json=message))[1] == "bad_item"


def test_pixels_of_all_requests_together_are_bounded(http: httpx.Client) -> None:
    gate = Gated(gate_score=True)
    large = [item(0, image=picture(0, 200, 200))]
    with serving({"b": gate}, limits=Limits(all_pixels=60_000)) as url, ThreadPoolExecutor(1) as pool:
        first = pool.submit(http.post, f"{url}/score", files=multipart(large))
        assert gate.scoring.wait(60) and metrics(url)["retouch_pixels"] == 40_000
        second = http.post(f"{url}/score", files=multipart([item(1, image=picture(1, 200, 200))]))
        gate.open()
        assert (first.result().status_code, second.status_code) == (200, 429) and second.headers["retry-after"] == "1"
        assert metrics(url)["retouch_pixels"] == 0
        assert http.post(f"{url}/score", files=multipart(large)).status_code == 200


def test_large_images_are_decoded_one_after_the_other(http: httpx.Client, monkeypatch: pytest.MonkeyPatch) -> None:
    """Decoding takes several times the size of an image: six requests of two megabytes made six gigabytes."""
    under_way, most = 0, list[int]()

    def counted(image: Image.Image) -> Image.Image:
        nonlocal under_way
        under_way += 1
        most.append(under_way)
        time.sleep(0.05)
        under_way -= 1
        return as_shown(image)

    monkeypatch.setattr("retouch.rewards.wire._LARGE", 100)
    monkeypatch.setattr("retouch.rewards.wire.as_shown", counted)
    buffer = io.BytesIO()
    Image.new("RGB", (16, 16)).save(buffer, "PNG")
    bodies = [one_picture(base64.b64encode(buffer.getvalue() + bytes([i])).decode()) for i in range(5)]
    with serving({"b": Brightness()}) as url, ThreadPoolExecutor(5) as pool:
        codes = list(pool.map(lambda body: http.post(f"{url}/score", **body).status_code, bodies))
    assert codes == [200] * 5 and most == [1] * 5


def test_images_that_wait_to_be_decoded_hold_no_batch_up(http: httpx.Client, monkeypatch: pytest.MonkeyPatch) -> None:
    """As many of them as the loop has threads, which also pack batches, filled all of these."""
    go = threading.Event()

    def held(image: Image.Image) -> Image.Image:
        assert go.wait(30)
        return as_shown(image)

    monkeypatch.setattr("retouch.rewards.wire.as_shown", held)
    count = min(32, (os.cpu_count() or 1) + 4) + 1
    bodies = [one_picture(base64.b64encode(png_file() + bytes([i])).decode()) for i in range(count)]
    with serving({"b": Brightness()}) as url, ThreadPoolExecutor(count) as pool:
        waiting = [pool.submit(http.post, f"{url}/score", **body) for body in bodies]
        try:
            until(lambda: metrics(url)["retouch_requests_waiting"] == count)
            raw = multipart([item(image=np.zeros((256, 256, 3), np.uint8))])
            assert http.post(f"{url}/score", files=raw, timeout=10).status_code == 200
            assert not any(one.done() for one in waiting)
        finally:
            go.set()
        assert [one.result().status_code for one in waiting] == [200] * count


def png_file() -> bytes:
    buffer = io.BytesIO()
    Image.new("RGB", (16, 16)).save(buffer, "PNG")
    return buffer.getvalue()


@pytest.mark.parametrize("kind", ["PNG", "WEBP", "JPEG"])
def test_the_metadata_of_a_file_is_bounded(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A text of 200 MB took 4 GB. A profile of the usual size is read over."""
    monkeypatch.setattr("retouch.rewards.wire._MAX_METADATA", 30_000)
    opened = list[int]()
    monkeypatch.setattr("retouch.rewards.wire.as_shown", lambda image: opened.append(1) or as_shown(image))
    for size, refused in ((20_000, False), (40_000, True)):
        buffer = io.BytesIO()
        Image.new("RGB", (16, 16)).save(buffer, kind, icc_profile=b"x" * size)
        share = Share(Room(1000), 1000)
        body = with_text(buffer.getvalue(), size) if kind == "PNG" else buffer.getvalue()
        if refused:
            with pytest.raises(BrokenMessage, match="bytes of metadata"):
                decode_pixels(body, "", "RGB", share)
        else:
            assert decode_pixels(body, "", "RGB", share).shape == (16, 16, 3)
    assert opened == [1]


def with_text(png: bytes, size: int) -> bytes:
    """A PNG file with a text of `size` bytes behind its header."""
    chunk = b"tEXta\0" + b"x" * (size - 2)
    return png[:33] + struct.pack(">I", size) + chunk + struct.pack(">I", zlib.crc32(chunk)) + png[33:]


def test_no_memory_to_decode_is_no_fault_of_the_picture(http: httpx.Client, monkeypatch: pytest.MonkeyPatch) -> None:
    buffer = io.BytesIO()
    Image.new("RGB", (8, 8)).save(buffer, "PNG")
    message = one_picture(base64.b64encode(buffer.getvalue()).decode())

    def full(image: Image.Image) -> Image.Image:
        raise MemoryError

    with serving({"b": Brightness()}) as url:
        with monkeypatch.context() as patched:
            patched.setattr("retouch.rewards.wire.as_shown", full)
            assert http.post(f"{url}/score", **message).status_code == 429
        assert http.post(f"{url}/score", **message).status_code == 200
        assert metrics(url)["retouch_pixels"] == 0


@pytest.mark.parametrize("names", [[f"r{i}" for i in range(65)], ["r" * 201]], ids=["many", "long"])
def test_names_of_rewards_are_bounded(http: httpx.Client, names: list[str]) -> None:
    """Every name has an outcome for every item: a small request would make gigabytes of them."""
    with serving({"b": Brightness()}) as url:
        assert http.post(f"{url}/score", json=as_json(items(1)) | {"rewards": names}).status_code == 422
        assert http.post(f"{url}/score", json=as_json(items(1)) | {"rewards": ["b", "x1", "x2"]}).status_code == 200
        told = metrics(url)
    assert told['retouch_outcomes_total{outcome="unknown_reward",reward="unknown"}'] == 2


def test_bodies_that_do_not_come_hold_no_place(http: httpx.Client) -> None:
    head = b"POST /score HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: 999\r\n\r\n{"
    with serving({"b": Brightness()}, limits=Limits(waiting=2, idle_s=0.3, body_s=0.6)) as url:
        address = ("127.0.0.1", int(url.rpartition(":")[2]))
        for _ in range(20):  # a busy machine asks after `idle_s`, or before both are there
            with socket.create_connection(address, HANG_S) as still, socket.create_connection(address, HANG_S) as drips:
                still.sendall(head)
                drips.sendall(head)
                with suppress(AssertionError):
                    until(lambda: metrics(url)["retouch_requests_waiting"] == 2, 0.2)
                if refused := http.post(f"{url}/score", files=multipart(items(1))).status_code == 429:
                    for _ in range(4):
                        time.sleep(0.2)
                        with suppress(OSError):
                            drips.sendall(b" ")
                    until(lambda: metrics(url)["retouch_requests_waiting"] == 0)
                    assert still.recv(99).startswith(b"HTTP/1.1 408")
                    break
        assert refused
        assert http.post(f"{url}/score", files=multipart(items(1))).status_code == 200


def read_to_the_end(connection: socket.socket) -> bytes:
    """What is still sent; a timeout where the server does not close."""
    with suppress(ConnectionError):  # what the client had sent was not read
        return b"".join(iter(lambda: connection.recv(9999), b""))
    return b""


def test_headers_that_do_not_come_end_the_connection(http: httpx.Client) -> None:
    """Of the first request and of a later one on the same connection; a request in time, and one whose reply takes
    longer, are answered."""
    slow = Brightness(delay_s=0.8)
    with serving({"b": slow}, limits=Limits(header_s=0.4)) as url:
        address = ("127.0.0.1", int(url.rpartition(":")[2]))
        with (
            socket.create_connection(address, HANG_S) as nothing,
            socket.create_connection(address, HANG_S) as dripping,
        ):
            dripping.sendall(b"GET /readyz HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n")
            assert dripping.recv(9999).startswith(b"HTTP/1.1 200")
            begun = time.monotonic()
            for byte in b"GET /readyz HTTP/1.1\r\n":
                with suppress(OSError):
                    dripping.sendall(bytes([byte]))
                time.sleep(0.03)
            assert read_to_the_end(nothing) == b"" and b"HTTP" not in read_to_the_end(dripping)
            assert time.monotonic() - begun < HANG_S
        assert http.post(f"{url}/score", files=multipart(items(1))).status_code == 200


def test_uploads_that_are_broken_off_are_not_logged(http: httpx.Client, capfd: pytest.CaptureFixture[str]) -> None:
    """200 of them left 690 KB of tracebacks."""
    head = b"POST /score HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: application/json\r\nContent-Length: 99999\r\n\r\n"
    with serving({"b": Brightness()}) as url:
        for _ in range(20):
            with socket.create_connection(("127.0.0.1", int(url.rpartition(":")[2])), 5) as upload:
                upload.sendall(head + b'{"items":')
        until(lambda: 'retouch_requests_total{status="499"}' in http.get(f"{url}/metrics").text)
        assert http.post(f"{url}/score", files=multipart(items(1))).status_code == 200
    assert "Traceback" not in "".join(capfd.readouterr())


# --- multipart ---


def test_multipart_as_httpx_and_curl_write_it() -> None:
    request = httpx.Request("POST", "http://a", files=encode_request(items(2), ["b"], "id", 5))
    body, kind = request.read(), request.headers["content-type"]
    parts = parse_multipart(body, kind, 9)
    assert next(iter(parts)) == "manifest" and len(parts) == 3
    assert {content for content, _ in list(parts.values())[1:]} == {one.image.tobytes() for one in items(2)}
    by_hand = b'--x\r\nContent-Disposition: form-data; name="a"\r\n\r\n\r\n--y\r\n\r\n--x--\r\n'
    assert parse_multipart(by_hand, 'multipart/form-data; boundary="x"', 9) == {"a": (b"\r\n--y\r\n", "")}
    with pytest.raises(ValueError, match="more than 2"):
        parse_multipart(body, kind, 2)
    with pytest.raises(ValueError, match="cut off"):
        parse_multipart(body[:-8], kind, 9)


# --- metrics ---


def test_metrics_count_what_was_done(http: httpx.Client) -> None:
    with serving({"b": Poisoned()}) as url:
        http.post(f"{url}/score", files=multipart([item(0), item(1, prompt="refused")]))
        http.post(f"{url}/score", content=b"no")
        http.post(f"{url}/score", **one_picture("%%%"))
        told = metrics(url)
    assert [told[f'retouch_requests_total{{status="{status}"}}'] for status in (200, 422)] == [2, 1]
    assert told['retouch_outcomes_total{outcome="score",reward="b"}'] == 1
    assert told['retouch_outcomes_total{outcome="bad_item",reward="b"}'] == 2
    assert told['retouch_model_seconds_count{reward="b"}'] == 1 and told["retouch_ready"] == 1


def test_labels_are_escaped() -> None:
    telemetry = Telemetry()
    telemetry.batch(1, BatchCost({'a"\\\n': 1}, {}))
    assert '{reward="a\\"\\\\\\n"} 1' in telemetry.text({}).decode()


# --- frames between front and worker ---


def test_places_in_a_frame_are_counted_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not anew for every image: of N images each place costs one length."""
    asked = 0

    class Chunk(bytes):
        def __len__(self) -> int:
            nonlocal asked
            asked += 1
            return super().__len__()

    monkeypatch.setattr(frames, "raw_bytes", lambda pixels: Chunk(pixels.tobytes()))
    rows, chunks = pack_items([item(i) for i in range(20)])
    assert asked == len(rows) == len(chunks) == 20


def test_items_and_outcomes_survive_the_frames_to_the_bit() -> None:
    source = picture(9)
    batch = [item(i, mask=half_mask(), source=source, group=2, metadata={"text": "é\ud83d\ude00"}) for i in range(3)]
    rows, chunks = pack_items(batch)
    pixels = b"".join(chunks)
    assert len(pixels) == sum(one.image.nbytes + 30 for one in batch) + source.nbytes  # the source once
    for there, here in zip(unpack_items(rows, pixels), batch, strict=True):
        assert (there.id, there.prompt, there.group, there.metadata) == (here.id, here.prompt, 2, here.metadata)
        for name in ("image", "mask", "source"):
            assert np.array_equal(getattr(there, name), getattr(here, name))
        assert there.reference is None
    assert all(
        np.shares_memory(np.frombuffer(chunk, np.uint8), one.image)
        for chunk, one in zip(chunks[:1], batch[:1], strict=True)
    )
    assert frames_of(pack(7, {"a": 0.1 + 0.2}, b"xyz")) == [(7, {"a": 0.1 + 0.2}, b"xyz")]
    for outcome in (Score(0.1 + 0.2, {"x": [1]}), Failure("bad_item", "m", True)):
        assert unpack_outcome(json.loads(json.dumps(pack_outcome(outcome)))) == outcome


def frames_of(stream: bytes) -> list[tuple[int, dict[str, Any], bytes]]:
    """Every frame up to the first that is broken or incomplete."""
    found: list[tuple[int, dict[str, Any], bytes]] = []
    while len(stream) >= HEAD_BYTES:
        try:
            head = read_head(stream[:HEAD_BYTES])
            text, pixels = (stream := stream[HEAD_BYTES:])[: head.text], stream[head.text : head.text + head.pixels]
            found.append((head.number, read_message(head, text, pixels), pixels))
        except BrokenFrame:
            break
        stream = stream[head.text + head.pixels :]
    return found


def test_no_part_of_a_frame_is_read_as_another() -> None:
    """Cut at every byte, with other frames behind: what is read was packed so, and nothing follows a broken frame."""
    first, then = pack(1, {"rewards": ["a"]}, b"\x00" * 60), pack(2, {"rewards": ["b"]}, b"\x01" * 60)
    for cut in range(1, len(first)):
        assert frames_of(first[:cut] + then + then) == []
    assert [number for number, *_ in frames_of(first + then)] == [1, 2]


def test_a_frame_with_a_flipped_bit_is_broken() -> None:
    frame = pack(1, {"rewards": ["a"]}, b"\x00" * 60)
    for place in range(len(frame)):
        for bit in (1, 128):
            assert frames_of(frame[:place] + bytes([frame[place] ^ bit]) + frame[place + 1 :]) == []


def test_a_worker_sees_its_gpu_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setenv("TORCH_ALLOW_TF32_CUBLAS_OVERRIDE", "1")
    assert "TORCH_ALLOW_TF32_CUBLAS_OVERRIDE" not in worker_environment("2")
    assert worker_environment("2")["CUDA_VISIBLE_DEVICES"] == "2" and torch_device("2") == "cuda"
    assert "CUDA_VISIBLE_DEVICES" not in worker_environment("cpu") and torch_device("cpu") == "cpu"
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,6")
    assert [worker_environment(number)["CUDA_VISIBLE_DEVICES"] for number in "012"] == ["4", "6", ""]
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert worker_environment("0")["CUDA_VISIBLE_DEVICES"] == ""


# --- memory ---
