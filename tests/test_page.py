"""`retouch demo-ui`: the page draws what `retouch sample` draws.

gradio asks for another Pillow than the tests are made with: a stand-in keeps what the page makes of it, and where the
real one is installed the page is tested in a browser as well.
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
import torch
import yaml
from PIL import Image

from retouch.config import ConfigError, RunConfig, load_run
from retouch.types import Diverged
from retouch.use.loaded import Loaded
from retouch.use.page import LOOK, Asked, Studio, _mask, _request, page
from retouch.use.trained import Trained
from tests.browser import Browser
from tests.command_line import retouch
from tests.test_use import drawn, inside, pixels
from tests.tiny_models import tiny_model

Finished = Callable[[str], Path]

CONFIGS = Path(__file__).parents[1] / "configs"


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
        assert todo in paged(studio)["Markdown"].given[0]
    with pytest.raises(ConfigError, match="paint over the region to repaint"):
        studio.repaint({**drawing, "layers": []}, Asked(text="A"))


def test_runs_that_the_page_is_not_for(config: Callable[..., RunConfig], monkeypatch: pytest.MonkeyPatch) -> None:
    """Told before a network is loaded."""
    monkeypatch.setattr("retouch.use.page.Loaded", lambda *_, **__: pytest.fail("the model was loaded"))
    run = load_run(CONFIGS / "tiny/qwen_image_edit_vlm_grpo.yaml")
    with pytest.raises(ConfigError, match=r"^demo-ui: the run trained a text encoder; use `retouch sample`"):
        Studio(Trained(run, {}))


def test_a_family_that_generates_from_prompts(run_file: Callable[..., dict[str, Any]], tmp_path: Path) -> None:
    """As `retouch sample --prompt`, which needs no image and no data."""
    file = tmp_path / "prompts.yaml"
    model = {"family": "sd3", "path": tiny_model("sd3"), "dtype": "fp32"}
    data = {"format": "prompts", "path": "p.txt", "resolution": [32, 64]}
    file.write_text(yaml.safe_dump(run_file(model=model, data=data, warmup_data=None, evaluation={})), encoding="utf-8")
    studio = Studio(Trained(load_run(file), {}))
    one, other = studio.repaint(None, Asked(prompt="A sign", steps=1, count=2))
    drawn_ones = drawn(tmp_path / "out", "--config", file, "--prompt", "A sign", "--steps", 1, "--count", 2)
    assert [np.asarray(image).tolist() for image in (one, other)] == [image.tolist() for image in drawn_ones.values()]
    with pytest.raises(ConfigError, match="enter a target text or a whole prompt"):
        studio.repaint(None, Asked())
    refused = retouch("sample", "--config", file, "--prompt", "A", "--box", "0,0,8,8", "--out", tmp_path / "x")
    assert refused.err.splitlines()[-1].startswith("error: --box: given, but sd3 generates whole images from prompts")


def test_strength_scales_what_was_trained(studio: Studio, drawing: dict[str, Any]) -> None:
    """0 is the base, 1 the trained weights; of a LoRA B is scaled, whose change is B A."""

    def images(strength: float) -> list[Any]:
        asked = Asked(text="SALE", steps=2, strength=strength)
        return [np.asarray(image) for image in studio.repaint(drawing, asked)]

    (base, none), (_, half), (_, whole) = images(0.0), images(0.5), images(1.0)
    assert np.array_equal(base, none) and not np.array_equal(half, whole) and not np.array_equal(half, base)


def test_every_checkpoint_of_a_run_can_be_chosen(studio: Studio, drawing: dict[str, Any], finished: Finished) -> None:
    names = list(studio.checkpoints)
    assert names[0] == "step 4" and studio.checkpoints["step 4"] == studio.trained.newest
    assert all(folder.is_dir() for folder in studio.checkpoints.values())
    earlier, newest = (
        studio.repaint(drawing, Asked(text="SALE", steps=2, checkpoint=name))[1] for name in (names[-1], names[0])
    )
    assert (earlier.tobytes() == newest.tobytes()) == (len(names) == 1)


def test_translucent_paint_is_the_whole_mask() -> None:
    """The middle of a stroke is repainted, and its edge as far as half of it is covered."""
    layer = Image.fromarray(np.array([[[255, 0, 0, alpha] for alpha in (0, 32, 64, 127, 255)]], np.uint8))
    mask = _mask([layer, layer], (5, 1))
    assert mask is not None and np.asarray(mask).tolist() == [[0, 64, 128, 254, 255]]
    assert _mask([Image.new("RGBA", (5, 1))], (5, 1)) is None and _mask([], (5, 1)) is None


def test_a_missing_gradio_is_named_before_a_network_is_loaded(
    finished: Finished, monkeypatch: pytest.MonkeyPatch
) -> None:
    if importlib.util.find_spec("gradio") is not None:
        pytest.skip("gradio is here")
    monkeypatch.setattr("retouch.use.page.Studio", lambda *_: pytest.fail("the model was loaded"))
    outcome = retouch("demo-ui", "--run", finished("lora"))
    assert outcome.code == 2
    assert outcome.err.splitlines()[-1] == 'error: gradio is not installed: pip install "retouch[ui]"'


# --- the page: what is shown, and what the buttons do ---


class Component:
    """A component of the page: its options, and what its events call."""

    def __init__(self, kind: str, *given: Any, **options: Any) -> None:
        self.kind, self.given, self.options = kind, given, options
        self.name = str(options.get("elem_id", options.get("label", "")))
        self.value = options.get(
            "value", given[0] if kind in ("Number", "State") else "" if kind == "Textbox" else None
        )

    def __enter__(self) -> Component:
        return self

    def __exit__(self, *_: object) -> None: ...

    def click(self, function: Any, inputs: Any = None, outputs: Any = None, api_name: Any = None) -> None:
        self.called = function, inputs or [], outputs, api_name

    select = click

    def launch(self, **options: Any) -> None:
        self.launched = options

    def block_thread(self) -> None: ...


class StandIn(ModuleType):
    """gradio as far as it is used: every function is a component of its name, which the page keeps."""

    class Error(Exception):
        def __init__(self, message: str, print_exception: bool = True) -> None:
            assert not print_exception  # or gradio prints a traceback on the terminal
            super().__init__(message)

    class SelectData: ...

    def __init__(self) -> None:
        super().__init__("gradio")
        self.made: list[Component] = []

    def __getattr__(self, kind: str) -> Any:
        if not kind[0].isupper():
            raise AttributeError(kind)

        def make(*given: Any, **options: Any) -> Component:
            self.made.append(Component(kind, *given, **options))
            return self.made[-1]

        return make

    def __getitem__(self, name: str) -> Component:
        return next(one for one in self.made if name in (one.name, one.kind))

    def press(self, **values: Any) -> tuple[Any, ...]:
        """Click on Sample, with other values than the first ones by name -> what is shown."""
        function, inputs, _, _ = self["sample"].called
        assert values.keys() <= {one.name for one in inputs}
        return tuple(function(*[values.get(one.name, one.value) for one in inputs]))


class Recorder:
    """A studio that notes what it is asked for; or raises `error`."""

    def __init__(self, *, takes_references: bool = False, edits: bool = False, image: bool = True, base: bool = True):
        self.trained = SimpleNamespace(config=SimpleNamespace(name="run"))
        self.takes_references, self.edits, self.takes_image, self.steps = takes_references, edits, image, 4
        self.checkpoints = {"step 4": Path("four"), "step 2": Path("two")} if base else {}
        self.asked: list[tuple[Any, Asked]] = []
        self.error: Exception | None = None

    def repaint(self, drawing: Any, asked: Asked) -> list[Image.Image]:
        self.asked.append((drawing, asked))
        if self.error is not None:
            raise self.error
        return [Image.new("L", (1, 1), n) for n in range(asked.count * (2 if self.checkpoints else 1))]


def paged(studio: Any) -> StandIn:
    page(made := StandIn(), studio)
    return made


def test_the_page_asks_for_what_is_entered() -> None:
    studio = Recorder()
    shown = paged(studio)
    entered = {"editor": {"background": None, "layers": []}, "text": "SALE", "prompt": "A sign", "seed": 3.0}
    first, gallery, pairs = shown.press(**entered, steps=" 2", count=2, strength=0.5, checkpoint="step 2")
    assert [name for _, name in gallery] == ["base 1", "trained 1", "base 2", "trained 2"]
    assert [tuple(image.getpixel((0, 0)) for image in pair) for pair in pairs] == [(0, 2), (1, 3)] and first == pairs[0]
    shown.press(seed=None, steps="", text="")  # as gradio says an empty number
    assert studio.asked == [
        (entered["editor"], Asked("SALE", "A sign", None, 3, 2, 2, 0.5, "step 2")),
        (None, Asked(checkpoint="step 4")),
    ]
    assert shown["Markdown"].given == ("## run: paint over the region to repaint",)
    assert shown["steps"].value == "" and shown["steps"].options["placeholder"] == "4 (the run's)"
    assert shown["Brush"].options["colors"][0][1] == 0.5  # the image stays visible
    function, inputs, output, _ = shown["gallery"].called
    assert (inputs.kind, output.name) == ("State", "compared")
    assert [function(pairs, SimpleNamespace(index=n)) for n in (1, 2, 3)] == [pairs[0], pairs[1], pairs[1]]
    with pytest.raises(
        StandIn.Error, match=r"^steps: given two; enter a number of 1 to 1000, or nothing for the run's"
    ):
        shown.press(steps="two")


def test_a_new_seed() -> None:
    function, inputs, output, _ = paged(Recorder())["new-seed"].called
    assert (inputs, output.name) == ([], "seed") and len({function() for _ in range(8)}) > 1


def test_the_page_of_other_runs() -> None:
    """One with style pictures, one of a family that edits, a base alone, and one that generates from prompts."""
    styled = Recorder(takes_references=True)
    style = Image.new("RGB", (2, 2))
    paged(styled).press(style=style)
    assert styled.asked[0][1].reference is style
    assert paged(Recorder(edits=True))["Markdown"].given == (
        "## run: describe the edit, and optionally paint over the region to keep it to",
    )
    base = paged(Recorder(base=False))
    background = Image.new("RGB", (2, 2), (9, 9, 9))
    (before, _), gallery, _ = base.press(editor={"background": background, "layers": []}, count=1)
    assert before.getpixel((0, 0)) == (9, 9, 9) and [name for _, name in gallery] == ["base 1"]
    assert not {"checkpoint", "strength"} & {one.name for one in base.made}
    prompts = paged(Recorder(image=False))
    assert "editor" not in {one.name for one in prompts.made}
    assert prompts["Markdown"].given == ("## run: enter a text or a prompt",)
    assert len(prompts.press(prompt="A cat", count=3)[2]) == 3


def test_a_base_that_generates_from_prompts_has_nothing_to_compare() -> None:
    first, gallery, pairs = paged(Recorder(image=False, base=False)).press(prompt="A cat")
    assert (first, len(gallery), pairs) == (None, 1, [])


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
    assert outcome.code == 0 and f"the page is at http://127.0.0.1:{port}" in outcome.err
    assert outcome.out == ""  # no line on how to publish it
    assert [trained.newest for trained in shown] == [run / "checkpoints/step-000004/weights"]
    where = {"server_name": "127.0.0.1", "server_port": port, "share": False, "quiet": True}
    assert where.items() <= gradio["Blocks"].launched.items()
    outcome = retouch("demo-ui", "--run", run, "--ema")
    assert outcome.code == 2 and outcome.err.endswith("has no EMA weights; leave --ema out\n")


def test_a_port_that_is_taken(finished: Finished, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "gradio", StandIn())
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        outcome = retouch("demo-ui", "--run", finished("lora"), "--port", port)
    assert outcome.code == 2
    assert outcome.err.splitlines()[-1] == f"error: --port: given {port}, which is in use; set another"


@pytest.mark.parametrize("width", [1280, 390])
def test_the_page_in_a_browser(
    studio: Studio, signs: Path, browser: Browser, width: int, capfd: pytest.CaptureFixture[str]
) -> None:
    """Without an image there is a message and no traceback; then an image is uploaded and painted over, sampled, and
    another pair is chosen. Steps stay empty."""
    gradio = pytest.importorskip("gradio", reason="asks for an older Pillow than the tests are made with")
    blocks = page(gradio, studio)
    _, address, _ = blocks.launch(server_name="127.0.0.1", prevent_thread_lock=True, quiet=True, **LOOK)
    shown = browser.page(width, 900)  # all samples are in sight, however low the window is
    try:
        shown.open(address)
        shown.wait("!!document.querySelector('#editor canvas') && !!document.querySelector('#sample')")
        shown.click("#sample")
        shown.wait("document.body.innerText.includes('choose an image first')")
        told = capfd.readouterr()
        assert "Traceback" not in told.out + told.err and "share" not in told.out + told.err
        shown.run("document.querySelector('.toast-close')?.click()")
        shown.upload("#editor input[type=file]", signs / "held_out/test200_source.png")
        shown.wait("!document.querySelector('#editor').innerText.includes('Upload an image')")
        shown.click("#editor [aria-label='Brush'], #editor [title='Brush'], #editor [aria-label='Draw']")
        left, top, wide, high = shown.box("#editor canvas")
        middle = (left + wide / 2, top + high / 2)
        shown.drag((middle[0] - 40, middle[1]), middle, (middle[0] + 40, middle[1]))
        shown.click("#text textarea, #text input")
        shown.type("SALE")
        shown.set("#count input[type=number]", "2")
        assert shown.run("document.querySelector('#steps textarea, #steps input').value") == ""
        shown.click("#sample")
        shown.wait("document.querySelectorAll('#gallery img').length >= 4")
        shown.wait("document.querySelectorAll('#compared img').length == 2")
        shown.wait("(all => all.scrollHeight <= all.clientHeight)(document.querySelector('#gallery .grid-wrap'))")
        first = shown.run("document.querySelector('#compared img').src")
        shown.run("document.querySelectorAll('#gallery button img')[3].closest('button').click()")
        shown.wait(f"document.querySelector('#compared img').src != {first!r}")
        before = shown.run("document.querySelector('#seed input').value")
        shown.click("#new-seed")
        shown.wait(f"document.querySelector('#seed input').value != {before!r}")
        assert shown.overflow() == 0 and shown.errors == []
        assert all(address.rstrip("/") in request for request in shown.requests)
    finally:
        shown.close()
        blocks.close()


def test_of_a_lora_that_began_as_no_change_b_alone_is_scaled() -> None:
    """Its change is B A: half of both would be a quarter."""
    a, b = torch.ones(2, 3, dtype=torch.float32), torch.full((3, 2), 4.0, dtype=torch.float32)
    names = ("x.lora_A.weight", "x.lora_B.weight")
    loaded = SimpleNamespace(_base=dict(zip(names, (a, torch.zeros_like(b)), strict=True)))
    scaled = Loaded._scaled(loaded, dict(zip(names, (2 * a, b), strict=True)), 0.5)  # type: ignore[arg-type]
    assert torch.equal(scaled[names[0]], 2 * a) and torch.equal(scaled[names[1]], b / 2)
