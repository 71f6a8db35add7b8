"""A small case of every benchmark: its published layout, made up here, and a benchmark file for a tiny base.

A benchmark that is registered needs a case in `CASES`; then it runs end to end in tests/benchmarks_room/test_all.py.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
from PIL import Image

from retouch_bench.formats.brushbench import SIDE
from tests.data.protocols import mmmg_rows, write_complex_edit
from tests.data.test_judged_formats import write_gedit, write_imgedit
from tests.rewards.openai_server import OpenAIServer, text_of
from tests.rewards.test_geneval import tiny_detector
from tests.rewards.test_imgedit import says as imgedit_says
from tests.rewards.test_imgedit import write_questions
from tests.tiny_models import tiny_clip


@dataclass(frozen=True)
class Case:
    """
    Attributes:
        write: writes the published data into an empty folder -> keys of the benchmark file.
        model: what the tiny base does: repaint in a mask, edit a source, or make an image of a prompt.
        server: the judge behind JUDGE_URL.
        measures: some of those that the result must have.
    """

    write: Callable[[Path], dict[str, Any]]
    measures: frozenset[str]
    model: Literal["inpaint", "edit", "text"] = "inpaint"
    server: type[OpenAIServer] = OpenAIServer


def write_brushbench(folder: Path, count: int = 2) -> Path:
    """Images of 512 x 512 with a square inside and its outside."""
    rows = np.arange(200, 300)
    inside = [value for row in rows for value in (int(row) * SIDE + 201, 100)]
    outside = [1, 200 * SIDE]
    entries: dict[str, Any] = {}
    (folder / "images").mkdir(parents=True)
    for number in range(count):
        pixels = np.indices((SIDE, SIDE)).sum(0)[..., None] * (1, 2, number + 3) % 256
        name = f"images/{number:09d}.jpg"
        Image.fromarray(pixels.astype(np.uint8)).save(folder / name)
        entries[f"{number:09d}"] = {
            "image": name, "caption": f"thing {number}", "inpainting_mask": inside, "outpainting_mask": outside,
        }  # fmt: skip
    (folder / "mapping_file.json").write_text(json.dumps(entries), encoding="utf-8")
    return folder


def _brushbench(folder: Path) -> dict[str, Any]:
    write_brushbench(folder)
    return {"resolution": 64, "rewards": {"clip": {"path": tiny_clip()}}, "saved_as": "jpeg"}


def _editbench(folder: Path) -> dict[str, Any]:
    write_brushbench(folder)
    paths = {name: {"path": tiny_clip()} for name in ("clip", "clip_r_precision")}
    return {"resolution": 64, "rewards": paths, "saved_as": "jpeg"}


def _calligrapher(folder: Path) -> dict[str, Any]:
    from retouch.tiny.signs import draw_words, write_signs

    write_signs(folder, draw_words(2, "held_out", 3), (32, 64), 3, first_id=1)
    for number in (1, 2):
        crop = Image.open(folder / f"test{number}_source.png").crop((4, 4, 40, 24))
        crop.save(folder / f"test{number}_ref.png")
    (folder / "cross_bench.txt").write_text("1-2-ABC\n2-1,2-DEF\n", encoding="utf-8")
    style = {"image_encoder": "tiny"}
    return {"resolution": [32, 64], "rewards": {"style": style, "ocr": {"detect": False, "threads": 1}}}


def _complex_edit(folder: Path) -> dict[str, Any]:
    write_complex_edit(folder, real=2, syn=1)
    return {"resolution": 64, "image_type": "all", "complexity": "1,8", "rewards": {"complex_edit": {"samples": 2}}}


def _mmmg(folder: Path) -> dict[str, Any]:
    folder.mkdir(parents=True, exist_ok=True)
    lines = "".join(json.dumps(row) + "\n" for row in mmmg_rows(3))
    (folder / "test.jsonl").write_text(lines, encoding="utf-8")
    return {"resolution": 64}


def _viescore(asked: dict[str, Any]) -> str:
    return '{"score": [8, 3], "reasoning": ""}' if "naturalness" in text_of(asked) else '{"score": [6, 9]}'


@dataclass
class VieScoreServer(OpenAIServer):
    """Gives every edit SC 6 and PQ 3."""

    says: Callable[[dict[str, Any]], str] | None = _viescore


@dataclass
class ImgEditServer(OpenAIServer):
    """Gives every edit 4, 2 and 1."""

    says: Callable[[dict[str, Any]], str] | None = imgedit_says


def _gedit(folder: Path) -> dict[str, Any]:
    write_gedit(folder, tasks=2)
    return {"resolution": 64}


def _imgedit(folder: Path) -> dict[str, Any]:
    write_questions(write_imgedit(folder) / "prompts.json")
    return {"resolution": 64, "limit": 3}


def _geneval(folder: Path) -> dict[str, Any]:
    folder.mkdir(parents=True, exist_ok=True)
    lines = (Path(__file__).parents[1] / "benchmarks_data/geneval_metadata.jsonl").read_bytes()
    (folder / "evaluation_metadata.jsonl").write_bytes(lines)
    networks = {"detector": str(tiny_detector(folder / "detector")), "color_model": tiny_clip()}
    return {"resolution": 64, "images_per_item": 2, "limit": 2, "rewards": {"geneval": networks}}


CASES: dict[str, Case] = {
    "brushbench": Case(_brushbench, frozenset({"psnr", "mse", "psnr_usual", "clip"})),
    "calligrapher_cross": Case(_calligrapher, frozenset({"ned", "exact", "style"})),
    "calligrapher_self": Case(_calligrapher, frozenset({"ned", "exact", "style"})),
    "complex_edit": Case(
        _complex_edit, frozenset({"instruction_following", "overall", "overall C1", "overall C8"}), "edit"
    ),
    "editbench": Case(_editbench, frozenset({"psnr", "mse", "clip", "clip_r_precision"})),
    "gedit": Case(_gedit, frozenset({"en_O", "cn_SC", "en_O.color_alter"}), "edit", VieScoreServer),
    "geneval": Case(_geneval, frozenset({"overall", "images", "prompts", "single_object"}), "text"),
    "imgedit": Case(_imgedit, frozenset({"overall", "micro", "add"}), "edit", ImgEditServer),
    "mmmg": Case(_mmmg, frozenset({"mmmg_style", "fidelity", "preschool", "Biology"}), "text"),
}
