"""docs/benchmarks.md names the outputs of every benchmark as the benchmark does."""

from __future__ import annotations

import pytest

from retouch.benchmarks import BENCHMARKS
from retouch.data.base import ItemFiles
from tests.docs.pages import REPOSITORY

PAGE = (REPOSITORY / "docs" / "benchmarks.md").read_text(encoding="utf-8")

ABOUT = {
    "key": "KEY", "image": "FOLDER/NAME.jpg", "image_type": "TYPE", "complexity": "C", "level": "LEVEL",
    "discipline": "DISCIPLINE", "item": 1, "reference_item": 2, "task_type": "TASK", "instruction_language": "LANGUAGE",
}  # fmt: skip

OTHERWISE = {"complex_edit": {"image": "FOLDER/NUMBER"}, "textedit": {"key": "FOLDER/NAME.jpg"}}
"""Metadata of these benchmarks that have another form."""


@pytest.mark.parametrize("name", sorted(BENCHMARKS))
def test_the_names_of_outputs_are_those_of_the_benchmark(name: str) -> None:
    """Of the first item: its image, or the first and the last of several."""
    benchmark = BENCHMARKS[name].model_construct(name=name, path="data", images_per_item=None)
    item, count = ItemFiles(0, "a prompt", metadata={**ABOUT, **OTHERWISE.get(name, {})}), benchmark.count
    files = [benchmark.file_name(item, index) for index in sorted({0, count - 1})]
    shown = " to ".join(f"`{file}`" for file in files)
    assert f"| `{name}` | {shown} |" in PAGE
