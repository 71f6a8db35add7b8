"""GEdit-Bench (arXiv 2504.17761): instructions in English and Chinese for 11 kinds of edits of real images.

Columns of the hub's data set, of which the only split is `train`: `task_type`, `key`, `instruction`,
`instruction_language` (en or cn), `input_image` (shown to the judge), `input_image_raw`, `Intersection_exist` (whether
all compared closed models answered).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, ClassVar, Literal

from pydantic import field_validator

from retouch.data.base import DataError, DataSection, ItemError, ItemFiles, ProtocolData, chosen, item_or_error
from retouch.data.lists import require_text_keys
from retouch.data.tables import Table, content_digest, hub_table, image_of, in_part, tables_of
from retouch.imaging.fitting import Fit

TASKS = (
    "background_change", "color_alter", "material_alter", "motion_change", "ps_human", "style_change", "subject-add",
    "subject-remove", "subject-replace", "text_change", "tone_transfer",
)  # fmt: skip
"""The 11 tasks, in the order of the published script."""

_COLUMNS = ("task_type", "key", "instruction", "instruction_language")


class GEditData(ProtocolData):
    """GEdit-Bench (arXiv 2504.17761): one example for every row. A folder holds parquet, arrow or JSONL files with the
    columns of the hub's data set."""

    format: Literal["gedit"] = "gedit"
    language: Literal["en", "cn", "all"] = "all"
    """Instructions in English, in Chinese, or both, as separate examples."""
    tasks: str = "all"
    """"all", or some of the 11 tasks, like subject-add, text_change, separated by commas."""
    fit: Fit = "stretch"
    """"stretch" ignores the aspect ratio; "crop" scales to cover and cuts out the middle."""

    has_images: ClassVar[frozenset[str]] = frozenset({"source"})
    choices: ClassVar[tuple[str, ...]] = ("language", "tasks")

    @field_validator("tasks")
    @classmethod
    def _are_tasks(cls, value: str) -> str:
        return value if value == "all" else ",".join(chosen(value, TASKS, "no task"))

    @property
    def languages(self) -> tuple[str, ...]:
        """Languages that are chosen."""
        return ("en", "cn") if self.language == "all" else (self.language,)

    def overlaps(self, other: DataSection) -> bool:
        # an image has instructions of several tasks and of both languages
        return isinstance(other, GEditData)

    def list_items(self) -> list[ItemFiles | ItemError]:
        """The items of the chosen languages and tasks, in the order of the files."""
        tables = tables_of(self.path) if self.hub_id is None else [hub_table(self.path, "train")]
        rows = ((table, position, row) for table in tables for position, row in enumerate(table))
        return self.require_items([item for number, row in enumerate(rows) for item in self._items(number, *row)])

    def _items(
        self, number: int, table: Table, position: int, row: Mapping[str, Any]
    ) -> Iterator[ItemFiles | ItemError]:
        """The item of one row; none if it is not chosen."""
        tasks = chosen(self.tasks, TASKS)
        about = {name: row.get(name) for name in _COLUMNS}
        known = all(isinstance(about[name], str) for name in _COLUMNS)
        if known and (about["task_type"] not in tasks or about["instruction_language"] not in self.languages):
            return
        where = f"{table.name} row {position}"
        try:
            image = image_of(table, position, row, column="input_image")
        except DataError as error:
            yield ItemError(where, str(error))
            return
        if in_part(content_digest(image), self.part, self.held_out_share):
            yield item_or_error(where, _item, number, image, about, row.get("Intersection_exist"))


def _item(number: int, image: Any, about: Mapping[str, Any], intersection: object) -> ItemFiles:
    require_text_keys(about, *_COLUMNS)
    if about["task_type"] not in TASKS or about["instruction_language"] not in ("en", "cn"):
        raise DataError(
            f"task_type {about['task_type']!r} or instruction_language {about['instruction_language']!r} is none of "
            "the benchmark"
        )
    if not isinstance(intersection, bool):
        raise DataError(f"Intersection_exist must be true or false; given {intersection!r}")
    kept = {name: about[name] for name in ("key", "task_type", "instruction_language")}
    return ItemFiles(
        id=number,
        prompt=about["instruction"],
        source_path=image,
        metadata={**kept, "intersection_exist": intersection},
    )
