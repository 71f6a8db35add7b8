"""The page of `retouch label` over HTTP and in a browser: the file has exactly the votes that were given."""

from __future__ import annotations

import http.client
import io
import json
import os
import shlex
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from retouch.config import load_run
from retouch.config.check import require_trainable
from retouch.errors import ConfigError, DataError
from retouch.taste.labelling import LabelServer, open_labelling, open_server, progress, what_next
from retouch.taste.votes import VotedImage, read_votes
from tests.browser import Page
from tests.command_line import retouch
from tests.taste.voters import drawn_image

HOSTILE = "<img src=x onerror='window.hacked = 1'>"


def listed(folder: Path, images: list[VotedImage], prompt: str | None = None, **more: str) -> Path:
    """A list of images, as `retouch sample --for-votes` writes it, with `more` in each entry."""
    path = folder / "samples.jsonl"
    entries = [
        {
            "image": i.image.name,
            "example": i.example,
            "prompt": prompt or i.prompt,
            "mask": i.mask and i.mask.name,
            **more,
        }
        for i in images
    ]
    path.write_text("".join(json.dumps(entry) + "\n" for entry in entries))
    return path


@pytest.fixture(scope="module")
def samples(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """20 examples of 3 images."""
    folder = tmp_path_factory.mktemp("samples")
    return listed(folder, [drawn_image(folder, e, k, 20.0 * k) for e in range(20) for k in range(3)], HOSTILE)


@contextmanager
def serving(samples: Path, votes: Path, **options: Any) -> Iterator[LabelServer]:
    given = {"alone": False, "active": None, "goal": 60, "seed": 0, **options}
    with open_labelling(samples, votes, **given) as labelling, open_server(labelling, 0) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        try:
            yield server
        finally:
            server.shutdown()
            thread.join()


def sent(server: LabelServer, place: str, told: object = None) -> tuple[int, Any]:
    connection = http.client.HTTPConnection("127.0.0.1", server.server_port, timeout=30)
    body = None if told is None else json.dumps(told)
    connection.request("GET" if told is None else "POST", f"/{server.token}/{place}", body)
    answer = connection.getresponse()
    content = answer.read()
    connection.close()
    is_json = answer.headers.get("Content-Type") == "application/json"
    return answer.status, json.loads(content) if is_json else content


def test_a_question_takes_one_answer_and_undo_asks_it_again(samples: Path, tmp_path: Path) -> None:
    votes = tmp_path / "votes.jsonl"
    with serving(samples, votes) as server:
        _, first = sent(server, "state?voter=ann")
        assert sent(server, "state?voter=ann")[1] == first  # a reload
        status, second = sent(server, "answer", {"voter": "ann", "question": first["question"], "answer": "left"})
        assert status == 200 and second["votes"] == 1 and second["question"] != first["question"]
        _, again = sent(server, "answer", {"voter": "ann", "question": first["question"], "answer": "right"})
        assert again == second and [v.answer for v in read_votes(votes)] == ["left"]  # a key pressed twice
        assert sent(server, "answer", {"voter": "ann", "question": second["question"], "answer": "good"})[0] == 400
        _, undone = sent(server, "undo", {"voter": "ann"})
        assert undone["votes"] == 0 and undone["images"] == first["images"]
        _, other = sent(server, "state?voter=bob")
        sent(server, "answer", {"voter": "bob", "question": other["question"], "answer": "tie"})
        sent(server, "answer", {"voter": "ann", "question": undone["question"], "answer": "both_bad"})
    assert [(v.voter, v.answer) for v in read_votes(votes)] == [("bob", "tie"), ("ann", "both_bad")]


def test_undo_takes_back_no_vote_that_the_page_cannot_ask_again(samples: Path, tmp_path: Path) -> None:
    votes = tmp_path / "votes.jsonl"
    with serving(samples, votes) as server:
        _, asked = sent(server, "state?voter=ann")
        sent(server, "answer", {"voter": "ann", "question": asked["question"], "answer": "left"})
    others = tmp_path / "others"
    others.mkdir()
    elsewhere = listed(others, [drawn_image(others, e, k, 5.0 + k) for e in range(2) for k in range(2)])
    for place, alone in ((elsewhere, False), (samples, True)):  # other images, or the other kind of votes
        with serving(place, votes, alone=alone) as server:
            _, asked = sent(server, "state?voter=ann")
            assert sent(server, "undo", {"voter": "ann"}) == (200, asked)
    assert len(read_votes(votes)) == 1


def test_transparent_pixels_are_shown_as_they_are_trained_on(tmp_path: Path) -> None:
    """Over white, and not in the colour that lies below them."""
    for name in ("a-0.png", "a-1.png"):
        Image.new("RGBA", (8, 8), (255, 0, 0, 0 if name == "a-0.png" else 255)).save(tmp_path / name)
    with serving(tmp_path, tmp_path / "votes.jsonl") as server:
        shown = [Image.open(io.BytesIO(sent(server, f"image/{n}")[1])) for n in range(2)]
    assert [(one.mode, one.getpixel((0, 0))) for one in shown] == [("RGB", (255, 255, 255)), ("RGB", (255, 0, 0))]


def test_images_are_those_that_are_voted_on_and_nothing_else(samples: Path, tmp_path: Path) -> None:
    with serving(samples, tmp_path / "votes.jsonl") as server:
        _, state = sent(server, "state?voter=ann")
        number = state["images"][0]["number"]
        assert sent(server, f"image/{number}")[1].startswith(b"\x89PNG")
        assert sent(server, f"outline/{number}")[1].startswith(b"\x89PNG")
        for place in (
            f"source/{number}",
            "image/999",
            "image/../samples.jsonl",
            "samples.jsonl",
            "state",
            "votes.jsonl",
        ):
            assert sent(server, place)[0] == 404, place
        for told in ([], {}, {"voter": " "}, {"voter": 7}, {"voter": "ann", "answer": "left"}):
            assert sent(server, "answer", told)[0] in (200, 400), told
        assert sent(server, "answer", {"voter": "x" * 70000})[0] == 413
        server.token = "another"
        assert sent(server, "state?voter=ann")[0] == 200


def test_what_cannot_be_voted_on_is_refused(samples: Path, tmp_path: Path) -> None:
    votes = tmp_path / "votes.jsonl"

    def refused(images: Path, error: type[Exception], match: str) -> None:
        with pytest.raises(error, match=match), serving(images, votes):
            pass

    single = tmp_path / "single"
    single.mkdir()
    refused(single, DataError, "no images")
    drawn_image(single, 0, 0, 0.0)
    (single / "0-mask.png").unlink()
    refused(single, ConfigError, "--alone")
    refused(tmp_path / "missing", DataError, "expected a run directory")
    (single / "broken.png").write_bytes(b"no image")
    refused(single, DataError, "broken.png")
    with serving(samples, votes):
        refused(samples, ConfigError, "another process has open")
    with (
        pytest.raises(ConfigError, match="--active: given with --alone"),
        serving(samples, votes, alone=True, active="tiny"),
    ):
        pass
    done = retouch("label", samples, "--extractor", "tiny")
    assert done.code == 2 and "--extractor: given 'tiny' without --active" in done.err
    votes = tmp_path / "votes.csv"  # it would be written as JSONL, and read as a table
    refused(samples, ConfigError, "ends in .jsonl")


def test_the_goal_is_no_less_than_all_pairs_and_their_repetitions(tmp_path: Path) -> None:
    samples = listed(tmp_path, [drawn_image(tmp_path, e, k, 9.0 * k) for e in range(10) for k in range(3)])
    with serving(samples, tmp_path / "votes.jsonl") as server:
        _, state = sent(server, "state?voter=ann")
        assert state["goal"] == 30
        while state["question"]:
            _, state = sent(server, "answer", {"voter": "ann", "question": state["question"], "answer": "left"})
        assert state["goal"] == state["votes"] > 30


def test_no_command_is_printed_for_votes_that_cannot_be_trained_on(samples: Path, tmp_path: Path) -> None:
    with serving(samples, tmp_path / "votes.jsonl") as server:  # its masks have no sources
        _, state = sent(server, "state?voter=ann")
        sent(server, "answer", {"voter": "ann", "question": state["question"], "answer": "left"})
        told = what_next(server.labelling)
    assert len(told) == 2 and told[0] == "a reward needs votes on 10 examples or photographs, and these are on 1"
    server.labelling.of_run = True
    assert what_next(server.labelling)[1:] == [
        "DPO and KTO train on images of `retouch sample --for-votes`; those of evaluations are held out"
    ]
    assert told[1].startswith("DPO and KTO need the prompt of each image, and a source with each mask")


def test_a_list_of_samples_in_a_run_directory_is_no_evaluation(tmp_path: Path) -> None:
    """The page voted on the list, and its last line denied that a model can be trained on it."""
    path = listed(tmp_path, [drawn_image(tmp_path, 0, k, 9.0 * k) for k in range(2)])
    (tmp_path / "config.yaml").touch()
    options: dict[str, Any] = {"alone": False, "active": None, "goal": 1, "seed": 0}
    with open_labelling(path.parent, tmp_path / "votes.jsonl", **options) as labelling:
        assert len(labelling.images) == 2 and not labelling.of_run


def test_the_commands_at_the_end_are_those_for_the_votes(tmp_path: Path) -> None:
    votes = tmp_path / "my votes.jsonl"
    images = [drawn_image(tmp_path, e, k, e + 9.0 * k) for e in range(10) for k in range(2)]
    samples = listed(tmp_path, images, "a sign")
    entries = zip(samples.read_text().splitlines(), images, strict=True)
    own = [{**json.loads(line), "source": f"{image.example}-0.png"} for line, image in entries]  # a photograph each
    samples.write_text("".join(json.dumps(entry) + "\n" for entry in own))

    def voted(server: LabelServer, answer: str) -> list[str]:
        _, state = sent(server, "state?voter=ann")
        for _ in range(10):
            _, state = sent(server, "answer", {"voter": "ann", "question": state["question"], "answer": answer})
        return what_next(server.labelling)

    with serving(samples, votes, alone=True) as server:
        assert what_next(server.labelling) == []
        assert progress(server.labelling) == [f"{votes}: 0 votes on 0 examples", "each voter: 20 of 20 images left"]
        told = voted(server, "good")
        assert told[0] == f"retouch reward fit '{votes}' --config RUN.yaml" and len(told) == 2
    with serving(samples, votes) as server:  # the same file
        assert sent(server, "state?voter=ann")[1]["votes"] == 0  # of pairs
        assert progress(server.labelling) == [f"{votes}: 10 votes on 10 examples", "ann: 10 of 10 pairs left"]
    with serving(samples, tmp_path / "pairs.jsonl") as server:
        told += voted(server, "left")
    commands = [shlex.split(line) for line in told if line.startswith("retouch train")]
    assert [next(word for word in words if "name=" in word)[15:] for words in commands] == ["kto", "dpo", "kto"]
    file = "configs/tiny/flux_fill_nft.yaml"
    for _, _, _, *overrides in commands:
        run = load_run(file, [*overrides, "algorithm.sft_steps=0", "data.resolution=[32, 64]"])
        require_trainable(run)
        assert run.data.format == "votes"
    votes_as = {"dpo": ("labels", "pairs"), "kto": ("pairs", "labels")}
    for name, (now, other) in votes_as.items():
        pairs = ["algorithm.pairs=offline"] * (name == "dpo")
        with pytest.raises(ConfigError, match=f"data.votes_as: given '{now}'.*set data.votes_as={other}"):
            load_run(
                file, [f"algorithm.name={name}", *pairs, "data={format: votes, path: v.jsonl}", f"data.votes_as={now}"]
            )


def press(page: Page, key: str) -> None:
    page.run(f"document.dispatchEvent(new KeyboardEvent('keydown', {{key: {json.dumps(key)}, bubbles: true}}))")


def test_fifty_votes_by_keyboard_with_undo_reload_and_another_voter(page: Page, samples: Path, tmp_path: Path) -> None:
    votes = tmp_path / "votes.jsonl"
    given, undone = list[str](), False

    def wait_for(count: int) -> None:
        page.wait(f"document.getElementById('count').textContent === '{count} of 60' && !busy")

    with serving(samples, votes) as server:
        page.open(server.address)
        page.set("#name", "Ann  B")
        page.click("#who button")
        wait_for(0)
        keys = {"ArrowLeft": "left", "ArrowRight": "right", "t": "tie", "b": "both_bad"}
        for key, answer in [*keys.items()] * 13:
            if len(given) == 20:
                page.open(server.address)
                wait_for(20)
            if len(given) == 30 and not undone:
                undone = True
                press(page, "u")
                given.pop()
                wait_for(29)
            if len(given) < 50:
                press(page, key)
                given.append(answer)
                wait_for(len(given))
        page.click("[data-answer='undo']")
        wait_for(49)
        assert page.run("window.hacked") is None
        assert HOSTILE in page.run("document.getElementById('asked').textContent")
        press(page, "m")
        page.wait("document.querySelectorAll('img.over').length === 2 && !busy")
        page.run("void alone(() => new Promise(() => 0))")  # images that never come: keys answer no question meanwhile
        press(page, "m")
        press(page, "ArrowLeft")
        assert page.run("shows.outline && busy")
    assert [v.answer for v in read_votes(votes)] == given[:49]
    assert {v.voter for v in read_votes(votes)} == {"Ann B"}


def test_buttons_name_the_place_of_the_image(page: Page, samples: Path, tmp_path: Path) -> None:
    """Beside each other on a wide page, one above the other on a narrow one and at full size."""
    with serving(samples, tmp_path / "votes.jsonl") as server:
        page.open(server.address)
        page.set("#name", "ann")
        page.click("#who button")
        told = (
            "[...document.querySelectorAll('[data-answer]')].slice(0, 2).map((e) => e.innerText.split(' ')[0]).join()"
        )
        page.wait(f"{told} === 'Left,Right'")
        press(page, "f")
        page.wait(f"{told} === 'Upper,Lower'")
        press(page, "f")
        page.wait(f"{told} === 'Left,Right'")
        page.shape(390)
        page.wait(f"{told} === 'Upper,Lower'")


def test_votes_outlast_a_kill(samples: Path, tmp_path: Path) -> None:
    votes = tmp_path / "votes.jsonl"
    command = [sys.executable, "-m", "retouch", "label", str(samples), "--votes", str(votes)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env={**os.environ, "PYTHONUNBUFFERED": "1"})
    try:
        assert process.stdout is not None
        address, *told = (process.stdout.readline().strip() for _ in range(4))
        assert (
            told[:2] == [f"{votes}: 0 votes on 0 examples", "each voter: 60 of 60 pairs left"] and "Ctrl-C" in told[2]
        )
        port, token = address.removeprefix("http://127.0.0.1:").strip("/").split("/")
        connection = http.client.HTTPConnection("127.0.0.1", int(port), timeout=30)

        def post(place: str, told: object | None) -> Any:
            connection.request(
                "GET" if told is None else "POST", f"/{token}/{place}", None if told is None else json.dumps(told)
            )
            return json.loads(connection.getresponse().read())

        state = post("state?voter=ann", None)
        for _ in range(3):
            state = post("answer", {"voter": "ann", "question": state["question"], "answer": "left"})
    finally:
        process.send_signal(signal.SIGKILL)
        process.wait()
    assert len(read_votes(votes)) == 3
    with serving(samples, votes) as server:  # the kernel has let the lock go
        assert sent(server, "state?voter=ann")[1]["votes"] == 3
