"""Every option of a run file, and where the package reads options."""

from __future__ import annotations

import ast
import types
import typing
from collections.abc import Callable, Iterator, Set
from dataclasses import dataclass
from typing import Any

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


def guarded_reads(source: str, options: Set[str], skipped: Set[str] = frozenset()) -> dict[str, frozenset[str]]:
    """Option -> the other options without whose test none of its reads is reached, of each that is read.

    A read is guarded by the options in the test of an `if` or a conditional expression around it, in the operands
    before it of `and` and `or`, in an `if` before it that leaves the block, and around every call of its function.

    Args:
        options: names of attributes that are options of one section.
        skipped: functions that do not count.
    """
    reads, calls = list[tuple[str, str, frozenset[str]]](), list[tuple[str, str, frozenset[str]]]()

    def names(node: ast.AST) -> frozenset[str]:
        return frozenset(n.attr for n in ast.walk(node) if isinstance(n, ast.Attribute) and n.attr in options)

    def visit(node: Any, function: str, guards: frozenset[str]) -> None:
        if isinstance(node, list):
            for one in node:
                visit(one, function, guards)
                if isinstance(one, ast.If) and isinstance(one.body[-1], ast.Return | ast.Raise | ast.Continue):
                    guards |= names(one.test)
        elif isinstance(node, ast.FunctionDef):
            if node.name not in skipped:
                visit(node.body, node.name, frozenset())
        elif isinstance(node, ast.If | ast.IfExp):
            visit(node.test, function, guards)
            for branch in (node.body, node.orelse):
                visit(branch, function, guards | names(node.test))
        elif isinstance(node, ast.BoolOp):
            for operand in node.values:
                visit(operand, function, guards)
                guards |= names(operand)
        elif isinstance(node, ast.AST):
            if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Load) and node.attr in options:
                reads.append((function, node.attr, guards))
            if isinstance(node, ast.Call):
                called = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
                calls.append((called, function, guards))
            for _, value in ast.iter_fields(node):
                visit(value, function, guards)

    def around(function: str, inner: tuple[str, ...] = ()) -> frozenset[str]:
        sites = [(caller, guards) for called, caller, guards in calls if called == function]
        if function in inner or not sites:
            return frozenset()
        return frozenset.intersection(*(guards | around(caller, (*inner, function)) for caller, guards in sites))

    visit(ast.parse(source), "", frozenset())
    found = dict[str, frozenset[str]]()
    for function, option, guards in reads:
        beside = (guards | around(function)) - {option}
        found[option] = found[option] & beside if option in found else beside
    return found
