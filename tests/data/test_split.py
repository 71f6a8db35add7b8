"""Halves that share no picture, and the guard against evaluating on what is trained on."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from retouch.data.base import DataError
from retouch.data.dataset import load_dataset
from retouch.data.formats.manifest import ManifestData
from retouch.data.formats.prompts import PromptsData
from retouch.data.identity import trained_on
from retouch.data.split import sides, split
from tests.command_line import retouch

from .conftest import Bench, picture


def words_of(listing: Path) -> list[str]:
    return listing.read_text(encoding="utf-8").splitlines()


def folder_of(bench: Bench, count: int) -> Bench:
    for number in range(count):
        bench.add(number)
    return bench.list([f"{number}-word {number}" for number in range(count)])


def test_halves_of_a_folder_are_lists_that_can_be_named(bench: Bench) -> None:
    folder_of(bench, 40)
    outcome = retouch("data", "split", bench.folder, "--share", "0.25")
    assert outcome.code == 0, outcome.err
    train, held_out = (bench.folder / f"self_bench_{half}.txt" for half in ("train", "held_out"))
    assert outcome.out == f"{train}: {len(words_of(train))} items\n{held_out}: {len(words_of(held_out))} items\n"
    assert 3 <= len(words_of(held_out)) <= 18  # of 10 expected
    everything = words_of(bench.folder / "self_bench.txt")
    assert sorted(words_of(train) + words_of(held_out)) == sorted(everything)
    data, evaluation = (load_dataset(bench.config(list_file=path.name)) for path in (train, held_out))
    assert trained_on(evaluation, data) == []
    again = retouch("data", "split", bench.folder, "--share", "0.25")
    assert (again.code, again.err) == (2, f"error: {train} exists; delete it, or rename it\n")


def test_a_share_that_few_items_cannot_give_is_said(bench: Bench) -> None:
    """The side of an item is its own: more items move none, so that a few do not divide as asked."""
    folder_of(bench, 12)
    said: dict[int, str] = {}
    for seed in (0, 1, 3, 16):
        for old in bench.folder.glob("self_bench_*"):
            old.unlink()
        outcome = retouch("data", "split", bench.folder, "--share", "0.25", "--seed", seed)
        said[len(words_of(bench.folder / "self_bench_held_out.txt"))] = outcome.err
    assert said == {2: "", 3: ""} | {
        count: f"--share: given 0.25, but {count} of 12 items are held out, because items that share an image (or "
        "text) stay together; set another --seed\n"
        for count in (1, 6)
    }


def test_a_side_does_not_depend_on_order_or_company(bench: Bench) -> None:
    folder_of(bench, 30)
    held_out = bench.folder / "self_bench_held_out.txt"

    def held(lines: list[str], **options: int) -> set[str]:
        for old in bench.folder.glob("self_bench_*"):
            old.unlink()
        bench.list(lines)
        split(bench.folder, 0.3, **options)
        return set(words_of(held_out))

    everything = words_of(bench.folder / "self_bench.txt")
    first = held(everything)
    assert held(everything[::-1]) == first
    assert held(everything[:20]) == first & set(everything[:20])
    assert held(everything, seed=1) != first


def test_items_of_one_picture_are_on_one_side(bench: Bench) -> None:
    folder_of(bench, 30)
    for number in range(0, 30, 2):  # pairs with the same source under another name
        shutil.copy(bench.folder / f"test{number}_source.png", bench.folder / f"test{number + 1}_source.png")
    for seed in range(4):
        for old in bench.folder.glob("self_bench_*"):
            old.unlink()
        split(bench.folder, 0.4, seed=seed)
        numbers = {int(line.partition("-")[0]) for line in words_of(bench.folder / "self_bench_held_out.txt")}
        assert all((n ^ 1) in numbers for n in numbers)


def test_what_is_shared_through_others_is_on_one_side() -> None:
    chain = [("a", "b"), ("c", "d"), ("b", "c"), ("x",), ("y",), ("z",)]
    found = [sides(chain, 0.5, seed) for seed in range(20)]
    assert all(len(set(side[:3])) == 1 for side in found)
    assert any(len(set(side)) == 2 for side in found)
    assert [side[::-1] for side in found] == [sides(chain[::-1], 0.5, seed) for seed in range(20)]


def test_a_manifest_keeps_its_entries(bench: Bench) -> None:
    folder_of(bench, 12)
    entries = [{"image_path": f"test{n}_source.png", "prompt": f"p {n % 3}", "note": "ä"} for n in range(12)]
    manifest = bench.folder / "m.json"
    manifest.write_text(json.dumps(entries), encoding="utf-8")
    halves = [json.loads(path.read_text(encoding="utf-8")) for path in split(manifest, 0.5)]
    assert sorted(map(str, halves[0] + halves[1])) == sorted(map(str, entries))
    assert [bool(half) for half in halves] == [True, True]
    for path in bench.folder.glob("m_*"):
        path.unlink()
    halves = [json.loads(path.read_text(encoding="utf-8")) for path in split(manifest, 0.5, by="text", seed=1)]
    assert {e["prompt"] for e in halves[0]}.isdisjoint(e["prompt"] for e in halves[1])


def test_texts_that_scorers_take_for_one_are_on_one_side(bench: Bench) -> None:
    """Each half else trains on what the other one measures: the same words in typographic marks, or another width."""
    texts = [(f"DON'T {n}", f"DON’T {n}", f"ＤＯＮ´Ｔ {n}") for n in range(12)]
    entries = [
        {"prompt": f"p {row} {n}", "text": text} for n, same in enumerate(texts) for row, text in enumerate(same)
    ]
    manifest = bench.folder / "m.json"
    manifest.write_text(json.dumps(entries), encoding="utf-8")
    halves = [json.loads(path.read_text(encoding="utf-8")) for path in split(manifest, 0.5, by="text")]
    sides = [{entry["prompt"].split()[-1] for entry in half} for half in halves]
    assert sides[0].isdisjoint(sides[1]) and all(sides)


def test_items_with_a_blank_text_are_divided_by_their_prompts(bench: Bench) -> None:
    """A blank text is none, as for scorers; all of them were one text, on one side."""
    manifest = bench.folder / "m.json"
    manifest.write_text(json.dumps([{"prompt": f"p {n}", "text": " "} for n in range(12)]), encoding="utf-8")
    halves = [json.loads(path.read_text(encoding="utf-8")) for path in split(manifest, 0.5, by="text")]
    assert all(halves) and len(halves[0]) + len(halves[1]) == 12


def test_an_imagefolder_keeps_its_rows(bench: Bench) -> None:
    folder_of(bench, 12)
    (bench.folder / "self_bench.txt").unlink()
    rows = [f'test{n}_source.png,"p, {n % 3}"' for n in range(12)]
    (bench.folder / "metadata.csv").write_text("\n".join(["file_name,text", *rows, ""]), encoding="utf-8")
    train, held_out = split(bench.folder, 0.5)
    assert (train.name, held_out.name) == ("metadata_train.csv", "metadata_held_out.csv")
    halves = [path.read_text(encoding="utf-8").splitlines() for path in (train, held_out)]
    assert [half[0] for half in halves] == ["file_name,text"] * 2
    assert sorted(halves[0][1:] + halves[1][1:]) == sorted(rows)
    assert len(load_dataset(ManifestData(path=str(held_out), resolution=(32, 48)))) == len(halves[1]) - 1 > 0


def test_what_cannot_be_divided(bench: Bench, tmp_path: Path) -> None:
    folder_of(bench, 2)
    for arguments, message in (
        (["--share", "1"], "--share: given 1.0; the held-out share lies between 0 and 1, like 0.1"),
        (["--by", "word"], "--by: given 'word'; allowed: image, text"),
        (["--share", "0.0001"], f"{bench.folder}: of 2 items none is in the held-out part; set another --share or"),
    ):
        outcome = retouch("data", "split", bench.folder, *arguments)
        assert outcome.code == 2 and outcome.err.startswith(f"error: {message}")
    bench.list(["1-A", "nonsense", "9-B"])
    with pytest.raises(DataError, match=r"self_bench.txt line 2: 'nonsense' is not .* \(and 1 more problems\)"):
        split(bench.folder, 0.5)
    assert not list(bench.folder.glob("self_bench_*"))


# --- the guard ---


@pytest.mark.parametrize("indent", [None, 2])
def test_an_object_of_items_is_no_list(tmp_path: Path, indent: int | None) -> None:
    """In one line it looks like a list of one entry."""
    entries = {str(n): {"id": f"{n}.png", "prompt": "p", "edit_type": "add"} for n in (1, 2)}
    (tmp_path / "basic_edit.json").write_text(json.dumps(entries, indent=indent), encoding="utf-8")
    for number in (1, 2):
        picture(blue=number).save(tmp_path / f"{number}.png")
    with pytest.raises(
        DataError, match=r"basic_edit\.json: holds no list with an entry for each of 2 items of format img"
    ):
        split(tmp_path, 0.5)
    assert len(list(tmp_path.iterdir())) == 3


def test_a_picture_is_known_by_its_bytes(bench: Bench, tmp_path: Path) -> None:
    folder_of(bench, 4)
    other = Bench(tmp_path / "other")
    other.folder.mkdir()
    other.add(0, picture(blue=100)).add(1, picture(blue=101)).add(2, picture(blue=102))
    shutil.copy(bench.folder / "test3_source.png", other.folder / "test1_source.png")
    other.list(["0-a", "1-b", "2-c"])
    data, evaluation = load_dataset(bench.config()), load_dataset(other.config())
    assert [item.id for item in trained_on(evaluation, data)] == [1]
    entry = {"image_path": "test2_source.png", "target_path": str(bench.folder / "test0_source.png"), "prompt": "p"}
    (other.folder / "m.json").write_text(json.dumps([entry]), encoding="utf-8")
    targets = load_dataset(ManifestData(path=str(other.folder / "m.json"), resolution=(32, 48)))
    assert [item.id for item in trained_on(evaluation, targets)] == [2]
    assert [item.id for item in trained_on(targets, data)] == [0]
    assert trained_on(evaluation, load_dataset(bench.config(limit=2))) == []
    assert trained_on(evaluation, data, with_prompt=True) == []  # the same image is asked for another text
    for text, found in (("word 3", [1]), ("word 0", [])):  # that of the image, that of another image
        other.list(["0-a", f"1-{text}", "2-c"])
        asked_again = load_dataset(other.config())
        assert asked_again.items[1].prompt in {item.prompt for item in data.items}
        assert [item.id for item in trained_on(asked_again, data, with_prompt=True)] == found


def test_prompts_are_known_by_their_words(tmp_path: Path) -> None:
    for name, words in (("train", "a\nb\n"), ("test", "b\nc\n")):
        (tmp_path / f"{name}.txt").write_text(words, encoding="utf-8")
    data, evaluation = (load_dataset(PromptsData(path=str(tmp_path / f"{n}.txt"))) for n in ("train", "test"))
    assert [item.prompt for item in trained_on(evaluation, data)] == ["b"]
