"""No test depends on how fast the machine is: CI has two cores for four processes (`tools/stutter.py`)."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

GENEROUS_S = 10.0
CLOCKS = ("monotonic", "perf_counter", "took")
SLOW = {"slow", "full", "gpu"}
SUSPECT = re.compile(
    r"((monotonic\(|perf_counter\(|took).* <=? |assert .*\.wait\()(\d|\d?\.\d+)(?![\d.])|wait_ready\(0?\.\d"
)
WORDS = ("monotonic(", "perf_counter(", "took ", ".wait(", "wait_ready(")
"""Files without a word of these and a line like that are not parsed."""

NEVER_READY = {
    "rewards/test_client.py: test_readiness_is_bounded",
    "rewards/test_compose.py: test_what_is_missing_is_said_for_every_place",
    "rewards/test_compose.py: test_a_reward_of_weight_0_is_not_ready_and_nobody_minds",
    "rewards/test_local.py: test_scorers_are_loaded_before_they_score",
}
"""They wait for what cannot become ready, and assert the same however late they look."""


def short(node: ast.AST) -> bool:
    return isinstance(node, ast.Constant) and isinstance(node.value, int | float) and 0 < node.value < GENEROUS_S


def elapsed(node: ast.AST) -> bool:
    return not {getattr(n, "attr", getattr(n, "id", "")) for n in ast.walk(node)}.isdisjoint(CLOCKS)


def hasty(tree: ast.AST) -> Iterator[ast.AST]:
    """Asserts that something took or waits less than `GENEROUS_S`, and `wait_ready` of less than a second."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and getattr(node.func, "attr", "") == "wait_ready":
            yield from (one for one in node.args[:1] if short(one) and float(ast.unparse(one)) < 1)
        for part in ast.walk(node.test) if isinstance(node, ast.Assert) else ():
            if isinstance(part, ast.Call) and getattr(part.func, "attr", "") == "wait":
                yield from (one for one in part.args[:1] if short(one))
            elif isinstance(part, ast.Compare) and isinstance(part.ops[-1], ast.Lt | ast.LtE):
                left = [part.left, *part.comparators][-2]
                yield from (one for one in part.comparators[-1:] if short(one) and elapsed(left))


def test_no_test_asserts_that_the_machine_is_fast() -> None:
    root, found = Path(__file__).parent, set[str]()
    for path in root.rglob("*.py"):
        text = path.read_text(encoding="utf-8")
        for function in ast.walk(ast.parse(text)) if any(w in text for w in WORDS) and SUSPECT.search(text) else ():
            if isinstance(function, ast.FunctionDef | ast.AsyncFunctionDef) and any(hasty(function)):
                marks = {getattr(n, "attr", "") for one in function.decorator_list for n in ast.walk(one)}
                found |= {f"{path.relative_to(root)}: {function.name}"} if not marks & SLOW else set()
    assert found == NEVER_READY


def test_what_a_test_stops_is_stopped_before_it_goes_on() -> None:
    """A signal takes effect later: another thread of the process may still read a socket that ends (`fakes.freeze`)."""
    root = Path(__file__).parent
    sent = re.compile(r"(os\.kill(pg)?|send_signal)\(.*SIGSTOP")
    found = {str(path.relative_to(root)) for path in root.rglob("*.py") if sent.search(path.read_text("utf-8"))}
    assert found == {"rewards/fakes.py", "test_stutter.py"}  # it is about late signals


def test_threads_are_compared_and_not_counted() -> None:
    """A thread of an earlier test that ends meanwhile changes their number."""
    found = [path.name for path in Path(__file__).parent.rglob("*.py") if "active_count(" in path.read_text("utf-8")]
    assert found == [Path(__file__).name]


def test_what_is_found() -> None:
    hasty_ones = ("time.monotonic() - a < 0.5", "0 < took <= 2", "client.wait_ready(0.2) == []", "gate.wait(5)")
    others = ("time.monotonic() - a < HANG_S", "time.monotonic() - a > 0.5", "took < 10", "client.wait_ready(60) == []")
    assert [bool(list(hasty(ast.parse(f"assert {test}")))) for test in hasty_ones + others] == [True] * 4 + [False] * 4
