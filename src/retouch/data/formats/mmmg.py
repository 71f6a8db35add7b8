"""MMMG (arXiv 2506.10963): prompts of ten disciplines and six levels of education, each with a knowledge graph.

The benchmark has the columns `key`, `prompt`, `Knowledge_Graph` (JSON text), `Annotation`, `Education` and, unless the
name of the configuration or file says it (PhD_Biology), `Discipline`. The training set is one JSON file: level ->
discipline -> list of `key`, `question`, `Visual Components` (the graph) and `Key Knowledge`; its levels are numbered
(0_preschool). They are read by different layouts, so that neither is taken for the other.
"""

from __future__ import annotations

import json
import logging
import re
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from retouch.data.dataset import DataError, ItemError, ItemFiles
from retouch.data.formats.tables import Table, content_digest, hub_configurations, hub_table, in_part, tables_of
from retouch.data.sections import (
    DISCIPLINES,
    LEVELS,
    chosen,
)
from retouch.hub import is_hub_id

if TYPE_CHECKING:
    from retouch.data.sections import MmmgData

logger = logging.getLogger(__name__)

_CELL = 100_000
"""More items than a discipline has at a level: the id of an item tells both, and stays the same whatever is chosen."""

_COLUMNS = {
    "benchmark": {"prompt": "prompt", "graph": "Knowledge_Graph", "annotation": "Annotation"},
    "train": {"prompt": "question", "graph": "Visual Components", "annotation": "Key Knowledge"},
}

_LEVEL_OF = {level.casefold(): level for level in LEVELS}
_DISCIPLINE_OF = {discipline.casefold(): discipline for discipline in DISCIPLINES}
_CONFIGURATION = re.compile(rf"({'|'.join(LEVELS)})_({'|'.join(DISCIPLINES)})", re.IGNORECASE)


def list_items(config: MmmgData) -> list[ItemFiles | ItemError]:
    """The items of the levels and disciplines asked for, in the order of the files.

    Raises:
        ConfigError: a data set that is not on this machine, without a hub.
        DataError: no such data set, one of the other layout, or nothing of it is chosen.
    """
    levels, disciplines = chosen(config.levels, LEVELS), chosen(config.disciplines, DISCIPLINES)
    rows = (
        _training_rows(config.path) if config.layout == "train" else _benchmark_rows(config.path, levels, disciplines)
    )
    columns, other = _COLUMNS[config.layout], _COLUMNS["benchmark" if config.layout == "train" else "train"]
    seen: Counter[tuple[str, str]] = Counter()
    items: list[ItemFiles | ItemError] = []
    for where, level, discipline, row in rows:
        number, seen[level, discipline] = seen[level, discipline], seen[level, discipline] + 1
        if level in levels and discipline in disciplines:
            if columns["prompt"] not in row and other["prompt"] in row and columns["graph"] not in row:
                raise DataError(
                    f"data.layout: given {config.layout!r}, but {config.path} has the columns of the other; set "
                    f"layout={'train' if config.layout == 'benchmark' else 'benchmark'}"
                )
            cell = LEVELS.index(level) * len(DISCIPLINES) + DISCIPLINES.index(discipline)
            item = _item(where, cell * _CELL + number, level, discipline, row, columns)
            prompt = item.prompt if isinstance(item, ItemFiles) else where
            if in_part(content_digest(" ".join(prompt.split())), config.part, config.held_out_share):
                items.append(item)
    if not items:
        raise DataError(
            f"data.path: {config.path} has nothing with levels {config.levels}, disciplines {config.disciplines} and "
            f"part {config.part} (held_out_share {config.held_out_share:g}); choose others, or add data"
        )
    return items


Row = tuple[str, str, str, Mapping[str, Any]]
"""Where it stands, level, discipline, columns."""


def _benchmark_rows(path: str, levels: tuple[str, ...], disciplines: tuple[str, ...]) -> Iterator[Row]:
    if is_hub_id(path):
        tables = _hub_tables(path, levels, disciplines)
    elif Path(path).suffix == ".json":
        raise DataError(
            f"data.layout: given 'benchmark', but {path} is a JSON file, as the training set is; set layout=train"
        )
    else:
        tables = tables_of(path)
    for table in tables:
        named = _CONFIGURATION.search(table.name)
        for position, row in enumerate(table):
            where = f"{table.name} row {position}"
            level = _LEVEL_OF.get(str(row.get("Education", "")).casefold())
            discipline = _DISCIPLINE_OF.get(str(row.get("Discipline", "")).casefold())
            if named:
                level = level or _LEVEL_OF[named[1].casefold()]
                discipline = discipline or _DISCIPLINE_OF[named[2].casefold()]
            if not level or not discipline:
                raise DataError(
                    f"{path}: {where} does not say its {'discipline' if level else 'level'}: neither in the column "
                    f"{'Discipline' if level else 'Education'} nor in its file's name, like PhD_Biology"
                )
            yield where, level, discipline, row


def _hub_tables(path: str, levels: tuple[str, ...], disciplines: tuple[str, ...]) -> list[Table]:
    """The selected configurations that exist (of the 60 pairs the benchmark has 59); without a hub, those that were
    downloaded.

    Raises:
        ConfigError: no configuration of the data set was downloaded, and there is no hub.
        DataError: none of the selected configurations exists, or one cannot be loaded.
    """
    asked = [f"{level}_{discipline}" for level in levels for discipline in disciplines]
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
        logger.log(
            logging.WARNING if existing is None else logging.INFO, "%s has no %s: left out", where, ", ".join(absent)
        )
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
        raise DataError(
            f"data.path: given {path!r}; for layout=train download its JSON file, and give the path of that"
        )
    given = Path(path).expanduser()
    file = given / "train.json" if given.is_dir() else given
    if not file.is_file() or file.suffix != ".json":
        raise DataError(f"data.path: {file}: no such file; layout=train takes the JSON file of the training set")
    try:
        content: Any = json.loads(file.read_text(encoding="utf-8-sig"))
    except (UnicodeDecodeError, json.JSONDecodeError) as error:
        raise DataError(f"{file}: not valid JSON: {error}") from None
    shape = "it must be level -> discipline -> list of items, like {'0_preschool': {'Math': [...]}}"
    if not isinstance(content, dict) or not all(isinstance(v, dict) for v in content.values()):  # pyright: ignore[reportUnknownVariableType, reportUnknownMemberType]
        raise DataError(f"{file}: not the training set of MMMG: {shape}")
    for level_name, by_discipline in cast("dict[str, dict[str, Any]]", content).items():
        level = _LEVEL_OF.get(re.sub(r"^\d+_", "", level_name).casefold())
        if level is None:
            raise DataError(f"{file}: {level_name!r} is no level of {', '.join(LEVELS)}; {shape}")
        for discipline_name, rows in by_discipline.items():
            discipline = _DISCIPLINE_OF.get(discipline_name.casefold())
            if discipline is None or not isinstance(rows, list):
                raise DataError(f"{file}: {level_name}: {discipline_name!r}: {shape}")
            for position, row in enumerate(cast("list[Any]", rows)):
                where = f"{level_name}/{discipline_name} entry {position}"
                yield where, level, discipline, cast("dict[str, Any]", row) if isinstance(row, dict) else {}


def _item(
    where: str, number: int, level: str, discipline: str, row: Mapping[str, Any], columns: Mapping[str, str]
) -> ItemFiles | ItemError:
    prompt = row.get(columns["prompt"])
    if not isinstance(prompt, str) or not prompt.strip():
        return ItemError(where, f"{columns['prompt']} is missing or empty")
    graph = row.get(columns["graph"])
    if isinstance(graph, str):
        try:
            graph = json.loads(graph)
        except ValueError as error:
            return ItemError(where, f"{columns['graph']} is not JSON: {error}")
    if not isinstance(graph, Mapping):
        return ItemError(
            where, f"{columns['graph']} must be an object with elements and dependencies; given {repr(graph)[:60]}"
        )
    graph = cast("Mapping[str, Any]", graph)
    size = sum(len(part) for name in ("elements", "dependencies") if isinstance(part := graph.get(name), list | dict))
    metadata = {"key": row.get("key"), "level": level, "discipline": discipline, "knowledge_graph": dict(graph)}
    note = row.get(columns["annotation"])
    return ItemFiles(
        id=number,
        prompt=prompt,
        metadata={**metadata, "annotation": note} if note else metadata,
        difficulty=LEVELS.index(level) + size / (size + 100),  # within a level, the larger graph is the harder
    )
