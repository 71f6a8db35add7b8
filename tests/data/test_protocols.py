"""Complex-Edit and MMMG from files of their schemas: what is chosen, what is held out, what is broken."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from retouch.data.base import DataError, ItemError, ItemFiles
from retouch.data.dataset import Dataset, load_dataset
from retouch.data.formats.complex_edit import ComplexEditData
from retouch.data.formats.mmmg import DISCIPLINES, LEVELS, MmmgData
from retouch.data.tables import Table, tables_of
from retouch.imaging.fitting import resize
from retouch.types import Example

from .protocols import (
    SIDE,
    Hub,
    edit_picture,
    edit_row,
    knowledge_graph,
    mmmg_configurations,
    mmmg_rows,
    write_cached_mmmg,
    write_complex_edit,
    write_mmmg,
    write_mmmg_train,
)


def edits(folder: Path, **options: Any) -> Dataset:
    return load_dataset(ComplexEditData.model_validate({"path": str(folder), "resolution": SIDE, **options}))


def prompts(folder: Path, **options: Any) -> Dataset:
    return load_dataset(MmmgData.model_validate({"path": str(folder), "resolution": SIDE, **options}))


def shown(example: Example) -> bytes:
    assert example.source is not None
    return example.source.tobytes()


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """edits, mmmg (JSONL) and train/train.json."""
    folder = tmp_path_factory.mktemp("protocols")
    write_complex_edit(folder / "edits")
    write_mmmg(folder / "mmmg")
    write_mmmg_train(folder / "train")
    return folder


# --- Complex-Edit ---


@pytest.mark.parametrize("kind", ["parquet", "arrow"])
def test_the_same_examples_from_every_kind_of_file(kind: str, made: Path, tmp_path: Path) -> None:
    pytest.importorskip("pyarrow")
    write_complex_edit(tmp_path / "e", kind)
    options = {"complexity": "2,8", "image_type": "all"}
    ours, theirs = edits(tmp_path / "e", **options), edits(made / "edits", **options)
    assert len(ours) == len(theirs) == 40
    for one, other in zip(ours, theirs, strict=True):
        assert (one.id, one.prompt, one.metadata, shown(one)) == (other.id, other.prompt, other.metadata, shown(other))
    write_mmmg(tmp_path / "m", kind)
    assert [e.metadata for e in prompts(tmp_path / "m")] == [e.metadata for e in prompts(made / "mmmg")]


def test_complexity_c_is_the_cth_compound_instruction(made: Path) -> None:
    found = edits(made / "edits", complexity="1-8")
    assert len(found) == 14 * 8
    assert [e.prompt for e in found[:3]] == [f"Do 1 to {c} to picture 0." for c in (1, 2, 3)]
    for example in found:
        number, complexity = divmod(example.id, 10)
        assert example.prompt == edit_row(number)["edit"]["compound"][complexity - 1]["compound_instruction"]
        about = {"image": f"real/{number:04d}", "image_type": "real", "complexity": complexity}
        assert example.metadata == about and example.mask is None and example.target is None


def test_ids_do_not_depend_on_what_is_chosen(made: Path) -> None:
    by_id = {e.id: (e.prompt, shown(e)) for e in edits(made / "edits", complexity="1-8", image_type="all")}
    assert len(by_id) == 20 * 8
    for options in ({"image_type": "syn"}, {"complexity": "3"}, {"part": "held_out", "held_out_share": 0.5}):
        some = edits(made / "edits", **options)
        assert all(by_id[e.id] == (e.prompt, shown(e)) for e in some)


def test_the_picture_is_resized_once_to_the_size_of_the_run(made: Path) -> None:
    (first, *_) = edits(made / "edits", resolution=[16, 8], fit="stretch")
    expected = resize(edit_picture(0), (8, 16), (0, 0, 8, 16))
    assert shown(first) == expected.tobytes() and first.size == (16, 8)
    (cropped, *_) = edits(made / "edits", resolution=SIDE)  # wider than high: the sides go
    assert shown(cropped) == edit_picture(0).crop((4, 0, SIDE + 4, SIDE)).tobytes()


def test_no_picture_is_in_both_parts(tmp_path: Path) -> None:
    """Whatever else differs, and where two rows hold one picture."""
    write_complex_edit(tmp_path, real=60, syn=20)
    for i in range(8):
        shutil.copy(tmp_path / "test_real" / f"000{i}.png", tmp_path / "test_syn" / f"{1000 + i}.png")
    for share in (0.1, 0.5):
        sizes: list[int] = []
        parts: dict[str, set[bytes]] = {"train": set(), "held_out": set()}
        for part, found in parts.items():
            of_one = {"held_out_share": share, "part": part}
            for options in ({"complexity": "1", "image_type": "real"}, {"complexity": "2-8", "image_type": "all"}):
                found |= {shown(e) for e in edits(tmp_path, **of_one, **options)}
            sizes.append(len(found))
        assert not parts["train"] & parts["held_out"]
        assert sum(sizes) == 72 and sizes[1] == pytest.approx(72 * share, abs=10)


def test_a_part_with_nothing_in_it_is_an_error(made: Path) -> None:
    with pytest.raises(DataError, match=r"nothing with image_type real and part held_out \(held_out_share 1e-09\)"):
        edits(made / "edits", part="held_out", held_out_share=1e-9)


def test_broken_rows_are_told_and_skipped(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    write_complex_edit(tmp_path, real=6)
    lines = [json.loads(line) for line in (tmp_path / "test_real.jsonl").read_text().splitlines()]
    lines[0]["edit"]["compound"] = lines[0]["edit"]["compound"][:7]
    lines[1]["edit"] = "no JSON"
    lines[2]["edit"]["compound"][7]["compound_instruction"] = None
    del lines[3]["image"]
    lines[4]["image"] = "test_real/gone.png"
    (tmp_path / "test_real.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    found = edits(tmp_path)
    assert [e.id for e in found] == [58]
    assert caplog.text.count("edit.compound has no instruction of complexity 8") == 3
    assert "row 3: no image under image" in caplog.text and "gone.png: no such file" in caplog.text


def test_compound_may_come_as_lists_or_as_json(tmp_path: Path) -> None:
    """As some versions of datasets give a list of objects, and as text."""
    write_complex_edit(tmp_path, real=2)
    lines = [json.loads(line) for line in (tmp_path / "test_real.jsonl").read_text().splitlines()]
    compound = lines[0]["edit"]["compound"]
    lines[0]["edit"]["compound"] = {"compound_instruction": [c["compound_instruction"] for c in compound]}
    lines[1]["edit"] = json.dumps(lines[1]["edit"])
    (tmp_path / "test_real.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert [e.prompt for e in edits(tmp_path, complexity="4")] == [f"Do 1 to 4 to picture {i}." for i in range(2)]


def test_a_folder_as_imagefolder_has_it(tmp_path: Path) -> None:
    write_complex_edit(tmp_path / "x", syn=0, real=3)
    lines = [json.loads(line) for line in (tmp_path / "x" / "test_real.jsonl").read_text().splitlines()]
    target = tmp_path / "test" / "real"
    shutil.copytree(tmp_path / "x" / "test_real", target / "images")
    rows = [{"file_name": line["image"].replace("test_real", "images"), "edit": line["edit"]} for line in lines]
    (target / "metadata.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert [shown(e) for e in edits(tmp_path / "test")] == [shown(e) for e in edits(tmp_path / "x")]


# --- MMMG ---


def test_the_benchmark(made: Path) -> None:
    found = prompts(made / "mmmg")
    rows = mmmg_rows()
    assert [e.prompt for e in found] == [row["prompt"] for row in rows]
    for example, row in zip(found, rows, strict=True):
        expected = {
            "key": row["key"], "level": row["Education"], "discipline": row["Discipline"],
            "knowledge_graph": json.loads(row["Knowledge_Graph"]), "annotation": row["Annotation"],
        }  # fmt: skip
        assert example.metadata == expected and example.source is None and example.size == (SIDE, SIDE)


@pytest.mark.parametrize("which", ["benchmark", "train"])
def test_levels_and_disciplines(which: str, made: Path) -> None:
    folder, layout = (made / "mmmg", {}) if which == "benchmark" else (made / "train", {"layout": "train"})
    every = {e.id: e.metadata for e in prompts(folder, **layout)}
    assert len(every) == 20
    for level in LEVELS:
        some = prompts(folder, levels=level.upper(), **layout)
        assert {e.id for e in some} == {i for i, about in every.items() if about["level"] == level}
    for discipline in DISCIPLINES:
        some = prompts(folder, disciplines=discipline, **layout)
        assert {e.id: e.metadata for e in some}.items() <= every.items() and len(some) == 2
    both = prompts(folder, levels="preschool,PhD", disciplines="Biology, Sociology", **layout)
    assert [(e.metadata["level"], e.metadata["discipline"]) for e in both] == [("preschool", "Biology")]


def test_the_training_set_has_a_schema_of_its_own(made: Path) -> None:
    found = {e.metadata["key"]: e for e in prompts(made / "train" / "train.json", layout="train")}
    one = found["train_7"]
    assert one.prompt == "Explain thing 7." and one.metadata["knowledge_graph"] == knowledge_graph(7)
    assert one.metadata["annotation"] == {"fact": "Thing 7 has parts."}


@pytest.mark.parametrize(
    ("path", "layout", "message"),
    [
        ("train/train.json", "benchmark", "set layout=train"),
        ("mmmg", "train", "no such file; layout=train takes the JSON file"),
        ("mmmg/test.jsonl", "train", "layout=train takes the JSON file"),
        ("edits", "benchmark", "has no level"),
        ("nowhere", "benchmark", "no such folder, and not the id of a data set of the hub"),
    ],
)
def test_one_layout_is_not_taken_for_the_other(path: str, layout: str, message: str, made: Path) -> None:
    with pytest.raises(DataError, match=message):
        prompts(made / path, layout=layout)


def test_a_benchmark_with_the_columns_of_the_training_set(tmp_path: Path) -> None:
    row = {"Education": "PhD", "Discipline": "Math", "question": "?", "Visual Components": {}}
    (tmp_path / "x.jsonl").write_text(json.dumps(row))
    with pytest.raises(DataError, match=r"given 'benchmark', but .* has the columns of the other; set layout=train"):
        prompts(tmp_path)


def test_the_name_of_a_file_may_say_level_and_discipline(tmp_path: Path) -> None:
    for level, discipline in (("PhD", "Math"), ("preschool", "Biology")):
        row = {"prompt": f"{level}?", "Knowledge_Graph": json.dumps(knowledge_graph(1))}
        (tmp_path / f"{level}_{discipline}").mkdir()
        (tmp_path / f"{level}_{discipline}" / "test.jsonl").write_text(json.dumps(row))
    assert [e.prompt for e in prompts(tmp_path, levels="phd")] == ["PhD?"]


def test_broken_rows_of_mmmg(tmp_path: Path) -> None:
    rows: list[dict[str, Any]] = mmmg_rows(5)
    rows[0]["prompt"], rows[1]["Knowledge_Graph"], rows[2]["Knowledge_Graph"] = " ", "{", "[1]"
    rows[3]["Knowledge_Graph"] = json.dumps({"elements": [None, 3, "b(c"], "dependencies": ["Causes(", 7]})
    (tmp_path / "x.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    listed = MmmgData(path=str(tmp_path)).items()
    problems = [one.problem for one in listed if isinstance(one, ItemError)]
    assert [p.partition(":")[0] for p in problems] == [
        "prompt is missing or empty",
        "Knowledge_Graph is not JSON",
        "Knowledge_Graph must be an object with elements and dependencies; given [1]",
    ]
    assert [one.prompt for one in listed if isinstance(one, ItemFiles)] == [row["prompt"] for row in rows[3:]]


def test_no_prompt_is_in_both_parts(tmp_path: Path) -> None:
    write_mmmg(tmp_path, count=200)
    train, held_out = (
        {e.prompt for e in prompts(tmp_path, part=part, held_out_share=0.3)} for part in ("train", "held_out")
    )
    assert not train & held_out and len(train | held_out) == 200 and len(held_out) == pytest.approx(60, abs=20)


# --- the hub, and what is imported ---


def test_from_the_hub(monkeypatch: pytest.MonkeyPatch, made: Path) -> None:
    hub = Hub({(None, "test_real"): [edit_row(i) for i in range(14)], ("PhD_Math", "test"): mmmg_rows()[17:18]})
    monkeypatch.setattr("retouch.data.tables.import_library", lambda name, what: hub)
    found = edits(Path("owner/edits"))
    assert [shown(e) for e in found] == [shown(e) for e in edits(made / "edits")]
    assert [e.prompt for e in prompts(Path("owner/mmmg"), levels="PhD", disciplines="Math")] == [
        "Draw how thing 17 works."
    ]
    assert hub.asked == [("owner/edits", None, "test_real"), ("owner/mmmg", "PhD_Math", "test")]
    with pytest.raises(DataError, match=r"owner/edits \(test_syn\) cannot be loaded from the hub: Unknown split"):
        edits(Path("owner/edits"), image_type="syn")


def test_configurations_of_mmmg_that_do_not_exist_are_left_out(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    hub = Hub({(name, "test"): [{**row, "prompt": name}] for name, row in mmmg_configurations().items()})
    monkeypatch.setattr("retouch.data.tables.import_library", lambda name, what: hub)
    caplog.set_level("INFO", "retouch")
    assert [e.prompt for e in prompts(Path("owner/mmmg"))] == list(mmmg_configurations())
    assert len(mmmg_configurations()) == 59
    assert [record.getMessage() for record in caplog.records if "left out" in record.getMessage()] == [
        "owner/mmmg has no preschool_Philosophy: left out"
    ]
    chosen = prompts(Path("owner/mmmg"), levels="preschool,PhD", disciplines="Philosophy")
    assert [e.prompt for e in chosen] == ["PhD_Philosophy"]
    with pytest.raises(DataError, match="owner/mmmg has none of the configurations preschool_Philosophy"):
        prompts(Path("owner/mmmg"), levels="preschool", disciplines="Philosophy")


def test_mmmg_is_read_from_the_cache_without_a_hub(tmp_path: Path) -> None:
    """Offline, the library itself lists one configuration, "default"."""
    for name in ("PhD_Math", "PhD_History"):
        write_cached_mmmg(tmp_path / "datasets" / "owner___mmmg", name)
    code = (
        "import logging; logging.basicConfig(format='%(levelname)s %(message)s')\n"
        "from retouch.data.formats.mmmg import MmmgData\n"
        "print(*(item.prompt for item in MmmgData(path='owner/mmmg', levels='PhD').items()))\n"
        "MmmgData(path='owner/mmmg', levels='preschool').items()\n"
    )
    environment = {**os.environ, "HF_HOME": str(tmp_path), "HF_HUB_OFFLINE": "1"}
    for name in ("HF_DATASETS_CACHE", "HF_HUB_CACHE"):
        environment.pop(name, None)
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=60)
    assert done.stdout == "PhD_History PhD_Math\n", done.stderr
    assert "WARNING owner/mmmg on this machine, which cannot reach the hub, has no PhD_Biology, PhD_Chem" in done.stderr
    assert "DataError: data.path: owner/mmmg on this machine, which cannot reach the hub, has none of" in done.stderr


def test_without_the_library_the_message_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(DataError, match=r'owner/edits needs datasets; pip install "retouch\[vlm\]"'):
        edits(Path("owner/edits"))


def test_data_need_neither_torch_nor_datasets(made: Path) -> None:
    code = (
        "import sys; from retouch.data.dataset import load_dataset\n"
        "from retouch.data.formats.complex_edit import ComplexEditData\n"
        "from retouch.data.formats.mmmg import MmmgData\n"
        f"load_dataset(ComplexEditData(path={str(made / 'edits')!r}, resolution=16))[0]\n"
        f"load_dataset(MmmgData(path={str(made / 'mmmg')!r}))[0]\n"
        "print(*(name for name in ('torch', 'datasets', 'pyarrow') if name in sys.modules))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout.strip()) == (0, ""), done.stderr


def test_pictures_are_read_when_they_are_looked_at() -> None:
    """Not kept: a run has thousands of them."""
    reads: list[int] = []

    def row(position: int) -> dict[str, Any]:
        reads.append(position)
        return edit_row(position)

    from retouch.data.tables import image_of

    table = Table("t", 3, row)
    picture = image_of(table, 1, row(1))
    assert not isinstance(picture, str | Path) and reads == [1]
    assert picture.read() == edit_row(1)["image"]["bytes"] and reads == [1, 1]
    assert np.asarray(edit_picture(1)).shape == (SIDE, SIDE + 8, 3)


def test_a_broken_line_is_named_by_its_number(tmp_path: Path) -> None:
    file = tmp_path / "test_real.jsonl"
    file.write_text('{"image": "a.png"}\n\n\n{"image": \n', encoding="utf-8")
    with pytest.raises(DataError, match="line 4: not valid JSON"):
        tables_of(str(file))
