"""Items are read once before a run: in threads, by several processes together, and not again while their files stay."""

from __future__ import annotations

import json
import logging
import os
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from retouch.config import parse_run
from retouch.data import checking
from retouch.data import item as items
from retouch.data.base import DataError, ItemError, ItemFiles
from retouch.data.checking import find_problems, fingerprint, in_threads
from retouch.data.dataset import Dataset, load_dataset
from retouch.data.formats.manifest import ManifestData
from retouch.data.formats.prompts import PromptsData
from retouch.data.validate import validate, validation_table
from retouch.doctor.data import data_lines
from retouch.process.machine import Machine
from retouch.types import Processes

from .conftest import Bench, box_mask, picture


@pytest.fixture(autouse=True)
def cache(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A cache of this test alone."""
    folder = tmp_path_factory.mktemp("cache")
    monkeypatch.setenv("XDG_CACHE_HOME", str(folder))
    return folder


@pytest.fixture
def read(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Ids of the items that are read, as they are."""
    ids: list[int] = []
    read_item = items.read_item

    def counted(item: ItemFiles, *how: Any) -> Any:
        ids.append(item.id)
        return read_item(item, *how)

    monkeypatch.setattr(items, "read_item", counted)
    return ids


def three(bench: Bench) -> Bench:
    for number in (1, 2, 3):
        bench.add(number)
    return bench.list(["1-A", "2-B", "3-C"])


def ids(data: Dataset) -> list[int]:
    return [item.id for item in data.items]


def damage(file: Path) -> None:
    """Other bytes, as many as before, and the same time of change."""
    overwrite(file, b"x" * file.stat().st_size)


def overwrite(file: Path, content: bytes) -> None:
    before = file.stat()
    file.write_bytes(content)
    os.utime(file, ns=(before.st_atime_ns, before.st_mtime_ns))


def touch(file: Path) -> None:
    os.utime(file, ns=(0, file.stat().st_mtime_ns + 1))


# --- what is remembered ---


def test_what_was_good_is_not_read_again(bench: Bench, read: list[int]) -> None:
    config = three(bench).config(max_bad_items=0)
    assert ids(load_dataset(config)) == sorted(read) == [1, 2, 3]
    read.clear()
    assert ids(load_dataset(config)) == [1, 2, 3]
    assert read == []
    bench.add(4).list(["1-A", "2-B", "3-C", "4-D"])
    assert ids(load_dataset(config)) == [1, 2, 3, 4]
    assert read == [4]


@pytest.mark.parametrize("place", ["image_path", "mask_path", "target_path", "reference_path", "win_path", "lose_path"])
def test_a_file_that_changed_is_read_again(place: str, tmp_path: Path) -> None:
    entry: dict[str, str] = {"prompt": "x"}
    for name in ("image_path", "mask_path", "target_path", "reference_path", "win_path", "lose_path"):
        (box_mask() if name == "mask_path" else picture()).save(tmp_path / f"{name}.png")
        entry[name] = f"{name}.png"
    (tmp_path / "list.json").write_text(json.dumps([entry]))
    config = ManifestData(path=str(tmp_path / "list.json"), resolution=(32, 48), max_bad_items=0)
    load_dataset(config)
    damage(tmp_path / f"{place}.png")
    load_dataset(config)  # its size and time are those of a good file
    touch(tmp_path / f"{place}.png")
    with pytest.raises(DataError, match="not an image"):
        load_dataset(config)


def test_a_mask_of_another_item_that_a_reference_belongs_to_counts(bench: Bench) -> None:
    item = ItemFiles(1, "x", reference_mask_path=bench.add(1).folder / "test1_mask.png")
    before = fingerprint(item)
    touch(bench.folder / "test1_mask.png")
    changed = fingerprint(item)
    (bench.folder / "test1_mask.png").unlink()
    assert len({before, changed, fingerprint(item)}) == 3


def test_every_field_of_an_item_is_part_of_its_fingerprint_or_decides_nothing(tmp_path: Path) -> None:
    """Of a new field too. A line that left its image would end a run at its first access."""
    picture().save(tmp_path / "a.png")
    file = tmp_path / "a.png"
    other: dict[str, Any] = {
        **{field.name: file for field in fields(ItemFiles) if field.name.endswith("_path")},
        "id": 2, "prompt": " ", "target": "source", "crops_reference": True, "mask_is_made": True,
        "more_paths": (file,), "metadata": {"lines": [{"text": "A", "box": [0, 0, 9, 9]}]},
    }  # fmt: skip
    item = ItemFiles(1, "p")
    assert {field.name for field in fields(ItemFiles)} == {*other, "difficulty", "name", "original"}
    prints = {name: fingerprint(replace(item, **{name: value})) for name, value in other.items()}
    assert len({*prints.values(), fingerprint(item)}) == len(other) + 1
    same = {"prompt": "q", "difficulty": 0.5, "metadata": {"text": "B"}, "original": "5eed"}
    assert {fingerprint(replace(item, **{name: value})) for name, value in same.items()} == {fingerprint(item)}


def test_a_line_that_moved_outside_its_image_is_found_at_the_start(tmp_path: Path) -> None:
    picture().save(tmp_path / "a.png")
    box_mask().save(tmp_path / "m.png")
    config = ManifestData(path=str(tmp_path / "list.json"), resolution=(32, 48), max_bad_items=0)
    for left in (10, 100):
        line = {"text": "A", "box": [left, 8, left + 20, 18]}
        entry = {"prompt": "x", "image_path": "a.png", "mask_path": "m.png", "lines": [line]}
        (tmp_path / "list.json").write_text(json.dumps([entry]))
        if left == 10:
            load_dataset(config)
    with pytest.raises(DataError, match="of its place lies outside"):
        load_dataset(config)


def test_a_broken_item_is_read_at_every_start(bench: Bench) -> None:
    config = three(bench).config(max_bad_items=1)
    source = bench.folder / "test2_source.png"
    good = source.read_bytes()
    damage(source)
    assert ids(load_dataset(config)) == [1, 3]
    assert ids(load_dataset(config)) == [1, 3]
    overwrite(source, good)
    assert ids(load_dataset(config)) == [1, 2, 3]


def test_too_many_broken_items_do_not_cost_the_next_start_the_good_ones(bench: Bench, read: list[int]) -> None:
    damage(three(bench).folder / "test2_source.png")
    with pytest.raises(DataError, match="1 of 3 items are broken"):
        load_dataset(bench.config(max_bad_items=0))
    read.clear()
    assert ids(load_dataset(bench.config(max_bad_items=1))) == [1, 3]
    assert read == [2]


def test_read_otherwise_is_read_again(bench: Bench, read: list[int]) -> None:
    """Whether a mask survives depends on the size, and what is missing on who asks."""
    load_dataset(three(bench).config())
    read.clear()
    with pytest.raises(DataError, match="the masked area vanishes"):
        load_dataset(bench.config(resolution=1, max_bad_items=0))
    assert sorted(read) == [1, 2, 3]
    with pytest.raises(DataError, match="win_path missing"):
        load_dataset(bench.config(max_bad_items=0), needs={"win"})
    (bench.folder / "test2_ref.png").write_bytes(b"")
    with pytest.raises(DataError, match="not an image"):
        load_dataset(bench.config(max_bad_items=0))


def test_validate_remembers_nothing(bench: Bench) -> None:
    load_dataset(three(bench).config())
    damage(bench.folder / "test2_source.png")
    assert [f.item for f in validate(bench.folder, (32, 48)) if f.problem] == ["item 2"]


def test_other_checks_begin_anew(bench: Bench, read: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    load_dataset(three(bench).config())
    read.clear()
    monkeypatch.setattr(checking, "_checks", lambda: ("another version",))
    load_dataset(bench.config())
    assert sorted(read) == [1, 2, 3]


def test_a_damaged_memory_knows_nothing(bench: Bench, read: list[int], cache: Path) -> None:
    load_dataset(three(bench).config())
    (memory,) = (cache / "retouch" / "checked").iterdir()
    whole = memory.read_bytes()
    assert len(whole) == 3 * 16
    memory.write_bytes(whole[1:])
    read.clear()
    load_dataset(bench.config())
    assert sorted(read) == [1, 2, 3]
    assert memory.read_bytes() == whole


def test_no_place_to_remember(bench: Bench, read: list[int], cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (cache / "retouch").write_text("in the way")
    assert ids(load_dataset(three(bench).config())) == [1, 2, 3]

    def homeless() -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setattr(Path, "home", homeless)
    assert ids(load_dataset(bench.config())) == [1, 2, 3]
    assert sorted(read) == [1, 1, 2, 2, 3, 3]


def test_prompts_alone_are_not_remembered(tmp_path: Path, cache: Path) -> None:
    (tmp_path / "p.txt").write_text("a\nb\n")
    assert len(load_dataset(PromptsData(path=str(tmp_path / "p.txt")))) == 2
    assert list(cache.iterdir()) == []


# --- several processes ---


class Rank:
    """One of several processes, played by threads."""

    def __init__(self, rank: int, size: int, table: dict[int, list[Any]], barrier: threading.Barrier) -> None:
        self.rank = rank
        self.world_size = size
        self._table = table
        self._barrier = barrier

    def gather_list(self, values: Sequence[Any], /) -> list[Any]:
        self._table[self.rank] = list(values)
        self._barrier.wait(20)
        gathered = [value for rank in range(self.world_size) for value in self._table[rank]]
        self._barrier.wait(20)
        return gathered


def on_ranks(size: int, load: Callable[[Rank], Any]) -> list[Any]:
    """What `load` gives on each, or the DataError that it raises."""
    outcomes: list[Any] = [None] * size
    table: dict[int, list[Any]] = {}
    barrier = threading.Barrier(size)

    def run(rank: int) -> None:
        try:
            outcomes[rank] = load(Rank(rank, size, table, barrier))
        except DataError as error:
            outcomes[rank] = error

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert None not in outcomes
    return outcomes


def seven(bench: Bench) -> Bench:
    """2 and 6 are damaged, line 4 is malformed."""
    for number in (1, 2, 3, 5, 6, 7):
        bench.add(number)
    damage(bench.folder / "test2_source.png")
    damage(bench.folder / "test6_mask.png")
    return bench.list(["1-A", "2-B", "3-C", "four", "5-E", "6-F", "7-G"])


@pytest.mark.parametrize("size", [2, 4, 9])
def test_processes_share_the_work_and_see_the_same(
    size: int, bench: Bench, read: list[int], caplog: pytest.LogCaptureFixture
) -> None:
    config = seven(bench).config()
    with caplog.at_level(logging.WARNING, "retouch"):
        outcomes = on_ranks(size, lambda rank: load_dataset(config, "data", (), rank))
    assert [ids(one) for one in outcomes if isinstance(one, Dataset)] == [[1, 3, 5, 7]] * size
    assert sorted(read) == [1, 2, 3, 5, 6, 7]
    assert len([r for r in caplog.records if "skipped" in r.getMessage()]) == 4
    read.clear()
    on_ranks(size, lambda rank: load_dataset(config, "data", (), rank))
    assert sorted(read) == [2, 6]
    read.clear()
    assert ids(load_dataset(config)) == [1, 3, 5, 7]
    assert sorted(read) == [2, 6]


def test_each_machine_reads_every_item(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its disk may be its own: what is broken on one machine is used on none."""
    at, read = threading.local(), list[tuple[int, int]]()
    monkeypatch.setattr(checking, "this_machine", lambda: Machine(f"machine{at.rank // 2}", ""))
    items = [ItemFiles(number, "p") for number in range(5)]

    def problems(process: Processes) -> list[ItemError | None]:
        at.rank = process.rank

        def check(item: ItemFiles) -> ItemError | None:
            read.append((process.rank // 2, item.id))
            return ItemError("item 3", "broken") if (process.rank, item.id) == (3, 3) else None

        return find_problems(items, check, "data", process, None)

    assert on_ranks(4, problems) == [[None, None, None, ItemError("item 3", "broken"), None]] * 4
    assert sorted(read) == [(machine, number) for machine in (0, 1) for number in range(5)]


def test_all_processes_refuse_alike(bench: Bench) -> None:
    config = seven(bench).config(max_bad_items=2)
    first, second = on_ranks(2, lambda rank: load_dataset(config, "data", (), rank))
    assert str(first) == str(second)
    assert str(first).startswith("data: 3 of 7 items are broken, more than max_bad_items 2; the first: item 2: ")


def test_processes_that_list_other_items(bench: Bench, tmp_path: Path) -> None:
    config = three(bench).config()
    (tmp_path / "other.txt").write_text("1-A\n3-C\n2-B\n")
    other = config.model_copy(update={"list_file": "other.txt"})
    outcomes = on_ranks(2, lambda rank: load_dataset(other if rank.rank else config, "warmup_data", (), rank))
    problem = f"warmup_data: {bench.folder} does not list the same items on all machines; give them equal files"
    assert [str(one) for one in outcomes] == [problem] * 2


@pytest.mark.parametrize(
    ("entries", "change"),
    [
        ([{"prompt": "a cat"}, {"prompt": "a dog"}], lambda entries: entries[::-1]),
        ([{"prompt": "a", "image": "x.png"}, {"prompt": "a", "image": "y.png"}], lambda entries: entries[::-1]),
        ([{"prompt": "a", "text": "MOON"}], lambda entries: [{"prompt": "a", "text": "NOON"}]),
    ],
)
def test_positions_as_ids_hide_no_other_list(
    entries: list[dict[str, str]], change: Callable[[Any], Any], tmp_path: Path
) -> None:
    """A list in the order of a machine's folder has the same ids on all; a group would then mix two examples."""
    for machine, listed in (("one", entries), ("two", change(entries)), ("three", entries)):
        (tmp_path / machine).mkdir()
        (tmp_path / machine / "list.json").write_text(json.dumps(listed))
        for name in ("x", "y"):
            Image.new("RGB", (16, 16)).save(tmp_path / machine / f"{name}.png")

    def load(rank: Rank, *machines: str) -> Dataset:
        return load_dataset(ManifestData(path=str(tmp_path / machines[rank.rank] / "list.json")), processes=rank)

    found = on_ranks(2, lambda rank: load(rank, "one", "two"))
    assert ["does not list the same items on all machines" in str(one) for one in found] == [True, True]
    assert [len(one) for one in on_ranks(2, lambda rank: load(rank, "one", "three"))] == [len(entries)] * 2


# --- threads ---


def test_results_come_in_order() -> None:
    waits = [0.02 * (number % 3 == 0) for number in range(50)]

    def work(number: int) -> int:
        time.sleep(waits[number])
        return number

    assert list(in_threads(work, range(50))) == list(range(50))
    assert list(in_threads(work, range(0))) == []


def test_several_are_worked_on_at_once() -> None:
    together = threading.Barrier(3)
    assert len(list(in_threads(lambda _: together.wait(20), range(24)))) == 24


def test_an_error_is_raised_and_no_thread_stays() -> None:
    def work(number: int) -> int:
        if number >= 30:
            raise DataError(str(number))
        return number

    before = set(threading.enumerate())
    results: Iterator[int] = in_threads(work, range(1000))
    with pytest.raises(DataError, match="30"):
        list(results)
    assert not set(threading.enumerate()) - before


def test_what_takes_long_says_how_far_it_is(
    bench: Bench, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    with caplog.at_level(logging.INFO, "retouch"):
        load_dataset(three(bench).config(), "warmup_data")
        assert not caplog.records
        monkeypatch.setattr(checking, "PROGRESS_S", 0.0)
        load_dataset(bench.config(), "warmup_data")
    assert [r.getMessage() for r in caplog.records] == [
        f"warmup_data: checked {n} of the 3 items of this process" for n in (1, 2, 3)
    ]


# --- doubtful masks ---


def doubtful(bench: Bench) -> Bench:
    """Item 2 has an erased mask, item 3 a photograph in place of one."""
    erased = picture().convert("RGBA")
    erased.putalpha(box_mask().point(lambda v: 255 - v))
    levels = (
        np.tile(np.linspace(0, 255, 48).astype(np.uint8), (32, 1)) // 2 + np.arange(32, dtype=np.uint8)[:, None] * 3
    )
    return bench.add(1).add(2, mask=erased).add(3, mask=Image.fromarray(levels)).list(["1-A", "2-B", "3-C"])


@pytest.mark.parametrize("size", [1, 3])
def test_doubtful_masks_are_reported_at_every_start(
    size: int, bench: Bench, read: list[int], caplog: pytest.LogCaptureFixture
) -> None:
    """Once for all of them, with the file and the reason of the first, which alone is read again."""
    config = doubtful(bench).config(max_bad_items=0)
    for reads in ([1, 2, 3], [2] * size):
        read.clear()
        caplog.clear()
        with caplog.at_level(logging.WARNING, "retouch"):
            outcomes = on_ranks(size, lambda rank: load_dataset(config, "data", (), rank))
        assert [ids(data) for data in outcomes] == [[1, 2, 3]] * size
        [record] = caplog.records
        assert record.getMessage().startswith("data: masks of 2 of 3 items are doubtful; the first: item 2: ")
        assert (
            f"item 2: {bench.folder / 'test2_mask.png'}: opaque pixels are repainted, but the border "
            in record.getMessage()
        )
        assert all(str(data.doubts[0]) in record.getMessage() for data in outcomes)
        assert record.getMessage().endswith(". `retouch data validate` lists all")
        assert sorted(read) == reads
    touch(bench.folder / "test2_mask.png")
    read.clear()
    load_dataset(config)
    assert read == [2]


def test_doctor_names_a_doubtful_mask_beside_a_broken_item(bench: Bench) -> None:
    section = doubtful(bench).config().model_dump(mode="json")
    damage(bench.folder / "test1_source.png")
    model = {"family": "sd_inpaint", "path": "tiny"}
    given = {"name": "t", "model": model, "algorithm": {"name": "grpo"}, "rewards": {"jpeg_size": {}}}
    [line] = [line for line in data_lines(parse_run({**given, "data": section}), 1) if line.what == "data"]
    assert line.status == "warning"
    left_out = ": 2 items, 1 more are broken and left out; `retouch data validate` lists them; masks of 2 of 2 items "
    assert line.says.startswith(f"{bench.folder}{left_out}are doubtful; the first: item 2: ")
    assert "the border of this mask is opaque" in line.says


def test_validate_lists_every_doubtful_mask(bench: Bench) -> None:
    """Also beyond the first good items, and beside problems."""
    doubtful(bench)
    for number in range(4, 12):
        bench.add(number)
    bench.list(f"{number}-A" for number in [*range(4, 12), 1, 2, 3])
    table = validation_table(validate(bench.folder, (32, 48)))
    lines = table.splitlines()
    assert [line.split()[2] for line in lines if " check: " in line] == ["2", "3"]
    assert "grey levels in the luminance channel" in table and "the border of this mask is opaque" in table
    assert lines[-1] == "11 items can be used; 2 of the masks to check"
    damage(bench.folder / "test4_source.png")
    again = validation_table(validate(bench.folder, (32, 48))).splitlines()
    assert sum(" check: " in line for line in again) == 2
    assert again[-1] == "10 items can be used; 1 problem; 2 of the masks to check"


def test_prompts_without_files_are_not_read_one_by_one(
    tmp_path: Path, read: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Their list has all that a check needs: no thread, fingerprint or example is made for any of them."""

    def unused(*_: object) -> None:
        raise AssertionError

    monkeypatch.setattr(checking, "ThreadPoolExecutor", unused)
    monkeypatch.setattr(checking, "fingerprint", unused)
    (tmp_path / "p.jsonl").write_text('{"prompt": "a"}\n{"prompt": " "}\n{"prompt": "b"}\n')
    for kind, bad in ((PromptsData, "entry 1"), (ManifestData, "item 1")):
        section = kind.model_validate({"path": str(tmp_path / "p.jsonl")})
        assert ids(load_dataset(section)) == [0, 2]
        with pytest.raises(DataError, match=f"the first: {bad}: "):
            load_dataset(section.model_copy(update={"max_bad_items": 0}))
    with pytest.raises(DataError, match="item 0: image_path missing, which the run needs"):
        load_dataset(section, needs={"source"})
    assert read == []
