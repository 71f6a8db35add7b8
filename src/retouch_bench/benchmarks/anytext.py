"""AnyText-benchmark (arXiv 2311.03054): Sen.ACC and NED of lines at given polygons, in two protocols.

`anytext` is the published generation protocol: four images of nothing but the prompt. `anytext_edit` is what editing
papers report under the same names: one image, the source visible around the polygons. The two never compare. Both
means are over all lines of all images. The recogniser of published numbers is DuGuangOCR; here it is the engine of the
reward, which the result names. FID is not computed.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import lru_cache
from pathlib import PurePath
from typing import Any, ClassVar, Literal, cast

from PIL import Image

from retouch.benchmarks.base import Benchmark, ImageRow, Official, PublishedRow, means
from retouch.data.base import DataSection
from retouch_bench.formats.anytext import SIDE, AnyTextData, TextFluxData
from retouch_bench.scorers.anytext import LineReading, Table, compare

_SOURCE = "arXiv 2311.03054; ModelScope iic/AnyText-benchmark"
_RECOGNISER = "lines are read by the engine of the reward, not by DuGuangOCR (damo/cv_convnextTiny_ocr-recognition)"


_MEASURES = ("sen_acc_en", "ned_en", "sen_acc_zh", "ned_zh")
_TABLES: Mapping[str, Table] = {"wukong": "zh", "laion": "en"}
"""Part of the name of a published set -> its table of characters."""


def language_of(options: Mapping[str, Any]) -> Table:
    """Table of characters by the options: of `language`, else of the published set that the path names: wukong is
    Chinese and laion English. The last component that names a set counts, which may lie below one of the other."""
    given = options.get("language")
    if given in ("en", "zh"):
        return cast("Table", given)
    for part in reversed(PurePath(str(options.get("path", ""))).parts):
        for name, table in _TABLES.items():
            if name in part.lower():
                return table
    return "en"


_compared = lru_cache(1 << 18)(compare)
"""An interval takes the same lines a thousand times: each pair of texts is compared once."""


def lines_of(rows: Sequence[ImageRow], table: Table) -> list[LineReading]:
    """Every line of every image, compared from what was read: a server may have another table."""
    read = [line for row in rows if (score := row.score("anytext")) for line in score.detail["lines"]]
    return [_compared(line["asked"], line["found"], table) for line in read]


class AnyText(Benchmark):
    """AnyText-benchmark, generation: four images of each prompt, every line at its polygon."""

    name: Literal["anytext"] = "anytext"
    language: Literal["auto", "en", "zh"] = "auto"
    """Table of characters that NED compares by; "auto" is Chinese for a path that names wukong and no laion below
    it, else English."""

    title: ClassVar[str] = "AnyText-benchmark, generation"
    source: ClassVar[str] = _SOURCE
    file: ClassVar[str] = "{key}_{index}.jpg"
    official: ClassVar[Official] = Official(
        images_per_item=4,
        resolution=(SIDE, SIDE),
        settings={"sampler": "DDIM, 20 steps, eta 0", "guidance_scale": 9, "seed": 100, "recogniser": "DuGuangOCR"},
    )
    caveats: ClassVar[Sequence[str]] = (_RECOGNISER, "the published models receive the lines outside the prompt")
    published: ClassVar[Sequence[PublishedRow]] = PublishedRow.table(
        "arXiv 2311.03054, table 2; AnyText repository for v1.1",
        _MEASURES,
        ("ControlNet", 0.5837, 0.8015, 0.3620, 0.6227),
        ("TextDiffuser", 0.5921, 0.7951, 0.0605, 0.1262),
        ("GlyphControl", 0.3710, 0.6680, 0.0327, 0.0845),
        ("AnyText v1.0", 0.6588, 0.8568, 0.6634, 0.8264),
        ("AnyText v1.1", 0.7239, 0.8760, 0.6923, 0.8396),
    )

    @classmethod
    def default_rewards(cls, options: Mapping[str, Any]) -> Mapping[str, Mapping[str, Any]]:
        return {"anytext": {"table": language_of(options)}}

    def data(self) -> DataSection:
        return self.sized(AnyTextData(path=self.path, protocol="generation"))

    def prepared(self, image: Image.Image, source: Image.Image | None, mask: Image.Image | None) -> Image.Image:
        """The output at the size in which the polygons are given: that of the source, if there is one."""
        if source is not None:
            return super().prepared(image, source, mask)
        height, width = self.size or self.official_size
        return image if image.size == (width, height) else image.resize((width, height), Image.Resampling.LANCZOS)

    def summary(self, rows: Sequence[ImageRow]) -> dict[str, float]:
        """Sen.ACC and NED over all lines, by language."""
        table = language_of({"language": self.language, "path": self.path})
        lines = lines_of(rows, table)
        return means(
            {
                f"sen_acc_{table}": [float(line.exact) for line in lines],
                f"ned_{table}": [line.ned for line in lines],
            }
        )


class AnyTextEdit(AnyText):
    """AnyText-benchmark, editing: one image of each item, whose source is visible around the polygons."""

    name: Literal["anytext_edit"] = "anytext_edit"  # pyright: ignore[reportIncompatibleVariableOverride]
    title: ClassVar[str] = "AnyText-benchmark, editing"
    official: ClassVar[Official] = Official(
        images_per_item=1, resolution=(SIDE, SIDE), settings={"recogniser": "DuGuangOCR"}
    )
    caveats: ClassVar[Sequence[str]] = (_RECOGNISER,)
    published: ClassVar[Sequence[PublishedRow]] = PublishedRow.table(
        "arXiv 2505.03329 (FLUX-Text)",
        _MEASURES,
        ("FLUX.1-Fill, untuned", 0.3093, 0.4698, 0.0292, 0.0625),
        ("AnyText", 0.6843, 0.8588, 0.6476, 0.8210),
        ("AnyText2", 0.7915, 0.9100, 0.7022, 0.8420),
        ("FLUX-Text 512", 0.8419, 0.9400, 0.7132, 0.8510),
        ("FLUX-Text, full data", 0.8175, 0.9193, 0.7213, 0.8555),
    )

    def data(self) -> DataSection:
        return self.sized(AnyTextData(path=self.path, protocol="editing", fit="stretch"))


class TextFlux(Benchmark):
    """TextFlux's test set of single lines: one image of each item, read at the first line's polygon."""

    name: Literal["textflux"] = "textflux"
    part: Literal["other", "ori", "Japan"] = "other"
    """"other": another word is written (the published editing table); "ori": the word that stands there; "Japan":
    Japanese."""

    title: ClassVar[str] = "TextFlux, ReCTS"
    source: ClassVar[str] = "arXiv 2505.17778; hub yyyyyxie/textflux-test-datasets"
    section: ClassVar[type[DataSection]] = TextFluxData
    file: ClassVar[str] = "{key}.jpg"
    official: ClassVar[Official] = Official(
        settings={"steps": 30, "guidance_scale": 30, "seed": 42, "layout": "a strip with the text above the image"}
    )
    caveats: ClassVar[Sequence[str]] = (
        _RECOGNISER,
        "outputs are brought to the size of their source; the published script applies polygons to any size",
    )
    published: ClassVar[Sequence[PublishedRow]] = PublishedRow.table(
        "TextFlux repository, ReCTS editing",
        ("seq_acc", "ned"),
        ("TextFlux-LoRA", 37.2, 58.2),
        ("TextFlux", 40.6, 60.7),
        ("TextFlux-LoRA-beta", 48.4, 70.5),
        ("TextFlux-beta", 51.5, 72.9),
    )
    own_rewards: ClassVar[Mapping[str, Mapping[str, Any]]] = {"anytext": {"table": "zh"}}

    def summary(self, rows: Sequence[ImageRow]) -> dict[str, float]:
        """Exact lines and NED in percent, over all images."""
        lines = lines_of(rows, "zh")
        return means({"seq_acc": [100.0 * line.exact for line in lines], "ned": [100 * line.ned for line in lines]})
