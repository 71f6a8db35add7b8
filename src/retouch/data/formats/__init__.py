"""Data formats: one file for each, with its options, how it is recognised and how its items are listed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated

from retouch.data.base import DataSection
from retouch.registry import Chosen, Registry

FORMATS: Registry[type[DataSection]] = Registry(
    "data format",
    "retouch.formats",
    {
        "self_bench": "retouch.data.formats.calligrapher:SelfBenchData",
        "cross_bench": "retouch.data.formats.calligrapher:CrossBenchData",
        "votes": "retouch.data.formats.votes:VotesData",
        "prompts": "retouch.data.formats.prompts:PromptsData",
        "manifest": "retouch.data.formats.manifest:ManifestData",
        "complex_edit": "retouch.data.formats.complex_edit:ComplexEditData",
        "mmmg": "retouch.data.formats.mmmg:MmmgData",
    },
    key="format",
)
"""`data.format` -> its section of the run file. A path without a format is of the first that recognises it."""

FACETS: Mapping[str, Sequence[str]] = {
    "level": ("preschool", "primaryschool", "secondaryschool", "highschool", "undergraduate", "PhD"),
    "discipline": (),
    "complexity": (),
    "image_type": (),
}
"""Fields of an example's metadata by which evaluations are broken down -> their values in order; of others, numbers are
ordered by size and names by letter."""

Data = Annotated[DataSection, Chosen(FORMATS, "format")]
