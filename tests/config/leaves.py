"""Every option of a run file, and where the package reads options."""

from __future__ import annotations

import ast
import types
import typing
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from retouch.config.errors import field_annotation, models_of


@dataclass(frozen=True)
class Leaf:
    """One option: its dotted key ("*" stands for a name the user chooses), the class that has it, its name."""

    key: str
    section: type[BaseModel]
    name: str
    info: FieldInfo

    @property
    def owner(self) -> str:
        return f"{self.section.__name__}.{self.name}"


def leaves(model: type[BaseModel], prefix: str = "") -> Iterator[Leaf]:
    """Options that hold a value, some of them in place of a section, through sections, unions, optionals and tables."""
    for name, info in model.model_fields.items():
        key, annotation = f"{prefix}{name}", field_annotation(model, name)
        if typing.get_origin(annotation) is dict:
            key, annotation = f"{key}.*", typing.get_args(annotation)[1]
        sections = models_of(annotation)
        values = [part for part in typing.get_args(annotation) if part is not type(None) and not models_of(part)]
        in_place_of_one = typing.get_origin(annotation) in (typing.Union, types.UnionType) and values
        if not sections or in_place_of_one:
            yield Leaf(key, model, name, info)
        for section in sections:
            yield from leaves(section, f"{key}.")


def attribute_reads(source: str, is_a_rule: Callable[[str], bool] = lambda function: False) -> set[str]:
    """Names of the attributes that are read. Writes, strings, keywords and docstrings do not count.

    Args:
        is_a_rule: of a function's name, whether what it reads does not count.
    """
    found: set[str] = set()
    nodes: list[ast.AST] = [ast.parse(source)]
    while nodes:
        node = nodes.pop()
        if isinstance(node, ast.FunctionDef) and is_a_rule(node.name):
            continue
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Load):
            found.add(node.attr)
        nodes += ast.iter_child_nodes(node)
    return found
