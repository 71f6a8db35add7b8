"""Knowledge graphs of MMMG (arXiv 2506.10963) and the distance of an image from one: pure functions.

An item lists *elements* and *dependencies* between them, written `Relation(a, b)`. A judge answers for each whether the
image shows it; elements and dependencies with a yes make a second graph, and the image's fidelity is
1 - normalised graph edit distance (GED) of the two. Legend: V elements, E directed edges between two of them.

Departures from the published evaluation: the ends of a dependency are looked up among all elements once, not among
those with a yes (a no to "cell wall" cannot move its edges to "cell"); a name with a comma is read as a whole if it is
one of the elements; a graph without elements is an error instead of a score.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

from retouch.files import plain_json

_REVERSED = "requires"
"""requires(a, b): b comes first."""

_MUTUAL = "defines"
"""defines(a, b): an edge each way."""


@dataclass(frozen=True)
class Dependency:
    """One dependency as written, and its directed edges as positions of elements."""

    text: str
    edges: tuple[tuple[int, int], ...]


@dataclass(frozen=True)
class KnowledgeGraph:
    """Elements and dependencies that an image must show.

    Attributes:
        elements: V names as written; no two differ by case or white space alone.
        dependencies: those whose two ends are elements.
        skipped: elements and dependencies that could not be read, as written.
    """

    elements: tuple[str, ...]
    dependencies: tuple[Dependency, ...]
    skipped: tuple[str, ...] = ()

    @property
    def edges(self) -> frozenset[tuple[int, int]]:
        """All E of them; two dependencies between the same ends are one edge."""
        return frozenset(edge for dependency in self.dependencies for edge in dependency.edges)


def read_graph(value: object) -> KnowledgeGraph:
    """An object with lists `elements` and `dependencies` (or objects, of which the keys count), or its JSON text.

    Entries that cannot be read are skipped and kept in `skipped`; the benchmark has some.

    Raises:
        ValueError: no such object, no element in it, or more than `MOST_ENTRIES`.
    """
    given = _object(value)
    count = sum(len(_entries(given, key)) for key in ("elements", "dependencies"))
    if count > MOST_ENTRIES:
        raise ValueError(f"the knowledge graph has {count} elements and dependencies; at most {MOST_ENTRIES} are read")
    # The first writing of an element stands for all that have its key, and dependencies are matched with the keys: the
    # benchmark does not always write a name in one way.
    elements: dict[str, str] = {}
    skipped: list[str] = []
    for entry in _entries(given, "elements"):
        name = _name(entry)
        if name is None:
            skipped.append(repr(entry))
        else:
            elements.setdefault(_key(name), name)
    if not elements:
        raise ValueError("the knowledge graph has no elements")
    keys = list(elements)
    dependencies: list[Dependency] = []
    for entry in _entries(given, "dependencies"):
        dependency = _dependency(entry, keys) if isinstance(entry, str) else None
        if dependency is None:
            skipped.append(entry if isinstance(entry, str) else repr(entry))
        elif dependency.text not in (known.text for known in dependencies):
            dependencies.append(dependency)
    return KnowledgeGraph(tuple(elements.values()), tuple(dependencies), tuple(skipped))


_ANSWER = re.compile(r"[:：]\s*\[?(?P<answer>yes|no)\b(?!\]?\s*(?:/|\||or\b))", re.IGNORECASE)
"""A judge may repeat the form "name: yes/no" in place of an answer."""
_NUMBER = re.compile(r"\d+\.\s*")
_BULLET = re.compile(r"^\s*[*•-]\s+")

MOST_ENTRIES = 1000
"""Elements and dependencies of a graph; more are an error, because looking up their ends would stall a run."""

_MOST_COMMAS = 50
"""Commas in a dependency that can be read."""


def read_checklist(text: str, names: Sequence[str]) -> list[bool]:
    """Whether the answer to each name is yes, from lines `name: yes` or `name: no`; of several for a name, the last.

    Raises:
        ValueError: names without a line. MMMG's own code takes them for a no.
    """
    found: dict[str, bool] = {}
    # A name may have marks that a line has around it, like "-OH" and "[Fe]": it is known without them, too, unless
    # that is another name.
    known = {_spellings(name)[-1]: _key(name) for name in names} | {_key(name): _key(name) for name in names}
    for line in text.replace("**", "").splitlines():
        answers = [(_spellings(line[: m.start()]), m["answer"].casefold() == "yes") for m in _ANSWER.finditer(line)]
        named = [(next(known[key] for key in keys if key in known), yes) for keys, yes in answers if {*keys} & {*known}]
        found |= dict(named[-1:])  # the longest: "Step 1: no air: yes" answers "Step 1: no air", and not "Step 1"
    missing = [name for name in names if _key(name) not in found]
    if missing:
        raise ValueError(
            f"no line answers yes or no for {len(missing)} of {len(names)} names, {missing[0]!r} among them"
        )
    return [found[_key(name)] for name in names]


def _spellings(text: str) -> tuple[str, ...]:
    """Keys of the part of a line before its answer: all of it, without a bullet, and without any mark around it."""
    return _key(text), _key(_BULLET.sub("", text, count=1)), _key(_listed_name(text).strip("`[] "))


def _listed_name(text: str) -> str:
    """The name in the part of a line before its answer: `* name`, `1. name`, with whatever Markdown around it."""
    start, end = 0, len(text)
    while start < end and (text[start].isspace() or text[start] in "*•-"):
        start += 1
    while end > start and (text[end - 1].isspace() or text[end - 1] in "`*"):
        end -= 1
    name = text[start:end]
    return _NUMBER.sub("", name, count=1) if _NUMBER.match(name) and not _NUMBER.fullmatch(name) else name


def shown(
    graph: KnowledgeGraph, elements: Sequence[bool], dependencies: Sequence[bool]
) -> tuple[list[int], list[tuple[int, int]]]:
    """Nodes and edges that the image shows: elements with a yes, and the edges of dependencies with a yes whose ends
    both are among them.

    Raises:
        ValueError: not one answer for each.
    """
    if (len(elements), len(dependencies)) != (len(graph.elements), len(graph.dependencies)):
        raise ValueError(
            f"{len(elements)} and {len(dependencies)} answers for {len(graph.elements)} elements and "
            f"{len(graph.dependencies)} dependencies"
        )
    nodes = {i for i, yes in enumerate(elements) if yes}
    edges = {
        edge
        for dependency, yes in zip(graph.dependencies, dependencies, strict=True)
        if yes
        for edge in dependency.edges
        if nodes.issuperset(edge)
    }
    return sorted(nodes), sorted(edges)


def closed_ged(graph: KnowledgeGraph, elements: Sequence[bool], dependencies: Sequence[bool]) -> float:
    """(missing nodes + missing edges) / (|V| + |E| of both graphs), in [0, 1].

    The shown graph is a subgraph, and the shortest edit from a subgraph to the graph adds the missing parts: this is
    the exact GED in linear time; a heuristic gives an upper bound.
    """
    nodes, edges = shown(graph, elements, dependencies)
    whole, part = len(graph.elements) + len(graph.edges), len(nodes) + len(edges)
    return (whole - part) / (whole + part)


def heuristic_ged(graph: KnowledgeGraph, elements: Sequence[bool], dependencies: Sequence[bool]) -> float:
    """The first value of networkx's `optimize_graph_edit_distance` over |V| + |E| of both graphs, as published; needs
    networkx and scipy. Names are ignored. In [0, 1]; 0 if everything is shown."""
    import networkx as nx

    nodes, edges = shown(graph, elements, dependencies)
    if len(nodes) == len(graph.elements) and len(edges) == len(graph.edges):
        return 0.0
    whole, part = nx.DiGraph(), nx.DiGraph()
    whole.add_nodes_from(range(len(graph.elements)))
    whole.add_edges_from(sorted(graph.edges))
    part.add_nodes_from(nodes)
    part.add_edges_from(edges)
    first = float(next(nx.optimize_graph_edit_distance(whole, part)))
    size = len(graph.elements) + len(graph.edges) + len(nodes) + len(edges)
    return min(1.0, first / size)


def readability(regions: float) -> float:
    """MMMG's R of the number of regions that a segmenter finds: 1 up to 70, down to 0 at 160."""
    return 1.0 if regions <= 70 else max((160 - regions) / 90, 0.0)


def _object(value: object) -> Mapping[str, Any]:
    if isinstance(value, str):
        try:
            value = plain_json.loads(value)
        except ValueError as error:
            raise ValueError(f"the knowledge graph is not JSON: {error}") from None
    if not isinstance(value, Mapping):
        raise ValueError(f"the knowledge graph must be an object with elements and dependencies; given {value!r:.80}")
    return cast("Mapping[str, Any]", value)


def _entries(given: Mapping[str, Any], key: str) -> list[object]:
    value = given.get(key)
    return list(cast("Sequence[object]", value)) if isinstance(value, list | tuple | Mapping) else []


def _name(entry: object) -> str | None:
    """A name as text; numbers are names, too."""
    if isinstance(entry, int | float) and not isinstance(entry, bool):
        return str(entry)
    return entry.strip() if isinstance(entry, str) and _key(entry) else None


def _key(name: str) -> str:
    """Normal form of a name: equal for spellings that mean the same name."""
    return " ".join(name.split()).strip("`'\"").strip().casefold()


def _dependency(text: str, keys: Sequence[str]) -> Dependency | None:
    """`Relation(a, b)` with both ends among the elements; None for anything else."""
    relation, bracket, inside = text.strip().partition("(")
    if not bracket:
        return None
    inside = inside.removesuffix(")")
    pieces = inside.split(",")
    if len(pieces) > _MOST_COMMAS:
        return None
    splits = [(",".join(pieces[:i]), ",".join(pieces[i:])) for i in range(1, len(pieces))]
    for lookup in (_exact, _contained):
        for pair in splits:
            first, second = (lookup(_end(end), keys) for end in pair)
            if first is not None and second is not None:
                return Dependency(text, _edges(relation, first, second))
    return None


def _end(text: str) -> str:
    """An end of a dependency; `change(x)` means x."""
    key = _key(text)
    changed = re.fullmatch(r"change\((.*?)\)?", key)
    return _key(changed.group(1)) if changed else key


def _exact(end: str, keys: Sequence[str]) -> int | None:
    return keys.index(end) if end in keys else None


def _contained(end: str, keys: Sequence[str]) -> int | None:
    """The one element that contains the words, or is contained in them if they are several; the exact one first."""
    found = _exact(end, keys)
    if found is not None or not end:
        return found
    near = [i for i, key in enumerate(keys) if end in key or (" " in end and key in end)]
    return near[0] if len(near) == 1 else None


def _edges(relation: str, first: int, second: int) -> tuple[tuple[int, int], ...]:
    kind = relation.strip().casefold()
    if kind == _MUTUAL:
        return (first, second), (second, first)
    return ((second, first),) if kind == _REVERSED else ((first, second),)
