"""Measure the structure of the package: size, edits that a new component forces, files that a run crosses.

    python tools/house.py [--root CHECKOUT] [--json] [--out FILE] [--static]

The rules below do not depend on the folder layout, so that two checkouts can be compared. Only `src/retouch` counts.

size
    Lines as `wc -l` counts them, files, length of functions from `def` to the last line (median, 90th percentile,
    longest), files over 400 lines.

forced edits
    For each kind of component (family, algorithm, reward, step rule, data format): the files outside a component's own
    room in which code names the component. The own room is the file or folder called NAME where the kind lives; a step
    rule's is the file that defines the function NAME. Code names a component by
      - a string constant that is its name, its name with a file extension, or the path of a module of its room;
      - an identifier, import or definition of its classes: those whose field annotated Literal["NAME"] selects the
        component in a run file, and those of its room that are called after it (of a step rule: its function);
      - an import from its room.
    Docstrings, comments, sentences, and default values of parameters do not count.
      forced   files that name more than half of the components of a kind: tables, unions, chains of isinstance. A new
               component has to be added to each. pyproject.toml counts where its entry points do that.
      named    files that name one component, over the components of the kind: smallest, median and largest number.
    Only components with a file or folder of their own in every layout are counted; those are COMPONENTS.

files crossed
    A GRPO run of two steps on the committed tiny base with one reward in the process (`preservation`) is traced with
    sys.setprofile in all threads. A file is crossed when control enters one of its functions or returns to one. Not
    counted: logging (frames of `observe/` and functions called log...), and leaving a context manager.
      on_stack      files with an active function, from the recipe down, at the first call of the engine's `backward`.
      to_gradient   files crossed by a data item: from the choice of the epoch's examples to the first `backward`, less
                    those crossed only between the image's decoding and its advantage. Those are counted by the next.
      to_advantage  files crossed by an image: from its submission to the rewards to the return of `group_advantages`.
      to_advantage_with_sampling  the same from the start of sampling, logging included.
      both_ways     from the choice of examples to the first `backward`, with nothing left out but logging.

functions crossed
    The same two ways (`to_gradient`, `to_advantage`) in functions instead of files: methods, nested functions and
    lambdas count, a comprehension belongs to the function that it stands in. `body_lines` are lines with code between
    `def` and the end of each function, without its docstring and the functions that it contains. `frames` is the
    largest number of active functions of the package, from the recipe's `train` down, between the choice and the first
    `backward`.

containers
    The classes of the package, besides that of a score, whose instances held the score of one image between its
    submission and its advantage: in a field, in a list, dict, tuple, tensor or future of a field, or, of dataclasses,
    in another such instance. Found by the score's value, in what the functions of the package took, held and returned.

names and pages
    Classes with one name in two files; functions, classes and constants without a leading underscore with one name in
    two files; modules at the top besides TOP; words of the pages in docs/, those that a tool writes apart.

re-entries
    A recipe is the file that defines GRPO's `train` with the other files of its folder where it has one to itself
    (without config.py). A re-entry is a pair (calling file, function of the recipe) in which a function of the recipe
    is called from another file of the package while the recipe is on the stack, during the same run. `closures`
    counts the lambdas, nested functions and functools.partial of the recipe.

knots
    Functions with more than BRANCHES branches (each `if`, loop, `except`, `case`, `and`, `or`, conditional expression
    and condition of a comprehension is one) in which no comment gives a reason.
"""

from __future__ import annotations

import argparse
import ast
import contextlib
import importlib
import io
import json
import math
import os
import re
import subprocess
import sys
import tempfile
import threading
import tokenize
import tomllib
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from concurrent import futures
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median, quantiles
from types import FrameType
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = Path("src") / "retouch"
LONG_FILE = 400
BRANCHES = 8
TOP = {"__init__.py", "__main__.py", "api.py", "errors.py", "types.py", "registry.py"}
"""Files that belong at the top of the package."""


@dataclass(frozen=True)
class Kind:
    """Components that a run file selects by name.

    Attributes:
        names: of the components.
        folders: where rooms of this kind lie, in any layout.
        selector: field of the configuration class; its annotation Literal["NAME"] selects the component.
        also: a further folder of a component's room.
    """

    names: tuple[str, ...]
    folders: tuple[str, ...] = ()
    selector: str = ""
    also: Mapping[str, str] = field(default_factory=dict)


COMPONENTS = {
    "family": Kind(("flux_fill", "sd_inpaint", "qwen_image", "qwen_image_edit"), ("models", "families"), "family"),
    "algorithm": Kind(
        ("sft", "grpo", "dpo", "nft", "vlm_grpo"),
        ("recipes", "algorithms", "core/objectives"),
        "name",
        {"vlm_grpo": "vlm/"},
    ),
    "reward": Kind(  # a fixed sample
        (
            *("clip", "complex_edit", "fn", "jpeg_size", "mask_composite", "mmmg", "ocr", "openai_judge"),
            *("preservation", "seam", "style", "vlm"),
        ),
        ("rewards/scorers",),
        "scorer",
    ),
    "step_rule": Kind(("flow_sde", "dance_sde", "cps", "ddim")),
    "format": Kind(
        ("self_bench", "cross_bench", "manifest", "brushbench", "prompts", "complex_edit", "mmmg"),
        ("data/formats",),
        "format",
    ),
}

Trees = Mapping[str, ast.Module]
Functions = ast.FunctionDef | ast.AsyncFunctionDef


def parsed(package: Path) -> dict[str, ast.Module]:
    """Syntax trees by path below the package, in POSIX form."""
    files = sorted(package.rglob("*.py"))
    return {file.relative_to(package).as_posix(): ast.parse(file.read_text(encoding="utf-8")) for file in files}


# --- size ---


def size(package: Path, trees: Trees) -> dict[str, Any]:
    """Lines, files and lengths of functions."""
    lines = {file: (package / file).read_bytes().count(b"\n") for file in trees}
    found = {f"{file}:{name}": length for file, tree in trees.items() for name, length in lengths(tree).items()}
    longest = max(found, key=lambda name: found[name])
    return {
        "lines": sum(lines.values()),
        "files": len(lines),
        "functions": len(found),
        "function_median": median(found.values()),
        "function_p90": quantiles(found.values(), n=10)[-1],
        "function_longest": {longest: found[longest]},
        "files_over_400_lines": {file: n for file, n in sorted(lines.items()) if n > LONG_FILE},
    }


def lengths(tree: ast.Module) -> dict[str, int]:
    """Lines of each function of a file, by name and line."""
    functions = [node for node in ast.walk(tree) if isinstance(node, Functions)]
    return {f"{n.lineno}:{n.name}": (n.end_lineno or n.lineno) - n.lineno + 1 for n in functions}


# --- knots ---

BRANCH = (ast.If, ast.IfExp, ast.For, ast.AsyncFor, ast.While, ast.ExceptHandler, ast.match_case)


def branches(function: ast.AST) -> int:
    """Branches of a function, those of the functions in it included."""
    nodes = list(ast.walk(function))
    joined = sum(len(node.values) - 1 for node in nodes if isinstance(node, ast.BoolOp))
    conditions = sum(len(node.ifs) for node in nodes if isinstance(node, ast.comprehension))
    return sum(isinstance(node, BRANCH) for node in nodes) + joined + conditions


def knots(package: Path, trees: Trees) -> dict[str, int]:
    """Branches of each function that has many and no comment, most first."""
    found: dict[str, int] = {}
    for file, tree in trees.items():
        lines = io.StringIO((package / file).read_text(encoding="utf-8")).readline
        commented = {token.start[0] for token in tokenize.generate_tokens(lines) if token.type == tokenize.COMMENT}
        for node in ast.walk(tree):
            if isinstance(node, Functions) and (count := branches(node)) > BRANCHES:
                own = set(range(node.lineno, (node.end_lineno or node.lineno) + 1))
                found |= {} if commented & own else {f"{file}:{node.lineno}:{node.name}": count}
    return dict(sorted(found.items(), key=lambda one: -one[1]))


# --- names and pages ---


def names(trees: Trees) -> dict[str, Any]:
    """Names that mean two things, and modules that have no room."""
    classes: dict[str, set[str]] = defaultdict(set)
    public: dict[str, set[str]] = defaultdict(set)
    for file, tree in trees.items():
        for node in ast.walk(tree):
            if isinstance(node, ast.ClassDef):
                classes[node.name].add(file)
        for name in top_level(tree):
            if not name.startswith("_"):
                public[name].add(file)
    return {
        "classes_with_two_meanings": {name: sorted(files) for name, files in sorted(classes.items()) if len(files) > 1},
        "public_names_twice": {name: sorted(files) for name, files in sorted(public.items()) if len(files) > 1},
        "loose_modules": sorted(file for file in trees if "/" not in file and file not in TOP),
    }


def top_level(tree: ast.Module) -> set[str]:
    """Functions, classes and constants that a file defines."""
    found = {node.name for node in tree.body if isinstance(node, Functions | ast.ClassDef)}
    for node in tree.body:
        if isinstance(node, ast.Assign):
            found |= {target.id for target in node.targets if isinstance(target, ast.Name)}
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            found.add(node.target.id)
    return found - {"logger"}


WRITTEN = re.compile(r"<!--[^>]*written by (tools/\w+\.py)", re.IGNORECASE)
"""What a page says that a tool writes, whole or from one such mark to `<!-- /... -->`."""


def pages(root: Path) -> dict[str, Any]:
    """Words of each page of docs/ by hand, and of all pages by tools."""
    by_hand, generated = {}, 0
    for page in sorted((root / "docs").rglob("*.md")):
        found = page.read_text(encoding="utf-8")
        words = len(found.split())
        parts = [found[mark.start() :].partition("<!-- /") for mark in WRITTEN.finditer(found)]
        whole = "writes this page from" in found or any(not end for _, end, _ in parts)
        own = 0 if whole else words - sum(len(part.split()) for part, _, _ in parts)
        by_hand[page.relative_to(root / "docs").as_posix()] = own
        generated += words - own
    return {"words_by_hand": sum(by_hand.values()), "words_generated": generated, "by_page": by_hand}


# --- forced edits ---


def forced_edits(root: Path, trees: Trees) -> dict[str, Any]:
    """By kind: files that name more than half of the components, and how many files name each."""
    entry_points = named_in_entry_points(root)
    nodes = {file: code(tree) for file, tree in trees.items()}
    result = {}
    for label, kind in COMPONENTS.items():
        naming = {name: naming_files(kind, name, trees, nodes) for name in kind.names}
        counts = sorted(len(files) for files in naming.values())
        by_file: dict[str, int] = defaultdict(int)
        for name, files in naming.items():
            for file in [*files, *(["pyproject.toml"] if name in entry_points else [])]:
                by_file[file] += 1
        tables = sorted(file for file, n in by_file.items() if 2 * n > len(kind.names))
        result[label] = {
            "forced": len(tables),
            "files": tables,
            "named": {"smallest": counts[0], "median": median(counts), "largest": counts[-1]},
            "by_component": {name: sorted(files) for name, files in naming.items()},
        }
    return result


def room(kind: Kind, name: str, trees: Trees) -> set[str]:
    """Files of a component."""
    if not kind.folders:
        return {
            file for file, tree in trees.items() if any(isinstance(n, Functions) and n.name == name for n in tree.body)
        }
    starts = tuple(f"{folder}/{name}{end}" for folder in kind.folders for end in (".py", "/"))
    return {file for file in trees if file.startswith((*starts, kind.also.get(name, "/")))}


def naming_files(kind: Kind, name: str, trees: Trees, nodes: Mapping[str, Sequence[ast.AST]]) -> set[str]:
    """Files outside the room of a component in which code names it.

    Args:
        nodes: of each file, what counts as code.
    """
    own = room(kind, name, trees)
    modules = {"retouch." + file.removesuffix(".py").removesuffix("/__init__").replace("/", ".") for file in own}
    identifiers = {c for file, tree in trees.items() for c in classes_of(kind, name, tree, own=file in own)}
    if not kind.folders:
        identifiers, modules = {name}, set()
    text = re.compile(rf"{name}(\.\w+)?")

    def names(node: ast.AST) -> bool:
        match node:
            case ast.Constant(value=str(value)):
                return text.fullmatch(value) is not None or value.partition(":")[0] in modules
            case ast.Name(id=found) | ast.Attribute(attr=found) | ast.ClassDef(name=found):
                return found in identifiers
            case ast.ImportFrom(module=module, names=aliases):
                full = {f"{module}.{alias.name}" for alias in aliases}
                return module in modules or bool(full & modules) or any(a.name in identifiers for a in aliases)
            case ast.Import(names=aliases):
                return any(alias.name in modules for alias in aliases)
        return False

    return {file for file in trees if file not in own and any(map(names, nodes[file]))}


def classes_of(kind: Kind, name: str, tree: ast.Module, *, own: bool) -> set[str]:
    """Classes of a file that stand for a component.

    Args:
        own: whether the file is in the component's room.
    """
    found = set()
    for node in ast.walk(tree):
        if not isinstance(node, ast.ClassDef):
            continue
        selects = any(
            isinstance(part, ast.AnnAssign)
            and ast.unparse(part.target) == kind.selector
            and ast.unparse(part.annotation) == f"Literal[{name!r}]"
            for part in node.body
        )
        if selects or (own and node.name.lower().startswith(name.replace("_", ""))):
            found.add(node.name)
    return found


def code(tree: ast.Module) -> list[ast.AST]:
    """Nodes of a file that may name a component: no docstrings, no default values of parameters."""
    skipped: set[ast.AST] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
            skipped.add(node.value)
        if isinstance(node, Functions | ast.Lambda):
            given = [*node.args.defaults, *(default for default in node.args.kw_defaults if default)]
            skipped |= {inner for default in given for inner in ast.walk(default)}
    kinds = (ast.Constant, ast.Name, ast.Attribute, ast.ClassDef, ast.ImportFrom, ast.Import)
    return [node for node in ast.walk(tree) if isinstance(node, kinds) and node not in skipped]


def named_in_entry_points(root: Path) -> set[str]:
    """Names under the entry points retouch.* of pyproject.toml."""
    project = tomllib.loads((root / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    return {name for group in project.get("entry-points", {}).values() for name in group}


# --- the recipe ---


def recipe_files(trees: Trees) -> list[str]:
    """GRPO's recipe: the file with `train` first.

    Raises:
        SystemExit: there is none.
    """
    places = ("algorithms/grpo/recipe.py", "recipes/grpo.py")
    found = [file for file in places if file in trees] or [
        file
        for file, tree in trees.items()
        if "grpo" in Path(file).parts and any(isinstance(n, Functions) and n.name == "train" for n in tree.body)
    ]
    if not found:
        raise SystemExit("no file defines GRPO's train function; add its path to recipe_files in tools/house.py")
    folder = Path(found[0]).parent
    others = [file for file in trees if Path(file).parent == folder and Path(file).name != "config.py"]
    return [found[0], *(file for file in others if file != found[0] and folder.name == "grpo")]


def closures(tree: ast.Module) -> int:
    """Lambdas, functions within functions, and calls of functools.partial."""
    nested = {
        inner
        for outer in ast.walk(tree)
        if isinstance(outer, Functions)
        for inner in ast.walk(outer)
        if inner is not outer and isinstance(inner, Functions | ast.Lambda)
    }
    free = {node for node in ast.walk(tree) if isinstance(node, ast.Lambda)}
    calls = [n for n in ast.walk(tree) if isinstance(n, ast.Call) and ast.unparse(n.func).endswith("partial")]
    return len(nested | free) + len(calls)


def code_lines(tree: ast.Module) -> int:
    """Lines with code: no blank lines, comments, docstrings or imports."""
    texts = {n.value for n in ast.walk(tree) if isinstance(n, ast.Expr) and isinstance(n.value, ast.Constant)}
    left_out = {
        line
        for n in ast.walk(tree)
        if n in texts or isinstance(n, ast.Import | ast.ImportFrom)
        for line in range(n.lineno, (n.end_lineno or n.lineno) + 1)  # type: ignore[attr-defined]
    }
    lines = {
        line
        for n in ast.walk(tree)
        if isinstance(n, ast.expr | ast.stmt | ast.arg) and not isinstance(n, Functions | ast.ClassDef | ast.Expr)
        for line in (n.lineno, n.end_lineno or n.lineno)
    }
    return len(lines - left_out)


Place = tuple[str, str]
"""A file and a function of it, as `co_qualname` names it."""

_COMPREHENSION = re.compile(r"(\.<locals>)?\.?<(listcomp|setcomp|dictcomp|genexpr)>")


def without_comprehension(function: str) -> str:
    """The function in which a comprehension stands."""
    return _COMPREHENSION.sub("", function)


def body_lines(tree: ast.Module) -> dict[str, int]:
    """Lines with code of each function's own body, by qualified name; of two of one name, both together."""
    found: dict[str, int] = defaultdict(int)

    def walk(node: ast.AST, prefix: str) -> None:
        for child in ast.iter_child_nodes(node):
            name, inside = "", prefix
            if isinstance(child, Functions | ast.Lambda):
                name = prefix + getattr(child, "name", "<lambda>")
                found[name] += len(own_lines(child))
                inside = f"{name}.<locals>."
            elif isinstance(child, ast.ClassDef):
                inside = f"{prefix}{child.name}."
            walk(child, inside)

    walk(tree, "")
    return found


def own_lines(function: ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda) -> set[int]:
    """Lines with code of a function, without its head, its docstring, and the functions and classes in it."""
    lines: set[int] = set()
    pending: list[ast.AST] = [function.body] if isinstance(function, ast.Lambda) else list(function.body)
    if isinstance(function, Functions) and ast.get_docstring(function, clean=False) is not None:
        pending = pending[1:]
    while pending:
        node = pending.pop()
        if isinstance(node, Functions | ast.ClassDef):
            continue
        if isinstance(node, ast.expr | ast.stmt):
            lines |= {node.lineno, node.end_lineno or node.lineno}
        pending += ast.iter_child_nodes(node)
    return lines


# --- a traced run ---


@dataclass(frozen=True)
class Event:
    """Control passes to a function of the package.

    Attributes:
        stack: (file, function) of the package's active functions, outermost first; the last has the control.
        kind: "enter"; "back" when control returns to it; "leave" when it ends.
        leaving: whether a context manager is being left.
    """

    stack: tuple[tuple[str, str], ...]
    kind: str
    leaving: bool

    @property
    def file(self) -> str:
        return self.stack[-1][0]

    @property
    def function(self) -> str:
        return self.stack[-1][1]

    @property
    def logs(self) -> bool:
        return any(
            file.startswith("observe/") or function.rpartition(".")[2].lstrip("_").startswith("log")
            for file, function in self.stack
        )


class Tracer:
    """Records how control passes between functions of a package, in all threads.

    Attributes:
        events: in their order.
        holders: classes of the package that held the first score that a scorer gave, in the order in which they did.
    """

    def __init__(self, package: Path) -> None:
        self.events: list[Event] = []
        self.holders: dict[str, None] = {}
        self._chosen, self._score = False, None  # the score of the first epoch, not of the evaluation before it
        self._prefix = f"{package}{os.sep}"

    def __enter__(self) -> Tracer:
        threading.setprofile(self._see)
        sys.setprofile(self._see)
        return self

    def __exit__(self, *_: object) -> None:
        sys.setprofile(None)
        threading.setprofile(None)  # type: ignore[arg-type]

    def _see(self, frame: FrameType, event: str, result: object) -> None:
        ours = frame.f_code.co_filename.startswith(self._prefix)
        if ours:
            self._look(frame, event, result)
        if event == "call" and ours:
            self._add(frame, "enter")
        elif event == "return":
            if ours:
                self._add(frame, "leave")
            if frame.f_back is not None and frame.f_back.f_code.co_filename.startswith(self._prefix):
                self._add(frame.f_back, "back")

    def _look(self, frame: FrameType, event: str, result: object) -> None:
        """Note which objects that a function has hold the score, from the first score on until the advantages."""
        returns = event == "return"
        if not self._chosen:
            self._chosen = frame.f_code.co_name in CHOICE[0]
        elif self._score is None:
            self._score = first_score(result) if returns and frame.f_code.co_name == "score" else None
        elif returns and frame.f_code.co_name == "group_advantages":
            self._score = math.nan  # equal to nothing
        elif not math.isnan(self._score):
            for thing in (*frame.f_locals.values(), result):
                self.holders.update(dict.fromkeys(sorted(holders(thing, self._score))))

    def _add(self, frame: FrameType, kind: str) -> None:
        stack, leaving, at = [], False, frame
        while at is not None:
            name = at.f_code.co_filename
            if name.startswith(self._prefix):
                stack.append((Path(name[len(self._prefix) :]).as_posix(), at.f_code.co_qualname))
                leaving = leaving or at.f_code.co_name == "__exit__"
            elif at.f_code.co_name == "__exit__" and name == contextlib.__file__:
                leaving = leaving or bool(stack)
            at = at.f_back
        self.events.append(Event(tuple(reversed(stack)), kind, leaving))


def first_score(result: object) -> float | None:
    """The value of the first score of what a scorer returned."""
    for one in result if isinstance(result, list | tuple) else ():
        value = getattr(one, "value", None)
        if isinstance(value, float) and value not in (0.0, 1.0):
            return value
    return None


def holders(thing: object, value: float) -> set[str]:
    """Classes of the package whose instances hold a value, among what can be reached from an object."""
    found: set[str] = set()
    seen: dict[int, bool] = {}

    def reaches(one: object, depth: int) -> bool:
        """Whether an object holds the value, for what holds the object."""
        if isinstance(one, float):
            return one == value
        if depth > 6 or one is None or isinstance(one, str | bytes | int | type):
            return False
        if id(one) in seen:
            return seen[id(one)]
        seen[id(one)] = False
        kind = type(one)
        if kind.__module__.startswith("retouch.") and kind.__name__ == "Score":
            return one.value == value  # type: ignore[attr-defined]
        if kind.__module__.startswith("retouch."):
            hits = [reaches(getattr(one, name, None), 0) for name in fields_of(one)]  # all: each may add a class
            if any(hits):
                found.add(f"{kind.__module__.removeprefix('retouch.')}.{kind.__qualname__}")
            seen[id(one)] = any(hits) and hasattr(kind, "__dataclass_fields__")
            return seen[id(one)]
        hits = [reaches(part, depth + 1) for part in contents(one, value)]
        seen[id(one)] = any(hits)
        return seen[id(one)]

    reaches(thing, 0)
    return found


def fields_of(one: object) -> list[str]:
    """Names of the attributes of an object."""
    slots = [name for kind in type(one).__mro__ for name in getattr(kind, "__slots__", ())]
    return [*getattr(one, "__dict__", {}), *slots]


def contents(one: Any, value: float) -> Sequence[object]:
    """What is in a container of the language, an array, a tensor or a future."""
    if isinstance(one, Mapping):
        return list(one.values())
    if isinstance(one, list | tuple | set | frozenset):
        return list(one)
    if isinstance(one, futures.Future):
        return [one.result()] if one.done() and not one.cancelled() and one.exception() is None else []
    if type(one).__name__ in ("Tensor", "ndarray") and one.ndim and len(one) < 4096 and "float" in str(one.dtype):
        return [value] if any(abs(x - value) <= 1e-6 * abs(value) for x in one.reshape(-1).tolist()) else []
    return []


RUN: dict[str, Any] = {
    "name": "house",
    "seed": 5,
    "model": {
        "family": "flux_fill",
        "path": "tiny",
        "dtype": "fp32",
        "max_sequence_length": 24,
        "train": {"kind": "full"},
    },
    "rollout": {
        "group_size": 2,
        "global_groups_per_batch": 2,
        "batch_size_per_device": 4,
        "num_steps": 3,
        "noise_level": 0.7,
        "window": {"size": 2, "range": [0, 1]},
    },
    "algorithm": {"name": "grpo", "clip_range": 1e-3},
    "rewards": {"preservation": {}},
    "optimizer": {"lr": 1e-4, "batch_size_per_device": 2, "gradient_accumulation": 1},
    "training": {
        "max_steps": 2,
        "checkpoint_every": 0,
        "eval_every": 0,
        "mixed_precision": "no",
        "gradient_checkpointing": False,
    },
}
"""Two groups of two samples an epoch, trained on in two optimizer steps."""


Mark = tuple[tuple[str, ...], tuple[str, ...]]
"""Names of functions, and starts of the paths of their files."""

CHOICE: Mark = (("curriculum_examples", "epoch_examples"), ("data/", "training/"))
SAMPLING: Mark = (("sample",), ("rollout/",))
DECODING: Mark = (("decode",), ("models/", "families/"))
ADVANTAGES: Mark = (("group_advantages",), ("core/",))
BACKWARD: Mark = (("backward",), ("engine/",))


def traced_run(root: Path, recipe: str) -> Tracer:
    """What a tracer saw of a GRPO run of two steps. Runs in this process, through the command line of the checkout.

    Args:
        recipe: its file.

    Raises:
        SystemExit: another package is imported, or the run fails.
    """
    sys.path.insert(0, str(root / "src"))
    import retouch
    from retouch.cli import main

    package = root / PACKAGE
    if package not in Path(retouch.__file__).resolve().parents:
        raise SystemExit(f"retouch is imported from {retouch.__file__}, not from {package}")

    def command(*arguments: object) -> None:
        sys.argv = ["retouch", *map(str, arguments)]
        with contextlib.redirect_stdout(io.StringIO()):
            try:
                main()
            except SystemExit as end:
                if end.code:
                    raise SystemExit(f"retouch {arguments[0]} ended with exit code {end.code}") from None

    with tempfile.TemporaryDirectory() as folder:
        at = Path(folder)
        synth = ("--size", "32x64", "--count")
        command("data", "synth", "--out", at / "prompts", *synth, 8, "--seed", 2, "--no-targets")
        command("data", "synth", "--out", at / "held_out", *synth, 4, "--seed", 3, "--half", "held_out")
        section = {"format": "self_bench", "resolution": [32, 64]}
        run = {
            **RUN,
            "data": {**section, "path": str(at / "prompts"), "target": "none"},
            "evaluation": {"data": {**section, "path": str(at / "held_out")}, "num_examples": 2, "grid_examples": 1},
            "logging": {"dir": str(at / "runs"), "sinks": []},
        }
        (at / "run.yaml").write_text(json.dumps(run), encoding="utf-8")
        importlib.import_module("retouch." + recipe.removesuffix(".py").replace("/", "."))  # slow under a tracer
        with Tracer(package) as tracer:
            command("train", at / "run.yaml")
    return tracer


def position(what: str, events: Sequence[Event], start: int, test: Callable[[Event], bool]) -> int:
    """Index of the first event from `start` on that passes a test.

    Raises:
        SystemExit: there is none.
    """
    for i in range(start, len(events)):
        if test(events[i]):
            return i
    raise SystemExit(f"no {what} in the traced run; adapt the marks (CHOICE, SAMPLING, ...) of tools/house.py")


def called(mark: Mark, kind: str) -> Callable[[Event], bool]:
    """A test of events: a function of the mark is entered or left."""
    names, folders = mark
    return lambda e: e.kind == kind and e.function.rpartition(".")[2] in names and e.file.startswith(folders)


def crossed(events: Sequence[Event], recipe: Sequence[str], lines: Mapping[Place, int]) -> dict[str, Any]:
    """Files and functions that a data item and an image cross in the first epoch.

    Args:
        lines: with code of each function of the package.
    """
    begin = position("train", events, 0, lambda e: (e.file, e.function) == (recipe[0], "train"))
    chosen = position("choice of examples", events, begin, called(CHOICE, "enter"))
    sampling = position("sampling", events, chosen, called(SAMPLING, "enter"))
    decoded = position("decoding", events, sampling, called(DECODING, "leave"))
    submitted = position("submission", events, decoded, lambda e: e.file.startswith("rewards/"))
    computing = position("group_advantages", events, decoded, called(ADVANTAGES, "enter"))
    computed = position("advantages", events, computing, called(ADVANTAGES, "leave"))
    backward = position("backward", events, computed, called(BACKWARD, "enter"))

    def files(start: int, end: int, *, logs: bool = False) -> set[str]:
        passing = (e for e in events[start : end + 1] if e.kind != "leave" and not e.leaving)
        return {e.file for e in passing if logs or not e.logs}

    def functions(start: int, end: int) -> set[Place]:
        passing = (e for e in events[start : end + 1] if e.kind != "leave" and not e.leaving and not e.logs)
        places = {(e.file, without_comprehension(e.function)) for e in passing}
        return {(file, function) for file, function in places if function != "<module>" and (file, function) in lines}

    active = [file for file, _ in events[backward].stack]
    both = files(chosen, backward)
    elsewhere = files(chosen, decoded) | files(computing, backward)
    ways = {
        "on_stack": set(active[active.index(recipe[0]) :]),
        "to_gradient": both & elsewhere,
        "to_advantage": files(submitted, computed),
        "to_advantage_with_sampling": files(sampling, computed, logs=True),
        "both_ways": both,
    }
    own = functions(chosen, decoded) | functions(computing, backward)
    routes = {
        "to_gradient": functions(chosen, backward) & own,
        "to_advantage": functions(submitted, computed),
    }
    below = [
        len(e.stack) - 1 - [file for file, _ in e.stack].index(recipe[0])
        for e in events[chosen : backward + 1]
        if any(file == recipe[0] for file, _ in e.stack)
    ]
    return {
        "crossed": {name: {"count": len(found), "files": sorted(found)} for name, found in ways.items()},
        "functions_crossed": {
            name: {
                "count": len(found),
                "body_lines": sum(lines[place] for place in found),
                "body_p90": quantiles([lines[place] for place in found], n=10)[-1],
                "functions": sorted(f"{file}:{function}" for file, function in found),
            }
            for name, found in routes.items()
        },
        "frames": max(below) + 1,
    }


def re_entries(events: Sequence[Event], recipe: Sequence[str]) -> list[str]:
    """`caller -> function` of every function of the recipe that another file calls below the recipe."""
    found = set()
    for event in events:
        if event.kind == "enter" and len(event.stack) > 1 and event.file in recipe:
            caller = event.stack[-2][0]
            if caller not in recipe and any(file in recipe for file, _ in event.stack[:-2]):
                found.add(f"{caller} -> {event.function}")
    return sorted(found)


# --- report ---


def measure(root: Path, *, run: bool = True) -> dict[str, Any]:
    """All numbers of a checkout.

    Args:
        run: also trace a run, which takes about half a minute.
    """
    package = root / PACKAGE
    trees = parsed(package)
    recipe = recipe_files(trees)
    result: dict[str, Any] = {
        "commit": commit_of(root),
        "size": size(package, trees),
        "forced_edits": forced_edits(root, trees),
        "names": names(trees),
        "knots": knots(package, trees),
        "pages": pages(root),
        "recipe": {
            "files": recipe,
            "lines": sum((package / file).read_bytes().count(b"\n") for file in recipe),
            "code_lines": sum(code_lines(trees[file]) for file in recipe),
            "closures": sum(closures(trees[file]) for file in recipe),
            "function_longest": max(length for file in recipe for length in lengths(trees[file]).values()),
        },
    }
    if run:
        result |= in_new_process(root)
    return result


def commit_of(root: Path) -> str | None:
    """Last commit that changed the package, with "+" where it has uncommitted changes; None outside git."""
    git = ["git", "-C", str(root)]
    found = subprocess.run([*git, "log", "-1", "--format=%H", "--", str(PACKAGE)], capture_output=True, text=True)
    changed = subprocess.run([*git, "status", "--porcelain", "--", str(PACKAGE)], capture_output=True, text=True)
    return found.stdout.strip() + ("+" if changed.stdout.strip() else "") if found.returncode == 0 else None


def in_new_process(root: Path) -> dict[str, Any]:
    """The traced numbers; a process of its own imports the package of this checkout and no other."""
    with tempfile.TemporaryDirectory() as cache:
        threads = {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", "HF_HUB_OFFLINE": "1", "XDG_CACHE_HOME": cache}
        done = subprocess.run(
            [sys.executable, __file__, "--root", str(root), "--trace"],
            env={**os.environ, **threads},
            capture_output=True,
            text=True,
        )
    if done.returncode:
        raise SystemExit(f"{done.stderr}\nthe traced run ended with exit code {done.returncode}")
    return json.loads(done.stdout.splitlines()[-1])


def text(found: Mapping[str, Any], *, named: bool = False) -> str:
    """The numbers as lines for a terminal.

    Args:
        named: also the files and functions of each way, and the knots.
    """
    s, recipe = found["size"], found["recipe"]
    (name, longest), *_ = s["function_longest"].items()
    lines = [
        f"commit    {found['commit']}",
        f"src       {s['lines']} lines, {s['files']} files, {len(s['files_over_400_lines'])} over {LONG_FILE} lines",
        f"functions {s['functions']}: median {s['function_median']:g} lines, 90 % up to {s['function_p90']:g}",
        f"          longest {longest} ({name})",
        f"recipe    {recipe['lines']} lines, {recipe['code_lines']} of code, {recipe['closures']} closures",
    ]
    for kind, edits in found["forced_edits"].items():
        lines.append(f"edits forced by a new {kind}: {edits['forced']} ({', '.join(edits['files']) or '-'})")
        lines.append("    files that name one: {smallest} to {largest}, median {median:g}".format(**edits["named"]))
    twice, words = found["names"], found["pages"]
    for what in ("classes_with_two_meanings", "public_names_twice", "loose_modules"):
        lines.append(f"{what.replace('_', ' '):27} {len(twice[what])}: {', '.join(twice[what])}")
    lines.append(f"knots without a comment     {len(found['knots'])}")
    if named:
        lines += [f"    {count:3} {function}" for function, count in found["knots"].items()]
    lines.append(f"words of docs               {words['words_by_hand']} by hand, {words['words_generated']} by tools")
    if named:
        lines += [f"    {count:5} {page}" for page, count in words["by_page"].items() if count]
    for way, files in found.get("crossed", {}).items():
        lines.append(f"{way:27} {files['count']} files")
        lines += [f"    {file}" for file in files["files"] if named]
    for way, one in found.get("functions_crossed", {}).items():
        of = f"{one['body_lines']} lines with code, 90 % up to {one['body_p90']:g}"
        lines.append(f"{way:27} {one['count']} functions, {of}")
        lines += [f"    {function}" for function in one["functions"] if named]
    if "frames" in found:
        lines.append(f"{'frames':27} {found['frames']}")
        lines.append(f"{'containers of a score':27} {len(found['containers'])}: {', '.join(found['containers'])}")
    if "re_entries" in found:
        lines.append(f"{'re-entries':27} {len(found['re_entries'])}: {'; '.join(found['re_entries']) or '-'}")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description="Measure size, forced edits and files crossed of a checkout.")
    parser.add_argument("--root", type=Path, default=ROOT, help="checkout to measure; default: this one")
    parser.add_argument("--json", action="store_true", help="print JSON with all file names")
    parser.add_argument("--out", type=Path, help="also write the JSON to this file")
    parser.add_argument("--static", action="store_true", help="skip the traced run; needs only the standard library")
    parser.add_argument(
        "--names", action="store_true", help="also print files and functions of each way, and the knots"
    )
    parser.add_argument("--trace", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    root = arguments.root.resolve()
    if arguments.trace:
        trees = parsed(root / PACKAGE)
        recipe = recipe_files(trees)
        lines = {(file, name): n for file, tree in trees.items() for name, n in body_lines(tree).items()}
        seen = traced_run(root, recipe[0])
        found = crossed(seen.events, recipe, lines)
        print(json.dumps({**found, "containers": list(seen.holders), "re_entries": re_entries(seen.events, recipe)}))
        return
    found = measure(root, run=not arguments.static)
    written = json.dumps(found, indent=2)
    if arguments.out:
        arguments.out.write_text(written + "\n", encoding="utf-8")
    print(written if arguments.json else text(found, named=arguments.names))


if __name__ == "__main__":
    main()
