"""The site: keys are found by name, nothing is loaded from elsewhere, and `make docs` installs only what it needs."""

from __future__ import annotations

import re

import markdown
import yaml
from tools.site import with_anchors

from .pages import DOCS, REPOSITORY

PAGES = [DOCS / "configuration.md", *sorted((DOCS / "configuration").glob("*.md"))]


def test_every_key_has_an_anchor_and_is_found_by_its_name() -> None:
    """Each row of a key, also where several kinds have one of that name."""
    titles = list[str]()
    for page in PAGES:
        text = page.read_text(encoding="utf-8")
        html = markdown.markdown(text, extensions=["tables", "toc", "attr_list"])
        anchored, entries = with_anchors(html)
        rows = re.findall(r"^\| `[^`|]+` \| .* \| .* \| .* \|$", text, re.MULTILINE)
        anchors = re.findall(r'<tr id="([^"]+)">', anchored)
        assert anchors == [anchor for anchor, _, _ in entries] and len({*anchors}) == len(anchors) >= len(rows) > 0
        assert re.sub(r' id="[^"]+"', "", anchored) == re.sub(r' id="[^"]+"', "", html)
        titles += [title for _, title, _ in entries]
    assert {"name", "optimizer.lr", "rollout.window.size", "model.train.rank (kind: lora)"} <= {*titles}
    assert "rewards.NAME.engine (scorer: ocr)" in titles
    [text] = [text for _, title, text in entries if title == "optimizer.max_grad_norm"]
    assert text.endswith("a larger gradient is scaled down to it.")


def test_the_site_loads_nothing_from_elsewhere() -> None:
    site = yaml.safe_load((REPOSITORY / "mkdocs.yml").read_text(encoding="utf-8"))
    assert site["theme"]["font"] is False and {"search", "offline"} == {*site["plugins"]}
    assert not any("://" in file for file in (*site["extra_css"], *site.get("extra_javascript", [])))
    assert "://" not in (DOCS / "site.css").read_text(encoding="utf-8")
    assert not any("```mermaid" in page.read_text(encoding="utf-8") for page in DOCS.rglob("*.md"))  # from a CDN


def test_the_pages_need_neither_torch_nor_the_package() -> None:
    makefile = (REPOSITORY / "Makefile").read_text(encoding="utf-8")
    rule = makefile.partition(".venv/docs/.installed: ")[2].partition("\n\n")[0]
    assert "docs: .venv/docs/.installed " in makefile and rule.startswith("constraints.txt")
    assert " -c constraints.txt mkdocs-material\n" in rule and "-e" not in rule.split()
