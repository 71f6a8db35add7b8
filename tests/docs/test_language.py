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


def test_names_keys_templates_and_questions_to_a_judge_are_not_prose(tmp_path: Path) -> None:
    (tmp_path / "src").mkdir()
    (tmp_path / "src" / "module.py").write_text(
        '''def count(picture):
    """Return the count under "pictures" and `a picture`.

    Args:
        picture: an image.
        picture, drawn: a picture.
    """

QUESTION = "What does this picture " + "show, and is it drawn well?"
_ABOUT_STYLE: str = f"A picture {count} drawn"
question: str = "How good is this picture?"
CHAT = "{% set picture = 1 -%} {{ 'Picture ' ~ count }}"
ANSWER = "of this picture"
''',
        encoding="utf-8",
    )
    texts = language.source(tmp_path / "src")
    assert [(f.line, f.found) for f in language.findings(texts)] == [(6, "picture"), (13, "picture")]


def test_lint_checks_pages_help_and_source() -> None:
    lint = (language.REPOSITORY / "Makefile").read_text(encoding="utf-8")
    assert "tools/language.py" + "".join(f" --scope {scope}" for scope in language.SCOPES) in lint


@pytest.mark.full
def test_source_is_all_of_it() -> None:
    """What `make lint` reads for the same seconds."""
    files = {text.file for text in language.source()}
    assert {"src/retouch/api.py", "src/retouch/config/run.py", "src/retouch/rewards/server/worker.py"} <= files


def test_the_help_of_every_command_is_read() -> None:
    assert {"retouch --help", "retouch train --help", "retouch reward serve --help"} <= {
        t.file for t in language.helps()
    }
