"""EditBench (arXiv 2212.06909) in the layout of BrushNet, which re-packed its images, masks and captions: a
`mapping_file.json` as BrushBench has it.

The paper's own measure is a human yes or no for each attribute. Its automatic ones are CLIPScore and CLIP-R-precision;
how many other captions the paper compares with is not published with the data: here they are 99 of the set.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, ClassVar, Literal

from retouch.benchmarks.base import Official, PublishedRow
from retouch_bench.benchmarks.brushbench import BrushBench


class EditBench(BrushBench):
    """EditBench in BrushNet's layout, with the measures of BrushBench."""

    name: Literal["editbench"] = "editbench"

    title: ClassVar[str] = "EditBench"
    source: ClassVar[str] = "arXiv 2212.06909; github.com/TencentARC/BrushNet, data/EditBench"
    official: ClassVar[Official] = replace(BrushBench.official, items=None)
    published: ClassVar[Sequence[PublishedRow]] = ()
    published_blended: ClassVar[Sequence[PublishedRow]] = ()
    caveats: ClassVar[Sequence[str]] = ("the paper's own measure is human judgement of attributes",)

    @classmethod
    def default_rewards(cls, options: Mapping[str, Any]) -> Mapping[str, Mapping[str, Any]]:
        return {**super().default_rewards(options), "clip_r_precision": {}}
