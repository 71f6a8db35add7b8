"""Data formats: one file for each, with its options, how it is recognised and how its items are listed."""

from __future__ import annotations

from typing import Annotated

from retouch.data.base import DataSection
from retouch.registry import Chosen, Registry

FORMATS: Registry[type[DataSection]] = Registry(
    "data format",
    "retouch.formats",
    {
        "anytext": "retouch.data.formats.anytext:AnyTextData",
        "brushbench": "retouch.data.formats.brushbench:BrushBenchData",
        "self_bench": "retouch.data.formats.calligrapher:SelfBenchData",
        "cross_bench": "retouch.data.formats.calligrapher:CrossBenchData",
        "geneval": "retouch.data.formats.geneval:GenEvalData",
        "imgedit": "retouch.data.formats.imgedit:ImgEditData",
        "cvtg": "retouch.data.formats.cvtg:CvtgData",
        "longtext": "retouch.data.formats.longtext:LongTextData",
        "prompts": "retouch.data.formats.prompts:PromptsData",
        "manifest": "retouch.data.formats.manifest:ManifestData",
        "complex_edit": "retouch.data.formats.complex_edit:ComplexEditData",
        "gedit": "retouch.data.formats.gedit:GEditData",
        "mmmg": "retouch.data.formats.mmmg:MmmgData",
        "textedit": "retouch.data.formats.textedit:TextEditData",
        "textflux": "retouch.data.formats.anytext:TextFluxData",
    },
    key="format",
)
"""`data.format` -> its section of the run file. A path without a format is of the first that recognises it."""

Data = Annotated[DataSection, Chosen(FORMATS, "format")]
