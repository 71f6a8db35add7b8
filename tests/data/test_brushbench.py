"""BrushBench: a mapping file with captions and runs of masked pixels, as its own evaluation reads them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from retouch.config import parse_run
from retouch.data.base import DataError, ItemError, ItemFiles
from retouch.data.dataset import load_dataset
from retouch.data.discover import data_at
from retouch.data.split import split
from retouch.use.items import like
from retouch_bench.formats.brushbench import SIDE, BrushBenchData
from tests.command_line import retouch
from tests.conftest import small_run
from tests.data.conftest import picture

INSIDE = [1, 3, SIDE + 2, 2, SIDE * SIDE, 1]
"""The first three pixels of the first row, the second and third of the second, the very last one."""

OUTSIDE = [4, SIDE * SIDE - 4]


def entry(**given: object) -> dict[str, object]:
    return {
        "image": "images/000000007.jpg",
        "caption": "a cat",
        "inpainting_mask": INSIDE,
        "outpainting_mask": OUTSIDE,
        **given,
    }


def bench(folder: Path, **entries: object) -> Path:
    """A folder in the layout; keys are written without their first underscore."""
    (folder / "images").mkdir(exist_ok=True)
    picture((SIDE, SIDE)).save(folder / "images/000000007.jpg", quality=100, subsampling=0)
    mapping = {key.removeprefix("_"): value for key, value in entries.items()} or {"000000007": entry()}
    (folder / "mapping_file.json").write_text(json.dumps(mapping), encoding="utf-8")
    return folder


def section(folder: Path, **options: object) -> BrushBenchData:
    return BrushBenchData.model_validate({"path": str(folder), **options})


def painted(mask: Any) -> set[tuple[int, int]]:
    """(row, column) of what is repainted."""
    return {(int(y), int(x)) for y, x in np.argwhere(np.asarray(mask) >= 128)}


def test_runs_are_counted_from_one_row_by_row(tmp_path: Path) -> None:
    [example] = load_dataset(section(bench(tmp_path)))
    assert (example.id, example.prompt, dict(example.metadata)) == (7, "a cat", {"image": "images/000000007.jpg"})
    assert painted(example.mask) == {(0, 0), (0, 1), (0, 2), (1, 1), (1, 2), (511, 511)}
    assert example.source is not None and example.target is not None
    assert example.source.tobytes() == example.target.tobytes()


def test_the_other_region_is_the_other_mask(tmp_path: Path) -> None:
    [example] = load_dataset(section(bench(tmp_path), region="outside"))
    rows = {(y, x) for y in range(SIDE) for x in range(SIDE)}
    assert rows - painted(example.mask) == {(0, 0), (0, 1), (0, 2), (511, 511)}


def test_items_are_called_by_their_numbers_else_by_their_places(tmp_path: Path) -> None:
    numbered = section(bench(tmp_path, _000000012=entry(), _000000003=entry())).items()
    assert [item.id for item in numbered if isinstance(item, ItemFiles)] == [12, 3]
    named = section(bench(tmp_path, _000000012=entry(), cat=entry())).items()
    assert [item.id for item in named if isinstance(item, ItemFiles)] == [0, 1]


PAIRS = "is no list of pairs of whole numbers: start and length of every run"


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        ([], "has no image or no caption; both are texts"),
        (entry(image=""), "has no image or no caption; both are texts"),
        (entry(caption=None), "has no image or no caption; both are texts"),
        (entry(inpainting_mask=[1]), f"inpainting_mask {PAIRS}"),
        (entry(inpainting_mask="1 3"), f"inpainting_mask {PAIRS}"),
        (entry(inpainting_mask=[1, 2.5]), f"inpainting_mask {PAIRS}"),
        (
            entry(inpainting_mask=[0, 3]),
            "inpainting_mask has a run of 3 pixels from 0 on, which do not lie in 1 to 262144",
        ),
        (
            entry(inpainting_mask=[5, 2, SIDE * SIDE, 2]),
            "inpainting_mask has a run of 2 pixels from 262144 on, which do not lie in 1 to 262144",
        ),
        (
            entry(inpainting_mask=[10**30, 1]),
            f"inpainting_mask has a run of 1 pixels from {10**30} on, which do not lie in 1 to 262144",
        ),
        (
            entry(inpainting_mask=[5, 0]),
            "inpainting_mask has a run of 0 pixels from 5 on, which do not lie in 1 to 262144",
        ),
    ],
)
def test_what_is_wrong_with_an_item(wrong: object, says: str, tmp_path: Path) -> None:
    good, bad = section(bench(tmp_path, _1=entry(), _2=wrong)).items()
    assert isinstance(good, ItemFiles)
    assert bad == ItemError("mapping_file.json 2", says)


def test_an_empty_mask_is_no_item(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"mapping_file\.json 1 inpainting_mask: the mask .* is empty"):
        load_dataset(section(bench(tmp_path, _1=entry(inpainting_mask=[]))))


@pytest.mark.parametrize(
    ("text", "says"),
    [
        (None, "has no mapping_file.json, which names images, captions and masks"),
        ("[]", "holds no object of images; is it BrushBench's?"),
        ("{", "not valid JSON: "),
    ],
)
def test_what_is_wrong_with_the_file(text: str | None, says: str, tmp_path: Path) -> None:
    if text is not None:
        (tmp_path / "mapping_file.json").write_text(text, encoding="utf-8")
    with pytest.raises(DataError) as caught:
        section(tmp_path).items()
    assert says in str(caught.value)


def test_the_commands_know_the_benchmark(tmp_path: Path) -> None:
    assert data_at(bench(tmp_path), (SIDE, SIDE)).format == "brushbench"
    outcome = retouch("data", "validate", tmp_path)
    assert (outcome.code, "ok: source, mask, target; mask in luminance" in outcome.out) == (0, True)
    run = parse_run(
        small_run(tmp_path, tmp_path, evaluation__data={"format": "brushbench", "path": "x", "region": "outside"})
    )
    assert like(run, tmp_path) == section(tmp_path, region="outside")  # an evaluation of a run keeps its region
    with pytest.raises(DataError, match="brushbench is for evaluation; divide a self_bench folder or a manifest"):
        split(tmp_path, 0.5)
