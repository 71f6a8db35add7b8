"""GEdit-Bench, ImgEdit-Bench and GenEval from made-up files of their published layouts."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from retouch.data.base import DataError, ItemError, ItemFiles
from retouch.data.dataset import load_dataset
from retouch.data.discover import recognised
from retouch.use.items import _shared
from retouch_bench.formats.gedit import TASKS, GEditData
from retouch_bench.formats.geneval import GenEvalData
from retouch_bench.formats.imgedit import ImgEditData
from tests.data.protocols import write_table

GENEVAL = Path(__file__).parents[1] / "benchmarks_data/geneval_metadata.jsonl"


def png(level: int) -> bytes:
    buffer = io.BytesIO()
    Image.fromarray(np.full((20, 30, 3), level, np.uint8)).save(buffer, "PNG")
    return buffer.getvalue()


def gedit_rows() -> list[dict[str, Any]]:
    """Two rows of each task and language; the raw image is another one than that of the judge."""
    return [
        {
            "task_type": task,
            "key": f"{i}{j}",
            "instruction": f"{language} {task} {j}",
            "instruction_language": language,
            "input_image": {"bytes": png(10 * i + j), "path": f"{i}.png"},
            "input_image_raw": {"bytes": png(200), "path": f"{i}.png"},
            "Intersection_exist": j == 0,
        }
        for i, task in enumerate(TASKS)
        for j, language in enumerate(("en", "cn"))
    ]


def write_gedit(folder: Path, tasks: int = len(TASKS)) -> Path:
    """The hub's split as one parquet file, with the first tasks."""
    pytest.importorskip("pyarrow")
    folder.mkdir(parents=True, exist_ok=True)
    write_table(folder, "train", gedit_rows()[: 2 * tasks], "parquet")
    return folder


def write_imgedit(folder: Path) -> Path:
    """A list of nine types, with the images in a folder beside it."""
    (folder / "images/animal").mkdir(parents=True)
    types = ("add", "adjust", "extract", "replace", "remove", "background", "style", "compose", "action")
    entries = {
        str(1000 + i): {"id": f"animal/{i}.png", "prompt": f"{t} it", "edit_type": t} for i, t in enumerate(types)
    }
    for i in range(len(types)):
        (folder / f"images/animal/{i}.png").write_bytes(png(20 * i))
    (folder / "basic_edit.json").write_text(json.dumps(entries), encoding="utf-8")
    return folder


def items(section: Any) -> list[ItemFiles]:
    found = section.list_items()
    assert all(isinstance(one, ItemFiles) for one in found), found
    return found


# --- GEdit-Bench ---


def test_gedit_reads_both_languages_and_the_image_of_the_judge(tmp_path: Path) -> None:
    found = items(GEditData(path=str(write_gedit(tmp_path))))
    assert len(found) == 22 and [one.id for one in found] == list(range(22))
    assert found[1].prompt == "cn background_change 1"
    assert found[1].metadata == {
        "key": "01", "task_type": "background_change", "instruction_language": "cn", "intersection_exist": False
    }  # fmt: skip
    data = load_dataset(GEditData(path=str(tmp_path), resolution=32))
    (_, second, *_) = iter(data)
    assert second.source is not None and np.asarray(second.source).max() == 1


def test_gedit_chooses_language_and_tasks_and_keeps_ids(tmp_path: Path) -> None:
    write_gedit(tmp_path)
    found = items(GEditData(path=str(tmp_path), language="cn", tasks="text_change, color_alter"))
    assert [(one.id, one.metadata["task_type"]) for one in found] == [(3, "color_alter"), (19, "text_change")]
    with pytest.raises(ValueError, match="'colour' is no task; write all, or some of background_change"):
        GEditData(path=str(tmp_path), tasks="colour")
    held_out = items(GEditData(path=str(tmp_path), part="held_out", held_out_share=0.5))
    train = items(GEditData(path=str(tmp_path), part="train", held_out_share=0.5))
    assert sorted(one.id for one in [*held_out, *train]) == list(range(22)) and held_out and train


def test_gedit_names_rows_that_are_broken(tmp_path: Path) -> None:
    rows = gedit_rows()[:5]
    rows[0]["instruction"] = " "
    rows[1]["task_type"] = "other"
    rows[2]["Intersection_exist"] = None
    rows[3]["input_image"] = None
    lines = [
        json.dumps({**row, "input_image": row["input_image"] and "x.png", "input_image_raw": None}) for row in rows
    ]
    (tmp_path / "train.jsonl").write_text("\n".join(lines), encoding="utf-8")
    found = GEditData(path=str(tmp_path)).list_items()
    problems = [one.problem for one in found if isinstance(one, ItemError)]
    assert problems == [
        "instruction missing or empty",
        "Intersection_exist must be true or false; given None",
        "no image under input_image (bytes, or a path) or file_name",
    ]
    assert [one.source_path for one in found if isinstance(one, ItemFiles)] == [tmp_path / "x.png"]


def test_gedit_from_the_hub_asks_for_its_split(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[Any, ...]] = []

    class Split(list[dict[str, Any]]):
        column_names = ("input_image", "input_image_raw", "key")

        def cast_column(self, column: str, kind: object) -> Any:
            asked.append((column, kind))
            return self

    class Library:
        Image = staticmethod(lambda decode: decode)

        @staticmethod
        def load_dataset(path: str, config: str | None, split: str) -> Any:
            asked.append((path, config, split))
            return Split(gedit_rows())

    monkeypatch.setattr("retouch.data.tables._hub_library", lambda path: Library)
    assert len(items(GEditData(path="stepfun-ai/GEdit-Bench"))) == 22
    assert asked[0] == ("stepfun-ai/GEdit-Bench", None, "train")
    assert sorted(asked[1:]) == [("input_image", False), ("input_image_raw", False)]


# --- ImgEdit-Bench ---


@pytest.mark.parametrize("path", [".", "basic_edit.json"])
def test_imgedit_finds_its_images(path: str, tmp_path: Path) -> None:
    write_imgedit(tmp_path)
    found = items(ImgEditData(path=str(tmp_path / path)))
    assert [one.id for one in found] == list(range(1000, 1009))
    assert found[7].metadata == {"key": "1007", "edit_type": "compose", "image": "animal/7.png"}
    assert found[7].source_path == tmp_path / "images/animal/7.png"
    assert isinstance(recognised(tmp_path / path, (32, 32)), ImgEditData)
    given = ImgEditData(path=str(tmp_path / path), images=str(tmp_path / "elsewhere"))
    assert items(given)[0].source_path == tmp_path / "elsewhere/animal/0.png"


def test_imgedit_names_entries_that_are_broken(tmp_path: Path) -> None:
    entries = {"a": {"id": "x", "prompt": "p", "edit_type": "add"}, "1": {"id": "x", "prompt": ""}, "2": 3}
    (tmp_path / "basic_edit.json").write_text(json.dumps(entries), encoding="utf-8")
    found = ImgEditData(path=str(tmp_path)).list_items()
    assert [str(one) for one in found] == [
        "basic_edit.json a: the key 'a' must be a number",
        "basic_edit.json 1: edit_type, prompt missing or empty; its keys are 'id', 'prompt'",
        "basic_edit.json 2: 3 is not an object",
    ]
    with pytest.raises(DataError, match=r"no such file; set the basic_edit.json of ImgEdit"):
        ImgEditData(path=str(tmp_path / "none")).list_items()


# --- GenEval ---


def test_geneval_reads_the_published_lines(tmp_path: Path) -> None:
    found = items(GenEvalData(path=str(GENEVAL)))
    assert len(found) == 12 and found[4].prompt == "a photo of two clocks"
    assert found[4].metadata == {
        "tag": "counting", "include": [{"class": "clock", "count": 2}], "exclude": [{"class": "clock", "count": 3}]
    }  # fmt: skip
    (tmp_path / "evaluation_metadata.jsonl").write_bytes(GENEVAL.read_bytes())
    assert [one.prompt for one in items(GenEvalData(path=str(tmp_path)))] == [one.prompt for one in found]
    for path in (tmp_path, GENEVAL):
        assert isinstance(recognised(path, (32, 32)), GenEvalData)


def test_geneval_names_lines_that_are_broken(tmp_path: Path) -> None:
    lines = [{"tag": "colors", "include": {}, "prompt": "p"}, {"tag": 1, "prompt": "p"}, {"tag": "colors"}]
    path = tmp_path / "m.jsonl"
    path.write_text("\n".join(map(json.dumps, lines)), encoding="utf-8")
    assert [str(one) for one in GenEvalData(path=str(path)).list_items()] == [
        "m.jsonl line 1: include must be a list of objects with class and count",
        "m.jsonl line 2: tag is 1; it must be a string",
        "m.jsonl line 3: prompt missing or empty; its keys are 'tag'",
    ]


def test_the_images_of_another_list_are_its_own() -> None:
    """`sample --data` reads a list with the options of the run; images of the same name may lie in the run's folder."""
    section = ImgEditData(path="a", images="b", fit="crop", max_bad_items=3)
    assert _shared(section, ImgEditData) == {"fit": "crop", "max_bad_items": 3, "resolution": 512}
