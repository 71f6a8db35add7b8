"""Reading MMMG's knowledge graphs, and the two distances to them."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest

from retouch.rewards.scorers.knowledge_graph import (
    KnowledgeGraph,
    closed_ged,
    heuristic_ged,
    read_checklist,
    read_graph,
    readability,
    shown,
)

WATER = {
    "elements": ["Sun", "ocean water", "cloud", "rain"],
    "dependencies": [
        "Causes(Sun, ocean water)",
        "TemporalOrder(cloud, rain)",
        "Requires(rain, cloud)",
        "Defines(cloud, ocean water)",
    ],
}


def edges(*dependencies: object, elements: tuple[object, ...] = ("a", "b", "c")) -> set[tuple[str, str]]:
    graph = read_graph({"elements": list(elements), "dependencies": list(dependencies)})
    return {(graph.elements[i], graph.elements[j]) for i, j in graph.edges}


# --- reading ---


def test_an_object_and_its_json_text_are_one_graph() -> None:
    graph = read_graph(WATER)
    assert graph == read_graph(json.dumps(WATER))
    assert graph.elements == ("Sun", "ocean water", "cloud", "rain") and graph.skipped == ()
    assert graph.edges == {(0, 1), (2, 3), (2, 1), (1, 2)}  # two dependencies are the edge from cloud to rain


@pytest.mark.parametrize(
    ("dependency", "expected"),
    [
        ("Causes(a, b)", {("a", "b")}),
        ("requires(a, b)", {("b", "a")}),
        ("Defines(a, b)", {("a", "b"), ("b", "a")}),
        ("Causes(a,b)", {("a", "b")}),
        ("Causes( A ,  b ", {("a", "b")}),  # no closing bracket, another case
        ("Causes('a', `b`)", {("a", "b")}),
        ("Causes(change(a), b)", {("a", "b")}),
        ("Causes(a, change(b))", {("a", "b")}),
        ("Causes(a, a)", {("a", "a")}),
    ],
)
def test_what_a_dependency_means(dependency: str, expected: set[tuple[str, str]]) -> None:
    assert edges(dependency) == expected


def test_ends_that_are_not_quite_elements() -> None:
    elements = ("cell wall", "cell", "Smith, John", "nucleus (dark)")
    assert edges("Causes(cell, wall)", elements=elements) == {("cell", "cell wall")}  # the one with the word
    assert edges("Causes(the nucleus (dark), cell)", elements=elements) == {("nucleus (dark)", "cell")}
    assert edges("Causes(Smith, John, cell)", elements=elements) == {("Smith, John", "cell")}
    assert edges("Causes(l, Smith, John)", elements=elements) == set()  # two have an l
    assert edges("Causes(dog, cell)", elements=elements) == set()


MALFORMED: list[Any] = [
    "", "Causes", "Causes()", "Causes(,)", "Causes(a)", "Causes(a; b)", "(", ")", "a, b", "Causes(a, )", "Causes(, b)",
    "((((", "Causes(zebra, b)", "change(", None, 7, {"Causes": ["a", "b"]}, ["a", "b"],
]  # fmt: skip


def test_malformed_names_survive() -> None:
    """Alone and all together; what is skipped is told."""
    for one in MALFORMED:
        graph = read_graph({"elements": ["a", "b"], "dependencies": [one, "Causes(a, b)"]})
        assert graph.edges == {(0, 1)} and len(graph.skipped) == 1, one
    names: list[Any] = ["a", None, "", "  ", "A ", 3, 4.5, True, {"x": 1}, [], "b(c", "d)", "e, f", "[g]*", "\\h", "`"]
    graph = read_graph({"elements": names, "dependencies": [*MALFORMED, "Causes(b(c, d))", "Causes(e, f, [g]*)"]})
    assert graph.elements == ("a", "3", "4.5", "b(c", "d)", "e, f", "[g]*", "\\h")
    assert {(graph.elements[i], graph.elements[j]) for i, j in graph.edges} == {("b(c", "d)"), ("e, f", "[g]*")}
    assert len(graph.skipped) == 7 + len(MALFORMED)


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (None, "must be an object"), ("{", "is not JSON"), ([], "must be an object"), ("3", "must be an object"),
        ({}, "no elements"), ({"elements": "abc"}, "no elements"), ({"elements": [None, ""]}, "no elements"),
    ],
)  # fmt: skip
def test_no_graph_is_no_score(value: object, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        read_graph(value)


def test_the_keys_of_an_object_are_names() -> None:
    graph = read_graph({"elements": {"a": "a letter", "b": 1}, "dependencies": {"Causes(a, b)": "why"}})
    assert graph.elements == ("a", "b") and graph.edges == {(0, 1)}


# --- distances ---


def random_graph(seed: int, most: int = 12) -> tuple[KnowledgeGraph, list[bool], list[bool]]:
    """A graph of the benchmark's kind and answers about it."""
    draw = random.Random(seed)
    elements = [f"thing {i}x" for i in range(draw.randint(2, most))]
    relations = ["Causes", "Requires", "Defines", "Entails", "Contains", "TemporalOrder"]
    dependencies = [
        f"{draw.choice(relations)}({', '.join(draw.sample(elements, 2))})" for _ in range(draw.randint(0, 2 * most))
    ]
    graph = read_graph({"elements": elements, "dependencies": dependencies})
    share = draw.random()
    return graph, *([draw.random() < share for _ in names] for names in (graph.elements, graph.dependencies))  # type: ignore[return-value]


@pytest.mark.parametrize("distance", [closed_ged, heuristic_ged])
def test_all_yes_is_0_and_all_no_is_1(distance: Any) -> None:
    pytest.importorskip("scipy")
    for seed in range(20):
        graph, _, _ = random_graph(seed)
        e, d = len(graph.elements), len(graph.dependencies)
        assert distance(graph, [True] * e, [True] * d) == 0.0
        assert distance(graph, [False] * e, [False] * d) == distance(graph, [False] * e, [True] * d) == 1.0


def test_by_hand() -> None:
    """4 elements and 4 edges; without rain 3 and 3 are left: (1 + 1) / (8 + 6)."""
    graph = read_graph(WATER)
    assert closed_ged(graph, [True, True, True, False], [True] * 4) == pytest.approx(2 / 14)
    assert shown(graph, [True, True, True, False], [True] * 4) == ([0, 1, 2], [(0, 1), (1, 2), (2, 1)])
    assert closed_ged(graph, [True] * 4, [True, False, False, True]) == pytest.approx(1 / 15)
    with pytest.raises(ValueError, match="3 and 4 answers for 4 elements and 4 dependencies"):
        shown(graph, [True] * 3, [True] * 4)


def published(graph: KnowledgeGraph, elements: list[bool], dependencies: list[bool]) -> tuple[float, Any, Any]:
    """The published recipe from the texts themselves: two graphs of names, networkx's first value, their sizes."""
    nx = pytest.importorskip("networkx")

    def build(said: list[bool], related: list[bool]) -> Any:
        g = nx.DiGraph()
        g.add_nodes_from(name for name, yes in zip(graph.elements, said, strict=True) if yes)
        for dependency, yes in zip(graph.dependencies, related, strict=True):
            relation, _, ends = dependency.text.removesuffix(")").partition("(")
            a, b = ends.split(", ")
            if yes and a in g and b in g:
                pairs = {"Requires": [(b, a)], "Defines": [(a, b), (b, a)]}.get(relation, [(a, b)])
                g.add_edges_from(pairs)
        return g

    whole = build([True] * len(elements), [True] * len(dependencies))
    part = build(elements, dependencies)
    size = sum(len(g.nodes) + len(g.edges) for g in (whole, part))
    return next(nx.optimize_graph_edit_distance(whole, part)) / size, whole, part


def test_the_heuristic_is_networkx_on_50_random_graphs() -> None:
    """Nodes and edges come in another order there, where ties may fall otherwise; the graphs themselves are equal."""
    pytest.importorskip("scipy")
    apart: list[float] = []
    for seed in range(50):
        graph, elements, dependencies = random_graph(seed)
        expected, whole, part = published(graph, elements, dependencies)
        nodes, drawn_edges = shown(graph, elements, dependencies)
        names = graph.elements
        assert {names[i] for i in nodes} == set(part.nodes) and {names[i] for i in range(len(names))} == set(whole)
        assert {(names[i], names[j]) for i, j in drawn_edges} == set(part.edges)
        assert {(names[i], names[j]) for i, j in graph.edges} == set(whole.edges)
        apart.append(abs(heuristic_ged(graph, elements, dependencies) - min(1.0, expected)))
    assert max(apart) == 0.0, apart


def test_the_closed_form_is_the_exact_distance_and_never_above_the_heuristic() -> None:
    nx = pytest.importorskip("networkx")
    pytest.importorskip("scipy")
    above = 0
    for seed in range(50):
        graph, elements, dependencies = random_graph(seed, most=4)
        _, whole, part = published(graph, elements, dependencies)
        size = sum(len(g.nodes) + len(g.edges) for g in (whole, part))
        closed = closed_ged(graph, elements, dependencies)
        assert closed * size == pytest.approx(nx.graph_edit_distance(whole, part))
        heuristic = heuristic_ged(graph, elements, dependencies)
        assert heuristic >= closed - 1e-12
        above += heuristic > closed + 1e-12
    assert above > 0  # they differ, or one of them would do


def test_every_further_yes_lowers_the_closed_form() -> None:
    """What a reward for training needs; the heuristic does not have it."""
    for seed in range(20):
        graph, _, _ = random_graph(seed)
        said, related = [False] * len(graph.elements), [True] * len(graph.dependencies)
        distances = [closed_ged(graph, said, related)]
        for i in random.Random(seed).sample(range(len(said)), len(said)):
            said[i] = True
            distances.append(closed_ged(graph, said, related))
        assert distances == sorted(distances, reverse=True) and len(set(distances)) == len(distances)


@pytest.mark.parametrize(("regions", "factor"), [(0, 1.0), (70, 1.0), (71, 89 / 90), (115, 0.5), (160, 0.0), (999, 0)])
def test_readability(regions: float, factor: float) -> None:
    assert readability(regions) == pytest.approx(factor)


def test_checklists_distances_and_readability_equal_the_published_scripts() -> None:
    pytest.importorskip("networkx")
    pytest.importorskip("scipy")
    path = Path(__file__).parents[1] / "benchmarks_data/mmmg.json"
    for case in json.loads(path.read_text(encoding="utf-8"))["cases"]:
        graph = read_graph(case["graph"])
        names = [*graph.elements, *(dependency.text for dependency in graph.dependencies)]
        yes = read_checklist(case["reply"], names)
        split = len(graph.elements)
        distance = heuristic_ged(graph, yes[:split], yes[split:])
        assert distance == pytest.approx(case["ged"], abs=1e-9), case
        assert (1 - distance) * readability(case["regions"]) == pytest.approx(case["score"], abs=1e-9), case
