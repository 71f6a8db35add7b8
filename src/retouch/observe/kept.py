"""Files of evaluations that a run reads back, for its alarms and the first columns of its grids.

One that was damaged is done without, after one warning: it must not end a run, and half of it must not count as all.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, cast

import numpy as np
from numpy.typing import NDArray

from retouch.errors import ImageProblem, log_once
from retouch.files import plain_json
from retouch.files.disk import read_bounded
from retouch.imaging.reading import open_image
from retouch.observe.run_dir import is_no_file
from retouch.process.plain_text import count_of

logger = logging.getLogger(__name__)

Row = dict[str, Any]

_MOST_BYTES = 1 << 30
"""Size of a rows.jsonl, at most."""


def steps_kept(part: Path) -> dict[int, Path]:
    """Step -> folder of the evaluations or images of a run, first ones first."""
    named = ((re.fullmatch(r"step-(\d{6,})", folder.name), folder) for folder in part.glob("step-*"))
    return dict(sorted((int(match[1]), folder) for match, folder in named if match))


def images_of(records: Sequence[Mapping[str, Any]]) -> dict[int, object]:
    """Step -> number of the images of its evaluation, by the records of a run."""
    return {record["step"]: record.get("images") for record in records if record["kind"] == "eval"}


def kept_rows(folder: Path, images: object) -> list[Row] | None:
    """The rows of an evaluation; None, with a warning, where its file was damaged.

    Args:
        images: number of rows that were written; None: not known.
    """
    try:
        if is_no_file(folder / "rows.jsonl"):
            return None
        rows = _rows(read_bounded(folder / "rows.jsonl", _MOST_BYTES))
        if images not in (None, len(rows)):
            raise ValueError(f"{count_of(len(rows), 'row')} for the {images} images of metrics.jsonl")
    except (OSError, ValueError) as error:
        _warn(folder / "rows.jsonl", str(error))
        return None
    return rows


def kept_images(folder: Path) -> list[NDArray[np.uint8]] | None:
    """The images of an evaluation that were kept, the first ones; None, with a warning, where one was damaged."""
    names = sorted(path.name for path in folder.glob("*.png"))
    try:
        if names != [f"{number:05d}.png" for number in range(len(names))]:
            raise ImageProblem(f"{names}: one is missing")
        return [np.asarray(open_image(folder / name).convert("RGB")) for name in names]
    except (ImageProblem, OSError, ValueError) as error:
        _warn(folder, str(error))
        return None


def _rows(content: bytes) -> list[Row]:
    """The rows of a rows.jsonl.

    Raises:
        ValueError: with what is wrong with it.
    """
    if not content.endswith(b"\n"):
        raise ValueError("empty" if not content else "cut off")
    rows = [plain_json.loads(line) for line in content.splitlines()]
    for number, row in enumerate(rows, 1):
        if not isinstance(row, dict) or not _is_row(cast("Row", row)):
            raise ValueError(f"line {number} is no row of an evaluation")
    return rows


def _is_row(row: Row) -> bool:
    """Whether it has an image's place, and a number in each measure; None where a reward failed."""
    if type(row.get("example")) is not int or type(row.get("index")) is not int:
        return False
    return all(value is None or isinstance(value, int | float | str) for value in row.values())


def _warn(place: Path, problem: str) -> None:
    log_once(logger, "%s: damaged (%s); this evaluation is left out of alarms and grids from now on", place, problem)
