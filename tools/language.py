"""Find phrases that this project does not use, in its pages, help texts, messages, docstrings and comments.

    python tools/language.py                          # pages, and the comments of run files and scripts
    python tools/language.py --scope help             # the help texts of the command line
    python tools/language.py --scope source --counts  # strings and comments of src/, as counts per file

`make lint` checks all three.

The exit code is 1 if a phrase was found. Code is not checked: fenced blocks, `inline code`, link targets and names.
"""

from __future__ import annotations

import argparse
import ast
import io
import re
import sys
import tokenize
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

REPOSITORY = Path(__file__).resolve().parents[1]

START = r"(?:^|(?<=[.:;|!?(] )|(?<=\*\* ))"
"""Where a sentence or a table cell begins."""

PHRASES: dict[str, str] = {
    r"pictures?": "image (pixels), sample (a generated image) or example (a data item)",
    r"holes?": "masked region",
    r"paste-back": "composite; the option keeps its name `paste_back`",
    r"painters?": "diffusion model, transformer",
    r"draws|drawn|drew|drawings?": "generates, generated, image; of random numbers: sampled",
    r"says?|said|saying|tells?|told": "reports, prints, states, means",
    r"asks? for|asked for|asking for": "requests, requires; the target text",
    r"knows|sees": "a program reads, receives, detects",
    r"of (?:yours|ours|theirs)": "custom; your own",
    r"by itself|by themselves": "automatically; alone",
    r"as (?:it|they|you) likes?": "optionally",
    r"otherwise|besides|aside|alike": "name the condition: if …, except …, also",
    r"so that": "to …; or a sentence of its own for the consequence",
    r"(?:is|are|was|were|be|being) refused": "name who rejects it and the remedy: `check` rejects …; set …",
    r"lacks?|lacking": "is missing, has no",
    r"at hand|in the way": "available; already exists",
    r"at last|now and then|a little": "finally; every N steps; a number",
    r"(?:in )?finite numbers?|(?:is|are) not finite": "contains NaN or Inf",
    r"nothing to learn from|without any signal|no signal": "zero reward variance in every group",
    r"what (?:is|are|was|were) (?:raised|asked|rewarded|drawn|wanted|said)": "the objective, the prompt, the reward",
    r"(?:what|who) says": "reward, scorer, judge",
    r"what an? (?:image|picture|step) costs": "network forwards per image",
    r"halves of the language|other half of the language": "vocabulary split; train and held_out are disjoint",
    r"averaged weights|the averages": "EMA weights",
    r"waits? for company": "batching delay",
    r"amounts? to": "results in; the derived values",
    r"items? of the data": "example",
    r"travels?": "is communicated, is sent",
    rf"{START}What (?!if\b)[^.?|]*(?:[.|]|$)": "start with the noun: 'The objective is …', not 'What is raised is …'",
    rf"{START}Of (?!course\b)": "a sentence that stands alone: 'Random seed of the split.'",
    rf"{START}Who(?:ever)? [^.?|]*(?:[.|]|$)": "name the actor: 'A user who …'",
}
"""Pattern -> what to write in its place. A pattern stands between word boundaries and ignores case."""

SENTENCES = {pattern for pattern in PHRASES if START in pattern}
"""Those are matched as they are: case counts, and they bring their own boundaries."""

COMPILED = [
    (
        re.compile(pattern, re.MULTILINE) if pattern in SENTENCES else re.compile(rf"\b(?:{pattern})\b", re.IGNORECASE),
        to,
    )
    for pattern, to in PHRASES.items()
]


class Finding(NamedTuple):
    file: str
    line: int
    found: str
    instead: str


class Text(NamedTuple):
    """A text as people read it, without code."""

    file: str
    line: int
    text: str


def findings(texts: Iterable[Text]) -> list[Finding]:
    """Phrases in the texts, in the order of the lines."""
    found: list[Finding] = []
    for file, first, text in texts:
        for pattern, instead in COMPILED:
            for match in pattern.finditer(text):
                line = first + text.count("\n", 0, match.start())
                found.append(Finding(file, line, " ".join(match.group().split()), instead))
    return sorted(found)


def page_text(markdown: str) -> str:
    """The page without code and link targets; line numbers stay. A heading may begin with "What"."""

    def blank(match: re.Match[str]) -> str:
        return re.sub(r"[^\n]", "", match.group())

    markdown = re.sub(r"^```.*?^```$", blank, markdown, flags=re.MULTILINE | re.DOTALL)
    markdown = re.sub(r"`[^`]*`", lambda match: "X" + blank(match), markdown)
    markdown = re.sub(r"\]\([^)\s]+(?: \"[^\"]*\")?\)", "]", markdown)
    return re.sub(r"^#+ ", "Heading ", markdown, flags=re.MULTILINE)


COMMENTED = ("configs/**/*.yaml", "scripts/*.sh", "constraints.txt", "Makefile")
"""Files whose comments people read as they read pages."""


def pages() -> Iterator[Text]:
    """The pages, and the comments of run files and scripts."""
    paths = [REPOSITORY / "README.md", REPOSITORY / "CONTRIBUTING.md", *sorted((REPOSITORY / "docs").rglob("*.md"))]
    for path in paths:
        name = path.relative_to(REPOSITORY).as_posix()
        yield Text(name, 1, page_text(path.read_text(encoding="utf-8")))
    for path in sorted(path for pattern in COMMENTED for path in REPOSITORY.glob(pattern)):
        lines = [line.partition("#")[2].strip("#! ") for line in path.read_text(encoding="utf-8").splitlines()]
        yield Text(path.relative_to(REPOSITORY).as_posix(), 1, re.sub(r"`[^`\n]*`", "X", "\n".join(lines)))


def helps() -> Iterator[Text]:
    """Help texts of every command, its arguments and its options."""
    import typer.main

    from retouch.cli import app

    def below(command: Any, name: str) -> Iterator[Text]:
        yield Text(f"{name} --help", 1, command.help or "")
        for parameter in command.params:
            yield Text(f"{name} --help", 1, getattr(parameter, "help", None) or "")
        for sub, nested in getattr(command, "commands", {}).items():
            yield from below(nested, f"{name} {sub}")

    yield from below(typer.main.get_command(app), "retouch")


def source(folder: Path = REPOSITORY / "src") -> Iterator[Text]:
    """Strings that hold more than a word, docstrings among them, and comments."""
    for path in sorted(folder.rglob("*.py")):
        code = path.read_text(encoding="utf-8")
        name = path.relative_to(folder.parent).as_posix()
        tree = ast.parse(code)
        kept = {id(part) for value in judge_texts(tree) for part in ast.walk(value)}
        for node in ast.walk(tree):
            if id(node) in kept:
                continue
            if isinstance(node, ast.Constant) and isinstance(node.value, str) and " " in node.value.strip():
                yield Text(name, node.lineno, string_text(node.value))
        for token in tokenize.generate_tokens(io.StringIO(code).readline):
            if token.type == tokenize.COMMENT:
                yield Text(name, token.start[0], string_text(token.string.lstrip("#! ")))


def judge_texts(tree: ast.AST) -> Iterator[ast.expr]:
    """Values of `question`, `_QUESTION` and `_ABOUT_...`: texts to a judge, whose scores depend on the wording."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Assign | ast.AnnAssign) and node.value is not None:
            target = node.targets[0] if isinstance(node, ast.Assign) else node.target
            if isinstance(target, ast.Name) and re.fullmatch(r"_?question|_ABOUT_\w+", target.id, re.IGNORECASE):
                yield node.value


def string_text(string: str) -> str:
    """The string without code: `code`, a "key" in quotes, the name that a line of Args documents, Jinja commands."""
    for code in (r"`[^`\n]*`", r'"[\w.]+"', r"(?<=\n    ) *\w+(?:, \w+)*(?=: )", r"\{%.*?%\}|\{\{.*?\}\}"):
        string = re.sub(code, "X", string)
    return string


SCOPES = {"docs": pages, "help": helps, "source": source}


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--scope", choices=SCOPES, action="append", help="what to check; default: docs")
    parser.add_argument("--counts", action="store_true", help="print counts per file only")
    options = parser.parse_args(arguments)
    found = [finding for scope in options.scope or ["docs"] for finding in findings(SCOPES[scope]())]
    if not options.counts:
        for file, line, phrase, instead in found:
            print(f"{file}:{line}: '{phrase}' -> {instead}")
    for file, count in Counter(finding.file for finding in found).most_common():
        print(f"{count:5d}  {file}")
    print(f"{len(found)} phrases to replace")
    return int(bool(found))


if __name__ == "__main__":
    sys.exit(main())
