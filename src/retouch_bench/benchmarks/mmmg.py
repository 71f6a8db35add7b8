"""MMMG (arXiv 2506.10963): images that explain knowledge, scored against a knowledge graph.

The official score of an image is (1 - GED) R, x 100; its evaluator reports the means of every level and discipline. R
counts regions that SAM 2.1 finds. It is left at 1 unless `rewards.mmmg.readability` is `sam2` or names a function that
counts them; without it the measures are called MMMG-style.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Literal

from retouch.benchmarks.base import Benchmark, ImageRow, Official, PublishedRow, judge, means, numbered
from retouch.data.base import DataSection, ItemFiles
from retouch.data.formats.mmmg import DISCIPLINES, LEVELS, MmmgData
from retouch.rewards.scorers.mmmg import MmmgReward


class MmmgBenchmark(Benchmark):
    """MMMG: (1 - GED) R of a judge's answers, by level and discipline."""

    name: Literal["mmmg"] = "mmmg"
    levels: str = "all"
    """Levels of education, as in the data format."""
    disciplines: str = "all"
    """Disciplines, as in the data format."""

    title: ClassVar[str] = "MMMG"
    source: ClassVar[str] = "arXiv 2506.10963; hub MMMGBench/MMMG"
    section: ClassVar[type[DataSection]] = MmmgData
    official: ClassVar[Official] = Official(
        items=4456,
        scorers={"mmmg": "o3"},
        settings={"judge": "o3", "temperature": 0.0, "regions": "SAM 2.1 large"},
    )
    published: ClassVar[Sequence[PublishedRow]] = (
        PublishedRow("GPT-4o", {"mmmg": 50.20}, "arXiv 2506.10963"),
        PublishedRow("FLUX-Reason", {"mmmg": 34.45}, "arXiv 2506.10963"),
    )
    own_rewards: ClassVar[Mapping[str, Mapping[str, Any]]] = {"mmmg": {**judge("o3"), "ged": "networkx"}}

    def file_name(self, item: ItemFiles, index: int) -> str:
        name = item.metadata.get("key") or f"{item.metadata['discipline']}_{item.id}"
        return numbered(f"{item.metadata['level']}/{name}.png", index)

    def summary(self, rows: Sequence[ImageRow]) -> dict[str, float]:
        """Means over images, x 100: of all, of each level, of each discipline; and of 1 - GED alone, `fidelity`."""
        name = "mmmg" if self._is_published() else "mmmg_style"
        scored = [(row.metadata, score) for row in rows if (score := row.score("mmmg"))]
        columns = {name: [100 * score.value for _, score in scored]}
        columns["fidelity"] = [100 * float(score.detail["fidelity"]) for _, score in scored]
        for facet, values in (("level", LEVELS), ("discipline", DISCIPLINES)):
            for value in values:
                columns[value] = [100 * score.value for about, score in scored if about[facet] == value]
        return means(columns)

    def departures(self) -> list[str]:
        parts = [] if self._is_published() else ["MMMG-style: without the published question, distance and readability"]
        entry = self.rewards.get("mmmg")
        if isinstance(entry, MmmgReward) and entry.readability == "sam2":
            parts.append(f"lines of text are found by {entry.reader}, not by PaddleOCR 2.10")
        return [*super().departures(), *parts]

    def _is_published(self) -> bool:
        entry = self.rewards.get("mmmg")
        return isinstance(entry, MmmgReward) and entry.is_published
