"""The server over real sockets, asked by plain HTTP."""

from __future__ import annotations

import base64
import hmac
import json
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import httpx
import numpy as np
import pytest
from fastapi.testclient import TestClient

from retouch.rewards.protocol import RewardItem, Scorer
from retouch.rewards.server.admission import Authorize, Limits
from retouch.rewards.server.app import app_of
from retouch.rewards.wire import encode_request
from retouch.types import Score
from tests.rewards.fakes import (
    Brightness,
    Gated,
    Poisoned,
    Scripted,
    ThreadWorker,
    Unloadable,
    brightness,
    get,
    half_mask,
    item,
    items,
    picture,
    serving,
    until,
)
from tests.rewards.test_wire import as_webp, encoded


@pytest.fixture
def http() -> Iterator[httpx.Client]:
    with httpx.Client(timeout=10, trust_env=False) as client:
        yield client


def multipart(batch: Sequence[RewardItem], rewards: Sequence[str] = ("b",), deadline_ms: int = 5000) -> Any:
    return encode_request(batch, rewards, "id", deadline_ms)


def as_json(batch: Sequence[RewardItem], rewards: Sequence[str] = ("b",), **changes: Any) -> dict[str, Any]:
    """A request as one would write it for curl."""
    wire: list[dict[str, Any]] = []
    for one in batch:
        pictures = {name: getattr(one, name) for name in ("image", "mask", "source", "reference")}
        text = {k: base64.b64encode(encoded(v, "PNG")).decode() for k, v in pictures.items() if v is not None}
        wire.append({"id": one.id, "prompt": one.prompt, "metadata": dict(one.metadata), **text})
    return {
        "protocol": 1, "request_id": "r", "deadline_ms": 5000, "rewards": list(rewards), "items": wire, **changes
    }  # fmt: skip


def outcomes(response: httpx.Response, name: str = "b") -> list[Any]:
    """Value, or code, of each item in the order of the reply."""
    assert response.status_code == 200, response.text
    return [
        one["scores"][name]["value"] if name in one["scores"] else one["errors"][name]["code"]
        for one in response.json()["items"]
    ]


# --- both forms of a request ---


def test_json_and_multipart_score_the_same(http: httpx.Client) -> None:
    batch = [item(i, mask=half_mask(), source=picture(50)) for i in range(3)]
    scorer = Brightness()
    with serving({"b": scorer}) as url:
        replies = [
            http.post(f"{url}/score", json=as_json(batch)).json(),
            http.post(f"{url}/score", files=multipart(batch)).json(),
            http.post(f"{url}/score", files=as_webp(multipart(batch))).json(),
        ]
    assert replies[0] == replies[1] == replies[2]
    assert [one["scores"]["b"]["value"] for one in replies[0]["items"]] == [brightness(one) for one in batch]
    assert replies[0]["scorers"] == {"b": {"revision": "fake 1"}}
    for seen, given in zip(scorer.seen, batch * 3, strict=True):
        np.testing.assert_array_equal(seen.image, given.image)
        np.testing.assert_array_equal(seen.mask, given.mask)  # type: ignore[arg-type]
        np.testing.assert_array_equal(seen.source, given.source)  # type: ignore[arg-type]


def test_a_manifest_may_be_a_plain_form_field(http: httpx.Client) -> None:
    """As `curl -F manifest=... -F a=@picture.png` sends it."""
    manifest = as_json([item(0)])
    manifest["items"][0]["image"] = "a"
    with serving({"b": Brightness()}) as url:
        files = {"a": ("a.png", encoded(picture(0), "PNG"), "image/png")}
        response = http.post(f"{url}/score", data={"manifest": json.dumps(manifest)}, files=files)
    assert outcomes(response) == [brightness(item(0))]


def test_ids_come_back_as_they_were_given(http: httpx.Client) -> None:
    ids = [7, "7", "seven", -1, 2**70]
    batch = [item(i) for i in range(len(ids))]
    message = as_json(batch)
    for wire, given in zip(message["items"], ids, strict=True):
        wire["id"] = given
    with serving({"b": Brightness()}) as url:
        back = http.post(f"{url}/score", json=message).json()["items"]
    assert [one["id"] for one in back] == ids
    assert [one["scores"]["b"]["value"] for one in back] == [brightness(one) for one in batch]


def test_several_rewards_each_answer_every_item(http: httpx.Client) -> None:
    half = Scripted(lambda batch: [Score(0.5)] * len(batch))
    batch = [item(0), item(1, image=picture(9, 2, 2))]
    message = as_json(batch, ["b", "half", "none"])
    message["items"][1]["image"] = "%%%"
    with serving({"b": Brightness(), "half": half}) as url:
        reply = http.post(f"{url}/score", json=message).json()
    first, second = reply["items"]
    assert {name: score["value"] for name, score in first["scores"].items()} == {
        "b": brightness(batch[0]),
        "half": 0.5,
    }
    assert first["errors"]["none"]["code"] == "unknown_reward" and "b, half" in first["errors"]["none"]["message"]
    assert second["scores"] == {}
    assert {name: error["code"] for name, error in second["errors"].items()} == dict.fromkeys(
        ["b", "half", "none"], "bad_item"
    )
    assert set(reply["scorers"]) == {"b", "half"}


def test_poison_and_broken_pictures_fail_alone(http: httpx.Client) -> None:
    batch = [item(0), item(1, prompt="poison"), item(2), item(3)]
    message = as_json(batch)
    message["items"][2]["image"] = base64.b64encode(encoded(picture(0, 30, 30), "PNG")[:-50]).decode()
    with serving({"b": Poisoned()}) as url:
        found = outcomes(http.post(f"{url}/score", json=message))
    assert found == [brightness(batch[0]), "scorer_error", "bad_item", brightness(batch[3])]


@pytest.mark.parametrize("rest", [[], ["%%%"]], ids=["alone", "two of two"])
def test_where_no_picture_can_be_read_each_item_says_so(http: httpx.Client, rest: list[str]) -> None:
    """As beside a good one: in both forms of a request."""
    message = as_json(items(1 + len(rest)))
    for wire, broken in zip(message["items"], ["%%%", *rest], strict=True):
        wire["image"] = broken
    parts = multipart([item(0)])
    victim = next(name for name in parts if name != "manifest")
    parts[victim] = (victim, b"not a picture", "image/png")
    scorer = Brightness()
    with serving({"b": scorer}) as url:
        as_base64 = http.post(f"{url}/score", json=message)
        as_parts = http.post(f"{url}/score", files=parts)
    assert outcomes(as_base64) == ["bad_item"] * (1 + len(rest)) and outcomes(as_parts) == ["bad_item"]
    error = as_base64.json()["items"][0]["errors"]["b"]
    assert error == {"code": "bad_item", "message": "image: not valid base64", "retryable": False}
    assert as_base64.json()["scorers"] == {"b": {"revision": "fake 1"}} and scorer.seen == []


@pytest.mark.parametrize("detail", [{"x": float("nan")}, {"x": np.zeros(3)}, {"x": "\ud800"}], ids=str)
def test_a_detail_that_cannot_travel_spoils_one_item_not_the_reply(http: httpx.Client, detail: Any) -> None:
    script = Scripted(lambda batch: [Score(0.5, detail if one.id == 1 else {}) for one in batch])
    with serving({"b": script}) as url:
        found = outcomes(http.post(f"{url}/score", files=multipart(items(3))))
    assert found == [0.5, "scorer_error", 0.5]


# --- refusals ---


@pytest.mark.parametrize(
    "changes",
    [{"protocol": 2}, {"surprise": 1}, {"rewards": []}, {"rewards": ["b", "b"]}, {"items": []}, {"deadline_ms": 0}],
    ids=str,
)
def test_422_for_what_is_not_of_the_protocol(http: httpx.Client, changes: dict[str, Any]) -> None:
    with serving({"b": Brightness()}) as url:
        response = http.post(f"{url}/score", json=as_json([item(0)]) | changes)
    told = response.json()["error"]
    assert response.status_code == 422 and next(iter(changes)) in told and "pydantic" not in told


def test_422_for_unknown_keys_of_items_and_for_double_ids(http: httpx.Client) -> None:
    unknown, double = as_json([item(0)]), as_json([item(0), item(0)])
    unknown["items"][0]["colour"] = "red"
    with serving({"b": Brightness()}) as url:
        answers = [http.post(f"{url}/score", json=message) for message in (unknown, double)]
    assert [a.status_code for a in answers] == [422, 422]
    assert "colour" in answers[0].json()["error"] and "ids of a request must differ" in answers[1].json()["error"]


@pytest.mark.parametrize(
    "request_of",
    [
        {"content": b"not json", "headers": {"content-type": "application/json"}},
        {"content": b""},
        {"content": b"\xff"},
        {"content": b"x", "headers": {"content-type": "multipart/form-data"}},
        {"content": b"x", "headers": {"content-type": "multipart/form-data; boundary=b"}},
        {"files": {"picture": ("a", b"x", "image/png")}},
        {"files": [("manifest", ("m", b"{}", "")), ("manifest", ("m", b"{}", ""))]},
    ],
    ids=["no json", "nothing", "no text", "no boundary", "no parts", "no manifest", "two manifests"],
)
def test_422_for_a_body_that_cannot_be_read(http: httpx.Client, request_of: dict[str, Any]) -> None:
    with serving({"b": Brightness()}) as url:
        response = http.post(f"{url}/score", **request_of)
        assert response.status_code == 422 and response.json()["error"]
        assert outcomes(http.post(f"{url}/score", files=multipart([item(0)]))) == [brightness(item(0))]


def test_413_for_too_many_items(http: httpx.Client) -> None:
    with serving({"b": Brightness()}, limits=Limits(items=2)) as url:
        fits = http.post(f"{url}/score", files=multipart(items(2)))
        over = [http.post(f"{url}/score", files=multipart(items(3))), http.post(f"{url}/score", json=as_json(items(3)))]
    assert len(outcomes(fits)) == 2
    assert [response.status_code for response in over] == [413, 413]
    assert "3 items, over the limit of 2" in over[0].json()["error"]


def test_413_for_a_large_body_whether_or_not_it_says_how_large(http: httpx.Client) -> None:
    body = json.dumps(as_json([item(0, image=picture(0, 40, 40))])).encode()
    scorer = Brightness()
    with serving({"b": scorer}, limits=Limits(body=len(body))) as url:
        assert http.post(f"{url}/score", content=body).status_code == 200
        chunked = http.post(f"{url}/score", content=iter([body, b" "]))
        told = http.post(f"{url}/score", content=body + b" ")
    assert (chunked.status_code, told.status_code) == (413, 413)
    assert f"over {len(body)} bytes" in chunked.json()["error"] and "batch_size" in told.json()["error"]
    assert len(scorer.seen) == 1


def test_429_when_too_many_requests_wait(http: httpx.Client) -> None:
    scorer = Gated(gate_score=True)
    with serving({"b": scorer}, limits=Limits(waiting=2)) as url, ThreadPoolExecutor(3) as pool:
        asked = [pool.submit(http.post, f"{url}/score", files=multipart([item(i)])) for i in range(3)]
        until(lambda: any(one.done() for one in asked))
        scorer.open()
        refused, *answered = sorted((one.result() for one in asked), key=lambda r: -r.status_code)
        assert http.post(f"{url}/score", files=multipart([item(3)])).status_code == 200
    assert refused.status_code == 429 and refused.headers["retry-after"] == "1"
    assert "2 requests are waiting" in refused.json()["error"]
    assert [one.status_code for one in answered] == [200, 200]


def test_requests_being_read_count_as_waiting(http: httpx.Client) -> None:
    """Else a crowd of slow uploads passes the check before any of them counts."""
    reading, may_end = threading.Event(), threading.Event()

    def upload() -> Iterator[bytes]:
        body = json.dumps(as_json([item(0)])).encode()
        yield body[:10]
        reading.set()
        assert may_end.wait(60)
        yield body[10:]

    with serving({"b": Brightness()}, limits=Limits(waiting=1)) as url, ThreadPoolExecutor(1) as pool:
        slow: Future[httpx.Response] = pool.submit(http.post, f"{url}/score", content=upload())
        assert reading.wait(60)
        until(lambda: http.post(f"{url}/score", files=multipart([item(1)])).status_code == 429)
        may_end.set()
        assert outcomes(slow.result()) == [brightness(item(0))]


# --- life ---


def test_alive_at_once_ready_when_loaded(http: httpx.Client) -> None:
    scorer = Gated(gate_load=True)
    with serving({"b": scorer}, wait=False) as url:
        assert http.get(f"{url}/livez").status_code == 200
        loading = http.get(f"{url}/readyz")
        early = http.post(f"{url}/score", files=multipart([item(0)]))
        assert http.get(f"{url}/info").json()["scorers"]["b"]["revision"] == "fake 1"
        scorer.open()
        until(lambda: http.get(f"{url}/readyz").status_code == 200)
        assert outcomes(http.post(f"{url}/score", files=multipart([item(0)]))) == [brightness(item(0))]
    assert loading.status_code == 503 and loading.json()["status"] == "loading"
    assert early.status_code == 503 and float(early.headers["retry-after"]) > 0


def test_a_scorer_that_cannot_load_is_said_and_never_ready(http: httpx.Client) -> None:
    with serving({"b": Unloadable()}, wait=False) as url:
        until(lambda: http.get(f"{url}/readyz").json()["status"] == "failed")
        ready, asked = http.get(f"{url}/readyz"), http.post(f"{url}/score", files=multipart([item(0)]))
        assert http.get(f"{url}/livez").status_code == 200
    assert ready.status_code == 503 and ready.json()["problem"] == "RuntimeError: no weights"
    assert asked.status_code == 503 and "no weights" in asked.json()["error"]


def test_info_says_what_the_scorers_say(http: httpx.Client) -> None:
    with serving({"b": Brightness(needs=("source", "mask"))}) as url:
        info = http.get(f"{url}/info").json()
    assert info["protocol"] == 1 and info["device"] == "cpu"
    assert info["scorers"] == {
        "b": {"range": [0.0, 1.0], "needs": ["mask", "source"], "revision": "fake 1", "licence": "Apache-2.0"}
    }


def test_alive_while_scoring(http: httpx.Client) -> None:
    scorer = Gated(gate_score=True)
    with serving({"b": scorer}) as url, ThreadPoolExecutor(1) as pool:
        asked = pool.submit(http.post, f"{url}/score", files=multipart([item(0)]))
        assert scorer.scoring.wait(60)
        assert http.get(f"{url}/livez").status_code == http.get(f"{url}/readyz").status_code == 200
        scorer.open()
        assert asked.result().status_code == 200


def test_work_whose_deadline_passed_in_the_queue_is_not_done(http: httpx.Client) -> None:
    scorer = Gated(gate_score=True)
    with serving({"b": scorer}) as url, ThreadPoolExecutor(2) as pool:
        first = pool.submit(http.post, f"{url}/score", files=multipart([item(0)]))
        assert scorer.scoring.wait(60)
        late = pool.submit(http.post, f"{url}/score", files=multipart([item(1), item(2)], deadline_ms=50))
        until(lambda: b"retouch_requests_waiting 2" in get(url, "/metrics"))
        time.sleep(0.15)
        scorer.open()
        assert outcomes(first.result()) == [brightness(item(0))]
        reply = late.result()
    assert outcomes(reply) == ["deadline", "deadline"]
    assert all(one["errors"]["b"]["retryable"] for one in reply.json()["items"])
    assert [one.id for one in scorer.seen] == [0]


def test_scorers_run_in_one_thread_at_a_time(http: httpx.Client) -> None:
    running, most, threads = 0, 0, set[int]()

    def script(batch: Sequence[RewardItem]) -> list[Score]:
        nonlocal running, most
        running += 1
        most = max(most, running)
        threads.add(threading.get_ident())
        time.sleep(0.01)
        running -= 1
        return [Score(0.5)] * len(batch)

    scorers: dict[str, Scorer] = {"b": Scripted(script), "c": Scripted(script)}
    with serving(scorers) as url, ThreadPoolExecutor(8) as pool:
        asked = [pool.submit(http.post, f"{url}/score", files=multipart([item(i)], ["b", "c"])) for i in range(8)]
        assert all(one.result().status_code == 200 for one in asked)
    assert most == 1 and len(threads) == 1


# --- tokens ---


@pytest.mark.parametrize("given", [None, "Bearer", "Bearer wrong", "Bearer secretx", "Basic secret", "secret", ""])
def test_401_without_the_token(http: httpx.Client, given: str | None) -> None:
    headers = {} if given is None else {"Authorization": given}
    scorer = Brightness()
    with serving({"b": scorer}, token="secret") as url:
        assert http.get(f"{url}/livez", headers=headers).status_code == 200
        answers = [
            http.get(f"{url}{path}", headers=headers) for path in ("/readyz", "/info", "/openapi.json", "/nowhere")
        ]
        answers.append(http.post(f"{url}/score", files=multipart([item(0)]), headers=headers))
        good = http.post(f"{url}/score", files=multipart([item(1)]), headers={"Authorization": "Bearer secret"})
    assert [answer.status_code for answer in answers] == [401] * 5
    assert [one.prompt for one in scorer.seen] == ["item 1"]
    assert all("secret" not in answer.text for answer in answers)
    assert outcomes(good) == [brightness(item(1))]


@pytest.mark.parametrize("given", ["Bearer secret", "bearer secret", "BEARER secret", "bEaReR   secret"])
def test_the_scheme_of_the_token_has_no_case(http: httpx.Client, given: str) -> None:
    with serving({"b": Brightness()}, token="secret") as url:
        assert http.get(f"{url}/info", headers={"Authorization": given}).status_code == 200
        for wrong in (given.upper(), given + "s", f"x{given}"):  # the token has
            assert http.get(f"{url}/info", headers={"Authorization": wrong}).status_code == 401


def test_what_holds_the_token_does_not_show_it() -> None:
    """A traceback with local variables prints them."""
    app: Any = None
    assert "secret" not in repr(Authorize(app, token="secret"))


def test_the_token_is_compared_in_constant_time(http: httpx.Client, monkeypatch: pytest.MonkeyPatch) -> None:
    compared: list[tuple[Any, Any]] = []
    real = hmac.compare_digest

    def spy(a: Any, b: Any) -> bool:
        compared.append((a, b))
        return real(a, b)

    monkeypatch.setattr(hmac, "compare_digest", spy)
    with serving({"b": Brightness()}, token="secret") as url:
        compared.clear()
        assert http.get(f"{url}/info", headers={"Authorization": "Bearer guess"}).status_code == 401
    assert compared and set(compared) == {(b"Bearer guess", b"Bearer secret")}  # of the connection and the request


def test_without_a_token_set_none_is_asked_for(http: httpx.Client) -> None:
    with serving({"b": Brightness()}) as url:
        assert http.get(f"{url}/info").status_code == 200


# --- web pages ---


@pytest.mark.parametrize("kind", ["text/plain", "application/x-www-form-urlencoded"])
def test_415_for_bodies_that_any_web_page_may_send(http: httpx.Client, kind: str) -> None:
    body = json.dumps(as_json(items(1))).encode()
    with serving({"b": Brightness()}) as url:
        reply = http.post(f"{url}/score", content=body, headers={"content-type": kind})
    assert reply.status_code == 415 and "application/json" in reply.json()["error"]


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({}, 200),
        ({"host": "localhost:8000"}, 200),
        ({"host": "[::1]"}, 200),
        ({"host": "rebound.example"}, 403),
        ({"host": "[::1"}, 403),
        ({"origin": "https://page.example"}, 403),
    ],
)
def test_without_a_token_only_programs_of_this_machine_are_answered(headers: dict[str, str], status: int) -> None:
    app = app_of(ThreadWorker({"b": Brightness()}, "cpu"), "cpu", local=True)
    with TestClient(app, base_url="http://127.0.0.1:8000") as client:
        assert client.get("/info", headers=headers).status_code == status
