"""Complex-Edit (arXiv 2504.13143): instructions that put 1 to 8 atomic edits together, scored by a judge.

The official means: instruction following, identity preservation and perceptual quality from 0 to 10, over images, and
the mean of the three. The official judge answers every question 20 times. The questions are those of the scorer
`complex_edit`, unless `rewards.complex_edit` sets `wording: published`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Literal

from retouch.benchmarks.base import Benchmark, ImageRow, Official, judge, mean, numbered
from retouch.data.base import DataSection, ItemFiles
from retouch.data.formats.complex_edit import ComplexEditData, complexities

_IMAGES = 531  # of each type

_PARTS = ("instruction_following", "identity_preservation", "perceptual_quality")


class ComplexEditBenchmark(Benchmark):
    """Complex-Edit: a judge's three scores and their mean."""

    name: Literal["complex_edit"] = "complex_edit"
    complexity: str = "8"
    """How many atomic edits an instruction puts together, as in the data format: "8", "1-8" or "1,3,5"."""
    image_type: Literal["real", "syn", "all"] = "real"
    """Photographs, synthetic images, or both."""

    title: ClassVar[str] = "Complex-Edit"
    source: ClassVar[str] = "arXiv 2504.13143; hub UCSC-VLAA/Complex-Edit"
    section: ClassVar[type[DataSection]] = ComplexEditData
    official: ClassVar[Official] = Official(
        scorers={"complex_edit": "gpt-4o-2024-11-20"},
        settings={"judge": "gpt-4o-2024-11-20", "answers": 20, "temperature": 1.0},
    )
    own_rewards: ClassVar[Mapping[str, Mapping[str, Any]]] = {
        "complex_edit": {**judge("gpt-4o-2024-11-20"), "samples": 20, "temperature": 1.0}
    }

    def official_items(self) -> int:
        types = 2 if self.image_type == "all" else 1
        return _IMAGES * types * len(complexities(self.complexity))

    def file_name(self, item: ItemFiles, index: int) -> str:
        about = item.metadata
        number = str(about["image"]).partition("/")[2]
        return numbered(f"test_{about['image_type']}/complexity_{about['complexity']}/{number}.png", index)

    def summary(self, rows: Sequence[ImageRow]) -> dict[str, float]:
        """Means over images from 0 to 10 and their mean, `overall`; by complexity, if there are several."""
        found = self._means(rows, "")
        levels = sorted({int(row.metadata["complexity"]) for row in rows})
        for level in levels if len(levels) > 1 else ():
            found |= self._means([row for row in rows if row.metadata["complexity"] == level], f" C{level}")
        return found

    def _means(self, rows: Sequence[ImageRow], suffix: str) -> dict[str, float]:
        details = [score.detail for row in rows if (score := row.score("complex_edit"))]
        if not details:
            return {}
        parts = {f"{name}{suffix}": 10 * mean([float(detail[name]) for detail in details]) for name in _PARTS}
        return {**parts, f"overall{suffix}": mean(list(parts.values()))}

    def departures(self) -> list[str]:
        entry = self.rewards.get("complex_edit")
        if getattr(entry, "wording", "own") == "published":
            return super().departures()
        return [*super().departures(), "the judge is asked this package's questions, not the published ones"]
