"""TextEdit (arXiv 2603.09877, hub opencompass/TextEdit): one text of an image is replaced by another.

`eval_prompts/{fullset,miniset}/{category}.jsonl`, 18 categories: `id`, `prompt`, `original_image` and `gt_image`
(relative to the folder of images), `source_text`, `target_text`, `gt_caption`. Categories 1.x are virtual, 2.x real.
"""

from __future__ import annotations

from collections.abc import Set
from pathlib import Path
from typing import Any, ClassVar, Literal

from retouch.data.base import DataError, ImageSection, ItemError, ItemFiles, item_or_error
from retouch.data.lists import entries_of, fields_of, require_text_keys
from retouch.data.remote import local_path
from retouch.files.disk import is_file, on_disk

CATEGORIES = (
    *("1.1.1", "1.1.2", "1.1.3", "1.2.1", "1.2.2", "1.3.1", "1.3.2", "1.4.1", "1.4.2", "1.4.3", "1.4.4"),
    *("2.1", "2.2", "2.3", "2.4", "2.5", "2.6", "2.7"),
)


class TextEditData(ImageSection):
    """TextEdit (arXiv 2603.09877): a folder with `eval_prompts` and the images of the hub's `data` folder."""

    FREE_IN_EPOCH: ClassVar[Set[str]] = {"part", "image_root"}

    format: Literal["textedit"] = "textedit"
    part: Literal["fullset", "miniset"] = "fullset"
    """The 2,148 items, or the 500 of the small set."""
    image_root: str | None = None
    """Folder that the images' names start from; null is `data` in `path`, or `path` itself if it has none."""

    has_texts: ClassVar[bool] = True
    marks: ClassVar[tuple[str, ...]] = ("eval_prompts",)

    def list_items(self) -> list[ItemFiles | ItemError]:
        folder = local_path(self.path)
        lists = folder / "eval_prompts" / self.part
        files = [lists / f"{name}.jsonl" for name in CATEGORIES if (lists / f"{name}.jsonl").is_file()]
        if not files:
            raise DataError(f"data.path: {lists} has no lists like {CATEGORIES[0]}.jsonl")
        if self.image_root is not None:
            root = local_path(self.image_root, "data.image_root")
        else:
            root = folder / "data" if (folder / "data").is_dir() else folder
        found: list[ItemFiles | ItemError] = []
        for file in files:
            for i, entry in enumerate(entries_of(file)):
                found.append(item_or_error(f"{file.name} {i}", self._item, entry, len(found), file.stem, root))
        return found

    def _item(self, given: Any, number: int, category: str, root: Path) -> ItemFiles:
        entry = fields_of(given)
        require_text_keys(entry, "prompt", "original_image", "source_text", "target_text")
        truth = entry.get("gt_image")
        return ItemFiles(
            number,
            entry["prompt"],
            source_path=on_disk(root / entry["original_image"]),
            reference_path=root / truth if isinstance(truth, str) and is_file(root / truth) else None,
            metadata={
                "text": entry["target_text"],
                "source_text": entry["source_text"],
                "caption": str(entry.get("gt_caption") or ""),
                "category": category,
                "group": "virtual" if category.startswith("1.") else "real",
                "key": f"{category}/{Path(entry['original_image']).name}",
            },
        )
