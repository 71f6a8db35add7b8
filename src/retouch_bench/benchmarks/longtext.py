"""LongText-Bench (arXiv 2507.22058): the share of the asked words that a VLM reads, over all images (micro: a long item
weighs more)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Literal

from retouch.benchmarks.base import Benchmark, ImageRow, Official, PublishedRow, judge
from retouch.data.base import DataSection, ItemFiles
from retouch_bench.formats.longtext import LongTextData

_READER = "Qwen/Qwen2.5-VL-7B-Instruct"


def _language(options: Mapping[str, Any]) -> str:
    """The language by the option, else by the name of the file."""
    given = options.get("language", "auto")
    return str(given) if given != "auto" else "zh" if str(options.get("path", "")).endswith("_zh.jsonl") else "en"


class LongText(Benchmark):
    """LongText-Bench: 160 prompts in each of two languages, four images of each."""

    name: Literal["longtext"] = "longtext"
    language: Literal["auto", "en", "zh"] = "auto"
    """Prompts of a folder to use; "auto" is Chinese for a path that ends in _zh.jsonl, else English."""

    title: ClassVar[str] = "LongText-Bench"
    source: ClassVar[str] = "arXiv 2507.22058; hub X-Omni/LongText-Bench"
    official: ClassVar[Official] = Official(
        images_per_item=4,
        items=160,
        scorers={"longtext": _READER},
        settings={"reader": f"{_READER}, bf16, at most 1024 new tokens, transformers 4.52.0"},
    )
    published: ClassVar[Sequence[PublishedRow]] = PublishedRow.table(
        "X-Omni/LongText-Bench and the models' own reports",
        ("text_en", "text_zh"),
        ("FLUX.1 [dev]", 0.607, 0.005),
        ("OmniGen2", 0.561, 0.059),
        ("HiDream-I1-Full", 0.543, 0.024),
        ("BAGEL", 0.373, 0.310),
        ("Kolors 2.0", 0.258, 0.329),
        ("X-Omni", 0.900, 0.814),
        ("Qwen-Image", 0.943, 0.946),
        ("Z-Image", 0.935, 0.936),
        ("Ovis-Image", 0.922, 0.964),
        ("Seedream 3.0", 0.896, 0.878),
        ("GPT Image 1 High", 0.956, 0.619),
    )

    @classmethod
    def default_rewards(cls, options: Mapping[str, Any]) -> Mapping[str, Mapping[str, Any]]:
        return {"longtext": {**judge(_READER), "language": _language(options)}}

    def data(self) -> DataSection:
        language = _language({"language": self.language, "path": self.path})
        return self.sized(LongTextData.model_validate({"path": self.path, "language": language}))

    def file_name(self, item: ItemFiles, index: int) -> str:
        return f"{item.id:04d}_{index + 1}.png"

    def summary(self, rows: Sequence[ImageRow]) -> dict[str, float]:
        """Matched over asked words (Chinese: characters) of all images, by language."""
        counts: dict[str, tuple[int, int]] = {}
        for row in rows:
            score, language = row.score("longtext"), str(row.metadata["language"])
            if score is not None:
                matched, asked = counts.get(language, (0, 0))
                counts[language] = matched + score.detail["matched"], asked + score.detail["asked"]
        return {f"text_{language}": matched / asked for language, (matched, asked) in sorted(counts.items())}
