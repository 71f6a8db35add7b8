"""Manifests, lists of prompts and published benchmarks: items, or a DataError; images and masks: pixels, or an
ImageProblem."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from retouch.data.base import ItemFiles
from retouch.data.discover import recognised
from retouch.data.formats import FORMATS
from retouch.data.item import read_item
from retouch.errors import RetouchError
from retouch.imaging.masks import read_mask
from retouch.imaging.reading import open_image, to_rgb
from tests.fuzz.inputs import attempt, blobs, changed, fuzzed, kept, texts

ENTRIES = [
    {
        "id": 3,
        "image_path": "a.png",
        "mask_path": "m.png",
        "prompt": "the word 'cat'",
        "text": "cat",
        "more_images": ["a.png"],
    },
    {"prompt": "a sign", "text": "two words", "level": "PhD", "discipline": "Math"},
    {"file_name": "a.png", "text": "a caption", "win_path": "a.png", "lose_path": "a.png"},
]
CSV = 'file_name,text,id\na.png,"a, caption",1\n"a.png",b,2\n'
BRUSH = {"0001": {"image": "a.png", "caption": "a cat", "inpainting_mask": [1, 30, 90, 5], "outpainting_mask": [5, 9]}}
LISTS = {
    "manifest.json": ("manifest", json.dumps(ENTRIES)),
    "manifest.jsonl": ("manifest", "\n".join(map(json.dumps, ENTRIES))),
    "manifest.csv": ("manifest", CSV),
    "prompts.txt": ("prompts", 'a sign with "one"\n\na sign\n'),
    "prompts.jsonl": ("prompts", "\n".join(map(json.dumps, ENTRIES[1:]))),
    "mapping_file.json": ("brushbench", json.dumps(BRUSH)),
    "self_bench.txt": ("self_bench", "1-cat\n2-two words-dog\n"),
    "cross_bench.txt": ("cross_bench", "1-2,3-cat\n2-1-two words\n"),
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("data")
    Image.new("RGB", (40, 32), "red").save(made / "a.png")
    Image.new("L", (40, 32), 255).save(made / "m.png")
    return made


def _list_and_read(name: str, path: Path) -> None:
    kind = LISTS[name][0]
    place = path.parent if kind in ("brushbench", "self_bench", "cross_bench") else path
    section = FORMATS.available()[kind].model_validate({"path": str(place), "resolution": 32})
    for item in section.list_items()[:3]:
        if isinstance(item, ItemFiles):
            try:
                read_item(item, section)
            except RetouchError as error:
                str(error).encode()
    recognised(place, (32, 32))


@fuzzed
@given(st.sampled_from(sorted(LISTS)).flatmap(lambda name: st.tuples(st.just(name), texts([LISTS[name][1]]))))
def test_lists(folder: Path, given_: tuple[str, str]) -> None:
    name, text = given_
    path = folder / name
    path.write_bytes(text.encode("utf-8", "surrogatepass"))
    try:
        attempt("lists, text", lambda: _list_and_read(name, path), RetouchError)
    finally:
        path.unlink()


@fuzzed
@given(changed([ENTRIES, BRUSH]), st.sampled_from(["manifest.json", "prompts.jsonl", "mapping_file.json"]))
def test_entries(folder: Path, value: Any, name: str) -> None:
    path = folder / name
    entries = value if name.endswith(".jsonl") and isinstance(value, list) else [value]
    path.write_text("\n".join(map(json.dumps, entries)) if name.endswith(".jsonl") else json.dumps(value))
    try:
        attempt("lists, structure", lambda: _list_and_read(name, path), RetouchError)
    finally:
        path.unlink()


def _images() -> list[bytes]:
    rng = np.random.default_rng(0)
    base = Image.fromarray(rng.integers(0, 255, (24, 20, 3), np.uint8))
    exif = Image.Exif()
    exif[274] = 6
    kinds: list[tuple[Image.Image, str, dict[str, Any]]] = [
        (base, "PNG", {}),
        (base, "JPEG", {"exif": exif}),
        (base, "WEBP", {"lossless": True}),
        (base, "BMP", {}),
        (base, "TIFF", {}),
        (base.convert("CMYK"), "JPEG", {}),
        (base.convert("P"), "GIF", {"save_all": True, "append_images": [base.convert("P")] * 2}),
        (base.convert("RGBA"), "PNG", {}),
        (base.convert("L").convert("I;16"), "PNG", {}),
        (base.convert("L").convert("F"), "TIFF", {}),
        (base.convert("1"), "PNG", {}),
    ]
    found: list[bytes] = []
    for image, kind, options in kinds:
        stream = io.BytesIO()
        image.save(stream, kind, **options)
        found.append(stream.getvalue())
    return found


@fuzzed
@given(blobs(_images()))
def test_images(folder: Path, data: bytes) -> None:
    path = folder / "image"
    path.write_bytes(data)

    def read() -> None:
        image = open_image(path)
        to_rgb(image)
        read_mask(image, str(path))

    attempt("images and masks", read, RetouchError)


@pytest.mark.parametrize("file", kept("lists"), ids=lambda file: file.name)
def test_corpus(folder: Path, file: Path) -> None:
    name = file.name.partition("@")[2]
    path = folder / name
    path.write_bytes(file.read_bytes())
    try:
        attempt("lists, corpus", lambda: _list_and_read(name, path), RetouchError)
    finally:
        path.unlink()
