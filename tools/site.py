"""Hooks of mkdocs (mkdocs.yml): every key of the configuration pages has an anchor and is found by its dotted name.

The rows of a table are no headings, which are all that search knows. A key of several kinds (`engine` of the scorers)
has an anchor and an entry for each.
"""

from __future__ import annotations

import html
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

_PART = re.compile(r"<h(?P<level>[23]) id=[^>]*>(?P<title>.*?)</h[23]>|<tr>\s*<td><code>(?P<key>[^<]+)</code></td>")
_TAG = re.compile(r"<[^>]+>")


@dataclass
class _Keys:
    """The keys of a page in the order of its tables.

    Attributes:
        section: dotted key of the section that its last heading names.
        kind: the kind of that section, or empty.
        entries: (anchor, title in search, text) of each.
    """

    page: str
    section: str = ""
    kind: str = ""
    entries: list[tuple[str, str, str]] = field(default_factory=list[tuple[str, str, str]])

    def with_anchor(self, part: re.Match[str]) -> str:
        """A heading as it is; the start of a row with the anchor of its key."""
        if part["level"]:
            title = html.unescape(_TAG.sub("", part["title"])).replace("¶", "").strip()
            self.section, self.kind = (title, "") if part["level"] == "2" else (self.section, title)
            return part[0]
        name = f"{'' if self.section == 'The run' else self.section + '.'}{part['key']}"
        of_kind = f"{name}-{re.sub(r'[^a-z0-9_]+', '-', self.kind.lower())}"
        taken = {anchor for anchor, _, _ in self.entries}
        anchor = next(one for one in (name, of_kind, *(f"{of_kind}-{n}" for n in range(2, 99))) if one not in taken)
        meaning = html.unescape(_TAG.sub(" ", self.page[part.end() :].partition("</tr>")[0]))
        title = f"{name} ({self.kind})" if ":" in self.kind else name
        self.entries.append((anchor, title, " ".join(meaning.split())))
        return part[0].replace("<tr>", f'<tr id="{anchor}">', 1)


def with_anchors(page: str) -> tuple[str, list[tuple[str, str, str]]]:
    """The HTML of a page with an anchor in each row of a key, and (anchor, title, text) of the keys."""
    keys = _Keys(page)
    return _PART.sub(keys.with_anchor, page), keys.entries


def on_page_content(page_html: str, page: Any, config: Any, files: Any) -> str:
    """mkdocs calls it with the HTML of each page."""
    del files
    if not page.file.src_uri.startswith("configuration"):
        return page_html
    page_html, entries = with_anchors(page_html)
    index = config.plugins["material/search"].search_index
    index.entries.extend(_entries(page.url, entries))
    return page_html


def _entries(url: str, keys: list[tuple[str, str, str]]) -> Iterator[dict[str, str]]:
    for anchor, title, text in keys:
        yield {"location": f"{url}#{anchor}", "title": html.escape(title), "text": html.escape(text)}
