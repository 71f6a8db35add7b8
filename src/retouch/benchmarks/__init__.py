"""Published benchmarks: one file each, with how its data are read, how outputs are scored, and the official summary."""

from __future__ import annotations

from typing import TYPE_CHECKING

from retouch.registry import Registry

if TYPE_CHECKING:
    from retouch.benchmarks.base import Benchmark

BENCHMARKS: Registry[type[Benchmark]] = Registry(
    "benchmark",
    "retouch.benchmarks",
    {
        "anytext": "retouch.benchmarks.anytext:AnyText",
        "anytext_edit": "retouch.benchmarks.anytext:AnyTextEdit",
        "brushbench": "retouch.benchmarks.brushbench:BrushBench",
        "calligrapher_cross": "retouch.benchmarks.calligrapher:CalligrapherCross",
        "calligrapher_self": "retouch.benchmarks.calligrapher:CalligrapherSelf",
        "complex_edit": "retouch.benchmarks.complex_edit:ComplexEditBenchmark",
        "cvtg": "retouch.benchmarks.cvtg:Cvtg",
        "editbench": "retouch.benchmarks.editbench:EditBench",
        "gedit": "retouch.benchmarks.gedit:GEdit",
        "geneval": "retouch.benchmarks.geneval:GenEval",
        "imgedit": "retouch.benchmarks.imgedit:ImgEdit",
        "longtext": "retouch.benchmarks.longtext:LongText",
        "mmmg": "retouch.benchmarks.mmmg:MmmgBenchmark",
        "ocr_prompts": "retouch.benchmarks.ocr_prompts:OcrPrompts",
        "textedit": "retouch.benchmarks.textedit:TextEdit",
        "textflux": "retouch.benchmarks.anytext:TextFlux",
    },
)
"""Name after `retouch eval --benchmark` -> its class."""
