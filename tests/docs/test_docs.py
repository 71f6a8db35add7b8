"""The pages agree with the code: commands parse, files exist, run files validate, and named tests exist."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import typer.main
import yaml
from tools.config_reference import pages as configuration_pages

from retouch.adapters import FORMATS
from retouch.benchmarks import BENCHMARKS
from retouch.benchmarks.load import load_benchmark
from retouch.cli import app
from retouch.config import load_run, parse_run

from .pages import DOCS, PAGES, REPOSITORY, blocks, commands, retouch_arguments

OTHER_YAML = {"extending.md", "benchmarks.md"}
"""Pages whose YAML names components of a plug-in (tests/examples/test_plugin.py trains with it) or of benchmarks."""

BASE: dict[str, Any] = {
    "name": "example",
    "model": {"path": "tiny"},
    "data": {"format": "self_bench", "path": "somewhere"},
    "algorithm": {"name": "grpo"},
    "rewards": {"ocr": {}},
}
"""What an example of a single section is completed with."""


def retouch_commands(page: Path) -> list[list[str]]:
    """What follows `retouch` in the commands of a page."""
    return [arguments for words in commands(page) if (arguments := retouch_arguments(words)) is not None]


def as_text(value: Any) -> str:
    return " ".join(value) if isinstance(value, list) else str(getattr(value, "name", value))


@pytest.fixture(autouse=True)
def variables(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("MODEL_PATH", "DATA_PATH", "DATA_JSON_PATH", "CALLIGRAPHER_PATH", "SIGLIP_PATH"):
        monkeypatch.setenv(name, f"some/{name.lower()}")


def test_there_are_pages_with_commands() -> None:
    assert {"README.md", "CONTRIBUTING.md", "index.md", "tutorial.md", "rewards.md"} <= {page.name for page in PAGES}
    assert {page.name for page in PAGES if retouch_commands(page)} >= {"README.md", "tutorial.md", "rewards.md"}


@pytest.mark.parametrize("page", PAGES, ids=as_text)
def test_the_commands_exist_with_their_options(page: Path) -> None:
    app_command: Any = typer.main.get_command(app)
    for arguments in retouch_commands(page):
        command, rest = app_command, list(arguments)
        while hasattr(command, "commands") and rest != ["--help"]:
            assert rest and rest[0] in command.commands, f"no command {rest[:1]}"
            command = command.commands[rest.pop(0)]
        if rest != ["--help"]:  # which ends the process
            command.make_context(command.name, rest)  # raises on an option that does not exist or lacks a value


def test_the_table_of_commands_has_all_of_them() -> None:
    rows = re.findall(r"^\| (`retouch .*) \|.*\|$", (REPOSITORY / "docs" / "index.md").read_text(), re.MULTILINE)
    named: list[str] = []
    for row in rows:
        first, *others = re.findall(r"`(?:retouch )?([a-z -]+)`", row)
        group = first.rpartition(" ")[0]
        named += [first, *(f"{group} {other}" for other in others)]
    command: Any = typer.main.get_command(app)
    below = {name: getattr(one, "commands", None) for name, one in command.commands.items()}
    known = [f"{name} {sub}" if sub else name for name, subs in below.items() for sub in subs or ("",)]
    assert sorted(named) == sorted(known)


def test_the_table_of_export_formats_has_all_of_them() -> None:
    text = (REPOSITORY / "docs" / "tutorial.md").read_text(encoding="utf-8")
    rows = text.partition("| `--to` |")[2].partition("\n\n")[0].splitlines()[2:]
    assert sorted(name for row in rows for name in re.findall(r"`([a-z-]+)`", row.split("|")[1])) == sorted(FORMATS)


@pytest.mark.parametrize("page", PAGES, ids=as_text)
def test_overrides_of_published_files_are_valid(page: Path) -> None:
    for arguments in retouch_commands(page):
        files = [word for word in arguments if re.fullmatch(r"configs/.+\.yaml", word)]
        if arguments[0] in ("train", "check") and files:
            load_run(REPOSITORY / files[0], [word for word in arguments if re.match(r"[a-z_.]+=", word)])


@pytest.mark.parametrize("page", PAGES, ids=as_text)
def test_files_of_the_repository_exist(page: Path) -> None:
    for words in commands(page):
        for option, word in zip(["", *words], words, strict=False):
            if option != "--out" and re.match(r"(configs|examples|tools|benchmarks|tests)/", word):
                assert (REPOSITORY / word).exists(), f"no {word}"


def test_make_targets_exist() -> None:
    makefile = (REPOSITORY / "Makefile").read_text(encoding="utf-8")
    targets = set(re.findall(r"^([a-z-]+):", makefile, re.MULTILINE))
    named = {
        word
        for page in PAGES
        for words in commands(page)
        if "make" in words
        for word in words[words.index("make") + 1 :]
    }
    assert {word for word in named if "=" not in word} <= targets


@pytest.mark.parametrize("page", [page for page in PAGES if page.name not in OTHER_YAML], ids=as_text)
def test_examples_of_run_files_are_valid(page: Path) -> None:
    for block in blocks(page, "yaml"):
        parse_run({**BASE, **yaml.safe_load(block)}, source=page.name)


def test_examples_of_benchmark_files_are_valid(tmp_path: Path) -> None:
    """And every benchmark is on the page."""
    page, file = DOCS / "benchmarks.md", tmp_path / "benchmark.yaml"
    for block in blocks(page, "yaml"):
        file.write_text(block, encoding="utf-8")
        load_benchmark(str(file), None)
    assert {name for name in BENCHMARKS if f"`{name}`" not in page.read_text(encoding="utf-8")} == set()


@pytest.mark.parametrize("page", PAGES, ids=as_text)
def test_links_lead_somewhere(page: Path) -> None:
    """The file exists, and so does the heading after #; a title with the name of a test names one in the file."""
    for target, title in re.findall(r'\]\(([^)\s]+)(?: "([^"]*)")?\)', page.read_text(encoding="utf-8")):
        if "://" in target:
            continue
        file, _, anchor = target.partition("#")
        path = page.parent / file if file else page
        assert path.exists(), target
        assert not anchor or path.suffix != ".md" or anchor in headings(path), target
        assert not title.startswith("test_") or f"def {title}(" in path.read_text(encoding="utf-8"), title


def headings(page: Path) -> set[str]:
    """The anchors of the headings of a page, as GitHub and mkdocs make them."""
    text = re.sub(r"^```.*?^```$", "", page.read_text(encoding="utf-8"), flags=re.MULTILINE | re.DOTALL)
    titles = re.findall(r"^#+ (.*)$", text, re.MULTILINE)
    return {re.sub(r"[\s-]+", "-", re.sub(r"[^\w\s-]", "", title.lower()).strip()) for title in titles}


def files_of(navigation: list[dict[str, Any]]) -> list[str]:
    """The files of a navigation of mkdocs, whose entries are files or sections of entries."""
    entries = [entry for titled in navigation for entry in titled.values()]
    return [file for entry in entries for file in ([entry] if isinstance(entry, str) else files_of(entry))]


def test_every_page_is_in_the_navigation_once() -> None:
    navigation = yaml.safe_load((REPOSITORY / "mkdocs.yml").read_text(encoding="utf-8"))["nav"]
    assert sorted(files_of(navigation)) == sorted(path.relative_to(DOCS).as_posix() for path in DOCS.rglob("*.md"))


def test_the_configuration_pages_are_the_schema() -> None:
    committed = [DOCS / "configuration.md", *(DOCS / "configuration").glob("*.md")]
    written = {path.relative_to(DOCS).as_posix(): path.read_text(encoding="utf-8") for path in committed}
    assert written == configuration_pages(), "the schema changed; run python tools/config_reference.py"
