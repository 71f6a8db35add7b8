"""Answers of judges and detectors, replies of their endpoints, and copies of published questions."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import pytest
from hypothesis import given
from hypothesis import strategies as st

from retouch.errors import ConfigError
from retouch.rewards.protocol import quoted_texts
from retouch.rewards.scorers import completion, editscore, mmmg, textpecker
from retouch.rewards.scorers.complex_edit import (
    _PUBLISHED,  # pyright: ignore[reportPrivateUsage]
    _read_as_text,  # pyright: ignore[reportPrivateUsage]
    read_published,
)
from retouch.rewards.scorers.copied_texts import copied_text
from retouch.rewards.scorers.judge_client import Budget, BudgetSpent, JudgeClient, JudgeError
from retouch.rewards.scorers.judge_replies import text_of
from retouch.rewards.scorers.judged import read_integers
from retouch.rewards.scorers.knowledge_graph import read_checklist, read_graph
from retouch.rewards.scorers.openai_judge import expectation
from retouch.rewards.scorers.unified_reward import read_axes, read_pair, read_point
from retouch_bench.scorers import geneval, imgedit, longtext, textedit_judge, viescore
from retouch_bench.scorers.geneval_verdict import relations
from retouch_bench.scorers.textedit import BoxedText, edit_scores
from tests.fuzz.inputs import attempt, blobs, changed, fuzzed, kept, texts, values

NAMES = ("Instruction Adherence", "Editing Quality", "Detail Preservation")
QUESTION = "Edit: <edit_prompt>\n" + "".join(f"{name}: A number from 1 to 5.\n" for name in NAMES)
AXES = ("Alignment", "Coherence", "Style")

READERS: dict[str, tuple[Callable[[str], Any], str]] = {
    "complex_edit": (
        lambda text: read_integers(text, ["following", "preservation"], 10, ["reasoning"]),
        json.dumps({"following": 7, "preservation": 10, "reasoning": "fine"}),
    ),
    "amid_prose": (
        lambda text: read_integers(text, ["following"], 10),
        '<think>{7}</think>So: ```json\n{"following": "7.0"}\n``` {or {"following": "7.0"}',
    ),
    "complex_edit_published": (
        lambda text: _read_as_text(text, ["following"], ["reasoning"]),
        json.dumps({"following": "7", "reasoning": "fine"}),
    ),
    "viescore": (lambda text: viescore.read_scores(text, 2), '||V^=^V||{"score": [7, 9], "reasoning": "fine"}'),
    "editscore": (editscore.read_scores, '```json\n{"reasoning": "fine", "score": [7.5, 20]}\n```'),
    "imgedit": (
        lambda text: imgedit.read_lines(text, NAMES),
        "Brief reasoning: fine\n" + "".join(f"{name}: 4\n" for name in NAMES),
    ),
    "textpecker": (
        lambda text: _transcribed(textpecker.read_transcript(text)),
        'Here: {"recognized_text": "one <#> tw<###>o, three"}',
    ),
    "textedit_judge": (
        textedit_judge.read_own,
        json.dumps({**dict.fromkeys(textedit_judge.PARTS, 4), "reasoning": "fine"}),
    ),
    "textedit_judge_published": (
        textedit_judge.read_published,
        '```json\n{"score": {"Q1": 5, "Q2": 4, "Q3": 3, "Q4": 2, "Q5": 1}, "reason": {"Q1": "fine"}}\n```',
    ),
    "longtext": (lambda text: [longtext.recall(["cat", "dogs"], text, lang) for lang in ("en", "zh")], "cat. The dogs"),
    "unified_axes": (read_axes, "".join(f"{axis} Score (1-5): 3.25\n" for axis in AXES)),
    "unified_point": (read_point, "it is fine\nFinal Score: 3.5"),
    "unified_pair": (read_pair, "".join(f"{axis} Score:\nImage 1: 0.44\nImage 2: 0.56\n" for axis in AXES)),
    "mmmg": (lambda text: mmmg._read_answers(text, ["e1"]), json.dumps({"e1": "yes", "description": "a"})),  # pyright: ignore[reportPrivateUsage]
    "mmmg_published": (
        lambda text: read_checklist(text, ["sun", "moon"]),
        '* **sun**: [yes]\n1. moon: no (it is "absent")\n- `causes(sun, moon)`: yes',
    ),
    "knowledge_graph": (read_graph, json.dumps({"elements": ["sun", "moon"], "dependencies": ["causes(sun, moon)"]})),
    "completion": (
        lambda text: (completion.think_format(text), completion.score_completion(text)),
        "<think>so</think>I am sorry, a sign that says stop, on a wall",
    ),
    "prompt": (quoted_texts, "a sign 'cat' and 'dog's' with \"one\""),
    "textedit": (
        lambda text: edit_scores([_boxed("cat", 0), _boxed("dog", 40)], [_boxed(text, 0)], "cat", text),
        "cow",
    ),
}
"""Reader -> function of an answer's text, an answer that it reads. It raises ValueError for any other."""


def _transcribed(transcript: str) -> None:
    for asked in ("one two three", "# 1"):
        textpecker.quality(transcript, asked, 5.0)
        textpecker.semantic(transcript, asked)


def _boxed(text: str, top: float) -> BoxedText:
    return BoxedText(text, (0.0, top, 30.0, top + 10))


@pytest.mark.parametrize("name", sorted(READERS))
def test_the_seeds_are_read(name: str) -> None:
    read, answer = READERS[name]
    read(answer)


@fuzzed
@given(st.sampled_from(sorted(READERS)).flatmap(lambda name: st.tuples(st.just(name), texts([READERS[name][1]]))))
def test_answers(given_: tuple[str, str]) -> None:
    name, text = given_
    attempt("answers, text", lambda: READERS[name][0](text), ValueError)


STRUCTURED = sorted(name for name, (_, answer) in READERS.items() if answer.startswith("{"))


@fuzzed
@given(
    st.sampled_from([*STRUCTURED, "viescore", "editscore", "textpecker"]).flatmap(
        lambda name: st.tuples(
            st.just(name), st.one_of(changed([json.loads(_object_in(READERS[name][1]))]), values).map(json.dumps)
        )
    )
)
def test_structured_answers(given_: tuple[str, str]) -> None:
    name, text = given_
    attempt("answers, structure", lambda: READERS[name][0](text), ValueError)


def _object_in(answer: str) -> str:
    return answer[answer.index("{") : answer.rindex("}") + 1]


CHAT: dict[str, Any] = {
    "model": "judge",
    "system_fingerprint": "a",
    "choices": [
        {
            "message": {"role": "assistant", "content": "7"},
            "finish_reason": "stop",
            "logprobs": {"content": [{"top_logprobs": [{"token": " 1", "logprob": -0.1}]}]},
        }
    ],
    "usage": {"prompt_tokens": 900, "completion_tokens": 3},
}


REFUSED: dict[str, Any] = {
    "error": {"message": "'seed' is not supported; insufficient_quota", "param": "seed", "code": 400},
    "choices": [{"message": {"content": [{"type": "text", "text": "<think>7"}]}, "error": {"code": 429}}],
}


def _ask(body: bytes, model: str, status: int = 200) -> None:
    """A question to an endpoint that answers with this body, and what its scorers do with the answer."""
    asked: list[bytes] = []

    def reply(request: httpx.Request) -> httpx.Response:
        asked.append(request.read())
        return httpx.Response(status, content=body)

    judge = JudgeClient("http://127.0.0.1:1/v1", model, Budget(tokens=10**6), timeout_s=0.02)
    judge._http = httpx.Client(transport=httpx.MockTransport(reply))  # pyright: ignore[reportPrivateUsage]
    choice = judge.ask([{"role": "user", "content": "?"}])
    judge.served.encode()
    text = text_of(choice)
    judge.ask([{"role": "assistant", "content": text}])  # as where an answer is complained about
    try:
        top: list[Any] = choice["logprobs"]["content"][0]["top_logprobs"]
        expectation(top, {"1": 1.0, "2": 0.0})
    except (KeyError, TypeError, IndexError, ValueError, OverflowError):
        pass
    assert judge.budget.spent_in >= 0 and judge.budget.spent_out >= 0


@fuzzed
@given(
    st.one_of(
        changed([CHAT, REFUSED]).map(lambda value: json.dumps(value).encode()), blobs([json.dumps(CHAT).encode()])
    ),
    st.sampled_from(["judge", "auto"]),
    st.sampled_from([200, 200, 200, 400, 429]),
)
def test_endpoints(body: bytes, model: str, status: int) -> None:
    attempt("replies of a judge's endpoint", lambda: _ask(body, model, status), JudgeError, BudgetSpent)


DETECTIONS: dict[str, Any] = {
    "detector": "mask2former",
    "objects": [{"class": "dog", "score": 0.9, "box": [0, 1, 20, 30], "color": "red"}],
}


@fuzzed
@given(
    st.one_of(
        changed([DETECTIONS]).map(lambda value: json.dumps(value).encode()), blobs([json.dumps(DETECTIONS).encode()])
    )
)
def test_detections(body: bytes) -> None:
    def read() -> None:
        _, found = geneval.read_detections(body)
        for one in found:
            for other in found:
                relations(one.box, other.box)

    attempt("replies of a detector", read, ValueError)


QUESTIONS = dict.fromkeys(imgedit.TYPES, QUESTION)
COPIED = 'ALIGNMENT_PROMPT_W_RUBRIC = """asked"""\nPROMPT_TEMPLATE = "{instruction} [ELEM_DEPEND]"\n'
COPIED += 'PERCEPTUAL_QUALITY_PROMPT_W_RUBRIC_WO_INST = """asked"""\n'


@fuzzed
@given(st.one_of(texts([json.dumps(QUESTIONS)]), changed([QUESTIONS]).map(json.dumps)))
def test_questions(tmp_path_factory: pytest.TempPathFactory, text: str) -> None:
    file = tmp_path_factory.getbasetemp() / "prompts.json"
    file.write_bytes(text.encode("utf-8", "surrogatepass"))
    attempt("published questions, JSON", lambda: imgedit.read_questions(str(file)), ConfigError)


@fuzzed
@given(texts([COPIED, "x = -1 + 2\n" * 20]))
def test_copied_files(tmp_path_factory: pytest.TempPathFactory, text: str) -> None:
    place = tmp_path_factory.getbasetemp() / "copied"
    place.mkdir(exist_ok=True)
    data = text.encode("utf-8", "surrogatepass")
    _copy(place, data)
    attempt("published questions, Python", lambda: read_published(str(place)), ConfigError)
    asked = partial(copied_text, "mmmg", str(place / "prompt.py"), ["[ELEM_DEPEND]"], "MMMG's question")
    attempt("published questions, Python", asked, ConfigError)


def _copy(place: Path, data: bytes) -> None:
    for name in (*_PUBLISHED, "prompt.py"):
        (place / name).write_bytes(data)


def test_a_copied_file_is_read(tmp_path: Path) -> None:
    _copy(tmp_path, COPIED.encode())
    assert read_published(str(tmp_path)).alignment == "asked"


@pytest.mark.parametrize("file", kept("answers"), ids=lambda file: file.name)
def test_corpus(file: Path) -> None:
    """Answers that once took minutes, or whose error could not be printed."""
    read = READERS[file.stem.partition("@")[2]][0]
    text = file.read_bytes().decode("utf-8", "surrogatepass")
    attempt("answers, corpus", lambda: read(text), ValueError)


LONG = {
    "unified_axes": "\n" * 60_000,
    "unified_pair": "\n" * 60_000,
    "editscore": "```" + "\n" * 4_000 + "x",
    "prompt": " 'a" * 30_000,
}
"""Answers that once took a time that grew with the square or the cube of their length."""


@pytest.mark.parametrize("reader", LONG)
def test_long_answers(reader: str) -> None:
    attempt("answers, corpus", lambda: READERS[reader][0](LONG[reader]), ValueError)


@pytest.mark.parametrize("file", kept("endpoints"), ids=lambda file: file.name)
def test_corpus_of_endpoints(file: Path) -> None:
    attempt("endpoints, corpus", lambda: _ask(file.read_bytes(), "judge"), JudgeError)


@pytest.mark.parametrize("file", kept("detectors"), ids=lambda file: file.name)
def test_corpus_of_detectors(file: Path) -> None:
    attempt("detectors, corpus", lambda: geneval.read_detections(file.read_bytes()), ValueError)
