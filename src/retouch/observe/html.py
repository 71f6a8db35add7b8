"""Parts of the offline HTML files: the page, tables, curves as SVG, images inside the page.

Texts are escaped here: `cell` and `heading` take text, everything else HTML.
"""

from __future__ import annotations

import base64
import html
import io
import itertools
from collections.abc import Iterable, Sequence
from pathlib import Path

from PIL import Image

_STYLE = """
:root{color-scheme:light dark;--ink:#1c1f24;--dim:#667;--line:#d8dce2;--back:#fff;--soft:#f4f6f8;--accent:#2563eb}
@media(prefers-color-scheme:dark){
:root{--ink:#e6e8eb;--dim:#9aa3ad;--line:#343a42;--back:#15181c;--soft:#1e2228;--accent:#7aa2ff}}
body{font:15px/1.5 system-ui,sans-serif;color:var(--ink);background:var(--back);max-width:1080px;margin:2rem auto;
padding:0 1rem}
h1{font-size:1.6rem;margin-bottom:.2rem}
h2{font-size:1.15rem;margin-top:2.2rem;border-bottom:1px solid var(--line);padding-bottom:.3rem}
.dim{color:var(--dim)}
.verdict b{text-transform:capitalize}
.verdict{font-size:1.15rem;background:var(--soft);border-left:4px solid var(--accent);padding:.8rem 1rem;margin:1rem 0}
table{border-collapse:collapse;font-variant-numeric:tabular-nums;margin:.6rem 0}
th,td{padding:.25rem .8rem;border-bottom:1px solid var(--line);text-align:right}
th:first-child,td:first-child{text-align:left}
.plots{display:grid;grid-template-columns:repeat(auto-fit,minmax(320px,1fr));gap:1rem}
figure{margin:0;background:var(--soft);padding:.6rem;border-radius:6px}
figcaption{font-size:.85rem;color:var(--dim)}
details{margin:.8rem 0}summary{cursor:pointer;color:var(--accent)}
svg{width:100%;height:auto}svg text{fill:var(--dim);font-size:10px}
img{max-width:100%;image-rendering:pixelated;border:1px solid var(--line)}
pre{background:var(--soft);padding:.8rem;overflow:auto;font-size:.85rem;border-radius:6px}
.bar{display:flex;height:22px;border-radius:4px;overflow:hidden}.bar span{display:block}
"""

COLOURS = (
    "#2563eb",
    "#7c3aed",
    "#db2777",
    "#ea580c",
    "#65a30d",
    "#0d9488",
    "#0891b2",
    "#a16207",
    "#475569",
    "#94a3b8",
)

LINE_COLOURS = tuple(COLOURS[i] for i in (0, 3, 4, 2, 7, 1, 5, 8, 6, 9))
"""Colours of runs in one plot, the most different first."""

_DOTTED = 40
"""Number of points up to which a curve shows each as a dot."""


def document(title: str, body: Iterable[str]) -> str:
    """A whole page with the text `title`."""
    return (
        "<!doctype html><html lang=en><meta charset=utf-8><meta name=viewport content='width=device-width'>"
        f"<title>{escape(title)} · retouch</title><style>{_STYLE}</style><body><h1>{escape(title)}</h1>"
        f"{''.join(body)}</body></html>"
    )


def escape(value: object) -> str:
    return html.escape(str(value))


def section(title: str, body: str, note: str = "") -> str:
    """A heading, a note in small text, and the body; nothing without a body."""
    dim = f"<p class=dim>{escape(note)}</p>" if note else ""
    return f"<h2>{escape(title)}</h2>{dim}{body}" if body else ""


def verdict(text: str, word: str = "") -> str:
    """A marked paragraph, which begins with `word` in bold."""
    bold = f"<b>{escape(word)}</b>" if word else ""
    return f"<p class=verdict>{bold}{escape(text)}</p>"


def table(head: Sequence[object], rows: Iterable[Sequence[object]]) -> str:
    """A table; "" without rows. Cells are text, except those that are `Markup`."""

    def line(tag: str, cells: Sequence[object]) -> str:
        shown = (cell if isinstance(cell, Markup) else escape(cell) for cell in cells)
        return f"<tr>{''.join(f'<{tag}>{cell}</{tag}>' for cell in shown)}</tr>"

    lines = [line("td", row) for row in rows]
    return f"<table>{line('th', head)}{''.join(lines)}</table>" if lines else ""


class Markup(str):
    """HTML that needs no escaping."""


def marked(colour: str, text: str) -> Markup:
    """A text after a square of a colour."""
    return Markup(f"<span style='color:{colour}'>■</span> {escape(text)}")


def number(value: object) -> str:
    return f"{value:.4f}" if isinstance(value, int | float) else "–"


def interval(change: tuple[float, float, float] | None) -> str:
    """A difference with its 95 % interval; "" for None."""
    return f"{change[0]:+.3f} [{change[1]:+.3f}, {change[2]:+.3f}]" if change else ""


def image_tag(name: str, image: Image.Image | Path) -> str:
    """An image inside the page."""
    if isinstance(image, Path):
        png = image.read_bytes()
    else:
        stream = io.BytesIO()
        image.save(stream, "PNG")
        png = stream.getvalue()
    return f"<img alt='{escape(name)}' src='data:image/png;base64,{base64.b64encode(png).decode()}'>"


def svg_curve(*lines: Sequence[tuple[float, float]], width: int = 340, height: int = 150) -> str:
    """A line through each sequence of (step, value), with the lowest and highest value on the axis."""
    steps = [step for points in lines for step, _ in points]
    values = [value for points in lines for _, value in points]
    first, last, low, high = min(steps), max(steps), min(values), max(values)
    span_x, span_y = max(last - first, 1e-9), high - low or 1.0
    left, top, right, bottom = 46, 8, width - 6, height - 18

    def place(step: float, value: float) -> str:
        x = left + (step - first) / span_x * (right - left)
        y = bottom - (value - low) / span_y * (bottom - top)
        return f"{x:.1f},{y:.1f}"

    drawn = ""
    for points, colour in zip(lines, itertools.cycle(LINE_COLOURS), strict=False):
        line = " ".join(place(s, v) for s, v in points)
        drawn += f"<polyline points='{line}' fill=none stroke='{colour}' stroke-width=1.6 />" if points else ""
        drawn += "".join(
            "<circle cx={} cy={} r=2 fill='{}' />".format(*place(s, v).split(","), colour)
            for s, v in (points if len(points) <= _DOTTED else ())
        )
    return (
        f"<svg viewBox='0 0 {width} {height}' role=img>"
        f"<polyline points='{left},{top} {left},{bottom} {right},{bottom}' fill=none stroke=currentColor "
        f"stroke-opacity=.3 />{drawn}"
        f"<text x={left - 4} y={top + 8} text-anchor=end>{high:.3g}</text>"
        f"<text x={left - 4} y={bottom} text-anchor=end>{low:.3g}</text>"
        f"<text x={left} y={height - 5}>{first:g}</text>"
        f"<text x={right} y={height - 5} text-anchor=end>step {last:g}</text></svg>"
    )
