"""GEdit-Bench (arXiv 2504.17761): edits by instruction in English and Chinese, judged by VIEScore.

The published scoring script iterates the data set without a split, and the script of the means expects the languages en
and zh, where the data have cn; here both languages are summarised, apart.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import product
from typing import Any, ClassVar, Literal

from PIL import Image

from retouch.benchmarks.base import Benchmark, ImageRow, Official, PublishedRow, judge, mean, means
from retouch.data.base import DataSection, ItemFiles
from retouch_bench.formats.gedit import TASKS, GEditData

_PREFIXES = ("en_", "en_intersection_", "cn_", "cn_intersection_")

_EDITS = 606  # in each of two languages

_MEASURES = {"SC": "semantic_consistency", "PQ": "perceptual_quality", "O": "overall"}

_REPORT = "arXiv 2504.17761 and later reports; judge GPT-4.1, full set"


class GEdit(Benchmark):
    """GEdit-Bench: 606 edits by instructions in English and the same in Chinese, of 11 tasks; SC, PQ and O from 0 to
    10."""

    name: Literal["gedit"] = "gedit"
    language: Literal["en", "cn", "all"] = "all"
    """Instructions in English, in Chinese, or both."""

    title: ClassVar[str] = "GEdit-Bench"
    source: ClassVar[str] = "arXiv 2504.17761; hub stepfun-ai/GEdit-Bench"
    section: ClassVar[type[DataSection]] = GEditData
    file: ClassVar[str] = "fullset/{key}.png"
    official: ClassVar[Official] = Official(
        scorers={"viescore": "gpt-4.1"},
        settings={
            "judge": "gpt-4.1, 1400 tokens, default temperature; images as JPEG of quality 75",
            "size": "input_image_raw at about 512 x 512 pixels, sides in multiples of 32",
        },
    )
    published: ClassVar[Sequence[PublishedRow]] = (
        *PublishedRow.table(
            _REPORT,
            ("en_SC", "en_PQ", "en_O"),
            ("InstructPix2Pix", 3.58, 5.49, 3.68),
            ("MagicBrush", 4.68, 5.66, 4.52),
            ("OmniGen2", 7.16, 6.77, 6.41),
            ("BAGEL", 7.36, 6.83, 6.52),
            ("FLUX.1 Kontext Pro", 7.02, 7.60, 6.56),
            ("Step1X-Edit", 7.66, 7.35, 6.97),
            ("GPT Image 1", 7.85, 7.62, 7.53),
            ("Qwen-Image-Edit", 8.00, 7.86, 7.56),
        ),
        PublishedRow("FLUX.1 Kontext dev", {"en_O": 6.46, "cn_O": 1.86}, _REPORT),
        PublishedRow("Qwen-Image-Edit-2509", {"en_O": 7.48, "cn_O": 7.47}, _REPORT),
        PublishedRow("Qwen-Image-Edit-2511", {"en_O": 7.88, "cn_O": 7.82}, _REPORT),
    )
    own_rewards: ClassVar[Mapping[str, Mapping[str, Any]]] = {
        "viescore": {**judge("gpt-4.1"), "encoding": "jpeg", "temperature": 1.0}
    }

    def official_items(self) -> int:
        return 2 * _EDITS if self.language == "all" else _EDITS

    def key(self, item: ItemFiles) -> str:
        return "{task_type}/{instruction_language}/{key}".format(**item.metadata)

    def prepared(self, image: Image.Image, source: Image.Image | None, mask: Image.Image | None) -> Image.Image:
        """The output at the size of the source, bicubic, as published."""
        return image if source is None or image.size == source.size else image.resize(source.size)

    def summary(self, rows: Sequence[ImageRow]) -> dict[str, float]:
        """SC, PQ and O of each language and task, their means over the tasks, and these over the subset that all
        compared closed models answered."""
        columns: dict[tuple[str, str, str], list[float]] = {}
        for row in rows:
            score = row.score("viescore")
            if score is None:
                continue
            about = row.metadata
            language = about["instruction_language"]
            prefixes = [f"{language}_", *([f"{language}_intersection_"] if about["intersection_exist"] else [])]
            for prefix, (measure, name) in product(prefixes, _MEASURES.items()):
                columns.setdefault((prefix, measure, about["task_type"]), []).append(float(score.detail[name]))
        found: dict[str, float] = {}
        for prefix, measure in product(_PREFIXES, _MEASURES):
            of_tasks = means({task: columns.get((prefix, measure, task), []) for task in TASKS})
            if of_tasks:
                found[f"{prefix}{measure}"] = mean([*of_tasks.values()])
            if "intersection" not in prefix:
                found |= {f"{prefix}{measure}.{task}": value for task, value in of_tasks.items()}
        return found
