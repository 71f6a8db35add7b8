"""Prompts without pictures."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from retouch.data.base import DataError
from retouch.data.dataset import load_dataset
from retouch.data.discover import data_at
from retouch.data.formats.prompts import PromptsData
from tests.command_line import retouch


def test_a_prompt_a_line(tmp_path: Path) -> None:
    path = tmp_path / "p.txt"
    path.write_bytes("\ufeffa cat\r\n\r\n  a sign that says 'ÄÖ'  \n".encode())
    found = load_dataset(PromptsData(path=str(path), resolution=(32, 64)))
    assert [(e.id, e.prompt, e.size) for e in found] == [(0, "a cat", (32, 64)), (2, "a sign that says 'ÄÖ'", (32, 64))]
    assert [(e.source, e.mask, e.target, e.reference) for e in found] == [(None,) * 4] * 2


def test_a_table_is_no_list_of_prompts(tmp_path: Path) -> None:
    """Image names and labels of PaddleOCR and Flickr became prompts. A tab within one line stays a part of it."""
    path = tmp_path / "Label.txt"
    path.write_text('a.png\t[{"transcription": "HI"}]\nb.png\t[]\n', encoding="utf-8")
    with pytest.raises(DataError, match=r"Label\.txt: each line has a tab, as in a table; give a \.tsv"):
        PromptsData(path=str(path)).list_items()
    path.write_text("a cat\tor a dog\na sign\n", encoding="utf-8")
    assert len(PromptsData(path=str(path)).list_items()) == 2


@pytest.mark.parametrize("suffix", ["json", "jsonl"])
def test_objects_with_a_text_and_metadata(suffix: str, tmp_path: Path) -> None:
    entries = [{"prompt": "a sign", "text": "MOON", "level": 3}, {"prompt": "a cat", "id": 7}]
    path = tmp_path / f"p.{suffix}"
    path.write_text(json.dumps(entries) if suffix == "json" else "\n".join(map(json.dumps, entries)), encoding="utf-8")
    found = load_dataset(PromptsData(path=str(path)))
    assert [(e.id, e.prompt, dict(e.metadata)) for e in found] == [
        (0, "a sign", {"text": "MOON", "level": 3}),
        (7, "a cat", {}),
    ]
    assert data_at(path, (64, 64)).format == "prompts"


def test_a_csv_file_has_a_header(tmp_path: Path) -> None:
    """Not a prompt that is its header, and prompts with quotes and cells around them."""
    (tmp_path / "p.csv").write_text('caption,text,id\n"a sign, red",MOON,7\na cat,,\n', encoding="utf-8")
    found = load_dataset(PromptsData(path=str(tmp_path / "p.csv"), prompt_key="caption"))
    assert [(e.id, e.prompt, dict(e.metadata)) for e in found] == [
        (7, "a sign, red", {"text": "MOON"}),
        (1, "a cat", {}),
    ]


def test_a_table_keeps_lists_of_texts(tmp_path: Path) -> None:
    """And objects; what JSON cannot hold is left out."""
    pa = pytest.importorskip("pyarrow")
    rows = [
        {"prompt": "a sign", "text": ["MOON", "SUN"], "tags": {"a": [1, None]}, "jpg": {"bytes": b"x"}, "n": [b"x"]}
    ]
    parquet = pytest.importorskip("pyarrow.parquet")
    parquet.write_table(pa.Table.from_pylist(rows), tmp_path / "p.parquet")
    [found] = load_dataset(PromptsData(path=str(tmp_path / "p.parquet")))
    (tmp_path / "p.jsonl").write_text(json.dumps({k: rows[0][k] for k in ("prompt", "text", "tags")}), encoding="utf-8")
    [same] = load_dataset(PromptsData(path=str(tmp_path / "p.jsonl")))
    assert found.metadata["text"] == "MOON SUN" and found.metadata == same.metadata


@pytest.mark.parametrize(
    ("entry", "problem"),
    [
        (3, "3 is not an object"),
        ({"text": "A"}, "prompt missing or empty; each entry needs one"),
        ({"prompt": " "}, "prompt missing or empty; each entry needs one"),
        ({"prompt": "a", "text": 5}, "text is 5; it must be a string, or a list of lines"),
        ({"prompt": "a", "id": "x"}, "id is 'x'; it must be an integer"),
    ],
)
def test_an_entry_that_is_none(entry: object, problem: str, tmp_path: Path) -> None:
    (tmp_path / "p.jsonl").write_text(json.dumps(entry), encoding="utf-8")
    config = PromptsData(path=str(tmp_path / "p.jsonl"), max_bad_items=0)
    with pytest.raises(DataError, match=f"entry 0: {problem}".replace("?", ".")):
        load_dataset(config)


def test_files_that_are_none(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="no such file of prompts"):
        load_dataset(PromptsData(path=str(tmp_path / "nowhere.txt")))
    (tmp_path / "p.txt").write_bytes(b"Gr\xfc\xdfe")
    with pytest.raises(DataError, match="not UTF-8"):
        load_dataset(PromptsData(path=str(tmp_path / "p.txt")))
    (tmp_path / "p.jsonl").write_text("{", encoding="utf-8")
    with pytest.raises(DataError, match="line 1: not valid JSON"):
        load_dataset(PromptsData(path=str(tmp_path / "p.jsonl")))


def test_validate_tells_prompts_from_a_manifest(tmp_path: Path) -> None:
    (tmp_path / "p.txt").write_text("a cat\n", encoding="utf-8")
    outcome = retouch("data", "validate", tmp_path / "p.txt")
    assert (outcome.code, outcome.out.splitlines()[-1]) == (0, "1 item can be used")
    (tmp_path / "m.jsonl").write_text('{"prompt": "a"}\n{"image_path": "x.png", "prompt": "b"}\n', encoding="utf-8")
    assert data_at(tmp_path / "m.jsonl", (64, 64)).format == "manifest"


@pytest.mark.parametrize("key", ["mask_path", "mask", "mask_file_name", "reference_path", "target_path", "win_path"])
def test_a_list_that_names_any_file_is_a_manifest(key: str, tmp_path: Path) -> None:
    (tmp_path / "m.jsonl").write_text(json.dumps({"prompt": "a", key: "x.png"}), encoding="utf-8")
    assert data_at(tmp_path / "m.jsonl", (64, 64)).format == "manifest"


def test_validate_refuses_a_mask_without_an_image(tmp_path: Path) -> None:
    (tmp_path / "m.jsonl").write_text('{"prompt": "a", "mask_path": "m.png"}', encoding="utf-8")
    outcome = retouch("data", "validate", tmp_path / "m.jsonl")
    assert outcome.code == 2 and "mask_path without image_path" in outcome.out
