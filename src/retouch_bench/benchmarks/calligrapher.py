"""Calligrapher's self and cross benchmarks (arXiv 2506.24123): text in the style of a reference.

No evaluator is published. The measures are this package's: NED and exact match of the mask box as a reader reads it,
and the cosine of its style to the reference by an encoder that the adapter was not trained on. The official run uses
random seeds; the names of outputs are this package's.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Literal

from retouch.benchmarks.base import Benchmark, ImageRow, Official, means
from retouch.data.base import DataSection
from retouch.data.formats.calligrapher import CrossBenchData, SelfBenchData


class Calligrapher(Benchmark):
    """Options of both benchmarks."""

    source: ClassVar[str] = "arXiv 2506.24123; hub Calligrapher2025/Calligrapher, Calligrapher_bench_testing.zip"
    official: ClassVar[Official] = Official(
        images_per_item=2,
        resolution=(512, 512),
        settings={"steps": 50, "adapter scale": 1.0, "seeds": "random", "prompt": "The text is '{text}'."},
    )
    caveats: ClassVar[Sequence[str]] = ("no evaluator and no table are published",)
    own_rewards: ClassVar[Mapping[str, Mapping[str, Any]]] = {
        "ocr": {},
        "style": {"scorer": "style", "image_encoder": "openai/clip-vit-large-patch14", "gate": 0.0},
    }

    def summary(self, rows: Sequence[ImageRow]) -> dict[str, float]:
        """Means over images: NED, exact match, and the cosine to the style reference."""
        read = [score.detail for row in rows if (score := row.score("ocr"))]
        styles = [score.value for row in rows if (score := row.score("style"))]
        return means(
            {
                "ned": [float(detail["ned"]) for detail in read],
                "exact": [float(detail["exact"]) for detail in read],
                "style": styles,
            }
        )


class CalligrapherSelf(Calligrapher):
    """Calligrapher's self benchmark: the style reference is the text of the source image."""

    name: Literal["calligrapher_self"] = "calligrapher_self"
    title: ClassVar[str] = "Calligrapher self"
    file: ClassVar[str] = "test{id}_{index}.png"

    def data(self) -> DataSection:
        return self.sized(SelfBenchData(path=self.path, fit="stretch", reference="mask_box"))


class CalligrapherCross(Calligrapher):
    """Calligrapher's cross benchmark: the style reference belongs to another item."""

    name: Literal["calligrapher_cross"] = "calligrapher_cross"
    title: ClassVar[str] = "Calligrapher cross"
    section: ClassVar[type[DataSection]] = CrossBenchData
    file: ClassVar[str] = "{id:04d}_test{item}_ref{reference_item}_{index}.png"
