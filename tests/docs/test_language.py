"""tools/language.py finds the phrases that the project does not use, and only in prose."""

from __future__ import annotations

from pathlib import Path

import pytest
from tools import language

PAGE = """# What it shows

The reward is a number.

```python
picture = "what a picture says"
```

See [the page](pictures.md "test_pictures") and `picture.nearest`. Is it off? What next?
"""


def found(text: str, file: str = "docs/page.md") -> list[tuple[int, str]]:
    return [(finding.line, finding.found) for finding in language.findings([language.Text(file, 1, text)])]


def test_code_links_names_and_questions_are_no_prose() -> None:
    assert found(language.page_text(PAGE)) == []


@pytest.mark.parametrize(
    ("planted", "phrase"),
    [
        ("Each picture is scored.", "picture"),
        ("The reward is the highest. What is raised is the sum.", "What is raised is the sum."),
        ("| seed | Of the noise |", "Of"),
        ("The setting\nis refused at once.", "is refused"),  # on its second line
        ("The run says why.", "says"),
        ("Whoever trains long enough wins.", "Whoever trains long enough wins."),
    ],
)
def test_a_planted_phrase_is_found_on_its_line(planted: str, phrase: str) -> None:
    text = language.page_text(PAGE + planted + "\n")
    assert phrase in [words for line, words in found(text) if line == len(PAGE.splitlines()) + 1 + ("\n" in planted)]


def test_docstrings_messages_and_comments_of_source_are_read(tmp_path: Path) -> None:
    (tmp_path / "src").mkdir()
    (tmp_path / "src" / "module.py").write_text(
        '"""Score a picture."""\n\nMESSAGE = f"{1} was drawn"  # so that it works\nNAME = "picture"\n', encoding="utf-8"
    )
    texts = language.source(tmp_path / "src")
    assert [(f.line, f.found) for f in language.findings(texts)] == [(1, "picture"), (3, "drawn"), (3, "so that")]


def test_the_help_of_every_command_is_read() -> None:
    assert {"retouch --help", "retouch train --help", "retouch reward serve --help"} <= {
        t.file for t in language.helps()
    }


def test_an_allowed_phrase_has_a_reason_and_is_not_reported() -> None:
    assert all(allowed.reason for allowed in language.ALLOWED)
    assert found("A picture.", file="docs/configuration/model.md") == []
