"""Write docs/configuration.md from the schema: every key of a run file, what it takes, its default, what it means.

python tools/config_reference.py            # write the page
python tools/config_reference.py --print    # print it
"""

from __future__ import annotations

import json
import sys
import types
import typing
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import annotated_types
from pydantic import BaseModel
from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined

from retouch.config.base import Section
from retouch.config.errors import models_of
from retouch.config.run import RunConfig

PAGE = Path(__file__).resolve().parents[1] / "docs" / "configuration.md"

HEAD = """# Configuration

<!-- Written by tools/config_reference.py from the schema. Change the docstrings there, then run the tool. -->

A run is one YAML file. Any key can be overridden on the command line by its dotted name
(`retouch train RUN.yaml rollout.group_size=4`); `${VAR}` and `${VAR:-default}` are filled in from the environment.
`retouch check RUN.yaml` validates a file without loading anything and prints what it amounts to. An unknown key is an
error that names the nearest one.

`extends: OTHER.yaml`, relative to the file that says it, takes what the other says and this one does not. Sections are
merged key by key, and lists are replaced. A section that names another kind (`model.family`, `model.train.kind`,
`data.format`, `algorithm.name`, `scorer`) starts afresh: nothing of the other's section stays. Other sections stay as
they are, and what does not fit the new kind is refused; of another `model.family`, so is a `rollout.guidance_scale`
that the file does not set anew. Null takes away a reward (`rewards: {ocr: null}`) or an optional section (`ema: null`).

Scalars are YAML 1.2: `1e-4` is a number and `no` is a word, so that `mixed_precision: no` means what it says.
"""

WORDS = {int: "integer", float: "number", str: "text", bool: "true or false", type(None): "null"}

SIGNS = {"ge": "≥", "gt": ">", "le": "≤", "lt": "<"}


def page() -> str:
    """The whole page."""
    return HEAD + "".join(_section("", "The run", RunConfig, {}))


def _section(key: str, title: str, section: type[BaseModel], shown: dict[type[BaseModel], str]) -> Iterator[str]:
    """A heading and a table for one class of the schema, then its sections.

    Args:
        shown: class -> title of where its table stands already; filled in on the way.
    """
    yield f"\n## {title}\n\n{_prose(section)}"
    if section in shown:
        yield f"The keys of {shown[section]}.\n"
        return
    shown[section] = title
    nested = {name: parts for name, info in section.model_fields.items() if (parts := models_of(_entry(info)))}
    rows = [_row(name, info, is_section=name in nested) for name, info in section.model_fields.items()]
    yield "| key | takes | default | meaning |\n|---|---|---|---|\n" + "\n".join(rows) + "\n"
    for name, parts in nested.items():
        dotted = f"{key}.{name}" if key else name
        if _is_table(section.model_fields[name]):
            dotted += ".NAME"
        tag = _tag(parts)
        for part in parts:
            kind = f" with `{tag}: {_tag_value(part, tag)}`" if tag else ""
            yield from _section(dotted, f"`{dotted}`{kind}", part, shown)


def _row(name: str, info: FieldInfo, *, is_section: bool) -> str:
    takes = ("sections by name" if _is_table(info) else "section") if is_section else _type(info)
    default = _default(info)
    if is_section and default not in ("required", "null"):
        parts = models_of(info.annotation)
        tag = _tag(parts) if len(parts) > 1 else None
        default = "none" if _is_table(info) else f"`{tag}: {getattr(info.default, tag)}`" if tag else "its defaults"
    return f"| `{name}` | {takes} | {default} | {_cell(info.description or '')} |"


def _tag(parts: list[type[BaseModel]]) -> str | None:
    """The key that tells the kinds of a union apart; also where there is only one kind yet."""
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
    """What a table of named entries holds; the type of anything else."""
    return typing.get_args(info.annotation)[1] if _is_table(info) else info.annotation


def _is_table(info: FieldInfo) -> bool:
    return typing.get_origin(info.annotation) is dict


def _type(info: FieldInfo) -> str:
    return _words(info.annotation, info.metadata)


def _words(annotation: Any, metadata: list[Any] | None = None) -> str:
    """A type as a reader of YAML thinks of it."""
    origin, arguments = typing.get_origin(annotation), typing.get_args(annotation)
    if origin is typing.Annotated:
        return _words(arguments[0], list(annotation.__metadata__))
    if origin is typing.Literal:
        return " or ".join(f"`{value}`" for value in arguments)
    if origin in (typing.Union, types.UnionType):
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
    if "--print" in sys.argv[1:]:
        print(page())
    else:
        PAGE.write_text(page(), encoding="utf-8")
        print(PAGE)
