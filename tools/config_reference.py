"""Write the configuration reference from the schema: every key of a run file, its type, its default and its meaning.

python tools/config_reference.py            # write docs/configuration.md and docs/configuration/*.md
python tools/config_reference.py --print    # print them
"""

from __future__ import annotations

import ast
import inspect
import json
import re
import sys
import textwrap
import types
import typing
from collections import Counter
from collections.abc import Iterator, Sequence
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any

import annotated_types
from pydantic import BaseModel
from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined

from retouch.algorithms import ALGORITHMS
from retouch.config import RunConfig
from retouch.config.base import Section
from retouch.config.errors import models_of
from retouch.config.reads import ReadBy, reads_of
from retouch.errors import is_own
from retouch.registry import Chosen
from retouch.rewards.judge import JudgeConfig
from retouch.rewards.scorers.judged import JudgeEntry

DOCS = Path(__file__).resolve().parents[1] / "docs"
UNIONS = (typing.Union, types.UnionType)
OVERVIEW = "configuration.md"

GROUPS = {
    "model": ("Model families", ("model",)),
    "data": ("Data formats", ("data", "warmup_data")),
    "rollout": ("Rollout", ("rollout",)),
    "algorithm": ("Algorithms", ("algorithm",)),
    "rewards": ("Rewards", ("rewards", "judge", "reward_client")),
    "training": ("Optimizer, training, evaluation, logging", ()),
}
"""Page -> its title and the sections of a run file on it; the last page takes the sections that no other page has."""


@cache
def descriptions(section: type[BaseModel]) -> dict[str, str]:
    """Field -> the docstring below it, in the section or a base of it. The package does not read these: pydantic would
    parse the source of every section whenever a run file is read."""
    found: dict[str, str] = {}
    for kind in reversed(section.__mro__):
        if kind is not Section and issubclass(kind, Section):
            (definition,) = ast.parse(textwrap.dedent(inspect.getsource(kind))).body
            assert isinstance(definition, ast.ClassDef)
            for field, below in pairwise(definition.body):
                if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name):
                    found.pop(field.target.id, None)
                    if isinstance(below, ast.Expr) and isinstance(below.value, ast.Constant):
                        found[field.target.id] = inspect.cleandoc(str(below.value.value))
    return found


NOTE = "<!-- Written by tools/config_reference.py from the schema. Change the docstrings there, then run the tool. -->"

HEAD = f"""# Configuration

{NOTE}

A run is one YAML file. These pages list every key; this page has the top level.

- **Overrides.** A dotted name on the command line replaces any key: `retouch train RUN.yaml rollout.group_size=4`.
  `rewards.NAME={{…}}` adds a reward, and `rewards={{…}}` replaces all; `rewards.NAME.KEY=` changes a reward of the run,
  and is an error for another. An override that names another kind (`algorithm.name=ppo` over a file of GRPO) replaces
  the section, as inheritance does, and drops the keys of other sections that the new algorithm refuses. The keys of
  the same command stay, and those that mean the same in every kind: `sft_steps`, `region`,
  `region_dilation`, `seam_weight` and `caption_dropout` of an algorithm, `dtype` of a model, `role` of a reward, and
  the options that all data formats share. A warning lists the dropped keys.
- **Variables.** `${{VAR}}` and `${{VAR:-default}}` are replaced by environment variables, `${{THIS_DIR}}` by the folder
  of the file that it stands in. `$${{` stands for `${{`. Other relative paths start from the working directory.
- **Validation.** `retouch check RUN.yaml` validates a file without loading models and prints its size and cost. An
  unknown key is an error that names the nearest valid key; a local path that does not exist is a warning. Examples are
  read by `retouch doctor RUN.yaml`.
- **Readers.** "Read …" at the end of a meaning names what reads the key. Where nothing reads a key that is given,
  `check` rejects the file, or warns.
- **Published files.** `example:NAME` stands for a run file that comes with the package, in every command and after
  `extends:`; `retouch init --example list` prints the names, and `--example NAME` writes the file.
- **Inheritance.** `extends: OTHER.yaml`, relative to the file that contains it, adds the keys of the other file that
  this file does not set. Sections are merged key by key; lists are replaced. A section that names another kind
  (`model.family`, `model.train.kind`, `data.format`, `algorithm.name`, `scorer`) replaces the inherited section
  completely. Other inherited sections stay, and `check` rejects values that do not fit the new kind. With another
  `model.family`, set `rollout.guidance_scale` again: `check` rejects the inherited value.
- **One size of a step.** `optimizer.global_batch_size` and `optimizer.gradient_accumulation` (`vlm_grpo`:
  `algorithm.trl.gradient_accumulation_steps`) replace each other: one in a file or an override removes the inherited
  other one. Both in one file are an error.
- **Removal.** `null` removes an inherited reward (`rewards: {{ocr: null}}`) or an optional section (`ema: null`).
- **Scalars** follow YAML 1.2: `1e-4` is a number, and `no` in `mixed_precision: no` is text, not a boolean.

| page | sections |
|---|---|
"""

WORDS = {int: "integer", float: "number", str: "text", bool: "true or false", type(None): "null"}

SIGNS = {"ge": "≥", "gt": ">", "le": "≤", "lt": "<"}

SEVERAL = "Keys of more than one"

Kinds = tuple[type[BaseModel], ...]
"""The classes that one section can be."""


def pages() -> dict[str, str]:
    """Path below docs/ -> text of every page of the reference."""
    return _Reference().pages()


class _Reference:
    """The pages; each section that occurs several times is shown where it occurs first."""

    def __init__(self) -> None:
        self.where: dict[Kinds, tuple[str, str]] = {}
        """Kinds -> page and dotted key of the heading that shows them."""

    def pages(self) -> dict[str, str]:
        fields = RunConfig.model_fields
        named = {section for _, sections in GROUPS.values() for section in sections}
        rest = tuple(name for name, info in fields.items() if _kinds(info) and name not in named)
        written: dict[str, str] = {}
        overview = HEAD
        for stem, (title, sections) in GROUPS.items():
            page, sections = f"configuration/{stem}.md", sections or rest
            overview += f"| [{title}]({page}) | {', '.join(f'`{section}`' for section in sections)} |\n"
            for section in sections:
                self.where.setdefault(_kinds(fields[section]), (page, _dotted("", section, fields[section])))
            body = "".join(text for section in sections for text in self._section(page, section, fields[section]))
            written[page] = f"# Configuration: {title[0].lower()}{title[1:]}\n\n{NOTE}\n{body}"
        rows = [self._row(OVERVIEW, "", RunConfig, name, info) for name, info in fields.items()]
        return {OVERVIEW: f"{overview}\n## The run\n\n{_table(rows)}", **written}

    def _section(self, page: str, name: str, info: FieldInfo, key: str = "") -> Iterator[str]:
        """A heading with the keys of one section, then the sections in it that are not shown elsewhere."""
        dotted, kinds = _dotted(key, name, info), _kinds(info)
        yield f"\n## `{dotted}`\n\n"
        if self.where[kinds] != (page, dotted):
            yield f"The keys of {self._link(page, kinds)}.\n"
            return
        tag = _tag(kinds)
        rows = {kind: self._rows(page, dotted, kind, tag if len(kinds) > 1 else None) for kind in kinds}
        of = {
            row: [kind for kind in kinds if row in rows[kind].values()] for kind in kinds for row in rows[kind].values()
        }
        shared = [row for row, having in of.items() if len(having) == len(kinds)] if len(kinds) > 2 else []
        several = _named_apart({row: having for row, having in of.items() if 1 < len(having) < len(kinds)}, tag)
        if shared:
            yield f"These keys are the same with every `{tag}`:\n\n{_table(shared)}"
        if several:
            yield f"\n### {SEVERAL} `{tag}`\n\nEach of them lists those that it has.\n\n{_table([*several.values()])}"
        for kind, named in rows.items():
            own = [row for row in named.values() if row not in several and row not in shared]
            if len(kinds) > 1:
                yield f"\n### `{tag}: {_tag_value(kind, tag or '')}`\n\n"
            judged = (
                f"It has the keys of {self._link(page, (JudgeConfig,))}.\n\n" if issubclass(kind, JudgeEntry) else ""
            )
            yield _prose(kind) + judged + _note(kinds) + (_table(own) if own else "")
            also = ", ".join(f"`{name}`" for name, row in named.items() if row in several)
            if also:
                anchor = re.sub(r"[^a-z0-9_-]", "", f"{SEVERAL} {tag}".lower().replace(" ", "-"))
                yield f"{chr(10) if own else ''}[{SEVERAL}](#{anchor}): {also}.\n"
            elif not own and not judged:
                yield "No other keys.\n"
        nested = {_kinds(i): (n, i) for kind in kinds for n, i in kind.model_fields.items() if _kinds(i)}
        for inner, (inner_name, inner_info) in nested.items():
            if self.where[inner] == (page, _dotted(dotted, inner_name, inner_info)):
                yield from self._section(page, inner_name, inner_info, dotted)

    def _rows(self, page: str, key: str, kind: type[BaseModel], tag: str | None) -> dict[str, str]:
        """Rows of the keys of a section; those that a reward has in common with section `judge` stand there."""
        left_out = {*JudgeConfig.model_fields, "from_judge"} if issubclass(kind, JudgeEntry) else set[str]()
        fields = {name: info for name, info in kind.model_fields.items() if name not in {tag, *left_out}}
        return {name: self._row(page, key, kind, name, info) for name, info in fields.items()}

    def _row(self, page: str, key: str, kind: type[BaseModel], name: str, info: FieldInfo) -> str:
        kinds = _kinds(info)
        takes, default = "" if kinds else _type(info), _default(info)
        if kinds:
            self.where.setdefault(kinds, (page, _dotted(key, name, info)))
            plain = _plain(info)
            link = self._link(page, kinds, "sections by name" if _is_table(info) else "section")
            takes = ", or ".join([*map(_words, plain), link])
            if default not in ("required", "null") and not plain:
                tag = _tag(kinds) if len(kinds) > 1 else None
                chosen = f"`{tag}: {getattr(info.default, tag)}`" if tag and not _is_table(info) else "its defaults"
                default = "none" if _is_table(info) else chosen
        meaning = f"{descriptions(kind).get(name, '')} {_readers(kind, name)}".strip()
        return f"| `{name}` | {takes} | {default} | {_cell(meaning)} |"

    def _link(self, page: str, kinds: Kinds, text: str = "") -> str:
        """Markdown link from a page to the heading that shows these kinds."""
        target, dotted = self.where[kinds]
        anchor = f"#{re.sub(r'[^a-z0-9_-]', '', dotted.lower())}"
        folders = ("configuration/" in page, "configuration/" in target)
        path = "" if target == page else target.removeprefix("configuration/") if all(folders) else target
        return f"[{text or f'`{dotted}`'}]({path}{anchor})"


def _named_apart(several: dict[str, list[type[BaseModel]]], tag: str | None) -> dict[str, str]:
    """Row of several kinds -> the row as it is printed: with their names, if rows of other kinds have its key."""
    keys = Counter(row.split(" | ", 1)[0] for row in several)
    named = {row: ", ".join(f"`{_tag_value(kind, tag or '')}`" for kind in having) for row, having in several.items()}
    return {
        row: f"{row.removesuffix(' |')} Option of {named[row]}. |" if keys[row.split(" | ", 1)[0]] > 1 else row
        for row in several
    }


def _readers(kind: type[BaseModel], name: str) -> str:
    """A sentence about what reads an option, if not every run does; that of its whole section stands above it."""
    parts = list[str]()
    for mark in reads_of(kind).get(name, ()):
        if not isinstance(mark, ReadBy):
            parts.append(mark.where)
        elif mark.what != getattr(kind, "READ_BY", None):
            parts.append(f"by {_algorithms(mark.what)}")
    return f"Read {', '.join(parts)}." if parts else ""


def _algorithms(what: str) -> str:
    """The algorithms that read options for `what`."""
    reads = {name: what in kind.READS for name, kind in ALGORITHMS.available().items()}
    others = [f"`{name}`" for name, has in reads.items() if not has]
    if len(others) == 1:
        return f"every algorithm except {others[0]}"
    return ", ".join(f"`{name}`" for name, has in reads.items() if has)


def _note(kinds: Kinds) -> str:
    """What reads the options of a section that declare nothing of their own."""
    first = kinds[0]
    what, exempt = getattr(first, "READ_BY", None), getattr(first, "READ_BY_ALL", ())
    if len(kinds) > 1 or what is None:
        return ""
    names = ", ".join(f"`{name}`" for name in first.model_fields if name in exempt)
    return f"Read by {_algorithms(what)}, which reads {names} alone.\n\n"


def _dotted(key: str, name: str, info: FieldInfo) -> str:
    return ".".join(part for part in (key, name, "NAME" if _is_table(info) else "") if part)


def _kinds(info: FieldInfo) -> Kinds:
    """The section classes that a key can hold, without those of plug-ins."""
    return tuple(kind for kind in models_of(_entry(info)) if is_own(kind.__module__))


def _plain(info: FieldInfo) -> list[Any]:
    """The types of a key in place of a section."""
    parts = typing.get_args(info.annotation) if typing.get_origin(info.annotation) in UNIONS else ()
    return [part for part in parts if part is not types.NoneType and not models_of(part)]


def _table(rows: Sequence[str]) -> str:
    return "| key | takes | default | meaning |\n|---|---|---|---|\n" + "\n".join(rows) + "\n"


def _tag(parts: Kinds) -> str | None:
    """The key whose value names the kind in a union, also in a union of one."""
    for name in ("kind", "format", "name", "scorer", "family"):
        if all(_tag_value(part, name) for part in parts):
            return name
    return None


def _tag_value(part: type[BaseModel], name: str) -> str | None:
    info = part.model_fields.get(name)
    if info is None or typing.get_origin(info.annotation) is not typing.Literal:
        return None
    values = typing.get_args(info.annotation)
    return str(values[0]) if len(values) == 1 else None


def _prose(section: type[BaseModel]) -> str:
    own = section.__doc__ if section.__doc__ != Section.__doc__ and section.__doc__ else ""
    return f"{' '.join(own.split())}\n\n" if own else ""


def _entry(info: FieldInfo) -> Any:
    """The type of the values of a table of named entries; the annotation of any other key, with its registry."""
    if _is_table(info):
        return typing.get_args(info.annotation)[1]
    chosen = [extra for extra in info.metadata if isinstance(extra, Chosen)]
    return typing.Annotated[info.annotation, chosen[0]] if chosen else info.annotation


def _is_table(info: FieldInfo) -> bool:
    return typing.get_origin(info.annotation) is dict


def _type(info: FieldInfo) -> str:
    return _words(info.annotation, info.metadata)


def _words(annotation: Any, metadata: list[Any] | None = None) -> str:
    """The YAML name of a type, with its bounds."""
    origin, arguments = typing.get_origin(annotation), typing.get_args(annotation)
    if origin is typing.Annotated:
        return _words(arguments[0], list(annotation.__metadata__))
    if origin is typing.Literal:
        return " or ".join(f"`{value}`" for value in arguments)
    if origin in UNIONS:
        return ", or ".join(_words(argument) for argument in arguments)
    if origin is tuple:
        return f"[{', '.join(_words(argument) for argument in arguments)}]"
    if origin is list:
        return f"list of {_words(arguments[0])}"
    if origin is dict:
        return "options by name"
    return f"{WORDS[annotation]}{_bounds(metadata or [])}"


def _bounds(metadata: list[Any]) -> str:
    found: list[str] = []
    for item in metadata:
        # pydantic wraps several bounds of one Field in a FieldInfo of its own
        for bound in item.metadata if isinstance(item, FieldInfo) else [item]:
            if isinstance(bound, annotated_types.MinLen):
                found.append("(not empty)")
            found += [f"{sign} {getattr(bound, name):.10g}" for name, sign in SIGNS.items() if hasattr(bound, name)]
    if len(found) == 2 and (found[0][0], found[1][0]) == ("≥", "≤"):
        return f" {found[0][2:]} to {found[1][2:]}"
    return f" {' and '.join(found)}" if found else ""


def _default(info: FieldInfo) -> str:
    if info.default_factory_takes_validated_data:
        return "by other keys"
    default = info.get_default(call_default_factory=True) if not info.is_required() else PydanticUndefined
    if default is PydanticUndefined:
        return "required"
    if default is None:
        return "null"
    return f"`{json.dumps(default) if isinstance(default, bool | list | tuple) else default}`"


def _cell(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|")


if __name__ == "__main__":
    for name, text in pages().items():
        if "--print" in sys.argv[1:]:
            print(text)
        else:
            (DOCS / name).parent.mkdir(exist_ok=True)
            (DOCS / name).write_text(text, encoding="utf-8")
            print(DOCS / name)
