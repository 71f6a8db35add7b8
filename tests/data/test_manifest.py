"""JSON and JSONL manifests."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from retouch.data.base import DataError, ItemError, ItemFiles
from retouch.data.dataset import load_dataset
from retouch.data.discover import data_at
from retouch.data.formats.manifest import ManifestData
from retouch.data.identity import item_key
from retouch.data.item import check_item

from .conftest import SIZE, box_mask, picture, pixels

ENTRY = {"image_path": "a.png", "mask_path": "m.png", "prompt": "a sign"}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Pictures a.png, b.png (another), m.png (mask), r.png (style)."""
    picture(blue=1).save(tmp_path / "a.png")
    picture(blue=2).save(tmp_path / "b.png")
    box_mask().save(tmp_path / "m.png")
    picture((16, 16), blue=3).save(tmp_path / "r.png")
    return tmp_path


def manifest(
    folder: Path, entries: list[Any] | str | bytes, name: str = "data.json", **options: object
) -> ManifestData:
    content = json.dumps(entries) if isinstance(entries, list) else entries
    (folder / name).write_bytes(content if isinstance(content, bytes) else content.encode())
    given: dict[str, object] = {"path": str(folder / name), "resolution": (SIZE[1], SIZE[0]), **options}
    return ManifestData.model_validate(given)


def items(config: ManifestData) -> list[ItemFiles]:
    listed = config.items()
    assert all(isinstance(item, ItemFiles) for item in listed), listed
    return [item for item in listed if isinstance(item, ItemFiles)]


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("data.json", json.dumps([ENTRY, ENTRY])),
        ("data.json", "\ufeff \n" + json.dumps([ENTRY, ENTRY], indent=2)),
        ("data.jsonl", json.dumps(ENTRY) + "\n\n" + json.dumps(ENTRY)),
        ("data.jsonl", json.dumps(ENTRY) + "\r\n" + json.dumps(ENTRY) + "\r\n"),
        ("data.json", json.dumps(ENTRY) + "\n" + json.dumps(ENTRY)),  # told by the content, not by the name
    ],
)
def test_a_list_or_a_line_each(name: str, text: str, folder: Path) -> None:
    found = items(manifest(folder, text, name))
    assert [(item.id, item.prompt) for item in found] == [(0, "a sign"), (1, "a sign")]
    assert found[1].source_path == folder / "a.png"


def test_a_string_may_hold_any_line_separator(folder: Path) -> None:
    line = json.dumps({**ENTRY, "prompt": "one\u2028two\x85three"}, ensure_ascii=False)
    assert [item.prompt for item in items(manifest(folder, f"{line}\n", "data.jsonl"))] == ["one\u2028two\x85three"]


def test_every_picture_finds_its_place(folder: Path) -> None:
    entry = {**ENTRY, "target_path": "b.png", "reference_path": "r.png", "text": "HI", "source": {"page": 3}, "id": 70}
    (example,) = load_dataset(manifest(folder, [entry]))
    assert pixels(example.source) == pixels(picture(blue=1))
    assert pixels(example.mask) == pixels(box_mask())
    assert pixels(example.target) == pixels(picture(blue=2))
    assert pixels(example.reference) == pixels(picture((16, 16), blue=3))
    assert (example.id, dict(example.metadata)) == (70, {"text": "HI", "source": {"page": 3}})


def test_further_source_images_have_the_size_of_the_run(folder: Path) -> None:
    """In order, and cut in the middle as `data.fit` says, while the one that is edited is cut around its mask."""
    picture((96, 32), blue=4).save(folder / "wide.png")
    entry = {**ENTRY, "more_images": ["b.png", "wide.png"]}
    (example,) = load_dataset(manifest(folder, [entry], resolution=32))
    assert pixels(example.source) == pixels(picture(blue=1).crop((8, 0, 40, 32)))
    first, second = example.more_images
    assert pixels(first) == pixels(picture(blue=2).crop((8, 0, 40, 32)))
    assert pixels(second) == pixels(picture((96, 32), blue=4).crop((32, 0, 64, 32)))
    assert dict(example.metadata) == {}
    (stretched,) = load_dataset(manifest(folder, [entry], resolution=32, fit="stretch"))
    assert [image.size for image in stretched.more_images] == [(32, 32)] * 2
    (one,) = items(manifest(folder, "prompt,image_path,more_images\na sign,a.png,b.png\n", "data.csv"))
    assert one.more_paths == (folder / "b.png",)


def test_further_source_images_are_a_part_of_what_an_item_is(folder: Path) -> None:
    given = [ENTRY, {**ENTRY, "more_images": []}, {**ENTRY, "more_images": ["b.png", "a.png"]}]
    given += [{**ENTRY, "more_images": ["a.png", "b.png"]}, {**ENTRY, "more_images": ["nowhere.png"]}]
    plain, empty, both, swapped, missing = (items(manifest(folder, [{**entry, "id": 1}]))[0] for entry in given)
    assert item_key(plain) == item_key(empty)
    assert len({item_key(item) for item in (plain, both, swapped)}) == 3
    config = manifest(folder, [])
    assert check_item(both, config) is None
    assert str(check_item(missing, config)) == f"item 1: {folder}/nowhere.png: no such file"


TARGET = {**ENTRY, "target_path": "b.png"}


@pytest.mark.parametrize(
    ("target", "entries", "expected"),
    [
        ("auto", [TARGET, TARGET], [2, 2]),
        ("auto", [TARGET, ENTRY], [2, None]),  # a list with targets in which one is missing
        ("auto", [ENTRY, ENTRY], [1, 1]),
        ("auto", [{**ENTRY, "mask_path": None}, ENTRY], [None, 1]),  # an edit that changes nothing teaches to copy
        ("auto", [{"prompt": "a sign"}], [None]),
        ("file", [TARGET, ENTRY], [2, None]),
        ("source", [TARGET, {**ENTRY, "mask_path": None}], [1, 1]),
        ("source", [{"prompt": "a sign"}], [None]),
        ("none", [TARGET, ENTRY], [None, None]),
    ],
)
def test_where_targets_come_from(target: str, entries: list[Any], expected: list[int | None], folder: Path) -> None:
    """By the blue of the pictures."""
    found = [example.target for example in load_dataset(manifest(folder, entries, target=target))]
    assert [None if image is None else image.getpixel((0, 0))[2] for image in found] == expected  # type: ignore[index]


def test_a_reference_of_the_size_of_the_source_is_a_style_picture(folder: Path) -> None:
    """Of self_bench it would be the ground truth."""
    (example,) = load_dataset(manifest(folder, [{**ENTRY, "reference_path": "b.png"}]))
    assert pixels(example.reference) == pixels(picture(blue=2))
    assert pixels(example.target) == pixels(example.source)


def test_a_target_that_is_the_source_is_none_to_rollouts(folder: Path) -> None:
    """Checkpoints inside an epoch, of runs that began before `data.target`, go on."""
    keys = [item_key(items(manifest(folder, [ENTRY], target=target))[0]) for target in ("auto", "none")]
    assert keys[0] == keys[1] != item_key(items(manifest(folder, [TARGET]))[0])


# --- other names for the same ---


@pytest.mark.parametrize(
    "entry",
    [
        {"image": "a.png", "mask": "m.png", "prompt": "a sign"},
        {"file_name": "a.png", "mask_file_name": "m.png", "prompt": "a sign"},
        {"image_file_name": "a.png", "mask_file_name": "m.png", "text": "a sign"},
        {"file_name": "a.png", "mask": "m.png", "text": "a sign"},
    ],
    ids=lambda entry: " ".join(entry),
)
def test_aliases(entry: dict[str, str], folder: Path) -> None:
    (found,) = items(manifest(folder, [entry]))
    assert found == items(manifest(folder, [ENTRY]))[0]


def test_a_path_goes_before_its_alias_and_the_alias_is_kept(folder: Path) -> None:
    (found,) = items(manifest(folder, [{**ENTRY, "image": {"page": 3}, "mask": "b.png"}]))
    assert (found.source_path, found.mask_path) == (folder / "a.png", folder / "m.png")
    assert dict(found.metadata) == {"image": {"page": 3}, "mask": "b.png"}


def test_text_is_a_caption_of_an_imagefolder_alone(folder: Path) -> None:
    (found,) = items(manifest(folder, [{"file_name": "a.png", "prompt": "a sign", "text": "HI"}]))
    assert (found.prompt, dict(found.metadata)) == ("a sign", {"text": "HI"})
    (listed,) = manifest(folder, [{"image": "a.png", "text": "HI"}]).items()
    assert str(listed) == "entry 0: prompt missing or empty; each entry needs one; its keys are 'image', 'text'"


CSV = 'image_path,mask_path,prompt,id,note\na.png,m.png,"a sign, old",7,\nb.png,m.png,"it says ""HI""",,x\n\n'


def test_a_csv_file(folder: Path) -> None:
    found = items(manifest(folder, "\ufeff" + CSV, "data.csv"))
    assert [(item.id, item.prompt, dict(item.metadata)) for item in found] == [
        (7, "a sign, old", {}),
        (1, 'it says "HI"', {"note": "x"}),
    ]
    assert [item.mask_path for item in found] == [folder / "m.png"] * 2


def test_blanks_around_the_names_of_columns_lose_none(folder: Path) -> None:
    """A target whose column is not found would be replaced by the source."""
    [found] = items(manifest(folder, "prompt, image_path,mask_path , target_path\na,a.png,m.png,b.png\n", "data.csv"))
    assert (found.target, found.target_path, dict(found.metadata)) == ("file", folder / "b.png", {})


def test_a_column_that_stands_twice_is_refused(folder: Path) -> None:
    with pytest.raises(DataError, match=r"data\.csv: the header names 'prompt' twice; rename one of the columns"):
        items(manifest(folder, "prompt,image_path, prompt\na,a.png,b\n", "data.csv"))


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("metadata.csv", "file_name,mask_file_name,text\na.png,m.png,a sign\n"),
        ("metadata.jsonl", json.dumps({"file_name": "a.png", "mask_file_name": "m.png", "text": "a sign"})),
    ],
)
def test_a_folder_with_metadata(name: str, content: str, folder: Path) -> None:
    (folder / name).write_text(content, encoding="utf-8")
    config = data_at(folder, (SIZE[1], SIZE[0]))
    assert (config.format, config.path) == ("manifest", str(folder))
    (example,) = load_dataset(config)
    assert (example.prompt, dict(example.metadata)) == ("a sign", {})
    assert pixels(example.source) == pixels(picture(blue=1)) and pixels(example.mask) == pixels(box_mask())


def test_paths_start_from_the_manifest_or_from_image_root(folder: Path, tmp_path: Path) -> None:
    lists = folder / "lists"
    lists.mkdir()
    entry = {**ENTRY, "mask_path": str(folder / "m.png")}
    (near,) = items(manifest(lists, [entry]))
    assert (near.source_path, near.mask_path) == (lists / "a.png", folder / "m.png")
    (rooted,) = items(manifest(lists, [entry], image_root=str(folder)))
    assert (rooted.source_path, rooted.mask_path) == (folder / "a.png", folder / "m.png")
    assert pixels(load_dataset(manifest(lists, [entry], image_root=str(folder)))[0].source) == pixels(picture(blue=1))


@pytest.mark.parametrize(
    ("entry", "problem"),
    [
        ("a.png", "entry 1: 'a.png' is not an object"),
        ([], "entry 1: [] is not an object"),
        (
            {"image_path": "a.png"},
            "entry 1: prompt missing or empty; each entry needs one; its keys are 'image_path'",
        ),
        (
            {**ENTRY, "prompt": ""},
            "entry 1: prompt missing or empty; each entry needs one",
        ),
        (
            {"prompt": "a sign", "mask_path": "m.png"},
            "entry 1: mask_path without image_path; name the image that the mask belongs to, or leave it out",
        ),
        ({}, "entry 1: prompt missing or empty; each entry needs one"),
        ({**ENTRY, "win_path": 3}, "entry 1: win_path is 3; it must be a string"),
        ({**ENTRY, "mask_path": ["m.png"]}, "entry 1: mask_path is ['m.png']; it must be a string"),
        ({**ENTRY, "more_images": [3]}, "entry 1: more_images is [3]; it must be a list of paths"),
        (
            {"prompt": "a sign", "more_images": ["a.png"]},
            "entry 1: more_images without image_path; name the image that is edited as image_path",
        ),
        ({**ENTRY, "image_path": 3}, "entry 1: image_path is 3; it must be a string"),
        ({**ENTRY, "prompt": ["a"]}, "entry 1: prompt is ['a']; it must be a string"),
        ({**ENTRY, "reference_path": {"a": 1}}, "entry 1: reference_path is {'a': 1}; it must be a string"),
        ({**ENTRY, "text": 42}, "entry 1: text is 42; it must be a string, or a list of lines"),
        ({**ENTRY, "id": "7"}, "entry 1: id is '7'; it must be an integer"),
        ({**ENTRY, "id": True}, "entry 1: id is True; it must be an integer"),
        ({**ENTRY, "id": 1.0}, "entry 1: id is 1.0; it must be an integer"),
    ],
)
def test_an_entry_that_cannot_be_used(entry: Any, problem: str, folder: Path) -> None:
    listed = manifest(folder, [ENTRY, entry, ENTRY]).items()
    assert [str(item) for item in listed if isinstance(item, ItemError)] == [problem]
    assert [item.id for item in listed if isinstance(item, ItemFiles)] == [0, 2]  # an id is a position, broken or not


# --- what a run needs ---


def test_a_prompt_alone_is_text_to_image(folder: Path) -> None:
    """Its target is brought to the size of the run; it is refused by those who repaint or edit."""
    config = manifest(folder, [{"prompt": "a sign"}, {"prompt": "a sign", "target_path": "a.png"}])
    alone, taught = load_dataset(config)
    assert (alone.source, alone.mask, alone.target, alone.size) == (None, None, None, config.size)
    assert taught.source is None and taught.target is not None
    assert (taught.target.height, taught.target.width) == taught.size == config.size
    assert str(check_item(items(config)[0], config, {"source"})) == "item 0: image_path missing, which the run needs"
    picture(blue=1).resize((9, 9)).save(folder / "nine.png")
    (pair,) = items(manifest(folder, [{"prompt": "a sign", "win_path": "a.png", "lose_path": "nine.png"}]))
    assert "nine.png: the rejected image is 9 x 9, its preferred image" in str(check_item(pair, config))


@pytest.mark.parametrize("mask", [{}, {"mask_path": None}, {"mask_path": ""}])
def test_a_mask_is_needed_only_by_those_who_repaint_inside_one(mask: dict[str, Any], folder: Path) -> None:
    config = manifest(folder, [{"image_path": "a.png", "prompt": "a sign", **mask}])
    (example,) = load_dataset(config)
    assert example.mask is None and pixels(example.source) == pixels(picture(blue=1))
    assert str(check_item(items(config)[0], config, {"source", "mask"})) == (
        "item 0: mask_path missing, which the run needs"
    )
    with pytest.raises(DataError) as caught:
        load_dataset(config, "data", {"source", "mask"})
    assert str(caught.value) == (
        f"data: {folder}/data.json holds no usable item; item 0: mask_path missing, which the run needs"
    )


def test_an_item_without_what_is_needed_is_one_broken_item(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    bare = {"image_path": "a.png", "prompt": "a sign"}
    config = manifest(folder, [ENTRY, bare, ENTRY])
    assert [example.id for example in load_dataset(config, needs={"mask"})] == [0, 2]
    assert caplog.messages[0] == "data: skipped item 1: mask_path missing, which the run needs"
    assert [example.id for example in load_dataset(config)] == [0, 1, 2]


def test_a_pair_finds_its_place(folder: Path) -> None:
    picture(blue=4).save(folder / "w.png")
    picture(blue=5).save(folder / "l.png")
    entry = {**ENTRY, "win_path": "w.png", "lose_path": "l.png"}
    (example,) = load_dataset(manifest(folder, [entry]), needs={"source", "mask", "win", "lose"})
    assert pixels(example.win) == pixels(picture(blue=4))
    assert pixels(example.lose) == pixels(picture(blue=5))
    assert pixels(example.target) == pixels(example.source) and dict(example.metadata) == {}


def test_a_pair_is_cut_like_its_source(folder: Path) -> None:
    """48 x 32 to a square of 32 around the hole, whose middle is at 24: columns 8 to 40."""
    entry = {**ENTRY, "win_path": "b.png", "lose_path": "a.png"}
    (example,) = load_dataset(manifest(folder, [entry], resolution=32))
    assert pixels(example.win) == pixels(picture(blue=2).crop((8, 0, 40, 32)))
    assert pixels(example.lose) == pixels(example.source) == pixels(picture(blue=1).crop((8, 0, 40, 32)))


@pytest.mark.parametrize(
    ("given", "problem"),
    [
        ({}, "lose_path, win_path missing, which the run needs"),
        ({"win_path": "b.png"}, "lose_path missing, which the run needs"),
        ({"win_path": "b.png", "lose_path": None}, "lose_path missing, which the run needs"),
        (
            {"win_path": "r.png", "lose_path": "b.png"},
            "{folder}/r.png: the preferred image is 16 x 16, its source 48 x 32; both must have one size",
        ),
        (
            {"win_path": "b.png", "lose_path": "r.png"},
            "{folder}/r.png: the rejected image is 16 x 16, its source 48 x 32; both must have one size",
        ),
        ({"win_path": "b.png", "lose_path": "nowhere.png"}, "{folder}/nowhere.png: no such file"),
    ],
)
def test_a_pair_that_is_none(given: dict[str, Any], problem: str, folder: Path) -> None:
    config = manifest(folder, [{**ENTRY, **given}])
    found = check_item(items(config)[0], config, {"source", "mask", "win", "lose"})
    assert str(found) == f"item 0: {problem.format(folder=folder)}"


def test_a_blank_prompt(folder: Path) -> None:
    config = manifest(folder, [{**ENTRY, "prompt": " \n"}])
    assert str(check_item(items(config)[0], config)) == "item 0: the prompt is empty; give it a text"


def test_a_target_of_another_size(folder: Path) -> None:
    config = manifest(folder, [{**ENTRY, "target_path": "r.png"}])
    assert str(check_item(items(config)[0], config)) == (
        f"item 0: {folder}/r.png: the target is 16 x 16, its source 48 x 32; both must have one size"
    )


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ('[{"image_path": 1,}]', "data.json: not valid JSON: .* \\(line 1\\)$"),
        (
            json.dumps(ENTRY) + "\n{oops}\n",
            "data.json line 2: not valid JSON: .*; write one object in each line, or one JSON list",
        ),
        (
            json.dumps(ENTRY, indent=1),
            "data.json line 1: not valid JSON: .*; write one object in each line, or one JSON list",
        ),
        (b'["\xff"]', "data.json: not UTF-8 \\(byte 2\\); save it as UTF-8$"),
        (
            "prompt\na, b\n",
            "data.csv line 2: 2 cells, but the header names 1; put a cell with a comma in double quotes$",
        ),
        ('prompt\n"a\n', "data.csv line 2: not valid CSV: unexpected end of data$"),
    ],
)
def test_a_file_that_is_no_manifest(content: str | bytes, message: str, folder: Path) -> None:
    with pytest.raises(DataError, match=message) as caught:
        manifest(folder, content, message.split()[0].rstrip(":")).items()
    assert "\n" not in str(caught.value)


def test_no_file(tmp_path: Path) -> None:
    with pytest.raises(DataError) as caught:
        ManifestData(path=str(tmp_path / "data.json")).items()
    assert str(caught.value) == f"data.path: {tmp_path}/data.json: no such manifest (a .json, .jsonl or .csv file)"


def test_a_folder_in_place_of_a_manifest(tmp_path: Path) -> None:
    with pytest.raises(DataError) as caught:
        ManifestData(path=str(tmp_path)).items()
    assert str(caught.value) == (
        f"data.path: {tmp_path} is a folder without metadata.jsonl or metadata.csv; give the manifest in it (a .json, "
        ".jsonl or .csv file), or, for a folder with a self_bench.txt, set data.format=self_bench"
    )
