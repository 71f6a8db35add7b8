"""`retouch demo-ui`: the page draws what `retouch sample` draws.

gradio asks for another Pillow than the tests are made with; the page itself is tested where it is installed, and what
it does with a painted picture everywhere.
"""

from __future__ import annotations

import importlib.util
import shutil
import socket
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
from PIL import Image

from retouch.config import ConfigError, RunConfig
from retouch.use import Trained
from retouch.use.page import Asked, Studio, page
from tests.command_line import retouch
from tests.test_use import drawn, inside, pixels

Finished = Callable[[str], Path]


@pytest.fixture(scope="module")
def studio(finished: Finished) -> Studio:
    return Studio(Trained.find(finished("lora"), None, None, None))


@pytest.fixture
def drawing(signs: Path) -> dict[str, Any]:
    """A sign in the page's editor, its mask painted half in one layer and half in another."""
    mask = np.asarray(Image.open(signs / "held_out/test200_mask.png").convert("L"))
    halves = [np.where(np.arange(64) < 32, mask, 0), np.where(np.arange(64) < 32, 0, mask)]
    layers = [np.dstack([np.full((32, 64, 3), 255), half]).astype(np.uint8) for half in halves]
    background = Image.open(signs / "held_out/test200_source.png").convert("RGBA")
    return {"background": background, "layers": [Image.fromarray(layer) for layer in layers], "composite": background}


def test_base_and_trained_as_sample_draws_them(
    studio: Studio, drawing: dict[str, Any], finished: Finished, signs: Path, tmp_path: Path
) -> None:
    base, trained = studio.repaint(drawing, Asked(text="SALE", seed=3, steps=2))
    given = ("--image", signs / "held_out/test200_source.png", "--mask", signs / "held_out/test200_mask.png")
    asked = ("--text", "SALE", "--seed", 3, "--steps", 2)
    [by_run] = drawn(tmp_path / "run", "--run", finished("lora"), *given, *asked).values()
    [by_base] = drawn(tmp_path / "base", "--config", finished("lora") / "config.yaml", *given, *asked).values()
    assert np.array_equal(np.asarray(trained), by_run)
    assert np.array_equal(np.asarray(base), by_base)
    hole = inside(signs / "held_out/test200_mask.png")
    assert np.array_equal(np.asarray(trained)[~hole], pixels(signs / "held_out/test200_source.png")[~hole])
    assert not np.array_equal(by_run, by_base)


def test_a_prompt_is_taken_as_it_is(studio: Studio, drawing: dict[str, Any]) -> None:
    said = studio.repaint(drawing, Asked(prompt="The text is 'SALE'.", steps=2))
    meant = studio.repaint(drawing, Asked(text="SALE", steps=2))
    assert [image.tobytes() for image in said] == [image.tobytes() for image in meant]


def test_a_run_file_alone_shows_the_base(config: Callable[..., RunConfig], drawing: dict[str, Any]) -> None:
    assert len(Studio(Trained(config(), {})).repaint(drawing, Asked(text="SALE", steps=2))) == 1


def test_what_is_missing_is_said(studio: Studio, drawing: dict[str, Any]) -> None:
    clear = Image.new("RGBA", (64, 32))
    cases: list[tuple[Any, Asked, str]] = [
        (None, Asked(text="A"), "choose a picture first"),
        ({**drawing, "background": None}, Asked(text="A"), "choose a picture first"),
        ({**drawing, "layers": []}, Asked(text="A"), "paint over what is to be drawn anew"),
        ({**drawing, "layers": [clear]}, Asked(text="A"), "paint over what is to be drawn anew"),
        (drawing, Asked(prompt=" "), "write a text, or a whole prompt"),
        (drawing, Asked(text="A", reference=clear), "--reference: given"),
    ]
    for given, asked, says in cases:
        with pytest.raises(ConfigError) as caught:
            studio.repaint(given, asked)
        assert str(caught.value).startswith(says)


def test_a_missing_gradio_is_named_before_a_network_is_loaded(
    finished: Finished, monkeypatch: pytest.MonkeyPatch
) -> None:
    if importlib.util.find_spec("gradio") is not None:
        pytest.skip("gradio is here")
    monkeypatch.setattr("retouch.use.page.Studio", lambda *_: pytest.fail("the model was loaded"))
    outcome = retouch("demo-ui", "--run", finished("lora"))
    assert (outcome.code, outcome.err) == (2, 'error: gradio is not installed: pip install "retouch[ui]"\n')


def test_a_run_without_averages(finished: Finished, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Its raw weights are shown; averaged ones are asked for by --ema alone."""
    run = shutil.copytree(finished("lora"), tmp_path / "run", ignore=shutil.ignore_patterns("ema"))
    shown: list[Trained] = []
    monkeypatch.setitem(sys.modules, "gradio", ModuleType("gradio"))
    monkeypatch.setattr("retouch.use.page.Studio", shown.append)
    monkeypatch.setattr("retouch.use.page.page", lambda *_: SimpleNamespace(launch=lambda **_: None))
    outcome = retouch("demo-ui", "--run", run, "--port", 7867)
    assert (outcome.code, outcome.err) == (0, "")
    assert [trained.newest for trained in shown] == [run / "checkpoints/step-000004/weights"]
    outcome = retouch("demo-ui", "--run", run, "--ema")
    assert outcome.code == 2 and outcome.err.endswith("has no averaged weights; leave --ema out\n")


def test_a_port_that_is_taken(finished: Finished, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "gradio", ModuleType("gradio"))
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        outcome = retouch("demo-ui", "--run", finished("lora"), "--port", port)
    assert (outcome.code, outcome.err) == (2, f"error: --port: something listens on {port}; give another\n")


def test_the_page_over_http(studio: Studio, drawing: dict[str, Any], tmp_path: Path) -> None:
    gradio = pytest.importorskip("gradio", reason="asks for an older Pillow than the tests are made with")
    from gradio_client import Client, handle_file
    from gradio_client.exceptions import AppError

    blocks = page(gradio, studio)
    _, address, _ = blocks.launch(server_name="127.0.0.1", prevent_thread_lock=True, quiet=True)
    try:
        client = Client(address, verbose=False, download_files=str(tmp_path))
        files = {"background": drawing["background"], "layer": drawing["layers"][0], "other": drawing["layers"][1]}
        for name, image in files.items():
            image.save(tmp_path / f"{name}.png")
        editor = {
            "background": handle_file(str(tmp_path / "background.png")),
            "layers": [handle_file(str(tmp_path / f"{name}.png")) for name in ("layer", "other")],
            "composite": None,
        }
        shown = client.predict(editor, "SALE", "", 3, 2, api_name="/draw")
        expected = studio.repaint(drawing, Asked(text="SALE", seed=3, steps=2))
        assert [pixels(Path(file)).tolist() for file in shown] == [np.asarray(image).tolist() for image in expected]
        with pytest.raises(AppError, match="write a text, or a whole prompt"):
            client.predict(editor, "", "", 3, 2, api_name="/draw")
    finally:
        blocks.close()
