"""How much of a knowledge graph an image shows, by the protocol of MMMG (arXiv 2506.10963): one question per image, a
yes or no for every element and dependency; score = (1 - GED) R.

The question is this package's own. With `wording: published` it is the user's copy of MMMG's, whose code has no
licence; only with the published distance and a region counter as well is the score called MMMG's.
"""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Callable, Sequence
from threading import Lock
from typing import Annotated, Any, Literal

from pydantic import model_validator

from retouch.config.base import Names, Text
from retouch.config.reads import ReadIf
from retouch.errors import ConfigError, shown
from retouch.registry import PLUGINS, load_attribute
from retouch.rewards.protocol import Pixels, RewardItem
from retouch.rewards.scorers.copied_texts import copied_text
from retouch.rewards.scorers.fn import find_function, source_digest
from retouch.rewards.scorers.judge_client import image_part
from retouch.rewards.scorers.judged import PUBLISHED, JudgeEntry, JudgeScorer, read_object, schema_of
from retouch.rewards.scorers.knowledge_graph import (
    KnowledgeGraph,
    closed_ged,
    heuristic_ged,
    read_checklist,
    read_graph,
    readability,
)
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

_WHERE = "MMMG's question (mmmg_eval/utils/instruction_prompt.py of github.com/MMMGBench/MMMG)"

_GRAPH_SLOT = "[ELEM_DEPEND]"
"""Place of the graph and the annotation in the published question."""

_PUBLISHED_TOKENS = 2048

_REGION_COUNTER = "retouch.rewards.scorers.regions:RegionCounter"


SAM2 = ReadIf(
    "with `readability: sam2`",
    lambda own: own.readability == "sam2",
    "but readability is not sam2, which alone reads {name}; leave it out",
    warns=True,
)


class MmmgReward(JudgeEntry):
    """Agreement with a knowledge graph by the protocol of MMMG (arXiv 2506.10963), in [0, 1]: a judge's yes or no for
    every element and dependency of `metadata.knowledge_graph`; (1 - GED) R. Needs a judge as of `openai_judge`. It is
    MMMG's own score only with wording=published, ged=networkx and readability together; anything else is an MMMG-style
    score."""

    published_in = _WHERE

    scorer: Literal["mmmg"] = "mmmg"
    ged: Literal["closed", "networkx"] = "closed"
    """Distance to the graph: exact (missing nodes and edges); or the published one, a heuristic that is never lower
    and needs the extra `mmmg`."""
    wording: Literal["own", "published"] = "own"
    """Question to the judge: this package's, answered by a JSON schema; or MMMG's from `prompts`, answered in lines of
    text."""
    prompts: Annotated[Text | None, PUBLISHED] = None
    """For wording=published: your copy of the published question, which the package does not contain: a text file, or
    MMMG's `mmmg_eval/utils/instruction_prompt.py`. [ELEM_DEPEND] stands for graph and annotation."""
    readability: Annotated[str | None, Names("code", own=("sam2",), variables=(PLUGINS,))] = None
    """Counter of an image's regions: "sam2" counts them as MMMG does, with `segmenter` and `reader`; "module:function"
    is a function of an RGB array [H, W, 3] uint8. R falls from 1 at 70 regions to 0 at 160. Null leaves R at 1."""
    segmenter: Annotated[Text, SAM2] = "facebook/sam2.1-hiera-large"
    """Hub id or folder of the `Sam2Model` of readability=sam2; it needs a GPU to be fast (`device`)."""
    reader: Annotated[Literal["rapidocr", "paddleocr"], SAM2] = "rapidocr"
    """Library that finds the lines of text of readability=sam2; MMMG's is PaddleOCR 2.10."""

    @property
    def cpu_only(self) -> str | None:  # pyright: ignore[reportIncompatibleMethodOverride]
        return None if self.readability == "sam2" else JudgeEntry.cpu_only

    def extras(self) -> frozenset[str]:
        return frozenset({"ocr"} if self.readability == "sam2" and self.reader == "rapidocr" else ())

    def models(self) -> dict[str, str]:
        return {"segmenter": self.segmenter} if self.readability == "sam2" else {}

    @property
    def is_published(self) -> bool:
        """Whether the score is MMMG's own."""
        return self.wording == "published" and self.ged == "networkx" and self.readability is not None

    @model_validator(mode="after")
    def _names_a_function(self) -> MmmgReward:
        if self.readability not in (None, "sam2") and not all(str(self.readability).partition(":")):
            raise ValueError(
                f"readability: given {self.readability!r}; write sam2, or module:function, like my_segmenter:regions"
            )
        return self

    def advice(self, name: str) -> list[str]:
        told = super().advice(name)
        if name != "mmmg" or not self.is_made_here or self.is_published:
            return told
        warning = (
            "rewards.mmmg: this score follows MMMG's idea and not its protocol, and must not be reported as MMMG; name "
            "it mmmg_style: {scorer: mmmg, ...}, or set wording=published with prompts, ged=networkx and readability"
        )
        return [*told, warning]

    def make(self) -> MmmgScorer:
        return MmmgScorer(self)


class MmmgScorer(JudgeScorer[MmmgReward]):
    """Reads `metadata.knowledge_graph` and, if it is there, `metadata.annotation`."""

    def __init__(self, options: MmmgReward) -> None:
        self.published_question = (
            copied_text("mmmg", options.prompts or "", [_GRAPH_SLOT], _WHERE)
            if options.wording == "published"
            else None
        )
        super().__init__(options, *self._parts(options), protocol="mmmg" if options.is_published else "mmmg-style")
        self._regions: Callable[[Pixels], float] | None = None

    def _parts(self, o: MmmgReward, source: str = "") -> list[Any]:
        """Everything that the scores depend on except the judge."""
        return [self.published_question or _QUESTION, o.ged, o.readability, source]

    def load(self, device: str) -> None:
        """Import the segmenter, and ask a first question.

        Raises:
            ConfigError: a library or the segmenter is missing; no such model, a wrong key, or a schema that is ignored.
        """
        missing = [name for name in ("networkx", "scipy") if importlib.util.find_spec(name) is None]
        if self.options.ged == "networkx" and missing:
            raise ConfigError(
                f"reward 'mmmg': ged 'networkx' needs {missing[0]}; pip install \"retouch[mmmg]\", or set ged=closed"
            )
        self._regions, source = self._counter(device)
        super().load(device)
        self._depend_on(*self._parts(self.options, source))

    def _first_question(self, item: RewardItem) -> object:
        graph = read_graph({"elements": ["a square", "a circle"], "dependencies": ["Contains(a square, a circle)"]})
        return self._ask(item, graph, again=False)

    def _counter(self, device: str) -> tuple[Callable[[Pixels], float] | None, str]:
        """The counter of regions, and what the scores depend on of it."""
        o = self.options
        if o.readability is None:
            return None, ""
        if o.readability == "sam2":
            counter = load_attribute(_REGION_COUNTER)(o.segmenter, o.reader, device)  # with torch
            return counter, counter.revision
        function = find_function(o.readability, "reward 'mmmg': readability")
        return _in_turn(function), source_digest(function)

    def _one(self, item: RewardItem) -> Outcome:
        try:
            graph = read_graph(item.metadata.get("knowledge_graph"))
        except ValueError as error:
            return Failure("bad_item", f"metadata.knowledge_graph: {error}")
        elements, dependencies = self._ask(item, graph)
        distance = (heuristic_ged if self.options.ged == "networkx" else closed_ged)(graph, elements, dependencies)
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
        except Exception as error:  # foreign code: only the item fails, and the judge is not asked again
            return Failure("scorer_error", f"{self.options.readability} raised {type(error).__name__}: {error}")
        if not regions >= 0:
            return Failure("scorer_error", f"{self.options.readability} returned {regions}; it must count regions")
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
            [{"type": "text", "text": f"{_QUESTION}{lines}{about}"}, image_part(item.image)],
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
            [{"type": "text", "text": question.replace(_GRAPH_SLOT, told)}, image_part(item.image)],
            None,
            lambda text: read_checklist(text, names),
            again=again,
            max_tokens=_PUBLISHED_TOKENS,
        )
        return yes[: len(graph.elements)], yes[len(graph.elements) :]


def _in_turn(function: Callable[[Pixels], float]) -> Callable[[Pixels], float]:
    """The function for several threads, because those of the judge share what it keeps."""
    lock = Lock()

    def counted(image: Pixels) -> float:
        with lock:
            return function(image)

    return counted


def _read_answers(text: str, keys: Sequence[str]) -> list[bool]:
    """Whether the answer to each key is yes.

    Raises:
        ValueError: not the schema, or an answer that is neither yes nor no.
    """
    found = read_object(text, [*keys, _DESCRIPTION])
    for key in keys:
        if found[key] not in ("yes", "no"):
            raise ValueError(f'{key} must be "yes" or "no"; given {shown(found[key])}')
    return [found[key] == "yes" for key in keys]
