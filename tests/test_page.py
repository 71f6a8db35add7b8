"""`retouch demo-ui`: the page draws what `retouch sample` draws.

gradio asks for another Pillow than the tests are made with: functions of the same names stand for it, and where the
real one is installed the page is tested over HTTP as well.
"""

from __future__ import annotations

import contextlib
import importlib.util
import shutil
import socket
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import yaml
from PIL import Image

from retouch.config import ConfigError, RunConfig, load_run
from retouch.types import Diverged
from retouch.use.page import Asked, Studio, _request, page
from retouch.use.trained import Trained
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


def test_transparent_pixels_are_white_as_sample_shows_them(studio: Studio, drawing: dict[str, Any]) -> None:
    """An editor hands over pictures with an alpha channel, and colours below it that no viewer shows."""
    hidden = np.dstack([np.full((32, 64, 3), (200, 30, 30)), np.zeros((32, 64))]).astype(np.uint8)
    request = _request({**drawing, "background": Image.fromarray(hidden)}, Asked(text="SALE"), edits=False)
    assert isinstance(request.image, Image.Image) and request.image.mode == "RGB"
    assert np.asarray(request.image).min() == 255


def test_a_prompt_is_taken_as_it_is(studio: Studio, drawing: dict[str, Any]) -> None:
    said = studio.repaint(drawing, Asked(prompt="The text is 'SALE'.", steps=2))
    meant = studio.repaint(drawing, Asked(text="SALE", steps=2))
    assert [image.tobytes() for image in said] == [image.tobytes() for image in meant]


def test_a_run_file_alone_shows_the_base(config: Callable[..., RunConfig], drawing: dict[str, Any]) -> None:
    assert len(Studio(Trained(config(), {})).repaint(drawing, Asked(text="SALE", steps=2))) == 1


def test_what_is_missing_is_said(studio: Studio, drawing: dict[str, Any]) -> None:
    clear = Image.new("RGBA", (64, 32))
    cases: list[tuple[Any, Asked, str]] = [
        (None, Asked(text="A"), "choose an image first"),
        ({**drawing, "background": None}, Asked(text="A"), "choose an image first"),
        ({**drawing, "layers": []}, Asked(text="A"), "paint over the region to repaint"),
        ({**drawing, "layers": [clear]}, Asked(text="A"), "paint over the region to repaint"),
        (drawing, Asked(prompt=" "), "enter a target text or a whole prompt"),
        (drawing, Asked(text="A", reference=clear), "--reference: given"),
    ]
    for given, asked, says in cases:
        with pytest.raises(ConfigError) as caught:
            studio.repaint(given, asked)
        assert str(caught.value).startswith(says)


@pytest.fixture
def edits(run_file: Callable[..., dict[str, Any]], tmp_path: Path) -> Path:
    """A run file of a family that changes whole pictures."""
    model = {"family": "qwen_image_edit", "path": "tiny", "dtype": "fp32", "max_sequence_length": 96}
    file = tmp_path / "edits.yaml"
    file.write_text(yaml.safe_dump(run_file(model=model)), encoding="utf-8")
    return file


def test_nothing_painted_is_the_whole_picture_where_such_are_changed(
    edits: Path, drawing: dict[str, Any], signs: Path, tmp_path: Path
) -> None:
    studio = Studio(Trained(load_run(edits), {}))
    asked = Asked(prompt="Make it red.", steps=1)
    [whole] = studio.repaint({**drawing, "layers": []}, asked)
    [part] = studio.repaint(drawing, asked)
    given = ("--image", signs / "held_out/test200_source.png", "--prompt", "Make it red.", "--steps", 1)
    [by_sample] = drawn(tmp_path / "whole", "--config", edits, *given).values()
    assert np.array_equal(np.asarray(whole), by_sample)
    hole = inside(signs / "held_out/test200_mask.png")
    source = pixels(signs / "held_out/test200_source.png")
    assert np.array_equal(np.asarray(part)[~hole], source[~hole])
    assert not np.array_equal(by_sample[~hole], source[~hole])


def test_a_mask_is_asked_for_where_the_run_needs_one(
    config: Callable[..., RunConfig], drawing: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Kontext edits whole images, but with reference images it repaints masks."""
    monkeypatch.setattr("retouch.use.page.Loaded", lambda *_, **__: None)
    for references, todo in ((False, "optionally paint"), (True, "paint over the region to repaint")):
        run = config(model__family="flux_kontext", model__path="folder", model__reference_images=references)
        studio = Studio(Trained(run, {}))
        assert todo in paged(studio).texts[0]
    with pytest.raises(ConfigError, match="paint over the region to repaint"):
        studio.repaint({**drawing, "layers": []}, Asked(text="A"))


def test_runs_that_the_page_is_not_for(config: Callable[..., RunConfig], monkeypatch: pytest.MonkeyPatch) -> None:
    """Told before a network is loaded."""
    monkeypatch.setattr("retouch.use.page.Loaded", lambda *_, **__: pytest.fail("the model was loaded"))
    run = config(model__family="qwen_image")
    with pytest.raises(ConfigError, match=r"^demo-ui: qwen_image generates from prompts, without a source image; use"):
        Studio(Trained(run, {}))


def test_a_missing_gradio_is_named_before_a_network_is_loaded(
    finished: Finished, monkeypatch: pytest.MonkeyPatch
) -> None:
    if importlib.util.find_spec("gradio") is not None:
        pytest.skip("gradio is here")
    monkeypatch.setattr("retouch.use.page.Studio", lambda *_: pytest.fail("the model was loaded"))
    outcome = retouch("demo-ui", "--run", finished("lora"))
    assert (outcome.code, outcome.err) == (2, 'error: gradio is not installed: pip install "retouch[ui]"\n')


# --- the page: what is shown, and what the button does ---


@dataclass
class Component:
    label: str | None
    value: Any = None


class Blocks:
    """The page of the stand-in: its components, what the button does, and how it was shown."""

    def __init__(self, *, title: str, analytics_enabled: bool) -> None:
        self.texts: list[str] = []
        self.click: tuple[Callable[..., Any], list[Component], list[Component], str] | None = None
        self.launched: dict[str, Any] = {}

    def __enter__(self) -> Blocks:
        return self

    def __exit__(self, *_: object) -> None: ...

    def launch(self, *, server_name: str, server_port: int, share: bool) -> None:
        self.launched = {"server_name": server_name, "server_port": server_port, "share": share}

    @property
    def labels(self) -> list[str | None]:
        assert self.click is not None
        return [component.label for component in self.click[1]]

    def press(self, **values: Any) -> dict[str | None, Any]:
        """Click, with other values than the first ones by label -> what is shown by label."""
        assert self.click is not None
        function, inputs, outputs, _ = self.click
        assert values.keys() <= {component.label for component in inputs}
        shown = function(*[values.get(str(component.label), component.value) for component in inputs])
        return dict(zip([component.label for component in outputs], shown, strict=True))


class StandIn(ModuleType):
    """The functions of gradio 6 that are used, with its names of arguments."""

    class Error(Exception):
        def __init__(self, message: str) -> None:
            super().__init__(message)

    def __init__(self) -> None:
        super().__init__("gradio")
        self.page: Blocks | None = None
        self.Row = self.Column = contextlib.nullcontext

    def Blocks(self, *, title: str, analytics_enabled: bool) -> Blocks:
        self.page = Blocks(title=title, analytics_enabled=analytics_enabled)
        return self.page

    def Markdown(self, value: str) -> None:
        assert self.page is not None
        self.page.texts.append(value)

    def Brush(self, *, colors: list[str]) -> list[str]:
        return colors

    def ImageEditor(self, *, type: str, label: str, brush: list[str]) -> Component:
        assert type == "pil"
        return Component(label)

    def Textbox(self, *, label: str) -> Component:
        return Component(label, "")

    def Number(self, value: float | None, *, label: str, precision: int) -> Component:
        return Component(label, value)

    def Image(self, *, label: str, type: str = "numpy", format: str = "webp") -> Component:
        assert (type, format) in (("pil", "webp"), ("numpy", "png"))  # what is given, and what is shown
        return Component(label)

    def Button(self, value: str, *, variant: str) -> Any:
        def click(fn: Any, inputs: list[Component], outputs: list[Component], *, api_name: str) -> None:
            assert self.page is not None
            self.page.click = (fn, inputs, outputs, api_name)

        return SimpleNamespace(click=click)


class Recorder:
    """A studio that notes what it is asked for; or raises `error`."""

    def __init__(self, *, takes_references: bool = False, edits: bool = False, pictures: int = 2) -> None:
        self.trained = SimpleNamespace(config=SimpleNamespace(name="run"))
        self.takes_references, self.edits = takes_references, edits
        self.pictures = [Image.new("L", (1, 1), n) for n in range(pictures)]
        self.asked: list[tuple[Any, Asked]] = []
        self.error: Exception | None = None

    def repaint(self, drawing: Any, asked: Asked) -> list[Image.Image]:
        self.asked.append((drawing, asked))
        if self.error is not None:
            raise self.error
        return self.pictures


def paged(studio: Any) -> Blocks:
    return page(StandIn(), studio)


def test_the_page_asks_for_what_is_entered() -> None:
    studio = Recorder()
    blocks = paged(studio)
    entered = {
        "Image": "drawn",
        "Target text": "SALE",
        "Whole prompt, instead of the text": "A sign",
        "Seed": 3.0,
    }
    shown = blocks.press(**entered, **{"Steps; empty: the run's": 2.0})
    assert shown == dict(zip(("Base", "Trained"), studio.pictures, strict=True))
    blocks.press(Seed=None)  # as gradio says an empty number
    assert studio.asked == [("drawn", Asked("SALE", "A sign", None, 3, 2)), (None, Asked())]
    assert blocks.texts == ["## run: paint over the region to repaint"]
    assert blocks.click is not None and blocks.click[3] == "sample"


def test_the_page_of_other_runs() -> None:
    """One with style pictures, one of a family that edits, and a base alone."""
    styled = Recorder(takes_references=True)
    style = Image.new("RGB", (2, 2))
    paged(styled).press(Style=style)
    assert styled.asked == [(None, Asked(reference=style))]
    assert "Style" not in paged(Recorder()).labels
    assert paged(Recorder(edits=True)).texts == [
        "## run: describe the edit, and optionally paint over the region to keep it to"
    ]
    base = Recorder(pictures=1)
    assert paged(base).press() == {"Base": base.pictures[0], "Trained": None}


@pytest.mark.parametrize(
    ("error", "says"),
    [
        (ConfigError("choose an image first\nor none"), "choose an image first\nor none"),
        (Diverged("example 1 was not drawn"), "example 1 was not drawn"),
        (torch.OutOfMemoryError("CUDA out of memory.\nTried"), "OutOfMemoryError: CUDA out of memory."),
        (RuntimeError(), "RuntimeError: see the log"),
    ],
)
def test_what_goes_wrong_is_shown(error: Exception, says: str, caplog: pytest.LogCaptureFixture) -> None:
    """What is not ours is in the log as well, with its traceback."""
    studio = Recorder()
    studio.error = error
    with pytest.raises(StandIn.Error) as caught:
        paged(studio).press()
    assert str(caught.value) == says
    ours = type(error).__module__.startswith("retouch")
    assert [record.exc_info is not None for record in caplog.records] == ([] if ours else [True])


def test_a_run_without_averages(finished: Finished, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Its raw weights are shown; averaged ones are asked for by --ema alone."""
    run = shutil.copytree(finished("lora"), tmp_path / "run", ignore=shutil.ignore_patterns("ema"))
    shown: list[Trained] = []
    gradio = StandIn()
    monkeypatch.setitem(sys.modules, "gradio", gradio)
    monkeypatch.setattr("retouch.use.page.Studio", lambda trained: shown.append(trained) or Recorder())
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]  # free again
    outcome = retouch("demo-ui", "--run", run, "--port", port)
    assert (outcome.code, outcome.err) == (0, "")
    assert [trained.newest for trained in shown] == [run / "checkpoints/step-000004/weights"]
    assert gradio.page is not None
    assert gradio.page.launched == {"server_name": "127.0.0.1", "server_port": port, "share": False}
    outcome = retouch("demo-ui", "--run", run, "--ema")
    assert outcome.code == 2 and outcome.err.endswith("has no EMA weights; leave --ema out\n")


def test_a_port_that_is_taken(finished: Finished, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "gradio", StandIn())
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        outcome = retouch("demo-ui", "--run", finished("lora"), "--port", port)
    assert (outcome.code, outcome.err) == (2, f"error: --port: given {port}, which is in use; set another\n")


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
        shown = client.predict(editor, "SALE", "", 3, 2, api_name="/sample")
        expected = studio.repaint(drawing, Asked(text="SALE", seed=3, steps=2))
        assert [pixels(Path(file)).tolist() for file in shown] == [np.asarray(image).tolist() for image in expected]
        with pytest.raises(AppError, match="enter a target text or a whole prompt"):
            client.predict(editor, "", "", 3, 2, api_name="/sample")
    finally:
        blocks.close()
