"""CVTG-2K (TextCrafter, arXiv 2503.23461): word accuracy and NED of two to five texts, over all words. CLIPScore is not
computed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Literal

from retouch.benchmarks.base import Benchmark, ImageRow, Official, PublishedRow
from retouch.data.base import DataSection
from retouch_bench.formats.cvtg import CvtgData


class Cvtg(Benchmark):
    """CVTG-2K: 2,000 prompts with two to five texts, one image of each."""

    name: Literal["cvtg"] = "cvtg"
    part: Literal["all", "CVTG", "CVTG-Style"] = "all"
    """Plain prompts, prompts with styles, or both."""

    title: ClassVar[str] = "CVTG-2K"
    source: ClassVar[str] = "arXiv 2503.23461; hub dnkdnk/CVTG-2K"
    section: ClassVar[type[DataSection]] = CvtgData
    official: ClassVar[Official] = Official(settings={"reader": "PaddleOCR, English, angle classifier"})
    caveats: ClassVar[Sequence[str]] = ("words are read by the engine of the reward, not by the published PaddleOCR",)
    published: ClassVar[Sequence[PublishedRow]] = PublishedRow.table(
        "arXiv 2503.23461 and the models' own reports",
        ("word_accuracy",),
        ("FLUX.1-dev", 0.497),
        ("SD3.5-L", 0.655),
        ("TextCrafter", 0.737),
        ("Qwen-Image", 0.829),
        ("Z-Image", 0.867),
        ("GPT-4o", 0.857),
        ("Ovis-Image", 0.920),
    )
    own_rewards: ClassVar[Mapping[str, Mapping[str, Any]]] = {"cvtg": {}}

    def official_items(self) -> int:
        return {"all": 2000, "CVTG": 1002, "CVTG-Style": 998}[self.part]

    def summary(self, rows: Sequence[ImageRow]) -> dict[str, float]:
        """Word accuracy and NED over all words, and word accuracy by the number of texts."""
        told = [(str(row.metadata["part"]).rpartition("/")[2], s.detail) for row in rows if (s := row.score("cvtg"))]
        if not told:
            return {}
        words = sum(detail["asked_words"] for _, detail in told)
        found = {"word_accuracy": sum(detail["found_words"] for _, detail in told) / words}
        found["ned"] = sum(detail["ratios"] for _, detail in told) / words
        for count in sorted({count for count, _ in told}):
            of = [detail for own, detail in told if own == count]
            found[f"word_accuracy_{count}"] = sum(d["found_words"] for d in of) / sum(d["asked_words"] for d in of)
        return found
