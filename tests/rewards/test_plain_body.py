"""`POST /score` with one image as plain JSON: the brief's fields, and what is said when a reward fails."""

from __future__ import annotations

import base64
import json
from collections.abc import Iterator, Sequence
from typing import Any

import httpx
import numpy as np
import pytest

from retouch.rewards.protocol import RewardItem
from retouch.rewards.server.admission import Limits
from retouch.types import Failure, Outcome, Score
from tests.rewards.fakes import Brightness, half_mask, item, picture, serving
from tests.rewards.test_server import as_json, multipart
from tests.rewards.test_wire import encoded

IMAGE = base64.b64encode(encoded(picture(1), "PNG")).decode()
BODY: dict[str, Any] = {"image": IMAGE, "prompt": "a sign that says 'KIGE'"}


class Told(Brightness):
    """Gives the same outcome to every item, and keeps the items."""

    span = (-1.0, 1.0)

    def __init__(self, outcome: Outcome) -> None:
        super().__init__()
        self.outcome = outcome

    def score(self, items: Sequence[RewardItem]) -> list[Outcome]:
        self.seen += items
        return [self.outcome for _ in items]


def both(vlm: Outcome | None = None) -> dict[str, Told]:
    ocr = Score(0.25, {"confidence": 0.75, "ned": 0.25})
    return {"vlm": Told(vlm or Score(0.5)), "ocr": Told(ocr)}


@pytest.fixture
def http() -> Iterator[httpx.Client]:
    with httpx.Client(timeout=10, trust_env=False) as client:
        yield client


def test_the_pair_of_scores_and_their_weighted_sum(http: httpx.Client) -> None:
    """Weights of the body; .6 and .4 without any. The OCR value is the recogniser's confidence, whatever `score` is."""
    with serving(both()) as url:
        plain = http.post(f"{url}/score", json=BODY)
        weighted = http.post(f"{url}/score", json={**BODY, "vlm_weight": 0.3, "ocr_weight": 0.7}).json()
        alone = http.post(f"{url}/score", json={**BODY, "vlm_weight": 0}).json()
    assert plain.status_code == 200 and plain.headers["content-type"] == "application/json"
    assert plain.json() == {
        "vlm_score": 0.5,
        "ocr_confidence": 0.75,
        "combined_score": pytest.approx(0.6 * 0.5 + 0.4 * 0.75),
        "weights": {"vlm": 0.6, "ocr": 0.4},
        "errors": {},
        "scorers": {"vlm": {"revision": "fake 1"}, "ocr": {"revision": "fake 1"}},
    }
    assert weighted["combined_score"] == pytest.approx(0.3 * 0.5 + 0.7 * 0.75)
    assert alone["vlm_score"] == 0.5 and alone["combined_score"] == pytest.approx(0.4 * 0.75)


def test_what_the_scorers_get(http: httpx.Client) -> None:
    scorers, mask = both(), base64.b64encode(encoded(half_mask(), "PNG")).decode()
    with serving(scorers) as url:
        fields = {"text": "KIGE", "mask": f"data:image/png;base64,{mask}", "source": IMAGE, "metadata": {"a": 1}}
        assert http.post(f"{url}/score", json={**BODY, **fields}).json()["errors"] == {}
    (one,) = scorers["ocr"].seen
    assert (one.prompt, dict(one.metadata)) == (BODY["prompt"], {"a": 1, "text": "KIGE"})
    assert one.mask is not None and one.source is not None
    assert np.array_equal(one.image, picture(1)) and np.array_equal(one.mask, half_mask())


@pytest.mark.parametrize(
    ("vlm", "code"),
    [
        (Failure("low_mass", "it said something else"), "low_mass"),
        (Failure("unavailable", "busy", True), "unavailable"),
    ],
)
def test_a_failed_reward_is_null_and_so_is_the_sum(http: httpx.Client, vlm: Failure, code: str) -> None:
    """Never a number: a sum without the failed reward would be another reward."""
    with serving(both(vlm)) as url:
        found = http.post(f"{url}/score", json=BODY).json()
        unweighted = http.post(f"{url}/score", json={**BODY, "vlm_weight": 0}).json()
    assert (found["vlm_score"], found["ocr_confidence"], found["combined_score"]) == (None, 0.75, None)
    assert found["errors"] == {"vlm": {"code": code, "message": vlm.message, "retryable": vlm.retryable}}
    assert unweighted["combined_score"] == pytest.approx(0.3) and unweighted["errors"].keys() == {"vlm"}


def test_a_reward_that_the_server_does_not_have(http: httpx.Client) -> None:
    with serving({"ocr": both()["ocr"]}) as url:
        found = http.post(f"{url}/score", json=BODY).json()
        without = http.post(f"{url}/score", json={**BODY, "vlm_weight": 0}).json()
    assert found["combined_score"] is None and found["errors"]["vlm"]["code"] == "unknown_reward"
    assert without["errors"] == {} and without["vlm_score"] is None and without["combined_score"] == pytest.approx(0.3)


def test_other_rewards_and_a_judge_in_place_of_vlm(http: httpx.Client) -> None:
    scorers = {"openai_judge": Told(Score(0.5)), "ocr": both()["ocr"], "style": Told(Score(-1.0)), "b": Brightness()}
    with serving(scorers) as url:
        found = http.post(f"{url}/score", json={**BODY, "style_weight": 2, "ocr_weight": 0}).json()
        unknown = http.post(f"{url}/score", json={**BODY, "stile_weight": 2}).json()
    assert found["style_score"] == -1 and found["vlm_score"] == 0.5 and "b_score" not in found
    assert found["combined_score"] == pytest.approx(0.6 * 0.5 - 2)
    assert unknown["stile_score"] is None and unknown["errors"]["stile"]["code"] == "unknown_reward"


def test_a_broken_image_is_an_error_of_each_reward(http: httpx.Client) -> None:
    with serving(both()) as url:
        found = http.post(f"{url}/score", json={**BODY, "image": "bm90IGFuIGltYWdl"}).json()
    assert {name: one["code"] for name, one in found["errors"].items()} == {"vlm": "bad_item", "ocr": "bad_item"}
    assert found["combined_score"] is None


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"image": IMAGE}, "prompt: Field required"),
    ({**BODY, "vlm_weight": "1"}, "weights.vlm: "),
    ({**BODY, "vlm_weight": 1e6}, "weights.vlm: "),
    ({**BODY, "vlm_weight": 0, "ocr_weight": 0}, "every weight is 0"),
    ({**BODY, "combined_weight": 1}, "the combined score is no reward"),
    ({**BODY, "weights": {"ocr": 1}}, "write them as NAME_weight"),
    ({**BODY, "_weight": 1}, "weights"),
    ({**BODY, "imgae": "x"}, "imgae: Extra inputs"),
    ({**BODY, "text": 3}, "text: "),
    ({**BODY, "deadline_ms": 0}, "deadline_ms: "),
    ({"prompt": "a"}, "protocol: Field required"),
    ({**BODY, "protocol": 1}, "request_id: Field required"),
]


@pytest.mark.parametrize(("body", "message"), REFUSED, ids=range(len(REFUSED)))
def test_422_for_a_plain_body_that_cannot_be_scored(http: httpx.Client, body: dict[str, Any], message: str) -> None:
    with serving(both()) as url:
        reply = http.post(f"{url}/score", json=body)
    assert reply.status_code == 422 and message in reply.json()["error"]


def test_the_path_is_the_ordinary_one(http: httpx.Client) -> None:
    """Token, limits and deadline; the same request of the protocol keeps its own reply."""
    scorers = both()
    with serving(scorers, token="secret", limits=Limits(text=1000)) as url:
        assert http.post(f"{url}/score", json=BODY).status_code == 401
        http.headers["Authorization"] = "Bearer secret"
        assert http.post(f"{url}/score", json={**BODY, "text": "a" * 2000}).status_code == 413
        assert (
            http.post(f"{url}/score", content=json.dumps(BODY), headers={"content-type": "text/plain"}).status_code
            == 415
        )
        same = {**BODY, "request_id": "r"}
        first, second = (http.post(f"{url}/score", json=same).json() for _ in range(2))
        assert first == second and len(scorers["vlm"].seen) == 1  # with an id, a request is computed once
        assert http.post(f"{url}/score", json={**same, "vlm_weight": 1}).json() != first
        http.post(f"{url}/score", json=BODY)
        http.post(f"{url}/score", json=BODY)
        assert len(scorers["vlm"].seen) == 4
        ordinary = http.post(f"{url}/score", files=multipart([item(0)], ["vlm"])).json()
        assert ordinary["items"][0]["scores"]["vlm"]["value"] == 0.5
        as_request = as_json([RewardItem(0, BODY["prompt"], picture(1))], ["vlm", "ocr"], deadline_ms=60_000)
        assert "items" in http.post(f"{url}/score", json=as_request).json()
