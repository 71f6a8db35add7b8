"""Data formats: a file for each, with its options and how its items are listed."""

from __future__ import annotations

from retouch.registry import Registry

FORMATS: Registry[type] = Registry(
    "data format",
    "retouch.formats",
    {
        "self_bench": "retouch.data.sections:SelfBenchData",
        "cross_bench": "retouch.data.sections:CrossBenchData",
        "manifest": "retouch.data.sections:ManifestData",
        "brushbench": "retouch.data.sections:BrushBenchData",
        "prompts": "retouch.data.sections:PromptsData",
        "complex_edit": "retouch.data.sections:ComplexEditData",
        "mmmg": "retouch.data.sections:MmmgData",
    },
)
"""`data.format` -> its section of the run file."""
