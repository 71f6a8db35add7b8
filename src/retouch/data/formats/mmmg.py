"""MMMG (arXiv 2506.10963): prompts of ten disciplines and six levels of education, each with a knowledge graph.

The benchmark has the columns `key`, `prompt`, `Knowledge_Graph` (JSON text), `Annotation`, `Education` and, unless the
name of the configuration or file has it (PhD_Biology), `Discipline`. The training set is one JSON file: level ->
discipline -> list of `key`, `question`, `Visual Components` (the graph) and `Key Knowledge`; its levels are numbered
(0_preschool).
"""

from __future__ import annotations

import logging
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Set
from contextlib import suppress
from itertools import product
from pathlib import Path
from typing import Any, ClassVar, Literal, cast

from pydantic import ValidationInfo, field_validator

from retouch.data.base import DataError, DataSection, ItemError, ItemFiles, ProtocolData, chosen, item_or_error
from retouch.data.formats import FACETS
from retouch.data.lists import parsed, read_text, suffix_of
from retouch.data.remote import local_path
from retouch.data.tables import Table, content_digest, hub_configurations, hub_table, in_part, tables_of
from retouch.files import plain_json
from retouch.files.disk import file_in
from retouch.files.hub import is_hub_id

logger = logging.getLogger(__name__)

LEVELS = tuple(FACETS["level"])
"""Levels of education of MMMG, from the easiest."""

DISCIPLINES = (
    "Biology", "Chemistry", "Economics", "Engineering", "Geography", "History", "Literature", "Math", "Philosophy",
    "Sociology",
)  # fmt: skip

_CELL = 100_000
"""More items than a discipline has at a level: the id of an item follows from both, whatever is chosen."""

_COLUMNS = {
    "benchmark": {"prompt": "prompt", "graph": "Knowledge_Graph", "annotation": "Annotation"},
    "train": {"prompt": "question", "graph": "Visual Components", "annotation": "Key Knowledge"},
}

_LEVEL_OF = {level.casefold(): level for level in LEVELS}
_DISCIPLINE_OF = {discipline.casefold(): discipline for discipline in DISCIPLINES}
_CONFIGURATION = re.compile(rf"({'|'.join(LEVELS)})_({'|'.join(DISCIPLINES)})", re.IGNORECASE)

Row = tuple[str, str, str, Mapping[str, Any]]
"""Place for messages, level, discipline, columns."""


class MmmgData(ProtocolData):
    """MMMG (arXiv 2506.10963): prompts with the knowledge graphs that their images should show."""

    FREE_IN_EPOCH: ClassVar[Set[str]] = {"layout", "levels", "disciplines"}

    format: Literal["mmmg"] = "mmmg"
    layout: Literal["benchmark", "train"] = "benchmark"
    """The benchmark's columns (parquet, arrow, JSONL, or the hub), or the JSON file of the training set."""
    levels: str = "all"
    """"all", or some of preschool, primaryschool, secondaryschool, highschool, undergraduate, PhD, separated by
    commas."""
    disciplines: str = "all"
    """"all", or some of Biology, Chemistry, Economics, Engineering, Geography, History, Literature, Math, Philosophy,
    Sociology, separated by commas."""

    choices: ClassVar[tuple[str, ...]] = ("levels", "disciplines")

    @field_validator("levels", "disciplines")
    @classmethod
    def _are_known(cls, value: str, info: ValidationInfo) -> str:
        names = LEVELS if info.field_name == "levels" else DISCIPLINES
        return value if value == "all" else ",".join(chosen(value, names))

    @property
    def hub_id(self) -> str | None:
        return None if self.layout == "train" else super().hub_id

    @property
    def cells(self) -> set[tuple[str, str]]:
        """(level, discipline) that are chosen."""
        return {*product(chosen(self.levels, LEVELS), chosen(self.disciplines, DISCIPLINES))}

    def overlaps(self, other: DataSection) -> bool:
        return isinstance(other, MmmgData) and bool(self.cells & other.cells)

    def list_items(self) -> list[ItemFiles | ItemError]:
        """The items of the chosen levels and disciplines, in the order of the files."""
        rows = _training_rows(self.path) if self.layout == "train" else self._benchmark_rows()
        columns, other = _COLUMNS[self.layout], _COLUMNS["benchmark" if self.layout == "train" else "train"]
        seen: Counter[tuple[str, str]] = Counter()
        items: list[ItemFiles | ItemError] = []
        cells = self.cells
        for where, level, discipline, row in rows:
            # every row counts, chosen or not: an id must not depend on what else is chosen
            number, seen[level, discipline] = seen[level, discipline], seen[level, discipline] + 1
            if (level, discipline) not in cells:
                continue
            if columns["prompt"] not in row and other["prompt"] in row and columns["graph"] not in row:
                raise DataError(
                    f"data.layout: given {self.layout!r}, but {self.path} has the columns of the other; set "
                    f"layout={'train' if self.layout == 'benchmark' else 'benchmark'}"
                )
            item = item_or_error(where, _item, number, level, discipline, row, columns)
            prompt = item.prompt if isinstance(item, ItemFiles) else where
            if in_part(content_digest(" ".join(prompt.split())), self.part, self.held_out_share):
                items.append(item)
        return self.require_items(items)

    def _benchmark_rows(self) -> Iterator[Row]:
        if self.hub_id is None and suffix_of(Path(self.path)) == ".json":
            raise DataError(
                f"data.layout: given 'benchmark', but {self.path} is a JSON file, like the training set; set "
                "layout=train"
            )
        for table in tables_of(self.path) if self.hub_id is None else self._hub_tables():
            # a table of the hub is one configuration, like PhD_Biology, which names what its rows may leave out
            named = _CONFIGURATION.search(table.name)
            for position, row in enumerate(table):
                where = f"{table.name} row {position}"
                level = _LEVEL_OF.get(str(row.get("Education", "")).casefold())
                discipline = _DISCIPLINE_OF.get(str(row.get("Discipline", "")).casefold())
                if named:
                    level = level or _LEVEL_OF[named[1].casefold()]
                    discipline = discipline or _DISCIPLINE_OF[named[2].casefold()]
                if not level or not discipline:
                    missing, column = ("discipline", "Discipline") if level else ("level", "Education")
                    raise DataError(
                        f"{self.path}: {where} has no {missing}: neither in the column {column} nor in its file's "
                        "name, like PhD_Biology"
                    )
                yield where, level, discipline, row

    def _hub_tables(self) -> list[Table]:
        """The selected configurations that exist (of the 60 pairs the benchmark has 59); without a hub, those that were
        downloaded."""
        path, cells = self.path, self.cells
        asked = ["_".join(cell) for cell in product(LEVELS, DISCIPLINES) if cell in cells]
        existing = hub_configurations(path)
        if existing is None:
            found, where = _downloaded(path, asked), f"{path} on this machine, which cannot reach the hub,"
        else:
            found, where = {name: hub_table(path, "test", name) for name in asked if name in existing}, path
        absent = [name for name in asked if name not in found]
        if not found:
            raise DataError(
                f"data.path: {where} has none of the configurations {', '.join(absent[:3])} that data.levels and "
                "data.disciplines choose; choose others, or give another data set"
            )
        if absent:
            level = logging.WARNING if existing is None else logging.INFO
            logger.log(level, "%s has no %s: left out", where, ", ".join(absent))
        return list(found.values())


def _downloaded(path: str, names: list[str]) -> dict[str, Table]:
    """The tables that the library loads from its cache."""
    found: dict[str, Table] = {}
    for name in names:
        with suppress(DataError):
            found[name] = hub_table(path, "test", name)
    return found


def _training_rows(path: str) -> Iterator[Row]:
    if is_hub_id(path):
        raise DataError(f"data.path: given {path!r}; for layout=train download its JSON file, and give the path of it")
    file = file_in(local_path(path), "train.json")
    if not file.is_file() or suffix_of(file) != ".json":
        raise DataError(f"data.path: {file}: no such file; layout=train takes the JSON file of the training set")
    shape = "it must be level -> discipline -> list of items, like {'0_preschool': {'Math': [...]}}"
    # The published file has numbers before its levels ("0_preschool") and other capitals than the benchmark. Any other
    # name is an error, because a part of the set would silently be missing.
    content = parsed(read_text(file), str(file))
    by_level = cast("dict[str, Any]", content) if isinstance(content, dict) else {}
    if not isinstance(content, dict) or not all(isinstance(value, dict) for value in by_level.values()):
        raise DataError(f"{file}: not the training set of MMMG: {shape}")
    for level_name, by_discipline in by_level.items():
        level = _LEVEL_OF.get(re.sub(r"^\d+_", "", level_name).casefold())
        if level is None:
            raise DataError(f"{file}: {level_name!r} is no level of {', '.join(LEVELS)}; {shape}")
        for discipline_name, rows in cast("dict[str, Any]", by_discipline).items():
            discipline = _DISCIPLINE_OF.get(discipline_name.casefold())
            if discipline is None or not isinstance(rows, list):
                raise DataError(f"{file}: {level_name}: {discipline_name!r}: {shape}")
            for position, row in enumerate(cast("list[Any]", rows)):
                fields = cast("dict[str, Any]", row) if isinstance(row, dict) else {}
                yield f"{level_name}/{discipline_name} entry {position}", level, discipline, fields


def _item(number: int, level: str, discipline: str, row: Mapping[str, Any], columns: Mapping[str, str]) -> ItemFiles:
    prompt = row.get(columns["prompt"])
    if not isinstance(prompt, str) or not prompt.strip():
        raise DataError(f"{columns['prompt']} is missing or empty")
    graph = row.get(columns["graph"])
    if isinstance(graph, str):
        try:
            graph = plain_json.loads(graph)
        except ValueError as error:
            raise DataError(f"{columns['graph']} is not JSON: {error}") from None
    if not isinstance(graph, Mapping):
        raise DataError(
            f"{columns['graph']} must be an object with elements and dependencies; given {repr(graph)[:60]}"
        )
    graph = cast("Mapping[str, Any]", graph)
    size = sum(len(part) for name in ("elements", "dependencies") if isinstance(part := graph.get(name), list | dict))
    metadata = {"key": row.get("key"), "level": level, "discipline": discipline, "knowledge_graph": dict(graph)}
    note = row.get(columns["annotation"])
    cell = LEVELS.index(level) * len(DISCIPLINES) + DISCIPLINES.index(discipline)
    return ItemFiles(
        id=cell * _CELL + number,
        prompt=prompt,
        metadata={**metadata, "annotation": note} if note else metadata,
        difficulty=LEVELS.index(level) + size / (size + 100),  # within a level, the larger graph is the harder
    )
