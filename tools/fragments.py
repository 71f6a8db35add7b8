"""Pieces of syntax trees, found in a package by the name of their function and replaced.

A fragment is Python text: one expression, or statements that follow each other. White space, line breaks and comments
do not count, since trees are compared. If the text is nowhere in its function, names may differ, one for one
(`centred = r - mean` is also `x = y - z`); the names of Python itself, numbers and strings may not. So a variable or a
file that gets another name costs nothing.
"""

from __future__ import annotations

import ast
import builtins
import copy
import textwrap
from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

Nodes = list[Any]
"""One expression, or the statements of a fragment."""

NAMES: dict[type[ast.AST], tuple[str, str]] = {
    ast.Name: ("id", "name"),
    ast.arg: ("arg", "name"),
    ast.ExceptHandler: ("name", "name"),
    ast.FunctionDef: ("name", "name"),
    ast.AsyncFunctionDef: ("name", "name"),
    ast.ClassDef: ("name", "name"),
    ast.Attribute: ("attr", "member"),
    ast.keyword: ("arg", "member"),
}
"""Kind of node -> the field that holds an identifier, and which of two sets of names it belongs to."""

SCOPES = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)


@dataclass
class Names:
    """Which name of a fragment stands for which name of the code. Without `free`, each stands for itself."""

    free: bool
    to: dict[tuple[str, str], str] = field(default_factory=dict)

    def agree(self, kind: str, mine: str | None, theirs: str | None) -> bool:
        if mine is None or theirs is None or not self.free or hasattr(builtins, mine) or hasattr(builtins, theirs):
            return mine == theirs
        if (kind, mine) in self.to:
            return self.to[kind, mine] == theirs
        taken = any(key[0] == kind and value == theirs for key, value in self.to.items())
        self.to[kind, mine] = theirs
        return not taken

    def put(self, node: ast.AST) -> ast.AST:
        """The same node with the names of the code."""
        for child in ast.walk(node):
            if type(child) in NAMES:
                attribute, kind = NAMES[type(child)]
                name = getattr(child, attribute)
                setattr(child, attribute, self.to.get((kind, name), name))
        return node


def parsed(*texts: str) -> list[Nodes]:
    """The nodes of fragments: if each is one expression, they stand for themselves wherever one is; else all are
    statements."""
    bodies: list[Nodes] = [list(ast.parse(textwrap.dedent(text).strip("\n")).body) for text in texts]
    if all(len(body) == 1 and isinstance(body[0], ast.Expr) for body in bodies):
        return [[body[0].value] for body in bodies]
    return bodies


def same(mine: Any, theirs: Any, names: Names) -> bool:
    """Whether two nodes, or lists or constants in them, are alike up to `names`."""
    if isinstance(mine, list):
        return len(mine) == len(theirs) and all(same(a, b, names) for a, b in zip(mine, theirs, strict=True))
    if type(mine) is not type(theirs):
        return False
    if not isinstance(mine, ast.AST):
        return mine == theirs
    identifier, kind = NAMES.get(type(mine), ("", ""))
    for attribute in mine._fields:
        if attribute in ("ctx", "type_comment", "kind"):
            continue
        one, other = getattr(mine, attribute, None), getattr(theirs, attribute, None)
        if not (names.agree(kind, one, other) if attribute == identifier else same(one, other, names)):
            return False
    return True


@dataclass
class Place:
    """Where a fragment stands: in a list, or in a field, of `parent`."""

    parent: ast.AST
    attribute: str
    start: int | None
    count: int
    names: Names

    def replace(self, new: Nodes) -> None:
        new = [self.names.put(copy.deepcopy(node)) for node in new]
        value = getattr(self.parent, self.attribute)
        if self.start is None:
            setattr(self.parent, self.attribute, new[0])
            return
        value[self.start : self.start + self.count] = new
        if not value and self.attribute == "body":
            value.append(ast.Pass())


Slot = tuple[ast.AST, str, int | None, Any]
"""A node's parent, the field of it, the index in that field if it is a list, and the node."""


Slots = dict[type, list[Slot]]
"""Nodes by their type."""


def scopes(tree: ast.AST) -> dict[str, list[Slots]]:
    """The nodes of every function and class by its qualified name; those of the file have no name."""
    found: dict[str, list[Slots]] = defaultdict(list)
    found[""].append(defaultdict(list))
    pending = [(tree, "", [found[""][0]])]
    while pending:
        parent, prefix, around = pending.pop()
        for attribute in parent._fields:
            value = getattr(parent, attribute, None)
            nodes = enumerate(value) if isinstance(value, list) else [(None, value)]
            for index, node in nodes:
                if not isinstance(node, ast.AST):
                    continue
                for slots in around:
                    slots[type(node)].append((parent, attribute, index, node))
                if isinstance(node, SCOPES):
                    name = prefix + node.name
                    found[name].append(defaultdict(list))
                    pending.append((node, f"{name}.", [*around, found[name][-1]]))
                else:
                    pending.append((node, prefix, around))
    return found


def places(among: Slots, fragment: Nodes, free: bool) -> Iterator[Place]:
    """Every place of the fragment."""
    for parent, attribute, start, node in among.get(type(fragment[0]), ()):
        nodes = [node] if start is None else getattr(parent, attribute)[start : start + len(fragment)]
        names = Names(free)
        if same(fragment, nodes, names):
            yield Place(parent, attribute, start, len(fragment), names)


@dataclass(frozen=True)
class Tree:
    """A file of a package."""

    path: Path

    @cached_property
    def module(self) -> ast.Module:
        return ast.parse(self.path.read_text(encoding="utf-8"))

    @cached_property
    def scopes(self) -> dict[str, list[Slots]]:
        return scopes(self.module)

    def places(self, name: str, fragment: Nodes, free: bool) -> list[Place]:
        return [place for among in self.scopes.get(name, ()) for place in places(among, fragment, free)]


def locate(trees: Iterable[Tree], name: str, fragment: Nodes) -> list[tuple[Tree, Place]]:
    """The places of a fragment in the functions of that name ("" for the whole package); as it is, else with other
    names."""
    trees = list(trees)
    for free in (False, True):
        if found := [(tree, place) for tree in trees for place in tree.places(name, fragment, free)]:
            return found
    return []
