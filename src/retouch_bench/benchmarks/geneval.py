"""GenEval (arXiv 2310.11513): whether images show the objects of their prompts, in number, colour and place."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Literal

from retouch.benchmarks.base import Benchmark, ImageRow, Official, PublishedRow, mean
from retouch.data.base import DataSection
from retouch_bench.formats.geneval import GenEvalData
from retouch_bench.scorers.geneval_verdict import TAGS


class GenEval(Benchmark):
    """GenEval: 553 prompts of six tasks, four images each; the share of images that are right."""

    name: Literal["geneval"] = "geneval"

    title: ClassVar[str] = "GenEval"
    source: ClassVar[str] = "arXiv 2310.11513; github djghosh13/geneval, prompts/evaluation_metadata.jsonl"
    section: ClassVar[type[DataSection]] = GenEvalData
    file: ClassVar[str] = "{id:05d}/samples/{index:04d}.png"
    official: ClassVar[Official] = Official(
        images_per_item=4,
        items=553,
        scorers={"geneval": "mask2former_swin-s-p4-w7-224_lsj_8x2_50e_coco"},
        settings={
            "detector": "Mask2Former Swin-S of mmdet 2.x, COCO; score > 0.3, 0.9 for counting; at most 16 of a class",
            "colours": "CLIP ViT-L/14 of OpenAI",
        },
    )
    published: ClassVar[Sequence[PublishedRow]] = (
        *PublishedRow.table(
            "arXiv 2310.11513",
            ("overall", *TAGS),
            ("SD 1.5", 0.43, 0.97, 0.38, 0.35, 0.76, 0.04, 0.06),
            ("SD 2.1", 0.50, 0.98, 0.51, 0.44, 0.85, 0.07, 0.17),
            ("SDXL", 0.55, 0.98, 0.74, 0.39, 0.85, 0.15, 0.23),
            ("IF-XL", 0.61, 0.97, 0.74, 0.66, 0.81, 0.13, 0.35),
        ),
        PublishedRow("SD3.5-M", {"overall": 0.63}, "arXiv 2505.05470"),
        PublishedRow("SD3.5-M, Flow-GRPO", {"overall": 0.95}, "arXiv 2505.05470"),
    )
    own_rewards: ClassVar[Mapping[str, Mapping[str, Any]]] = {"geneval": {}}

    def summary(self, rows: Sequence[ImageRow]) -> dict[str, float]:
        """The share of right images of each task; `overall` is the mean of these; `images` is the share of all images;
        `prompts` is the share of prompts with at least one right image."""
        judged = [(row, float(score.detail["correct"])) for row in rows if (score := row.score("geneval"))]
        if not judged:
            return {}
        by_tag = {tag: [right for row, right in judged if row.metadata["tag"] == tag] for tag in TAGS}
        of_tags = {tag: mean(values) for tag, values in by_tag.items() if values}
        best: dict[str, float] = {}
        for row, right in judged:
            best[row.key] = max(right, best.get(row.key, 0.0))
        # an interval's sample has prompts several times: each counts as often as it has an image of one number
        counts = Counter((row.key, row.index) for row, _ in judged)
        times: dict[str, int] = {}
        for (key, _), count in counts.items():
            times[key] = max(count, times.get(key, 0))
        prompts = sum(best[key] * count for key, count in times.items()) / sum(times.values())
        images = mean([right for _, right in judged])
        return {"overall": mean([*of_tags.values()]), "images": images, "prompts": prompts, **of_tags}
