"""A judge behind the OpenAI protocol, on loopback: checks keys, schemas and pictures, limits rates, counts tokens.

It judges by brightness: black is 0, white is 5. Asked for the parts of an edit, from 0 to 10, it takes the brightness
of the output for instruction following, 1 - mean |difference| to the input for identity preservation, and the output's
blue for perceptual quality. The n-th answer of a checklist is yes where the n-th pixel of the picture is bright. Of two
pictures it prefers the brighter one, by half the difference. It answers EditScore's and UnifiedReward's questions in
their formats.
"""

from __future__ import annotations

import base64
import io
import json
import math
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import numpy as np
from PIL import Image

KEY = "sk-test-4f9a1c77deadbeef"


@dataclass
class OpenAIServer:
    """`with OpenAIServer() as server`: `server.url` is the address with /v1.

    Attributes:
        per_second: requests that are answered; more get 429 with Retry-After.
        has_logprobs, has_schema: whether it does what it is asked, or ignores it, as some servers do.
        served: what it calls its model.
        digits: probability of the score tokens together.
        bad_first: answers of a rubric that do not keep to the schema before one that does.
        fail: statuses of the first requests.
        by_seed: is added to every integer of an edit, by the seed of the request.
        refuses: requests that get a refusal.
        breaks: request -> status to fail with, for an hour; 0 answers.
        spoil: the fields of an answer by a schema -> its text.
        says: request without a schema -> the text of its answer.
        models: names that it lists; it answers for the first.
        prefers_first: is added to the probability that the first of two pictures is better.
        rewrite: an answer as text -> the text that is sent.
        host: its address.
    """

    per_second: float = math.inf
    has_logprobs: bool = True
    has_schema: bool = True
    served: str = "judge-2026-01"
    digits: float = 0.95
    bad_first: int = 0
    fail: list[int] = field(default_factory=list[int])
    by_seed: dict[int, int] = field(default_factory=dict[int, int])
    refuses: Callable[[dict[str, Any]], bool] = lambda asked: False
    breaks: Callable[[dict[str, Any]], int] = lambda asked: 0
    spoil: Callable[[dict[str, Any]], str] = json.dumps
    says: Callable[[dict[str, Any]], str] | None = None
    models: list[str] = field(default_factory=lambda: ["judge"])
    prefers_first: float = 0.0
    rewrite: Callable[[str], str] = lambda text: text
    host: str = "127.0.0.1"
    asked: list[dict[str, Any]] = field(default_factory=list[dict[str, Any]])
    refused: int = 0

    def __enter__(self) -> OpenAIServer:
        judge, lock, times = self, threading.Lock(), list[float]()

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["Content-Length"]))
                with lock:
                    self.answer(*judge.respond(self.path, dict(self.headers), body, times))

            def do_GET(self) -> None:
                listed = {"object": "list", "data": [{"id": name, "object": "model"} for name in judge.models]}
                known = self.path == "/v1/models"
                self.answer(200 if known else 404, listed if known else _error("no such path"), {})

            def answer(self, status: int, reply: dict[str, Any], headers: dict[str, str]) -> None:
                payload = json.dumps(reply).encode()
                self.send_response(status)
                for name, value in {"Content-Length": str(len(payload)), **headers}.items():
                    self.send_header(name, value)
                self.end_headers()
                self.wfile.write(payload)

            def log_message(self, format: str, *args: Any) -> None: ...

        self._server = ThreadingHTTPServer((self.host, 0), Handler)
        self._server.daemon_threads = True
        self.url = f"http://{self.host}:{self._server.server_port}/v1"
        threading.Thread(target=self._server.serve_forever, args=(0.01,), daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._server.server_close()

    def respond(
        self, path: str, headers: dict[str, str], body: bytes, times: list[float]
    ) -> tuple[int, dict[str, Any], dict[str, str]]:
        now = time.monotonic()
        if path != "/v1/chat/completions":
            return 404, _error("no such path"), {}
        if headers.get("Authorization") != f"Bearer {KEY}":
            return 401, _error(f"Incorrect API key provided: {headers.get('Authorization')}"), {}
        times[:] = [t for t in times if now - t < 1]
        if len(times) >= self.per_second:
            self.refused += 1
            return 429, _error("Rate limit reached"), {"Retry-After": f"{1 - (now - times[0]):.3f}"}
        times.append(now)
        if self.fail:
            return self.fail.pop(0), _error(f"try again, {headers['Authorization']}"), {}
        asked = json.loads(body)
        problem = _problem(asked)
        if problem:
            return 400, _error(problem), {}
        self.asked.append(asked)
        if self.breaks(asked):
            return self.breaks(asked), _error("broken"), {"Retry-After": "3600"}
        return 200, self.complete(asked), {}

    def complete(self, asked: dict[str, Any]) -> dict[str, Any]:
        brightness = float(pictures(asked)[-1].mean()) / 255
        message: dict[str, Any] = {"role": "assistant", "content": f"{round(5 * brightness)}"}
        choice: dict[str, Any] = {"index": 0, "message": message, "finish_reason": "stop", "logprobs": None}
        if "Image 2:" in text_of(asked):
            message["content"] = "1" if self.first_is_better(asked) >= 0.5 else "2"
        message["content"] = self.rewrite(self.published(asked) or message["content"])
        if asked.get("logprobs") and self.has_logprobs and "Image 2:" in text_of(asked):
            choice["logprobs"] = {"content": [{"token": message["content"], "top_logprobs": self.ones_and_twos(asked)}]}
        elif asked.get("logprobs") and self.has_logprobs:
            choice["logprobs"] = {"content": [{"token": message["content"], "top_logprobs": self.top(brightness)}]}
        if "response_format" in asked and self.has_schema:
            verdict = {"score": round(5 * brightness), "reason": "bright"}
            message["content"] = json.dumps(verdict if not self.bad_first else {"score": 9})
            if "score" not in fields_of(asked):
                message["content"] = self.spoil(self.fill(asked)) if not self.bad_first else '{"other": 1}'
            self.bad_first = max(0, self.bad_first - 1)
        elif self.says is not None:
            message["content"] = self.says(asked)
        if self.refuses(asked):
            message |= {"content": None, "refusal": "I cannot judge this."}
        usage = {"prompt_tokens": 100, "completion_tokens": 10, "total_tokens": 110}
        return {
            "id": "c", "object": "chat.completion", "model": self.served, "system_fingerprint": "fp_1",
            "choices": [choice], "usage": usage,
        }  # fmt: skip

    def fill(self, asked: dict[str, Any]) -> dict[str, Any]:
        """What the schema asks for, by the rules above."""
        shown, fields = pictures(asked), fields_of(asked)
        output, pixels = shown[-1] / 255, shown[-1].reshape(-1, 3).mean(1)
        scores = {
            "instruction_following": output.mean(),
            "identity_preservation": 1 - np.abs(output - shown[0] / 255).mean(),
            "perceptual_quality": output[..., 2].mean(),
        }
        names = [name for name in fields if fields[name].get("enum") == ["yes", "no"]]
        answers: dict[str, Any] = {name: "yes" if pixels[i] > 127 else "no" for i, name in enumerate(names)}
        fives = [name for name in fields if fields[name].get("enum") == [1, 2, 3, 4, 5]]
        answers |= dict.fromkeys(fives, 1 + round(4 * float(output.mean())))
        for name in scores.keys() & fields.keys():
            assert len(shown) == (1 if name == "perceptual_quality" else 2)
            answers[name] = int(np.clip(round(10 * float(scores[name])) + self.by_seed.get(asked["seed"], 0), 0, 10))
        return {name: answers.get(name, "as I see it") for name in fields}

    def first_is_better(self, asked: dict[str, Any]) -> float:
        """Probability, of the last two pictures."""
        first, second = (float(picture.mean()) / 255 for picture in pictures(asked)[-2:])
        return float(np.clip(0.5 + (first - second) / 2 + self.prefers_first, 0, 1))

    def ones_and_twos(self, asked: dict[str, Any]) -> list[dict[str, Any]]:
        p = self.first_is_better(asked)
        found = {"1": self.digits * p, "2": self.digits * (1 - p), "The": 1 - self.digits}
        return [{"token": token, "logprob": math.log(max(1e-12, share))} for token, share in found.items()]

    def published(self, asked: dict[str, Any]) -> str | None:
        """The answer to a question of EditScore or UnifiedReward; None to another."""
        text, shown = text_of(asked), [picture / 255 for picture in pictures(asked)]
        bright = float(shown[-1].mean())
        if '"score" : [...]' in text:
            kept = 1 - float(np.abs(shown[-1] - shown[0]).mean())
            parts = (bright, kept) if len(shown) == 2 else (float(shown[-1][..., 2].mean()), 1.0)
            offset = self.by_seed.get(asked["seed"], 0)
            scores = [int(np.clip(round(25 * part) + offset, 0, 25)) for part in parts]
            return json.dumps({"reasoning": "as I see it", "score": scores})
        if "Alignment Score (1-5)" in text:
            axes = {"Alignment": bright, "Coherence": float(shown[-1][..., 0].mean()), "Style": 1.0}
            return "\n".join(f"{name} Score (1-5): {1 + 4 * value:.4f}" for name, value in axes.items())
        if "'Final Score:'" in text:
            return f"square (object): 1\nFinal Score: {1 + 4 * bright:.2f}"
        if "relative score" in text:
            p = self.first_is_better(asked)
            blocks = (
                f"{name} Score:\n Image 1: {p}\n Image 2: {1 - p}" for name in ("Alignment", "Coherence", "Style")
            )
            return "\n\n".join(blocks)
        return None

    def top(self, brightness: float) -> list[dict[str, Any]]:
        """The two digits around 5 x brightness, each as two variants, and a word that is no score."""
        low, share = divmod(5 * brightness, 1)
        found = {f"{low:.0f}": 1 - share, f"{low + 1:.0f}": share} if share else {f"{low:.0f}": 1.0}
        top = [
            {"token": variant, "logprob": math.log(max(1e-12, self.digits * p / 2))}
            for token, p in found.items()
            for variant in (token, f" {token}")
        ]
        return [*top, {"token": "The", "logprob": math.log(max(1e-12, 1 - self.digits))}]


def _problem(asked: dict[str, Any]) -> str | None:
    """What of a request is not of the protocol."""
    if asked.get("model") != "judge":
        return f"The model {asked.get('model')!r} does not exist"
    known = {
        "model", "messages", "temperature", "seed", "max_tokens", "logprobs", "top_logprobs", "response_format",
        "top_p", "top_k",
        "repetition_penalty",  # of vLLM
    }  # fmt: skip
    if set(asked) - known:
        return f"Unrecognized request argument: {set(asked) - known}"
    if not 0 <= asked.get("top_logprobs", 0) <= 20 or (asked.get("top_logprobs") and not asked.get("logprobs")):
        return "top_logprobs must be at most 20, beside logprobs"
    if "response_format" in asked:
        format = asked["response_format"]["json_schema"]
        schema = format["schema"]
        strict = format["strict"] and schema["additionalProperties"] is False
        if schema["type"] != "object" or not strict or sorted(schema["required"]) != sorted(schema["properties"]):
            return "invalid schema: strict takes an object that requires all of its properties and no others"
    try:
        assert 1 <= len(pictures(asked)) <= 3
    except Exception as error:
        return f"invalid image: {error}"
    return None


def fields_of(asked: dict[str, Any]) -> dict[str, Any]:
    """Properties of the schema of a request."""
    return asked["response_format"]["json_schema"]["schema"]["properties"]


def text_of(asked: dict[str, Any]) -> str:
    """The words of the first question of a request."""
    question = next(message for message in asked["messages"] if message["role"] == "user")
    return "\n".join(part["text"] for part in question["content"] if part["type"] == "text")


def pictures(asked: dict[str, Any]) -> list[np.ndarray[Any, Any]]:
    """The pictures of a request, in order."""
    urls = [
        part["image_url"]["url"]
        for message in asked["messages"]
        if isinstance(message["content"], list)
        for part in message["content"]
        if part["type"] == "image_url"
    ]
    found: list[np.ndarray[Any, Any]] = []
    for url in urls:
        head, _, data = url.partition(",")
        assert head in ("data:image/png;base64", "data:image/jpeg;base64")
        with Image.open(io.BytesIO(base64.b64decode(data, validate=True))) as image:
            found.append(np.asarray(image.convert("RGB")))
    return found


def _error(message: str) -> dict[str, Any]:
    return {"error": {"message": message, "type": "invalid_request_error", "param": None, "code": None}}
