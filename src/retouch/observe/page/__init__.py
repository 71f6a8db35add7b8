"""Pages about runs as one HTML file each: templates, style, scripts and how they are put together.

`page.html` frames a page, `parts.html` has its tables and texts, which jinja2 escapes; `page.js` shows curves and
gallery from JSON. `uPlot.iife.min.js` and `uPlot.min.css` are uPlot 1.6.32, see uPlot.LICENSE.
"""

from __future__ import annotations

import base64
import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from jinja2 import Environment

_FILES = Path(__file__).parent


class Markup(str):
    """HTML that needs no escaping."""

    def __html__(self) -> str:
        return self


@dataclass(frozen=True)
class Block:
    """A part of a page.

    Attributes:
        kind: html, charts, gallery or tools.
        key: name by which an update replaces the part; of charts, their section.
        folded: charts that are shown on a click.
    """

    kind: str
    key: str = ""
    html: str = ""
    title: str = ""
    folded: bool = False


@dataclass(frozen=True)
class PageTable:
    """Cells are text, except those that are `Markup`.

    Attributes:
        name: of its CSV file.
        text: columns of words, which wrap.
    """

    name: str
    head: Sequence[object]
    rows: Sequence[Sequence[object]]
    text: bool = False


@dataclass(frozen=True)
class Page:
    """Everything that a page shows.

    Attributes:
        data: `lines`, `charts` and `gallery` for page.js.
        images: addresses to which the gallery refers by number.
        beside: the images are files beside the page.
    """

    title: str
    blocks: Sequence[Block]
    data: Mapping[str, Any]
    images: Sequence[str] = ()
    beside: bool = False

    def parts(self) -> dict[str, str]:
        """HTML by key, for an update."""
        return {block.key: block.html for block in self.blocks if block.kind == "html"}


def part(name: str, *given: object) -> Markup:
    """The HTML of a macro of parts.html."""
    return Markup(getattr(_environment().get_template("parts.html").module, name)(*given))


def table(shown: PageTable) -> Markup:
    """A table that scrolls in itself and can be saved as CSV; "" without rows."""
    return part("table", shown) if shown.rows else Markup()


def document(page: Page, live: Mapping[str, Any] | None = None) -> str:
    """The whole page.

    Args:
        live: `version` and `live`, the milliseconds between updates, of a page that a server keeps up to date.
    """
    style = Markup(_file("uPlot.min.css") + _file("page.css"))
    scripts = [
        Markup(f"/*! uPlot\n{_file('uPlot.LICENSE').replace('*/', '')}*/\n{_file('uPlot.iife.min.js')}"),
        Markup(_file("page.js")),
    ]
    return (
        _environment()
        .get_template("page.html")
        .render(
            title=page.title,
            policy=policy(style, scripts, beside=page.beside, live=live is not None),
            style=style,
            blocks=[replace(block, html=Markup(block.html)) for block in page.blocks],
            data=script_json({**page.data, **(live or {"live": 0})}),
            images=script_json(list(page.images)),
            scripts=scripts,
        )
    )


def policy(style: str, scripts: Iterable[str], *, beside: bool, live: bool) -> str:
    """The content policy of a page: its own script and style, by their hashes, and nothing else."""
    runs = " ".join(map(_digest, scripts))
    images = "data: 'self' file:" if beside else "data:"
    connect = "'self'" if live else "'none'"
    return (
        f"default-src 'none'; script-src {runs}; style-src {_digest(style)}; img-src {images}; connect-src {connect}; "
        "base-uri 'none'; form-action 'none'"
    )


def script_json(value: object) -> Markup:
    """JSON that may stand inside a script element, whatever texts it holds."""
    text = json.dumps(value, separators=(",", ":"), ensure_ascii=False, allow_nan=False)
    for character in "<>&\u2028\u2029":
        text = text.replace(character, f"\\u{ord(character):04x}")
    return Markup(text)


def _digest(text: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"


@cache
def _file(name: str) -> str:
    return (_FILES / name).read_text(encoding="utf-8")


@cache
def _environment() -> Environment:
    """Imported with the first page: `retouch check` must not wait for it."""
    from jinja2 import Environment, FileSystemLoader, StrictUndefined

    return Environment(
        loader=FileSystemLoader(_FILES),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
