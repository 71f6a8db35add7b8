"""Lists as spreadsheets, pandas and other systems write them: read, or refused by the key that is wrong."""

from __future__ import annotations

import csv
import json
import unicodedata
from pathlib import Path, PurePath
from typing import Any

import pytest

from retouch.data.base import DataError, DataSection, ItemError, ItemFiles
from retouch.data.dataset import load_dataset
from retouch.data.discover import data_at, discover
from retouch.data.formats.manifest import ManifestData
from retouch.data.formats.prompts import PromptsData
from retouch.data.split import split
from retouch.data.tables import tables_of
from retouch.files.disk import files_below
from tests.command_line import retouch

from .conftest import box_mask, picture

SIZE = (32, 48)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    picture().save(tmp_path / "a.png")
    box_mask().save(tmp_path / "m.png")
    return tmp_path


def listed(section: DataSection) -> list[str]:
    """Prompts of the items, and the problems of the broken ones."""
    return [item.prompt if isinstance(item, ItemFiles) else item.problem for item in section.items()]


def problem(folder: Path, name: str, content: str, kind: type[DataSection] = ManifestData) -> str:
    """The first problem of a list."""
    (folder / name).write_text(content, encoding="utf-8")
    try:
        [broken] = kind.model_validate({"path": str(folder / name)}).items()
    except DataError as error:
        return str(error).removeprefix(f"{folder}/{name}")
    assert isinstance(broken, ItemError)
    return broken.problem


# --- numbers that are none ---


@pytest.mark.parametrize("number", ["NaN", "Infinity", "-Infinity", "1e999", "-1E+400"])
@pytest.mark.parametrize(
    ("value", "key"), [("{}", "score"), ('{{"a": [1, {}]}}', "score.a.1"), ("[[{}]]", "score.0.0")]
)
def test_nan_and_infinity_are_refused_with_item_and_key(number: str, value: str, key: str, folder: Path) -> None:
    """When the list is read; a text may hold these words."""
    good = '{"prompt": "NaN or Infinity, 1e999", "score": 1e30}'
    bad = f'{{"prompt": "a", "score": {value.format(number)}}}'
    says = f"{key} is NaN or infinite, which no JSON number is; write null, or leave the key out"
    for kind in (ManifestData, PromptsData):
        assert problem(folder, "l.json", f"[{good}, {bad}]", kind) == f": entry 1: {says}"
        assert problem(folder, "l.jsonl", f"{good}\n{bad}\n", kind) == f" line 2: {says}"
        (folder / "g.json").write_text(f"[{good}]")
        assert listed(kind.model_validate({"path": str(folder / "g.json")})) == ["NaN or Infinity, 1e999"]


def test_validate_names_them(folder: Path) -> None:
    (folder / "l.jsonl").write_text('{"image": "a.png", "mask": "m.png", "prompt": "a", "score": NaN}')
    outcome = retouch("data", "validate", folder / "l.jsonl", "--resolution", "32x48")
    assert outcome.code == 2 and "line 1: score is NaN or infinite" in outcome.err


def test_a_key_twice_in_one_object(folder: Path) -> None:
    """Another value was lost silently; the same one twice is no loss."""
    for name, content in (
        ("l.json", '[{"prompt": "a", "prompt": "b"}]'),
        ("l.jsonl", '{"prompt": "a", "prompt": "b"}'),
    ):
        assert problem(folder, name, content).endswith("prompt is given twice, with different values")
    (folder / "l.json").write_text('[{"prompt": "a", "x": {"y": 1, "y": 1}, "prompt": "a"}]')
    assert listed(ManifestData(path=str(folder / "l.json"))) == ["a"]


# --- keys ---


@pytest.mark.parametrize(
    ("name", "content", "says"),
    [
        ("l.csv", "Image,Mask,Prompt\na.png,m.png,a\n", "'Image', 'Mask', 'Prompt': rename 'Prompt' to 'prompt'"),
        ("l.json", '[{" prompt ": "a", "id": 1}]', "its keys are ' prompt ', 'id': rename ' prompt ' to 'prompt'"),
        ("l.json", '[{"image": "a.png", "caption": "a"}]', "each entry needs one; its keys are 'image', 'caption'"),
        ("l.json", '{"data": [{"prompt": "a"}]}', "its keys are 'data': write the list under 'data' alone"),
        ("l.json", '{"texts": [{"prompt": "a"}]}', "its keys are 'texts': write the list under 'texts' alone"),
        ("l.json", '{"words": [{"text": "a", "box": [0, 0, 8, 8]}]}', "; its keys are 'words'"),
        (
            "l.json",
            '{\n "n": 1,\n "data": [\n  {"prompt": "a"}]}',
            "an object with a list under 'data'; write the list",
        ),
        ("l.csv", "image;mask;prompt\na.png;m.png;a\n", "'image;mask;prompt', as with a semicolon between the cells"),
        (
            "l.csv",
            "image;prompt\na.png;a, b\n",
            "'image;prompt', as with a semicolon between the cells; save it with a comma",
        ),
        ("l.csv", "image\tprompt\na.png\ta\n", "as with a tab between the cells; save it with a comma between them"),
        ("l.tsv", "image,prompt\na.png,a\n", "as with a comma between the cells; save it with a tab between them"),
        ("l.csv", "Image,prompt\na.png,a\n", "the key 'Image' is not read; rename it to 'image'"),
        ("l.json", '[{"prompt": "a", "Mask_Path ": "m.png"}]', "'Mask_Path ' is not read; rename it to 'mask_path'"),
        ("l.json", '[{"image": "a.png", "prompt": "a", "target": "m.png"}]', "rename it to 'target_path'"),
        ("l.csv", "source,prompt\na.png,a\n", "the key 'source' is not read; rename it to 'image_path'"),
        ("l.csv", "original_image,target_path,prompt\na.png,m.png,a\n", "'original_image' is not read; rename it"),
        (
            "l.csv",
            "image,edit_image,prompt\nm.png,a.png,a\n",
            "if 'image' is the result of the edit, rename 'edit_image' to 'image_path' and 'image' to 'target_path',",
        ),
        (
            "l.json",
            '[{"image_path": "m.png", "control_path": "a.png", "prompt": "a"}]',
            "if 'image_path' is the result",
        ),
        ("l.json", '[{"image": "m.png", "edit_image": ["a.png"], "prompt": "a"}]', "'edit_image' is not read; if 'im"),
        ("l.json", '[{"image": "a.png", "prompt": "a", "mask_image": "m.png"}]', "'mask_image' is not read; rename it"),
    ],
)
def test_the_keys_that_were_found_and_the_likely_cause(name: str, content: str, says: str, folder: Path) -> None:
    assert says in problem(folder, name, content)


def test_a_list_that_cannot_be_one_is_not_recommended(folder: Path) -> None:
    """A COCO file has lists of licences, images and outlines, an entry that of its lines: none is a manifest."""
    for content in (
        '{"licenses": [{"id": 1}], "images": [{"file_name": "a.png"}]}',
        '{"messages": [{"role": "user"}]}',
        '{"image": "a.png", "lines": [{"text": "HI", "box": [0, 0, 9, 9]}]}',
    ):
        assert "alone" not in problem(folder, "l.json", content)


def test_prompts_name_their_keys_too(folder: Path) -> None:
    for name, content in (("l.csv", "Prompt\na\n"), ("l.jsonl", '{"Prompt": "a"}')):
        assert "its keys are 'Prompt': rename 'Prompt' to 'prompt'" in problem(folder, name, content, PromptsData)
    many = json.dumps({f"key{number}": number for number in range(20)})
    assert problem(folder, "l.jsonl", many, PromptsData).endswith("'key11' and 8 more")


def test_another_key_beside_the_one_that_counts_is_metadata(folder: Path) -> None:
    (folder / "l.json").write_text('[{"image": "a.png", "Image": "x", "Prompt": "y", "prompt": "a", "ID": "7"}]')
    [item] = ManifestData(path=str(folder / "l.json")).items()
    assert isinstance(item, ItemFiles) and item.metadata == {"Image": "x", "Prompt": "y", "ID": "7"}


def test_the_map_of_another_program_beside_a_target_is_metadata(folder: Path) -> None:
    """The image is then the one to edit, whatever the other program makes of it."""
    entry = {"image": "a.png", "target_path": "m.png", "prompt": "a", "conditioning_image": "a.png"}
    (folder / "l.json").write_text(json.dumps([entry]))
    [item] = ManifestData(path=str(folder / "l.json")).items()
    assert isinstance(item, ItemFiles)
    assert (item.source_path, item.target_path) == (folder / "a.png", folder / "m.png")
    assert item.metadata == {"conditioning_image": "a.png"}


def test_a_value_that_names_no_file_is_metadata(folder: Path) -> None:
    """`Mask` and `Image` may be columns of another program; a list with its whole items was refused for them."""
    other = [{"Mask": "none"}, {"Image": "web", "MASK": 1}, {"Target_Path": "nowhere.png", "Image": "x" * 5000}]
    other += [{"source": "web"}, {"target": "nowhere.png"}, {"control_path": "none"}, {"edit_image": []}]
    (folder / "l.json").write_text(json.dumps([{"prompt": "a", **more} for more in other]))
    items = [item for item in ManifestData(path=str(folder / "l.json")).items() if isinstance(item, ItemFiles)]
    assert [item.metadata for item in items] == other
    both = '[{"prompt": "a", "Image": "web", "Mask": "m.png"}]'
    assert problem(folder, "l.json", both) == "the key 'Mask' is not read; rename it to 'mask'"


# --- names of files ---


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("l.CSV", "image,prompt\na.png,a\nb.png,b\n"),
        ("l.tsv", "image\tprompt\na.png\ta\nb.png\tb\n"),
        ("l.TSV", 'image\tprompt\na.png\t"a"\nb.png\tb\n'),
        ("l.JSON", '[{"image": "a.png", "prompt": "a"}, {"image": "b.png", "prompt": "b"}]'),
        ("l.JSONL", '{"image": "a.png", "prompt": "a"}\n{"image": "b.png", "prompt": "b"}\n'),
    ],
)
def test_suffixes_in_any_case_and_tabs(name: str, content: str, folder: Path) -> None:
    """By their path, in a folder, as prompts, and split in two."""
    (folder / name).write_text(content, encoding="utf-8")
    picture(blue=9).save(folder / "b.png")
    for path in (folder, folder / name):
        section = data_at(path, SIZE)
        assert (section.format, listed(section)) == ("manifest", ["a", "b"])
    assert listed(PromptsData(path=str(folder / name))) == ["a", "b"]
    seed = next(seed for seed in range(50) if _splits(folder / name, seed))
    halves = [f for f in folder.iterdir() if f.name.startswith("l_")]
    assert seed >= 0 and {f.suffix for f in halves} == {Path(name).suffix}
    assert sorted(prompt for half in halves for prompt in listed(ManifestData(path=str(half)))) == ["a", "b"]


def _splits(path: Path, seed: int) -> bool:
    try:
        return bool(split(path, 0.5, seed=seed))
    except DataError:
        return False


TEXTS = {
    '"SALE" in red letters': '"SALE" in red letters',
    '"OPEN" and "SHUT"': '"OPEN" and "SHUT"',
    '5" by 7"': '5" by 7"',
    '"never closed': '"never closed',
    '"all of ""it"""': 'all of "it"',
    '"""SALE"" in blue"': '"SALE" in blue',
    '"a\ttab and two\n\nlines"': "a\ttab and two\n\nlines",
    '"plain"': "plain",
}
"""Cells as a TSV file has them -> what they say."""


def in_halves(path: Path) -> list[str]:
    """Prompts of the two lists that a list is divided into."""
    return [prompt for half in split(path, 0.5) for prompt in listed(ManifestData(path=str(half)))]


def test_quotes_within_a_cell_of_a_tsv_are_its_own(folder: Path) -> None:
    (folder / "l.tsv").write_text("note\tprompt\n" + "".join(f"\t{cell}\n" for cell in TEXTS), encoding="utf-8")
    assert listed(ManifestData(path=str(folder / "l.tsv"))) == list(TEXTS.values())
    wide = 'note\tprompt\n\n"two\nlines"\tb\na\tb\tc'
    says = " line 5: 3 cells, but the header names 2; put a cell with a tab in double quotes"
    assert problem(folder, "l.tsv", wide) == says


def test_a_quote_that_is_not_closed_takes_no_rows_of_a_tsv(folder: Path) -> None:
    """A later cell that ends with a quote would close it, and the rows between would be one prompt."""
    says = (
        "a double quote that begins a cell on line 3 ends here, but each line has 2 cells, as the header; put a cell "
        "that begins with a double quote in double quotes, and double those within it"
    )
    for rows in ('"Hello\ta\nok\tb\nMonitor 24"\tc', 'a\t"Hello\nb\tok\nc\tMonitor 24"\nd\te'):
        assert problem(folder, "l.tsv", f"\nprompt\tnote\n{rows}\n") == f" line 5: {says}"
    (folder / "l.tsv").write_text('prompt\tnote\n"two\nlines"\ta\n"with\ta tab\n\nand more\n"\tb\n')
    assert listed(ManifestData(path=str(folder / "l.tsv"))) == ["two\nlines", "with\ta tab\n\nand more\n"]


def test_blanks_behind_the_commas_of_a_csv(folder: Path) -> None:
    """Quotes behind a blank are no part of the prompt, which would be read as a text to write."""
    (folder / "l.csv").write_text('note, prompt\na, "a sign, red"\nb, hello\n"c",  it\'s "so"\n')
    assert listed(ManifestData(path=str(folder / "l.csv"))) == ["a sign, red", "hello", 'it\'s "so"']
    (folder / "l.csv").write_text("note,prompt\na, kept\n")
    assert listed(ManifestData(path=str(folder / "l.csv"))) == [" kept"]


@pytest.mark.parametrize("name", ["l.csv", "l.tsv"])
def test_a_second_header_is_no_prompt(name: str, folder: Path) -> None:
    """Of lists that were joined, each with its byte-order mark."""
    for content in ("prompt\na\nprompt\nb\n", "\ufeffprompt\na\n\ufeffprompt\nb\n"):
        says = (
            " line 3: the header stands here again, as in two files that were joined; delete it, or give the list as "
            ".jsonl if it is an item"
        )
        assert problem(folder, name, content) == says


@pytest.mark.parametrize(("name", "separator"), [("l.tsv", "\t"), ("l.csv", ",")])
def test_rows_are_the_same_when_they_are_written_again(name: str, separator: str, folder: Path) -> None:
    """As a spreadsheet writes them, and in the two lists of `data split`."""
    with (folder / name).open("w", encoding="utf-8", newline="") as file:
        csv.writer(file, delimiter=separator).writerows([["prompt", "note"], *([text, "x"] for text in TEXTS.values())])
    assert listed(ManifestData(path=str(folder / name))) == list(TEXTS.values())
    assert sorted(in_halves(folder / name)) == sorted(TEXTS.values())


@pytest.mark.parametrize("on_disk", ["NFC", "NFD"])
def test_accents_in_either_form(on_disk: Any, tmp_path: Path) -> None:
    """macOS writes names in NFD; a list that was typed, or made elsewhere, has them in NFC. Folders may differ."""
    name, other = "Schönes Café", "NFC" if on_disk == "NFD" else "NFD"
    folder = tmp_path / unicodedata.normalize("NFC", "Größe") / unicodedata.normalize(on_disk, name)
    folder.mkdir(parents=True)
    picture().save(folder / unicodedata.normalize(on_disk, "é.png"))
    box_mask().save(folder / unicodedata.normalize(on_disk, "é_mask.png"))
    written = unicodedata.normalize(other, f"Größe/{name}/é")
    entry = {"prompt": "a", "image": f"{written}.png", "mask": f"{written}_mask.png"}
    (tmp_path / "l.json").write_text(json.dumps([entry], ensure_ascii=False), encoding="utf-8")
    config = ManifestData(path=str(tmp_path / "l.json"), resolution=SIZE, max_bad_items=0)
    [example] = load_dataset(config)
    assert example.source is not None and example.mask is not None
    (folder / unicodedata.normalize(other, "é.txt")).write_text("a", encoding="utf-8")  # a caption of another program
    found = discover(Path(unicodedata.normalize(other, str(folder))) if other == "NFC" else folder)
    assert [entry["prompt"] for entry in found.entries] == ["a"] and not found.left_out


def test_names_of_onetrainer_and_kohya(folder: Path) -> None:
    (folder / "m.png").rename(folder / "a-masklabel.png")
    (folder / "a.caption").write_text("a sign", encoding="utf-8")
    found = discover(folder)
    [entry] = found.entries
    assert (Path(entry["mask_path"]).name, entry["prompt"], found.left_out) == ("a-masklabel.png", "a sign", [])


def test_caches_of_datasets_are_no_tables(tmp_path: Path) -> None:
    """`map` and `filter` of the library write their rows beside the tables, and would be read again."""
    pa = pytest.importorskip("pyarrow")

    def write(path: Path, prompt: str) -> None:
        table = pa.table({"prompt": [prompt]})
        with pa.OSFile(str(path), "wb") as file, pa.ipc.new_stream(file, table.schema) as stream:
            stream.write_table(table)

    write(tmp_path / "data-00000-of-00001.arrow", "a")
    write(tmp_path / "cache-1f2e3d4c5b6a7988.arrow", "b")
    write(tmp_path / "cache-1f2e3d4c5b6a7988_00000_of_00002.arrow", "c")
    assert [dict(row) for table in tables_of(str(tmp_path)) for row in table] == [{"prompt": "a"}]


def test_a_link_that_leads_nowhere_costs_no_other_file(tmp_path: Path) -> None:
    (tmp_path / "a.png").touch()
    (tmp_path / "b").symlink_to(tmp_path / "b")  # to itself
    (tmp_path / "c").symlink_to(tmp_path / "nothing")
    assert sorted(path.name for path in files_below(tmp_path)) == ["a.png", "b", "c"]


def test_folders_behind_links_are_read_and_hidden_ones_are_not(tmp_path: Path) -> None:
    """A part of the data may lie on another disk, and editors keep copies; nothing is read twice."""
    data, other = tmp_path / "data", tmp_path / "other"
    for name in ("data/a", "data/sub/b", "data/.ipynb_checkpoints/a-checkpoint", "data/._a", "other/c", "other/deep/d"):
        (tmp_path / f"{name}.jsonl").parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / f"{name}.jsonl").write_text('{"prompt": "x"}\n')
    for place, link in ((other, "linked"), (other, "again"), (data, "sub/circle"), (data / "sub", "a-sub")):
        (data / link).symlink_to(place)
    assert sorted(path.relative_to(data).as_posix() for path in files_below(data)) == [
        "a.jsonl", "again/c.jsonl", "again/deep/d.jsonl", "sub/b.jsonl"
    ]  # fmt: skip
    assert [table.name for table in tables_of(str(data))] == [
        "a.jsonl", "again/c.jsonl", "again/deep/d.jsonl", "sub/b.jsonl"
    ]  # fmt: skip
    (other / "dog.txt").write_text("a dog")
    picture().save(other / "dog.png")
    (tmp_path / "pictures").mkdir()
    (tmp_path / "pictures/linked").symlink_to(other)
    (found,) = discover(tmp_path / "pictures").items
    assert found.prompt == "a dog"


def test_images_beside_tables_are_not_sorted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """There may be a million."""
    for name in ("b.jsonl", "a.jsonl", *(f"{number}.jpg" for number in range(9))):
        (tmp_path / name).touch()
    less, compared = PurePath.__lt__, set[str]()

    def recorded(one: PurePath, other: PurePath) -> bool:
        compared.update((one.suffix, other.suffix))
        return less(one, other)

    monkeypatch.setattr(PurePath, "__lt__", recorded)
    assert [table.name for table in tables_of(str(tmp_path))] == ["a.jsonl", "b.jsonl"]
    assert compared == {".jsonl"}
