"""AnyText-benchmark (arXiv 2311.03054) and TextFlux's test set (arXiv 2505.17778): lines of text at given polygons.

A JSON object with `data_list`: `img_name`, `caption`, and `annotations` of a `polygon` in pixels of 512 x 512 (of the
image in TextFlux), its `text`, and `valid`. As published, the first 20 valid lines count, each cut to 20 characters,
and `*` in a caption is a space. An image without a valid line is left out: it has no measure but the distance to the
real images.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping, Sequence, Set
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar, Literal, cast

from retouch.data.base import DataError, ImageSection, ItemError, ItemFiles, Template, item_or_error
from retouch.data.lists import data_list_of, line_fields, lines_mask
from retouch.data.remote import local_path
from retouch.files.disk import file_in, is_file, on_disk
from retouch.imaging.lines import TextLine, parse_lines, placed

SIDE = 512
"""Side of AnyText's images in pixels, in which its polygons are given."""

_MOST_LINES, _MOST_CHARACTERS = 20, 20
_LIST = "test1k.json"
_PARTS = {"other": "ReCTS_other.json", "ori": "ReCTS_ori.json", "Japan": "ReCTS_Japan.json"}


class AnnotatedData(ImageSection):
    """Options of both data sets."""

    FREE_IN_EPOCH: ClassVar[Set[str]] = {"prompt_template"}

    prompt_template: Template = "{caption}, with the text {text}"
    """Prompt of an item; {caption} stands for its caption, {text} for its lines in double quotes, with commas between.
    The published models take the lines from outside the prompt."""

    has_texts: ClassVar[bool] = True

    @abstractmethod
    def json_file(self) -> Path:
        """The JSON file of `path`."""

    @abstractmethod
    def _item(self, number: int, name: str, caption: str, lines: Sequence[TextLine], root: Path) -> ItemFiles:
        """The item of an entry with at least one line."""

    def list_items(self) -> list[ItemFiles | ItemError]:
        file = self.json_file()
        if not file.is_file():
            raise DataError(f"data.path: {file}: no such file, which names images, captions and lines")
        found = [
            item_or_error(f"{file.name} {number}", self._entry, number, entry, file.parent)
            for number, entry in enumerate(data_list_of(file))
        ]
        return [item for item in found if isinstance(item, ItemError) or item.metadata]

    def _entry(self, number: int, entry: object, root: Path) -> ItemFiles:
        """The item of an entry; one without metadata has no line."""
        fields = cast("dict[str, Any]", entry) if isinstance(entry, dict) else {}
        name, caption = fields.get("img_name"), fields.get("caption", "")
        if not isinstance(name, str) or not name or not isinstance(caption, str):
            raise DataError("has no img_name, or a caption that is no text")
        annotations = fields.get("annotations") or []
        if not isinstance(annotations, list):
            raise DataError("annotations must be a list")
        usable = self.annotated(cast("list[Any]", annotations))
        if not usable:
            return ItemFiles(number, caption)
        try:
            lines = parse_lines(usable)
        except ValueError as error:
            raise DataError(f"annotations: {error}") from None
        item = self._item(number, name, " ".join(caption.replace("*", " ").split()), lines, root)
        texts = [str(line["text"]) for line in usable]
        if texts != [line.text for line in lines]:  # a cut behind a space: the published script compares with the space
            item = replace(item, metadata=dict(item.metadata) | {"asked_texts": texts})
        return item

    def annotated(self, annotations: Sequence[Any]) -> list[dict[str, Any]]:
        """The first valid lines, text and polygon."""
        return [
            {"text": str(a["text"])[:_MOST_CHARACTERS], "polygon": a["polygon"]}
            for a in annotations
            if isinstance(a, Mapping) and a.get("polygon") and str(a.get("text") or "").strip() and a.get("valid", True)
        ][:_MOST_LINES]

    def repainted(self, number: int, prompt: str, source: Path, lines: Sequence[TextLine], key: str) -> ItemFiles:
        """An item whose mask are the polygons of its lines."""
        return ItemFiles(
            number,
            prompt,
            source_path=source,
            mask_path=lines_mask(source, lines),
            mask_is_made=True,
            metadata=line_fields(lines) | {"key": key},
        )

    def prompt_of(self, caption: str, lines: Sequence[TextLine]) -> str:
        """The prompt of an item."""
        quoted = ", ".join(f'"{line.text}"' for line in lines)
        return self.prompt_template.replace("{caption}", caption).replace("{text}", quoted)


class AnyTextData(AnnotatedData):
    """AnyText-benchmark (arXiv 2311.03054): `laion_word` (English) or `wukong_word` (Chinese), a folder with
    `test1k.json` and `imgs`."""

    format: Literal["anytext"] = "anytext"
    protocol: Literal["generation", "editing"] = "generation"
    """"generation": an image from nothing, with every line at its polygon. "editing": the image is the source and the
    polygons of all lines are the mask."""
    marks: ClassVar[tuple[str, ...]] = (_LIST,)

    def json_file(self) -> Path:
        return file_in(local_path(self.path), _LIST)

    def _item(self, number: int, name: str, caption: str, lines: Sequence[TextLine], root: Path) -> ItemFiles:
        key, prompt = name.split(".")[0], self.prompt_of(caption, lines)
        if self.protocol == "generation":
            height, width = self.size_for(None)
            lines = placed(lines, (width / SIDE, height / SIDE), (0.0, 0.0))
            return ItemFiles(number, prompt, metadata=line_fields(lines) | {"key": key})
        return replace(self.repainted(number, prompt, on_disk(root / "imgs" / name), lines, key), target="source")


class TextFluxData(AnnotatedData):
    """TextFlux's test set of single lines (arXiv 2505.17778): the folder with `ReCTS_other.json` and
    `textflux_data`. Only the first line of an image counts."""

    FREE_IN_EPOCH: ClassVar[Set[str]] = {"part", "image_root"}

    format: Literal["textflux"] = "textflux"
    part: Literal["other", "ori", "Japan"] = "other"
    """"other": another word is written (editing); "ori": the word that stands there; "Japan": Japanese."""
    image_root: str | None = None
    """Folder of the images; null is the one below the JSON file that has them."""
    marks: ClassVar[tuple[str, ...]] = tuple(_PARTS.values())

    def json_file(self) -> Path:
        file = file_in(local_path(self.path), _PARTS[self.part])
        of = next((part for part, name in _PARTS.items() if name == file.name), self.part)
        if of != self.part:  # images of both parts have the same names
            raise DataError(f"data.part: given {self.part!r}, but {file} is the list of {of!r}; set part={of}")
        return file

    def annotated(self, annotations: Sequence[Any]) -> list[dict[str, Any]]:
        return super().annotated(annotations[:1])

    def _item(self, number: int, name: str, caption: str, lines: Sequence[TextLine], root: Path) -> ItemFiles:
        if self.image_root is not None:
            source = on_disk(local_path(self.image_root, "data.image_root") / name)
        else:
            folder = (
                "processed_ReCTS_test_images_other_words" if self.part == "other" else "processed_ReCTS_test_images"
            )
            places = [on_disk(root / "textflux_data" / folder / "original" / name), on_disk(root / name)]
            source = next((place for place in places if is_file(place)), places[0])
        return self.repainted(number, self.prompt_of(caption, lines), source, lines, Path(name).stem)
