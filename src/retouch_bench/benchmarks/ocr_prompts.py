"""The OCR prompts of Flow-GRPO (arXiv 2505.05470): the published reward, and the symmetric one of this package."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Literal

from retouch.benchmarks.base import Benchmark, ImageRow, Official, PublishedRow, means
from retouch.data.base import DataSection
from retouch.data.formats.prompts import PromptsData


class OcrPrompts(Benchmark):
    """Flow-GRPO's OCR prompts: the text in double quotes is to be written, one image of each prompt."""

    name: Literal["ocr_prompts"] = "ocr_prompts"

    title: ClassVar[str] = "Flow-GRPO OCR prompts"
    source: ClassVar[str] = "arXiv 2505.05470; github yifan123/flow_grpo, dataset/ocr/test.txt"
    section: ClassVar[type[DataSection]] = PromptsData
    file: ClassVar[str] = "{id:05d}_{index}.png"
    official: ClassVar[Official] = Official(
        resolution=(512, 512),
        items=1018,
        settings={"reader": "PaddleOCR 2.9.1, English", "steps": 40, "guidance_scale": 4.5},
    )
    caveats: ClassVar[Sequence[str]] = ("texts are read by the engine of the reward, not by PaddleOCR 2.9.1",)
    published: ClassVar[Sequence[PublishedRow]] = (
        PublishedRow("SD3.5-M", {"ocr_accuracy": 0.59}, "arXiv 2505.05470, table 1"),
        PublishedRow("SD3.5-M + Flow-GRPO", {"ocr_accuracy": 0.92}, "arXiv 2505.05470, table 1"),
    )
    own_rewards: ClassVar[Mapping[str, Mapping[str, Any]]] = {"flow_grpo_ocr": {}, "ocr": {}}

    def summary(self, rows: Sequence[ImageRow]) -> dict[str, float]:
        """Means over images: the published reward, and NED and exact match, which also count further text."""
        read = [score.detail for row in rows if (score := row.score("ocr"))]
        return means(
            {
                "ocr_accuracy": [score.value for row in rows if (score := row.score("flow_grpo_ocr"))],
                "ned": [float(detail["ned"]) for detail in read],
                "exact": [float(detail["exact"]) for detail in read],
            }
        )
