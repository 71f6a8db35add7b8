"""TextEdit (arXiv 2603.09877): a text of an image is replaced; OCR measures by group of categories, virtual and real.

Its CLIP score against `gt_caption`, its aesthetic head (LAION v1) and its judge are not computed. TextEditBench, which
reports 0 to 25, is another benchmark.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Literal

from PIL import Image

from retouch.benchmarks.base import Benchmark, ImageRow, Official, PublishedRow, means, numbered
from retouch.data.base import DataSection, ItemFiles
from retouch.data.formats.textedit import TextEditData

_MEASURES = ("accuracy", "precision", "recall", "f1", "ned")


class TextEdit(Benchmark):
    """TextEdit: 2,148 edits that replace a text by another, one image of each."""

    name: Literal["textedit"] = "textedit"
    part: Literal["fullset", "miniset"] = "fullset"
    """All items, or the 500 of the small set."""
    image_root: str | None = None
    """Folder of the images; null is `data` in `path`, or `path` itself."""

    title: ClassVar[str] = "TextEdit"
    source: ClassVar[str] = "arXiv 2603.09877; hub opencompass/TextEdit"
    official: ClassVar[Official] = Official(settings={"reader": "PaddleOCR 2.10, English, angle classifier"})
    caveats: ClassVar[Sequence[str]] = ("texts are read by the engine of the reward, not by PaddleOCR 2.10",)
    published: ClassVar[Sequence[PublishedRow]] = tuple(
        PublishedRow(
            model,
            {f"{measure}_{group}": value for (measure, group), value in zip(
                [(m, g) for g in ("real", "virtual") for m in ("accuracy", "f1", "ned")], numbers, strict=True
            )},
            "opencompass/TextEdit, OCR table",
        )
        for model, *numbers in (
            ("Qwen-Image-Edit", 0.75, 0.67, 0.71, 0.78, 0.74, 0.75),
            ("GPT-Image-1.5", 0.74, 0.68, 0.68, 0.73, 0.71, 0.70),
            ("Nano Banana Pro", 0.77, 0.71, 0.72, 0.80, 0.78, 0.78),
            ("BAGEL", 0.60, 0.55, 0.55, 0.57, 0.57, 0.54),
            ("Ovis-U1", 0.40, 0.35, 0.35, 0.37, 0.39, 0.33),
            ("InternVL-U", 0.77, 0.71, 0.72, 0.79, 0.75, 0.77),
        )
    )  # fmt: skip
    own_rewards: ClassVar[Mapping[str, Mapping[str, Any]]] = {"textedit": {}}

    def data(self) -> DataSection:
        return self.sized(TextEditData(path=self.path, part=self.part, image_root=self.image_root, fit="stretch"))

    def file_name(self, item: ItemFiles, index: int) -> str:
        return numbered(str(item.metadata["key"]), index)

    def prepared(self, image: Image.Image, source: Image.Image | None, mask: Image.Image | None) -> Image.Image:
        """The output as it is: the scorer brings it to the size of the source, as published."""
        return image

    def summary(self, rows: Sequence[ImageRow]) -> dict[str, float]:
        """Means over images of each group."""
        columns: dict[str, list[float]] = {
            f"{measure}_{group}": [] for group in ("real", "virtual") for measure in _MEASURES
        }
        for row in rows:
            if score := row.score("textedit"):
                for measure in _MEASURES:
                    columns[f"{measure}_{row.metadata['group']}"].append(float(score.detail[measure]))
        return means(columns)
