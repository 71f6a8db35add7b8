"""Calligrapher's layout: the list, and both meanings of `_ref`."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from retouch.data.base import DataError, ItemError, ItemFiles
from retouch.data.dataset import load_dataset
from retouch.data.formats.calligrapher import SelfBenchData
from retouch.data.item import check_item
from retouch.imaging.masks import mask_box
from tests.command_line import retouch

from .conftest import HOLE, SIZE, Bench, box_mask, picture, pixels


def texts(bench: Bench, **options: object) -> list[object]:
    """id and text of every item that is listed, or the problem."""
    listed = bench.config(**options).items()
    return [str(item) if isinstance(item, ItemError) else (item.id, item.metadata["text"]) for item in listed]


# --- the list ---


@pytest.mark.parametrize(
    ("line", "item"),
    [
        ("11-Azir", (11, "Azir")),
        ("3-well-known", (3, "well-known")),
        ("3--5 degrees", (3, "-5 degrees")),
        ("7-2024-01-01", (7, "2024-01-01")),
        (" 4 - spaced out ", (4, "spaced out")),
        ("012-Zero", (12, "Zero")),
        ("5-Grüße, 東京 – ça va", (5, "Grüße, 東京 – ça va")),
        ("6-one\u2028line", (6, "one\u2028line")),  # what str.splitlines would cut
    ],
)
def test_a_line_is_split_at_its_first_hyphen(line: str, item: tuple[int, str], bench: Bench) -> None:
    assert texts(bench.list([line])) == [item]


def test_a_byte_order_mark_and_windows_line_ends_are_no_text(bench: Bench) -> None:
    assert texts(bench.list("\ufeff1-Ä\r\n\r\n2-B\r\n".encode())) == [(1, "Ä"), (2, "B")]


@pytest.mark.parametrize(
    ("line", "problem"),
    [
        ("Azir", "'Azir' is not {number}-{text}"),
        ("x1-Azir", "'x1-Azir' is not {number}-{text}"),
        ("-Azir", "'-Azir' is not {number}-{text}"),
        ("1.5-Azir", "'1.5-Azir' is not {number}-{text}"),
        ("12-", "the text of item 12 is empty; write the target text of the mask"),
        ("12- \t", "the text of item 12 is empty; write the target text of the mask"),
    ],
)
def test_a_malformed_line_is_an_error_of_its_own(line: str, problem: str, bench: Bench) -> None:
    bench.list(["1-First", "", line, "2-Last"])
    assert texts(bench) == [(1, "First"), f"self_bench.txt line 3: {problem}", (2, "Last")]


def test_the_prompt_is_made_from_the_text(bench: Bench) -> None:
    (item,) = bench.list(["1-{text} 'n' roll"]).config().items()
    assert isinstance(item, ItemFiles)
    assert item.prompt == "The text is '{text} 'n' roll'."
    (item,) = bench.config(prompt_template="{text}! I said {text}!").items()
    assert isinstance(item, ItemFiles)
    assert item.prompt == "{text} 'n' roll! I said {text} 'n' roll!"


def test_another_list_file(bench: Bench) -> None:
    bench.list(["1-A"])
    (bench.folder / "mine.txt").write_text("2-B\n", encoding="utf-8")
    assert texts(bench, list_file="mine.txt") == [(2, "B")]


def test_a_list_that_is_not_there_or_not_utf8(bench: Bench) -> None:
    with pytest.raises(DataError) as caught:
        bench.config().items()
    assert str(caught.value) == (
        f"data.path: {bench.folder} has no self_bench.txt; each of its lines is {{number}}-{{text}}"
    )
    with pytest.raises(DataError) as caught:
        bench.config(path=str(bench.folder / "nowhere")).items()
    assert str(caught.value) == f"data.path: {bench.folder}/nowhere: no such folder"
    bench.list(b"1-Gr\xfc\xdfe\n")
    with pytest.raises(DataError) as caught:
        bench.config().items()
    assert str(caught.value) == f"{bench.folder}/self_bench.txt: not UTF-8 (byte 4); save it as UTF-8"


# --- the pictures ---


def test_a_crop_size_reference_is_the_style_and_the_source_the_target(bench: Bench) -> None:
    source = picture(blue=1)
    bench.add(1, source, ref=source.crop(HOLE)).list(["1-Azir"])
    example = load_dataset(bench.config())[0]
    assert pixels(example.source) == pixels(source)
    assert pixels(example.target) == pixels(source)
    assert pixels(example.reference) == pixels(source.crop(HOLE))
    assert pixels(example.mask) == pixels(box_mask())
    assert (example.id, example.prompt, dict(example.metadata)) == (1, "The text is 'Azir'.", {"text": "Azir"})


def test_a_full_size_reference_is_the_target_and_its_mask_box_the_style(bench: Bench) -> None:
    source, truth = picture(blue=1), picture(blue=200)
    example = load_dataset(bench.add(1, source, ref=truth).list(["1-Azir"]).config())[0]
    assert pixels(example.source) == pixels(source)
    assert pixels(example.target) == pixels(truth)
    assert pixels(example.reference) == pixels(truth.crop(HOLE))
    assert example.reference is not None and example.reference.getpixel((0, 0)) == (HOLE[0], HOLE[1], 200)  # not black


def test_the_source_as_target_whatever_the_reference(bench: Bench) -> None:
    source, truth = picture(blue=1), picture(blue=200)
    example = load_dataset(bench.add(1, source, ref=truth).list(["1-Azir"]).config(target="source"))[0]
    assert pixels(example.target) == pixels(source)
    assert pixels(example.reference) == pixels(truth.crop(HOLE))


def test_no_target(bench: Bench) -> None:
    style = picture((16, 16), blue=7)
    example = load_dataset(bench.add(1, ref=style).list(["1-Azir"]).config(target="none"))[0]
    assert example.target is None
    assert pixels(example.reference) == pixels(style)


def test_a_full_size_reference_is_the_style_without_a_target_too(bench: Bench) -> None:
    """The target decides what is learned, not what the style reference is."""
    truth = picture(blue=200)
    bench.add(1, ref=truth).list(["1-Azir"])
    for target in ("auto", "source", "none"):
        example = load_dataset(bench.config(target=target))[0]
        assert pixels(example.reference) == pixels(truth.crop(HOLE))
    assert example.target is None


def test_a_reference_may_be_missing(bench: Bench) -> None:
    example = load_dataset(bench.add(1).list(["1-Azir"]).config())[0]
    assert example.reference is None
    assert pixels(example.target) == pixels(picture(blue=1))


def test_the_reference_keeps_its_size_when_the_picture_is_scaled(bench: Bench) -> None:
    bench.add(1, ref=picture(blue=9)).list(["1-Azir"])
    example = load_dataset(bench.config(resolution=(16, 24)))[0]
    assert example.source is not None and example.source.size == (24, 16)
    assert example.target is not None and example.target.size == (24, 16)
    assert mask_box(example.mask) == (4, 2, 20, 10)  # type: ignore[arg-type]
    assert example.reference is not None and example.reference.size == (32, 16)


def broken(bench: Bench) -> str:
    (item,) = bench.config().items()
    assert isinstance(item, ItemFiles)
    return str(check_item(item, bench.config()))


def test_files_that_are_missing(bench: Bench) -> None:
    bench.add(1).list(["1-Azir"])
    (bench.folder / "test1_mask.png").unlink()
    assert broken(bench) == f"item 1: {bench.folder}/test1_mask.png: no such file"
    (bench.folder / "test1_source.png").unlink()
    assert broken(bench) == f"item 1: {bench.folder}/test1_source.png: no such file"


@pytest.mark.parametrize("name", ["source", "mask", "ref"])
def test_files_that_are_no_pictures(name: str, bench: Bench) -> None:
    bench.add(1).list(["1-Azir"])
    path = bench.folder / f"test1_{name}.png"
    path.write_text("<html>not found</html>")
    assert broken(bench) == f"item 1: {path}: not an image that Pillow can read; convert it to PNG or JPEG"


def test_a_picture_that_was_cut_off(bench: Bench) -> None:
    bench.add(1).list(["1-Azir"])
    path = bench.folder / "test1_source.png"
    path.write_bytes(path.read_bytes()[:60])
    message = broken(bench)
    assert message.startswith(f"item 1: {path}: damaged image (")
    assert message.endswith("; replace the file")


def test_a_mask_of_another_size(bench: Bench) -> None:
    bench.add(1, mask=box_mask((SIZE[0], SIZE[1] + 1))).list(["1-Azir"])
    assert broken(bench) == (
        f"item 1: {bench.folder}/test1_mask.png: the mask is 48 x 33, its source 48 x 32; both must have one size"
    )


def test_the_benchmark_itself() -> None:
    shared = os.environ.get("RETOUCH_SHARED_DATA")
    folder = Path(shared or "") / "self_bench"
    if not shared or not folder.is_dir():
        pytest.skip("RETOUCH_SHARED_DATA names no folder with self_bench/")
    outcome = retouch("data", "validate", folder)
    assert (outcome.code, outcome.out.splitlines()[-1]) == (0, "1 item can be used")


def test_a_list_in_place_of_the_folder(tmp_path: Path) -> None:
    (tmp_path / "list.json").write_text("[]", encoding="utf-8")
    section = SelfBenchData(path=str(tmp_path / "list.json"), resolution=(32, 64))
    with pytest.raises(DataError, match=r"list\.json is a file; give the folder, or set data\.format=manifest"):
        section.items()
