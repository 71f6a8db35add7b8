"""Lists of published benchmarks: items, or a DataError; names of outputs that stay in their folder; lines with their
places."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path, PurePosixPath
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from retouch.benchmarks import BENCHMARKS
from retouch.benchmarks.outputs import find_file, item_digest, outputs_of
from retouch.data.base import ItemError, ItemFiles
from retouch.data.discover import recognised
from retouch.data.formats import FORMATS
from retouch.data.item import read_item
from retouch.errors import RetouchError
from retouch.imaging.lines import parse_lines, placed, polygon_mask, share_inside, shown_text
from retouch.rewards.protocol import RewardItem, lines_to_read, text_to_read
from retouch.rewards.scorers.knowledge_graph import closed_ged, read_graph
from retouch.types import Failure
from retouch_bench.scorers.geneval_verdict import counted, read_clauses, soft_value, verdict
from tests.fuzz.inputs import attempt, changed, fuzzed, kept, texts, values

SQUARE = [[4, 4], [30, 4], [30, 12], [4, 12]]
CVTG: dict[str, Any] = {"data_list": [{"index": 0, "prompt": "a 'cat' and a 'dog'", "sentence_list": ["cat", "dog"]}]}
ANYTEXT: dict[str, Any] = {
    "data_list": [
        {
            "img_name": "a.png",
            "caption": "a sign with *",
            "annotations": [{"polygon": SQUARE, "text": "cat", "valid": True}, {"polygon": SQUARE, "text": "dog"}],
        }
    ]
}
GENEVAL: dict[str, Any] = {
    "tag": "position",
    "include": [{"class": "dog", "count": 1}, {"class": "tie", "count": 2, "color": "red", "position": ["above", 0]}],
    "exclude": [{"class": "dog", "count": 2}],
    "prompt": "a red tie above a dog",
}
IMGEDIT: dict[str, Any] = {"1082": {"id": "a.png", "prompt": "Remove the sign", "edit_type": "remove"}}
LONGTEXT: dict[str, Any] = {"prompt_id": 3, "prompt": "a sign", "text": ["one two", "three"], "category": "sign"}
TEXTEDIT: dict[str, Any] = {
    "prompt": "replace it",
    "original_image": "a.png",
    "source_text": "cat",
    "target_text": "dog",
    "gt_image": "m.png",
    "gt_caption": "a sign",
}
GEDIT: dict[str, Any] = {
    "key": "1",
    "task_type": "text_change",
    "instruction": "write a word",
    "instruction_language": "en",
    "input_image": "a.png",
    "Intersection_exist": True,
}

LISTS: dict[str, tuple[str, str, Any, bool]] = {
    "anytext": ("anytext", "test1k.json", ANYTEXT, False),
    "anytext_edit": ("anytext", "test1k.json", ANYTEXT, False),
    "textflux": ("textflux", "ReCTS_other.json", ANYTEXT, False),
    "cvtg": ("cvtg", "CVTG/2.json", CVTG, False),
    "geneval": ("geneval", "evaluation_metadata.jsonl", GENEVAL, True),
    "imgedit": ("imgedit", "basic_edit.json", IMGEDIT, False),
    "longtext": ("longtext", "text_prompts.jsonl", LONGTEXT, True),
    "textedit": ("textedit", "eval_prompts/fullset/1.1.1.jsonl", TEXTEDIT, True),
    "gedit": ("gedit", "rows.jsonl", GEDIT, True),
}
"""Benchmark -> its format, its list, an entry (a whole file), and whether the list has an entry in each line."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("formats")


def _write(root: Path, name: str, content: str) -> Path:
    """The folder of a published benchmark with one list of this content."""
    place = root / name
    shutil.rmtree(place, ignore_errors=True)
    file = place / LISTS[name][1]
    file.parent.mkdir(parents=True)
    Image.new("RGB", (40, 32), "red").save(place / "a.png")
    Image.new("L", (40, 32), 255).save(place / "m.png")
    if name == "cvtg":
        for style in ("CVTG", "CVTG-Style"):
            for count in (2, 3, 4, 5):
                (place / style).mkdir(exist_ok=True)
                (place / style / f"{count}.json").write_text('{"data_list": []}')
    file.write_bytes(content.encode("utf-8", "surrogatepass"))
    return place


def _read(name: str, place: Path) -> None:
    """Everything that reads a list: items, their images, the outputs of the benchmark and their digests."""
    kind = LISTS[name][0]
    section = FORMATS.available()[kind].model_validate({"path": str(place), "resolution": 32})
    recognised(place, (32, 32))
    items = section.list_items()
    for item in items[:3]:
        if isinstance(item, ItemError):
            str(item).encode()
            continue
        try:
            example, _ = read_item(item, section)
        except RetouchError as error:
            str(error).encode()
        else:
            str(shown_text(example.metadata)).encode()
    given_ = {
        "name": name,
        "path": str(place),
        "resolution": 32,
        "rewards": {"imgedit": None} if kind == "imgedit" else {},
    }
    benchmark = BENCHMARKS[name].model_validate(given_)
    good = [item for item in benchmark.data().items() if isinstance(item, ItemFiles)]
    outputs = outputs_of(benchmark, good[:3])
    for output in outputs:
        parts = PurePosixPath(output.file).parts
        assert not output.file.startswith("/") and ".." not in parts, output.file
        find_file(place, output.file)
        find_file(place, output.own_file)
        item_digest(output.item)


def _content(name: str, value: Any) -> str:
    lined = LISTS[name][3]
    return "\n".join(map(json.dumps, value)) if lined and isinstance(value, list) else json.dumps(value)


def _seed(name: str) -> Any:
    entry, lined = LISTS[name][2:]
    other = {"prompt_id": 4, "original_image": "m.png", "key": "2"}
    return [entry, entry | {key: value for key, value in other.items() if key in entry}] if lined else entry


@pytest.mark.parametrize("name", sorted(LISTS))
def test_the_seeds_are_read(folder: Path, name: str) -> None:
    place = _write(folder, name, _content(name, _seed(name)))
    section = FORMATS.available()[LISTS[name][0]].model_validate({"path": str(place), "resolution": 32})
    items = section.list_items()
    assert items and not any(isinstance(item, ItemError) for item in items), items
    _read(name, place)


@fuzzed
@given(st.sampled_from(sorted(LISTS)).flatmap(lambda name: st.tuples(st.just(name), changed([_seed(name)]))))
def test_entries(folder: Path, given_: tuple[str, Any]) -> None:
    name, value = given_
    place = _write(folder, name, _content(name, value))
    attempt("published lists, structure", lambda: _read(name, place), RetouchError)


@fuzzed
@given(
    st.sampled_from(sorted(LISTS)).flatmap(
        lambda name: st.tuples(st.just(name), texts([_content(name, _seed(name))])),
    )
)
def test_texts(folder: Path, given_: tuple[str, str]) -> None:
    name, text = given_
    place = _write(folder, name, text)
    attempt("published lists, text", lambda: _read(name, place), RetouchError)


LINES: list[Any] = [
    [{"text": "cat", "polygon": SQUARE}, {"text": "two words", "box": [1, 2, 30, 12]}],
    ["cat", "dog"],
    [{"text": "cat", "box": [0, 0, 1e-200, 1e-200]}],
]


def _use_lines(given_: Any) -> None:
    lines = parse_lines(given_)
    for scale, offset in (((1.0, 1.0), (0.0, 0.0)), ((0.5, 1e-9), (1e6, -1e6))):
        for line in placed(lines, scale, offset):
            assert 0 <= share_inside(line, (32, 32)) <= 1
    polygon_mask([line.polygon for line in lines if line.polygon is not None], (32, 32))
    _crop([line.polygon for line in lines if line.polygon is not None])


def _crop(polygons: list[Any]) -> None:
    pytest.importorskip("cv2")
    from retouch.rewards.line_crops import upright

    for polygon in polygons:
        crop = upright(np.zeros((32, 40, 3), np.uint8), polygon)
        assert crop is None or crop.size <= 3 * 33 * 41


@fuzzed
@given(st.one_of(changed(LINES), values))
def test_lines(lines: Any) -> None:
    attempt("metadata.lines", lambda: _use_lines(lines), ValueError)


ABOUT: list[dict[str, Any]] = [
    {"text": "cat", "lines": LINES[0], "source_text": "dog"},
    GENEVAL,
    {"knowledge_graph": {"elements": ["sun", "moon"], "dependencies": ["causes(sun, moon)"]}, "annotation": "a"},
]


def _use_metadata(about: dict[str, Any]) -> None:
    """The functions of scorers that read the metadata of an item, which a server takes from any client."""
    item = RewardItem(0, "a 'sign'", np.zeros((8, 8, 3), np.uint8), metadata=about)
    for read in (text_to_read, lines_to_read):
        found = read(item)
        assert not isinstance(found, Failure) or found.message
    for use in (_verdict, _distance):
        try:
            use(about)
        except ValueError as error:
            str(error).encode("utf-8", "backslashreplace")


def _verdict(about: dict[str, Any]) -> None:
    include, exclude = read_clauses(about)
    objects = counted([], 0.3)
    verdict(objects, include, exclude)
    soft_value(objects, include)


def _distance(about: dict[str, Any]) -> None:
    graph = read_graph(about.get("knowledge_graph"))
    closed_ged(graph, [True] * len(graph.elements), [False] * len(graph.dependencies))


@fuzzed
@given(changed(ABOUT))
def test_metadata(about: Any) -> None:
    attempt("metadata of items", lambda: _use_metadata(about) if isinstance(about, dict) else None)


_CORPUS: dict[str, Callable[[Any], None]] = {"lines": _use_lines, "metadata": _use_metadata}


@pytest.mark.parametrize("file", kept("formats"), ids=lambda file: file.name)
def test_corpus(folder: Path, file: Path) -> None:
    target = file.stem.partition("@")[2]
    if target in _CORPUS:
        value = json.loads(file.read_text(encoding="utf-8"))
        attempt("published lists, corpus", lambda: _CORPUS[target](value), ValueError)
    else:
        place = _write(folder, target, file.read_text(encoding="utf-8"))
        attempt("published lists, corpus", lambda: _read(target, place), RetouchError)
