"""Write what docs/ says of each model family, between two comments.

python tools/family_pages.py            # write the pages
python tools/family_pages.py --print    # print them

    docs/index.md      the matrix of models and algorithms: the cells that the tests train
    docs/models.md     a section for each family: `page.md` in its folder
    docs/evidence.md   the test of each family that compares it with diffusers' pipeline

The first line of a `page.md` is "# TITLE: TASKS", and its links start from docs/.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))  # for the cells of the tests

from tests.algorithms import test_cells, test_ip_adapter, test_killed  # noqa: E402
from tools.titles import ALGORITHMS  # noqa: E402

from retouch.families import FAMILIES  # noqa: E402

BEGIN, END = "<!-- families: written by tools/family_pages.py -->", "<!-- /families -->"

LETTERS = "LFAT"
"""What is trained: LoRA, all weights, a style adapter, the text encoder."""


@dataclass(frozen=True)
class Page:
    """What `page.md` of a family says; `text` may be empty."""

    family: str
    title: str
    tasks: tuple[str, ...]
    text: str


def families() -> Iterator[Page]:
    """The package's own, in the order of their registry."""
    for family in FAMILIES:
        file = ROOT / "src/retouch/families" / family / "page.md"
        if file.is_file():  # families of plug-ins have none
            head, _, text = file.read_text(encoding="utf-8").partition("\n")
            title, _, tasks = head.removeprefix("# ").partition(": ")
            yield Page(family, title, tuple(tasks.split(", ")), text.strip())


def trained() -> set[tuple[str, str, str]]:
    """(family, algorithm, letter of what is trained) of every cell that the tests train."""
    cells = test_cells.CELLS + test_killed.CELLS
    found = {(family, name, "F" if kind == "full" else "L") for family, name, kind in cells}
    found |= {(family, name, "A") for family, name in test_ip_adapter.CELLS}
    reading = (name for name, section in FAMILIES.items() if section.model_validate({}).chat_task is not None)
    return found | {(family, "vlm_grpo", "T") for family in reading}


def matrix() -> str:
    cells = trained()
    lines = ["", "| model | task | " + " | ".join(ALGORITHMS.values()) + " |", "|---" * (len(ALGORITHMS) + 2) + "|"]
    for page in families():
        letters = [[x for x in LETTERS if (page.family, name, x) in cells] for name in ALGORITHMS]
        row = " | ".join(" ".join(cell) or "-" for cell in letters)
        lines.append(f"| {page.title} (`{page.family}`) | {', '.join(page.tasks)} | {row} |")
    return "\n".join([*lines, ""])


def sections() -> str:
    return "\n".join(f"\n## {page.family}\n\n{page.text}\n" for page in families() if page.text)


def comparisons() -> str:
    rows = [
        f"| {page.title}: images equal those of diffusers' pipeline for the same weights, text states, noise and sizes "
        f"| [✓](../tests/families/test_{page.family}.py) |"
        for page in families()
    ]
    return "\n".join(["", "| claim | test |", "|---|---|", *rows, ""])


PARTS = {"docs/index.md": matrix, "docs/models.md": sections, "docs/evidence.md": comparisons}


def pages() -> dict[str, str]:
    """Path -> what the page has to be."""
    made: dict[str, str] = {}
    for path, write in PARTS.items():
        before, _, rest = (ROOT / path).read_text(encoding="utf-8").partition(BEGIN)
        made[path] = f"{before}{BEGIN}\n{write()}\n{END}{rest.partition(END)[2]}"
    return made


def main() -> None:
    for path, text in pages().items():
        if "--print" in sys.argv[1:]:
            print(text, end="")
        else:
            (ROOT / path).write_text(text, encoding="utf-8")
            print(path)


if __name__ == "__main__":
    main()
