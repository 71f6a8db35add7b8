"""A headless Chromium for tests of pages, driven over the DevTools protocol.

The `browser` fixture starts one for all tests of a process and skips them where there is none; `page` is a tab of it
with its own storage, which fails the test at its end if the page logged an error or raised an exception. Messages go
through two pipes, so no port is open and no library is needed.
"""

from __future__ import annotations

import base64
import fcntl
import json
import os
import select
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

NAMES = ("chromium", "chromium-browser", "google-chrome")

WAIT_S = 60.0
"""Bound of every wait: a machine with other load may take seconds for a page."""

_OPTIONS = (
    "--headless=new",
    "--remote-debugging-pipe",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-dev-shm-usage",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-extensions",
    "--disable-backgrounding-occluded-windows",
    "--disable-renderer-backgrounding",
    "--hide-scrollbars",
    "--force-color-profile=srgb",
)

_WITH_PIPES = (
    "import os, sys; read, write = map(int, sys.argv[1:3]); os.dup2(read, 3); os.dup2(write, 4); "
    "os.closerange(5, 256); os.execvp(sys.argv[3], sys.argv[3:])"
)
"""Chromium reads commands from descriptor 3 and writes replies and events to 4."""

Event = dict[str, Any]


def executable() -> str | None:
    """The path of a Chromium or Chrome, if one is installed."""
    return next((path for name in NAMES if (path := shutil.which(name))), None)


class Browser:
    """A running Chromium; `close` ends it."""

    def __init__(self, program: str) -> None:
        self._profile = tempfile.TemporaryDirectory(prefix="retouch-chromium-", ignore_cleanup_errors=True)
        theirs_in, self._out = map(_high, os.pipe())
        self._in, theirs_out = map(_high, os.pipe())
        options = [*_OPTIONS, f"--user-data-dir={self._profile.name}", "about:blank"]
        self._process = subprocess.Popen(
            [sys.executable, "-S", "-c", _WITH_PIPES, str(theirs_in), str(theirs_out), program, *options],
            pass_fds=(theirs_in, theirs_out),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        os.close(theirs_in)
        os.close(theirs_out)
        self._buffer = b""
        self._number = 0
        self._listeners: dict[str, Callable[[Event], None]] = {}

    def call(self, method: str, session: str = "", **parameters: Any) -> dict[str, Any]:
        """Send a command -> its result; events that arrive meanwhile go to their pages."""
        self._number += 1
        number = self._number
        command = {"id": number, "method": method, "params": parameters}
        os.write(self._out, json.dumps(command | ({"sessionId": session} if session else {})).encode() + b"\0")
        while True:
            message = self._message()
            if message.get("id") == number:
                assert "error" not in message, (method, message["error"])
                return dict(message["result"])
            if listener := self._listeners.get(message.get("sessionId", "")):
                listener(message)

    def page(self, width: int = 1280, height: int = 900, *, dark: bool = False) -> Page:
        """A new tab with its own storage."""
        context = self.call("Target.createBrowserContext")["browserContextId"]
        target = self.call("Target.createTarget", url="about:blank", browserContextId=context)["targetId"]
        session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        page = Page(self, session, context)
        self._listeners[session] = page.note
        for domain in ("Page", "Runtime", "Log", "Network"):
            page.call(f"{domain}.enable")
        page.shape(width, height, dark=dark)
        page.call("Page.bringToFront")  # a tab behind another one draws no frames
        return page

    def close(self) -> None:
        """End the browser and its processes."""
        with suppress(OSError, AssertionError):
            self.call("Browser.close")
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(10)
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        os.close(self._in)
        os.close(self._out)
        self._profile.cleanup()

    def _message(self) -> Event:
        while b"\0" not in self._buffer:
            assert select.select([self._in], [], [], WAIT_S)[0], "Chromium does not answer"
            read = os.read(self._in, 1 << 20)
            if not read:
                raise ConnectionError("Chromium ended")
            self._buffer += read
        message, _, self._buffer = self._buffer.partition(b"\0")
        return dict(json.loads(message))


class Page:
    """A tab.

    Attributes:
        errors: texts of console errors, uncaught exceptions, and violations of a content policy.
        requests: addresses that the page asked for, other than `data:` and `blob:`; the first is its own.
    """

    def __init__(self, browser: Browser, session: str, context: str) -> None:
        self._browser, self._session, self._context = browser, session, context
        self.errors: list[str] = []
        self.requests: list[str] = []

    def call(self, method: str, **parameters: Any) -> dict[str, Any]:
        return self._browser.call(method, self._session, **parameters)

    def shape(self, width: int, height: int = 900, *, dark: bool = False) -> None:
        """Set the size of the window in CSS pixels, and the preferred colours."""
        self.call("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=False)
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.call("Emulation.setEmulatedMedia", features=[scheme])

    def open(self, address: str | Path) -> None:
        """Load a file or an address, and wait until it is loaded."""
        url = address.resolve().as_uri() if isinstance(address, Path) else address
        self.call("Page.bringToFront")  # a tab behind another one draws no frames, and observes nothing that scrolls
        found = self.call("Page.navigate", url=url)
        assert "errorText" not in found, found
        self.wait("document.readyState == 'complete' && location.href != 'about:blank'")

    def run(self, expression: str) -> Any:
        """The value of a JavaScript expression, awaited if it is a promise."""
        found = self.call("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in found, found["exceptionDetails"].get("exception", found)
        return found["result"].get("value")

    def wait(self, expression: str) -> Any:
        """Wait until an expression is true -> its value."""
        end = time.monotonic() + WAIT_S
        while not (value := self.run(expression)):
            assert time.monotonic() < end, f"never true: {expression}"
            time.sleep(0.02)
        return value

    def box(self, selector: str) -> tuple[float, float, float, float]:
        """Left, top, width and height of the first element of a selector, scrolled into view."""
        found = self.run(
            f"(() => {{ const e = document.querySelector({json.dumps(selector)}); if (!e) return null; "
            "e.scrollIntoView({block: 'center'}); const b = e.getBoundingClientRect(); "
            "return [b.left, b.top, b.width, b.height]; })()"
        )
        assert found, f"no element {selector}"
        return tuple(found)

    def click(self, selector: str) -> None:
        """Click in the middle of an element with the mouse."""
        left, top, width, height = self.box(selector)
        self.drag((left + width / 2, top + height / 2))

    def drag(self, *points: tuple[float, float], clicks: int = 1) -> None:
        """Press the mouse at the first point, move it through the others and release it; one point is a click, the
        second one of a double click with `clicks=2`."""
        self.mouse("mouseMoved", points[0], clicks=0)
        self.mouse("mousePressed", points[0], clicks=clicks)
        for point in points[1:]:
            self.mouse("mouseMoved", point)
        self.mouse("mouseReleased", points[-1], clicks=clicks)

    def mouse(self, kind: str, point: tuple[float, float], *, clicks: int = 1) -> None:
        """One event, with the left button unless `clicks` is 0."""
        button = {"button": "left", "buttons": int(kind != "mouseReleased"), "clickCount": clicks} if clicks else {}
        self.call("Input.dispatchMouseEvent", type=kind, x=point[0], y=point[1], **button)

    def type(self, text: str) -> None:
        """Enter text into the focused element."""
        self.call("Input.insertText", text=text)

    def set(self, selector: str, value: object) -> None:
        """Give an input or a select a value, as a user who moves a slider does."""
        self.box(selector)
        self.run(
            f"(() => {{ const e = document.querySelector({json.dumps(selector)}); e.value = {json.dumps(value)}; "
            "for (const name of ['input', 'change']) e.dispatchEvent(new Event(name, {bubbles: true})); })()"
        )

    def upload(self, selector: str, file: Path) -> None:
        """Give a file input a file, as a user who chooses one does."""
        root = self.call("DOM.getDocument")["root"]["nodeId"]
        found = self.call("DOM.querySelector", nodeId=root, selector=selector)["nodeId"]
        assert found, selector
        self.call("DOM.setFileInputFiles", nodeId=found, files=[str(file)])

    def overflow(self) -> int:
        """CSS pixels by which the document is wider than the window."""
        return int(self.run("document.documentElement.scrollWidth - document.documentElement.clientWidth"))

    def screenshot(self, path: Path, *, whole: bool = False) -> None:
        """Write a PNG of the window, or of the whole page."""
        shot = self.call("Page.captureScreenshot", format="png", captureBeyondViewport=whole, **self._clip(whole))
        path.write_bytes(base64.b64decode(shot["data"]))

    def close(self) -> None:
        self._browser.call("Target.disposeBrowserContext", browserContextId=self._context)

    def note(self, event: Event) -> None:
        """Keep what an event reports."""
        about = event.get("params", {})
        match event.get("method"):
            case "Runtime.exceptionThrown":
                details = about["exceptionDetails"]
                self.errors.append(details.get("exception", {}).get("description", details["text"]))
            case "Runtime.consoleAPICalled" if about["type"] in ("error", "assert"):
                self.errors.append(" ".join(str(a.get("value", a.get("description"))) for a in about["args"]))
            case "Log.entryAdded" if about["entry"]["level"] == "error":
                self.errors.append(f"{about['entry']['text']} {about['entry'].get('url', '')}")
            case "Network.requestWillBeSent" if not about["request"]["url"].startswith(("data:", "blob:")):
                self.requests.append(about["request"]["url"])
            case _:
                pass

    def _clip(self, whole: bool) -> dict[str, Any]:
        if not whole:
            return {}
        size = self.call("Page.getLayoutMetrics")["cssContentSize"]
        return {"clip": {"x": 0, "y": 0, "width": size["width"], "height": size["height"], "scale": 1}}


def _high(descriptor: int) -> int:
    """The descriptor under a number that is neither of those that Chromium uses."""
    high = fcntl.fcntl(descriptor, fcntl.F_DUPFD_CLOEXEC, 10)
    os.close(descriptor)
    return high


@pytest.fixture(scope="session")
def browser() -> Iterator[Browser]:
    """One browser for all tests of this process; started by the first of them."""
    program = executable()
    if program is None:
        pytest.skip(f"no browser: none of {', '.join(NAMES)} is installed")
    started = Browser(program)
    yield started
    started.close()


@pytest.fixture
def page(browser: Browser) -> Iterator[Page]:
    """A tab of 1280 x 900; the test fails at its end if the page had an error."""
    opened = browser.page()
    yield opened
    opened.call("Runtime.evaluate", expression="0")  # events before it have arrived
    errors = opened.errors
    opened.close()
    assert errors == []
