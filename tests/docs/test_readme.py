"""README.md and the landing page: the matrix is what the tests train, numbers are committed results, calls exist."""

from __future__ import annotations

import ast
import json
import re

from tools import family_pages

from .pages import DOCS, REPOSITORY, blocks

README = REPOSITORY / "README.md"
PAGE = README.read_text(encoding="utf-8")
PROSE = " ".join(PAGE.split())
LANDING = (DOCS / "index.md").read_text(encoding="utf-8")


def test_the_matrix_is_what_the_tests_train() -> None:
    rows = re.findall(r"^\| [^|]+\(`(\w+)`\) \| [^|]+ \| (.+) \|$", LANDING, re.MULTILINE)
    shown = {
        (family, name, letter)
        for family, cells in rows
        for name, cell in zip(family_pages.ALGORITHMS, cells.split(" | "), strict=True)
        for letter in cell.replace("-", "").split()
    }
    assert shown == family_pages.trained()


def test_the_readme_names_every_family() -> None:
    models = PROSE.partition("**Models:** ")[2].partition(". The [table]")[0]
    titles = [page.title.removesuffix(", Edit-Plus") for page in family_pages.families()]
    assert models.split(", ") == titles


def test_the_ends_of_the_memory_are_those_of_its_page() -> None:
    """Which tests/docs/test_memory_page.py counts anew."""
    memory = (DOCS / "memory.md").read_text(encoding="utf-8")
    cells = {
        (row[0], row[1]): row[2:] for row in re.findall(r"^\| `(\w+)` \| `(\w+)` " + r"\| ([^|]+) " * 5, memory, re.M)
    }
    assert "| 24 GB | 48 GB | 80 GB | 141 GB |" in memory
    _, on_24, *_ = cells["sd_inpaint", "lora"]
    _, _, _, on_80, _ = cells["flux_fill", "full"]
    assert (on_24, on_80) == ("bf16", "4 × fsdp2")
    assert "from SD1.5 with LoRA on one GPU of 24 GB to all weights of FLUX.1-Fill on four of 80 GB or more" in PROSE


def test_the_numbers_of_the_caption_are_committed_results() -> None:
    """Of the run in the image, of the demo, and of six times its steps."""

    def shown(name: str, run: str) -> list[str]:
        result = json.loads((REPOSITORY / f"benchmarks/results/{name}.json").read_text(encoding="utf-8"))
        [row] = [row for row in result["rows"] if row["run"] == run]
        mean, low, high = (f"{value:+.3f}".replace("0.", ".", 1) for value in row["gain"]["ocr.ned"])
        levels = [f"{row['held_out'][point]['ocr.ned']:.3f}"[1:] for point in ("base", "warmed up", "last")]
        return [*levels, mean, f"[{low}, {high}]"]

    for name, run in (
        ("algorithms", "flux_fill-nft-full-0"),
        ("demo_gain", "grpo-0"),
        ("demo_gain_30_minutes", "long-0"),
    ):
        for number in shown(name, run):
            assert number in PROSE, f"{run}: {number}"
    landing = " ".join(LANDING.split())
    assert all(number in landing for number in shown("algorithms", "flux_fill-nft-full-0")[1:])


def test_the_calls_of_the_python_lines_are_those_that_are_run() -> None:
    """tests/test_api.py runs the lines of docs/python.md."""

    def calls(source: str) -> dict[str, set[str]]:
        found = [node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Call)]
        return {ast.unparse(call.func): {keyword.arg or "" for keyword in call.keywords} for call in found}

    known = calls(blocks(DOCS / "python.md", "python")[0])
    for name, keywords in calls(blocks(README, "python")[0]).items():
        assert name in known and keywords <= known[name], name
