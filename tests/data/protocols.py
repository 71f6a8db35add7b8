"""Small data sets with the schemas of Complex-Edit and MMMG, made up here: 20 rows each, pictures of a few pixels."""

from __future__ import annotations

import io
import itertools
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from retouch.data.formats.mmmg import DISCIPLINES, LEVELS

SIDE = 24


def edit_picture(number: int) -> Image.Image:
    """A square on a ground; every number gives other pixels."""
    pixels = np.full((SIDE, SIDE + 8, 3), (40, 7 * number % 256, 90), np.uint8)
    pixels[6:18, 8:20] = (200, 160, 11 * number % 256)
    return Image.fromarray(pixels)


def edit_row(number: int) -> dict[str, Any]:
    """A row of Complex-Edit as datasets gives it, its picture as bytes."""
    buffer = io.BytesIO()
    edit_picture(number).save(buffer, "PNG")
    steps = [{"task": f"step {c}", "instruction": f"Do {c} to {number}."} for c in range(1, 9)]
    compound = [
        {"compound_instruction": f"Do 1 to {c} to picture {number}.", "reasoning": "one after another"}
        for c in range(1, 9)
    ]
    return {
        "image": {"bytes": buffer.getvalue(), "path": f"{number:04d}.png"},
        "edit": {"original_sequence": steps[::-1], "sequence": steps, "compound": compound},
    }


def write_complex_edit(folder: Path, kind: str = "jsonl", real: int = 14, syn: int = 6) -> Path:
    """Files test_real and test_syn of one kind: jsonl (pictures beside them), parquet or arrow (pictures inside)."""
    folder.mkdir(parents=True, exist_ok=True)
    for split, first, count in (("test_real", 0, real), ("test_syn", 1000, syn)):
        rows = [edit_row(first + i) for i in range(count)]
        if kind == "jsonl":
            for row in rows:
                name = f"{split}/{row['image']['path']}"
                (folder / split).mkdir(exist_ok=True)
                (folder / name).write_bytes(row["image"]["bytes"])
                row["image"] = name
            lines = "".join(json.dumps(row) + "\n" for row in rows)
            (folder / f"{split}.jsonl").write_text(lines, encoding="utf-8")
        else:
            write_table(folder, split, rows, kind)
    return folder


def write_table(folder: Path, name: str, rows: list[dict[str, Any]], kind: str) -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq

    table = pa.Table.from_pylist(rows)
    if kind == "parquet":
        pq.write_table(table, folder / f"{name}-00000-of-00001.parquet")
        return
    (folder / name).mkdir(exist_ok=True)
    path = str(folder / name / "data-00000-of-00001.arrow")
    with pa.OSFile(path, "wb") as file, pa.ipc.new_stream(file, table.schema) as stream:
        stream.write_table(table)


def knowledge_graph(number: int) -> dict[str, list[str]]:
    """A chain of 2 to 6 things."""
    names = [f"thing {number} {letter}" for letter in "abcdef"[: 2 + number % 5]]
    return {"elements": names, "dependencies": [f"Causes({a}, {b})" for a, b in itertools.pairwise(names)]}


def mmmg_rows(count: int = 20) -> list[dict[str, Any]]:
    """Of the benchmark, levels and disciplines in turn."""
    return [
        {
            "key": f"{LEVELS[i % 6]}_{DISCIPLINES[i % 10]}_{i}",
            "prompt": f"Draw how thing {i} works.",
            "Education": LEVELS[i % 6],
            "Discipline": DISCIPLINES[i % 10],
            "Knowledge_Graph": json.dumps(knowledge_graph(i)),
            "Annotation": f"Thing {i} has parts.",
        }
        for i in range(count)
    ]


class Hub:
    """What is used of the library datasets, over rows in memory."""

    Image = staticmethod(lambda decode: ("picture", decode))

    def __init__(self, rows: dict[tuple[str | None, str], Sequence[dict[str, Any]]]) -> None:
        self.rows, self.asked = rows, list[tuple[str, str | None, str]]()

    def load_dataset(self, path: str, config: str | None, split: str) -> Any:
        self.asked.append((path, config, split))
        if (config, split) not in self.rows:
            raise ValueError(f"Unknown split {split}")
        found = self.rows[config, split]

        class Split(list[dict[str, Any]]):
            @property
            def column_names(self) -> list[str]:
                return list(self[0])

            def cast_column(self, column: str, kind: object) -> Any:
                assert (column, kind) == ("image", ("picture", False))  # bytes, not decoded pictures
                return self

        return Split(found)

    def get_dataset_config_names(self, path: str) -> list[str]:
        return [config for config, _ in self.rows if config is not None]


def mmmg_configurations() -> dict[str, dict[str, Any]]:
    """The 59 configurations that the benchmark has on the hub, each with a row."""
    pairs = [(level, name) for level in LEVELS for name in DISCIPLINES if (level, name) != ("preschool", "Philosophy")]
    rows = zip(pairs, mmmg_rows(len(pairs)), strict=True)
    return {f"{level}_{name}": {**row, "Education": level, "Discipline": name} for (level, name), row in rows}


def write_cached_mmmg(folder: Path, name: str) -> None:
    """A configuration with one row, whose prompt is its name, as datasets keeps it in `folder` after a download."""
    from datasets import Dataset, DatasetInfo
    from datasets.arrow_writer import ArrowWriter

    prepared = folder / name / "0.0.0" / ("0" * 40)
    prepared.mkdir(parents=True)
    row = {"key": name, "prompt": name, "Knowledge_Graph": json.dumps(knowledge_graph(0))}
    rows = Dataset.from_list([row])
    writer = ArrowWriter(path=str(prepared / "mmmg-test.arrow"), features=rows.features)
    writer.write(row)
    count, size = writer.finalize()
    splits: Any = {"test": {"name": "test", "num_bytes": size, "num_examples": count, "dataset_name": "mmmg"}}
    DatasetInfo(
        features=rows.features,
        builder_name="parquet",
        dataset_name="mmmg",
        config_name=name,
        version="0.0.0",
        splits=splits,
    ).write_to_directory(str(prepared))


def write_mmmg(folder: Path, kind: str = "jsonl", count: int = 20) -> Path:
    """The benchmark, in one file."""
    folder.mkdir(parents=True, exist_ok=True)
    if kind == "jsonl":
        lines = "".join(json.dumps(row) + "\n" for row in mmmg_rows(count))
        (folder / "test.jsonl").write_text(lines, encoding="utf-8")
    else:
        write_table(folder, "test", mmmg_rows(count), kind)
    return folder


def write_mmmg_train(folder: Path, count: int = 20) -> Path:
    """The training set's one JSON file -> its path."""
    folder.mkdir(parents=True, exist_ok=True)
    content: dict[str, dict[str, list[dict[str, Any]]]] = {}
    for i, row in enumerate(mmmg_rows(count)):
        of_level = content.setdefault(f"{LEVELS.index(row['Education'])}_{row['Education']}", {})
        of_level.setdefault(row["Discipline"], []).append(
            {
                "key": f"train_{i}",
                "question": f"Explain thing {i}.",
                "Visual Components": knowledge_graph(i),
                "Key Knowledge": {"fact": f"Thing {i} has parts."},
            }
        )
    path = folder / "train.json"
    path.write_text(json.dumps(content), encoding="utf-8")
    return path
