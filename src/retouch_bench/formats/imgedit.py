"""ImgEdit-Bench (arXiv 2505.20275), basic part: one JSON object, key -> `id` (path of the source image), `prompt`,
`edit_type`; the images lie below a folder."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar, Literal, cast

from retouch.config.base import Text
from retouch.data.base import DataError, DataSection, ItemError, ItemFiles, item_or_error
from retouch.data.lists import fields_of, number_of, parsed, read_text, require_text_keys
from retouch.data.remote import local_path
from retouch.files.disk import file_in, is_file, on_disk
from retouch.imaging.fitting import Fit

LIST = "basic_edit.json"


class ImgEditData(DataSection):
    """ImgEdit-Bench (arXiv 2505.20275): `basic_edit.json`, or the folder that holds it, and the source images."""

    format: Literal["imgedit"] = "imgedit"
    images: Text | None = None
    """Folder of the source images, to which the ids of the list are relative; null: the folder of the list, or the
    folder in it that holds the first image."""
    fit: Fit = "stretch"
    """"stretch" ignores the aspect ratio; "crop" scales to cover and cuts out the middle."""

    has_images: ClassVar[frozenset[str]] = frozenset({"source"})

    @classmethod
    def recognises(cls, path: Path) -> bool:
        return (path / LIST).is_file() or (path.name == LIST and path.is_file())

    def listing(self) -> Path:
        return file_in(local_path(self.path), LIST)

    def list_items(self) -> list[ItemFiles | ItemError]:
        """The items in the order of the list."""
        path = self.listing()
        if not path.is_file():
            raise DataError(f"data.path: {path}: no such file; set the {LIST} of ImgEdit, or its folder")
        content = parsed(read_text(path), str(path))
        if not isinstance(content, dict) or not content:
            raise DataError(f"{path}: it must be an object: key -> id, prompt, edit_type")
        entries = cast("dict[str, Any]", content)
        folder = self._folder(path.parent, entries)
        return [item_or_error(f"{path.name} {key}", _item, key, entry, folder) for key, entry in entries.items()]

    def _folder(self, start: Path, entries: Mapping[str, Any]) -> Path:
        if self.images is not None:
            return local_path(self.images, "data.images")
        first = next((e["id"] for e in entries.values() if isinstance(e, dict) and isinstance(e.get("id"), str)), "")
        inside = sorted(path for path in start.iterdir() if path.is_dir())
        return next((path for path in (start, *inside) if is_file(path / first)), start)


def _item(key: str, entry: Any, folder: Path) -> ItemFiles:
    fields = fields_of(entry)
    require_text_keys(fields, "id", "prompt", "edit_type")
    return ItemFiles(
        id=number_of(key, "the key"),
        prompt=fields["prompt"],
        source_path=on_disk(folder / fields["id"]),
        metadata={"key": key, "edit_type": fields["edit_type"], "image": fields["id"]},
    )
