"""Lists of items in text, JSON, JSONL and CSV files."""

from __future__ import annotations

import csv
import io
import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast

from retouch import plain_json
from retouch.data.base import DataError

SUFFIXES = (".json", ".jsonl", ".csv")
"""Files that `entries_of` reads."""

IMAGE_KEYS = ("image_path", "image", "file_name", "image_file_name")
"""Keys that name the image of an entry; the first that is present counts."""


def read_text(path: Path) -> str:
    """A text file, without a byte-order mark.

    Raises:
        DataError: not UTF-8, or with a null character.
    """
    try:
        text = path.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        raise DataError(f"{path}: not UTF-8 (byte {error.start}); save it as UTF-8") from None
    if "\0" in text:
        raise DataError(f"{path}: holds a null character; is it a text file?")
    return text


def lines_of(path: Path) -> list[tuple[int, str]]:
    """(number from 1, line) of the lines that are not blank. Raises as `read_text`."""
    # splitlines() would also cut at U+2028, which a JSON string or a text may hold
    return [(number, line) for number, line in enumerate(read_text(path).split("\n"), 1) if line.strip()]


def parsed(text: str, where: str, remedy: str | None = None) -> Any:
    """The value of a JSON text.

    Args:
        where, remedy: for the message; without a remedy it has the line of the text.

    Raises:
        DataError: not JSON, or with a string that no file name or prompt can be.
    """
    try:
        value = plain_json.loads(text)
    except json.JSONDecodeError as error:
        raise DataError(f"{where}: not valid JSON: {error.msg}{remedy or f' (line {error.lineno})'}") from None
    except ValueError as error:
        raise DataError(f"{where}: not valid JSON: {error}") from None
    if _ESCAPE.search(text) and (problem := _unusable(value)):
        raise DataError(f"{where}: {problem}")
    return value


_ESCAPE = re.compile(r"\\u(?:[dD][89a-fA-F]|0000)")
"""Escapes of half a surrogate pair (which a whole pair has too) and of the null character."""


def _unusable(value: Any) -> str | None:
    """The problem of the strings in a value; None if there is none."""
    text = json.dumps(value, ensure_ascii=False)
    if "\\u0000" in text:
        return "holds a null character"
    try:
        text.encode()
    except UnicodeEncodeError:
        return "holds half of a surrogate pair, which is no character"
    return None


def entries_of(path: Path) -> list[Any]:
    """The entries of a JSON list, a JSONL file with an object in each line, or a CSV file without its empty cells.

    Raises:
        DataError: not UTF-8, or not what its suffix means.
    """
    if path.suffix == ".csv":
        header, *rows = csv_rows(path) or [[]]
        entries = [{key: cell for key, cell in zip(header, row, strict=False) if cell} for row in rows]
        return [{k: int(v) if k == "id" and v.isdecimal() else v for k, v in entry.items()} for entry in entries]
    text = read_text(path)
    if text.lstrip().startswith("["):
        return cast("list[Any]", parsed(text, str(path)))
    remedy = "; write one object in each line, or one JSON list of them"
    return [parsed(line, f"{path} line {number}", remedy) for number, line in lines_of(path)]


def csv_rows(path: Path) -> list[list[str]]:
    """Every row of a CSV file that is not blank, the header first.

    Raises:
        DataError: not UTF-8, not CSV, or a row with more cells than the header.
    """
    reader = csv.reader(io.StringIO(read_text(path), newline=""), strict=True)
    rows: list[list[str]] = []
    try:
        for row in reader:
            if rows and len(row) > len(rows[0]):
                raise DataError(
                    f"{path} line {reader.line_num}: {len(row)} cells, but the header names {len(rows[0])}; put a cell "
                    "with a comma in double quotes"
                )
            if row:
                rows.append(row)
    except csv.Error as error:
        raise DataError(f"{path} line {reader.line_num}: not valid CSV: {error}") from None
    return rows


def fields_of(entry: Any) -> Mapping[str, Any]:
    """The fields of an entry.

    Raises:
        DataError: not an object.
    """
    if not isinstance(entry, dict):
        raise DataError(f"{entry!r} is not an object")
    return cast("dict[str, Any]", entry)


def id_of(entry: Mapping[str, Any], position: int) -> int:
    """The `id` of an entry, else its position.

    Raises:
        DataError: not an integer.
    """
    number = entry.get("id", position)
    if not isinstance(number, int) or isinstance(number, bool):
        raise DataError(f"id is {number!r}; it must be an integer")
    return number
