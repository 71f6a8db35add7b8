"""How much of a knowledge graph a picture shows, by the protocol of MMMG (arXiv 2506.10963): one question a picture, a
yes or no for every element and dependency; score = (1 - GED) R.

The question is in our own words. With `wording: published` it is the user's copy of MMMG's, whose code has no licence;
only with the published distance and a region counter besides is the score called MMMG's.
"""

from __future__ import annotations

import ast
import hashlib
import importlib.util
import inspect
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

import numpy as np
from pydantic import Field

from retouch.config.errors import ConfigError
from retouch.rewards.judge import BudgetSpent, JudgeError, picture_part
from retouch.rewards.knowledge_graph import (
    KnowledgeGraph,
    closed_ged,
    heuristic_ged,
    read_checklist,
    read_graph,
    readability,
)
from retouch.rewards.protocol import Pixels, RewardItem
from retouch.rewards.scorers.fn import find_function
from retouch.rewards.scorers.judged import JudgeScorer, read_object, schema_of
from retouch.rewards.sections import is_published_mmmg
from retouch.types import Failure, Outcome, Score

_DESCRIPTION = "description"

_QUESTION = (
    "First describe in detail what this picture shows. Then say of every element and every dependency below whether "
    'the picture shows it: "yes" only where it is there to be seen, clearly and correctly; "no" where it is missing, '
    "wrong, unreadable, or could only be guessed from knowledge of the subject.\n"
    "An element must be recognisable. A dependency Relation(a, b) must be drawn, not just its two ends: Defines: a "
    "makes plain what b is. Contains: one is a part of the other or lies within it. Requires: a is shown to need b. "
    "Entails: a is shown to lead to b. Causes: a is shown to bring about b. TemporalOrder: a is shown to come before "
    "b."
)

_GRAPH_SLOT = "[ELEM_DEPEND]"
"""Where the published question takes the graph and the annotation."""

_PUBLISHED_TOKENS = 2048

_Positive = Annotated[float, Field(gt=0)]


class MmmgScorer(JudgeScorer):
    """Value in [0, 1]. Reads `metadata.knowledge_graph` and, where it is there, `metadata.annotation`.

    Args:
        ged: "closed" is the exact distance, missing nodes and edges; "networkx" the published one, networkx's first
            heuristic value (needs networkx and scipy).
        wording: "own" asks this package's question, answered by a schema; "published" the one in `prompts`, in text.
        prompts: file with the published question.
        readability: "module:function" that counts the regions of an RGB array [H, W, 3] uint8, as a segmenter finds
            them; None leaves R at 1. MMMG counts those of SAM 2.1.
        model ... timeout_s: see `JudgeScorer`.
    """

    name = "mmmg"

    def __init__(
        self,
        ged: Literal["closed", "networkx"] = "closed",
        wording: Literal["own", "published"] = "own",
        prompts: str | None = None,
        readability: str | None = None,
        model: str = "",
        address: str = "https://api.openai.com/v1",
        concurrency: Annotated[int, Field(gt=0)] = 8,
        requests_per_minute: _Positive | None = None,
        tokens_per_minute: _Positive | None = None,
        budget_requests: Annotated[int, Field(gt=0)] | None = None,
        budget_tokens: Annotated[int, Field(gt=0)] | None = None,
        budget_dollars: _Positive | None = None,
        price_in: Annotated[float, Field(ge=0)] = 0.0,
        price_out: Annotated[float, Field(ge=0)] = 0.0,
        timeout_s: _Positive = 180.0,
    ) -> None:
        if readability is not None and not all(readability.partition(":")):
            raise ConfigError(
                f"reward 'mmmg': readability: given {readability!r}; write module:function, like my_segmenter:regions"
            )
        self.ged, self.readability = ged, readability
        self.published_question = _published_question(wording, prompts)
        self.protocol = "mmmg" if is_published_mmmg(wording, ged, readability) else "mmmg-style"
        self._regions: Callable[[Pixels], float] | None = None
        self._connect(
            model, address, concurrency, requests_per_minute, tokens_per_minute,
            budget_requests, budget_tokens, budget_dollars, price_in, price_out, timeout_s,
        )  # fmt: skip
        self._describe()

    def load(self, device: str) -> None:
        """Import the segmenter, and ask a first question.

        Raises:
            ConfigError: a library or the segmenter is missing; no such model, a wrong key, or a schema that is ignored.
        """
        missing = [name for name in ("networkx", "scipy") if importlib.util.find_spec(name) is None]
        if self.ged == "networkx" and missing:
            raise ConfigError(
                f"reward 'mmmg': ged 'networkx' needs {missing[0]}; pip install \"retouch[mmmg]\", or set ged=closed"
            )
        source = ""
        if self.readability is not None:
            found = find_function(self.readability, "reward 'mmmg': readability")
            source = hashlib.blake2b(Path(inspect.getfile(found)).read_bytes(), digest_size=6).hexdigest()
            self._regions = found
        graph = read_graph({"elements": ["a square", "a circle"], "dependencies": ["Contains(a square, a circle)"]})
        probe = RewardItem(0, "a square", np.full((64, 64, 3), 127, np.uint8))
        try:
            self._ask(probe, graph, again=False)
        except (JudgeError, BudgetSpent) as error:
            raise ConfigError(f"reward 'mmmg': {error}") from None
        self._describe(source)

    def score(self, items: Sequence[RewardItem]) -> list[Outcome]:
        return self._answers(self._one, items)

    def _one(self, item: RewardItem) -> Outcome:
        try:
            graph = read_graph(item.metadata.get("knowledge_graph"))
        except ValueError as error:
            return Failure("bad_item", f"metadata.knowledge_graph: {error}")
        elements, dependencies = self._ask(item, graph)
        distance = (heuristic_ged if self.ged == "networkx" else closed_ged)(graph, elements, dependencies)
        detail: dict[str, Any] = {
            "fidelity": 1 - distance,
            "elements": sum(elements) / len(elements),
            "dependencies": sum(dependencies) / len(dependencies) if dependencies else None,
            "skipped": len(graph.skipped),
        }
        if self._regions is None:
            return Score(1 - distance, detail)
        try:
            regions = float(self._regions(item.image))
        except Exception as error:  # foreign code: its failure is the item's, and the judge need not be asked again
            return Failure("scorer_error", f"{self.readability} raised {type(error).__name__}: {error}")
        if not regions >= 0:
            return Failure("scorer_error", f"{self.readability} returned {regions}; it must count regions")
        factor = readability(regions)
        return Score((1 - distance) * factor, {**detail, "readability": factor, "regions": regions})

    def _ask(self, item: RewardItem, graph: KnowledgeGraph, *, again: bool = True) -> tuple[list[bool], list[bool]]:
        """A yes or no for each element and each dependency."""
        if self.published_question is not None:
            return self._ask_published(self.published_question, item, graph, again=again)
        asked = {f"e{i}": name for i, name in enumerate(graph.elements, 1)}
        asked |= {f"d{i}": d.text for i, d in enumerate(graph.dependencies, 1)}
        lines = "".join(f"\n{key}: {' '.join(text.split())}" for key, text in asked.items())
        note = item.metadata.get("annotation")
        about = f"\nAbout them: {note if isinstance(note, str) else json.dumps(note)}" if note else ""
        answer = {"type": "string", "enum": ["yes", "no"]}
        yes = self._structured(
            [{"type": "text", "text": f"{_QUESTION}{lines}{about}"}, picture_part(item.image)],
            schema_of("checklist", {_DESCRIPTION: {"type": "string"}, **dict.fromkeys(asked, answer)}),
            lambda text: _read_answers(text, list(asked)),
            again=again,
        )
        split = len(graph.elements)
        return yes[:split], yes[split:]

    def _ask_published(
        self, question: str, item: RewardItem, graph: KnowledgeGraph, *, again: bool
    ) -> tuple[list[bool], list[bool]]:
        names = [*graph.elements, *(dependency.text for dependency in graph.dependencies)]
        given, note = (item.metadata.get(name) for name in ("knowledge_graph", "annotation"))
        parts = [given or {"elements": graph.elements, "dependencies": names[len(graph.elements) :]}, note or ""]
        told = "\n".join(part if isinstance(part, str) else json.dumps(part, ensure_ascii=False) for part in parts)
        yes = self._structured(
            [{"type": "text", "text": question.replace(_GRAPH_SLOT, told)}, picture_part(item.image)],
            None,
            lambda text: read_checklist(text, names),
            again=again,
            max_tokens=_PUBLISHED_TOKENS,
        )
        return yes[: len(graph.elements)], yes[len(graph.elements) :]

    def _describe(self, source: str = "") -> None:
        self._set_spec(self.published_question or _QUESTION, self.ged, self.readability, source)


def _published_question(wording: str, prompts: str | None) -> str | None:
    """The text of the user's copy, of a Python file the string constant that holds it; None for wording=own.

    Raises:
        ConfigError: no such file, or no question in it.
    """
    if wording == "own":
        return None
    where = f"reward 'mmmg': prompts: given {prompts!r}"
    path = Path(prompts or "").expanduser()
    if prompts is None or not path.is_file():
        raise ConfigError(
            f"{where}, which is no file; set it to your copy of MMMG's question "
            "(mmmg_eval/utils/instruction_prompt.py of github.com/MMMGBench/MMMG)"
        )
    try:
        text = path.read_text(encoding="utf-8")
        texts = _constants(text) if path.suffix == ".py" else [text]
    except (UnicodeDecodeError, SyntaxError) as error:
        raise ConfigError(f"{where}, which cannot be read: {error}; give a text file in UTF-8") from None
    found = [one for one in texts if _GRAPH_SLOT in one]
    if not found:
        raise ConfigError(f"{where}, which does not contain {_GRAPH_SLOT}, where the graph goes; give MMMG's own file")
    return found[0]


def _constants(source: str) -> list[str]:
    """String constants of a Python file, which is not run."""
    nodes = ast.walk(ast.parse(source))
    return [node.value for node in nodes if isinstance(node, ast.Constant) and isinstance(node.value, str)]


def _read_answers(text: str, keys: Sequence[str]) -> list[bool]:
    """Whether the answer to each key is yes.

    Raises:
        ValueError: not the schema, or an answer that is neither yes nor no.
    """
    found = read_object(text, [*keys, _DESCRIPTION])
    for key in keys:
        if found[key] not in ("yes", "no"):
            raise ValueError(f'{key} must be "yes" or "no"; given {found[key]!r}')
    return [found[key] == "yes" for key in keys]
