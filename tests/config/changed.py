"""Runs with one option changed, past the rules that reject it."""

from __future__ import annotations

import types
import typing
from collections.abc import Iterator
from typing import Any

from pydantic import BaseModel

from retouch.config import RunConfig
from retouch.config.base import Section, sections
from retouch.config.reads import is_given, reads_of


def declared(run: RunConfig) -> Iterator[tuple[str, Section, str]]:
    """Dotted key, section and name of every option of a run that declares what reads it."""
    for key, section in sections(run):
        for name in reads_of(type(section)):
            yield f"{key}.{name}".lstrip("."), section, name


def others(section: Section, name: str) -> list[Any]:
    """Values of an option that are not its default, each of another kind."""
    found = list[Any]()
    for value in _values(type(section).model_fields[name].annotation):
        if is_given(section.model_copy(update={name: value}), name):
            found.append(value)
    return found


def _values(kind: Any) -> Iterator[Any]:
    origin, arguments = typing.get_origin(kind), typing.get_args(kind)
    if origin is typing.Annotated:
        yield from _values(arguments[0])
    elif origin is typing.Literal:
        yield from arguments
    elif origin in (typing.Union, types.UnionType):
        for argument in arguments:
            yield from _values(argument)
    elif isinstance(kind, type) and issubclass(kind, BaseModel):
        if not any(info.is_required() for info in kind.model_fields.values()):
            yield kind()
    else:
        plain: dict[Any, tuple[Any, ...]] = {bool: (True, False), int: (2, 3), float: (0.5,), str: ("cps",)}
        yield from plain.get(kind, ())


def with_value(value: Any, key: str, option: Any) -> Any:
    """A run, or a section of it, with another value of one option."""
    name, _, rest = key.partition(".")
    if not rest and isinstance(value, BaseModel):
        return value.model_copy(update={name: option})
    if isinstance(value, BaseModel):
        return value.model_copy(update={name: with_value(getattr(value, name), rest, option)})
    return {**value, name: with_value(value[name], rest, option)}
