"""Values of the options of protocols' data that cannot be, and what is said of them: rows of test_rules.ELEMENTS."""

from __future__ import annotations

from retouch.data.formats.mmmg import DISCIPLINES, LEVELS

_EDIT = "{format: complex_edit, path: somewhere, resolution: 64, %s}"
_MMMG = "{format: mmmg, path: somewhere, resolution: 64, %s}"

DATA_ELEMENTS = [
    (
        "data",
        "{format: brushbench, path: somewhere, resolution: 64, region: all}",
        "data.region: given 'all'; input should be 'inside' or 'outside'",
    ),
    (
        "data",
        "{format: manifest, path: somewhere, resolution: 64, target: image}",
        "data.target: given 'image'; input should be 'auto', 'file', 'source' or 'none'",
    ),
    ("data", _EDIT % "part: test", "data.part: given 'test'; input should be 'all', 'train' or 'held_out'"),
    ("data", _EDIT % "held_out_share: 1", "data.held_out_share: given 1; input should be less than 1"),
    ("data", _EDIT % "held_out_share: 0", "data.held_out_share: given 0; input should be greater than 0"),
    ("data", _MMMG % "curriculum: 0", "data.curriculum: given 0; input should be greater than 0"),
    ("data", _EDIT % "image_type: both", "data.image_type: given 'both'; input should be 'real', 'syn' or 'all'"),
    ("data", _MMMG % "layout: test", "data.layout: given 'test'; input should be 'benchmark' or 'train'"),
    *(
        (
            "data",
            _EDIT % f"complexity: {written}",
            f'data.complexity: given {shown}; write numbers from 1 to 8, like "8", "1-8" or "1,3,5"',
        )
        for written, shown in (
            ("9", "'9'"),
            ("0-3", "'0-3'"),
            ("'5-3'", "'5-3'"),
            ("'1,,2'", "'1,,2'"),
            ("all", "'all'"),
        )
    ),
    (
        "data",
        _MMMG % "levels: 'PhD, kindergarten'",
        f"data.levels: given 'PhD, kindergarten': 'kindergarten' is none; write all, or some of {', '.join(LEVELS)}",
    ),
    (
        "data",
        _MMMG % "disciplines: Maths",
        f"data.disciplines: given 'Maths': 'Maths' is none; write all, or some of {', '.join(DISCIPLINES)}",
    ),
]
