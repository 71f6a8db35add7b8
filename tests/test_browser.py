"""The browser that the tests of pages drive: what a page logs, asks for and shows is seen."""

from __future__ import annotations

from pathlib import Path

from tests.browser import Browser

_PAGE = """<!doctype html><title>t</title><meta name=viewport content="width=device-width">
<body style="margin:0"><button id=b style="width:500px">press</button><input id=r type=range max=9>
<script>b.onclick = () => { b.textContent = r.value; if (r.value == 7) { console.error('seven'); undefinedName; } }
matchMedia('(prefers-color-scheme: dark)').matches && (document.title = 'dark')</script><img src="gone.png">"""


def test_a_page_is_clicked_and_its_errors_and_requests_are_seen(browser: Browser, tmp_path: Path) -> None:
    file = tmp_path / "page.html"
    file.write_text(_PAGE)
    page = browser.page(390, 800, dark=True)
    try:
        page.open(file)
        assert page.run("document.title") == "dark" and page.overflow() > 0
        assert page.requests == [file.as_uri(), (tmp_path / "gone.png").as_uri()]
        missing = page.errors.copy()
        page.set("#r", 7)
        page.click("#b")
        page.wait("b.textContent == '7'")
        assert len(missing) == 1 and [error.split(":")[0] for error in page.errors[1:]] == ["seven", "ReferenceError"]
        page.screenshot(tmp_path / "shot.png")
        assert (tmp_path / "shot.png").read_bytes().startswith(b"\x89PNG")
    finally:
        page.close()
