"""Write the parts of docs/ that come from files: tables of committed measurements, and the files of the example.

python tools/page_parts.py            # write the pages
python tools/page_parts.py --print    # print them

A part stands between `<!-- NAME: written by tools/page_parts.py -->` and `<!-- /NAME -->`. NAME is a file of examples/;
or a program of benchmarks/ whose `table` takes the rows of benchmarks/results/NAME.json; or a key of `OTHERS`.
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

PART = re.compile(r"(<!-- (\S+): written by tools/page_parts\.py -->\n\n).*?(\n\n<!-- /\2 -->)", re.DOTALL)

LANGUAGES = {".py": "python", ".toml": "toml", ".yaml": "yaml"}


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
    "nft_quarter": lambda: str(program("nft").quarter_table(rows("nft_quarter"))),
    "reward_gradient_reached": reached,
    "structure_letters": lambda: structure(0),
    "structure_words": lambda: structure(1),
    "structure_attacks": lambda: structure(2),
    "structure_trial": lambda: str(program("structure_reward").trial_table(rows("structure_trial"))),
    "vlm_edit_words": lambda: str(program("vlm_edit").words_table(rows("vlm_edit"))),
    "taste_fit": lambda: str(program("taste").fit_table(result("taste"))),
    "taste_choice": lambda: str(program("taste").choice_table(result("taste"))),
    "reward_servers": lambda: str(program("rewards").table(result("rewards"))),
    "reward_balance": lambda: str(program("rewards").balance_table(result("rewards"))),
    "gpu_first_run": lambda: str(program("gpu_first_run").table(result("gpu_first_run"))),
    "broken_servers": lambda: str(program("broken_servers").table(result("broken_servers"))),
}


def part(name: str) -> str:
    """Markdown of one part, without its marks."""
    if name.startswith("examples/"):
        file = ROOT / name
        return f"```{LANGUAGES[file.suffix]}\n{file.read_text(encoding='utf-8')}```"
    made = OTHERS[name]() if name in OTHERS else str(program(name).table(rows(name)))
    return made.strip("\n")


def pages() -> list[Path]:
    """The pages with such a part."""
    return [page for page in sorted((ROOT / "docs").glob("*.md")) if PART.search(page.read_text(encoding="utf-8"))]


def current(page: Path) -> str:
    """What a page has to be."""
    return PART.sub(lambda found: found[1] + part(found[2]) + found[3], page.read_text(encoding="utf-8"))


def main() -> None:
    for page in pages():
        text = current(page)
        if "--print" in sys.argv[1:]:
            print(text, end="")
        else:
            page.write_text(text, encoding="utf-8")
            print(page.relative_to(ROOT))


if __name__ == "__main__":
    main()
