"""README.md: its matrix is what the tests train, its numbers are committed results, its Python calls exist."""

from __future__ import annotations

import ast
import json
import re

from tools import family_pages

from .pages import DOCS, REPOSITORY, blocks

README = REPOSITORY / "README.md"
PAGE = README.read_text(encoding="utf-8")
PROSE = " ".join(PAGE.split())


def test_the_matrix_is_what_the_tests_train() -> None:
    rows = re.findall(r"^\| [^|]+\(`(\w+)`\) \| [^|]+ \| (.+) \|$", PAGE, re.MULTILINE)
    shown = {
        (family, name, letter)
        for family, cells in rows
        for name, cell in zip(family_pages.ALGORITHMS, cells.split(" | "), strict=True)
        for letter in cell.replace("-", "").split()
    }
    assert shown == family_pages.trained()


def test_the_landing_page_has_the_same_matrix() -> None:
    matrix = PAGE.partition("| model | task |")[2].partition("\n\n")[0]
    assert matrix and matrix in (DOCS / "index.md").read_text(encoding="utf-8")


def test_the_table_of_memory_agrees_with_the_page_on_scaling() -> None:
    """Which tests/docs/test_scaling_page.py counts anew."""
    scaling = (DOCS / "scaling.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| [^|]+ \| [^|]+ \| `(configs/\S+)` \| (\d+) \| ([\d.]+) \|$", PAGE, re.MULTILINE)
    assert len(rows) == 7
    for file, processes, gb in rows:
        assert re.search(rf"{file}[^|]*` \| {processes} \| {gb} \|", scaling), file


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
    landing = " ".join((DOCS / "index.md").read_text(encoding="utf-8").split())
    assert all(number in landing for number in shown("algorithms", "flux_fill-nft-full-0")[1:])


def test_the_calls_of_the_python_lines_are_those_that_are_run() -> None:
    """tests/test_api.py runs the lines of docs/python.md."""

    def calls(source: str) -> dict[str, set[str]]:
        found = [node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Call)]
        return {ast.unparse(call.func): {keyword.arg or "" for keyword in call.keywords} for call in found}

    known = calls(blocks(DOCS / "python.md", "python")[0])
    for name, keywords in calls(blocks(README, "python")[0]).items():
        assert name in known and keywords <= known[name], name
