"""HTTP bodies, replies of a server, and answers of a judge."""

from __future__ import annotations

import base64
import io
import json
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
from fastapi.testclient import TestClient
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from retouch.rewards.messages import PROTOCOL_VERSION
from retouch.rewards.scorers.judged import read_integers
from retouch.rewards.scorers.knowledge_graph import read_checklist, read_graph
from retouch.rewards.wire import BrokenMessage, parse_reply
from tests.fuzz.inputs import attempt, blobs, changed, fuzzed, texts, tried, values
from tests.rewards.fakes import Brightness, create_app, until


def _png() -> bytes:
    stream = io.BytesIO()
    Image.fromarray(np.zeros((8, 8, 3), np.uint8)).save(stream, "PNG")
    return stream.getvalue()


REQUEST = {
    "protocol": PROTOCOL_VERSION,
    "request_id": "a",
    "deadline_ms": 5000,
    "rewards": ["r"],
    "items": [
        {"id": 1, "prompt": "a", "image": base64.b64encode(_png()).decode(), "group": 3, "metadata": {"text": "a"}},
        {"id": "b", "prompt": "", "image": base64.b64encode(_png()).decode()},
    ],
}
PLAIN = {
    "image": base64.b64encode(_png()).decode(),
    "prompt": "a",
    "text": "a",
    "mask": None,
    "metadata": {"caption": "b"},
    "vlm_weight": 0,
    "ocr_weight": 0.0,
    "r_weight": 0.5,
}
FORM = (
    b'--x\r\ncontent-disposition: form-data; name="manifest"\r\ncontent-type: application/json\r\n\r\n'
    + json.dumps(REQUEST | {"items": [{"id": 1, "prompt": "a", "image": "p"}]}).encode()
    + b'\r\n--x\r\ncontent-disposition: form-data; name="p"\r\ncontent-type: image/png\r\n\r\n'
    + _png()
    + b"\r\n--x--\r\n"
)
REPLY = {
    "items": [
        {"id": 1, "scores": {"r": {"value": 0.5, "detail": {"a": 1}}}},
        {"id": 2, "errors": {"r": {"code": "bad_item", "message": "x"}}},
    ],
    "scorers": {"r": {"revision": "1"}},
}


@pytest.fixture(scope="module")
def server() -> Iterator[TestClient]:
    with TestClient(create_app({"r": Brightness()}), raise_server_exceptions=True) as client:
        until(lambda: client.get("/readyz").status_code == 200)
        reply = client.post("/score", json=REQUEST)
        assert reply.status_code == 200, reply.text
        plain = client.post("/score", json=PLAIN).json()
        assert plain["combined_score"] == 0.5 * plain["r_score"]
        yield client


def _answered(server: TestClient, body: bytes, kind: str) -> Callable[[], None]:
    def post() -> None:
        reply = server.post("/score", content=body, headers={"content-type": kind})
        assert reply.status_code < 500 and len(reply.content) < 100_000, reply.text[:300]
        reply.json()

    return post


@fuzzed
@given(
    st.one_of(blobs([FORM, json.dumps(REQUEST).encode(), json.dumps(PLAIN).encode()])),
    st.sampled_from(["application/json", "multipart/form-data; boundary=x"]),
)
def test_bodies(server: TestClient, body: bytes, kind: str) -> None:
    attempt("HTTP bodies, bytes", _answered(server, body, kind))


@fuzzed
@given(changed([REQUEST, PLAIN]))
def test_requests(server: TestClient, request_: Any) -> None:
    attempt("HTTP bodies, structure", _answered(server, json.dumps(request_).encode(), "application/json"))


@fuzzed
@given(st.one_of(texts([json.dumps(REPLY)]), changed([REPLY]).map(json.dumps)))
def test_replies(text: str) -> None:
    attempt("replies", lambda: parse_reply(text.encode("utf-8", "surrogatepass")), BrokenMessage)


ANSWERS = [
    json.dumps({"instruction_following": 7, "identity_preservation": 10, "reasoning": "fine"}),
    '* **sun**: [yes]\n* moon: no (it is "absent")\n1. `causes(sun, moon)`: yes',
    json.dumps({"elements": ["sun", "moon"], "dependencies": ["causes(sun, moon)"]}),
]


@fuzzed
@given(st.one_of(texts(ANSWERS), values.map(lambda value: json.dumps(value))))
def test_answers(text: str) -> None:
    for read in (
        lambda: read_integers(text, ["instruction_following", "identity_preservation"], 10, ["reasoning"]),
        lambda: read_checklist(text, ["sun", "moon"]),
        lambda: read_graph(text),
    ):
        attempt("answers of a judge", read, ValueError)
    assert tried["answers of a judge"]
