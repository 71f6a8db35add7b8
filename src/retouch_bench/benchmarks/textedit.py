"""TextEdit (arXiv 2603.09877): a text of an image is replaced; OCR measures by group of categories, virtual and real.

Its CLIP score against `gt_caption`, its aesthetic head (LAION v1) and its judge are computed if the benchmark file
names the rewards. The published script of the judge recognises virtual items by "/1." in their paths, which the
published paths do not have: it counts all of them as real. Here the category decides. TextEditBench, which reports 0 to
25, is another benchmark.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, ClassVar, Literal, cast

from retouch.benchmarks.base import Benchmark, ImageRow, Official, PublishedRow, judge, means
from retouch.data.base import DataSection
from retouch_bench.formats.textedit import TextEditData
from retouch_bench.scorers.textedit_judge import PARTS

_MEASURES = ("accuracy", "precision", "recall", "f1", "ned")

_PUBLISHED = ("accuracy", "f1", "ned", "clip", "aesthetic_v1")
"""Measures of the published rows."""

_CLIP_FACTOR = 2.5

_OPTIONAL: Mapping[str, Mapping[str, Any]] = {
    "textedit_judge": judge("gemini-3-pro-preview"),
    "clip": {"text_key": "caption"},
}
"""Reward that the benchmark file may name -> its keys of the protocol."""


class TextEdit(Benchmark):
    """TextEdit: 2,148 edits that replace a text by another, one image of each."""

    name: Literal["textedit"] = "textedit"
    part: Literal["fullset", "miniset"] = "fullset"
    """All items, or the 500 of the small set."""
    image_root: str | None = None
    """Folder of the images; null is `data` in `path`, or `path` itself."""

    title: ClassVar[str] = "TextEdit"
    source: ClassVar[str] = "arXiv 2603.09877; hub opencompass/TextEdit"
    section: ClassVar[type[DataSection]] = TextEditData
    file: ClassVar[str] = "{key}"
    official: ClassVar[Official] = Official(settings={"reader": "PaddleOCR 2.10, English, angle classifier"})
    caveats: ClassVar[Sequence[str]] = ("texts are read by the engine of the reward, not by PaddleOCR 2.10",)
    published: ClassVar[Sequence[PublishedRow]] = PublishedRow.table(
        "opencompass/TextEdit, OCR table",
        [f"{measure}_{group}" for group in ("real", "virtual") for measure in _PUBLISHED],
        ("Qwen-Image-Edit", 0.75, 0.67, 0.71, 0.75, 5.72, 0.78, 0.74, 0.75, 0.81, 5.21),
        ("GPT-Image-1.5", 0.74, 0.68, 0.68, 0.75, 5.78, 0.73, 0.71, 0.70, 0.80, 5.28),
        ("Nano Banana Pro", 0.77, 0.71, 0.72, 0.75, 5.79, 0.80, 0.78, 0.78, 0.81, 5.28),
        ("BAGEL", 0.60, 0.55, 0.55, 0.74, 5.71, 0.57, 0.57, 0.54, 0.78, 5.19),
        ("Ovis-U1", 0.40, 0.35, 0.35, 0.72, 5.32, 0.37, 0.39, 0.33, 0.75, 4.66),
        ("InternVL-U", 0.77, 0.71, 0.72, 0.75, 5.70, 0.79, 0.75, 0.77, 0.80, 5.12),
    )

    def official_items(self) -> int:
        return {"fullset": 2148, "miniset": 500}[self.part]

    @classmethod
    def default_rewards(cls, options: Mapping[str, Any]) -> Mapping[str, Mapping[str, Any]]:
        named = options.get("rewards")
        given = cast("Mapping[str, Any]", named) if isinstance(named, Mapping) else {}
        return {"textedit": {}, **{name: keys for name, keys in _OPTIONAL.items() if name in given}}

    def summary(self, rows: Sequence[ImageRow]) -> dict[str, float]:
        """Means over images of each group. `judge` is the weighted mean of the judge's five shares, each also by its
        name; `clip` is 2.5 max(0, cosine)."""
        columns: dict[str, list[float]] = {
            f"{measure}_{group}": [] for group in ("real", "virtual") for measure in _MEASURES
        }
        for row in rows:
            if score := row.score("textedit"):
                for measure in _MEASURES:
                    columns[f"{measure}_{row.metadata['group']}"].append(float(score.detail[measure]))
            for measure, value in _further(row):
                columns.setdefault(f"{measure}_{row.metadata['group']}", []).append(value)
        return means(columns)


def _further(row: ImageRow) -> Iterator[tuple[str, float]]:
    """The values of an output by the rewards that a benchmark file may name."""
    if score := row.score("textedit_judge"):
        yield "judge", score.value
        yield from zip(PARTS, map(float, score.detail["shares"]), strict=True)
    if score := row.score("clip"):
        yield "clip", _CLIP_FACTOR * max(0.0, score.value)
    if score := row.score("aesthetic_v1"):
        yield "aesthetic_v1", score.value
