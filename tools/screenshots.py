"""Write the screenshots of docs/report.md, docs/tutorial.md and docs/taste.md: pages at 1280 and 390 pixels, light and
dark.

python tools/screenshots.py                 # all of them, into docs/images
python tools/screenshots.py running demo-ui    # some of them

It needs Chromium; the demo page needs gradio as well (`pip install "retouch[ui]"`), and is left out without it. The
runs are made up (benchmarks/report_pages.py), except that of the demo page, which trains the tiny base for a few steps.
Each page must fit into the window, log no error and load nothing from elsewhere.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from PIL import Image

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT)]

from benchmarks.report_pages import write_run  # noqa: E402
from tests import browser as headless  # noqa: E402
from tests.browser import Browser, Page, executable  # noqa: E402

from retouch.observe.comparison import run_names, write_comparison  # noqa: E402
from retouch.observe.report import write_report  # noqa: E402
from retouch.observe.run_lock import RunLock  # noqa: E402

FORMS = [(1280, 960, False), (1280, 960, True), (390, 844, False), (390, 844, True)]
"""Width, height and darkness of the windows."""

LIGHT_ONLY = ("label",)
"""Names of pages that are shown in light windows alone."""

QUALITY = 82
"""Of WebP: text stays sharp, and an image takes some 30 kB."""

READY = "document.documentElement.dataset.ready"
DRAWN = "document.querySelectorAll('canvas').length > 0"

Shoot = Callable[[Page], None]
"""Brings a page to what is shown."""


def name_of(name: str, width: int, dark: bool) -> str:
    return f"{name}-{width}{'-dark' if dark else ''}.webp"


@contextmanager
def running(folder: Path) -> Iterator[Path]:
    """The report of a run whose lock is held."""
    lock = RunLock(write_run(folder / "runs/flux_fill_grpo", 47, 9, of=80))
    lock.take()
    try:
        yield write_report(Path("runs/flux_fill_grpo"))
    finally:
        lock.release()


@contextmanager
def killed(folder: Path) -> Iterator[Path]:
    with running(folder):
        pass
    yield write_report(Path("runs/flux_fill_grpo"))


@contextmanager
def finished(folder: Path) -> Iterator[Path]:
    write_run(folder / "runs/flux_fill_grpo", 80, 9)
    yield write_report(Path("runs/flux_fill_grpo"))


@contextmanager
def compared(folder: Path) -> Iterator[Path]:
    """Three learning rates with three seeds each."""
    runs = [
        write_run(folder / f"runs/lr{lr}-{seed}", 80, 5, seed=seed, optimizer__lr=lr)
        for lr in (3e-4, 1e-3, 3e-3)
        for seed in (0, 1, 2)
    ]
    yield write_comparison(run_names(runs), Path("compare.html")).path


@contextmanager
def demo_ui(folder: Path) -> Iterator[str]:
    """The page about a run of a few steps -> its address."""
    import gradio  # pyright: ignore[reportMissingImports]

    from retouch.algorithms.train import train
    from retouch.config import load_run
    from retouch.tiny.signs import draw_words, write_signs
    from retouch.use.page import LOOK, Studio, page
    from retouch.use.trained import Trained

    write_signs(folder / "signs", draw_words(24, "train", 1), (32, 64), 1)
    Image.open(folder / "signs/test0_source.png").resize((512, 256), Image.Resampling.LANCZOS).save(folder / "sign.png")
    given = ["name=tiny_flux_fill", f"data.path={folder}/signs", "evaluation.data=null", "evaluation.num_examples=4"]
    given += ["training.max_steps=4", "training.checkpoint_every=2", "logging.sinks=[]"]
    run = train(load_run(ROOT / "configs/tiny/flux_fill_sft.yaml", given))
    blocks = page(gradio, Studio(Trained.find(run, None, None, None)))
    _, address, _ = blocks.launch(server_name="127.0.0.1", prevent_thread_lock=True, quiet=True, **LOOK)
    try:
        yield address
    finally:
        blocks.close()


@contextmanager
def label(folder: Path) -> Iterator[str]:
    """The page of votes on pairs of signs -> its address."""
    from retouch.taste.labelling import open_labelling, open_server
    from retouch.tiny.signs import draw_words, write_signs

    words = draw_words(8, "train", 1)
    entries: list[dict[str, str]] = []
    for seed in range(2):
        write_signs(folder / f"{seed}", words, (256, 512), seed)
        for number, word in enumerate(words):
            image = {"image": f"{seed}/test{number}_source.png", "mask": f"{seed}/test{number}_mask.png"}
            entries.append(image | {"example": word, "prompt": f"The text is '{word}'."})
    listing = folder / "samples.jsonl"
    listing.write_text("".join(json.dumps(entry) + "\n" for entry in entries), encoding="utf-8")
    opened = open_labelling(listing, folder / "votes.jsonl", alone=False, active=None, goal=300, seed=0)
    with opened as labelling, open_server(labelling, 0) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.1,))
        thread.start()
        try:
            yield server.address
        finally:
            server.shutdown()
            thread.join()


VOTERS = iter(("Ann", "Ben"))
"""A voter for each window: who has voted goes on with the next pair."""


def voted_twice(tab: Page) -> None:
    """Enter a name, vote on two pairs, and show the outline of the masks of the third."""
    count = "document.getElementById('count').textContent"
    tab.set("#name", next(VOTERS))
    tab.click("#who button")
    for votes, key in enumerate(("ArrowLeft", "t", "m")):
        tab.wait(f"{count}.startsWith('{votes} of') && !busy")
        tab.run(f"document.dispatchEvent(new KeyboardEvent('keydown', {{key: '{key}', bubbles: true}}))")
    tab.wait("document.querySelectorAll('img.over').length === 2 && !busy")


def at_top(tab: Page) -> None:
    tab.wait(READY)
    tab.wait(DRAWN)


def at(selector: str) -> Shoot:
    """Scroll to an element."""

    def scroll(tab: Page) -> None:
        tab.wait(READY)
        tab.run(f"document.querySelector({selector!r}).scrollIntoView()")
        tab.wait(DRAWN)

    return scroll


def at_gallery(tab: Page) -> None:
    """With each image half before and half after."""
    at("#gallery")(tab)
    tab.set("[name='wipe all']", 50)
    tab.run("document.querySelector('#gallery').scrollIntoView()")


def painted(tab: Page) -> None:
    """Upload an image, paint over its text, and sample twice."""
    tab.wait("!!document.querySelector('#editor canvas') && !!document.querySelector('#sample')")
    tab.upload("#editor input[type=file]", Path("sign.png").resolve())
    tab.wait("!document.querySelector('#editor').innerText.includes('Upload an image')")
    tab.click("#editor [aria-label='Brush'], #editor [title='Brush'], #editor [aria-label='Draw']")
    left, top, width, height = tab.box("#editor canvas")
    rows = [(x, y) for y in (0.4, 0.5, 0.6) for x in (0.2, 0.35, 0.5, 0.65, 0.8)]
    tab.drag(*[(left + x * width, top + height * y) for x, y in rows])
    tab.click("#text textarea, #text input")
    tab.type("CAFE")
    tab.set("#count input[type=number]", "2")
    tab.click("#steps textarea, #steps input")
    tab.type("20")
    tab.click("#sample")
    tab.wait("document.querySelectorAll('#gallery img').length >= 4")
    tab.wait("document.querySelectorAll('#compared img').length == 2")
    tab.wait("(all => all.scrollHeight <= all.clientHeight)(document.querySelector('#gallery .grid-wrap'))")
    tab.run("scrollTo(0, 0)")


SHOTS: Mapping[str, tuple[Any, Shoot]] = {
    "running": (running, at_top),
    "killed": (killed, at_top),
    "finished": (finished, at_top),
    "gallery": (finished, at_gallery),
    "compare": (compared, at(".tools")),
    "demo-ui": (demo_ui, painted),
    "label": (label, voted_twice),
}
"""Name -> what opens the page, and what is done on it."""


def forms_of(name: str) -> list[tuple[int, int, bool]]:
    """The windows that a page is shown in."""
    return [form for form in FORMS if not (form[2] and name in LIGHT_ONLY)]


def shoot(browser: Browser, name: str, address: str | Path, act: Shoot, out: Path) -> None:
    for width, height, dark in forms_of(name):
        tab = browser.page(width, height, dark=dark)
        tab.open(address)
        act(tab)
        tab.wait("[...document.images].filter(one => one.getClientRects().length).every(one => one.complete)")
        time.sleep(0.5)  # for the curves that come into sight
        assert tab.overflow() == 0 and tab.errors == [], (name, width, tab.overflow(), tab.errors)
        place = str(address) if isinstance(address, str) else address.resolve().as_uri()
        assert all(request.startswith(place.rstrip("/")) for request in tab.requests), tab.requests
        with tempfile.TemporaryDirectory() as folder:
            tab.screenshot(Path(folder) / "shot.png", whole=name == "demo-ui")
            Image.open(Path(folder) / "shot.png").convert("RGB").save(
                out / name_of(name, width, dark), quality=QUALITY, method=6
            )
        tab.close()
        print(out / name_of(name, width, dark))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"{', '.join(SHOTS)}; default: all")
    parser.add_argument("--out", type=Path, default=ROOT / "docs/images")
    options = parser.parse_args()
    out = options.out.resolve()
    program = executable()
    assert program, "no Chromium is installed"
    headless.WAIT_S = 300.0  # a busy machine samples slowly
    browser = Browser(program)
    try:
        for name in options.names or SHOTS:
            if name == "demo-ui" and importlib.util.find_spec("gradio") is None:
                print('demo-ui: left out, gradio is not installed (pip install "retouch[ui]")')
                continue
            opened, act = SHOTS[name]
            with tempfile.TemporaryDirectory() as folder:
                os.chdir(folder)  # paths on the pages are as a user types them
                with opened(Path(folder)) as address:
                    shoot(browser, name, address, act, out)
                os.chdir(ROOT)
    finally:
        browser.close()


if __name__ == "__main__":
    main()
