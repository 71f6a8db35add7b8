"""The pages of the documentation and the code blocks in them."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

REPOSITORY = Path(__file__).parents[2]
DOCS = REPOSITORY / "docs"
PAGES = [REPOSITORY / "README.md", REPOSITORY / "CONTRIBUTING.md", *sorted(DOCS.rglob("*.md"))]


def blocks(page: Path, language: str) -> list[str]:
    """The fenced code blocks of one language."""
    text = page.read_text(encoding="utf-8")
    return re.findall(rf"^```{language}\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)


def commands(page: Path) -> list[list[str]]:
    """The commands of the ```bash blocks, and those after a `$` in the ```console blocks, split into words."""
    lines: list[str] = []
    for block in blocks(page, "bash"):
        lines += joined(block)
    for block in blocks(page, "console"):
        lines += [line.removeprefix("$ ") for line in joined(block) if line.startswith("$ ")]
    return [words for line in lines for words in _between(shlex.split(line, comments=True), "&&") if words]


def _between(words: list[str], separator: str) -> list[list[str]]:
    parts: list[list[str]] = [[]]
    for word in words:
        if word == separator:
            parts.append([])
        else:
            parts[-1].append(word)
    return parts


def joined(block: str) -> list[str]:
    """The lines of a block; a line that ends in a backslash or inside quotes is joined with the next."""
    lines: list[str] = []
    pending = ""
    for line in block.splitlines():
        pending += line.removesuffix("\\") + " "
        try:
            shlex.split(pending, comments=True)
        except ValueError:  # no closing quotation
            continue
        if not line.endswith("\\"):
            lines.append(pending.strip())
            pending = ""
    return lines


def retouch_arguments(words: list[str]) -> list[str] | None:
    """The arguments of `retouch` in a command, also after `accelerate launch ... -m`; None for other commands."""
    if words[0] == "retouch":
        return words[1:]
    if "-m" in words and words[words.index("-m") + 1] == "retouch":
        return words[words.index("-m") + 2 :]
    return None
