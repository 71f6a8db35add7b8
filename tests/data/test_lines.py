"""Several texts in one example: where they may stand in a list, and where they lie in the example."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from retouch.data.base import ItemError, ItemFiles
from retouch.data.dataset import load_dataset
from retouch.data.formats.manifest import ManifestData
from retouch.data.formats.prompts import PromptsData
from retouch.imaging.lines import (
    MOST_LINES,
    TextLine,
    area,
    joined,
    parse_lines,
    pieces,
    placed,
    polygon_mask,
    share_inside,
    shown_text,
)
from retouch.imaging.reading import PackedImage

BOX = [40, 20, 80, 40]
TILTED = [[100, 50], [140, 60], [135, 80], [95, 70]]


def line(text: str, box: list[int]) -> dict[str, Any]:
    return {"text": text, "box": box}


def test_a_line_is_a_text_or_has_a_place() -> None:
    lines = parse_lines([{"text": " OPEN ", "box": BOX}, {"text": "DAILY", "polygon": TILTED}])
    assert lines[0] == TextLine("OPEN", ((40, 20), (80, 20), (80, 40), (40, 40)))
    assert (lines[0].bounds, lines[1].bounds) == ((40, 20, 80, 40), (95, 50, 140, 80))
    assert parse_lines([one.json() for one in lines]) == lines
    assert parse_lines(["OPEN"]) == (TextLine("OPEN"),)
    assert TextLine("OPEN").json() == {"text": "OPEN"}


@pytest.mark.parametrize(
    ("given", "problem"),
    [
        ([], "expected a list of 1 to 64"),
        ("OPEN", "expected a list of 1 to 64"),
        (["A"] * (MOST_LINES + 1), "expected a list of 1 to 64"),
        ([" "], "line 1: text is ' '"),
        ([{"text": "A", "where": 1}], "line 1: no such key 'where'"),
        ([{"text": "A", "box": BOX, "polygon": TILTED}], "line 1: polygon and box both given"),
        ([{"text": "A", "box": [1, 2, 3]}], r"line 1: box is \[1, 2, 3\]"),
        ([{"text": "A", "box": [3, 2, 1, 4]}], "left must be below right"),
        ([{"text": "A", "polygon": [[0, 0], [1, 1]]}], "at least 3 points"),
        ([{"text": "A", "polygon": [[0, 0], [1, 1], [2, True]]}], "at least 3 points"),
        ([{"text": "A", "polygon": [[0, 0], [1, 1], [2, 2]]}], "which has no area"),
        ([{"text": "A", "box": [0.1, 0.2, 0.5, 0.3]}], "within one pixel, as shares of the sides do"),
        ([{"text": "A", "box": [0, 0, 1, 10**400]}], r"line 1: box is"),
        ([{"text": "A", "box": [0, 0, 1, float("nan")]}], r"line 1: box is"),
        ([{"text": "A", "polygon": [[0, 0], [1, 1], [-1e300, 2]]}], "at least 3 points"),
        ([{"text": "A", "box": BOX}, "B"], "give every line one, or none"),
    ],
)
def test_lines_that_cannot_be_used(given: Any, problem: str) -> None:
    with pytest.raises(ValueError, match=problem):
        parse_lines(given)


def test_places_by_hand() -> None:
    assert area([(0, 0), (4, 0), (4, 3)]) == 6
    (moved,) = placed([TextLine("A", ((10, 20), (30, 20), (30, 40)))], (0.5, 2), (1, 30))
    assert moved.polygon == ((4, 10), (14, 10), (14, 50))
    assert share_inside(moved, (9, 30)) == pytest.approx(0.25)
    assert share_inside(TextLine("A"), (1, 1)) == 1
    mask = np.asarray(polygon_mask([[(1, 1), (3, 1), (3, 2), (1, 2)], [(6, 4), (6, 4), (6, 4)]], (8, 6)))
    assert mask.sum() == 255 * 7 and mask[1:3, 1:4].all() and mask[4, 6]


@pytest.mark.parametrize(
    ("texts", "whole"),
    [(["OPEN", "DAILY"], "OPEN DAILY"), (["你好", "世界"], "你好世界"), (["咖啡", "BAR"], "咖啡 BAR"), (["A"], "A")],
)
def test_lines_as_one_text(texts: list[str], whole: str) -> None:
    assert joined(texts) == whole
    assert joined(pieces(whole)) == whole


def test_pieces_of_a_text() -> None:
    assert pieces("OPEN 你好 BAR咖啡") == ["OPEN", "你", "好", "BAR咖", "啡"]


def test_the_text_for_people() -> None:
    assert shown_text({"text": "OPEN DAILY", "lines": [{"text": "OPEN"}, {"text": "DAILY"}]}) == "OPEN / DAILY"
    assert shown_text({"text": "OPEN"}) == "OPEN" and shown_text({}) is None


# --- in lists ---


def manifest(
    folder: Path, *entries: dict[str, Any], size: tuple[int, int] = (200, 100), **options: Any
) -> ManifestData:
    folder.mkdir(exist_ok=True)
    Image.new("RGB", size, "white").save(folder / "sign.png")
    (folder / "m.json").write_text(json.dumps([{"prompt": "a sign", "image_path": "sign.png"} | e for e in entries]))
    return ManifestData(path=str(folder / "m.json"), **options)


@pytest.mark.parametrize("key", ["text", "texts", "lines"])
def test_texts_of_an_entry(tmp_path: Path, key: str) -> None:
    (item,) = manifest(tmp_path, {key: ["OPEN", "DAILY"]}).items()
    assert isinstance(item, ItemFiles) and item.mask_path is None
    assert item.metadata == {"text": "OPEN DAILY", "lines": [{"text": "OPEN"}, {"text": "DAILY"}]}
    (tmp_path / "p.jsonl").write_text(json.dumps({"prompt": "a sign", key: ["OPEN", "DAILY"]}))
    (prompt,) = PromptsData(path=str(tmp_path / "p.jsonl")).items()
    assert isinstance(prompt, ItemFiles) and prompt.metadata == item.metadata


def test_one_text_stays_a_text(tmp_path: Path) -> None:
    items = manifest(tmp_path, {"text": ["OPEN"]}, {"text": "OPEN", "style": "neon"}).items()
    assert [i.metadata for i in items if isinstance(i, ItemFiles)] == [
        {"text": "OPEN"},
        {"text": "OPEN", "style": "neon"},
    ]


@pytest.mark.parametrize(
    ("entry", "problem"),
    [
        ({"text": "A", "texts": ["B"]}, "text and texts given; keep one of them"),
        ({"text": ["A"], "lines": ["B"]}, "text and lines given; keep one of them"),
        ({"texts": ["A", ""]}, "texts: line 2: text is ''"),
        ({"lines": "A"}, "lines: given 'A'"),
    ],
)
def test_texts_that_cannot_be_used(tmp_path: Path, entry: dict[str, Any], problem: str) -> None:
    (found,) = manifest(tmp_path, entry).items()
    assert isinstance(found, ItemError) and problem in str(found)


def test_what_a_list_of_lines_became_is_read_again(tmp_path: Path) -> None:
    (item,) = manifest(tmp_path, {"lines": [line("OPEN", BOX)]}).items()
    assert isinstance(item, ItemFiles)
    (again,) = manifest(tmp_path, dict(item.metadata)).items()
    assert isinstance(again, ItemFiles) and again.metadata == item.metadata


# --- in examples ---


def test_the_polygons_are_the_mask_of_an_entry_without_one(tmp_path: Path) -> None:
    lines = [line("OPEN", BOX), {"text": "DAILY", "polygon": TILTED}]
    config = manifest(tmp_path, {"lines": lines}, resolution=(100, 200))
    (item,) = config.items()
    assert isinstance(item, ItemFiles) and isinstance(item.mask_path, PackedImage)
    (example,) = load_dataset(config, needs={"mask"})
    wanted = polygon_mask([one.polygon for one in parse_lines(lines) if one.polygon], (200, 100))
    assert example.mask is not None and np.array_equal(np.asarray(example.mask), np.asarray(wanted))
    (bare,) = manifest(tmp_path, {"lines": lines}, resolution=(100, 200), mask_lines=False).items()
    assert isinstance(bare, ItemFiles) and bare.mask_path is None


def test_other_places_are_another_mask(tmp_path: Path) -> None:
    one, other = manifest(tmp_path, {"lines": [line("A", BOX)]}, {"lines": [line("A", [41, 20, 80, 40])]}).items()
    assert isinstance(one, ItemFiles) and isinstance(other, ItemFiles) and one.mask_path != other.mask_path


def marked(folder: Path) -> None:
    """A white image with a black rectangle over BOX."""
    image = Image.new("RGB", (200, 100), "white")
    image.paste("black", (BOX[0], BOX[1], BOX[2], BOX[3]))
    image.save(folder / "sign.png")


@pytest.mark.parametrize("mask_lines", [True, False])
@pytest.mark.parametrize(
    ("fit", "resolution"), [("crop", 64), ("stretch", 64), ("crop", (48, 32)), ("stretch", (48, 96))]
)
def test_places_move_with_the_pixels(tmp_path: Path, fit: str, resolution: Any, mask_lines: bool) -> None:
    """The rectangle that the image shows is the rectangle that the line names, at every size and fit."""
    options: dict[str, Any] = {"fit": fit, "resolution": resolution, "mask_lines": mask_lines}
    config = manifest(tmp_path, {"lines": [line("OPEN", BOX)]}, **options)
    marked(tmp_path)
    (example,) = load_dataset(config)
    (shown,) = parse_lines(example.metadata["lines"])
    assert example.source is not None and shown.bounds is not None
    rows, columns = np.nonzero(np.asarray(example.source.convert("L")) < 128)
    seen = columns.min(), rows.min(), columns.max() + 1, rows.max() + 1
    np.testing.assert_allclose(shown.bounds, seen, atol=1.01)


def test_a_line_outside_the_example_is_an_error(tmp_path: Path) -> None:
    lines = [line("OPEN", [0, 20, 40, 40]), line("DAILY", [160, 20, 200, 40])]
    with pytest.raises(Exception, match=r"line 'OPEN': \d+% of its place lies outside the 64 x 64 pixels"):
        load_dataset(manifest(tmp_path, {"lines": lines}, resolution=64, mask_lines=False, max_bad_items=0))
    assert len(load_dataset(manifest(tmp_path, {"lines": lines}, resolution=64, fit="stretch", max_bad_items=0))) == 1


def test_without_an_image_places_are_in_pixels_of_the_example(tmp_path: Path) -> None:
    config = manifest(tmp_path, {"image_path": None, "lines": [line("OPEN", BOX)]}, resolution=128)
    (example,) = load_dataset(config)
    assert parse_lines(example.metadata["lines"]) == parse_lines([line("OPEN", BOX)]) and example.mask is None
