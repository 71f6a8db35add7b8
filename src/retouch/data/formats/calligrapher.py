"""Calligrapher's benchmarks: a list file and numbered images in one folder.

Item N has `test{N}_source.png`, `test{N}_mask.png` and optionally `test{N}_ref.png`. The size of the reference decides
its meaning: a crop (the mask box of the source: a style reference; the text is already in the source, which is the
target) or a full-size ground truth.
"""

from __future__ import annotations

from collections.abc import Set
from pathlib import Path
from typing import ClassVar, Literal

from retouch.data.base import DataError, ImageSection, ItemError, ItemFiles, Template, item_or_error
from retouch.data.lists import is_number, lines_of, number_of
from retouch.data.remote import local_path
from retouch.files.disk import is_file

DEFAULT_TEMPLATE = "The text is '{text}'."
"""Calligrapher's prompt."""

SELF_BENCH, CROSS_BENCH = "self_bench.txt", "cross_bench.txt"
_CROSS_PATTERN = "{number}-{reference[,reference]}-{text}"


class CalligrapherData(ImageSection):
    """Options of both benchmarks."""

    FREE_IN_EPOCH: ClassVar[Set[str]] = {"list_file", "prompt_template"}

    list_file: str
    """File of the folder that lists the items."""
    prompt_template: Template = DEFAULT_TEMPLATE
    """Prompt of an item; {text} stands for its text."""

    has_texts: ClassVar[bool] = True

    def lines(self, pattern: str) -> list[tuple[int, str]]:
        """(number, line) of the list file.

        Raises:
            DataError: no folder, no list file, or not UTF-8.
        """
        folder = local_path(self.path)
        if folder.is_file():
            raise DataError(f"data.path: {folder} is a file; give the folder, or set data.format=manifest for a list")
        if not folder.is_dir():
            raise DataError(f"data.path: {folder}: no such folder")
        if not (folder / self.list_file).is_file():
            raise DataError(f"data.path: {folder} has no {self.list_file}; each of its lines is {pattern}")
        return lines_of(folder / self.list_file)


class SelfBenchData(CalligrapherData):
    """Calligrapher's layout: `self_bench.txt` with `{int}-{text}` lines, `test{N}_source/_mask/_ref.png`."""

    FREE_IN_EPOCH: ClassVar[Set[str]] = {"target"}

    format: Literal["self_bench"] = "self_bench"
    list_file: str = SELF_BENCH
    """File of the folder that lists the items."""
    target: Literal["auto", "source", "none"] = "auto"
    """Ground truth: "auto" takes a full-size `_ref`, else the source (the text is already in it); "none": no item has
    one, for sources whose masked region holds nothing to imitate."""

    expects: ClassVar[str] = f"a {SELF_BENCH}"
    marks: ClassVar[tuple[str, ...]] = (SELF_BENCH,)

    def listing(self) -> Path:
        return local_path(self.path) / self.list_file

    def list_items(self) -> list[ItemFiles | ItemError]:
        name = Path(self.list_file).name
        lines = self.lines("{number}-{text}")
        return [item_or_error(f"{name} line {number}", self._item, line) for number, line in lines]

    def _item(self, line: str) -> ItemFiles:
        head, hyphen, text = line.partition("-")
        if not hyphen or not head.strip().isdecimal():
            raise DataError(f"{line!r} is not {{number}}-{{text}}")
        number = number_of(head.strip(), "the number")
        text, folder = _written(text, head), local_path(self.path)
        reference = folder / f"test{number}_ref.png"
        return ItemFiles(
            id=number,
            prompt=self.prompt_template.replace("{text}", text),
            source_path=folder / f"test{number}_source.png",
            mask_path=folder / f"test{number}_mask.png",
            reference_path=reference if is_file(reference) else None,
            target=self.target,
            crops_reference=True,
            metadata={"text": text},
        )


class CrossBenchData(CalligrapherData):
    """Calligrapher's layout with references of other items: `cross_bench.txt` with `{int}-{ref_id[,ref_id]}-{text}`
    lines in a self_bench folder; an item for each reference, numbered in order, without a target."""

    format: Literal["cross_bench"] = "cross_bench"
    list_file: str = CROSS_BENCH
    """File of the folder that lists the items."""

    expects: ClassVar[str] = f"a {CROSS_BENCH}"
    marks: ClassVar[tuple[str, ...]] = (CROSS_BENCH,)

    def list_items(self) -> list[ItemFiles | ItemError]:
        name, items = Path(self.list_file).name, list[ItemFiles | ItemError]()
        for number, line in self.lines(_CROSS_PATTERN):
            where = f"{name} line {number}"
            head, references, text = (*line.split("-", 2), "", "")[:3]
            others = [other.strip() for other in references.split(",")]
            if not is_number(head.strip()) or not all(map(is_number, others)):
                items.append(ItemError(where, f"{line!r} is not {_CROSS_PATTERN}"))
                continue
            for other in others if text.strip() else others[:1]:
                items.append(item_or_error(where, self._item, len(items), head, int(other), text))
        return items

    def _item(self, number: int, head: str, other: int, given: str) -> ItemFiles:
        text, folder = _written(given, head), local_path(self.path)
        return ItemFiles(
            id=number,
            prompt=self.prompt_template.replace("{text}", text),
            source_path=folder / f"test{int(head)}_source.png",
            mask_path=folder / f"test{int(head)}_mask.png",
            reference_path=folder / f"test{other}_ref.png",
            reference_mask_path=folder / f"test{other}_mask.png",
            metadata={"text": text, "item": int(head), "reference_item": other},
        )


def _written(text: str, head: str) -> str:
    if not text.strip():
        raise DataError(f"the text of item {head.strip()} is empty; write the target text of the mask")
    return text.strip()
