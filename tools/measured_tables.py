"""Write the tables of measurements in docs/ from the committed results of the benchmarks.

python tools/measured_tables.py            # write the pages
python tools/measured_tables.py --print    # print them

A table stands between `<!-- NAME: written by tools/measured_tables.py -->` and `<!-- /NAME -->`. NAME is a program of
benchmarks/ whose `table` takes the rows of benchmarks/results/NAME.json, or a key of `OTHERS`.
"""

from __future__ import annotations

import importlib
import json
import re
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "benchmarks"))

TABLE = re.compile(r"(<!-- (\w+): written by tools/measured_tables\.py -->\n\n).*?(\n\n<!-- /\2 -->)", re.DOTALL)


def program(name: str) -> Any:
    return importlib.import_module(name)


def result(name: str) -> Any:
    return json.loads((ROOT / f"benchmarks/results/{name}.json").read_text(encoding="utf-8"))


def rows(name: str) -> Any:
    return result(name)["rows"]


def reached() -> str:
    benchmark = program("reward_gradient")
    return str(benchmark.reached_table([*rows("reward_gradient"), *benchmark.others()]))


def structure(number: int) -> str:
    return str(program("structure").tables(result("structure"))[number])


OTHERS: Mapping[str, Callable[[], str]] = {
    "reward_gradient_reached": reached,
    "structure_letters": lambda: structure(0),
    "structure_words": lambda: structure(1),
    "structure_attacks": lambda: structure(2),
    "structure_trial": lambda: str(program("structure_reward").trial_table(rows("structure_trial"))),
}


def table(name: str) -> str:
    """Markdown of one table, without the mark."""
    return OTHERS[name]() if name in OTHERS else str(program(name).table(rows(name)))


def pages() -> dict[Path, str]:
    """Page with such a table -> what it has to be."""
    texts = {page: page.read_text(encoding="utf-8") for page in sorted((ROOT / "docs").glob("*.md"))}
    return {
        page: TABLE.sub(lambda found: found[1] + table(found[2]).strip("\n") + found[3], text)
        for page, text in texts.items()
        if TABLE.search(text)
    }


def main() -> None:
    for page, text in pages().items():
        if "--print" in sys.argv[1:]:
            print(text, end="")
        else:
            page.write_text(text, encoding="utf-8")
            print(page.relative_to(ROOT))


if __name__ == "__main__":
    main()
