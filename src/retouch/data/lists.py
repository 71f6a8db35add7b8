"""Lists of items in text, JSON, JSONL, CSV and TSV files."""

from __future__ import annotations

import csv
import hashlib
import io
import json
import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, cast

from retouch.data.base import DataError
from retouch.files import plain_json
from retouch.imaging.lines import TextLine, joined, parse_lines, polygon_mask
from retouch.imaging.reading import PackedImage, as_shown, open_image

TABLES = (".csv", ".tsv")
"""Files of cells, the first row of which names the columns."""

SUFFIXES = (".json", ".jsonl", *TABLES)
"""Files that `entries_of` reads."""

MOST_DIGITS = 18
"""Maximum digits of a number in a list; it becomes the id of an example."""

PATH_KEYS = {
    "image_path": ("image_path", "image", "file_name", "image_file_name"),
    "mask_path": ("mask_path", "mask", "mask_file_name"),
    **{f"{role}_path": (f"{role}_path", f"{role}_file_name") for role in ("reference", "target", "win", "lose")},
    "t5_embedding_path": ("t5_embedding_path",),
}
"""File of an entry -> the keys that name it; the first that is present counts."""

EDITED_KEYS = ("edit_image", "control_path", "control_path_0", "control_image", "conditioning_image")
"""Keys of the image that is edited in lists of DiffSynth, musubi-tuner and diffusers, whose `image` is the result."""

OTHER_KEYS = {
    "image_path": (
        *("source", "source_path", "source_image", "source_img", "input_image", "original_image", "image_file"),
        *("img_path", *EDITED_KEYS),
    ),
    "mask_path": ("mask_image", "mask_img", "mask_file"),
    "target_path": ("target", "target_image", "target_img", "edited_image", "output_image"),
    "reference_path": ("reference", "reference_image"),
    "win_path": ("win",),
    "lose_path": ("lose",),
}
"""File of an entry -> keys of other programs, which are metadata here: an entry with its file under one is an error."""


def require_file(path: Path) -> None:
    """Raises: DataError: nothing, or a pipe, a device, or a folder, in place of a file."""
    if not path.is_file():
        raise DataError(f"{path}: not a file")


def read_text(path: Path) -> str:
    """A text file, without a byte-order mark.

    Raises:
        DataError: not a file, not UTF-8, or with a null character.
    """
    require_file(path)
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
        DataError: not JSON, an object with a key twice, a number that is NaN or infinite, or a string that no file name
            or prompt can be.
    """
    try:
        value = plain_json.loads(text, unique=True)
    except json.JSONDecodeError as error:
        raise DataError(f"{where}: not valid JSON: {error.msg}{remedy or f' (line {error.lineno})'}") from None
    except ValueError as error:
        raise DataError(f"{where}: not valid JSON: {error}") from None
    # The text is searched before the values are walked: a list may have a million entries, and hardly one has either.
    if "\\u0000" in text and "\\u0000" in json.dumps(value, ensure_ascii=False):
        raise DataError(f"{where}: holds a null character")
    if _MAY_BE_INFINITE.search(text) and (path := _infinite(value)) is not None:
        inside = f"entry {path[0]}: " if isinstance(value, list) else ""
        key = ".".join(path[1:] if inside else path) or "it"
        raise DataError(
            f"{where}: {inside}{key} is NaN or infinite, which no JSON number is; write null, or leave the key out"
        )
    return value


_MAY_BE_INFINITE = re.compile(r"NaN|Infinity|[0-9][eE]\+?[0-9]{3}")
"""Matches every text with a number that is NaN or infinite, and some texts with such words in strings."""


def _infinite(value: Any) -> tuple[str, ...] | None:
    """The keys that lead to a number that is NaN or infinite; None without one."""
    if isinstance(value, float):
        return None if math.isfinite(value) else ()
    parts = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, part in cast("Iterable[tuple[object, Any]]", parts):
        if (path := _infinite(part)) is not None:
            return (str(key), *path)
    return None


def entries_of(path: Path) -> list[Any]:
    """The entries of a JSON list, a JSONL file with an object in each line, or a CSV or TSV file without its empty
    cells.

    Raises:
        DataError: not UTF-8, or not what its suffix means.
    """
    if suffix_of(path) in TABLES:
        header, *rows = csv_rows(path) or [[]]
        entries = [{key: cell for key, cell in zip(header, row, strict=False) if cell} for row in rows]
        return [{k: int(v) if k == "id" and is_number(v) else v for k, v in entry.items()} for entry in entries]
    text = read_text(path)
    if text.lstrip().startswith("["):
        return cast("list[Any]", parsed(text, str(path)))
    remedy = "; write one object in each line, or one JSON list of them"
    try:
        return [parsed(line, f"{path} line {number}", remedy) for number, line in lines_of(path)]
    except DataError:
        _refuse_wrapped(path, text)
        raise


def _refuse_wrapped(path: Path, text: str) -> None:
    """Raises: DataError: a text that is no JSONL file is an object with the list under a key."""
    try:
        value = plain_json.loads(text)
    except ValueError:
        return
    if isinstance(value, dict) and (key := _wrapping_key(cast("dict[str, Any]", value))) is not None:
        raise DataError(f"{path}: holds an object with a list under {key!r}; write the list alone")


def _wrapping_key(entry: Mapping[str, Any]) -> str | None:
    """The key under which an object holds a list of objects with a caption."""
    lists = ((key, cast("list[Any]", part)) for key, part in entry.items() if isinstance(part, list))
    firsts = {key: cast("dict[str, Any]", part[0]) for key, part in lists if part and isinstance(part[0], dict)}
    for key, first in firsts.items():  # the lines of one image have texts, too
        lines = not first.keys().isdisjoint({"box", "polygon"}) or (key in TEXT_KEYS and set(first) == {"text"})
        if not lines and not _CAPTIONS.isdisjoint(first):
            return key
    return None


_CAPTIONS = frozenset({"prompt", "text", "caption"})
"""Keys of an entry's caption; `prompt` alone is read, and a message names the others."""


def suffix_of(path: Path) -> str:
    """The suffix of a file in lower case, by which it is read."""
    return path.suffix.lower()


def is_number(text: str) -> bool:
    """Whether a text is a number that Python reads: digits, and at most MOST_DIGITS of them."""
    return text.isdecimal() and len(text) <= MOST_DIGITS


def number_of(text: str, what: str) -> int:
    """The number that a text is.

    Args:
        what: names the text in the message.

    Raises:
        DataError: no number, or more than MOST_DIGITS digits.
    """
    if not text.isdecimal():
        raise DataError(f"{what} {text[:40]!r} must be a number")
    if not is_number(text):
        raise DataError(f"{what} {text[:40]!r} has {len(text)} digits; at most {MOST_DIGITS} are read")
    return int(text)


def csv_rows(path: Path) -> list[list[str]]:
    """Every row of a CSV file, or a TSV file with tabs between the cells, that is not blank; the header first, its
    names without blanks around them. In a TSV file, quotes are a part of a cell that does not begin and end with one.

    Raises:
        DataError: not UTF-8, not CSV, a header of another separator, a name that stands twice in it, a second header,
            a row with more cells than it, or cells of a TSV file that quotes divide in two ways.
    """
    delimiter = separator_of(path)
    rows: list[list[str]] = []
    for number, row in _tab_rows(path) if delimiter == "\t" else _comma_rows(path):
        if rows and len(row) > len(rows[0]):
            raise DataError(
                f"{path} line {number}: {len(row)} cells, but the header names {len(rows[0])}; put a cell with a "
                f"{_SEPARATORS[delimiter]} in double quotes"
            )
        if rows and [cell.strip("\ufeff ") for cell in row] == rows[0]:
            raise DataError(
                f"{path} line {number}: the header stands here again, as in two files that were joined; delete it, or "
                "give the list as .jsonl if it is an item"
            )
        if row:
            rows.append(row if rows else _header(path, row))
    return rows


def _comma_rows(path: Path) -> Iterator[tuple[int, list[str]]]:
    """(line of its end, row) of a CSV file; a blank line has no cells. Where the header has blanks behind its commas,
    blanks there are no part of a cell: they would make its quotes a part of it, too."""
    text = read_text(path)
    spaced = ", " in text.lstrip().partition("\n")[0]
    reader = csv.reader(io.StringIO(text, newline=""), strict=True, skipinitialspace=spaced)
    try:
        for row in reader:
            yield reader.line_num, row
    except csv.Error as error:
        raise DataError(f"{path} line {reader.line_num}: not valid CSV: {error}") from None


_TAB_CELL = re.compile(r'(?:"([^"]*(?:""[^"]*)*)"|([^\t\n]*))(\t|\n|\Z)')
"""A cell in quotes, in which two are one, or a cell as it stands; and what ends it."""


def _tab_rows(path: Path) -> Iterator[tuple[int, list[str]]]:
    """(line of its end, row) of a TSV file; a blank line has no cells."""
    # Quotes in a TSV file are text, except around a whole cell, which may hold line breaks. A cell that merely begins
    # with a quote would swallow the rows up to the next one: rows of the header's width inside a cell show it.
    text, row, number, start, width = read_text(path), list[str](), 1, 0, 0
    for cell in _TAB_CELL.finditer(text):
        quoted, plain, end = cell.groups()
        number += (quoted or "").count("\n")
        row.append(plain if quoted is None else quoted.replace('""', '"'))
        if end != "\t":
            lines = text[start : cell.end()].removesuffix("\n").split("\n")
            if width > 1 < len(lines) and {line.count("\t") for line in lines} == {width - 1}:
                raise DataError(
                    f"{path} line {number}: a double quote that begins a cell on line {number - len(lines) + 1} ends "
                    f"here, but each line has {width} cells, as the header; put a cell that begins with a double quote "
                    "in double quotes, and double those within it"
                )
            row = [] if row == [plain] == [""] else row
            yield number, row
            width = width or len(row)
            row, number, start = [], number + 1, cell.end()


_SEPARATORS = {",": "comma", ";": "semicolon", "\t": "tab"}


def separator_of(path: Path) -> str:
    """The character between the cells of a table."""
    return "\t" if suffix_of(path) == ".tsv" else ","


def _header(path: Path, row: Sequence[str]) -> list[str]:
    names = [name.strip() for name in row]
    meant = separator_of(path)
    other = next((name for sign, name in _SEPARATORS.items() if sign != meant and sign in row[0]), None)
    if len(names) == 1 and other is not None:
        raise DataError(
            f"{path}: the header names one column, {names[0]!r}, as with a {other} between the cells; save it with a "
            f"{_SEPARATORS[meant]} between them"
        )
    twice = next((name for name in names if name and names.count(name) > 1), None)
    if twice is not None:
        raise DataError(f"{path}: the header names {twice!r} twice; rename one of the columns")
    return names


def data_list_of(path: Path) -> list[Any]:
    """The entries of a JSON object with `data_list`.

    Raises:
        DataError: not JSON, or without the list.
    """
    content = parsed(read_text(path), str(path))
    if not isinstance(content, dict) or not isinstance(content.get("data_list"), list):
        raise DataError(f"{path}: holds no object with data_list")
    return cast("list[Any]", content["data_list"])


def fields_of(entry: Any) -> Mapping[str, Any]:
    """The fields of an entry.

    Raises:
        DataError: not an object.
    """
    if not isinstance(entry, dict):
        raise DataError(f"{entry!r} is not an object")
    return cast("dict[str, Any]", entry)


def require_text_keys(entry: Mapping[str, Any], *names: str, remedy: str = "") -> None:
    """Check that an entry has a text under every key.

    Raises:
        DataError: one is missing or empty; with the keys that the entry has in place of a missing one.
    """
    missing = sorted(name for name in names if not isinstance(entry.get(name), str) or not entry[name].strip())
    if missing:
        raise DataError(f"{', '.join(missing)} missing or empty{remedy}{keys_in_place_of(missing, entry)}")


_MOST_KEYS = 12
"""Keys of an entry in a message."""


def keys_in_place_of(names: Sequence[str], entry: Mapping[str, Any]) -> str:
    """The keys of an entry without some that it needs, for the end of a message, and the likely cause; "" if it has
    these keys, or none."""
    absent = [name for name in names if name not in entry]
    if not absent or not entry:
        return ""
    more = f" and {len(entry) - _MOST_KEYS} more" if len(entry) > _MOST_KEYS else ""
    keys = f"; its keys are {', '.join(map(repr, list(entry)[:_MOST_KEYS]))}{more}"
    if near := near_keys(entry, absent):
        return f"{keys}: rename " + ", ".join(f"{key!r} to {name!r}" for key, name in near.items())
    wrapping = _wrapping_key(entry)
    return keys if wrapping is None else f"{keys}: write the list under {wrapping!r} alone"


def near_keys(entry: Mapping[str, Any], names: Iterable[str]) -> dict[str, str]:
    """Keys of an entry -> the names of which they differ in capitals and blanks alone, where the entry has no such."""
    odd = {key: folded for key in entry if (folded := key.strip().casefold()) != key and entry[key]}
    if not odd:
        return {}
    meant = {name.casefold(): name for name in names if name not in entry}
    return {key: meant[folded] for key, folded in odd.items() if folded in meant}


def id_of(entry: Mapping[str, Any], position: int) -> int:
    """The `id` of an entry, else its position.

    Raises:
        DataError: not an integer.
    """
    number = entry.get("id", position)
    if not isinstance(number, int) or isinstance(number, bool):
        raise DataError(f"id is {number!r}; it must be an integer")
    return number


TEXT_KEYS = ("text", "texts", "lines")
"""Keys of what to write: one text or a list of texts, a list of texts, a list of lines with their places."""


def text_fields(entry: Mapping[str, Any]) -> dict[str, Any]:
    """Metadata of what an entry asks to write: `text`, and `lines` for several texts or texts with places.

    Raises:
        DataError: texts of a wrong type, or under more than one key.
    """
    given = {key: entry[key] for key in TEXT_KEYS if entry.get(key) is not None}
    text = given.get("text")
    if isinstance(text, str) and len(given) == 1:
        return given
    if isinstance(text, str) and _letters(joined(line.text for line in _lines_of(given))) == _letters(text):
        del given["text"]  # what `line_fields` made of the lines
    if len(given) > 1:
        raise DataError(f"{' and '.join(given)} given; keep one of them")
    return line_fields(_lines_of(given)) if given else {}


def _letters(text: str) -> str:
    return "".join(text.split())


def _lines_of(given: Mapping[str, Any]) -> tuple[TextLine, ...]:
    key = next((key for key in reversed(TEXT_KEYS) if key in given and key != "text"), "text")
    if key == "text" and not isinstance(given["text"], list):
        raise DataError(f"text is {given['text']!r}; it must be a string, or a list of lines")
    try:
        return parse_lines(given[key])
    except ValueError as error:
        raise DataError(f"{key}: {error}") from None


def line_fields(lines: Sequence[TextLine]) -> dict[str, Any]:
    """`text` and `lines` of the metadata of an item; one line without a place is a text alone."""
    text = joined(line.text for line in lines)
    if len(lines) == 1 and lines[0].polygon is None:
        return {"text": text}
    return {"text": text, "lines": [line.json() for line in lines]}


def lines_mask(source: Path | PackedImage, lines: Sequence[TextLine]) -> PackedImage | None:
    """The mask of an item without one: the polygons of its lines, at the size of the source; None without places."""
    polygons = [line.polygon for line in lines if line.polygon is not None]
    if not polygons:
        return None
    digest = hashlib.sha256(json.dumps(polygons).encode()).hexdigest()
    return PackedImage(f"the lines of {source}", partial(_mask_png, source, polygons), digest)


def _mask_png(source: Path | PackedImage, polygons: Sequence[Sequence[tuple[float, float]]]) -> bytes:
    out = io.BytesIO()
    polygon_mask(polygons, as_shown(open_image(source)).size).save(out, "PNG", compress_level=1)
    return out.getvalue()
