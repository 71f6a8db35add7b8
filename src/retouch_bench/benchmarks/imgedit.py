"""ImgEdit-Bench (arXiv 2505.20275), basic part: nine types of edits, each judged by its own question."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Literal

from retouch.benchmarks.base import Benchmark, ImageRow, Official, PublishedRow, judge, mean
from retouch.config.base import Text
from retouch.data.base import DataSection
from retouch.files.disk import expanded
from retouch_bench.formats.imgedit import ImgEditData
from retouch_bench.scorers.imgedit import TYPES

_REPORT = "arXiv 2505.20275 and later reports; judge GPT-4.1"

_OVERALL = {
    "MagicBrush": 1.83,
    "InstructPix2Pix": 1.88,
    "AnyEdit": 2.45,
    "UltraEdit": 2.70,
    "Step1X-Edit": 3.06,
    "BAGEL": 3.20,
    "UniWorld-V1": 3.26,
    "OmniGen2": 3.44,
    "FLUX.1 Kontext dev": 3.71,
    "FLUX.1 Kontext Pro": 4.00,
    "GPT Image 1": 4.20,
    "Qwen-Image-Edit": 4.27,
    "Qwen-Image-Edit-2511": 4.51,
}


class ImgEdit(Benchmark):
    """ImgEdit-Bench, basic part: 737 edits of nine types, each scored from 1 to 5."""

    name: Literal["imgedit"] = "imgedit"
    images: Text | None = None
    """Folder of the source images; null: below `path`."""
    prompts: Text | None = None
    """The published questions, `Benchmark/Basic/prompts.json`; null: prompts.json beside the list."""

    title: ClassVar[str] = "ImgEdit-Bench"
    source: ClassVar[str] = "arXiv 2505.20275; hub sysuyy/ImgEdit, Benchmark.tar"
    section: ClassVar[type[DataSection]] = ImgEditData
    official: ClassVar[Official] = Official(
        items=737,
        scorers={"imgedit": "gpt-4.1"},
        settings={"judge": "gpt-4.1, default temperature; image files as they are"},
    )
    published: ClassVar[Sequence[PublishedRow]] = tuple(
        PublishedRow(model, {"overall": value}, _REPORT) for model, value in _OVERALL.items()
    )

    @classmethod
    def default_rewards(cls, options: Mapping[str, Any]) -> Mapping[str, Mapping[str, Any]]:
        path = expanded(str(options.get("path", "")))
        beside = (path if path.is_dir() else path.parent) / "prompts.json"
        prompts = options.get("prompts") or (str(beside) if beside.is_file() else None)
        return {"imgedit": {**judge("gpt-4.1"), "temperature": 1.0, **({"prompts": prompts} if prompts else {})}}

    def summary(self, rows: Sequence[ImageRow]) -> dict[str, float]:
        """The mean of each type, rounded to 2 places as published; `overall` is the mean of these; `micro` is the mean
        over all outputs."""
        judged = [(row.metadata["edit_type"], score) for row in rows if (score := row.score("imgedit"))]
        of_types = {kind: [float(score.detail["mean"]) for k, score in judged if k == kind] for kind in TYPES}
        means = {kind: round(mean(values), 2) for kind, values in of_types.items() if values}
        if not means:
            return {}
        micro = mean([value for values in of_types.values() for value in values])
        return {"overall": mean([*means.values()]), "micro": micro, **means}
