"""tools/house.py: what it counts in a small package."""

from __future__ import annotations

import ast
from concurrent.futures import Future
from importlib import import_module
from pathlib import Path
from textwrap import dedent

import pytest
import torch
import transformers
from tools import house

from retouch.types import Outcome, Place, Score, Scores

CODE = '''
    """A module."""
    LIMIT = 3

    class Box:
        def size(self) -> int:
            """Of the box."""

            # a comment
            return sum(
                x for x in self
            )

    def outer(rows):
        def inner(row):
            return row

        many = [inner(row) for row in rows]
        return sorted(many, key=lambda row: -row)
'''


def test_lines_of_a_body_are_code_without_the_docstring_and_inner_functions() -> None:
    assert house.body_lines(ast.parse(dedent(CODE))) == {
        "Box.size": 3,
        "outer": 2,
        "outer.<locals>.inner": 1,
        "outer.<locals>.<lambda>": 1,
    }


@pytest.mark.parametrize("inner", ["<listcomp>", "<genexpr>", "<dictcomp>"])
def test_a_comprehension_belongs_to_the_function_that_it_stands_in(inner: str) -> None:
    assert house.without_comprehension(f"outer.<locals>.{inner}") == "outer"


def test_names_that_stand_in_two_files_and_modules_without_a_room() -> None:
    code = ast.parse(dedent(CODE))
    found = house.names({"api.py": code, "loose.py": code, "core/x.py": ast.parse("_LIMIT = 1")})
    assert found["classes_with_two_meanings"] == {"Box": ["api.py", "loose.py"]}
    assert set(found["public_names_twice"]) == {"Box", "LIMIT", "outer"}
    assert found["loose_modules"] == ["loose.py"]


def test_words_of_a_page_are_by_hand_but_for_what_a_tool_writes(tmp_path: Path) -> None:
    (tmp_path / "docs").mkdir()
    (tmp_path / "docs" / "hand.md").write_text("one two three", encoding="utf-8")
    (tmp_path / "docs" / "all.md").write_text("<!-- Written by tools/x.py from y. --> one two", encoding="utf-8")
    (tmp_path / "docs" / "part.md").write_text("one <!-- t: written by tools/x.py --> two three <!-- /t -->")
    found = house.pages(tmp_path)
    assert found["by_page"] == {"all.md": 0, "hand.md": 3, "part.md": 4}  # with the words of the end's mark
    assert found["words_by_hand"] == 7


def test_holders_of_a_score_are_found_through_containers_tensors_and_futures() -> None:
    later: Future[dict[str, list[Outcome]]] = Future()
    pending = Scores({}, {}, parts={Place((), (None, None), "counts"): later})
    assert house.holders([pending], 0.25) == set()
    later.set_result({"r": [Score(0.25)]})
    assert house.holders([{"a": (pending,)}], 0.25) == {"types.Scores"}
    assert house.holders(Scores({"r": [Score(0.25)]}, {"r": 1.0}), 0.25) == {"types.Scores"}
    assert house.holders(Scores({"r": [Score(0.5)]}, {"r": 1.0}), 0.25) == set()
    assert house.contents(torch.tensor([1.0, 0.25]), 0.25) == [0.25]


def test_a_function_of_many_branches_without_a_comment_is_a_knot(tmp_path: Path) -> None:
    tests = "".join(f"\n    if rows == {i} and rows:\n        return {i}" for i in range(5))
    (tmp_path / "a.py").write_text(
        f"def tied(rows):{tests}\n\n\ndef told(rows):  # a reason{tests}\n\n\ndef few(rows):\n    pass\n"
    )
    assert house.knots(tmp_path, house.parsed(tmp_path)) == {"a.py:1:tied": 10}


def test_types_find_the_names_of_transformers_where_they_are() -> None:
    """`typings` stands in front of the package for `make types`."""
    stub = Path(__file__).parents[1] / "typings" / "transformers" / "__init__.pyi"
    _, *imports = ast.parse(stub.read_text(encoding="utf-8")).body
    for one in imports:
        assert isinstance(one, ast.ImportFrom) and one.module is not None
        for alias in one.names:
            assert alias.name == alias.asname
            assert getattr(import_module(one.module), alias.name) is getattr(transformers, alias.name)
