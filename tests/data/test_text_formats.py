"""Published data sets of text: their layouts, read as they are."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from retouch.data.base import DataError, DataSection, ItemError, ItemFiles
from retouch.data.buckets import Buckets
from retouch.data.dataset import load_dataset
from retouch.data.discover import recognised
from retouch.imaging.lines import parse_lines
from retouch_bench.formats.anytext import AnyTextData, TextFluxData
from retouch_bench.formats.cvtg import CvtgData
from retouch_bench.formats.longtext import LongTextData
from retouch_bench.formats.textedit import TextEditData
from tests.benchmarks_room.text_cases import write_anytext, write_cvtg, write_longtext, write_textedit, write_textflux

POINT = {"text": "a", "polygon": [[1, 2]]}


def items_of(section: DataSection) -> list[ItemFiles]:
    listed = section.items()
    assert not any(isinstance(item, ItemError) for item in listed), listed
    return [item for item in listed if isinstance(item, ItemFiles)]


@pytest.mark.parametrize(
    ("write", "name"),
    [(write_anytext, "anytext"), (write_textflux, "textflux"), (write_longtext, "longtext"), (write_cvtg, "cvtg"),
     (write_textedit, "textedit")],
)  # fmt: skip
def test_a_folder_is_recognised(write: Any, name: str, tmp_path: Path) -> None:
    section = recognised(write(tmp_path / "data"), (64, 64))
    assert section is not None and section.format == name


def test_anytext_generation(tmp_path: Path) -> None:
    first, second = items_of(AnyTextData(path=str(write_anytext(tmp_path)), resolution=256))
    assert first.prompt == 'a sign 0, with the text "OPEN", "DAILY 9-5"'
    assert (first.id, first.metadata["key"], first.source_path, first.mask_path) == (0, "000", None, None)
    lines = parse_lines(first.metadata["lines"])
    assert [line.bounds for line in lines] == [(30, 30, 150, 60), (50, 150, 200, 190)]  # 512 -> 256
    square, _ = items_of(AnyTextData(path=str(tmp_path), resolution=Buckets(pixels=256**2)))  # no image: the square
    assert square.metadata["lines"] == first.metadata["lines"]
    assert second.metadata["text"] == "A" * 20 and len(second.metadata["lines"]) == 1


def test_anytext_editing(tmp_path: Path) -> None:
    config = AnyTextData(path=str(write_anytext(tmp_path)), protocol="editing", resolution=128, fit="stretch")
    first, _ = load_dataset(config, needs={"source", "mask"})
    assert first.mask is not None and first.target is not None
    mask = np.asarray(first.mask)
    assert mask[16:30, 16:75].all() and mask[76:95, 26:100].all() and not mask[40:70].any()
    assert [line.bounds for line in parse_lines(first.metadata["lines"])] == [(15, 15, 75, 30), (25, 75, 100, 95)]


def test_textflux_takes_the_first_line(tmp_path: Path) -> None:
    first, second = items_of(TextFluxData(path=str(write_textflux(tmp_path))))
    assert (first.metadata["text"], first.metadata["key"], second.metadata["key"]) == ("咖啡", "image_0", "image_1")
    assert first.source_path is not None and Path(str(first.source_path)).is_file() and first.mask_path is not None
    (shown, _) = load_dataset(TextFluxData(path=str(tmp_path), resolution=64, fit="stretch"))
    assert shown.metadata["lines"][0]["polygon"][0] == [16, 10]


def test_a_list_of_textflux_is_of_its_own_part(tmp_path: Path) -> None:
    """The parts have images of the same names in folders of their own."""
    file = write_textflux(tmp_path) / "ReCTS_other.json"
    assert (
        items_of(TextFluxData(path=str(file)))[0].source_path
        == items_of(TextFluxData(path=str(tmp_path)))[0].source_path
    )
    file.rename(tmp_path / "ReCTS_ori.json")
    with pytest.raises(
        DataError, match=r"data\.part: given 'other', but .*ReCTS_ori\.json is the list of 'ori'; set part=ori"
    ):
        items_of(TextFluxData(path=str(tmp_path / "ReCTS_ori.json")))
    assert "other_words" not in str(
        items_of(TextFluxData(path=str(tmp_path / "ReCTS_ori.json"), part="ori"))[0].source_path
    )


def test_longtext(tmp_path: Path) -> None:
    first, second = items_of(LongTextData(path=str(write_longtext(tmp_path))))
    assert (first.id, second.id, second.metadata["key"]) == (79, 100, "0100")
    assert first.metadata["lines"] == [{"text": "OPEN DAILY"}, {"text": "Come in!"}]
    assert (first.metadata["category"], first.metadata["language"]) == ("sign", "en")
    (chinese,) = items_of(LongTextData(path=str(tmp_path), language="zh"))
    assert chinese.metadata["text"] == "你好 WORLD" and chinese.metadata["language"] == "zh"
    other = LongTextData(path=str(tmp_path / "text_prompts_zh.jsonl"))  # as English, a whole text would be one word
    with pytest.raises(DataError, match=r"data\.language: given .en., but .*_zh\.jsonl is the list of .zh."):
        other.items()


def test_cvtg(tmp_path: Path) -> None:
    items = items_of(CvtgData(path=str(write_cvtg(tmp_path))))
    assert [item.metadata["key"] for item in items] == [
        f"{s}/{n}/7" for s in ("CVTG", "CVTG-Style") for n in (2, 3, 4, 5)
    ]
    assert [item.id for item in items] == list(range(8)) and len(items[3].metadata["lines"]) == 5
    assert len(items_of(CvtgData(path=str(tmp_path), part="CVTG-Style"))) == 4


def test_textedit(tmp_path: Path) -> None:
    virtual, real = items_of(TextEditData(path=str(write_textedit(tmp_path)), part="miniset"))
    assert (virtual.metadata["group"], real.metadata["group"]) == ("virtual", "real")
    assert (real.metadata["key"], real.metadata["text"], real.metadata["source_text"]) == (
        "2.6/77.0.jpg",
        "Menu",
        "SALE",
    )
    assert real.mask_path is None and Path(str(real.reference_path)).is_file()


@pytest.mark.parametrize(
    ("section", "files", "problem"),
    [
        (AnyTextData, {"test1k.json": "[]"}, "holds no object with data_list"),
        (AnyTextData, {}, "no such file"),
        (LongTextData, {}, "no such file of prompts"),
        (CvtgData, {}, "no such file; CVTG-2K has CVTG/2.json"),
        (TextEditData, {}, "has no lists like 1.1.1.jsonl"),
    ],
)
def test_a_folder_that_is_not_the_published_one(
    section: Any, files: dict[str, str], problem: str, tmp_path: Path
) -> None:
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    with pytest.raises(DataError, match=problem):
        section(path=str(tmp_path)).items()


@pytest.mark.parametrize(
    ("section", "name", "entry", "problem"),
    [
        (LongTextData, "text_prompts.jsonl", {"prompt": "a", "text": ["b"]}, "prompt_id is None"),
        (LongTextData, "text_prompts.jsonl", {"prompt": "a", "prompt_id": 1}, "text missing"),
        (LongTextData, "text_prompts.jsonl", {"prompt": "a", "prompt_id": 1, "text": ["b", ""]}, "line 2: text is ''"),
        (AnyTextData, "test1k.json", {"data_list": [{"caption": "a"}]}, "has no img_name"),
        (AnyTextData, "test1k.json", {"data_list": [{"img_name": "a", "annotations": [POINT]}]}, "at least 3 points"),
    ],
)  # fmt: skip
def test_an_item_that_cannot_be_used(section: Any, name: str, entry: Any, problem: str, tmp_path: Path) -> None:
    (tmp_path / name).write_text(json.dumps(entry))
    (found,) = section(path=str(tmp_path)).items()
    assert isinstance(found, ItemError) and problem in str(found)
